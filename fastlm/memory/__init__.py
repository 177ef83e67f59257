"""Memory: what each layer keeps, what a run will need, and what to change where it would not fit.

`estimate`, `max_batch_size` and `max_seq_length` predict; `advice` says what an out-of-memory error should. They are imported when they
are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastlm.memory.manager import set_memory_strategy
    from fastlm.memory.prediction import Estimate, advice, estimate, max_batch_size, max_seq_length

_PUBLIC = ("Estimate", "advice", "estimate", "max_batch_size", "max_seq_length")
__all__ = ["Estimate", "advice", "estimate", "max_batch_size", "max_seq_length", "set_memory_strategy"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module("fastlm.memory.prediction"), name)
    if name == "set_memory_strategy":
        return importlib.import_module("fastlm.memory.manager").set_memory_strategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
