"""Device code of layer_norm's backward for rows longer than registers hold, and the load that all its kernels share."""

from __future__ import annotations

from fastlm_kernels._launch import tl, triton


@triton.jit
def load_rows(ptr, stride_row, stride_head, row, offs_d, mask):
    # of head program_id(1): row, [BLOCK_T, 1] or a scalar, at offs_d -> float32
    head = tl.program_id(1).to(tl.int64)
    return tl.load(ptr + row * stride_row + head * stride_head + offs_d, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def layer_norm_bwd_long_kernel(
    dy_ptr, dh_ptr, h_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr,
    stride_dy_row, stride_dy_head, stride_dh_row, stride_dh_head, stride_h_row, stride_h_head, n_cols,
    HAS_DH: tl.constexpr, HAS_WEIGHT: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # dx of one row that does not fit in registers: read once for its averages and again, from cache, for the gradient
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    out_row = row * tl.num_programs(1) + head
    mean, rstd = tl.load(mean_ptr + out_row), tl.load(rstd_ptr + out_row)
    total = tl.zeros((BLOCK_D,), tl.float32)
    total_along = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, n_cols, BLOCK_D):
        offs_d = start + tl.arange(0, BLOCK_D)
        mask_d = offs_d < n_cols
        scaled = load_rows(dy_ptr, stride_dy_row, stride_dy_head, row, offs_d, mask_d)
        if HAS_WEIGHT:
            scaled *= tl.load(weight_ptr + head * n_cols + offs_d, mask=mask_d, other=0.0).to(tl.float32)
        total += scaled
        total_along += scaled * ((load_rows(h_ptr, stride_h_row, stride_h_head, row, offs_d, mask_d) - mean) * rstd)
    average, along = tl.sum(total, axis=0) / n_cols, tl.sum(total_along, axis=0) / n_cols
    for start in range(0, n_cols, BLOCK_D):
        offs_d = start + tl.arange(0, BLOCK_D)
        mask_d = offs_d < n_cols
        scaled = load_rows(dy_ptr, stride_dy_row, stride_dy_head, row, offs_d, mask_d)
        if HAS_WEIGHT:
            scaled *= tl.load(weight_ptr + head * n_cols + offs_d, mask=mask_d, other=0.0).to(tl.float32)
        normed = (load_rows(h_ptr, stride_h_row, stride_h_head, row, offs_d, mask_d) - mean) * rstd
        dx = rstd * (scaled - average - normed * along)
        if HAS_DH:
            dx += load_rows(dh_ptr, stride_dh_row, stride_dh_head, row, offs_d, mask_d)
        tl.store(dx_ptr + out_row * n_cols + offs_d, dx.to(dx_ptr.dtype.element_ty), mask=mask_d)


@triton.jit
def layer_norm_sums_kernel(
    dy_ptr, h_ptr, mean_ptr, rstd_ptr, dweight_ptr, dbias_ptr,
    stride_dy_row, stride_dy_head, stride_h_row, stride_h_head, n_rows, n_cols,
    HAS_DWEIGHT: tl.constexpr, HAS_DBIAS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # for rows too long for the sums in _layer_norm_bwd_kernel: program (i, head, j) sums rows i, i + programs, ... of column
    # block j
    head, n_heads = tl.program_id(1), tl.num_programs(1)
    offs_d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = offs_d < n_cols
    dweight = tl.zeros((BLOCK_D,), tl.float32)
    dbias = tl.zeros((BLOCK_D,), tl.float32)
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        row_64 = tl.cast(row, tl.int64)
        dy = load_rows(dy_ptr, stride_dy_row, stride_dy_head, row_64, offs_d, mask_d)
        if HAS_DWEIGHT:
            h = load_rows(h_ptr, stride_h_row, stride_h_head, row_64, offs_d, mask_d)
            out_row = row_64 * n_heads + head
            dweight += dy * ((h - tl.load(mean_ptr + out_row)) * tl.load(rstd_ptr + out_row))
        if HAS_DBIAS:
            dbias += dy
    sum_offs = (tl.program_id(0).to(tl.int64) * n_heads + head) * n_cols + offs_d
    if HAS_DWEIGHT:
        tl.store(dweight_ptr + sum_offs, dweight, mask=mask_d)
    if HAS_DBIAS:
        tl.store(dbias_ptr + sum_offs, dbias, mask=mask_d)
