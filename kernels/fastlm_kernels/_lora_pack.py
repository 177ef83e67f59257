"""Adapters of projections that share their input, laid out for one GEMM: A below each other, s B on a diagonal, zeros elsewhere.

One launch where the parts would be a dozen small copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastlm_kernels._case import build
from fastlm_kernels._launch import runs_triton, tl, triton

# N rows of all B, K columns of each A, R rank of all adapters with the zeros that fill it up
MAX_ADAPTERS = 3
BLOCK = 64
_NUM_WARPS = 4


@triton.jit
def _load_part(ptr, rows, cols, first_row, first_col, n_rows, n_cols):
    """The values of a contiguous [n_rows, n_cols] that stands at (first_row, first_col) of a larger one; zero outside."""
    row, col = rows - first_row, cols - first_col
    inside = ((row >= 0) & (row < n_rows))[:, None] & ((col >= 0) & (col < n_cols))[None, :]
    offsets = row.to(tl.int64)[:, None] * n_cols + col[None, :]
    return tl.load(ptr + offsets, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _lora_pack_kernel(
    a_0_ptr, a_1_ptr, a_2_ptr, b_0_ptr, b_1_ptr, b_2_ptr, a_out_ptr, b_out_ptr,
    rank_0, rank_1, rank_2, first_0, first_1, first_2, width_0, width_1, width_2, scaling_0, scaling_1, scaling_2,
    stride_a_row, stride_b_row, n_cols, n_rows, n_ranks, a_programs, rank_blocks,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    if program < a_programs:
        rows, cols = program % rank_blocks * BLOCK + offs, program // rank_blocks * BLOCK + offs
        value = _load_part(a_0_ptr, rows, cols, 0, 0, rank_0, n_cols)
        if COUNT > 1:
            value += _load_part(a_1_ptr, rows, cols, rank_0, 0, rank_1, n_cols)
        if COUNT > 2:
            value += _load_part(a_2_ptr, rows, cols, rank_0 + rank_1, 0, rank_2, n_cols)
        places = a_out_ptr + rows.to(tl.int64)[:, None] * stride_a_row + cols[None, :]
        tl.store(
            places, value.to(a_out_ptr.dtype.element_ty), mask=(rows < n_ranks)[:, None] & (cols < n_cols)[None, :]
        )
    else:
        tile = program - a_programs
        rows, cols = tile // rank_blocks * BLOCK + offs, tile % rank_blocks * BLOCK + offs
        value = scaling_0 * _load_part(b_0_ptr, rows, cols, first_0, 0, width_0, rank_0)
        if COUNT > 1:
            value += scaling_1 * _load_part(b_1_ptr, rows, cols, first_1, rank_0, width_1, rank_1)
        if COUNT > 2:
            value += scaling_2 * _load_part(b_2_ptr, rows, cols, first_2, rank_0 + rank_1, width_2, rank_2)
        places = b_out_ptr + rows.to(tl.int64)[:, None] * stride_b_row + cols[None, :]
        tl.store(
            places, value.to(b_out_ptr.dtype.element_ty), mask=(rows < n_rows)[:, None] & (cols < n_ranks)[None, :]
        )


def _pack_torch(
    loras: Sequence[tuple[Tensor, Tensor]],
    scalings: Sequence[float],
    rows: Sequence[slice],
    a_out: Tensor,
    b_out: Tensor,
) -> None:
    b_out.zero_()
    stop = 0
    for (a, b), scaling, where in zip(loras, scalings, rows, strict=True):
        start, stop = stop, stop + a.shape[0]
        a_out[start:stop] = a
        torch.mul(b, scaling, out=b_out[where, start:stop])
    a_out[stop:].zero_()


def pack_adapters(
    loras: Sequence[tuple[Tensor, Tensor]],
    scalings: Sequence[float],
    rows: Sequence[slice],
    a_out: Tensor,
    b_out: Tensor,
) -> None:
    """Writes all adapters that share a pass over x into the factors of one product.

    Args:
        loras: (A [R_i, K], B [N_i, R_i]) of each.
        scalings: of each.
        rows: where the outputs of each lie among all N.
        a_out: [R, K], R at least the sum of R_i: receives the A below each other, then zeros.
        b_out: [N, R]: receives s_i B_i at its rows and columns, and zeros elsewhere. Both of unit column stride.
    """
    n_ranks, n_cols = a_out.shape
    n_rows = b_out.shape[0]
    parts = [t for pair in loras for t in pair]
    # float32 adapters under autocast are rounded on the way
    is_plain = parts[0].dtype in (a_out.dtype, torch.float32) and all(
        t.dtype == parts[0].dtype and t.is_contiguous() for t in parts
    )
    if not is_plain or len(loras) > MAX_ADAPTERS or not runs_triton(a_out):
        _pack_torch(loras, scalings, rows, a_out, b_out)
        return
    missing = MAX_ADAPTERS - len(loras)
    a_s, b_s = [a for a, _ in loras] + [None] * missing, [b for _, b in loras] + [None] * missing
    ranks = [a.shape[0] for a, _ in loras] + [0] * missing
    firsts, widths = [r.start for r in rows] + [0] * missing, [r.stop - r.start for r in rows] + [0] * missing
    rank_blocks = -(-n_ranks // BLOCK)
    a_programs, b_programs = rank_blocks * -(-n_cols // BLOCK), rank_blocks * -(-n_rows // BLOCK)
    _lora_pack_kernel[(a_programs + b_programs,)](
        *a_s, *b_s, a_out, b_out, *ranks, *firsts, *widths, *scalings, *[0.0] * missing,
        a_out.stride(0), b_out.stride(0), n_cols, n_rows, n_ranks, a_programs, rank_blocks,
        COUNT=len(loras), BLOCK=BLOCK, num_warps=_NUM_WARPS,
    )  # fmt: skip


def builds(dtype: torch.dtype):
    """What is assembled ahead of time, as `Case.builds` yields it."""
    scalings = dict.fromkeys((f"scaling_{i}" for i in range(MAX_ADAPTERS)), "fp32")
    yield build(_lora_pack_kernel, dtype, dict(COUNT=MAX_ADAPTERS, BLOCK=BLOCK), _NUM_WARPS, scalings)
