"""The table of model families: one row of data each. Adding a family that fits the fields is adding its row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
        window: which layers have the sliding window that the config has when they are called: "none", "config" (all), "module"
            (those whose attention was made with one) or "layer_type" (those that the config's `layer_types` call
            "sliding_attention").
        softcap: the setting of the cap on attention scores, which is also the attention's attribute; None without one.
        rotates: the attention's attribute that says whether it rotates at all: true or not None; None: always.
        rotates_without_windows: and every layer rotates where the config has no window.
        rope_interleaved: rotated pairs are neighbours, not halves.
        rope_tables_interleaved: the tables repeat each value beside itself, not in their second half.
        rope_rounds_once: the rotation is computed in float32 whatever the tables' dtype.
        residual_multiplier: the layer's attribute with the factor m, or None: 1.
        dropouts: attributes of layer, attention or MLP ("self_attn.residual_dropout") that must be 0 in training.
        refuses: attributes of the layer and its modules that must be false: what they switch on has no fast path.
        layer_keeps_kwargs: the layer hands its keyword arguments on to its attention. Where it does not, only a layer that
            runs as a block can be told where samples begin.
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
    rotates_without_windows: bool = False
    rope_interleaved: bool = False
    rope_tables_interleaved: bool = False
    rope_rounds_once: bool = False
    residual_multiplier: str | None = None
    dropouts: tuple[str, ...] = ()
    refuses: tuple[str, ...] = ()
    layer_keeps_kwargs: bool = True
    logit_softcap: str | None = None
    logit_scale: str | None = None
    logit_divisor: str | None = None


def stock_attention_reason(settings: Mapping[str, Any]) -> str | None:
    """Why the attention of a model with these settings stays stock, whatever its family, or None."""
    # not every config has them
    if settings.get("attention_dropout"):
        return f"attention_dropout is {settings['attention_dropout']}"
    if settings.get("is_causal") is False:
        return "its config says that it is not causal"
    return None


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
_QK = ("q_norm", "k_norm")
_ROUNDS_NORM_ONCE = dict(norm_casts_before_weight=False)
_LAYER_NORM = dict(norm="LayerNorm", has_layer_norm=True, norm_eps="eps", norm_casts_before_weight=False)
_UNGATED = dict(gate_up=("up_proj",), is_gated=False)
_FUSED_MLP = dict(gate_up=("gate_up_proj",))
_POST_NORM = dict(
    attention_norm=None,
    attention_out_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_out_norm="post_feedforward_layernorm",
)
_OLMO = dict(_POST_NORM, **_ROUNDS_NORM_ONCE, qk_norms=_QK, qk_norm_place="width", rope_rounds_once=True)
_GEMMA = dict(norm_eps="eps", norm_weight_offset=1.0, norm_casts_before_weight=False)
# the embedding variants of these look both ways
_GEMMA_CAUSAL = dict(_GEMMA, refuses=("self_attn.config.use_bidirectional_attention",))
_GEMMA_NORMS = dict(
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)
_GEMMA_CAPS = dict(softcap="attn_logit_softcapping", logit_softcap="final_logit_softcapping")
_GEMMA_LATER = dict(activation="hidden_activation", window="module")
_COHERE = dict(
    norm="CohereLayerNorm", has_layer_norm=True, norm_casts_before_weight=False, mlp_norm=None, parallel=True,
    rope_interleaved=True, rope_tables_interleaved=True, rope_rounds_once=True, logit_scale="logit_scale",
)  # fmt: skip
_INNER_DROPOUTS = ("self_attn.residual_dropout", "mlp.residual_dropout")

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        # Llama 2, 3, 3.1, 3.2, 3.3; SmolLM2; every checkpoint that ships as LlamaForCausalLM
        _row("llama", "Llama"),
        _row("mistral", "Mistral", window="config"),
        _row("ministral", "Ministral", window="module"),
        # Qwen2 and Qwen2.5
        _row("qwen2", "Qwen2", window="module"),
        _row("qwen3", "Qwen3", window="module", qk_norms=_QK),
        _row("smollm3", "SmolLM3", window="module", rotates="use_rope"),
        _row("gemma", "Gemma", **_GEMMA_CAUSAL),
        _row("gemma2", "Gemma2", **_GEMMA_CAUSAL, **_GEMMA_NORMS, **_GEMMA_CAPS, **_GEMMA_LATER),
        _row(
            "gemma3_text", "Gemma3", backbone="Gemma3TextModel", **_GEMMA_CAUSAL, **_GEMMA_NORMS, **_GEMMA_LATER,
            qk_norms=_QK, logit_softcap="final_logit_softcapping",
        ),
        _row(
            "vaultgemma", "VaultGemma", **_GEMMA, **_GEMMA_CAPS, **_GEMMA_LATER, mlp_norm="pre_feedforward_layernorm"
        ),
        _row(
            "phi", "Phi", **_LAYER_NORM, mlp_norm=None, parallel=True, out="dense", gate_up=("fc1",), down="fc2",
            is_gated=False, dropouts=("resid_dropout.p",), refuses=("self_attn.qk_layernorm",),
        ),
        # Phi-3, Phi-3.5, Phi-4, Phi-4-mini
        _row(
            "phi3", "Phi3", qkv=("qkv_proj",), **_FUSED_MLP, window="config",
            dropouts=("resid_attn_dropout.p", "resid_mlp_dropout.p"),
        ),
        _row("granite", "Granite", residual_multiplier="residual_multiplier", logit_divisor="logits_scaling"),
        _row("olmo2", "Olmo2", **_OLMO),
        _row("olmo3", "Olmo3", **_OLMO, window="module"),
        _row("glm", "Glm", **_FUSED_MLP, rope_interleaved=True),
        _row(
            "glm4", "Glm4", **_FUSED_MLP, rope_interleaved=True, attention_out_norm="post_self_attn_layernorm",
            mlp_out_norm="post_mlp_layernorm",
        ),
        _row("cohere", "Cohere", **_COHERE, qk_norms=_QK, qk_norm_switch="use_qk_norm"),
        _row(
            "cohere2", "Cohere2", **{**_COHERE, "norm": "Cohere2LayerNorm"}, window="module", rotates="sliding_window"
        ),
        _row("cwm", "Cwm", window="module"),
        _row(
            "starcoder2", "Starcoder2", **_LAYER_NORM, gate_up=("c_fc",), down="c_proj", is_gated=False, window="config",
            dropouts=_INNER_DROPOUTS,
        ),
        _row(
            "stablelm", "StableLm", **_LAYER_NORM, parallel="use_parallel_residual", dropouts=("dropout.p",),
            refuses=("self_attn.qk_layernorm",), layer_keeps_kwargs=False,
        ),
        _row("ernie4_5", "Ernie4_5", rope_interleaved=True, rope_rounds_once=True),
        _row(
            "hunyuan_v1_dense", "HunYuanDenseV1", qk_norms=("query_layernorm", "key_layernorm"), qk_norm_place="after"
        ),
        _row(
            "exaone4", "Exaone4", **_POST_NORM, qk_norms=_QK, window="layer_type", rotates="is_sliding",
            rotates_without_windows=True,
        ),
        _row("seed_oss", "SeedOss", dropouts=_INNER_DROPOUTS),
        _row("helium", "Helium", **_ROUNDS_NORM_ONCE, rope_interleaved=True),
        _row("arcee", "Arcee", **_UNGATED),
        _row("jais2", "Jais2", **_LAYER_NORM, **_UNGATED),
        _row(
            "nemotron", "Nemotron", **{**_LAYER_NORM, "norm": "NemotronLayerNorm1P"}, **_UNGATED, norm_weight_offset=1.0,
            layer_keeps_kwargs=False,
        ),
    )
}  # fmt: skip
