"""Chat templates of strangers: each renders a short conversation in time, when it is loaded, or is refused.

transformers renders templates in Jinja's sandbox, which keeps them from the rest of the process but sets no limit to their loops.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import jinja2

# an honest template takes milliseconds, traced as it is here
SECONDS = 2.0
_NAME = re.compile(r"[\w.-]+")
_TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
_PROBES: list[dict[str, Any]] = [
    {"conversation": [*_TURNS, _TURNS[0]], "add_generation_prompt": True},
    {"conversation": [{"role": "system", "content": "c"}, *_TURNS], "tools": [_TOOL]},
]


def check_templates(tokenizer: Any, where: str) -> None:
    """Refuse a tokenizer whose chat template does not end, or would be saved outside its folder.

    Args:
        tokenizer: of transformers, with one template, several by name, or none.
        where: it comes from, for the error.

    Raises:
        ValueError: naming the template. What else a template does wrong shows when it is used.
    """
    templates = tokenizer.chat_template
    if isinstance(templates, str):
        templates = {"default": templates}
    for name, text in (templates or {}).items():
        if not _NAME.fullmatch(str(name)):
            raise ValueError(
                f"the name of a chat template in {where} must be letters, digits, '.', '_' and '-', got {name!r}"
            )
        _check(tokenizer, text, f"the chat template {name!r} in {where}")


def _check(tokenizer: Any, text: str, named: str) -> None:
    if _has_power(text):
        raise ValueError(f"{named} computes powers, which no template needs and which may never end")
    for probe in _PROBES:
        try:
            with _within(SECONDS):
                tokenizer.apply_chat_template(**probe, chat_template=text, tokenize=False)
        except _TooLate as error:
            raise ValueError(
                f"{named} does not end: {SECONDS:g} s were not enough for a conversation of {len(probe['conversation'])} short turns. "
                "Set another one in its place"
            ) from error
        except Exception:  # noqa: S112
            # many refuse a role or tools, with errors of any kind
            continue


def _has_power(text: Any) -> bool:
    """Whether a template raises numbers to a power: Jinja does it when it compiles, and nothing can end 9 ** 9 ** 9."""
    try:
        # only cut into words. A call's **names follow a bracket or a comma
        words = [(kind, word) for _, kind, word in jinja2.Environment().lex(text) if kind != "whitespace"]  # noqa: S701
    except (jinja2.TemplateSyntaxError, TypeError):
        # no template: said by who uses it
        return False
    powers = [number for number, word in enumerate(words) if word == ("operator", "**")]
    return any(words[number - 1] not in (("operator", "("), ("operator", ",")) for number in powers)


class _TooLate(Exception):
    pass


@contextlib.contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raise `_TooLate` inside Python code that is called in here, once this time is over."""
    end, before = time.perf_counter() + seconds, sys.gettrace()

    def trace(frame: FrameType, event: str, value: Any) -> Any:
        if time.perf_counter() > end:
            raise _TooLate
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
