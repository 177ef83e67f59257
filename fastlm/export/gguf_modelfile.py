"""An Ollama Modelfile: the file of weights, the chat template in Go's language, and the tokens that end an answer.

The Go template is made of the texts that the tokenizer's own template puts around messages. They are found by rendering
conversations of marked messages, and a template is written only if its texts give exactly the rendering of several others;
otherwise the Modelfile has none, and Ollama takes the one inside the GGUF file if it knows it.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from fastlm.export.gguf_vocab import text_tokenizer

logger = logging.getLogger(__name__)

# texts that no template strips, splits or changes
_SYSTEM, _USER, _ANSWER, _AGAIN = "qzsystemqz", "qzuserqz", "qzanswerqz", "qzagainqz"
Message = dict[str, str]


@dataclass(frozen=True)
class Texts:
    """What a template puts before and after each message.

    Attributes:
        default: where the conversation has no system message.
        system, user, answer: texts before and after a message, None for a role that the template does not take.
        prompt: before the answer that is to be generated.
    """

    default: str
    system: tuple[str, str] | None
    user: tuple[str, str]
    answer: tuple[str, str]
    prompt: str

    def written(self, messages: list[Message]) -> str:
        """What the Go template makes of a conversation that ends with a user's message."""
        parts = [] if messages[0]["role"] == "system" else [self.default]
        around = {"system": self.system, "user": self.user, "assistant": self.answer}
        for message in messages:
            before, after = around[message["role"]] or ("", "")
            parts += [before, message["content"], after]
        return "".join(parts) + self.prompt


def _messages(*pairs: tuple[str, str]) -> list[Message]:
    return [{"role": role, "content": content} for role, content in pairs]


@dataclass(frozen=True)
class _Template:
    """A tokenizer's chat template, without the begin token that Ollama puts there itself."""

    tokenizer: Any
    adds_bos: bool

    def written(self, messages: list[Message], is_prompt: bool) -> str:
        text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=is_prompt)
        return text.removeprefix(self.tokenizer.bos_token) if self.adds_bos else text


def _between(text: str, *marks: str) -> list[str]:
    """The texts before, between and after marks that stand there once, in this order.

    Raises:
        ValueError: if they do not.
    """
    found = []
    for mark in marks:
        if text.count(mark) != 1:
            raise ValueError(f"a message appears {text.count(mark)} times")
        before, _, text = text.partition(mark)
        found.append(before)
    return [*found, text]


def _cut_start(text: str, start: str) -> str:
    if not text.startswith(start):
        raise ValueError(f"{start!r} does not begin {text!r}")
    return text[len(start) :]


def _cut_end(text: str, end: str) -> str:
    if not text.endswith(end):
        raise ValueError(f"{end!r} does not end {text!r}")
    return text[: len(text) - len(end)]


def find_texts(tokenizer: Any, adds_bos: bool) -> Texts | None:
    """The texts of a tokenizer's chat template, or None if it does more than put texts around messages.

    Args:
        tokenizer: with a chat template.
        adds_bos: its begin token is put before every text by itself.
    """
    template = _Template(tokenizer, adds_bos)
    try:
        texts = _find(template)
        for messages in _probes(with_system=texts.system is not None):
            if texts.written(messages) != template.written(messages, True):
                return None
    # what templates raise for conversations that they do not take
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        logger.debug("the chat template has no form in Go: %s", error)
        return None
    return texts


def _find(template: _Template) -> Texts:
    open_end = template.written(_messages(("user", _USER)), False)
    prompt = _cut_start(template.written(_messages(("user", _USER)), True), open_end)
    whole = _messages(("user", _USER), ("assistant", _ANSWER), ("user", _AGAIN))
    first, middle, between, last = _between(template.written(whole, True), _USER, _ANSWER, _AGAIN)
    after_user = _cut_end(last, prompt)
    before_answer = _cut_start(middle, after_user)
    after_answer = _between(template.written(whole[:2], False), _USER, _ANSWER)[-1]
    before_user = _cut_start(between, after_answer)
    default = _cut_end(first, before_user)
    try:
        with_system = template.written(_messages(("system", _SYSTEM), ("user", _USER)), True)
        before_system, inner, _ = _between(with_system, _SYSTEM, _USER)
        system = (before_system, _cut_end(inner, before_user))
    except (TemplateError, ValueError):
        system = None
    return Texts(default, system, (before_user, after_user), (before_answer, after_answer), prompt)


def _probes(with_system: bool) -> list[list[Message]]:
    turns = [
        ("user", "How are you?"),
        ("assistant", "Well.\nAnd you?"),
        ("user", "{{ x }}"),
        ("assistant", "Ok"),
        ("user", "1"),
    ]
    found = [_messages(*turns[:1]), _messages(*turns[:3]), _messages(*turns)]
    return found + ([_messages(("system", "Be kind."), *turns[:n]) for n in (1, 3)] if with_system else [])


def _go(text: str) -> str:
    """A text in a Go template: one that holds its marks becomes a quoted string."""
    if "{{" in text or "}}" in text:
        return "{{ " + json.dumps(text, ensure_ascii=False) + " }}"
    return text


def go_template(texts: Texts) -> str:
    """The Go template of Ollama, over `.Messages`."""
    branches = [("user", texts.user), ("assistant", texts.answer)]
    if texts.system is not None:
        branches.insert(0, ("system", texts.system))
    body = ""
    for number, (role, (before, after)) in enumerate(branches):
        body += "{{ " + ("if" if number == 0 else "else if") + f' eq .Role "{role}" }}}}'
        body += f"{_go(before)}{{{{ .Content }}}}{_go(after)}"
    default = ""
    if texts.default:
        default = '{{ if ne (index .Messages 0).Role "system" }}' + _go(texts.default) + "{{ end }}"
    return f"{default}{{{{ range .Messages }}}}{body}{{{{ end }}}}{{{{ end }}}}{_go(texts.prompt)}"


def modelfile(file_name: str, tokenizer: Any, adds_bos: bool, end_ids: list[int]) -> str:
    """The text of a Modelfile.

    Args:
        file_name: of the GGUF file beside it.
        tokenizer: of transformers, or a processor that holds one.
        adds_bos: its begin token is put before every text by itself.
        end_ids: tokens that end an answer by the generation settings.
    """
    tokenizer = text_tokenizer(tokenizer)
    lines = [f"FROM ./{file_name}"]
    texts = find_texts(tokenizer, adds_bos) if tokenizer.chat_template else None
    made = None if texts is None else go_template(texts)
    if made is not None and '"""' not in made:
        lines.append(f'TEMPLATE """{made}"""')
    elif tokenizer.chat_template:
        logger.warning("the chat template is more than texts around messages: the Modelfile leaves it to the GGUF file")
        lines.append("# the chat template is the one inside the GGUF file")
    stops = [tokenizer.eos_token_id, *end_ids]
    for token in dict.fromkeys(tokenizer.convert_ids_to_tokens(index) for index in stops if index is not None):
        if token is not None:
            lines.append(f"PARAMETER stop {json.dumps(token, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"
