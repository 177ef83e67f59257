"""The MLP of a layer between its input projections and its output, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fastlm.block.spec import BlockSpec
from fastlm_kernels._pointwise import activation_bwd, activation_fwd
from fastlm_kernels.glu import glu_bwd, glu_fwd
from fastlm_kernels.lora import StackedLinear

# T tokens, F width of the MLP


def act_fwd(packed: Tensor, spec: BlockSpec, out: Tensor) -> Tensor:
    """The input projections, [T, 2F] with a gate or [T, F], -> what `down` reads, in `out` [T, F]."""
    if spec.is_gated:
        gate, up = packed.chunk(2, dim=1)
        return glu_fwd(gate, up, spec.activation, out=out)
    return out.copy_(activation_fwd(packed, spec.activation))


def act_bwd(dact: Tensor, packed: Tensor, spec: BlockSpec, out: Tensor) -> Tensor:
    """Gradient of the input projections, written into `out`, which may be `packed`; what `down` read is remade in the place of `dact`."""
    if spec.is_gated:
        gate, up = packed.chunk(2, dim=1)
        dgate, dup = out.chunk(2, dim=1)
        glu_bwd(dact, gate, up, spec.activation, dgate=dgate, dup=dup, h=dact)
        return dact
    act = activation_fwd(packed, spec.activation)
    out.copy_(activation_bwd(dact, packed, spec.activation))
    return act


def mlp_bwd(
    dy: Tensor, x: Tensor, packed: Tensor, gate_up: StackedLinear, down: StackedLinear, spec: BlockSpec,
    needs_dx: bool, needed: Sequence[bool], owns_packed: bool,
) -> tuple[Tensor | None, list[Tensor | None]]:  # fmt: skip
    """Backward of the MLP.

    Args:
        dy: [T, D]; x: [T, D], the MLP's input; packed: [T, 2F] or [T, F], its input projections.
        gate_up, down: with the forward's `low`; where down has none, it is made again from the remade product.
        needs_dx: whether dx is asked for.
        needed: whether the gradient of each tensor of gate_up, then of down, is.
        owns_packed: `packed` may be overwritten by its gradient.

    Returns:
        dx [T, D] or None, and the gradients of the tensors.
    """
    dact = down.backward_x(dy)
    dpacked = packed if owns_packed else gate_up.gradient(packed.shape[0], packed.device)
    act = act_bwd(dact, packed, spec, dpacked)
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
