"""Queries and keys between their projection and the attention: norms and rotation, forward and backward.

Without norms of their own, queries and keys are turned in place in the stacked projection, which is then what the attention reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastlm.block.norms import Statistics, norm_bwd, norm_fwd
from fastlm.block.spec import Layer, Norm
from fastlm_kernels.rope import rope_bwd, rope_fwd

# B batch, S sequence, T = B*S tokens, E head size


@dataclass
class Heads:
    """What the attention reads, [B, S, heads, E] each, with what the norms need for their backward."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_statistics: Statistics = ()
    k_statistics: Statistics = ()


def split(packed: Tensor, layer: Layer, batch: int) -> list[Tensor]:
    """q, k and v as views [B, S, heads, E] of the stacked projection [T, sum of their widths]."""
    size = layer.spec.head_size
    return [y.view(batch, y.shape[0] // max(1, batch), -1, size) for y in packed.split(layer.spec.widths, dim=1)]


def _is_fused(layer: Layer) -> bool:
    """Whether norm and rotation are one kernel: an RMSNorm of each head before the rotation."""
    return layer.q_norm is not None and layer.spec.qk_norm_place == "head" and not layer.q_norm.is_layer_norm


def turns_in_place(layer: Layer) -> bool:
    """Whether the stacked projection holds turned queries and keys afterwards."""
    return layer.q_norm is None or layer.spec.qk_norm_place == "after"


def _rows(x: Tensor, layer: Layer, norm: Norm) -> Tensor:
    """x [B, S, heads, E] as the rows that its norm reads: of all heads of a token, or of one head."""
    if layer.spec.qk_norm_place == "width":
        return x.flatten(2).flatten(0, 1)
    if norm.weight is not None and norm.weight.ndim == 2:
        return x.flatten(0, 1)
    return x.reshape(-1, x.shape[-1])


def _normed(x: Tensor, layer: Layer, norm: Norm) -> tuple[Tensor, Statistics]:
    y, _, statistics = norm_fwd(norm, _rows(x, layer, norm))
    return y.view(x.shape), statistics


def _unnormed(dy: Tensor, x: Tensor, layer: Layer, norm: Norm, statistics: Statistics) -> Tensor:
    return norm_bwd(norm, _rows(dy, layer, norm), _rows(x, layer, norm), statistics).view(x.shape)


def _standing(cos: Tensor, sin: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
    """The tables of a rotation by nothing, for a layer that has only the norm of the fused kernel."""
    return (cos, sin) if layer.spec.rotates else (torch.ones_like(cos), torch.zeros_like(sin))


def heads_fwd(packed: Tensor, cos: Tensor, sin: Tensor, layer: Layer, batch: int, is_turned: bool = False) -> Heads:
    """The stacked projection [T, …] -> what the attention reads. `is_turned`: it was turned in place before."""
    spec, q_norm, k_norm = layer.spec, layer.q_norm, layer.k_norm
    q, k, v = split(packed, layer, batch)
    if _is_fused(layer):
        assert q_norm is not None and k_norm is not None
        q, k, q_rstd, k_rstd = rope_fwd(
            q, k, *_standing(cos, sin, layer), q_norm.weight, k_norm.weight, q_norm.eps, q_norm.weight_offset,
            spec.rope_interleaved,
        )  # fmt: skip
        assert q_rstd is not None and k_rstd is not None
        return Heads(q, k, v, (q_rstd,), (k_rstd,))
    heads = Heads(q, k, v)
    is_after = spec.qk_norm_place == "after"
    if q_norm is not None and k_norm is not None and not is_after:
        heads.q, heads.q_statistics = _normed(q, layer, q_norm)
        heads.k, heads.k_statistics = _normed(k, layer, k_norm)
    if spec.rotates and not is_turned:
        rope_fwd(heads.q, heads.k, cos, sin, interleaved=spec.rope_interleaved, q_out=heads.q, k_out=heads.k)
    if q_norm is not None and k_norm is not None and is_after:
        heads.q, heads.q_statistics = _normed(q, layer, q_norm)
        heads.k, heads.k_statistics = _normed(k, layer, k_norm)
    return heads


def heads_bwd(
    dq: Tensor, dk: Tensor, dv: Tensor, heads: Heads, packed: Tensor, cos: Tensor, sin: Tensor, layer: Layer,
    out: Tensor,
) -> None:  # fmt: skip
    """Gradient of the stacked projection, written into `out` [T, …], which may be `packed` itself.

    dq, dk, dv: [B, S, heads, E]; dq and dk may be overwritten.
    """
    spec, q_norm, k_norm, batch = layer.spec, layer.q_norm, layer.k_norm, dq.shape[0]
    dq, dk = (d if d.stride(-1) == 1 else d.contiguous() for d in (dq, dk))
    dq_out, dk_out, dv_out = split(out, layer, batch)
    dv_out.copy_(dv)
    q, k, _ = split(packed, layer, batch)
    if _is_fused(layer):
        assert q_norm is not None and k_norm is not None
        rope_bwd(
            dq, dk, q, k, *_standing(cos, sin, layer), q_norm.weight, k_norm.weight, heads.q_statistics[0],
            heads.k_statistics[0], q_norm.weight_offset, spec.rope_interleaved, dq_out=dq_out, dk_out=dk_out,
        )  # fmt: skip
        return
    is_after = spec.qk_norm_place == "after"
    if q_norm is not None and k_norm is not None and is_after:
        dq = _unnormed(dq, q, layer, q_norm, heads.q_statistics)
        dk = _unnormed(dk, k, layer, k_norm, heads.k_statistics)
    # straight to its place, if nothing comes behind
    is_last = q_norm is None or k_norm is None or is_after
    if spec.rotates:
        dq, dk, _, _ = rope_bwd(
            dq, dk, None, None, cos, sin, interleaved=spec.rope_interleaved, dq_out=dq_out if is_last else None,
            dk_out=dk_out if is_last else None,
        )  # fmt: skip
    if q_norm is not None and k_norm is not None and not is_after:
        dq = _unnormed(dq, q, layer, q_norm, heads.q_statistics)
        dk = _unnormed(dk, k, layer, k_norm, heads.k_statistics)
    if not (spec.rotates and is_last):
        dq_out.copy_(dq)
        dk_out.copy_(dk)
