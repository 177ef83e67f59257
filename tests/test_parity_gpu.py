"""Families of the table on the GPU: the kernels inside whole models, patched against stock."""

import pytest
import tiny
import torch

import fastlm
from fastlm import binding

pytestmark = pytest.mark.gpu
SHAPE = dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def on_gpu(name, dtype, attention):
    made = tiny.with_lora(tiny.model(name, dtype, attention, **SHAPE).cuda(), dtype=dtype)
    return made.train()


def batches():
    lengths = (70, 1, 111, 54)
    packed = tiny.packed_batch(lengths)
    x = tiny.ids(3, 200)
    mask = torch.ones_like(x)
    # less padding than any window: a query that sees nothing is NaN in a float64 model with an additive mask
    mask[1, 197:], mask[2, 195:] = 0, 0
    labels = x.masked_fill(mask == 0, -100)
    yield dict(input_ids=x, labels=x)
    yield dict(input_ids=x, attention_mask=mask, labels=labels)
    yield packed


def step(made, batch):
    """Logits of the real tokens and all gradients of one training step, each as one vector."""
    made.train().zero_grad()
    output = made(**batch, use_cache=False)
    output.loss.backward()
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    gradients = [p.grad.flatten() for _, p in sorted(made.named_parameters()) if p.grad is not None]
    return output.logits.detach()[real].double().flatten(), torch.cat(gradients).double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name", ["llama-biases", "mistral-window", "qwen2-windowed-layer", "qwen3", "gemma2", "cohere"]
)
def test_block_is_no_worse_than_stock(name, dtype):
    """RMS error of logits and of all gradients to the float32 truth, over batches of every layout: at most 1.1 times stock's."""
    stock, ours = (
        on_gpu(name, DTYPES[dtype], "eager"),
        fastlm.patch_model(on_gpu(name, DTYPES[dtype], "sdpa"), strict=True),
    )
    exact = on_gpu(name, torch.float32, "eager").double()
    for truth, rounded in zip(exact.parameters(), stock.parameters(), strict=True):
        truth.data.copy_(rounded.data)
    totals = {(label, what): 0.0 for label in ("stock", "ours") for what in ("logits", "gradients")}
    for batch in batches():
        batch = {k: v.cuda() for k, v in batch.items()}
        truth = dict(zip(("logits", "gradients"), step(exact, batch), strict=True))
        for label, made in (("stock", stock), ("ours", ours)):
            for what, got in zip(("logits", "gradients"), step(made, batch), strict=True):
                totals[label, what] += float((got - truth[what]).norm() / truth[what].norm())
    for what in ("logits", "gradients"):
        assert totals["ours", what] <= 1.1 * totals["stock", what] + 1e-6, totals
    layers = [row for row in fastlm.report(ours) if ".layers." in row.layer]
    assert all(row.path == "block" and row.device == "triton" and not row.fallback_calls for row in layers)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_recomputing_changes_no_value(name):
    """Plans change no value. What differs between runs is the order in which attention's backward adds, where it may."""
    ours = fastlm.patch_model(on_gpu(name, torch.bfloat16, "sdpa"), strict=True)
    batch = {k: v.cuda() for k, v in next(batches()).items()}
    kept, again = tiny.loss_and_gradients(ours, batch), tiny.loss_and_gradients(ours, batch)
    binding.set_checkpointing(ours.get_base_model(), True)
    ours.enable_input_require_grads()
    recomputed = tiny.loss_and_gradients(ours, batch)
    assert torch.equal(kept[0], recomputed[0])
    noise = max(tiny.relative(again[1][n], kept[1][n]) for n in kept[1])
    assert max(tiny.relative(recomputed[1][n], kept[1][n]) for n in kept[1]) <= 2 * noise


def test_greedy_tokens_in_float32():
    stock, ours = (tiny.with_lora(tiny.model("llama", attention=a, **SHAPE).cuda()).eval() for a in ("eager", "sdpa"))
    fastlm.patch_model(ours, strict=True)
    batch = {k: v.cuda() for k, v in tiny.padded_batch("left").items() if k != "labels"}
    settings = dict(max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=3)
    assert torch.equal(ours.generate(**batch, **settings), stock.generate(**batch, **settings))
