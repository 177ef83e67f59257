"""Device code that the Triton attention kernels share: tiles, scores, and which tiles a window, a sequence or causality hides.

A query's position counts in keys: row i of the queries stands at i + n_keys - n_queries. Of a block of queries or keys,
the tiles that hold anything seen form one range, in whose middle all is seen and nothing is masked.
"""

from __future__ import annotations

import functools

from fastlm_kernels._launch import HAS_TRITON, tl, triton

# M queries of a tile, N keys of a tile, E head size
_NUMBERS = ("n_queries", "n_keys", "n_sequences", "search_steps", "window")
# the decorator of the kernels: lengths change with every batch, and none gets a compilation of its own
kernel = functools.partial(triton.jit, do_not_specialize=_NUMBERS) if HAS_TRITON else triton.jit


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    # Triton's interpreter multiplies the bit patterns of bfloat16
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def tanh(x, FAST: tl.constexpr):
    # FAST: one instruction, relative error 2**-11: less than half precision loses on the scores
    if FAST:
        y = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        # near zero the quotient loses digits that the series keeps
        square = x * x
        series = -17.0 / 315.0 + square * (62.0 / 2835.0)
        series = x + x * square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * series))
        y = tl.where(tl.abs(x) < 0.25, series, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))
    return y


@triton.jit
def _tile(ptr, row, n_rows, stride_row, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr):
    offs = tl.arange(0, ROWS)
    offs_e = tl.arange(0, BLOCK_E)
    ptrs = ptr + tl.cast(row, tl.int64) * stride_row + (offs[:, None] * stride_row + offs_e[None, :])
    mask = (row + offs < n_rows)[:, None]
    if HEAD_DIM != BLOCK_E:
        mask = mask & (offs_e < HEAD_DIM)[None, :]
    return ptrs, mask


@triton.jit
def load_tile(ptr, row, n_rows, stride_row, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr):
    # [ROWS, BLOCK_E] from `row` on, zero past n_rows and past the head size
    ptrs, mask = _tile(ptr, row, n_rows, stride_row, HEAD_DIM, ROWS, BLOCK_E)
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, row, n_rows, stride_row, tile, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr):
    ptrs, mask = _tile(ptr, row, n_rows, stride_row, HEAD_DIM, ROWS, BLOCK_E)
    tl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sequence(cu_ptr, token, n_sequences, search_steps):
    # where the sequence of each token starts and ends: it is the last one that starts at the token or before
    first = tl.zeros_like(token)
    after = first + n_sequences
    for _ in range(search_steps):
        middle = (first + after) // 2
        is_right = tl.load(cu_ptr + middle) <= token
        first = tl.where(is_right, middle, first)
        after = tl.where(is_right, after, middle)
    return tl.load(cu_ptr + first), tl.load(cu_ptr + first + 1)


@triton.jit
def first_seen(position, n_keys, cu_ptr, n_sequences, search_steps, window, IS_PACKED: tl.constexpr,
               HAS_WINDOW: tl.constexpr):  # fmt: skip
    # the first key that each query position sees; positions past the end see what the last one sees
    position = tl.minimum(position, n_keys - 1)
    low = tl.zeros_like(position)
    if IS_PACKED:
        low, _ = _sequence(cu_ptr, position, n_sequences, search_steps)
    if HAS_WINDOW:
        low = tl.maximum(low, position - window + 1)
    return low


@triton.jit
def seen_before(key, n_keys, cu_ptr, n_sequences, search_steps, window, IS_PACKED: tl.constexpr,
                HAS_WINDOW: tl.constexpr):  # fmt: skip
    # the first query position that no longer sees each key
    key = tl.minimum(key, n_keys - 1)
    high = tl.zeros_like(key) + n_keys
    if IS_PACKED:
        _, high = _sequence(cu_ptr, key, n_sequences, search_steps)
    if HAS_WINDOW:
        high = tl.minimum(high, key + window)
    return high


@triton.jit
def tile_range(first, last, full_first, full_last, BLOCK: tl.constexpr):
    # The tiles over [first, last), each from a multiple of BLOCK on, where all is seen in [full_first, full_last).
    # -> start of the first tile, number of tiles, and [middle, middle_end): the starts of tiles that need no mask
    start = first // BLOCK * BLOCK
    n_tiles = tl.maximum(0, last - start + BLOCK - 1) // BLOCK
    middle = (full_first + BLOCK - 1) // BLOCK * BLOCK
    return start, n_tiles, middle, full_last // BLOCK * BLOCK
