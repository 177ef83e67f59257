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
# name -> (model_type, what differs from _COMMON); every family of the table is here at least once
MODELS: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", dict(attention_bias=True, mlp_bias=True)),
    "llama-tied-mha": ("llama", dict(tie_word_embeddings=True, num_key_value_heads=4)),
    "llama3-rope": (
        "llama",
        dict(rope_parameters=dict(
            rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=32,
        )),
    ),
    "mistral": ("mistral", dict(sliding_window=None)),
    "mistral-window": ("mistral", dict(sliding_window=6)),
    "qwen2": ("qwen2", {}),
    "qwen2-windowed-layer": (
        "qwen2",
        dict(use_sliding_window=True, sliding_window=6, layer_types=["full_attention", "sliding_attention"]),
    ),
    "qwen3": ("qwen3", dict(head_dim=32)),
}  # fmt: skip
assert {model_type for model_type, _ in MODELS.values()} == set(FAMILIES)
# families without a row: they keep their stock forwards and only their adapters run fast
OTHERS: dict[str, tuple[str, dict]] = {
    "gemma2": ("gemma2", dict(head_dim=32, query_pre_attn_scalar=24, sliding_window=8, tie_word_embeddings=True)),
    "phi3": ("phi3", dict(sliding_window=None)),
}


def config(name: str, **over) -> transformers.PretrainedConfig:
    model_type, extra = {**MODELS, **OTHERS}[name]
    return transformers.AutoConfig.for_model(model_type, **{**_COMMON, **extra, **over})


def model(name: str, dtype: torch.dtype = torch.float32, attention: str = "eager", seed: int = 0, **over):
    """A stock model with every norm, bias and weight away from its initial value."""
    torch.manual_seed(seed)
    made = transformers.AutoModelForCausalLM.from_config(
        copy.deepcopy(config(name, **over)), attn_implementation=attention
    )
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return made.to(dtype).eval()


def with_lora(made, targets=None, seed: int = 0, dtype: torch.dtype | None = None, **settings):
    """The model in plain PEFT, with an adapter that does something; its weights depend on their names alone."""
    settings = {"r": 4, "lora_alpha": 12, "lora_dropout": 0.0, **settings}
    wrapped = get_peft_model(made, LoraConfig(target_modules=targets or LINEAR, task_type="CAUSAL_LM", **settings))
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
