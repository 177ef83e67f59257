"""AdamW over many tensors: its values over many steps, on both paths, beside torch's, bitsandbytes' and the formula in float64."""

import copy
import math

import pytest
import torch

from fastlm.optimizers import FusedAdamW
from fastlm_kernels import adamw
from fastlm_kernels._dynamic_map import dequantize, dynamic_map, quantize

SIZES = (1, 255, 256, 257, 4095, 4097, 100003)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SETTINGS = dict(lr=1e-2, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1)
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def parameters(dtype, sizes=SIZES, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(n, generator=generator).to(device, dtype)) for n in sizes]


def set_gradients(params, step, scale=0.1):
    """The same gradients for every run, a third of the values far smaller than the rest."""
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        value = torch.randn(p.numel(), generator=generator) * scale
        value[::3] *= 1e-3
        p.grad = value.view(p.shape).to(p.device, p.dtype)


def run(optimizer, params, steps, max_norm=None, scale=0.1):
    """Steps at a rate that changes; the norms that the clip measured."""
    norms = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = SETTINGS["lr"] * (1 - step / 20)
        set_gradients(params, step, scale)
        if max_norm is not None:
            is_ours = isinstance(optimizer, FusedAdamW)
            clip = optimizer.clip_grad_norm if is_ours else lambda limit: torch.nn.utils.clip_grad_norm_(params, limit)
            norms.append(float(clip(max_norm)))
        optimizer.step()
    return norms


def exact(params, steps, max_norm=None, scale=0.1):
    """The formula in float64 from the same values and gradients, and the norms."""
    values = [p.detach().double() for p in params]
    moments = [(torch.zeros_like(v), torch.zeros_like(v)) for v in values]
    norms = []
    for step in range(steps):
        set_gradients(params, step, scale)
        grads = [p.grad.double() for p in params]
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads))
        norms.append(norm)
        factor = min(1.0, max_norm / (norm + 1e-6)) if max_norm is not None else 1.0
        settings = dict(SETTINGS, lr=SETTINGS["lr"] * (1 - step / 20))
        for i, grad in enumerate(grads):
            values[i], *moments[i] = adamw.adamw_reference(
                values[i], grad * factor, *moments[i], step=step + 1, **settings
            )
    return values, norms


def errors(params, truth):
    """Of each tensor: the largest distance to the truth, in units of its largest value."""
    return [float((p.detach().double() - t).abs().max() / t.abs().max()) for p, t in zip(params, truth, strict=True)]


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_many_steps(path, dtype, max_norm):
    """No farther from the formula than torch's fused AdamW, which also computes in float32 and keeps moments in the parameter's dtype."""
    check_many_steps("cpu", DTYPES[dtype], max_norm)


def test_many_steps_in_bfloat16():
    # Triton's interpreter cuts bfloat16 off where hardware rounds: the kernels' values are checked on the GPU
    check_many_steps("cpu", torch.bfloat16, 1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_steps_on_the_gpu(dtype, max_norm):
    check_many_steps("cuda", DTYPES[dtype], max_norm)


def check_many_steps(device, dtype, max_norm):
    steps = 12
    params, stock = parameters(dtype, device=device), parameters(dtype, device=device)
    truth, true_norms = exact(parameters(dtype, device=device), steps, max_norm)
    norms = run(FusedAdamW(params, **SETTINGS), params, steps, max_norm)
    run(torch.optim.AdamW(stock, **SETTINGS, fused=True), stock, steps, max_norm)
    unit = torch.finfo(dtype).eps
    for n, ours, torchs in zip(SIZES, errors(params, truth), errors(stock, truth), strict=True):
        assert ours <= 1.1 * torchs + unit, (n, ours, torchs)
    if max_norm is not None:
        assert true_norms[0] > 3 * max_norm
        # float32 sums of 1e5 squares, in torch's order on the torch path
        assert norms == pytest.approx(true_norms, rel=4e-6)


def test_float32_on_a_cpu_is_torchs_to_the_bit():
    params, stock = parameters(torch.float32), parameters(torch.float32)
    ours, theirs = FusedAdamW(params, **SETTINGS), torch.optim.AdamW(stock, **SETTINGS, foreach=False)
    assert run(ours, params, 6, max_norm=0.5) == run(theirs, stock, 6, max_norm=0.5)
    assert all(torch.equal(a, b) for a, b in zip(params, stock, strict=True))
    for a, b in zip(params, stock, strict=True):
        assert torch.equal(ours.state[a]["exp_avg"], theirs.state[b]["exp_avg"])
        assert torch.equal(ours.state[a]["exp_avg_sq"], theirs.state[b]["exp_avg_sq"])


def test_float32_moments_of_half_precision_parameters(path):
    """state_dtype=torch.float32: only the parameters are rounded, once a step."""
    params = parameters(torch.float16)
    truth, _ = exact(parameters(torch.float16), 8)
    optimizer = FusedAdamW(params, **SETTINGS, state_dtype=torch.float32)
    run(optimizer, params, 8)
    assert all(optimizer.state[p]["exp_avg"].dtype is torch.float32 for p in params)
    assert all(error <= 8 * torch.finfo(torch.float16).eps / 2 for error in errors(params, truth))


def test_mixed_dtypes_and_sizes_in_one_norm(path):
    """Tensors of four dtypes, contiguous or not: one norm over all of them, and every one of them moves as alone."""
    made = [torch.randn(*shape) for shape in ((3, 5), (40, 64), (7, 300), (2, 2), (0, 4))]
    dtypes = (torch.float32, torch.float16, torch.float64, torch.float32, torch.float32)
    params = [torch.nn.Parameter(t.to(d)) for t, d in zip(made, dtypes, strict=True)]
    params[1] = torch.nn.Parameter(params[1].detach().t())
    alone = [torch.nn.Parameter(p.detach().double().clone()) for p in params]
    for p, a in zip(params, alone, strict=True):
        p.grad = torch.randn(p.shape).to(p.dtype).mT.contiguous().mT
        a.grad = p.grad.double().clone()
    want = torch.nn.utils.clip_grad_norm_(alone, 0.7)
    optimizer = FusedAdamW(params, **SETTINGS)
    assert float(optimizer.clip_grad_norm(0.7)) == pytest.approx(float(want), rel=1e-6)
    optimizer.step()
    torch.optim.AdamW(alone, **SETTINGS).step()
    for p, a in zip(params, alone, strict=True):
        torch.testing.assert_close(p.double(), a.double(), rtol=2 * torch.finfo(p.dtype).eps, atol=1e-7)


def test_a_view_that_starts_at_an_odd_place(path):
    """A parameter and a gradient whose addresses are no multiples of 16 bytes."""
    base = torch.randn(5001)
    param, alone = torch.nn.Parameter(base[1:]), torch.nn.Parameter(base[1:].clone())
    param.grad = torch.randn(5003)[3:]
    alone.grad = param.grad.clone()
    FusedAdamW([param], **SETTINGS).step()
    torch.optim.AdamW([alone], **SETTINGS).step()
    torch.testing.assert_close(param, alone, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_gradients_that_are_not_finite(path, bad, max_norm):
    """They spread as torch's clip and AdamW let them."""
    params, stock = parameters(torch.float32, (600, 5000)), parameters(torch.float32, (600, 5000))
    ours, theirs = FusedAdamW(params, **SETTINGS), torch.optim.AdamW(stock, **SETTINGS)
    for group in (params, stock):
        set_gradients(group, 0)
        group[0].grad[17] = bad
    if max_norm is not None:
        norm, want = ours.clip_grad_norm(max_norm), torch.nn.utils.clip_grad_norm_(stock, max_norm)
        torch.testing.assert_close(norm, want, equal_nan=True)
    ours.step()
    theirs.step()
    for a, b in zip(params, stock, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7, equal_nan=True)
    assert torch.isnan(params[0][17])


def test_repeated_runs_are_equal_to_the_bit(path):
    results = []
    for _ in range(2):
        params = parameters(torch.float32, (257, 9001))
        norms = run(FusedAdamW(params, **SETTINGS, state_dtype=torch.uint8), params, 3, max_norm=0.3)
        results.append((norms, params))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_a_gradient_may_move_and_so_may_a_parameter(path):
    """The tables of addresses follow: every step has gradients elsewhere, and in the middle the values move too."""
    params, alone = parameters(torch.float32, (300, 5000)), parameters(torch.float32, (300, 5000))
    ours, theirs = FusedAdamW(params, **SETTINGS), torch.optim.AdamW(alone, **SETTINGS)
    kept = []
    for step in range(5):
        set_gradients(params, step)
        set_gradients(alone, step)
        kept.append([p.grad for p in params])
        if step == 2:
            params[1].data = params[1].data.clone()
            ours.state[params[0]]["exp_avg"] = ours.state[params[0]]["exp_avg"].clone()
        if step == 3:
            params[0].grad = alone[0].grad = None
        norms = ours.clip_grad_norm(0.5), torch.nn.utils.clip_grad_norm_(alone, 0.5)
        torch.testing.assert_close(*norms)
        if step == 4:
            # after the norm was measured
            params[0].grad, alone[0].grad = torch.ones(300), torch.ones(300) * min(1.0, 0.5 / (float(norms[0]) + 1e-6))
        ours.step()
        theirs.step()
    assert [ours.state[p]["step"] for p in params] == [4, 5]
    for a, b in zip(params, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("state_dtype", [None, torch.uint8])
def test_groups_have_settings_of_their_own(path, state_dtype):
    made = []
    for _ in range(2):
        params = parameters(torch.float32, (4096, 5000, 6000))
        groups = [
            dict(params=params[:1], lr=1e-1, weight_decay=0.5),
            dict(params=params[1:2], betas=(0.5, 0.6)),
            dict(params=params[2:], eps=1.0),
        ]
        made.append((params, groups))
    (params, groups), (alone, single) = made
    optimizer = FusedAdamW(groups, **SETTINGS, state_dtype=state_dtype)
    others = [torch.optim.AdamW([group], **SETTINGS) for group in single]
    for step in range(3 if state_dtype is None else 1):
        set_gradients(params, step)
        set_gradients(alone, step)
        for one in (optimizer, *others):
            one.step()
    for a, b in zip(params, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


# --- 8-bit moments ---


def test_the_map_is_that_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    for is_signed in (True, False):
        values = dynamic_map(is_signed)
        assert torch.equal(values, functional.create_dynamic_map(is_signed))
        assert torch.equal(values, values.sort().values) and values.unique().numel() == 256


@pytest.mark.parametrize("is_signed", [True, False])
def test_codes_are_of_the_nearest_values(is_signed):
    values = torch.randn(3000, generator=torch.Generator().manual_seed(3)) ** 3
    values = values if is_signed else values.abs()
    values[512:768] = 0.0
    codes, absmax = quantize(values, is_signed)
    assert torch.equal(absmax, torch.stack([block.abs().max() for block in values.split(256)]))
    assert not dequantize(codes, absmax, is_signed)[512:768].any()
    scaled = values.double() / torch.where(absmax > 0, absmax, 1.0).repeat_interleave(256)[:3000]
    distances = (scaled[:, None] - dynamic_map(is_signed).double()).abs()
    chosen = distances.gather(1, codes.long()[:, None])[:, 0]
    # a value within a rounding of the middle between two codes has either
    assert torch.all(chosen <= distances.min(1).values + 1e-7)
    assert torch.equal(
        dequantize(codes, absmax, is_signed),
        dynamic_map(is_signed)[codes.long()] * absmax.repeat_interleave(256)[:3000],
    )


def by_the_paper(params, steps, max_norm):
    """8-bit AdamW written from the paper: moments are decoded, updated and encoded again, 256 values at a time, in float64."""
    maps = [dynamic_map(True).double(), dynamic_map(False).double()]
    values = [p.detach().double() for p in params]
    coded = [[torch.zeros_like(v), torch.zeros_like(v)] for v in values]
    for step in range(steps):
        set_gradients(params, step)
        grads = [p.grad.double() for p in params]
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads))
        settings = dict(SETTINGS, lr=SETTINGS["lr"] * (1 - step / 20))
        for i, grad in enumerate(grads):
            grad = grad * min(1.0, max_norm / (norm + 1e-6))
            values[i], *moments = adamw.adamw_reference(values[i], grad, *coded[i], step=step + 1, **settings)
            for which, moment in enumerate(moments):
                if moment.numel() >= 4096:
                    blocks = [b / b.abs().max() for b in moment.split(256)]
                    nearest = [maps[which][(b[:, None] - maps[which]).abs().argmin(1)] for b in blocks]
                    moment = torch.cat([n * b.abs().max() for n, b in zip(nearest, moment.split(256), strict=True)])
                coded[i][which] = moment
    return values, coded


def decoded(state):
    if state["state1"].dtype is torch.float32:
        return [state["state1"], state["state2"]]
    return [dequantize(state[f"state{i}"].view(-1), state[f"absmax{i}"], i == 1) for i in (1, 2)]


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_8bit_moments(path, dtype):
    check_8bit("cpu", DTYPES[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_8bit_moments_on_the_gpu(dtype):
    check_8bit("cuda", DTYPES[dtype])


def check_8bit(device, dtype):
    sizes, steps = (1, 257, 4095, 4096, 4097, 9001), 4
    params = parameters(dtype, sizes, device)
    optimizer = FusedAdamW(params, **SETTINGS, state_dtype=torch.uint8)
    run(optimizer, params, steps, max_norm=1.0)
    truth, moments = by_the_paper(parameters(dtype, sizes), steps, max_norm=1.0)
    for p, want, both in zip(params, truth, moments, strict=True):
        state = optimizer.state[p]
        assert (state["state1"].dtype is torch.uint8) == (p.numel() >= 4096)
        # a rounding of the parameter in each step; a moment beside the middle of two codes takes the other one, and moves its value on
        far = (p.detach().double().cpu() - want).abs() > steps * torch.finfo(dtype).eps * want.abs().max() + 1e-6
        assert far.double().mean() <= 2e-3, (p.numel(), int(far.sum()))
        for got, moment in zip(decoded(state), both, strict=True):
            off = (got.double().cpu() - moment).abs() > 1e-5 * moment.abs().max()
            assert off.double().mean() <= 2e-3, (p.numel(), int(off.sum()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_8bit_moments_pass_over_what_is_not_finite(path, bad):
    """As bitsandbytes on a GPU: such a value keeps its weight and forgets its moments, all others go on."""
    params, others = parameters(torch.float32, (5000,)), parameters(torch.float32, (5000,))
    ours, clean = (FusedAdamW(group, **SETTINGS, state_dtype=torch.uint8) for group in (params, others))
    for step in range(2):
        set_gradients(params, step)
        set_gradients(others, step)
        if step == 1:
            before = params[0].detach().clone()
            params[0].grad[300] = bad
        ours.step()
        clean.step()
    assert params[0][300] == before[300] and torch.isfinite(params[0]).all()
    m, v = decoded(ours.state[params[0]])
    assert m[300] == 0 and v[300] == 0 and m[301] != 0
    assert torch.equal(params[0][:256], others[0][:256])


def bnb_optimizer(params, **settings):
    optim = pytest.importorskip("bitsandbytes").optim
    return optim.AdamW8bit(params, **{**SETTINGS, **settings})


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.filterwarnings("ignore")
def test_beside_bitsandbytes(device, dtype):
    """One step of each from every state of bitsandbytes' own run: equal parameters, and moments nearest to the same values.

    On a CPU its search for codes skips some, so its moments are compared where they are the nearest; on a GPU it keeps the sign of values
    that round to zero, one code off.
    """
    dtype = DTYPES[dtype]
    # on a GPU it decays after the update, which shrinks this too: by lr * weight_decay of it, and in 16 bit after one more rounding
    settings = dict(weight_decay=SETTINGS["weight_decay"] if device == "cpu" else 0.0)
    theirs = parameters(dtype, (4096, 10000), device)
    stock = bnb_optimizer(theirs, **settings)
    for step in range(5):
        ours = [torch.nn.Parameter(p.detach().clone()) for p in theirs]
        optimizer = FusedAdamW(ours, **{**SETTINGS, **settings}, state_dtype=torch.uint8)
        optimizer.load_state_dict(copy.deepcopy(stock.state_dict()))
        for group in (ours, theirs):
            set_gradients(group, step)
        optimizer.step()
        stock.step()
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-6 if dtype is torch.float32 else torch.finfo(dtype).eps, atol=2e-6)
            got, want = optimizer.state[a], stock.state[b]
            for i in (1, 2):
                torch.testing.assert_close(got[f"absmax{i}"], want[f"absmax{i}"], rtol=1e-5, atol=0)
            if device == "cuda":
                for i in (1, 2):
                    apart = (got[f"state{i}"].int() - want[f"state{i}"].int()).abs()
                    assert apart.max() <= 1 and (apart > 0).float().mean() < 0.01
            else:
                gaps = (dynamic_map(True).diff().max(), dynamic_map(False).diff().max())
                for mine, other, gap, i in zip(decoded(got), decoded(want), gaps, (1, 2), strict=True):
                    scale = got[f"absmax{i}"].repeat_interleave(256)[: mine.numel()]
                    assert torch.all((mine - other.view(-1)).abs() <= gap * scale * (1 + 1e-5))
