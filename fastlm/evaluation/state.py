"""Looking at a model in training without changing what the training does next."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import TrainerCallback


class RandomState:
    """The state of every generator that training draws from, when this is made."""

    def __init__(self) -> None:
        self._python, self._numpy, self._cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self._devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        if self._devices:
            torch.cuda.set_rng_state_all(self._devices)


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Within, the model is in evaluation mode and without gradients; then each module is in the mode that it was in.

    Random numbers that are drawn within are drawn again after it.
    """
    random_state = RandomState()
    training = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, was_training in training:
            module.training = was_training
        random_state.restore()


class LeaveNoTrace(TrainerCallback):
    """For any Trainer with evaluations: the training goes on as it would have without them.

    Each pass over a data loader draws a number of torch's generator, so that after an evaluation the dropout of a training on a CPU
    would be another one; and one at the last step leaves the model in evaluation mode, which TRL's summary takes for no training.
    """

    _before: tuple[RandomState, bool] | None = None

    def _look(self, control: Any, model: Any) -> None:
        self._before = (RandomState(), model.training) if control.should_evaluate else None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._before = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._look(control, kwargs["model"])

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._look(control, kwargs["model"])

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # once for each of several data sets
        if self._before is not None:
            random_state, was_training = self._before
            random_state.restore()
            kwargs["model"].train(was_training)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._before = None
