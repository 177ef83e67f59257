"""Out of memory inside a layer: its forward or backward is run again after room was made, before it has returned anything.

A pass only reads what it was given and draws nothing at random, so a second run gives the values of the first. Room is what the allocator
holds free in pieces; then what layers keep beside their inputs, which their backward makes again. No micro-batch is repeated, no
gradient is added twice, and no collective is called inside a layer.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastlm.block.spec import SMALLEST, MemoryPlan

logger = logging.getLogger(__name__)

T = TypeVar("T")


def is_dropped(tensor: Tensor) -> bool:
    """Whether a kept tensor's memory was taken away."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


class Rescue:
    """What a model's layers do when memory is short.

    Attributes:
        repeated: passes of layers that were run again.
        dropped_bytes: of kept tensors that were given up for them.
        explain: makes the last error's message of torch's own; None leaves it as it is.
    """

    def __init__(self, explain: Callable[[str], str] | None = None) -> None:
        self.repeated = self.dropped_bytes = 0
        self.explain = explain
        self._kept: list[weakref.ref[Tensor]] = []
        self._most = 0

    def __reduce__(self) -> tuple[Any, ...]:
        # what tensors are alive belongs to a process
        return Rescue, ()

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Tensors that a layer keeps and can make again."""
        if len(self._kept) >= self._most:
            # the dead are looked for now and then only
            self._kept = [reference for reference in self._kept if reference() is not None]
            self._most = 2 * len(self._kept) + 512
        self._kept += [weakref.ref(tensor) for tensor in tensors]

    def _drop(self) -> int:
        """Take the memory of all kept tensors away. Returns how many bytes that were."""
        n_bytes = 0
        for reference in self._kept:
            tensor = reference()
            if tensor is not None and not is_dropped(tensor):
                n_bytes += tensor.untyped_storage().nbytes()
                tensor.untyped_storage().resize_(0)
        self._kept = []
        self.dropped_bytes += n_bytes
        return n_bytes

    def run(self, attempt: Callable[[MemoryPlan], T], plan: MemoryPlan, settle: Callable[[], None]) -> T:
        """attempt(plan), once more with what the allocator can give back, and once more at the cost of what is kept.

        Args:
            attempt: one pass of a layer. The last one gets a plan that keeps nothing on the device but the input.
            settle: lets go of what is on its way to the host.

        Raises:
            torch.OutOfMemoryError: if that is not enough either.
        """
        tries = 0
        while True:
            try:
                return attempt(plan)
            except torch.OutOfMemoryError as error:
                # not the error itself, whose frames hold the tensors of the pass that failed
                message = str(error)
            tries += 1
            settle()
            if tries == 2:
                n_bytes = self._drop()
                plan = dataclasses.replace(SMALLEST, offloads=plan.offloads)
                logger.warning("out of memory in a layer: %d bytes of kept activations are made again instead", n_bytes)
            elif tries > 2:
                raise torch.OutOfMemoryError(self.explain(message) if self.explain is not None else message)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.repeated += 1
