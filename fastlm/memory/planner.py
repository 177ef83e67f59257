"""What each layer keeps, by what a kept byte saves, and the peak that follows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fastlm.block.spec import RECOMPUTE_ALL, SMALLEST, MemoryPlan
from fastlm.memory.sizes import (
    LayerShape,
    backward_peak,
    forward_peak,
    kept_bytes,
    kept_on_device,
    kept_on_host,
    recompute_flops,
)
from fastlm_kernels.linear_cross_entropy import chunk_rows

# T tokens, D hidden size, V vocabulary

# Rates that order what is worth keeping, of a GEMM and of an attention's forward: measured on an H200, their ratio holds elsewhere.
_GEMM_FLOPS, _ATTENTION_FLOPS = 680e12, 500e12
# Pinned copies, one way (PCIe 5).
_HOST_BYTES_PER_S = 50e9
_FLOAT, _INDEX = 4, 8
# From here on a layer runs long enough that the next one's tensors are all that must travel beside it.
_LONG_TOKENS = 16384


@dataclass(frozen=True)
class HeadShape:
    """The head: vocabulary, hidden size, bytes of a value, whether its weights are trained, and whether a device pads its logits."""

    vocabulary: int
    hidden: int
    itemsize: int = 2
    is_trained: bool = False
    on_cuda: bool = True


@dataclass(frozen=True)
class Batch:
    """tokens: of all rows, padding included. row_tokens: of the longest row. labelled: of the tokens that the head sees."""

    tokens: int
    row_tokens: int
    labelled: int

    @classmethod
    def of(cls, rows: int, length: int) -> Batch:
        return cls(rows * length, length, rows * length)


@dataclass(frozen=True)
class Model:
    """What a plan depends on.

    Attributes:
        layers: in order.
        head: behind them.
        table_bytes: of the rotary tables, a token of a row.
        n_frozen_first: layers at the beginning that run forward only, because nothing in or below them is trained.
    """

    layers: tuple[LayerShape, ...]
    head: HeadShape
    table_bytes: int = 0
    n_frozen_first: int = 0


@dataclass(frozen=True)
class Peak:
    """Bytes at the moment when most are in use, beside weights, gradients and optimizer.

    Attributes:
        where: "forward", "head" or "backward".
        kept: activations that wait for their backward.
        working: what the running layer holds, and what travels.
        head: what the head holds; 0 elsewhere.
        host: bytes of activations on the host.
    """

    where: str
    kept: int
    working: int
    head: int
    host: int

    @property
    def total(self) -> int:
        return self.kept + self.working + self.head


def _head_forward(head: HeadShape, batch: Batch) -> int:
    columns = -(-head.vocabulary // 64) * 64 if head.on_cuda else head.vocabulary
    n = batch.labelled
    step = min(chunk_rows(n, columns, head.itemsize, head.is_trained), n)
    held = step * columns * head.itemsize + step * head.hidden * head.itemsize + n * head.hidden * _FLOAT
    return held + 3 * n * _FLOAT + 3 * batch.tokens * _INDEX + head.is_trained * head.vocabulary * head.hidden * _FLOAT


def _head_backward(head: HeadShape, batch: Batch) -> int:
    """With the gradient of the hidden states scaled, put at its tokens, and through the last norm."""
    row = batch.tokens * head.hidden * head.itemsize
    trained = head.vocabulary * head.hidden * (_FLOAT + head.itemsize) if head.is_trained else 0
    return batch.labelled * head.hidden * (_FLOAT + head.itemsize) + row + trained


# one plan of one shape is asked for in every layer, and again while a plan is sought
_forward_peak = functools.lru_cache(maxsize=4096)(forward_peak)
_backward_peak = functools.lru_cache(maxsize=4096)(backward_peak)


def ahead(batch: Batch) -> int:
    """Layers whose tensors travel at a time beside the one that runs."""
    return 1 if batch.tokens >= _LONG_TOKENS else 2


def peak_of(model: Model, batch: Batch, plans: Sequence[MemoryPlan]) -> Peak:
    """The most that a micro-batch holds at once, and where."""
    tokens, first = batch.tokens, model.n_frozen_first
    row = tokens * model.head.hidden * model.head.itemsize
    tables = batch.row_tokens * model.table_bytes + 2 * tokens * _INDEX
    kept_so_far = [0]
    hosts = [0] * len(plans)
    for i, (shape, plan) in enumerate(zip(model.layers, plans, strict=True)):
        is_kept = i >= first
        hosts[i] = kept_on_host(shape, tokens, plan) if is_kept else 0
        kept_so_far.append(kept_so_far[-1] + (kept_on_device(shape, tokens, plan) if is_kept else 0))
    host, n_ahead = sum(hosts), ahead(batch)
    # the embeddings' output, which the model's own forward holds until it is over
    embedded = row if any(hosts) else 0
    peaks = []
    for i, (shape, plan) in enumerate(zip(model.layers, plans, strict=True)):
        used = plan if i >= first else RECOMPUTE_ALL
        travels = sum(hosts[max(0, i - n_ahead + 1) : i])
        working = row + _forward_peak(shape, tokens, used) + travels + embedded
        peaks.append(Peak("forward", kept_so_far[i] + tables, working, 0, host))
        if i >= first:
            arrives = sum(hosts[max(0, i - n_ahead) : i + 1])
            working = row + _backward_peak(shape, tokens, used) + arrives
            peaks.append(Peak("backward", kept_so_far[i + 1] + tables, working, 0, host))
    # hidden states, normed
    in_flight = sum(hosts[len(plans) - n_ahead :])
    peaks.append(Peak("head", kept_so_far[-1] + tables, 2 * row + in_flight, _head_forward(model.head, batch), host))
    peaks.append(Peak("head", kept_so_far[-1] + tables, row, _head_backward(model.head, batch), host))
    return max(peaks, key=lambda peak: peak.total)


@dataclass(frozen=True)
class Choice:
    """Plans for a batch, and what they need. `fits`: within the budget that they were made for."""

    plans: tuple[MemoryPlan, ...]
    peak: Peak
    fits: bool

    def __str__(self) -> str:
        n = len(self.plans)
        names = ("attention", "qkv", "residual", "gate_up", "down")
        kept = [f"{name} of {sum(getattr(p, name) for p in self.plans)}" for name in names[:4]]
        away = {name: sum(name in p.offloads for p in self.plans) for name in ("input", *names)}
        text = f"of {n} layers keep {', '.join(kept)}"
        if any(away.values()):
            text += "; on the host: " + ", ".join(f"{name} of {count}" for name, count in away.items() if count)
        return text


def values(shape: LayerShape, batch: Batch) -> list[str]:
    """What a layer may keep, by the time that a kept byte saves."""
    flops, sizes = recompute_flops(shape, batch.tokens, batch.row_tokens), kept_bytes(shape, batch.tokens)
    rate = {name: _ATTENTION_FLOPS if name == "attention" else _GEMM_FLOPS for name in flops}
    worth = {name: flops[name] / rate[name] / sizes[name] for name in flops if sizes[name]}
    # of two that are worth about the same, the smaller one has more launches for its bytes
    return sorted(worth, key=lambda name: (-round(4 * math.log2(max(worth[name], 1e-30))), sizes[name]))


def _largest(most: int, holds: Callable[[int], bool]) -> int:
    """The largest n up to `most` for which a claim holds that holds for all smaller ones; -1 if for none."""
    low, high = -1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _with(plans: Sequence[MemoryPlan], which: Sequence[int], name: str, to_host: bool) -> tuple[MemoryPlan, ...]:
    made = list(plans)
    for i in which:
        plan = made[i] if name == "input" else replace(made[i], **{name: True})  # type: ignore[arg-type]
        made[i] = replace(plan, offloads=plan.offloads | {name}) if to_host else plan
    return tuple(made)


def minimal(model: Model, batch: Batch, host_limit: int) -> Choice:
    """The smallest footprint: everything is made again, and inputs wait on the host as far as it has room."""
    plans: tuple[MemoryPlan, ...] = (SMALLEST,) * len(model.layers)
    # the last layers' would come straight back
    candidates = list(range(model.n_frozen_first, len(plans) - 1))
    fits = lambda n: peak_of(model, batch, _with(plans, candidates[:n], "input", True)).host <= host_limit
    n = _largest(len(candidates), fits)
    chosen = _with(plans, candidates[: max(0, n)], "input", True)
    before, after = peak_of(model, batch, plans), peak_of(model, batch, chosen)
    return Choice(chosen, after, True) if after.total < before.total else Choice(plans, before, True)


def choose(model: Model, batch: Batch, budget: int, host_limit: int) -> Choice:
    """The fastest plans that fit.

    Args:
        budget: bytes of the device for what a micro-batch holds.
        host_limit: bytes of the host for activations.

    Returns:
        The choice; where nothing fits, the smallest one, with `fits` False.
    """
    n_layers = len(model.layers)
    plans: tuple[MemoryPlan, ...] = (RECOMPUTE_ALL,) * n_layers

    def holds(trial: tuple[MemoryPlan, ...]) -> bool:
        peak = peak_of(model, batch, trial)
        return peak.total <= budget and peak.host <= host_limit

    if not holds(plans):
        smallest = minimal(model, batch, host_limit)
        if smallest.peak.total > budget:
            return replace(smallest, fits=False)
        # as few inputs travel as must: those that have the longest to wait
        candidates = list(range(model.n_frozen_first, n_layers - 1))
        n = len(candidates) - _largest(
            len(candidates), lambda n: holds(_with(plans, candidates[: len(candidates) - n], "input", True))
        )
        plans = _with(plans, candidates[:n], "input", True) if n <= len(candidates) else smallest.plans
        away = [i for i in candidates[:n] if _hides(model.layers[i], batch, ("input", "attention"))]
        trial = _with(plans, away, "attention", True)
        if away and values(model.layers[away[0]], batch)[0] == "attention" and holds(trial):
            plans = trial
    # from the last layer down: what it keeps is gone first
    order = list(range(n_layers - 1, model.n_frozen_first - 1, -1))
    for name in values(model.layers[-1], batch):
        free = [i for i in order if not getattr(plans[i], name)]
        n = _largest(len(free), lambda n: holds(_with(plans, free[:n], name, False)))  # noqa: B023
        plans = _with(plans, free[: max(0, n)], name, False)
    return Choice(plans, peak_of(model, batch, plans), True)


def _hides(shape: LayerShape, batch: Batch, names: Sequence[str]) -> bool:
    """Whether a layer's forward takes longer than what it sends to the host."""
    flops, sizes = recompute_flops(shape, batch.tokens, batch.row_tokens), kept_bytes(shape, batch.tokens)
    gemms = 2.0 * batch.tokens * sum(group.n_weights for group in shape.groups)
    seconds = gemms / _GEMM_FLOPS + flops["attention"] / _ATTENTION_FLOPS
    return sum(sizes[name] for name in names) / _HOST_BYTES_PER_S < seconds
