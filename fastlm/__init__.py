"""fastlm: fine-tune language models faster and in less memory, with the same numbers.

The public names are imported when they are first used: importing fastlm loads nothing and changes nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastlm import chat_templates, data, evaluation, memory
    from fastlm.guards import callbacks
    from fastlm.memory.manager import set_memory_strategy
    from fastlm.memory.prediction import estimate, max_batch_size, max_seq_length
    from fastlm.migrated import (
        SFTConfig,
        SFTTrainer,
        UnslothTrainer,
        UnslothTrainingArguments,
        is_bf16_supported,
        is_bfloat16_supported,
        unsloth_train,
    )
    from fastlm.model import FastLanguageModel, FastModel, patch_model, revert
    from fastlm.reporting import report
    from fastlm.tokens import add_new_tokens

__version__ = "0.1.0"

_WHERE = {
    "FastLanguageModel": "fastlm.model",
    "FastModel": "fastlm.model",
    "patch_model": "fastlm.model",
    "revert": "fastlm.model",
    "report": "fastlm.reporting",
    "callbacks": "fastlm.guards",
    "add_new_tokens": "fastlm.tokens",
    "estimate": "fastlm.memory.prediction",
    "max_batch_size": "fastlm.memory.prediction",
    "max_seq_length": "fastlm.memory.prediction",
    "set_memory_strategy": "fastlm.memory.manager",
    "SFTConfig": "fastlm.migrated",
    "SFTTrainer": "fastlm.migrated",
    "UnslothTrainer": "fastlm.migrated",
    "UnslothTrainingArguments": "fastlm.migrated",
    "is_bf16_supported": "fastlm.migrated",
    "is_bfloat16_supported": "fastlm.migrated",
    "unsloth_train": "fastlm.migrated",
}
# packages with names of their own
_PACKAGES = ("chat_templates", "data", "evaluation", "memory")
__all__ = [
    "FastLanguageModel",
    "FastModel",
    "SFTConfig",
    "SFTTrainer",
    "UnslothTrainer",
    "UnslothTrainingArguments",
    "add_new_tokens",
    "callbacks",
    "chat_templates",
    "data",
    "estimate",
    "evaluation",
    "is_bf16_supported",
    "is_bfloat16_supported",
    "max_batch_size",
    "max_seq_length",
    "memory",
    "patch_model",
    "report",
    "revert",
    "set_memory_strategy",
    "unsloth_train",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"fastlm.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'fastlm' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
