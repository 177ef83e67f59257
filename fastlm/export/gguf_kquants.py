"""K-quants: rows of float32 in super-blocks of 256 values of 2 to 6 bits, byte for byte as llama.cpp writes them.

A super-block holds 8 blocks of 32 values or 16 of 16. A block has a scale (and for 2, 4 and 5 bits a minimum) that is itself
quantized against the super-block's 16-bit scale. Scales are searched for: every candidate rounds the values, solves the weighted
least-squares problem for the rounded values, and is kept if its error is the smallest so far.

    value = d * scale * level - dmin * minimum            2, 4, 5 bits; weights |x| or sqrt(mean x²) + |x|
    value = d * scale * (level - offset)                  3, 6 bits; weights x²

The algorithm, its constants, its order of sums and the layout of blocks are those of `quantize_row_q*_K_ref` in ggml-quants.c of
llama.cpp (https://github.com/ggml-org/llama.cpp, MIT licence), written anew over whole tensors: blocks are columns, S of them, the
values of a block are rows, so that a sum over a block adds its values one by one as the reference does and rounds the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SUPER = 256
# blocks whose largest value is below this are zero
_TINY = 1e-15
# values that are quantized at a time: small enough for a CPU's caches, large enough to fill a GPU
_CHUNK = {"cpu": 2**18, "cuda": 2**24}


def _f32(value: float) -> float:
    """The float32 nearest to a number: constants and their sums round as in C."""
    return float(torch.tensor(value, dtype=torch.float32))


def _over(number: float, values: Tensor) -> Tensor:
    """number / values, rounded once: torch itself multiplies by a rounded reciprocal."""
    return torch.full_like(values, number).div_(values)


def _divided(values: Tensor, number: float) -> Tensor:
    """values / number, rounded once, for the same reason."""
    return values / torch.full_like(values, number)


def _sum(values: Tensor) -> Tensor:
    """[n, S] -> [S], added in the order of the rows."""
    total = values[0].clone()
    for row in values[1:]:
        total += row
    return total


def _first_largest(values: Tensor) -> Tensor:
    """[n, S] -> [S], the first value whose magnitude is largest."""
    return values.gather(0, values.abs().argmax(0, keepdim=True))[0]


def _levels(x: Tensor, minimum: Tensor, inverse: Tensor, most: int) -> Tensor:
    return ((x - minimum) * inverse).round_().clamp_(0, most)


def _search_with_minimum(
    x: Tensor, weights: Tensor, most: int, first: float, step: float, n_steps: int, absolute: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Scale and minimum of each block (`make_qkx2_quants`).

    Args:
        x, weights: [n, S].
        most: the highest level.
        first, step, n_steps: candidates span `most + first + i * step` levels, i in 0..n_steps.
        absolute: the error is the weighted sum of |difference|, not of its square.

    Returns:
        scales [S], minima [S] (positive, to be subtracted), levels [n, S].
    """

    def error(levels: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
        difference = levels.mul(scale).add_(minimum).sub_(x)
        return _sum((difference.abs_() if absolute else difference.square_()).mul_(weights))

    low, high = x.amin(0).clamp_(max=0), x.amax(0)
    sum_w, sum_x = _sum(weights), _sum(weights * x)
    is_flat = low == high
    inverse, minimum = _over(most, high - low), low
    # of the best candidate: what its levels were rounded with
    kept_inverse, kept_minimum = inverse, minimum
    scale = _over(1, inverse)
    best = error(_levels(x, minimum, inverse, most), scale, minimum)
    for i in range(n_steps + 1):
        span = _f32(_f32(_f32(first) + _f32(_f32(step) * i)) + most)
        inverse = _over(span, high - minimum)
        levels = _levels(x, minimum, inverse, most)
        weighted = weights * levels
        sum_l, sum_xl = _sum(weighted), _sum(weighted * x)
        sum_l2 = _sum(weighted.mul_(levels))
        determinant = sum_w * sum_l2 - sum_l * sum_l
        new_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
        new_minimum = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
        is_above = new_minimum > 0
        new_scale = torch.where(is_above, sum_xl / sum_l2, new_scale)
        new_minimum = new_minimum.masked_fill(is_above, 0)
        new_error = error(levels, new_scale, new_minimum)
        better = (determinant > 0) & (new_error < best)
        best = torch.where(better, new_error, best)
        scale = torch.where(better, new_scale, scale)
        kept_inverse = torch.where(better, inverse, kept_inverse)
        kept_minimum = torch.where(better, minimum, kept_minimum)
        minimum = torch.where(better, new_minimum, minimum)
    levels = _levels(x, kept_minimum, kept_inverse, most).masked_fill_(is_flat, 0)
    # 0 - x: no minus zero, whose sign would be stored
    return scale.masked_fill(is_flat, 0), 0 - torch.where(is_flat, low, minimum), levels


def _search_symmetric(x: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Scale of each block of levels -most .. most-1 (`make_qx_quants` with weights x²).

    Returns:
        scales [S], levels [n, S] from 0.
    """
    largest = _first_largest(x)
    is_zero = largest.abs() < _TINY
    weights = x * x
    weighted = weights * x

    def sums(inverse: Tensor) -> tuple[Tensor, Tensor]:
        levels = (inverse * x).round_().clamp_(-most, most - 1)
        return _sum(weighted * levels), _sum((weights * levels).mul_(levels))

    inverse = _over(-most, largest)
    sum_lx, sum_l2 = sums(inverse)
    scale = torch.where(sum_l2 != 0, sum_lx / sum_l2, 0.0)
    best, kept = scale * sum_lx, inverse
    for i in (*range(-9, 0), *range(1, 10)):
        inverse = _over(-_f32(most + _f32(_f32(0.1) * i)), largest)
        sum_lx, sum_l2 = sums(inverse)
        better = (sum_l2 > 0) & (sum_lx * sum_lx > best * sum_l2)
        new_scale = sum_lx / sum_l2
        scale = torch.where(better, new_scale, scale)
        best = torch.where(better, new_scale * sum_lx, best)
        kept = torch.where(better, inverse, kept)
    levels = (kept * x).round_().clamp_(-most, most - 1).add_(most)
    return scale.masked_fill(is_zero, 0), levels.masked_fill_(is_zero, 0)


def _search_by_coordinates(x: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Scale of each block of levels -most .. most-1, one level improved at a time (`make_q3_quants`).

    Returns:
        scales [S], levels [n, S] from 0.
    """
    largest = _first_largest(x)
    is_zero = largest.abs() < _TINY
    levels = (_over(-most, largest) * x).round_().clamp_(-most, most - 1)
    weights = x * x
    weighted = weights * x
    sum_lx, sum_l2 = _sum(weighted * levels), _sum(weights * levels * levels)
    for _ in range(5):
        for i in range(len(x)):
            old = levels[i]
            rest_lx = sum_lx - weighted[i] * old
            rest_l2 = sum_l2 - weights[i] * old * old
            new = (x[i] * rest_l2 / rest_lx).round_().clamp_(-most, most - 1)
            new_lx = rest_lx + weighted[i] * new
            new_l2 = rest_l2 + weights[i] * new * new
            better = (rest_lx > 0) & (new != old) & (new_l2 > 0)
            better &= new_lx * new_lx * sum_l2 > sum_lx * sum_lx * new_l2
            levels[i] = torch.where(better, new, old)
            sum_lx = torch.where(better, new_lx, sum_lx)
            sum_l2 = torch.where(better, new_l2, sum_l2)
    scale = torch.where(sum_l2 > 0, sum_lx / sum_l2, 0.0)
    return scale.masked_fill(is_zero, 0), levels.add_(most).masked_fill_(is_zero, 0)


def _blocks(x: Tensor, size: int) -> Tensor:
    """[M, 256] -> [size, S], blocks as columns, those of a super-block one after the other."""
    return x.reshape(-1, size).t().contiguous()


def _by_super(values: Tensor, size: int) -> Tensor:
    """[S] -> [M, 256/size]."""
    return values.reshape(-1, SUPER // size)


def _half(values: Tensor) -> tuple[Tensor, Tensor]:
    """The float16 that is stored and its float32 value."""
    stored = values.to(torch.float16)
    return stored, stored.float()


def _as_bytes(values: Tensor) -> Tensor:
    """[M] float16 -> [M, 2] uint8, little end first."""
    return values[:, None].contiguous().view(torch.uint8)


def _pairs(levels: Tensor, n_bits: int, stride: int) -> Tensor:
    """Levels [M, 256] packed several to a byte: values `stride` apart share one. [M, 256 * n_bits / 8] uint8."""
    n = 8 // n_bits
    groups = levels.reshape(-1, SUPER // (n * stride), n, stride)
    packed = groups[:, :, 0]
    for i in range(1, n):
        packed = packed | (groups[:, :, i] << (n_bits * i))
    return packed.reshape(len(levels), -1)


def _final_levels(x: Tensor, scale: Tensor, minimum: Tensor | None, low: int, high: int, kept: Tensor) -> Tensor:
    """Levels against the scales as they are stored, from 0: x, kept [n, S]; scale, minimum [S] -> [M, 256] uint8.

    A block whose stored scale is zero keeps the levels of the search.
    """
    levels = (x if minimum is None else x + minimum).div(scale).round_().clamp_(low, high).sub_(low)
    return torch.where(scale != 0, levels, kept).t().reshape(-1, SUPER).to(torch.uint8)


def _with_minimum_6bit(x: Tensor, n_bits: int, first: float, n_steps: int) -> tuple[list[Tensor], Tensor]:
    """What 4 and 5 bits have in common: [d, dmin, 12 bytes of scales], and levels [M, 256]."""
    most = 2**n_bits - 1
    columns = _blocks(x, 32)
    # torch's float32 square root is not always rounded correctly; through float64 it is
    weights = (_sum(columns * columns) / 32).double().sqrt_().float() + columns.abs()
    found, minima, kept = _search_with_minimum(columns, weights, most, first, 0.1, n_steps, absolute=False)
    found, minima = _by_super(found, 32), _by_super(minima, 32)

    def six_bits(values: Tensor) -> tuple[Tensor, Tensor]:
        largest = values.amax(1).clamp_(min=0)
        inverse = torch.where(largest > 0, _over(63, largest), 0.0)
        return _divided(largest, 63), (values * inverse[:, None]).round_().to(torch.int32).bitwise_and_(255).clamp_(
            max=63
        )

    (largest, scales), (deepest, mins) = six_bits(found), six_bits(minima)
    (d, d_value), (dmin, dmin_value) = _half(largest), _half(deepest)
    levels = _final_levels(
        columns,
        (d_value[:, None] * scales).reshape(-1),
        (dmin_value[:, None] * mins).reshape(-1),
        0,
        most,
        kept,
    )
    # 16 numbers of 6 bits in 12 bytes: the upper two bits of the last eight lie above the first eight
    head = [
        scales[:, :4] | (scales[:, 4:] >> 4) << 6,
        mins[:, :4] | (mins[:, 4:] >> 4) << 6,
        (scales[:, 4:] & 15) | (mins[:, 4:] & 15) << 4,
    ]
    return [_as_bytes(d), _as_bytes(dmin), *(part.to(torch.uint8) for part in head)], levels


def _q2(x: Tensor) -> list[Tensor]:
    columns = _blocks(x, 16)
    found, minima, kept = _search_with_minimum(columns, columns.abs(), 3, -0.5, 0.1, 15, absolute=True)

    def four_bits(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values = _by_super(values, 16)
        largest = values.amax(1).clamp_(min=0)
        inverse = torch.where(largest > 0, _over(15, largest), 0.0)
        stored, value = _half(_divided(largest, 15))
        return stored, value, (values * inverse[:, None]).round_().to(torch.int32).bitwise_and_(15)

    (d, d_value, scales), (dmin, dmin_value, mins) = four_bits(found), four_bits(minima)
    levels = _final_levels(
        columns, (d_value[:, None] * scales).reshape(-1), (dmin_value[:, None] * mins).reshape(-1), 0, 3, kept
    )
    return [(scales | mins << 4).to(torch.uint8), _pairs(levels, 2, 32), _as_bytes(d), _as_bytes(dmin)]


def _q3(x: Tensor) -> list[Tensor]:
    columns = _blocks(x, 16)
    found, kept = _search_by_coordinates(columns, 4)
    found = _by_super(found, 16)
    largest = _first_largest(found.t())
    inverse = torch.where(largest != 0, _over(-32, largest), 0.0)
    d, d_value = _half(torch.where(largest != 0, _over(1, inverse), 0.0))
    scales = (found * inverse[:, None]).round_().clamp_(-32, 31).to(torch.int32) + 32
    # a super-block of zeros stores no scale at all
    scales = scales.masked_fill((largest == 0)[:, None], 0)
    levels = _final_levels(columns, (d_value[:, None] * (scales - 32)).reshape(-1), None, -4, 3, kept)
    high = (levels > 3).to(torch.uint8)
    quarters = (scales >> 4).reshape(-1, 4, 4)
    packed = [
        (scales[:, :8] & 15) | (scales[:, 8:] & 15) << 4,
        quarters[:, 0] | quarters[:, 1] << 2 | quarters[:, 2] << 4 | quarters[:, 3] << 6,
    ]
    return [
        _pairs(high, 1, 32),
        _pairs(levels - 4 * high, 2, 32),
        *(part.to(torch.uint8) for part in packed),
        _as_bytes(d),
    ]


def _q4(x: Tensor) -> list[Tensor]:
    head, levels = _with_minimum_6bit(x, 4, -1.0, 20)
    return [*head, _pairs(levels, 4, 32)]


def _q5(x: Tensor) -> list[Tensor]:
    head, levels = _with_minimum_6bit(x, 5, -0.5, 15)
    return [*head, _pairs(levels >> 4, 1, 32), _pairs(levels & 15, 4, 32)]


def _q6(x: Tensor) -> list[Tensor]:
    columns = _blocks(x, 16)
    found, kept = _search_symmetric(columns, 32)
    found = _by_super(found, 16)
    largest = _first_largest(found.t())
    is_zero = largest.abs() < _TINY
    inverse = torch.where(is_zero, 0.0, _over(-128, largest))
    d, d_value = _half(torch.where(is_zero, 0.0, _over(1, inverse)))
    scales = (found * inverse[:, None]).round_().clamp_(max=127)
    levels = _final_levels(columns, (d_value[:, None] * scales).reshape(-1), None, -32, 31, kept)
    levels = levels.masked_fill(is_zero[:, None], 0)
    low = _pairs(levels & 15, 4, 64)
    return [low, _pairs(levels >> 4, 2, 32), scales.to(torch.int8).view(torch.uint8), _as_bytes(d)]


@dataclass(frozen=True)
class KQuant:
    """One format: bytes of a super-block, and the function that gives their parts in order."""

    n_bytes: int
    parts: Callable[[Tensor], list[Tensor]]


KQUANTS = {
    "Q2_K": KQuant(84, _q2),
    "Q3_K": KQuant(110, _q3),
    "Q4_K": KQuant(144, _q4),
    "Q5_K": KQuant(176, _q5),
    "Q6_K": KQuant(210, _q6),
}


@torch.no_grad()
def quantize(weight: Tensor, name: str) -> Tensor:
    """Quantize the rows of a matrix.

    Args:
        weight: [N, K], float32, float16 or bfloat16, K a multiple of 256, on any device.
        name: "Q2_K", "Q3_K", "Q4_K", "Q5_K" or "Q6_K".

    Returns:
        [N, K / 256 * bytes of a super-block] uint8 on the CPU.

    Raises:
        ValueError: if K is no multiple of 256.

    Reference: ggml-quants.c of llama.cpp, MIT licence.
    """
    n_rows, n_columns = weight.shape
    if n_columns % SUPER:
        raise ValueError(f"rows must be a multiple of {SUPER} values for {name}, got {n_columns}")
    kind = KQUANTS[name]
    supers = weight.reshape(-1, SUPER)
    step = _CHUNK[weight.device.type] // SUPER
    out = torch.empty(len(supers), kind.n_bytes, dtype=torch.uint8)
    for start in range(0, len(supers), step):
        part = supers[start : start + step].float()
        out[start : start + step] = torch.cat(kind.parts(part), dim=1)
    return out.reshape(n_rows, -1)
