"""What each attention library can do, and which of them serves a call."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fastlm_kernels._attention_triton import MIN_CAPABILITY, largest_head_size

_log = logging.getLogger(__name__)
_HALF = (torch.float16, torch.bfloat16)


@functools.lru_cache(maxsize=1)
def _missing_flash_attention_4() -> str | None:
    """Why flash-attn-4 cannot be used, None if it can. Its import takes seconds, so only a call on a GPU asks."""
    try:
        version = importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return "the package flash-attn-4 is not installed"
    try:
        import flash_attn.cute.utils  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    except ImportError as error:
        reason = f"flash-attn-4 {version} does not import: {error}"
        _log.warning("%s; attention runs on the next library", reason)
        return reason
    return None


@dataclass(frozen=True)
class Backend:
    """What one attention library can do. Sources: flash_attn/cute/interface.py of flash-attn-4 4.0.0b36;
    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and torch/nn/attention/varlen.py of torch 2.11 to 2.13.

    Attributes:
        name: as `attention_backend` returns it.
        on_cuda: True where it runs on CUDA GPUs only, False where only elsewhere, None for any device.
        dtypes: of q, k and v.
        min_capability: of the GPU.
        max_head_size: of a GPU's capability and the dtype.
        head_multiple: the head size must be a multiple of it.
        takes_other_value_size: whether Ev may differ from E.
        is_varlen: takes cumulative lengths, windows and S < Skv itself. The others are given one sequence at a time,
            and a boolean mask for a window or S < Skv.
        is_square_only: takes whole causal rows of more than one token only.
        takes_mask: takes a mask.
        takes_softcap: of a GPU's capability: bounds the scores by a softcap, forward and backward.
        needs_triton: runs wherever our Triton kernels do.
        deterministic: whether its backward is "always"; by an "argument"; by torch.use_deterministic_algorithms(True),
            a "global" flag; or "never".
        missing: why it is not installed, or None.
    """

    name: str
    on_cuda: bool | None
    dtypes: tuple[torch.dtype, ...]
    deterministic: str
    min_capability: tuple[int, int] = (0, 0)
    max_head_size: Callable[[tuple[int, int], torch.dtype], int] = lambda cc, dtype: 1 << 30
    head_multiple: int = 1
    takes_other_value_size: bool = False
    is_varlen: bool = False
    is_square_only: bool = False
    takes_mask: bool = False
    takes_softcap: Callable[[tuple[int, int]], bool] = lambda cc: False
    needs_triton: bool = False
    missing: Callable[[], str | None] = lambda: None


def _flash_2_head_size(cc: tuple[int, int], dtype: torch.dtype) -> int:
    # its backward needs the shared memory of the data-centre chips above 192
    return 256 if cc in ((8, 0), (9, 0), (10, 0)) else 192


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend(
            "flash_attention_4", True, _HALF, "argument", (9, 0),
            max_head_size=lambda cc, dtype: 256 if cc[0] == 9 else 128, head_multiple=8, is_varlen=True,
            # its backward refuses modified scores there
            takes_softcap=lambda cc: cc[0] != 12,
            missing=_missing_flash_attention_4,
        ),
        Backend(
            "cudnn", True, _HALF, "never", (9, 0),
            max_head_size=lambda cc, dtype: 128, head_multiple=8, is_square_only=True,
        ),
        Backend(
            "torch_varlen", True, _HALF, "global", (8, 0),
            max_head_size=_flash_2_head_size, head_multiple=8, is_varlen=True,
        ),
        Backend("flash", True, _HALF, "global", (8, 0), max_head_size=_flash_2_head_size),
        Backend(
            "efficient", True, (*_HALF, torch.float32), "global", (5, 0),
            head_multiple=8, takes_other_value_size=True, takes_mask=True,
        ),
        # the implementation that torch chooses for a CPU
        Backend(
            "sdpa", False, (*_HALF, torch.float32, torch.float64), "always",
            takes_other_value_size=True, takes_mask=True,
        ),
        # our own kernels
        Backend(
            "triton", None, (*_HALF, torch.float32), "always", MIN_CAPABILITY,
            max_head_size=lambda cc, dtype: largest_head_size(dtype), is_varlen=True,
            takes_softcap=lambda cc: True, needs_triton=True,
        ),
        Backend(
            "math", None, (*_HALF, torch.float32, torch.float64), "always",
            takes_other_value_size=True, takes_mask=True,
        ),
        # our own blocks of queries
        Backend(
            "torch", None, (*_HALF, torch.float32, torch.float64), "always",
            takes_other_value_size=True, takes_mask=True, takes_softcap=lambda cc: True,
        ),
    )
}  # fmt: skip

# What a call asks for -> the backends in order of speed. Measured on one H200 for "square" and "packed"; torch's flash
# kernel splits the keys of a single query over the chip, flash-attn-4 does not unless asked to. "efficient" stands behind
# "triton" where it would need a mask or one launch a sequence, "math" where it would need the [S, S] matrix.
ORDER = {
    "empty": ("math",),
    "mask": ("efficient", "sdpa", "math", "torch"),
    "packed": ("flash_attention_4", "torch_varlen", "flash", "sdpa", "triton", "efficient", "math", "torch"),
    "square": ("flash_attention_4", "cudnn", "flash", "efficient", "sdpa", "triton", "math", "torch"),
    "window": ("flash_attention_4", "torch_varlen", "sdpa", "triton", "efficient", "math", "torch"),
    "single": ("flash", "efficient", "sdpa", "triton", "math", "torch"),
    "rectangular": ("flash_attention_4", "torch_varlen", "sdpa", "triton", "efficient", "math", "torch"),
}


@dataclass(frozen=True)
class Call:
    """What decides the backend. `form` is a key of ORDER; `window` is None where it hides nothing."""

    form: str
    is_cuda: bool
    capability: tuple[int, int]
    dtype: torch.dtype
    head_size: int
    value_head_size: int
    window: int | None
    is_deterministic: bool
    is_globally_deterministic: bool
    has_softcap: bool
    has_triton: bool


def refusal(backend: Backend, call: Call) -> str | None:
    """Why a backend cannot serve a call, None if it can."""
    if backend.on_cuda is not None and backend.on_cuda != call.is_cuda:
        return f"it runs {'on CUDA GPUs only' if backend.on_cuda else 'on other devices than CUDA GPUs'}"
    if backend.needs_triton and not call.has_triton:
        return "it runs on CUDA GPUs with Triton only"
    if call.is_cuda and call.capability < backend.min_capability:
        return f"it needs compute capability {backend.min_capability}, the GPU has {call.capability}"
    if call.dtype not in backend.dtypes:
        return f"it takes {', '.join(map(str, backend.dtypes))}, not {call.dtype}"
    if call.head_size != call.value_head_size and not backend.takes_other_value_size:
        return f"keys and values must have one head size, got {call.head_size} and {call.value_head_size}"
    largest = backend.max_head_size(call.capability, call.dtype)
    for size in (call.head_size, call.value_head_size):
        if size > largest or size % backend.head_multiple:
            return f"head sizes must be at most {largest} and a multiple of {backend.head_multiple}, got {size}"
    # without a key there is no score
    if call.has_softcap and call.form != "empty" and not backend.takes_softcap(call.capability):
        return "it has no softcap" + (" on this GPU" if backend.takes_softcap((9, 0)) else "")
    if call.form == "mask" and not backend.takes_mask:
        return "it takes no mask"
    if call.form not in ("square", "empty") and backend.is_square_only:
        return "it takes whole causal rows of more than one token only"
    if not (backend.is_varlen or backend.takes_mask):
        if call.window is not None:
            return "it has no sliding window"
        if call.form == "rectangular":
            return "it has no causal mask for fewer queries than keys"
    if call.is_deterministic:
        if backend.deterministic == "never" or (backend.deterministic == "argument" and call.capability[0] == 12):
            return "its backward is not deterministic"
        if backend.deterministic == "global" and not call.is_globally_deterministic:
            return "its backward is deterministic only after torch.use_deterministic_algorithms(True)"
    return backend.missing()


@functools.lru_cache(maxsize=1024)
def choose(call: Call, forced: str | None) -> str:
    """The backend of a call: the first of its order that can serve it, or the forced one.

    Raises:
        ValueError: if the forced one is unknown or cannot serve the call.
    """
    if forced is None:
        return next(name for name in ORDER[call.form] if refusal(BACKENDS[name], call) is None)
    if forced not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {forced!r}")
    reason = refusal(BACKENDS[forced], call)
    if reason is not None:
        raise ValueError(f"backend {forced!r} cannot serve this call: {reason}")
    return forced
