"""Which characters of a rendered conversation the model has to write, as the chat template itself tells.

Marks (`{% generation %}`) say it. Where a template has none, the difference between two renderings does: with and without
an answer, or with another one in its place.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
Span = tuple[int, int]

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# characters of no script, which no data set holds and no template changes
_STAND_IN = "\ue000\ue001"


def units_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[str]]:
    """A function that splits a text; tokens and <tags> count as one: two of them may begin alike without being the same."""
    tokens = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
    unit = re.compile("|".join([*map(re.escape, tokens), r"<[^<>\s]+>", r"\[/?[A-Z_]+\]", "."]), flags=re.DOTALL)
    return unit.findall


def common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many elements two sequences begin with in common."""
    if isinstance(a, str) and isinstance(b, str):
        # whole texts are long: halve the question instead of asking for every character
        low, high = 0, min(len(a), len(b))
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle - 1)
        return low
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


class AnswerSpans:
    """`text, spans = answer_spans(messages)`: a rendered conversation, and `text[start:end]` of each answer.

    An answer reaches from the end of what the generation prompt holds to the end of its end-of-turn token: the thinking
    block, the text and the tool calls that the model writes. `spans` is None where neither marks nor renderings tell the
    answers apart.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None):
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.units = units_of(tokenizer)
        self._openings: dict[str, str] = {}
        self._parts: dict[str, list[str]] = {}

    def _render(self, messages: Sequence[Message], is_marked: bool = False, **options: Any) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self.tokenizer.get_chat_template(self.chat_template, options.get("tools"))
        (text,), marks = render_jinja_template(
            [list(messages)],
            chat_template=template,
            return_assistant_tokens_mask=is_marked,
            **{**self.tokenizer.special_tokens_map, **options},
        )
        return text, marks[0] if is_marked else []

    def __call__(self, messages: Sequence[Message], tools: Any = None, **options: Any) -> tuple[str, list[Span] | None]:
        """Render a conversation.

        Args:
            messages: with `role` and `content`, as the template takes them.
            tools, **options: passed to the template.

        Raises:
            jinja2.TemplateError, TypeError: what the template raises for this conversation.
        """
        render: Callable[..., tuple[str, list[Span]]] = functools.partial(self._render, tools=tools, **options)
        template = self.tokenizer.get_chat_template(self.chat_template, tools)
        if _MARK.search(template):
            text, marks = render(messages, is_marked=True)
            spans = [self._without_prompt(text, span, options) for span in _joined(marks)]
            return text, [self._with_end(text, span) for span in spans]
        return self._by_differences(messages, render, options)

    def opening(self, options: Mapping[str, Any]) -> str:
        """What the generation prompt adds to a question, as `<|im_start|>assistant` and a line break; "" for nothing."""
        import jinja2

        key = repr(options)
        if key not in self._openings:
            question = [{"role": "user", "content": _STAND_IN}]
            try:
                texts = [self._render(question, add_generation_prompt=prompt, **options)[0] for prompt in (False, True)]
            except jinja2.TemplateError:
                # the template wants more than a question: nothing is known of its prompt
                texts = ["", ""]
            before, after = (self.units(text.partition(_STAND_IN)[2]) for text in texts)
            self._openings[key] = "".join(after[common_prefix(before, after) :])
        return self._openings[key]

    def openings(self, options: Mapping[str, Any]) -> list[str]:
        """The opening, and what it begins with up to any of its tokens or with it, the longest first."""
        key = repr(options)
        if key not in self._parts:
            units = self.units(self.opening(options))
            ends = {n + end for n, unit in enumerate(units) if len(unit) > 1 for end in (0, 1)} | {len(units)}
            self._parts[key] = ["".join(units[:n]) for n in sorted(ends - {0}, reverse=True)]
        return self._parts[key]

    def _without_prompt(self, text: str, span: Span, options: Mapping[str, Any]) -> Span:
        """A mark may enclose the header too, which the prompt holds already."""
        start, end = span
        for part in self.openings(options):
            at = text.rfind(part, max(0, start - len(part)), min(end, start + len(part)))
            if at >= 0:
                return at + len(part), end
        return span

    def _by_differences(
        self, messages: Sequence[Message], render: Callable[..., tuple[str, list[Span]]], options: Mapping[str, Any]
    ) -> tuple[str, list[Span] | None]:
        import jinja2

        text, _ = render(messages)
        spans: list[Span] = []
        for n, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            low = spans[-1][1] if spans else 0
            span = None
            for find in (self._added, self._replaced):
                try:
                    span = find(text, messages, n, low, render, options)
                except (jinja2.TemplateError, TypeError):
                    # the template does not render the changed conversation
                    continue
                if span is not None and low <= span[0] and _holds(text, span, message):
                    break
                span = None
            if span is None:
                return text, None
            spans.append(self._with_end(text, span))
        return text, spans

    def _added(self, text: str, messages: Any, n: int, low: int, render: Any, options: Any) -> Span | None:
        """The answer is what its message adds to the generation prompt."""
        prompt = render(messages[:n], add_generation_prompt=True)[0]
        upto = render(messages[: n + 1])[0]
        end = common_prefix(text, upto)
        # a template may close a whole conversation once more
        closes_only = all(len(unit) > 1 or unit.isspace() for unit in self.units(upto[end:]))
        return (len(prompt), end) if text.startswith(prompt) and closes_only and end > len(prompt) else None

    def _replaced(self, text: str, messages: Any, n: int, low: int, render: Any, options: Any) -> Span | None:
        """The answer is what changes when another stands in its place: right where earlier turns render in another way."""
        other = {"role": "assistant", "content": _STAND_IN}
        changed = render([*messages[:n], other, *messages[n + 1 :]])[0]
        if changed.count(_STAND_IN) != 1:
            return None
        start = common_prefix(text, changed)
        same = common_prefix(text[::-1], changed[::-1])
        end = len(text) - same
        # back to the end of the header, over a thinking block that both have
        parts = self.openings(options)
        found = [at + len(part) for part in parts if (at := text.rfind(part, low, start)) >= 0]
        if found:
            start = found[0]
        elif not parts:
            tokens = [unit for unit in self.units(text[low:start]) if len(unit) > 1]
            start = text.rfind(tokens[-1], low, start) + len(tokens[-1]) if tokens else start
        # on over what closes the turn, wherever it stands
        closing = self.units(render([*messages[:n], other])[0].partition(_STAND_IN)[2])
        following = self.units(text[end:])
        if n + 1 < len(messages):
            following = following[: common_prefix(closing, following) or int(len("".join(following[:1])) > 1)]
        return start, end + len("".join(following))

    def _with_end(self, text: str, span: Span) -> Span:
        """With the end-of-sequence token behind an answer, without white space behind a token that ends it."""
        start, end = span
        eos = self.tokenizer.eos_token
        if eos and text.startswith(eos, end):
            end += len(eos)
        stripped = text[start:end].rstrip()
        last = self.units(stripped)[-1:]
        return (start, start + len(stripped)) if last and len(last[0]) > 1 else (start, end)


def _joined(marks: Sequence[Span]) -> list[Span]:
    """Marks that touch, or hold nothing, are no answers of their own."""
    joined: list[Span] = []
    for start, end in marks:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        elif end > start:
            joined.append((start, end))
    return joined


def _holds(text: str, span: Span, message: Message) -> bool:
    """Whether a span has the words of its message; what a template takes from a thinking block may be gone."""
    content = message.get("content")
    return not isinstance(content, str) or content.rpartition("</think>")[2].strip() in text[slice(*span)]
