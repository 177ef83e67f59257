"""Backward kernels of the Triton attention (`_attention_triton` has the forward and the launchers).

    p = exp(s - lse)    dv = pᵀ do    ds = p * (do vᵀ - delta), delta = rowsum(o * do)    dq = scale * ds k, dk = scale * dsᵀ q

with ds times 1 - tanh² under a softcap. Dao et al. 2022, arXiv:2205.14135. One kernel loops over the keys of a block
of queries (and makes delta), one over the queries, of all heads of the group, of a block of keys, so that nothing is
summed by atomics. p and ds are rounded to the input dtype before their products, sums are float32.
"""

from __future__ import annotations

from fastlm_kernels._attention_tiles import (
    dot,
    first_seen,
    kernel,
    load_tile,
    seen_before,
    store_tile,
    tanh,
    tile_range,
)  # fmt: skip
from fastlm_kernels._launch import tl

# B batch, S queries of a row, H query heads, K key/value heads, E head size; M queries, N keys of a tile


@kernel
def _attention_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr, lse_ptr, cu_ptr, dq_ptr, delta_ptr,
    stride_q_batch, stride_q_token, stride_q_head, stride_k_batch, stride_k_token, stride_k_head,
    stride_v_batch, stride_v_token, stride_v_head, stride_out_batch, stride_out_token, stride_out_head,
    stride_dout_batch, stride_dout_token, stride_dout_head, stride_dq_batch, stride_dq_token, stride_dq_head,
    n_queries, n_keys, n_sequences, search_steps, window, scale, inner, outer,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
    STAGES: tl.constexpr, IS_PACKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    FAST_TANH: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    # the blocks with the most keys first
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    q_ptr += batch * stride_q_batch + head * stride_q_head
    out_ptr += batch * stride_out_batch + head * stride_out_head
    dout_ptr += batch * stride_dout_batch + head * stride_dout_head
    k_ptr += batch * stride_k_batch + head // GROUP * stride_k_head
    v_ptr += batch * stride_v_batch + head // GROUP * stride_v_head
    rows = row + tl.arange(0, BLOCK_M)
    statistics = (batch * tl.num_programs(1) + head) * n_queries + rows
    q = load_tile(q_ptr, row, n_queries, stride_q_token, HEAD_DIM, BLOCK_M, BLOCK_E)
    out = load_tile(out_ptr, row, n_queries, stride_out_token, HEAD_DIM, BLOCK_M, BLOCK_E)
    dout = load_tile(dout_ptr, row, n_queries, stride_dout_token, HEAD_DIM, BLOCK_M, BLOCK_E)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), axis=1)
    tl.store(delta_ptr + statistics, delta, mask=rows < n_queries)
    lse = tl.load(lse_ptr + statistics, mask=rows < n_queries, other=0.0) * 1.4426950408889634

    position = rows + (n_keys - n_queries)
    low = first_seen(position, n_keys, cu_ptr, n_sequences, search_steps, window, IS_PACKED, HAS_WINDOW)
    diagonal = row + (n_keys - n_queries) + 1
    start, n_tiles, middle, middle_end = tile_range(
        tl.min(low), tl.minimum(n_keys, diagonal + BLOCK_M - 1), tl.max(low), diagonal, BLOCK_N
    )
    dq = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    for tile in tl.range(0, n_tiles, num_stages=STAGES):
        key = start + tile * BLOCK_N
        k = load_tile(k_ptr, key, n_keys, stride_k_token, HEAD_DIM, BLOCK_N, BLOCK_E)
        v = load_tile(v_ptr, key, n_keys, stride_v_token, HEAD_DIM, BLOCK_N, BLOCK_E)
        scores = dot(q, tl.trans(k), None, PRECISION, UPCAST)  # [M, N]
        if HAS_SOFTCAP:
            scores = tanh(scores * inner, FAST_TANH)
        p = tl.exp2(scores * outer - lse[:, None])
        if (key < middle) | (key >= middle_end):
            keys = key + tl.arange(0, BLOCK_N)
            seen = keys[None, :] <= position[:, None]
            if IS_PACKED or HAS_WINDOW:
                seen = seen & (keys[None, :] >= low[:, None])
            p = tl.where(seen, p, 0.0)
        dscores = p * (dot(dout, tl.trans(v), None, PRECISION, UPCAST) - delta[:, None])
        if HAS_SOFTCAP:
            dscores *= 1.0 - scores * scores
        dq = dot(dscores.to(k.dtype), k, dq, PRECISION, UPCAST)
    dq_ptr += batch * stride_dq_batch + head * stride_dq_head
    store_tile(dq_ptr, row, n_queries, stride_dq_token, dq * scale, HEAD_DIM, BLOCK_M, BLOCK_E)


@kernel
def _attention_bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, cu_ptr, dk_ptr, dv_ptr,
    stride_q_batch, stride_q_token, stride_q_head, stride_k_batch, stride_k_token, stride_k_head,
    stride_v_batch, stride_v_token, stride_v_head, stride_dout_batch, stride_dout_token, stride_dout_head,
    stride_dk_batch, stride_dk_token, stride_dk_head, stride_dv_batch, stride_dv_token, stride_dv_head,
    n_queries, n_keys, n_sequences, search_steps, window, scale, inner, outer,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
    STAGES: tl.constexpr, IS_PACKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    FAST_TANH: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    # the first keys are seen by the most queries
    key = tl.program_id(0) * BLOCK_N
    kv_head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    k_ptr += batch * stride_k_batch + kv_head * stride_k_head
    v_ptr += batch * stride_v_batch + kv_head * stride_v_head
    k = load_tile(k_ptr, key, n_keys, stride_k_token, HEAD_DIM, BLOCK_N, BLOCK_E)
    v = load_tile(v_ptr, key, n_keys, stride_v_token, HEAD_DIM, BLOCK_N, BLOCK_E)

    shift = n_keys - n_queries
    keys = key + tl.arange(0, BLOCK_N)
    high = seen_before(keys, n_keys, cu_ptr, n_sequences, search_steps, window, IS_PACKED, HAS_WINDOW)
    start, n_tiles, middle, middle_end = tile_range(
        tl.maximum(0, key - shift), tl.max(high) - shift, tl.maximum(0, key + BLOCK_N - 1 - shift), tl.min(high) - shift,
        BLOCK_M,
    )  # fmt: skip
    dk = tl.zeros((BLOCK_N, BLOCK_E), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_E), tl.float32)
    # the tiles of one head of the group after those of another
    for tile in tl.range(0, GROUP * n_tiles, num_stages=STAGES):
        head = kv_head * GROUP + tile // n_tiles
        row = start + tile % n_tiles * BLOCK_M
        rows = row + tl.arange(0, BLOCK_M)
        statistics = (batch * tl.num_programs(1) * GROUP + head) * n_queries + rows
        q = load_tile(
            q_ptr + batch * stride_q_batch + head * stride_q_head, row, n_queries, stride_q_token,
            HEAD_DIM, BLOCK_M, BLOCK_E,
        )  # fmt: skip
        dout = load_tile(
            dout_ptr + batch * stride_dout_batch + head * stride_dout_head, row, n_queries, stride_dout_token,
            HEAD_DIM, BLOCK_M, BLOCK_E,
        )  # fmt: skip
        lse = tl.load(lse_ptr + statistics, mask=rows < n_queries, other=0.0) * 1.4426950408889634
        scores = dot(k, tl.trans(q), None, PRECISION, UPCAST)  # [N, M]
        if HAS_SOFTCAP:
            scores = tanh(scores * inner, FAST_TANH)
        p = tl.exp2(scores * outer - lse[None, :])
        if (row < middle) | (row >= middle_end):
            position = rows + shift
            seen = position[None, :] >= keys[:, None]
            if IS_PACKED or HAS_WINDOW:
                seen = seen & (position[None, :] < high[:, None])
            p = tl.where(seen, p, 0.0)
        dv = dot(p.to(q.dtype), dout, dv, PRECISION, UPCAST)
        delta = tl.load(delta_ptr + statistics, mask=rows < n_queries, other=0.0)
        dscores = p * (dot(v, tl.trans(dout), None, PRECISION, UPCAST) - delta[None, :])
        if HAS_SOFTCAP:
            dscores *= 1.0 - scores * scores
        dk = dot(dscores.to(q.dtype), q, dk, PRECISION, UPCAST)
    dk_ptr += batch * stride_dk_batch + kv_head * stride_dk_head
    dv_ptr += batch * stride_dv_batch + kv_head * stride_dv_head
    store_tile(dk_ptr, key, n_keys, stride_dk_token, dk * scale, HEAD_DIM, BLOCK_N, BLOCK_E)
    store_tile(dv_ptr, key, n_keys, stride_dv_token, dv, HEAD_DIM, BLOCK_N, BLOCK_E)
