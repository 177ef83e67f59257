"""Rows from files, tables, lists and data sets."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_JSON_LINES = (".jsonl", ".ndjson")
_TEXTS = (".txt", ".md")
_TABLES = {".csv": ",", ".tsv": "\t"}
KINDS = (".json", *_JSON_LINES, *_TABLES, ".parquet", *_TEXTS)

# a row that could not be read, with the reason
BROKEN = "fastlm: broken row"


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                yield {BROKEN: "the line is no JSON"}
                continue
            yield row if isinstance(row, dict) else {BROKEN: "the line is JSON, but no object"}


def _json(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        text = file.read()
    try:
        data = json.loads(text)
    except ValueError as error:
        if text.lstrip().startswith("{") and "\n" in text.strip():
            # lines of JSON under the other name
            return _json_lines(path)
        raise ValueError(f"{path} is no JSON: {error}") from error
    if isinstance(data, dict):
        lists = {key: value for key, value in data.items() if isinstance(value, list)}
        if len(lists) == 1 and len(data) > len(lists) or set(lists) in ({"data"}, {"train"}, {"rows"}):
            data = next(iter(lists.values()))
        elif lists and len(lists) == len(data) and len({len(value) for value in lists.values()}) == 1:
            data = [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
        else:
            data = [data]
    if not isinstance(data, list):
        raise ValueError(f"{path} holds {type(data).__name__}, but rows are needed: a list of objects")
    return _of_list(data)


def _of_list(rows: list[Any]) -> Iterator[dict[str, Any]]:
    for row in rows:
        yield dict(row) if isinstance(row, Mapping) else {BROKEN: f"the row is {type(row).__name__}, no object"}


def _table(path: Path, delimiter: str) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        # cells may hold whole documents; this is csv's own limit of the process, and what it was comes back
        limit = csv.field_size_limit(2**31 - 1)
        try:
            for row in csv.DictReader(file, delimiter=delimiter):
                is_torn = None in row or None in row.values()
                yield {BROKEN: "the line has more or fewer cells than the header"} if is_torn else row
        finally:
            csv.field_size_limit(limit)


def _file(path: Path) -> Iterator[dict[str, Any]]:
    import datasets

    kind = path.suffix.lower()
    if kind in _JSON_LINES:
        return _json_lines(path)
    if kind == ".json":
        return _json(path)
    if kind in _TABLES:
        return _table(path, _TABLES[kind])
    if kind in _TEXTS:
        return iter([{"text": path.read_text(encoding="utf-8-sig", errors="surrogateescape")}])
    if kind == ".parquet":
        return iter(datasets.Dataset.from_parquet(str(path)))
    raise ValueError(f"{path} is of no kind that is known: use one of {', '.join(KINDS)}")


def _files(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a file, or of all files of a folder in the order of their names."""
    if not path.is_dir():
        yield from _file(path)
        return
    found = [each for each in sorted(path.rglob("*")) if each.suffix.lower() in KINDS and each.is_file()]
    if not found:
        raise ValueError(f"the folder {path} holds no file of a kind that is known: {', '.join(KINDS)}")
    for each in found:
        yield from _file(each)


def read(source: Any, split: str | None) -> Any:
    """A datasets.Dataset or IterableDataset as it is, or an iterator over rows.

    Args:
        source: a path, the name of a data set on the hub, a data set, a list of rows, a dict of columns, or a pandas
            DataFrame.
        split: of a data set with several.

    Raises:
        ValueError: for a path that is not there or of an unknown kind, or a missing split.
        TypeError: for another type.
    """
    import datasets

    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if path.is_dir() and ((path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists()):
            source = datasets.load_from_disk(str(path))
        elif path.exists():
            if split is not None:
                raise ValueError(f"split={split!r} is of a data set with several: {path} is a file or folder of rows")
            return _files(path)
        elif path.suffix or str(source).count("/") > 1 or isinstance(source, os.PathLike) or path.is_absolute():
            raise ValueError(f"there is no file or folder {str(source)!r}")
        else:
            source = datasets.load_dataset(str(source))
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(source, pandas.DataFrame):
        return _of_list(source.to_dict("records"))
    if isinstance(source, (datasets.DatasetDict, datasets.IterableDatasetDict)):
        wanted = split or ("train" if "train" in source or len(source) != 1 else next(iter(source)))
        if wanted not in source:
            raise ValueError(f"split {wanted!r} is not there: the data set has {list(source)}")
        return source[wanted]
    if split is not None:
        raise ValueError(f"split={split!r} is of a data set with several: this source is {type(source).__name__}")
    if isinstance(source, (datasets.Dataset, datasets.IterableDataset)):
        return source
    if isinstance(source, list):
        return _of_list(source)
    if isinstance(source, dict) and source and all(isinstance(column, list) for column in source.values()):
        lengths = {name: len(column) for name, column in source.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the columns are of different lengths: {lengths}")
        return _of_list([dict(zip(source, row, strict=True)) for row in zip(*source.values(), strict=True)])
    raise TypeError(
        "source must be a path, a data set, a list of rows, a dict of columns or a pandas DataFrame, "
        f"got {type(source).__name__}"
    )
