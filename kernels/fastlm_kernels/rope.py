"""Rotary position embedding of queries and keys, with an optional RMSNorm of each head in the same pass.

    n = x / sqrt(mean(x**2) + eps) * (weight + weight_offset)     (only with weights; the mean is over one head)
    y[i], y[j] = n[i] * cos - n[j] * sin, n[j] * cos + n[i] * sin

for the pairs (i, j) of the first R values of a head; the values from R on pass through. Pairs are (i, i + R/2), as in
Llama, or (2i, 2i + 1), as in GLM (`interleaved`). Su et al. 2021, arXiv:2104.09864. All is computed in float32 and
rounded where a stock model rounds: the norm's output, each product with cos or sin (unless these are wider than x), and
their sum. Saved for the backward: cos, sin and, only with weights, q, k and 1/rms (one float32 a head).
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from fastlm_kernels._case import Case, build, randn
from fastlm_kernels._launch import RowLaunch, multiprocessors, next_power_of_2, runs_triton, tl, triton
from fastlm_kernels._rope_pairs import load_angles, load_pairs, place_rows, rounded, store_pairs, turn, turn_torch

# B batch, S sequence, H query heads, K key heads, E head size, R rotary size, P rows of a position table
# In kernels a row is one head of one token; its E values are E/2 pairs, those past R/2 being pairs that do not turn.
MAX_HEAD_DIM = 1024


@triton.jit
def _turn_rows(
    x_ptr, strides_x, weight_ptr, y_ptr, strides_y, rstd_ptr, tables, strides_tables,
    block, blocks_per_batch, n_tokens, eps, weight_offset,
    N_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, INVERSE: tl.constexpr, HAS_NORM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    batch, row, token, head, mask_row = place_rows(block, blocks_per_batch, n_tokens, N_HEADS, ROWS)
    x_ptrs = (x_ptr + batch * strides_x[0] + token * strides_x[1] + head * strides_x[2])[:, None]
    y_ptrs = (y_ptr + batch * strides_y[0] + token * strides_y[1] + head * strides_y[2])[:, None]
    first, second = load_pairs(x_ptrs, mask_row[:, None], HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)
    cos, sin = load_angles(tables, strides_tables, batch, token, mask_row, HAS_POSITIONS, ROTARY_DIM // 2, BLOCK_PAIRS)
    if INVERSE:
        sin = -sin
    if HAS_NORM:
        mean = tl.sum(first * first + second * second, axis=1) / HEAD_DIM
        rstd = 1.0 / tl.sqrt(mean + eps)  # [ROWS]
        tl.store(rstd_ptr + row, rstd, mask=mask_row)
        rstd = rstd[:, None]
        weight_first, weight_second = load_pairs(weight_ptr, True, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)
        dtype = x_ptr.dtype.element_ty
        first = rounded(first * rstd * (weight_first + weight_offset), dtype)
        second = rounded(second * rstd * (weight_second + weight_offset), dtype)
    y_first, y_second = turn(first, second, cos, sin, tables[0].dtype.element_ty)
    store_pairs(y_ptrs, mask_row[:, None], y_first, y_second, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)


@triton.jit
def _rope_fwd_kernel(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, q_out_ptr, k_out_ptr, q_rstd_ptr, k_rstd_ptr,
    cos_ptr, sin_ptr, position_ptr, q_blocks, q_blocks_per_batch, k_blocks_per_batch, n_tokens,
    stride_q_batch, stride_q_token, stride_q_head, stride_k_batch, stride_k_token, stride_k_head,
    stride_q_out_batch, stride_q_out_token, stride_q_out_head,
    stride_k_out_batch, stride_k_out_token, stride_k_out_head,
    stride_cos_batch, stride_cos_token, stride_position_batch, stride_position_token, eps, weight_offset,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_POSITIONS: tl.constexpr, INVERSE: tl.constexpr, HAS_NORM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    # programs 0..q_blocks-1 take ROWS rows of q each, the others rows of k; INVERSE turns back: a rotation's backward
    tables = (cos_ptr, sin_ptr, position_ptr)
    strides_tables = (stride_cos_batch, stride_cos_token, stride_position_batch, stride_position_token)
    block = tl.program_id(0)
    if block < q_blocks:
        _turn_rows(
            q_ptr, (stride_q_batch, stride_q_token, stride_q_head), q_weight_ptr,
            q_out_ptr, (stride_q_out_batch, stride_q_out_token, stride_q_out_head), q_rstd_ptr,
            tables, strides_tables, block, q_blocks_per_batch, n_tokens, eps, weight_offset,
            Q_HEADS, HEAD_DIM, ROTARY_DIM, INTERLEAVED, HAS_POSITIONS, INVERSE, HAS_NORM, ROWS, BLOCK_PAIRS,
        )  # fmt: skip
    else:
        _turn_rows(
            k_ptr, (stride_k_batch, stride_k_token, stride_k_head), k_weight_ptr,
            k_out_ptr, (stride_k_out_batch, stride_k_out_token, stride_k_out_head), k_rstd_ptr,
            tables, strides_tables, block - q_blocks, k_blocks_per_batch, n_tokens, eps, weight_offset,
            K_HEADS, HEAD_DIM, ROTARY_DIM, INTERLEAVED, HAS_POSITIONS, INVERSE, HAS_NORM, ROWS, BLOCK_PAIRS,
        )  # fmt: skip


@triton.jit
def _turn_norm_bwd_rows(
    dy_ptr, strides_dy, x_ptr, strides_x, dx_ptr, strides_dx, weight_ptr, rstd_ptr, dweight_ptr, tables, strides_tables,
    first_block, n_blocks, blocks_per_batch, n_tokens, weight_offset,
    N_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, HAS_DWEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    weight_first, weight_second = load_pairs(weight_ptr, True, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)
    dweight_first = tl.zeros((ROWS, BLOCK_PAIRS), tl.float32)
    dweight_second = tl.zeros((ROWS, BLOCK_PAIRS), tl.float32)
    for block in range(first_block, n_blocks, tl.num_programs(0)):
        batch, row, token, head, mask_row = place_rows(block, blocks_per_batch, n_tokens, N_HEADS, ROWS)
        dy_ptrs = (dy_ptr + batch * strides_dy[0] + token * strides_dy[1] + head * strides_dy[2])[:, None]
        x_ptrs = (x_ptr + batch * strides_x[0] + token * strides_x[1] + head * strides_x[2])[:, None]
        dx_ptrs = (dx_ptr + batch * strides_dx[0] + token * strides_dx[1] + head * strides_dx[2])[:, None]
        dy_first, dy_second = load_pairs(dy_ptrs, mask_row[:, None], HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)
        x_first, x_second = load_pairs(x_ptrs, mask_row[:, None], HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)
        cos, sin = load_angles(
            tables, strides_tables, batch, token, mask_row, HAS_POSITIONS, ROTARY_DIM // 2, BLOCK_PAIRS
        )
        rstd = tl.load(rstd_ptr + row, mask=mask_row, other=0.0)[:, None]
        normed_first = x_first * rstd
        normed_second = x_second * rstd
        # gradient of the norm's output, turned back
        dtype = x_ptr.dtype.element_ty
        dn_first, dn_second = turn(dy_first, dy_second, cos, -sin, tables[0].dtype.element_ty)
        dn_first = rounded(dn_first, dtype)
        dn_second = rounded(dn_second, dtype)
        if HAS_DWEIGHT:
            dweight_first += dn_first * normed_first
            dweight_second += dn_second * normed_second
        dn_first = rounded(dn_first * (weight_first + weight_offset), dtype)
        dn_second = rounded(dn_second * (weight_second + weight_offset), dtype)
        mean = tl.sum(dn_first * normed_first + dn_second * normed_second, axis=1, keep_dims=True) / HEAD_DIM
        dx_first = rstd * (dn_first - normed_first * mean)
        dx_second = rstd * (dn_second - normed_second * mean)
        store_pairs(dx_ptrs, mask_row[:, None], dx_first, dx_second, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)
    if HAS_DWEIGHT:
        store_pairs(
            dweight_ptr + tl.program_id(0) * HEAD_DIM, True,
            tl.sum(dweight_first, axis=0, keep_dims=True), tl.sum(dweight_second, axis=0, keep_dims=True),
            HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS,
        )  # fmt: skip


@triton.jit
def _rope_norm_bwd_kernel(
    dq_ptr, dk_ptr, q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, q_rstd_ptr, k_rstd_ptr, dq_out_ptr, dk_out_ptr,
    dq_weight_ptr, dk_weight_ptr, cos_ptr, sin_ptr, position_ptr,
    q_blocks, k_blocks, q_blocks_per_batch, k_blocks_per_batch, n_tokens,
    stride_dq_batch, stride_dq_token, stride_dq_head, stride_dk_batch, stride_dk_token, stride_dk_head,
    stride_q_batch, stride_q_token, stride_q_head, stride_k_batch, stride_k_token, stride_k_head,
    stride_dq_out_batch, stride_dq_out_token, stride_dq_out_head,
    stride_dk_out_batch, stride_dk_out_token, stride_dk_out_head,
    stride_cos_batch, stride_cos_token, stride_position_batch, stride_position_token, weight_offset,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_DWEIGHT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    # programs walk over the blocks of q from the first program on and over those of k from the last one back: with as
    # many programs as blocks each takes one, with fewer each keeps one partial sum of both dweights
    tables = (cos_ptr, sin_ptr, position_ptr)
    strides_tables = (stride_cos_batch, stride_cos_token, stride_position_batch, stride_position_token)
    _turn_norm_bwd_rows(
        dq_ptr, (stride_dq_batch, stride_dq_token, stride_dq_head),
        q_ptr, (stride_q_batch, stride_q_token, stride_q_head),
        dq_out_ptr, (stride_dq_out_batch, stride_dq_out_token, stride_dq_out_head),
        q_weight_ptr, q_rstd_ptr, dq_weight_ptr, tables, strides_tables,
        tl.program_id(0), q_blocks, q_blocks_per_batch, n_tokens, weight_offset,
        Q_HEADS, HEAD_DIM, ROTARY_DIM, INTERLEAVED, HAS_POSITIONS, HAS_DWEIGHT, ROWS, BLOCK_PAIRS,
    )  # fmt: skip
    _turn_norm_bwd_rows(
        dk_ptr, (stride_dk_batch, stride_dk_token, stride_dk_head),
        k_ptr, (stride_k_batch, stride_k_token, stride_k_head),
        dk_out_ptr, (stride_dk_out_batch, stride_dk_out_token, stride_dk_out_head),
        k_weight_ptr, k_rstd_ptr, dk_weight_ptr, tables, strides_tables,
        tl.num_programs(0) - 1 - tl.program_id(0), k_blocks, k_blocks_per_batch, n_tokens, weight_offset,
        K_HEADS, HEAD_DIM, ROTARY_DIM, INTERLEAVED, HAS_POSITIONS, HAS_DWEIGHT, ROWS, BLOCK_PAIRS,
    )  # fmt: skip


def _launch(head_dim: int) -> RowLaunch:
    # 8 values of each member of a pair a thread: two 16-byte loads in bfloat16
    block = next_power_of_2(head_dim)
    return RowLaunch(block=block // 2, num_warps=4, rows=max(1, 2048 // block))


def _grid(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None, interleaved: bool):
    """What both kernels share: blocks of q and k in all and in one batch entry, tables and their strides, constants."""
    n_batch, n_tokens, n_heads, head_dim = q.shape
    launch = _launch(head_dim)
    # a block never crosses batch entries
    per_batch = [triton.cdiv(n_tokens * x.shape[2], launch.rows) for x in (q, k)]
    if cos.dtype != q.dtype or sin.dtype != q.dtype:
        # the kernels round products to the tables' dtype: float32 is what q and tables of different dtypes promote to
        cos, sin = cos.float(), sin.float()
    if cos.stride(-1) != 1 or cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    if position_ids is None:
        strides = (cos.stride(0) if cos.shape[0] == n_batch else 0, cos.stride(1), 0, 0)
    else:
        position_strides = (position_ids.stride(0) if position_ids.shape[0] == n_batch else 0, position_ids.stride(1))
        strides = (0, cos.stride(0), *position_strides)
    constants = dict(
        Q_HEADS=n_heads, K_HEADS=k.shape[2], HEAD_DIM=head_dim, ROTARY_DIM=cos.shape[-1], INTERLEAVED=interleaved,
        HAS_POSITIONS=position_ids is not None, ROWS=launch.rows, BLOCK_PAIRS=launch.block,
        num_warps=launch.num_warps,
        # a fused product and sum would skip the rounding of the product that stock models make
        enable_fp_fusion=False,
    )  # fmt: skip
    return [n_batch * blocks for blocks in per_batch], per_batch, (cos, sin, position_ids), strides, constants


def rope_fwd(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor | None = None, k_weight: Tensor | None = None,
    eps: float = 1e-6, weight_offset: float = 0.0, interleaved: bool = False, position_ids: Tensor | None = None,
    q_out: Tensor | None = None, k_out: Tensor | None = None, inverse: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Turns q [B, S, H, E] and k [B, S, K, E], both of unit last stride; the other arguments as in `rope`.

    `q_out`, `k_out` receive the results ([B, S, heads, E], unit last stride); None makes contiguous ones. They may be q
    and k themselves, which are then lost: a program reads its rows before it writes them.
    `inverse` turns the other way, which is the backward where there are no weights.

    Returns q_out, k_out, and 1/rms [B, S, H] and [B, S, K] float32 (None without weights).
    """
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if q_out is None else q_out
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device) if k_out is None else k_out
    has_norm = q_weight is not None and k_weight is not None
    if not runs_triton(q):
        rstds: list[Tensor | None] = []
        for x, weight, out in ((q, q_weight, q_out), (k, k_weight, k_out)):
            rstd = None
            if weight is not None:
                rstd = torch.rsqrt(x.float().square().mean(-1) + eps)
                x = (x.float() * rstd[..., None] * (weight.float() + weight_offset)).to(x.dtype)
            out.copy_(turn_torch(x, cos, -sin if inverse else sin, interleaved, position_ids))
            rstds.append(rstd)
        return q_out, k_out, rstds[0], rstds[1]
    q_rstd = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if has_norm else None
    k_rstd = torch.empty(k.shape[:3], dtype=torch.float32, device=k.device) if has_norm else None
    (q_blocks, k_blocks), per_batch, tables, strides, constants = _grid(q, k, cos, sin, position_ids, interleaved)
    if q_blocks + k_blocks:
        _rope_fwd_kernel[(q_blocks + k_blocks,)](
            q, k, q_weight, k_weight, q_out, k_out, q_rstd, k_rstd, *tables, q_blocks, *per_batch, q.shape[1],
            *q.stride()[:3], *k.stride()[:3], *q_out.stride()[:3], *k_out.stride()[:3], *strides, eps, weight_offset,
            INVERSE=inverse, HAS_NORM=has_norm, **constants,
        )  # fmt: skip
    return q_out, k_out, q_rstd, k_rstd


def rope_bwd(
    dq: Tensor, dk: Tensor, q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor,
    q_weight: Tensor | None = None, k_weight: Tensor | None = None, q_rstd: Tensor | None = None,
    k_rstd: Tensor | None = None, weight_offset: float = 0.0, interleaved: bool = False,
    position_ids: Tensor | None = None, needs_dweight: bool = False,
    dq_out: Tensor | None = None, dk_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of q and k and, with `needs_dweight`, of both weights.

    dq [B, S, H, E], dk [B, S, K, E], q, k: unit last stride. q, k and both rstd are read only with weights. `dq_out`,
    `dk_out` receive the results (unit last stride, for example slices of one packed gradient); None makes contiguous
    ones. They may be dq and dk, or q and k, which are then lost: a program reads its rows before it writes them.

    Returns dq_out, dk_out, dq_weight [E] and dk_weight [E] in the weights' dtype, or None, None.
    """
    if q is None or k is None or q_weight is None or k_weight is None or q_rstd is None or k_rstd is None:
        dq, dk, _, _ = rope_fwd(
            dq, dk, cos, sin, interleaved=interleaved, position_ids=position_ids,
            q_out=dq_out, k_out=dk_out, inverse=True,
        )  # fmt: skip
        return dq, dk, None, None
    dq_out = torch.empty(dq.shape, dtype=dq.dtype, device=dq.device) if dq_out is None else dq_out
    dk_out = torch.empty(dk.shape, dtype=dk.dtype, device=dk.device) if dk_out is None else dk_out
    if not runs_triton(dq):
        dweights = []
        for dy, x, weight, rstd, out in ((dq, q, q_weight, q_rstd, dq_out), (dk, k, k_weight, k_rstd, dk_out)):
            normed = x.float() * rstd[..., None]
            dn = turn_torch(dy, cos, -sin, interleaved, position_ids).to(dy.dtype).float()
            dweights.append((dn * normed).sum((0, 1, 2)).to(weight.dtype) if needs_dweight else None)
            dn = (dn * (weight.float() + weight_offset)).to(dy.dtype).float()
            out.copy_(rstd[..., None] * (dn - normed * (dn * normed).mean(-1, keepdim=True)))
        return dq_out, dk_out, dweights[0], dweights[1]
    blocks, per_batch, tables, strides, constants = _grid(dq, dk, cos, sin, position_ids, interleaved)
    # a fixed number of partial sums, so that the weights' gradients do not depend on timing
    programs = min(sum(blocks), 4 * multiprocessors(dq.device.index)) if needs_dweight else sum(blocks)
    partials = torch.empty((2, programs if needs_dweight else 0, dq.shape[3]), dtype=torch.float32, device=dq.device)
    if programs:
        _rope_norm_bwd_kernel[(programs,)](
            dq, dk, q, k, q_weight, k_weight, q_rstd, k_rstd, dq_out, dk_out, partials[0], partials[1], *tables,
            *blocks, *per_batch, dq.shape[1], *dq.stride()[:3], *dk.stride()[:3], *q.stride()[:3], *k.stride()[:3],
            *dq_out.stride()[:3], *dk_out.stride()[:3], *strides, weight_offset, HAS_DWEIGHT=needs_dweight, **constants,
        )  # fmt: skip
    if not needs_dweight:
        return dq_out, dk_out, None, None
    return dq_out, dk_out, partials[0].sum(0).to(q_weight.dtype), partials[1].sum(0).to(k_weight.dtype)


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class RopeFunction(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx, q, k, q_weight, k_weight, cos, sin, eps, weight_offset, interleaved, position_ids
    ):
        q, k = _unit_stride(q), _unit_stride(k)
        q_out, k_out, q_rstd, k_rstd = rope_fwd(
            q, k, cos, sin, q_weight, k_weight, eps, weight_offset, interleaved, position_ids
        )
        has_norm = q_weight is not None
        saved = (q, k, q_weight, k_weight, q_rstd, k_rstd) if has_norm else (None,) * 6
        ctx.save_for_backward(cos, sin, position_ids, *saved)
        ctx.weight_offset, ctx.interleaved = weight_offset, interleaved
        return q_out, k_out

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk):  # type: ignore[override]
        cos, sin, position_ids, q, k, q_weight, k_weight, q_rstd, k_rstd = ctx.saved_tensors
        dq, dk, dq_weight, dk_weight = rope_bwd(
            _unit_stride(dq), _unit_stride(dk), q, k, cos, sin, q_weight, k_weight, q_rstd, k_rstd,
            ctx.weight_offset, ctx.interleaved, position_ids,
            needs_dweight=ctx.needs_input_grad[2] or ctx.needs_input_grad[3],
        )  # fmt: skip
        return dq, dk, dq_weight, dk_weight, None, None, None, None, None, None


def _check(q, k, cos, sin, q_weight, k_weight, position_ids) -> None:
    if q.ndim != 4 or k.ndim != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3] or q.dtype != k.dtype:
        raise ValueError(
            "q must be [B, S, H, E] and k [B, S, K, E] of one dtype, got "
            f"{tuple(q.shape)} {q.dtype} and {tuple(k.shape)} {k.dtype}"
        )
    n_batch, n_tokens, n_heads, head_dim = q.shape
    rotary_dim = cos.shape[-1]
    if head_dim % 2 or rotary_dim % 2 or not 0 < rotary_dim <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"E and R must be even, R <= E <= {MAX_HEAD_DIM}: got E = {head_dim} and R = {rotary_dim}")
    rows, needed = (cos, "cos and sin") if position_ids is None else (position_ids, "position_ids")
    if (
        rows.shape[:2] not in ((n_batch, n_tokens), (1, n_tokens))
        or rows.ndim + (position_ids is not None) != 3
        or cos.shape != sin.shape
        or cos.ndim != (3 if position_ids is None else 2)
    ):
        raise ValueError(
            f"{needed} must start with [{n_batch} or 1, {n_tokens}]; got cos {tuple(cos.shape)}, "
            f"sin {tuple(sin.shape)}, position_ids {None if position_ids is None else tuple(position_ids.shape)}"
        )
    for weight in (q_weight, k_weight):
        if (weight is None) != (q_weight is None) or (weight is not None and weight.shape != (head_dim,)):
            got = [None if w is None else tuple(w.shape) for w in (q_weight, k_weight)]
            raise ValueError(f"q_weight and k_weight must both be [{head_dim}] or both None, got {got[0]} and {got[1]}")
    if n_tokens * max(n_heads, k.shape[2]) >= 2**30:
        raise ValueError(f"S * heads must stay below 2**30, got S = {n_tokens} with {n_heads} and {k.shape[2]} heads")


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    interleaved: bool = False,
    position_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Turn queries and keys by their positions, after an RMSNorm of each head where weights are given.

    Args:
        q: [B, S, H, E], k: [B, S, K, E]; float16, bfloat16 or float32 of one dtype, any strides (slices of a packed
            projection; a copy is made only where the last stride is not 1).
        cos, sin: [B or 1, S, R] in any float dtype, R <= E even, as transformers' rotary embedding returns them: the
            second half of a row repeats the first and is not read. With `position_ids`, tables [P, R].
        q_weight, k_weight: [E], any float dtype; both or neither.
        eps, weight_offset: of the norm, as in `rms_norm`.
        interleaved: pairs are (2i, 2i + 1) as in GLM instead of (i, i + R/2) as in Llama.
        position_ids: [B or 1, S] integers, the table row of each token. Values outside 0..P-1 are not checked on a GPU.

    Returns:
        q and k turned, contiguous, in their dtype. cos, sin and position_ids get no gradient.

    Raises:
        ValueError: for shapes that do not fit together, an odd R or one above E, only one of the two weights.
        TypeError: for a dtype that the device's kernels do not take.

    Reference: Su et al. 2021, arXiv:2104.09864; for the norm, Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    _check(q, k, cos, sin, q_weight, k_weight, position_ids)
    return RopeFunction.apply(q, k, q_weight, k_weight, cos, sin, eps, weight_offset, interleaved, position_ids)


def rope_reference(
    q, k, cos, sin, q_weight=None, k_weight=None, eps=1e-6, weight_offset=0.0, interleaved=False, position_ids=None
):  # fmt: skip
    cos, sin = ((table if position_ids is None else table[position_ids])[:, :, None] for table in (cos, sin))
    half = cos.shape[-1] // 2
    if interleaved:
        cos, sin = (table[..., :half].repeat_interleave(2, dim=-1) for table in (cos, sin))
    outputs = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        if weight is not None:
            x = functional.rms_norm(x, x.shape[-1:], weight + weight_offset, eps)
        rotary, passed = x[..., : 2 * half], x[..., 2 * half :]
        if interleaved:
            crossed = torch.stack((-rotary[..., 1::2], rotary[..., 0::2]), -1).flatten(-2)
        else:
            crossed = torch.cat((-rotary[..., half:], rotary[..., :half]), -1)
        outputs.append(torch.cat((rotary * cos + crossed * sin, passed), -1))
    return tuple(outputs)


def _make(shape, dtype, device, generator, has_norm=False, has_positions=False, interleaved=False):
    batch, n_tokens, n_heads, n_kv_heads, head_dim, rotary_dim = shape
    rows = 2 * n_tokens if has_positions else n_tokens
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.outer(torch.arange(rows).float(), frequencies).repeat(1, 2)
    tables = dict(cos=angles.cos().to(dtype).to(device), sin=angles.sin().to(dtype).to(device))
    inputs = dict(
        q=randn((batch, n_tokens, n_heads, head_dim), dtype, device, generator),
        k=randn((batch, n_tokens, n_kv_heads, head_dim), dtype, device, generator),
        interleaved=interleaved,
        **(tables if has_positions else {name: table[None] for name, table in tables.items()}),
    )
    if has_positions:
        positions = torch.randint(0, max(rows, 1), (batch, n_tokens), generator=generator)
        inputs["position_ids"] = positions.to(device)
    if has_norm:
        for name in ("q_weight", "k_weight"):
            inputs[name] = randn((head_dim,), dtype, device, generator)
        inputs.update(eps=1e-5, weight_offset=float(n_tokens % 2))
    return inputs


def _strided(inputs):
    # as slices of one packed projection, with NaN where v lies
    q, k = inputs["q"], inputs["k"]
    packed = q.new_full((*q.shape[:2], q.shape[2] + 2 * k.shape[2], q.shape[3]), float("nan"))
    packed[:, :, : q.shape[2]] = q
    packed[:, :, q.shape[2] : q.shape[2] + k.shape[2]] = k
    return dict(inputs, q=packed[:, :, : q.shape[2]], k=packed[:, :, q.shape[2] : q.shape[2] + k.shape[2]])


def _builds(cc, dtype):
    # H, K, E, R, interleaved: Llama-8B, GLM-4, Phi
    for n_heads, n_kv_heads, head_dim, rotary_dim, interleaved in (
        (32, 8, 128, 128, False), (32, 2, 128, 64, True), (32, 32, 80, 32, False),
    ):  # fmt: skip
        launch = _launch(head_dim)
        constants = dict(
            Q_HEADS=n_heads, K_HEADS=n_kv_heads, HEAD_DIM=head_dim, ROTARY_DIM=rotary_dim, INTERLEAVED=interleaved,
            HAS_POSITIONS=interleaved, ROWS=launch.rows, BLOCK_PAIRS=launch.block,
        )  # fmt: skip
        types = dict.fromkeys(("q_rstd_ptr", "k_rstd_ptr", "dq_weight_ptr", "dk_weight_ptr"), "*fp32")
        types |= dict(position_ptr="*i64", eps="fp32", weight_offset="fp32")
        # every option once, the longest forms elsewhere
        for option in (False, True) if rotary_dim == 128 else (True,):
            fwd, bwd = dict(constants, HAS_NORM=option, INVERSE=not option), dict(constants, HAS_DWEIGHT=option)
            for kernel, options in ((_rope_fwd_kernel, fwd), (_rope_norm_bwd_kernel, bwd)):
                made = build(kernel, dtype, options, launch.num_warps, types)
                yield dataclasses.replace(made, enable_fp_fusion=False)


# B, S, H, K, E, R
_SHAPES = {
    "typical": (2, 12, 4, 2, 32, 32), "odd": (1, 7, 3, 1, 20, 20), "partial": (2, 5, 5, 1, 80, 24),
    "one-row": (1, 1, 1, 1, 64, 64), "empty": (0, 4, 2, 2, 16, 16),
}  # fmt: skip
_BENCH_SHAPES = {
    "Llama-8B-T4096": (2, 2048, 32, 8, 128, 128), "Llama-8B-T16384": (2, 8192, 32, 8, 128, 128),
    "Llama-1B-T8192": (4, 2048, 32, 8, 64, 64),
}  # fmt: skip


def _case(name, gradients, **options):
    # q and k read, both outputs written; the norm's backward also reads q and k again
    def ideal(shape, size, tensors, flops):
        values = shape[0] * shape[1] * (shape[2] + shape[3]) * shape[4]
        return float(tensors * values * size), float(flops * values)

    has_norm = "q_weight" in gradients
    return Case(
        name=name,
        op=rope,
        reference=rope_reference,
        eager=rope_reference,
        make=functools.partial(_make, has_norm=has_norm, **options),
        shapes=_SHAPES,
        gradients=gradients,
        strided=_strided,
        bench_shapes=_BENCH_SHAPES,
        ideal=lambda shape, size: ideal(shape, size, 2, 6 if has_norm else 3),
        ideal_backward=lambda shape, size: ideal(shape, size, 3 if has_norm else 2, 12 if has_norm else 3),
        builds=None if options else _builds,
    )


CASE = _case("rope", ("q", "k"))
INTERLEAVED_CASE = _case("rope_interleaved", ("q", "k"), interleaved=True, has_positions=True)
NORM_CASE = _case("rope_norm", ("q", "k", "q_weight", "k_weight"))
