"""Adapters in another dtype than the layer they sit on: no worse than PEFT's own sequence of modules."""

import pytest
import torch
from tiny import relative

from fastlm_kernels.lora import Projection, lora_linear

WIDTHS, K, R, T = (48, 32), 64, 8, 40


def draw(generator, *shape):
    return torch.randn(shape, generator=generator) * shape[-1] ** -0.5


def stock(x, weights, adapters, scaling):
    """What peft's Linear does: the base product, then B(A(x)) in the adapter's dtype, scaled and added in the wider of both."""
    parts = []
    for weight, (a, b) in zip(weights, adapters, strict=True):
        base = x @ weight.t()
        parts.append((base + ((x.to(a.dtype) @ a.t()) @ b.t()) * scaling).to(base.dtype))
    return torch.cat(parts, dim=-1)


FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


# (layer, adapter): what peft makes (float32 adapters), and what TRL makes of a quantized model's (bfloat16, whatever the layer)
@pytest.mark.parametrize(
    "dtype, lora_dtype",
    [(FP32, BF16), (FP16, BF16), (BF16, BF16), (FP32, FP16), (FP16, FP16), (FP16, FP32), (BF16, FP32)],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
@pytest.mark.parametrize("widths", [WIDTHS[:1], WIDTHS], ids=["one", "stacked"])
def test_adapters_of_another_dtype(dtype, lora_dtype, widths):
    """RMS errors of the result and of each gradient to the exact value, over several draws: at most 1.1 times those of stock."""
    totals: dict[str, dict[str, float]] = {}
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        x = (draw(generator, T, K) * 8).to(dtype).requires_grad_()
        weights = [draw(generator, n, K).to(dtype) for n in widths]
        adapters = [
            tuple(m.to(lora_dtype).requires_grad_() for m in (draw(generator, R, K), draw(generator, n, R)))
            for n in widths
        ]
        leaves = [x, *(m for pair in adapters for m in pair)]
        exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
        truth = stock(exact[0], [w.double() for w in weights], list(zip(exact[1::2], exact[2::2], strict=True)), 1.5)
        dy = torch.randn(truth.shape, generator=generator).to(dtype)
        want = [truth, *torch.autograd.grad(truth, exact, dy.double())]
        projections = [Projection(w, None, a, b, 1.5) for w, (a, b) in zip(weights, adapters, strict=True)]
        for label, y in (("stock", stock(x, weights, adapters, 1.5)), ("ours", lora_linear(x, projections))):
            got = [y, *torch.autograd.grad(y, leaves, dy)]
            assert [g.dtype for g in got] == [dtype, *(leaf.dtype for leaf in leaves)]
            for name, value, exact_value in zip(("y", "dx", *["dlora"] * (len(leaves) - 1)), got, want, strict=True):
                sums = totals.setdefault(name, {"stock": 0.0, "ours": 0.0})
                sums[label] += relative(value.detach(), exact_value.detach()) ** 2
    for name, sums in totals.items():
        assert sums["ours"] ** 0.5 <= 1.1 * sums["stock"] ** 0.5 + 1e-6, (name, sums)
