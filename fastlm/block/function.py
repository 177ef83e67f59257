"""The block's forward and backward over plain tensors.

    n1 = norm(x);  q, k, v = heads(n1 W_qkv);  q, k = rope(norm(q)), rope(norm(k));  o = attention(q, k, v)
    h = x + o W_o;  n2 = norm(h);  y = h + (act(n2 W_gate) * n2 W_up) W_down          each W with its adapter

The first residual add rides in the second norm's kernel, and both norms' backward kernels add the gradient of the residual stream.
Each weight is decoded once in the forward and once in the backward. Values are rounded where the stock layer rounds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastlm.block.spec import DOWN, GATE_UP, MLP, OUT, QKV, Layer, Norm
from fastlm_kernels.attention import attention
from fastlm_kernels.glu import glu_fwd
from fastlm_kernels.lora import StackedLinear
from fastlm_kernels.lora_mlp import glu_mlp_bwd
from fastlm_kernels.rms_norm import rms_norm_bwd, rms_norm_fwd
from fastlm_kernels.rope import rope_bwd, rope_fwd

# B batch, S sequence, T = B*S tokens, D hidden size, H query heads, K key/value heads, E head size, F MLP width


def _norm(x: Tensor, norm: Norm, layer: Layer, residual: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """norm(x + residual) [T, D], the sum itself, and 1/rms [T]."""
    spec = layer.spec
    offset, casts = spec.norm_weight_offset, spec.norm_casts_before_weight
    return rms_norm_fwd(x, norm.weight, norm.eps, offset, casts, residual)


@dataclass
class _Attended:
    """A layer up to its attention's output [B, S, H, E], with what the way back needs."""

    normed: Tensor
    rstd: Tensor
    packed: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    q_rstd: Tensor | None
    k_rstd: Tensor | None
    out: Tensor


def _heads(packed: Tensor, layer: Layer, batch: int) -> list[Tensor]:
    """q, k and v as views [B, S, heads, E] of the stacked projections [T, sum of their widths]."""
    size = layer.spec.head_size
    return [y.view(batch, y.shape[0] // max(1, batch), -1, size) for y in packed.split(layer.spec.widths, dim=1)]


def _attend(
    x: Tensor, batch: int, cos: Tensor, sin: Tensor, layer: Layer, qkv: StackedLinear, records: bool
) -> _Attended:
    """x [T, D] -> the attention's output. `records`: its gradient will be asked for, with q, k and v as leaves."""
    spec = layer.spec
    normed, _, rstd = _norm(x, layer.input_norm, layer)
    packed = qkv.forward(normed)
    q, k, v = _heads(packed, layer, batch)
    q_weight, k_weight = (None if n is None else n.weight for n in (layer.q_norm, layer.k_norm))
    q, k, q_rstd, k_rstd = rope_fwd(
        q, k, cos, sin, q_weight, k_weight, layer.q_norm.eps if layer.q_norm else 0.0, spec.norm_weight_offset,
        spec.rope_interleaved,
    )  # fmt: skip
    if records:
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    with torch.set_grad_enabled(records):
        out = attention(q, k, v, spec.scale, layout=layer.layout, window=spec.window)
    return _Attended(normed, rstd, packed, q, k, v, q_rstd, k_rstd, out)


def _flat(out: Tensor) -> Tensor:
    """[B, S, H, E] -> [T, H*E]; a copy only where the library's strides allow no view."""
    return out.detach().reshape(out.shape[0] * out.shape[1], -1)


def _attend_bwd(dflat: Tensor, first: _Attended, cos: Tensor, sin: Tensor, layer: Layer, keeps: bool) -> Tensor:
    """Gradient of the stacked projections [T, sum of their widths] from that of the attention's output [T, H*E]."""
    dpacked = torch.empty_like(first.packed)
    batch = first.out.shape[0]
    dq_out, dk_out, dv_out = _heads(dpacked, layer, batch)
    q, k, _ = _heads(first.packed, layer, batch)
    leaves = (first.q, first.k, first.v)
    dq, dk, dv = torch.autograd.grad(first.out, leaves, dflat.view(first.out.shape), retain_graph=keeps)
    dv_out.copy_(dv)
    dq, dk = (d if d.stride(-1) == 1 else d.contiguous() for d in (dq, dk))
    q_weight, k_weight = (None if n is None else n.weight for n in (layer.q_norm, layer.k_norm))
    rope_bwd(
        dq, dk, q, k, cos, sin, q_weight, k_weight, first.q_rstd, first.k_rstd, layer.spec.norm_weight_offset,
        layer.spec.rope_interleaved, dq_out=dq_out, dk_out=dk_out,
    )  # fmt: skip
    return dpacked


class BlockFunction(torch.autograd.Function):
    """y = layer(x). Inputs: x [B, S, D], cos and sin [B or 1, S, R], the layer, and the 21 tensors of its projections."""

    @staticmethod
    def forward(ctx, x, cos, sin, layer, *tensors):  # type: ignore[override]
        rows = x.reshape(-1, x.shape[-1])
        ctx.keeps = layer.plan.keeps and any(ctx.needs_input_grad)
        qkv, out, gate_up, down = _linears(layer, tensors, x.dtype)
        first = _attend(rows, x.shape[0], cos, sin, layer, qkv, ctx.keeps)
        normed, h, rstd = _norm(out.forward(_flat(first.out)), layer.post_norm, layer, residual=rows)
        if not ctx.keeps:
            del first
        packed = gate_up.forward(normed)
        del normed
        gate, up = packed.chunk(2, dim=1)
        act = glu_fwd(gate, up, layer.spec.activation)
        del gate, up
        if not ctx.keeps:
            del packed
        y = down.forward(act).add_(h)
        ctx.layer = layer
        if ctx.keeps:
            ctx.first, ctx.lows = first, [linear.saved() for linear in (qkv, out, gate_up, down)]
            ctx.save_for_backward(x, cos, sin, h, rstd, packed, *tensors)
        else:
            ctx.save_for_backward(x, cos, sin, *tensors)
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):  # type: ignore[override]
        layer, keeps = ctx.layer, ctx.keeps
        needs_dx, needed = ctx.needs_input_grad[0], ctx.needs_input_grad[4:]
        dy = dy.reshape(-1, dy.shape[-1])
        dy = dy if dy.stride(1) == 1 else dy.contiguous()
        x, cos, sin, *kept = ctx.saved_tensors
        tensors = kept[3:] if keeps else kept
        rows = x.reshape(-1, x.shape[-1])
        # what is made again is decoded once: the forward's weights serve the backward
        qkv, out, gate_up, down = _linears(layer, tensors, x.dtype, holds=not keeps)
        if keeps:
            h, rstd, packed = kept[:3]
            first = ctx.first
            for linear, low in zip((qkv, out, gate_up, down), ctx.lows, strict=True):
                linear.restore(low)
            normed, _, _ = _norm(h, layer.post_norm, layer)
        else:
            first = _attend(rows, x.shape[0], cos, sin, layer, qkv, True)
            normed, h, rstd = _norm(out.forward(_flat(first.out)), layer.post_norm, layer, residual=rows)
            packed = gate_up.forward(normed)
        dnormed, mlp_grads = glu_mlp_bwd(
            dy, normed, packed, gate_up, down, layer.spec.activation, True, needed[MLP], owns_packed=not keeps
        )
        del packed, normed
        assert dnormed is not None  # it was asked for
        dh, _ = rms_norm_bwd(dnormed, h, layer.post_norm.weight, rstd, layer.spec.norm_weight_offset, dh=dy)
        del dnormed, h, dy
        dflat = out.backward_x(dh)
        out_grads = out.backward_adapters(dh, _flat(first.out), needed[OUT])
        dpacked = _attend_bwd(dflat, first, cos, sin, layer, keeps)
        del dflat
        dx = None
        if needs_dx:
            dnormed, offset = qkv.backward_x(dpacked), layer.spec.norm_weight_offset
            dx = rms_norm_bwd(dnormed, rows, layer.input_norm.weight, first.rstd, offset, dh=dh)[0].view(x.shape)
        else:
            qkv.make_high(dpacked)
        qkv_grads = qkv.backward_adapters(dpacked, first.normed, needed[QKV])
        return dx, None, None, None, *qkv_grads, *out_grads, *mlp_grads


def _linears(
    layer: Layer, tensors: Sequence[Tensor | None], dtype: torch.dtype, holds: bool = False
) -> list[StackedLinear]:
    """The layer's four groups of projections: q|k|v, o, gate|up, down."""
    groups = (layer.qkv, layer.out, layer.gate_up, layer.down)
    return [
        StackedLinear(group, tensors[where], dtype, holds)
        for group, where in zip(groups, (QKV, OUT, GATE_UP, DOWN), strict=True)
    ]
