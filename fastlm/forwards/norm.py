"""RMSNorm modules on the fused kernel."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fastlm.patching import patch_of
from fastlm_kernels.rms_norm import rms_norm


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    # families call their one argument differently
    (hidden_states,) = args or kwargs.values()
    family = patch_of(self).facts
    return rms_norm(
        hidden_states,
        self.weight,
        getattr(self, family.norm_eps),
        weight_offset=family.norm_weight_offset,
        cast_before_weight=family.norm_casts_before_weight,
    )
