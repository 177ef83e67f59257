"""The forms that training data comes in: which one some rows have, and a row of each as TRL's trainers read it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]


class Unusable(Exception):
    """A row that cannot be trained on; the text says why, the same for all rows of this kind."""


ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "input": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "bot": "assistant", "chatgpt": "assistant",
    "output": "assistant", "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool",
    "function_call": "function_call",
}  # fmt: skip

_CHATS = ("messages", "conversations", "conversation", "chat", "dialogue")
# a question's column and its answer's, the most telling pairs first
_PAIRS = (
    ("instruction", ("output", "response", "answer", "completion")),
    ("question", ("answer", "response", "output")),
    ("query", ("response", "answer", "output")),
    ("prompt", ("response", "answer", "output")),
    ("problem", ("solution", "answer")),
    ("input", ("output", "response")),
)
_TEXTS = ("text", "content", "document")
_KEPT_KEYS = ("name", "tool_call_id", "reasoning_content", "thinking")


def is_empty(value: Any) -> bool:
    """Whether a cell holds nothing: None, or NaN as pandas writes it."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def text_of(value: Any, what: str) -> str:
    """A text that can be tokenized.

    Raises:
        Unusable: if it is missing, blank, of another type, or no valid Unicode.
    """
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        if any(part.get("type") != "text" or not isinstance(part.get("text"), str) for part in value):
            raise Unusable(f"the {what} holds parts that are no text")
        value = "".join(part["text"] for part in value)
    if is_empty(value):
        raise Unusable(f"the {what} is missing")
    if not isinstance(value, str):
        raise Unusable(f"the {what} is {type(value).__name__}, not text")
    if not value.strip():
        raise Unusable(f"the {what} is empty")
    return _encodable(value, what)


def _encodable(value: str, what: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise Unusable(f"the {what} holds bytes or halves of characters that are no Unicode text") from error
    return value


def _decoded(value: Any, what: str) -> Any:
    """A value that may be JSON in a text, as tables hold it."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise Unusable(f"the {what} is a text that is no JSON") from error


def _tool_call(call: Any) -> dict[str, Any]:
    """As chat templates read it: a function with its arguments as an object."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Unusable("a tool call has no function name")
    arguments = function.get("arguments", function.get("parameters"))
    arguments = {} if is_empty(arguments) or arguments == "" else _decoded(arguments, "tool call's arguments")
    if not isinstance(arguments, dict):
        raise Unusable("the arguments of a tool call are no object")
    _encodable(json.dumps([function["name"], arguments], ensure_ascii=False), "tool call")
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return made | ({"id": call["id"]} if isinstance(call.get("id"), str) else {})


def message_of(message: Any) -> dict[str, Any]:
    """One message with role and content, from this form or from `from` and `value`."""
    if not isinstance(message, dict):
        raise Unusable(f"a message is {type(message).__name__}, not an object")
    given = {key: value for key, value in message.items() if not is_empty(value)}
    role = given.get("role", given.get("from"))
    if not isinstance(role, str) or role.strip().lower() not in ROLES:
        raise Unusable(
            f"a message has the unknown role {str(role)[:40]!r}" if role is not None else "a message has no role"
        )
    role = ROLES[role.strip().lower()]
    content = given.get("content", given.get("value"))
    calls = given.get("tool_calls")
    if role == "function_call":
        role, calls, content = "assistant", _decoded(content, "function call"), None
        calls = calls if isinstance(calls, list) else [calls]
    made: dict[str, Any] = {"role": role}
    if calls:
        if not isinstance(calls, list) or role != "assistant":
            raise Unusable("tool calls are no list of an assistant's")
        is_blank = is_empty(content) or (isinstance(content, str) and not content.strip())
        made["content"] = "" if is_blank else text_of(content, "content of a message")
        made["tool_calls"] = [_tool_call(call) for call in calls]
    elif role in ("tool", "system") and isinstance(content, str):
        # a tool may return nothing, a system text may be empty
        made["content"] = _encodable(content, f"content of a {role} message")
    else:
        made["content"] = text_of(content, f"content of a message of role {role}")
    for key in _KEPT_KEYS:
        if key in given and isinstance(given[key], str):
            made[key] = _encodable(given[key], key)
    return made


def chat_of(value: Any, what: str, needs_answer: bool = True) -> list[dict[str, Any]]:
    """A conversation as a list of messages."""
    value = _decoded(value, what)
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise Unusable(
            f"the {what} is missing" if is_empty(value) else f"the {what} is {type(value).__name__}, no list"
        )
    messages = [message_of(message) for message in value]
    if not messages:
        raise Unusable(f"the {what} is empty")
    if needs_answer and not any(message["role"] == "assistant" for message in messages):
        raise Unusable(f"the {what} has no answer of an assistant")
    return messages


def _side(value: Any, what: str, needs_answer: bool) -> Any:
    """A prompt or an answer: a text, or messages."""
    return text_of(value, what) if isinstance(value, str) else chat_of(value, what, needs_answer)


@dataclass(frozen=True)
class Form:
    """A form of rows, found in their columns.

    Attributes:
        name: alpaca, chat, prompt-completion, preference, unpaired-preference, question-answer or text.
        columns: the columns it reads, by what they are.
        makes: the columns of the rows that it makes.
        ignores: the other columns.
    """

    name: str
    columns: Mapping[str, str]
    makes: tuple[str, ...]
    ignores: tuple[str, ...] = ()

    def __str__(self) -> str:
        read = ", ".join(
            f"{column!r} as {role}" if column != role else repr(column) for role, column in self.columns.items()
        )
        ignored = f"; ignores {', '.join(map(repr, self.ignores))}" if self.ignores else ""
        return f"{self.name} (reads {read}; makes {', '.join(map(repr, self.makes))}{ignored})"

    def convert(self, row: Row) -> dict[str, Any]:
        """A row for TRL's trainers.

        Raises:
            Unusable: saying why the row cannot be trained on.
        """
        return _CONVERTERS[self.name]({role: row.get(column) for role, column in self.columns.items()})


def _chat(cells: dict[str, Any]) -> dict[str, Any]:
    messages = chat_of(cells["messages"], "conversation")
    if not is_empty(cells.get("system")) and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": text_of(cells["system"], "system text")}, *messages]
    made: dict[str, Any] = {"messages": messages}
    if "tools" in cells:
        # as JSON: TRL reads it back, and a table need not hold one schema for all
        tools = [] if is_empty(cells["tools"]) or cells["tools"] == "" else _decoded(cells["tools"], "tools")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise Unusable("the tools are no list of objects")
        made["tools"] = json.dumps(tools, ensure_ascii=False) if tools else None
    return made


def _question(cells: dict[str, Any]) -> dict[str, Any]:
    question, extra = text_of(cells["question"], "question"), cells.get("input")
    if isinstance(extra, str) and extra.strip():
        question = f"{question}\n\n{_encodable(extra, 'input')}"
    elif not is_empty(extra) and not isinstance(extra, str):
        raise Unusable(f"the input is {type(extra).__name__}, not text")
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": text_of(cells["answer"], "answer")},
    ]
    history = [] if is_empty(cells.get("history")) else _decoded(cells["history"], "history")
    if not isinstance(history, list) or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in history):
        raise Unusable("the history is no list of pairs of question and answer")
    for asked, answered in reversed(history):
        messages = [
            {"role": "user", "content": text_of(asked, "question in the history")},
            {"role": "assistant", "content": text_of(answered, "answer in the history")},
            *messages,
        ]
    if isinstance(cells.get("system"), str) and cells["system"].strip():
        messages = [{"role": "system", "content": text_of(cells["system"], "system text")}, *messages]
    return {"messages": messages}


def _completion(cells: dict[str, Any]) -> dict[str, Any]:
    made = {
        "prompt": _side(cells["prompt"], "prompt", needs_answer=False),
        "completion": _side(cells["completion"], "completion", needs_answer=True),
    }
    if isinstance(made["prompt"], str) != isinstance(made["completion"], str):
        raise Unusable("one of prompt and completion is a text, the other messages")
    return made


def _preference(cells: dict[str, Any]) -> dict[str, Any]:
    made = {side: _side(cells[side], f"{side} answer", needs_answer=True) for side in ("chosen", "rejected")}
    if "prompt" in cells:
        made = {"prompt": _side(cells["prompt"], "prompt", needs_answer=False), **made}
    if len({isinstance(value, str) for value in made.values()}) == 2:
        raise Unusable("some of prompt, chosen and rejected are texts, the others messages")
    if made["chosen"] == made["rejected"]:
        raise Unusable("the chosen and the rejected answer are the same")
    return made


def _unpaired(cells: dict[str, Any]) -> dict[str, Any]:
    label = cells["label"]
    if label not in (True, False, 0, 1):
        raise Unusable("the label is neither true nor false")
    return {**_completion(cells), "label": bool(label)}


_CONVERTERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "chat": _chat,
    "alpaca": _question,
    "question-answer": _question,
    "prompt-completion": _completion,
    "preference": _preference,
    "unpaired-preference": _unpaired,
    "text": lambda cells: {"text": text_of(cells["text"], "text")},
}
FORMS = tuple(_CONVERTERS)


def detect(columns: Sequence[str], rare: Sequence[str] = ()) -> Form:
    """The form that rows with these columns have.

    Args:
        columns: those of most rows, which decide.
        rare: those of some, read where the form knows what to do with them.

    Raises:
        ValueError: if it is none that is known, naming those that are.
    """
    names = {column.strip().lower(): column for column in reversed(columns)}
    all_names = {column.strip().lower(): column for column in reversed(rare)} | names

    def found(*candidates: str) -> str | None:
        return next((names[name] for name in candidates if name in names), None)

    def also(*candidates: str) -> str | None:
        return next((all_names[name] for name in candidates if name in all_names), None)

    def form(name: str, makes: Sequence[str] = (), **roles: str | None) -> Form:
        read = {role: column for role, column in roles.items() if column is not None}
        ignored = sorted(set(all_names.values()) - set(read.values()))
        return Form(name, read, tuple(makes or read), tuple(ignored))

    chosen, rejected = found("chosen"), found("rejected")
    prompt, completion = found("prompt"), found("completion")
    if chosen and rejected:
        prompt = prompt or found("question", "instruction", "input")
        return form("preference", prompt=prompt, chosen=chosen, rejected=rejected)
    if chat := found(*_CHATS):
        tools = also("tools", "functions")
        makes = ("messages", "tools") if tools else ("messages",)
        return form("chat", makes, messages=chat, system=also("system"), tools=tools)
    if prompt and completion:
        label = found("label")
        return form(
            "unpaired-preference" if label else "prompt-completion", prompt=prompt, completion=completion, label=label
        )
    for asks, answers in _PAIRS:
        question, answer = found(asks), found(*answers)
        if question and answer:
            more = also("input", "context") if asks != "input" else also("context")
            name = "alpaca" if asks == "instruction" else "question-answer"
            rest = {"system": also("system"), "history": also("history")}
            return form(name, ("messages",), question=question, input=more, answer=answer, **rest)
    if text := found(*_TEXTS):
        return form("text", text=text)
    raise ValueError(
        f"the columns {list(columns)} are of no form that is known: {', '.join(_CHATS[:2])} (chat); instruction, output (alpaca); "
        "prompt, completion; chosen, rejected (preference); question, answer; text. Name yours with "
        "columns={'question': 'my column', 'answer': 'my other column'}, or rename them"
    )
