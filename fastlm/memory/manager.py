"""The memory of one model: what its layers keep in each call, and what became of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fastlm.block.offload import CudaCopier, HostStore
from fastlm.block.rescue import Rescue
from fastlm.block.spec import MemoryPlan
from fastlm.memory import budget
from fastlm.memory.budget import GIB
from fastlm.memory.planner import Batch, Choice, Model, ahead, choose, minimal

logger = logging.getLogger(__name__)

STRATEGIES = ("minimal", "balanced", "aggressive")
Strategy = str | float
# strategy -> share and bytes of the free memory that stay free, for fragmentation and what libraries take
HEADROOM = {"minimal": (0.02, 128 << 20), "balanced": (0.08, 512 << 20), "aggressive": (0.03, 256 << 20)}
# cuBLAS' own, of the two threads that run forward and backward
LIBRARY_BYTES = 64 << 20
# How far a prediction may be off before a run that seems too large is let go on.
_TOLERANCE = 1.05
_default: Strategy | None = None


def parse_strategy(strategy: Any) -> Strategy | None:
    """A checked strategy.

    Raises:
        ValueError: for anything but "minimal", "balanced", "aggressive", a positive number of GiB, or None.
    """
    is_number = isinstance(strategy, (int, float)) and not isinstance(strategy, bool)
    if strategy is None or strategy in STRATEGIES or (is_number and 0 < strategy < float("inf")):
        return float(strategy) if is_number else strategy
    raise ValueError(f"memory must be one of {', '.join(STRATEGIES)}, or the GiB that may be used, got {strategy!r}")


def parse_host(host_memory: Any) -> float | None:
    """Checked GiB of host memory.

    Raises:
        ValueError: for anything but a number of at least 0, or None.
    """
    is_number = isinstance(host_memory, (int, float)) and not isinstance(host_memory, bool)
    if host_memory is None or (is_number and 0 <= host_memory < float("inf")):
        return None if host_memory is None else float(host_memory)
    raise ValueError(f"host_memory must be the GiB of host memory for activations, or None, got {host_memory!r}")


def set_memory_strategy(strategy: Strategy) -> None:
    """What models that are loaded or patched from now on keep for their backward.

    Args:
        strategy: "minimal": the smallest footprint; activations are made again, layer inputs wait in host memory. "balanced": as fast as
            fits safely into what is free when the first batch of a shape comes. "aggressive": all speed that the device's memory buys.
            A number: never use more GiB than that.

    Raises:
        ValueError: for anything else.
    """
    global _default
    checked = parse_strategy(strategy)
    if checked is None:
        raise ValueError(f"memory must be one of {', '.join(STRATEGIES)}, or the GiB that may be used, got None")
    _default = checked


@dataclass(frozen=True)
class Weights:
    """Bytes on the device beside activations.

    Attributes:
        weights: frozen parameters and buffers.
        trained: parameters that are trained.
        gradients: of these, where none are there yet.
        optimizer: states of these, where none are there yet: at least, and as the largest common optimizer has them.
    """

    weights: int
    trained: int
    gradients: int
    optimizer: tuple[int, int]


class Memory:
    """What one model's layers keep.

    Attributes:
        strategy: None where nobody chose one: then balanced, where the trainer asks for gradient checkpointing.
        host_gib: of host memory for activations; None for what is free.
        checkpointing: True, False or None, as `config.parse_checkpointing`.
        rescue: runs passes of layers again that were short of memory.
        choice: the plans of the last call that was planned, or None.
    """

    def __init__(self, strategy: Strategy | None = None, host_gib: float | None = None) -> None:
        self.strategy = strategy if strategy is not None else _default
        self.host_gib = host_gib
        self.checkpointing: bool | None = None
        self.rescue = Rescue(self._explain)
        self.choice: Choice | None = None
        self._forget()

    def _explain(self, message: str) -> str:
        """What to say where a layer had too little memory even so."""
        said = f"{message} The layer was run again at the cost of all kept activations, and that was not enough."
        return said if self._last is None else f"{said} {_would_fit(*self._last)}"

    def _forget(self) -> None:
        # by what the plan depends on
        self._choices: dict[tuple[int, int, Any], Choice] = {}
        self._stores: dict[torch.device, HostStore] = {}
        self._device_budget: int | None = None
        self._repeated, self._ahead = 0, 2
        # what the last plan was made for, what it needs beside activations, what is available, and the host's budget
        self._last: tuple[Model, Batch, int, int, int] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # counts, plans and host memory belong to a process
        return _made, (self.strategy, self.host_gib, self.checkpointing)

    def __deepcopy__(self, memo: dict[int, Any]) -> Memory:
        return _made(self.strategy, self.host_gib, self.checkpointing)

    def choose_strategy(self, strategy: Strategy | None, host_gib: float | None) -> None:
        """Plan anew by another strategy; None leaves what there is."""
        self.strategy = self.strategy if strategy is None else strategy
        self.host_gib = self.host_gib if host_gib is None else host_gib
        self._forget()

    def is_asked(self, recomputes: bool) -> bool:
        """Whether plans decide what layers keep. recomputes: the trainer asks for gradient checkpointing."""
        if self.checkpointing is not None:
            # said once and for all; what is made again may still have its inputs on the host
            return self.checkpointing and self.strategy == "minimal"
        return recomputes or self.strategy is not None

    def host(self, device: torch.device) -> HostStore:
        """What takes activations of a device."""
        if device not in self._stores:
            self._stores[device] = HostStore(CudaCopier(device), budget.host_bytes(self.host_gib), self._ahead)
        return self._stores[device]

    def plans(
        self, batch: Batch, device: torch.device, key: Any, describe: Callable[[], tuple[Model, Weights]]
    ) -> tuple[MemoryPlan, ...] | None:
        """What each layer keeps in a call; None where nothing is known that plans could follow from.

        Args:
            batch: of the call.
            device: of the layers.
            key: what `describe` depends on.
            describe: gives the model's shape and what lies beside its activations.

        Raises:
            torch.OutOfMemoryError: if the call cannot fit, before it runs, saying what would.
        """
        bucket = Batch(_bucket(batch.tokens), _bucket(batch.row_tokens), _bucket(batch.tokens))
        if self.rescue.repeated > self._repeated:
            # the device holds less than was thought
            self._repeated = self.rescue.repeated
            self._choices.clear()
            if self._device_budget is not None:
                self._device_budget = self._device_budget * 9 // 10
        place = bucket.tokens, bucket.row_tokens, key
        if place not in self._choices:
            found = self._planned(bucket, device, *describe())
            if found is None:
                return None
            self._choices[place] = found
        self.choice = self._choices[place]
        self._ahead = ahead(batch)
        if device in self._stores:
            self._stores[device].ahead = self._ahead
        return self.choice.plans

    def _planned(self, batch: Batch, device: torch.device, model: Model, fixed: Weights) -> Choice | None:
        strategy = self.strategy or "balanced"
        now = budget.device_memory(device)
        if now is None and strategy == "minimal":
            return minimal(model, batch, 0)
        if now is None and not isinstance(strategy, float):
            return None
        host = self._host_bytes() if now is not None else 0
        available = self._available(now, fixed, strategy)
        share, least = HEADROOM["minimal" if isinstance(strategy, float) else strategy]
        libraries, least = (0, 0) if now is None else (LIBRARY_BYTES, least)
        if self._device_budget is None:
            later = fixed.gradients + fixed.optimizer[1] + libraries
            self._device_budget = max(0, available - later - max(int(available * share), least))
        found = (
            minimal(model, batch, host) if strategy == "minimal" else choose(model, batch, self._device_budget, host)
        )
        needed = found.peak.total + fixed.gradients + fixed.optimizer[0] + libraries
        if needed > available * _TOLERANCE:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory: this batch of {batch.tokens} tokens is predicted to need {needed / GIB:.2f} GiB beside what is in "
                f"use, and {available / GIB:.2f} GiB are available. {_would_fit(model, batch, needed - found.peak.total, available, host)}"
            )
        self._last = model, batch, needed - found.peak.total, available, host
        logger.info(
            "memory for up to %d tokens: %.2f GiB predicted beside the %.2f GiB in use (kept %.2f, working set %.2f, head %.2f, gradients "
            "and optimizer %.2f or more; most in the %s), %.2f GiB on the host, of %.2f GiB available; %s",
            batch.tokens, needed / GIB, (fixed.weights + fixed.trained if now is None else now.in_use) / GIB,
            found.peak.kept / GIB, found.peak.working / GIB, found.peak.head / GIB,
            (fixed.gradients + fixed.optimizer[0]) / GIB, found.peak.where, found.peak.host / GIB, available / GIB, found,
        )  # fmt: skip
        return found

    def _host_bytes(self) -> int:
        """What activations may take of the host, what they have taken included."""
        taken = sum(store.buffers.n_bytes for store in self._stores.values())
        return budget.host_bytes(self.host_gib) + (taken if self.host_gib is None else 0)

    @staticmethod
    def _available(now: budget.DeviceMemory | None, fixed: Weights, strategy: Strategy) -> int:
        in_use = fixed.weights + fixed.trained if now is None else now.in_use
        limit = int(strategy * GIB) - in_use if isinstance(strategy, float) else None
        if now is None:
            return max(0, limit or 0)
        return now.available if limit is None else max(0, min(now.available, limit))

    @property
    def status(self) -> str:
        """For the report."""
        parts = [f"{self.strategy or 'balanced'}, {self.choice}"] if self.choice is not None else []
        sent = sum(store.sent_bytes for store in self._stores.values())
        if sent:
            held = sum(store.buffers.peak_bytes for store in self._stores.values())
            pageable = sum(store.copier.pageable_bytes for store in self._stores.values())
            parts.append(
                f"{sent / GIB:.2f} GiB sent to {held / GIB:.2f} GiB of host memory, {pageable / GIB:.2f} of it not pinned"
            )
        if self.rescue.repeated:
            parts.append(
                f"{self.rescue.repeated} passes of layers repeated for lack of memory, {self.rescue.dropped_bytes / GIB:.2f} GiB dropped"
            )
        return "; ".join(parts)

    def release(self) -> None:
        """Give back host memory that nobody uses: nobody trains for now."""
        for store in self._stores.values():
            store.settle(0)
            store.buffers.clear()


def _made(strategy: Strategy | None, host_gib: float | None, checkpointing: bool | None) -> Memory:
    memory = Memory(strategy, host_gib)
    memory.strategy, memory.checkpointing = strategy, checkpointing
    return memory


def _bucket(tokens: int) -> int:
    """Tokens rounded up to an eighth of their power of two, so that lengths that vary a little share a plan."""
    unit = max(1, 1 << max(0, tokens.bit_length() - 4))
    return -(-tokens // unit) * unit


def _would_fit(model: Model, batch: Batch, rest: int, available: int, host: int) -> str:
    """The change that would fit. rest: bytes that are needed beside activations."""

    def fits(tokens: int) -> bool:
        smaller = Batch(tokens, min(tokens, batch.row_tokens), tokens)
        return minimal(model, smaller, host).peak.total + rest <= available

    low, high = 0, batch.tokens
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    if not low:
        return "No batch would fit beside these weights: load them in 4 bit, or free memory that others use."
    if low == batch.tokens:
        return "With memory='minimal' it is predicted to fit."
    return f"At most {low} tokens a micro-batch would fit, with memory='minimal': lower the batch size or the length of rows."
