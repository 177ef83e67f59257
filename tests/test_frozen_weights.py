"""Frozen weights that somebody writes to between forward and backward: autograd's error, as stock has it."""

import pytest
import test_parity_4bit
import tiny
import torch

import fastlm

X = tiny.ids(2, 40)
MODIFIED = "modified by an inplace operation"


def train_a_norm(base):
    """Layers run in parts then."""
    for layer in base.model.layers:
        layer.post_attention_layernorm.weight.requires_grad_(True)


def no_change(base):
    pass


CASES = [
    ("llama", no_change, "self_attn.k_proj.base_layer"),
    ("llama", no_change, "mlp.down_proj.base_layer"),
    ("llama", no_change, "input_layernorm"),
    ("qwen3", no_change, "self_attn.k_norm"),
    ("phi3", no_change, "mlp.gate_up_proj.base_layer"),
    ("llama", train_a_norm, "self_attn.o_proj.base_layer"),
    ("llama", train_a_norm, "mlp.up_proj.base_layer"),
    ("olmo", no_change, "mlp.up_proj.base_layer"),
]


@pytest.mark.parametrize("name, change, place", CASES, ids=[f"{n}-{c.__name__}-{p}" for n, c, p in CASES])
def test_dense_weights(name, change, place):
    stock = tiny.with_lora(tiny.model(name))
    ours = fastlm.patch_model(tiny.with_lora(tiny.model(name, attention="sdpa")))
    for made in (stock, ours):
        change(made.get_base_model())
        weight = made.get_base_model().model.layers[1].get_submodule(place).weight
        loss = made.train()(input_ids=X, labels=X, use_cache=False).loss
        loss.backward(retain_graph=True)
        with torch.no_grad():
            weight.mul_(0.5)
        with pytest.raises(RuntimeError, match=MODIFIED):
            loss.backward()
        # the next step takes it as it is
        made(input_ids=X, labels=X, use_cache=False).loss.backward()


def test_4bit_weights(tmp_path):
    """bitsandbytes decodes in the backward whatever is there then."""
    models = test_parity_4bit.pair(tmp_path, "llama")
    for made in models:
        loss = made.train()(input_ids=X, labels=X, use_cache=False).loss
        with torch.no_grad():
            made.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight.fill_(0x37)
        loss.backward()
    stock, ours = ({n: p.grad for n, p in made.named_parameters() if p.grad is not None} for made in models)
    assert all(tiny.relative(ours[n], stock[n]) <= 1e-5 for n in stock) and set(ours) == set(stock)
