"""Gated MLPs with low-rank adapters as one function.

    y = (act(x W_gate^T) * (x W_up^T)) W_down^T, each product with its bias and adapter as in `lora.py`

Shazeer 2020, arXiv:2002.05202; Hu et al. 2021, arXiv:2106.09685. Saved for the backward: x, gate, up and the rank-R products; the
product act(gate) * up is remade by the activation's backward, in the same pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastlm_kernels._case import Case
from fastlm_kernels._pointwise import activation_bwd, activation_fwd
from fastlm_kernels._stacked import Projection, StackedLinear, check_projections, group_tensors, make_group
from fastlm_kernels.glu import glu_bwd, glu_fwd
from fastlm_kernels.lora import lora_linear_reference, make_inputs, strided_inputs, unstacked

# T rows (tokens), D hidden size, F MLP width


def act_fwd(packed: Tensor, activation: str, is_gated: bool, out: Tensor | None = None) -> Tensor:
    """The input projections, [T, 2F] with a gate or [T, F], -> what `down` reads [T, F], in `out` if given."""
    if is_gated:
        gate, up = packed.chunk(2, dim=1)
        return glu_fwd(gate, up, activation, out=out)
    act = activation_fwd(packed, activation)
    return act if out is None else out.copy_(act)


def act_bwd(dact: Tensor, packed: Tensor, activation: str, is_gated: bool, out: Tensor) -> Tensor:
    """Gradient of the input projections, written into `out`, which may be `packed`.

    Returns what `down` read, remade; with a gate in the place of `dact`, which must be the caller's alone.
    """
    if is_gated:
        gate, up = packed.chunk(2, dim=1)
        dgate, dup = out.chunk(2, dim=1)
        glu_bwd(dact, gate, up, activation, dgate=dgate, dup=dup, h=dact)
        return dact
    act = activation_fwd(packed, activation)
    out.copy_(activation_bwd(dact, packed, activation))
    return act


def mlp_bwd(
    dy: Tensor,
    x: Tensor,
    packed: Tensor,
    gate_up: StackedLinear,
    down: StackedLinear,
    activation: str,
    needs_dx: bool,
    needed: Sequence[bool],
    owns_packed: bool = False,
    is_gated: bool = True,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Backward of an MLP.

    Args:
        dy: [T, D], unit column stride; x: [T, D], the MLP's input; packed: its input projections, [T, 2F] side by side with a
            gate, else [T, F].
        gate_up, down: with the forward's `low`; where down has none, it is made again from the remade product.
        needed: of bias, A, B of each of gate_up's projections, then of down's.
        owns_packed: `packed` may be overwritten by its gradient.

    Returns:
        dx [T, D] or None, and the gradients of the tensors.
    """
    dact = down.backward_x(dy)
    dpacked = packed if owns_packed else gate_up.gradient(packed.shape[0], packed.device)
    act = act_bwd(dact, packed, activation, is_gated, dpacked)
    del dact, packed
    n_first = len(gate_up.tensors)
    if not down.low:
        down.make_low(act)
    grads_down = down.backward_adapters(dy, act, needed[n_first:])
    del act
    dx = gate_up.backward_x(dpacked) if needs_dx else None
    if dx is None:
        gate_up.make_high(dpacked)
    return dx, [*gate_up.backward_adapters(dpacked, x, needed[:n_first]), *grads_down]


class LoraGluMlpFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, activation, gate_up, down, *tensors):  # type: ignore[override]
        first, second = StackedLinear(gate_up, tensors[:6], x.dtype), StackedLinear(down, tensors[6:], x.dtype)
        packed = first.forward(x)
        y = second.forward(act_fwd(packed, activation, is_gated=True))
        ctx.activation, ctx.gate_up, ctx.down, ctx.n_low = activation, gate_up, down, len(first.saved())
        ctx.save_for_backward(x, packed, *tensors, *first.saved(), *second.saved())
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):  # type: ignore[override]
        x, packed, *rest = ctx.saved_tensors
        first = StackedLinear(ctx.gate_up, rest[:6], x.dtype)
        second = StackedLinear(ctx.down, rest[6:9], x.dtype)
        first.restore(rest[9 : 9 + ctx.n_low])
        second.restore(rest[9 + ctx.n_low :])
        needs_dx, needed = ctx.needs_input_grad[0], ctx.needs_input_grad[4:]
        dy = dy if dy.stride(1) == 1 else dy.contiguous()
        dx, grads = mlp_bwd(dy, x, packed, first, second, ctx.activation, needs_dx, needed)
        return dx, None, None, None, *grads


def lora_glu_mlp(
    x: Tensor,
    gate: Projection,
    up: Projection,
    down: Projection,
    activation: str = "silu",
    lora_dtype: torch.dtype | None = None,
) -> Tensor:
    """down(act(gate(x)) * up(x)), each projection with its adapter, as one function.

    Args:
        x: [..., D].
        gate, up: [F, D]; down: [D, F].
        activation: "silu", "gelu_tanh" or "gelu".
        lora_dtype: as in `lora_linear`.

    Returns:
        [..., D] in x.dtype.

    Raises:
        ValueError: as `lora_linear`, and if gate and up differ in width.

    Reference: Shazeer 2020, arXiv:2002.05202.
    """
    check_projections(x, (gate, up))
    if gate.shape != up.shape or down.shape[1] != up.shape[0]:
        raise ValueError(f"gate {gate.shape}, up {up.shape} and down {down.shape} do not make a gated MLP")
    y = LoraGluMlpFunction.apply(
        x.reshape(-1, x.shape[-1]), activation, make_group((gate, up), lora_dtype), make_group((down,), lora_dtype),
        *group_tensors((gate, up, down)),
    )  # fmt: skip
    return y.view(*x.shape[:-1], y.shape[1])


def _mlp_op(x, **named):
    weights, biases, lora_as, lora_bs, scalings = unstacked(named)
    gate, up, down = (Projection(*p) for p in zip(weights, biases, lora_as, lora_bs, scalings, strict=True))
    return lora_glu_mlp(x, gate, up, down)


def _mlp_reference(x, **named):
    weights, biases, lora_as, lora_bs, scalings = unstacked(named)
    layer = lambda x, i: lora_linear_reference(
        x, *([each[i]] for each in (weights, biases, lora_as, lora_bs, scalings))
    )
    return layer(F.silu(layer(x, 0)) * layer(x, 1), 2)


def _mlp_make(shape, dtype, device, generator):
    *rows, n_cols, width, rank = shape
    inputs = make_inputs((width, width))((*rows, n_cols, rank), dtype, device, generator)
    down = make_inputs((n_cols,))((1, width, rank), dtype, device, generator)
    return inputs | {f"{letter}2": down[f"{letter}0"] for letter in "wbac"}


CASE = Case(
    name="lora_glu_mlp",
    op=_mlp_op,
    reference=_mlp_reference,
    eager=_mlp_reference,
    make=_mlp_make,
    shapes={"typical": (2, 12, 32, 48, 4), "odd": (7, 33, 21, 3), "one-row": (1, 32, 16, 4), "empty": (0, 32, 16, 4)},
    gradients=("x", "b0", "a0", "c0", "b1", "a1", "c1", "b2", "a2", "c2"),
    strided=strided_inputs,
    draws=16,
)
