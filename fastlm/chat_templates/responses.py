"""Labels on the assistant's answers only, in the prepared data sets of a trainer."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastlm.chat_templates.labels import (
    CONVERSATIONS,
    MASKS,
    READ,
    ConversationLabels,
    ResponseLabels,
    RowLabels,
    from_template,
    is_trained,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Trainer

logger = logging.getLogger(__name__)

# rows of a stream that are looked at before training: all of them without an answer is a mistake
_LOOK_AHEAD = 32


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


class _Kept:
    """Filter of a stream: rows with an answer. Counts the others and tells of the first, the tenth, the hundredth, …"""

    def __init__(self, name: str):
        self.name, self.dropped, self.seen = name, 0, 0

    def __call__(self, labels: Sequence[int]) -> bool:
        self.seen += 1
        if is_trained(labels):
            return True
        self.dropped += 1
        if str(self.dropped).strip("0") == "1":
            logger.warning(
                "Rows without any answer to train were dropped: %d of the first %d read of %s.",
                self.dropped,
                self.seen,
                self.name,
            )
        return False


def _mask_stream(dataset: Any, name: str, rows: RowLabels) -> Any:
    masked = dataset.map(rows, batched=True)
    first = list(masked.take(_LOOK_AHEAD))
    if not any(is_trained(row["labels"]) for row in first):
        raise ValueError(
            f"{name}: no label is left in the first {len(first)} rows, so there may be none at all: there is no answer in "
            "them, or all lie beyond max_length. Raise max_length, give the markers as they stand in the text, or shuffle "
            "the data set"
        )
    return masked.filter(_Kept(name), input_columns="labels")


def _mask_dataset(
    dataset: Any, name: str, rows: RowLabels, num_proc: int | None, max_length: int | None
) -> tuple[Any, str]:
    """The data set with labels on its answers, without the rows that keep none, and what to say of those ("": nothing)."""
    import datasets

    if not isinstance(dataset, (datasets.Dataset, datasets.IterableDataset)):
        raise TypeError(
            f"{name} must be a datasets.Dataset or IterableDataset, got {type(dataset).__name__} (batch_by_tokens comes after this)"
        )
    # an iterable data set may not know its columns
    columns = dataset.column_names or ["input_ids"]
    if "input_ids" not in columns:
        raise ValueError(
            f"{name} has no column input_ids, only {columns}: pass it through trl.SFTTrainer, or tokenize it, first "
            "(rows with images get their tokens in the collator, and can't be masked here)"
        )
    if isinstance(dataset, datasets.IterableDataset):
        return _mask_stream(dataset, name, rows), ""
    if len(dataset) == 0:
        raise ValueError(f"{name} has no rows")
    by_markers = rows
    if isinstance(rows, ConversationLabels) and not set(CONVERSATIONS) & set(columns):
        by_markers = rows.by_markers()
    if isinstance(by_markers, ResponseLabels):
        _check_markers_occur(dataset, name, by_markers, max_length)
    known = [column for column in columns if column in READ]
    # labels alone go through the map: the other columns, conversations among them, are not written again
    made = dataset.select_columns(known).map(
        _Told(rows), batched=True, num_proc=num_proc, remove_columns=known, desc=f"Labels on the answers in {name}"
    )
    lost = [number for number, is_kept in enumerate(made["is_trained"]) if not is_kept]
    others = dataset.remove_columns([column for column in (*MASKS, "labels") if column in columns])
    labels = made.remove_columns("is_trained")
    masked = datasets.concatenate_datasets([others.with_format("arrow"), labels.with_format("arrow")], axis=1)
    masked.set_format(**dataset.format | {"columns": None})
    masked.info.description = dataset.info.description
    if not lost:
        return masked, ""
    reasons = _reasons(dataset.select(lost), max_length)
    if len(lost) == len(dataset):
        raise ValueError(
            f"{name}: no label is left in {len(lost)} rows: {reasons}. Raise max_length, leave out what masks answers before "
            "(completion_only_loss, a labels column), or look at the rows with fastlm.data.preview"
        )
    kept = masked.select(sorted(set(range(len(dataset))) - set(lost)))
    told = f"{len(lost)} of {len(dataset)} in {name} ({reasons})"
    kept.info.description = "; ".join([*filter(None, [kept.info.description]), f"dropped {told}"])
    return kept, told


class _Told:
    """For `datasets.map`, batched: labels, and whether a row has any."""

    def __init__(self, rows: RowLabels):
        self.rows = rows

    def __call__(self, batch: dict[str, Any]) -> dict[str, list]:
        labels = self.rows(batch)["labels"]
        return {"labels": labels, "is_trained": [is_trained(each) for each in labels]}


def _reasons(lost: Any, max_length: int | None) -> str:
    """Why rows got no label, with their numbers. `lost`: those rows as they were before."""
    had = lost["labels"] if "labels" in lost.column_names else [[0]] * len(lost)
    counts: Counter[str] = Counter()
    for ids, labels in zip(lost["input_ids"], had, strict=True):
        if not is_trained(labels):
            counts["had no label to train before"] += 1
        elif len(ids) == max_length:
            counts[f"as long as max_length={max_length}, all responses lie beyond it"] += 1
        else:
            counts["without an answer"] += 1
    return ", ".join(f"{count} {reason}" for reason, count in counts.most_common())


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
) -> Trainer | RowLabels:
    """Train the assistant's answers, each with its end-of-turn token, and nothing else.

    Without markers, the chat template tells what an answer is: by its `{% generation %}` marks, or by the difference that
    an answer makes to the rendering. Thinking blocks and tool calls belong to an answer, what the generation prompt
    holds and the results of tools do not. That is looked up in the conversation of each row (`messages`, or `prompt`
    and `completion`); rows without one, texts and packed rows, are searched for the markers that the template writes.

    Sets the `labels` in `trainer.train_dataset` and `trainer.eval_dataset` (or in each of a dict). Labels that are
    -100 already stay so. Rows that keep no label, because max_length cut the answer off, are dropped; one warning
    counts them. Other columns stay, and packed rows are masked sample by sample.

    Not masked: a data set that is given later, to `trainer.evaluate(…)`; map it with the function of
    `return_function=True` first. A stream is masked while it is read; its first rows are looked at here.

    Args:
        trainer: a trl.SFTTrainer, or a transformers.Trainer over tokenized rows whose collator keeps `labels`. May be
            None with `return_function`.
        instruction_part: the text before the words of a user, as "<|im_start|>user" and a line break. With it and
            response_part, answers are what stands between these markers in the text (`ResponseLabels`).
        response_part: the text before an answer, as "<|im_start|>assistant" and a line break.
        force_match: take the markers exactly; if False, white space at their ends may be missing in the text.
        tokenizer: in place of `trainer.processing_class`.
        return_function: leave the trainer alone and return the function for `datasets.map` (one row, or batched) that
            makes `labels` from `input_ids`. It drops no rows.
        num_proc: processes for `datasets.map`.
        last_response_only: train the last answer of a sample only, as far as the row still holds it.

    Returns:
        The trainer, or the row function.

    Raises:
        ValueError: if a marker is missing, holds the other or occurs in no row; if there is no template, or it does not
            tell its answers apart; if no label is left; if the trainer's collator replaces labels; if
            `last_response_only` meets packing that does not say where samples end.
        TypeError: for a data set or tokenizer of another type.
    """
    tokenizer = _tokenizer_of(trainer, tokenizer)
    rows: RowLabels
    if instruction_part is None and response_part is None:
        # the template that the trainer made the rows with, where it is not the tokenizer's
        template = vars(trainer).get("chat_template") if trainer is not None else None
        rows = from_template(tokenizer, template, last_response_only)
        if return_function:
            rows.by_markers()
    else:
        instruction_part, response_part = _check_markers(instruction_part, response_part)
        rows = ResponseLabels(tokenizer, instruction_part, response_part, force_match, last_response_only)
    if return_function:
        return rows
    if trainer is None:
        raise ValueError("trainer is None: pass a trainer, or return_function=True")
    _check_trainer(trainer, last_response_only)
    max_length = vars(trainer.args).get("max_length")
    dropped = []

    def mask(dataset: Any, name: str) -> Any:
        masked, told = _mask_dataset(dataset, name, rows, num_proc, max_length)
        if told:
            dropped.append(told)
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
            "Rows without any answer to train were dropped: %s.",
            ", ".join(dropped),
        )
    return trainer
