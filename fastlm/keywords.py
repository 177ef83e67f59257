"""Keywords of trainers that older releases of TRL and transformers took, and what is written instead."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

logger = logging.getLogger(__name__)

# of SFTTrainer -> of SFTTrainer
TRAINER_RENAMED: Mapping[str, str] = {"tokenizer": "processing_class"}
# settings that were SFTTrainer's own and are SFTConfig's
TRAINER_SETTINGS = (
    "dataset_batch_size", "dataset_kwargs", "dataset_num_proc", "dataset_text_field", "eval_packing", "max_length",
    "max_seq_length", "model_init_kwargs", "neftune_noise_alpha", "num_of_sequences", "chars_per_token", "packing",
)  # fmt: skip
# of TrainingArguments and SFTConfig -> what they are called now
RENAMED: Mapping[str, str] = {
    "max_seq_length": "max_length",
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_token": "hub_token",
    # a share of the steps is a number below 1 now
    "warmup_ratio": "warmup_steps",
}
# settings that are gone -> the values that today's libraries have always, or that nothing depends on any more
GONE: Mapping[str, tuple[Any, ...]] = {
    "chars_per_token": (3.6,),
    "dataset_batch_size": (None, 1, 1000),
    "fp16_backend": ("auto",),
    "fp16_opt_level": ("O1",),
    "half_precision_backend": ("auto",),
    "include_tokens_per_second": (False,),
    "jit_mode_eval": (False,),
    "logging_dir": (None,),
    "num_of_sequences": (1024,),
    "overwrite_output_dir": (False, True),
    "past_index": (-1,),
    "ray_scope": ("last",),
    "save_safetensors": (True,),
    "use_ipex": (False,),
    "use_legacy_prediction_loop": (False,),
    "use_mps_device": (False,),
}
# what to write for a value that is not the one above
INSTEAD: Mapping[str, str] = {
    "logging_dir": "the folder of TensorBoard's logs is named by the environment variable TENSORBOARD_LOGGING_DIR",
    "save_safetensors": "weights are saved as safetensors",
    "half_precision_backend": "mixed precision is torch's",
}
# switches that became a value of another setting
SWITCHES: Mapping[str, tuple[str, str]] = {
    "adafactor": ("optim", "adafactor"),
    "group_by_length": ("train_sampling_strategy", "group_by_length"),
}


def current(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Settings by today's names, and what was changed.

    Raises:
        ValueError: for a setting given by both names.
    """
    made: dict[str, Any] = {}
    notes: list[str] = []
    for name, value in given.items():
        if name in SWITCHES:
            new, chosen = SWITCHES[name]
            pair = (new, chosen) if value else None
            notes.append(f"{name}={value!r} is {new}={chosen!r}" if value else f"{name}={value!r} is the default")
        elif name in RENAMED:
            pair = (RENAMED[name], value)
            notes.append(f"{name} is {RENAMED[name]}")
        elif name in GONE:
            pair = None
            why = "" if value in GONE[name] else f": {INSTEAD.get(name, 'it was left out')}"
            notes.append(f"{name}={value!r} is gone{why}")
        else:
            pair = (name, value)
        if pair is None:
            continue
        is_ratio = name == "warmup_ratio"
        if pair[0] in given and name != pair[0]:
            # as before: a number of steps wins over a share of them
            if is_ratio and given["warmup_steps"]:
                continue
            if not is_ratio:
                raise ValueError(
                    f"{name}={value!r} is {pair[0]} by its old name, which is given too: {given[pair[0]]!r}"
                )
        if pair[0] == "warmup_steps" and not is_ratio and not value and given.get("warmup_ratio"):
            continue
        made[pair[0]] = pair[1]
    return made, notes


def split_trainer(
    given: Mapping[str, Any], of_config: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """SFTTrainer's arguments by today's names, those of its old ones that belong into the SFTConfig, and what was changed.

    Args:
        given: keywords of a call.
        of_config: names that an SFTConfig takes.
    """
    trainer: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    notes: list[str] = []
    for name, value in given.items():
        if name in TRAINER_RENAMED:
            if TRAINER_RENAMED[name] in given:
                raise ValueError(f"{name} is {TRAINER_RENAMED[name]} by its old name, and both are given")
            trainer[TRAINER_RENAMED[name]] = value
            notes.append(f"{name} is {TRAINER_RENAMED[name]}")
        elif name in TRAINER_SETTINGS and (name in of_config or name in RENAMED or name in GONE):
            settings[name] = value
            notes.append(f"{name} belongs into SFTConfig")
        else:
            trainer[name] = value
    return trainer, settings, notes
