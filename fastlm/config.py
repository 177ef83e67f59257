"""Settings of a load and of an adapter, checked when they are made: a wrong value is an error before any work starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

_DTYPES = {
    "float16": torch.float16, "fp16": torch.float16, "half": torch.float16,
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
    "float32": torch.float32, "fp32": torch.float32, "float": torch.float32,
}  # fmt: skip
MODES = ("4bit", "8bit", "16bit", "full")
# What scripts written for other libraries pass: argument -> values that ask for nothing. Any other value is an error.
NOT_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "auto_model": (None,),
    "device_map_planner_kwargs": (None,),
    "fast_inference": (False, None),
    "fix_tokenizer": (True, False, None),
    "float32_mixed_precision": (None, False),
    "float8_training": (False, None),
    "fullgraph": (True, False, None),
    "load_in_fp8": (False, None),
    "max_memory": (None,),
    "num_labels": (None,),
    "offload_embedding": ("auto", False, None),
    "offload_layers": (None, 0),
    "on_model_resolved": (None,),
    "qat_scheme": (None,),
    "quantization_config": (None,),
    "resize_model_vocab": (None,),
    "return_logits": (True, False, None),
    "rope_parameters": (None,),
    "target_parameters": (None,),
    "text_only": (False, None),
    "unsloth_force_compile": (False, None),
    "unsloth_tiled_mlp": (False, None),
    "use_exact_model_name": (True, False, None),
    "whisper_language": (None,),
    "whisper_task": (None,),
}
# These say how an inference engine or an offload works that another argument, refused above, would start: no value does anything.
WITHOUT_EFFECT = ("disable_log_stats", "float8_kv_cache", "gpu_memory_utilization", "max_lora_rank", "prefetch_depth")
NOT_SUPPORTED_PEFT: Mapping[str, tuple[Any, ...]] = {
    "block_swap_layers": (None, 0),
    "checkpoint_skip_layers": (0, None),
    "finetune_attention_modules": (True,),
    "finetune_audio_layers": (False, None),
    "finetune_language_layers": (True,),
    "finetune_last_n_layers": (None,),
    "finetune_mlp_modules": (True,),
    "finetune_vision_layers": (True, False, None),
    "offload_layers": (None, 0),
    "qat_scheme": (None,),
}
# Likewise; the length of rows is set where the model is loaded, and nothing is written to a folder of buffers.
WITHOUT_EFFECT_PEFT = ("max_seq_length", "prefetch_depth", "temporary_location")
# What to write instead of an argument that is refused.
_INSTEAD = {
    "fast_inference": "generate with model.generate()",
    "float32_mixed_precision": "choose precision in the trainer's arguments (bf16=True or fp16=True)",
    "max_memory": "say where layers go with device_map",
    "quantization_config": "choose with load_in_4bit, load_in_8bit or load_in_16bit",
    "rope_parameters": "pass rope_scaling",
}
# rope_type -> what it needs besides a factor
_ROPE_TYPES: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": (),
    "dynamic": (),
    "yarn": (),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
_BIASES = ("none", "all", "lora_only")
MAX_RANK = 4096


def reject_unknown(
    name: str, given: Mapping[str, Any], known: Mapping[str, tuple[Any, ...]], without_effect: Sequence[str]
) -> None:
    """Raises for arguments that a function does not take.

    Args:
        name: of the function.
        given: the arguments that it does not name itself.
        known: argument -> the values of it that ask for nothing.
        without_effect: arguments that may have any value.

    Raises:
        NotImplementedError: for an argument that fastlm knows and does not support yet, unless its value asks for nothing.
        TypeError: for any other name.
    """
    for key, value in given.items():
        if key in without_effect:
            continue
        if key not in known:
            raise TypeError(f"{name}() got an unexpected keyword argument {key!r}")
        # identity and type first: a dict or a tensor is no neutral value, whatever it says of equality
        if not any(value is neutral or (type(value) is type(neutral) and value == neutral) for neutral in known[key]):
            instead = f"{_INSTEAD[key]}, and " if key in _INSTEAD else ""
            allowed = " or ".join(repr(neutral) for neutral in known[key])
            raise NotImplementedError(
                f"{name}(): {key}={value!r} is not supported yet: {instead}leave the argument out ({key}={allowed} is taken, "
                "and does nothing)"
            )


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A torch dtype from what users type; None stays None.

    Raises:
        ValueError: for anything but float16, bfloat16 and float32.
    """
    if dtype is None or dtype == "auto":
        return None
    found = _DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if found not in _DTYPES.values():
        raise ValueError(f"dtype must be float16, bfloat16 or float32 (or None to choose by the device), got {dtype!r}")
    return found


def check_flags(**flags: Any) -> None:
    """Raises ValueError for a flag that is not a bool: the string "no" would count as yes."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r}")


def parse_lora_rounding(lora_rounding: Any) -> bool:
    """Whether adapters' products are rounded together with the base product.

    Raises:
        ValueError: for anything but "stock" and "once".
    """
    if lora_rounding not in ("stock", "once"):
        raise ValueError(f"lora_rounding must be 'stock' or 'once', got {lora_rounding!r}")
    return bool(lora_rounding == "once")


def check_seed(random_state: Any) -> None:
    """Raises ValueError unless it is an integer that every generator takes."""
    if isinstance(random_state, bool) or not isinstance(random_state, int) or not 0 <= random_state < 2**32:
        raise ValueError(f"random_state must be an integer in 0..2**32-1, got {random_state!r}")


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def parse_rope(rope_scaling: Any) -> dict[str, Any] | None:
    """transformers' RoPE parameters from what users type; None stays None.

    Raises:
        ValueError: for an unknown type, a missing or wrong parameter.
    """
    if rope_scaling is None:
        return None
    example = "{'rope_type': 'linear', 'factor': 2.0}"
    if not isinstance(rope_scaling, Mapping):
        raise ValueError(f"rope_scaling must be a dict like {example}, got {rope_scaling!r}")
    parameters = dict(rope_scaling)
    if "type" in parameters:
        parameters["rope_type"] = parameters.pop("type")
    kind = str(parameters.get("rope_type"))
    if kind not in _ROPE_TYPES:
        raise ValueError(
            f"rope_scaling needs a 'rope_type', one of {', '.join(_ROPE_TYPES)}, got {dict(rope_scaling)!r}"
        )
    missing = [name for name in _ROPE_TYPES[kind] if name not in parameters]
    if missing:
        raise ValueError(f"rope_scaling of type {kind!r} lacks {', '.join(missing)}: got {dict(rope_scaling)!r}")
    factor = parameters.get("factor", 1.0 if kind == "default" else None)
    if not _is_number(factor) or not 1 <= factor < float("inf"):
        raise ValueError(f"rope_scaling needs a factor of 1 or more, as in {example}, got {dict(rope_scaling)!r}")
    return parameters


def parse_mode(
    load_in_4bit: bool | None, load_in_8bit: bool | None, load_in_16bit: bool | None, full_finetuning: bool | None
) -> str:
    """One of `MODES` from the flags: none given is 4-bit, one alone selects its mode.

    Raises:
        ValueError: if two are True, or one is neither a bool nor None.
    """
    flags = dict(zip(MODES, (load_in_4bit, load_in_8bit, load_in_16bit, full_finetuning), strict=True))
    names = dict(zip(MODES, ("load_in_4bit", "load_in_8bit", "load_in_16bit", "full_finetuning"), strict=True))
    for mode, value in flags.items():
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{names[mode]} must be True, False or None, got {value!r}")
    chosen = [mode for mode in MODES if flags[mode]]
    # full fine-tuning is itself a 16-bit load, so the two may be said together
    if chosen == ["16bit", "full"]:
        chosen = ["full"]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(names[mode] for mode in chosen)} cannot both be True: choose one")
    if chosen:
        return chosen[0]
    return "4bit" if load_in_4bit is None else "16bit"


def parse_checkpointing(value: bool | str) -> bool | None:
    """True: recompute each layer in the backward; False: keep all; None ("auto"): as the trainer decides.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(value, bool):
        return value
    # the name under which scripts written for Unsloth ask for its default
    if value in ("auto", "unsloth"):
        return None
    raise ValueError(f"use_gradient_checkpointing must be 'auto', True or False, got {value!r}")


@dataclass(frozen=True)
class LoadConfig:
    """A checked request to load a model.

    Attributes:
        model_name: hub id, local directory of a model, or local directory or hub id of an adapter.
        mode: "4bit", "8bit", "16bit" or "full".
        dtype: of everything that is not quantized; None chooses by the device.
        max_seq_length: longest row that will be trained; None is the model's own window.
        rope_scaling: transformers' RoPE parameters to use instead of the checkpoint's.
        has_mode: the user named the mode. Otherwise a checkpoint that is quantized already is taken as it is.
    """

    model_name: str
    mode: str
    has_mode: bool
    dtype: torch.dtype | None
    max_seq_length: int | None
    rope_scaling: dict[str, Any] | None
    token: str | bool | None
    device_map: Any
    trust_remote_code: bool
    revision: str | None
    attn_implementation: str | None
    use_safetensors: bool
    local_files_only: bool
    cache_dir: str | None

    def __post_init__(self) -> None:
        if not self.model_name:
            raise ValueError("model_name must be a hub id or a directory, got an empty string")
        length = self.max_seq_length
        if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
            raise ValueError(f"max_seq_length must be a positive integer or None, got {length!r}")
        check_flags(
            trust_remote_code=self.trust_remote_code,
            use_safetensors=self.use_safetensors,
            local_files_only=self.local_files_only,
        )


def check_lora(r: Any, lora_alpha: Any, lora_dropout: Any) -> None:
    """Raises ValueError for a rank, a scale or a dropout that no adapter can have."""
    if isinstance(r, bool) or not isinstance(r, int) or not 1 <= r <= MAX_RANK:
        raise ValueError(f"r must be an integer in 1..{MAX_RANK}, got {r!r}")
    if not _is_number(lora_alpha) or not 0 < lora_alpha < float("inf"):
        raise ValueError(f"lora_alpha must be a positive number, got {lora_alpha!r}")
    if not _is_number(lora_dropout) or not 0 <= lora_dropout < 1:
        raise ValueError(f"lora_dropout must be in [0, 1), got {lora_dropout!r}")


def _names(argument: str, value: Any) -> list[str]:
    if isinstance(value, Iterable) and not isinstance(value, str):
        names = list(value)
        if all(isinstance(name, str) for name in names):
            return names
    raise ValueError(f"{argument} must be a list of names, got {value!r}")


def lora_settings(
    r: Any, target_modules: Any, lora_alpha: Any, lora_dropout: Any, bias: Any, layers_to_transform: Any, use_rslora: Any,
    use_dora: Any, modules_to_save: Any, init_lora_weights: Any, loftq_config: Any,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of an adapter, checked as far as they can be without the model, as `LoraConfig` takes them.

    Raises:
        ValueError: saying what was received and what is allowed.
    """
    check_lora(r, lora_alpha, lora_dropout)
    check_flags(use_rslora=use_rslora, use_dora=use_dora)
    if bias not in _BIASES:
        raise ValueError(f"bias must be one of {', '.join(map(repr, _BIASES))}, got {bias!r}")
    if not isinstance(init_lora_weights, (bool, str)):
        raise ValueError(
            f"init_lora_weights must be True, False or the name of one of PEFT's methods, got {init_lora_weights!r}"
        )
    if loftq_config is not None and not isinstance(loftq_config, Mapping):
        raise ValueError(f"loftq_config must be a dict or None, got {loftq_config!r}")
    if not isinstance(target_modules, str):
        target_modules = _names("target_modules (unless it is 'all-linear' or a regular expression)", target_modules)
    if layers_to_transform is not None:
        layers = [layers_to_transform] if isinstance(layers_to_transform, int) else layers_to_transform
        if isinstance(layers, str) or not isinstance(layers, Iterable) or not all(type(i) is int for i in layers):
            raise ValueError(
                f"layers_to_transform must be a layer's number or a list of them, got {layers_to_transform!r}"
            )
        layers_to_transform = list(layers)
    settings = dict(
        r=r, target_modules=target_modules, lora_alpha=lora_alpha, lora_dropout=lora_dropout, bias=bias,
        layers_to_transform=layers_to_transform, use_rslora=use_rslora, use_dora=use_dora,
        modules_to_save=None if modules_to_save is None else _names("modules_to_save", modules_to_save),
        init_lora_weights=init_lora_weights,
    )  # fmt: skip
    return settings | (dict(loftq_config=dict(loftq_config)) if loftq_config else {})
