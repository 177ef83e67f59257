"""Adapters by a path: `save_lora` and `load_lora`, beside PEFT's own methods, which work too."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from fastlm import adapters, files
from fastlm.export.merge import save_pretrained_merged

logger = logging.getLogger(__name__)


def save_lora(model: Any, save_directory: str | os.PathLike[str], tokenizer: Any = None) -> None:
    """Save the adapters of a model in PEFT's own format, whole or not at all.

    Args:
        model: the PEFT model.
        save_directory: target folder; made if missing.
        tokenizer: saved beside them, if given.

    Raises:
        ValueError: if the model has no adapter, or an adapter's name is no name of a folder.
    """
    save_pretrained_merged(model, save_directory, tokenizer, save_method="lora")


def load_lora(
    model: Any, path: str | os.PathLike[str], adapter_name: str | None = None, is_trainable: bool = False
) -> str:
    """Load a saved adapter into a model that has one, beside the others, and make it the active one.

    Args:
        model: the PEFT model; a base model without an adapter takes its first by `FastLanguageModel.from_pretrained(path)`.
        path: the adapter's folder, with safetensors weights.
        adapter_name: by which `set_adapter` finds it again; None is the folder's name. An adapter of this name is replaced.
        is_trainable: whether its weights are trained from now on. An optimizer knows only those that were there when it was made.

    Returns:
        The adapter's name.

    Raises:
        TypeError: if the model has no adapter yet.
        ValueError: if the folder holds none, or it does not fit the model: the adapters are then as they were.
    """
    if not adapters.is_peft_model(model):
        raise TypeError(
            f"load_lora adds an adapter to a PEFT model, got a {type(model).__name__}: load the first one with "
            "FastLanguageModel.from_pretrained(path)"
        )
    folder = Path(path)
    settings_file = folder / "adapter_config.json"
    if not settings_file.is_file():
        raise ValueError(f"{os.fspath(path)!r} holds no adapter: its adapter_config.json is missing")
    files.check_adapter(str(settings_file), files.read_json(str(settings_file)))
    files.check_weights(str(folder), "adapter_model", allow_pickle=False)
    name = adapter_name if adapter_name is not None else folder.resolve().name.replace(".", "_")
    if not name or "." in name:
        raise ValueError(f"adapter_name becomes a part of the names of weights and must have no dot, got {name!r}")
    _load_beside(model, str(folder), name, is_trainable)
    logger.info("adapter %r is loaded from %s and active", name, folder)
    return name


def _load_beside(model: Any, folder: str, name: str, is_trainable: bool) -> None:
    # under a name of its own until it is known to fit
    new = name if name not in model.peft_config else f"{name}-new"
    is_training, trained = model.training, [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        result = model.load_adapter(folder, new, is_trainable=is_trainable)
        missing = [key for key in result.missing_keys if f".{new}." in key]
        foreign = [key for key in result.unexpected_keys if "lora_" in key]
        if missing or foreign:
            raise ValueError(f"it lacks {missing[0]}" if missing else f"{foreign[0]} has no place in it")
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        if new in model.peft_config:
            model.delete_adapter(new)
        for parameter, requires_grad in trained:
            parameter.requires_grad_(requires_grad)
        model.train(is_training)
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"the adapter {folder!r} does not fit this model, which is as it was: {reason}") from error
    if new != name:
        model.delete_adapter(new)
        model.delete_adapter(name)
        model.load_adapter(folder, name, is_trainable=is_trainable)
    model.set_adapter(name, inference_mode=not is_trainable)
