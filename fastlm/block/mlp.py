"""The layer's MLP, forward and backward, by tiles of rows where these are many.

A tile's wide activations are gone when the next one begins; weights are decoded once a pass all the same. How many rows a tile has
follows from the shape alone, so that no plan and no free memory changes a value. Adapters' gradients of tiles are summed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fastlm.block.norms import norm_bwd, norm_fwd
from fastlm.block.spec import Layer, MemoryPlan
from fastlm_kernels.lora import StackedLinear
from fastlm_kernels.lora_mlp import act_fwd, mlp_bwd

# T rows (tokens), D hidden size, F MLP width

# Of the input projections: rows with no more are not tiled, and of one tile. GEMMs of 2,048 rows of an 8B model's MLP still fill the
# multiprocessors of an H200 in whole waves.
WHOLE_BYTES = 256 << 20
TILE_BYTES = 128 << 20
# GEMM tiles cover 128 rows or a divisor of it
_ROW_MULTIPLE = 128


class HeldLinear(StackedLinear):
    """Projections whose weights stay decoded from one tile to the next, until `release`."""

    _held: Tensor | None = None

    def _room(self) -> Tensor:
        if self._decoded is None:
            self._decoded = self._held
        self._held = super()._room()
        return self._held

    def release(self) -> None:
        self._held = self._decoded = None


def replay(linear: StackedLinear, x: Tensor) -> Tensor:
    """The projections' output once more. Their decoded weights stay for the gradients if the pass holds them, or tiles share them."""
    y = linear.forward(x)
    if not linear.holds and not isinstance(linear, HeldLinear):
        # where adapters ride, they lie in the weights' room
        linear.a = linear.b = None
    return y


def tile_rows(n_rows: int, width: int, itemsize: int) -> int:
    """Rows of a tile: all of them up to `WHOLE_BYTES` of input projections, else of equal tiles of `TILE_BYTES` and 128 rows or more."""
    if n_rows * width * itemsize <= WHOLE_BYTES:
        return n_rows
    most = max(1, TILE_BYTES // (width * itemsize * _ROW_MULTIPLE)) * _ROW_MULTIPLE
    n_tiles = -(-n_rows // most)
    return _ROW_MULTIPLE * -(-n_rows // (n_tiles * _ROW_MULTIPLE))


def layer_tile(layer: Layer, rows: Tensor) -> int:
    """Rows of a tile for this layer and its input [T, D]."""
    if any(layer.gate_up.dropouts) or any(layer.down.dropouts):
        # a mask is drawn for all rows at once
        return rows.shape[0]
    return tile_rows(rows.shape[0], sum(layer.gate_up.widths), rows.element_size())


def _tiles(n_rows: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, n_rows)) for start in range(0, n_rows, max(1, step))] or [slice(0, 0)]


class _Kept:
    """Tensors that tiles leave behind, each put together from its tiles."""

    def __init__(self, n_rows: int) -> None:
        self._n_rows = n_rows
        self.tensors: dict[str, Tensor] = {}

    def add(self, name: str, part: Tensor, rows: slice) -> None:
        if part.shape[0] == self._n_rows:
            self.tensors[name] = part
            return
        room = self.room(name, part.shape[1], part, rows)
        if room.data_ptr() != part.data_ptr():
            room.copy_(part)

    def room(self, name: str, width: int, like: Tensor, rows: slice) -> Tensor:
        """Where a tile of this tensor of [T, width] lies."""
        if name not in self.tensors:
            self.tensors[name] = like.new_empty((self._n_rows, width))
        return self.tensors[name][rows]


def _release(*linears: StackedLinear) -> None:
    for linear in linears:
        if isinstance(linear, HeldLinear):
            linear.release()


def _act(gate_up: Tensor, layer: Layer, down: StackedLinear) -> Tensor:
    room = down.input(gate_up.shape[0], gate_up.device)
    return act_fwd(gate_up, layer.spec.activation, layer.spec.is_gated, out=room)


def mlp_forward(
    read: Tensor,
    h: Tensor,
    layer: Layer,
    gate_up: StackedLinear,
    down: StackedLinear,
    plan: MemoryPlan,
    step: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """y = h + m * mlp_out_norm(mlp(read)), all [T, D], and what the plan keeps. h may be overwritten unless it is kept.

    step: rows of a tile.
    """
    spec, n_rows = layer.spec, h.shape[0]
    owns, adds_in_gemm = not plan.residual, layer.mlp_out_norm is None and spec.residual_multiplier == 1.0
    kept, tiles = _Kept(n_rows), _tiles(n_rows, step)
    # a single tile makes its own; the sum in place and the sum into new memory are the same to the bit
    y = None if len(tiles) == 1 else h if owns else h.clone()
    for rows in tiles:
        h_rows = h[rows] if y is None else y[rows]
        room = kept.room("gate_up", gate_up.width, read, rows) if plan.gate_up and len(tiles) > 1 else None
        packed = gate_up.forward(read[rows], out=room)
        if plan.gate_up:
            kept.add("gate_up", packed, rows)
        del room
        act = _act(packed, layer, down)
        del packed
        if adds_in_gemm:
            y_rows = down.forward_add(act, h_rows, owns=owns or y is not None)
        else:
            y_rows = down.forward(act)
            if layer.mlp_out_norm is not None:
                if plan.down:
                    kept.add("down", y_rows, rows)
                y_rows, _, _ = norm_fwd(layer.mlp_out_norm, y_rows)
            y_rows = (y_rows if spec.residual_multiplier == 1.0 else y_rows.mul_(spec.residual_multiplier)).add_(h_rows)
        del act
        if plan.gate_up:
            for i, linear in ((2, gate_up), (3, down)):
                for j, low in enumerate(linear.saved()):
                    kept.add(f"low {i} {j}", low, rows)
        if y is None:
            y = y_rows
        elif y_rows.data_ptr() != h_rows.data_ptr():
            h_rows.copy_(y_rows)
        # before the next tile has its own
        del h_rows, y_rows
        gate_up.low, down.low = {}, {}
    _release(gate_up, down)
    assert y is not None
    return y, kept.tensors


class _Sums:
    """Gradients of adapters, summed over tiles."""

    def __init__(self) -> None:
        self._totals: list[Tensor | None] | None = None
        self._dtypes: list[torch.dtype | None] = []

    def add(self, grads: Sequence[Tensor | None]) -> None:
        if self._totals is None:
            self._totals, self._dtypes = list(grads), [None if g is None else g.dtype for g in grads]
            return
        for i, grad in enumerate(grads):
            total = self._totals[i]
            if total is not None and grad is not None:
                self._totals[i] = total.float().add_(grad)

    def take(self) -> list[Tensor | None]:
        assert self._totals is not None  # there is a tile
        return [
            total if total is None or dtype is None else total.to(dtype)
            for total, dtype in zip(self._totals, self._dtypes, strict=True)
        ]


def mlp_backward(
    dy: Tensor,
    read: Tensor,
    layer: Layer,
    gate_up: StackedLinear,
    down: StackedLinear,
    kept: dict[str, Tensor],
    needed: Sequence[bool],
    step: int,
) -> tuple[Tensor, list[Tensor | None]]:
    """Gradients of `mlp_forward`'s read [T, D], without what flows through h, and of the adapters.

    Args:
        dy: [T, D], unit column stride.
        kept: what the forward kept; the rest is made again.
        needed: of bias, A, B of each projection.
        step: rows of a tile, as in the forward.
    """
    tiles, spec = _tiles(dy.shape[0], step), layer.spec
    dread, sums = None if len(tiles) == 1 else torch.empty_like(read, memory_format=torch.contiguous_format), _Sums()
    for rows in tiles:
        _restore(gate_up, kept, 2, rows)
        _restore(down, kept, 3, rows)
        packed = kept["gate_up"][rows] if "gate_up" in kept else replay(gate_up, read[rows])
        dz = dy[rows] if spec.residual_multiplier == 1.0 else dy[rows] * spec.residual_multiplier
        if layer.mlp_out_norm is not None:
            z = kept["down"][rows] if "down" in kept else replay(down, _act(packed, layer, down))
            dz = norm_bwd(layer.mlp_out_norm, dz, z, norm_fwd(layer.mlp_out_norm, z)[2])
            del z
        dx, grads = mlp_bwd(
            dz, read[rows], packed, gate_up, down, spec.activation, True, needed,
            owns_packed="gate_up" not in kept, is_gated=spec.is_gated,
        )  # fmt: skip
        assert dx is not None  # it was asked for
        del dz, packed
        sums.add(grads)
        if dread is None:
            return dx, sums.take()
        dread[rows] = dx
        # before the next tile has its own; products with B lie beside the gradient
        del dx
        gate_up.high, down.high = {}, {}
    _release(gate_up, down)
    assert dread is not None
    return dread, sums.take()


def _restore(linear: StackedLinear, kept: dict[str, Tensor], index: int, rows: slice) -> None:
    """The rank-R products of a tile from the forward; none where they are made again."""
    lows = [low[rows] for name, low in kept.items() if name.startswith(f"low {index} ")]
    linear.low = {}
    if lows:
        linear.restore(lows)


# Makes the projections of a group: plain ones for a single tile.
MakeLinear = Callable[..., StackedLinear]


def linear_class(n_rows: int, step: int) -> MakeLinear:
    return StackedLinear if step >= n_rows else HeldLinear
