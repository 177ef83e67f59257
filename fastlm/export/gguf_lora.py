"""A LoRA adapter as a GGUF file, which llama.cpp adds to a base model when it loads both.

llama.cpp adds (alpha / rank) B A with one alpha for the file: the factor of each layer goes into its B where it is another
(rank and alpha patterns, rank-stabilised LoRA). Rows of B change their order as those of the weight do. Several active adapters
of a layer become one of their ranks' sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fastlm.export.gguf_arch import Arch, heads_of, interleave, score_factor, tensor_names
from fastlm.export.weights import LowRank, Source


def adapter_tensors(
    weights: Mapping[str, Source], config: Any, arch: Arch, alpha: float
) -> Iterator[tuple[str, Tensor]]:
    """Names and values of the adapter's tensors, float32 on the CPU.

    Args:
        weights: of the model, by checkpoint name.
        config: of the text model.
        arch: its row.
        alpha: of the file.

    Raises:
        ValueError: for a part of the adapter that has no form there.
    """
    adapted = {name: source for name, source in weights.items() if source.is_adapted}
    if not adapted:
        raise ValueError("save_method='lora' needs a model with an active LoRA adapter, and none adapts any weight")
    made = tensor_names(list(adapted), arch, config.num_hidden_layers)
    for name, source in adapted.items():
        _check(name, source, config)
        a, b = _joined(source.updates, alpha)
        if name == "model.embed_tokens.weight":
            # the rows of A are looked up by token
            a = a.t()
        n_heads = heads_of(name, config, arch)
        if n_heads is not None:
            b = interleave(b, n_heads)
        yield f"{made[name]}.lora_a", a.contiguous()
        yield f"{made[name]}.lora_b", b.contiguous()


def _check(name: str, source: Source, config: Any) -> None:
    if source.rows or source.added or any(update.magnitude is not None for update in source.updates):
        kind = "trained rows" if source.rows else "a trained bias" if source.added else "DoRA"
        raise ValueError(f"{name} has {kind}, which a GGUF adapter cannot hold: save a merged model instead")
    if name.startswith("lm_head.") and config.tie_word_embeddings:
        raise ValueError(
            f"{name} is tied to the embedding, which llama.cpp reads for both: save a merged model, or adapt other layers"
        )
    if name.endswith("q_proj.weight") and config.model_type == "gemma2" and score_factor(config) != 1.0:
        raise ValueError("query_pre_attn_scalar is not the heads' size: save a merged model instead")


def _joined(updates: tuple[LowRank, ...], alpha: float) -> tuple[Tensor, Tensor]:
    """A [R, K] and B [N, R] of all updates, so that (alpha / R) B A is their sum."""
    rank = sum(update.a.shape[0] for update in updates)
    a = torch.cat([update.a.detach().cpu().float() for update in updates])
    factors = [update.scaling * rank / alpha for update in updates]
    b = torch.cat(
        [update.b.detach().cpu().float() * factor for update, factor in zip(updates, factors, strict=True)], dim=1
    )
    return a, b
