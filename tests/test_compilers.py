"""Compiled models: to torch.compile and torch.export, a fast forward is one opaque step."""

import pytest
import tiny
import torch
import training
from adapted import BATCH, assert_block

import fastlm


def ours(**over):
    return fastlm.patch_model(tiny.with_lora(tiny.model("llama", attention="sdpa", **over)), strict=True)


def step(made):
    loss, gradients = tiny.loss_and_gradients(made, BATCH)
    return [loss, *(gradients[name] for name in sorted(gradients))]


def assert_equal(got, want):
    assert len(got) == len(want) > 1 and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_models(backend):
    """Equal to the bit, and no more frames for many layers than for one."""
    frames = []
    for n_layers in (1, 6):
        made = ours(num_hidden_layers=n_layers)
        want = step(made)
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(made, backend=backend)
        for _ in range(2):
            assert_equal(step(compiled), want)
        frames.append(torch._dynamo.utils.counters["frames"]["total"])
        assert_block(made)
    assert frames[0] == frames[1] <= 32, frames


def test_layers_one_by_one():
    made = ours()
    want = step(made)
    for layer in made.get_base_model().model.layers:
        layer.compile(backend="eager")
    for _ in range(2):
        assert_equal(step(made), want)
    assert_block(made)


def test_under_a_trainer(tmp_path):
    compiled = dict(torch_compile=True, torch_compile_backend="eager")
    want = training.train(training.sft(training.ours(), tmp_path))
    made = training.ours()
    training.assert_same_run(training.train(training.sft(made, tmp_path, **compiled)), want)
    training.assert_ran_fast(made)


def test_models_of_other_families():
    """Their single LoRA layers are opaque steps between compiled ones."""
    made = fastlm.patch_model(
        tiny.with_lora(tiny.model("olmo", attention="sdpa", num_hidden_layers=1), targets=tiny.LINEAR)
    )
    want = step(made)
    compiled = torch.compile(made, backend="eager")
    for _ in range(2):
        got = step(compiled)
        assert all(tiny.relative(a, b) <= 1e-5 for a, b in zip(got, want, strict=True))


def test_compilers_that_break_no_graph_are_told_what_to_do():
    made = ours()
    for part in (made, made.get_base_model().model.layers[0]):
        with pytest.raises(RuntimeError, match=r"fastlm\.revert\(model\) first, or compile with fullgraph=False"):
            torch.compile(part, backend="eager", fullgraph=True)(BATCH["input_ids"])
    for strict in (False, True):
        with pytest.raises(RuntimeError, match=r"fastlm\.revert\(model\) first"):
            torch.export.export(made, (), kwargs=dict(input_ids=BATCH["input_ids"]), strict=strict)
    fastlm.revert(made)
    torch.compiler.reset()
    compiled = torch.compile(made, backend="eager", fullgraph=True)
    assert all(tiny.relative(a, b) <= 1e-5 for a, b in zip(step(compiled), step(made), strict=True))
