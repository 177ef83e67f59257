"""Which decoder layers are captured as CUDA graphs, and when: one launch for a pass instead of dozens keeps the host ahead of the device.

A layer that meets the same call again (shapes, weights, adapters, plan) is captured (`captures.py`) and replayed from then on; what a
replay would get wrong, or must share its memory with, runs eagerly. All captures of a model share one pool of memory, which `release`
gives back.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastlm.block.captures import Buffers, Passes, Place, Recorder, ReplayFunction, addresses, not_captured
from fastlm.block.function import BlockFunction
from fastlm.block.offload import HostStore, Parcel
from fastlm.block.spec import Layer, MemoryPlan

logger = logging.getLogger(__name__)

# A layer that makes its activations again saves memory, of which captures cost some (a pool for what they work on): it is captured only
# where its forward has fewer floating-point operations than this, so that the device is done before the host has launched the next layer.
# A layer of Llama-3.2-1B has 1.0e12 at 4x2048 tokens, one of Llama-3.1-8B 1.8e12 at 2x2048.
_LAUNCH_BOUND_FLOPS = 1.2e12
# Equal calls in a row before one is captured: they compile and load what a capture may not.
_EAGER_CALLS = 2
# A capture costs about as much as an eager step: so many in a row that were replayed less often than this, and it is not tried again.
_MAX_WASTED, _WORTH = 16, 8


class StackCall:
    """One call of all layers of a model: the same object reaches each of them.

    Attributes:
        n_unwatched: how many layers follow each other with nobody looking in between; 0 where somebody may.
        plans: what each layer keeps; None leaves it to the layer.
    """

    def __init__(
        self,
        n_unwatched: int,
        plans: Sequence[MemoryPlan] | None = None,
        host: Callable[[torch.device], HostStore] | None = None,
    ) -> None:
        """`host`: gives what takes the kept tensors of a device that plans send to the host."""
        self.n_unwatched, self.plans, self._host = n_unwatched, plans, host
        self._last: Parcel | None = None

    def plan(self, index: int) -> MemoryPlan | None:
        """Of the layer with this index."""
        return None if self.plans is None or index >= len(self.plans) else self.plans[index]

    def parcel(self, plan: MemoryPlan, device: torch.device) -> Parcel | None:
        """Takes what a layer's plan sends to the host, in the order of layers; None where nothing was sent so far.

        The backward of a layer that keeps all on the device calls for what those below it sent.
        """
        # hooks of the user's, which offload themselves or look at what is saved, would see copies that are not there yet
        has_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        if self._host is None or has_hooks or not torch.is_grad_enabled() or not (plan.offloads or self._last):
            return None
        self._last = self._host(device).open(self._last)
        return self._last

    def place(self, index: int) -> Place:
        """Where the layer with this index stands."""
        return Place(self.n_unwatched > 0 and index > 0, index < self.n_unwatched - 1)


@dataclass
class _Entry:
    """What one layer met: the last key, how often in a row, and its captured passes."""

    key: tuple[Any, ...] | None = None
    times: int = 0
    passes: Passes | None = None


@dataclass
class _Generation:
    """Captures that share memory. What one keeps may lie where an earlier one worked, so all forwards are captured in one call, in the
    order in which they run; one more, later, would write over what others keep.

    Attributes:
        call: in which its forwards are captured.
        n_before: replays of earlier generations.
        devices: what records on each device, and the buffers there.
    """

    call: StackCall
    n_before: int
    devices: dict[torch.device, tuple[Any, Buffers]]


class LayerGraphs:
    """The captured layers of one model.

    Attributes:
        reason: why nothing is captured any more; "" while all is well.
        replays: calls of layers that were replayed.
    """

    def __init__(self, make_recorder: Callable[[torch.device], Any] | None = None) -> None:
        """`make_recorder`: makes what records on a device; None for CUDA graphs, and then only on CUDA devices."""
        self._make_recorder = make_recorder
        self.reason = ""
        self.replays = 0
        self._n_wasted = 0
        self.release()

    def __reduce__(self) -> tuple[Any, ...]:
        # graphs belong to a process and to the tensors that they were captured with
        return LayerGraphs, (self._make_recorder,)

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerGraphs:
        return LayerGraphs(self._make_recorder)

    def release(self) -> None:
        """Forget all captures. Their memory is free as soon as no backward needs it."""
        self._entries: weakref.WeakKeyDictionary[nn.Module, _Entry] = weakref.WeakKeyDictionary()
        self._generation: _Generation | None = None
        # the call in which a generation ended: its first layers have run, so that no new one may begin in it
        self._barred: weakref.ref[StackCall] | None = None

    @property
    def is_empty(self) -> bool:
        return self._generation is None

    @property
    def status(self) -> str:
        """For the report."""
        parts = [f"{self.replays} calls of layers replayed"] if self.replays else []
        return "; ".join(parts + ([f"none any more, {self.reason}"] if self.reason else []))

    def give_up(self, reason: str) -> None:
        """Capture nothing any more, and say why."""
        self.reason = reason
        self.release()
        logger.warning("%s. Layers run without CUDA graphs from now on, which changes no value", reason)

    def apply(
        self,
        module: nn.Module,
        call: StackCall,
        index: int,
        inputs: tuple[Tensor, Tensor, Tensor],
        layer: Layer,
        tensors: Sequence[Tensor | None],
    ) -> Tensor:
        """`BlockFunction.apply` for a layer, captured where that is possible.

        Args:
            module: the layer.
            call: the call of the model that this is a part of.
            index: of the layer among the model's.
            inputs: hidden states [B, S, D], cos and sin.
            layer, tensors: as `BlockFunction`.
        """
        place = call.place(index)
        passes = self._passes(module, call, place, inputs, layer, tensors)
        if passes is None:
            return BlockFunction.apply(*inputs, layer, *tensors)
        self.replays += 1
        return ReplayFunction.apply(*inputs, passes, layer, place, self, *tensors)

    def _passes(
        self,
        module: nn.Module,
        call: StackCall,
        place: Place,
        inputs: tuple[Tensor, Tensor, Tensor],
        layer: Layer,
        tensors: Sequence[Tensor | None],
    ) -> Passes | None:
        """The captured passes that serve this call, captured now if it is time to; None where it must run eagerly."""
        if self.reason or not torch.is_grad_enabled():
            return None
        key = _key(inputs, layer, tensors) if self._can_capture(inputs[0], layer, tensors) else None
        entry = self._entries.setdefault(module, _Entry())
        entry.times = entry.times + 1 if entry.key == key else 1
        entry.key = key
        if key is not None and entry.passes is not None and entry.passes.key == key:
            return entry.passes if entry.passes.is_free else None
        is_wanted = key is not None and entry.times > _EAGER_CALLS
        if self._generation is not None and (
            entry.passes is not None or (is_wanted and self._generation.call is not call)
        ):
            # this call needs the memory, or captures that the others must share: all anew, from the first layer of a later call on
            self._forget_passes(call)
        is_barred = self._barred is not None and self._barred() is call
        if not is_wanted or is_barred or self.reason:
            return None
        if self._generation is None:
            self._generation = _Generation(call, self.replays, {})
        return self._capture(entry, self._generation.devices, place, inputs, layer, tensors)

    def _forget_passes(self, call: StackCall) -> None:
        assert self._generation is not None
        n_replays = self.replays - self._generation.n_before
        self._n_wasted = self._n_wasted + 1 if n_replays < _WORTH * len(self._entries) else 0
        self._generation, self._barred = None, weakref.ref(call)
        for entry in self._entries.values():
            entry.passes = None
        if self._n_wasted == _MAX_WASTED:
            self.give_up(f"shapes, adapters or settings changed {_MAX_WASTED} times in a row after a few steps")

    def _capture(
        self,
        entry: _Entry,
        devices: dict[torch.device, tuple[Any, Buffers]],
        place: Place,
        inputs: tuple[Tensor, Tensor, Tensor],
        layer: Layer,
        tensors: Sequence[Tensor | None],
    ) -> Passes | None:
        x = inputs[0]
        reads_in_place = place.follows_a_layer and self._is_output(x)
        try:
            if x.device not in devices:
                devices[x.device] = (self._make_recorder or Recorder)(x.device), Buffers({})
            recorder, buffers = devices[x.device]
            assert entry.key is not None
            entry.passes = Passes(entry.key, recorder, buffers, inputs, layer, tensors, reads_in_place)
        except RuntimeError as error:
            self.give_up(not_captured(error))
        return entry.passes

    def _can_capture(self, x: Tensor, layer: Layer, tensors: Sequence[Tensor | None]) -> bool:
        if self._make_recorder is None and (not x.is_cuda or torch.cuda.is_current_stream_capturing()):
            return False
        trained = [t for t in tensors if t is not None and t.requires_grad]
        return (
            bool(trained)
            and len({t.dtype for t in trained}) == 1
            # where samples lie differs from batch to batch
            and layer.layout is None
            and layer.parcel is None
            and (layer.plan.gate_up or _flops(x, layer) < _LAUNCH_BOUND_FLOPS)
            # a mask's seed is drawn by the host
            and not any(any(group.dropouts) for group in layer.groups)
            # what is kept in a graph would never reach hooks that offload it
            and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            and not torch.is_anomaly_enabled()
        )

    def _is_output(self, x: Tensor) -> bool:
        """Whether x lies where a captured forward writes it."""
        return any(
            e.passes is not None and e.passes.out.data_ptr() == x.data_ptr() and e.passes.out.shape == x.shape
            for e in self._entries.values()
        )


def _flops(x: Tensor, layer: Layer) -> int:
    """Floating-point operations of the projections in one forward."""
    sizes = sum(math.prod(weight.shape) for group in layer.groups for weight in group.weights)
    return 2 * sizes * x.shape[0] * x.shape[1]


def _key(inputs: tuple[Tensor, Tensor, Tensor], layer: Layer, tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """All that the kernels of a call depend on, beside the values in memory. Addresses last."""
    x = inputs[0]
    kind = x.device.type
    return (
        x.device, x.requires_grad, *((t.shape, t.dtype) for t in inputs),
        layer.spec, layer.plan, layer.deterministic, layer.rounds_once,
        *((group.scalings, group.lora_dtype) for group in layer.groups),
        *(norm and (norm.eps, norm.weight_offset, norm.casts_before_weight, norm.is_layer_norm) for norm in layer.norms),
        tuple(t is not None and t.requires_grad for t in tensors),
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0,
        torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
        addresses(layer, tensors),
    )  # fmt: skip
