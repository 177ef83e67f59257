"""What the generic op test cannot ask of cross_entropy: bad labels, impossible tokens, ties, huge logits."""

import math

import pytest
import torch
import torch.nn.functional as F

from fastlm_kernels import _launch
from fastlm_kernels._loss_rule import LossRule, RowStats
from fastlm_kernels.cross_entropy import cross_entropy, cross_entropy_fwd, cross_entropy_reference

# V below one tile, one tile of 8192 columns to the column, and one that ends inside its last tile
VOCABULARIES = (7, 512, 8192, 17000)


def _logits(n_rows, n_cols, seed=0):
    return torch.randn(n_rows, n_cols, generator=torch.Generator().manual_seed(seed)) * 3


def _stats(logits, labels, **rule):
    stats = RowStats.empty(logits.shape[0], logits.device, with_entropy=True, with_top1=True)
    cross_entropy_fwd(logits, labels, LossRule(**rule), stats)
    return stats


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_agrees_with_torch(path, smoothing):
    logits = _logits(5, 300).requires_grad_()
    labels = torch.tensor([3, -100, 299, 0, -100])
    loss = cross_entropy(logits, labels, label_smoothing=smoothing)
    theirs = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="none")
    torch.testing.assert_close(loss, theirs, rtol=1e-5, atol=1e-6)
    weights = torch.randn(5, generator=torch.Generator().manual_seed(1))
    (ours_dx,) = torch.autograd.grad(loss, logits, weights)
    (their_dx,) = torch.autograd.grad(theirs, logits, weights)
    torch.testing.assert_close(ours_dx, their_dx, rtol=1e-5, atol=1e-7)


def test_scale_comes_before_the_cap(path):
    logits = _logits(4, 33)
    labels = torch.tensor([0, 5, 32, 7])
    z = torch.tanh(logits.double() * 2.0 / 4.0) * 4.0
    expected = F.cross_entropy(z, labels, reduction="none")
    loss = cross_entropy(logits, labels, logit_scale=2.0, softcap=4.0)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n_cols", VOCABULARIES)
def test_row_statistics(path, n_cols):
    logits = _logits(4, n_cols)
    labels = torch.tensor([0, n_cols - 1, n_cols // 2, -100])
    z = logits.double() * 1.5 / 0.7
    log_p = z.log_softmax(-1)
    stats = _stats(logits.clone(), labels, logit_scale=1.5, temperature=0.7)
    kept = torch.tensor([True, True, True, False])
    expected = {
        "log_prob": log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0],
        "lse": z.logsumexp(-1),
        "entropy": -(log_p.exp() * log_p).sum(-1),
    }
    for name, value in expected.items():
        torch.testing.assert_close(getattr(stats, name).double(), value.where(kept, 0.0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stats.loss, -stats.log_prob)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("n_cols", VOCABULARIES)
def test_of_equal_logits_the_first_is_top(path, n_cols, softcap):
    logits = _logits(6, n_cols)
    middle, last = n_cols // 2, n_cols - 1
    peak = logits.max() + 1
    for row, columns in enumerate([(0,), (last,), (1, middle), (1, middle), (middle, last), (middle, last)]):
        logits[row, list(columns)] = peak
    labels = torch.tensor([0, last, 1, middle, middle, last])
    expected = logits.argmax(-1) == labels
    assert expected.tolist() == [True, True, True, False, True, False]
    assert _stats(logits, labels, softcap=softcap).is_top1.tolist() == expected.tolist()


def test_ignored_rows_are_not_looked_at(path):
    logits = _logits(3, 40)
    logits[1] = float("nan")
    logits.requires_grad_()
    loss = cross_entropy(logits, torch.tensor([2, -100, 3]), z_loss=0.1, label_smoothing=0.2)
    loss.sum().backward()
    assert loss[1] == 0 and torch.isfinite(loss).all()
    assert not logits.grad[1].any() and torch.isfinite(logits.grad).all()
    stats = _stats(logits.detach(), torch.tensor([2, -100, 3]))
    assert stats.entropy[1] == 0 and not stats.is_top1[1]


def test_another_ignore_index(path):
    logits = _logits(3, 40)
    labels = torch.tensor([0, 7, 0])
    expected = F.cross_entropy(logits, labels, ignore_index=0, reduction="none")
    torch.testing.assert_close(cross_entropy(logits, labels, ignore_index=0), expected)


@pytest.mark.parametrize("n_cols", (40, 9000))
def test_impossible_tokens_take_no_part(path, n_cols):
    logits = _logits(2, n_cols)
    logits[:, 5 : n_cols - 3] = -math.inf
    logits.requires_grad_()
    labels = torch.tensor([1, n_cols - 1])
    loss = cross_entropy(logits, labels)
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels, reduction="none"))
    loss.sum().backward()
    assert torch.isfinite(logits.grad).all() and not logits.grad[:, 5 : n_cols - 3].any()
    kept = torch.cat([logits[:, :5], logits[:, n_cols - 3 :]], 1).detach().log_softmax(-1)
    entropy = _stats(logits.detach(), labels).entropy
    torch.testing.assert_close(entropy, -(kept.exp() * kept).sum(-1))


@pytest.mark.parametrize("label", [40, -1, -101, 2**31 + 3, -(2**40)])
def test_a_label_outside_the_vocabulary_is_an_error_on_a_cpu(label):
    with pytest.raises(ValueError, match=r"0\.\.39 or ignore_index=-100, got " + str(label)):
        cross_entropy(_logits(2, 40), torch.tensor([1, label]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU in this process")
@pytest.mark.parametrize("label", [40, -1, -101, 2**31 + 3, -(2**40)])
def test_a_label_outside_the_vocabulary_makes_its_row_nan_in_a_kernel(label):
    logits = _logits(3, 40).requires_grad_()
    labels = torch.tensor([1, label, 2])
    with _launch.interpreting():
        loss = cross_entropy(logits, labels, label_smoothing=0.1)
        loss.sum().backward()
        stats = _stats(logits.detach(), labels)
    assert loss[1].isnan() and logits.grad[1].isnan().all() and stats.log_prob[1].isnan() and not stats.is_top1[1]
    assert torch.isfinite(loss[[0, 2]]).all() and torch.isfinite(logits.grad[[0, 2]]).all()


def test_a_row_with_nan_gives_nan_and_no_best_token(path):
    logits = _logits(2, 40)
    logits[0, 7] = float("nan")
    stats = _stats(logits, torch.tensor([3, 3]))
    assert stats.loss[0].isnan() and not stats.is_top1[0] and torch.isfinite(stats.loss[1])


def test_writes_stay_inside_the_row(path):
    wide = torch.full((4, 64), 7.5)
    logits = wide[1:3, :50]
    logits.copy_(_logits(2, 50))
    stats = RowStats.empty(2, logits.device)
    cross_entropy_fwd(logits, torch.tensor([0, 49]), LossRule(), stats, gradient_weight=1.0)
    assert (wide[[0, 3]] == 7.5).all() and (wide[:, 50:] == 7.5).all()
    assert (logits[0, 0] < 0) and (logits[1, 49] < 0) and (logits.sum(1).abs() < 1e-5).all()


def test_backward_twice_gives_the_same(path):
    logits = _logits(3, 40).requires_grad_()
    loss = cross_entropy(logits, torch.tensor([1, 2, -100])).sum()
    first = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, logits)[0])


@pytest.mark.parametrize(
    "settings,message",
    [
        (dict(softcap=0.0), "softcap must be positive and finite, or None for no cap, got 0.0"),
        (dict(label_smoothing=1.5), "label_smoothing must be in 0..1, got 1.5"),
        (dict(z_loss=-1.0), "z_loss must be zero or positive, got -1.0"),
        (dict(logit_scale=math.nan), "logit_scale must be finite, got nan"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        cross_entropy(_logits(2, 4), torch.tensor([0, 1]), **settings)


def test_inputs_that_do_not_fit():
    logits = _logits(2, 4)
    with pytest.raises(ValueError, match=r"shape of logits \(2, 4\) without its last dimension, got \(3,\)"):
        cross_entropy(logits, torch.zeros(3, dtype=torch.long))
    with pytest.raises(TypeError, match="labels must be integers, got torch.float32"):
        cross_entropy(logits, torch.zeros(2))
    with pytest.raises(TypeError, match="logits must be float32, float16 or bfloat16, got torch.float64"):
        cross_entropy(logits.double(), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="empty vocabulary"):
        cross_entropy(logits[:, :0], torch.tensor([0, 1]))


@pytest.mark.gpu
def test_more_logits_than_32_bits_count():
    n_rows, n_cols = 20000, 131200
    assert n_rows * n_cols > 2**31
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(n_rows, n_cols, generator=generator, device="cuda", dtype=torch.bfloat16)
    logits.requires_grad_()
    labels = torch.randint(n_cols, (n_rows,), generator=generator, device="cuda")
    labels[::7] = -100
    cross_entropy(logits, labels).sum().backward()
    # the rows on both sides of element 2**31, and the ends
    edge = 2**31 // n_cols
    for row in (1, edge - 1, edge, edge + 1, n_rows - 1):
        x = logits[row : row + 1].detach().double().requires_grad_()
        cross_entropy_reference(x, labels[row : row + 1]).sum().backward()
        error = (logits.grad[row].double() - x.grad[0]).abs().max()
        assert error <= 2.0**-8 * x.grad.abs().max(), f"row {row}: off by {error:.3g}"
    ignored = labels == -100
    assert not logits.grad[ignored].any() and logits.grad[~ignored].any(1).all()
