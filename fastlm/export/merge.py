"""`save_pretrained_merged`: a trained model as a plain 16-bit checkpoint, or its adapter.

The checkpoint has the names, the configuration and the files that transformers' own `save_pretrained` gives the
unquantized base model. It is written tensor by tensor, shard by shard, into a hidden folder and moved into place when
complete: after an error the target holds what it held before.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from fastlm import adapters
from fastlm.export.folders import staging
from fastlm.export.weights import PLAIN_DTYPES, Source, effective_weights

logger = logging.getLogger(__name__)

SAVE_METHODS = ("merged_16bit", "lora")
_NOT_YET = {
    "merged_4bit": "save 'merged_16bit' and load it with load_in_4bit=True",
    "merged_4bit_forced": "save 'merged_16bit' and load it with load_in_4bit=True",
    **dict.fromkeys(
        ("gguf", "f16", "bf16", "f32", "q8_0", "q4_k_m", "q5_k_m", "q6_k", "q4_0", "q2_k", "q3_k_m"),
        "save 'merged_16bit' and convert that folder with llama.cpp's convert_hf_to_gguf.py",
    ),
}
_SAVED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


def save_pretrained_merged(
    model: Any,
    save_directory: str | os.PathLike[str],
    tokenizer: Any = None,
    save_method: str = "merged_16bit",
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
) -> None:
    """Save a model with its adapters merged into 16-bit weights, or the adapter alone.

    W + s B A is computed in float32 from the weights that the model trained on (4-bit and 8-bit weights decoded) and
    rounded once. The live model is not touched. Embeddings and heads that were trained apart are saved apart, with
    `tie_word_embeddings` false in the configuration. A model without adapters is saved as it is, in 16 bits.

    Args:
        model: a transformers model, or one that PEFT wrapped.
        save_directory: target folder; made if missing. In an existing folder, files of the same names and the weight
            files of an earlier merged save are replaced, others stay.
        tokenizer: saved beside the weights by its own `save_pretrained`, if given; a processor works too.
        save_method: "merged_16bit" or "lora" (PEFT's own format).
        max_shard_size: largest weight file, bytes or a text such as "5GB"; a single larger tensor gets its own file.
        dtype: torch.bfloat16, torch.float16 or torch.float32; by default the model's own 16-bit dtype, bfloat16 for a
            float32 model. "lora" ignores it.

    Raises:
        TypeError: if the model is not a transformers or PEFT model.
        ValueError: for an unknown `save_method` or `dtype`, "lora" without an adapter, an adapter that has no merged
            form, is switched off or changes no saved weight, weights that are not finite, or a folder with an adapter.
        NotImplementedError: for a format that is not supported yet; the text says what to use.
    """
    _check_method(save_method)
    base = _base_model(model)
    target = Path(save_directory).resolve()
    if save_method == "lora":
        if not (adapters.is_peft_model(model) or base._hf_peft_config_loaded):
            raise ValueError(
                f"save_method='lora' needs the PEFT model with its adapter, got a {type(model).__name__}; "
                f"save a model without an adapter with 'merged_16bit'"
            )
        _check_adapter_names(model)
        with staging(target) as folder:
            if (target / "README.md").exists():
                # PEFT adds its tags to the card that is there
                shutil.copy2(target / "README.md", folder)
            model.save_pretrained(folder)
            _save_tokenizer(tokenizer, folder)
        return
    if (target / "adapter_config.json").exists():
        raise ValueError(
            f"{target} holds an adapter, which transformers would apply again on top of the merged weights; "
            f"save the merged model into another folder"
        )
    _check_mergeable(model)
    weights = effective_weights(base)
    _check_quantizer(base, weights)
    dtype = _saved_dtype(base, weights, dtype)
    with staging(target, replaces=_WEIGHT_FILE) as folder:
        _save_tokenizer(tokenizer, folder)
        tied = _tied_names(base, weights, dtype)
        _save_config(base, dtype, folder, is_tied=bool(tied))
        left_out = tied | set(base._keys_to_ignore_on_save or ())
        written = {name: source for name, source in weights.items() if name not in left_out}
        _write_weights(base, written, dtype, max_shard_size, folder)


def _check_method(save_method: str) -> None:
    if save_method in SAVE_METHODS:
        return
    if save_method in _NOT_YET:
        raise NotImplementedError(f"save_method={save_method!r} is not supported yet: {_NOT_YET[save_method]}")
    raise ValueError(f"save_method must be one of {', '.join(map(repr, SAVE_METHODS))}, got {save_method!r}")


def _base_model(model: Any) -> PreTrainedModel:
    base = adapters.base_model(model)
    if not isinstance(base, PreTrainedModel):
        raise TypeError(
            f"model must be a transformers PreTrainedModel or a PeftModel around one, got {type(model).__name__}; "
            f"pass the model inside a wrapper such as DistributedDataParallel (its .module)"
        )
    return base


def _check_mergeable(model: Any) -> None:
    if adapters.is_peft_model(model) and model.active_peft_config.is_prompt_learning:
        kind = model.active_peft_config.peft_type.value
        raise ValueError(f"an adapter of type {kind} has no merged form; save it with save_method='lora'")


def _check_adapter_names(model: Any) -> None:
    # peft saves all but the default one into a folder of this name
    for name in model.peft_config:
        if Path(name).name != name:
            raise ValueError(
                f"an adapter's name becomes a folder of the saved model and must be a plain name, got {name!r}"
            )


def _check_quantizer(base: PreTrainedModel, weights: dict[str, Source]) -> None:
    quantizer = vars(base).get("hf_quantizer")
    if quantizer is None or quantizer.quantization_config.quant_method == "bitsandbytes":
        return
    # other quantizers may have decoded at load (GGUF, dequantize=True): then every tensor is plain
    packed = [name for name, source in weights.items() if source.dtype not in PLAIN_DTYPES]
    if packed:
        raise NotImplementedError(
            f"weights quantized by {quantizer.quantization_config.quant_method} cannot be merged yet ({packed[0]} is "
            f"{weights[packed[0]].dtype}): load the model in 4 bits or 16 bits, or use save_method='lora'"
        )


def _saved_dtype(base: PreTrainedModel, weights: dict[str, Source], dtype: torch.dtype | None) -> torch.dtype:
    if dtype is not None:
        if dtype not in _SAVED_DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, _SAVED_DTYPES))} or None, got {dtype!r}")
        return dtype
    # the 16-bit dtype that most dense entries have: float32 norms or heads do not make a float32 model
    entries = dict.fromkeys((torch.bfloat16, torch.float16), 0)
    for source in weights.values():
        if source.packed is None and source.dtype in entries:
            entries[source.dtype] += source.tensor.numel()
    most = max(entries, key=entries.__getitem__)
    if entries[most]:
        return most
    return base.config.dtype if base.config.dtype in entries else torch.bfloat16


def _dtype_rule(base: PreTrainedModel, dtype: torch.dtype) -> Callable[[str, Source], torch.dtype]:
    """Tensors that transformers loads in float32 whatever the dtype of the model (MoE router biases) stay float32."""
    kept = set() if dtype == torch.float32 else set(base._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        kept |= set(base._keep_in_fp32_modules or ())
    # the same pattern language as in transformers: a search, in which * stands for anything
    pattern = re.compile("|".join(part.replace("*", ".*") for part in sorted(kept)) or r"(?!)")

    def rule(name: str, source: Source) -> torch.dtype:
        if not source.dtype.is_floating_point:
            return source.dtype
        return torch.float32 if source.dtype == torch.float32 and pattern.search(name) else dtype

    return rule


def _tied_names(base: PreTrainedModel, weights: dict[str, Source], dtype: torch.dtype) -> set[str]:
    """Names that need no tensor because they equal the one they are tied to; none of them if a single one differs."""
    pairs = {name: other for name, other in base.all_tied_weights_keys.items() if name in weights and other in weights}
    for name, other in pairs.items():
        if weights[name].same_tensors(weights[other]):
            continue
        if not torch.equal(weights[name].compute(dtype)[0], weights[other].compute(dtype)[0]):
            logger.info("%s and %s were trained apart: saved as two tensors, tie_word_embeddings=False", name, other)
            return set()
    return set(pairs)


def _save_config(base: PreTrainedModel, dtype: torch.dtype, folder: Path, is_tied: bool) -> None:
    config: Any = copy.deepcopy(base.config)
    vars(config).pop("quantization_config", None)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(base).__name__]
    for part in (config, config.get_text_config()):
        if part.tie_word_embeddings and not is_tied:
            part.tie_word_embeddings = False
    if base.is_remote_code():
        custom_object_save(base, folder, config=config)
    config.save_pretrained(folder)
    if base.can_generate():
        copy.deepcopy(base.generation_config).save_pretrained(folder)


@dataclass(frozen=True)
class _Group:
    """Tensors that are computed together because the checkpoint may hold them in another form (fused experts)."""

    names: tuple[str, ...]
    saved: dict[str, Tensor]  # checkpoint name -> meta tensor


def _without_quantizer(base: PreTrainedModel) -> PreTrainedModel:
    """The model as `revert_weight_conversion` reads it, without the unpacking of a pre-quantized checkpoint."""
    quantizer, conversions = vars(base).get("hf_quantizer"), vars(base).get("_weight_conversions")
    if quantizer is None or not conversions:
        return base
    unpacking = {
        type(operation) for conversion in quantizer.get_weight_conversions() for operation in conversion.operations
    }
    # a shallow copy shares every module and tensor; only its list of conversions is another one
    view: Any = copy.copy(base)
    view._weight_conversions = [
        conversion
        for conversion in conversions
        if not isinstance(conversion, WeightConverter) or not unpacking & {type(step) for step in conversion.operations}
    ]
    return view


def _groups(base: PreTrainedModel, meta: dict[str, Tensor]) -> list[_Group]:
    """One group a decoder layer, the rest one by one; a single group if conversions reach across layers."""
    layers: dict[str, list[str]] = {}
    for name in meta:
        layer = re.match(r".*?\.\d+\.", name)
        layers.setdefault(layer[0] if layer else name, []).append(name)
    groups = [
        _Group(tuple(names), revert_weight_conversion(base, {name: meta[name] for name in names}))
        for names in layers.values()
    ]
    whole = _Group(tuple(meta), revert_weight_conversion(base, dict(meta)))
    apart = [(name, tensor.shape) for group in groups for name, tensor in group.saved.items()]
    return groups if sorted(apart) == sorted((name, t.shape) for name, t in whole.saved.items()) else [whole]


def _write_weights(
    base: PreTrainedModel, weights: dict[str, Source], dtype: torch.dtype, max_shard_size: int | str, folder: Path
) -> None:
    base = _without_quantizer(base)
    rule = _dtype_rule(base, dtype)
    dtypes = {name: rule(name, source) for name, source in weights.items()}
    meta = {name: torch.empty(weights[name].shape, dtype=dtypes[name], device="meta") for name in weights}
    groups = _groups(base, meta)
    plan = split_torch_state_dict_into_shards(
        {name: tensor for group in groups for name, tensor in group.saved.items()},
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    open_files: dict[str, dict[str, Tensor]] = {}
    seen: set[int] = set()
    is_changed = False
    for group in groups:
        tensors = {}
        for name in group.names:
            source = weights[name]
            try:
                tensor, differs = source.compute(dtypes[name])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            # one file must not hold the same memory twice
            tensors[name] = tensor.clone() if id(source.tensor) in seen else tensor
            seen.add(id(source.tensor))
            is_changed = is_changed or differs
        for name, tensor in revert_weight_conversion(base, tensors).items():
            file = plan.tensor_to_filename[name]
            content = open_files.setdefault(file, {})
            content[name] = tensor.contiguous()
            if len(content) == len(plan.filename_to_tensors[file]):
                save_file(open_files.pop(file), folder / file, metadata={"format": "pt"})
    if open_files:
        raise RuntimeError(f"incomplete weight files: {sorted(open_files)}")
    _check_changed(weights, is_changed, dtype)
    if plan.is_sharded:
        n_parameters = sum(tensor.numel() for tensor in meta.values())
        index = {
            "metadata": {"total_parameters": n_parameters, **plan.metadata},
            "weight_map": plan.tensor_to_filename,
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _check_changed(weights: dict[str, Source], is_changed: bool, dtype: torch.dtype) -> None:
    adapted = [name for name, source in weights.items() if source.is_adapted]
    if not adapted or is_changed:
        return
    if any(not weights[name].is_zero() for name in adapted):
        raise ValueError(
            f"the adapter is too small to change any entry of the {len(adapted)} adapted tensors in {dtype}: the saved "
            f"model would be the untrained one. Train on, save with dtype=torch.float32, or use save_method='lora'"
        )
    logger.warning("the adapter is all zero: the saved model equals the base model")


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    if tokenizer is not None:
        tokenizer.save_pretrained(os.fspath(folder))
