"""Checks that every CASE passes: values and gradients, no worse than torch at the same precision.

Used by the tests (interpreter on a CPU, kernels on a GPU) and by the op benchmark, which times nothing that is wrong.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import fastlm_kernels
from fastlm_kernels._case import Case, Inputs, Shape

# Half a unit in the last place of the result's dtype, as a share of its size: one rounding is always allowed.
_ROUNDING = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def cases() -> list[Case]:
    """All CASEs of the package, in the order of their modules. A public op module without one is an error."""
    found = []
    for info in pkgutil.iter_modules(fastlm_kernels.__path__):
        if info.name.startswith("_") or info.name == "testing":
            continue
        module = importlib.import_module(f"fastlm_kernels.{info.name}")
        own = [value for value in vars(module).values() if isinstance(value, Case)]
        if not own:
            raise AssertionError(f"fastlm_kernels.{info.name} has no CASE")
        found += own
    return found


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Every uninitialised tensor is full of NaN, so a value that a kernel forgot to write shows."""
    before = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = fill


def _convert(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _run(function: Any, inputs: Inputs, gradients: tuple[str, ...], weights: list[Tensor] | None):
    """Outputs, gradients of sum(outputs * weights), and the weights drawn for them."""
    inputs = dict(inputs)
    for name in gradients:
        # detach keeps the strides: the op must meet the layout that the case made
        inputs[name] = inputs[name].detach().requires_grad_()
    outputs = function(**inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    differentiable = [y for y in outputs if y.requires_grad]
    if weights is None:
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(y.shape, generator=generator).to(y.device) for y in differentiable]
    if gradients and differentiable:
        torch.autograd.backward(differentiable, [w.to(y.dtype) for w, y in zip(weights, differentiable, strict=True)])
    grads = {name: inputs[name].grad for name in gradients}
    return [y.detach() for y in outputs], grads, weights


def _error(got: Tensor, truth: Tensor) -> float:
    return float((got.double() - truth).abs().max()) if truth.numel() else 0.0


def check_case(
    case: Case, shape: Shape, dtype: torch.dtype, device: torch.device | str, strided: bool = False,
    slack: float = 0.0, draws: int | None = None,
) -> None:  # fmt: skip
    """Forward and every gradient of one shape: |truth - ours| <= |truth - torch| + one rounding.

    Args:
        case: the op.
        shape, dtype, device: of the inputs.
        strided: use the case's non-contiguous inputs.
        slack: further error allowed, relative to the largest true value. Zero on a GPU; Triton's interpreter
            truncates bfloat16 stores where hardware rounds, so tests there pass one bfloat16 unit.
        draws: over how many inputs the errors are averaged; the case's own number by default.

    Raises:
        AssertionError: naming the tensor, both errors and the bound.
    """
    totals: dict[str, list[float]] = {}
    draws = draws or case.draws
    for seed in range(draws):
        for what, *figures in _figures(case, shape, dtype, torch.device(device), strided, seed):
            totals[what] = [a + b for a, b in zip(totals.get(what, [0.0] * 4), figures, strict=True)]
    for what, figures in totals.items():
        error, eager, size, rounding = (total / draws for total in figures)
        allowed = eager + (rounding + 1e-6 + slack) * size
        assert error <= allowed, (
            f"{case.name} {what} {tuple(shape)} {dtype}: off by {error:.3g}, torch by {eager:.3g}, allowed {allowed:.3g}"
        )


def _figures(
    case: Case, shape: Shape, dtype: torch.dtype, device: torch.device, strided: bool, seed: int
) -> Iterator[tuple[str, float, float, float, float]]:
    """Of every output and gradient: its name, our largest error, torch's, the largest true value, one rounding's share."""
    inputs = case.make(shape, dtype, device, torch.Generator().manual_seed(seed))
    gradients = tuple(case.gradients)
    exact = {name: _convert(value, torch.float64) for name, value in inputs.items()}
    # weights of the outputs' sum are drawn once, rounded to dtype, so that all three runs see the same dy
    _, _, weights = _run(case.eager, inputs, gradients, None)
    weights = [w.to(dtype).double() for w in weights]
    eager_out, eager_grads, _ = _run(case.eager, inputs, gradients, weights)
    truth_out, truth_grads, _ = _run(case.reference, exact, gradients, weights)
    with poisoned_memory():
        ours_in = case.strided(inputs) if strided and case.strided else inputs
        ours_out, ours_grads, _ = _run(case.op, ours_in, gradients, weights)
    assert len(ours_out) == len(truth_out), f"{case.name}: {len(ours_out)} outputs, expected {len(truth_out)}"
    triples = [(f"output {i}", *t) for i, t in enumerate(zip(ours_out, eager_out, truth_out, strict=True))]
    triples += [(f"d{name}", ours_grads[name], eager_grads[name], truth_grads[name]) for name in gradients]
    for what, ours, eager, truth in triples:
        if truth is None:
            assert ours is None or not ours.abs().sum(), f"{case.name} {what}: a gradient where there is none"
            continue
        assert ours is not None, f"{case.name} {what}: no gradient"
        assert ours.shape == truth.shape, f"{case.name} {what}: shape {tuple(ours.shape)}, not {tuple(truth.shape)}"
        assert torch.isfinite(ours).all() or not torch.isfinite(truth).all(), f"{case.name} {what}: not finite"
        size = float(truth.abs().max()) if truth.numel() else 0.0
        yield what, _error(ours, truth), _error(eager, truth), size, _ROUNDING.get(ours.dtype, 0.0)
