"""Tiny models of every kind that merged saving meets, and how saved folders are read and compared."""

import copy
import json
from pathlib import Path

import torch
import transformers as tf
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIGS = {
    "llama": (tf.LlamaConfig, {}),
    "llama-biases": (tf.LlamaConfig, dict(attention_bias=True, mlp_bias=True)),
    "qwen2-tied": (tf.Qwen2Config, dict(tie_word_embeddings=True)),
    "qwen3": (tf.Qwen3Config, dict(head_dim=16)),
    "gemma2": (tf.Gemma2Config, dict(head_dim=16, sliding_window=8, tie_word_embeddings=True)),
    "mistral": (tf.MistralConfig, dict(sliding_window=8)),
    "mixtral": (tf.MixtralConfig, dict(num_local_experts=4, num_experts_per_tok=2)),
    "qwen3-moe": (
        tf.Qwen3MoeConfig,
        dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    ),
}
DENSE = [name for name in CONFIGS if name not in ("mixtral", "qwen3-moe")]
BATCH = torch.arange(4, 36).view(2, 16)


def make(name, dtype=torch.bfloat16, seed=0, **over):
    """A tiny random model whose norms and biases are not ones and zeros."""
    kind, own = CONFIGS[name]
    settings = dict(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=3, initializer_range=0.1,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = tf.AutoModelForCausalLM.from_config(kind(**settings | own | over))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def shake(model, only="lora_", seed=1, std=0.1):
    """Random values for the trained tensors whose name contains `only`."""
    generator = torch.Generator().manual_seed(seed)
    shaken = 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if only in name and parameter.requires_grad:
                parameter.add_((torch.randn(parameter.shape, generator=generator) * std).to(parameter))
                shaken += 1
    assert shaken
    return model


def with_lora(base, seed=1, **kw):
    settings = dict(r=4, lora_alpha=12, target_modules=PROJECTIONS, task_type="CAUSAL_LM") | kw
    return shake(get_peft_model(base, LoraConfig(**settings)), seed=seed).eval()


def tensors(folder):
    found = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        found |= load_file(file)
    return found


def stock(base, folder):
    """What transformers' own save_pretrained writes: (tensors, config)."""
    copy.deepcopy(base).save_pretrained(folder)
    return tensors(folder), json.loads((folder / "config.json").read_text())


def snapshot(model):
    return {name: (tensor, tensor.detach().clone(), tensor.requires_grad) for name, tensor in model.named_parameters()}


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def add_lora(expected, model, scaling, dtype, decoded=None):
    """W + s B A in float32, rounded once, for every LoRA weight of the model; in place."""
    layers = {name[: -len(".lora_A.default.weight")] for name, _ in model.named_parameters() if "lora_A" in name}
    assert layers
    for layer in layers:
        module = model.get_submodule(layer)
        name = layer.removeprefix("base_model.model.") + ".weight"
        base = (decoded or expected)[name].float()
        delta = module.lora_B["default"].weight.double() @ module.lora_A["default"].weight.double() * scaling
        expected[name] = (base + delta.float()).to(dtype).detach()
    return expected


def logits(model):
    with torch.no_grad():
        return model(input_ids=BATCH, use_cache=False).logits.float()


def reload(folder, dtype=torch.float32):
    model, info = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model.eval()


def assert_close(got, want, tolerance):
    assert (got - want).abs().max() <= tolerance * want.abs().max(), float((got - want).abs().max())


def tokenizer(chat_template="{{ messages }}"):
    core = Tokenizer(models.WordLevel({"<pad>": 0, "a": 1, "b": 2}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = tf.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", padding_side="left")
    fast.chat_template = chat_template
    return fast
