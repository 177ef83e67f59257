"""Decoder layers replayed as CUDA graphs: one launch for a pass instead of dozens, so that the host keeps ahead of the device.

A layer that meets the same call again (shapes, weights, adapters, plan) is captured, its forward and its backward apart, and replayed
from then on. A replay runs the very kernels of the eager pass on the addresses of the capture, so values do not change. What a
capture keeps for its backward stays in its memory: while somebody may still ask for that backward, further calls run eagerly.

Gradients leave through autograd as ever. All graphs of a model share one pool of memory, which `release` gives back.
"""

from __future__ import annotations

import functools
import logging
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fastlm.block.function import BlockFunction, refuse_second_derivative
from fastlm.block.spec import Layer
from fastlm_kernels.nf4 import NF4Weight

logger = logging.getLogger(__name__)

# A layer that makes its activations again saves memory, of which captures cost some (a pool for what they work on): it is captured only
# where its forward has fewer floating-point operations than this, so that the device is done before the host has launched the next layer.
# A layer of Llama-3.2-1B has 1.0e12 at 4x2048 tokens, one of Llama-3.1-8B 1.8e12 at 2x2048.
_LAUNCH_BOUND_FLOPS = 1.2e12
# Equal calls in a row before one is captured: they compile and load what a capture may not.
_EAGER_CALLS = 2
# Each costs some eager steps and a capture: a run whose calls change again and again is better off without.
_MAX_CHANGES = 16


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures on a device: cuBLAS keeps a workspace for every stream that it ever ran on."""
    return torch.cuda.Stream(device)


class Recorder:
    """Captures what runs on one device into CUDA graphs of one memory pool."""

    def __init__(self, device: torch.device) -> None:
        # what eager steps left behind would stand beside the pool
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _stream(device)

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture `run` without running its kernels. Returns what replays them on the current stream.

        Raises:
            RuntimeError: if it does what cannot be captured, or memory is short. The device is as before then.
        """
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # other threads may allocate meanwhile: a data loader pins memory, a collective's watchdog asks for events
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                _abandon(graph)
                raise
            graph.capture_end()
        current.wait_stream(self._stream)
        return graph.replay


def _abandon(graph: torch.cuda.CUDAGraph) -> None:
    try:
        graph.capture_end()
    except RuntimeError as error:
        # the error that ended the capture is the one to tell
        logger.debug("ending a failed capture: %s", error)


@dataclass
class _Buffers:
    """Memory that all captures of a device use in turn, each only while it runs."""

    made: dict[tuple[Any, ...], Tensor]

    def get(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        key = (name, shape, like.dtype)
        if key not in self.made:
            self.made[key] = torch.empty(shape, dtype=like.dtype, device=like.device)
        return self.made[key]


class _Passes:
    """The forward and backward of one layer for one key, captured.

    Attributes:
        x: [B, S, D], the input that the graphs read. It may be the output of the layer before, which then writes it in place.
        out: [B, S, D], the output that the forward writes.
        user: dies with the right to ask for the backward of the last replay; None before the first.
    """

    def __init__(
        self,
        key: tuple[Any, ...],
        recorder: Any,
        buffers: _Buffers,
        inputs: tuple[Tensor, Tensor, Tensor],
        layer: Layer,
        tensors: Sequence[Tensor | None],
        reads_in_place: bool,
    ) -> None:
        x, cos, sin = inputs
        self.key, self._recorder, self._layer = key, recorder, layer
        self.x = x.detach() if reads_in_place else torch.empty_like(x, memory_format=torch.contiguous_format)
        self.tables = torch.empty_like(cos), torch.empty_like(sin)
        # as tensors of their own: that each call writes new values into this memory is no change behind autograd's back
        self.leaf, self.leaves = _leaf(self.x, x.requires_grad), _leaves(tensors)
        self._wanted = [t for t in self.leaves if t is not None and t.requires_grad]
        # the gradient of the output arrives where that of the input leaves, as each layer's does for the layer below
        self.gradient = buffers.get("gradient", tuple(x.shape), x)
        size = sum(t.numel() for t in self._wanted)
        self._flat = buffers.get("adapters", (size,), self._wanted[0]) if self._wanted else None
        self.user: weakref.ref[Tensor] | None = None
        self._edge: GradientEdge | None = None
        self._replay_backward: Callable[[], None] | None = None
        self.load(*inputs)
        self._replay_forward = recorder.record(self._forward)

    @property
    def is_free(self) -> bool:
        """Whether nobody can ask for the backward of the last replay any more."""
        return self.user is None or self.user() is None

    def _forward(self) -> None:
        with torch.enable_grad():
            out = BlockFunction.apply(self.leaf, *(t.data for t in self.tables), self._layer, *self.leaves)
        # the graph without its output keeps what the backward reads
        self._edge, self.out = get_gradient_edge(out), out.detach()

    def _backward(self) -> None:
        wanted = [*([self.leaf] if self.leaf.requires_grad else []), *self._wanted]
        assert self._edge is not None
        grads = list(torch.autograd.grad(self._edge, wanted, self.gradient, retain_graph=True))
        if self.leaf.requires_grad:
            self.gradient.copy_(grads.pop(0))
        if self._flat is not None:
            torch.cat([grad.reshape(-1) for grad in grads], out=self._flat)

    def load(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Put a call's inputs where the graphs read them."""
        if x.data_ptr() != self.x.data_ptr():
            self.x.copy_(x.detach())
        torch._foreach_copy_(list(self.tables), [cos, sin])

    def replay_forward(self) -> None:
        self._replay_forward()

    def replay_backward(self, dy: Tensor) -> list[Tensor | None]:
        """Gradients of the layer's tensors from that of its output; that of its input is in `gradient`.

        Raises:
            RuntimeError: as `Recorder.record`, the first time.
        """
        if dy.data_ptr() != self.gradient.data_ptr():
            self.gradient.copy_(dy)
        if self._replay_backward is None:
            self._replay_backward = self._recorder.record(self._backward)
        self._replay_backward()
        if self._flat is None:
            return [None] * len(self.leaves)
        # one copy for all: they are the caller's, who may keep them
        flat = self._flat.clone()
        parts = iter(flat.split([t.numel() for t in self._wanted]))
        return [None if t is None or not t.requires_grad else next(parts).view(t.shape) for t in self.leaves]

    def eager_backward(
        self, dy: Tensor, layer: Layer, tensors: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """The same from a forward made again, with the tensors as they are now."""
        leaf, leaves = _leaf(self.x, self.leaf.requires_grad), _leaves(tensors)
        with torch.enable_grad():
            out = BlockFunction.apply(leaf, *self.tables, layer, *leaves)
        wanted = [t for t in (leaf, *leaves) if t is not None and t.requires_grad]
        grads = iter(torch.autograd.grad(out, wanted, dy))
        dx, *rest = [None if t is None or not t.requires_grad else next(grads) for t in (leaf, *leaves)]
        return dx, rest


def _leaf(tensor: Tensor, requires_grad: bool) -> Tensor:
    """The same memory as a tensor of its own."""
    return tensor.data.requires_grad_(requires_grad)


def _leaves(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if t is None else _leaf(t, t.requires_grad) for t in tensors]


def _not_captured(error: RuntimeError) -> str:
    return f"a CUDA graph could not be captured: {str(error).splitlines()[0]}"


class _ReplayFunction(torch.autograd.Function):
    """`BlockFunction` through captured passes."""

    @staticmethod
    def forward(ctx, x, cos, sin, passes, layer, place, graphs, *tensors):  # type: ignore[override]
        passes.load(x, cos, sin)
        passes.replay_forward()
        # freed by autograd together with everything saved: after the backward, unless the graph is retained, or with the graph
        mark = torch.empty(0)
        passes.user = weakref.ref(mark)
        ctx.passes, ctx.layer, ctx.place, ctx.graphs = passes, layer, place, graphs
        ctx.save_for_backward(mark, *tensors)
        return passes.out.detach() if place.feeds_a_layer else passes.out.clone()

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]
        refuse_second_derivative()
        passes, layer = ctx.passes, ctx.layer
        for group in layer.groups:
            group.refuse_changes()
        _, *tensors = ctx.saved_tensors
        needs_dx = ctx.needs_input_grad[0]
        is_current = _addresses(layer, tensors) == passes.key[-1]
        if is_current and not ctx.graphs.reason:
            try:
                grads = passes.replay_backward(dy)
            except RuntimeError as error:
                ctx.graphs.give_up(_not_captured(error))
            else:
                dx = None
                if needs_dx:
                    dx = passes.gradient.detach() if ctx.place.follows_a_layer else passes.gradient.clone()
                return dx, None, None, None, None, None, None, *grads
        dx, grads = passes.eager_backward(dy, layer, tensors)
        return dx, None, None, None, None, None, None, *grads


class StackCall:
    """One call of all layers of a model: the same object reaches each of them.

    Attributes:
        n_unwatched: how many layers follow each other with nobody looking in between; 0 where somebody may.
    """

    def __init__(self, n_unwatched: int) -> None:
        self.n_unwatched = n_unwatched

    def place(self, index: int) -> Place:
        """Where the layer with this index stands."""
        return Place(self.n_unwatched > 0 and index > 0, index < self.n_unwatched - 1)


@dataclass(frozen=True)
class Place:
    """Where a layer stands. Between two layers that nobody looks in between, hidden states and their gradients are handed on in the
    graphs' own memory; elsewhere they are copied out of it.

    Attributes:
        follows_a_layer: nothing but the layer before reads the gradient of its input.
        feeds_a_layer: nothing but the next layer reads its output.
    """

    follows_a_layer: bool
    feeds_a_layer: bool


@dataclass
class _Entry:
    """What one layer met: the last key, how often in a row, and its captured passes."""

    key: tuple[Any, ...] | None = None
    times: int = 0
    passes: _Passes | None = None


@dataclass
class _Generation:
    """Captures that share memory. What one keeps may lie where an earlier one worked, so all forwards are captured in one call, in the
    order in which they run; one more, later, would write over what others keep.

    Attributes:
        call: in which its forwards are captured.
        devices: what records on each device, and the buffers there.
    """

    call: StackCall
    devices: dict[torch.device, tuple[Any, _Buffers]]


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
        self._n_changes = 0
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
        return _ReplayFunction.apply(*inputs, passes, layer, place, self, *tensors)

    def _passes(
        self,
        module: nn.Module,
        call: StackCall,
        place: Place,
        inputs: tuple[Tensor, Tensor, Tensor],
        layer: Layer,
        tensors: Sequence[Tensor | None],
    ) -> _Passes | None:
        """The captured passes that serve this call, captured now if it is time to; None where it must run eagerly."""
        if self.reason or not self._can_capture(inputs[0], layer, tensors):
            return None
        key = _key(inputs, layer, tensors)
        entry = self._entries.setdefault(module, _Entry())
        entry.times = entry.times + 1 if entry.key == key else 1
        entry.key = key
        if entry.passes is not None and entry.passes.key == key:
            return entry.passes if entry.passes.is_free else None
        if entry.times <= _EAGER_CALLS:
            return None
        if self._generation is not None and self._generation.call is not call:
            # all anew, from the first layer of the next call on
            self._forget_passes()
            self._barred = weakref.ref(call)
        if self._barred is not None and self._barred() is call:
            return None
        if self._generation is None:
            self._generation = _Generation(call, {})
        return self._capture(entry, self._generation.devices, place, inputs, layer, tensors)

    def _forget_passes(self) -> None:
        self._generation = None
        for entry in self._entries.values():
            entry.passes = None
        self._n_changes += 1
        if self._n_changes == _MAX_CHANGES:
            self.give_up(f"shapes, adapters or settings changed for the {_MAX_CHANGES}th time")

    def _capture(
        self,
        entry: _Entry,
        devices: dict[torch.device, tuple[Any, _Buffers]],
        place: Place,
        inputs: tuple[Tensor, Tensor, Tensor],
        layer: Layer,
        tensors: Sequence[Tensor | None],
    ) -> _Passes | None:
        x = inputs[0]
        reads_in_place = place.follows_a_layer and self._is_output(x)
        try:
            if x.device not in devices:
                devices[x.device] = (self._make_recorder or Recorder)(x.device), _Buffers({})
            recorder, buffers = devices[x.device]
            assert entry.key is not None
            entry.passes = _Passes(entry.key, recorder, buffers, inputs, layer, tensors, reads_in_place)
        except RuntimeError as error:
            self.give_up(_not_captured(error))
        return entry.passes

    def _can_capture(self, x: Tensor, layer: Layer, tensors: Sequence[Tensor | None]) -> bool:
        if self._make_recorder is None and (not x.is_cuda or torch.cuda.is_current_stream_capturing()):
            return False
        trained = [t for t in tensors if t is not None and t.requires_grad]
        return (
            torch.is_grad_enabled()
            and bool(trained)
            and len({t.dtype for t in trained}) == 1
            # where samples lie differs from batch to batch
            and layer.layout is None
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


def _weight_addresses(weight: Tensor | NF4Weight) -> tuple[int, ...]:
    if isinstance(weight, Tensor):
        return (weight.data_ptr(),)
    parts = (weight.packed, weight.absmax, weight.nested_absmax, weight.nested_code, weight.nested_offset)
    return tuple(0 if part is None else part.data_ptr() for part in parts)


def _addresses(layer: Layer, tensors: Sequence[Tensor | None]) -> tuple[int, ...]:
    """Where all that a layer reads lies, beside its inputs."""
    found = [a for group in layer.groups for weight in group.weights for a in _weight_addresses(weight)]
    found += [
        0 if tensor is None else tensor.data_ptr()
        for norm in layer.norms
        if norm is not None
        for tensor in (norm.weight, norm.bias)
    ]
    found += [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    return tuple(found)


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
        torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
        _addresses(layer, tensors),
    )  # fmt: skip
