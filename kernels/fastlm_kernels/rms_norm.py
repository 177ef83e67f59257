"""RMSNorm, with an optional residual add in the same pass.

    h = x + residual                       (add_rms_norm; rounded to x.dtype, it is the new residual stream)
    y = h / sqrt(mean(h**2) + eps) * (weight + weight_offset)

Zhang and Sennrich 2019, arXiv:1910.07467. The mean square and the product are computed in float32. Models differ in
where they round: Llama rounds the normalised value to x.dtype before it multiplies by the weight
(`cast_before_weight=True`; the result then has the promoted dtype of x and weight), Gemma multiplies in float32 and rounds once.
Saved for the backward: h, weight and 1/rms (one float32 a row).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastlm_kernels._case import (
    ROW_BENCH_SHAPES,
    ROW_SHAPES,
    Case,
    build,
    ideal_rows,
    randn,
    strided_rows,
    with_residual,
)
from fastlm_kernels._launch import RowLaunch, as_rows, multiprocessors, row_launch, runs_triton, tl, triton

# T rows (tokens), D columns (hidden size)
MAX_COLUMNS = 16384
# rows up to which the sums for dweight fit in registers beside the row itself
_MAX_FUSED_DWEIGHT = 8192
_DWEIGHT_BLOCK = 2048


@triton.jit
def _rms_norm_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, h_ptr, rstd_ptr,
    stride_x_row, stride_residual_row, stride_y_row, n_cols, eps, weight_offset,
    HAS_RESIDUAL: tl.constexpr, CAST_BEFORE_WEIGHT: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < n_cols
    h = tl.load(x_ptr + row * stride_x_row + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * stride_residual_row + offs_d, mask=mask_d, other=0.0)
        # the residual stream is what the next layers see: normalise exactly the rounded value
        rounded = (h + residual.to(tl.float32)).to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + row * n_cols + offs_d, rounded, mask=mask_d)
        h = rounded.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(h * h, axis=0) / n_cols + eps)
    tl.store(rstd_ptr + row, rstd)
    weight = tl.load(weight_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32) + weight_offset
    normed = h * rstd
    if CAST_BEFORE_WEIGHT:
        normed = normed.to(x_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + row * stride_y_row + offs_d, (normed * weight).to(y_ptr.dtype.element_ty), mask=mask_d)


@triton.jit
def _rms_norm_bwd_kernel(
    dy_ptr, dh_ptr, h_ptr, weight_ptr, rstd_ptr, dx_ptr, dweight_ptr,
    stride_dy_row, stride_dh_row, stride_h_row, stride_dx_row, n_rows, n_cols, weight_offset,
    HAS_DH: tl.constexpr, HAS_DWEIGHT: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # each program walks over rows program_id, program_id + programs, ... and keeps one partial sum of dweight
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < n_cols
    dweight = tl.zeros((BLOCK_D,), tl.float32)
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        row_64 = tl.cast(row, tl.int64)
        h = tl.load(h_ptr + row_64 * stride_h_row + offs_d, mask=mask_d, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row_64 * stride_dy_row + offs_d, mask=mask_d, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row_64)
        # read for every row: it lies in cache, and its registers are needed
        weight = tl.load(weight_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32) + weight_offset
        normed = h * rstd
        scaled = dy * weight
        dx = rstd * (scaled - normed * (tl.sum(scaled * normed, axis=0) / n_cols))
        if HAS_DH:
            dh = tl.load(dh_ptr + row_64 * stride_dh_row + offs_d, mask=mask_d, other=0.0)
            dx += dh.to(tl.float32)
        tl.store(dx_ptr + row_64 * stride_dx_row + offs_d, dx.to(dx_ptr.dtype.element_ty), mask=mask_d)
        if HAS_DWEIGHT:
            dweight += dy * normed
    if HAS_DWEIGHT:
        tl.store(dweight_ptr + tl.program_id(0).to(tl.int64) * n_cols + offs_d, dweight, mask=mask_d)


@triton.jit
def _rms_norm_dweight_kernel(
    dy_ptr, h_ptr, rstd_ptr, dweight_ptr, stride_dy_row, stride_h_row, n_rows, n_cols, BLOCK_D: tl.constexpr
):  # fmt: skip
    # for rows too long for the sums in _rms_norm_bwd_kernel: program (i, j) sums rows i, i + programs, ... of column block j
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = offs_d < n_cols
    dweight = tl.zeros((BLOCK_D,), tl.float32)
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        row_64 = tl.cast(row, tl.int64)
        h = tl.load(h_ptr + row_64 * stride_h_row + offs_d, mask=mask_d, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row_64 * stride_dy_row + offs_d, mask=mask_d, other=0.0).to(tl.float32)
        dweight += dy * (h * tl.load(rstd_ptr + row_64))
    tl.store(dweight_ptr + tl.program_id(0).to(tl.int64) * n_cols + offs_d, dweight, mask=mask_d)


def _launch_fwd(n_cols: int) -> RowLaunch:
    return row_launch(n_cols, live_values=4, max_block=MAX_COLUMNS)


def _launch_bwd(n_cols: int, needs_dweight: bool) -> RowLaunch:
    return row_launch(n_cols, live_values=8 if needs_dweight else 4, max_block=MAX_COLUMNS)


def _out_dtype(x: Tensor, weight: Tensor, cast_before_weight: bool) -> torch.dtype:
    return torch.promote_types(x.dtype, weight.dtype) if cast_before_weight else x.dtype


def rms_norm_fwd(
    x: Tensor,
    weight: Tensor,
    eps: float,
    weight_offset: float = 0.0,
    cast_before_weight: bool = True,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual [T, D] with unit column stride -> y [T, D], h [T, D] (x itself without a residual), 1/rms [T] float32.

    `out` [T, D] with unit column stride, in y's dtype, receives y.
    """
    n_rows, n_cols = x.shape
    out_dtype = _out_dtype(x, weight, cast_before_weight)
    if not runs_triton(x):
        h = x if residual is None else x + residual
        h_32 = h.float()
        rstd = torch.rsqrt(h_32.square().mean(-1) + eps)
        normed = h_32 * rstd[:, None]
        if cast_before_weight:
            normed = normed.to(x.dtype)
        y = (normed * (weight.float() + weight_offset)).to(out_dtype)
        return y if out is None else out.copy_(y), h, rstd
    y = torch.empty((n_rows, n_cols), dtype=out_dtype, device=x.device) if out is None else out
    h = x if residual is None else torch.empty((n_rows, n_cols), dtype=x.dtype, device=x.device)
    rstd = torch.empty(n_rows, dtype=torch.float32, device=x.device)
    if n_rows:
        launch = _launch_fwd(n_cols)
        _rms_norm_fwd_kernel[(n_rows,)](
            x, x if residual is None else residual, weight, y, h, rstd,
            x.stride(0), 0 if residual is None else residual.stride(0), y.stride(0), n_cols, eps, weight_offset,
            HAS_RESIDUAL=residual is not None, CAST_BEFORE_WEIGHT=cast_before_weight, BLOCK_D=launch.block,
            num_warps=launch.num_warps, enable_fp_fusion=True,
        )  # fmt: skip
    return y, h, rstd


def rms_norm_bwd(
    dy: Tensor,
    h: Tensor,
    weight: Tensor,
    rstd: Tensor,
    weight_offset: float = 0.0,
    dh: Tensor | None = None,
    needs_dweight: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gradient of x (and, being equal, of the residual), plus `dh` that flows in through the residual stream.

    dy, h, dh: [T, D] with unit column stride; rstd: [T]. `out` [T, D] with unit column stride, in h's dtype, receives dx.

    Returns dx [T, D] in h.dtype, dweight [D] in weight.dtype or None.
    """
    n_rows, n_cols = h.shape
    if not runs_triton(h):
        normed = h.float() * rstd[:, None]
        scaled = dy.float() * (weight.float() + weight_offset)
        dx = rstd[:, None] * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
        if dh is not None:
            dx = dx + dh.float()
        dweight = (dy.float() * normed).sum(0).to(weight.dtype) if needs_dweight else None
        return dx.to(h.dtype) if out is None else out.copy_(dx), dweight
    dx = torch.empty((n_rows, n_cols), dtype=h.dtype, device=h.device) if out is None else out
    if not n_rows:
        return dx, torch.zeros_like(weight) if needs_dweight else None
    is_fused = needs_dweight and n_cols <= _MAX_FUSED_DWEIGHT
    launch = _launch_bwd(n_cols, is_fused)
    # a fixed number of partial sums, so that dweight does not depend on timing
    n_sums = min(n_rows, 4 * multiprocessors(h.device.index)) if needs_dweight else 0
    partial = torch.empty((n_sums, n_cols), dtype=torch.float32, device=h.device)
    _rms_norm_bwd_kernel[(n_sums if is_fused else n_rows,)](
        dy, dy if dh is None else dh, h, weight, rstd, dx, partial,
        dy.stride(0), 0 if dh is None else dh.stride(0), h.stride(0), dx.stride(0), n_rows, n_cols, weight_offset,
        HAS_DH=dh is not None, HAS_DWEIGHT=is_fused, BLOCK_D=launch.block,
        num_warps=launch.num_warps, enable_fp_fusion=True,
    )  # fmt: skip
    if needs_dweight and not is_fused:
        launch = _launch_bwd(_DWEIGHT_BLOCK, True)
        _rms_norm_dweight_kernel[(n_sums, triton.cdiv(n_cols, launch.block))](
            dy, h, rstd, partial, dy.stride(0), h.stride(0), n_rows, n_cols,
            BLOCK_D=launch.block, num_warps=launch.num_warps, enable_fp_fusion=True,
        )  # fmt: skip
    return dx, partial.sum(0).to(weight.dtype) if needs_dweight else None


class RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps, weight_offset, cast_before_weight):  # type: ignore[override]
        y, h, rstd = rms_norm_fwd(x, weight, eps, weight_offset, cast_before_weight, residual)
        ctx.save_for_backward(h, weight, rstd)
        ctx.weight_offset, ctx.has_residual = weight_offset, residual is not None
        return (y, h) if residual is not None else y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dh=None):  # type: ignore[override]
        h, weight, rstd = ctx.saved_tensors
        n_cols = h.shape[1]
        dx, dweight = rms_norm_bwd(
            as_rows(dy, n_cols), h, weight, rstd, ctx.weight_offset,
            None if dh is None else as_rows(dh, n_cols), needs_dweight=ctx.needs_input_grad[2],
        )  # fmt: skip
        return dx, dx if ctx.has_residual else None, dweight, None, None, None


def _check(x: Tensor, weight: Tensor) -> None:
    if weight.ndim != 1 or x.ndim == 0 or x.shape[-1] != weight.shape[0]:
        raise ValueError(
            f"weight must be [D] with D the last dimension of x {tuple(x.shape)}, got {tuple(weight.shape)}"
        )
    if x.shape[-1] > MAX_COLUMNS:
        raise ValueError(f"the last dimension must be at most {MAX_COLUMNS}, got {x.shape[-1]}")


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, weight_offset: float = 0.0, cast_before_weight: bool = True
) -> Tensor:
    """Normalise the last dimension by its root mean square.

    y = x / sqrt(mean(x**2) + eps) * (weight + weight_offset)

    Args:
        x: [..., D], float16, bfloat16 or float32.
        weight: [D], any float dtype.
        eps: added to the mean square; same unit as x squared.
        weight_offset: 1.0 for Gemma-style weights stored around zero, else 0.0.
        cast_before_weight: round the normalised value to x.dtype before the product with the weight, as Llama does.

    Returns:
        [..., D]; in the promoted dtype of x and weight if `cast_before_weight`, else in x.dtype.

    Raises:
        ValueError: if weight.shape is not (D,), or D exceeds 16384.
        TypeError: for a dtype that the device's kernels do not take.

    Reference: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    _check(x, weight)
    y = RMSNormFunction.apply(as_rows(x, x.shape[-1]), None, weight, eps, weight_offset, cast_before_weight)
    return y.view(x.shape)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    cast_before_weight: bool = True,
) -> tuple[Tensor, Tensor]:
    """Add to the residual stream and normalise the sum, in one pass in both directions.

    Args:
        x, residual: [..., D] of one shape and dtype.
        weight, eps, weight_offset, cast_before_weight: as in `rms_norm`.

    Returns:
        y as `rms_norm(x + residual, …)`, and h = x + residual in x.dtype.

    Raises:
        ValueError: if the shapes or dtypes of x and residual differ, else as `rms_norm`.
    """
    _check(x, weight)
    if x.shape != residual.shape or x.dtype != residual.dtype:
        raise ValueError(
            f"x and residual must agree, got {tuple(x.shape)} {x.dtype} and {tuple(residual.shape)} {residual.dtype}"
        )
    n_cols = x.shape[-1]
    y, h = RMSNormFunction.apply(
        as_rows(x, n_cols), as_rows(residual, n_cols), weight, eps, weight_offset, cast_before_weight
    )
    return y.view(x.shape), h.view(x.shape)


def rms_norm_reference(x, weight, eps=1e-6, weight_offset=0.0, cast_before_weight=True):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight + weight_offset)


def add_rms_norm_reference(x, residual, weight, eps=1e-6, weight_offset=0.0, cast_before_weight=True):
    h = x + residual
    return rms_norm_reference(h, weight, eps, weight_offset), h


def _eager(x, weight, eps=1e-6, weight_offset=0.0, cast_before_weight=True):
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    if cast_before_weight:
        return normed.to(x.dtype) * (weight + weight_offset)
    return (normed * (weight.float() + weight_offset)).to(x.dtype)


def _make(shape, dtype, device, generator):
    return dict(
        x=randn(shape, dtype, device, generator),
        weight=randn(shape[-1:], dtype, device, generator),
        eps=1e-5,
        weight_offset=float(shape[-1] % 2),
        cast_before_weight=shape[-1] % 2 == 0,
    )


def _builds(cc, dtype):
    types = dict.fromkeys(("rstd_ptr", "dweight_ptr"), "*fp32") | dict.fromkeys(("eps", "weight_offset"), "fp32")
    for n_cols in (4096, 8192, 16384):
        launch = _launch_fwd(n_cols)
        options = dict(HAS_RESIDUAL=True, CAST_BEFORE_WEIGHT=True, BLOCK_D=launch.block)
        yield build(_rms_norm_fwd_kernel, dtype, options, launch.num_warps, types)
        for has_dweight in (False, True):
            if not has_dweight or n_cols <= _MAX_FUSED_DWEIGHT:
                launch = _launch_bwd(n_cols, has_dweight)
                options = dict(HAS_DH=True, HAS_DWEIGHT=has_dweight, BLOCK_D=launch.block)
                yield build(_rms_norm_bwd_kernel, dtype, options, launch.num_warps, types)
    launch = _launch_bwd(_DWEIGHT_BLOCK, True)
    yield build(_rms_norm_dweight_kernel, dtype, dict(BLOCK_D=launch.block), launch.num_warps, types)


CASE = Case(
    name="rms_norm",
    op=rms_norm,
    reference=rms_norm_reference,
    eager=_eager,
    make=_make,
    shapes=dict(ROW_SHAPES, **{"long-rows": (3, 8200)}),
    gradients=("x", "weight"),
    strided=strided_rows,
    bench_shapes=ROW_BENCH_SHAPES,
    ideal=ideal_rows(2.0, 4.0),
    ideal_backward=ideal_rows(3.0, 8.0),
    builds=_builds,
)

ADD_CASE = with_residual(
    CASE, add_rms_norm, add_rms_norm_reference, ideal=ideal_rows(4.0, 5.0), ideal_backward=ideal_rows(4.0, 9.0)
)
