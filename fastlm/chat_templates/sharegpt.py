"""Conversations of ShareGPT's form, `from` and `value`, as `role` and `content`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

_COLUMNS = ("conversations", "messages")
_KEYS = {"role": "role", "from": "role", "content": "content", "value": "content"}


def _message(message: Mapping[str, Any], roles: Mapping[str, str], where: str) -> dict[str, Any]:
    # data sets fill the keys that other rows have with None
    given = {key: value for key, value in message.items() if value is not None}
    unknown = sorted(set(given) - set(_KEYS))
    if unknown:
        raise ValueError(
            f"{where}: unknown key {unknown[0]!r} with value {given[unknown[0]]!r}; a message has role and content, "
            "or from and value. Remove other keys first"
        )
    if sorted(_KEYS[key] for key in given) != ["content", "role"]:
        raise ValueError(f"{where}: a message needs one role (or from) and one content (or value), got {dict(message)}")
    standard = {_KEYS[key]: value for key, value in given.items()}
    if standard["role"] not in roles:
        raise ValueError(
            f"{where}: unknown role {standard['role']!r}; known are {sorted(roles)}. Name it in aliases_for_system, "
            "aliases_for_user or aliases_for_assistant, or remove the message"
        )
    return {"role": roles[standard["role"]], "content": standard["content"]}


def _conversation(
    conversation: Sequence[Mapping[str, Any]], roles: Mapping[str, str], where: str
) -> list[dict[str, Any]]:
    return [_message(message, roles, f"{where}, message {n}") for n, message in enumerate(conversation)]


def _batch(
    batch: Mapping[str, list], rows: list[int], column: str, roles: Mapping[str, str], where: str
) -> dict[str, list]:
    pairs = zip(rows, batch[column], strict=True)
    return {column: [_conversation(conversation, roles, f"{where}row {row}") for row, conversation in pairs]}


def _column(names: Sequence[str], where: str) -> str:
    found = [name for name in _COLUMNS if name in names]
    if len(found) != 1:
        raise ValueError(f"{where}one of the columns {list(_COLUMNS)} is needed, got {list(names)}")
    return found[0]


def _roles(system: Sequence[str], user: Sequence[str], assistant: Sequence[str]) -> dict[str, str]:
    roles = {"system": "system", "user": "user", "assistant": "assistant"}
    for role, aliases in (("system", system), ("user", user), ("assistant", assistant)):
        if isinstance(aliases, str):
            raise TypeError(f"aliases_for_{role} must be a list of names, got the string {aliases!r}")
        for alias in aliases:
            if roles.setdefault(alias, role) != role:
                raise ValueError(f"{alias!r} cannot stand for {role!r}: it stands for {roles[alias]!r} already")
    return roles


def standardize_sharegpt(
    dataset: Any,
    aliases_for_system: Sequence[str] = ("system",),
    aliases_for_user: Sequence[str] = ("user", "human", "input"),
    aliases_for_assistant: Sequence[str] = ("gpt", "assistant", "output"),
    batch_size: int = 1000,
    num_proc: int | None = None,
) -> Any:
    """Conversations with `role` (system, user, assistant) and `content`, from these or from `from` and `value`.

    The column (`conversations` or `messages`) keeps its name, other columns stay, and standard conversations stay as
    they are.

    Args:
        dataset: datasets.Dataset, IterableDataset (converted while it is read), a DatasetDict of them, or a list of
            dicts.
        aliases_for_system, aliases_for_user, aliases_for_assistant: names that the roles have in the data; the three
            standard names are always known.
        batch_size: rows at a time.
        num_proc: processes; not for iterable data sets, which are read by the data loader's.

    Returns:
        A new data set (list) of the same type.

    Raises:
        ValueError: with row and value, for an unknown role, an unknown key, or a message without role or content; if
            the column is missing; if a name stands for two roles.
        TypeError: for another type of data set.
    """
    import datasets

    roles = _roles(aliases_for_system, aliases_for_user, aliases_for_assistant)

    def convert(data: Any, where: str) -> Any:
        if isinstance(data, list):
            columns = [_column(list(row), f"{where}row {n}: ") for n, row in enumerate(data)]
            return [
                {**row, column: _conversation(row[column], roles, f"{where}row {n}")}
                for n, (row, column) in enumerate(zip(data, columns, strict=True))
            ]
        if not isinstance(data, (datasets.Dataset, datasets.IterableDataset)):
            raise TypeError(
                f"{where}dataset must be a datasets.Dataset, IterableDataset, a dict of them or a list of dicts, "
                f"got {type(data).__name__}"
            )
        column = _column(data.column_names or list(next(iter(data))), where)
        function = functools.partial(_batch, column=column, roles=roles, where=where)
        if isinstance(data, datasets.IterableDataset):
            return data.map(function, with_indices=True, batched=True, batch_size=batch_size)
        return data.map(
            function, with_indices=True, batched=True, batch_size=batch_size, num_proc=num_proc, desc="Standard roles"
        )

    if isinstance(dataset, dict):
        return type(dataset)({key: convert(each, f"{key}: ") for key, each in dataset.items()})
    return convert(dataset, "")


standardize_data_formats = standardize_sharegpt
