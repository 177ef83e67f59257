"""The norms of a layer, forward and backward, over rows of tokens or heads."""

from __future__ import annotations

from torch import Tensor

from fastlm.block.spec import Norm
from fastlm_kernels.layer_norm import layer_norm_bwd, layer_norm_fwd
from fastlm_kernels.rms_norm import rms_norm_bwd, rms_norm_fwd

# 1/rms [rows] of an RMSNorm; mean and 1/deviation [rows] of a LayerNorm
Statistics = tuple[Tensor, ...]


def _weight(norm: Norm) -> Tensor | None:
    """A LayerNorm's weight; an offset is added in its own dtype, as models do that have one."""
    return norm.weight + norm.weight_offset if norm.weight is not None and norm.weight_offset else norm.weight


def norm_fwd(
    norm: Norm, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Statistics]:
    """norm(x + residual) [rows, D], the sum itself (x without a residual), and what the backward needs. `out` receives the first."""
    if norm.is_layer_norm:
        y, h, mean, rstd = layer_norm_fwd(x, _weight(norm), norm.bias, norm.eps, residual)
        return y if out is None else out.copy_(y), h, (mean, rstd)
    assert norm.weight is not None
    y, h, rstd = rms_norm_fwd(x, norm.weight, norm.eps, norm.weight_offset, norm.casts_before_weight, residual, out)
    return y, h, (rstd,)


def norm_bwd(
    norm: Norm, dy: Tensor, h: Tensor, statistics: Statistics, dh: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Gradient of what was normed, h [rows, D], plus `dh` that flows in beside the norm. `out` receives it."""
    if norm.is_layer_norm:
        mean, rstd = statistics
        dx = layer_norm_bwd(dy, h, _weight(norm), mean, rstd, dh)[0]
        return dx if out is None else out.copy_(dx)
    (rstd,) = statistics
    assert norm.weight is not None
    return rms_norm_bwd(dy, h, norm.weight, rstd, norm.weight_offset, dh, out=out)[0]
