"""Trainers by the names and with the keywords of scripts that were written for older TRL, or for Unsloth.

Thin subclasses of TRL's classes: what is trained is what TRL trains, TRL itself stays as it is.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
import transformers
import trl
from torch import nn

from fastlm.keywords import current, split_trainer
from fastlm.trainers import is_bfloat16_supported

logger = logging.getLogger(__name__)


is_bf16_supported = is_bfloat16_supported


def _tell(name: str, notes: list[str]) -> None:
    if notes:
        logger.info("%s took older keywords: %s", name, "; ".join(notes))


class SFTConfig(trl.SFTConfig):
    """TRL's SFTConfig that also takes the keywords of older releases (max_seq_length, evaluation_strategy, warmup_ratio, …).

    Raises:
        ValueError: for a setting given by its old name and its new one.
        TypeError: for a keyword that no release had.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        settings, notes = current(kwargs)
        _tell(type(self).__name__, notes)
        super().__init__(*args, **settings)


_CONFIG_NAMES = frozenset(field.name for field in dataclasses.fields(trl.SFTConfig))


class SFTTrainer(trl.SFTTrainer):
    """TRL's SFTTrainer that also takes the keywords of older releases.

    `tokenizer` for `processing_class`; `dataset_text_field`, `max_seq_length`, `packing`, `dataset_num_proc` and the like, which
    belong into the SFTConfig; plain TrainingArguments for `args`. A setting that the call gives replaces that of `args`,
    as it did; the `args` given are not changed.

    Raises:
        ValueError: for an argument given by its old name and its new one.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        kwargs, settings, notes = split_trainer(kwargs, _CONFIG_NAMES)
        _tell(type(self).__name__, notes)
        args_at = 1
        config = args[args_at] if len(args) > args_at else kwargs.get("args")
        if settings:
            config = _with_settings(config, current(settings)[0])
            if len(args) > args_at:
                args = (*args[:args_at], config, *args[args_at + 1 :])
            else:
                kwargs["args"] = config
        super().__init__(*args, **kwargs)


def _with_settings(config: Any, settings: dict[str, Any]) -> Any:
    """An SFTConfig with these settings instead of the given one's."""
    if config is None:
        return SFTConfig(**settings)
    if not isinstance(config, transformers.TrainingArguments):
        raise TypeError(f"args must be an SFTConfig or TrainingArguments, got {type(config).__name__}")
    # not to_dict, which hides whatever is called a token
    taken = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init}
    kind = type(config) if isinstance(config, trl.SFTConfig) else SFTConfig
    return kind(**taken | settings)


@dataclasses.dataclass(init=False)
class UnslothTrainingArguments(SFTConfig):
    """An SFTConfig with learning rates of their own for some parameters.

    Attributes:
        embedding_learning_rate: of the embedding and the head, where they are trained whole (`modules_to_save`), usually two to
            ten times below `learning_rate`; None for the same.
        loraplus_lr_ratio: the learning rate of LoRA's B matrices over that of A, 1 or more; None for the same. Hayou et al.
            2024, arXiv:2402.12354.
    """

    embedding_learning_rate: float | None = None
    loraplus_lr_ratio: float | None = None

    def __init__(
        self,
        *args: Any,
        embedding_learning_rate: float | None = None,
        loraplus_lr_ratio: float | None = None,
        **kwargs: Any,
    ):
        for name, value in (
            ("embedding_learning_rate", embedding_learning_rate),
            ("loraplus_lr_ratio", loraplus_lr_ratio),
        ):
            if value is not None and not (isinstance(value, (int, float)) and value > 0):
                raise ValueError(f"{name} must be a number above 0, or None, got {value!r}")
        super().__init__(*args, **kwargs)
        self.embedding_learning_rate = embedding_learning_rate
        self.loraplus_lr_ratio = loraplus_lr_ratio


class UnslothTrainer(SFTTrainer):
    """An SFTTrainer whose optimizer has the learning rates of `UnslothTrainingArguments`; the scheduler scales all of them."""

    # the Trainer's
    optimizer: torch.optim.Optimizer | None

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        settings = self.args
        if self.optimizer is not None or not isinstance(settings, UnslothTrainingArguments):
            return super().create_optimizer(model)
        if settings.embedding_learning_rate is None and settings.loraplus_lr_ratio is None:
            return super().create_optimizer(model)
        trained: Any = self.model if model is None else model
        make, kwargs = self.get_optimizer_cls_and_kwargs(settings, trained)
        if set(kwargs) & {"params", "model", "optimizer_dict"}:
            raise ValueError(
                f"optim={settings.optim!r} makes parameter groups of its own: leave embedding_learning_rate and "
                "loraplus_lr_ratio out, or choose another, as adamw_torch or adamw_8bit"
            )
        made: torch.optim.Optimizer = make(self._groups(trained), **kwargs)
        self.optimizer = made
        return made

    def _groups(self, model: Any) -> list[dict[str, Any]]:
        """Trained parameters by learning rate and weight decay; each in one group, empty groups left out."""
        settings = self.args
        rate = settings.learning_rate
        tables = [table for table in (model.get_input_embeddings(), model.get_output_embeddings()) if table is not None]
        whole = {id(p) for table in tables for name, p in table.named_parameters() if "lora_" not in name}
        decaying = set(self.get_decay_parameter_names(model))
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            own = rate
            if id(parameter) in whole and settings.embedding_learning_rate is not None:
                own = settings.embedding_learning_rate
            elif settings.loraplus_lr_ratio is not None and ("lora_B" in name or "lora_embedding_B" in name):
                own = rate * settings.loraplus_lr_ratio
            groups.setdefault((own, settings.weight_decay if name in decaying else 0.0), []).append(parameter)
        return [{"params": params, "lr": lr, "weight_decay": decay} for (lr, decay), params in groups.items()]


def unsloth_train(trainer: transformers.Trainer, *args: Any, **kwargs: Any) -> Any:
    """`trainer.train(…)`. Gradient accumulation needs no other loop: losses are normalised by the tokens of all its batches."""
    return trainer.train(*args, **kwargs)
