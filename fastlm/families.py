"""The table of model families: one row of data each. Adding a family that fits the fields is adding its row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """What the fast forwards need to know about one of transformers' dense causal models.

    A decoder layer is attention and an MLP around a residual stream:

        h = x + m * out_norm(attention(norm(x)));  y = h + m * mlp_out_norm(mlp(mlp_norm(h)))

    where each norm may be missing; in a parallel layer both read norm(x). Names of modules are those of the layer, of its
    `self_attn` and of its `mlp`; "settings" are attributes of the model's config.

    Attributes:
        model_type: `config.model_type`.
        causal_lm, backbone, layer, attention, mlp, norm: names of transformers' classes.
        has_layer_norm: norms subtract the mean (LayerNorm), else RMSNorm.
        norm_eps: the attribute of a norm that holds its eps.
        norm_weight_offset: added to a norm's weight (1.0 where weights are stored around zero).
        norm_casts_before_weight: the normalised value is rounded to the input's dtype before the product with the weight.
        attention_norm, attention_out_norm, mlp_norm, mlp_out_norm: the layer's norms before and after each half, or None.
        parallel: attention and MLP read the same norm: True, False, or the layer's attribute that says so.
        qkv: the projections that give queries, keys and values: three, or one that gives all.
        out: the projection of the attention's output.
        gate_up: the projections into the MLP: gate and up, one that gives both, or, without a gate, one alone.
        down: the projection out of the MLP.
        is_gated: the MLP multiplies act(gate) by up; else it is act(up).
        activation: the setting that names the activation.
        qk_norms: the norms of queries and keys, or None.
        qk_norm_place: "head" before the rotation, "width" before it over all heads at once, "after" the rotation by head.
        qk_norm_switch: the attention's attribute that says whether it has them, or None: always.
        window: where an attention module's sliding window is read: "none", "config" (one for all layers) or "module".
        softcap: the setting of the cap on attention scores, or None.
        rotates: the attention's attribute that says whether it rotates at all: true or not None; None: always.
        rope_interleaved: rotated pairs are neighbours, not halves.
        rope_tables_interleaved: the tables repeat each value beside itself, not in their second half.
        rope_rounds_once: the rotation is computed in float32 whatever the tables' dtype.
        residual_multiplier: the layer's attribute with the factor m, or None: 1.
        dropouts: attributes of layer, attention or MLP ("self_attn.residual_dropout") that must be 0 in training.
        logit_softcap, logit_scale, logit_divisor: settings that shape the head's logits, or None.
    """

    model_type: str
    causal_lm: str
    backbone: str
    layer: str
    attention: str
    mlp: str
    norm: str
    has_layer_norm: bool = False
    norm_eps: str = "variance_epsilon"
    norm_weight_offset: float = 0.0
    norm_casts_before_weight: bool = True
    attention_norm: str | None = "input_layernorm"
    attention_out_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_out_norm: str | None = None
    parallel: bool | str = False
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    out: str = "o_proj"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    is_gated: bool = True
    activation: str = "hidden_act"
    qk_norms: tuple[str, str] | None = None
    qk_norm_place: str = "head"
    qk_norm_switch: str | None = None
    window: str = "none"
    softcap: str | None = None
    rotates: str | None = None
    rope_interleaved: bool = False
    rope_tables_interleaved: bool = False
    rope_rounds_once: bool = False
    residual_multiplier: str | None = None
    dropouts: tuple[str, ...] = ()
    logit_softcap: str | None = None
    logit_scale: str | None = None
    logit_divisor: str | None = None


def _row(model_type: str, prefix: str, **facts) -> Family:
    names = dict(
        causal_lm=f"{prefix}ForCausalLM",
        backbone=f"{prefix}Model",
        layer=f"{prefix}DecoderLayer",
        attention=f"{prefix}Attention",
        mlp=f"{prefix}MLP",
        norm=f"{prefix}RMSNorm",
    )
    return Family(model_type=model_type, **{**names, **facts})


# what several families share
_POST_NORM = dict(
    attention_norm=None,
    attention_out_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_out_norm="post_feedforward_layernorm",
)
_GEMMA = dict(norm_eps="eps", norm_weight_offset=1.0, norm_casts_before_weight=False)
_GEMMA_2 = dict(
    _GEMMA,
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
    activation="hidden_activation",
    window="module",
    softcap="attn_logit_softcapping",
    logit_softcap="final_logit_softcapping",
)
_COHERE = dict(
    has_layer_norm=True, mlp_norm=None, parallel=True, rope_interleaved=True, rope_tables_interleaved=True,
    rope_rounds_once=True, logit_scale="logit_scale",
)  # fmt: skip
_QK = ("q_norm", "k_norm")

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        # Llama 2, 3, 3.1, 3.2, 3.3; SmolLM2; every checkpoint that ships as LlamaForCausalLM
        _row("llama", "Llama"),
        _row("mistral", "Mistral", window="config"),
        # Qwen2 and Qwen2.5
        _row("qwen2", "Qwen2", window="module"),
        _row("qwen3", "Qwen3", window="module", qk_norms=_QK),
    )
}
