"""The layer's attention, forward and backward, by groups of key/value heads where rows are long.

Libraries sum the gradients of queries (and, for groups of heads, of keys and values) in float32 buffers of their own: with a group at a
time there is one for a group, not for all. How many groups there are follows from the shape alone, so that no plan changes a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastlm.block.heads import Heads
from fastlm.block.spec import Layer
from fastlm_kernels._attention_record import AttentionRecord, attention_bwd, attention_recorded
from fastlm_kernels.attention import attention

# B batch, S sequence, H query heads, K key/value heads, E head size

# Of a float32 gradient of the queries of one group.
GROUP_BYTES = 256 << 20


def n_groups(n_tokens: int, n_heads: int, n_kv_heads: int, head_size: int) -> int:
    """Groups of key/value heads that attention runs one after the other."""
    size = n_tokens * n_heads * head_size * 4
    divisors = [n for n in range(1, n_kv_heads + 1) if n_kv_heads % n == 0]
    return next((n for n in divisors if size <= n * GROUP_BYTES), n_kv_heads)


def _groups(layer: Layer, q: Tensor) -> list[tuple[slice, slice]]:
    """Query heads and key/value heads of each group."""
    spec = layer.spec
    count = n_groups(q.shape[0] * q.shape[1], spec.n_heads, spec.n_kv_heads, spec.head_size)
    queries, keys = spec.n_heads // count, spec.n_kv_heads // count
    return [(slice(i * queries, (i + 1) * queries), slice(i * keys, (i + 1) * keys)) for i in range(count)]


def _options(layer: Layer) -> dict[str, Any]:
    spec = layer.spec
    return dict(
        scale=spec.scale, layout=layer.layout, window=spec.window, softcap=spec.softcap,
        deterministic=layer.deterministic,
    )  # fmt: skip


@dataclass(frozen=True)
class _Output:
    """Stands among the library's saved tensors for one that lies in the memory of its output, which is kept anyway.

    Attributes:
        strides: of the output.
        size, stride, offset: of the saved tensor; the offset counts from the output's first value, in values.
    """

    strides: tuple[int, ...]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass
class Record:
    """What the backward of one group needs beside its heads, the output and the tensors that the caller keeps.

    Attributes:
        queries, keys: its heads.
        graph: the library's.
        places: of each of the library's saved tensors: its place among the group's kept ones, or that it lies in the output.
        n_kept: tensors that the caller keeps for it.
    """

    queries: slice
    keys: slice
    graph: AttentionRecord
    places: list[_Output | int]
    n_kept: int

    def saved(self, out: Tensor, kept: Sequence[Tensor]) -> list[Tensor]:
        """The library's saved tensors; out is the group's part [B, S, H, E] of the output."""
        found = []
        for place in self.places:
            if isinstance(place, int):
                found.append(kept[place])
                continue
            if out.stride() != place.strides:
                out = torch.empty_strided(out.shape, place.strides, dtype=out.dtype, device=out.device).copy_(out)
            found.append(out.as_strided(place.size, place.stride, int(out.storage_offset()) + place.offset))
        return found


def attend(heads: Heads, layer: Layer) -> Tensor:
    """The attention's output [B, S, H, E]."""
    groups = _groups(layer, heads.q)
    if len(groups) == 1:
        return attention(heads.q, heads.k, heads.v, **_options(layer))
    out = heads.q.new_empty(heads.q.shape)
    for queries, keys in groups:
        q, k, v = heads.q[:, :, queries], heads.k[:, :, keys], heads.v[:, :, keys]
        out[:, :, queries] = attention(q, k, v, **_options(layer))
    return out


def attend_recorded(heads: Heads, layer: Layer) -> tuple[Tensor, list[Record], list[Tensor]]:
    """`attend`, with what `attend_bwd` needs: a record of each group, and the tensors to keep beside the output."""
    groups, kept, records = _groups(layer, heads.q), [], []
    whole = None if len(groups) == 1 else heads.q.new_empty(heads.q.shape)
    for queries, keys in groups:
        q, k, v = heads.q[:, :, queries], heads.k[:, :, keys], heads.v[:, :, keys]
        out, graph = attention_recorded(q, k, v, **_options(layer))
        memory, start = out.untyped_storage().data_ptr(), int(out.storage_offset())
        places: list[_Output | int] = []
        others: list[Tensor] = []
        taken = graph.take()
        for tensor in list(taken):
            if tensor.untyped_storage().data_ptr() == memory and tensor.dtype == out.dtype and tensor.numel():
                offset = int(tensor.storage_offset()) - start
                places.append(_Output(out.stride(), tensor.shape, tensor.stride(), offset))
            else:
                places.append(len(others))
                others.append(tensor)
            del tensor
        # the graph's hooks hold the list
        taken.clear()
        records.append(Record(queries, keys, graph, places, len(others)))
        kept += others
        if whole is None:
            return out, records, kept
        whole[:, :, queries] = out
        del out
    assert whole is not None
    return whole, records, kept


def attend_bwd(
    dout: Tensor, records: Sequence[Record], heads: Heads, out: Tensor, kept: Sequence[Tensor], owns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v [B, S, heads, E]. `owns`: they may take the place of heads.q, k and v."""
    results = None
    for record in records:
        inputs = heads.q[:, :, record.queries], heads.k[:, :, record.keys], heads.v[:, :, record.keys]
        saved = record.saved(out[:, :, record.queries], kept[: record.n_kept])
        kept = kept[record.n_kept :]
        grads = attention_bwd(dout[:, :, record.queries], record.graph, *inputs, saved)
        del inputs, saved
        if len(records) == 1:
            return grads
        if results is None:
            results = [t if owns else t.new_empty(t.shape) for t in (heads.q, heads.k, heads.v)]
        for whole, part, place in zip(results, grads, (record.queries, record.keys, record.keys), strict=True):
            whole[:, :, place] = part
        # before the next group has its own
        del grads, part
    assert results is not None
    dq, dk, dv = results
    return dq, dk, dv
