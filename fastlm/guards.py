"""Callbacks that keep a run's weights finite and its token to itself; `fastlm.callbacks`."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from fastlm.optimizers import FusedAdamW, Verdict
from fastlm.output import MarkedCheckpoints, OutputFolder
from fastlm.signals import Leave, StopRequests

logger = logging.getLogger(__name__)

MAX_SKIPPED_STEPS = 10


def callbacks(max_skipped_steps: int = MAX_SKIPPED_STEPS) -> list[TrainerCallback]:
    """What protects a run under a plain `SFTTrainer` or `Trainer`: `SFTTrainer(..., callbacks=fastlm.callbacks())`.

    SIGTERM and SIGINT save before they end the run; steps whose gradients are not finite are skipped; checkpoints are marked while they
    are written and then listed with their SHA-256; one run at a time trains into an output folder; the hub token is in no file.
    `FastLanguageModel.get_trainer` has all of this and more.

    Args:
        max_skipped_steps: so many steps in a row that are not finite end the run.

    Returns:
        New callbacks, for one trainer, to be given in this order.

    Raises:
        ValueError: if max_skipped_steps is no positive integer.
    """
    if isinstance(max_skipped_steps, bool) or not isinstance(max_skipped_steps, int) or max_skipped_steps < 1:
        raise ValueError(f"max_skipped_steps must be an integer of 1 or more, got {max_skipped_steps!r}")
    requests = StopRequests()
    return [
        requests, FiniteSteps(max_skipped_steps), SecretToken(), OutputFolder(), MarkedCheckpoints(), Leave(requests),
    ]  # fmt: skip


def for_whole_checkpoints(given: Iterable[Any] | None) -> list[Any]:
    """The callbacks of a trainer that publishes its checkpoints itself: those given, and ours that are not among them.

    Args:
        given: instances or classes; `callbacks()` may be among them, for another max_skipped_steps.
    """
    kept = [one for one in given or () if not isinstance(one, MarkedCheckpoints)]
    if any(isinstance(one, StopRequests) for one in kept):
        return kept
    ours = [one for one in callbacks() if not isinstance(one, MarkedCheckpoints)]
    return [ours[0], *kept, *ours[1:]]


class FiniteSteps(TrainerCallback):
    """Skips an optimizer step whose gradients, or losses where the trainer shows them, are not finite. One host read a step.

    The gradients are set to None, which every optimizer passes over: weights and moments stay as they are. float16 training has a
    gradient scaler that skips by itself, and whose overflows are no fault: there only losses count.

    A `FusedAdamW` is told on the device instead, and skips there: nobody waits, and the host hears of it at the next step.

    Attributes:
        n_skipped: optimizer steps so far, as far as the host has heard.
    """

    def __init__(self, max_in_a_row: int = MAX_SKIPPED_STEPS) -> None:
        self.n_skipped = 0
        self._max_in_a_row = max_in_a_row
        self._in_a_row = 0
        self._losses: Tensor | None = None
        # what is wrong with the step in hand; None before anybody looked, "" for nothing
        self._fault: str | None = None
        # what an optimizer was told of the step of this number, until it is heard
        self._told: tuple[int, Verdict] | None = None

    def add_loss(self, loss: Tensor) -> None:
        """Take note of the loss of a part of a step, a scalar. Reads nothing from the device."""
        self._losses = loss.detach() if self._losses is None else self._losses + loss.detach()

    def look(self, model: nn.Module, has_scaler: bool, norm: Tensor | None = None) -> None:
        """Look at the gradients of a step, all summed: best before they are clipped, which spreads what is not finite.

        Args:
            model: whose gradients.
            has_scaler: overflows are a gradient scaler's: only losses count.
            norm: of all gradients, if somebody measured it.
        """
        losses, self._losses = self._losses, None
        if norm is not None and _all_finite([] if has_scaler else [norm], losses):
            self._fault = ""
            return
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and not has_scaler}
        if norm is None and _all_finite(list(gradients.values()), losses):
            self._fault = ""
            return
        wrong = [name for name, gradient in gradients.items() if not _all_finite([gradient], None, is_shared=False)]
        self._fault = _fault_of(wrong, len(gradients))

    def leave_to(self, optimizer: FusedAdamW, model: nn.Module, norm: Tensor, step: int) -> None:
        """Let the optimizer's next step do nothing if this one is not finite, without a wait. First hear of the step before.

        Args:
            model: whose gradients.
            norm: of all of them, on their device, as `optimizer.clip_grad_norm` measured it.
            step: its number, from 1.

        Raises:
            FloatingPointError: after too many steps in a row before this one.
        """
        self._hear(model)
        losses, self._losses = self._losses, None
        bad = _any_bad([norm], losses)
        if bad is not None:
            self._told = step, optimizer.step_only_if(bad == 0)

    def _hear(self, model: nn.Module) -> None:
        """Of the last step that was left to the optimizer."""
        told, self._told = self._told, None
        if told is None:
            return
        step, verdict = told
        if verdict.is_taken():
            self._in_a_row = 0
            return
        params = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        bad = verdict.not_finite()
        self._skipped(step, _fault_of([name for name, p in params if p in bad], len(params)))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.n_skipped = self._in_a_row = 0
        self._losses = self._fault = self._told = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """
        Raises:
            FloatingPointError: after too many steps in a row.
        """
        if self._told is not None and self._told[0] == state.global_step + 1:
            return
        if self._fault is None:
            if args.fp16:
                return
            self.look(model, has_scaler=False)
        fault, self._fault = self._fault, None
        if not fault:
            self._in_a_row = 0
            return
        for p in model.parameters():
            p.grad = None
        self._skipped(state.global_step + 1, fault)

    def _skipped(self, step: int, fault: str) -> None:
        self.n_skipped += 1
        self._in_a_row += 1
        logger.warning("step %d is skipped: %s", step, fault)
        if self._in_a_row >= self._max_in_a_row:
            raise FloatingPointError(
                f"{self._in_a_row} steps in a row were not finite, the last of them step {step}: {fault}. The weights are finite, those "
                f"of step {step - self._in_a_row}. Lower learning_rate or look at the rows of these steps"
            )

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._hear(model)
        if self.n_skipped:
            logger.warning("%d of %d steps were skipped: they were not finite", self.n_skipped, state.global_step)


def _fault_of(wrong: list[str], n_gradients: int) -> str:
    """What to say of a step: the names of parameters whose gradients are not finite, of so many."""
    if not wrong:
        return "the loss is not finite"
    return f"the gradient of {wrong[0]} is not finite, the first of {len(wrong)} among {n_gradients}"


def _any_bad(gradients: list[Tensor], losses: Tensor | None, is_shared: bool = True) -> Tensor | None:
    """[] float32 on the device: more than 0 if some of this is not finite, in any process. None for nothing at all."""
    parts = []
    if gradients:
        norm = torch.nn.utils.get_total_norm(gradients)
        parts.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if losses is not None:
        parts.append(losses.to(parts[0].device) if parts else losses)
    if not parts:
        return None
    bad = torch.stack([part.float().reshape(()) for part in parts]).isfinite().all().logical_not().float()
    if is_shared and dist.is_available() and dist.is_initialized():
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    return bad


def _all_finite(gradients: list[Tensor], losses: Tensor | None, is_shared: bool = True) -> bool:
    """Whether all of this is finite, in every process; one read from the device."""
    bad = _any_bad(gradients, losses, is_shared)
    return bad is None or not bad.item()


class SecretToken(TrainerCallback):
    """Keeps the hub token out of training_args.bin, which holds a pickle of the trainer's arguments, and of whatever else pickles them."""

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if isinstance(args.hub_token, str):
            args.hub_token = _Token(args.hub_token)


class _Token(str):
    """A text that is None once it was pickled, and that shows nothing of itself in a representation."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return type(None), ()

    def __copy__(self) -> _Token:
        return self

    def __deepcopy__(self, memo: Any) -> _Token:
        return self

    def __repr__(self) -> str:
        return "'<token>'"
