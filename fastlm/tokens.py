"""New tokens, added where everybody sees it: to the tokenizer, to the embedding and the head, and to what an adapter trains."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AddedToken, PreTrainedTokenizerBase

from fastlm import adapters, binding

logger = logging.getLogger(__name__)


def add_new_tokens(model: nn.Module, tokenizer: Any, new_tokens: Sequence[str], special: bool = False) -> list[int]:
    """Add tokens to a tokenizer and a model, in place, each beginning as the mean of all tokens.

    The rows of the new tokens, in the embedding and the head, become the mean of the rows of the vocabulary's tokens: what a model
    writes for other tokens then hardly changes (Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models").
    Rows that the embedding has beyond its vocabulary are used first; where they do not suffice, it grows to a multiple of 64 rows.

    A following `FastLanguageModel.get_peft_model` trains these rows with the adapter, alone and in float32, by PEFT's
    `trainable_token_indices`: a head that is tied to the embedding stays tied to it, one that is not has rows of its own. They are
    saved in the adapter; save the tokenizer with it. In full fine-tuning they are trained with all others.

    Args:
        model: loaded or patched by fastlm, without an adapter, in any mode.
        tokenizer: the model's.
        new_tokens: texts. One that is a token already is left as it is.
        special: leave the tokens out where text is decoded with `skip_special_tokens=True`.

    Returns:
        The ids of `new_tokens`, in their order.

    Raises:
        ValueError: for a model with an adapter, an empty or repeated text, or a model that fastlm did not patch.
        TypeError: if a token is no text, or tokenizer is none.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(f"tokenizer must be a transformers tokenizer, got {type(tokenizer).__name__}")
    if isinstance(new_tokens, str) or not all(isinstance(token, str) for token in new_tokens):
        raise TypeError(f"new_tokens must be a list of texts, got {new_tokens!r}")
    tokens = list(new_tokens)
    if not tokens or not all(token.strip() for token in tokens) or len(set(tokens)) != len(tokens):
        raise ValueError(f"new_tokens must be texts that differ, none of them empty, got {tokens!r}")
    if adapters.has_adapter(model):
        raise ValueError(
            "the model has an adapter already, which would not train the new tokens: add them before get_peft_model"
        )
    state = binding.state_of(model)
    if state is None:
        raise ValueError("the model is not fastlm's: load it with from_pretrained, or call fastlm.patch_model first")
    base: Any = adapters.base_model(model)
    known = set(tokenizer.get_vocab())
    added = [token for token in tokens if token not in known]
    n_known = len(tokenizer)
    if added:
        made = [AddedToken(token, normalized=False, special=special) for token in added]
        tokenizer.add_tokens(made, special_tokens=special)
    ids: list[int] = tokenizer.convert_tokens_to_ids(tokens)
    new = [index for token, index in zip(tokens, ids, strict=True) if token not in known]
    if len(added) < len(tokens):
        logger.info("tokens already: %s", ", ".join(repr(token) for token in tokens if token in known))
    if not new:
        return ids
    n_rows = base.get_input_embeddings().weight.shape[0]
    adapters.grow_embeddings(base, max(new) + 1)
    if state.stock_config is not None:
        # what a revert brings back must know of the rows
        state.stock_config.get_text_config().vocab_size = base.config.get_text_config().vocab_size
    _begin_as_mean(base, new, min(n_known, n_rows))
    state.new_tokens = (*state.new_tokens, *new)
    now = base.get_input_embeddings().weight.shape[0]
    logger.info(
        "%d tokens were added, ids %d to %d; %s", len(new), min(new), max(new),
        f"the embedding grew from {n_rows:,} to {now:,} rows" if now > n_rows else f"its {n_rows:,} rows suffice",
    )  # fmt: skip
    return ids


@torch.no_grad()
def _begin_as_mean(base: Any, new: list[int], n_known: int) -> None:
    """Set the rows of new tokens to the mean of the first n_known ones, in the embedding, the head and its bias."""
    tables = {id(each.weight): each for each in (base.get_input_embeddings(), base.get_output_embeddings()) if each}
    for table in tables.values():
        rows = [table.weight, *([table.bias] if isinstance(table, nn.Linear) and table.bias is not None else [])]
        for values in rows:
            index = torch.tensor(new, device=values.device)
            mean = values[:n_known].mean(dim=0, dtype=torch.float32, keepdim=True).to(values.dtype)
            values.index_copy_(0, index, mean.expand(len(new), *values.shape[1:]))


def trained_rows(model: Any, modules_to_save: Sequence[str] | None) -> dict[str, list[int]]:
    """PEFT's `trainable_token_indices` for the tokens that were added to a model; empty if there are none.

    Args:
        modules_to_save: what the adapter trains whole anyway.
    """
    state = binding.state_of(model)
    if state is None or not state.new_tokens:
        return {}
    base: Any = adapters.base_model(model)
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    tables = [embedding] if head is None or head.weight is embedding.weight else [embedding, head]
    names = [name for table in tables for name, module in base.named_modules() if module is table]
    whole = modules_to_save or ()
    return {n: list(state.new_tokens) for n in names if not any(n == w or n.endswith(f".{w}") for w in whole)}
