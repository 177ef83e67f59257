"""Causal attention in plain torch, exact and in O(S) memory, where neither a library nor Triton can serve.

    s = scale * q kᵀ, or softcap * tanh(scale * q kᵀ / softcap)        o = softmax(s + mask) v

Blocks of queries see their own keys only and are made again in the backward (Rabe and Staats 2021, arXiv:2112.05682).
Everything is computed in float32, or float64 for float64 inputs, and rounded once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# B batch, S queries of a row, Skv keys of a row, H query heads, K key/value heads, G = H / K, E head size, C queries of a block
_BLOCK = 256


@dataclass(frozen=True)
class _Rule:
    """What the scores are; all but the tensors."""

    scale: float
    window: int | None
    softcap: float | None
    lengths: tuple[int, ...] | None
    is_causal: bool

    def blocks(self, n_queries: int, n_keys: int) -> Iterator[tuple[slice, slice]]:
        """Queries, and the keys that any of them sees."""
        shift = n_keys - n_queries
        bounds = itertools.pairwise(itertools.accumulate(self.lengths or (n_queries,), initial=0))
        for start, end in bounds:
            for first in range(start, end, _BLOCK):
                last = min(end, first + _BLOCK)
                low = start if self.window is None else max(start, first + shift - self.window + 1)
                yield slice(first, last), slice(low, last + shift) if self.is_causal else slice(0, n_keys)

    def scores(self, q: Tensor, k: Tensor, mask: Tensor | None, queries: slice, keys: slice, shift: int):  # type: ignore[no-untyped-def]
        """The masked scores [B, K, G, C, N] of a block, their tanh (None without a softcap), and what is seen."""
        scores = _by_group(q, queries, k.shape[2]) @ k[:, keys].permute(0, 2, 3, 1) * self.scale
        scores = scores.unflatten(2, (-1, queries.stop - queries.start))
        tanh = None
        if self.softcap is not None:
            tanh = torch.tanh(scores / self.softcap)
            scores = self.softcap * tanh
        if mask is not None:
            part = mask[:, :, queries, keys].expand(-1, q.shape[2] if mask.shape[1] > 1 else 1, -1, -1)
            part = part.unflatten(1, (k.shape[2] if mask.shape[1] > 1 else 1, -1))
            scores = scores.masked_fill(~part, -torch.inf) if part.dtype is torch.bool else scores + part
        elif self.is_causal:
            i = torch.arange(queries.start + shift, queries.stop + shift, device=q.device)[:, None]
            j = torch.arange(keys.start, keys.stop, device=q.device)
            seen = j <= i if self.window is None else (j <= i) & (j > i - self.window)
            scores = scores.masked_fill(~seen, -torch.inf)
        return scores, tanh


def _by_group(x: Tensor, rows: slice, n_kv_heads: int) -> Tensor:
    """[B, S, H, E] -> [B, K, G * C, E]: a group's queries as more queries of its key/value head."""
    return x[:, rows].unflatten(2, (n_kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _from_group(x: Tensor, n_rows: int) -> Tensor:
    """[B, K, G * C, E] -> [B, C, H, E]."""
    return x.unflatten(2, (-1, n_rows)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse) [B, K, G * C, N]; zero for a query that sees nothing."""
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    return torch.exp(scores - lse.unsqueeze(-1)).flatten(2, 3)


def _fwd(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: _Rule) -> tuple[Tensor, Tensor]:
    """The output [B, S, H, Ev] in q.dtype and the log-sum-exp [B, K, G, S] of the scores."""
    (batch, n_queries, n_heads, _), (n_keys, n_kv_heads) = q.shape, k.shape[1:3]
    out = q.new_zeros((batch, n_queries, n_heads, v.shape[3]))
    q, k, v = _wide(q), _wide(k), _wide(v)
    lse = q.new_zeros((batch, n_kv_heads, n_heads // n_kv_heads, n_queries))
    for queries, keys in rule.blocks(n_queries, n_keys):
        scores, _ = rule.scores(q, k, mask, queries, keys, n_keys - n_queries)
        lse[..., queries] = torch.logsumexp(scores, -1)
        p = _probabilities(scores, lse[..., queries])
        out[:, queries] = _from_group(p @ v[:, keys].transpose(1, 2), queries.stop - queries.start).to(out.dtype)
    return out, lse


def _bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor, rule: _Rule
) -> tuple[Tensor, Tensor, Tensor]:
    n_queries, n_keys, n_kv_heads = q.shape[1], *k.shape[1:3]
    dtype = q.dtype
    q, k, v, out, dout = (_wide(x) for x in (q, k, v, out, dout))
    delta = (out * dout).sum(-1, keepdim=True)
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    for queries, keys in rule.blocks(n_queries, n_keys):
        scores, tanh = rule.scores(q, k, mask, queries, keys, n_keys - n_queries)
        p = _probabilities(scores, lse[..., queries])
        dout_rows = _by_group(dout, queries, n_kv_heads)
        dv[:, keys] += (p.mT @ dout_rows).transpose(1, 2)
        dscores = p * (dout_rows @ v[:, keys].permute(0, 2, 3, 1) - _by_group(delta, queries, n_kv_heads))
        if tanh is not None:
            dscores *= 1.0 - tanh.square().flatten(2, 3)
        dscores *= rule.scale
        dq[:, queries] = _from_group(dscores @ k[:, keys].transpose(1, 2), queries.stop - queries.start)
        dk[:, keys] += (dscores.mT @ _by_group(q, queries, n_kv_heads)).transpose(1, 2)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


class TorchAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask, rule):  # type: ignore[override]
        # the result has the dtype of q, also where autocast would lower it
        with torch.autocast(q.device.type, enabled=False):
            out, lse = _fwd(q, k, v, mask, rule)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        ctx.rule = rule
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):  # type: ignore[override]
        q, k, v, mask, out, lse = ctx.saved_tensors
        with torch.autocast(dout.device.type, enabled=False):
            return *_bwd(dout, q, k, v, mask, out, lse, ctx.rule), None, None


def torch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    lengths: tuple[int, ...] | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Causal attention, or what the mask lets through.

    Args:
        q: [B, S, H, E], any float dtype and strides.
        k: [B, Skv, K, E], S <= Skv without a mask.
        v: [B, Skv, K, Ev].
        scale, window, softcap: as `attention`.
        lengths: of the sequences, each of which attends to itself, S == Skv.
        mask: [B or 1, H or 1, S, Skv], bool or added to the scores, instead of causality and window. It gets no gradient.

    Returns:
        [B, S, H, Ev] in q.dtype; zeros for queries that see nothing.
    """
    return TorchAttentionFunction.apply(q, k, v, mask, _Rule(scale, window, softcap, lengths, mask is None))
