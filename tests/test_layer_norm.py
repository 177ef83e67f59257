"""layer_norm beyond its CASEs: torch's and transformers' own norms, parts that are absent, views of heads, errors."""

import pytest
import torch

from fastlm_kernels.layer_norm import (
    add_layer_norm,
    add_layer_norm_reference,
    layer_norm,
    layer_norm_bwd,
    layer_norm_fwd,
    layer_norm_reference,
)

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
EPS = 1e-5


def _randn(*shape, seed=0, dtype=torch.float32, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _one_rounding(dtype):
    # y is rounded once, which float32 sums in another order may tip by a unit; terms of up to 10 may cancel in float32
    return dict(rtol={"fp32": 2.0**-20, "fp16": 2.0**-10, "bf16": 2.0**-7}[dtype], atol=2.0**-20)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True], ids=["weight", "weight-bias"])
def test_equals_torch(path, dtype, has_bias):
    x = _randn(6, 96, dtype=DTYPES[dtype]) * 3 + 1
    weight, bias = _randn(96, seed=1, dtype=x.dtype), _randn(96, seed=2, dtype=x.dtype) if has_bias else None
    expected = torch.nn.functional.layer_norm(x, (96,), weight, bias, EPS)
    torch.testing.assert_close(layer_norm(x, weight, bias, EPS), expected, **_one_rounding(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 5, 64), (2, 5, 3, 32)], ids=["hidden", "heads"])
def test_equals_cohere(path, dtype, shape):
    cohere = pytest.importorskip("transformers.models.cohere.modeling_cohere")
    norm = cohere.CohereLayerNorm(shape[2:] if len(shape) == 4 else shape[2], EPS).to(DTYPES[dtype])
    with torch.no_grad():
        norm.weight.copy_(_randn(*norm.weight.shape, seed=1))
    x = _randn(*shape, dtype=DTYPES[dtype]) * 2 - 1
    y, expected = layer_norm(x, norm.weight, eps=EPS), norm(x)
    if path == "torch":
        assert torch.equal(y, expected)
    torch.testing.assert_close(y, expected, **_one_rounding(dtype))


@pytest.mark.parametrize("has_residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("parts", ["none", "weight", "weight-bias", "heads", "heads-bias"])
def test_gradients_of_every_combination_of_parts(path, parts, has_residual):
    shape, columns = (3, 7, 4, 24), (4, 24) if parts.startswith("heads") else (24,)
    names = {
        "x": _randn(*shape) + 1,
        **({"residual": _randn(*shape, seed=1)} if has_residual else {}),
        **({"weight": _randn(*columns, seed=2)} if parts != "none" else {}),
        **({"bias": _randn(*columns, seed=3)} if parts.endswith("bias") else {}),
    }

    def run(op, dtype):
        inputs = {name: value.to(dtype, copy=True).requires_grad_() for name, value in names.items()}
        outputs = op(**inputs, eps=EPS)
        outputs = outputs if has_residual else (outputs,)
        torch.autograd.backward(outputs, [_randn(*shape, seed=5 + i).to(dtype) for i in range(len(outputs))])
        return [*outputs, *(value.grad for value in inputs.values())]

    ours = run(add_layer_norm if has_residual else layer_norm, torch.float32)
    truth = run(add_layer_norm_reference if has_residual else layer_norm_reference, torch.float64)
    for got, expected in zip(ours, truth, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n_cols", [40, 5000, 8200], ids=["together", "own-sums", "long"])
def test_plain_functions_on_views_of_heads(path, n_cols):
    # q of a buffer that also holds k and v
    buffer = _randn(5, 4, n_cols) + 2
    x, weight, bias = buffer[:, 1:3], _randn(2, n_cols, seed=1), _randn(2, n_cols, seed=2)
    y, h, mean, rstd = layer_norm_fwd(x, weight, bias, EPS)
    assert h is x
    torch.testing.assert_close(mean, x.mean(-1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rstd, (x.var(-1, unbiased=False) + EPS).rsqrt(), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(y, layer_norm_reference(x, weight, bias, EPS), rtol=1e-5, atol=1e-5)
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    dy, dh = _randn(5, 3, n_cols, seed=3)[:, 1:], _randn(5, 3, n_cols, seed=4)[:, :2]
    layer_norm_reference(*leaves, EPS).backward(dy.double())
    leaves[0].grad += dh
    got = layer_norm_bwd(dy, x, weight, mean, rstd, dh, needs_weight=True, needs_bias=True)
    for gradient, leaf in zip(got, leaves, strict=True):
        torch.testing.assert_close(gradient.double(), leaf.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n_cols", [40, 5000], ids=["together", "own-sums"])
def test_only_needed_gradients_are_computed(path, n_cols):
    x, weight, dy = _randn(3, n_cols), _randn(n_cols, seed=1), _randn(3, n_cols, seed=2)
    _, h, mean, rstd = layer_norm_fwd(x, weight, None, EPS)
    both = layer_norm_bwd(dy, h, weight, mean, rstd, needs_weight=True, needs_bias=True)
    for needs_weight, needs_bias in ((False, False), (True, False), (False, True)):
        some = layer_norm_bwd(dy, h, weight, mean, rstd, needs_weight=needs_weight, needs_bias=needs_bias)
        assert (some[1] is not None, some[2] is not None) == (needs_weight, needs_bias)
        for got, expected in zip(some, both, strict=True):
            assert got is None or torch.equal(got, expected)


def test_a_large_mean_does_not_cancel(path):
    x = _randn(4, 512) + 4096.0
    expected = layer_norm_reference(x.double())
    torch.testing.assert_close(layer_norm(x).double(), expected, rtol=1e-3, atol=1e-3)


def test_wrong_parameters_are_named():
    x, weight = torch.zeros(2, 3, 8), torch.zeros(8)
    with pytest.raises(ValueError, match=r"weight must be \[D\].* got \(7,\)"):
        layer_norm(x, torch.zeros(7))
    with pytest.raises(ValueError, match=r"weight must be .* got \(2, 8\)"):
        layer_norm(x, torch.zeros(2, 8))
    with pytest.raises(ValueError, match=r"bias must be .* got \(3, 8\)"):
        layer_norm(x, weight, torch.zeros(3, 8))
    with pytest.raises(ValueError, match=r"must agree, got \(8,\) torch.float16"):
        layer_norm(x, weight, weight.half())
    with pytest.raises(ValueError, match="a bias needs a weight"):
        layer_norm(x, bias=weight)
    with pytest.raises(ValueError, match=r"D in 1\.\.16384, got \(2, 16385\)"):
        layer_norm(torch.zeros(2, 16385))
    with pytest.raises(ValueError, match="x and residual must agree"):
        add_layer_norm(x, x.half(), weight)
