"""Self-attention with rotary embedding: fused projections, fused q/k norm + rotation, a chosen attention backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastlm.families import Family
from fastlm.forwards.backbone import ATTENTION, sequence_layout
from fastlm.forwards.projections import project
from fastlm.patching import Fallback, patch_of
from fastlm_kernels.attention import attention, attention_backend
from fastlm_kernels.rope import rope


@dataclass(frozen=True)
class AttentionFacts:
    """deterministic: gradients are equal to the bit between runs. is_sliding: as the function of this name."""

    family: Family
    deterministic: bool
    is_sliding: bool


def is_sliding(module: nn.Module, family: Family) -> bool:
    """Whether an attention module is one with a window: the config's, of which masks are made, when it is called."""
    if family.window == "layer_type":
        return module.config.layer_types[module.layer_idx] == "sliding_attention"
    return family.window == "config" or (family.window == "module" and module.sliding_window is not None)


def fits(family: Family) -> bool:
    """Whether `forward` computes what this family's attention does."""
    return (
        family.qkv == ("q_proj", "k_proj", "v_proj")
        and family.out == "o_proj"
        and family.qk_norms in (None, ("q_norm", "k_norm"))
        and (family.qk_norms is None or (family.qk_norm_place == "head" and not family.has_layer_norm))
        and family.qk_norm_switch is None
        and family.softcap is None
        and family.rotates is None
        and not family.rope_tables_interleaved
        and not family.rope_rounds_once
    )


def forward(
    self: nn.Module,
    hidden_states: Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    patch = patch_of(self)
    family = patch.facts.family
    if self.config._attn_implementation != ATTENTION:
        raise Fallback(f"attention implementation {self.config._attn_implementation!r} was asked for")
    if self.training and self.attention_dropout:
        raise Fallback("attention dropout is on")
    batch, length, _ = hidden_states.shape
    # [B, S, heads, E]: views of one stacked GEMM's output where the projections run as one function
    packed = project((self.q_proj, self.k_proj, self.v_proj), hidden_states, patch)
    q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in packed)
    norms: dict[str, Any] = {}
    if family.qk_norms is not None:
        norms = dict(
            q_weight=self.q_norm.weight,
            k_weight=self.k_norm.weight,
            eps=getattr(self.q_norm, family.norm_eps),
            weight_offset=family.norm_weight_offset,
        )
    cos, sin = position_embeddings
    q, k = rope(q, k, cos, sin, interleaved=family.rope_interleaved, **norms)
    if past_key_values is not None:
        k, v = past_key_values.update(k.transpose(1, 2), v.transpose(1, 2), self.layer_idx)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    # a mask holds causality, window and padding already; without one, whole rows have a layout or are plain
    is_whole_row = attention_mask is None and k.shape[1] == length
    layout = sequence_layout(kwargs, q) if is_whole_row else None
    window = self.config.sliding_window if attention_mask is None and patch.facts.is_sliding else None
    deterministic = patch.facts.deterministic
    patch.backend = attention_backend(q, k, v, layout, window, attention_mask, deterministic)
    out = attention(
        q, k, v, self.scaling, layout=layout, window=window, mask=attention_mask, deterministic=deterministic
    )  # fmt: skip
    return project((self.o_proj,), out.reshape(batch, length, -1), patch)[0], None
