"""Rows of data sets that no trainer has prepared, as tokens and labels, and what such rows should begin and end with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastlm.chat_templates.labels import RowLabels, conversation_of, from_template
from fastlm.chat_templates.spans import AnswerSpans, common_prefix
from fastlm.data.statistics import IGNORED, Ends

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def tokenized(rows: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Rows that no trainer has prepared, as SFTTrainer and train_on_responses_only would."""
    chats = [conversation_of(dict(row)) for row in rows]
    labels = from_template(tokenizer, None, last_response_only=False) if any(chats) else None
    return [
        _of_texts(row, tokenizer)
        if messages is None or labels is None
        else _of_chat(dict(row), messages, tokenizer, labels)
        for row, messages in zip(rows, chats, strict=True)
    ]


def _of_chat(
    row: dict[str, Any], messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, labels: RowLabels
) -> dict[str, Any]:
    tools = row.get("tools")
    options = {
        "tools": json.loads(tools) if isinstance(tools, str) else tools,
        **(row.get("chat_template_kwargs") or {}),
    }
    ids = list(tokenizer.apply_chat_template(messages, return_dict=False, **options))
    made = {"input_ids": ids, **labels({**row, "input_ids": ids})}
    if row.get("messages") is None:
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False, **options)
        made["labels"] = _without(list(prompt), ids, made["labels"])
    return made


def _of_texts(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    end = tokenizer.eos_token or ""
    if isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
        prompt = tokenizer(row["prompt"], verbose=False)["input_ids"]
        ids = tokenizer(row["prompt"] + row["completion"] + end, verbose=False)["input_ids"]
        return {"input_ids": ids, "labels": _without(prompt, ids, ids)}
    if isinstance(row.get("text"), str):
        return {"input_ids": tokenizer(row["text"] + end, verbose=False)["input_ids"]}
    raise ValueError(
        f"rows need input_ids, messages, prompt and completion, or text, got the columns {sorted(row)}: "
        "fastlm.data.load makes them from other forms"
    )


def _without(prompt: list[int], ids: list[int], labels: Sequence[int]) -> list[int]:
    """Labels of what stands behind the prompt."""
    n_same = common_prefix(prompt, ids)
    return [IGNORED] * n_same + list(labels[n_same:])


def ends_of(tokenizer: PreTrainedTokenizerBase, model: Any = None, args: Any = None) -> Ends:
    """What samples should begin and end with, by the tokenizer, its template and the model's generation settings."""
    ends = {tokenizer.eos_token_id}
    n_embeddings = None
    if model is not None:
        n_embeddings = model.get_input_embeddings().weight.shape[0]
        stops = model.generation_config.eos_token_id if model.can_generate() else None
        ends |= set(stops if isinstance(stops, list) else [stops])
    if tokenizer.chat_template is not None:
        ends |= _closing_tokens(tokenizer)
    blanks = tokenizer(["\n", "\n\n", " "], add_special_tokens=False)["input_ids"]
    return Ends(
        bos=tokenizer.bos_token_id,
        begins=tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id],
        ends=frozenset(ends - {None}),
        blanks=frozenset(ids[0] for ids in map(tuple, blanks) if len(ids) == 1),
        pad=tokenizer.pad_token_id,
        unk=tokenizer.unk_token_id,
        max_length=None if args is None or _keeps_all(vars(args)) else vars(args).get("max_length"),
        n_embeddings=n_embeddings,
    )


def _keeps_all(settings: dict[str, Any]) -> bool:
    """Whether a trainer packs rows without cutting any: TRL's best fit cuts those that are longer than a packed row."""
    return bool(settings.get("packing")) and settings.get("packing_strategy") != "bfd"


def _closing_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The token that ends an answer in the chat template."""
    import jinja2

    chat = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    spans_of = AnswerSpans(tokenizer)
    try:
        text, spans = spans_of(chat)
    except jinja2.TemplateError:
        # the template wants another kind of conversation
        return set()
    answer = text[slice(*spans[-1])] if spans else ""
    ids = tokenizer(answer.rstrip(), add_special_tokens=False)["input_ids"] if len(answer) > 1 else []
    added = set(tokenizer.get_added_vocab().values())
    return {ids[-1]} & added if ids else set()


# settings of an SFTConfig that make more of a conversation than its tokens
_MORE = ("packing", "eval_packing", "assistant_only_loss", "dataset_kwargs", "chat_template_path", "eos_token")


class _Tokens:
    """For `datasets.map`, batched: conversations to `input_ids`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer

    def __call__(self, batch: dict[str, list]) -> dict[str, list]:
        return {"input_ids": self.tokenizer.apply_chat_template(batch["messages"], return_dict=True)["input_ids"]}


def with_tokens(rows: Any, tokenizer: Any, settings: Mapping[str, Any]) -> Any:
    """Conversations with their tokens: those that an SFTTrainer would make row by row, made many at a time.

    Args:
        rows: a data set of `messages` alone; anything else comes back as it is.
        tokenizer: the trainer's.
        settings: of its SFTConfig. With one that makes more of a conversation, rows come back as they are.
    """
    import datasets
    from transformers import PreTrainedTokenizerBase

    is_plain = isinstance(rows, datasets.Dataset) and rows.column_names == ["messages"] and len(rows) > 0
    if not is_plain or any(settings.get(name) for name in _MORE):
        return rows
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or tokenizer.chat_template is None:
        return rows
    n_processes = settings.get("dataset_num_proc")
    return rows.map(_Tokens(tokenizer), batched=True, num_proc=n_processes, desc="Tokenizing conversations")
