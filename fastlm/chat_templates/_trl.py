"""The chat templates that TRL ships with marks for training, as text."""

from __future__ import annotations

import functools
import importlib.resources


@functools.cache
def training_template(name: str) -> str:
    """Jinja of `trl/chat_templates/<name>_training.jinja`: the model's own template with `{% generation %}` marks.

    Raises:
        ValueError: if the installed TRL ships none of this name.
    """
    file = importlib.resources.files("trl") / "chat_templates" / f"{name}_training.jinja"
    if not file.is_file():
        raise ValueError(
            f"the installed trl has no training template {name!r}: fastlm reads those of trl 1.15 and newer"
        )
    return file.read_text(encoding="utf-8")
