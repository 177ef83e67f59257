"""The forward and backward of one decoder layer, captured as two CUDA graphs and replayed behind one autograd function.

A replay runs the very kernels of the eager pass on the addresses of the capture, so values do not change. What a capture keeps for
its backward stays in its memory: it is free for another call only when nobody can ask for that backward any more. Gradients leave
through autograd as ever.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fastlm.block.function import BlockFunction, refuse_second_derivative
from fastlm.block.spec import Layer
from fastlm_kernels.nf4 import NF4Weight

logger = logging.getLogger(__name__)


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
class Buffers:
    """Memory that all captures of a device use in turn, each only while it runs."""

    made: dict[tuple[Any, ...], Tensor]

    def get(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        key = (name, shape, like.dtype)
        if key not in self.made:
            self.made[key] = torch.empty(shape, dtype=like.dtype, device=like.device)
        return self.made[key]


class Passes:
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
        buffers: Buffers,
        inputs: tuple[Tensor, Tensor, Tensor],
        layer: Layer,
        tensors: Sequence[Tensor | None],
        reads_in_place: bool,
    ) -> None:
        x, cos, sin = inputs
        # what is kept in a graph cannot be dropped
        self.key, self._recorder, self._layer = key, recorder, dataclasses.replace(layer, rescue=None)
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

    def load_gradient(self, dy: Tensor) -> None:
        """Put the gradient of the output where the backward reads it, and capture the backward if it was not yet.

        Raises:
            RuntimeError: as `Recorder.record`; dy is as before then.
        """
        if dy.data_ptr() != self.gradient.data_ptr():
            self.gradient.copy_(dy)
        if self._replay_backward is None:
            self._replay_backward = self._recorder.record(self._backward)

    def replay_backward(self) -> list[Tensor | None]:
        """Gradients of the layer's tensors; that of its input takes the place of the output's in `gradient`."""
        assert self._replay_backward is not None
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


def not_captured(error: RuntimeError) -> str:
    return f"a CUDA graph could not be captured: {str(error).splitlines()[0]}"


class ReplayFunction(torch.autograd.Function):
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
        if not ctx.graphs.reason and addresses(layer, tensors) != passes.key[-1]:
            ctx.graphs.give_up("weights or adapters moved between a forward and its backward")
        if not ctx.graphs.reason:
            try:
                passes.load_gradient(dy)
            except RuntimeError as error:
                ctx.graphs.give_up(not_captured(error))
        if ctx.graphs.reason:
            dx, grads = passes.eager_backward(dy, layer, tensors)
        else:
            grads, dx = passes.replay_backward(), None
            if needs_dx:
                dx = passes.gradient.detach() if ctx.place.follows_a_layer else passes.gradient.clone()
        return dx, None, None, None, None, None, None, *grads


def _weight_addresses(weight: Tensor | NF4Weight) -> tuple[int, ...]:
    if isinstance(weight, Tensor):
        return (weight.data_ptr(),)
    parts = (weight.packed, weight.absmax, weight.nested_absmax, weight.nested_code, weight.nested_offset)
    return tuple(0 if part is None else part.data_ptr() for part in parts)


def addresses(layer: Layer, tensors: Sequence[Tensor | None]) -> tuple[int, ...]:
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
