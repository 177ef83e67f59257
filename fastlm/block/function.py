"""The block's forward and backward over plain tensors.

    h = x + m * out_norm(attention(norm(x)));  y = h + m * mlp_out_norm(mlp(mlp_norm(h)))        each projection with its adapter

Norms may be missing; in a parallel layer the MLP reads norm(x). The first residual add rides in the MLP's norm, and both norms'
backward kernels add the gradient of the residual stream. Each weight is decoded once in the forward and once in the backward,
for what is made again there and for the gradients together. Values are rounded where the stock layer rounds them. All that is
kept goes through `save_for_backward`, as it is or as its copy on the host. Long rows go through the MLP in tiles and through the
attention by groups of heads (`mlp.py`, `attention.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastlm.block.attention import Record, attend, attend_bwd, attend_recorded
from fastlm.block.heads import heads_bwd, heads_fwd, turns_in_place
from fastlm.block.mlp import layer_tile, linear_class, mlp_backward, mlp_forward, replay
from fastlm.block.norms import Statistics, norm_bwd, norm_fwd
from fastlm.block.rescue import is_dropped
from fastlm.block.spec import RECOMPUTE_ALL, Layer, MemoryPlan, Norm
from fastlm_kernels.lora import StackedLinear

# B batch, S sequence, T = B*S tokens, D hidden size


def _linears(
    layer: Layer, tensors: Sequence[Tensor | None], x: Tensor, plan: MemoryPlan, is_forward: bool, step: int
) -> list[StackedLinear]:
    """The layer's four groups of projections for one pass: the forward, or the backward with what `plan` makes again.

    Each is to be let go of when its part is over: where adapters ride, it holds the decoded weights. step: rows of the MLP's tiles.
    """
    tokens, spec = x.shape[0], layer.spec
    # rooms beside x are written by norms and the activation, beside dy by the backward of what stands behind
    writes_x = layer.attention_norm is not None and not layer.attention_norm.is_layer_norm
    writes_n = layer.mlp_norm is not None and not layer.mlp_norm.is_layer_norm
    writes_dh = writes_n and layer.attention_out_norm is None and spec.residual_multiplier == 1.0
    writes_act = spec.is_gated and (is_forward or layer.mlp_out_norm is not None)
    rooms = (
        (tokens, layer.rounds_once and writes_x and (is_forward or not plan.qkv), not is_forward),
        (tokens, False, writes_dh and not is_forward),
        (step, layer.rounds_once and writes_n and (is_forward or not plan.gate_up), not is_forward),
        (step, layer.rounds_once and writes_act, False),
    )
    made, stop, holds = [], 0, plan.holds_weights and not is_forward
    of_mlp = linear_class(tokens, step)
    for i, (group, (rows, x_room, dy_room)) in enumerate(zip(layer.groups, rooms, strict=True)):
        start, stop = stop, stop + 3 * len(group.weights)
        make = of_mlp if i >= 2 else StackedLinear
        made.append(make(group, tensors[start:stop], x.dtype, rows * x_room, rows * dy_room, holds=holds))
    return made


def _flat(out: Tensor) -> Tensor:
    """[B, S, H, E] -> [T, H*E]; a copy only where the library's strides allow no view."""
    return out.reshape(out.shape[0] * out.shape[1], -1)


def _normed(
    norm: Norm, x: Tensor, linear: StackedLinear, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Statistics]:
    """`norm_fwd`, where it can into the room of the projections that read it."""
    room = None if norm.is_layer_norm else linear.input(x.shape[0], x.device)
    return norm_fwd(norm, x, residual, out=room)


def _read(rows: Tensor, layer: Layer, linear: StackedLinear) -> tuple[Tensor, Statistics]:
    """What attention (and a parallel MLP) reads: norm(x) [T, D], or x itself without a norm."""
    if layer.attention_norm is None:
        return rows, ()
    n, _, statistics = _normed(layer.attention_norm, rows, linear)
    return n, statistics


@dataclass
class _Added:
    """The residual stream h [T, D] behind the attention and what the MLP reads of it."""

    h: Tensor
    read: Tensor | None
    statistics: Statistics
    added: Tensor | None
    added_statistics: Statistics


def _scaled(x: Tensor, layer: Layer) -> Tensor:
    """x times the residual multiplier; x may be overwritten."""
    return x if layer.spec.residual_multiplier == 1.0 else x.mul_(layer.spec.residual_multiplier)


def _add(rows: Tensor, added: Tensor, layer: Layer, linear: StackedLinear) -> _Added:
    """h = x + m * out_norm(added), and the MLP's norm of it in the same pass."""
    raw = added
    added_statistics: Statistics = ()
    if layer.attention_out_norm is not None:
        added, _, added_statistics = norm_fwd(layer.attention_out_norm, added)
    added = _scaled(added, layer)
    kept = raw if layer.attention_out_norm is not None else None
    if layer.mlp_norm is None:
        return _Added(rows + added, None, (), kept, added_statistics)
    read, h, statistics = _normed(layer.mlp_norm, added, linear, rows)
    return _Added(h, read, statistics, kept, added_statistics)


class BlockFunction(torch.autograd.Function):
    """y = layer(x).

    Inputs: x [B, S, D], cos and sin [B or 1, S, R], the layer, (bias, A, B) of each projection, and the biases of the attention's
    and the MLP's norm, which are there for their gradients alone.
    """

    @staticmethod
    def forward(ctx, x, cos, sin, layer, *tensors):  # type: ignore[override]
        plan = layer.plan if any(ctx.needs_input_grad) else RECOMPUTE_ALL
        y, kept = _attempted(layer, plan, lambda plan: _forward(x, cos, sin, layer, tensors, plan))
        ctx.layer, ctx.kept, ctx.names = layer, kept, tuple(kept.tensors)
        ctx.save_for_backward(kept.x, cos, sin, *kept.tensors.values(), *tensors)
        kept.tensors = {}
        del kept.x
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]
        refuse_second_derivative()
        return _attempted(ctx.layer, ctx.kept.plan, lambda _: _backward(ctx, dy))


def _attempted(layer: Layer, plan: MemoryPlan, attempt: Callable[[MemoryPlan], Any]) -> Any:
    """A pass of a layer, again where it is short of memory."""
    if layer.rescue is None:
        return attempt(plan)
    return layer.rescue.run(attempt, plan, lambda: None if layer.parcel is None else layer.parcel.settle())


def _forward(
    x: Tensor, cos: Tensor, sin: Tensor, layer: Layer, tensors: Sequence[Tensor | None], plan: MemoryPlan
) -> tuple[Tensor, _Kept]:
    rows, spec = x.reshape(-1, x.shape[-1]), layer.spec
    step = layer_tile(layer, rows)
    qkv, projection, gate_up, down = _linears(layer, tensors, rows, plan, is_forward=True, step=step)
    kept = _Kept(layer, plan, step)
    kept.x = kept.sent("input", "x", x)
    n, _ = _read(rows, layer, qkv)
    packed = qkv.forward(n)
    heads = heads_fwd(packed, cos, sin, layer, x.shape[0])
    if plan.qkv:
        kept.add("qkv", "packed", packed)
    del packed
    records = None
    if plan.attention:
        out, records, saved = attend_recorded(heads, layer)
        kept.add("attention", "out", out)
        for i, tensor in enumerate(saved):
            kept.add("", f"attention {i}", tensor)
        del saved
    else:
        out = attend(heads, layer)
    del heads
    if plan.qkv:
        kept.add_low(0, qkv)
    # what read the norm's output is over; the last of it goes with the products beside it
    del qkv
    if not spec.is_parallel:
        del n
    added = _add(rows, projection.forward(_flat(out)), layer, gate_up)
    del out
    if plan.residual:
        kept.add_low(1, projection)
        kept.add("residual", "h", added.h)
        if added.added is not None:
            kept.add("residual", "added", added.added)
    read = added.read if added.read is not None else (n if spec.is_parallel else added.h)
    h = added.h
    del added, projection
    y, of_mlp = mlp_forward(read, h, layer, gate_up, down, plan, step)
    del read, h
    for name, tensor in of_mlp.items():
        kept.add(_field(name), name, tensor)
    kept.records = records
    if layer.rescue is not None:
        # what a library saved beside its output is small, and may be others' too
        layer.rescue.watch(t for name, t in kept.tensors.items() if _FIELDS.get(name, "") not in ("", *plan.offloads))
    # as a tensor of its own: autograd lets nobody write into a view that a function returns, and hooks on layers may
    return y.view(x.shape).data, kept


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    layer, plan, step, records = ctx.layer, ctx.kept.plan, ctx.kept.step, ctx.kept.records
    spec, needs_dx = layer.spec, ctx.needs_input_grad[0]
    x, cos, sin, *rest = ctx.saved_tensors
    kept, tensors = dict(zip(ctx.names, rest, strict=False)), rest[len(ctx.names) :]
    del rest
    if layer.parcel is not None:
        kept = layer.parcel.fetch({"x": x} | kept)
        x = kept.pop("x")
    kept, plan = _without_dropped(kept, plan)
    rows, batch = x.reshape(-1, x.shape[-1]), x.shape[0]
    dy = dy.reshape(rows.shape)
    dy = dy if dy.stride(1) == 1 else dy.contiguous()
    qkv, projection, gate_up, down = _linears(layer, tensors, rows, plan, is_forward=False, step=step)
    needed = _shares(ctx.needs_input_grad[4:], (qkv, projection, gate_up, down))
    trains_attention_bias, trains_mlp_bias = ctx.needs_input_grad[-2:]
    # --- what the plan makes again
    n, n_statistics = _read(rows, layer, qkv)
    packed = kept["packed"] if plan.qkv else replay(qkv, n)
    # long rows have no memory to spare for it while the MLP and the attention run
    remakes_n = step < rows.shape[0] and layer.attention_norm is not None and not (spec.is_parallel or qkv.x_pad)
    if remakes_n:
        del n
    heads = heads_fwd(packed, cos, sin, layer, batch, is_turned=plan.qkv and turns_in_place(layer))
    if plan.attention:
        out = kept.pop("out")
        saved = [kept.pop(name) for name in ctx.names if name.startswith("attention ")]
    else:
        out, records, saved = attend_recorded(heads, layer)
    if plan.residual:
        added = _Added(kept.pop("h"), None, (), kept.pop("added", None), ())
        if layer.mlp_norm is not None:
            added.read, _, added.statistics = _normed(layer.mlp_norm, added.h, gate_up)
        if layer.attention_out_norm is not None:
            assert added.added is not None
            added.added_statistics = norm_fwd(layer.attention_out_norm, added.added)[2]
    else:
        added = _add(rows, replay(projection, _flat(out)), layer, gate_up)
    read = added.read if added.read is not None else (n if spec.is_parallel else added.h)
    if plan.qkv:
        qkv.restore([kept[name] for name in ctx.names if name.startswith("low 0 ")])
    if plan.residual:
        projection.restore([kept[name] for name in ctx.names if name.startswith("low 1 ")])
    # --- the MLP
    dread, mlp_grads = mlp_backward(dy, read, layer, gate_up, down, kept, needed[2] + needed[3], step)
    added.read = None
    del read, kept, gate_up, down
    mlp_bias = _bias_grad(layer.mlp_norm, dread) if trains_mlp_bias else None
    # --- the residual stream behind the attention
    if spec.is_parallel:
        dh = dy
    elif layer.mlp_norm is None:
        dh = dread.add_(dy)
    else:
        room = projection.gradient(rows.shape[0], x.device) if projection.dy_pad else None
        dh = norm_bwd(layer.mlp_norm, dread, added.h, added.statistics, dh=dy, out=room)
    if not spec.is_parallel:
        del dread
    da = dh if spec.residual_multiplier == 1.0 else dh * spec.residual_multiplier
    if layer.attention_out_norm is not None:
        assert added.added is not None
        da = norm_bwd(layer.attention_out_norm, da, added.added, added.added_statistics)
    del added, dy
    # --- the attention
    dflat = projection.backward_x(da)
    out_grads = projection.backward_adapters(da, _flat(out), needed[1])
    del da, projection
    dq, dk, dv = attend_bwd(dflat.view(out.shape), records, heads, out, saved, owns=not plan.qkv)
    del dflat, out, saved
    dpacked = qkv.gradient(rows.shape[0], x.device) if plan.qkv else packed
    heads_bwd(dq, dk, dv, heads, packed, cos, sin, layer, dpacked)
    del dq, dk, dv, heads, packed
    # --- the input
    dx = attention_bias = None
    norm = layer.attention_norm
    if needs_dx or trains_attention_bias:
        dn = qkv.backward_x(dpacked)
        dn = dn.add_(dread) if spec.is_parallel else dn
    else:
        qkv.make_high(dpacked)
    if trains_attention_bias:
        attention_bias = _bias_grad(norm, dn)
    if needs_dx:
        dx = dn.add_(dh) if norm is None else norm_bwd(norm, dn, rows, n_statistics, dh=dh)
        dx = dx.view(x.shape)
        del dn
    del dh
    if remakes_n:
        n, _ = _read(rows, layer, qkv)
    qkv_grads = qkv.backward_adapters(dpacked, n, needed[0])
    return dx, None, None, None, *qkv_grads, *out_grads, *mlp_grads, attention_bias, mlp_bias


class _Kept:
    """What a forward keeps, by name; what its plan sends to the host begins to travel at once.

    Attributes:
        x: the layer's input, or its copy on the host.
        tensors: all else that is saved.
        records: of the attention, where that is kept.
        plan, step: what the forward ran with.
    """

    x: Tensor

    def __init__(self, layer: Layer, plan: MemoryPlan, step: int) -> None:
        self.plan, self.step = plan, step
        self.tensors: dict[str, Tensor] = {}
        self.records: list[Record] | None = None
        self._parcel = layer.parcel

    def sent(self, field: str, name: str, tensor: Tensor) -> Tensor:
        """What to save in the place of a tensor of this field of the plan."""
        if self._parcel is None or field not in self.plan.offloads:
            return tensor
        return self._parcel.send(name, tensor)

    def add(self, field: str, name: str, tensor: Tensor) -> None:
        self.tensors[name] = self.sent(field, name, tensor)

    def add_low(self, index: int, linear: StackedLinear) -> None:
        """The rank-R products of a group that the backward does not multiply again."""
        self.tensors |= {f"low {index} {j}": low for j, low in enumerate(linear.saved())}


# Kept tensors -> the field of the plan that keeps them. Rank-R products stay where they are: they are small.
_FIELDS = {
    "packed": "qkv",
    "out": "attention",
    "h": "residual",
    "added": "residual",
    "gate_up": "gate_up",
    "down": "down",
}


def _field(name: str) -> str:
    return "attention" if name.startswith("attention ") else _FIELDS.get(name, "")


def _without_dropped(kept: dict[str, Tensor], plan: MemoryPlan) -> tuple[dict[str, Tensor], MemoryPlan]:
    """What is still kept, where memory was short in the meantime, and the plan that would have kept it."""
    dropped = {_field(name) for name, tensor in kept.items() if is_dropped(tensor)}
    if not dropped:
        return kept, plan
    remaining = {name: tensor for name, tensor in kept.items() if _field(name) not in dropped}
    changes: dict[str, Any] = dict.fromkeys(dropped, False)
    return remaining, dataclasses.replace(plan, **changes)


def refuse_second_derivative() -> None:
    """Raises RuntimeError in a backward whose own graph is wanted."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True: the fast decoder layer has no second derivative. Use fastlm.revert(model) for that"
        )


def _bias_grad(norm: Norm | None, dy: Tensor) -> Tensor:
    """Gradient of a LayerNorm's bias from that of its output [T, D]."""
    assert norm is not None and norm.bias is not None
    return dy.sum(0, dtype=torch.float32).to(norm.bias.dtype)


def _shares(needed: Sequence[bool], linears: Sequence[StackedLinear]) -> list[list[bool]]:
    """The flags of all tensors, by the group of projections that they belong to."""
    shares, stop = [], 0
    for linear in linears:
        start, stop = stop, stop + len(linear.tensors)
        shares.append(list(needed[start:stop]))
    return shares
