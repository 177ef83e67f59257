"""What get_trainer leaves on the device between two logs: metrics, the filter of losses, the skip of a step; and short walks."""

import copy
import itertools
import math
import pickle

import pytest
import tiny
import torch
import training
import trl

import fastlm
from fastlm import FastLanguageModel, batches, optimizers, steps
from fastlm.optimizers import FusedAdamW

TO_THE_BIT = 0.0
READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)


def get_trainer(model, folder, data=None, **args):
    """get_trainer's trainer, with arguments of its own in `trainer`."""
    own = args.pop("trainer", {})
    named = dict(processing_class=training.tokenizer(), train_dataset=training.rows() if data is None else data)
    return FastLanguageModel.get_trainer(model, args=trl.SFTConfig(**training.settings(folder, **args)), **named, **own)


LOOPS = {
    "every-step": dict(max_steps=3),
    "every-third": dict(max_steps=7, logging_steps=3),
    "accumulated": dict(max_steps=4, logging_steps=2, gradient_accumulation_steps=2),
    "padding-free": dict(max_steps=3, logging_steps=2, padding_free=True, packing=True, max_length=32),
    "evaluated": dict(max_steps=6, logging_steps=3, eval_strategy="steps", eval_steps=2),
    "dft": dict(max_steps=3, logging_steps=2, loss_type="dft"),
    "equal-lengths": dict(max_steps=6, logging_steps=3, eval_strategy="steps", eval_steps=2),
    "equal-lengths-dft": dict(max_steps=3, logging_steps=2, loss_type="dft"),
    "stream": dict(max_steps=3, logging_steps=2),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_what_is_logged_is_what_a_plain_trainer_logs(tmp_path, loop):
    """To the bit: losses, gradient norms, entropy, accuracy, tokens, and the weights."""
    lengths = (16,) * 8 if loop.startswith("equal") else training.LENGTHS
    data = training.rows(lengths).to_iterable_dataset() if loop == "stream" else training.rows(lengths)
    trainer = dict(eval_dataset=training.rows(lengths, seed=1)) if "eval_steps" in LOOPS[loop] else {}
    runs = []
    for make in (get_trainer, training.sft):
        model = training.ours()
        made = make(model, tmp_path, data, trainer=trainer, **LOOPS[loop])
        runs.append((training.train(made), training.trained(model)))
    training.assert_same_run(runs[0][0], runs[1][0], TO_THE_BIT)
    training.assert_same_weights(runs[0][1], runs[1][1], TO_THE_BIT)
    assert all(isinstance(value, (int, float)) for entry in runs[0][0] for value in entry.values())


@pytest.mark.parametrize("logging_nan_inf_filter", [True, False])
def test_losses_that_are_not_finite_are_filtered_as_the_trainer_filters_them(tmp_path, logging_nan_inf_filter):
    """On the device, for the log alone; the step is skipped all the same, and the arguments stay the user's, on disk too."""
    logged, args = [], dict(max_steps=6, logging_steps=3, logging_nan_inf_filter=logging_nan_inf_filter)
    for make in (get_trainer, training.sft):
        own = {} if make is get_trainer else dict(callbacks=fastlm.callbacks())
        trainer = make(training.ours(), tmp_path, trainer=own, **args)
        compute, calls = trainer.compute_loss, []

        def compute_loss(*args, compute=compute, calls=calls, **kwargs):
            loss = compute(*args, **kwargs)
            calls.append(loss.detach())
            return loss * float("nan") if len(calls) in (2, 5) else loss

        trainer.compute_loss = compute_loss
        logged.append([entry["loss"] for entry in training.train(trainer)])
        trainer.save_model(str(tmp_path / "saved"))
        saved = torch.load(tmp_path / "saved" / "training_args.bin", weights_only=False)
        assert trainer.args.logging_nan_inf_filter is saved.logging_nan_inf_filter is logging_nan_inf_filter
    assert logged[0] == logged[1] if logging_nan_inf_filter else all(map(math.isnan, logged[0] + logged[1]))


def test_arguments_saved_in_the_middle_of_a_run_are_the_users(tmp_path):
    trainer = get_trainer(training.ours(), tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    trainer.train()
    saved = torch.load(tmp_path / "checkpoint-1" / "training_args.bin", weights_only=False)
    assert saved.logging_nan_inf_filter is True


class Reads(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts what would wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.n += function in READS
        return function(*args, **kwargs or {})


def test_nothing_is_read_from_the_device_between_two_logs(tmp_path, monkeypatch):
    """But where samples lie and how many rows have a label: two reads of the model's, which on a GPU nobody waits for."""
    monkeypatch.setattr(steps, "_DEVICES", ("cpu",))
    monkeypatch.setattr(optimizers.Verdict, "is_taken", lambda self: True)
    reads, n = [], []
    trainer = get_trainer(training.ours(), tmp_path, max_steps=4, logging_steps=100, packing=True, max_length=32)
    step, prepare = trainer.training_step, trainer._get_grad_norm

    def training_step(*args, **kwargs):
        reads.append(Reads())
        reads[-1].__enter__()
        return step(*args, **kwargs)

    def after(*args, **kwargs):
        norm = prepare(*args, **kwargs)
        reads[-1].__exit__(None, None, None)
        n.append(reads[-1].n)
        return norm

    monkeypatch.setattr(trainer, "training_step", training_step)
    monkeypatch.setattr(trainer, "_get_grad_norm", after)
    trainer.train()
    assert n == [2] * 4


@pytest.mark.parametrize("state_dtype", [None, torch.uint8], ids=["own", "8bit"])
@pytest.mark.parametrize("param_dtype", [torch.float32, torch.float64], ids=["kernel", "torch"])
def test_a_step_that_is_not_taken_leaves_everything(path, state_dtype, param_dtype):
    """Weights, moments and numbers of steps are those of a run without it, on both paths; float64 is torch's."""
    runs = []
    for verdicts in ((True, False, True, False, False, True), (True, True, True)):
        generator = torch.Generator().manual_seed(3)
        params = [torch.nn.Parameter(torch.randn(n, generator=generator, dtype=param_dtype)) for n in (5000, 40)]
        optimizer, taken = FusedAdamW(params, lr=1e-2, state_dtype=state_dtype), []
        for verdict in verdicts:
            # the gradients of a step that is taken, whatever was between
            generator = torch.Generator().manual_seed(50 + sum(taken))
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator, dtype=param_dtype)
                if not verdict:
                    p.grad[7] = float("nan")
            norm = optimizer.clip_grad_norm(1.0)
            told = optimizer.step_only_if(norm.isfinite())
            optimizer.step()
            assert told.is_taken() is verdict and told.not_finite() == (set() if verdict else set(params))
            taken.append(verdict)
        runs.append((params, optimizer.state_dict()["state"]))
    for a, b in zip(*(params for params, _ in runs), strict=True):
        assert torch.equal(a, b)
    flat = [torch.utils._pytree.tree_flatten(state)[0] for _, state in runs]
    assert len(flat[0]) == len(flat[1])
    for a, b in zip(*flat, strict=True):
        assert torch.equal(a, b) if torch.is_tensor(a) else a == b


@pytest.mark.gpu
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_8bit"])
def test_a_step_that_is_not_finite_is_skipped_on_the_gpu_and_named(tmp_path, caplog, optim):
    model = training.ours().to("cuda")
    trainer = get_trainer(model, tmp_path, optim=optim, use_cpu=False, max_steps=3)
    name, p = next((n, p) for n, p in model.named_parameters() if p.requires_grad and "up_proj" in n)
    p.register_hook(lambda g: g * float("nan") if trainer.state.global_step == 1 else g)
    before = []
    callback = type("Look", (fastlm.guards.TrainerCallback,), {})()
    callback.on_step_end = lambda args, state, control, **kwargs: before.append(training.trained(model))
    trainer.add_callback(callback)
    trainer.train()
    training.assert_same_weights(before[1], before[0], TO_THE_BIT)
    assert any(not torch.equal(before[2][n], before[1][n]) for n in before[1])
    assert f"step 2 is skipped: the gradient of {name} is not finite, the first of 1 among" in caplog.text
    assert {state["step"] for state in trainer.optimizer.optimizer.state.values()} == {2}


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [dict(packing=True, max_length=32), dict()], ids=["packed", "equal-lengths"])
def test_a_step_of_the_trainer_waits_for_nothing(tmp_path, rows):
    """From the forward to the end of the step, nothing logged: torch's own watch finds no wait."""
    model, data = training.ours().to("cuda"), None if rows else training.rows((16,) * 8)
    trainer = get_trainer(model, tmp_path, data, use_cpu=False, max_steps=5, logging_steps=100, **rows)
    step = trainer.training_step

    class Watch(fastlm.guards.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            torch.cuda.set_sync_debug_mode("default")

    def training_step(*args, **kwargs):
        torch.cuda.set_sync_debug_mode("error")
        return step(*args, **kwargs)

    trainer.training_step = training_step
    trainer.add_callback(Watch())
    try:
        trainer.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.state.global_step == 5


def test_a_loss_of_the_users_sees_the_collators_batch(tmp_path):
    trainer = get_trainer(training.ours(), tmp_path, training.rows((16,) * 8), max_steps=1)
    compute, seen = trainer.compute_loss, []

    def compute_loss(model, inputs, **kwargs):
        seen.append(set(inputs))
        return compute(model, inputs, **kwargs)

    trainer.compute_loss = compute_loss
    trainer.train()
    assert seen == [{"input_ids", "attention_mask", "labels"}]


@pytest.mark.parametrize("name", ["padding-free", "equal-lengths", "every-step"])
def test_batches_say_what_they_are(tmp_path, name):
    lengths = (16,) * 8 if name == "equal-lengths" else training.LENGTHS
    trainer = get_trainer(
        training.ours(), tmp_path, training.rows(lengths), **(LOOPS[name] if name == "padding-free" else {})
    )
    collate = trainer.data_collator
    batch = next(iter(trainer.get_train_dataloader()))
    assert trainer.data_collator is collate
    if name == "padding-free":
        bounds = batch["cu_seq_lens_q"].tolist()
        firsts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
        assert bounds == [*firsts, batch["input_ids"].numel()] and len(bounds) > 2
        assert batch["max_length_k"] == max(b - a for a, b in itertools.pairwise(bounds))
        assert batches.pop_is_full(batch) is False
    else:
        assert batches.pop_is_full(batch) is (name == "equal-lengths") and "cu_seq_lens_q" not in batch
        assert batches.pop_is_full(batch) is False


def test_a_row_of_one_sample_is_not_called_packed():
    batch = batches.DescribedBatches(lambda rows: dict(position_ids=torch.arange(9)[None]))(None)
    assert set(batch) == {"position_ids"}
    batch = batches.DescribedBatches(lambda rows: dict(position_ids=torch.tensor([[0, 0, 1]])))(None)
    assert batch["cu_seq_lens_q"].tolist() == [0, 1, 3] and batch["max_length_q"] == 2


# --- walks ---


def test_short_walks_do_what_torch_does():
    model = tiny.with_lora(tiny.model("llama"))
    before = dict(vars(model))
    with steps.short_walks(model):
        inner = model.get_submodule("base_model.model.model.layers.0.mlp")
        model.eval()
        assert not any(module.training for module in model.modules())
        assert model.train() is model and all(module.training for module in model.modules())
        inner.eval()
        assert model.train() is model and inner.training and inner.up_proj.training
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        model.zero_grad(set_to_none=False)
        assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
        model.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    assert vars(model).keys() == before.keys()


def test_short_walks_see_what_is_put_in_later():
    """New modules, others in the place of known ones, and other parameters of known ones, as FSDP2 makes them."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Dropout()))
    with steps.short_walks(model):
        model.train()
        model.zero_grad()
        model[1].add_module("more", torch.nn.Linear(2, 2))
        model[0] = torch.nn.Linear(2, 3)
        model[1].more.weight = torch.nn.Parameter(torch.ones(2, 2))
        for module in model.modules():
            module.training = False
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        model.train()
        model.zero_grad()
        assert all(module.training for module in model.modules())
        assert all(p.grad is None for p in model.parameters())


def test_a_copy_and_a_pickle_have_torchs_own_walks():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Dropout()))
    with steps.short_walks(model):
        twin, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for other in (twin, loaded):
            other.eval()
            assert model.training and not any(module.training for module in other.modules())
            other.train()
            assert all(module.training for module in other.modules())
            for p in (*other.parameters(), *model.parameters()):
                p.grad = torch.ones_like(p)
            other.zero_grad()
            assert all(p.grad is None for p in other.parameters())
            assert all(p.grad is not None for p in model.parameters())
    assert "train" not in vars(model) and "zero_grad" not in vars(model)


def test_a_run_that_fails_leaves_no_walk_behind(tmp_path):
    trainer = get_trainer(training.ours(), tmp_path)

    def compute_loss(*args, **kwargs):
        raise RuntimeError("mine")

    trainer.compute_loss = compute_loss
    with pytest.raises(RuntimeError, match="mine"):
        trainer.train()
    assert "train" not in vars(trainer.model) and trainer.args.logging_nan_inf_filter
