"""Causal attention of decoder models: one entry over the attention libraries that are installed.

    o = softmax(scale * q kᵀ + mask) v, with a softcap: o = softmax(softcap * tanh(scale * q kᵀ / softcap) + mask) v

Vaswani et al. 2017, arXiv:1706.03762; without the [S, S] matrix in memory: Dao 2023, arXiv:2307.08691. Every library
used here keeps the softmax statistics in float32 and rounds the probabilities to the input dtype before the product
with v; what is saved for the backward is q, k, v, o and one float32 log-sum-exp a query. Gradients are the libraries'
own autograd. What none of them serves without an [S, S] matrix, our own Triton kernels do, or blocks of queries in torch.

Which library runs is a pure function of the device, dtype, head sizes, window, softcap, layout, mask and installed
packages: `attention_backend` tells it, `BACKENDS` holds the facts that it is decided by.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastlm_kernels._attention_backends import BACKENDS, Call, choose
from fastlm_kernels._attention_libraries import dense, packed, sdpa
from fastlm_kernels._attention_torch import torch_attention
from fastlm_kernels._attention_triton import builds
from fastlm_kernels._case import Case, randn
from fastlm_kernels._launch import capability, check_dtype, runs_triton
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


def _check(
    q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout | None, window: int | None, mask: Tensor | None,
    softcap: float | None,
) -> None:  # fmt: skip
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(f"q must be [B, S, H, E], k [B, Skv, K, E] and v [B, Skv, K, Ev], got {shapes}")
    batch, n_queries, n_heads, _ = q.shape
    if k.shape[:3] != v.shape[:3] or batch != k.shape[0] or q.shape[3] != k.shape[3]:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(f"q [B, S, H, E], k [B, Skv, K, E] and v [B, Skv, K, Ev] do not fit each other, got {shapes}")
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
    if softcap is not None and not 0.0 < softcap < math.inf:
        raise ValueError(f"softcap must be None or a bound of the scores above 0, got {softcap}")
    if mask is not None and layout is not None:
        raise ValueError("give a mask or a layout, not both: a layout already says what each token sees")
    if mask is not None:
        wanted = ((1, batch), (1, n_heads), (n_queries,), (n_keys,))
        if mask.ndim != 4 or any(got not in allowed for got, allowed in zip(mask.shape, wanted, strict=True)):
            raise ValueError(f"mask must be [{batch}, 1, {n_queries}, {n_keys}], got {tuple(mask.shape)}")
        if mask.dtype is not torch.bool and not mask.is_floating_point():
            raise ValueError(f"mask must be bool (true: sees) or float (added to the scores), got {mask.dtype}")
        if mask.requires_grad and softcap is not None:
            raise ValueError("a mask beside a softcap gets no gradient: pass it detached")
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
    softcap: float | None,
) -> Call:
    _check(q, k, v, layout, window, mask, softcap)
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
        has_softcap=softcap is not None,
        has_triton=runs_triton(q),
    )


def attention_backend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout | None = None,
    window: int | None = None,
    mask: Tensor | None = None,
    deterministic: bool = False,
    softcap: float | None = None,
) -> str:
    """The name of the backend that `attention` runs for these arguments.

    Raises:
        ValueError, TypeError: as `attention`.
    """
    return choose(_describe(q, k, v, layout, window, mask, deterministic, softcap), None)


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
    softcap: float | None = None,
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
        softcap: bound of the scores, softcap * tanh(scale * q kᵀ / softcap) before the mask; None leaves them as they are.
        deterministic: bit-equal gradients between runs; also asked for by torch.use_deterministic_algorithms(True).
        backend: a name of BACKENDS instead of the one that `attention_backend` gives.

    Returns:
        [B, S, H, Ev] in q.dtype.

    Raises:
        ValueError: if shapes, dtypes or devices do not fit each other, mask and layout are both given, the layout does
            not fit the batch, window < 1, softcap <= 0, or `backend` cannot serve the call.
        TypeError: for a dtype that the GPU's kernels do not take.

    Reference: Vaswani et al. 2017, arXiv:1706.03762; grouped heads: Ainslie et al. 2023, arXiv:2305.13245; sliding
    window: Beltagy et al. 2020, arXiv:2004.05150; softcap: Gemma Team 2024, arXiv:2408.00118.
    """
    call = _describe(q, k, v, layout, window, mask, deterministic, softcap)
    name = choose(call, backend)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    batch, n_queries = q.shape[:2]
    if layout is not None:
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        if layout.indices is not None:
            q, k, v = (_TakeRows.apply(x, layout.indices) for x in (q, k, v))
        out = packed(name, q, k, v, scale, layout, call.window, softcap, call.is_deterministic)
        if layout.indices is not None:
            out = _PutRows.apply(out, layout.indices, batch * n_queries)
        return out.unflatten(0, (batch, n_queries))
    if name == "torch" and mask is not None:
        return torch_attention(q, k, v, scale, softcap=softcap, mask=mask)
    if mask is not None or call.form == "empty":
        return sdpa(name, q, k, v, scale, mask is None, mask)
    if n_queries == 1 and window is not None:
        # only the last keys, all of them seen
        first = max(0, k.shape[1] - window)
        k, v = k[:, first:], v[:, first:]
    return dense(name, q, k, v, scale, call.window, softcap, call.is_deterministic)


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


def attention_reference(
    q, k, v, scale, *, layout=None, window=None, mask=None, softcap=None, deterministic=False, backend=None
):  # fmt: skip
    def core(q, k, v, scale, mask):
        scores = q @ k.mT * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        return (scores + mask).softmax(-1) @ v

    return _plain(q, k, v, scale, layout, window, mask, core)


def _eager(q, k, v, scale, *, layout=None, window=None, mask=None, softcap=None, deterministic=False, backend=None):
    # what transformers' default attention runs for these masks; a softcap is for its matrix form alone
    def core(q, k, v, scale, mask):
        if softcap is not None:
            scores = softcap * torch.tanh(q @ k.mT * scale / softcap)
            return (scores + mask).softmax(-1, dtype=torch.float32).to(q.dtype) @ v
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


def _capped(make):
    # a bound that the scores reach
    return lambda *arguments: dict(make(*arguments), softcap=2.0)


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

_CAPPED_SHAPES = {
    "typical": (1, 40, 4, 2, 64, 0),
    "window": (2, 24, 4, 2, 16, 5),
    "wide-heads": (1, 17, 2, 1, 256, 9),
    "odd": (1, 35, 3, 3, 24, 0),
    # of a single token the true dq and dk are zero, and nothing is to be compared
    "two-tokens": (1, 2, 2, 1, 64, 0),
    "empty": (0, 8, 4, 2, 64, 0),
}

SOFTCAP_CASE = Case(
    name="attention_softcap",
    op=attention,
    reference=attention_reference,
    eager=_eager,
    make=_capped(_make),
    shapes=_CAPPED_SHAPES,
    gradients=("q", "k", "v"),
    strided=_strided,
    # Gemma-2's layers, 9B and 27B, full and windowed
    bench_shapes={
        "B1-S4096-H16-K8-E256": (1, 4096, 16, 8, 256, 0),
        "B1-S4096-H32-K16-E128-W1024": (1, 4096, 32, 16, 128, 1024),
    },
    ideal=_ideal,
    ideal_backward=_ideal_backward,
    builds=builds,
)

PACKED_SOFTCAP_CASE = Case(
    name="attention_packed_softcap",
    op=attention,
    reference=attention_reference,
    eager=_eager,
    make=_capped(_make_packed),
    shapes=_PACKED_SHAPES,
    gradients=("q", "k", "v"),
    strided=_strided,
)
