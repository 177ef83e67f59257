"""The attention libraries behind one form of call: what each is told, and how rows reach it.

Dense tensors are q [B, S, H, E], k [B, Skv, K, E] and v [B, Skv, K, Ev], packed ones lack B; scores are `scale * q kᵀ`, bounded by
`softcap` where a backend's facts say that it can. Causal masks are aligned to the last key.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastlm_kernels._attention_torch import torch_attention
from fastlm_kernels._attention_triton import TritonAttentionFunction
from fastlm_kernels._sequences import SequenceLayout

# B batch, S queries of a row, Skv keys of a row, H query heads, K key/value heads, E head size, Ev value head size
_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
_SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def sdpa(name: str, q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool, mask: Tensor | None) -> Tensor:
    """q [B, S, H, E], k [B, Skv, K, E], v [B, Skv, K, Ev], mask [B or 1, H or 1, S, Skv] -> [B, S, H, Ev]."""
    groups = q.shape[2] // k.shape[2]
    if name == "efficient" and groups > 1:  # torch 2.11's kernel has no groups of heads
        k, v = (x.unsqueeze(3).expand(-1, -1, -1, groups, -1).flatten(2, 3) for x in (k, v))
    dead = None
    if mask is not None:
        if mask.dtype is not torch.bool:
            mask = mask.to(q.dtype)
        if name == "efficient":  # a query that sees nothing: zero, as torch's other implementations give
            dead = (mask.logical_not() if mask.dtype is torch.bool else mask.isneginf()).all(-1, keepdim=True)
            mask = mask.masked_fill(dead, True if mask.dtype is torch.bool else 0.0)
    forced = sdpa_kernel(_SDPA[name]) if name in _SDPA else contextlib.nullcontext()
    # the result has the dtype of q, also where autocast would lower it
    with forced, torch.autocast(q.device.type, enabled=False):
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, is_causal=is_causal,
            scale=scale, enable_gqa=q.shape[2] != k.shape[2],
        )  # fmt: skip
    if dead is not None:
        out = out.masked_fill(dead, 0.0)
    return out.transpose(1, 2)


def _causal_mask(n_queries: int, n_keys: int, window: int | None, device: torch.device) -> Tensor:
    """[1, 1, S, Skv] bool: key j is seen by query i if i - window < j <= i, counted from the last key."""
    i = torch.arange(n_keys - n_queries, n_keys, device=device)[:, None]
    j = torch.arange(n_keys, device=device)
    seen = j <= i if window is None else (j <= i) & (j > i - window)
    return seen[None, None]


def _causal_sdpa(name: str, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    n_queries, n_keys = q.shape[1], k.shape[1]
    if n_queries == 1 and window is None:
        return sdpa(name, q, k, v, scale, False, None)
    if n_queries == n_keys and (window is None or window >= n_keys):
        return sdpa(name, q, k, v, scale, True, None)
    return sdpa(name, q, k, v, scale, False, _causal_mask(n_queries, n_keys, window, q.device))


@functools.lru_cache(maxsize=16)
def _softcap_functions(softcap: float) -> dict[str, Any]:
    """flash-attn-4's own functions of a softcap, as arguments of its calls.

    Its argument `softcap` makes them anew in every call, and the host hashes each new one by reading its source file,
    which takes longer than a layer's other work; a function that stays keeps its hash.
    """
    from flash_attn.cute.utils import (  # type: ignore[import-not-found,unused-ignore]
        create_softcap_scoremod,
        create_softcap_scoremod_bwd,
    )

    return dict(score_mod=create_softcap_scoremod(softcap), score_mod_bwd=create_softcap_scoremod_bwd(softcap))


def _flash_attention_4(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None, deterministic: bool,
    **lengths: Any,
) -> Tensor:  # fmt: skip
    """[B, S, H, E], or [tokens, H, E] with `lengths`; causal masks are aligned to the last key."""
    from flash_attn.cute import (  # type: ignore[import-not-found,unused-ignore]
        flash_attn_func,
        flash_attn_varlen_func,
    )

    out, _ = (flash_attn_varlen_func if lengths else flash_attn_func)(
        q, k, v, softmax_scale=scale, causal=True, deterministic=deterministic,
        # its window counts the keys to the left of the query's own
        window_size=(None, None) if window is None else (window - 1, 0),
        **({} if softcap is None else _softcap_functions(softcap)), **lengths,
    )  # fmt: skip
    return out


def _torch_varlen(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None,
    cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
) -> Tensor:  # fmt: skip
    """q [tokens, H, E], k and v [key tokens, K, E] -> [tokens, H, E]; causal masks are aligned to the last key."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 takes fewer key/value heads unasked and has no such argument
    groups: dict[str, Any] = {"enable_gqa": True} if _TORCH >= (2, 12) and q.shape[1] != k.shape[1] else {}
    size = (-1, 0) if window is None else (window - 1, 0)
    out = varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, scale=scale, window_size=size, **groups)
    assert isinstance(out, Tensor)  # a tuple only with return_aux
    return out


def packed(
    name: str, q: Tensor, k: Tensor, v: Tensor, scale: float, layout: SequenceLayout, window: int | None,
    softcap: float | None, is_deterministic: bool,
) -> Tensor:  # fmt: skip
    """q [tokens, H, E], k [tokens, K, E], v [tokens, K, Ev] -> [tokens, H, Ev], each sequence for itself."""
    cu, longest = layout.cu_seqlens, layout.max_seqlen
    if name == "flash_attention_4":
        return _flash_attention_4(
            q, k, v, scale, window, softcap, is_deterministic,
            cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest,
        )  # fmt: skip
    if name == "torch_varlen":
        return _torch_varlen(q, k, v, scale, window, cu, cu, longest, longest)
    q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    if name == "triton":
        return TritonAttentionFunction.apply(q, k, v, cu, scale, window, softcap).squeeze(0)
    if name == "torch":
        return torch_attention(q, k, v, scale, window, softcap, layout.sequence_lengths).squeeze(0)
    bounds = itertools.pairwise(itertools.accumulate(layout.sequence_lengths, initial=0))
    # without a token, one empty sequence keeps the result in the graph
    parts = [slice(*bound) for bound in bounds if bound[0] < bound[1]] or [slice(0, 0)]
    outs = [_causal_sdpa(name, q[:, part], k[:, part], v[:, part], scale, window) for part in parts]
    return torch.cat(outs, dim=1).squeeze(0)


def dense(
    name: str, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None,
    is_deterministic: bool,
) -> Tensor:  # fmt: skip
    """q [B, S, H, E], k [B, Skv, K, E], v [B, Skv, K, Ev] -> [B, S, H, Ev], each row for itself, S <= Skv."""
    if name == "flash_attention_4":
        return _flash_attention_4(q, k, v, scale, window, softcap, is_deterministic)
    if name == "triton":
        return TritonAttentionFunction.apply(q, k, v, None, scale, window, softcap)
    if name == "torch":
        return torch_attention(q, k, v, scale, window, softcap)
    if name == "torch_varlen":
        (batch, n_queries), n_keys = q.shape[:2], k.shape[1]
        cu_q = torch.arange(0, (batch + 1) * n_queries, n_queries, dtype=torch.int32, device=q.device)
        cu_k = cu_q
        if n_keys != n_queries:
            cu_k = torch.arange(0, (batch + 1) * n_keys, n_keys, dtype=torch.int32, device=q.device)
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        out = _torch_varlen(q, k, v, scale, window, cu_q, cu_k, n_queries, n_keys)
        return out.unflatten(0, (batch, n_queries))
    return _causal_sdpa(name, q, k, v, scale, window)
