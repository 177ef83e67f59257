"""The 8-bit code of optimizer states: dynamic quantization, each block of 256 values scaled by its largest.

Dettmers et al. 2021, arXiv:2110.02861, section 2.1. A code's value lies in one of seven decades, 1e-7 … 1; each decade has twice as
many codes as the one below it, in equal steps. The first moment spends half of its codes on negative values, the second has none.
The values are bitsandbytes' to the bit, so that states move between the two.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

QUANT_BLOCK = 256
DECADES = 7


@functools.cache
def dynamic_map(is_signed: bool) -> Tensor:
    """[256] float32 on the CPU: the value of each code, ascending. Shared: not to be written to."""
    values = [0.0, 1.0]
    for decade in range(DECADES):
        steps = 2 ** (decade if is_signed else decade + 1)
        edges = torch.linspace(0.1, 1.0, steps + 1, dtype=torch.float32, device="cpu")
        scaled = (10.0 ** (decade + 1 - DECADES) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        values += scaled + [-value for value in scaled] * is_signed
    return torch.tensor(sorted(values), dtype=torch.float32, device="cpu")


@functools.cache
def _bounds(is_signed: bool) -> Tensor:
    """[255] float32: a value has as its code the number of bounds below it; they are the midpoints of neighbours."""
    values = dynamic_map(is_signed)
    return (values[:-1] + values[1:]) / 2


@functools.cache
def code_tables(device: torch.device) -> Tensor:
    """[4, 256] float32: values of the signed and of the unsigned codes, then the bounds of both, filled up with one that none passes."""
    unreached = torch.full((1,), float("inf"), device="cpu")
    rows = [dynamic_map(True), dynamic_map(False), *(torch.cat([_bounds(s), unreached]) for s in (True, False))]
    return torch.stack(rows).to(device)


def quantize(values: Tensor, is_signed: bool) -> tuple[Tensor, Tensor]:
    """Codes of the nearest values in each block of 256.

    Args:
        values: [N] float32.
        is_signed: which map.

    Returns:
        [N] uint8, and [ceil(N / 256)] float32: the largest absolute value of each block.
    """
    blocks = torch.nn.functional.pad(values, (0, -values.numel() % QUANT_BLOCK)).view(-1, QUANT_BLOCK)
    absmax = blocks.abs().amax(1)
    # a block of zeros stays one
    scaled = blocks / torch.where(absmax > 0, absmax, 1.0)[:, None]
    codes = torch.bucketize(scaled, _bounds(is_signed).to(values.device)).to(torch.uint8)
    return codes.view(-1)[: values.numel()], absmax


def dequantize(codes: Tensor, absmax: Tensor, is_signed: bool) -> Tensor:
    """The values of `quantize`'s codes: [N] float32."""
    values = dynamic_map(is_signed).to(codes.device)[codes.long()]
    return values * absmax.repeat_interleave(QUANT_BLOCK)[: codes.numel()]
