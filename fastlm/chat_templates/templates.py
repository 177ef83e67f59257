"""Chat templates with `{% generation %}` marks, and a tokenizer that carries one.

A template here writes text only: roles system, user and assistant, no tools, no images; anything else raises instead
    of being left out.
The mark of an assistant turn encloses its content and its end-of-turn token, and nothing after it, so
`assistant_only_loss=True` trains exactly what the model has to write. The renderings are those of the models' own
templates.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

MAPPING = {"role": "role", "content": "content", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True)
class ChatTemplate:
    """One row of the table.

    Attributes:
        body: Jinja over `messages` with string contents.
        stop: the end-of-turn token, or None where that is the tokenizer's own end-of-sequence token.
        system: the system text of a conversation that brings none, or None for no system turn.
        begins: write the begin token for a tokenizer that puts one before plain text. For formats that belong to no
            model; the others write it, or not, in their body.
    """

    body: str
    stop: str | None
    system: str | None = None
    begins: bool = False


def _fill(text: str, **values: str) -> str:
    """Replaces names in capitals by Jinja expressions, in one pass: what was filled in is left alone."""
    return re.sub(r"\b[A-Z]+\b", lambda match: values.get(match[0], match[0]), text)


def _literal(value: object) -> str:
    # JSON's strings and objects are Jinja's too
    return json.dumps(value, ensure_ascii=False)


def _headed(before: str, after: str, stop: str, tail: str, content: str = "message['content']") -> str:
    """Turns of the form before + role + after + content + stop + tail; each argument is a Jinja expression."""
    body = r"""
{%- for message in messages %}
    {{- BEFORE + message['role'] + AFTER }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- CONTENT + STOP }}
        {%- endgeneration %}
    {%- else %}
        {{- CONTENT + STOP }}
    {%- endif %}
    {{- TAIL }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- BEFORE + 'assistant' + AFTER }}
{%- endif %}"""
    return _fill(body, BEFORE=before, AFTER=after, CONTENT=content, STOP=stop, TAIL=tail)


_BEGIN = "{{- bos_token }}"

# takes the system turn out of messages, for formats that write it elsewhere
_TAKE_SYSTEM = r"""
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}"""

_ALTERNATE = r"""
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) or message['role'] == 'system' %}
        {{- raise_exception('this template wants an optional system message, then user and assistant in turn') }}
    {%- endif %}"""

_CHATML = _headed("'<|im_start|>'", r"'\n'", "'<|im_end|>'", r"'\n'")

_LLAMA3 = _headed(
    "'<|start_header_id|>'", r"'<|end_header_id|>\n\n'", "'<|eot_id|>'", "''", content="message['content'] | trim"
)

# the date is a constant (the template's own default), so that rows do not change from day to day
_LLAMA31_SYSTEM = r"""
{{- '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: ' }}
{{- (date_string if date_string is defined else '26 Jul 2024') + '\n\n' + system | trim + '<|eot_id|>' }}"""

# the reasoning block is always there, as in TRL's training template, so that earlier turns render alike whatever
# follows them
_QWEN3 = r"""
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' }}
    {%- set content = message['content'] %}
    {%- if message['role'] == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if message['reasoning_content'] is string %}
            {%- set reasoning = message['reasoning_content'] %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- generation %}
            {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') + '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- content + '<|im_end|>' }}
    {%- endif %}
    {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""

_GEMMA = (
    r"""
{%- for message in messages %}"""
    + _ALTERNATE
    + r"""
    {%- if message['role'] == 'assistant' %}
        {{- '<start_of_turn>model\n' }}
        {%- generation %}
            {{- message['content'] | trim + '<end_of_turn>' }}
        {%- endgeneration %}
    {%- else %}
        {{- '<start_of_turn>user\n' + (system + '\n\n' if loop.first and system else '') }}
        {{- message['content'] | trim + '<end_of_turn>' }}
    {%- endif %}
    {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\n' }}
{%- endif %}"""
)

_NO_SYSTEM = r"""
{%- if messages[0]['role'] == 'system' %}
    {{- raise_exception('this template has no system message; gemma-3 puts it before the first user message') }}
{%- endif %}
{%- set system = '' %}"""

# as mistral-common does for this version, the system text goes with the last user message
_MISTRAL = (
    r"""
{%- set last_user = (messages | length - 1) // 2 * 2 %}
{%- for message in messages %}"""
    + _ALTERNATE
    + r"""
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- ' ' + message['content'] | trim + eos_token }}
        {%- endgeneration %}
    {%- else %}
        {{- '[INST] ' + (system + '\n\n' if loop.index0 == last_user and system else '') }}
        {{- message['content'] + '[/INST]' }}
    {%- endif %}
{%- endfor %}"""
)

_VICUNA = (
    r"""
{{- system + ' ' }}
{%- for message in messages %}"""
    + _ALTERNATE
    + r"""
    {%- if message['role'] == 'assistant' %}
        {{- 'ASSISTANT:' }}
        {%- generation %}
            {{- ' ' + message['content'] + eos_token }}
        {%- endgeneration %}
    {%- else %}
        {{- 'USER: ' + message['content'] + ' ' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'ASSISTANT:' }}
{%- endif %}"""
)

_ALPACA = (
    r"""
{{- system + '\n\n' }}
{%- for message in messages %}"""
    + _ALTERNATE
    + r"""
    {%- if message['role'] == 'assistant' %}
        {{- '### Response:\n' }}
        {%- generation %}
            {{- message['content'] + eos_token }}
        {%- endgeneration %}
        {{- '' if loop.last else '\n\n' }}
    {%- else %}
        {{- '### Instruction:\n' + message['content'] + '\n\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '### Response:\n' }}
{%- endif %}"""
)

# Phi-3 closes a whole conversation with <|endoftext|>; written out, because eos_token may have become <|end|>
_PHI3_END = r"""
{%- if not add_generation_prompt %}
    {{- '<|endoftext|>' }}
{%- endif %}"""

TEMPLATES = {
    "chatml": ChatTemplate(_CHATML, "<|im_end|>", begins=True),
    "llama-3": ChatTemplate(_BEGIN + _LLAMA3, "<|eot_id|>"),
    "llama-3.1": ChatTemplate(_BEGIN + _TAKE_SYSTEM + _LLAMA31_SYSTEM + _LLAMA3, "<|eot_id|>"),
    "mistral": ChatTemplate(_BEGIN + _TAKE_SYSTEM + _MISTRAL, None),
    "qwen-2.5": ChatTemplate(
        _CHATML, "<|im_end|>", system="You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    ),
    "qwen-3": ChatTemplate(_QWEN3, "<|im_end|>"),
    "qwen-3-instruct": ChatTemplate(_CHATML, "<|im_end|>"),
    "gemma": ChatTemplate(_BEGIN + _NO_SYSTEM + _GEMMA, "<end_of_turn>"),
    "gemma-3": ChatTemplate(_BEGIN + _TAKE_SYSTEM + _GEMMA, "<end_of_turn>"),
    "phi-3": ChatTemplate(_headed("'<|'", r"'|>\n'", "'<|end|>'", r"'\n'") + _PHI3_END, "<|end|>"),
    "phi-4": ChatTemplate(_headed("'<|im_start|>'", "'<|im_sep|>'", "'<|im_end|>'", "''"), "<|im_end|>"),
    "zephyr": ChatTemplate(_headed("'<|'", r"'|>\n'", "eos_token", r"'\n'"), None),
    "vicuna": ChatTemplate(
        _BEGIN + _TAKE_SYSTEM + _VICUNA,
        None,
        system="A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions.",
    ),
    "alpaca": ChatTemplate(
        _TAKE_SYSTEM + _ALPACA,
        None,
        system="Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request.",
        begins=True,
    ),
    "smollm2": ChatTemplate(
        _CHATML, "<|im_end|>", system="You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    ),
}

# llama-3.2's own template differs from llama-3.1's in its default date only, gemma-2's not at all, phi-3.5's for
# empty system texts
_ALIASES = {"llama-3.2": "llama-3.1", "gemma-2": "gemma", "phi-3.5": "phi-3"}

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
    return _fill(_RENAME, ROLE=_literal(named["role"]), CONTENT=_literal(named["content"]), NAMES=_literal(roles))


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
        text += _fill(_DEFAULT_SYSTEM, SYSTEM=_literal(system))
    if isinstance(chat_template, str):
        text += _ONLY_TEXT
    if template.begins and _begins_plain_text(tokenizer):
        text += _BEGIN
    result = copy.deepcopy(tokenizer)
    result.chat_template = text + template.body
    if map_eos_token and template.stop not in (None, tokenizer.eos_token):
        if _encodes_as_one(tokenizer, template.stop):
            result.eos_token = template.stop
        else:
            logger.warning(
                "The vocabulary has no token %r, so the end-of-sequence token stays %r: generation will not stop at "
                "the end of a turn by itself. Use a template of this model's own, or add the token and resize the embeddings.",
                template.stop,
                tokenizer.eos_token,
            )
    return result
