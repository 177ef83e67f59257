"""The description of an op that the generic tests and benchmarks read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Shape = tuple[int, ...]
Inputs = dict[str, Any]


@dataclass(frozen=True)
class Build:
    """One kernel configuration to assemble ahead of time.

    Attributes:
        kernel: the `@triton.jit` function.
        signature: argument name -> Triton type ("*bf16", "i32", "fp32", "constexpr").
        constants: values of the constexpr arguments.
        num_warps: as `_launch.py` picks it for the chip.
        multiples_of_16: integer arguments that are multiples of 16 at run time; pointers always are.
        enable_fp_fusion: as the launcher passes it.
    """

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int
    multiples_of_16: tuple[str, ...] = ()
    enable_fp_fusion: bool = True


def build(
    kernel: Any,
    dtype: torch.dtype,
    constants: Mapping[str, Any],
    num_warps: int,
    types: Mapping[str, str] | None = None,
) -> Build:
    """The Build of a kernel whose arguments are named as usual: `*_ptr` point to `dtype`, the rest are integers.

    `types` says otherwise by name. `stride_*` and `n_cols` are taken as multiples of 16, but those of position_ids.
    """
    pointer = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}[dtype]
    signature = {name: pointer if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
    signature |= {name: kind for name, kind in (types or {}).items() if name in signature}
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = tuple(n for n in signature if n == "n_cols" or (n.startswith("stride_") and "position" not in n))
    return Build(kernel, signature, constants, num_warps, aligned)


@dataclass(frozen=True)
class Case:
    """How to test and time one op.

    Attributes:
        name: the op's name.
        op: the public function, called with the inputs as keywords; returns a tensor or a tuple of tensors.
        reference: the same arguments; the shortest correct torch code, computing in the dtype of its inputs, so that
            float64 inputs give the truth.
        eager: what a user's model runs at the same precision: the error to be no worse than.
        make: (shape, dtype, device, generator) -> inputs; floating inputs are drawn there, in `dtype`.
        shapes: readable id -> shape: typical, odd, one row, empty.
        gradients: the inputs whose gradients are checked.
        strided: makes the inputs of a shape non-contiguous, or None where the op has no strided form.
        bench_shapes: real models' shapes for the benchmark.
        ideal: (shape, bytes per element) -> (bytes moved, floating-point operations) of a perfect forward run.
        ideal_backward: the same for the backward.
        builds: (compute capability, dtype) -> the configurations the launchers would pick there.
        draws: inputs are drawn this often and errors averaged, for ops that round between several GEMMs: there, ours and
            torch's errors are sums of many roundings, and one draw of a few values says little about either.
    """

    name: str
    op: Callable[..., Any]
    reference: Callable[..., Any]
    eager: Callable[..., Any]
    make: Callable[[Shape, torch.dtype, torch.device, torch.Generator], Inputs]
    shapes: Mapping[str, Shape]
    gradients: Sequence[str]
    strided: Callable[[Inputs], Inputs] | None = None
    bench_shapes: Mapping[str, Shape] = field(default_factory=dict)
    ideal: Callable[[Shape, int], tuple[float, float]] | None = None
    ideal_backward: Callable[[Shape, int], tuple[float, float]] | None = None
    builds: Callable[[tuple[int, int], torch.dtype], Sequence[Build]] | None = None
    draws: int = 1


def randn(
    shape: Shape, dtype: torch.dtype, device: torch.device, generator: torch.Generator, std: float = 1.0
) -> torch.Tensor:
    """Normal values drawn on the CPU, so that every device sees the same ones."""
    return (torch.randn(shape, generator=generator) * std).to(device=device, dtype=dtype)


# What ops over rows [T, D] share.
ROW_SHAPES: dict[str, Shape] = {
    "typical": (2, 24, 64),
    "odd": (5, 97),
    "one-row": (1, 128),
    "one-column": (3, 1),
    "empty": (0, 64),
}
ROW_BENCH_SHAPES: dict[str, Shape] = {
    "T4096-D4096": (4096, 4096),
    "T8192-D2048": (8192, 2048),
    "T16384-D4096": (16384, 4096),
}


def strided_rows(inputs: Inputs) -> Inputs:
    """The same with an x whose rows are three NaN longer in memory."""
    x = inputs["x"]
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), float("nan"), dtype=x.dtype, device=x.device)
    wide[..., : x.shape[-1]] = x
    return dict(inputs, x=wide[..., : x.shape[-1]])


def ideal_rows(passes: float, flops: float) -> Callable[[Shape, int], tuple[float, float]]:
    """A `Case.ideal` of an op that reads or writes each value so often and spends so many operations on it."""
    return lambda shape, size: (passes * math.prod(shape) * size, flops * math.prod(shape))


def with_residual(
    case: Case,
    op: Callable[..., Any],
    reference: Callable[..., Any],
    ideal: Callable[[Shape, int], tuple[float, float]],
    ideal_backward: Callable[[Shape, int], tuple[float, float]],
) -> Case:
    """The case of an op over rows that first adds x to a residual stream and returns their sum too."""
    return dataclasses.replace(
        case,
        name=f"add_{case.name}",
        op=op,
        reference=reference,
        eager=lambda x, residual, **rest: (case.eager(x + residual, **rest), x + residual),
        make=lambda shape, dtype, device, generator: dict(
            case.make(shape, dtype, device, generator), residual=randn(shape, dtype, device, generator)
        ),
        gradients=(case.gradients[0], "residual", *case.gradients[1:]),
        ideal=ideal,
        ideal_backward=ideal_backward,
        # the kernels are the other case's
        builds=None,
    )
