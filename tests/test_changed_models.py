"""Models that somebody changed before or after they were patched: stock's numbers, or an error."""

import copy
import functools

import pytest
import tiny
import torch
import torch.nn.functional as F
from torch import nn

import fastlm

X = tiny.ids(2, 14)
BATCH = dict(input_ids=X, labels=X, use_cache=False)


def pair(change=tiny.with_lora, name="llama"):
    """Stock with eager attention, and patched, both changed in the same way before."""
    return change(tiny.model(name)), fastlm.patch_model(change(tiny.model(name, attention="sdpa")))


def losses(models, batch=BATCH):
    return [m.train()(**{**batch, "use_cache": False}).loss.item() for m in models]


def same(values):
    return abs(values[0] - values[1]) <= 1e-5 * abs(values[0])


def layers_of(made):
    return made.base_model.model.model.layers


def test_logits_first_read_without_gradient_have_one():
    for made in pair():
        output = made.train()(**BATCH)
        with torch.no_grad():
            output.logits.argmax(-1)
        assert output.logits.requires_grad


def test_logits_read_after_the_head_was_trained_are_refused():
    _, ours = pair(lambda made: made)
    output = ours.train()(**BATCH)
    output.loss.backward()
    torch.optim.SGD(ours.parameters(), 0.5).step()
    with pytest.raises(RuntimeError, match="head has been trained or changed"):
        _ = output.logits


def test_what_is_added_to_the_first_layers_input_gets_its_gradient():
    gradients = []
    for made in pair():
        vector = nn.Parameter(torch.zeros(64))
        layers_of(made)[0].register_forward_pre_hook(lambda _, args, v=vector: (args[0] + v, *args[1:]))
        made.train()(**BATCH).loss.backward()
        gradients.append(vector.grad)
    assert tiny.relative(gradients[1], gradients[0]) <= 1e-5


def looped(made):
    first, second = made.model.layers
    made.model.layers = nn.ModuleList([first, second, first, second])
    made.config.num_hidden_layers = 4
    return tiny.with_lora(made)


def stacked(made):
    made.model.layers = nn.ModuleList([*made.model.layers, *copy.deepcopy(made.model.layers)])
    made.config.num_hidden_layers = 4
    return tiny.with_lora(made)


def test_layers_that_run_twice():
    stock, ours = pair(looped)
    batch = dict(input_ids=X, labels=X)
    want_loss, want = tiny.loss_and_gradients(stock, batch, use_cache=False)
    loss, got = tiny.loss_and_gradients(ours, batch, use_cache=False)
    assert abs(loss - want_loss) <= 1e-5 * want_loss
    assert all(tiny.relative(got[n], want[n]) <= 1e-5 for n in want)


@pytest.mark.parametrize("name", ["llama", "phi3", "mistral-window"])
def test_layers_with_a_config_of_their_own(name):
    """A deep copy of a layer copies its config: its attention is not ours, and must still know of padding, packing, windows."""
    models = pair(stacked, name)
    for batch in (BATCH, tiny.padded_batch("left"), tiny.packed_batch()):
        assert same(losses(models, batch))


def test_a_model_that_looks_both_ways_keeps_doing_so():
    def change(made):
        made.config.is_causal = False
        return tiny.with_lora(made)

    models = pair(change)
    assert same(losses(models))
    assert any("not causal" in row.reason for row in fastlm.report(models[1]))


@pytest.mark.parametrize("place", ["mlp", "self_attn.o_proj", "input_layernorm"])
def test_a_forward_that_somebody_replaced_is_called(place):
    def change(made):
        module = made.model.layers[0].get_submodule(place)
        stock = module.forward
        module.forward = lambda x: stock(x) * 1.5
        return tiny.with_lora(made, ["q_proj", "down_proj"])

    assert same(losses(pair(change)))


def test_a_head_that_somebody_replaced_is_called():
    _, ours = pair()
    head = ours.base_model.model.lm_head
    stock = head.forward
    head.forward = lambda x: stock(x) * 1.5
    output = ours.train()(**BATCH)
    want = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), X[:, 1:].flatten())
    assert same([float(want), float(output.loss)])


def test_an_activation_that_the_config_does_not_name():
    def change(made):
        made.model.layers[0].mlp.act_fn = nn.GELU()
        return tiny.with_lora(made)

    models = pair(change)
    assert same(losses(models))
    assert any("GELU" in row.reason for row in fastlm.report(models[1]))


def test_float64_runs():
    stock = tiny.with_lora(tiny.model("llama")).double()
    ours = fastlm.patch_model(tiny.with_lora(tiny.model("llama", attention="sdpa")).double())
    assert same(losses((stock, ours)))


def _set(path, value):
    """Set the attribute at a dotted path, of the model or, from "layer" on, of each of its layers."""
    *way, name = path.split(".")

    def change(base):
        for root in base.model.layers if way[0] == "layer" else [base]:
            setattr(functools.reduce(getattr, way[way[0] == "layer" :], root), name, value)

    return change


CHANGES = [
    ("mistral-window", "config.sliding_window", 3),
    ("mistral", "config.sliding_window", 5),
    ("mistral-window", "config.sliding_window", None),
    ("gemma2", "config.sliding_window", 3),
    ("gemma2", "layer.self_attn.scaling", 0.9),
    ("gemma2", "layer.self_attn.attn_logit_softcapping", 0.5),
    ("gemma2", "layer.self_attn.sliding_window", 2),
    ("gemma3", "config.sliding_window", 3),
    ("exaone4", "config.sliding_window", 3),
    ("smollm3", "layer.self_attn.use_rope", 0),
    ("granite", "layer.residual_multiplier", 1.3),
    ("llama", "layer.self_attn.scaling", 0.9),
    ("llama", "layer.mlp.act_fn", nn.GELU()),
    ("stablelm", "layer.use_parallel_residual", True),
]


@pytest.mark.parametrize("runs", ["block", "parts", "stock"])
@pytest.mark.parametrize("name, path, value", CHANGES, ids=[f"{name}-{path}={value}" for name, path, value in CHANGES])
def test_what_is_changed_between_two_calls(name, path, value, runs):
    """Masks are made of the config's window in each call, the rest is read from the modules: so do we."""
    models = pair(name=name)
    if runs == "parts":
        # its norm's weight is trained, which is autograd's work
        for made in models:
            for norm in [
                m for n, m in made.named_modules() if n.endswith(("layernorm", "norm")) and hasattr(m, "weight")
            ]:
                norm.weight.requires_grad_(True)
    elif runs == "stock":
        for made in models:
            for layer in layers_of(made):
                layer.self_attn.register_forward_hook(lambda module, args, output: None)
    assert same(losses(models))
    before = losses(models[:1])
    for made in models:
        _set(path, value)(made.get_base_model())
    want_loss, want = tiny.loss_and_gradients(models[0], dict(input_ids=X, labels=X), use_cache=False)
    loss, got = tiny.loss_and_gradients(models[1], dict(input_ids=X, labels=X), use_cache=False)
    # stock's eager attention does not read the module's window
    assert same([want_loss, before[0]]) == (path == "layer.self_attn.sliding_window")
    assert same([want_loss, loss])
    assert all(tiny.relative(got[n], want[n]) <= 1e-5 for n in want)
    stays = not any(row.fallback_calls for row in fastlm.report(models[1]))
    assert stays or runs == "stock" or "act_fn" in path
