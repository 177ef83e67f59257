"""The fused head: masks, chunks, what is computed and when, and the statistics that TRL asks for."""

import importlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fastlm_kernels import _launch
from fastlm_kernels.linear_cross_entropy import (
    chunk_rows,
    linear_cross_entropy,
    linear_cross_entropy_reference,
    linear_log_probs,
)
from fastlm_kernels.testing import poisoned_memory

# the package's attribute of this name would do, but the module is what holds CHUNK_BYTES
module = importlib.import_module("fastlm_kernels.linear_cross_entropy")


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 128 rows, the fewest there are."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 1)


def _inputs(n_rows, n_cols, n_hidden=8, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n_rows, n_hidden, generator=generator).to(dtype)
    weight = (torch.randn(n_cols, n_hidden, generator=generator) * 0.5).to(dtype)
    bias = torch.randn(n_cols, generator=generator).to(dtype)
    labels = torch.randint(n_cols, (n_rows,), generator=generator)
    return hidden, weight, bias, labels


def _leaves(*tensors, dtype=None):
    return [t.detach().clone().to(dtype or t.dtype).requires_grad_() for t in tensors]


def _gradients(loss, inputs, upstream=None):
    return torch.autograd.grad(loss, inputs, upstream)


class _Ops(TorchDispatchMode):
    """Counts GEMMs and notes the largest float32 tensor that any operation made."""

    def __init__(self):
        super().__init__()
        self.gemms, self.largest_float32 = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.gemms += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.float32:
                self.largest_float32 = max(self.largest_float32, tensor.untyped_storage().nbytes() // 4)
        return out


@pytest.mark.parametrize("n_cols", [7, 512, 65537, 131200])
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_every_setting_against_float64(path, n_cols, reduction):
    hidden, weight, bias, labels = _inputs(6, n_cols)
    labels[[0, 3]] = -100
    rest = dict(softcap=3.0, logit_scale=1.3, label_smoothing=0.1, z_loss=1e-3, reduction=reduction)
    upstream = torch.randn(6, generator=torch.Generator().manual_seed(1)) if reduction == "none" else torch.tensor(0.3)
    ours = _leaves(hidden, weight, bias)
    loss = linear_cross_entropy(ours[0], ours[1], labels, ours[2], **rest)
    truth = _leaves(hidden, weight, bias, dtype=torch.float64)
    true_loss = linear_cross_entropy_reference(truth[0], truth[1], labels, truth[2], **rest)
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss.double(), true_loss, rtol=1e-5, atol=1e-6)
    expected = _gradients(true_loss, truth, upstream.double())
    for ours_dx, true_dx in zip(_gradients(loss, ours, upstream), expected, strict=True):
        assert (ours_dx.double() - true_dx).abs().max() <= 1e-5 * true_dx.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("n_labels", [100, 256, 333])
@pytest.mark.parametrize("spread", [0.02, 1.0, 8.0])
def test_dhidden_is_as_exact_as_the_stock_head_at_16_bits(dtype, n_labels, spread):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n_labels, 64, generator=generator).to(dtype)
    weight = (torch.randn(500, 64, generator=generator) * spread / 8).to(dtype)
    labels = torch.multinomial(F.linear(hidden, weight).float().softmax(-1), 1, generator=generator)[:, 0]
    # a loss scale, as float16 is trained with: without one the stock gradients drown
    upstream = torch.tensor(4096.0)
    (ours,), (stock,), (truth,) = _leaves(hidden), _leaves(hidden), _leaves(hidden, dtype=torch.float64)
    (ours,) = _gradients(linear_cross_entropy(ours, weight, labels), (ours,), upstream)
    (stock,) = _gradients(F.cross_entropy(F.linear(stock, weight).float(), labels), (stock,), upstream)
    (truth,) = _gradients(F.cross_entropy(F.linear(truth, weight.double()), labels), (truth,), upstream.double())
    ours_error, stock_error = ours.double() - truth, stock.double() - truth
    assert ours_error.norm() <= 1.1 * stock_error.norm()
    assert ours_error.abs().max() <= 2 * stock_error.abs().max()


def _last_turn(n_tokens):
    keep = torch.zeros(n_tokens, dtype=torch.bool)
    keep[-n_tokens // 3 :] = True
    return keep


@pytest.mark.parametrize(
    "mask",
    [torch.arange(30) == 17, _last_turn(30), torch.arange(30) % 4 != 1, torch.ones(30, dtype=torch.bool)],
    ids=["one-row", "last-turn", "scattered", "no-mask"],
)
def test_masks(path, mask):
    hidden, weight, bias, labels = _inputs(30, 50)
    labels = labels.masked_fill(~mask, -100)
    shaped = hidden.view(5, 6, 8).requires_grad_()
    log_probs = linear_log_probs(shaped, weight, labels.view(5, 6), bias).log_probs
    expected = F.linear(hidden.double(), weight.double(), bias.double()).log_softmax(-1)
    expected = expected.gather(1, labels.clamp(min=0)[:, None])[:, 0].where(mask, 0.0).view(5, 6)
    torch.testing.assert_close(log_probs.double(), expected, rtol=1e-5, atol=1e-6)
    (dhidden,) = _gradients(log_probs.sum(), (shaped,))
    assert not dhidden.view(30, 8)[~mask].any() and dhidden.view(30, 8)[mask].any(1).all()


@pytest.mark.parametrize("n_tokens", [0, 5])
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_no_label_gives_zeros_with_zero_gradients(path, n_tokens, reduction, dtype):
    hidden, weight, bias, labels = _inputs(n_tokens, 50, dtype=dtype)
    leaves = _leaves(hidden, weight, bias)
    labels = torch.full_like(labels, -100)
    loss = linear_cross_entropy(leaves[0], leaves[1], labels, leaves[2], reduction=reduction)
    assert loss.shape == (torch.Size([n_tokens]) if reduction == "none" else torch.Size([])) and not loss.any()
    stats = linear_log_probs(leaves[0], leaves[1], labels, leaves[2], with_entropy=True, with_top1=True)
    assert not stats.log_probs.any() and not stats.entropy.any() and not stats.is_top1.any()
    for gradient, leaf in zip(_gradients(loss.sum() + stats.log_probs.sum(), leaves), leaves, strict=True):
        assert gradient.shape == leaf.shape and gradient.dtype is leaf.dtype and (gradient == 0).all()


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gradients_for_each_token(path, trained, dtype):
    """Random upstream gradients over five orders of magnitude, one of them zero."""
    hidden, weight, bias, labels = _inputs(40, 60, dtype=dtype)
    labels[::5] = -100
    generator = torch.Generator().manual_seed(2)
    upstream = torch.randn(40, generator=generator) * 10.0 ** torch.randint(-5, 1, (40,), generator=generator)
    upstream[1] = 0.0
    ours = _leaves(hidden, weight, bias)
    if not trained:
        ours[1].requires_grad_(False)
        ours[2].requires_grad_(False)
    log_probs = linear_log_probs(ours[0], ours[1], labels, ours[2], softcap=5.0, temperature=0.8).log_probs
    got = _gradients(log_probs, [leaf for leaf in ours if leaf.requires_grad], upstream)
    truth = _leaves(hidden, weight, bias, dtype=torch.float64)
    z = 5.0 * torch.tanh(F.linear(*truth) / 5.0) / 0.8
    true_log_probs = z.log_softmax(-1).gather(1, labels.clamp(min=0)[:, None])[:, 0].where(labels != -100, 0.0)
    expected = _gradients(true_log_probs, truth, upstream.double())
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for ours_dx, true_dx in zip(got, expected, strict=False):
        assert (ours_dx.double() - true_dx).abs().max() <= tolerance * true_dx.abs().max()
    # a small upstream gradient keeps its digits beside a large one
    rows, true_rows = got[0].double().norm(dim=1), expected[0].norm(dim=1)
    assert ((rows - true_rows).abs() <= tolerance * true_rows).all()


@pytest.mark.parametrize("n_rows", [127, 128, 129, 300])
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_chunk_boundaries(small_chunks, n_rows, trained):
    hidden, weight, bias, labels = _inputs(n_rows + 3, 33)
    labels[[0, 5, n_rows]] = -100

    def run():
        ours = _leaves(hidden, weight, bias)
        ours[1].requires_grad_(trained)
        ours[2].requires_grad_(trained)
        loss = linear_cross_entropy(ours[0], ours[1], labels, ours[2])
        return [loss, *_gradients(loss, [leaf for leaf in ours if leaf.requires_grad])]

    first = run()
    assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))
    truth = _leaves(hidden, weight, bias, dtype=torch.float64)
    true_loss = linear_cross_entropy_reference(truth[0], truth[1], labels, truth[2])
    for got, expected in zip(first, [true_loss, *_gradients(true_loss, truth)], strict=False):
        assert (got.double() - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_chunk_rows_follow_from_shapes():
    assert chunk_rows(4096, 128256, 2, sums_dweight=False) == 1024
    assert chunk_rows(4096, 128256, 2, sums_dweight=True) == 2048
    # equal chunks rather than a short last one
    assert chunk_rows(1100, 128256, 2, sums_dweight=False) == 640
    assert chunk_rows(0, 128256, 2, sums_dweight=False) == 0
    for n_cols in (7, 32000, 49152, 151936, 262144):
        for n_rows in (1, 500, 16384):
            rows = chunk_rows(n_rows, n_cols, 2, sums_dweight=False)
            assert rows % 128 == 0 and rows * n_cols * 2 <= 256 * 2**20


def test_dweight_is_summed_in_float32(small_chunks):
    """Eight chunks of bfloat16 products. A sum rounded to bfloat16 after each is many times further from the truth."""
    n_rows, n_cols = 1024, 16
    hidden, weight, _, labels = _inputs(n_rows, n_cols, n_hidden=32, dtype=torch.bfloat16)
    hidden += 3.0
    # a float32 weight takes the gradient unrounded
    weight_32 = weight.float().requires_grad_()
    loss = linear_cross_entropy(hidden, weight_32, labels, reduction="sum")
    (ours,) = _gradients(loss, (weight_32,))
    dlogits = F.linear(hidden, weight).float().softmax(-1) - F.one_hot(labels, n_cols)
    truth = dlogits.double().t() @ hidden.double()
    rounded = torch.zeros(n_cols, 32, dtype=torch.bfloat16)
    for rows in range(0, n_rows, 128):
        chunk = slice(rows, rows + 128)
        rounded += (dlogits[chunk].bfloat16().float().t() @ hidden[chunk].float()).bfloat16()
    ours_error, rounded_error = (ours - truth).norm() / truth.norm(), (rounded - truth).norm() / truth.norm()
    print(f"relative error of dweight: {ours_error:.2e}, rounded after each chunk: {rounded_error:.2e}")
    assert ours_error * 3 < rounded_error


@pytest.mark.parametrize(
    "reduction,needs,gemms",
    [
        ("mean", (True, False, False), 2),
        ("none", (True, False, False), 2),
        ("sum", (True, True, True), 3),
        ("sum", (False, True, False), 2),
        ("sum", (False, False, True), 1),
        ("none", (True, True, True), 4),
        ("none", (False, False, True), 2),
        ("none", (False, False, False), 1),
    ],
)
def test_nothing_is_computed_that_nobody_asked_for(path, reduction, needs, gemms):
    hidden, weight, bias, labels = _inputs(20, 50)
    labels[3] = -100
    leaves = [leaf.requires_grad_(need) for leaf, need in zip((hidden, weight, bias), needs, strict=True)]
    with _Ops() as ops:
        loss = linear_cross_entropy(leaves[0], leaves[1], labels, leaves[2], reduction=reduction)
        if any(needs):
            loss.sum().backward()
    assert ops.gemms == gemms
    assert [leaf.grad is not None for leaf in leaves] == list(needs)
    with _Ops() as ops, torch.no_grad():
        assert not linear_cross_entropy(leaves[0], leaves[1], labels, leaves[2], reduction=reduction).requires_grad
    assert ops.gemms == 1


def test_the_float32_values_of_a_batch_never_exist_at_once(small_chunks, monkeypatch):
    cross_entropy = importlib.import_module("fastlm_kernels.cross_entropy")
    monkeypatch.setattr(cross_entropy, "_TORCH_BLOCK", 16 * 1000)
    hidden, weight, _, labels = _inputs(1000, 1000, dtype=torch.bfloat16)
    with _Ops() as ops:
        linear_cross_entropy(hidden.requires_grad_(), weight, labels).backward()
    assert ops.largest_float32 <= 16 * 1000


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_backward_twice_gives_the_same(path, reduction, trained, dtype):
    hidden, weight, _, labels = _inputs(20, 50, dtype=dtype)
    labels[4] = -100
    leaves = [hidden.requires_grad_(), weight.requires_grad_(trained)][: 1 + trained]
    loss = linear_cross_entropy(hidden, weight, labels, reduction=reduction).sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    for once, again in zip(first, torch.autograd.grad(loss, leaves), strict=True):
        assert torch.equal(once, again)


def test_no_gradient_of_a_gradient():
    hidden, weight, _, labels = _inputs(4, 9)
    hidden.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, labels).square()
    (dhidden,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dhidden.sum().backward()


def test_entropy_and_top1_carry_no_gradient(path):
    hidden, weight, _, labels = _inputs(4, 9)
    stats = linear_log_probs(hidden.requires_grad_(), weight, labels, with_entropy=True, with_top1=True)
    assert stats.log_probs.requires_grad and not stats.entropy.requires_grad and not stats.is_top1.requires_grad
    assert stats.log_probs.dtype is torch.float32 and stats.entropy.dtype is torch.float32
    assert stats.is_top1.dtype is torch.bool
    plain = linear_log_probs(hidden, weight, labels)
    assert plain.entropy is None and plain.is_top1 is None and torch.equal(plain.log_probs, stats.log_probs)


def test_a_head_of_another_dtype_is_converted(path):
    hidden, weight, bias, labels = _inputs(6, 50, dtype=torch.bfloat16)
    weight_32, bias_32 = _leaves(weight, bias, dtype=torch.float32)
    hidden.requires_grad_()
    loss = linear_cross_entropy(hidden, weight_32, labels, bias_32)
    assert torch.equal(loss, linear_cross_entropy(hidden, weight, labels, bias))
    dhidden, dweight, dbias = _gradients(loss, (hidden, weight_32, bias_32))
    assert (dhidden.dtype, dweight.dtype, dbias.dtype) == (torch.bfloat16, torch.float32, torch.float32)


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_autocast_is_not_consulted(trained):
    hidden, weight, bias, labels = _inputs(6, 50)

    def run():
        leaves = _leaves(hidden, weight, bias)
        leaves[1].requires_grad_(trained)
        loss = linear_cross_entropy(leaves[0], leaves[1], labels, leaves[2], reduction="none")
        return [loss, *_gradients(loss.sum(), [leaf for leaf in leaves if leaf.requires_grad])]

    plain = run()
    with torch.autocast("cpu", torch.bfloat16):
        assert all(torch.equal(a, b) for a, b in zip(plain, run(), strict=True))


def test_a_label_outside_the_vocabulary():
    hidden, weight, _, labels = _inputs(4, 9)
    labels[1], labels[2] = -100, 9
    with pytest.raises(ValueError, match=r"labels must be in 0\.\.8 or ignore_index=-100, got 9"):
        linear_cross_entropy(hidden, weight, labels)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU in this process")
def test_a_label_outside_the_vocabulary_makes_its_row_nan_in_a_kernel():
    hidden, weight, _, labels = _inputs(4, 9)
    labels[1], labels[2] = -100, 9
    hidden.requires_grad_()
    with _launch.interpreting():
        stats = linear_log_probs(hidden, weight, labels, with_entropy=True, with_top1=True)
        stats.log_probs.sum().backward()
        assert linear_cross_entropy(hidden, weight, labels).isnan()
    assert stats.log_probs.isnan().tolist() == [False, False, True, False] and not stats.is_top1[2]
    assert hidden.grad.isnan().all(1).tolist() == [False, False, True, False] and torch.isfinite(stats.entropy).all()


@pytest.mark.parametrize("softcap,logit_scale,temperature", [(None, 1.0, 1.0), (None, 0.25, 0.7), (6.0, 2.0, 0.7)])
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_agrees_with_trl(path, softcap, logit_scale, temperature, trained):
    """What `SFTTrainer` reads of its own head, from ours."""
    pytest.importorskip("trl", minversion="1.16")
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    hidden, weight, bias, labels = _inputs(24, 300)
    # some labels are the most likely token
    labels[::3] = F.linear(hidden, weight, bias).argmax(-1)[::3]
    upstream = torch.randn(24, generator=torch.Generator().manual_seed(3))
    ours, theirs = _leaves(hidden, weight, bias), _leaves(hidden, weight, bias)
    for leaf in (*ours[1:], *theirs[1:]):
        leaf.requires_grad_(trained)
    stats = linear_log_probs(
        ours[0], ours[1], labels, ours[2], -100, logit_scale, softcap, temperature, with_entropy=True, with_top1=True
    )
    log_probs, entropy, _, _, is_top1 = ChunkedLogProbFunction.apply(
        *theirs, labels, temperature, 128, softcap, logit_scale, ("log_probs", "entropy", "is_top1")
    )
    torch.testing.assert_close(stats.log_probs, log_probs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stats.entropy, entropy, rtol=1e-5, atol=1e-5)
    assert stats.is_top1.equal(is_top1) and is_top1.any() and not is_top1.all()
    leaves = slice(None if trained else 1)
    for got, expected in zip(
        _gradients(stats.log_probs, ours[leaves], upstream),
        _gradients(log_probs, theirs[leaves], upstream),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_inputs_that_do_not_fit():
    hidden, weight, bias, labels = _inputs(4, 9)
    with pytest.raises(ValueError, match=r"reduction must be one of mean, sum, none, got 'avg'"):
        linear_cross_entropy(hidden, weight, labels, reduction="avg")
    with pytest.raises(ValueError, match=r"weight must be \[V, D\] with D the last dimension of hidden \(4, 8\)"):
        linear_cross_entropy(hidden, weight.t(), labels)
    with pytest.raises(ValueError, match=r"bias must be \[9\] as weight has rows, got \(8,\)"):
        linear_cross_entropy(hidden, weight, labels, bias[:8])
    with pytest.raises(ValueError, match=r"shape of hidden \(4, 8\) without its last dimension, got \(3,\)"):
        linear_cross_entropy(hidden, weight, labels[:3])
    with pytest.raises(ValueError, match="temperature must be positive and finite, got 0"):
        linear_log_probs(hidden, weight, labels, temperature=0)
    with pytest.raises(TypeError, match="hidden must be float32, float16 or bfloat16, got torch.float64"):
        linear_cross_entropy(hidden.double(), weight, labels)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_on_the_gpu_in_several_chunks(dtype, trained, reduction, small_chunks):
    """Columns that are no multiple of anything: padded rows of logits, a float32 sum of 16-bit products."""
    hidden, weight, bias, labels = (t.cuda() for t in _inputs(700, 4099, n_hidden=256, dtype=dtype))
    weight *= 0.1
    labels[::9] = -100
    upstream = torch.rand(700, device="cuda") if reduction == "none" else torch.tensor(1.7, device="cuda")

    def run(head, leaves):
        for leaf in leaves[1:]:
            leaf.requires_grad_(trained)
        loss = head(leaves[0], leaves[1], labels, leaves[2], reduction=reduction)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        return [loss, *_gradients(loss, wanted, upstream.to(loss.dtype))]

    def stock(hidden, weight, labels, bias, reduction):
        return F.cross_entropy(F.linear(hidden, weight, bias).float(), labels, reduction=reduction)

    # NaN wherever nothing was written, between the rows of logits too
    with poisoned_memory():
        ours = run(linear_cross_entropy, _leaves(hidden, weight, bias))
    theirs = run(stock, _leaves(hidden, weight, bias))
    truth = run(linear_cross_entropy_reference, _leaves(hidden, weight, bias, dtype=torch.float64))
    for got, eager, exact in zip(ours, theirs, truth, strict=True):
        error, eager_error = got.double() - exact, eager.double() - exact
        floor = 1e-6 * exact.abs().max()
        assert torch.isfinite(got).all() and error.abs().max() <= 2 * eager_error.abs().max() + floor
        assert error.norm() <= 1.1 * eager_error.norm() + floor * math.sqrt(exact.numel())
    assert all(
        torch.equal(a, b) for a, b in zip(ours, run(linear_cross_entropy, _leaves(hidden, weight, bias)), strict=True)
    )
