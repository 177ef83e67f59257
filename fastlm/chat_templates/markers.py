"""The texts that open a user turn and an assistant turn, found out from a chat template."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fastlm.chat_templates.spans import common_prefix, units_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# question, answer, question, answer: words that no template holds and no template changes
WORDS = ("Qfirstquestion", "Afirstanswer", "Qsecondquestion", "Asecondanswer")

ADVICE = "pass instruction_part and response_part, the texts that stand before a user's words and before an answer"


def _common_prefix(a: list[str], b: list[str]) -> list[str]:
    return a[: common_prefix(a, b)]


def _common_suffix(a: list[str], b: list[str]) -> list[str]:
    return _common_prefix(a[::-1], b[::-1])[::-1]


def _rest(a: list[str], b: list[str]) -> list[str]:
    """a without what it begins with in common with b."""
    return a[len(_common_prefix(a, b)) :]


def derive_markers(tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None) -> tuple[str, str]:
    """instruction_part and response_part for a chat template, by default the tokenizer's own.

    Two turns are rendered with known words. What stands between a question and its answer, less the end of the user's
    turn, opens an answer; what stands between an answer and the next question, less the end of the assistant's turn,
    opens a question.

    Raises:
        ValueError: if there is no template, or it does not render such a conversation with each word once and in order.
    """
    import jinja2

    def render(*words: str, **options: bool) -> str:
        roles = ("user", "assistant", "user", "assistant")
        messages = [{"role": role, "content": word} for role, word in zip(roles, words, strict=False)]
        return str(tokenizer.apply_chat_template(messages, chat_template=chat_template, tokenize=False, **options))

    if chat_template is None and tokenizer.chat_template is None:
        raise ValueError(f"the tokenizer has no chat template to find the markers in: {ADVICE}")
    try:
        chat, one_turn, question = render(*WORDS), render(*WORDS[:2]), render(WORDS[0])
        prompt = render(WORDS[0], add_generation_prompt=True)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise ValueError(
            f"the chat template does not render two turns of user and assistant ({error}): {ADVICE}"
        ) from error
    found = re.fullmatch("(.*)" + "(.*)".join(WORDS) + "(.*)", chat, flags=re.DOTALL)
    once = [(chat, word) for word in WORDS] + [(one_turn, WORDS[1]), (question, WORDS[0]), (prompt, WORDS[0])]
    if found is None or any(text.count(word) != 1 for text, word in once):
        raise ValueError(f"the chat template does not write the words of two turns once and in order: {ADVICE}")

    units = units_of(tokenizer)
    before_user, to_answer, to_user, to_second_answer, _ = map(units, found.groups())
    after_question, after_prompt = units(question.split(WORDS[0])[1]), units(prompt.split(WORDS[0])[1])
    after_answer = units(one_turn.split(WORDS[1])[1])

    # what only some answers begin with, or what a prompt leaves to the model (an empty reasoning block), is part
    # of the answer
    opening = _common_prefix(to_answer, to_second_answer)
    response = _rest(opening, after_question)
    if not "".join(response).strip():
        # the end of the user's turn is all there is, as with [/INST]
        response, prompted = opening, after_prompt
    else:
        prompted = _rest(after_prompt, after_question)
    if "".join(_common_prefix(response, prompted)).strip():
        response = _common_prefix(response, prompted)
    instructions = [
        "".join(_rest(to_user, after_answer)),
        "".join(_common_suffix(to_user, before_user)),
    ]
    instructions = [text for text in instructions if text.strip()]
    if not "".join(response).strip() or not instructions:
        raise ValueError(f"the chat template writes nothing that tells user and assistant turns apart: {ADVICE}")
    return min(instructions, key=len).lstrip(), "".join(response).lstrip()
