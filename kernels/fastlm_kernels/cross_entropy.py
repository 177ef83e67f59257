"""Cross-entropy over logits that exist, one pass of row statistics and one of gradients; any vocabulary.

    z = logit_scale * x / temperature                               (softcap=None)
    z = softcap * tanh(logit_scale * x / softcap) / temperature     (Cohere scales, Granite divides, Gemma 2 caps)
    lse = log(sum(exp(z)))
    loss = lse - (1 - e) * z[label] - e * mean(z) + z_loss * lse**2       (e = label_smoothing)
    dloss/dz_j = (1 + 2 * z_loss * lse) * exp(z_j - lse) - (1 - e) * [j = label] - e / V

Smoothing: Szegedy et al. 2016, arXiv:1512.00567; z-loss: Chowdhery et al. 2022, arXiv:2204.02311; running maximum and
sum: Milakov and Gimelshein 2018, arXiv:1805.02867. All statistics are float32 whatever the logits' dtype; the gradient
is rounded once, to that dtype. Saved for the backward: the logits, the labels and lse (one float32 a row).

The fused head (`linear_cross_entropy`) uses the same kernel with a `gradient_weight`: one program reads its row twice
and overwrites it with the gradient, at one weight for all rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastlm_kernels._case import Case, build, randn
from fastlm_kernels._launch import next_power_of_2, runs_triton, tl, triton
from fastlm_kernels._loss_rule import LossRule, RowStats, check_label_range, check_labels

# T rows (tokens), V columns (vocabulary)
# float32 values that the torch path holds at a time: 4 MiB lie in a CPU's second-level caches
_TORCH_BLOCK = 1 << 20


@triton.jit
def _exp(x):
    # flushes denormal results to zero; tl.exp spends three more instructions on keeping them
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _transform(x, scale, cap, HAS_SOFTCAP: tl.constexpr):
    z = x.to(tl.float32) * scale
    if HAS_SOFTCAP:
        # tanh without libdevice
        z = cap - cap * 2.0 / (_exp(2.0 * z) + 1.0)
    return z


@triton.jit
def _tile_offsets(UNROLL: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """[UNROLL, LANES, VECTOR]: a lane is a thread, a vector one 16-byte load of it."""
    lanes = tl.arange(0, LANES)[None, :, None] * VECTOR + tl.arange(0, VECTOR)[None, None, :]
    return tl.arange(0, UNROLL)[:, None, None] * (LANES * VECTOR) + lanes


@triton.jit
def _lane_max(values):
    return tl.max(tl.max(values, axis=2), axis=0)


@triton.jit
def _lane_sum(values):
    return tl.sum(tl.sum(values, axis=2), axis=0)


@triton.jit
def _accumulate(
    z, mask, is_before_label, peak, total, weighted, plain, peak_before,
    HAS_ENTROPY: tl.constexpr, HAS_SMOOTHING: tl.constexpr, HAS_TOP1: tl.constexpr,
):  # fmt: skip
    # every lane keeps its own running maximum and sums [LANES]: a tile needs no exchange between threads
    z_masked = tl.where(mask, z, float("-inf"))
    tile_peak = _lane_max(z_masked)
    new_peak = tl.maximum(peak, tile_peak)
    shift = peak - new_peak
    rescale = _exp(shift)
    centred = z_masked - new_peak[None, :, None]
    e = _exp(centred)
    if HAS_ENTROPY:
        # sum of e * (z - peak); the bound keeps an impossible token (z = -inf, e = 0) from making NaN
        weighted = rescale * (weighted + shift * total) + _lane_sum(e * tl.maximum(centred, -1.0e4))
    total = total * rescale + _lane_sum(e)
    if HAS_SMOOTHING:
        plain += _lane_sum(tl.where(mask, z, 0.0))
    if HAS_TOP1:
        peak_before = tl.where(is_before_label, tl.maximum(peak_before, tile_peak), peak_before)
    return new_peak, total, weighted, plain, peak_before


@triton.jit
def _gradient(x, is_label, lse, everywhere, on_label, on_probability, scale, cap, HAS_SOFTCAP: tl.constexpr):
    z = _transform(x, scale, cap, HAS_SOFTCAP)
    dx = _exp(z - lse) * on_probability - everywhere
    dx = tl.where(is_label, dx - on_label, dx)
    if HAS_SOFTCAP:
        tanh = z * (1.0 / cap)
        dx *= 1.0 - tanh * tanh
    return dx


@triton.jit
def _write_gradient(
    x_row_ptr, dx_row_ptr, label, is_ignored, lse, weight, n_cols, scale, cap, slope, label_smoothing, z_loss,
    HAS_SOFTCAP: tl.constexpr, UNROLL: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    TILE: tl.constexpr = UNROLL * LANES * VECTOR
    offs_v = _tile_offsets(UNROLL, LANES, VECTOR)
    if is_ignored:
        zeros = tl.zeros((UNROLL, LANES, VECTOR), dx_row_ptr.dtype.element_ty)
        for start in range(0, n_cols, TILE):
            tl.store(dx_row_ptr + start + offs_v, zeros, mask=start + offs_v < n_cols)
    else:
        # a label outside the vocabulary makes the whole row NaN
        is_valid = (label >= 0) & (label < n_cols)
        on_probability = tl.where(is_valid, (1.0 + 2.0 * z_loss * lse) * weight * slope, float("nan"))
        on_label = (1.0 - label_smoothing) * weight * slope
        everywhere = label_smoothing / n_cols * weight * slope
        # from the end of the row: its last columns were read last and are still in the cache
        n_whole = n_cols // TILE * TILE
        if n_whole < n_cols:
            columns = n_whole + offs_v
            x = tl.load(x_row_ptr + columns, mask=columns < n_cols, other=0.0)
            dx = _gradient(x, columns == label, lse, everywhere, on_label, on_probability, scale, cap, HAS_SOFTCAP)
            tl.store(dx_row_ptr + columns, dx.to(dx_row_ptr.dtype.element_ty), mask=columns < n_cols)
        for done in range(0, n_whole, TILE):
            start = n_whole - TILE - done
            x = tl.load(x_row_ptr + start + offs_v)
            is_label = offs_v == label - start
            dx = _gradient(x, is_label, lse, everywhere, on_label, on_probability, scale, cap, HAS_SOFTCAP)
            tl.store(dx_row_ptr + start + offs_v, dx.to(dx_row_ptr.dtype.element_ty))


@triton.jit
def _cross_entropy_fwd_kernel(
    x_ptr, labels_ptr, loss_ptr, log_prob_ptr, lse_ptr, entropy_ptr, is_top1_ptr,
    stride_x_row, n_cols, ignore_index, scale, cap, slope, label_smoothing, z_loss, gradient_weight,
    HAS_SOFTCAP: tl.constexpr, HAS_SMOOTHING: tl.constexpr, HAS_ENTROPY: tl.constexpr, HAS_TOP1: tl.constexpr,
    WRITES_GRADIENT: tl.constexpr, UNROLL: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_row_ptr = x_ptr + row * stride_x_row
    label = tl.load(labels_ptr + row)
    is_ignored = label == ignore_index
    is_valid = (label >= 0) & (label < n_cols)
    label = tl.where(is_valid, label, -1).to(tl.int32)
    z_label = _transform(tl.load(x_row_ptr + tl.maximum(label, 0)), scale, cap, HAS_SOFTCAP)

    TILE: tl.constexpr = UNROLL * LANES * VECTOR
    offs_v = _tile_offsets(UNROLL, LANES, VECTOR)
    n_read = tl.where(is_ignored, 0, n_cols)
    n_whole = n_read // TILE * TILE
    # finite, so that a lane that saw no column yet gives 0 and not NaN
    peak = tl.full((LANES,), -1.0e38, tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    weighted = tl.zeros((LANES,), tl.float32)
    plain = tl.zeros((LANES,), tl.float32)
    peak_before = tl.full((LANES,), float("-inf"), tl.float32)
    # whole tiles carry no mask: loads stay wide for a vocabulary of any size
    for start in range(0, n_whole, TILE):
        z = _transform(tl.load(x_row_ptr + start + offs_v), scale, cap, HAS_SOFTCAP)
        peak, total, weighted, plain, peak_before = _accumulate(
            z, offs_v >= 0, start + TILE <= label, peak, total, weighted, plain, peak_before,
            HAS_ENTROPY, HAS_SMOOTHING, HAS_TOP1,
        )  # fmt: skip
    if n_whole < n_read:
        mask = n_whole + offs_v < n_read
        z = _transform(tl.load(x_row_ptr + n_whole + offs_v, mask=mask, other=0.0), scale, cap, HAS_SOFTCAP)
        peak, total, weighted, plain, peak_before = _accumulate(
            z, mask, n_whole + TILE <= label, peak, total, weighted, plain, peak_before,
            HAS_ENTROPY, HAS_SMOOTHING, HAS_TOP1,
        )  # fmt: skip

    row_peak = tl.max(peak, axis=0)
    lane_weight = _exp(peak - row_peak)
    row_total = tl.sum(total * lane_weight, axis=0)
    log_total = tl.log(row_total)
    lse = row_peak + log_total
    log_prob = tl.where(is_valid, (z_label - row_peak) - log_total, float("nan"))
    loss = -log_prob
    if HAS_SMOOTHING:
        loss = (1.0 - label_smoothing) * loss + label_smoothing * (lse - tl.sum(plain, axis=0) / n_cols)
    loss += z_loss * lse * lse
    tl.store(loss_ptr + row, tl.where(is_ignored, 0.0, loss))
    tl.store(log_prob_ptr + row, tl.where(is_ignored, 0.0, log_prob))
    tl.store(lse_ptr + row, tl.where(is_ignored, 0.0, lse))
    if HAS_ENTROPY:
        row_weighted = tl.sum(lane_weight * (weighted + (peak - row_peak) * total), axis=0)
        tl.store(entropy_ptr + row, tl.where(is_ignored, 0.0, log_total - row_weighted / row_total))
    if HAS_TOP1:
        # of equal logits the first one wins, as in torch.argmax: look again at the label's tile, up to the label
        columns = tl.maximum(label, 0) // TILE * TILE + offs_v
        mask = columns < label
        z = _transform(tl.load(x_row_ptr + columns, mask=mask, other=0.0), scale, cap, HAS_SOFTCAP)
        before = tl.maximum(tl.max(peak_before, axis=0), tl.max(_lane_max(tl.where(mask, z, float("-inf"))), axis=0))
        # a row with NaN in it has no best token
        is_best = (z_label >= row_peak) & (z_label > before) & (lse < float("inf"))
        is_top1 = is_best & is_valid & (is_ignored == 0)
        tl.store(is_top1_ptr + row, is_top1.to(tl.int8))
    if WRITES_GRADIENT:
        _write_gradient(
            x_row_ptr, x_row_ptr, label, is_ignored, lse, gradient_weight, n_cols, scale, cap, slope,
            label_smoothing, z_loss, HAS_SOFTCAP, UNROLL, LANES, VECTOR,
        )  # fmt: skip


@triton.jit
def _cross_entropy_bwd_kernel(
    dloss_ptr, x_ptr, labels_ptr, lse_ptr, dx_ptr, stride_x_row, stride_dx_row, n_cols, ignore_index,
    scale, cap, slope, label_smoothing, z_loss,
    HAS_SOFTCAP: tl.constexpr, UNROLL: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    is_ignored = label == ignore_index
    label = tl.where((label >= 0) & (label < n_cols), label, -1).to(tl.int32)
    _write_gradient(
        x_ptr + row * stride_x_row, dx_ptr + row * stride_dx_row, label, is_ignored, tl.load(lse_ptr + row),
        tl.load(dloss_ptr + row), n_cols, scale, cap, slope, label_smoothing, z_loss,
        HAS_SOFTCAP, UNROLL, LANES, VECTOR,
    )  # fmt: skip


def _tile(n_cols: int, itemsize: int, has_all: bool = False) -> dict[str, int]:
    """Threads of a row (LANES), what each loads at a time (VECTOR), and its loads in flight (UNROLL).

    Up to 16 warps a row: few rows in flight, so a second read meets the cache and a short last wave costs little.
    Softcap, smoothing and entropy together (`has_all`) spill beside two loads, and their arithmetic takes longer than one.
    """
    vector = 16 // itemsize
    lanes = min(512, max(32, next_power_of_2(n_cols) // (2 * vector)))
    return dict(UNROLL=2 if n_cols > lanes * vector and not has_all else 1, LANES=lanes, VECTOR=vector)


def _transform_in_torch(x: Tensor, rule: LossRule) -> Tensor:
    z = x.float() if rule.scale == 1.0 else x.float() * rule.scale
    return z if rule.softcap is None else z.tanh().mul_(rule.cap)


def _gradient_in_torch(
    z: Tensor, softmax: Tensor, label: Tensor, is_ignored: Tensor, lse: Tensor, dloss: Tensor, rule: LossRule
) -> Tensor:
    """dloss times the gradient of the raw logits; written over `softmax`."""
    n_cols = z.shape[1]
    dx = softmax.mul_(((1.0 + 2.0 * rule.z_loss * lse) * dloss * rule.slope)[:, None])
    if rule.label_smoothing:
        dx -= (rule.label_smoothing / n_cols * dloss * rule.slope)[:, None]
    on_label = (rule.label_smoothing - 1.0) * dloss * rule.slope
    dx.scatter_add_(1, label.clamp(0, n_cols - 1)[:, None], on_label[:, None])
    if rule.softcap is not None:
        dx *= 1.0 - (z / rule.cap).square_()
    dx[(label < 0) | (label >= n_cols)] = torch.nan
    dx[is_ignored] = 0.0
    return dx


def _row_blocks(n_rows: int, n_cols: int) -> list[slice]:
    step = max(1, _TORCH_BLOCK // max(1, n_cols))
    return [slice(start, min(start + step, n_rows)) for start in range(0, n_rows, step)]


def _fwd_in_torch(
    logits: Tensor, labels: Tensor, rule: LossRule, gradient_weight: float | None, stats: RowStats
) -> None:
    n_rows, n_cols = logits.shape
    columns = torch.arange(n_cols, device=logits.device)
    for rows in _row_blocks(n_rows, n_cols):
        label, z = labels[rows], _transform_in_torch(logits[rows], rule)
        is_ignored, is_valid = label == rule.ignore_index, (label >= 0) & (label < n_cols)
        z_label = z.gather(1, label.clamp(0, n_cols - 1)[:, None])
        peak = z.amax(1, keepdim=True)
        centred = z - peak
        softmax = centred.exp()
        total = softmax.sum(1, keepdim=True)
        softmax /= total
        log_total = total.log()[:, 0]
        lse = peak[:, 0] + log_total
        log_prob = ((z_label - peak)[:, 0] - log_total).where(is_valid, torch.nan)
        loss = (rule.label_smoothing - 1.0) * log_prob + rule.z_loss * lse.square()
        if rule.label_smoothing:
            loss += rule.label_smoothing * (lse - z.mean(1))
        stats.loss[rows] = loss.masked_fill_(is_ignored, 0.0)
        stats.log_prob[rows] = log_prob.masked_fill_(is_ignored, 0.0)
        stats.lse[rows] = lse.masked_fill(is_ignored, 0.0)
        if stats.entropy is not None:
            # the bound keeps an impossible token (z = -inf, softmax = 0) from making NaN
            entropy = log_total - torch.linalg.vecdot(softmax, centred.clamp_(min=-1.0e4))
            stats.entropy[rows] = entropy.masked_fill_(is_ignored, 0.0)
        if stats.is_top1 is not None:
            # of equal logits the first one wins, as in torch.argmax (whose own CPU kernel takes ten times as long)
            is_beaten = ((z == peak) & (columns < label[:, None])).any(1)
            stats.is_top1[rows] = (z_label == peak)[:, 0] & is_valid & ~is_beaten & ~is_ignored
        if gradient_weight is not None:
            dloss = torch.full_like(lse, gradient_weight)
            dx = _gradient_in_torch(z, softmax, label, is_ignored, lse, dloss, rule)
            logits[rows] = dx.to(logits.dtype)


def cross_entropy_fwd(
    logits: Tensor, labels: Tensor, rule: LossRule, stats: RowStats, gradient_weight: float | None = None
) -> None:
    """Row statistics of logits [T, V] (unit column stride, any row stride) and labels [T] int64.

    Args:
        stats: written; its entropy (of softmax(z)) and is_top1 (whether the label is the most likely token, of equal
            ones the first) are left out where None.
        gradient_weight: overwrite `logits` with dloss/dlogits times this; the logits are destroyed.

    Raises:
        ValueError: on a CPU, for a label outside the vocabulary. A GPU writes NaN to that row's loss, log_prob and
            gradient instead, because reading labels back would stall it.
    """
    n_rows, n_cols = logits.shape
    if not runs_triton(logits):
        if not logits.is_cuda:
            check_label_range(labels, n_cols, rule.ignore_index)
        _fwd_in_torch(logits, labels, rule, gradient_weight, stats)
    elif n_rows:
        has_all = rule.softcap is not None and rule.label_smoothing > 0.0 and stats.entropy is not None
        tile = _tile(n_cols, logits.element_size(), has_all)
        _cross_entropy_fwd_kernel[(n_rows,)](
            logits, labels, stats.loss, stats.log_prob, stats.lse,
            stats.loss if stats.entropy is None else stats.entropy,
            stats.loss if stats.is_top1 is None else stats.is_top1.view(torch.int8),
            logits.stride(0), n_cols, rule.ignore_index, rule.scale, rule.cap, rule.slope,
            rule.label_smoothing, rule.z_loss, gradient_weight or 0.0,
            HAS_SOFTCAP=rule.softcap is not None, HAS_SMOOTHING=rule.label_smoothing > 0.0,
            HAS_ENTROPY=stats.entropy is not None, HAS_TOP1=stats.is_top1 is not None,
            WRITES_GRADIENT=gradient_weight is not None, **tile, num_warps=tile["LANES"] // 32, enable_fp_fusion=True,
        )  # fmt: skip


def cross_entropy_bwd(
    dloss: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, rule: LossRule, in_place: bool = False
) -> Tensor:
    """dloss [T] float32 times dloss/dlogits, [T, V] in logits.dtype; with `in_place`, written over the logits."""
    n_rows, n_cols = logits.shape
    dlogits = logits if in_place else torch.empty((n_rows, n_cols), dtype=logits.dtype, device=logits.device)
    if not runs_triton(logits):
        for rows in _row_blocks(n_rows, n_cols):
            label, z = labels[rows], _transform_in_torch(logits[rows], rule)
            softmax = torch.exp(z - lse[rows][:, None])
            dx = _gradient_in_torch(z, softmax, label, label == rule.ignore_index, lse[rows], dloss[rows], rule)
            dlogits[rows] = dx.to(logits.dtype)
    elif n_rows:
        tile = _tile(n_cols, logits.element_size())
        _cross_entropy_bwd_kernel[(n_rows,)](
            dloss, logits, labels, lse, dlogits, logits.stride(0), dlogits.stride(0), n_cols, rule.ignore_index,
            rule.scale, rule.cap, rule.slope, rule.label_smoothing, rule.z_loss,
            HAS_SOFTCAP=rule.softcap is not None, **tile, num_warps=tile["LANES"] // 32, enable_fp_fusion=True,
        )  # fmt: skip
    return dlogits


class CrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, rule):  # type: ignore[override]
        stats = RowStats.empty(logits.shape[0], logits.device)
        cross_entropy_fwd(logits, labels, rule, stats)
        ctx.save_for_backward(logits, labels, stats.lse)
        ctx.rule = rule
        return stats.loss

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):  # type: ignore[override]
        logits, labels, lse = ctx.saved_tensors
        return cross_entropy_bwd(dloss.contiguous(), logits, labels, lse, ctx.rule), None, None


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """Cross-entropy of every row, not reduced.

    loss = -(1 - e) * log p[label] - e * mean(log p) + z_loss * lse**2
    p = softmax(z), z = softcap * tanh(logit_scale * x / softcap)

    Args:
        logits: [..., V], float16, bfloat16 or float32.
        labels: [...], any integer dtype, in 0..V-1 or `ignore_index`.
        ignore_index: label of rows that get loss 0 and gradient 0.
        label_smoothing: e above; 0 to 1.
        logit_scale: factor on the logits, before the cap (Cohere's logit_scale, 1 / Granite's logits_scaling).
        softcap: Gemma 2's final_logit_softcapping, or None.
        z_loss: weight of the squared log-sum-exp.

    Returns:
        [...] float32. Statistics are float32, the gradient has logits.dtype.

    Raises:
        ValueError: if shapes or settings do not fit, or, on a CPU, for a label outside the vocabulary. On a GPU such a
            row's loss and gradient are NaN: a check would stall the device.
        TypeError: for a dtype that the kernels do not take.
    """
    rule = LossRule(ignore_index, logit_scale, softcap, 1.0, label_smoothing, z_loss)
    check_labels(labels, logits, "logits")
    if logits.shape[-1] == 0:
        raise ValueError("logits must have at least one column, got an empty vocabulary")
    rows = logits.reshape(-1, logits.shape[-1])
    rows = rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()
    return CrossEntropyFunction.apply(rows, labels.reshape(-1).long().contiguous(), rule).view(labels.shape)


def cross_entropy_reference(
    logits, labels, ignore_index=-100, label_smoothing=0.0, logit_scale=1.0, softcap=None, z_loss=0.0
):
    z = logits * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    log_p = z.log_softmax(-1)
    kept = labels != ignore_index
    nll = -log_p.gather(-1, labels.where(kept, 0)[..., None])[..., 0]
    loss = (1 - label_smoothing) * nll - label_smoothing * log_p.mean(-1) + z_loss * z.logsumexp(-1).square()
    return loss.where(kept, 0.0)


def _eager(logits, **rest):
    return cross_entropy_reference(logits.float(), **rest)


def _make(shape, dtype, device, generator):
    labels = torch.randint(shape[-1], shape[:-1], generator=generator)
    labels = labels.masked_fill(torch.rand(shape[:-1], generator=generator) < 0.2, -100)
    # one column: the gradient is zero but for the z-loss, nothing but cancellation
    is_odd = shape[-1] % 2 == 1 and shape[-1] > 1
    return dict(
        logits=randn(shape, dtype, device, generator, std=3.0),
        labels=labels.to(device),
        label_smoothing=0.1 if is_odd else 0.0,
        logit_scale=0.5 if is_odd else 1.0,
        softcap=5.0 if shape[-1] % 3 == 0 else None,
        z_loss=1e-3 if is_odd else 0.0,
    )


def _strided(inputs):
    logits = inputs["logits"]
    wide = F.pad(logits, (0, 3), value=float("nan"))
    return dict(inputs, logits=wide[..., : logits.shape[-1]])


def _builds(cc, dtype):
    types = dict.fromkeys(("loss_ptr", "log_prob_ptr", "lse_ptr", "entropy_ptr", "dloss_ptr"), "*fp32")
    types |= dict.fromkeys(("scale", "cap", "slope", "label_smoothing", "z_loss", "gradient_weight"), "fp32")
    types |= dict(labels_ptr="*i64", is_top1_ptr="*i8")
    # a loss alone, what a trainer's metrics ask for, everything
    settings = ((2048, True, True), (128256, False, False), (128256, True, False), (128256, True, True))
    for n_cols, has_metrics, has_all in settings:
        tile = _tile(n_cols, dtype.itemsize, has_all)
        options = tile | dict(HAS_SOFTCAP=has_all, HAS_SMOOTHING=has_all, WRITES_GRADIENT=True)
        options |= dict(HAS_ENTROPY=has_metrics, HAS_TOP1=has_metrics)
        yield build(_cross_entropy_fwd_kernel, dtype, options, tile["LANES"] // 32, types)
        tile = _tile(n_cols, dtype.itemsize)
        yield build(_cross_entropy_bwd_kernel, dtype, dict(HAS_SOFTCAP=has_all) | tile, tile["LANES"] // 32, types)


CASE = Case(
    name="cross_entropy",
    op=cross_entropy,
    reference=cross_entropy_reference,
    eager=_eager,
    make=_make,
    shapes={
        "typical": (2, 12, 512),
        "odd": (5, 97),
        "softcap": (4, 300),
        "one-row": (1, 128),
        "one-column": (3, 1),
        "long": (3, 65537),
        "empty": (0, 64),
    },
    gradients=("logits",),
    strided=_strided,
    bench_shapes={"T4096-V32000": (4096, 32000), "T4096-V128256": (4096, 128256), "T2048-V262144": (2048, 262144)},
    ideal=lambda shape, size: (1.0 * shape[0] * shape[1] * size, 4.0 * shape[0] * shape[1]),
    ideal_backward=lambda shape, size: (2.0 * shape[0] * shape[1] * size, 4.0 * shape[0] * shape[1]),
    builds=_builds,
)
