"""Batches of a constant number of tokens: whole samples side by side in one row, without padding, mixed anew in each epoch."""

from __future__ import annotations

import bisect
import dataclasses
import importlib
import logging
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fastlm.data.statistics import IGNORED, labels_of

if TYPE_CHECKING:
    from transformers import Trainer

logger = logging.getLogger(__name__)

LONG = ("error", "split", "drop")


class Piece(NamedTuple):
    """Tokens start to stop of a row: all of them, unless it was split."""

    row: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


def best_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Numbers of the lengths in bins of at most `size`: the longest first, each where the least room is left.

    Best-fit decreasing needs at most 11/9 of the fewest bins, and one more (Johnson 1973).
    """
    bins: list[list[int]] = []
    with_room: dict[int, list[int]] = defaultdict(list)
    rooms: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        at = bisect.bisect_left(rooms, lengths[number])
        if at == len(rooms):
            bins.append([number])
            chosen, room = len(bins) - 1, size
        else:
            room = rooms[at]
            chosen = with_room[room].pop()
            if not with_room[room]:
                del rooms[at]
            bins[chosen].append(number)
        room -= lengths[number]
        if not with_room[room]:
            bisect.insort(rooms, room)
        with_room[room].append(chosen)
    return bins


class TokenBatches(torch.utils.data.Dataset):
    """Rows of packed samples, for a trainer that takes one row at a time.

    Which lengths share a row is fixed, by `best_fit`; which samples of a length, and so what is trained together, is drawn anew in each
    epoch. The number of rows never changes.

    Attributes:
        rows: the samples, with `input_ids` and perhaps `labels`.
        pieces: of them that are trained.
        size: the most tokens of a packed row.
    """

    def __init__(self, rows: Any, pieces: Sequence[Piece], size: int, seed: int):
        self.rows, self.pieces, self.size, self._seed = rows, list(pieces), size, seed
        self._bins = best_fit([piece.length for piece in self.pieces], size)
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw which samples stand where; an epoch's draw is always the same."""
        draw = random.Random(f"{self._seed}-{epoch}")
        same: dict[int, list[int]] = defaultdict(list)
        for number, piece in enumerate(self.pieces):
            same[piece.length].append(number)
        self._at = list(range(len(self.pieces)))
        for numbers in same.values():
            for place, number in zip(numbers, draw.sample(numbers, len(numbers)), strict=True):
                self._at[place] = number

    def members(self, index: int) -> list[Piece]:
        """The samples of a packed row."""
        return [self.pieces[self._at[place]] for place in self._bins[index]]

    def __len__(self) -> int:
        return len(self._bins)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        made: dict[str, list[int]] = {"input_ids": [], "labels": [], "seq_lengths": []}
        for piece in self.members(index):
            row = self.rows[piece.row]
            made["input_ids"] += row["input_ids"][piece.start : piece.stop]
            made["labels"] += labels_of(row)[piece.start : piece.stop]
            made["seq_lengths"].append(piece.length)
        return made

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return (self[index] for index in range(len(self)))

    def select(self, indices: Sequence[int]) -> list[dict[str, list[int]]]:
        return [self[index] for index in indices]

    @property
    def info(self) -> Any:
        return self.rows.info

    @property
    def share(self) -> float:
        """Of the tokens that the rows could hold, how many they do."""
        return sum(piece.length for piece in self.pieces) / (len(self) * self.size)


@dataclass
class PackedOrPadded:
    """A collator: packed rows become one row without padding, all others what they were."""

    packed: Any
    padded: Any

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        chosen = self.packed if "seq_lengths" in rows[0] else self.padded
        made: dict[str, Any] = chosen(rows)
        return made


def _pieces(rows: Any, size: int, long: str) -> tuple[list[Piece], list[str]]:
    """What is trained of all rows, and what to tell of those that are longer than `size`."""
    pieces: list[Piece] = []
    n_long = n_lost = longest = 0
    for number, row in enumerate(rows):
        length = len(row["input_ids"])
        if length <= size:
            pieces += [Piece(number, 0, length)] if length else []
            continue
        n_long, longest = n_long + 1, max(longest, length)
        if long != "split":
            continue
        labels = labels_of(row)
        # the first token of a further piece is the last of the one before: context for the next, and trained there
        for start in range(0, length - 1, size - 1):
            piece = Piece(number, start, min(start + size, length))
            is_trained = any(label != IGNORED for label in labels[start + 1 : piece.stop])
            pieces += [piece] if is_trained else []
            n_lost += not is_trained
    if n_long and long == "error":
        raise ValueError(
            f"{n_long:,} of {len(rows):,} rows are longer than tokens_per_batch={size}, the longest has {longest:,} tokens: raise it, or "
            "choose long='split' (trained in pieces, each without what stands before it) or long='drop'"
        )
    told = [f"{n_long:,} longer rows were {'split' if long == 'split' else 'dropped'}"] if n_long else []
    return pieces, told + ([f"{n_lost:,} pieces of them without a label were left out"] if n_lost else [])


def batch_by_tokens(trainer: Trainer, tokens_per_batch: int, long: str = "error") -> Trainer:
    """Train on batches of a constant number of tokens: as many whole samples as fit, in one row without padding.

    Every sample is trained once an epoch; none sees another, positions begin at 0 in each, and losses are those of padded batches of the
    same samples. Call it last, after `train_on_responses_only`. Evaluation stays as it is.

    Args:
        trainer: a trl.SFTTrainer with `per_device_train_batch_size=1`: what is one row at a time here. Its `train_dataset` is replaced by
            `TokenBatches`, its collator by one that knows them.
        tokens_per_batch: the most tokens of a batch on a device; most batches hold nearly as many.
        long: what becomes of samples that are longer: "error" raises, "split" trains them in pieces (each token once, the last token of
            a piece again as context of the next), "drop" leaves them out. What was done is logged with its number.

    Returns:
        The trainer.

    Raises:
        ValueError: for longer samples with "error", a batch size other than 1, rows that are packed already, a stream, a collator that
            is not TRL's, or if nothing is left.
        TypeError: for a trainer of another type.
    """
    import datasets
    from transformers import Trainer

    if not isinstance(trainer, Trainer):
        raise TypeError(f"trainer must be a transformers Trainer, got {type(trainer).__name__}")
    if not isinstance(tokens_per_batch, int) or tokens_per_batch < 2:
        raise ValueError(f"tokens_per_batch must be a whole number of 2 or more, got {tokens_per_batch!r}")
    if long not in LONG:
        raise ValueError(f"long must be one of {', '.join(LONG)}, got {long!r}")
    rows, args = trainer.train_dataset, trainer.args
    if not isinstance(rows, datasets.Dataset) or "input_ids" not in rows.column_names:
        raise ValueError(
            f"train_dataset must be a prepared datasets.Dataset with input_ids, got {type(rows).__name__} (the lengths of a stream are "
            "not known: TRL's packing=True packs streams)"
        )
    if "seq_lengths" in rows.column_names:
        raise ValueError("the rows are packed already: leave packing=True out of the arguments")
    if args.per_device_train_batch_size != 1:
        raise ValueError(
            f"tokens_per_batch={tokens_per_batch} is the size of a batch: set per_device_train_batch_size=1, got "
            f"{args.per_device_train_batch_size}"
        )
    collator = trainer.data_collator
    if not isinstance(collator, importlib.import_module("trl.trainer.sft_trainer").DataCollatorForLanguageModeling):
        raise ValueError(f"the collator must be TRL's own for tokens, got {type(collator).__name__}")
    columns = [column for column in ("input_ids", "labels") if column in rows.column_names]
    kept = rows.select_columns(columns)
    pieces, told = _pieces(kept, tokens_per_batch, long)
    if not pieces:
        raise ValueError(f"no row is left: {'; '.join(told) or 'all are empty'}")
    made = TokenBatches(kept, pieces, tokens_per_batch, args.data_seed if args.data_seed is not None else args.seed)
    longest = vars(args).get("max_length")
    n_full = sum(piece.length == longest for piece in pieces) if longest is not None else 0
    if n_full:
        told.append(
            f"{n_full:,} rows are exactly as long as max_length={longest}, where the trainer cut longer ones: max_length=None leaves "
            "them whole"
        )
    trainer.train_dataset = made
    trainer.data_collator = PackedOrPadded(dataclasses.replace(collator, padding_free=True), collator)
    text = f"{len(pieces):,} samples in {len(made):,} batches of at most {tokens_per_batch:,} tokens, {made.share:.1%} full"
    (logger.warning if told else logger.info)("%s", "; ".join([text, *told]))
    return trainer
