"""Causal attention of decoder models: one entry over the attention libraries that are installed.

    o = softmax(scale * q kᵀ + mask) v

Vaswani et al. 2017, arXiv:1706.03762; without the [S, S] matrix in memory: Dao 2023, arXiv:2307.08691. Every library
used here keeps the softmax statistics in float32 and rounds the probabilities to the input dtype before the product
with v; what is saved for the backward is q, k, v, o and one float32 log-sum-exp a query. Gradients are the libraries'
own autograd.

Which library runs is a pure function of the device, dtype, head sizes, window, layout, mask and installed packages:
`attention_backend` tells it, `BACKENDS` holds the facts that it is decided by.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastlm_kernels._attention_backends import BACKENDS, Call, choose
from fastlm_kernels._case import Case, randn
from fastlm_kernels._launch import capability, check_dtype
from fastlm_kernels._sequences import SequenceLayout, layout_from_cu_seqlens, packed_layout, padded_layout

__all__ = [
    "BACKENDS",
    "SequenceLayout",
    "attention",
    "attention_backend",
    "layout_from_cu_seqlens",
    "packed_layout",
    "padded_layout",
]

# B batch, S queries of a row, Skv keys of a row, H query heads, K key/value heads, E head size, Ev value head size
_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
_SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def _check(
    q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout | None, window: int | None, mask: Tensor | None
) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q must be [B, S, H, E], k [B, Skv, K, E] and v [B, Skv, K, Ev], got {shapes}")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q [B, S, H, E], k [B, Skv, K, E] and v [B, Skv, K, Ev] do not fit each other, got {shapes}")
    batch, n_queries, n_heads, _ = q.shape
    n_keys, n_kv_heads = k.shape[1:3]
    if not n_kv_heads or n_heads % n_kv_heads:
        raise ValueError(f"the query heads must be a multiple of the key/value heads, got {n_heads} and {n_kv_heads}")
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise ValueError(
            "q, k and v must agree in dtype and device, "
            f"got {q.dtype} {q.device}, {k.dtype} {k.device}, {v.dtype} {v.device}"
        )
    if window is not None and window < 1:
        raise ValueError(f"window must be None or at least 1, the key of the query's own position, got {window}")
    if mask is not None and layout is not None:
        raise ValueError("give a mask or a layout, not both: a layout already says what each token sees")
    if mask is not None:
        wanted = ((1, batch), (1, n_heads), (n_queries,), (n_keys,))
        if mask.ndim != 4 or any(got not in allowed for got, allowed in zip(mask.shape, wanted, strict=True)):
            raise ValueError(f"mask must be [{batch}, 1, {n_queries}, {n_keys}], got {tuple(mask.shape)}")
        if mask.dtype is not torch.bool and not mask.is_floating_point():
            raise ValueError(f"mask must be bool (true: sees) or float (added to the scores), got {mask.dtype}")
        return
    if n_queries > n_keys:
        raise ValueError(f"there must be a key for each query, got {n_queries} queries and {n_keys} keys")
    if layout is None:
        return
    if n_queries != n_keys:
        raise ValueError(f"a layout needs as many keys as queries, got {n_keys} and {n_queries}: pass a mask instead")
    if layout.cu_seqlens.device != q.device:
        raise ValueError(f"the layout lies on {layout.cu_seqlens.device}, q on {q.device}")
    if layout.tokens != batch * n_queries and (layout.indices is None or layout.tokens > batch * n_queries):
        raise ValueError(
            f"the layout covers {layout.tokens} tokens, the batch has {batch} x {n_queries}: "
            "without indices it must cover each, with indices at most as many"
        )


def _describe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout | None,
    window: int | None,
    mask: Tensor | None,
    deterministic: bool,
) -> Call:
    _check(q, k, v, layout, window, mask)
    cc = (0, 0)
    if q.is_cuda:
        cc = capability(q.device.index)
        check_dtype(q.dtype, cc)
    elif q.dtype not in BACKENDS["sdpa"].dtypes:
        raise ValueError(f"q, k and v must be floating, got {q.dtype}")
    n_queries, n_keys = q.shape[1], k.shape[1]
    longest = layout.max_seqlen if layout is not None else n_keys
    hides = window is not None and window < longest and mask is None and n_queries > 1
    if not q.numel() or not k.numel() or (layout is not None and not layout.tokens):
        form = "empty"
    elif mask is not None:
        form = "mask"
    elif layout is not None:
        form = "packed"
    elif n_queries == 1:
        form = "single"
    elif n_queries < n_keys:
        form = "rectangular"
    else:
        form = "window" if hides else "square"
    # under the global flag torch refuses kernels that are not deterministic
    is_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    is_global = torch.are_deterministic_algorithms_enabled() and not is_warning
    return Call(
        form=form,
        is_cuda=q.is_cuda,
        capability=cc,
        dtype=q.dtype,
        head_size=q.shape[3],
        value_head_size=v.shape[3],
        window=window if hides else None,
        is_deterministic=deterministic or is_global,
        is_globally_deterministic=is_global,
    )


def attention_backend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout | None = None,
    window: int | None = None,
    mask: Tensor | None = None,
    deterministic: bool = False,
) -> str:
    """The name of the backend that `attention` runs for these arguments.

    Raises:
        ValueError, TypeError: as `attention`.
    """
    return choose(_describe(q, k, v, layout, window, mask, deterministic), None)


def _sdpa(name: str, q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool, mask: Tensor | None) -> Tensor:
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
    if n_queries == n_keys and (window is None or window >= n_keys):
        return _sdpa(name, q, k, v, scale, True, None)
    return _sdpa(name, q, k, v, scale, False, _causal_mask(n_queries, n_keys, window, q.device))


def _flash_attention_4(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, deterministic: bool, **lengths: Any
) -> Tensor:
    """[B, S, H, E], or [tokens, H, E] with `lengths`; causal masks are aligned to the last key."""
    from flash_attn.cute import (  # type: ignore[import-not-found,unused-ignore]
        flash_attn_func,
        flash_attn_varlen_func,
    )

    out, _ = (flash_attn_varlen_func if lengths else flash_attn_func)(
        q, k, v, softmax_scale=scale, causal=True, deterministic=deterministic,
        # its window counts the keys to the left of the query's own
        window_size=(None, None) if window is None else (window - 1, 0), **lengths,
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


def _packed(
    name: str, q: Tensor, k: Tensor, v: Tensor, scale: float, layout: SequenceLayout, window: int | None,
    is_deterministic: bool,
) -> Tensor:  # fmt: skip
    """q [tokens, H, E], k [tokens, K, E], v [tokens, K, Ev] -> [tokens, H, Ev], each sequence for itself."""
    cu, longest = layout.cu_seqlens, layout.max_seqlen
    if name == "flash_attention_4":
        return _flash_attention_4(
            q, k, v, scale, window, is_deterministic,
            cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest,
        )  # fmt: skip
    if name == "torch_varlen":
        return _torch_varlen(q, k, v, scale, window, cu, cu, longest, longest)
    q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    bounds = itertools.pairwise(itertools.accumulate(layout.sequence_lengths, initial=0))
    # without a token, one empty sequence keeps the result in the graph
    parts = [slice(*bound) for bound in bounds if bound[0] < bound[1]] or [slice(0, 0)]
    outs = [_causal_sdpa(name, q[:, part], k[:, part], v[:, part], scale, window) for part in parts]
    return torch.cat(outs, dim=1).squeeze(0)


class _TakeRows(torch.autograd.Function):
    """x [rows, …] -> x[indices]. The indices differ, so the gradient is a copy, not a sum by atomics."""

    @staticmethod
    def forward(ctx, x, indices):  # type: ignore[override]
        ctx.save_for_backward(indices)
        ctx.rows = x.shape[0]
        return x.index_select(0, indices)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):  # type: ignore[override]
        (indices,) = ctx.saved_tensors
        return dy.new_zeros((ctx.rows, *dy.shape[1:])).index_copy_(0, indices, dy), None


class _PutRows(torch.autograd.Function):
    """y[indices] = x, zero elsewhere: the reverse of _TakeRows."""

    @staticmethod
    def forward(ctx, x, indices, rows):  # type: ignore[override]
        ctx.save_for_backward(indices)
        return x.new_zeros((rows, *x.shape[1:])).index_copy_(0, indices, x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):  # type: ignore[override]
        return dy.index_select(0, ctx.saved_tensors[0]), None, None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    layout: SequenceLayout | None = None,
    window: int | None = None,
    mask: Tensor | None = None,
    deterministic: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Causal attention with groups of query heads that share a key/value head.

    Query i sees key j if i - window < j <= i. Positions count within each sequence of the layout, else within the row;
    with fewer queries than keys, as in decoding through a cache, the last query stands at the last key.

    Args:
        q: [B, S, H, E], float16, bfloat16 or float32, any strides with a unit last one (others are copied).
        k: [B, Skv, K, E] of the same dtype, H a multiple of K.
        v: [B, Skv, K, Ev].
        scale: factor of the scores, usually E ** -0.5.
        layout: the sequences of a packed or padded batch, S == Skv; tokens outside it give zeros and zero gradients.
        window: length of the sliding window, the query's own key included; None sees all earlier keys.
        mask: [B, 1, S, Skv] (B or 1, H or 1 heads) that already holds causality, window and padding: bool, true for
            what is seen, or float, added to the scores. A query that sees nothing gives zeros.
        deterministic: bit-equal gradients between runs; also asked for by torch.use_deterministic_algorithms(True).
        backend: a name of BACKENDS instead of the one that `attention_backend` gives.

    Returns:
        [B, S, H, Ev] in q.dtype.

    Raises:
        ValueError: if shapes, dtypes or devices do not fit each other, mask and layout are both given, the layout does
            not fit the batch, window < 1, or `backend` cannot serve the call.
        TypeError: for a dtype that the GPU's kernels do not take.

    Reference: Vaswani et al. 2017, arXiv:1706.03762; grouped heads: Ainslie et al. 2023, arXiv:2305.13245; sliding
    window: Beltagy et al. 2020, arXiv:2004.05150.
    """
    call = _describe(q, k, v, layout, window, mask, deterministic)
    name = choose(call, backend)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    batch, n_queries = q.shape[:2]
    if layout is not None:
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        if layout.indices is not None:
            q, k, v = (_TakeRows.apply(x, layout.indices) for x in (q, k, v))
        out = _packed(name, q, k, v, scale, layout, call.window, call.is_deterministic)
        if layout.indices is not None:
            out = _PutRows.apply(out, layout.indices, batch * n_queries)
        return out.unflatten(0, (batch, n_queries))
    if mask is not None or call.form == "empty":
        return _sdpa(name, q, k, v, scale, mask is None, mask)
    if n_queries == 1:
        # only the last keys, all of them seen
        seen = slice(None) if window is None else slice(max(0, k.shape[1] - window), None)
        k, v = k[:, seen], v[:, seen]
        if name not in ("flash_attention_4", "torch_varlen"):
            return _sdpa(name, q, k, v, scale, False, None)
    if name == "flash_attention_4":
        return _flash_attention_4(q, k, v, scale, call.window, call.is_deterministic)
    if name == "torch_varlen":
        cu_q, cu_k = (
            torch.arange(0, (batch + 1) * x.shape[1], x.shape[1], dtype=torch.int32, device=x.device) for x in (q, k)
        )
        n_keys = k.shape[1]
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        out = _torch_varlen(q, k, v, scale, call.window, cu_q, cu_k, n_queries, n_keys)
        return out.unflatten(0, (batch, n_queries))
    return _causal_sdpa(name, q, k, v, scale, call.window)


def _seen(n_queries: int, n_keys: int, layout: SequenceLayout | None, window: int | None) -> Tensor:
    """[1, 1, S, Skv] bool, written from the definition: one sequence after the other."""
    seen = torch.zeros(n_queries, n_keys, dtype=torch.bool)
    if layout is None:
        places = [(torch.arange(n_queries), torch.arange(n_keys))]
    else:
        indices = torch.arange(layout.tokens) if layout.indices is None else layout.indices.cpu()
        places = [(part, part) for part in indices.split(layout.sequence_lengths)]
    for queries, keys in places:
        i = torch.arange(len(queries))[:, None] + len(keys) - len(queries)
        j = torch.arange(len(keys))[None, :]
        seen[queries[:, None], keys[None, :]] = (j <= i) & (j > i - (window or len(keys)))
    return seen[None, None]


def _plain(q, k, v, scale, layout, window, mask, core):
    """`core` on repeated heads, packed rows laid out as one, and an additive mask for everything."""
    groups = q.shape[2] // k.shape[2]
    shape = (*q.shape[:3], v.shape[3])
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    if layout is not None:
        q, k, v = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v))
    if mask is None:
        mask = _seen(q.shape[1], k.shape[1], layout, window)
    if mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask.cpu(), float("-inf"))
    mask = mask.to(q)
    # a query that sees nothing gives zeros
    dead = mask.isneginf().all(-1, keepdim=True)
    out = core(*(x.transpose(1, 2) for x in (q, k, v)), scale, mask.masked_fill(dead, 0.0))
    return out.masked_fill(dead, 0.0).transpose(1, 2).reshape(shape)


def attention_reference(q, k, v, scale, *, layout=None, window=None, mask=None, deterministic=False, backend=None):
    def core(q, k, v, scale, mask):
        return (q @ k.mT * scale + mask).softmax(-1) @ v

    return _plain(q, k, v, scale, layout, window, mask, core)


def _eager(q, k, v, scale, *, layout=None, window=None, mask=None, deterministic=False, backend=None):
    # what transformers' default attention runs for these masks
    def core(q, k, v, scale, mask):
        if not q.numel():  # cuDNN, which torch may pick here, gives None for an empty batch
            return (q @ k.mT) @ v
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)

    return _plain(q, k, v, scale, layout, window, mask, core)


def _make(shape, dtype, device, generator):
    """shape: B, S, H, K, E, window (0: none)."""
    batch, n_tokens, n_heads, n_kv_heads, head_size, window = shape
    q, k, v = (
        randn((batch, n_tokens, heads, head_size), dtype, device, generator)
        for heads in (n_heads, n_kv_heads, n_kv_heads)
    )
    return dict(q=q, k=k, v=v, scale=head_size**-0.5, layout=None, window=window or None)


def _make_packed(shape, dtype, device, generator):
    inputs = _make(shape, dtype, device, generator)
    batch, n_tokens = shape[:2]
    # samples of 1, 2, 3, … tokens, the last cut off by the end of the row
    positions = torch.cat([torch.arange(length) for length in range(1, n_tokens + 2)])[:n_tokens]
    return dict(inputs, layout=packed_layout(positions.expand(batch, -1).to(device)))


def _make_padded(shape, dtype, device, generator):
    inputs = _make(shape, dtype, device, generator)
    batch, n_tokens = shape[:2]
    # rows padded left and right in turn, the last row whole
    n_pads = torch.arange(batch, 0, -1) - 1
    places = torch.arange(n_tokens).expand(batch, -1)
    is_right = torch.arange(batch)[:, None] % 2 == 0
    is_real = torch.where(is_right, places < n_tokens - n_pads[:, None], places >= n_pads[:, None])
    return dict(inputs, layout=padded_layout(is_real.to(device)))


def _strided(inputs):
    packed = torch.cat([inputs["q"], inputs["k"], inputs["v"]], dim=2)
    parts = packed.split([inputs[name].shape[2] for name in "qkv"], dim=2)
    return dict(inputs, **dict(zip("qkv", parts, strict=True)))


def _ideal(shape, size):
    batch, n_tokens, n_heads, n_kv_heads, head_size, window = shape
    seen = n_tokens * (n_tokens + 1) / 2
    if window and window < n_tokens:
        seen -= (n_tokens - window) * (n_tokens - window + 1) / 2
    moved = 2.0 * batch * n_tokens * (n_heads + n_kv_heads) * head_size * size
    return moved, 4.0 * batch * n_heads * head_size * seen


def _ideal_backward(shape, size):
    moved, flops = _ideal(shape, size)
    return 2.0 * moved, 2.5 * flops


# few head sizes and group sizes: flash-attn-4 compiles its kernels for each at the first call
_SHAPES = {
    "typical": (2, 24, 4, 2, 64, 0),
    "window": (2, 24, 4, 2, 64, 5),
    "odd": (1, 17, 3, 3, 24, 0),
    "empty": (0, 8, 4, 2, 64, 0),
}
_PACKED_SHAPES = {"typical": (3, 12, 4, 2, 64, 0), "window": (2, 17, 4, 2, 64, 3), "one-row": (1, 9, 4, 2, 64, 0)}

CASE = Case(
    name="attention",
    op=attention,
    reference=attention_reference,
    eager=_eager,
    make=_make,
    shapes=_SHAPES,
    gradients=("q", "k", "v"),
    strided=_strided,
    bench_shapes={
        "B1-S2048-H32-K8-E128": (1, 2048, 32, 8, 128, 0),
        "B2-S2048-H32-K8-E64": (2, 2048, 32, 8, 64, 0),
        "B1-S4096-H32-K8-E128-W1024": (1, 4096, 32, 8, 128, 1024),
    },
    ideal=_ideal,
    ideal_backward=_ideal_backward,
)

PACKED_CASE = Case(
    name="attention_packed",
    op=attention,
    reference=attention_reference,
    eager=_eager,
    make=_make_packed,
    shapes=_PACKED_SHAPES,
    gradients=("q", "k", "v"),
    strided=_strided,
)

PADDED_CASE = Case(
    name="attention_padded",
    op=attention,
    reference=attention_reference,
    eager=_eager,
    make=_make_padded,
    shapes=_PACKED_SHAPES,
    gradients=("q", "k", "v"),
    strided=_strided,
)
