"""Attention whose backward runs later, from tensors that the caller keeps.

The libraries behind `attention` give no plain backward, only their own autograd. Here their graph is recorded without any tensor in
it: what they save is handed to the caller, who gives it back for the backward, or makes it again. So a decoder layer saves it through
its own `save_for_backward`, where hooks on saved tensors (offloading to the host) see it, and keeps what its plan says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from fastlm_kernels.attention import attention


@dataclass
class _Slot:
    """What the graph's saved tensors are while it runs: the inputs q, k, v, and all else that the library saved."""

    inputs: Sequence[Tensor] = ()
    others: Sequence[Tensor] = ()


@dataclass(frozen=True)
class _View:
    """A saved tensor that lies in the memory of an input.

    Attributes:
        index: the first input in that memory.
        offset: from this input's first value, in values.
    """

    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass
class AttentionRecord:
    """A graph without tensors, beside `saved`: the library's own tensors, until the caller takes them."""

    output: GradientEdge
    inputs: list[GradientEdge]
    slot: _Slot
    saved: list[Tensor] = field(default_factory=list)

    def take(self) -> list[Tensor]:
        """The library's tensors, which the caller keeps from now on."""
        saved, self.saved = self.saved, []
        return saved


class _Mark(torch.autograd.Function):
    """Inputs as outputs of a node of their own: a place in the graph that holds no tensor, as a leaf would."""

    @staticmethod
    def forward(ctx, anchor, q, k, v):  # type: ignore[override]
        return q.view_as(q), k.view_as(k), v.view_as(v)

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[override]
        raise AssertionError("gradients are taken at this node, not behind it")


def attention_recorded(q: Tensor, k: Tensor, v: Tensor, scale: float, **options: Any) -> tuple[Tensor, AttentionRecord]:
    """`attention` without gradient, and what `attention_bwd` needs for it beside q, k and v.

    Args:
        q, k, v, scale, options: as `attention`.

    Returns:
        The output [B, S, H, Ev], and the record. The output may be among `record.saved`.
    """
    slot, others = _Slot(), []
    memories = [t.untyped_storage().data_ptr() for t in (q, k, v)]
    starts = [int(t.storage_offset()) for t in (q, k, v)]

    def pack(tensor: Tensor) -> _View | int:
        memory = tensor.untyped_storage().data_ptr()
        if memory in memories and tensor.numel():
            index = memories.index(memory)
            return _View(index, tensor.shape, tensor.stride(), int(tensor.storage_offset()) - starts[index])
        # without the graph that made it, which would hold what it saved
        others.append(tensor.detach())
        return len(others) - 1

    # refers to the slot alone: through the record, the graph would hold itself
    def unpack(place: _View | int) -> Tensor:
        if isinstance(place, int):
            return slot.others[place]
        base = slot.inputs[place.index]
        return base.as_strided(place.size, place.stride, base.storage_offset() + place.offset)

    with torch.enable_grad():
        marked = _Mark.apply(torch.empty((), device=q.device, requires_grad=True), q, k, v)
        with saved_tensors_hooks(pack, unpack):
            out = attention(marked[0], marked[1], marked[2], scale, **options)
        record = AttentionRecord(get_gradient_edge(out), [get_gradient_edge(t) for t in marked], slot, others)
    return out.detach(), record


def attention_bwd(
    dout: Tensor, record: AttentionRecord, q: Tensor, k: Tensor, v: Tensor, saved: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v.

    Args:
        dout: [B, S, H, Ev].
        record: of `attention_recorded`; may serve more than once.
        q, k, v: the forward's, or the same values made again in the same layout (also to each other, where they share memory).
        saved: what `record.take` gave, likewise.
    """
    record.slot.inputs, record.slot.others = (q, k, v), saved
    try:
        dq, dk, dv = torch.autograd.grad(record.output, record.inputs, dout, retain_graph=True)
    finally:
        record.slot.inputs = record.slot.others = ()
    return dq, dk, dv
