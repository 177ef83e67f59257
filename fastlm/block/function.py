"""The block's forward and backward over plain tensors.

    h = x + m * out_norm(attention(norm(x)));  y = h + m * mlp_out_norm(mlp(mlp_norm(h)))        each projection with its adapter

Norms may be missing; in a parallel layer the MLP reads norm(x). The first residual add rides in the MLP's norm, and both norms'
backward kernels add the gradient of the residual stream. Each weight is decoded once in the forward and once in the backward,
for what is made again there and for the gradients together. Values are rounded where the stock layer rounds them. All that is
kept goes through `save_for_backward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastlm.block.heads import heads_bwd, heads_fwd, turns_in_place
from fastlm.block.norms import Statistics, norm_bwd, norm_fwd
from fastlm.block.spec import RECOMPUTE_ALL, Layer, MemoryPlan, Norm
from fastlm_kernels._attention_record import attention_bwd, attention_recorded
from fastlm_kernels.attention import attention
from fastlm_kernels.lora import StackedLinear
from fastlm_kernels.lora_mlp import act_fwd, mlp_bwd

# B batch, S sequence, T = B*S tokens, D hidden size


@dataclass
class Linears:
    """A layer's four groups of projections during one pass."""

    qkv: StackedLinear
    out: StackedLinear
    gate_up: StackedLinear
    down: StackedLinear

    def __iter__(self):
        return iter((self.qkv, self.out, self.gate_up, self.down))


def _linears(layer: Layer, tensors: Sequence[Tensor | None], x: Tensor, plan: MemoryPlan, is_forward: bool) -> Linears:
    """The projections for one pass: the forward, or the backward with what `plan` makes again."""
    tokens, spec = x.shape[0], layer.spec
    # rooms beside x are written by norms and the activation, beside dy by the backward of what stands behind
    writes_x = layer.attention_norm is not None and not layer.attention_norm.is_layer_norm
    writes_n = layer.mlp_norm is not None and not layer.mlp_norm.is_layer_norm
    writes_dh = writes_n and layer.attention_out_norm is None and spec.residual_multiplier == 1.0
    writes_act = spec.is_gated and (is_forward or layer.mlp_out_norm is not None)
    rooms = (
        (layer.rounds_once and writes_x and (is_forward or not plan.qkv), not is_forward),
        (False, writes_dh and not is_forward),
        (layer.rounds_once and writes_n and (is_forward or not plan.gate_up), not is_forward),
        (layer.rounds_once and writes_act, False),
    )
    made, stop = [], 0
    for group, (x_room, dy_room) in zip(layer.groups, rooms, strict=True):
        start, stop = stop, stop + 3 * len(group.weights)
        made.append(
            StackedLinear(
                group, tensors[start:stop], x.dtype, tokens * x_room, tokens * dy_room, holds=not is_forward
            )
        )  # fmt: skip
    return Linears(*made)


def _keeps_low(plan: MemoryPlan) -> tuple[bool, bool, bool, bool]:
    """Of which groups the rank-R products are kept: of those that the backward does not multiply again."""
    return plan.qkv, plan.residual, plan.gate_up, plan.gate_up


def _flat(out: Tensor) -> Tensor:
    """[B, S, H, E] -> [T, H*E]; a copy only where the library's strides allow no view."""
    return out.reshape(out.shape[0] * out.shape[1], -1)


def _attention_options(layer: Layer) -> dict[str, Any]:
    spec = layer.spec
    return dict(
        scale=spec.scale, layout=layer.layout, window=spec.window, softcap=spec.softcap,
        deterministic=layer.deterministic,
    )  # fmt: skip


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
        rows, spec = x.reshape(-1, x.shape[-1]), layer.spec
        plan = layer.plan if any(ctx.needs_input_grad) else RECOMPUTE_ALL
        linears = _linears(layer, tensors, rows, plan, is_forward=True)
        kept: dict[str, Tensor] = {}
        n, _ = _read(rows, layer, linears.qkv)
        packed = linears.qkv.forward(n)
        heads = heads_fwd(packed, cos, sin, layer, x.shape[0])
        if plan.qkv:
            kept["packed"] = packed
        del packed
        record = None
        if plan.attention:
            out, record = attention_recorded(heads.q, heads.k, heads.v, **_attention_options(layer))
            kept["out"] = out
            kept |= {f"attention {i}": t for i, t in enumerate(record.take())}
        else:
            out = attention(heads.q, heads.k, heads.v, **_attention_options(layer))
        del heads
        added = _add(rows, linears.out.forward(_flat(out)), layer, linears.gate_up)
        del out
        if plan.residual:
            kept["h"] = added.h
            if added.added is not None:
                kept["added"] = added.added
        read = added.read if added.read is not None else (n if spec.is_parallel else added.h)
        h = added.h
        del n, added
        packed = linears.gate_up.forward(read)
        del read
        if plan.gate_up:
            kept["gate_up"] = packed
        act = _act(packed, layer, linears.down)
        del packed
        if layer.mlp_out_norm is None and spec.residual_multiplier == 1.0:
            y = linears.down.forward_add(act, h, owns=not plan.residual)
        else:
            y = linears.down.forward(act)
            if layer.mlp_out_norm is not None:
                if plan.down:
                    kept["down"] = y
                y, _, _ = norm_fwd(layer.mlp_out_norm, y)
            y = _scaled(y, layer).add_(h)
        del act, h
        for i, (keeps, linear) in enumerate(zip(_keeps_low(plan), linears, strict=True)):
            if keeps:
                kept |= {f"low {i} {j}": t for j, t in enumerate(linear.saved())}
        ctx.layer, ctx.plan, ctx.record, ctx.names = layer, plan, record, tuple(kept)
        ctx.save_for_backward(x, cos, sin, *kept.values(), *tensors)
        # as a tensor of its own: autograd lets nobody write into a view that a function returns, and hooks on layers may
        return y.view(x.shape).data

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]
        refuse_second_derivative()
        layer, plan = ctx.layer, ctx.plan
        spec, needs_dx = layer.spec, ctx.needs_input_grad[0]
        x, cos, sin, *rest = ctx.saved_tensors
        kept, tensors = dict(zip(ctx.names, rest, strict=False)), rest[len(ctx.names) :]
        del rest
        rows, batch = x.reshape(-1, x.shape[-1]), x.shape[0]
        dy = dy.reshape(rows.shape)
        dy = dy if dy.stride(1) == 1 else dy.contiguous()
        linears = _linears(layer, tensors, rows, plan, is_forward=False)
        needed = _shares(ctx.needs_input_grad[4:], linears)
        trains_attention_bias, trains_mlp_bias = ctx.needs_input_grad[-2:]
        # --- what the plan makes again
        n, n_statistics = _read(rows, layer, linears.qkv)
        packed = kept["packed"] if plan.qkv else linears.qkv.forward(n)
        heads = heads_fwd(packed, cos, sin, layer, batch, is_turned=plan.qkv and turns_in_place(layer))
        if plan.attention:
            out, record = kept["out"], ctx.record
            saved = [kept[name] for name in ctx.names if name.startswith("attention ")]
        else:
            out, record = attention_recorded(heads.q, heads.k, heads.v, **_attention_options(layer))
            saved = record.take()
        if plan.residual:
            added = _Added(kept["h"], None, (), kept.get("added"), ())
            if layer.mlp_norm is not None:
                added.read, _, added.statistics = _normed(layer.mlp_norm, added.h, linears.gate_up)
            if layer.attention_out_norm is not None:
                added.added_statistics = norm_fwd(layer.attention_out_norm, kept["added"])[2]
        else:
            added = _add(rows, linears.out.forward(_flat(out)), layer, linears.gate_up)
        read = added.read if added.read is not None else (n if spec.is_parallel else added.h)
        gate_up = kept["gate_up"] if plan.gate_up else linears.gate_up.forward(read)
        for i, (keeps, linear) in enumerate(zip(_keeps_low(plan), linears, strict=True)):
            if keeps:
                linear.restore([kept[name] for name in ctx.names if name.startswith(f"low {i} ")])
        # --- the MLP
        dz = dy if spec.residual_multiplier == 1.0 else dy * spec.residual_multiplier
        if layer.mlp_out_norm is not None:
            z = kept["down"] if plan.down else linears.down.forward(_act(gate_up, layer, linears.down))
            dz = norm_bwd(layer.mlp_out_norm, dz, z, norm_fwd(layer.mlp_out_norm, z)[2])
            del z
        dread, mlp_grads = mlp_bwd(
            dz, read, gate_up, linears.gate_up, linears.down, spec.activation, True, needed[2] + needed[3],
            owns_packed=not plan.gate_up, is_gated=spec.is_gated,
        )  # fmt: skip
        del dz, read, gate_up
        assert dread is not None  # it was asked for
        mlp_bias = _bias_grad(layer.mlp_norm, dread) if trains_mlp_bias else None
        # --- the residual stream behind the attention
        if spec.is_parallel:
            dh = dy
        elif layer.mlp_norm is None:
            dh = dread.add_(dy)
        else:
            room = linears.out.gradient(rows.shape[0], x.device) if linears.out.dy_pad else None
            dh = norm_bwd(layer.mlp_norm, dread, added.h, added.statistics, dh=dy, out=room)
        if not spec.is_parallel:
            del dread
        da = dh if spec.residual_multiplier == 1.0 else dh * spec.residual_multiplier
        if layer.attention_out_norm is not None:
            assert added.added is not None
            da = norm_bwd(layer.attention_out_norm, da, added.added, added.added_statistics)
        del added, dy
        # --- the attention
        dflat = linears.out.backward_x(da)
        out_grads = linears.out.backward_adapters(da, _flat(out), needed[1])
        del da
        dq, dk, dv = attention_bwd(dflat.view(out.shape), record, heads.q, heads.k, heads.v, saved)
        del dflat, out, saved
        dpacked = linears.qkv.gradient(rows.shape[0], x.device) if plan.qkv else packed
        heads_bwd(dq, dk, dv, heads, packed, cos, sin, layer, dpacked)
        del dq, dk, dv, heads, packed
        # --- the input
        dx = attention_bias = None
        norm = layer.attention_norm
        if needs_dx or trains_attention_bias:
            dn = linears.qkv.backward_x(dpacked)
            dn = dn.add_(dread) if spec.is_parallel else dn
        else:
            linears.qkv.make_high(dpacked)
        if trains_attention_bias:
            attention_bias = _bias_grad(norm, dn)
        if needs_dx:
            dx = dn.add_(dh) if norm is None else norm_bwd(norm, dn, rows, n_statistics, dh=dh)
            dx = dx.view(x.shape)
        qkv_grads = linears.qkv.backward_adapters(dpacked, n, needed[0])
        return dx, None, None, None, *qkv_grads, *out_grads, *mlp_grads, attention_bias, mlp_bias


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


def _act(gate_up: Tensor, layer: Layer, down: StackedLinear) -> Tensor:
    room = down.input(gate_up.shape[0], gate_up.device)
    return act_fwd(gate_up, layer.spec.activation, layer.spec.is_gated, out=room)


def _shares(needed: Sequence[bool], linears: Linears) -> list[list[bool]]:
    """The flags of all tensors, by the group of projections that they belong to."""
    shares, stop = [], 0
    for linear in linears:
        start, stop = stop, stop + len(linear.tensors)
        shares.append(list(needed[start:stop]))
    return shares
