"""Packed rows: samples in one row must not see each other, nor train across their border."""

import pytest
import torch
from tiny_models import (
    PROJ,
    build,
    close,
    close_grads,
    close_number,
    differs,
    ids,
    load,
    logits,
    loss_and_grads,
    ref,
    with_lora,
)


def packed(lengths, seed=3):
    rows = [ids(1, n, seed=seed + i)[0].tolist() for i, n in enumerate(lengths)]
    flat = [t for r in rows for t in r]
    pos = [p for r in rows for p in range(len(r))]
    lab = [t for r in rows for t in [-100, *r[1:]]]  # a sample's first token is nobody's target

    def one(v):
        return torch.tensor([v])

    return rows, dict(input_ids=one(flat), position_ids=one(pos), labels=one(lab))


@pytest.mark.parametrize(
    "arch,over", [("llama", {}), ("qwen3", {}), ("gemma2", {}), ("mistral", dict(sliding_window=8))]
)
def test_packed_equals_separate(arch, over):
    path = build(arch, **over)
    rows, batch = packed([7, 13, 5, 11])
    want = torch.cat(ref("separate", path=path, rows=rows))[None]
    mixed = ref("forward", path=path, batch=dict(input_ids=batch["input_ids"]))
    differs(mixed, want, what="packing")
    model, _ = load(path)
    close(logits(model, dict(input_ids=batch["input_ids"], position_ids=batch["position_ids"])), want, what=arch)


def test_packed_with_single_token_samples():
    """Lengths 1 and 1 in the middle: positions 0, 0 next to each other are two samples, not one."""
    path = build("llama")
    rows, batch = packed([6, 1, 1, 8])
    want = torch.cat(ref("separate", path=path, rows=rows))[None]
    model, _ = load(path)
    close(logits(model, dict(input_ids=batch["input_ids"], position_ids=batch["position_ids"])), want)


def test_packed_training_equals_padded_training():
    path = build("llama")
    rows, batch = packed([7, 13, 5])
    lora = dict(r=4, lora_alpha=8, target_modules=PROJ, lora_dropout=0.0)
    n = max(map(len, rows))

    def pad(r, fill):
        return r + [fill] * (n - len(r))

    padded = dict(
        input_ids=torch.tensor([pad(r, 3) for r in rows]),
        attention_mask=torch.tensor([pad([1] * len(r), 0) for r in rows]),
        labels=torch.tensor([pad(r, -100) for r in rows]),
    )
    want = ref("forward", path=path, batch=padded, want="grads", only="lora_", lora=lora)
    model, _ = load(path)
    model = with_lora(model, r=4, lora_alpha=8)
    loss, grads = loss_and_grads(model, batch, only="lora_")
    close_number(loss, want["loss"])
    close_grads(grads, want["grads"])
