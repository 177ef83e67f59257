"""Settings of a load and of an adapter, checked when they are made: a wrong value is an error before any work starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

_DTYPES = {
    "float16": torch.float16, "fp16": torch.float16, "half": torch.float16,
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
    "float32": torch.float32, "fp32": torch.float32, "float": torch.float32,
}  # fmt: skip
MODES = ("4bit", "8bit", "16bit", "full")
# What scripts written for other libraries pass: argument -> values that ask for nothing. Any other value is an error.
NOT_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "device_map_planner_kwargs": (None,),
    "fix_tokenizer": (True, False, None),
    "resize_model_vocab": (None,),
    "use_exact_model_name": (True, False),
    "float32_mixed_precision": (None, False),
    "fast_inference": (False, None),
    "gpu_memory_utilization": (0.5, None),
    "float8_kv_cache": (False, None),
    "max_lora_rank": (64, None),
    "disable_log_stats": (True, False),
    "qat_scheme": (None,),
    "load_in_fp8": (False, None),
    "tiled_mlp": (False, None),
    "text_only": (False, None),
    "offload_embedding": ("auto", False, None),
    "memory": (None,),
    "host_memory": (None,),
    "deterministic": (None, False),
}
NOT_SUPPORTED_PEFT: Mapping[str, tuple[Any, ...]] = {
    "finetune_last_n_layers": (None,),
    "temporary_location": ("_unsloth_temporary_saved_buffers", None),
    "qat_scheme": (None,),
    "offload_layers": (None, 0),
    "checkpoint_skip_layers": (0, None),
    "prefetch_depth": (2, None),
    "max_seq_length": (),
}


def reject_unknown(name: str, given: Mapping[str, Any], known: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises for arguments that a function does not take.

    Raises:
        NotImplementedError: for an argument that fastlm knows and does not support yet, unless its value asks for nothing.
        TypeError: for any other name.
    """
    for key, value in given.items():
        if key not in known:
            raise TypeError(f"{name}() got an unexpected keyword argument {key!r}")
        if not any(value is neutral or value == neutral for neutral in known[key]):
            raise NotImplementedError(f"{name}(): {key}={value!r} is not supported yet: leave the argument out")


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
    """

    model_name: str
    mode: str
    dtype: torch.dtype | None
    max_seq_length: int | None
    rope_scaling: Mapping[str, Any] | None
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
        if self.rope_scaling is not None and not isinstance(self.rope_scaling, Mapping):
            raise ValueError(f"rope_scaling must be a dict like {{'rope_type': 'linear', 'factor': 2.0}}, got {self.rope_scaling!r}")
