"""Device functions on rows of rotary pairs, and their rotation in torch: a row is one head of one token, its E values are E/2 pairs.

Pair p < R/2 turns; its members lie at (p, p + R/2), or at (2p, 2p + 1) if interleaved. The E - R values that do
not turn are taken as pairs too, of cos 1 and sin 0, so that every row is two tiles of one width whatever the layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastlm_kernels._launch import tl, triton


@triton.jit
def _pair_columns(HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, BLOCK_PAIRS: tl.constexpr):
    # columns of the first and the second member of each pair, halves layout: [1, BLOCK_PAIRS]
    first = tl.arange(0, BLOCK_PAIRS)[None, :]
    second = first + ROTARY_DIM // 2
    if ROTARY_DIM < HEAD_DIM:
        turns = first < ROTARY_DIM // 2
        first = tl.where(turns, first, second)
        second = tl.where(turns, second, first + (HEAD_DIM - ROTARY_DIM) // 2)
    return first, second


@triton.jit
def load_pairs(
    row_ptrs, mask_row,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    # row_ptrs, mask_row: [N, 1] or scalars -> first and second members, [N or 1, BLOCK_PAIRS] float32
    if INTERLEAVED:
        offs = tl.arange(0, 2 * BLOCK_PAIRS)[None, :]
        both = tl.load(row_ptrs + offs, mask=mask_row & (offs < HEAD_DIM), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (both.shape[0], BLOCK_PAIRS, 2)))
    else:
        mask = mask_row & (tl.arange(0, BLOCK_PAIRS)[None, :] < HEAD_DIM // 2)
        offs_first, offs_second = _pair_columns(HEAD_DIM, ROTARY_DIM, BLOCK_PAIRS)
        first = tl.load(row_ptrs + offs_first, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(row_ptrs + offs_second, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def store_pairs(
    row_ptrs, mask_row, first, second,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    first = first.to(row_ptrs.dtype.element_ty)
    second = second.to(row_ptrs.dtype.element_ty)
    if INTERLEAVED:
        offs = tl.arange(0, 2 * BLOCK_PAIRS)[None, :]
        both = tl.reshape(tl.join(first, second), (first.shape[0], 2 * BLOCK_PAIRS))
        tl.store(row_ptrs + offs, both, mask=mask_row & (offs < HEAD_DIM))
    else:
        mask = mask_row & (tl.arange(0, BLOCK_PAIRS)[None, :] < HEAD_DIM // 2)
        offs_first, offs_second = _pair_columns(HEAD_DIM, ROTARY_DIM, BLOCK_PAIRS)
        tl.store(row_ptrs + offs_first, first, mask=mask)
        tl.store(row_ptrs + offs_second, second, mask=mask)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    # float32 with the precision of dtype, as if it had been stored and read back
    return x.to(dtype).to(tl.float32)


@triton.jit
def turn(first, second, cos, sin, dtype: tl.constexpr):
    # the rotation of pairs; a stock model rounds each product before it adds them
    y_first = rounded(first * cos, dtype) - rounded(second * sin, dtype)
    y_second = rounded(second * cos, dtype) + rounded(first * sin, dtype)
    return y_first, y_second


@triton.jit
def place_rows(block, blocks_per_batch, n_tokens, N_HEADS: tl.constexpr, ROWS: tl.constexpr):
    # batch, and for ROWS rows of it: index (over the whole tensor), token, head, mask; all [ROWS] but batch
    batch = tl.cast(block // blocks_per_batch, tl.int64)
    row = (block % blocks_per_batch) * ROWS + tl.arange(0, ROWS)
    index = batch * n_tokens * N_HEADS + row
    return batch, index, (row // N_HEADS).to(tl.int64), row % N_HEADS, row < n_tokens * N_HEADS


@triton.jit
def load_angles(
    tables, strides, batch, token, mask_row, HAS_POSITIONS: tl.constexpr, HALF: tl.constexpr, BLOCK_PAIRS: tl.constexpr
):  # fmt: skip
    # tables: cos, sin, position_ids; strides: batch and token stride of cos and sin, then those of position_ids.
    # The second half of a table row repeats the first and is not read. token, mask_row [ROWS]
    if HAS_POSITIONS:
        position = tl.load(tables[2] + batch * strides[2] + token * strides[3], mask=mask_row, other=0)
        entry = position.to(tl.int64) * strides[1]
    else:
        entry = batch * strides[0] + token * strides[1]
    offs = tl.arange(0, BLOCK_PAIRS)[None, :]
    mask = mask_row[:, None] & (offs < HALF)
    cos = tl.load(tables[0] + entry[:, None] + offs, mask=mask, other=1.0).to(tl.float32)
    sin = tl.load(tables[1] + entry[:, None] + offs, mask=mask, other=0.0).to(tl.float32)
    return cos, sin


def turn_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, position_ids: Tensor | None) -> Tensor:
    """The rotation in torch: x [B, S, H, E] -> float32, each product rounded to the promoted dtype of x and cos."""
    dtype = torch.promote_types(x.dtype, cos.dtype)
    cos, sin = (table.float() if position_ids is None else table[position_ids].float() for table in (cos, sin))
    half = cos.shape[-1] // 2
    cos, sin = cos[..., None, :half], sin[..., None, :half]
    rotary, passed = x.float()[..., : 2 * half], x.float()[..., 2 * half :]
    first, second = (rotary[..., 0::2], rotary[..., 1::2]) if interleaved else rotary.chunk(2, dim=-1)

    def product(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).to(dtype).float()

    turned = (product(first, cos) - product(second, sin), product(second, cos) + product(first, sin))
    together = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((together, passed), -1)
