"""Reporting callbacks that can fail, hang or be slow without ending or holding up the training.

A call runs in a thread of the callback's own, one after another, with the trainer's state as it was. The training waits for it as long as
a service that is well needs, and no more once one was slow: calls then queue. MLflow keeps its run in the thread that started it,
which may be the user's: its calls stay in the training's thread.
"""

from __future__ import annotations

import copy
import functools
import importlib
import logging
import queue
import threading
import time
from typing import Any

from transformers import TrainerCallback

logger = logging.getLogger(__name__)

# seconds: a log takes milliseconds; to log in, and to send the last of a run, is waited for where nothing trains
PATIENCE_S = 1.0
PATIENCE_AT_ENDS_S = 60.0
_ENDS = ("on_init_end", "on_train_begin", "on_train_end")
MOST_WAITING = 1000
_EVENTS = tuple(name for name in dir(TrainerCallback) if name.startswith("on_"))
_IN_THREAD_OF_TRAINING = ("mlflow", "dagshub")


def shield(registered: list[Any]) -> None:
    """Shield a training from the reporting callbacks among these.

    One that raises is told of and not called again; one that is slow is told of and not waited for.
    """
    kinds = importlib.import_module("transformers.integrations.integration_utils").INTEGRATION_TO_CALLBACK
    stay = tuple(kinds[name] for name in _IN_THREAD_OF_TRAINING if name in kinds)
    for callback in registered:
        if isinstance(callback, tuple(kinds.values())):
            shielded = (_Shielded if isinstance(callback, stay) else _Beside)(callback)
            for event in _EVENTS:
                # on this instance, which stays what it is for whoever looks for its class
                callback.__dict__[event] = functools.partial(shielded.call, event)


class _Shielded:
    """A reporting callback that is called where the training is. After a call that raises or takes a minute it is switched off."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._name = type(callback).__name__
        self.is_off = False

    def call(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.is_off:
            return
        start = time.monotonic()
        self._run(event, (args, state, control), kwargs)
        seconds = time.monotonic() - start
        if seconds > PATIENCE_AT_ENDS_S and event not in _ENDS:
            self._switch_off(f"{self._name} held {event} up for {seconds:.0f} s")

    def _run(self, event: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            getattr(type(self._callback), event)(self._callback, *args, **kwargs)
        except Exception as error:
            self._switch_off(f"{self._name} failed in {event}", error)

    def _switch_off(self, what: str, error: Exception | None = None) -> None:
        self.is_off = True
        why = "" if error is None else f": {error}"
        logger.warning("%s and is switched off; training goes on%s", what, why)


class _Beside(_Shielded):
    """A reporting callback in a thread of its own."""

    def __init__(self, callback: Any) -> None:
        super().__init__(callback)
        self._calls: queue.Queue[tuple[str, tuple[Any, ...], dict[str, Any], threading.Event]] = queue.Queue(
            MOST_WAITING
        )
        self._thread: threading.Thread | None = None
        self._is_slow = False

    def __reduce__(self) -> tuple[Any, ...]:
        # a thread belongs to a process
        return _Beside, (self._callback,)

    def call(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.is_off:
            return
        if self._thread is None:
            # a service that never answers must not keep the process
            self._thread = threading.Thread(target=self._work, name=f"fastlm-{self._name}", daemon=True)
            self._thread.start()
        # what changes as the training goes on
        kwargs |= {name: copy.copy(kwargs[name]) for name in ("logs", "metrics") if name in kwargs}
        done = threading.Event()
        try:
            self._calls.put_nowait((event, (args, copy.copy(state), copy.copy(control)), kwargs, done))
        except queue.Full:
            self._switch_off(f"{self._name} is {MOST_WAITING} calls behind")
            return
        at_ends = event in _ENDS
        if self._is_slow and not at_ends:
            return
        if done.wait(PATIENCE_AT_ENDS_S if at_ends else PATIENCE_S):
            return
        if event == "on_train_end":
            logger.warning(
                "%s has not ended after %.0f s: what it still sends may be lost", self._name, PATIENCE_AT_ENDS_S
            )
        elif not self._is_slow:
            logger.warning("%s is slow in %s: training goes on without waiting for it", self._name, event)
        self._is_slow = True

    def _work(self) -> None:
        while True:
            event, args, kwargs, done = self._calls.get()
            if not self.is_off:
                self._run(event, args, kwargs)
            done.set()
