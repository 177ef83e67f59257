"""Causal attention in Triton, for what no library has: soft-capped scores, and windows or packed rows in float32 or at
head sizes that the libraries refuse.

    s = scale * q kᵀ, or softcap * tanh(scale * q kᵀ / softcap)        o = softmax(s + mask) v

Dao 2023, arXiv:2307.08691; soft-capping: Gemma Team 2024, arXiv:2408.00118. Scores, softmax statistics and sums are
float32, probabilities are rounded to the input dtype before the product with v, and memory is O(S). Saved for the
backward: q, k, v, o and one float32 log-sum-exp a query. The backward (`_attention_triton_bwd`) has no atomics: equal
inputs give equal bits.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastlm_kernels._attention_tiles import dot, first_seen, kernel, load_tile, store_tile, tanh, tile_range
from fastlm_kernels._attention_triton_bwd import _attention_bwd_dkdv_kernel, _attention_bwd_dq_kernel
from fastlm_kernels._case import Build, build
from fastlm_kernels._launch import capability, next_power_of_2, tl, triton

# B batch, S queries of a row, Skv keys of a row, H query heads, K key/value heads, E head size; M queries, N keys of a tile
# older chips have no tensor-core product in Triton: every tile would spill
MIN_CAPABILITY = (8, 0)


@kernel
def _attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, cu_ptr, out_ptr, lse_ptr,
    stride_q_batch, stride_q_token, stride_q_head, stride_k_batch, stride_k_token, stride_k_head,
    stride_v_batch, stride_v_token, stride_v_head, stride_out_batch, stride_out_token, stride_out_head,
    n_queries, n_keys, n_sequences, search_steps, window, inner, outer,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
    STAGES: tl.constexpr, IS_PACKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    FAST_TANH: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    # the blocks with the most keys first
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    q_ptr += batch * stride_q_batch + head * stride_q_head
    k_ptr += batch * stride_k_batch + head // GROUP * stride_k_head
    v_ptr += batch * stride_v_batch + head // GROUP * stride_v_head
    q = load_tile(q_ptr, row, n_queries, stride_q_token, HEAD_DIM, BLOCK_M, BLOCK_E)

    rows = row + tl.arange(0, BLOCK_M)
    position = rows + (n_keys - n_queries)
    low = first_seen(position, n_keys, cu_ptr, n_sequences, search_steps, window, IS_PACKED, HAS_WINDOW)
    diagonal = row + (n_keys - n_queries) + 1
    start, n_tiles, middle, middle_end = tile_range(
        tl.min(low), tl.minimum(n_keys, diagonal + BLOCK_M - 1), tl.max(low), diagonal, BLOCK_N
    )
    acc = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    # finite, since a row may see nothing of the first tiles, and -inf less -inf is no number
    highest = tl.full((BLOCK_M,), -1e30, tl.float32)
    for tile in tl.range(0, n_tiles, num_stages=STAGES):
        key = start + tile * BLOCK_N
        k = load_tile(k_ptr, key, n_keys, stride_k_token, HEAD_DIM, BLOCK_N, BLOCK_E)
        scores = dot(q, tl.trans(k), None, PRECISION, UPCAST)  # [M, N]
        if HAS_SOFTCAP:
            scores = tanh(scores * inner, FAST_TANH)
        scores = scores * outer
        if (key < middle) | (key >= middle_end):
            keys = key + tl.arange(0, BLOCK_N)
            seen = keys[None, :] <= position[:, None]
            if IS_PACKED or HAS_WINDOW:
                seen = seen & (keys[None, :] >= low[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        p = tl.exp2(scores - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        highest = new_highest
        total = total * shrink + tl.sum(p, axis=1)
        v = load_tile(v_ptr, key, n_keys, stride_v_token, HEAD_DIM, BLOCK_N, BLOCK_E)
        acc = dot(p.to(v.dtype), v, acc * shrink[:, None], PRECISION, UPCAST)
    statistics = (batch * tl.num_programs(1) + head) * n_queries + rows
    # from powers of 2 to powers of e; before the output, whose stores would make registers for it spill in the loop
    tl.store(lse_ptr + statistics, (highest + tl.log2(total)) * 0.6931471805599453, mask=rows < n_queries)
    out_ptr += batch * stride_out_batch + head * stride_out_head
    store_tile(out_ptr, row, n_queries, stride_out_token, acc / total[:, None], HEAD_DIM, BLOCK_M, BLOCK_E)


@dataclass(frozen=True)
class Tiles:
    """Launch of one kernel: queries and keys of a tile, warps, and how many tiles are loaded ahead."""

    block_m: int
    block_n: int
    num_warps: int
    stages: int


# Per kernel, the tiles for head sizes up to 64, 128 and 256: the largest that fit the registers and the shared memory.
# A warp group's product has at least 64 rows, so the eight warps of "wgmma" get 128 where registers allow.
_TILES: dict[str, dict[str, tuple[Tiles, ...]]] = {
    "wgmma": {
        "fwd": (Tiles(128, 128, 8, 2), Tiles(128, 128, 8, 2), Tiles(128, 64, 8, 2)),
        "dq": (Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 2)),
        "dkdv": (Tiles(64, 128, 8, 2), Tiles(32, 128, 8, 2), Tiles(32, 64, 8, 2)),
    },
    "tcgen05": {
        "fwd": (Tiles(128, 128, 8, 2), Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 2)),
        "dq": (Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 1)),
        "dkdv": (Tiles(64, 128, 8, 2), Tiles(32, 128, 8, 2), Tiles(32, 64, 8, 2)),
    },
    "mma": {
        "fwd": (Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 2), Tiles(64, 32, 8, 2)),
        "dq": (Tiles(64, 32, 4, 2), Tiles(64, 64, 8, 2), Tiles(64, 16, 8, 2)),
        "dkdv": (Tiles(32, 64, 4, 2), Tiles(32, 64, 8, 2), Tiles(32, 32, 8, 1)),
    },
    "float32": {
        "fwd": (Tiles(64, 32, 8, 1), Tiles(32, 16, 8, 1)),
        "dq": (Tiles(32, 32, 4, 1), Tiles(16, 32, 8, 1)),
        "dkdv": (Tiles(16, 32, 4, 1), Tiles(16, 16, 8, 1)),
    },
}
# small ones, so that the few tokens of a test fill several
_INTERPRETER_TILES = Tiles(32, 16, 4, 1)


def largest_head_size(dtype: torch.dtype) -> int:
    """A wider float32 head does not fit the registers beside the three products that stand for one."""
    return 128 if dtype is torch.float32 else 256


def _block_e(head_size: int) -> int:
    return max(16, next_power_of_2(head_size))


def _tiles(name: str, cc: tuple[int, int] | None, head_size: int, dtype: torch.dtype) -> Tiles:
    """The tiles of a kernel, "fwd", "dq" or "dkdv". cc is None in the interpreter."""
    if cc is None:
        return _INTERPRETER_TILES
    chip = {9: "wgmma", 10: "tcgen05", 11: "tcgen05"}.get(cc[0], "mma")
    tiles = _TILES["float32" if dtype is torch.float32 else chip][name]
    return tiles[max(0, _block_e(head_size).bit_length() - 7)]


def _constants(
    cc: tuple[int, int] | None, dtype: torch.dtype, tiles: Tiles, head_size: int, group: int,
    is_packed: bool, has_window: bool, has_softcap: bool,
) -> dict[str, Any]:  # fmt: skip
    """The compile-time arguments that the three kernels share."""
    return dict(
        GROUP=group, HEAD_DIM=head_size, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        BLOCK_E=_block_e(head_size), STAGES=tiles.stages,
        IS_PACKED=is_packed, HAS_WINDOW=has_window, HAS_SOFTCAP=has_softcap,
        FAST_TANH=cc is not None and dtype is not torch.float32,
        # three products in tensor-float-32 stand for one in float32
        PRECISION="ieee" if cc is None else "tf32x3",
        UPCAST=cc is None,
    )  # fmt: skip


@dataclass(frozen=True)
class _Launch:
    """What the three kernels are given beside their tensors and tiles."""

    cc: tuple[int, int] | None
    numbers: tuple[int, ...]
    inner: float
    outer: float
    facts: tuple[int, int, bool, bool, bool]

    def options(self, q: Tensor, tiles: Tiles) -> dict[str, Any]:
        constants = _constants(self.cc, q.dtype, tiles, *self.facts)
        return dict(constants, num_warps=tiles.num_warps, enable_fp_fusion=True)


def _launch(
    q: Tensor, k: Tensor, scale: float, window: int | None, softcap: float | None, cu_seqlens: Tensor | None
) -> _Launch:
    n_sequences = 0 if cu_seqlens is None else len(cu_seqlens) - 1
    return _Launch(
        capability(q.device.index) if q.is_cuda else None,
        (q.shape[1], k.shape[1], n_sequences, max(0, n_sequences - 1).bit_length(), window or 0),
        1.0 if softcap is None else scale / softcap,
        (scale if softcap is None else softcap) * math.log2(math.e),
        (q.shape[3], q.shape[2] // k.shape[2], cu_seqlens is not None, window is not None, softcap is not None),
    )


def triton_attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention; the last query stands at the last key, or each sequence attends to itself.

    Args:
        q: [B, S, H, E], float16, bfloat16 or float32, any strides with a unit last one.
        k, v: [B, Skv, K, E], S <= Skv, likewise.
        scale: factor of the scores.
        window: keys that a query sees, its own included.
        softcap: the bound of the scores, above 0.
        cu_seqlens: [n + 1] int32, where the sequences of the one row start (B == 1, S == Skv).

    Returns:
        out [B, S, H, E] in q.dtype and the natural log-sum-exp of the scores, [B, H, S] float32.
    """
    batch, n_queries, n_heads, head_size = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, n_heads, n_queries), dtype=torch.float32, device=q.device)
    launch = _launch(q, k, scale, window, softcap, cu_seqlens)
    tiles = _tiles("fwd", launch.cc, head_size, q.dtype)
    if q.numel():
        _attention_fwd_kernel[(triton.cdiv(n_queries, tiles.block_m), n_heads, batch)](
            q, k, v, lse if cu_seqlens is None else cu_seqlens, out, lse,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
            *launch.numbers, launch.inner, launch.outer, **launch.options(q, tiles),
        )  # fmt: skip
    return out, lse


def triton_attention_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, contiguous, in q.dtype; arguments as `triton_attention_fwd` took and returned them.

    dout: [B, S, H, E] in q.dtype with a unit last stride.
    """
    batch, n_queries, n_heads, head_size = q.shape
    n_keys, n_kv_heads = k.shape[1:3]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta = torch.empty_like(lse)
    launch = _launch(q, k, scale, window, softcap, cu_seqlens)
    cu = lse if cu_seqlens is None else cu_seqlens
    if not q.numel():
        return dq, dk.zero_(), dv.zero_()
    tiles = _tiles("dq", launch.cc, head_size, q.dtype)
    _attention_bwd_dq_kernel[(triton.cdiv(n_queries, tiles.block_m), n_heads, batch)](
        q, k, v, out, dout, lse, cu, dq, delta,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *dout.stride()[:3], *dq.stride()[:3],
        *launch.numbers, scale, launch.inner, launch.outer, **launch.options(q, tiles),
    )  # fmt: skip
    tiles = _tiles("dkdv", launch.cc, head_size, q.dtype)
    _attention_bwd_dkdv_kernel[(triton.cdiv(n_keys, tiles.block_n), n_kv_heads, batch)](
        q, k, v, dout, lse, delta, cu, dk, dv,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3], *dk.stride()[:3], *dv.stride()[:3],
        *launch.numbers, scale, launch.inner, launch.outer, **launch.options(q, tiles),
    )  # fmt: skip
    return dq, dk, dv


class TritonAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens, scale, window, softcap):  # type: ignore[override]
        out, lse = triton_attention_fwd(q, k, v, scale, window, softcap, cu_seqlens)
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens)
        ctx.numbers = scale, window, softcap
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):  # type: ignore[override]
        q, k, v, out, lse, cu_seqlens = ctx.saved_tensors
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        scale, window, softcap = ctx.numbers
        gradients = triton_attention_bwd(dout, q, k, v, out, lse, scale, window, softcap, cu_seqlens)
        return *gradients, None, None, None, None


_TYPES = dict.fromkeys(("lse_ptr", "delta_ptr"), "*fp32") | {"cu_ptr": "*i32"} | dict.fromkeys(
    ("scale", "inner", "outer"), "fp32"
)  # fmt: skip


def builds(cc: tuple[int, int], dtype: torch.dtype) -> list[Build]:
    """The launches to assemble ahead of time: all that can be asked for at once, at each size of tiles.

    8.6, with the tiles and the shared memory of 8.9, takes the widest heads alone; 9.0 also an odd head size, and the
    widest ones with a window and a softcap or packed alone, whose registers are the scarcest.
    """
    if cc < MIN_CAPABILITY:
        return []
    # packed, windowed, capped
    everything = (True, True, True)
    asked = [(256, everything)]
    if cc != (8, 6):
        asked += [(64, everything), (128, everything)]
    if cc == (9, 0):
        asked += [(80, (False, False, False)), (256, (True, False, False)), (256, (False, True, True))]
    if dtype is torch.float32:
        asked = [(head_size, asks) for head_size, asks in asked if head_size <= largest_head_size(dtype)]
    found = []
    kernels = {"fwd": _attention_fwd_kernel, "dq": _attention_bwd_dq_kernel, "dkdv": _attention_bwd_dkdv_kernel}
    for (name, function), (head_size, asks) in itertools.product(kernels.items(), asked):
        tiles = _tiles(name, cc, head_size, dtype)
        constants = _constants(cc, dtype, tiles, head_size, 2, *asks)
        found.append(build(function, dtype, constants, tiles.num_warps, _TYPES))
    return found
