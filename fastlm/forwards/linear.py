"""A single LoRA layer as one function: what any model gets, whatever its architecture."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fastlm import adapters
from fastlm.forwards.projections import is_decode_step
from fastlm.patching import Fallback, patch_of
from fastlm_kernels.lora import lora_linear


def forward(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if args or kwargs:
        raise Fallback(f"it was called with further arguments {sorted(kwargs)}")
    if is_decode_step(x):
        return patch_of(self).stock(self, x)
    view = adapters.view_linear(self, x)
    if isinstance(view, str):
        if view == adapters.TRAINED_WEIGHT:
            return patch_of(self).stock(self, x)
        raise Fallback(view)
    return lora_linear(x.to(view.dtype), (view.projection,), view.lora_dtype).to(view.out_dtype)
