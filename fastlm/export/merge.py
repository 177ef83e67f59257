"""`save_pretrained_merged`: a trained model as a plain 16-bit checkpoint, as a 4-bit one, or its adapter.

The checkpoint has the names, the configuration and the files that transformers' own `save_pretrained` gives the
model without adapters. It is written beside its target, verified against the live model, and exchanged with the target when
complete: after an error or a kill the target holds what it held before.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from fastlm import adapters
from fastlm.export import verify as verification
from fastlm.export.bases import with_base
from fastlm.export.card import merged_card
from fastlm.export.checkpoint import WEIGHT_FILE, Checkpoint, common_dtype, dtype_rule, tied_names
from fastlm.export.folders import staging
from fastlm.export.four_bit import FourBit
from fastlm.export.sources import TOKENIZER_FILES, save_generation_config, save_tokenizer
from fastlm.export.targets import TARGETS, check_target, quantize_folder
from fastlm.export.weights import PLAIN_DTYPES, Source, effective_weights

logger = logging.getLogger(__name__)

SAVE_METHODS = ("merged_16bit", "merged_4bit", "merged_4bit_forced", "lora", *TARGETS)
_GGUF = ("gguf", "f16", "bf16", "f32", "q8_0", "q4_k_m", "q5_k_m", "q6_k", "q4_0", "q2_k", "q3_k_m")
_NOT_YET = dict.fromkeys(_GGUF, "save_pretrained_gguf writes that, with quantization_method")
_SAVED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def save_pretrained_merged(
    model: Any,
    save_directory: str | os.PathLike[str],
    tokenizer: Any = None,
    save_method: str = "merged_16bit",
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    base: str | os.PathLike[str] | None = None,
    verify: bool = True,
) -> None:
    """Save a model with its adapters merged into its weights, or the adapter alone.

    W + s B A is computed in float32 from the weights that the model trained on (4-bit and 8-bit weights decoded) and
    rounded once. The live model is not touched. Embeddings and heads that were trained apart are saved apart, with
    `tie_word_embeddings` false in the configuration. A model without adapters is saved as it is. Of several processes, the one
    of rank 0 saves.

    Args:
        model: a transformers model, or one that PEFT wrapped.
        save_directory: target folder; made if missing. In an existing folder, files of the same names and the weight
            and tokenizer files of an earlier save are replaced, others stay. A model card is written where none is.
        tokenizer: saved beside the weights, if given; a processor works too. Files of a tokenizer, and generation settings, that are as
            they were loaded are copies of their source's, byte for byte.
        save_method: "merged_16bit"; "merged_4bit" (bitsandbytes: weights that an adapter changes are quantized anew, which
            "merged_16bit" avoids); "lora" (PEFT's own format); or a format of another library, listed in `fastlm.export.targets`, made of
            the verified 16-bit model, which then lies in memory as a whole.
        max_shard_size: largest weight file, bytes or a text such as "5GB"; a single larger tensor gets its own file. Beyond the live model,
            the memory of one such file is needed, and of one tensor.
        dtype: torch.bfloat16, torch.float16 or torch.float32; by default the model's own 16-bit dtype, bfloat16 for a
            float32 model. "lora" ignores it.
        base: folder of the 16-bit model that this one was loaded from: adapters are added to its weights instead of the decoded
            ones that they were trained on.
        verify: before anything is replaced, compute every tensor again and compare it with the files bit for bit, and compare the logits
            of a short probe: the live model's may differ from those of the saved weights by twice the error that 16-bit arithmetic
            makes. Where the saved weights are others by intent ("merged_4bit", `base`), and for 8-bit models, the tensors alone
            are compared. "lora" ignores it.

    Raises:
        TypeError: if the model is not a transformers or PEFT model.
        ValueError: for an unknown `save_method` or `dtype`, "lora" without an adapter, an adapter that has no merged
            form, is switched off or changes no saved weight, weights that are not finite, a `base` of another model, or a folder
            with an adapter.
        RuntimeError: if the verification fails, with numbers.
        ImportError: if the library of a format is not installed, naming the extra.
        NotImplementedError: for a format that is not supported yet; the text says what to use.
    """
    _check_method(save_method)
    inner = _base_model(model)
    target = Path(save_directory).resolve()
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank():
        logger.info("%s is saved by the process of rank 0", target)
        return
    if save_method == "lora":
        _save_adapter(model, inner, target, tokenizer)
        return
    if (target / "adapter_config.json").exists():
        raise ValueError(
            f"{target} holds an adapter, which transformers would apply again on top of the merged weights; "
            f"save the merged model into another folder"
        )
    _check_mergeable(model)
    weights = effective_weights(inner)
    _check_quantizer(inner, weights)
    dtype = _saved_dtype(inner, weights, dtype)
    if base is not None:
        weights = with_base(weights, base)
    packer = FourBit(inner, weights, dtype) if save_method.startswith("merged_4bit") else None
    with staging(target, replaces=_replaced(tokenizer)) as folder:
        save_tokenizer(tokenizer, folder, inner.get_input_embeddings().weight.shape[0])
        save_generation_config(inner, folder)
        tied = tied_names(inner, weights, dtype)
        _save_config(inner, dtype, folder, is_tied=bool(tied), quantization=packer.config if packer else None)
        left_out = tied | set(inner._keys_to_ignore_on_save or ())
        written = {name: source for name, source in weights.items() if name not in left_out}
        checkpoint = Checkpoint(inner, written, dtype_rule(inner, dtype), packer)
        is_changed = checkpoint.write(folder, max_shard_size)
        _check_changed(written, is_changed, "4 bits" if packer else str(dtype))
        if verify:
            logger.info("verified: %d tensors", checkpoint.verify(folder))
            if packer is None and base is None:
                verification.check_logits(inner, weights, folder, dtype)
        form = "in bitsandbytes' 4-bit form" if packer else f"in {str(dtype).removeprefix('torch.')}"
        if save_method in TARGETS:
            quantize_folder(inner, folder, save_method, max_shard_size)
            form = f"quantized as {save_method}"
        if not (target / "README.md").exists():
            merged_card(model, inner, f"its weights {form}").save(folder / "README.md")


def _replaced(tokenizer: Any) -> re.Pattern[str]:
    """Files of an earlier save that must not be read with the new ones."""
    names = "|".join(map(re.escape, TOKENIZER_FILES if tokenizer is not None else ()))
    return re.compile(f"{WEIGHT_FILE.pattern}|{names}" if names else WEIGHT_FILE.pattern)


def _save_adapter(model: Any, base: PreTrainedModel, target: Path, tokenizer: Any) -> None:
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
        save_tokenizer(tokenizer, folder, base.get_input_embeddings().weight.shape[0])


def _check_method(save_method: str) -> None:
    if save_method in TARGETS:
        check_target(save_method)
    if save_method in SAVE_METHODS:
        return
    if save_method == "torchao_int4":
        raise ValueError(
            "save_method='torchao_int4' is not there: torchao packs int4 weights on and for one kind of GPU. "
            "'compressed_tensors_w4a16' has int4 weights that vLLM and SGLang read"
        )
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
    return common_dtype(weights.values(), base.config.dtype)


def _save_config(base: PreTrainedModel, dtype: torch.dtype, folder: Path, is_tied: bool, quantization: Any) -> None:
    config: Any = copy.deepcopy(base.config)
    vars(config).pop("quantization_config", None)
    if quantization is not None:
        config.quantization_config = quantization
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(base).__name__]
    for part in (config, config.get_text_config()):
        if part.tie_word_embeddings and not is_tied:
            part.tie_word_embeddings = False
    if base.is_remote_code():
        custom_object_save(base, folder, config=config)
    config.save_pretrained(folder)


def _check_changed(weights: dict[str, Source], is_changed: bool, form: str) -> None:
    adapted = [name for name, source in weights.items() if source.is_adapted]
    if not adapted or is_changed:
        return
    if any(not weights[name].is_zero() for name in adapted):
        raise ValueError(
            f"the adapter is too small to change any entry of the {len(adapted)} adapted tensors in {form}: the saved "
            f"model would be the untrained one. Train on, save with dtype=torch.float32, or use save_method='lora'"
        )
    logger.warning("the adapter is all zero: the saved model equals the base model")
