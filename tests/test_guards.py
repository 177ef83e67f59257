"""Steps that are not finite, tokens, disks, second runs and reporting: what must not harm a run, and what must not leave it."""

import errno
import logging
import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path

import checkpoint_worker
import pytest
import tiny
import torch
import training
import transformers
import trl

import fastlm
from fastlm import FastLanguageModel, checkpoints, guards, output, steps

TO_THE_BIT = 0.0
NOT_FINITE = {"nan": float("nan"), "inf": float("inf")}


@pytest.fixture(autouse=True)
def handlers():
    """A plain trainer that an error ends leaves its signal handlers; the next test begins without them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def make(folder, plain=False, callbacks=None, **args):
    """A trainer of a patched tiny model that saves nothing unless args say so."""
    model = fastlm.patch_model(tiny.with_lora(tiny.model("llama", attention="sdpa")))
    settings = training.settings(folder, **args)
    named = dict(processing_class=training.tokenizer(), train_dataset=training.rows())
    if plain:
        ours = fastlm.callbacks() if callbacks is None else callbacks
        return trl.SFTTrainer(model=model, args=trl.SFTConfig(**settings), callbacks=ours, **named)
    return FastLanguageModel.get_trainer(model, args=settings, callbacks=callbacks, **named)


def both(test):
    return pytest.mark.parametrize("plain", [False, True], ids=["get_trainer", "callbacks"])(test)


# --- steps that are not finite ---


def poison(trainer, value: float, steps: tuple[int, ...], part: str = "layers.1.mlp.up_proj") -> str:
    """Make one gradient not finite in these steps (counted from 1); returns the parameter's name."""
    name, p = next((name, p) for name, p in trainer.model.named_parameters() if part in name and p.requires_grad)

    def replace(gradient):
        if trainer.state.global_step + 1 not in steps:
            return gradient
        poisoned = gradient.clone()
        poisoned.view(-1)[0] = value
        return poisoned

    p.register_hook(replace)
    return name


@both
@pytest.mark.parametrize("value", list(NOT_FINITE))
@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_a_step_that_is_not_finite_is_skipped_and_named(tmp_path, caplog, plain, value, clip):
    """The weights are those of a run that has zeros for gradients in this step, and never saw another learning rate."""
    args = dict(max_steps=4, max_grad_norm=clip, optim="sgd", learning_rate=0.1)
    trainer = make(tmp_path / "ours", plain, **args)
    name = poison(trainer, NOT_FINITE[value], (2,))
    trainer.train()
    want = make(tmp_path / "want", plain, **args)
    for p in want.model.parameters():
        if p.requires_grad:
            p.register_hook(lambda g: g * 0 if want.state.global_step == 1 else g)
    want.train()
    training.assert_same_weights(training.trained(trainer.model), training.trained(want.model), TO_THE_BIT)
    (guard,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, guards.FiniteSteps)]
    assert guard.n_skipped == 1 and "1 of 4 steps were skipped" in caplog.text
    told = [record.message for record in caplog.records if "is skipped" in record.message]
    assert len(told) == 1 and told[0].startswith("step 2 is skipped: the gradient of ")
    # a plain trainer has clipped before anybody can look, and that spreads all but an Inf whose norm is known
    if not plain:
        assert f"the gradient of {name} is not finite, the first of 1 among" in told[0]
    elif value == "inf" and clip:
        assert name in told[0]


@both
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "adafactor", "rmsprop"])
def test_every_optimizer_skips(tmp_path, plain, optim):
    trainer = make(tmp_path, plain, max_steps=1, optim=optim)
    before = training.trained(trainer.model)
    poison(trainer, float("nan"), (1,))
    trainer.train()
    training.assert_same_weights(training.trained(trainer.model), before, TO_THE_BIT)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_8bit"])
@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_a_step_that_clips_in_the_optimizer_skips_and_names(tmp_path, caplog, monkeypatch, clip, optim):
    """Where one norm serves the clip, the log and the look at what is finite."""
    monkeypatch.setattr(steps, "_DEVICES", ("cpu",))
    trainer = make(tmp_path, max_steps=3, optim=optim, max_grad_norm=clip)
    name = poison(trainer, float("nan"), (2,))
    before = []
    trainer.add_callback(At(1, lambda: before.append(training.trained(trainer.model))))
    trainer.add_callback(
        At(2, lambda: training.assert_same_weights(training.trained(trainer.model), before[0], TO_THE_BIT))
    )
    trainer.train()
    assert trainer.clips_in_step and len(before) == 1
    assert f"step 2 is skipped: the gradient of {name} is not finite, the first of 1 among" in caplog.text
    after = training.trained(trainer.model)
    assert all(p.isfinite().all() for p in after.values()) and any(
        not torch.equal(after[n], before[0][n]) for n in after
    )


@both
def test_a_run_that_stays_not_finite_ends(tmp_path, caplog, plain):
    given = fastlm.callbacks(max_skipped_steps=3)
    trainer = make(tmp_path, plain, given, max_steps=50)
    poison(trainer, float("nan"), (2, 3, *range(5, 60)), part="layers.0.self_attn.q_proj")
    with pytest.raises(FloatingPointError) as caught:
        trainer.train()
    assert "3 steps in a row were not finite, the last of them step 7: the gradient of " in str(caught.value)
    assert "those of step 4" in str(caught.value) and trainer.state.global_step == 6
    assert plain or "layers.0.self_attn.q_proj" in str(caught.value)
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_a_loss_that_is_not_finite_is_enough(tmp_path, caplog):
    """Of any part of a step, with gradients that are fine."""
    trainer = make(tmp_path, max_steps=2, gradient_accumulation_steps=2, per_device_train_batch_size=1)
    before, compute, calls = training.trained(trainer.model), trainer.compute_loss, []

    def compute_loss(*args, **kwargs):
        loss = compute(*args, **kwargs)
        calls.append(loss.item())
        return loss + float("inf") if len(calls) in (1, 4) else loss

    trainer.compute_loss = compute_loss
    trainer.train()
    assert [f"step {step} is skipped: the loss is not finite" in caplog.text for step in (1, 2)] == [True, True]
    training.assert_same_weights(training.trained(trainer.model), before, TO_THE_BIT)


def test_fp16_leaves_overflows_to_the_gradient_scaler():
    model = torch.nn.Linear(2, 2)
    model.weight.grad = torch.full((2, 2), float("inf"))
    guard = guards.FiniteSteps()
    args, state = transformers.TrainingArguments("unused", use_cpu=True), transformers.TrainerState()
    args.fp16 = True
    guard.on_pre_optimizer_step(args, state, None, model=model)
    guard.look(model, has_scaler=True)
    guard.on_pre_optimizer_step(args, state, None, model=model)
    assert model.weight.grad is not None and guard.n_skipped == 0
    guard.add_loss(torch.tensor(float("nan")))
    guard.look(model, has_scaler=True)
    guard.on_pre_optimizer_step(args, state, None, model=model)
    assert model.weight.grad is None and guard.n_skipped == 1


def test_one_host_read_a_step():
    model = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(4)])
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    guard, reads = guards.FiniteSteps(), []

    class Counts(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
                reads.append(function)
            return function(*args, **kwargs or {})

    with Counts():
        for _ in range(3):
            guard.add_loss(torch.tensor(1.0))
        guard.look(model, has_scaler=False)
        guard.on_pre_optimizer_step(None, None, None, model=model)
    assert len(reads) == 1 and guard.n_skipped == 0


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, None, "3"])
def test_callbacks_refuse_a_count_that_is_none(wrong):
    with pytest.raises(ValueError, match="max_skipped_steps must be an integer of 1 or more, got"):
        fastlm.callbacks(max_skipped_steps=wrong)


def test_get_trainer_takes_callbacks_beside_its_own(tmp_path):
    class Mine(transformers.TrainerCallback):
        pass

    kinds = [type(c).__name__ for c in guards.for_whole_checkpoints([Mine(), *fastlm.callbacks(3)])]
    assert kinds == ["Mine", "StopRequests", "FiniteSteps", "SecretToken", "OutputFolder", "Leave"]
    kinds = [type(c).__name__ for c in make(tmp_path, callbacks=[Mine]).callback_handler.callbacks]
    ours = ["FiniteSteps", "SecretToken", "OutputFolder", "Leave"]
    assert kinds[-7:] == ["Mine", *ours, "PrinterCallback", "LeaveNoTrace"]
    assert kinds.count("StopRequests") == 1 and "MarkedCheckpoints" not in kinds


# --- tokens ---

TOKEN = "hf_SECRETSECRETSECRETSECRETSECRETSEC"


@both
def test_the_hub_token_is_in_no_file_and_no_log(tmp_path, caplog, capfd, plain):
    with caplog.at_level(logging.DEBUG):
        trainer = make(tmp_path, plain, save_strategy="steps", save_steps=1, max_steps=2, hub_token=TOKEN)
        trainer.train()
        trainer.save_model(str(tmp_path / "saved"))
        trainer.create_model_card(model_name="mine")
        logging.getLogger("fastlm").info("%r %s", trainer.args, trainer.args.to_json_string())
    # it works all the same
    assert trainer.args.hub_token == TOKEN and f"Bearer {trainer.args.hub_token}" == f"Bearer {TOKEN}"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"training_args.bin", "README.md", "trainer_state.json"} <= {path.name for path in files}
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]
    out, err = capfd.readouterr()
    assert TOKEN not in caplog.text + out + err
    loaded = torch.load(tmp_path / "saved" / "training_args.bin", weights_only=False)
    assert type(loaded) is trl.SFTConfig and loaded.hub_token is None and loaded.max_steps == 2
    assert TOKEN not in repr(trainer.args.hub_token) and pickle.loads(pickle.dumps(trainer.args.hub_token)) is None


# --- disks ---


def saving(folder, plain=False, **args):
    return make(folder, plain, **{"save_strategy": "steps", "save_steps": 2, "max_steps": 6, **args})


class FullDisk:
    """From now on /dev/full stands for what torch or safetensors write under a name: the kernel says ENOSPC."""

    def __init__(self, monkeypatch, name: str) -> None:
        save = torch.save

        def to_full(content, path, *args, **kwargs):
            if not str(path).endswith(name):
                return save(content, path, *args, **kwargs)
            with open(path, "wb") as file:
                file.write(b"half of it")
            return save(content, "/dev/full", *args, **kwargs)

        monkeypatch.setattr(torch, "save", to_full)


@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state.pth"])
def test_a_disk_that_fills_up_is_an_error_with_numbers_and_the_earlier_checkpoint_resumes(tmp_path, name):
    with pytest.MonkeyPatch.context() as patched:
        trainer = saving(tmp_path / "run")
        trainer.add_callback(At(4, lambda: FullDisk(patched, name)))
        with pytest.raises(OSError) as caught:
            trainer.train()
    said = str(caught.value)
    assert caught.value.errno == errno.ENOSPC and str(tmp_path / "run" / "checkpoint-4") in said
    # two moments of float32 beside each trained weight
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    needed = output.checkpoint_bytes(trainer.model, trainer.args)
    said_bytes = int(re.search(r"it needs about ([\d,]+) bytes, [\d,]+ are free", said)[1].replace(",", ""))
    assert needed == 3 * 4 * trained and needed <= said_bytes < 3 * needed
    assert sorted(path.name for path in (tmp_path / "run").glob("*checkpoint-*")) == ["checkpoint-2"]
    again = saving(tmp_path / "run")
    again.train(resume_from_checkpoint=True)
    whole = saving(tmp_path / "whole")
    whole.train()
    training.assert_same_weights(training.trained(again.model), training.trained(whole.model), TO_THE_BIT)


class At(transformers.TrainerCallback):
    """Does something once, at the end of a step."""

    def __init__(self, step, action) -> None:
        self.step, self.action = step, action

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.action()


def test_other_errors_of_a_save_stay_what_they_are(tmp_path):
    trainer = saving(tmp_path)
    trainer.add_callback(At(2, lambda: setattr(trainer, "save_model", lambda *a, **k: 1 / 0)))
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert not list(tmp_path.glob("*checkpoint-*"))


def test_a_save_into_a_folder_that_is_gone_is_told_of_too(tmp_path):
    final = tmp_path / "gone" / "run" / "checkpoint-4"
    said = output.save_error(FileNotFoundError(errno.ENOENT, "it is gone"), str(final), written=5, needed=7)
    assert said.errno == errno.ENOENT and f"{final} could not be saved: it needs about 7 bytes" in str(said)
    assert output.save_error(RuntimeError("CUDA out of memory"), str(final), written=5, needed=7) is None


@both
def test_a_disk_that_is_too_small_is_told_of_before_the_first_step(tmp_path, monkeypatch, caplog, plain):
    trainer = saving(tmp_path, plain, max_steps=1)
    trainer.train()
    assert "a checkpoint needs about" not in caplog.text
    needed = output.checkpoint_bytes(trainer.model, trainer.args)
    monkeypatch.setattr(output, "free_bytes", lambda folder: needed - 1)
    again = saving(tmp_path, plain, max_steps=1)
    again.add_callback(At(1, lambda: logging.getLogger("fastlm").warning("the first step")))
    again.train()
    text = caplog.text
    assert f"a checkpoint needs about {needed:,} bytes, {needed - 1:,} are free" in text
    assert text.index("a checkpoint needs") < text.index("the first step")


def test_what_a_checkpoint_takes_is_estimated_from_what_is_trained():
    model, args = tiny.model("llama"), transformers.TrainingArguments("unused", use_cpu=True)
    weights = sum(p.numel() for p in model.parameters())
    assert output.checkpoint_bytes(model, args) == 12 * weights
    args.optim = "adamw_bnb_8bit"
    assert output.checkpoint_bytes(model, args) == 6 * weights
    args.save_only_model = True
    assert output.checkpoint_bytes(model, args) == 4 * weights


@both
def test_a_folder_that_cannot_be_written_is_an_error_before_the_first_step(tmp_path, plain):
    """A folder in the place of the lock, for root may write anywhere else."""
    trainer = saving(tmp_path, plain)
    (tmp_path / output.LOCK).mkdir()
    with pytest.raises(OSError, match="cannot be written, so no checkpoint could be saved") as caught:
        trainer.train()
    assert str(tmp_path) in str(caught.value) and trainer.state.global_step == 0
    make(tmp_path, plain, max_steps=1).train()


# --- two runs ---

HOLDS = """
import sys, filelock
with filelock.FileLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@both
def test_a_second_run_into_the_same_folder_is_refused(tmp_path, plain):
    command = [sys.executable, "-c", HOLDS, str(tmp_path / output.LOCK)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "held\n"
        trainer = saving(tmp_path, plain)
        with pytest.raises(RuntimeError, match=f"another run trains into {tmp_path}"):
            trainer.train()
        assert trainer.state.global_step == 0
    finally:
        other.kill()
        other.wait()
    # a run that is killed leaves its file, and no lock
    trainer.train()
    assert trainer.state.global_step == 6


@both
def test_after_an_error_the_folder_is_free_for_the_next_run_of_the_process(tmp_path, plain):
    trainer = saving(tmp_path, plain)
    trainer.add_callback(At(3, lambda: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    saving(tmp_path, plain).train(resume_from_checkpoint=True)


def test_other_callbacks_may_end_the_run(tmp_path):
    trainer = make(tmp_path, callbacks=[At(1, lambda: 1 / 0)])
    with pytest.raises(ZeroDivisionError):
        trainer.train()


# --- checkpoints of a plain trainer ---


def checkpoint_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*checkpoint-*"))


def test_a_plain_trainers_checkpoints_are_marked_then_listed(tmp_path, monkeypatch):
    seen, write = [], transformers.TrainerState.save_to_json

    def save_to_json(state, path):
        seen.append((Path(path).parent / checkpoints.MARK).exists())
        write(state, path)

    monkeypatch.setattr(transformers.TrainerState, "save_to_json", save_to_json)
    saving(tmp_path, plain=True).train()
    assert seen == [True] * 3 and checkpoint_names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    for name in checkpoint_names(tmp_path):
        assert not (tmp_path / name / checkpoints.MARK).exists() and (tmp_path / name / checkpoints.MANIFEST).exists()
        checkpoints.verify(str(tmp_path / name))
    checkpoint_worker.flip_a_bit(tmp_path / "checkpoint-6" / "optimizer.pt")
    assert checkpoints.newest_whole(str(tmp_path)) == str(tmp_path / "checkpoint-4")


def test_a_plain_trainers_half_checkpoint_steps_aside_and_others_stay(tmp_path, caplog):
    saving(tmp_path, plain=True).train()
    half, never = tmp_path / "checkpoint-6", tmp_path / "checkpoint-4"
    checkpoints.mark(str(half))
    (half / checkpoints.MANIFEST).unlink()
    (half / checkpoints.TRAINER_STATE).unlink()
    (never / checkpoints.MANIFEST).unlink()
    checkpoints.mark(str(tmp_path / "checkpoint-8"))
    # saved to its end, and killed before the mark was off
    checkpoints.mark(str(tmp_path / "checkpoint-2"))
    trainer = saving(tmp_path, plain=True)
    names = [".checkpoint-6.damaged", ".checkpoint-8.damaged", "checkpoint-2", "checkpoint-4"]
    assert checkpoint_names(tmp_path) == names and not (tmp_path / "checkpoint-2" / checkpoints.MARK).exists()
    assert "checkpoint-6 was not saved to its end and is renamed to .checkpoint-6.damaged" in caplog.text
    trainer.train(resume_from_checkpoint=True)
    whole = saving(tmp_path / "whole", plain=True)
    whole.train()
    training.assert_same_weights(training.trained(trainer.model), training.trained(whole.model), TO_THE_BIT)


def test_a_plain_trainer_that_keeps_the_best_leaves_no_empty_folder(tmp_path):
    """A checkpoint is marked before it is known whether the evaluation is the best one."""
    trainer = checkpoint_worker.make(
        tmp_path, plain=True, save_strategy="best", eval_strategy="steps", eval_steps=1, metric_for_best_model="loss",
        greater_is_better=True,
    )  # fmt: skip
    for callback in fastlm.callbacks():
        trainer.add_callback(callback)
    trainer.train()
    best = f"checkpoint-{trainer.state.best_global_step}"
    assert best in checkpoint_names(tmp_path) and f"checkpoint-{trainer.state.global_step}" not in checkpoint_names(
        tmp_path
    )
    for name in checkpoint_names(tmp_path):
        assert (tmp_path / name / checkpoints.MANIFEST).exists() and not (tmp_path / name / checkpoints.MARK).exists()


def test_the_best_checkpoint_is_verified_before_it_is_loaded(tmp_path):
    trainer = checkpoint_worker.make(
        tmp_path, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True, metric_for_best_model="eval_loss",
        greater_is_better=True,
    )  # fmt: skip
    damaged = tmp_path / "checkpoint-2" / "adapter_model.safetensors"
    trainer.add_callback(At(5, lambda: checkpoint_worker.flip_a_bit(damaged)))
    with pytest.raises(ValueError, match="its bytes are not those that were saved") as caught:
        trainer.train()
    assert str(damaged) in str(caught.value)
