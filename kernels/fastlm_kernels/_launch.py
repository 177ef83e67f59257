"""Where an op runs and how its kernels are launched: pure functions of device, dtype and shape.

Nothing here is tuned at run time: the same shape on the same chip always gets the same launch, so results do not
depend on timing, free memory or the environment.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:  # a platform without Triton wheels: every op takes its torch path
    HAS_TRITON = False

    class _NoTriton:
        """Stands in for `triton` and `triton.language` while kernels are defined, never while they run."""

        constexpr = None

        def jit(self, function: Any) -> Any:
            return function

    triton = tl = _NoTriton()

# Compute capabilities whose launches are assembled ahead of time by the tests, and the shared memory one program may use.
# CUDA C++ programming guide, table "Technical Specifications per Compute Capability".
SHARED_MEMORY_BYTES = {
    (7, 5): 64 * 1024,
    (8, 0): 163 * 1024,
    (8, 6): 99 * 1024,
    (8, 9): 99 * 1024,
    (9, 0): 227 * 1024,
    (10, 0): 227 * 1024,
    (12, 0): 99 * 1024,
}
MULTIPROCESSORS_FALLBACK = 64

_interpreting = False


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """Sends CPU tensors through the Triton kernels, for tests in Triton's interpreter.

    Raises:
        RuntimeError: if Triton was not imported with its interpreter on (`TRITON_INTERPRET=1`).
    """
    global _interpreting
    if not HAS_TRITON or not triton.knobs.runtime.interpret:
        raise RuntimeError("interpreting() needs Triton imported with TRITON_INTERPRET=1")
    before, _interpreting = _interpreting, True
    try:
        yield
    finally:
        _interpreting = before


@functools.cache
def capability(device_index: int) -> tuple[int, int]:
    """Compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device_index)


@functools.cache
def multiprocessors(device_index: int | None) -> int:
    """Number of streaming multiprocessors; a fixed number where there is no GPU (interpreter, ahead-of-time)."""
    if device_index is None:
        return MULTIPROCESSORS_FALLBACK
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def check_dtype(dtype: torch.dtype, cc: tuple[int, int]) -> None:
    """Raises TypeError for a dtype that a chip's kernels do not take.

    bfloat16 compiles for capability 7.5 but is emulated there with thousands of spilled registers, so it is refused.
    """
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"kernels take float32, float16 or bfloat16, got {dtype}")
    if dtype is torch.bfloat16 and cc < (8, 0):
        raise TypeError(
            f"bfloat16 needs a GPU of compute capability 8.0 or newer, this one has {cc[0]}.{cc[1]}: load the model "
            "with dtype=torch.float16 and train with fp16=True"
        )


def runs_triton(x: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether an op on `x` launches its Triton kernel. The answer to `report`'s device path.

    Args:
        x: a tensor on the op's device.
        dtype: the dtype that the kernel computes for where that is not x's own (a weight stored as integers).

    Raises:
        TypeError: if `x` lies on a GPU whose kernels do not take the dtype.
    """
    if x.is_cuda:
        if HAS_TRITON:
            check_dtype(dtype or x.dtype, capability(x.device.index))
        return HAS_TRITON
    return _interpreting


@dataclass(frozen=True)
class RowLaunch:
    """Launch of a kernel that handles whole rows: `block` columns at a time, `rows` rows a program."""

    block: int
    num_warps: int
    rows: int = 1


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def as_rows(x: Tensor, n_cols: int) -> Tensor:
    """[..., N] -> [T, N] with unit column stride; a copy only where the strides allow no view."""
    x = x.reshape(-1, n_cols)
    return x if x.stride(1) == 1 or n_cols == 1 else x.contiguous()


def row_launch(n_cols: int, live_values: int, max_block: int = 32768) -> RowLaunch:
    """Launch for a kernel that holds a whole row of `n_cols` in registers.

    Args:
        n_cols: row length.
        live_values: float32 values a column keeps alive at once; sets how many threads share a row so that each
            stays under about 128 registers of row data.
        max_block: longest row the kernel takes.

    Raises:
        ValueError: if the row is longer than `max_block`.
    """
    block = next_power_of_2(n_cols)
    if block > max_block:
        raise ValueError(f"rows of {n_cols} values are longer than the {max_block} this kernel holds in registers")
    threads = min(1024, max(32, block * live_values // 64))
    return RowLaunch(block=block, num_warps=next_power_of_2(threads // 32))
