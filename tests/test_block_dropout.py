"""LoRA dropout in a layer that runs as one function: our seeded mask, the same in keeping and recomputing, and PEFT's numbers with it."""

import copy

import pytest
import tiny
import torch
from adapted import (
    BATCH,
    EXACT,
    RECOMPUTE,
    assert_block,
    assert_same_step,
    logits,
    pair,
    pair_4bit,
    quantized,
    recomputing,
    with_our_masks,
)


@pytest.fixture(scope="module")
def base_4bit(tmp_path_factory):
    return quantized(tmp_path_factory.mktemp("base"))


DROPOUTS = {
    "all": dict(lora_dropout=0.3),
    "few-targets": dict(lora_dropout=0.5, targets=["k_proj", "up_proj"]),
    "ranks": dict(lora_dropout=0.1, rank_pattern={"v_proj": 7}, use_rslora=True),
    "biases": dict(lora_dropout=0.2, bias="all"),
}


@RECOMPUTE
@pytest.mark.parametrize("kind", DROPOUTS)
def test_dropout_is_the_same_with_the_same_mask(kind, recompute):
    stock, ours = pair("llama-biases", **copy.deepcopy(DROPOUTS[kind]))
    with_our_masks(stock)
    if recompute:
        recomputing(stock, ours)
    for seed in range(2):
        assert_same_step(stock, ours, seed=seed)
    assert_same_step(stock, ours, tiny.packed_batch(), seed=5, use_cache=False)
    assert_block(ours)
    assert tiny.relative(logits(ours), logits(stock)) <= EXACT


def test_keeping_and_recomputing_draw_one_mask():
    ours = pair(lora_dropout=0.4)[1]
    steps = []
    for recompute in (False, True):
        recomputing(ours) if recompute else None
        torch.manual_seed(3)
        steps.append(tiny.loss_and_gradients(ours, BATCH))
    assert torch.equal(steps[0][0], steps[1][0])
    assert all(torch.equal(steps[0][1][name], steps[1][1][name]) for name in steps[0][1])
    torch.manual_seed(4)
    assert not torch.equal(tiny.loss_and_gradients(ours, BATCH)[0], steps[0][0])
    # the masks of a graph's second use are those of its first
    loss = ours.train()(**BATCH).loss
    parameters = [p for p in ours.parameters() if p.requires_grad]
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    torch.manual_seed(77)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(loss, parameters), strict=True))


@RECOMPUTE
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_adapters_in_float32_over_a_bfloat16_base(dropout, recompute):
    """Outside autocast PEFT computes them in float32: at most 1.1 times its error, with the same mask."""
    exact = with_our_masks(tiny.with_lora(tiny.model("llama", torch.bfloat16).float(), lora_dropout=dropout))
    stock, ours = pair(dtype=torch.bfloat16, lora_dropout=dropout)
    assert {p.dtype for n, p in ours.named_parameters() if "lora_" in n} == {torch.float32}
    with_our_masks(stock)
    if recompute:
        recomputing(stock, ours)
    errors = [0.0, 0.0]
    for seed in range(6):
        batch = dict(input_ids=tiny.ids(2, 24, seed), labels=tiny.ids(2, 24, seed))
        steps = []
        for made in (exact, stock, ours):
            torch.manual_seed(seed)
            loss, gradients = tiny.loss_and_gradients(made, batch)
            assert all(g.dtype == torch.float32 for g in gradients.values())
            steps.append(torch.cat([gradients[name].flatten() for name in sorted(gradients)]))
        for i in range(2):
            errors[i] += tiny.relative(steps[1 + i], steps[0])
    assert errors[1] <= 1.1 * errors[0], errors
    assert_block(ours)


@RECOMPUTE
@pytest.mark.parametrize("kind", DROPOUTS)
def test_dropout_over_4bit_weights(base_4bit, kind, recompute):
    stock, ours = pair_4bit(base_4bit, **copy.deepcopy(DROPOUTS[kind]))
    with_our_masks(stock)
    if recompute:
        recomputing(stock, ours)
    for seed in range(2):
        assert_same_step(stock, ours, seed=seed)
    assert_block(ours)
