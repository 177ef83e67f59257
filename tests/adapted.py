"""Stock and patched models with one adapter for the tests: pairs, one dropout mask for both, and what a step of both must share."""

from __future__ import annotations

import copy

import peft
import pytest
import tiny
import torch
import training
from torch import nn

import fastlm
from fastlm_kernels import _stacked

EXACT = 1e-5
BATCH = tiny.padded_batch()
X = tiny.ids(2, 40)


def models(name="llama", dtype=torch.float32):
    return tiny.model(name, dtype), tiny.model(name, dtype, "sdpa")


def pair(name="llama", dtype=torch.float32, **settings):
    stock, ours = models(name, dtype)
    return tiny.with_lora(stock, **settings), fastlm.patch_model(tiny.with_lora(ours, **settings), strict=True)


def layer_rows(made):
    return [row for row in fastlm.report(made) if ".layers." in row.layer]


def assert_block(made):
    """Every layer is a block that ran and never fell back."""
    rows = layer_rows(made)
    assert rows and all(
        row.path == "block" and row.calls and not row.fallback_calls and not row.reason for row in rows
    ), rows


def fill(made, adapter, seed=9):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(made.named_parameters()):
        if f".{adapter}." in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def assert_same_step(stock, ours, batch=None, seed=None, tolerance=EXACT, **call):
    results = []
    for made in (stock, ours):
        if seed is not None:
            torch.manual_seed(seed)
        results.append(tiny.loss_and_gradients(made, batch or BATCH, **call))
    (want_loss, want), (loss, got) = results
    assert abs(loss - want_loss) <= tolerance * want_loss
    assert set(got) == set(want) and want
    for name in want:
        assert tiny.relative(got[name], want[name]) <= tolerance or (got[name] - want[name]).abs().max() <= 1e-7, name


def logits(made):
    with torch.no_grad():
        return made.eval()(input_ids=X, use_cache=False).logits


def recomputing(*made):
    for one in made:
        one.gradient_checkpointing_enable(dict(use_reentrant=False))
        one.enable_input_require_grads()


RECOMPUTE = pytest.mark.parametrize("recompute", [False, True], ids=["keep", "recompute"])


def quantized(folder):
    """A 4-bit base model without an adapter, for `pair_4bit`."""
    pytest.importorskip("bitsandbytes")
    return fastlm.FastLanguageModel.from_pretrained(training.save_base(folder), dtype=torch.float32)[0]


def pair_4bit(base, **settings):
    ours = tiny.with_lora(copy.deepcopy(base), **settings)
    return fastlm.revert(copy.deepcopy(ours)), fastlm.patch_model(ours, strict=True)


class OurMask(nn.Dropout):
    """The mask that a block draws, for PEFT's own layer: a seed of each projection in the order they are called."""

    def forward(self, x):
        if not self.training:
            return x
        seed = int(torch.randint(2**62, ()))
        return _stacked._dropout(x.reshape(-1, x.shape[-1]), self.p, seed).view(x.shape)


def with_our_masks(made):
    for module in made.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            for name, dropout in module.lora_dropout.items():
                if isinstance(dropout, nn.Dropout):
                    module.lora_dropout[name] = OurMask(dropout.p)
    return made
