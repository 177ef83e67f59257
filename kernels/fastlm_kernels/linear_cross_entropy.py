"""The language-model head and its loss together, without the logits of a batch in memory.

    x = hidden @ weight.T + bias        loss, log p[label], entropy of softmax(z(x)) as in `cross_entropy.py`

Only rows with a label enter the GEMMs. They go through in chunks, whose size follows from the shapes alone; a chunk's
logits (in hidden.dtype) are overwritten by their gradient at one row weight. What is computed when:

- frozen head: logits and dhidden, two GEMMs, both in the forward. Whatever the gradient of each token's loss turns out
  to be, it only scales that row of dhidden, so the backward has no GEMM left.
- trained head, loss summed or averaged: also dweight, a third GEMM, summed over chunks in float32.
- trained head, a loss for each token: dweight mixes rows whose weights only the backward knows. The forward keeps lse
  and nothing else, the backward makes the logits again: four GEMMs.
- a 16-bit dtype on a CPU: the backward makes the logits again too. The other cases need float32 results of 16-bit
  factors, so that dhidden is rounded once, after its scaling; a CPU's fast GEMMs give none, and a third is cheaper.

Row statistics and row scaling are float32. The logits' gradient is kept in float16's range: made with a row weight of
256 there (probabilities of 1e-5 would lose most of their digits at 1), and, where the backward makes it, with incoming
gradients divided by about the largest of them (those of a mean over many tokens would vanish).
Saved for the backward: float32 dhidden of the labelled rows and dweight of a trained head, or the inputs and lse.
Chunking the loss with its gradient: Hsu et al. 2024, arXiv:2410.10989; Wijmans et al. 2024, arXiv:2411.09009.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastlm_kernels._case import Case, randn
from fastlm_kernels._labelled import LabelledRows
from fastlm_kernels._loss_rule import LossRule, RowStats, check_labels
from fastlm_kernels.cross_entropy import cross_entropy_bwd, cross_entropy_fwd, cross_entropy_reference

# T tokens, N of them labelled, D hidden size, V vocabulary
CHUNK_BYTES = 256 << 20
# GEMM tiles cover 128 rows or a divisor of it; rows of logits start at multiples of 128 bytes or more
_ROW_MULTIPLE = 128
_COLUMN_MULTIPLE = 64
REDUCTIONS = ("mean", "sum", "none")


class TokenStats(NamedTuple):
    """Of every token, in the shape of the labels; zero and False where the label is ignored, None if not asked for."""

    log_probs: Tensor
    entropy: Tensor | None
    is_top1: Tensor | None


@dataclass(frozen=True)
class _Wanted:
    reduction: str
    is_grad_enabled: bool
    with_entropy: bool = False
    with_top1: bool = False


def chunk_rows(n_rows: int, n_cols: int, itemsize: int, sums_dweight: bool) -> int:
    """Rows of logits to hold at a time: `CHUNK_BYTES` of them, in equal chunks of a multiple of 128 rows.

    Summing dweight costs a pass over a float32 [V, D] for every chunk, so chunks are twice as large there.
    """
    budget = CHUNK_BYTES * (2 if sums_dweight else 1)
    most = max(1, budget // (n_cols * itemsize * _ROW_MULTIPLE)) * _ROW_MULTIPLE
    n_chunks = -(-n_rows // most)
    return _ROW_MULTIPLE * -(-n_rows // (n_chunks * _ROW_MULTIPLE)) if n_rows else 0


def _gradient_weight(dtype: torch.dtype, rule: LossRule) -> float:
    """Power of two that keeps the logits' gradient, at most about slope in size, well inside the range of its dtype."""
    return 1.0 if dtype is not torch.float16 else 2.0 ** (8 - math.ceil(math.log2(max(1.0, abs(rule.slope)))))


class _Chunks:
    """The labelled rows of a batch, a chunk at a time, with one buffer for their logits."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor | None, sums_dweight: bool):
        self.hidden, self.index = hidden, index
        self.weight = weight.to(hidden.dtype)
        self.bias = None if bias is None else bias.to(hidden.dtype)
        self.n_rows = hidden.shape[0] if index is None else index.shape[0]
        self.n_cols = weight.shape[0]
        # aligned rows for wide loads; not on a CPU, where bfloat16 GEMMs take what lies in the padding for data
        stride = -(-self.n_cols // _COLUMN_MULTIPLE) * _COLUMN_MULTIPLE if hidden.is_cuda else self.n_cols
        self.step = chunk_rows(self.n_rows, stride, hidden.element_size(), sums_dweight)
        self.buffer = hidden.new_empty((min(self.step, self.n_rows), stride))

    def __iter__(self):
        """Yields the rows as a slice of 0..N, their hidden [n, D], their logits [n, V] in the shared buffer."""
        for start in range(0, self.n_rows, max(1, self.step)):
            rows = slice(start, min(start + self.step, self.n_rows))
            hidden = self.hidden[rows] if self.index is None else self.hidden.index_select(0, self.index[rows])
            logits = self.buffer[: rows.stop - start, : self.n_cols]
            # `out=` also keeps autocast away: the caller has chosen the dtype
            if self.bias is None:
                torch.mm(hidden, self.weight.t(), out=logits)
            else:
                torch.addmm(self.bias, hidden, self.weight.t(), out=logits)
            yield rows, hidden, logits


class _Gradients:
    """Sums of dhidden [N, D], dweight [V, D], dbias [V] over chunks of dlogits; None if not needed.

    float32, but dhidden has hidden.dtype where that is all a GEMM gives.
    """

    def __init__(self, chunks: _Chunks, needs: Sequence[bool]):
        hidden, weight = chunks.hidden, chunks.weight
        self.weight = weight
        dtype = torch.float32 if _has_float32_products(hidden) else hidden.dtype
        self.dhidden = hidden.new_empty((chunks.n_rows, hidden.shape[1]), dtype=dtype) if needs[0] else None
        self.dweight = torch.empty_like(weight, dtype=torch.float32) if needs[1] else None
        self.dbias = weight.new_zeros(weight.shape[0], dtype=torch.float32) if needs[2] else None

    def add(self, rows: slice, hidden: Tensor, dlogits: Tensor) -> None:
        if self.dhidden is not None and self.dhidden.dtype is dlogits.dtype:
            torch.mm(dlogits, self.weight, out=self.dhidden[rows])
        elif self.dhidden is not None:
            _add_product(self.dhidden[rows], dlogits, self.weight, is_first=True)
        if self.dweight is not None:
            _add_product(self.dweight, dlogits.t(), hidden, is_first=rows.start == 0)
        if self.dbias is not None:
            self.dbias += dlogits.sum(0, dtype=torch.float32)


def _has_float32_products(factor: Tensor) -> bool:
    """Whether a GEMM of such factors can be had before it is rounded to their dtype, without converting them."""
    return factor.is_cuda or factor.dtype is torch.float32


def _add_product(total: Tensor, left: Tensor, right: Tensor, is_first: bool) -> None:
    """total += left @ right without rounding the product to their dtype; `is_first` overwrites what total held."""
    beta = 0 if is_first else 1
    if left.dtype is torch.float32:
        total.addmm_(left, right, beta=beta)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=torch.float32, beta=beta, out=total)
    else:
        right_32 = right.float()
        # converted a block of the vocabulary at a time
        for start in range(0, left.shape[0], 8192):
            block = slice(start, start + 8192)
            total[block].addmm_(left[block].float(), right_32, beta=beta)


def _spread(values: Tensor, index: Tensor | None, n_tokens: int) -> Tensor:
    """[N, ...] back to [T, ...], zeros elsewhere."""
    if index is None:
        return values
    return values.new_zeros((n_tokens, *values.shape[1:])).index_copy_(0, index, values)


def _scaled(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """values * scale, the product rounded once to `dtype`; scale is float32 of as many dimensions as values.

    (A scale of fewer dimensions would be rounded to the dtype of `values` before the product.)
    """
    return torch.mul(values, scale, out=torch.empty_like(values, dtype=dtype))


class LinearCrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, labelled: LabelledRows, rule: LossRule, wanted: _Wanted):  # type: ignore[override]
        n_tokens = hidden.shape[0]
        needs = tuple(need and wanted.is_grad_enabled for need in ctx.needs_input_grad[:3])
        waits = any(needs) and (not _has_float32_products(hidden) or (any(needs[1:]) and wanted.reduction == "none"))
        index, labels = labelled.index(), labelled.labels
        kept_labels = labels if index is None else labels.index_select(0, index)
        chunks = _Chunks(hidden, weight, bias, index, sums_dweight=needs[1])
        gradients = _Gradients(chunks, (False, False, False) if waits else needs)
        gradient_weight = _gradient_weight(hidden.dtype, rule) if any(needs) and not waits else None
        stats = RowStats.empty(chunks.n_rows, hidden.device, wanted.with_entropy, wanted.with_top1)
        for rows, rows_hidden, logits in chunks:
            cross_entropy_fwd(logits, kept_labels[rows], rule, stats.of(rows), gradient_weight)
            if gradient_weight is not None:
                gradients.add(rows, rows_hidden, logits)
        if waits:
            ctx.save_for_backward(hidden, weight, bias, index, kept_labels, stats.lse)
        else:
            ctx.save_for_backward(gradients.dhidden, gradients.dweight, gradients.dbias, index)
        ctx.gradient_weight = gradient_weight
        ctx.rule, ctx.waits, ctx.needs, ctx.reduction = rule, waits, needs, wanted.reduction
        ctx.n_rows, ctx.n_tokens = chunks.n_rows, n_tokens
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.set_materialize_grads(False)
        entropy = None if stats.entropy is None else _spread(stats.entropy, index, n_tokens)
        is_top1 = None if stats.is_top1 is None else _spread(stats.is_top1, index, n_tokens)
        ctx.mark_non_differentiable(*(extra for extra in (entropy, is_top1) if extra is not None))
        if wanted.reduction == "none":
            return _spread(stats.loss, index, n_tokens), entropy, is_top1
        total = stats.loss.sum()
        return total / max(1, chunks.n_rows) if wanted.reduction == "mean" else total, entropy, is_top1

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss, *_):  # type: ignore[override]
        if dloss is None:
            return (None,) * 6
        weights = dloss / max(1, ctx.n_rows) if ctx.reduction == "mean" else dloss
        if ctx.waits:
            return *_backward_from_hidden(ctx, weights), None, None, None
        dhidden, dweight, dbias, index = ctx.saved_tensors
        weights = (weights if index is None or not weights.ndim else weights.index_select(0, index)).view(-1, 1)
        weights = weights / ctx.gradient_weight
        return *_finished(ctx, dhidden, dweight, dbias, weights, index), None, None, None


def _backward_from_hidden(ctx, weights: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients with the logits made again, for row weights that the forward could not know. weights: [T] or scalar."""
    hidden, weight, bias, index, labels, lse = ctx.saved_tensors
    chunks = _Chunks(hidden, weight, bias, index, sums_dweight=ctx.needs[1])
    gradients = _Gradients(chunks, ctx.needs)
    row_weight = weights if index is None or not weights.ndim else weights.index_select(0, index)
    row_weight = row_weight.expand(chunks.n_rows)
    # a power of two, so that neither the division nor the product back rounds
    unit = torch.exp2(torch.ceil(torch.log2(row_weight.abs().max()))) if chunks.n_rows else lse.new_ones(())
    unit = unit.where(unit != 0.0, 1.0) / _gradient_weight(hidden.dtype, ctx.rule)
    row_weight = row_weight / unit
    for rows, rows_hidden, logits in chunks:
        dlogits = cross_entropy_bwd(row_weight[rows], logits, labels[rows], lse[rows], ctx.rule, in_place=True)
        gradients.add(rows, rows_hidden, dlogits)
    return _finished(ctx, gradients.dhidden, gradients.dweight, gradients.dbias, unit.view(1, 1), index)


def _finished(ctx, dhidden, dweight, dbias, scale, index):
    """Scaled and rounded to the inputs' dtypes, dhidden back at its tokens; the sums stay for another backward."""
    hidden_dtype, weight_dtype, bias_dtype = ctx.dtypes
    if dweight is not None and not ctx.n_rows:
        # no chunk has written this sum
        dweight = torch.zeros_like(dweight, dtype=weight_dtype)
    elif dweight is not None:
        dweight = _scaled(dweight, scale, weight_dtype)
    if dbias is not None:
        dbias = _scaled(dbias, scale.view(1), bias_dtype)
    if dhidden is not None:
        dhidden = _spread(_scaled(dhidden, scale, hidden_dtype), index, ctx.n_tokens)
    return dhidden, dweight, dbias


def _apply(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, rule: LossRule, wanted: _Wanted,
    labelled: LabelledRows | None,
):  # fmt: skip
    check_labels(labels, hidden, "hidden")
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1] or not weight.shape[0]:
        raise ValueError(
            f"weight must be [V, D] with D the last dimension of hidden {tuple(hidden.shape)}, "
            f"got {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [{weight.shape[0]}] as weight has rows, got {tuple(bias.shape)}")
    rows = hidden.reshape(-1, hidden.shape[-1])
    if labelled is None:
        labelled = LabelledRows(labels.reshape(-1).long(), rule.ignore_index)
    return LinearCrossEntropyFunction.apply(rows, weight, bias, labelled, rule, wanted)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    labelled: LabelledRows | None = None,
) -> Tensor:
    """Cross-entropy of a linear head, from its input.

    The same as `cross_entropy(linear(hidden, weight, bias), labels, …)`, reduced over the labels that count.
    Labels are not shifted here: for next-token prediction pass hidden whole and the labels moved by one with
    `ignore_index` at the end, which copies nothing, rather than a slice of hidden.

    Args:
        hidden: [..., D], float16, bfloat16 or float32. Logits have its dtype; autocast is not consulted.
        weight: [V, D]. One of another dtype is converted to hidden.dtype for the GEMMs (once a pass, whole); its
            gradient has its own dtype.
        labels: [...], any integer dtype, in 0..V-1 or `ignore_index`.
        bias: [V] or None; converted as weight is.
        ignore_index: label of rows that take no part.
        logit_scale, softcap: z = softcap * tanh(logit_scale * x / softcap).
        label_smoothing, z_loss: as in `cross_entropy`.
        reduction: "mean" over the labels that count, "sum", or "none" for [...] with 0 on ignored rows.
        labelled: made of the flattened labels before hidden was computed, so that their number is known by now.

    Returns:
        float32, a scalar or [...]. Where no label counts it is 0 (a mean, too) and has gradient 0.
        What does not require a gradient is not computed.

    Raises:
        ValueError: if shapes or settings do not fit, or, on a CPU, for a label outside the vocabulary. On a GPU such a
            row's loss and gradient are NaN: a check would stall the device.
        TypeError: for a dtype that the kernels do not take.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    rule = LossRule(ignore_index, logit_scale, softcap, 1.0, label_smoothing, z_loss)
    loss, _, _ = _apply(hidden, weight, labels, bias, rule, _Wanted(reduction, torch.is_grad_enabled()), labelled)
    return loss.view(labels.shape) if reduction == "none" else loss


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_top1: bool = False,
    labelled: LabelledRows | None = None,
) -> TokenStats:
    """Log-probability of every label under a linear head, with entropy and top-1 on request.

    z = softcap * tanh(logit_scale * x / softcap) / temperature, log_probs = z[label] - log(sum(exp(z)))

    Args:
        hidden, weight, labels, bias, ignore_index, logit_scale, softcap: as in `linear_cross_entropy`.
        temperature: divisor of the capped logits.
        with_entropy: also the entropy of softmax(z).
        with_top1: also whether the label is the most likely token (of equal ones, the first).
        labelled: as in `linear_cross_entropy`.

    Returns:
        log_probs: [...] float32, differentiable in hidden, weight and bias.
        entropy: [...] float32 without gradient, or None.
        is_top1: [...] bool, or None.

    Raises:
        ValueError, TypeError: as `linear_cross_entropy`.
    """
    rule = LossRule(ignore_index, logit_scale, softcap, temperature)
    wanted = _Wanted("none", torch.is_grad_enabled(), with_entropy, with_top1)
    loss, entropy, is_top1 = _apply(hidden, weight, labels, bias, rule, wanted, labelled)
    return TokenStats(
        log_probs=0.0 - loss.view(labels.shape),
        entropy=None if entropy is None else entropy.view(labels.shape),
        is_top1=None if is_top1 is None else is_top1.view(labels.shape),
    )


def linear_cross_entropy_reference(hidden, weight, labels, bias, reduction="mean", **rest):
    return _reduced(cross_entropy_reference(hidden @ weight.T + bias, labels, **rest), labels, reduction)


def linear_log_probs_reference(hidden, weight, labels, temperature=1.0, softcap=None):
    return _log_probs_and_entropy(hidden @ weight.T, labels, temperature, softcap)


def _reduced(loss, labels, reduction):
    if reduction == "none":
        return loss
    return loss.sum() / (max(1, int((labels != -100).sum())) if reduction == "mean" else 1)


def _log_probs_and_entropy(logits, labels, temperature, softcap):
    z = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_p = (z / temperature).log_softmax(-1)
    kept = labels != -100
    log_prob = log_p.gather(-1, labels.where(kept, 0)[..., None])[..., 0]
    return log_prob.where(kept, 0.0), torch.special.entr(log_p.exp()).sum(-1).where(kept, 0.0).detach()


def _eager(hidden, weight, labels, bias, reduction="mean", **rest):
    return _reduced(cross_entropy_reference(F.linear(hidden, weight, bias).float(), labels, **rest), labels, reduction)


def _eager_log_probs(hidden, weight, labels, temperature=1.0, softcap=None):
    return _log_probs_and_entropy(F.linear(hidden, weight).float(), labels, temperature, softcap)


def _make_log_probs(shape, dtype, device, generator):
    *tokens, n_hidden, n_cols = shape
    labels = torch.randint(n_cols, tokens, generator=generator)
    labels = labels.masked_fill(torch.rand(tokens, generator=generator) < 0.3, -100)
    return dict(
        hidden=randn((*tokens, n_hidden), dtype, device, generator),
        # logits of about 2, as a softmax has where most of its mass is open
        weight=randn((n_cols, n_hidden), dtype, device, generator, std=2.0 * n_hidden**-0.5),
        labels=labels.to(device),
        softcap=5.0 if n_cols % 3 == 0 else None,
        temperature=0.7 if n_cols % 2 == 1 else 1.0,
    )


def _make(shape, dtype, device, generator):
    inputs = _make_log_probs(shape, dtype, device, generator)
    temperature = inputs.pop("temperature")
    return dict(
        inputs,
        bias=randn(shape[-1:], dtype, device, generator),
        label_smoothing=0.1 if temperature != 1.0 else 0.0,
        logit_scale=temperature,
        z_loss=1e-3 if temperature != 1.0 else 0.0,
        reduction=REDUCTIONS[shape[-1] % 3],
    )


def _strided(inputs):
    wide = F.pad(inputs["hidden"], (0, 3), value=float("nan"))
    return dict(inputs, hidden=wide[..., :-3], weight=inputs["weight"].t().contiguous().t())


_SHAPES = {
    "typical": (2, 12, 32, 512),
    "mean": (24, 32, 384),
    "odd": (5, 17, 97),
    "one-row": (1, 8, 128),
    "long": (5, 8, 65537),
    "empty": (0, 8, 64),
}
_BENCH_SHAPES = {"T4096-D4096-V128256": (4096, 4096, 128256), "T4096-D2048-V32000": (4096, 2048, 32000)}


def _ideal(n_gemms, n_passes):
    """Weight, hidden and each chunk's logits once for every GEMM, the row kernel's passes over the logits."""

    def ideal(shape, size):
        n_rows, n_hidden, n_cols = shape
        moved = n_gemms * (n_rows * n_hidden + n_cols * n_hidden + n_rows * n_cols) + n_passes * n_rows * n_cols
        return float(moved * size), 2.0 * n_gemms * n_rows * n_hidden * n_cols

    return ideal


CASE = Case(
    name="linear_cross_entropy",
    op=linear_cross_entropy,
    reference=linear_cross_entropy_reference,
    eager=_eager,
    make=_make,
    shapes=_SHAPES,
    gradients=("hidden", "weight", "bias"),
    strided=_strided,
    bench_shapes=_BENCH_SHAPES,
    # of a frozen head, forward and backward: the logits and the gradient of the hidden states
    ideal=_ideal(n_gemms=2, n_passes=3),
)

FROZEN_CASE = Case(
    name="linear_log_probs",
    op=lambda **inputs: tuple(linear_log_probs(**inputs, with_entropy=True)[:2]),
    reference=linear_log_probs_reference,
    eager=_eager_log_probs,
    make=_make_log_probs,
    shapes=_SHAPES,
    gradients=("hidden",),
    strided=_strided,
    bench_shapes=_BENCH_SHAPES,
    ideal=_ideal(n_gemms=2, n_passes=3),
)
