"""Captured layers: the same numbers, and eager runs where a replay would be wrong. Without a GPU, a recorder that runs again."""

import copy
import itertools
import pickle

import pytest
import tiny
import torch
import training

import fastlm
import fastlm.block.graphs
from fastlm import binding
from fastlm.patching import patch_of

WARM_UP = 2
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class RunsAgain:
    """Stands for CUDA graphs: a replay is the same run once more, on the same addresses. The run that is recorded is its first."""

    def __init__(self, device):
        pass

    def record(self, run):
        run()
        runs = itertools.chain([lambda: None], itertools.repeat(run))
        return lambda: next(runs)()


class Refuses(RunsAgain):
    def record(self, run):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")


def graphs_of(model):
    return binding.state_of(model).graphs


def replays(model):
    """Replayed calls a layer."""
    return graphs_of(model).replays / model.config.num_hidden_layers


def patched(device, name="llama", recorder=RunsAgain, **over):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    made = tiny.with_lora(tiny.model(name, dtype, "sdpa", **over).to(device), dtype=dtype)
    made = fastlm.patch_model(made, strict=True, deterministic=True).train()
    if device == "cpu":
        graphs_of(made)._make_recorder = recorder
    return made


def eager_twin(made):
    return fastlm.patch_model(copy.deepcopy(made), strict=True, deterministic=True, cuda_graphs=False)


def batch(device, seed=0, rows=2, length=24):
    x = tiny.ids(rows, length, seed=seed).to(device)
    return dict(input_ids=x, labels=x, use_cache=False)


def adapter_grads(model):
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def step(model, inputs):
    """The loss and all gradients."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return [loss.detach(), *adapter_grads(model)]


def assert_same(ours, theirs):
    assert len(ours) == len(theirs) > 10
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def warmed(device, **settings):
    """A model whose layers are captured for `batch`, and a twin that runs eagerly."""
    made = patched(device, **settings)
    for seed in range(WARM_UP + 1):
        step(made, batch(device, seed))
    assert replays(made) == 1 and not graphs_of(made).reason
    return made, eager_twin(made)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recomputes", [False, True], ids=["keep", "recompute"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "cohere"])
def test_replays_are_equal_to_the_bit(name, recomputes, device):
    made = patched(device, name)
    eager = eager_twin(made)
    if recomputes:
        for model in (made, eager):
            binding.set_checkpointing(model.get_base_model(), True)
            model.enable_input_require_grads()
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (made, eager)]
    for seed in range(6):
        assert_same(step(made, batch(device, seed)), step(eager, batch(device, seed)))
        for optimizer in optimizers:
            optimizer.step()
    assert replays(made) == 6 - WARM_UP and not graphs_of(made).reason
    n_calls = (6 - WARM_UP) * made.config.num_hidden_layers
    assert str(fastlm.report(made)).endswith(f"CUDA graphs: {n_calls} calls of layers replayed")
    assert graphs_of(eager) is None


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_accumulate_and_stay_the_callers(device):
    made, eager = warmed(device)
    for model in (made, eager):
        model.zero_grad()
        for seed in (5, 6):
            model(**batch(device, seed)).loss.backward()
    kept = adapter_grads(made)
    assert_same(kept, adapter_grads(eager))
    first = [p.grad for p in made.parameters() if p.grad is not None]
    made.zero_grad()
    made(**batch(device, 7)).loss.backward()
    assert_same(first, kept)


@pytest.mark.parametrize("device", DEVICES)
def test_a_second_forward_before_the_backward_runs_eagerly(device):
    made, eager = warmed(device)
    before = replays(made)
    results = []
    for model in (made, eager):
        model.zero_grad()
        losses = [model(**batch(device, seed)).loss for seed in (5, 6)]
        for loss in losses:
            loss.backward()
        results.append(adapter_grads(model))
    assert_same(*results)
    assert replays(made) == before + 1
    # free again
    step(made, batch(device, 8))
    assert replays(made) == before + 2


@pytest.mark.parametrize("device", DEVICES)
def test_a_retained_graph_answers_again(device):
    made, eager = warmed(device)
    results = []
    for model in (made, eager):
        model.zero_grad()
        loss = model(**batch(device, 5)).loss
        loss.backward(retain_graph=True)
        # in between, another batch, whose replay would write over what the first one kept
        model(**batch(device, 6)).loss.backward()
        loss.backward()
        results.append(adapter_grads(model))
    assert_same(*results)


@pytest.mark.parametrize("device", DEVICES)
def test_a_loss_without_backward_frees_its_layers(device):
    made, eager = warmed(device)
    before = replays(made)
    made(**batch(device, 5))
    assert_same(step(made, batch(device, 6)), step(eager, batch(device, 6)))
    assert replays(made) == before + 2


@pytest.mark.parametrize("device", DEVICES)
def test_other_shapes_run_eagerly_until_they_repeat(device):
    made, eager = warmed(device)
    before = replays(made)
    for length in (24, 23, 24, 22):
        assert_same(step(made, batch(device, 5, length=length)), step(eager, batch(device, 5, length=length)))
        # another shape has the memory for itself
        assert length == 24 or graphs_of(made).is_empty
    assert replays(made) == before + 1
    for seed in range(WARM_UP + 2):
        assert_same(step(made, batch(device, seed, length=22)), step(eager, batch(device, seed, length=22)))
    assert replays(made) == before + 1 + 3


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_returned_stays_as_it_was(device):
    """Hidden states that a user holds, or a hook saw, are not written by later replays."""
    made, _ = warmed(device)
    seen = []
    backbone = made.get_base_model().model
    outputs = [backbone(input_ids=batch(device, seed)["input_ids"], use_cache=False)[0] for seed in (5, 5)]
    copies = [t.detach().clone() for t in outputs]
    handle = backbone.layers[0].register_forward_hook(lambda module, inputs, output: seen.append(output))
    for seed in (5, 6, 7):
        step(made, batch(device, seed))
    handle.remove()
    all_states = made(**batch(device, 5), output_hidden_states=True).hidden_states
    copied = [t.detach().clone() for t in all_states]
    step(made, batch(device, 8))
    assert torch.equal(copies[0], copies[1])
    assert all(torch.equal(a, b) for a, b in zip(outputs, copies, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(all_states, copied, strict=True))
    assert torch.equal(seen[0], all_states[1]) and not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("device", DEVICES)
def test_one_layer_that_changes_does_not_write_over_the_others(device):
    """What one capture keeps must never lie where another works: all layers are captured anew together."""
    made, eager = warmed(device, num_hidden_layers=4)
    for model in (made, eager):
        model.get_base_model().model.layers[2].mlp.up_proj.scaling["default"] *= 2
    for seed in range(WARM_UP + 4):
        assert_same(step(made, batch(device, seed)), step(eager, batch(device, seed)))
    # two layers before the changed one; then without it, until it has settled: the two before it once more, and then all again
    assert graphs_of(made).replays == 4 + 2 + 3 + 2 + 4 * 3


def test_calls_that_never_settle_end_the_captures(caplog):
    made = patched("cpu")
    eager = eager_twin(made)
    for i in range(200):
        made.get_base_model().model.layers[1].mlp.up_proj.scaling["default"] = 1.0 + i // (WARM_UP + 2)
        step(made, batch("cpu"))
        if graphs_of(made).reason:
            break
    assert "changed" in graphs_of(made).reason
    eager.get_base_model().model.layers[1].mlp.up_proj.scaling["default"] = 1.0 + i // (WARM_UP + 2)
    assert_same(step(made, batch("cpu")), step(eager, batch("cpu")))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("where", ["input_layernorm", "mlp"])
def test_what_hooks_inside_a_layer_keep_stays_as_it_was(device, where):
    """The layer runs stock for such a call, between two that are replayed."""
    made, _ = warmed(device, num_hidden_layers=3)
    fastlm.patch_model(made, strict=False, deterministic=True)
    for seed in range(WARM_UP + 1):
        step(made, batch(device, seed))
    module, seen = made.get_base_model().model.layers[1].get_submodule(where), []
    if where == "mlp":
        module.register_full_backward_hook(lambda module, dx, dy: seen.append(dy[0]))
    else:
        module.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    step(made, batch(device, 5))
    kept = [t.detach().clone() for t in seen]
    for seed in (6, 7, 8):
        step(made, batch(device, seed))
    assert kept and all(torch.equal(a, b) for a, b in zip(seen, kept, strict=False))


def test_an_error_behind_a_replay_is_raised():
    made, _ = warmed("cpu")
    loss = made(**batch("cpu", 5)).loss
    passes = next(iter(graphs_of(made)._entries.values())).passes

    def replay():
        raise torch.OutOfMemoryError("CUDA out of memory")

    passes._replay_backward = replay
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    assert not graphs_of(made).reason


def test_a_copy_has_captures_of_its_own():
    made, _ = warmed("cpu")
    twin = copy.deepcopy(made)
    for layer in twin.get_base_model().model.layers:
        assert patch_of(layer).facts.graphs is graphs_of(twin)
    with torch.no_grad():
        twin.eval()(**batch("cpu"))
    assert not graphs_of(made).is_empty and graphs_of(made) is not graphs_of(twin)


def test_generation_gives_the_memory_back():
    made, _ = warmed("cpu")
    made.eval()
    with torch.no_grad():
        made.generate(input_ids=batch("cpu")["input_ids"][:, :4], max_new_tokens=2, do_sample=False)
    assert graphs_of(made).is_empty


def test_one_layer_in_evaluation_does_not_end_the_captures_of_others():
    made = patched("cpu")
    made.get_base_model().model.layers[0].eval()
    for seed in range(WARM_UP + 3):
        step(made, batch("cpu", seed))
    assert graphs_of(made).replays == 3


@pytest.mark.parametrize("device", DEVICES)
def test_layers_that_were_moved_hand_nothing_on_in_place(device):
    made = patched(device, num_hidden_layers=3)
    backbone = made.get_base_model().model
    backbone.layers = torch.nn.ModuleList(list(backbone.layers)[1:])
    made.config.num_hidden_layers = 2
    table, grads = made.get_input_embeddings(), []
    for seed in range(WARM_UP + 3):
        embeds = table(batch(device, seed)["input_ids"]).detach().requires_grad_()
        made(inputs_embeds=embeds, labels=batch(device, seed)["input_ids"], use_cache=False).loss.backward()
        grads.append((embeds.grad, embeds.grad.clone()))
    assert replays(made) == 3 and all(torch.equal(a, b) for a, b in grads)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_given_embeddings_stay_as_they_were(device):
    made, eager = warmed(device)
    table = made.get_input_embeddings()
    grads = []
    for model in (made, eager):
        for seed in range(WARM_UP + 2):
            embeds = table(batch(device, seed)["input_ids"]).detach().requires_grad_()
            model(inputs_embeds=embeds, labels=batch(device, seed)["input_ids"], use_cache=False).loss.backward()
            grads.append(embeds.grad)
    half = len(grads) // 2
    assert all(torch.equal(a, b) for a, b in zip(grads[:half], grads[half:], strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_changed_adapters_and_weights_are_never_replayed_stale(device):
    made, eager = warmed(device)
    for model in (made, eager):
        layer = model.get_base_model().model.layers[1]
        layer.self_attn.q_proj.scaling["default"] *= 2
        a = layer.mlp.up_proj.lora_A["default"]
        a.weight = torch.nn.Parameter(a.weight.detach() * 2)
        layer.mlp.down_proj.base_layer.weight.data.mul_(0.5)
    assert_same(step(made, batch(device, 5)), step(eager, batch(device, 5)))
    with torch.no_grad():
        for model in (made, eager):
            model.get_base_model().model.layers[0].self_attn.v_proj.lora_B["default"].weight.add_(0.1)
    assert_same(step(made, batch(device, 5)), step(eager, batch(device, 5)))


@pytest.mark.parametrize("device", DEVICES)
def test_an_adapter_changed_between_forward_and_backward_is_an_error(device):
    made, _ = warmed(device)
    loss = made(**batch(device, 5)).loss
    with torch.no_grad():
        made.get_base_model().model.layers[0].self_attn.v_proj.lora_B["default"].weight.add_(0.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("device", DEVICES)
def test_a_frozen_weight_changed_between_forward_and_backward_is_an_error(device):
    made, _ = warmed(device)
    loss = made(**batch(device, 5)).loss
    with torch.no_grad():
        made.get_base_model().model.layers[0].self_attn.v_proj.base_layer.weight.add_(0.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("device", DEVICES)
def test_hooks_that_offload_see_what_is_kept(device):
    made, eager = warmed(device)
    before, packed = replays(made), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.numel()) or t, lambda t: t):
        assert_same(step(made, batch(device, 5)), step(eager, batch(device, 5)))
    assert replays(made) == before and sum(packed) > 0


@pytest.mark.parametrize("device", DEVICES)
def test_evaluation_gives_the_memory_back(device):
    made, eager = warmed(device)
    made.eval()
    with torch.no_grad():
        made(**batch(device, 5))
    assert graphs_of(made).is_empty
    made.train()
    for seed in range(WARM_UP + 2):
        assert_same(step(made, batch(device, seed)), step(eager, batch(device, seed)))
    assert not graphs_of(made).is_empty


def test_memory_comes_back_when_training_ends(tmp_path):
    made, _ = warmed("cpu")
    fastlm.FastLanguageModel.for_inference(made)
    assert graphs_of(made).is_empty
    made = patched("cpu")
    rows = [dict(input_ids=tiny.ids(1, 12, seed=seed)[0].tolist()) for seed in range(5)]
    args = dict(
        output_dir=str(tmp_path),
        use_cpu=True,
        max_steps=5,
        per_device_train_batch_size=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = fastlm.FastLanguageModel.get_trainer(made, rows, args, processing_class=training.tokenizer())
    trainer.train()
    assert graphs_of(made).is_empty and graphs_of(made).replays


def test_any_number_of_evaluations_leaves_captures_on():
    made = patched("cpu")
    for _ in range(20):
        for _ in range(WARM_UP + 1):
            step(made.train(), batch("cpu"))
        made.eval()(**batch("cpu"))
    assert not graphs_of(made).reason and replays(made) == 20


@pytest.mark.parametrize("device", DEVICES)
def test_no_second_derivative(device):
    made, _ = warmed(device)
    loss = made(**batch(device, 5)).loss
    trained = [p for p in made.parameters() if p.requires_grad]
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(loss, trained, create_graph=True)


def test_a_capture_that_fails_is_told_and_costs_no_number(caplog):
    made = patched("cpu", recorder=Refuses)
    eager = eager_twin(made)
    for seed in range(WARM_UP + 2):
        assert_same(step(made, batch("cpu", seed)), step(eager, batch("cpu", seed)))
    assert replays(made) == 0 and "not permitted" in graphs_of(made).reason
    assert fastlm.report(made).graphs.startswith(
        "none any more, a CUDA graph could not be captured: operation not permitted"
    )
    assert sum("without CUDA graphs" in record.message for record in caplog.records) == 1


def test_a_backward_that_cannot_be_captured_runs_eagerly(caplog):
    class Late(RunsAgain):
        def record(self, run):
            if run.__name__ == "_backward":
                raise RuntimeError("out of memory")
            return super().record(run)

    made = patched("cpu", recorder=Late)
    eager = eager_twin(made)
    for seed in range(WARM_UP + 2):
        assert_same(step(made, batch("cpu", seed)), step(eager, batch("cpu", seed)))
    assert "out of memory" in graphs_of(made).reason


@pytest.mark.parametrize("recomputes", [False, True], ids=["keep", "recompute"])
def test_large_layers_that_save_memory_are_not_captured(monkeypatch, recomputes):
    monkeypatch.setattr(fastlm.block.graphs, "_LAUNCH_BOUND_FLOPS", 1000)
    made = patched("cpu")
    if recomputes:
        made.gradient_checkpointing_enable()
        made.enable_input_require_grads()
    for seed in range(WARM_UP + 2):
        step(made, batch("cpu", seed))
    assert replays(made) == (0 if recomputes else 2)


def test_without_a_gpu_nothing_is_captured():
    made = patched("cpu", recorder=None)
    for seed in range(WARM_UP + 2):
        step(made, batch("cpu", seed))
    assert graphs_of(made).is_empty and replays(made) == 0


def test_graphs_are_no_part_of_a_copy_or_a_pickle():
    made, _ = warmed("cpu")
    assert graphs_of(copy.deepcopy(made.get_base_model())).is_empty
    graphs = graphs_of(made)
    graphs._make_recorder = None
    assert pickle.loads(pickle.dumps(graphs)).is_empty and not graphs.is_empty
