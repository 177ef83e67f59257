"""A tokenizer as GGUF holds it: tokens, merges or scores, kinds of tokens, special tokens and the chat template.

Everything is read from the tokenizer in memory, not from files of the model it came with. Two kinds have a form in GGUF:

- byte-level BPE ("gpt2"): tokens in byte-level letters, merges in order, and the name of the pre-tokenizer;
- SentencePiece's BPE ("llama"): pieces with ▁ for a space, single bytes as <0x41>, and a score for each piece. llama.cpp merges the
  neighbours whose union has the highest score, tokenizers those whose merge comes first: minus the place of the first merge that
  makes a piece is therefore its score, which gives the same order.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from fastlm.export.gguf_pre import pre_tokenizer_name

logger = logging.getLogger(__name__)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# what stands for a control token in vocabularies that do not say so
_LOOKS_SPECIAL = re.compile(r"<\|.*\|>|<｜.*｜>|<unused.*>|<pad>|<mask>|<2mass>|\[@BOS@\]", re.DOTALL)
# pieces that no merge makes come after all that some merge makes
_NEVER = -1e6
_ADDED = -1000.0


@dataclass(frozen=True)
class Vocabulary:
    """Values of the tokenizer.ggml.* fields; None for those that are left out.

    Attributes:
        model: "gpt2" or "llama".
        pre: name of the pre-tokenizer.
        tokens, kinds: one a row of the embedding.
        scores: of the pieces of a "llama".
        merges: of a "gpt2", "left right".
        special: name in GGUF -> id.
        adds: "bos" and "eos" -> whether the tokenizer puts that token around a text.
        adds_prefix: a text begins with a space.
        template: chat template, or named ones.
    """

    model: str
    pre: str
    tokens: list[str]
    kinds: list[int]
    scores: list[float] | None
    merges: list[str] | None
    special: dict[str, int]
    adds: dict[str, bool]
    adds_prefix: bool | None
    template: str | list[dict[str, str]] | None


def text_tokenizer(tokenizer: Any) -> Any:
    """The fast tokenizer itself, of a processor too.

    Raises:
        TypeError: if there is none.
    """
    inner = tokenizer.tokenizer if isinstance(tokenizer, ProcessorMixin) else tokenizer
    if not isinstance(inner, PreTrainedTokenizerBase) or not inner.is_fast:
        raise TypeError(
            f"a GGUF file holds the vocabulary: tokenizer must be a fast tokenizer of transformers, got {type(tokenizer).__name__}"
        )
    return inner


def safe_title(name: str, tokenizer: Any) -> str:
    """A name for general.name with which llama.cpp treats the special tokens as the tokenizer does.

    It lets the special tokens of a model that is called Phi-3 take the white space behind them, and cannot load one whose
    vocabulary is another. Only Phi-3's tokenizer says that of its tokens.
    """
    tokenizer = text_tokenizer(tokenizer)
    is_called = re.search(r"phi-?3", name, re.IGNORECASE) is not None
    strips = any(token.rstrip for token in tokenizer.added_tokens_decoder.values() if token.special)
    if strips and {"<unk>", "<s>", "</s>", "<|endoftext|>"} <= set(tokenizer.get_vocab()):
        return name if is_called else f"{name} (Phi-3)"
    return re.sub(r"(phi)-?3", r"\1", name, flags=re.IGNORECASE) if is_called else name


def read_vocabulary(tokenizer: Any, n_rows: int, end_ids: list[int]) -> Vocabulary:
    """Read a tokenizer for a model.

    Args:
        tokenizer: of transformers, or a processor that holds one.
        n_rows: rows of the model's embedding; rows without a token get an unused one.
        end_ids: tokens that end an answer by the generation settings.

    Raises:
        TypeError: if it is no fast tokenizer.
        ValueError: if it has more tokens of its own than the embedding rows, or is of a kind that GGUF has no form for.
    """
    tokenizer = text_tokenizer(tokenizer)
    backend = tokenizer.backend_tokenizer
    # a copy that neither pads nor cuts: the state of the live one stays as it is
    spec = json.loads(backend.to_str()) | {"padding": None, "truncation": None}
    plain = type(backend).from_str(json.dumps(spec))

    def encode(text: str) -> list[int]:
        return list(plain.encode(text).ids)

    vocabulary = {index: token for token, index in tokenizer.get_vocab().items()}
    beyond = {index: token for index, token in vocabulary.items() if index >= n_rows}
    if beyond and not set(beyond) <= set(tokenizer.added_tokens_decoder):
        raise ValueError(
            f"the tokenizer has tokens up to {max(vocabulary)} ({vocabulary[max(vocabulary)]!r}), but the model's embedding has "
            f"{n_rows} rows: call resize_token_embeddings, or pass the tokenizer that the model was trained with"
        )
    if beyond:
        # Gemma 3's text models come with the token of an image, for which they have no row
        logger.warning("tokens without a row in the embedding are left out: %s", ", ".join(map(repr, beyond.values())))
    model, kind = spec["model"], spec["model"]["type"]
    is_byte_level = '"ByteLevel"' in json.dumps(spec["pre_tokenizer"])
    if kind != "BPE" or not (is_byte_level or model.get("byte_fallback")):
        raise ValueError(
            f"a tokenizer of kind {kind} has no form in GGUF: byte-level BPE has, and SentencePiece BPE with byte fallback"
        )
    merges = [tuple(pair.split(" ", 1)) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    tokens, kinds = _tokens(vocabulary, tokenizer, n_rows, model.get("unk_token"), is_byte_level)
    # the names are GGUF's, one letter short in one case
    named = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "unknown": tokenizer.unk_token_id,
        "seperator": tokenizer.sep_token_id,
        "padding": tokenizer.pad_token_id,
    }
    special = {name: index for name, index in named.items() if index is not None and index < n_rows}
    others = [index for index in end_ids if index != special.get("eos") and index in vocabulary and index < n_rows]
    if others:
        special["eot"] = others[0]
    around = encode("a")
    adds = {"bos": around[0] == special.get("bos"), "eos": around[-1] == special.get("eos")}
    shared: dict[str, Any] = dict(tokens=tokens, kinds=kinds, special=special, adds=adds, template=_template(tokenizer))
    if is_byte_level:
        _tell_of_normalizer(spec["normalizer"])
        # a space inside a merge is a byte-level letter there
        texts = [" ".join(part.replace(" ", "Ġ") for part in pair) for pair in merges]
        pre = pre_tokenizer_name(spec, encode)
        return Vocabulary(model="gpt2", pre=pre, scores=None, merges=texts, adds_prefix=None, **shared)
    return Vocabulary(
        model="llama",
        pre="default",
        scores=_scores(tokens, kinds, merges),
        merges=None,
        adds_prefix=_adds_prefix(spec),
        **shared,
    )


def _tokens(
    vocabulary: Mapping[int, str], tokenizer: Any, n_rows: int, unknown: str | None, is_byte_level: bool
) -> tuple[list[str], list[int]]:
    added = tokenizer.added_tokens_decoder
    tokens, kinds = [], []
    for index in range(n_rows):
        token = vocabulary.get(index)
        if token is None:
            token, kind = f"[PAD{index}]", UNUSED
        elif token == unknown and not is_byte_level:
            kind = UNKNOWN
        elif index in added:
            is_control = added[index].special or _LOOKS_SPECIAL.fullmatch(token) is not None
            kind = CONTROL if is_control else USER_DEFINED
            token = token if is_control else token.replace("▁", " ")
        elif not is_byte_level and _BYTE_PIECE.fullmatch(token):
            kind = BYTE
        else:
            kind = NORMAL
        tokens.append(token)
        kinds.append(kind)
    return tokens, kinds


def _scores(tokens: list[str], kinds: list[int], merges: list[tuple[str, ...]]) -> list[float]:
    first: dict[str, float] = {}
    for place, pair in enumerate(merges):
        first.setdefault("".join(pair), -float(place))
    fixed = {UNUSED: _ADDED, CONTROL: _ADDED, USER_DEFINED: _ADDED, UNKNOWN: 0.0, BYTE: 0.0}
    return [
        fixed[kind] if kind != NORMAL else first.get(token, _NEVER) for token, kind in zip(tokens, kinds, strict=True)
    ]


def _adds_prefix(spec: Mapping[str, Any]) -> bool:
    """Whether a space is put before a text: by a normalizer, or by a Metaspace pre-tokenizer."""

    def steps(step: Any) -> list[Any]:
        if step is None:
            return []
        inner = step.get("normalizers") or step.get("pretokenizers")
        return [step] if inner is None else [leaf for part in inner for leaf in steps(part)]

    return any(
        step["type"] == "Prepend" or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for part in ("normalizer", "pre_tokenizer")
        for step in steps(spec[part])
    )


def _tell_of_normalizer(normalizer: Any) -> None:
    # composed letters are what nearly all text holds anyway, and the published files leave this step out too
    kinds = set(re.findall(r'"type": "(\w+)"', json.dumps(normalizer))) - {"Sequence", "NFC"}
    if kinds:
        logger.warning("the tokenizer's normalizer (%s) has no form in GGUF and is left out", ", ".join(sorted(kinds)))


def _template(tokenizer: Any) -> str | list[dict[str, str]] | None:
    template = tokenizer.chat_template
    if isinstance(template, dict):
        return [{"name": name, "template": text} for name, text in template.items()]
    return template


def write_vocabulary(writer: Any, vocabulary: Vocabulary) -> None:
    """Put the fields into a gguf.GGUFWriter."""
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.kinds)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    for name, index in vocabulary.special.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", index)
    for name, adds in vocabulary.adds.items():
        writer.add_bool(f"tokenizer.ggml.add_{name}_token", adds)
    if vocabulary.adds_prefix is not None:
        writer.add_add_space_prefix(vocabulary.adds_prefix)
    if vocabulary.template:
        writer.add_chat_template(vocabulary.template)
