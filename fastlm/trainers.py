"""The door to trl: our head under its trainers, and a trainer made in one call."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
import sys
from collections.abc import Sized
from typing import Any

import torch
from torch import Tensor, nn

from fastlm import adapters, binding
from fastlm.forwards.causal_lm import TOKEN_OUTPUT
from fastlm.patching import opaque, patch_of
from fastlm_kernels.linear_cross_entropy import TokenStats

logger = logging.getLogger(__name__)

# What TRL's SFTTrainer asks of its fused head; others ask for more and keep TRL's.
_FIELDS = ("log_probs", "entropy", "is_top1")


def token_output(loss: Tensor, statistics: TokenStats, label_mask: Tensor) -> Any:
    """TRL's output of a fused head, from our per-token statistics. All of shape [B, S]."""
    output = importlib.import_module("trl.trainer.utils").FusedCausalLMOutput
    values = dict(
        loss=loss,
        log_probs=statistics.log_probs,
        entropy=statistics.entropy,
        is_top1=statistics.is_top1,
        label_mask=label_mask,
    )
    return output(**values)


def _head_reason(base: nn.Module) -> str | None:
    """Why TRL's fused head runs instead of ours, or None. Read from the wrapper that TRL put on this model.

    TRL's wrapper bears the name of the forward that it wraps; what it closes over shows what it is and how it was made.
    """
    # accelerate's mixed precision keeps the forward that it wrapped under the second name
    outermost = base.__dict__.get("_original_forward", base.__dict__.get("forward"))
    function = getattr(outermost, "__func__", None)
    made_with = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    if "original_forward" not in made_with or "temperature" not in made_with:
        return "the fused head was asked for, but TRL's wrapper is not on this model"
    if made_with["temperature"] != 1.0:
        return f"TRL's head was made with temperature {made_with['temperature']}"
    if made_with.get("cast_lm_head_to_fp32", False):
        return "TRL's head was made to run in float32"
    further = set(made_with.get("outputs", ())) - set(_FIELDS)
    if further:
        return f"TRL's head was asked for {', '.join(sorted(further))}"
    return None


@opaque
def _redirect_head(base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Forward pre-hook of a patched model: TRL's request for its head becomes a request for ours.

    TRL's wrapper hands calls without its flag to the forward that it captured, which is ours.
    """
    if not kwargs.get("fused_lm_head"):
        return None
    patch = patch_of(base)
    if patch is None or not patch.active:
        return None
    state = binding.state_of(base)
    if state.head_wrapper is not base.__dict__.get("forward"):
        # a new wrapper: look once at how it was made
        state.head_wrapper = base.__dict__.get("forward")
        state.head_reason = _head_reason(base)
    if not state.told_of_cut:
        _log_cut_rows(state, kwargs)
    reason = state.head_reason
    if reason is not None:
        patch.fell_back(reason)
        return None
    kwargs = dict(kwargs)
    del kwargs["fused_lm_head"]
    kwargs[TOKEN_OUTPUT] = token_output
    return args, kwargs


def _log_cut_rows(state: binding.ModelState, kwargs: dict[str, Any]) -> None:
    """Tell once of rows that end exactly where TRL's default length cuts them, if the model was loaded for longer ones."""
    rows, longest = kwargs.get("input_ids"), state.max_seq_length
    if rows is None or longest is None or kwargs.get("cu_seq_lens_q") is not None:
        return
    default = next(f.default for f in dataclasses.fields(sys.modules["trl"].SFTConfig) if f.name == "max_length")
    if rows.shape[1] == default < longest:
        state.told_of_cut = True
        logger.warning(
            "rows end exactly at %d tokens, the default max_length of SFTConfig, while the model was loaded for %d: longer rows are "
            "cut. Pass SFTConfig(max_length=%d) to train on all of them",
            default,
            longest,
            longest,
        )


def serve_head(model: nn.Module) -> None:
    """Let the model's own fused head answer TRL's trainers. On this model's instance only."""
    base = adapters.base_model(model)
    state = binding.state_of(model)
    patch = patch_of(base)
    if state is not None and state.hook is None and patch is not None and patch.part == "head":
        state.hook = base.register_forward_pre_hook(_redirect_head, with_kwargs=True)


def get_trainer(model: nn.Module, train_dataset: Any, args: Any = None, **kwargs: Any) -> Any:
    """A TRL `SFTTrainer` for this model.

    Args:
        model: loaded or patched by fastlm.
        train_dataset: as SFTTrainer takes it; must hold at least one row if its length is known.
        args: an `SFTConfig`, or a dict of its arguments, or None for its defaults. Without a `max_length` of its own, rows may be as
            long as the model was loaded for. Mixed precision follows the model's dtype where the dict does not say it.
        **kwargs: SFTTrainer's other arguments (processing_class, eval_dataset, callbacks, …).

    Returns:
        The trainer. It computes what a plain SFTTrainer with the same arguments does.

    Raises:
        TypeError: if args is neither, or an argument is unknown to SFTConfig.
        ValueError: for a data set without a token to train on, or bf16=True on a GPU without bfloat16.
    """
    trl = importlib.import_module("trl")
    train_dataset = _as_dataset(train_dataset)
    if "eval_dataset" in kwargs:
        kwargs["eval_dataset"] = _as_dataset(kwargs["eval_dataset"])
    if "tokenizer" in kwargs:
        raise TypeError("get_trainer() takes the tokenizer as processing_class, as TRL names it")
    if train_dataset is None or (hasattr(train_dataset, "__len__") and len(train_dataset) == 0):
        raise ValueError("train_dataset is empty or missing: there is nothing to train on")
    state = binding.state_of(model)
    if args is None or isinstance(args, dict):
        settings = dict(args or {})
        if "max_length" not in settings and state is not None and state.max_seq_length is not None:
            settings["max_length"] = state.max_seq_length
        _choose_precision(model, settings)
        args = trl.SFTConfig(**settings)
    elif not isinstance(args, trl.SFTConfig):
        raise TypeError(f"args must be an SFTConfig or a dict of its arguments, got {type(args).__name__}")
    _refuse_bf16(args.bf16 and not args.use_cpu)
    trainer = trl.SFTTrainer(model=model, train_dataset=train_dataset, args=args, **kwargs)
    if _is_empty(trainer.train_dataset):
        raise ValueError(
            "no row of train_dataset has a token to train on: all labels are -100, in every row. Look at what masks them "
            "(completion_only_loss, assistant_only_loss, train_on_responses_only, or a max_length that cuts every answer)"
        )
    return trainer


def _is_empty(rows: Any) -> bool:
    """Whether a data set that knows its length has no rows."""
    return isinstance(rows, Sized) and len(rows) == 0


def _as_dataset(rows: Any) -> Any:
    """A data set from a list of rows; anything else as it is."""
    return (
        importlib.import_module("datasets").Dataset.from_list(list(rows)) if isinstance(rows, (list, tuple)) else rows
    )


def _has_bf16() -> bool:
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 0)


def _refuse_bf16(is_asked: bool | None) -> None:
    if is_asked and not _has_bf16():
        raise ValueError(
            f"bf16=True needs compute capability 8.0, {torch.cuda.get_device_name()} is older: use fp16=True"
        )


def _choose_precision(model: nn.Module, settings: dict[str, Any]) -> None:
    """Fill in bf16 and fp16 by the model's dtype and the device, unless the user said either."""
    _refuse_bf16(settings.get("bf16") and not settings.get("use_cpu"))
    if not torch.cuda.is_available() and "use_cpu" not in settings:
        settings["use_cpu"] = True
    if "bf16" in settings or "fp16" in settings:
        return
    dtype = adapters.base_model(model).dtype
    settings["bf16"] = dtype is torch.bfloat16 and _has_bf16()
    settings["fp16"] = dtype is torch.float16 and torch.cuda.is_available()
