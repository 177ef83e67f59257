"""Reporting services that fail, hang, are slow or are well: the training goes on, and what can be reported is."""

import threading
import time

import pytest
import tiny
import training
import transformers

import fastlm
from fastlm import FastLanguageModel, services


def make(folder, callbacks, **args):
    model = fastlm.patch_model(tiny.with_lora(tiny.model("llama", attention="sdpa")))
    settings = training.settings(folder, **args)
    named = dict(processing_class=training.tokenizer(), train_dataset=training.rows())
    return FastLanguageModel.get_trainer(model, args=settings, callbacks=callbacks, **named)


class Service(transformers.integrations.TensorBoardCallback):
    """Takes note of what it is told: the event, the step and the loss."""

    def __init__(self) -> None:
        self.told, self.threads = [], set()

    def on_init_end(self, args, state, control, **kwargs):
        pass

    def on_train_begin(self, args, state, control, **kwargs):
        self.note("begin", state)

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.note("log", state, logs.get("loss"))

    def on_train_end(self, args, state, control, **kwargs):
        self.note("end", state)

    def note(self, event, state, value=None):
        self.threads.add(threading.current_thread().name)
        self.told.append((event, state.global_step, value))


def complete(trainer) -> list:
    losses = [(entry["step"], entry["loss"]) for entry in training_log(trainer)]
    return [("begin", 0, None), *[("log", *one) for one in losses], ("log", 3, None), ("end", 3, None)]


def training_log(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def about(caplog, name: str) -> list[str]:
    return [record.message for record in caplog.records if name in record.message]


def test_a_service_that_is_well_is_told_everything_in_order(tmp_path, caplog):
    trainer = make(tmp_path, [Service])
    trainer.train()
    service = trainer.pop_callback(Service)
    assert service.told == complete(trainer) and len(training_log(trainer)) == 3
    assert service.threads == {"fastlm-Service"} and not about(caplog, "Service")


class Unreachable(Service):
    def on_log(self, args, state, control, logs=None, **kwargs):
        self.note("log", state, logs.get("loss"))
        raise ConnectionError("no route to host")


def test_one_that_fails_is_switched_off(tmp_path, caplog):
    trainer = make(tmp_path, [Unreachable])
    trainer.train()
    service = trainer.pop_callback(Unreachable)
    assert trainer.state.global_step == 3 and [event for event, *_ in service.told] == ["begin", "log"]
    assert about(caplog, "Unreachable") == [
        "Unreachable failed in on_log and is switched off; training goes on: no route to host"
    ]


class Slow(Service):
    def on_log(self, args, state, control, logs=None, **kwargs):
        time.sleep(0.3)
        super().on_log(args, state, control, logs, **kwargs)


def test_one_that_is_slow_is_told_everything_later_and_not_waited_for(tmp_path, monkeypatch, caplog):
    """What is told is of the time of the call, though the training has gone on."""
    monkeypatch.setattr(services, "PATIENCE_S", 0.02)
    trainer = make(tmp_path, [Slow])
    behind = []
    trainer.add_callback(At(lambda: behind.append(len(service.told))))
    (service,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, Slow)]
    trainer.train()
    # 3 logs of 0.3 s each: not all were through when the last step ended
    assert behind[-1] < 3
    assert service.told == complete(trainer)
    assert about(caplog, "Slow") == ["Slow is slow in on_log: training goes on without waiting for it"]


class At(transformers.TrainerCallback):
    def __init__(self, action):
        self.action = action

    def on_step_end(self, args, state, control, **kwargs):
        self.action()


class Hanging(Service):
    """Never comes back from its first log, until the test ends."""

    def __init__(self) -> None:
        super().__init__()
        self.over = threading.Event()

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.over.wait()


def test_one_that_hangs_holds_nothing_up(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(services, "PATIENCE_S", 0.02)
    monkeypatch.setattr(services, "PATIENCE_AT_ENDS_S", 0.2)
    trainer = make(tmp_path, [Hanging])
    (service,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, Hanging)]
    try:
        trainer.train()
        assert trainer.state.global_step == 3 and [event for event, *_ in service.told] == ["begin"]
        told = about(caplog, "Hanging")
        assert told[0] == "Hanging is slow in on_log: training goes on without waiting for it"
        assert len(told) == 2 and "what it still sends may be lost" in told[1]
    finally:
        service.over.set()


def test_one_that_falls_too_far_behind_is_switched_off(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(services, "PATIENCE_S", 0.02)
    monkeypatch.setattr(services, "MOST_WAITING", 4)
    trainer = make(tmp_path, [Hanging], max_steps=6)
    (service,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, Hanging)]
    try:
        trainer.train()
    finally:
        service.over.set()
    assert trainer.state.global_step == 6
    assert "Hanging is 4 calls behind and is switched off; training goes on" in caplog.text


class Bound(Service, transformers.integrations.MLflowCallback):
    """Of MLflow, which knows its run by the thread."""

    def __init__(self) -> None:
        Service.__init__(self)

    # MLflow's own ends the run
    def __del__(self):
        pass


@pytest.mark.parametrize("patience", [60.0, -1.0], ids=["well", "slow"])
def test_one_that_knows_its_thread_is_called_there(tmp_path, monkeypatch, caplog, patience):
    monkeypatch.setattr(services, "PATIENCE_AT_ENDS_S", patience)
    trainer = make(tmp_path, [Bound])
    trainer.train()
    service = trainer.pop_callback(Bound)
    assert service.threads == {threading.current_thread().name} and trainer.state.global_step == 3
    if patience > 0:
        assert service.told == complete(trainer) and not about(caplog, "Bound")
    else:
        assert len(about(caplog, "is switched off; training goes on")) == 1 and len(service.told) < 5
