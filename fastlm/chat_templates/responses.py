"""Labels on the assistant's answers only, in the prepared data sets of a trainer."""

from __future__ import annotations

import itertools
import logging
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fastlm.chat_templates._token_text import TokenText
from fastlm.chat_templates.markers import ADVICE, WORDS, derive_markers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Trainer

logger = logging.getLogger(__name__)

IGNORED = -100
# other libraries' names for "train this token"; a `labels` column already says it
_MASKS = ("completion_mask", "assistant_masks")


class ResponseLabels:
    """Row function for `datasets.map`, on one row or batched: `input_ids` (and what limits them) to `labels`.

    Markers are looked for in the text of a row, not in its token ids: a marker's tokens depend on its neighbours (a
    line break at its end may be one token with the next). An answer reaches from the end of a response marker to the
    first of: the next marker; the token that opens every turn, if both markers begin with the same added token; a begin
    token; the end-of-sequence token, which belongs to it; the end of the sample. A token that the beginning or the end
    of an answer cuts through is trained, because it holds characters of the answer. What stands before the first marker
    is not.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        instruction_part: str,
        response_part: str,
        force_match: bool,
        last_response_only: bool,
    ):
        self.text = TokenText(tokenizer)
        self.instruction_part, self.response_part = instruction_part, response_part
        self.instruction = self._pattern(instruction_part, force_match)
        self.response = self._pattern(response_part, force_match)
        self.last_response_only = last_response_only
        self.eos = tokenizer.eos_token_id
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
        answers = []
        for start, end in responses:
            following = bisect_right(markers, (start, end))
            stop = markers[following][0] if following < len(markers) else len(text)
            # tokens that hold a character of text[end:stop]; markers may share characters, then there is none
            first = bisect_right(ends, end)
            last = bisect_left(starts, stop) if stop > end else first
            for position in range(first, last):
                if ids[position] in self.opening:
                    last = position
                elif ids[position] == self.eos:
                    last = position + 1
                else:
                    continue
                break
            answers.append(range(first, last))
        return answers

    def _row(self, row: dict[str, Any]) -> list[int]:
        ids = [int(token) for token in row["input_ids"]]
        labels = [IGNORED] * len(ids)
        allowed = [int(label) for label in row.get("labels", ids)]
        masks = [row[name] for name in ("attention_mask", *(() if "labels" in row else _MASKS)) if name in row]
        # a packed row holds several samples: an answer at the end of one does not reach into the next
        bounds = [0, *itertools.accumulate(int(length) for length in row.get("seq_lengths", ())), len(ids)]
        for start, stop in itertools.pairwise(bounds):
            answers = self.answers(ids[start:stop])
            for answer in answers[-1:] if self.last_response_only else answers:
                for position in range(start + answer.start, start + answer.stop):
                    if all(mask[position] for mask in masks):
                        labels[position] = allowed[position]
        return labels

    def __call__(self, rows: dict[str, Any]) -> dict[str, list]:
        if len(rows["input_ids"]) and np.ndim(rows["input_ids"][0]) == 0:
            return {"labels": self._row(rows)}
        names = [name for name in ("input_ids", "labels", "attention_mask", "seq_lengths", *_MASKS) if name in rows]
        columns = zip(*(rows[name] for name in names), strict=True)
        return {"labels": [self._row(dict(zip(names, row, strict=True))) for row in columns]}


def _is_trained(labels: Sequence[int]) -> bool:
    return any(label != IGNORED for label in labels)


def _check_derived(tokenizer: PreTrainedTokenizerBase, rows: ResponseLabels) -> None:
    """Derived markers must find both answers of a rendered conversation and no question."""
    messages = [{"role": role, "content": word} for role, word in zip(("user", "assistant") * 2, WORDS, strict=True)]
    ids = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"]
    trained = [rows.text(ids[answer.start : answer.stop])[0] for answer in rows.answers(ids)]
    if [[word for word in WORDS if word in text] for text in trained] != [[WORDS[1]], [WORDS[3]]]:
        raise ValueError(
            f"the markers {rows.instruction_part!r} and {rows.response_part!r}, found in the chat template, "
            f"do not mark its answers: {ADVICE}"
        )


def _check_markers_occur(dataset: Any, name: str, rows: ResponseLabels, max_length: int | None) -> None:
    """Raises unless both markers occur in the data set; reads no further than needed."""
    missing = {"instruction": rows.instruction, "response": rows.response}
    longest = 0
    for row in dataset.select_columns(["input_ids"]):
        text = rows.text([int(token) for token in row["input_ids"]])[0]
        missing = {kind: pattern for kind, pattern in missing.items() if not pattern.search(text)}
        longest = max(longest, len(row["input_ids"]))
        if not missing:
            return
    parts = {"instruction": rows.instruction_part, "response": rows.response_part}
    what = " and ".join(f"the {kind} marker {parts[kind]!r}" for kind in missing)
    first = rows.text([int(token) for token in dataset[0]["input_ids"]])[0]
    advice = [
        "Pass instruction_part and response_part as they stand in the text "
        "(with force_match=False, white space at their ends may be missing).",
        f"The first row begins {first[:200]!r}.",
    ]
    if "instruction" not in missing and longest == max_length:
        advice.insert(0, f"If all responses lie beyond max_length={max_length}, where rows were cut, raise max_length.")
    raise ValueError(f"{name}: no row contains {what}. {' '.join(advice)}")


def _mask_dataset(
    dataset: Any, name: str, rows: ResponseLabels, num_proc: int | None, max_length: int | None
) -> tuple[Any, int]:
    """The data set with labels on its answers, without the rows that keep none, and their number (0: not known yet)."""
    import datasets

    if not isinstance(dataset, (datasets.Dataset, datasets.IterableDataset)):
        raise TypeError(f"{name} must be a datasets.Dataset or IterableDataset, got {type(dataset).__name__}")
    # an iterable data set may not know its columns
    columns = dataset.column_names or ["input_ids"]
    if "input_ids" not in columns:
        raise ValueError(
            f"{name} has no column input_ids, only {columns}: pass it through trl.SFTTrainer, or tokenize it, first "
            "(rows with images get their tokens in the collator, and can't be masked here)"
        )
    if isinstance(dataset, datasets.IterableDataset):
        return dataset.map(rows, batched=True).filter(_is_trained, input_columns="labels"), 0
    if len(dataset) == 0:
        raise ValueError(f"{name} has no rows")
    _check_markers_occur(dataset, name, rows, max_length)
    masked = dataset.map(
        rows,
        batched=True,
        num_proc=num_proc,
        remove_columns=[column for column in _MASKS if column in columns],
        desc=f"Labels on the answers in {name}",
    )
    kept = masked.filter(_is_trained, input_columns="labels", num_proc=num_proc, desc=f"Rows with an answer in {name}")
    if len(kept) == 0:
        raise ValueError(
            f"{name}: no label is left. The markers occur, but all responses lie beyond max_length={max_length} or are "
            "ignored by the labels that the rows had: raise max_length, or leave out what masks answers before "
            "(completion_only_loss, a labels column)"
        )
    return kept, len(dataset) - len(kept)


def _tokenizer_of(trainer: Trainer | None, tokenizer: Any) -> PreTrainedTokenizerBase:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    if tokenizer is None and trainer is not None:
        tokenizer = trainer.processing_class
    if isinstance(tokenizer, ProcessorMixin):
        tokenizer = tokenizer.tokenizer
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(
            "a transformers tokenizer is needed, as tokenizer= or as the trainer's processing_class, "
            f"got {type(tokenizer).__name__}"
        )
    return tokenizer


def _check_markers(instruction_part: str | None, response_part: str | None) -> tuple[str, str]:
    parts = (instruction_part, response_part)
    if not all(part is None or isinstance(part, str) for part in parts):
        raise TypeError(f"instruction_part and response_part must be strings, got {parts!r}")
    if not instruction_part or not instruction_part.strip() or not response_part or not response_part.strip():
        raise ValueError(
            "give both instruction_part and response_part, or neither to find them out from the chat template, "
            f"got {instruction_part!r} and {response_part!r}"
        )
    if instruction_part.strip() in response_part or response_part.strip() in instruction_part:
        raise ValueError(f"one marker must not hold the other, got {instruction_part!r} and {response_part!r}")
    return instruction_part, response_part


def _check_trainer(trainer: Trainer, last_response_only: bool) -> None:
    from transformers import DataCollatorForLanguageModeling

    if isinstance(trainer.data_collator, DataCollatorForLanguageModeling):
        raise ValueError(
            "the trainer's transformers.DataCollatorForLanguageModeling makes labels of its own from input_ids: use "
            "trl.SFTTrainer with its default collator, or transformers.DataCollatorForSeq2Seq(tokenizer)"
        )
    settings = vars(trainer.args)
    if last_response_only and settings.get("packing") and settings.get("packing_strategy") == "wrapped":
        raise ValueError(
            "last_response_only needs to know where samples end, and packing_strategy='wrapped' does not say: use 'bfd'"
        )
    if trainer.train_dataset is None and trainer.eval_dataset is None:
        raise ValueError("the trainer has neither train_dataset nor eval_dataset")


def train_on_responses_only(
    trainer: Trainer | None,
    instruction_part: str | None = None,
    response_part: str | None = None,
    force_match: bool = True,
    tokenizer: PreTrainedTokenizerBase | None = None,
    return_function: bool = False,
    num_proc: int | None = None,
    last_response_only: bool = False,
) -> Trainer | ResponseLabels:
    """Train the assistant's answers, each with its end-of-turn token, and nothing else.

    Sets the `labels` in `trainer.train_dataset` and `trainer.eval_dataset` (or in each of a dict). Labels that are
    -100 already stay so. Rows that keep no label, because max_length cut the answer off, are dropped; one warning
    counts them. Other columns stay, and packed rows are masked sample by sample. `ResponseLabels` says where an
    answer ends.

    Not masked: a data set that is given later, to `trainer.evaluate(…)`; map it with the function of
    `return_function=True` first. An iterable data set is masked while it is read, so nothing about it is checked here:
    with wrong markers it yields no rows.

    Args:
        trainer: a trl.SFTTrainer, or a transformers.Trainer over tokenized rows whose collator keeps `labels`. May be
            None with `return_function`.
        instruction_part: the text before the words of a user, as "<|im_start|>user" and a line break.
        response_part: the text before an answer, as "<|im_start|>assistant" and a line break. Without both, they are
            found out by rendering the tokenizer's chat template.
        force_match: take the markers exactly; if False, white space at their ends may be missing in the text.
        tokenizer: in place of `trainer.processing_class`.
        return_function: leave the trainer alone and return the function for `datasets.map` (one row, or batched) that
            makes `labels` from `input_ids`. It drops no rows.
        num_proc: processes for `datasets.map`.
        last_response_only: train the last answer of a sample only, as far as the row still holds it.

    Returns:
        The trainer, or the row function.

    Raises: ValueError: if a marker is missing, holds the other, occurs in no row, or can't be found out; if no label
        is left; if the
            trainer's collator replaces labels; if `last_response_only` meets packing that does not say where samples
            end.
        TypeError: for a data set or tokenizer of another type.
    """
    tokenizer = _tokenizer_of(trainer, tokenizer)
    if is_derived := instruction_part is None and response_part is None:
        instruction_part, response_part = derive_markers(tokenizer)
    instruction_part, response_part = _check_markers(instruction_part, response_part)
    rows = ResponseLabels(tokenizer, instruction_part, response_part, force_match, last_response_only)
    if is_derived:
        _check_derived(tokenizer, rows)
        logger.info(
            "Found out from the chat template: %r opens a user turn, %r an answer.", instruction_part, response_part
        )
    if return_function:
        return rows
    if trainer is None:
        raise ValueError("trainer is None: pass a trainer, or return_function=True")
    _check_trainer(trainer, last_response_only)
    max_length = vars(trainer.args).get("max_length")
    dropped = []

    def mask(dataset: Any, name: str) -> Any:
        masked, without_answer = _mask_dataset(dataset, name, rows, num_proc, max_length)
        if without_answer:
            dropped.append(f"{without_answer} of {len(dataset)} in {name}")
        return masked

    train, evaluated = trainer.train_dataset, trainer.eval_dataset
    if train is not None:
        train = mask(train, "train_dataset")
    if isinstance(evaluated, dict):
        evaluated = type(evaluated)({key: mask(each, f"eval_dataset[{key!r}]") for key, each in evaluated.items()})
    elif evaluated is not None:
        evaluated = mask(evaluated, "eval_dataset")
    trainer.train_dataset, trainer.eval_dataset = train, evaluated
    if dropped:
        logger.warning(
            "Rows without any answer to train were dropped: %s. If max_length=%s cut their answers off, raise it.",
            ", ".join(dropped),
            max_length,
        )
    return trainer
