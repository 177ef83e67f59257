"""A loaded tokenizer made safe to train with, on its instance only: its files stay as they were."""

from __future__ import annotations

import logging
import types
from typing import Any

logger = logging.getLogger(__name__)

# Tokens that models ship for padding, or that never occur in text, in the order of preference.
_PADDING = (
    "<|finetune_right_pad_id|>", "<|pad|>", "<pad>", "[PAD]", "<|padding|>", "<|PAD_TOKEN|>", "<|vision_pad|>",
    "<|endoftext|>", "<|dummy_0|>", "<|reserved_special_token_0|>", "<unk>", "[UNK]",
)  # fmt: skip


def choose_padding(tokenizer: Any, n_embeddings: int) -> None:
    """Give the tokenizer a padding token that is not its end token.

    With one token for both, a collator that ignores padding also ignores every end token, and the model never learns to stop.
    Only a token that the vocabulary has already is chosen; nothing is added.

    Args:
        tokenizer: changed in memory.
        n_embeddings: rows of the model's embedding: ids beyond it are no choice.
    """
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    if pad is not None and pad != eos and pad < n_embeddings:
        return
    vocabulary = tokenizer.get_vocab()
    unused = [tokenizer.unk_token] if tokenizer.unk_token is not None else []
    for token in (*_PADDING, *unused):
        index = vocabulary.get(token)
        if index is not None and index != eos and index < n_embeddings and token != tokenizer.bos_token:
            tokenizer.pad_token = token
            logger.info("padding token: %r (it was %s), so that the end token is trained", token, _name(tokenizer, pad))
            return
    logger.warning(
        "the padding token is %s and the vocabulary has no better one: a collator that ignores padding will ignore end tokens too",
        _name(tokenizer, pad),
    )


def _name(tokenizer: Any, index: int | None) -> str:
    return "not set" if index is None else repr(tokenizer.convert_ids_to_tokens(index))


def _encode_plus(self: Any, text: Any, *args: Any, **kwargs: Any) -> Any:
    """The tokenizer's own encoding of a text without the begin token that it would put there a second time.

    Bears the name of the method it stands in for, so that a pickled tokenizer comes back with its class's.
    """
    bos = self.bos_token
    adds_special = kwargs.get("add_special_tokens", True)

    def without(item: Any) -> Any:
        return item[len(bos) :] if isinstance(item, str) and item.startswith(bos) else item

    if adds_special and bos and not kwargs.get("is_split_into_words") and not kwargs.get("return_offsets_mapping"):
        text = [without(item) for item in text] if isinstance(text, (list, tuple)) else without(text)
    return type(self)._encode_plus(self, text, *args, **kwargs)


def one_begin_token(tokenizer: Any) -> None:
    """Keep rendered chats from getting two begin tokens: one from the template, one from the tokenizer.

    A text that starts with the begin token is encoded as the tokenizer encodes the rest of it. Encodings with offsets are left
    alone, since their offsets speak of the text as given. Nothing changes for tokenizers that add no begin token.
    """
    if tokenizer.bos_token_id is None or not tokenizer.is_fast:
        return
    # asked of the library itself: a call would set its padding and truncation, which are part of what is saved
    ids = [i for i in tokenizer.backend_tokenizer.encode("a").ids if i != tokenizer.pad_token_id]
    if ids[:1] == [tokenizer.bos_token_id]:
        tokenizer._encode_plus = types.MethodType(_encode_plus, tokenizer)
