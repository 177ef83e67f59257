"""Families of the table on 4-bit weights: patched against transformers + PEFT + bitsandbytes as they are."""

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import fastlm
from fastlm import quant

pytest.importorskip("bitsandbytes")
FAMILIES = ["llama", "mistral-window", "qwen2", "qwen3"]
# Rows of whole quantization blocks of 64, as real models have them: bitsandbytes 0.50 decodes rows of 96 wrongly on a CPU.
SHAPE = dict(hidden_size=128, intermediate_size=192)


def load(path, dtype, attention):
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    made = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, quantization_config=config, attn_implementation=attention
    )
    quant.keep_cpu_layout(made)
    return made


def pair(tmp_path, name, dtype=torch.float32, lora_dtype=None, **settings):
    tiny.model(name, **SHAPE).save_pretrained(tmp_path)
    stock, ours = (
        tiny.with_lora(load(tmp_path, dtype, attention), dtype=lora_dtype, **settings)
        for attention in ("eager", "sdpa")
    )
    return stock, fastlm.patch_model(ours, strict=True)


@pytest.mark.parametrize("batch", ["padded", "packed"])
@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients(tmp_path, name, batch):
    stock, ours = pair(tmp_path, name)
    inputs = tiny.padded_batch() if batch == "padded" else tiny.packed_batch()
    want_loss, want = tiny.loss_and_gradients(stock, inputs, use_cache=False)
    for recompute in (False, True):
        if recompute:
            ours.gradient_checkpointing_enable()
            ours.enable_input_require_grads()
        loss, got = tiny.loss_and_gradients(ours, inputs, use_cache=False)
        assert abs(loss - want_loss) <= 1e-5 * want_loss
        assert set(got) == set(want)
        assert all(tiny.relative(got[n], want[n]) <= 1e-5 for n in want)
    layers = [row for row in fastlm.report(ours) if ".layers." in row.layer]
    assert all(row.path == "block" and row.calls >= 2 and not row.fallback_calls for row in layers)


@pytest.mark.parametrize("settings", [dict(targets=["q_proj", "down_proj"]), dict(lora_dropout=0.0, bias="lora_only")])
def test_partly_adapted_layers_are_one_function_too(tmp_path, settings):
    stock, ours = pair(tmp_path, "qwen2", **settings)
    want_loss, want = tiny.loss_and_gradients(stock, tiny.padded_batch())
    loss, got = tiny.loss_and_gradients(ours, tiny.padded_batch())
    assert abs(loss - want_loss) <= 1e-5 * want_loss and set(got) == set(want)
    assert all(tiny.relative(got[n], want[n]) <= 1e-5 for n in want)


@pytest.mark.parametrize("lora_dtype", ["bf16", "fp32"])
def test_no_worse_than_stock_in_bfloat16(tmp_path, lora_dtype):
    """RMS error of all gradients to the float32 truth, over several batches: at most 1.1 times stock's."""
    stock, ours = pair(tmp_path, "qwen3", torch.bfloat16, {"bf16": torch.bfloat16, "fp32": torch.float32}[lora_dtype])
    exact = tiny.with_lora(tiny.model("qwen3", **SHAPE))
    theirs, truths = dict(stock.named_modules()), dict(exact.named_modules())
    with torch.no_grad():
        for name, module in theirs.items():
            if quant.is_4bit(module):
                truths[name].weight.copy_(quant.decode_weight(module, torch.float32))
        for name, parameter in stock.named_parameters():
            if parameter.is_floating_point():
                exact.get_parameter(name).copy_(parameter)
    totals = {"stock": 0.0, "ours": 0.0}
    for seed in range(4):
        batch = dict(input_ids=tiny.ids(2, 24, seed), labels=tiny.ids(2, 24, seed))
        _, truth = tiny.loss_and_gradients(exact, batch)
        for label, made in (("stock", stock), ("ours", ours)):
            _, got = tiny.loss_and_gradients(made, batch)
            error = torch.cat([(got[n].double() - truth[n].double()).flatten() for n in sorted(truth)])
            totals[label] += float(error.norm())
    assert totals["ours"] <= 1.1 * totals["stock"], totals


def test_evaluating_first_does_not_break_training(tmp_path):
    """On some CPUs bitsandbytes rewrites its weights at the first inference; a loaded model must not be hurt by it."""
    stock, ours = pair(tmp_path, "llama")
    x = tiny.ids(2, 40)
    with torch.no_grad():
        ours.eval()(input_ids=x)
        ours(input_ids=x[:, :3])
    want_loss, want = tiny.loss_and_gradients(stock, dict(input_ids=x, labels=x))
    loss, got = tiny.loss_and_gradients(ours, dict(input_ids=x, labels=x))
    assert abs(loss - want_loss) <= 1e-5 * want_loss and all(tiny.relative(got[n], want[n]) <= 1e-5 for n in want)
