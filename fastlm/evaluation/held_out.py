"""The loss of a model on rows that it was not trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlm.data.prepared import tokenized
from fastlm.data.statistics import IGNORED, bounds, labels_of
from fastlm.evaluation.state import undisturbed


class HeldOut(NamedTuple):
    """Means over the labelled tokens of all rows.

    Attributes:
        loss: of a token, in nats.
        perplexity: e to the power of it.
        token_accuracy: the share of tokens that the model holds likeliest.
        n_tokens: that were counted.
    """

    loss: float
    perplexity: float
    token_accuracy: float
    n_tokens: int


def _sums(model: Any, rows: Sequence[tuple[list[int], list[int]]], device: torch.device) -> Tensor:
    """[loss, right, tokens] summed over rows that run together, padded on the right; float64."""
    longest = max(len(ids) for ids, _ in rows)
    batch = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows], device=device)
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows], device=device)
    logits = model(input_ids=batch, attention_mask=mask, use_cache=False).logits
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    # row by row: float32 copies of all logits would be most of the memory
    for row, (_, labels) in zip(logits, rows, strict=True):
        targets = torch.tensor(labels[1:], device=row.device)
        scores = row[: len(targets)][targets != IGNORED].float()
        targets = targets[targets != IGNORED]
        loss = F.cross_entropy(scores, targets, reduction="sum")
        counted = torch.stack([loss, (scores.argmax(-1) == targets).sum(), torch.tensor(len(targets)).to(loss)])
        sums += counted.double().to(device)
    return sums


def held_out(model: Any, data: Any, tokenizer: Any = None, *, batch_tokens: int = 4096) -> HeldOut:
    """Loss, perplexity and token accuracy of a model on rows that it was not trained on.

    Every labelled token counts once, whatever the batches; the sums are float64. The model, its mode and the generators of random numbers
    are afterwards as they were.

    Args:
        model: any causal language model of transformers, or a PEFT model.
        data: a data set or a list of rows with `input_ids` and perhaps `labels` (a trainer's `eval_dataset`, packed or not), or with
            `messages`, `prompt` and `completion`, or `text` (as `fastlm.data.load` makes them): then the answers are counted.
        tokenizer: for rows without `input_ids`.
        batch_tokens: of rows that run together, padding counted; a longer row runs alone.

    Raises:
        ValueError: if no token is labelled, or rows of text come without a tokenizer.
    """
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens must be 1 or more, got {batch_tokens}")
    rows: list[Mapping[str, Any]] = [dict(row) for row in data]
    if rows and "input_ids" not in rows[0]:
        if tokenizer is None:
            raise ValueError(f"rows of {sorted(rows[0])} need a tokenizer")
        rows = list(tokenized(rows, tokenizer))
    # samples of a packed row apart
    pairs = [
        (list(row["input_ids"][start:stop]), list(labels_of(row)[start:stop]))
        for row in rows
        for start, stop in bounds(row)
    ]
    pairs = sorted((pair for pair in pairs if any(label != IGNORED for label in pair[1][1:])), key=lambda p: -len(p[0]))
    if not pairs:
        raise ValueError(f"none of {len(rows)} rows has a labelled token")
    device = model.get_input_embeddings().weight.device
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    with undisturbed(model):
        start = 0
        while start < len(pairs):
            n_rows = max(1, batch_tokens // len(pairs[start][0]))
            sums += _sums(model, pairs[start : start + n_rows], device)
            start += n_rows
    loss, right, n_tokens = sums.tolist()
    mean = loss / n_tokens
    return HeldOut(mean, math.exp(min(mean, 700.0)), right / n_tokens, int(n_tokens))
