"""fastlm: fine-tune language models faster and in less memory, with the same numbers.

The public names are imported when they are first used: importing fastlm loads nothing and changes nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastlm import chat_templates, data
    from fastlm.guards import callbacks
    from fastlm.model import FastLanguageModel, patch_model, revert
    from fastlm.reporting import report

__version__ = "0.1.0"

_WHERE = {
    "FastLanguageModel": "fastlm.model",
    "patch_model": "fastlm.model",
    "revert": "fastlm.model",
    "report": "fastlm.reporting",
    "callbacks": "fastlm.guards",
}
# packages with names of their own
_PACKAGES = ("chat_templates", "data")
__all__ = ["FastLanguageModel", "callbacks", "chat_templates", "data", "patch_model", "report", "revert"]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"fastlm.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'fastlm' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
