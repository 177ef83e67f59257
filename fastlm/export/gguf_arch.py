"""Model families in GGUF: names of tensors, what is done to their values, and the numbers that llama.cpp computes with.

llama.cpp rotates neighbouring values of a head where transformers rotates the two halves, for some families: rows of their query
and key projections are interleaved. Norms of Gemma are stored with their one added. Scaled RoPE becomes a type and a factor, or a
tensor of divisors for each pair of values. What llama.cpp computes without being told (which layers slide, the scale of
scores) is compared with the configuration; a model that it would compute otherwise is refused or, where that is exact, rewritten.

Names and fields are those that conversion/*.py and src/models/*.cpp of llama.cpp write and read
(https://github.com/ggml-org/llama.cpp, MIT licence).
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastlm.export.gguf_types import Shape, library

logger = logging.getLogger(__name__)

_ALL_BIASES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Arch:
    """How a family of transformers is written.

    Attributes:
        name: of the architecture in GGUF.
        activation: of the MLP, which llama.cpp takes for granted.
        is_interleaved: rows of query and key projections change their order.
        norm_offset: added to the weights of norms.
        biases: projections that may have one.
        has_head: an output matrix beside the embedding is read.
        has_free_head_size: heads times their size may differ from the hidden size.
        swa_period: None if layers do not slide in llama.cpp; else every swa_period-th one does not.
    """

    name: str
    activation: str = "silu"
    is_interleaved: bool = False
    norm_offset: float = 0.0
    biases: tuple[str, ...] = ()
    has_head: bool = True
    has_free_head_size: bool = True
    swa_period: int | None = None


_LLAMA = Arch("llama", is_interleaved=True, biases=_ALL_BIASES)
_GELU = "gelu_pytorch_tanh"
# model_type of transformers -> its row
ARCHS: Mapping[str, Arch] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": Arch("qwen2", biases=("q_proj", "k_proj", "v_proj"), has_free_head_size=False),
    "qwen3": Arch("qwen3"),
    "gemma": Arch("gemma", activation=_GELU, norm_offset=1.0, has_head=False),
    "gemma2": Arch("gemma2", activation=_GELU, norm_offset=1.0, has_head=False, swa_period=2),
    "gemma3_text": Arch("gemma3", activation=_GELU, norm_offset=1.0, swa_period=6),
    "phi3": Arch("phi3", has_free_head_size=False),
    "granite": Arch("granite", is_interleaved=True, biases=_ALL_BIASES),
    "smollm3": Arch("smollm3", is_interleaved=True),
}


def find_arch(config: Any) -> Arch:
    """The row of a model.

    Raises:
        ValueError: for a family without one, or a configuration that llama.cpp would compute otherwise.
    """
    arch = ARCHS.get(config.model_type)
    if arch is None:
        raise ValueError(
            f"models of type {config.model_type!r} are not written as GGUF: {', '.join(ARCHS)} are. Save with "
            f"save_pretrained_merged, and convert that folder with llama.cpp's convert_hf_to_gguf.py"
        )
    settings = config.to_dict()
    activation = settings.get("hidden_activation") or settings.get("hidden_act")
    if activation != arch.activation:
        raise _differs(arch, f"its MLP uses {activation}", arch.activation)
    heads, size = config.num_attention_heads, _head_size(config)
    if not arch.has_free_head_size and heads * size != config.hidden_size:
        raise _differs(arch, f"it has {heads} heads of {size}", f"a product of {config.hidden_size}")
    if config.model_type == "smollm3":
        rotated = [int((layer + 1) % 4 != 0) for layer in range(config.num_hidden_layers)]
        if list(config.no_rope_layers) != rotated:
            raise _differs(arch, f"no_rope_layers is {config.no_rope_layers}", "no rotation in every fourth layer")
    if config.model_type == "gemma2" and None in (config.attn_logit_softcapping, config.final_logit_softcapping):
        raise _differs(arch, "its scores or logits are not capped", "both capped")
    if config.model_type == "gemma3_text" and config.attn_logit_softcapping is not None:
        raise _differs(arch, "its scores are capped", "none")
    if settings.get("use_bidirectional_attention"):
        raise _differs(arch, "tokens see those behind them", "causal attention")
    window = settings.get("sliding_window")
    slides = "sliding_attention" in (settings.get("layer_types") or ["sliding_attention"])
    if arch.swa_period is None and window and slides and window < config.max_position_embeddings:
        logger.warning(
            "llama.cpp lets every layer of a %s model see all tokens: beyond sliding_window=%d its answers differ from the model's",
            config.model_type, window,
        )  # fmt: skip
    return arch


def _differs(arch: Arch, found: str, expected: str) -> ValueError:
    return ValueError(
        f"llama.cpp computes {arch.name} models with {expected}, but of this one {found}: it has no GGUF form"
    )


def _head_size(config: Any) -> int:
    return config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads


def mix_shape(config: Any, has_head: bool) -> Shape:
    """What the quantization mixtures ask of a model."""
    n_layers, n_groups = config.num_hidden_layers, config.num_attention_heads // config.num_key_value_heads
    # as llama.cpp tells its sizes apart
    is_70b = n_layers == 80 and (config.model_type == "qwen2" or (ARCHS[config.model_type] is _LLAMA and n_groups > 1))
    return Shape(n_layers=n_layers, n_groups=n_groups, is_70b=is_70b, has_head=has_head)


# --- tensors ---


def tensor_names(names: list[str], arch: Arch, n_layers: int) -> dict[str, str]:
    """Checkpoint name -> name in the file.

    Raises:
        ValueError: for a tensor that the architecture does not have in GGUF.
    """
    gguf = library()
    kind = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch.name)
    table = gguf.get_tensor_name_map(kind, n_layers)
    found = {}
    for name in names:
        made = table.get_name(name, try_suffixes=(".weight", ".bias"))
        is_stray_bias = name.endswith(".bias") and name.split(".")[-2] not in arch.biases
        if made is None or is_stray_bias or not _is_plain(made):
            raise ValueError(f"the tensor {name} has no place in a GGUF file of a {arch.name} model")
        found[name] = made
    return found


def _is_plain(name: str) -> bool:
    return re.fullmatch(r"[a-z0-9_.]{1,63}", name) is not None


def interleave(tensor: Tensor, n_heads: int) -> Tensor:
    """Rows of a projection [n_heads * E, ...]: the two halves of every head alternate."""
    halves = tensor.reshape(n_heads, 2, tensor.shape[0] // n_heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def heads_of(name: str, config: Any, arch: Arch) -> int | None:
    """Heads whose rows are interleaved in this tensor, or None."""
    part = name.split(".")[-2]
    if not arch.is_interleaved or part not in ("q_proj", "k_proj"):
        return None
    return config.num_attention_heads if part == "q_proj" else config.num_key_value_heads


def score_factor(config: Any) -> float:
    """What queries are multiplied by, so that llama.cpp's own scale of scores gives the configured one."""
    if config.model_type not in ("gemma2", "gemma3_text"):
        return 1.0
    # the largest model of each is known by its number of layers
    is_largest = config.num_hidden_layers == {"gemma2": 46, "gemma3_text": 62}[config.model_type]
    taken = config.hidden_size // config.num_attention_heads if is_largest else _head_size(config)
    return math.sqrt(taken / config.query_pre_attn_scalar)


def convert(name: str, tensor: Tensor, config: Any, arch: Arch) -> Tensor:
    """The value in the file of a checkpoint tensor, of the same dtype unless it is computed."""
    n_heads = heads_of(name, config, arch)
    if n_heads is not None:
        tensor = interleave(tensor, n_heads)
    if name.endswith("norm.weight") and arch.norm_offset:
        tensor = tensor.float() + arch.norm_offset
    queries = {"gemma2": "q_proj.weight", "gemma3_text": "q_norm.weight"}.get(config.model_type)
    if queries is not None and name.endswith(queries) and score_factor(config) != 1.0:
        tensor = tensor.float() * score_factor(config)
    return tensor


def _rope(config: Any) -> Mapping[str, Any]:
    """RoPE parameters of the layers that see everything."""
    parameters = config.rope_parameters
    found: Mapping[str, Any] = parameters.get("full_attention", parameters)
    return found


def rope_tensors(config: Any) -> dict[str, Tensor]:
    """Divisors of RoPE's frequencies, by their names in the file; float32, one for each pair of values."""
    rope = _rope(config)
    if rope["rope_type"] == "llama3":
        return {"rope_freqs.weight": _llama3_divisors(rope, _head_size(config))}
    if rope["rope_type"] == "longrope":
        return {
            "rope_factors_long.weight": torch.tensor(rope["long_factor"], dtype=torch.float32),
            "rope_factors_short.weight": torch.tensor(rope["short_factor"], dtype=torch.float32),
        }
    return {}


def _llama3_divisors(rope: Mapping[str, Any], size: int) -> Tensor:
    """Llama 3.1's scaling: long wavelengths are stretched by `factor`, short ones not, those between in part."""
    frequencies = rope["rope_theta"] ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).float()


# --- fields ---


def write_fields(writer: Any, config: Any, arch: Arch, n_rows: int) -> None:
    """Put what llama.cpp computes with into a gguf.GGUFWriter.

    Args:
        writer: of this architecture.
        config: of the text model.
        arch: its row.
        n_rows: of the embedding.
    """
    settings = config.to_dict()
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(_head_size(config))
    writer.add_value_length(_head_size(config))
    writer.add_vocab_size(n_rows)
    _write_rope(writer, config, arch)
    for name, add in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
    ):
        if settings.get(name) is not None:
            add(settings[name])
    if arch.swa_period is not None and settings.get("sliding_window"):
        _write_windows(writer, config, arch.swa_period)
    if config.model_type == "phi3":
        # zero tells llama.cpp that no layer slides
        writer.add_sliding_window(settings.get("sliding_window") or 0)
    if config.model_type == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def _write_windows(writer: Any, config: Any, period: int) -> None:
    writer.add_sliding_window(config.sliding_window)
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    if slides != [(layer + 1) % period != 0 for layer in range(config.num_hidden_layers)]:
        logger.info("layers slide in a pattern of their own, which llama.cpp reads since 2025: %s", config.layer_types)
        writer.add_sliding_window_pattern(slides)


def _write_rope(writer: Any, config: Any, arch: Arch) -> None:
    gguf, rope = library(), _rope(config)
    kind = rope["rope_type"]
    writes = _ROPE_TYPES.get(kind)
    if writes is None or (kind == "longrope" and config.model_type != "phi3"):
        raise _differs(arch, f"RoPE is of type {kind!r}", f"RoPE of type {', '.join(_ROPE_TYPES)}")
    writer.add_rope_freq_base(rope["rope_theta"])
    local = config.rope_parameters.get("sliding_attention")
    if local is not None:
        if local["rope_type"] != "default":
            raise _differs(arch, f"sliding layers have RoPE of type {local['rope_type']!r}", "'default' there")
        writer.add_rope_freq_base_swa(local["rope_theta"])
    share = rope.get("partial_rotary_factor") or 1.0
    if share != 1.0 and config.model_type != "phi3":
        raise _differs(arch, f"RoPE turns only {share} of each head", "all of it turned")
    writer.add_rope_dimension_count(int(_head_size(config) * share))
    writes(gguf, writer, rope, config)


def _write_nothing(gguf: Any, writer: Any, rope: Mapping[str, Any], config: Any) -> None:
    if config.model_type == "phi3":
        # read whatever the type
        writer.add_rope_scaling_orig_ctx_len(_original_length(rope, config))


def _write_linear(gguf: Any, writer: Any, rope: Mapping[str, Any], config: Any) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(rope["factor"])
    _write_nothing(gguf, writer, rope, config)


def _write_yarn(gguf: Any, writer: Any, rope: Mapping[str, Any], config: Any) -> None:
    own = [key for key in ("attention_factor", "mscale", "mscale_all_dim") if rope.get(key) is not None]
    own += ["truncate=False"] if rope.get("truncate") is False else []
    if own:
        raise ValueError(f"YaRN with {', '.join(own)} has no GGUF form: llama.cpp computes its attention factor itself")
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(_original_length(rope, config))
    if rope.get("beta_fast") is not None:
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    if rope.get("beta_slow") is not None:
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def _write_longrope(gguf: Any, writer: Any, rope: Mapping[str, Any], config: Any) -> None:
    """Microsoft's LongRoPE, arXiv:2402.13753: two sets of divisors and one factor of the attention."""
    original = _original_length(rope, config)
    stretch = config.max_position_embeddings / original
    factor = rope.get("attention_factor")
    if factor is None:
        factor = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_rope_scaling_attn_factors(factor)


def _original_length(rope: Mapping[str, Any], config: Any) -> int:
    """Positions that the model was trained on before its RoPE was scaled."""
    found = rope.get("original_max_position_embeddings") or config.to_dict().get("original_max_position_embeddings")
    return int(found or config.max_position_embeddings)


_ROPE_TYPES: Mapping[str, Callable[[Any, Any, Mapping[str, Any], Any], None]] = {
    "default": _write_nothing,
    "llama3": _write_nothing,
    "linear": _write_linear,
    "yarn": _write_yarn,
    "longrope": _write_longrope,
}
