"""Chat templates with `{% generation %}` marks, and a tokenizer that carries one.

The templates are TRL's own for training where it ships one, and the renderings those of the models' own templates.
The mark of an assistant turn encloses its content and its end-of-turn token. What a template cannot write (unknown
roles, images; tools, unless the row of the table says so) raises instead of being left out.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastlm.chat_templates import _own, _trl

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

MAPPING = {"role": "role", "content": "content", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True)
class ChatTemplate:
    """One row of the table.

    Attributes:
        body: Jinja over `messages` with string contents, or the name of TRL's template.
        stop: the end-of-turn token, or None where that is the tokenizer's own end-of-sequence token.
        system: the system text of a conversation that brings none, or None for no system turn.
        begins: write the begin token for a tokenizer that puts one before plain text. For formats that belong to no
            model; the others write it, or not, in their body.
        is_trl: `body` names a training template of TRL.
        has_tools: it writes tools, tool calls and their results.
        eos: the end-of-sequence token that the body means where it writes one, whatever `stop` becomes in the copy.
    """

    body: str
    stop: str | None
    system: str | None = None
    begins: bool = False
    is_trl: bool = False
    has_tools: bool = False
    eos: str | None = None

    def jinja(self) -> str:
        body = _trl.training_template(self.body) if self.is_trl else self.body
        return body if self.eos is None else f"{{%- set eos_token = {_literal(self.eos)} %}}{body}"


def _literal(value: object) -> str:
    # JSON's strings and objects are Jinja's too
    return json.dumps(value, ensure_ascii=False)


TEMPLATES = {
    "chatml": ChatTemplate(_own.CHATML, "<|im_end|>", begins=True),
    "llama-3": ChatTemplate("llama3", "<|eot_id|>", is_trl=True),
    "llama-3.1": ChatTemplate(_own.BEGIN + _own.TAKE_SYSTEM + _own.LLAMA31_SYSTEM + _own.LLAMA3, "<|eot_id|>"),
    "mistral": ChatTemplate(_own.BEGIN + _own.TAKE_SYSTEM + _own.MISTRAL, None),
    "mistral-v7": ChatTemplate(_own.BEGIN + _own.MISTRAL_V7, None),
    "qwen-2.5": ChatTemplate("qwen2_5", "<|im_end|>", is_trl=True, has_tools=True),
    "qwen-3": ChatTemplate("qwen3", "<|im_end|>", is_trl=True, has_tools=True),
    "qwen-3-instruct": ChatTemplate("qwen3_instruct_2507", "<|im_end|>", is_trl=True, has_tools=True),
    "qwen-3.5": ChatTemplate("qwen3_5_think", "<|im_end|>", is_trl=True, has_tools=True),
    "gemma": ChatTemplate("gemma", "<end_of_turn>", is_trl=True),
    "gemma-3": ChatTemplate("gemma3", "<end_of_turn>", is_trl=True),
    "phi-3": ChatTemplate("phi3", "<|end|>", is_trl=True, eos="<|endoftext|>"),
    "phi-3.5": ChatTemplate("phi3_5", "<|end|>", is_trl=True, eos="<|endoftext|>"),
    "phi-4": ChatTemplate(_own.PHI4, "<|im_end|>"),
    "zephyr": ChatTemplate(_own.ZEPHYR, None),
    "vicuna": ChatTemplate(
        _own.BEGIN + _own.TAKE_SYSTEM + _own.VICUNA,
        None,
        system="A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions.",
    ),
    "alpaca": ChatTemplate(
        _own.TAKE_SYSTEM + _own.ALPACA,
        None,
        system="Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request.",
        begins=True,
    ),
    "granite": ChatTemplate(_own.GRANITE, "<|end_of_text|>"),
    "smollm2": ChatTemplate(
        _own.CHATML, "<|im_end|>", system="You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    ),
    "gpt-oss": ChatTemplate("gptoss", "<|return|>", is_trl=True, has_tools=True),
    "deepseek-r1": ChatTemplate("deepseek_r1_distill", "<｜end▁of▁sentence｜>", is_trl=True),
    "deepseek-v3": ChatTemplate("deepseekv3", "<｜end▁of▁sentence｜>", is_trl=True, has_tools=True),
    "lfm-2": ChatTemplate("lfm2_v2", "<|im_end|>", is_trl=True, has_tools=True),
    "glm-4.5": ChatTemplate("glm4moe", "<|user|>", is_trl=True, has_tools=True),
    "aya": ChatTemplate("cohere", "<|END_OF_TURN_TOKEN|>", is_trl=True),
}

# llama-3.2's own template differs from llama-3.1's in its default date only, gemma-2's not at all
_ALIASES = {
    "llama-3.2": "llama-3.1",
    "llama-3.3": "llama-3.1",
    "gemma-2": "gemma",
    "smollm": "smollm2",
    "harmony": "gpt-oss",
    "qwen-3-thinking": "qwen-3",
}

# data sets fill the keys that other rows have with None, and templates ask whether a key is there; a message of tool
# calls alone has an empty content, with or without the key
_NO_NONES = r"""
{%- set filled = namespace(messages=[]) %}
{%- for message in messages %}
    {%- set content = {'content': ''} if message['tool_calls'] and message.get('content') is none else {} %}
    {%- set keys = message.items() | rejectattr(1, 'none') | list %}
    {%- set filled.messages = filled.messages + [dict(keys, **content)] %}
{%- endfor %}
{%- set messages = filled.messages %}"""

_ONLY_TEXT = r"""
{%- if tools %}
    {{- raise_exception('this template writes no tools: keep the template of the model for tool calls') }}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('role must be system, user or assistant, got ' ~ message['role']) }}
    {%- elif message['content'] is not string or message['tool_calls'] %}
        {{- raise_exception('content must be text and without tool calls, got ' ~ message) }}
    {%- endif %}
{%- endfor %}"""

_TEXT_AND_TOOLS = r"""
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'developer', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('role must be system, developer, user, assistant or tool, got ' ~ message['role']) }}
    {%- elif message['content'] is not string and not message['tool_calls'] %}
        {{- raise_exception('content must be text, got ' ~ message) }}
    {%- endif %}
{%- endfor %}"""

# names that a conversation uses instead of role and content; standard names are taken too, since TRL converts to them
# by itself
_RENAME = r"""
{%- set renamed = namespace(messages=[]) %}
{%- for message in messages %}
    {%- set role = message['role'] if message.get(ROLE) is none else message[ROLE] %}
    {%- set content = message['content'] if message.get(CONTENT) is none else message[CONTENT] %}
    {%- set renamed.messages = renamed.messages + [dict(message, role=NAMES.get(role, role), content=content)] %}
{%- endfor %}
{%- set messages = renamed.messages %}"""

_DEFAULT_SYSTEM = r"""
{%- if messages[0]['role'] != 'system' %}
    {%- set messages = [{'role': 'system', 'content': SYSTEM}] + messages %}
{%- endif %}"""


def _normal(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _find(chat_template: object) -> ChatTemplate:
    if isinstance(chat_template, (tuple, list)):
        if (
            len(chat_template) != 2
            or not isinstance(chat_template[0], str)
            or not isinstance(chat_template[1], (str, type(None)))
        ):
            raise ValueError(
                f"an own chat template is a pair (Jinja text, end-of-turn token or None), got {chat_template!r}"
            )
        return ChatTemplate(chat_template[0], chat_template[1])
    if not isinstance(chat_template, str):
        raise TypeError(
            "chat_template must be a name or a pair (Jinja text, end-of-turn token), "
            f"got {type(chat_template).__name__}"
        )
    names = {_normal(name): row for name, row in TEMPLATES.items()}
    names |= {_normal(alias): TEMPLATES[name] for alias, name in _ALIASES.items()}
    if _normal(chat_template) not in names:
        raise ValueError(
            f"unknown chat template {chat_template!r}: use one of {', '.join(sorted([*TEMPLATES, *_ALIASES]))}, "
            "or a pair (Jinja text, end-of-turn token) of your own"
        )
    return names[_normal(chat_template)]


def _rename(mapping: Mapping[str, str]) -> str:
    """Jinja that gives `messages` their standard names; empty where they have them."""
    unknown = sorted(set(mapping) - set(MAPPING))
    if unknown or not all(isinstance(name, str) for name in mapping.values()):
        raise ValueError(f"mapping takes the keys {list(MAPPING)} with a name for each, got {dict(mapping)}")
    named = {**MAPPING, **mapping}
    if named == MAPPING:
        return ""
    if named["role"] == named["content"] or named["user"] == named["assistant"]:
        raise ValueError(f"two keys of mapping have one name: {dict(mapping)}")
    roles = {named["user"]: "user", named["assistant"]: "assistant"}
    return _own.fill(_RENAME, ROLE=_literal(named["role"]), CONTENT=_literal(named["content"]), NAMES=_literal(roles))


def _encodes_as_one(tokenizer: PreTrainedTokenizerBase, token: str) -> bool:
    token_id = tokenizer.convert_tokens_to_ids(token)
    known = token_id is not None and (token_id != tokenizer.unk_token_id or token == tokenizer.unk_token)
    return known and tokenizer(token, add_special_tokens=False)["input_ids"] == [token_id]


def _begins_plain_text(tokenizer: PreTrainedTokenizerBase) -> bool:
    return tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]


def get_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | tuple[str, str | None] = "chatml",
    mapping: Mapping[str, str] = MAPPING,
    map_eos_token: bool = True,
    system_message: str | None = None,
) -> PreTrainedTokenizerBase:
    """A copy of the tokenizer that carries a chat template.

    The tokenizer given, its files and every token id stay as they are: no token is ever added. chatml and alpaca, which
    belong to no model, begin with the begin token if the tokenizer puts one before plain text.

    Args:
        tokenizer: of transformers. For a processor, its `tokenizer`.
        chat_template: a name (`TEMPLATES`, and aliases such as "llama-3.2"; case, "-" and "_" do not matter), or a pair
            of Jinja text and its end-of-turn token (None for the tokenizer's own end-of-sequence token).
        mapping: the names in your conversations of the keys role and content and of the roles user and assistant, for
            example {"role": "from", "content": "value", "user": "human", "assistant": "gpt"}. Keys left out keep
            their standard name, and messages with standard names are rendered too.
        map_eos_token: make the end-of-turn token of the template the end-of-sequence token of the copy, so that
            generation stops at it. Only if the vocabulary has it as one token; if not, the end-of-sequence token
            stays, and a warning is logged.
        system_message: the system text of conversations that bring none; replaces the template's own, if it has one.

    Returns:
        The copy. Its template has `{% generation %}` marks (an own template: as given), as
        `SFTConfig(assistant_only_loss=True)` needs.

    Raises:
        ValueError: for an unknown name, unknown keys of `mapping`, or names in it that are not distinct.
        TypeError: if `tokenizer` is not a tokenizer, or `chat_template` is neither a name nor a pair.
    """
    from transformers import PreTrainedTokenizerBase

    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(
            f"tokenizer must be a transformers tokenizer, got {type(tokenizer).__name__} "
            "(of a processor, pass its .tokenizer)"
        )
    template = _find(chat_template)
    text = _rename(mapping)
    system = template.system if system_message is None else system_message
    if system is not None:
        text += _own.fill(_DEFAULT_SYSTEM, SYSTEM=_literal(system))
    if isinstance(chat_template, str):
        text = _NO_NONES + text + (_TEXT_AND_TOOLS if template.has_tools else _ONLY_TEXT)
    if template.begins and _begins_plain_text(tokenizer):
        text += _own.BEGIN
    result = copy.deepcopy(tokenizer)
    result.chat_template = text + template.jinja()
    if map_eos_token and template.stop not in (None, tokenizer.eos_token):
        if _encodes_as_one(tokenizer, template.stop):
            result.eos_token = template.stop
        else:
            logger.warning(
                "The vocabulary has no token %r, so the end-of-sequence token stays %r: generation will not stop at "
                "the end of a turn by itself. Use a template of this model's own, or add the token with fastlm.add_new_tokens.",
                template.stop,
                tokenizer.eos_token,
            )
    return result
