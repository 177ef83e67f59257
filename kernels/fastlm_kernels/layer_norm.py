"""LayerNorm, with an optional residual add in the same pass.

    h = x + residual                       (add_layer_norm; rounded to x.dtype, it is the new residual stream)
    y = (h - mean(h)) / sqrt(mean((h - mean(h))**2) + eps) * weight + bias

Ba, Kiros and Hinton 2016, arXiv:1607.06450. Statistics and products are computed in float32 and y is rounded once, to x.dtype,
as in torch and in Cohere's models. A weight of each head, [H, E], norms every head of x [..., H, E] by its own row.
Saved for the backward: h, weight, mean and 1/std (two float32 a row).
"""

from __future__ import annotations

import dataclasses

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
from fastlm_kernels._launch import (
    RowLaunch,
    as_rows,
    multiprocessors,
    next_power_of_2,
    row_launch,
    runs_triton,
    tl,
    triton,
)  # fmt: skip
from fastlm_kernels._layer_norm_long import layer_norm_bwd_long_kernel, layer_norm_sums_kernel, load_rows

# T tokens, D columns (hidden size or head size), H rows of the weight: its heads, 1 for a hidden state
MAX_COLUMNS = 16384
# rows up to which the sums for dweight and dbias fit in registers beside the row itself
_MAX_FUSED_SUMS = 4096
_SUMS_BLOCK = 1024
# rows up to which the backward holds them in registers, and the columns at a time that it walks over longer ones in
_MAX_HELD = 8192
_LONG_BLOCK = 4096
# short rows share a program until it has so many values
_PROGRAM_VALUES = 2048


@triton.jit
def _layer_norm_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, h_ptr, mean_ptr, rstd_ptr,
    stride_x_row, stride_x_head, stride_residual_row, stride_residual_head, n_rows, n_cols, eps,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head, n_heads = tl.program_id(1), tl.num_programs(1)
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    mask_d = offs_d < n_cols
    mask = (row < n_rows) & mask_d
    out_row = row * n_heads + head
    h = load_rows(x_ptr, stride_x_row, stride_x_head, row, offs_d, mask)
    if HAS_RESIDUAL:
        residual = load_rows(residual_ptr, stride_residual_row, stride_residual_head, row, offs_d, mask)
        # the residual stream is what the next layers see: normalise exactly the rounded value
        rounded = (h + residual).to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + out_row * n_cols + offs_d, rounded, mask=mask)
        h = rounded.to(tl.float32)
    mean = tl.sum(h, axis=1, keep_dims=True) / n_cols
    # the deviations once more in a pass of their own: E[h**2] - E[h]**2 would cancel
    centred = tl.where(mask_d, h - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=1, keep_dims=True) / n_cols + eps)
    tl.store(mean_ptr + out_row, mean, mask=row < n_rows)
    tl.store(rstd_ptr + out_row, rstd, mask=row < n_rows)
    y = centred * rstd
    if HAS_WEIGHT:
        y *= tl.load(weight_ptr + head * n_cols + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + head * n_cols + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    tl.store(y_ptr + out_row * n_cols + offs_d, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _layer_norm_bwd_kernel(
    dy_ptr, dh_ptr, h_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    stride_dy_row, stride_dy_head, stride_dh_row, stride_dh_head, stride_h_row, stride_h_head, n_rows, n_cols,
    HAS_DH: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_DWEIGHT: tl.constexpr, HAS_DBIAS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # each program walks over tiles program_id, program_id + programs, ... and keeps one partial sum of dweight and dbias
    head, n_heads = tl.program_id(1), tl.num_programs(1)
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    mask_d = offs_d < n_cols
    dweight = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    dbias = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_T), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
        mask = (row < n_rows) & mask_d
        out_row = row * n_heads + head
        h = load_rows(h_ptr, stride_h_row, stride_h_head, row, offs_d, mask)
        dy = load_rows(dy_ptr, stride_dy_row, stride_dy_head, row, offs_d, mask)
        mean = tl.load(mean_ptr + out_row, mask=row < n_rows, other=0.0)
        rstd = tl.load(rstd_ptr + out_row, mask=row < n_rows, other=0.0)
        normed = (h - mean) * rstd
        scaled = dy
        if HAS_WEIGHT:
            # read for every tile: it lies in cache, and its registers are needed
            scaled *= tl.load(weight_ptr + head * n_cols + offs_d, mask=mask_d, other=0.0).to(tl.float32)
        # masked lanes add nothing: dy is zero there
        along = tl.sum(scaled * normed, axis=1, keep_dims=True) / n_cols
        dx = rstd * (scaled - tl.sum(scaled, axis=1, keep_dims=True) / n_cols - normed * along)
        if HAS_DH:
            dx += load_rows(dh_ptr, stride_dh_row, stride_dh_head, row, offs_d, mask)
        tl.store(dx_ptr + out_row * n_cols + offs_d, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if HAS_DWEIGHT:
            dweight += dy * normed
        if HAS_DBIAS:
            dbias += dy
    sum_offs = (tl.program_id(0).to(tl.int64) * n_heads + head) * n_cols + offs_d
    if HAS_DWEIGHT:
        tl.store(dweight_ptr + sum_offs, tl.sum(dweight, axis=0, keep_dims=True), mask=mask_d)
    if HAS_DBIAS:
        tl.store(dbias_ptr + sum_offs, tl.sum(dbias, axis=0, keep_dims=True), mask=mask_d)


def _launch(n_cols: int, live_values: int) -> RowLaunch:
    block = next_power_of_2(n_cols)
    rows = max(1, _PROGRAM_VALUES // block)
    num_warps = row_launch(rows * block, live_values, max_block=MAX_COLUMNS).num_warps
    return RowLaunch(block=block, num_warps=num_warps, rows=rows)


def _launch_fwd(n_cols: int) -> RowLaunch:
    return _launch(n_cols, live_values=4)


def _launch_bwd(n_cols: int, has_sums: bool) -> RowLaunch:
    return _launch(n_cols, live_values=12 if has_sums else 8)


def _strides(x: Tensor) -> tuple[int, int]:
    """Strides of a token and of a head in x [T, D] or [T, H, D]."""
    return x.stride(0), x.stride(1) if x.ndim == 3 else 0


def layer_norm_fwd(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalise x + residual over the last dimension.

    Args:
        x, residual: [T, D], or [T, H, D] with a weight of each head; of one dtype, unit column stride.
        weight, bias: [D], or [H, D] if x has heads; contiguous, or None.
        eps: added to the variance.

    Returns:
        y and h, contiguous, of x's shape and dtype (h is x itself without a residual); mean and 1/std, float32, of x's
        shape without its last dimension.
    """
    if not runs_triton(x):
        h = x if residual is None else x + residual
        h_32 = h.float()
        mean = h_32.mean(-1, keepdim=True)
        centred = h_32 - mean
        rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
        y = centred * rstd
        if weight is not None:
            y = y * weight.float()
        if bias is not None:
            y = y + bias.float()
        return y.to(x.dtype), h, mean.squeeze(-1), rstd.squeeze(-1)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    h = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    mean = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    n_rows, n_cols = x.shape[0], x.shape[-1]
    if mean.numel():
        launch = _launch_fwd(n_cols)
        _layer_norm_fwd_kernel[(triton.cdiv(n_rows, launch.rows), x.shape[1] if x.ndim == 3 else 1)](
            x, residual, weight, bias, y, h, mean, rstd,
            *_strides(x), *(_strides(x) if residual is None else _strides(residual)), n_rows, n_cols, eps,
            HAS_RESIDUAL=residual is not None, HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None,
            BLOCK_T=launch.rows, BLOCK_D=launch.block, num_warps=launch.num_warps, enable_fp_fusion=True,
        )  # fmt: skip
    return y, h, mean, rstd


def layer_norm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dh: Tensor | None = None,
    needs_weight: bool = False,
    needs_bias: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradient of x (and, being equal, of the residual), plus `dh` that flows in through the residual stream.

    Args:
        dy, x, dh: [T, D] or [T, H, D] with unit column stride; x is what was normalised, the sum if there was a residual.
        weight, mean, rstd: as the forward took and gave them.

    Returns:
        dx, contiguous, of x's shape and dtype; dweight and dbias, [D] or [H, D] in weight.dtype (x.dtype without a
        weight), or None where not needed.
    """
    n_rows, n_cols = x.shape[0], x.shape[-1]
    n_heads = x.shape[1] if x.ndim == 3 else 1
    parameter_dtype = x.dtype if weight is None else weight.dtype
    if not runs_triton(x):
        dy_32, normed = dy.float(), (x.float() - mean[..., None]) * rstd[..., None]
        scaled = dy_32 if weight is None else dy_32 * weight.float()
        along = (scaled * normed).mean(-1, keepdim=True)
        dx = rstd[..., None] * (scaled - scaled.mean(-1, keepdim=True) - normed * along)
        if dh is not None:
            dx = dx + dh.float()
        dweight = (dy_32 * normed).sum(0).to(parameter_dtype) if needs_weight else None
        return dx.to(x.dtype), dweight, dy_32.sum(0).to(parameter_dtype) if needs_bias else None
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    # One partial sum a program, and a fixed number of programs, so that the sums do not depend on timing.
    has_sums = needs_weight or needs_bias
    is_fused = has_sums and n_cols <= _MAX_FUSED_SUMS
    launch = _launch_bwd(n_cols, is_fused)
    n_tiles, n_sums = triton.cdiv(n_rows, launch.rows), 0
    partial = dweight_part = dbias_part = None
    if has_sums:
        n_sums = min(n_tiles if is_fused else n_rows, max(1, 4 * multiprocessors(x.device.index) // n_heads))
        partial = torch.empty((needs_weight + needs_bias, n_sums, *x.shape[1:]), dtype=torch.float32, device=x.device)
        dweight_part, dbias_part = partial[0], partial[-1]
    strides = (*_strides(dy), *(_strides(dy) if dh is None else _strides(dh)), *_strides(x))
    if dx.numel() and n_cols > _MAX_HELD:
        long = row_launch(_LONG_BLOCK, live_values=8)
        layer_norm_bwd_long_kernel[(n_rows, n_heads)](
            dy, dh, x, weight, mean, rstd, dx, *strides, n_cols, HAS_DH=dh is not None, HAS_WEIGHT=weight is not None,
            BLOCK_D=long.block, num_warps=long.num_warps, enable_fp_fusion=True,
        )  # fmt: skip
    elif dx.numel():
        _layer_norm_bwd_kernel[(n_sums if is_fused else n_tiles, n_heads)](
            dy, dh, x, weight, mean, rstd, dx, dweight_part, dbias_part, *strides, n_rows, n_cols,
            HAS_DH=dh is not None, HAS_WEIGHT=weight is not None, HAS_DWEIGHT=is_fused and needs_weight,
            HAS_DBIAS=is_fused and needs_bias, BLOCK_T=launch.rows, BLOCK_D=launch.block,
            # fused, dy * weight - mean(dy * weight) of one column would be the product's rounding, not zero
            num_warps=launch.num_warps, enable_fp_fusion=False,
        )  # fmt: skip
    if dx.numel() and has_sums and not is_fused:
        launch = row_launch(_SUMS_BLOCK, live_values=8)
        layer_norm_sums_kernel[(n_sums, n_heads, triton.cdiv(n_cols, launch.block))](
            dy, x, mean, rstd, dweight_part, dbias_part, *_strides(dy), *_strides(x), n_rows, n_cols,
            HAS_DWEIGHT=needs_weight, HAS_DBIAS=needs_bias, BLOCK_D=launch.block,
            num_warps=launch.num_warps, enable_fp_fusion=True,
        )  # fmt: skip
    if partial is None:
        return dx, None, None
    sums = partial.sum(1).to(parameter_dtype)
    return dx, sums[0] if needs_weight else None, sums[-1] if needs_bias else None


class LayerNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps):  # type: ignore[override]
        y, h, mean, rstd = layer_norm_fwd(x, weight, bias, eps, residual)
        ctx.save_for_backward(h, weight, mean, rstd)
        ctx.has_residual = residual is not None
        return (y, h) if residual is not None else y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dh=None):  # type: ignore[override]
        h, weight, mean, rstd = ctx.saved_tensors
        dx, dweight, dbias = layer_norm_bwd(
            _unit_columns(dy), h, weight, mean, rstd, None if dh is None else _unit_columns(dh),
            needs_weight=ctx.needs_input_grad[2], needs_bias=ctx.needs_input_grad[3],
        )  # fmt: skip
        return dx, dx if ctx.has_residual else None, dweight, dbias, None


def _unit_columns(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _as_tokens(x: Tensor, weight: Tensor | None) -> Tensor:
    """[..., D] -> [T, D], or [..., H, D] -> [T, H, D] for a weight of each head; a copy only where strides allow no view."""
    n_cols = x.shape[-1]
    if weight is None or weight.ndim == 1:
        return as_rows(x, n_cols)
    return _unit_columns(x.reshape(-1, weight.shape[0], n_cols))


def _check(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    if x.ndim == 0 or not 0 < x.shape[-1] <= MAX_COLUMNS:
        raise ValueError(f"x must be [..., D] with D in 1..{MAX_COLUMNS}, got {tuple(x.shape)}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and (
            parameter.ndim not in (1, 2)
            or tuple(x.shape[-parameter.ndim :]) != tuple(parameter.shape)
            or (weight is not None and (parameter.shape != weight.shape or parameter.dtype != weight.dtype))
        ):
            raise ValueError(
                f"{name} must be [D], or [H, D] with the last two dimensions of x {tuple(x.shape)}, and weight and bias "
                f"must agree, got {tuple(parameter.shape)} {parameter.dtype}"
            )
    if weight is None and bias is not None:
        raise ValueError("a bias needs a weight, got none")


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Normalise the last dimension to mean 0 and variance 1, then scale and shift it.

    y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias

    Args:
        x: [..., D], float16, bfloat16 or float32.
        weight: [D], or [H, D] for x [..., H, D]; any float dtype. None for ones.
        bias: of weight's shape and dtype. None for zeros.
        eps: added to the variance; same unit as x squared.

    Returns:
        [..., D] in x.dtype, rounded once.

    Raises:
        ValueError: if weight or bias do not fit x or one another, or D is 0 or exceeds 16384.
        TypeError: for a dtype that the device's kernels do not take.

    Reference: Ba, Kiros and Hinton 2016, arXiv:1607.06450.
    """
    _check(x, weight, bias)
    return LayerNormFunction.apply(_as_tokens(x, weight), None, *_parameters(weight, bias), eps).view(x.shape)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Add to the residual stream and normalise the sum, in one pass in both directions.

    Args:
        x, residual: [..., D] of one shape and dtype.
        weight, bias, eps: as in `layer_norm`.

    Returns:
        y as `layer_norm(x + residual, …)`, and h = x + residual in x.dtype.

    Raises:
        ValueError: if the shapes or dtypes of x and residual differ, else as `layer_norm`.
    """
    _check(x, weight, bias)
    if x.shape != residual.shape or x.dtype != residual.dtype:
        raise ValueError(
            f"x and residual must agree, got {tuple(x.shape)} {x.dtype} and {tuple(residual.shape)} {residual.dtype}"
        )
    y, h = LayerNormFunction.apply(_as_tokens(x, weight), _as_tokens(residual, weight), *_parameters(weight, bias), eps)
    return y.view(x.shape), h.view(x.shape)


def _parameters(weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return None if weight is None else weight.contiguous(), None if bias is None else bias.contiguous()


def layer_norm_reference(x, weight=None, bias=None, eps=1e-5):
    centred = x - x.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def add_layer_norm_reference(x, residual, weight=None, bias=None, eps=1e-5):
    h = x + residual
    return layer_norm_reference(h, weight, bias, eps), h


def _eager(x, weight=None, bias=None, eps=1e-5):
    weight, bias = (None if p is None else p.float() for p in (weight, bias))
    return layer_norm_reference(x.float(), weight, bias, eps).to(x.dtype)


def _make(shape, dtype, device, generator):
    x = randn(shape, dtype, device, generator) + 0.5
    weight, bias = (randn(shape[-1:], dtype, device, generator) for _ in range(2))
    return dict(x=x, weight=weight, bias=bias, eps=1e-5)


def _make_heads(shape, dtype, device, generator):
    x = randn(shape, dtype, device, generator) + 0.5
    return dict(x=x, weight=randn(shape[-2:], dtype, device, generator), eps=1e-5)


def _builds(cc, dtype):
    types = dict.fromkeys(("mean_ptr", "rstd_ptr", "dweight_ptr", "dbias_ptr"), "*fp32") | dict(eps="fp32")
    # the shortest rows and the longest that each kernel holds
    for n_cols in (128, 4096, MAX_COLUMNS):
        launch = _launch_fwd(n_cols)
        options = dict(HAS_RESIDUAL=True, HAS_WEIGHT=True, HAS_BIAS=True, BLOCK_T=launch.rows, BLOCK_D=launch.block)
        yield build(_layer_norm_fwd_kernel, dtype, options, launch.num_warps, types)
    for n_cols, has_sums in ((128, True), (128, False), (_MAX_FUSED_SUMS, True), (_MAX_HELD, False)):
        launch = _launch_bwd(n_cols, has_sums)
        options = dict(
            HAS_DH=True, HAS_WEIGHT=True, HAS_DWEIGHT=has_sums, HAS_DBIAS=has_sums,
            BLOCK_T=launch.rows, BLOCK_D=launch.block,
        )  # fmt: skip
        made = build(_layer_norm_bwd_kernel, dtype, options, launch.num_warps, types)
        yield dataclasses.replace(made, enable_fp_fusion=False)
    launch = row_launch(_LONG_BLOCK, live_values=8)
    options = dict(HAS_DH=True, HAS_WEIGHT=True, BLOCK_D=launch.block)
    yield build(layer_norm_bwd_long_kernel, dtype, options, launch.num_warps, types)
    launch = row_launch(_SUMS_BLOCK, live_values=8)
    options = dict(HAS_DWEIGHT=True, HAS_DBIAS=True, BLOCK_D=launch.block)
    yield build(layer_norm_sums_kernel, dtype, options, launch.num_warps, types)


CASE = Case(
    name="layer_norm",
    op=layer_norm,
    reference=layer_norm_reference,
    eager=_eager,
    make=_make,
    shapes=dict(ROW_SHAPES, **{"long-rows": (3, 4200), "longer-rows": (2, 8200)}),
    gradients=("x", "weight", "bias"),
    strided=strided_rows,
    bench_shapes=ROW_BENCH_SHAPES,
    ideal=ideal_rows(2.0, 7.0),
    ideal_backward=ideal_rows(3.0, 12.0),
    builds=_builds,
)

ADD_CASE = with_residual(
    CASE, add_layer_norm, add_layer_norm_reference, ideal=ideal_rows(4.0, 8.0), ideal_backward=ideal_rows(4.0, 13.0)
)

HEADS_CASE = Case(
    name="layer_norm_heads",
    op=layer_norm,
    reference=layer_norm_reference,
    eager=_eager,
    make=_make_heads,
    shapes={"typical": (2, 30, 4, 64), "odd": (7, 3, 41), "one-head": (1, 5, 1, 128), "empty": (0, 4, 64)},
    gradients=("x", "weight"),
    strided=strided_rows,
    bench_shapes={"T4096-H64-E128": (4096, 64, 128), "T4096-H8-E128": (4096, 8, 128)},
    ideal=ideal_rows(2.0, 6.0),
    ideal_backward=ideal_rows(3.0, 11.0),
)
