"""Linear layers with low-rank adapters that share their input, over dense or 4-bit weights, as one function.

    y_i = x W_i^T + bias_i + s_i * dropout_i(x) A_i^T B_i^T          Hu et al. 2021, arXiv:2106.09685

Weights are frozen and decoded again for the backward. All GEMMs accumulate in float32; the adapters' product is added to the rounded
base product in their own GEMM. Saved for the backward: x and the rank-R products.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastlm_kernels import _lora_pack
from fastlm_kernels._case import Case, randn
from fastlm_kernels._stacked import (
    Group,
    Projection,
    StackedLinear,
    check_projections,
    group_tensors,
    make_group,
)

__all__ = ["Group", "Projection", "StackedLinear", "group_tensors", "lora_linear", "make_group"]

# T rows (tokens), K input features, N output features, R LoRA rank


class LoraLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, *tensors):  # type: ignore[override]
        linear = StackedLinear(group, tensors, x.dtype)
        y = linear.forward(x)
        ctx.group, ctx.n_tensors = group, len(tensors)
        ctx.save_for_backward(x, *tensors, *linear.saved())
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):  # type: ignore[override]
        x, *rest = ctx.saved_tensors
        linear = StackedLinear(ctx.group, rest[: ctx.n_tensors], x.dtype)
        linear.restore(rest[ctx.n_tensors :])
        dy = dy if dy.stride(1) == 1 else dy.contiguous()
        dx = linear.backward_x(dy) if ctx.needs_input_grad[0] else None
        if dx is None:
            linear.make_high(dy)
        return dx, None, *linear.backward_adapters(dy, x, ctx.needs_input_grad[2:])


def lora_linear(x: Tensor, projections: Sequence[Projection], lora_dtype: torch.dtype | None = None) -> Tensor:
    """Apply projections that share their input, each with its adapter.

    Args:
        x: [..., K], float16, bfloat16 or float32: the dtype of the base GEMM.
        projections: their weights are frozen: no gradient flows into them.
        lora_dtype: dtype of the adapters' GEMMs; None means each adapter's own, as PEFT computes outside autocast.

    Returns:
        [..., sum of N] in x.dtype: the projections' outputs side by side.

    Raises:
        ValueError: if shapes do not fit, or a dropout is outside [0, 1).

    Reference: Hu et al. 2021, arXiv:2106.09685; Dettmers et al. 2023, arXiv:2305.14314.
    """
    check_projections(x, projections)
    group = make_group(projections, lora_dtype)
    y = LoraLinearFunction.apply(x.reshape(-1, x.shape[-1]), group, *group_tensors(projections))
    return y.view(*x.shape[:-1], y.shape[1])


def lora_linear_reference(x, weights, biases, lora_as, lora_bs, scalings):
    parts = []
    for weight, bias, a, b, scaling in zip(weights, biases, lora_as, lora_bs, scalings, strict=True):
        y = x @ weight.t()
        parts.append(y + bias + scaling * (x @ a.t()) @ b.t())
    return torch.cat(parts, dim=-1)


def unstacked(prefix_inputs):
    """Case inputs are plain tensors by name; these gather w0, b0, a0, … into lists."""
    n = sum(name.startswith("w") for name in prefix_inputs)
    pick = lambda letter: [prefix_inputs[f"{letter}{i}"] for i in range(n)]
    return pick("w"), pick("b"), pick("a"), pick("c"), [0.5 + i for i in range(n)]


def _case_op(x, **named):
    weights, biases, lora_as, lora_bs, scalings = unstacked(named)
    projections = [
        Projection(w, bias, a, b, s)
        for w, bias, a, b, s in zip(weights, biases, lora_as, lora_bs, scalings, strict=True)
    ]
    return lora_linear(x, projections)


def _case_reference(x, **named):
    return lora_linear_reference(x, *unstacked(named))


def make_inputs(widths):
    def make(shape, dtype, device, generator):
        *rows, n_cols, rank = shape
        inputs = {"x": randn((*rows, n_cols), dtype, device, generator)}
        for i, width in enumerate(widths):
            inputs[f"w{i}"] = randn((width, n_cols), dtype, device, generator, n_cols**-0.5)
            inputs[f"b{i}"] = randn((width,), dtype, device, generator)
            inputs[f"a{i}"] = randn((rank + i, n_cols), dtype, device, generator, n_cols**-0.5)
            inputs[f"c{i}"] = randn((width, rank + i), dtype, device, generator, 0.3)
        return inputs

    return make


def strided_inputs(inputs):
    x = inputs["x"]
    return dict(inputs, x=torch.cat([x, torch.full_like(x, float("nan"))], dim=-1)[..., : x.shape[-1]])


_SHAPES = {"typical": (2, 12, 64, 8), "odd": (7, 33, 3), "one-row": (1, 32, 4), "empty": (0, 32, 4)}

CASE = Case(
    name="lora_linear",
    op=_case_op,
    reference=_case_reference,
    eager=_case_reference,
    make=make_inputs((48, 17, 16)),
    shapes=_SHAPES,
    gradients=("x", "b0", "a0", "c0", "b1", "a1", "c1", "b2", "a2", "c2"),
    strided=strided_inputs,
    draws=16,
    builds=lambda cc, dtype: _lora_pack.builds(dtype),
)
