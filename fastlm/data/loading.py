"""A data set that TRL's trainers can read, from what a person has."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastlm.data.documents import Chunks
from fastlm.data.forms import FORMS, Form, Row, Unusable, detect
from fastlm.data.sources import BROKEN, read

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# rows of a data set whose columns are looked at, which a stream has to fetch
_SAMPLE = 100


@dataclass
class Found:
    """What a source held: its form, how many rows were made, and which were dropped, why, and where the first stood."""

    form: Form
    n_read: int = 0
    n_made: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    first: dict[str, int] = field(default_factory=dict)

    def convert(self, rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
        """Rows for TRL's trainers; counts the others."""
        for row in rows:
            number = self.n_read
            self.n_read += 1
            try:
                if BROKEN in row:
                    raise Unusable(row[BROKEN])
                made = self.form.convert(row)
            except Unusable as why:
                self.first.setdefault(str(why), number)
                self.dropped[str(why)] += 1
                continue
            self.n_made += 1
            yield made

    def __str__(self) -> str:
        lines = [f"{self.n_made:,} of {self.n_read:,} rows of the form {self.form}"]
        lines += [
            f"dropped {count:,}: {why} (the first is row {self.first[why]})"
            for why, count in self.dropped.most_common()
        ]
        return "; ".join(lines)


def _form_of(rows: list[Row], columns: Mapping[str, str] | None, form: str | None) -> Form:
    """The form of rows that need not all have the same columns: the one of the most common columns."""
    whole = [row for row in rows if BROKEN not in row]
    if not whole:
        reasons = Counter(str(row[BROKEN]) for row in rows)
        raise ValueError(f"no row can be read: {dict(reasons) or 'the source is empty'}")
    counts = Counter(name for row in whole for name in row)
    renamed = {str(theirs): ours for ours, theirs in (columns or {}).items()}
    missing = sorted(set(renamed) - set(counts))
    if missing:
        raise ValueError(f"columns names {missing}, but the rows have {sorted(counts)}")
    # a column that few rows have must not decide
    common = [name for name, count in counts.items() if 2 * count >= len(whole)] or list(counts)
    found = detect([renamed.get(name, name) for name in common], [renamed.get(name, name) for name in counts])
    if form not in (None, found.name):
        raise ValueError(f"form is {form!r}, but the columns {common} are of the form {found}")
    theirs = {ours: name for name, ours in renamed.items()}
    return dataclasses.replace(found, columns={role: theirs.get(name, name) for role, name in found.columns.items()})


def _features(form: Form, rows: list[dict[str, Any]] | None) -> datasets.Features | None:
    """Types of the columns: messages with more than role and content keep their own keys each."""
    import datasets

    def is_plain(value: Any) -> bool:
        return isinstance(value, list) and all(set(message) == {"role", "content"} for message in value)

    plain = datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")})
    types: dict[str, Any] = {}
    for column in form.makes:
        values = None if rows is None else [row[column] for row in rows]
        if column == "label":
            types[column] = datasets.Value("bool")
        elif column in ("tools", "text") or (values is not None and all(isinstance(value, str) for value in values)):
            types[column] = datasets.Value("string")
        elif values is not None and all(map(is_plain, values)):
            types[column] = plain
        elif values is not None and any(isinstance(value, str) for value in values):
            raise ValueError(f"the column {column!r} holds texts in some rows and messages in others: keep one of them")
        else:
            types[column] = datasets.List(datasets.Json())
    return datasets.Features(types)


def load(
    source: Any,
    *,
    split: str | None = None,
    form: str | None = None,
    columns: Mapping[str, str] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    chunk_length: int | None = None,
    overlap: int = 0,
) -> datasets.Dataset | datasets.IterableDataset:
    """Read training data of any usual form and return what TRL's trainers read.

    | form | columns | returned columns |
    | --- | --- | --- |
    | chat | `messages` or `conversations` (role/content or from/value), `tools`, `system` | `messages`, `tools` |
    | alpaca | `instruction`, `input`, `output` or `response`, `system`, `history` | `messages` |
    | question-answer | `question`, `answer` and the like | `messages` |
    | prompt-completion | `prompt`, `completion`: texts or messages | the same |
    | preference | `chosen`, `rejected`, `prompt`: texts or messages | the same |
    | unpaired-preference | `prompt`, `completion`, `label` | the same |
    | text | `text`, or files of text | `text`, or `input_ids` of chunks |

    Rows that cannot be trained on (no answer, an unknown role, a number where a text belongs, text that is no Unicode, …)
    are dropped, counted and explained in one warning; what was found is logged and stands in `dataset.info.description`.

    Args:
        source: a file (.json, .jsonl, .csv, .tsv, .parquet, .txt, .md) or a folder of them, what `save_to_disk` wrote, the
            name of a data set on the hub, a datasets.Dataset or IterableDataset or a dict of them, a list of rows, a
            dict of columns, or a pandas DataFrame.
        split: of a source with several; "train" by default.
        form: what you expect; raises if the rows are of another.
        columns: your names for columns, as {"question": "my column", "answer": "my other column"}.
        tokenizer: with `chunk_length`.
        chunk_length: cut texts into rows of at most so many tokens, instead of letting a trainer cut them off.
        overlap: tokens that a chunk repeats of the one before.

    Returns:
        A Dataset; for an IterableDataset, one that converts rows while it is read.

    Raises:
        ValueError: for a missing file, a form that is not known or not the one expected, or if no row can be used.
        TypeError: for a source of another type.
    """
    import datasets

    if form is not None and form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
    chunks = Chunks.checked(tokenizer, chunk_length, overlap)
    rows = read(source, split)
    is_dataset = isinstance(rows, (datasets.Dataset, datasets.IterableDataset))
    # all of them where they are read anyway: a column that only late rows have must not be lost
    sample = list(itertools.islice(iter(rows), _SAMPLE)) if is_dataset else list(rows)
    found = Found(_form_of(sample, columns, form))
    if chunks is not None and found.form.name != "text":
        raise ValueError(f"chunk_length is for texts, but the rows are of the form {found.form}")
    if isinstance(rows, datasets.IterableDataset):
        return _stream(rows, sample, found, chunks)
    made = list(found.convert(rows if is_dataset else sample))
    if not made:
        raise ValueError(f"no row is left: {found}")
    dataset = datasets.Dataset.from_list(made, features=_features(found.form, made))
    if chunks is not None:
        dataset = dataset.map(chunks, batched=True, remove_columns=["text"], desc="Chunks of texts")
    dataset.info.description = str(found)
    (logger.warning if found.dropped else logger.info)("%s", found)
    return dataset


def _as_rows(sample: Any) -> list[Row]:
    if isinstance(sample, list):
        return sample
    return [dict(zip(sample, values, strict=True)) for values in zip(*sample.values(), strict=True)]


def _stream(rows: Any, sample: list[Row], found: Found, chunks: Chunks | None) -> Any:
    def convert(batch: dict[str, list]) -> dict[str, list]:
        n_before = sum(found.dropped.values())
        made = list(found.convert(_as_rows(batch)))
        n_dropped = sum(found.dropped.values())
        # the first, and then each tenfold
        if len(str(n_dropped)) > len(str(n_before)) or (n_dropped and not n_before):
            logger.warning("so far %s", found)
        return {column: [row[column] for row in made] for column in found.form.makes}

    # texts or messages: the first rows show which; conversations keep the keys that later rows may have
    is_open = found.form.name in ("chat", "alpaca", "question-answer")
    features = _features(found.form, None if is_open else list(Found(found.form).convert(sample)))
    stream = rows.map(convert, batched=True, remove_columns=list(sample[0]), features=features)
    logger.info("a stream of rows of the form %s", found.form)
    return stream if chunks is None else stream.map(chunks, batched=True, remove_columns=["text"])
