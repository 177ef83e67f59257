"""FusedAdamW in get_trainer's trainer: the runs of the stock optimizers, their checkpoints, DDP, float16, and what a step costs."""

import logging

import pytest
import test_distributed
import torch
import training
import transformers
import trl

from fastlm import steps, trainers
from fastlm.optimizers import FusedAdamW


def trainer(model, folder, **args):
    """get_trainer's trainer with training.sft's arguments."""
    config = trl.SFTConfig(**training.settings(folder, **args))
    return trainers.get_trainer(model, training.rows(), config, processing_class=training.tokenizer())


@pytest.fixture
def on_any_device(monkeypatch):
    """Without a GPU get_trainer keeps torch's optimizer: here it takes ours, whose CPU path computes the same."""
    monkeypatch.setattr(steps, "_DEVICES", ("cpu", "cuda"))


ADAMS = ["adamw_torch", "adamw_torch_fused", "adamw_8bit", "adamw_bnb_8bit"]
CLIPS = {"clipped": dict(max_grad_norm=0.05), "loose": dict(max_grad_norm=1e3), "unclipped": dict(max_grad_norm=0.0)}


@pytest.mark.parametrize("optim", ADAMS)
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_run_is_that_of_the_stock_optimizer(on_any_device, tmp_path, optim, clip, accumulation):
    """Losses, gradient norms and trained weights of a plain SFTTrainer. All tensors here are too small for 8-bit moments."""
    args = dict(
        optim=optim, gradient_accumulation_steps=accumulation, weight_decay=0.1, learning_rate=1e-2, **CLIPS[clip]
    )
    model, other = training.ours(), training.ours()
    plain = training.sft(other, tmp_path, **args)
    want = training.train(plain)
    made_by_us = trainer(model, tmp_path, **args)
    got = training.train(made_by_us)
    assert isinstance(made_by_us.optimizer.optimizer, FusedAdamW)
    assert not isinstance(plain.optimizer.optimizer, FusedAdamW)
    assert made_by_us.optimizer.optimizer.is_8bit == ("8bit" in optim)
    training.assert_same_run(got, want, 1e-5)
    training.assert_same_weights(training.trained(model), training.trained(other), 1e-5)
    groups = [[(len(g["params"]), g["weight_decay"]) for g in t.optimizer.param_groups] for t in (made_by_us, plain)]
    assert groups[0] == groups[1]


def test_the_clip_changes_a_run(on_any_device, tmp_path):
    """What the comparison above rests on: with and without the clip, weights differ."""
    trained = []
    for max_grad_norm in (0.05, 0.0):
        model = training.ours()
        # the moments of Adam are blind to a factor, but not to one that changes beside eps
        trainer(model, tmp_path, max_grad_norm=max_grad_norm, adam_epsilon=1e-2, learning_rate=1e-1).train()
        trained.append(training.trained(model))
    assert any(not torch.allclose(trained[0][name], trained[1][name], rtol=1e-3) for name in trained[0])


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_8bit"])
@pytest.mark.parametrize("from_stock", [False, True], ids=["own-checkpoint", "stock-checkpoint"])
def test_resume(on_any_device, tmp_path, optim, from_stock):
    """From its own checkpoint to the bit; from one that a plain SFTTrainer wrote, to a rounding."""
    args = dict(optim=optim, max_steps=4, save_strategy="steps", save_steps=2, learning_rate=1e-2)
    whole = training.ours()
    writer = training.sft if from_stock else trainer
    writer(whole, tmp_path / "whole", **args).train()
    again = training.ours()
    resumed = trainer(again, tmp_path / "again", **args)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert isinstance(resumed.optimizer.optimizer, FusedAdamW)
    assert {state["step"] for state in resumed.optimizer.state.values()} == {4}
    training.assert_same_weights(training.trained(again), training.trained(whole), 1e-5 if from_stock else 0.0)


def test_embeddings_keep_float32_moments_as_with_bitsandbytes(on_any_device, tmp_path):
    model = training.ours(lora=False)
    made_by_us = trainer(model, tmp_path, optim="adamw_8bit", max_steps=1)
    made_by_us.train()
    table = model.get_input_embeddings().weight
    state = made_by_us.optimizer.state
    assert table.numel() >= 4096 and state[table]["state1"].dtype is torch.float32
    others = [s["state1"].dtype for p, s in state.items() if p is not table and p.numel() >= 4096]
    assert others and set(others) == {torch.uint8}


def test_the_log_says_which_optimizer_runs(tmp_path, caplog, monkeypatch):
    with caplog.at_level(logging.INFO, logger="fastlm.steps"):
        on_cpu = trainer(training.ours(), tmp_path, max_steps=1)
        on_cpu.train()
        monkeypatch.setattr(steps, "_DEVICES", ("cpu",))
        trainer(training.ours(), tmp_path, max_steps=1).train()
        trainer(training.ours(), tmp_path, optim="adamw_8bit", max_steps=1).train()
        stays = trainer(training.ours(), tmp_path, optim="sgd", max_steps=1)
        stays.train()
    assert [record.getMessage() for record in caplog.records] == [
        "optimizer: AdamW, as transformers makes it (a trained parameter is on cpu)",
        "optimizer: FusedAdamW with moments in the parameters' dtype, in place of adamw_torch_fused",
        "optimizer: FusedAdamW with 8-bit moments, in place of adamw_8bit",
        "optimizer: SGD, as transformers makes it (optim=sgd)",
    ]
    assert isinstance(on_cpu.optimizer.optimizer, torch.optim.AdamW)
    assert isinstance(stays.optimizer.optimizer, torch.optim.SGD)


def test_the_users_own_optimizer_stays(on_any_device, tmp_path):
    model = training.ours()
    config = trl.SFTConfig(**training.settings(tmp_path, max_steps=1, max_grad_norm=0.1))
    mine = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for own in (dict(optimizers=(mine, None)), dict(optimizer_cls_and_kwargs=(torch.optim.Adagrad, dict(lr=1e-3)))):
        made_by_us = trainers.get_trainer(model, training.rows(), config, processing_class=training.tokenizer(), **own)
        made_by_us.train()
        assert not isinstance(made_by_us.optimizer.optimizer, FusedAdamW)
        assert 0.0 < made_by_us.state.log_history[0]["grad_norm"] < float("inf")


def test_an_optimizer_put_in_later_is_clipped_as_ever(on_any_device, tmp_path):
    """Trained once with ours, then with another: gradients of the second are clipped in place, before its step."""
    model = training.ours()
    made_by_us = trainer(model, tmp_path, max_grad_norm=1e-3, max_steps=1)
    made_by_us.train()
    params = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in params]
    made_by_us.optimizer, made_by_us.lr_scheduler = torch.optim.SGD(params, lr=1.0), None
    made_by_us.train()
    moved = torch.nn.utils.get_total_norm([a.detach() - b for a, b in zip(params, before, strict=True)])
    assert float(moved) == pytest.approx(1e-3, rel=1e-2)


def test_the_norm_is_left_on_the_device_until_it_is_logged(on_any_device, tmp_path):
    """A callback between the clip and the step sees whole gradients; the trainer is handed a tensor, not a number."""
    seen = []

    class Look(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            seen.append(
                float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
            )

    model = training.ours()
    made_by_us = trainer(model, tmp_path, max_grad_norm=1e-3, max_steps=2)
    made_by_us.add_callback(Look())
    got = training.train(made_by_us)
    assert [entry["grad_norm"] for entry in got] == pytest.approx(seen, rel=1e-5) and min(seen) > 1e-2
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    assert isinstance(made_by_us._clip_grad_norm(model), torch.Tensor)


def test_two_processes(tmp_path):
    """Under DDP every rank clips by the norm of the averaged gradients: weights as with torch's optimizer, equal on both ranks."""
    ranks = test_distributed.run_two_processes(tmp_path, "adamw_worker.py")
    assert all(torch.equal(ranks[0]["ours"][name], ranks[1]["ours"][name]) for name in ranks[0]["ours"])
    ours, stock = ranks[0]["ours"], ranks[0]["stock"]
    assert ours["numbers"].shape == (3, 2) and ours["numbers"][:, 1].min() > 0.05
    training.assert_same_weights(ours, stock, 1e-5)


# --- on a GPU ---


def waits_and_kernels(profile, span):
    """Of what was called within the last span of this name: waits for the GPU, and kernels started."""
    events = profile.events()
    # the device has a span of this name as well
    on_host = torch.autograd.DeviceType.CPU
    within = [event.time_range for event in events if event.name == span and event.device_type == on_host][-1]
    called = [e.name for e in events if within.start <= e.time_range.start and e.time_range.end <= within.end]
    waits = [name for name in called if "Synchronize" in name]
    return waits, [name for name in called if "LaunchKernel" in name]


@pytest.mark.gpu
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_8bit"])
def test_a_step_on_the_gpu_is_a_few_launches_without_a_wait(tmp_path, monkeypatch, optim):
    """The third step of get_trainer's trainer: clip and step, after compilers and tables have been at work."""
    model = training.ours().to("cuda")
    args = dict(optim=optim, use_cpu=False, max_grad_norm=0.1, max_steps=3)
    made_by_us = trainer(model, tmp_path, **args)
    measured = []

    def spanned(name, method):
        def inside(*args, **kwargs):
            with torch.profiler.record_function(f"measured {name}"):
                return method(*args, **kwargs)

        return inside

    for name in ("clip_grad_norm", "step"):
        monkeypatch.setattr(FusedAdamW, name, spanned(name, getattr(FusedAdamW, name)))
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        got = training.train(made_by_us)
    assert isinstance(made_by_us.optimizer.optimizer, FusedAdamW)
    for name in ("clip_grad_norm", "step"):
        measured.append(waits_and_kernels(profile, f"measured {name}"))
    assert not measured[0][0] and not measured[1][0]
    # one sum of squares and one update for the adapters, one norm
    assert 3 <= len(measured[0][1]) + len(measured[1][1]) <= 4, measured
    other = training.ours().to("cuda")
    plain = training.sft(other, tmp_path, **args)
    training.assert_same_run(got, training.train(plain), 1e-4)
    training.assert_same_weights(training.trained(model), training.trained(other), 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("max_grad_norm", [0.1, 0.0])
def test_float16_training_on_the_gpu(tmp_path, max_grad_norm):
    """With accelerate's GradScaler: the same run as the stock optimizer's."""
    runs = []
    for make in (trainer, training.sft):
        model = training.ours().to("cuda")
        runs.append(training.train(make(model, tmp_path, use_cpu=False, fp16=True, max_grad_norm=max_grad_norm)))
    training.assert_same_run(runs[0], runs[1], 1e-3)
