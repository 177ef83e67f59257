"""A decoder layer that runs as one function is still a module: hooks, outputs, copies, compilers, whoever decides what it keeps."""

import contextlib
import copy
import dataclasses
import functools
import pickle

import pytest
import tiny
import torch
import torch.utils._pytree as pytree
import training
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.utils import convert_outputs_to_fp32
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

import fastlm
from fastlm.block import function
from fastlm.forwards.causal_lm import DeferredLogits
from fastlm.patching import patch_of

EXACT = 1e-5
X = tiny.ids(2, 40)
BATCH = dict(input_ids=X, labels=X)


def pair(name="llama", strict=True, recompute=False, **over):
    """The stock model and a patched one with the same weights, both with an adapter."""
    stock = tiny.with_lora(tiny.model(name, **over))
    ours = fastlm.patch_model(tiny.with_lora(tiny.model(name, attention="sdpa", **over)), strict=strict)
    for made in (stock, ours):
        if recompute:
            made.gradient_checkpointing_enable(dict(use_reentrant=False))
            made.enable_input_require_grads()
    return stock, ours


def layers(made):
    return made.get_base_model().model.layers


def layer_rows(made):
    return [row for row in fastlm.report(made) if ".layers." in row.layer]


def assert_block(made):
    rows = layer_rows(made)
    assert all(row.path == "block" and row.calls and not row.fallback_calls and not row.reason for row in rows), rows


def close(got, want, tolerance=EXACT):
    got, want = ([t] if torch.is_tensor(t) else list(t) for t in (got, want))
    assert len(got) == len(want) and want
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and tiny.relative(a.detach(), b.detach()) <= tolerance


def step(made, batch=None, **call):
    loss, gradients = tiny.loss_and_gradients(made, batch or BATCH, **call)
    return [loss, *(gradients[name] for name in sorted(gradients))]


RECOMPUTE = pytest.mark.parametrize("recompute", [False, True], ids=["keep", "recompute"])


# --- outputs and hooks -----------------------------------------------------------------------------------------------


@RECOMPUTE
def test_hidden_states_have_values_and_gradients(recompute):
    """A loss on hidden states of inner layers, as distillation and probes have it."""
    stock, ours = pair(recompute=recompute, num_hidden_layers=3)
    results = []
    for made in (stock, ours):
        out = made.train()(**BATCH, output_hidden_states=True)
        (out.loss + sum(h.square().mean() for h in out.hidden_states[1:])).backward()
        gradients = [p.grad for _, p in sorted(made.named_parameters()) if p.grad is not None]
        results.append((out.hidden_states, gradients))
    (want, want_gradients), (got, got_gradients) = results
    close(got, want)
    assert [h.requires_grad for h in got] == [h.requires_grad for h in want]
    close(got_gradients, want_gradients)
    # the hooks that transformers left behind are idle now
    close(step(ours), step(stock))
    assert_block(ours)


@RECOMPUTE
def test_forward_hooks_on_a_layer(recompute):
    """They see its input and output, may replace the output, and may write into it."""

    def run(made, seen):
        first, second = layers(made)
        first.register_forward_hook(lambda m, args, out: seen.extend((args[0], out)))
        first.register_forward_hook(lambda m, args, out: out * 1.5)
        second.register_forward_pre_hook(lambda m, args: (args[0] + 0.25, *args[1:]))
        second.register_forward_hook(lambda m, args, out: out.mul_(0.5))
        # transformers runs a stock layer's hooks again when it recomputes the layer
        return [*step(made), *seen[:2]]

    stock, ours = pair(recompute=recompute)
    close(run(ours, []), run(stock, []))
    assert_block(ours)


@RECOMPUTE
def test_gradient_hooks_on_a_layer(recompute):
    def run(made, seen):
        made.enable_input_require_grads()
        for layer in layers(made):
            layer.register_full_backward_hook(lambda m, dx, dy: seen.extend((dx[0], dy[0])))
        layers(made)[1].register_full_backward_hook(lambda m, dx, dy: (dx[0] * 2, *dx[1:]))
        layers(made)[0].register_full_backward_pre_hook(lambda m, dy: (dy[0] * 3,))
        return [*step(made), *seen]

    stock, ours = pair(recompute=recompute)
    close(run(ours, []), run(stock, []))
    assert_block(ours)


class Halved(ModelHook):
    def post_forward(self, module, output):
        return halved(output)


def halved(output):
    return tuple(None if t is None else t * 0.5 for t in output) if isinstance(output, tuple) else output * 0.5


HOOKS = {
    "forward": lambda module: module.register_forward_hook(lambda m, args, out: halved(out)),
    "pre": lambda module: module.register_forward_pre_hook(lambda m, args: tuple(a * 0.5 for a in args)),
    "backward": lambda module: module.register_full_backward_hook(lambda m, dx, dy: (dx[0] * 0.5, *dx[1:])),
    "accelerate": lambda module: add_hook_to_module(module, Halved()),
}
INNER = {
    "self_attn": "a module in it has hooks",
    "mlp": "a module in it has hooks",
    "input_layernorm": "a norm has hooks",
    "self_attn.q_proj": "a projection has hooks",
    "mlp.down_proj.base_layer": "a projection has hooks",
    "self_attn.v_proj.lora_A.default": "adapter 'default' is more than two plain matrices",
}
# transformers calls the attention with keywords alone, which such hooks do not see
PLACES = [(w, k) for w in INNER for k in HOOKS if w != "self_attn" or k in ("forward", "accelerate")]


@pytest.mark.parametrize(("where", "kind"), PLACES, ids=[f"{w}-{k}" for w, k in PLACES])
def test_hooks_on_inner_modules(where, kind):
    """The layer around them runs stock code for that call, which is right, counted and explained; a strict model refuses."""
    stock, ours = pair(strict=False)
    for made in (stock, ours):
        HOOKS[kind](layers(made)[1].get_submodule(where))
    close(step(ours), step(stock))
    first, second = layer_rows(ours)
    assert first.path == "block" and not first.fallback_calls
    assert INNER[where] in second.reason and set(patch_of(layers(ours)[1]).fallbacks) == {INNER[where]}
    fastlm.patch_model(ours, strict=True)
    with pytest.raises(RuntimeError, match="the fast block cannot run for this call"):
        ours(**BATCH)


def test_hooks_on_all_modules():
    """torch's hooks for every module of the process, which may change any output."""
    stock, ours = pair(strict=False)
    halve = lambda m, args, out: out * 0.5 if type(m).__name__ == "LlamaMLP" else None
    handle = torch.nn.modules.module.register_module_forward_hook(halve)
    try:
        close(step(ours), step(stock))
    finally:
        handle.remove()
    assert all("1 calls: a module in it has hooks" in row.reason for row in layer_rows(ours))
    close(step(ours), step(stock))
    assert [len(patch_of(layer).fallbacks) for layer in layers(ours)] == [1, 1]


def test_attention_scores():
    """transformers gives none without its eager attention; the call that asks for them runs stock layers and is counted."""
    stock, ours = tiny.model("llama", attention="sdpa"), fastlm.patch_model(tiny.model("llama", attention="sdpa"))
    with torch.no_grad():
        for use_cache in (True, False):
            want, got = (made(input_ids=X, output_attentions=True, use_cache=use_cache) for made in (stock, ours))
            close(got.logits, want.logits)
            assert got.attentions == want.attentions
    close(step(ours, output_attentions=True), step(stock))
    assert all("3 calls: attention scores were asked for" in row.reason for row in layer_rows(ours))
    assert all(row.fallback_calls == 3 for row in layer_rows(ours))
    close(step(ours), step(stock))
    assert all(row.fallback_calls == 3 for row in layer_rows(ours))


def test_rows_with_adapters_of_their_own():
    """PEFT's mixed batches call every projection through hooks: layers run stock, are counted, and are a block again after it."""
    models = pair(strict=False)
    for made in models:
        made.add_adapter("second", made.peft_config["default"])
        generator = torch.Generator().manual_seed(9)
        for name, parameter in sorted(made.named_parameters()):
            if ".second." in name:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    call = dict(input_ids=tiny.ids(3, 20), adapter_names=["default", "second", "__base__"])
    with torch.no_grad():
        want, got = (made.eval()(**call, use_cache=False).logits for made in models)
    close(got, want)
    ours = models[1]
    for layer in layers(ours):
        assert set(patch_of(layer).fallbacks) == {"a projection has hooks"}
        patch_of(layer).fallbacks.clear()
    close(step(ours), step(models[0]))
    assert not any(patch_of(layer).fallbacks for layer in layers(ours))


def test_walking_over_an_output_makes_no_logits(monkeypatch):
    """As FSDP and accelerate do, by fields, by keys or as a tree; what is rebuilt from it still has them to give."""
    _, ours = pair()
    want = ours.train()(**BATCH, output_hidden_states=True).logits
    made, make = [], DeferredLogits.__call__
    monkeypatch.setattr(DeferredLogits, "__call__", lambda self: made.append(1) or make(self))
    output = ours(**BATCH, output_hidden_states=True)
    rebuilt = dataclasses.replace(output, loss=output.loss * 2)
    leaves, tree = pytree.tree_flatten(output)
    walked = [getattr(rebuilt, field.name) for field in dataclasses.fields(rebuilt)]
    assert len(walked) == 4 and dict(output.items()) and not made
    for other in (output, rebuilt, copy.copy(output), pytree.tree_unflatten(leaves, tree)):
        assert list(other) == ["loss", "logits", "hidden_states"] and torch.equal(other.logits, want)
        assert other["logits"] is other[1] is other.to_tuple()[1] is dict(other.items())["logits"] is other.logits
        assert [field.name for field in dataclasses.fields(other)][:2] == ["loss", "logits"]
    with torch.no_grad():
        loaded = pickle.loads(pickle.dumps(ours(**BATCH)))
    assert torch.equal(loaded.logits, want)
    output = ours(**BATCH)
    output.logits = want[:1]
    assert output["logits"] is output.logits is dict(output.items())["logits"]


# --- gradients -------------------------------------------------------------------------------------------------------


@RECOMPUTE
def test_a_graph_may_be_used_twice(recompute):
    _, ours = pair(recompute=recompute)
    loss = ours.train()(**BATCH).loss
    parameters = [p for p in ours.parameters() if p.requires_grad]
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    second = torch.autograd.grad(loss, parameters)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(loss, parameters)


@RECOMPUTE
def test_a_second_derivative_is_refused(recompute):
    _, ours = pair(recompute=recompute)
    loss = ours.train()(**BATCH).loss
    with pytest.raises(RuntimeError, match=r"no second derivative. Use fastlm.revert\(model\)"):
        torch.autograd.grad(loss, [p for p in ours.parameters() if p.requires_grad], create_graph=True)


@RECOMPUTE
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_without_gradients(mode, recompute):
    stock, ours = pair(recompute=recompute)
    for training_mode in (True, False):
        with mode():
            want, got = (made.train(training_mode)(**BATCH).logits.clone() for made in (stock, ours))
        close(got, want)
    # weights that inference has seen are trained as before
    close(step(ours), step(stock))
    assert_block(ours)


@RECOMPUTE
def test_what_is_kept_may_move_to_the_host(recompute):
    _, ours = pair(recompute=recompute)
    want = step(ours)
    with torch.autograd.graph.save_on_cpu():
        got = step(ours)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def offloading(model, folder):
    """An SFTTrainer with activation offloading: on a CPU, with torch's hooks in the place of TRL's, which need an accelerator.

    TRL lets the head's own activations stay, by hooks on the head.
    """
    has_gpu = torch.cuda.is_available()
    trainer = training.sft(model, folder, activation_offloading=has_gpu, use_cpu=not has_gpu)
    if not has_gpu:
        stays = contextlib.ExitStack()
        head = model.get_output_embeddings()
        head.register_forward_pre_hook(
            lambda *_: stays.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)) and None
        )
        head.register_forward_hook(lambda *_: stays.close(), always_call=True)
        trainer.maybe_activation_offload_context = torch.autograd.graph.save_on_cpu()
    return trainer


def test_activation_offloading_under_a_trainer(tmp_path):
    stock, ours = (offloading(make(), tmp_path) for make in (training.stock, training.ours))
    training.assert_same_run(training.train(ours), training.train(stock))
    training.assert_ran_fast(ours.model)


# --- who recomputes --------------------------------------------------------------------------------------------------

CHECKPOINTING = [name for name in tiny.MODELS if "-" not in name]


def flags(made):
    """Of every layer: transformers' own flag, and the permission that a block keeps to itself."""
    return [(layer.gradient_checkpointing, patch_of(layer).recomputes) for layer in layers(made)]


@pytest.mark.parametrize("name", CHECKPOINTING)
def test_no_layer_is_replayed_and_the_model_tells_the_truth(name):
    """In every family: a layer's forward runs once, what it keeps is what recomputing needs, and the flag says what is on."""
    _, ours = pair(name, strict=True)
    kept = training_bytes(ours)
    ours.gradient_checkpointing_enable()
    ours.enable_input_require_grads()
    base = ours.get_base_model()
    assert base.is_gradient_checkpointing and flags(ours) == [(False, True)] * 2
    calls = [patch_of(layer).calls for layer in layers(ours)]
    assert training_bytes(ours) < 0.7 * kept
    assert [patch_of(layer).calls for layer in layers(ours)] == [n + 1 for n in calls]
    ours.gradient_checkpointing_disable()
    assert not base.is_gradient_checkpointing and flags(ours) == [(False, False)] * 2
    assert training_bytes(ours) == kept
    ours.gradient_checkpointing_enable()
    fastlm.revert(ours)
    assert base.is_gradient_checkpointing and all(layer.gradient_checkpointing for layer in layers(ours))


def training_bytes(made):
    """What a step keeps for its backward in distinct memories, apart from parameters."""
    memories, own = {}, {p.untyped_storage().data_ptr() for p in made.parameters()}

    def pack(tensor):
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in own:
            # held, so that no address is given out twice
            memories[memory.data_ptr()] = memory
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step(made)
    return sum(memory.nbytes() for memory in memories.values())


@pytest.mark.parametrize("reentrant", [False, True])
def test_permission_from_before_patching_and_in_copies(reentrant):
    stock, ours = (tiny.with_lora(tiny.model("llama", attention=kind)) for kind in ("eager", "sdpa"))
    for made in (stock, ours):
        made.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    fastlm.patch_model(ours, strict=True)
    twin = copy.deepcopy(ours)
    fastlm.patch_model(ours, strict=True)
    want = step(stock)
    for made in (ours, twin):
        assert made.get_base_model().is_gradient_checkpointing and flags(made) == [(False, True)] * 2
        close(step(made), want)
        assert_block(made)
    fastlm.revert(twin)
    assert flags(ours) == [(False, True)] * 2 and all(layer.gradient_checkpointing for layer in layers(twin))
    close(step(twin), want)


def test_a_layer_that_runs_stock_is_replayed():
    """The permission goes on to transformers' own function where a layer is no block; its neighbours are not replayed."""
    stock, ours = pair(strict=False, recompute=True, num_hidden_layers=3)
    for made in (stock, ours):
        layers(made)[1].mlp.register_forward_hook(lambda m, args, out: out * 0.5)
    seen = []
    layers(ours)[1].post_attention_layernorm.register_forward_pre_hook(lambda m, args: seen.append(1))
    close(step(ours), step(stock))
    assert len(seen) == 2 and [patch_of(layer).calls for layer in layers(ours)] == [1, 1, 1]
    assert [row.fallback_calls for row in layer_rows(ours)] == [0, 1, 0]


@pytest.mark.parametrize("impl", list(CheckpointImpl), ids=lambda impl: impl.name)
def test_layers_that_somebody_else_recomputes(impl):
    """torch's own wrappers replay a whole layer, with its dropout."""
    ours = fastlm.patch_model(tiny.with_lora(tiny.model("llama", attention="sdpa"), lora_dropout=0.3), strict=True)
    ours.enable_input_require_grads()
    torch.manual_seed(1)
    want = step(ours)
    apply_activation_checkpointing(
        ours,
        checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, checkpoint_impl=impl),
        check_fn=lambda module: patch_of(module) is not None and patch_of(module).part == "block",
    )
    torch.manual_seed(1)
    got = step(ours)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert_block(ours)


def test_every_second_layer():
    stock, ours = pair(num_hidden_layers=4)
    sizes = []
    for n in (None, 2, 1):
        if n is not None:
            ours.get_base_model().gradient_checkpointing_enable(every_n_layers=n)
            assert [recomputes for _, recomputes in flags(ours)] == [i % n == 0 for i in range(4)]
        sizes.append(training_bytes(ours))
    assert sizes[0] > sizes[1] > sizes[2]
    close(step(ours), step(stock))


def test_adapters_in_the_top_half_under_a_trainer(tmp_path, monkeypatch):
    """TRL's defaults: the frozen layers below run once in a step, and have no backward."""
    made = tiny.with_lora(tiny.model("llama", num_hidden_layers=4), layers_to_transform=[2, 3])
    want = training.train(training.sft(made, tmp_path))
    ours = tiny.with_lora(tiny.model("llama", attention="sdpa", num_hidden_layers=4), layers_to_transform=[2, 3])
    fastlm.patch_model(ours, strict=True)
    backward, seen = function.BlockFunction.backward, []
    counted = lambda ctx, dy: seen.append(ctx.needs_input_grad[0]) or backward(ctx, dy)
    monkeypatch.setattr(function.BlockFunction, "backward", staticmethod(counted))
    trainer = training.sft(ours, tmp_path)
    assert trainer.args.gradient_checkpointing
    training.assert_same_run(training.train(trainer), want)
    assert seen == [True, False] * 3 and [patch_of(layer).calls for layer in layers(ours)] == [3, 3, 3, 3]
    assert ours.get_base_model().is_gradient_checkpointing
    assert_block(ours)


# --- copies ----------------------------------------------------------------------------------------------------------


def test_a_deep_copy_stays_fast():
    stock, ours = pair()
    twin = copy.deepcopy(ours)
    fastlm.revert(ours)
    close(step(twin), step(stock))
    assert_block(twin)
    assert {row.path for row in layer_rows(ours)} == {"stock"}


def test_a_pickle_is_stock():
    """Of a family whose stock model can be pickled wherever it is: others hold functions that pickle refuses."""
    stock, ours = pair("ernie4_5", strict=False)
    want = step(ours)
    loaded = pickle.loads(pickle.dumps(ours))
    assert {row.path for row in layer_rows(loaded)} == {"stock"}
    close(step(loaded), step(stock))
    fastlm.revert(loaded)
    close(step(loaded), step(stock))
    fastlm.patch_model(loaded)
    assert all(torch.equal(a, b) for a, b in zip(step(loaded), want, strict=True))


def test_reverting_reaches_through_wrappers_at_every_level():
    """What a trainer, accelerate and a user put around our forwards goes on to the stock ones, and back when patched again."""
    plain, ours = (tiny.with_lora(tiny.model("llama", attention="sdpa")) for _ in range(2))
    fastlm.patch_model(ours, strict=True)
    want = step(plain)
    base, seen = ours.get_base_model(), []

    def around(module, name="forward"):
        inner = getattr(module, name)
        module.forward = lambda *args, **kwargs: seen.append(name) or inner(*args, **kwargs)

    around(base), around(base.model), around(layers(ours)[0])
    add_hook_to_module(layers(ours)[1], ModelHook())
    base.forward = convert_outputs_to_fp32(base.forward)
    close(step(ours), want)
    assert len(seen) == 3
    assert_block(ours)
    fastlm.revert(ours)
    assert all(torch.equal(a, b) for a, b in zip(step(ours), want, strict=True)) and len(seen) == 6
    assert {row.path for row in layer_rows(ours)} == {"stock"}
    fastlm.patch_model(ours, strict=True)
    close(step(ours), want)
    assert len(seen) == 9
    assert_block(ours)
