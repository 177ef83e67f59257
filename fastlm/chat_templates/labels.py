"""Row functions that make `labels` from `input_ids`: the tokens of the answers, and -100 elsewhere."""

from __future__ import annotations

import itertools
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fastlm.chat_templates._token_text import TokenText
from fastlm.chat_templates.markers import ADVICE, WORDS, derive_markers
from fastlm.chat_templates.spans import AnswerSpans, Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
# other libraries' names for "train this token"; a `labels` column already says it
MASKS = ("completion_mask", "assistant_masks")
CONVERSATIONS = ("messages", "prompt", "completion", "tools", "chat_template_kwargs")
# what a row function reads
READ = ("input_ids", "labels", "attention_mask", "seq_lengths", *MASKS, *CONVERSATIONS)


def is_trained(labels: Sequence[int]) -> bool:
    return any(label != IGNORED for label in labels)


class RowLabels:
    """For `datasets.map`, on one row or batched: `input_ids` (and what limits them) to `labels`."""

    last_response_only: bool

    def samples(self, row: dict[str, Any], ids: list[int]) -> list[list[range]]:
        """Token positions of the answers, one list for each sample of the row."""
        raise NotImplementedError

    def _row(self, row: dict[str, Any]) -> list[int]:
        ids = list(map(int, row["input_ids"]))
        labels = [IGNORED] * len(ids)
        allowed = list(map(int, row.get("labels", ids)))
        masks = [row[name] for name in ("attention_mask", *(() if "labels" in row else MASKS)) if name in row]
        for answers in self.samples(row, ids):
            for answer in answers[-1:] if self.last_response_only else answers:
                if not masks:
                    labels[answer.start : answer.stop] = allowed[answer.start : answer.stop]
                    continue
                for position in answer:
                    if all(mask[position] for mask in masks):
                        labels[position] = allowed[position]
        return labels

    def __call__(self, rows: dict[str, Any]) -> dict[str, list]:
        if len(rows["input_ids"]) and np.ndim(rows["input_ids"][0]) == 0:
            return {"labels": self._row(rows)}
        names = [name for name in READ if name in rows]
        columns = zip(*(rows[name] for name in names), strict=True)
        return {"labels": [self._row(dict(zip(names, row, strict=True))) for row in columns]}


class ResponseLabels(RowLabels):
    """Answers between marker texts.

    Markers are looked for in the text of a row, not in its token ids: a marker's tokens depend on its neighbours (a
    line break at its end may be one token with the next). An answer reaches from the end of a response marker to the
    first of: what closes an answer, if that is known; the next marker; the token that opens every turn, if both markers
    begin with the same added token; a begin token; the end-of-sequence token, which belongs to it; the end of the
    sample. A token that the beginning or the end of an answer cuts through is trained, because it holds characters of
    the answer. What stands before the first marker is not.

    Args:
        openings: longer forms of the response marker, which the generation prompt writes.
        closings: texts that close an answer and belong to it, with the end-of-sequence token behind them. One may begin
            where the next marker does.
        is_joined: a response marker right behind an answer is part of it: formats that write one answer in several
            messages.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        instruction_part: str,
        response_part: str,
        force_match: bool,
        last_response_only: bool,
        openings: Sequence[str] = (),
        closings: Sequence[str] = (),
        is_joined: bool = False,
    ):
        self.text = TokenText(tokenizer)
        self.instruction_part, self.response_part = instruction_part, response_part
        self.instruction = self._pattern(instruction_part, force_match)
        forms = sorted({response_part, *openings}, key=len, reverse=True)
        self.response = re.compile("|".join(self._pattern(form, force_match).pattern for form in forms))
        self.last_response_only = last_response_only
        self.is_joined = is_joined
        self.eos = tokenizer.eos_token_id
        self.closing = None
        if closings:
            end = f"(?:\\s*{re.escape(tokenizer.eos_token)})?" if tokenizer.eos_token else ""
            given = sorted(closings, key=len, reverse=True)
            self.closing = re.compile(f"(?:{'|'.join(map(re.escape, given))}){end}")
        first = {
            tuple(tokenizer(part.strip(), add_special_tokens=False)["input_ids"][:1])
            for part in (instruction_part, response_part)
        }
        shared = first.pop() if len(first) == 1 else ()
        self.opening = {token for token in shared if token in tokenizer.get_added_vocab().values()}
        self.opening |= {tokenizer.bos_token_id} - {None, self.eos}

    def _pattern(self, part: str, force_match: bool) -> re.Pattern[str]:
        # as given, and as the tokenizer gives it back; a space that it puts before every text is no part of the marker
        round_trip = self.text.round_trip(part)
        texts = {part, round_trip, round_trip.removeprefix(" ")}
        before, after = len(part) - len(part.lstrip()), len(part) - len(part.rstrip())
        if not force_match:
            texts = {text.strip() for text in texts}
        known = sorted((text for text in texts if text.strip()), key=len, reverse=True)
        pattern = "|".join(map(re.escape, known))
        return re.compile(f"(?:{pattern})" if force_match else rf"\s{{0,{before}}}(?:{pattern})\s{{0,{after}}}")

    def answers(self, ids: Sequence[int]) -> list[range]:
        """Token positions of each answer of one sample; empty for a marker that nothing follows."""
        text, starts, ends = self.text(ids)
        responses = [match.span() for match in self.response.finditer(text)]
        markers = sorted(responses + [match.span() for match in self.instruction.finditer(text)])
        answers: list[range] = []
        stopped = -1
        for start, end in responses:
            following = bisect_right(markers, (start, end))
            stop = markers[following][0] if following < len(markers) else len(text)
            closing = self.closing.search(text, end) if self.closing else None
            if closing and closing.start() <= stop:
                stop = closing.end()
            else:
                closing = None
            # tokens that hold a character of text[end:stop]; markers may share characters, then there is none
            first = bisect_right(ends, end)
            last = bisect_left(starts, stop) if stop > end else first
            for position in range(first, last):
                if ids[position] in self.opening:
                    last = position
                elif ids[position] == self.eos and not closing:
                    last = position + 1
                else:
                    continue
                break
            if self.is_joined and answers and start == stopped:
                answers[-1] = range(answers[-1].start, last)
            else:
                answers.append(range(first, last))
            stopped = stop
        return answers

    def samples(self, row: dict[str, Any], ids: list[int]) -> list[list[range]]:
        # a packed row holds several samples: an answer at the end of one does not reach into the next
        bounds = [0, *itertools.accumulate(int(length) for length in row.get("seq_lengths", ())), len(ids)]
        return [
            [range(start + answer.start, start + answer.stop) for answer in self.answers(ids[start:stop])]
            for start, stop in itertools.pairwise(bounds)
        ]


class ConversationLabels(RowLabels):
    """Answers of the conversation that a row was made from, as its chat template tells them (`AnswerSpans`).

    Rows that were cut at either end are found in the tokens of the whole conversation. Rows without one (texts, packed
    rows), or whose tokens are not its, are left to `otherwise`.

    Args:
        chat_template: the template that made the rows, None for the tokenizer's own.
        otherwise: by markers, or the reason why there is no such way.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str | None,
        last_response_only: bool,
        otherwise: ResponseLabels | str,
    ):
        self.tokenizer = tokenizer
        self.spans = AnswerSpans(tokenizer, chat_template)
        self.text = TokenText(tokenizer)
        self.added = set(tokenizer.get_added_vocab().values())
        self.last_response_only = last_response_only
        self.otherwise = otherwise

    def by_markers(self) -> ResponseLabels:
        """The way for rows without a conversation.

        Raises:
            ValueError: saying why there is none.
        """
        if isinstance(self.otherwise, str):
            raise ValueError(self.otherwise)
        return self.otherwise

    def _tokens(self, text: str) -> tuple[list[int], list[int], list[int]] | None:
        """Ids of a text, and the characters that each of them covers."""
        if not self.tokenizer.is_fast:
            ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            again, starts, ends = self.text(ids)
            return (ids, starts, ends) if again == text else None
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return encoded["input_ids"], *([pair[n] for pair in encoded["offset_mapping"]] for n in (0, 1))

    def _positions(self, span: Span, ids: Sequence[int], starts: list[int], ends: list[int]) -> range:
        first, last = bisect_right(ends, span[0]), bisect_left(starts, span[1])
        # a token of the header may take white space with it that the answer begins with
        while first < last and starts[first] < span[0] and ids[first] in self.added:
            first += 1
        return range(first, max(first, last))

    def _of_conversation(self, row: dict[str, Any], ids: list[int]) -> list[range] | None:
        messages = conversation_of(row)
        if messages is None:
            return None
        tools = row.get("tools")
        text, spans = self.spans(
            messages,
            tools=json.loads(tools) if isinstance(tools, str) else tools,
            **(row.get("chat_template_kwargs") or {}),
        )
        if spans is None:
            return None
        # the row was prepared from this conversation, and may have been cut at either end
        said, starts, ends = self.text(ids)
        if said in (text[: len(said)], text[len(text) - len(said) :]):
            cut = 0 if text.startswith(said) else len(text) - len(said)
            found = [self._positions((start - cut, end - cut), ids, starts, ends) for start, end in spans]
            return [each for each in found if len(each)]
        # this tokenizer does not give back the text that it was given: compare the ids
        tokens = self._tokens(text)
        if tokens is None:
            return None
        whole, starts, ends = tokens
        if whole[: len(ids)] == ids:
            cut = 0
        elif len(ids) and whole[-len(ids) :] == ids:
            cut = len(whole) - len(ids)
        else:
            return None
        found = [self._positions(span, whole, starts, ends) for span in spans]
        kept = [range(max(0, each.start - cut), min(len(ids), each.stop - cut)) for each in found]
        return [each for each in kept if len(each)]

    def samples(self, row: dict[str, Any], ids: list[int]) -> list[list[range]]:
        answers = self._of_conversation(row, ids)
        if answers is not None:
            return [answers]
        if isinstance(self.otherwise, str):
            raise ValueError(
                f"a row that begins {self.text(ids)[0][:200]!r} is not what the chat template makes of its conversation, "
                f"and {self.otherwise}"
            )
        return self.otherwise.samples(row, ids)


def conversation_of(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The messages that a row was made from, if it still holds them."""
    found = row.get("messages")
    if found is None and isinstance(row.get("prompt"), list) and isinstance(row.get("completion"), list):
        found = row["prompt"] + row["completion"]
    is_chat = isinstance(found, list) and found and all(isinstance(each, dict) and "role" in each for each in found)
    return found if is_chat else None


def from_template(
    tokenizer: PreTrainedTokenizerBase, chat_template: str | None, last_response_only: bool
) -> ConversationLabels:
    """Labels as the chat template tells them: from a row's conversation, or from the markers found in the template.

    Raises:
        ValueError: if there is no template.
    """
    if chat_template is None and tokenizer.chat_template is None:
        raise ValueError(f"the tokenizer has no chat template to find the answers with: {ADVICE}")
    try:
        markers: ResponseLabels | str = _derived(tokenizer, chat_template, last_response_only)
    except ValueError as error:
        markers = str(error)
    return ConversationLabels(tokenizer, chat_template, last_response_only, markers)


def _derived(tokenizer: PreTrainedTokenizerBase, chat_template: str | None, last_response_only: bool) -> ResponseLabels:
    import jinja2

    instruction, response = derive_markers(tokenizer, chat_template)
    spans_of = AnswerSpans(tokenizer, chat_template)

    def answers(*messages: dict[str, Any]) -> list[str]:
        text, spans = spans_of(messages)
        return [text[slice(*span)] for span in spans or ()]

    question, answer = chat(*WORDS[:2])
    closings = {text.partition(word)[2] for word, text in zip(WORDS[1::2], answers(*chat(*WORDS)), strict=False)}
    # two keys: templates read the thoughts of a message from one or the other
    thought = answers(question, {**answer, "reasoning_content": WORDS[3], "thinking": WORDS[3]})
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    try:
        calling = answers(question, {"role": "assistant", "content": "", "tool_calls": [call]})
    except (jinja2.TemplateError, TypeError):
        # the template writes no tool calls
        calling = []
    last = spans_of.units(calling[-1])[-1] if calling else ""
    # a tag may close one call of several
    closings |= {last} if len(last) > 1 and not last.startswith("</") else set()
    closings = {closing for closing in closings if closing.strip()}
    for closing in closings:
        # what closes an answer is part of it, unless nothing else opens the next question
        instruction = instruction.removeprefix(closing) if instruction.removeprefix(closing).strip() else instruction
    rows = ResponseLabels(
        tokenizer,
        instruction,
        response,
        force_match=True,
        last_response_only=last_response_only,
        openings=[part[part.index(response) :] for part in spans_of.openings({}) if response in part],
        closings=sorted(closings),
        is_joined=any(response in text for text in thought),
    )
    _check_derived(tokenizer, chat_template, rows)
    return rows


def chat(*words: str) -> list[dict[str, str]]:
    """A conversation of user and assistant in turn."""
    return [{"role": ("user", "assistant")[n % 2], "content": word} for n, word in enumerate(words)]


def _check_derived(tokenizer: PreTrainedTokenizerBase, chat_template: str | None, rows: ResponseLabels) -> None:
    """Derived markers must find both answers of a rendered conversation and no question."""
    text = tokenizer.apply_chat_template(chat(*WORDS), chat_template=chat_template, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    trained = [rows.text(ids[answer.start : answer.stop])[0] for answer in rows.answers(ids)]
    if [[word for word in WORDS if word in text] for text in trained] != [[WORDS[1]], [WORDS[3]]]:
        raise ValueError(
            f"the markers {rows.instruction_part!r} and {rows.response_part!r}, found in the chat template, "
            f"do not mark its answers: {ADVICE}"
        )
