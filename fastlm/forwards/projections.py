"""Linear layers that share their input, run as one function where their adapters allow it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fastlm import adapters
from fastlm.patching import Patch
from fastlm_kernels.lora import lora_linear
from fastlm_kernels.nf4 import NF4Weight

# Below this many tokens an inference step is bound by reading weights: bitsandbytes multiplies 4-bit weights without decoding them
# to memory first, which a decode followed by a GEMM cannot beat.
DECODE_TOKENS = 32


def is_decode_step(x: Tensor) -> bool:
    return not torch.is_grad_enabled() and x.numel() // max(1, x.shape[-1]) <= DECODE_TOKENS


def shared_views(modules: Sequence[nn.Module], x: Tensor, patch: Patch) -> list[adapters.LinearView] | None:
    """The layers as plain tensors if running them as one function gains anything, else None: call them as modules.

    Frozen dense layers without an adapter, and layers whose weights are trained, are called: a plain GEMM is all they are.
    A layer that cannot be read is counted on `patch`.
    """
    if is_decode_step(x):
        return None
    found = adapters.views(modules, x)
    if isinstance(found, str):
        if found != adapters.TRAINED_WEIGHT:
            patch.fell_back(found)
        return None
    fused = any(v.projection.lora_a is not None or isinstance(v.projection.weight, NF4Weight) for v in found)
    return found if fused else None


def project(modules: Sequence[nn.Module], x: Tensor, patch: Patch) -> list[Tensor]:
    """[module(x) for module in modules], as one function where possible. x [..., K] -> each [..., N]."""
    found = shared_views(modules, x, patch)
    if found is None:
        return [module(x) for module in modules]
    projections = [view.projection for view in found]
    y = lora_linear(x.to(found[0].dtype), projections, found[0].lora_dtype).to(found[0].out_dtype)
    return list(y.split([p.shape[0] for p in projections], dim=-1))
