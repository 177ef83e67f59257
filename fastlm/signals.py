"""SIGTERM and SIGINT while a trainer trains: the step in hand ends, is saved, and then the process ends as the signal asks.

Two callbacks, because the first must speak before the trainer saves and the second only after everybody has seen the save.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import signal
import threading
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

logger = logging.getLogger(__name__)

# what a shell reports of a process that SIGTERM ended: 128 + 15
TERMINATED = 143
_TRAINER = "transformers.trainer"


class StopRequests(TrainerCallback):
    """Turns the first SIGTERM or SIGINT into a save and the end of the training; a second one ends the process at once.

    Handlers are set in the main thread of each process for the time of a training, and those that were there come back. With several
    processes all stop at the same step, by one reduction a step.

    Attributes:
        received: the signal to obey, once all processes know of it.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._pending: int | None = None
        self._before: dict[int, Any] = {}
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        # handlers belong to a process
        return {"received": None, "_pending": None, "_before": {}, "_pid": 0}

    def restore(self) -> None:
        """Give the signals the handlers back that they had before the training."""
        for number, handler in self._before.items():
            # None: it was set outside Python, and cannot be set again from here
            with contextlib.suppress(TypeError):
                signal.signal(number, handler)
        self._before = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.restore()
        self.received = self._pending = None
        if threading.current_thread() is not threading.main_thread():
            logger.info("training runs in a thread: only the main thread can wait for SIGTERM and SIGINT")
            return
        self._pid = os.getpid()
        for number in (signal.SIGTERM, signal.SIGINT):
            handler = signal.getsignal(number)
            if inspect.ismethod(handler) and isinstance(handler.__self__, StopRequests):
                # of a training that an error ended, of which callbacks are not told
                handler.__self__.restore()
        # transformers has its own answer to SIGTERM, if it is asked for
        numbers = (signal.SIGINT,) if args.enable_jit_checkpoint else (signal.SIGTERM, signal.SIGINT)
        self._before = {number: signal.signal(number, self._note) for number in numbers}

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._agree(args)
        if self.received is not None:
            control.should_save = control.should_training_stop = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.received is not None:
            # who is told to stop has seconds, and an evaluation can take hours
            control.should_evaluate = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.received is not None:
            control.should_save, control.should_evaluate = True, False

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.restore()
        if self._pending is not None and self.received is None:
            # it came after the last step, which the trainer has saved if it saves at all
            self.received = self._pending
            self.leave()

    def leave(self) -> None:
        """End as the signal asks.

        Raises:
            KeyboardInterrupt: for SIGINT.
            SystemExit: with code 143, for SIGTERM.
        """
        self.restore()
        self._pending = None
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(TERMINATED)

    def _agree(self, args: Any) -> None:
        if self.received is not None:
            return
        number = self._pending or 0
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            largest = torch.tensor(number, device=args.device)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            number = int(largest.item())
        self.received = number or None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid or self._pending is not None or not _is_training(frame):
            # a worker that was forked from this process, the second signal, or a training that an error ended
            self.restore()
            if signal.getsignal(number) == self._note:
                # somebody set it again
                signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            return
        self._pending = number
        logger.warning(
            "%s: the step in hand is finished and saved, then the training ends. A second signal ends it at once",
            signal.Signals(number).name,
        )


class Leave(TrainerCallback):
    """Ends the process after the save that a `StopRequests` asked for. The last of the callbacks."""

    def __init__(self, requests: StopRequests) -> None:
        self._requests = requests

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._requests.received is not None:
            logger.warning("step %d is saved in %s", state.global_step, args.output_dir)
            self._requests.leave()


def _is_training(frame: FrameType | None) -> bool:
    """Whether the code that a signal interrupted was called by a trainer."""
    while frame is not None:
        if frame.f_globals.get("__name__") == _TRAINER:
            return True
        frame = frame.f_back
    return False
