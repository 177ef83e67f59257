"""A signal ends a training after the step in hand, whole and saved; what goes on from there ends as if nothing had happened."""

import os
import signal
import subprocess
import sys
import threading
import time

import checkpoint_worker
import pytest
import torch
import training
import transformers
from test_distributed import ROOT

import fastlm
from fastlm import checkpoints, signals

TO_THE_BIT = 0.0
RECOUNTED = ("num_tokens",)
ENDS = {signal.SIGTERM: (SystemExit, 143), signal.SIGINT: (KeyboardInterrupt, None)}


class Sends(transformers.TrainerCallback):
    """Sends this process signals in the middle of a step, as seen from the callbacks."""

    def __init__(self, step: int, *numbers: int, event: str = "on_pre_optimizer_step") -> None:
        self.step, self.numbers = step, numbers
        setattr(self, event, self.send)

    def send(self, args, state, control, **kwargs):
        if state.global_step == self.step - 1:
            for number in self.numbers:
                signal.raise_signal(number)


@pytest.fixture(autouse=True)
def handlers():
    """Whatever happens, the handlers of this process are what they were."""
    before = {number: signal.getsignal(number) for number in ENDS}
    yield before
    after = {number: signal.getsignal(number) for number in ENDS}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before


def make(folder, plain, **args):
    """A trainer that saves only when a signal asks it to, unless args say otherwise."""
    args = {"save_strategy": "no", **args}
    trainer = checkpoint_worker.make(folder, plain=plain, **args)
    if plain:
        for callback in fastlm.callbacks():
            trainer.add_callback(callback)
    return trainer


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    trainer = checkpoint_worker.make(tmp_path_factory.mktemp("whole"), save_strategy="no")
    return training.train(trainer), training.trained(trainer.model)


@pytest.mark.parametrize("number", list(ENDS), ids=lambda n: n.name)
@pytest.mark.parametrize("plain", [False, True], ids=["get_trainer", "callbacks"])
def test_a_signal_saves_and_ends_the_run_which_then_goes_on(tmp_path, caplog, undisturbed, number, plain):
    kind, code = ENDS[number]
    # on the step of an evaluation, for which there is no time
    trainer = make(tmp_path, plain, eval_strategy="steps", eval_steps=3)
    trainer.add_callback(Sends(3, number))
    with pytest.raises(kind) as caught:
        trainer.train()
    assert getattr(caught.value, "code", None) == code
    assert trainer.state.global_step == 3 and not any("eval_loss" in entry for entry in trainer.state.log_history)
    assert f"{number.name}: the step in hand is finished and saved" in caplog.text
    assert [path.name for path in tmp_path.glob("*checkpoint-*")] == ["checkpoint-3"]
    checkpoints.verify(str(tmp_path / "checkpoint-3"))
    assert (tmp_path / "checkpoint-3" / checkpoints.MANIFEST).exists()
    again = make(tmp_path, plain)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == checkpoint_worker.STEPS
    log, weights = undisturbed
    training.assert_same_run(training.logged(again), log, TO_THE_BIT, but=RECOUNTED)
    training.assert_same_weights(training.trained(again.model), weights, TO_THE_BIT)


@pytest.mark.parametrize("plain", [False, True], ids=["get_trainer", "callbacks"])
def test_a_second_signal_ends_at_once(tmp_path, plain):
    trainer = make(tmp_path, plain)
    trainer.add_callback(Sends(3, signal.SIGINT, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.state.global_step == 2 and not list(tmp_path.glob("*checkpoint-*"))


def test_with_the_best_strategy_and_one_kept_checkpoint_the_last_one_stays(tmp_path):
    trainer = make(
        tmp_path, False, save_strategy="best", eval_strategy="steps", eval_steps=1, metric_for_best_model="loss",
        greater_is_better=True, load_best_model_at_end=True, save_total_limit=1,
    )  # fmt: skip
    trainer.add_callback(Sends(3, signal.SIGTERM, event="on_prediction_step"))
    with pytest.raises(SystemExit):
        trainer.train()
    steps = {int(path.name.rpartition("-")[2]) for path in tmp_path.glob("checkpoint-*")}
    assert max(steps) == trainer.state.global_step


def test_handlers_come_back_after_every_end(tmp_path):
    """A training that ends, that fails, and that was never a training; the fixture looks at the handlers."""
    seen = []
    previous = signal.signal(signal.SIGTERM, lambda *_: seen.append("mine"))
    try:
        mine = signal.getsignal(signal.SIGTERM)
        trainer = make(tmp_path / "ends", False, max_steps=1)
        trainer.train()
        assert signal.getsignal(signal.SIGTERM) is mine
        trainer = make(tmp_path / "fails", False)
        trainer.add_callback(Fails())
        with pytest.raises(ZeroDivisionError):
            trainer.train()
        assert signal.getsignal(signal.SIGTERM) is mine
        # callbacks are not told of an error: their handlers stay, and know that nobody trains any more
        trainer = make(tmp_path / "plain", True)
        trainer.add_callback(Fails())
        with pytest.raises(ZeroDivisionError):
            trainer.train()
        signal.raise_signal(signal.SIGTERM)
        assert seen == ["mine"] and signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, previous)


class Fails(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        raise ZeroDivisionError


def test_a_training_after_one_that_failed_obeys_a_second_signal(tmp_path):
    """The handlers of the first are not taken for the user's."""
    trainer = make(tmp_path / "fails", True)
    trainer.add_callback(Fails())
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    trainer = make(tmp_path / "next", True)
    trainer.add_callback(Sends(3, signal.SIGINT, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.state.global_step == 2
    for number in ENDS:
        assert not isinstance(getattr(signal.getsignal(number), "__self__", None), signals.StopRequests)


def test_a_signal_after_the_last_step_ends_the_process_too(tmp_path):
    trainer = make(tmp_path, False, max_steps=2)
    trainer.add_callback(Sends(3, signal.SIGTERM, event="on_epoch_end"))
    with pytest.raises(SystemExit) as caught:
        trainer.train()
    assert caught.value.code == 143


def test_other_threads_train_without_handlers(tmp_path):
    before = {number: signal.getsignal(number) for number in ENDS}
    trainer = make(tmp_path, False, max_steps=1)
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()
    assert trainer.state.global_step == 1 and before == {number: signal.getsignal(number) for number in ENDS}


def test_a_forked_worker_obeys_as_it_always_did(tmp_path):
    """A worker of a data loader has this process's handlers, and must still end when it is told to."""
    requests = signals.StopRequests()
    requests.on_train_begin(transformers.TrainingArguments(str(tmp_path)), None, None)
    try:
        child = os.fork()
        if not child:
            time.sleep(30)
            os._exit(0)
        time.sleep(0.2)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    finally:
        requests.restore()


OUTSIDE = """
import sys, torch, checkpoint_worker
torch.set_num_threads(1)
trainer = checkpoint_worker.make(sys.argv[1], max_steps=10_000, save_strategy="no", logging_steps=10_000)
class Says(checkpoint_worker.transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            print("training", flush=True)
trainer.add_callback(Says())
trainer.train()
"""


def test_a_process_that_is_terminated_exits_with_143(tmp_path):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests")])
    command = [sys.executable, "-c", OUTSIDE, str(tmp_path)]
    running = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True)
    assert running.stdout.readline() == "training\n"
    running.send_signal(signal.SIGTERM)
    assert running.wait(timeout=60) == 143
    (saved,) = tmp_path.glob("checkpoint-*")
    checkpoints.verify(str(saved))
    assert torch.load(saved / "optimizer.pt", weights_only=True)["state"]
