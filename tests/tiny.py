"""Tiny random models for the tests: one for each row of the table of families, and some that have no row."""

from __future__ import annotations

import copy

import torch
import transformers
from peft import LoraConfig, get_peft_model

from fastlm.families import FAMILIES

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

_COMMON = dict(
    vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.12, pad_token_id=3, bos_token_id=1,
    eos_token_id=2, tie_word_embeddings=False,
)  # fmt: skip
_LLAMA_3_ROPE = dict(
    rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
_SLIDING_FULL = dict(sliding_window=6, layer_types=["sliding_attention", "full_attention"])


def _longrope(settings: dict) -> dict:
    """Phi's long-context RoPE over half of each head, which rows of more than 16 tokens stretch by the long factors."""
    pairs = settings["hidden_size"] // settings["num_attention_heads"] // 4
    return dict(
        rope_type="longrope", rope_theta=10000.0, partial_rotary_factor=0.5,
        short_factor=[1.0 + 0.1 * i for i in range(pairs)], long_factor=[2.0 + 0.5 * i for i in range(pairs)],
    )  # fmt: skip


def _head_size(settings: dict) -> int:
    return settings["hidden_size"] // settings["num_attention_heads"]


# name -> (model_type, what differs from _COMMON; a function is called with the other settings); every family of the table is here
# at least once, with what its checkpoints switch on, windows shorter than the tests' rows and caps that bend
MODELS: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", dict(attention_bias=True, mlp_bias=True)),
    "llama-tied-mha": ("llama", dict(tie_word_embeddings=True, num_key_value_heads=4)),
    "llama3-rope": ("llama", dict(rope_parameters=_LLAMA_3_ROPE)),
    "mistral": ("mistral", dict(sliding_window=None)),
    "mistral-window": ("mistral", dict(sliding_window=6)),
    "ministral": ("ministral", dict(_SLIDING_FULL, head_dim=32)),
    "qwen2": ("qwen2", {}),
    "qwen2-windowed-layer": (
        "qwen2",
        dict(use_sliding_window=True, sliding_window=6, layer_types=["full_attention", "sliding_attention"]),
    ),
    "qwen3": ("qwen3", dict(head_dim=32)),
    "smollm3": ("smollm3", dict(_SLIDING_FULL, use_sliding_window=True, no_rope_layers=[0, 1], tie_word_embeddings=True)),
    "gemma": ("gemma", dict(head_dim=32, tie_word_embeddings=True)),
    "gemma2": (
        "gemma2",
        dict(
            _SLIDING_FULL, head_dim=32, query_pre_attn_scalar=24, attn_logit_softcapping=1.5, final_logit_softcapping=2.0,
            tie_word_embeddings=True,
        ),
    ),
    "gemma3": (
        "gemma3_text",
        dict(_SLIDING_FULL, head_dim=32, query_pre_attn_scalar=24, final_logit_softcapping=2.0, tie_word_embeddings=True),
    ),
    "vaultgemma": (
        "vaultgemma",
        dict(
            _SLIDING_FULL, head_dim=32, query_pre_attn_scalar=24, attn_logit_softcapping=1.5, final_logit_softcapping=2.0,
        ),
    ),
    "phi": ("phi", dict(partial_rotary_factor=0.5)),
    "phi3": ("phi3", dict(sliding_window=6, partial_rotary_factor=0.5)),
    "phi3-longrope": ("phi3", dict(rope_parameters=_longrope, original_max_position_embeddings=16)),
    "granite": (
        "granite",
        dict(
            attention_bias=True, mlp_bias=True, embedding_multiplier=3.0, attention_multiplier=0.2,
            residual_multiplier=0.6, logits_scaling=1.7,
        ),
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        dict(
            _SLIDING_FULL,
            rope_parameters=dict(
                sliding_attention=dict(rope_type="default", rope_theta=10000.0),
                full_attention=dict(
                    rope_type="yarn", rope_theta=500000.0, factor=4.0, original_max_position_embeddings=64
                ),
            ),
        ),
    ),
    "glm": ("glm", dict(head_dim=32, partial_rotary_factor=0.5)),
    "glm4": ("glm4", dict(head_dim=32, partial_rotary_factor=0.25)),
    "cohere": ("cohere", dict(logit_scale=0.4, tie_word_embeddings=True)),
    "cohere-qk-norm": ("cohere", dict(use_qk_norm=True, logit_scale=1.5, attention_bias=True)),
    "cohere2": ("cohere2", dict(_SLIDING_FULL, logit_scale=0.4, tie_word_embeddings=True)),
    "cwm": ("cwm", dict(_SLIDING_FULL, head_dim=32, rope_parameters=_LLAMA_3_ROPE)),
    "starcoder2": ("starcoder2", dict(sliding_window=6, tie_word_embeddings=True)),
    "stablelm": ("stablelm", dict(use_qkv_bias=True, partial_rotary_factor=0.25)),
    "stablelm-parallel": ("stablelm", dict(use_parallel_residual=True, partial_rotary_factor=0.25)),
    "ernie4_5": ("ernie4_5", dict(head_dim=32, use_bias=True, tie_word_embeddings=True)),
    "hunyuan": ("hunyuan_v1_dense", dict(head_dim=32)),
    "exaone4": ("exaone4", dict(_SLIDING_FULL, head_dim=32)),
    "exaone4-full": ("exaone4", dict(sliding_window=None, layer_types=["full_attention"] * 2, tie_word_embeddings=True)),
    "seed_oss": (
        "seed_oss",
        dict(head_dim=32, attention_out_bias=True, mlp_bias=True, attention_dropout=0.0, residual_dropout=0.0),
    ),
    "helium": ("helium", dict(head_dim=_head_size, attention_bias=True)),
    "arcee": ("arcee", dict(mlp_bias=True)),
    "jais2": ("jais2", {}),
    "nemotron": ("nemotron", dict(partial_rotary_factor=0.5)),
}  # fmt: skip
assert {model_type for model_type, _ in MODELS.values()} == set(FAMILIES)
# families without a row: they keep their stock forwards and only their adapters run fast
OTHERS: dict[str, tuple[str, dict]] = {
    # norms without weights
    "olmo": ("olmo", {}),
    # queries scaled by their positions
    "ministral3": ("ministral3", dict(sliding_window=None)),
}


def config(name: str, **over) -> transformers.PretrainedConfig:
    model_type, extra = {**MODELS, **OTHERS}[name]
    settings = {**_COMMON, **extra, **over}
    settings = {key: value(settings) if callable(value) else value for key, value in settings.items()}
    return transformers.AutoConfig.for_model(model_type, **settings)


def targets(name: str) -> list[str]:
    """Names of the projections in the layers of a model of this name here."""
    return _projections({**MODELS, **OTHERS}[name][0])


def _projections(model_type: str) -> list[str]:
    family = FAMILIES.get(model_type)
    return LINEAR if family is None else [*family.qkv, family.out, *family.gate_up, family.down]


def model(name: str, dtype: torch.dtype = torch.float32, attention: str = "eager", seed: int = 0, **over):
    """A stock model with every norm, bias and weight away from its initial value.

    attention: "sdpa" stands for what transformers takes by itself, which is not SDPA for every family in every release.
    """
    torch.manual_seed(seed)
    made = transformers.AutoModelForCausalLM.from_config(
        copy.deepcopy(config(name, **over)), attn_implementation=None if attention == "sdpa" else attention
    )
    generator = torch.Generator().manual_seed(seed + 1)
    family = FAMILIES.get(made.config.model_type)
    with torch.no_grad():
        for parameter_name, parameter in made.named_parameters():
            if family is not None and family.norm_weight_offset and parameter_name.endswith("norm.weight"):
                # as checkpoints store them: not every class of theirs begins there
                parameter.zero_()
            if parameter.ndim == 1 or "norm" in parameter_name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return made.to(dtype).eval()


def with_lora(made, targets=None, seed: int = 0, dtype: torch.dtype | None = None, **settings):
    """The model in plain PEFT, with an adapter that does something; its weights depend on their names alone."""
    settings = {"r": 4, "lora_alpha": 12, "lora_dropout": 0.0, **settings}
    targets = targets or _projections(made.config.model_type)
    wrapped = get_peft_model(made, LoraConfig(target_modules=targets, task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for i, (name, parameter) in enumerate(sorted(wrapped.named_parameters())):
            if "lora_" in name:
                generator = torch.Generator().manual_seed(1000 * seed + i)
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
                if dtype is not None:
                    parameter.data = parameter.data.to(dtype)
    return wrapped


def ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(4, 160, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded_batch(side: str = "right") -> dict[str, torch.Tensor]:
    """Three rows of 20, 13 and 7 tokens with some labels ignored."""
    x, mask = ids(3, 20), torch.ones(3, 20, dtype=torch.long)
    labels = x.clone()
    labels[:, 4:6] = -100
    for row, length in ((1, 13), (2, 7)):
        gone = slice(length, None) if side == "right" else slice(None, 20 - length)
        x[row, gone], mask[row, gone], labels[row, gone] = 3, 0, -100
        if side == "left":
            # what a row's first token is predicted from is padding: no model has a right value there
            labels[row, 20 - length] = -100
    return dict(input_ids=x, attention_mask=mask, labels=labels)


def packed_batch(lengths=(7, 1, 11, 5)) -> dict[str, torch.Tensor]:
    """Samples in one row, recognised by positions that restart."""
    x = ids(1, sum(lengths), seed=4)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    labels = x.clone()
    labels[positions == 0] = -100
    return dict(input_ids=x, position_ids=positions, labels=labels)


def loss_and_gradients(made, batch: dict, **call):
    """One training step's loss and the gradient of every trainable parameter, by name."""
    made.train()
    made.zero_grad()
    output = made(**{k: v.to(made.device) for k, v in batch.items()}, **call)
    output.loss.backward()
    gradients = {
        name.replace(".base_layer", ""): parameter.grad.detach().clone()
        for name, parameter in made.named_parameters()
        if parameter.requires_grad and parameter.grad is not None
    }
    return output.loss.detach(), gradients


def relative(ours: torch.Tensor, truth: torch.Tensor) -> float:
    """Root-mean-square difference as a share of the truth's size."""
    ours, truth = ours.double().cpu(), truth.double().cpu()
    return float((ours - truth).norm() / truth.norm().clamp(min=1e-30)) if truth.numel() else 0.0
