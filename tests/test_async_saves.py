"""Checkpoints that get their names while the training goes on: the same files and the same run, whole or not there at all."""

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import checkpoint_worker
import pytest
import torch
import training
import transformers
from test_distributed import ROOT

from fastlm import checkpoints, output

TO_THE_BIT = 0.0
RECOUNTED = ("num_tokens",)


class At(transformers.TrainerCallback):
    """Calls a function at the end of a step, before it is saved."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.action()


def saves(folder: Path) -> dict[str, dict]:
    return {path.name: checkpoints.manifest(str(path)) for path in folder.glob("checkpoint-*")}


@pytest.mark.parametrize("limit", [None, 1])
def test_not_a_bit_is_different(tmp_path, limit):
    """Same log, weights and files: every byte that a run in this folder writes, and the rotation."""
    logs, weights, files = [], [], []
    for later in (False, True):
        trainer = checkpoint_worker.make(tmp_path / "run", save_total_limit=limit, async_save=later)
        logs.append(training.train(trainer))
        weights.append(training.trained(trainer.model))
        files.append(saves(tmp_path / "run"))
        for path in (tmp_path / "run").glob("checkpoint-*"):
            checkpoints.verify(str(path))
        shutil.rmtree(tmp_path / "run")
    training.assert_same_run(logs[1], logs[0], TO_THE_BIT)
    training.assert_same_weights(weights[1], weights[0], TO_THE_BIT)
    assert (
        set(files[1])
        == set(files[0])
        == ({f"checkpoint-{n}" for n in (2, 4, 6)} if limit is None else {"checkpoint-6"})
    )
    for name, listed in files[0].items():
        # the state tells of times
        for one in (listed, files[1][name]):
            one["files"].pop(checkpoints.TRAINER_STATE)
        assert files[1][name] == listed


def test_the_training_does_not_wait_and_the_next_save_does(tmp_path, monkeypatch, caplog):
    """The first save ends only when step 3 has been taken."""
    taken, seen = threading.Event(), []
    publish = checkpoints.publish

    def waits(part, final):
        seen.append((os.path.basename(final), threading.current_thread().name, taken.wait(60)))
        return publish(part, final)

    monkeypatch.setattr(checkpoints, "publish", waits)
    trainer = checkpoint_worker.make(tmp_path, async_save=True)
    names = []
    trainer.add_callback(
        At(3, lambda: (names.extend(path.name for path in tmp_path.glob("checkpoint-*")), taken.set()))
    )
    with caplog.at_level(logging.INFO, "fastlm"):
        trainer.train()
    assert names == []
    # the last one is waited for in any case
    assert seen == [
        (f"checkpoint-{n}", name, True) for n, name in ((2, "fastlm-save"), (4, "fastlm-save"), (6, "MainThread"))
    ]
    assert set(saves(tmp_path)) == {"checkpoint-2", "checkpoint-4", "checkpoint-6"}
    assert caplog.text.count("bytes saved in") == 3


def fail_once(monkeypatch, error):
    publish, failed = checkpoints.publish, []

    def fails(part, final):
        if not failed:
            failed.append(final)
            raise error
        return publish(part, final)

    monkeypatch.setattr(checkpoints, "publish", fails)


@pytest.mark.parametrize("steps", [6, 3], ids=["next-save", "end"])
def test_a_full_disk_is_an_error_of_the_next_save_or_the_end(tmp_path, monkeypatch, steps):
    """Which names the checkpoint that was lost; nothing is left of it, and the output folder is free again."""
    fail_once(monkeypatch, OSError(errno.ENOSPC, "No space left on device"))
    trainer = checkpoint_worker.make(tmp_path, async_save=True, max_steps=steps)
    if steps == 3:
        trainer.add_callback(NoLastSave())
    with pytest.raises(OSError) as caught:
        trainer.train()
    assert f"the checkpoint {tmp_path / 'checkpoint-2'} could not be saved" in str(caught.value)
    assert caught.value.errno == errno.ENOSPC and trainer.state.global_step == min(steps, 4)
    assert not list(tmp_path.glob("*checkpoint-*"))
    trainer.train()
    assert f"checkpoint-{steps if steps == 6 else 2}" in saves(tmp_path)


class NoLastSave(transformers.TrainerCallback):
    """Trainer saves the last step too, unless a callback says no."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            control.should_save = False


def test_an_error_of_the_training_is_told_first_and_the_save_ends(tmp_path, monkeypatch, caplog):
    trainer = checkpoint_worker.make(tmp_path, async_save=True)
    trainer.add_callback(At(3, lambda: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    checkpoints.verify(str(tmp_path / "checkpoint-2"))
    fail_once(monkeypatch, OSError(errno.ENOSPC, "No space left on device"))
    other = checkpoint_worker.make(tmp_path / "other", async_save=True)
    other.add_callback(At(3, lambda: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        other.train()
    assert "could not be saved" in caplog.text


@pytest.mark.parametrize("step", [3, 4])
def test_a_run_that_is_terminated_waits_for_its_save(tmp_path, step):
    want = checkpoint_worker.make(tmp_path / "whole")
    want.train()
    trainer = checkpoint_worker.make(tmp_path / "run", async_save=True)
    trainer.add_callback(At(step - 1, lambda: signal.raise_signal(signal.SIGTERM)))
    with pytest.raises(SystemExit) as caught:
        trainer.train()
    assert caught.value.code == 143
    checkpoints.verify(str(tmp_path / "run" / f"checkpoint-{step}"))
    again = checkpoint_worker.make(tmp_path / "run", async_save=True)
    again.train(resume_from_checkpoint=True)
    training.assert_same_run(training.logged(again), training.logged(want), TO_THE_BIT, but=RECOUNTED)
    training.assert_same_weights(training.trained(again.model), training.trained(want.model), TO_THE_BIT)


def test_the_best_checkpoint_is_there_when_it_is_loaded(tmp_path):
    args = dict(
        eval_strategy="steps", eval_steps=2, save_total_limit=1, load_best_model_at_end=True, metric_for_best_model="eval_loss",
        greater_is_better=True,
    )  # fmt: skip
    left = {}
    for later in (False, True):
        folder = tmp_path / str(later)
        trainer = checkpoint_worker.make(folder, async_save=later, **args)
        trainer.train()
        left[later] = sorted(path.name for path in folder.iterdir()), Path(trainer.state.best_model_checkpoint).name
    assert left[True] == left[False] and left[True][1] == "checkpoint-2"


def test_a_save_is_waited_for_once_and_another_one_is_refused():
    later, go = output.LaterSaves(), threading.Event()
    later.wait()
    later.start(go.wait)
    with pytest.raises(RuntimeError, match="was not waited for"):
        later.start(go.wait)
    go.set()
    later.wait()
    later.start(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        later.wait()
    later.wait()
    later.start(lambda: 1 / 0)
    later.settle()


@pytest.mark.parametrize("wrong", [1, "yes", None])
def test_the_option_is_true_or_false(tmp_path, wrong):
    with pytest.raises(TypeError, match="async_save must be True or False"):
        checkpoint_worker.make(tmp_path, async_save=wrong)


def test_killed_runs_go_on(tmp_path):
    """At moments of a save that goes on beside the training."""
    paths = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, str(ROOT / "tests" / "checkpoint_worker.py"), str(tmp_path), "later"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-6000:]
    want = torch.load(tmp_path / "result.pt", weights_only=True)
    for moment in checkpoint_worker.LATER_MOMENTS:
        got = torch.load(tmp_path / moment / "result.pt", weights_only=True)
        assert got["resumed"] == f"checkpoint-{checkpoint_worker.MOMENTS[moment][1]}", moment
        training.assert_same_run(got["log"], want["log"], TO_THE_BIT, but=RECOUNTED)
        training.assert_same_weights(got["weights"], want["weights"], TO_THE_BIT)
        assert {path.name for path in (tmp_path / moment).glob("*checkpoint-*")} == {"checkpoint-6"}
