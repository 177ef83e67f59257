"""Adapters that ride in the base GEMM: no worse than torch, and no row of anybody else's is touched."""

import contextlib

import pytest
import torch

from fastlm_kernels import _launch
from fastlm_kernels._lora_pack import pack_adapters
from fastlm_kernels._stacked import Projection, StackedLinear, group_tensors, make_group, padding
from fastlm_kernels.nf4 import NF4Weight, nf4_decode
from fastlm_kernels.testing import poisoned_memory

FP32, FP16 = torch.float32, torch.float16
TOKENS, K, WIDTHS, RANKS = 512, 1024, (640, 256, 128), (16, 5, 8)


def nf4(n, dtype, generator, device):
    """A random weight [n, K] of about unit output."""
    packed = torch.randint(0, 256, (n * K // 2,), dtype=torch.uint8, generator=generator).to(device)
    absmax = torch.rand(n * K // 64, generator=generator).to(device) * K**-0.5
    return NF4Weight(packed, absmax, (n, K), dtype=dtype)


def test_padding_is_a_function_of_shape():
    assert padding(4096, 4096, 48) == 64 and padding(4096, 4096, 65) == 128
    assert padding(511, 4096, 16) == padding(4096, 1023, 16) == padding(4096, 1024, 192) == 0


def check_riding(dtype, has_bias, device, draws=4):
    """Errors of y, dx and y + residual, each as the mean of several draws: of few GEMMs, one says little."""
    found = [riding_errors(dtype, has_bias, device, seed) for seed in range(draws)]
    riding, beside = (
        [sum(column) / draws for column in zip(*(f[label] for f in found), strict=True)] for label in found[0]
    )
    for ours, stocks in zip(riding, beside, strict=True):
        assert ours <= 1.1 * stocks + 1e-9, found


def riding_errors(dtype, has_bias, device, seed):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(device)
    weights = [nf4(n, dtype, generator, device) for n in WIDTHS]
    projections = [
        Projection(
            w,
            draw(n).to(dtype) if has_bias else None,
            (draw(r, K) * K**-0.5).to(dtype),
            draw(n, r).to(dtype) * 0.3,
            2.0,
        )
        for w, n, r in zip(weights, WIDTHS, RANKS, strict=True)
    ]
    group, tensors = make_group(projections, None), group_tensors(projections)
    x, dy = draw(TOKENS, K).to(dtype), draw(TOKENS, sum(WIDTHS)).to(dtype)
    residual = draw(TOKENS, sum(WIDTHS)).to(dtype)
    dense = torch.cat([nf4_decode(w, dtype) for w in weights]).double()
    wide = torch.cat([2.0 * p.lora_b.double() @ p.lora_a.double() for p in projections])
    bias = torch.cat([p.bias.double() for p in projections]) if has_bias else 0.0
    truth = [
        x.double() @ (dense + wide).t() + bias,
        dy.double() @ (dense + wide),
        x.double() @ (dense + wide).t() + bias + residual.double(),
    ]
    errors = {}
    for label, room in (("riding", TOKENS), ("beside", 0)):
        with poisoned_memory():
            linear = StackedLinear(group, tensors, dtype, room, room, holds=True)
            assert bool(linear.x_pad) == bool(linear.dy_pad) == bool(room)
            into = linear.input(TOKENS, x.device).copy_(x)
            y = linear.forward(into)
            dx = linear.backward_x(linear.gradient(TOKENS, x.device).copy_(dy))
            grads = linear.backward_adapters(dy, x, [True] * 9)
            again = StackedLinear(group, tensors, dtype, room)
            total = again.forward_add(again.input(TOKENS, x.device).copy_(x), residual.clone(), owns=True)
            restored = StackedLinear(group, tensors, dtype, 0, room)
            restored.restore(linear.saved())
            assert torch.equal(restored.backward_x(restored.gradient(TOKENS, x.device).copy_(dy)), dx)
        errors[label] = [
            float((got.double() - want).norm() / want.norm()) for got, want in zip((y, dx, total), truth, strict=True)
        ]
        for i, p in enumerate(projections):
            rows = slice(sum(WIDTHS[:i]), sum(WIDTHS[: i + 1]))
            high = 2.0 * dy[:, rows].double() @ p.lora_b.double()
            want = [
                dy[:, rows].double().sum(0),
                high.t() @ x.double(),
                2.0 * dy[:, rows].double().t() @ (x.double() @ p.lora_a.double().t()),
            ]
            for got, exact in zip(
                grads[3 * i + (0 if has_bias else 1) : 3 * i + 3], want[0 if has_bias else 1 :], strict=True
            ):
                assert float((got.double() - exact).norm() / exact.norm()) <= (1e-5 if dtype is torch.float32 else 8e-3)
    return errors


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_riding_is_no_worse_than_beside(dtype, has_bias):
    check_riding(dtype, has_bias, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_riding_on_the_gpu(dtype, has_bias):
    check_riding(dtype, has_bias, "cuda")


@pytest.mark.parametrize("rank", [16, 64])
def test_a_bias_that_rides_is_added_once(rank):
    """In a column of its own, whatever rank the adapter has; gradients do not see it, even where it would overflow them."""
    generator = torch.Generator().manual_seed(0)
    weight, bias = nf4(1024, FP16, generator, "cpu"), torch.full((1024,), 6e4, dtype=FP16)
    a, b = (torch.randn(rank, K, generator=generator) * K**-0.5).half(), torch.zeros(1024, rank).half()
    group, tensors = make_group([Projection(weight, bias, a, b)], None), group_tensors([Projection(weight, bias, a, b)])
    linear = StackedLinear(group, tensors, FP16, TOKENS, TOKENS, holds=True)
    assert linear.x_pad == linear.dy_pad == 64 * (1 if rank == 16 else 2)
    y = linear.forward(linear.input(TOKENS, bias.device).zero_())
    assert (y == 6e4).all()
    dx = linear.backward_x(linear.gradient(TOKENS, bias.device).fill_(10.0))
    want = StackedLinear(group, tensors, FP16).backward_x(torch.full((TOKENS, 1024), 10.0, dtype=FP16))
    assert float((dx.float() - want.float()).norm() / want.float().norm()) <= 1e-3


def test_what_rounding_takes_from_a_small_update():
    """An adapter that adds a tenth of a unit in the last place: riding, all of it arrives; beside, as in PEFT, a part is lost."""
    generator = torch.Generator().manual_seed(0)
    weight = nf4(1024, torch.bfloat16, generator, "cpu")
    a, b = torch.randn(16, K, generator=generator) * K**-0.5, torch.randn(1024, 16, generator=generator) * 1e-4
    p = Projection(weight, None, a.bfloat16(), b.bfloat16())
    group, tensors = make_group([p], None), group_tensors([p])
    x = torch.randn(TOKENS, K, generator=generator).bfloat16()
    base = x @ nf4_decode(weight, torch.bfloat16).t()
    small = (x.double() @ a.bfloat16().double().t()) @ b.bfloat16().double().t()
    shares = {}
    for label, room in (("riding", TOKENS), ("beside", 0)):
        linear = StackedLinear(group, tensors, torch.bfloat16, room)
        arrived = linear.forward(linear.input(TOKENS, x.device).copy_(x)).double() - base.double()
        shares[label] = float((arrived * small).sum() / (small * small).sum())
    assert abs(shares["riding"] - 1) <= 0.03 and shares["beside"] < 0.9, shares


def test_dense_weights_are_never_laid_out_anew():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1024, K, generator=generator)
    p = Projection(weight, None, torch.randn(4, K, generator=generator), torch.randn(1024, 4, generator=generator))
    linear = StackedLinear(make_group([p], None), group_tensors([p]), torch.float32, TOKENS, TOKENS)
    assert linear.x_pad == linear.dy_pad == 0 and linear.input(3, weight.device).is_contiguous()


@pytest.mark.parametrize("made, dtype", [(FP32, FP32), (FP16, FP16), (FP32, FP16)], ids=str)
@pytest.mark.parametrize("ranks", [(16, 5, 8), (64,), (1, 70)], ids=str)
def test_packing_is_equal_to_the_bit(ranks, made, dtype):
    """The kernel writes what torch's copies do, into rows that are longer than what it fills."""
    if torch.cuda.is_available():
        pytest.skip("Triton compiles for the GPU in this process: the gpu test runs the kernel")
    check_packing(ranks, made, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("made, dtype", [(FP32, FP32), (FP16, FP16), (FP32, FP16)], ids=str)
@pytest.mark.parametrize("ranks", [(16, 5, 8), (64,), (1, 70)], ids=str)
def test_packing_on_the_gpu(ranks, made, dtype):
    check_packing(ranks, made, dtype, "cuda")


def check_packing(ranks, made, dtype, device):
    # filled up to the padding, or as many as there are
    total = 128 if len(ranks) == 2 else sum(ranks)
    generator = torch.Generator().manual_seed(0)
    widths, n_cols = (130, 64, 31)[: len(ranks)], 100
    loras = [
        (torch.randn(r, n_cols, generator=generator).to(made), torch.randn(n, r, generator=generator).to(made))
        for n, r in zip(widths, ranks, strict=True)
    ]
    # a projection without an adapter lies between the first and the second
    starts = [0, *(sum(widths[:i]) + 7 for i in range(1, len(widths)))]
    rows = [slice(start, start + n) for start, n in zip(starts, widths, strict=True)]
    got = []
    run_kernel = contextlib.nullcontext if device == "cuda" else _launch.interpreting
    for where, kernels in (("cpu", contextlib.nullcontext), (device, run_kernel)):
        a, b = torch.full((128, n_cols + 9), 7.0, dtype=dtype), torch.full((rows[-1].stop, 140), 7.0, dtype=dtype)
        a, b = a.to(where), b.to(where)
        parts = [tuple(t.to(where) for t in pair) for pair in loras]
        with kernels():
            pack_adapters(parts, [0.3, 2.0, 1.0][: len(ranks)], rows, a[:total, :n_cols], b[:, :total])
        got.append((a.cpu(), b.cpu()))
    assert torch.equal(got[0][0], got[1][0]) and torch.equal(got[0][1], got[1][1])
    assert (got[1][0][:, n_cols:] == 7).all() and (got[1][0][total:] == 7).all() and (got[1][1][:, total:] == 7).all()
