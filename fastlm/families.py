"""The table of model families: one row of data each. Adding a family that fits the fields is adding its row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """What the fast forwards need to know about one of transformers' dense causal models.

    Attributes:
        model_type: `config.model_type`.
        causal_lm, backbone, layer, attention, mlp, norm: names of transformers' classes.
        norm_weight_offset: added to a norm's weight (1.0 where weights are stored around zero).
        norm_casts_before_weight: the normalised value is rounded to the input's dtype before the product with the weight.
        has_qk_norm: query and key heads are normalised before the rotation.
        window: where an attention module's sliding window is read: "none", "config" (one for all layers) or "module".
        rope_interleaved: rotated pairs are neighbours, not halves.
    """

    model_type: str
    causal_lm: str
    backbone: str
    layer: str
    attention: str
    mlp: str
    norm: str
    norm_weight_offset: float = 0.0
    norm_casts_before_weight: bool = True
    has_qk_norm: bool = False
    window: str = "none"
    rope_interleaved: bool = False


def _row(model_type: str, prefix: str, **facts) -> Family:
    return Family(
        model_type=model_type,
        causal_lm=f"{prefix}ForCausalLM",
        backbone=f"{prefix}Model",
        layer=f"{prefix}DecoderLayer",
        attention=f"{prefix}Attention",
        mlp=f"{prefix}MLP",
        norm=f"{prefix}RMSNorm",
        **facts,
    )


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        # Llama 2, 3, 3.1, 3.2, 3.3; SmolLM2; every checkpoint that ships as LlamaForCausalLM
        _row("llama", "Llama"),
        _row("mistral", "Mistral", window="config"),
        # Qwen2 and Qwen2.5
        _row("qwen2", "Qwen2", window="module"),
        _row("qwen3", "Qwen3", window="module", has_qk_norm=True),
    )
}
