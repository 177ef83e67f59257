"""What a prepared data set holds: lengths, trained tokens, and what a person should look at."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

IGNORED = -100


@dataclass(frozen=True)
class Ends:
    """Tokens that a sample should begin or end with, and limits.

    Attributes:
        bos: the begin token, None where the tokenizer has none.
        begins: the tokenizer puts `bos` before plain text.
        ends: tokens that a generation stops at or an answer ends with.
        blanks: tokens of white space, which may stand behind an end.
        pad, unk: of the tokenizer, None where it has none.
        max_length: where rows are cut, None if they are not.
        n_embeddings: rows of the model's embedding, None if no model is known.
    """

    bos: int | None
    begins: bool
    ends: frozenset[int]
    blanks: frozenset[int]
    pad: int | None
    unk: int | None
    max_length: int | None
    n_embeddings: int | None


@dataclass
class Statistics:
    """Counts over rows; a row may be packed of several samples.

    Attributes:
        n_rows, n_samples, n_tokens, n_trained: of all rows that were counted.
        n_untrained: rows without a token to train.
        n_cut: rows as long as `max_length`, whose end was cut off, most likely.
        n_two_bos, n_no_bos: samples that begin with two begin tokens, or with none though plain text gets one.
        n_open: samples whose last trained token is no end token, in rows that were not cut.
        n_unk, n_pad: trained tokens that are the unknown token, or padding.
        n_outside: tokens that the model's embedding has no row for.
        n_repeated: rows with the tokens of an earlier one.
        lengths: tokens of each row.
    """

    n_rows: int = 0
    n_samples: int = 0
    n_tokens: int = 0
    n_trained: int = 0
    n_untrained: int = 0
    n_cut: int = 0
    n_two_bos: int = 0
    n_no_bos: int = 0
    n_open: int = 0
    n_unk: int = 0
    n_pad: int = 0
    n_outside: int = 0
    n_repeated: int = 0
    lengths: list[int] = field(default_factory=list)

    @property
    def trained_share(self) -> float:
        return self.n_trained / self.n_tokens if self.n_tokens else 0.0

    def quantile(self, share: float) -> int:
        """The length that this share of the rows does not exceed."""
        ordered = sorted(self.lengths)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0

    def histogram(self, n_bins: int = 12) -> list[tuple[int, int, int]]:
        """(first length, last length, rows) of equally wide bins from the shortest row to the longest."""
        if not self.lengths:
            return []
        low, high = min(self.lengths), max(self.lengths)
        width = -(-(high - low + 1) // n_bins)
        counts = Counter((length - low) // width for length in self.lengths)
        n_used = (high - low) // width + 1
        return [(low + n * width, min(high, low + (n + 1) * width - 1), counts[n]) for n in range(n_used)]


def bounds(row: Mapping[str, Any]) -> list[tuple[int, int]]:
    """First token and end of each sample of a row."""
    lengths = [int(length) for length in row.get("seq_lengths") or [len(row["input_ids"])]]
    return list(itertools.pairwise([0, *itertools.accumulate(lengths)]))


def labels_of(row: Mapping[str, Any]) -> Sequence[int]:
    """The labels of a row; all tokens are trained where it has none."""
    return row["input_ids"] if row.get("labels") is None else row["labels"]


def count(rows: Iterable[Mapping[str, Any]], ends: Ends) -> Statistics:
    """Statistics of rows with `input_ids`, and `labels` and `seq_lengths` where there are."""
    made = Statistics()
    seen: set[int] = set()
    for row in rows:
        ids, labels = row["input_ids"], labels_of(row)
        trained = [position for position, label in enumerate(labels) if label != IGNORED]
        made.n_rows += 1
        made.n_tokens += len(ids)
        made.n_trained += len(trained)
        made.n_untrained += not trained
        made.lengths.append(len(ids))
        parts = bounds(row)
        is_cut = len(ids) == ends.max_length and len(parts) == 1
        made.n_cut += is_cut
        made.n_samples += len(parts)
        key = hash(tuple(ids))
        made.n_repeated += key in seen
        seen.add(key)
        for start, stop in parts:
            if ends.bos is not None and start < stop:
                begins = ids[start] == ends.bos
                made.n_two_bos += begins and start + 1 < stop and ids[start + 1] == ends.bos
                made.n_no_bos += ends.begins and not begins
            ended = (ids[at] for at in range(stop - 1, start - 1, -1) if labels[at] != IGNORED)
            last = next((token for token in ended if token not in ends.blanks), None)
            made.n_open += last is not None and not is_cut and last not in ends.ends
        made.n_unk += sum(ids[at] == ends.unk for at in trained) if ends.unk is not None else 0
        made.n_pad += sum(ids[at] == ends.pad for at in trained) if ends.pad not in (None, *ends.ends) else 0
        if ends.n_embeddings is not None:
            made.n_outside += sum(not 0 <= token < ends.n_embeddings for token in ids)
    return made


def warnings_of(made: Statistics, ends: Ends, is_chat: bool) -> list[str]:
    """What a person should look at, the worst first.

    Args:
        is_chat: the rows were made from conversations, so that questions are in them.
    """
    n_rows, n_samples = made.n_rows, made.n_samples
    found = [
        (made.n_outside, f"{made.n_outside:,} tokens have no row in the model's embedding of {ends.n_embeddings}: this is "
         "the tokenizer of another model, or its embedding was not resized"),
        (made.n_untrained, f"{made.n_untrained:,} of {n_rows:,} rows have no token to train: drop them"),
        (made.n_two_bos, f"{made.n_two_bos:,} of {n_samples:,} samples begin with two begin tokens: the template writes one "
         "and the tokenizer another"),
        (made.n_no_bos, f"{made.n_no_bos:,} of {n_samples:,} samples begin without the begin token, which this tokenizer puts "
         "before plain text: the model may expect it"),
        (made.n_open, f"{made.n_open:,} of {n_samples:,} samples do not train an end token last: the model may not learn to stop"),
        (made.n_cut, f"{made.n_cut:,} of {n_rows:,} rows are as long as max_length={ends.max_length}, so what followed was cut off: "
         "raise it, or chunk long texts"),
        (made.n_unk, f"{made.n_unk:,} trained tokens are the unknown token: the vocabulary lacks some characters"),
        (made.n_pad, f"{made.n_pad:,} trained tokens are padding"),
        (ends.pad is not None and ends.pad in ends.ends, "the padding token is also an end token: a collator that ignores "
         "padding will ignore the ends too"),
        (is_chat and made.n_tokens == made.n_trained, "every token is trained, the questions too: "
         "train_on_responses_only(trainer) leaves the answers"),
        (20 * made.n_repeated > n_rows, f"{made.n_repeated:,} of {n_rows:,} rows repeat an earlier one"),
    ]  # fmt: skip
    return [text for is_so, text in found if is_so]
