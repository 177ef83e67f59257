"""AdamW over many tensors in one launch, the clip by the global gradient norm in the same pass.

    c = min(1, max_norm / (norm + 1e-6)),  g <- c * g                                  (only where a clip is asked for)
    m <- beta1 * m + (1 - beta1) * g
    v <- beta2 * v + (1 - beta2) * g**2
    p <- (1 - lr * weight_decay) * p - lr / (1 - beta1**t) * m / (sqrt(v / (1 - beta2**t)) + eps)

Loshchilov and Hutter 2019, arXiv:1711.05101. Everything is computed in float32; p, and m and v if they are not float32, are rounded
once, when stored. With 8-bit moments (Dettmers et al. 2021, arXiv:2110.02861; `_dynamic_map.py`) the parameter sees the moments before
they are rounded to codes, and a value whose clipped gradient is not finite stays as it is and has its moments set to zero, as in
bitsandbytes.

Addresses travel in tables: one of the parameters and moments, sent to the GPU when one of them moves, and one of the gradients, which
move at every step. The norm is summed in a fixed order: one partial sum a block, added up by one program. Whether the step is taken at
all may be decided on the GPU. Nothing waits for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlm_kernels import _launch
from fastlm_kernels._case import Case, build, randn
from fastlm_kernels._dynamic_map import QUANT_BLOCK, code_tables, dequantize, quantize
from fastlm_kernels._launch import HAS_TRITON, capability, tl, triton

# N values of a tensor
_BLOCK = 2048
_NUM_WARPS = 8
_SUM_BLOCK = 4096
# of one tensor in the table: size; addresses of the parameter, both moments and their blocks' largest; place of its scalars; first block
_FIELDS = 8
# of one row: 1 - lr * weight_decay, lr / (1 - beta1**t), sqrt(1 - beta2**t), eps, beta1, 1 - beta1, beta2, 1 - beta2
_SCALARS = 8


@triton.jit
def _place(
    blocks_ptr, table_ptr, taken_ptr,
    FIELDS: tl.constexpr, BLOCK: tl.constexpr, IS_ALIGNED: tl.constexpr, HAS_VERDICT: tl.constexpr,
):  # fmt: skip
    """Of this program: its tensor, the number of its first value there, and how many values are left from that on: none without a step."""
    block = tl.program_id(0)
    tensor = tl.load(blocks_ptr + block).to(tl.int64)
    first = (block - tl.load(table_ptr + tensor * FIELDS + 7)) * BLOCK
    left = tl.minimum(tl.load(table_ptr + tensor * FIELDS) - first, BLOCK).to(tl.int32)
    if HAS_VERDICT:
        left *= tl.load(taken_ptr)
    if IS_ALIGNED:
        left = tl.multiple_of(left, 16)
    return tensor, first, left


@triton.jit
def _pointer(table_ptr, index, typed_ptr, first, IS_ALIGNED: tl.constexpr):
    """Where value `first` of the tensor lies whose address is at `index`; of typed_ptr's type."""
    pointer = tl.load(table_ptr + index).to(typed_ptr.dtype)
    if IS_ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + first


@triton.jit
def _adamw_squares_kernel(
    blocks_ptr, table_ptr, addresses_ptr, grad_ptr, partial_ptr,
    FIELDS: tl.constexpr, BLOCK: tl.constexpr, IS_ALIGNED: tl.constexpr,
):  # fmt: skip
    tensor, first, left = _place(blocks_ptr, table_ptr, blocks_ptr, FIELDS, BLOCK, IS_ALIGNED, False)
    offs = tl.arange(0, BLOCK)
    grads_ptr = _pointer(addresses_ptr, tensor, grad_ptr, first, IS_ALIGNED)
    grad = tl.load(grads_ptr + offs, mask=offs < left, other=0.0).to(tl.float32)
    tl.store(partial_ptr + tl.program_id(0), tl.sum(grad * grad))


@triton.jit
def _adamw_norm_kernel(partial_ptr, norm_ptr, max_norm, n_cols, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_cols, BLOCK):
        total += tl.load(partial_ptr + start + offs, mask=start + offs < n_cols, other=0.0)
    norm = tl.sqrt_rn(tl.sum(total))
    factor = tl.div_rn(max_norm, norm + 1e-6)
    tl.store(norm_ptr, norm)
    # not a minimum: a norm that is not a number must stay one
    tl.store(norm_ptr + 1, tl.where(factor > 1.0, 1.0, factor))


@triton.jit
def _adamw_kernel(
    blocks_ptr, table_ptr, addresses_ptr, scalars_ptr, factor_ptr, taken_ptr, param_ptr, grad_ptr, moment_ptr,
    FIELDS: tl.constexpr, BLOCK: tl.constexpr, IS_ALIGNED: tl.constexpr, HAS_FACTOR: tl.constexpr,
    HAS_VERDICT: tl.constexpr,
):  # fmt: skip
    tensor, first, left = _place(blocks_ptr, table_ptr, taken_ptr, FIELDS, BLOCK, IS_ALIGNED, HAS_VERDICT)
    offs = tl.arange(0, BLOCK)
    mask = offs < left
    fields = tensor * FIELDS
    grads_ptr = _pointer(addresses_ptr, tensor, grad_ptr, first, IS_ALIGNED)
    params_ptr = _pointer(table_ptr, fields + 1, param_ptr, first, IS_ALIGNED)
    ms_ptr = _pointer(table_ptr, fields + 2, moment_ptr, first, IS_ALIGNED)
    vs_ptr = _pointer(table_ptr, fields + 3, moment_ptr, first, IS_ALIGNED)
    row_ptr = scalars_ptr + tl.load(table_ptr + fields + 6)
    decay, step_size, root, eps = tl.load(row_ptr), tl.load(row_ptr + 1), tl.load(row_ptr + 2), tl.load(row_ptr + 3)

    grad = tl.load(grads_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if HAS_FACTOR:
        grad *= tl.load(factor_ptr)
    m = tl.load(ms_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    m += tl.load(row_ptr + 5) * (grad - m)
    v = tl.load(vs_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    v = v * tl.load(row_ptr + 6) + tl.load(row_ptr + 7) * grad * grad
    param = tl.load(params_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    param = param * decay - tl.div_rn(step_size * m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
    tl.store(params_ptr + offs, param.to(param_ptr.dtype.element_ty), mask=mask)
    tl.store(ms_ptr + offs, m.to(moment_ptr.dtype.element_ty), mask=mask)
    tl.store(vs_ptr + offs, v.to(moment_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _quantize(value, bounds_ptr):
    """Codes of [ROWS, 256] values, and the largest of each row. The code is found by bisection of the 255 bounds."""
    absmax = tl.max(tl.abs(value), axis=1)
    scaled = tl.div_rn(value, tl.where(absmax > 0.0, absmax, 1.0)[:, None])
    code = tl.zeros(value.shape, tl.int32)
    for bit in tl.static_range(8):
        half = 128 >> bit
        code += tl.where(scaled > tl.load(bounds_ptr + code + (half - 1)), half, 0)
    return code.to(tl.uint8), absmax


@triton.jit
def _adamw_8bit_kernel(
    blocks_ptr, table_ptr, addresses_ptr, scalars_ptr, factor_ptr, taken_ptr, param_ptr, grad_ptr, moment_ptr, codes_ptr,
    FIELDS: tl.constexpr, BLOCK: tl.constexpr, IS_ALIGNED: tl.constexpr, HAS_FACTOR: tl.constexpr,
    HAS_VERDICT: tl.constexpr, QUANT_BLOCK: tl.constexpr,
):  # fmt: skip
    tensor, first, left = _place(blocks_ptr, table_ptr, taken_ptr, FIELDS, BLOCK, IS_ALIGNED, HAS_VERDICT)
    rows = tl.arange(0, BLOCK // QUANT_BLOCK)
    offs = rows[:, None] * QUANT_BLOCK + tl.arange(0, QUANT_BLOCK)[None, :]  # [BLOCK // QUANT_BLOCK, QUANT_BLOCK]
    mask, mask_rows = offs < left, rows * QUANT_BLOCK < left
    fields = tensor * FIELDS
    grads_ptr = _pointer(addresses_ptr, tensor, grad_ptr, first, IS_ALIGNED)
    params_ptr = _pointer(table_ptr, fields + 1, param_ptr, first, IS_ALIGNED)
    ms_ptr = _pointer(table_ptr, fields + 2, moment_ptr, first, IS_ALIGNED)
    vs_ptr = _pointer(table_ptr, fields + 3, moment_ptr, first, IS_ALIGNED)
    m_absmax_ptr = _pointer(table_ptr, fields + 4, codes_ptr, first // QUANT_BLOCK, False) + rows
    v_absmax_ptr = _pointer(table_ptr, fields + 5, codes_ptr, first // QUANT_BLOCK, False) + rows
    row_ptr = scalars_ptr + tl.load(table_ptr + fields + 6)
    decay, step_size, root, eps = tl.load(row_ptr), tl.load(row_ptr + 1), tl.load(row_ptr + 2), tl.load(row_ptr + 3)

    grad = tl.load(grads_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if HAS_FACTOR:
        grad *= tl.load(factor_ptr)
    is_finite = tl.abs(grad) < float("inf")
    m = tl.load(codes_ptr + tl.load(ms_ptr + offs, mask=mask, other=0).to(tl.int32))
    m *= tl.load(m_absmax_ptr, mask=mask_rows, other=0.0)[:, None]
    m = tl.where(is_finite & mask, m * tl.load(row_ptr + 4) + tl.load(row_ptr + 5) * grad, 0.0)
    v = tl.load(codes_ptr + 256 + tl.load(vs_ptr + offs, mask=mask, other=0).to(tl.int32))
    v *= tl.load(v_absmax_ptr, mask=mask_rows, other=0.0)[:, None]
    v = tl.where(is_finite & mask, v * tl.load(row_ptr + 6) + tl.load(row_ptr + 7) * grad * grad, 0.0)
    param = tl.load(params_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    after = param * decay - tl.div_rn(step_size * m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
    # not a mask of the store, which would then write one value at a time
    after = tl.where(is_finite, after, param)
    tl.store(params_ptr + offs, after.to(param_ptr.dtype.element_ty), mask=mask)
    code, absmax = _quantize(m, codes_ptr + 512)
    tl.store(ms_ptr + offs, code, mask=mask)
    tl.store(m_absmax_ptr, absmax, mask=mask_rows)
    code, absmax = _quantize(v, codes_ptr + 768)
    tl.store(vs_ptr + offs, code, mask=mask)
    tl.store(v_absmax_ptr, absmax, mask=mask_rows)


def scalars(lr: float, betas: tuple[float, float], eps: float, weight_decay: float, step: int) -> list[float]:
    """The numbers that one step (1 is the first) needs of a group of parameters, computed in float64."""
    beta1, beta2 = betas
    step_size, root = lr / (1 - beta1**step), (1 - beta2**step) ** 0.5
    return [1 - lr * weight_decay, step_size, root, eps, beta1, 1 - beta1, beta2, 1 - beta2]


# of one parameter: first and second moment; or the codes of both, then the largest value of each of their blocks
Moments = Sequence[Tensor]


class Kind(NamedTuple):
    """What tensors of one launch have in common: device, dtypes, and whether addresses and sizes are multiples of 16."""

    device: torch.device
    param: torch.dtype
    grad: torch.dtype
    moment: torch.dtype
    is_aligned: bool


class Slot:
    """A parameter with its moments, as the kernels find them; to be made anew when one of them moves.

    Args:
        param: any strides.
        moments: of one dtype and shaped as param; those of uint8 are followed by the largest value of their blocks, float32
            [ceil(N / 256)].

    Attributes:
        places: addresses of the parameter and of the moments.
        fields: of its line in the table.
    """

    def __init__(self, param: Tensor, moments: Moments) -> None:
        self.param, self.moments = param, moments
        self.places, size = [t.data_ptr() for t in (param, *moments)], param.numel()
        self.fields = (size, *self.places, *[0] * (5 - len(self.places)))
        self._bits = size | self.places[0] | self.places[1] | self.places[2]
        self._kinds: dict[tuple[torch.dtype, bool], Kind | None] = {}

    def kind(self, grad: Tensor) -> Kind | None:
        """Which `TensorSet` takes this parameter with this gradient, which must be contiguous; None if no kernel does."""
        key = (grad.dtype, (self._bits | grad.data_ptr()) % 16 == 0)
        if key not in self._kinds:
            param = self.param
            kind = Kind(param.device, param.dtype, grad.dtype, self.moments[0].dtype, key[1])
            self._kinds[key] = kind if _runs_kernel(kind) and param.is_contiguous() else None
        return self._kinds[key]


def _runs_kernel(kind: Kind) -> bool:
    """Whether the kernels take these dtypes on this device. Unlike other ops', ours fall back to torch without bfloat16."""
    dtypes = {kind.param, kind.grad, kind.moment} - {torch.uint8}
    if not dtypes <= {torch.float32, torch.float16, torch.bfloat16}:
        return False
    if kind.device.type == "cuda":
        return HAS_TRITON and (torch.bfloat16 not in dtypes or capability(kind.device.index) >= (8, 0))
    return kind.device.type == "cpu" and _launch._interpreting


def _send(values: Sequence[Any] | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of the host on the device, without waiting for it: from pinned memory, which torch keeps until it was read."""
    host = torch.as_tensor(values, dtype=dtype, device="cpu")
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _current(device: torch.device) -> contextlib.AbstractContextManager:
    """Triton launches on the current GPU, whichever one the tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def send_scalars(rows: Sequence[Sequence[float]], device: torch.device) -> Tensor:
    """[rows, 8] float32 on the device, of what `scalars` gave."""
    return _send(rows, torch.float32, device)


class TensorSet:
    """Tensors of one kind, and the tables that the kernels find them by.

    Attributes:
        device: of all of them.
        n_blocks: how many partial sums of squares it gives.
        blocks: [n_blocks] int32 on the device, which tensor each of them is of.
    """

    def __init__(self, kind: Kind) -> None:
        self.device, self.n_blocks = kind.device, 0
        self._is_8bit = kind.moment is torch.uint8
        # the tables hold bare addresses: what they point to is said by the types of these
        self._typed = [torch.empty(16, dtype=t, device=kind.device) for t in (kind.param, kind.grad, kind.moment)]
        self._options = dict(FIELDS=_FIELDS, BLOCK=_BLOCK, IS_ALIGNED=kind.is_aligned, num_warps=_NUM_WARPS)
        self._lines: tuple[list[tuple[int, ...]], list[int]] = ([], [])
        self._grad_places: list[int] = []

    def hold(self, slots: Sequence[Slot], grads: Sequence[Tensor], rows: list[int]) -> None:
        """Takes these tensors in place of what it held. What has not moved is not sent again.

        Args:
            slots: parameters and moments; to be kept alive until the last launch, as are the gradients.
            grads: contiguous, of each.
            rows: of each, which row of the scalars is its.
        """
        grad_places, lines = [grad.data_ptr() for grad in grads], ([slot.fields for slot in slots], rows)
        if grad_places != self._grad_places:
            self._addresses = _send(grad_places, torch.int64, self.device)
            self._grad_places = grad_places
        if lines != self._lines:
            table = torch.tensor(lines[0], dtype=torch.int64, device="cpu")
            counts = -(-table[:, 0] // _BLOCK)
            firsts = counts.cumsum(0) - counts
            blocks = torch.arange(len(slots), dtype=torch.int32, device="cpu").repeat_interleave(counts)
            places = torch.tensor(rows, dtype=torch.int64, device="cpu") * _SCALARS
            table = torch.cat([table, places[:, None], firsts[:, None]], 1)
            self._table, self.blocks = (_send(t, t.dtype, self.device) for t in (table, blocks))
            self.n_blocks, self._lines = blocks.numel(), lines

    def squares(self, partial: Tensor) -> None:
        """Writes the sums of the gradients' squares: partial is [n_blocks] float32."""
        if self.n_blocks:
            tables = (self.blocks, self._table, self._addresses)
            _adamw_squares_kernel[(self.n_blocks,)](*tables, self._typed[1], partial, **self._options)

    def step(self, rows: Tensor, factor: Tensor | None, taken: Tensor | None = None) -> None:
        """Updates all parameters and moments in place.

        Args:
            rows: [rows, 8] float32, `send_scalars`' on this device.
            factor: [] float32 on this device, multiplies the gradients; None for 1.
            taken: [] int32 on this device: 1, or 0 to leave everything as it is; None for 1.
        """
        if not self.n_blocks:
            return
        optional = (rows if factor is None else factor, self.blocks if taken is None else taken)
        arguments = (self.blocks, self._table, self._addresses, rows, *optional, *self._typed)
        options = dict(self._options, HAS_FACTOR=factor is not None, HAS_VERDICT=taken is not None)
        with _current(self.device):
            if self._is_8bit:
                arguments += (code_tables(self.device),)
                _adamw_8bit_kernel[(self.n_blocks,)](*arguments, **options, QUANT_BLOCK=QUANT_BLOCK)
            else:
                _adamw_kernel[(self.n_blocks,)](*arguments, **options)


class Clip(NamedTuple):
    """What the gradients on one device give.

    norm, factor: [] float32; the factor clips them to what was asked for.
    partial: [blocks] float32, the sums of squares, of each set in turn.
    """

    norm: Tensor
    factor: Tensor
    partial: Tensor


def clip_of(sets: Sequence[TensorSet], max_norm: float, device: torch.device) -> Clip:
    """The norm of all gradients that these sets of one device hold, and what clips them to max_norm."""
    partial = torch.empty(sum(part.n_blocks for part in sets), dtype=torch.float32, device=device)
    found, start = torch.empty(2, dtype=torch.float32, device=device), 0
    with _current(device):
        for part in sets:
            part.squares(partial[start : start + part.n_blocks])
            start += part.n_blocks
        options = dict(BLOCK=_SUM_BLOCK, num_warps=_NUM_WARPS)
        _adamw_norm_kernel[(1,)](partial, found, float(max_norm), partial.numel(), **options)
    return Clip(found[0], found[1], partial)


def adamw_torch_(param: Tensor, grad: Tensor, moments: Moments, row: Sequence[float], factor: Tensor | None) -> None:
    """The same step in torch's own operations: any device, float dtype and strides. In place, as `TensorSet.step`.

    In float32 the operations are those of torch.optim.AdamW, in its order.
    """
    decay, step_size, root, eps, beta1, rest1, beta2, rest2 = row
    dtype = torch.promote_types(param.dtype, torch.float32)
    grad = grad.to(dtype)
    if factor is not None:
        grad = grad * factor
    if moments[0].dtype is torch.uint8:
        # blocks follow the order of the values, whatever the strides
        grad, before = grad.reshape(-1), param.to(dtype, copy=True).reshape(-1)
        is_finite = grad.isfinite()
        m, v = (dequantize(moments[i].view(-1), moments[i + 2], is_signed=i == 0) for i in (0, 1))
        m = torch.where(is_finite, m.mul_(beta1).add_(grad, alpha=rest1), 0.0)
        v = torch.where(is_finite, v.mul_(beta2).addcmul_(grad, grad, value=rest2), 0.0)
        after = (before * decay).addcdiv_(m, (v.sqrt() / root).add_(eps), value=-step_size)
        param.copy_(torch.where(is_finite, after, before).view(param.shape))
        for i, value in enumerate((m, v)):
            codes, absmax = quantize(value, is_signed=i == 0)
            moments[i].view(-1).copy_(codes)
            moments[i + 2].copy_(absmax)
        return
    m = moments[0].to(dtype).lerp_(grad, rest1)
    v = moments[1].to(dtype).mul_(beta2).addcmul_(grad, grad, value=rest2)
    after = param.to(dtype).mul_(decay).addcdiv_(m, (v.sqrt() / root).add_(eps), value=-step_size)
    # nothing is copied where the dtype was right already
    for kept, value in zip((param, *moments), (after, m, v), strict=True):
        kept.copy_(value)


def adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    max_norm: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of AdamW on one tensor, out of place. Optimizers use `TensorSet`, for many and in place.

    Args:
        param, grad: of one shape, float16, bfloat16 or float32.
        exp_avg, exp_avg_sq: the moments before the step, of the same shape and of one dtype.
        step: its number, from 1.
        lr, betas, eps, weight_decay: as torch.optim.AdamW's.
        max_norm: clips the gradient's norm first; None does not.

    Returns:
        param, exp_avg and exp_avg_sq after the step, in their dtypes. Computed in float32.

    Raises:
        ValueError: if the shapes differ, or step < 1.

    Reference: Loshchilov and Hutter 2019, arXiv:1711.05101.
    """
    shapes = [tuple(t.shape) for t in (param, grad, exp_avg, exp_avg_sq)]
    if len(set(shapes)) != 1:
        raise ValueError(f"param, grad, exp_avg and exp_avg_sq must have one shape, got {shapes}")
    if step < 1:
        raise ValueError(f"step must be at least 1, got {step}")
    param, *moments = (t.detach().clone(memory_format=torch.contiguous_format) for t in (param, exp_avg, exp_avg_sq))
    grad, row, factor = grad.detach().contiguous(), scalars(lr, betas, eps, weight_decay, step), None
    slot = Slot(param, moments)
    kind = slot.kind(grad)
    if kind is not None:
        tensors = TensorSet(kind)
        tensors.hold([slot], [grad], [0])
        if max_norm is not None:
            factor = clip_of([tensors], max_norm, param.device).factor
        tensors.step(send_scalars([row], param.device), factor)
    else:
        if max_norm is not None:
            norm = torch.linalg.vector_norm(grad, dtype=torch.float32)
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        adamw_torch_(param, grad, moments, row, factor)
    return param, moments[0], moments[1]


def adamw_reference(
    param, grad, exp_avg, exp_avg_sq, step, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, max_norm=None
):
    if max_norm is not None:
        grad = grad * min(1.0, max_norm / (float(grad.square().sum().sqrt()) + 1e-6))
    m = betas[0] * exp_avg + (1 - betas[0]) * grad
    v = betas[1] * exp_avg_sq + (1 - betas[1]) * grad**2
    m_hat, v_hat = m / (1 - betas[0] ** step), v / (1 - betas[1] ** step)
    return (1 - lr * weight_decay) * param - lr * m_hat / (v_hat.sqrt() + eps), m, v


def _eager(param, grad, exp_avg, exp_avg_sq, **rest):
    """What torch's fused AdamW does: float32 inside, results rounded to the dtype of the parameter."""
    after = adamw_reference(param.float(), grad.float(), exp_avg.float(), exp_avg_sq.float(), **rest)
    return tuple(value.to(param.dtype) for value in after)


def _make(shape, dtype, device, generator):
    draw = lambda std: randn(shape, dtype, device, generator, std)
    moments = dict(exp_avg=draw(0.01), exp_avg_sq=draw(0.01).abs())
    return dict(
        param=draw(1.0), grad=draw(0.1), **moments, step=3, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1, max_norm=1.0
    )


def _strided(inputs):
    return {name: value.mT.contiguous().mT if torch.is_tensor(value) else value for name, value in inputs.items()}


def _builds(cc, dtype):
    types = dict.fromkeys(("table_ptr", "addresses_ptr"), "*i64") | dict.fromkeys(("blocks_ptr", "taken_ptr"), "*i32")
    types["max_norm"] = "fp32"
    types |= dict.fromkeys(("scalars_ptr", "factor_ptr", "partial_ptr", "norm_ptr", "codes_ptr"), "*fp32")
    for is_aligned in (True, False):
        sizes = dict(FIELDS=_FIELDS, BLOCK=_BLOCK, IS_ALIGNED=is_aligned)
        yield build(_adamw_squares_kernel, dtype, sizes, _NUM_WARPS, types)
        options = dict(sizes, HAS_FACTOR=True, HAS_VERDICT=True)
        yield build(_adamw_kernel, dtype, options, _NUM_WARPS, types)
        yield build(_adamw_kernel, dtype, options, _NUM_WARPS, types | dict(moment_ptr="*fp32"))
        types_8bit = types | dict(moment_ptr="*u8")
        yield build(_adamw_8bit_kernel, dtype, options | dict(QUANT_BLOCK=QUANT_BLOCK), _NUM_WARPS, types_8bit)
    yield build(_adamw_norm_kernel, dtype, dict(BLOCK=_SUM_BLOCK), _NUM_WARPS, types)


CASE = Case(
    name="adamw",
    op=adamw,
    reference=adamw_reference,
    eager=_eager,
    make=_make,
    shapes={
        "typical": (40, 64),
        "odd": (3, 701),
        "one-value": (1, 1),
        "one-block": (8, 256),
        "many-blocks": (9, 1024),
        "empty": (0, 4),
    },
    gradients=(),
    strided=_strided,
    builds=_builds,
)
