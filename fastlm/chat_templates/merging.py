"""Tables as conversations: columns merged into a question, and rows joined into conversations of several turns."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

_OPTIONAL = re.compile(r"\[\[(.*?)\]\]", flags=re.DOTALL)
_COLUMN = re.compile(r"\{(\w+)\}")


def _is_blank(value: Any) -> bool:
    return value is None or value != value or (isinstance(value, str) and not value.strip())


class _Prompt:
    """The text of a row: `{column}` is its value, and what is in `[[…]]` is left out where one of its columns is empty."""

    def __init__(self, pattern: str, columns: Sequence[str]):
        if not isinstance(pattern, str):
            raise TypeError(f"merged_prompt must be a text with {{column}} in it, got {type(pattern).__name__}")
        unknown = sorted(set(_COLUMN.findall(pattern)) - set(columns))
        if unknown:
            raise ValueError(f"merged_prompt names {unknown}, but the data set has the columns {list(columns)}")
        if not _COLUMN.search(pattern):
            raise ValueError(
                f"merged_prompt names no column: write {{column}} where its value belongs, got {pattern!r}"
            )
        empty = [part for part in _OPTIONAL.findall(pattern) if not _COLUMN.search(part)]
        if (
            empty
            or pattern.count("[[") != len(_OPTIONAL.findall(pattern))
            or pattern.count("]]") != pattern.count("[[")
        ):
            raise ValueError(f"each [[ of merged_prompt needs its ]] and a {{column}} between them, got {pattern!r}")
        self.pattern = pattern

    def __call__(self, row: Mapping[str, Any]) -> str:
        def part(match: re.Match[str]) -> str:
            is_empty = any(_is_blank(row[name]) for name in _COLUMN.findall(match[1]))
            return "" if is_empty else match[1]

        def value(match: re.Match[str]) -> str:
            return "" if row[match[1]] is None else str(row[match[1]])

        # values are filled in last: what looks like a pattern in them stays text
        return _COLUMN.sub(value, _OPTIONAL.sub(part, self.pattern))


def to_sharegpt(
    dataset: Any,
    merged_prompt: str = "",
    merged_column_name: str = "instruction",
    output_column_name: str = "output",
    remove_unused_columns: bool = True,
    conversation_extension: int = 1,
    random_state: int = 3407,
) -> Any:
    """A table as ShareGPT conversations: a column `conversations` of `from` (human, gpt) and `value`.

    Args:
        dataset: datasets.Dataset, or a DatasetDict of them.
        merged_prompt: the question made of columns, as "[[Passenger of class {Pclass}.]][[ Age {Age}.]] Did they survive?". A
            part in [[ ]] is left out of rows where one of its columns is empty. "" takes the column
            `merged_column_name` as it is.
        merged_column_name: the column of the question; with `merged_prompt` and `remove_unused_columns=False`, the one that
            it is written to.
        output_column_name: the column of the answer.
        remove_unused_columns: keep `conversations` alone.
        conversation_extension: turns of each conversation: a row is followed by so many others, drawn at random, less one.
        random_state: seed of the draw.

    Returns:
        A data set of as many rows.

    Raises:
        ValueError: for a column that is not there, a pattern that is not closed, or fewer turns than one.
        TypeError: for another type of data set.
    """
    import datasets

    if isinstance(dataset, datasets.DatasetDict):
        arguments = (merged_prompt, merged_column_name, output_column_name, remove_unused_columns)
        return datasets.DatasetDict(
            {key: to_sharegpt(each, *arguments, conversation_extension, random_state) for key, each in dataset.items()}
        )
    if not isinstance(dataset, datasets.Dataset):
        raise TypeError(f"dataset must be a datasets.Dataset or DatasetDict, got {type(dataset).__name__}")
    if not isinstance(conversation_extension, int) or conversation_extension < 1:
        raise ValueError(f"conversation_extension must be 1 or more turns, got {conversation_extension!r}")
    columns = dataset.column_names
    for name in (output_column_name, *(() if merged_prompt else (merged_column_name,))):
        if name not in columns:
            raise ValueError(f"there is no column {name!r}: the data set has {columns}")
    prompt = _Prompt(merged_prompt or f"{{{merged_column_name}}}", columns)

    def turn(row: Mapping[str, Any]) -> list[dict[str, str]]:
        answer = row[output_column_name]
        return [
            {"from": "human", "value": prompt(row)},
            {"from": "gpt", "value": "" if answer is None else str(answer)},
        ]

    turns = [turn(row) for row in dataset]
    draw = random.Random(random_state)
    orders = [draw.sample(range(len(turns)), len(turns)) for _ in range(conversation_extension - 1)]
    joined = [
        [message for index in (n, *(order[n] for order in orders)) for message in turns[index]]
        for n in range(len(turns))
    ]
    made = datasets.Dataset.from_dict({"conversations": joined})
    if remove_unused_columns:
        return made
    if merged_prompt:
        dataset = dataset.remove_columns([name for name in (merged_column_name,) if name in columns])
        dataset = dataset.add_column(merged_column_name, [each[0]["value"] for each in turns])
    return datasets.concatenate_datasets(
        [dataset.remove_columns([name for name in ("conversations",) if name in columns]), made], axis=1
    )
