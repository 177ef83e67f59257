"""Gated linear unit: h = act(gate) * up, with act one of SiLU (SwiGLU), GELU (GeGLU) or GELU's tanh form.

    silu(x)      = x / (1 + exp(-x))
    gelu(x)      = x * (1 + erf(x / sqrt(2))) / 2
    gelu_tanh(x) = x * (1 + tanh(u)) / 2 = x / (1 + exp(-2u)), u = sqrt(2 / pi) * (x + 0.044715 * x**3)

Shazeer 2020, arXiv:2002.05202; Hendrycks and Gimpel 2016, arXiv:1606.08415. All is computed in float32 and rounded to the inputs'
dtype where the two modules of a stock model round: act(gate) and, in the backward, the gradient of act(gate).
Saved for the backward: gate and up. The product itself is never kept: the backward can remake it in its own pass.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from fastlm_kernels._case import Case, build, randn
from fastlm_kernels._launch import RowLaunch, as_rows, next_power_of_2, runs_triton, tl, triton

# T rows (tokens), F columns (MLP width)
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")


@triton.jit
def _activation(x, ACTIVATION: tl.constexpr):
    # act(x) and its derivative, float32
    if ACTIVATION == "silu":
        gate = 1.0 / (1.0 + tl.exp(-x))
        slope = gate + x * gate * (1.0 - gate)
    elif ACTIVATION == "gelu_tanh":
        # 2u; tanh(u) + 1 is twice the sigmoid of 2u
        inner = 1.5957691216057308 * x * (1.0 + 0.044715 * x * x)
        gate = 1.0 / (1.0 + tl.exp(-inner))
        slope = gate + x * gate * (1.0 - gate) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    else:
        gate = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        slope = gate + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return x * gate, slope


@triton.jit
def _glu_fwd_kernel(
    gate_ptr, up_ptr, h_ptr, stride_gate_row, stride_up_row, stride_h_row, n_cols, blocks_per_row,
    ACTIVATION: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    offs_f = (tl.program_id(0) % blocks_per_row) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask_f = offs_f < n_cols
    gate = tl.load(gate_ptr + row * stride_gate_row + offs_f, mask=mask_f, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up_row + offs_f, mask=mask_f, other=0.0).to(tl.float32)
    activated, _ = _activation(gate, ACTIVATION)
    activated = activated.to(gate_ptr.dtype.element_ty).to(tl.float32)
    tl.store(h_ptr + row * stride_h_row + offs_f, (activated * up).to(h_ptr.dtype.element_ty), mask=mask_f)


@triton.jit
def _glu_bwd_kernel(
    dh_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, h_ptr,
    stride_dh_row, stride_gate_row, stride_up_row, stride_dgate_row, stride_dup_row, stride_h_row, n_cols, blocks_per_row,
    ACTIVATION: tl.constexpr, HAS_H: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    offs_f = (tl.program_id(0) % blocks_per_row) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask_f = offs_f < n_cols
    # all loads come before the first store, so that outputs may lie where inputs lay
    dh = tl.load(dh_ptr + row * stride_dh_row + offs_f, mask=mask_f, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * stride_gate_row + offs_f, mask=mask_f, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up_row + offs_f, mask=mask_f, other=0.0).to(tl.float32)
    activated, slope = _activation(gate, ACTIVATION)
    activated = activated.to(gate_ptr.dtype.element_ty).to(tl.float32)
    dgate = (dh * up).to(gate_ptr.dtype.element_ty).to(tl.float32) * slope
    tl.store(dgate_ptr + row * stride_dgate_row + offs_f, dgate.to(dgate_ptr.dtype.element_ty), mask=mask_f)
    tl.store(dup_ptr + row * stride_dup_row + offs_f, (dh * activated).to(dup_ptr.dtype.element_ty), mask=mask_f)
    if HAS_H:
        tl.store(h_ptr + row * stride_h_row + offs_f, (activated * up).to(h_ptr.dtype.element_ty), mask=mask_f)


def _launch(n_cols: int) -> RowLaunch:
    # 8 values of each tensor a thread: one 16-byte load in bfloat16
    return RowLaunch(block=min(1024, next_power_of_2(n_cols)), num_warps=4)


def _activation_torch(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """act(x) and its derivative; x float32."""
    if activation == "silu":
        gate = torch.sigmoid(x)
        slope = gate + x * gate * (1 - gate)
    elif activation == "gelu_tanh":
        gate = torch.sigmoid(1.5957691216057308 * x * (1 + 0.044715 * x * x))
        slope = gate + x * gate * (1 - gate) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    else:
        gate = 0.5 + 0.5 * torch.erf(x * 0.7071067811865476)
        slope = gate + x * 0.3989422804014327 * torch.exp(-0.5 * x * x)
    return x * gate, slope


def glu_fwd(gate: Tensor, up: Tensor, activation: str = "silu", out: Tensor | None = None) -> Tensor:
    """gate, up [T, F] with unit column stride (halves of one [T, 2F] product, say) -> act(gate) * up [T, F].

    `out` [T, F] with unit column stride receives the result; it may be gate or up, whose values are then lost.
    """
    n_rows, n_cols = gate.shape
    out = torch.empty((n_rows, n_cols), dtype=gate.dtype, device=gate.device) if out is None else out
    if not runs_triton(gate):
        return out.copy_(_activation_torch(gate.float(), activation)[0].to(gate.dtype).float() * up.float())
    launch = _launch(n_cols)
    blocks_per_row = triton.cdiv(n_cols, launch.block)
    if out.numel():
        _glu_fwd_kernel[(n_rows * blocks_per_row,)](
            gate, up, out, gate.stride(0), up.stride(0), out.stride(0), n_cols, blocks_per_row,
            ACTIVATION=activation, BLOCK_F=launch.block, num_warps=launch.num_warps, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def glu_bwd(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: str = "silu",
    dgate: Tensor | None = None,
    dup: Tensor | None = None,
    h: Tensor | None = None,
    needs_h: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of gate and up and, where `h` is given or `needs_h`, the product act(gate) * up remade in the same pass.

    dh, gate, up: [T, F] with unit column stride. `dgate`, `dup` and `h` [T, F] with unit column stride receive the
    results (dgate and dup may be the halves of one [T, 2F] buffer); None makes new ones. Each of them may also be the very
    tensor dh, gate or up, whose values are then lost: a value is read before its place is written, by the same
    program. Tensors that overlap otherwise (shifted rows) are not allowed.

    Returns dgate, dup, and h or None.
    """
    n_rows, n_cols = gate.shape
    dgate = torch.empty((n_rows, n_cols), dtype=gate.dtype, device=gate.device) if dgate is None else dgate
    dup = torch.empty((n_rows, n_cols), dtype=up.dtype, device=up.device) if dup is None else dup
    if h is None and needs_h:
        h = torch.empty((n_rows, n_cols), dtype=gate.dtype, device=gate.device)
    if not runs_triton(gate):
        activated, slope = _activation_torch(gate.float(), activation)
        activated = activated.to(gate.dtype).float()
        dh_32, up_32 = dh.float(), up.float()
        results = ((dh_32 * up_32).to(gate.dtype).float() * slope, dh_32 * activated, activated * up_32)
        return dgate.copy_(results[0]), dup.copy_(results[1]), None if h is None else h.copy_(results[2])
    launch = _launch(n_cols)
    blocks_per_row = triton.cdiv(n_cols, launch.block)
    if gate.numel():
        _glu_bwd_kernel[(n_rows * blocks_per_row,)](
            dh, gate, up, dgate, dup, h, dh.stride(0), gate.stride(0), up.stride(0), dgate.stride(0), dup.stride(0),
            0 if h is None else h.stride(0), n_cols, blocks_per_row,
            ACTIVATION=activation, HAS_H=h is not None, BLOCK_F=launch.block,
            num_warps=launch.num_warps, enable_fp_fusion=True,
        )  # fmt: skip
    return dgate, dup, h


class GLUFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, activation):  # type: ignore[override]
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return glu_fwd(gate, up, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx, dh):  # type: ignore[override]
        gate, up = ctx.saved_tensors
        dgate, dup, _ = glu_bwd(as_rows(dh, gate.shape[1]), gate, up, ctx.activation)
        return dgate, dup, None


def glu(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """Product of an activated gate and a value: act(gate) * up.

    Args:
        gate, up: [..., F] of one shape and dtype, float16, bfloat16 or float32. The halves of one [..., 2F] tensor are
            taken as they are; a copy is made only where rows have no unit column stride.
        activation: "silu", "gelu_tanh" or "gelu" (with erf).

    Returns:
        [..., F] in gate's dtype.

    Raises:
        ValueError: if shapes or dtypes differ, or the activation is another.
        TypeError: for a dtype that the device's kernels do not take.

    Reference: Shazeer 2020, arXiv:2002.05202.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if gate.ndim == 0 or gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gate and up must agree, got {tuple(gate.shape)} {gate.dtype} and {tuple(up.shape)} {up.dtype}"
        )
    n_cols = gate.shape[-1]
    return GLUFunction.apply(as_rows(gate, n_cols), as_rows(up, n_cols), activation).view(gate.shape)


def glu_reference(gate, up, activation="silu"):
    if activation == "silu":
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def _make(shape, dtype, device, generator, activation):
    return dict(
        gate=randn(shape, dtype, device, generator, std=2.0),
        up=randn(shape, dtype, device, generator),
        activation=activation,
    )


def _strided(inputs):
    # halves of one buffer, with NaN in the columns between
    gate, up = inputs["gate"], inputs["up"]
    n_cols = gate.shape[-1]
    both = gate.new_full((*gate.shape[:-1], 2 * n_cols + 3), float("nan"))
    both[..., :n_cols], both[..., n_cols + 3 :] = gate, up
    return dict(inputs, gate=both[..., :n_cols], up=both[..., n_cols + 3 :])


def _builds(cc, dtype):
    launch = _launch(14336)
    for activation in ACTIVATIONS:
        constants = dict(ACTIVATION=activation, BLOCK_F=launch.block)
        yield build(_glu_fwd_kernel, dtype, constants, launch.num_warps)
        yield build(_glu_bwd_kernel, dtype, dict(constants, HAS_H=True), launch.num_warps)


_BENCH_SHAPES = {
    "Llama-8B-T4096": (4096, 14336),
    "Llama-8B-T16384": (16384, 14336),
    "Llama-1B-T8192": (8192, 8192),
    "Qwen3-4B-T4096": (4096, 9728),
}


def _case(name, activation):
    return Case(
        name=name,
        op=glu,
        reference=glu_reference,
        eager=glu_reference,
        make=functools.partial(_make, activation=activation),
        shapes={"typical": (2, 12, 96), "odd": (5, 1031), "one-row": (1, 128), "one-column": (3, 1), "empty": (0, 64)},
        gradients=("gate", "up"),
        strided=_strided,
        bench_shapes=_BENCH_SHAPES,
        ideal=lambda shape, size: (3.0 * shape[0] * shape[1] * size, 5.0 * shape[0] * shape[1]),
        ideal_backward=lambda shape, size: (5.0 * shape[0] * shape[1] * size, 12.0 * shape[0] * shape[1]),
        builds=_builds if activation == "silu" else None,
    )


CASE = _case("glu", "silu")
GELU_TANH_CASE = _case("glu_gelu_tanh", "gelu_tanh")
GELU_CASE = _case("glu_gelu", "gelu")
