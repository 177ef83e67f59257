"""NF4 weights, and their decoding into a dense buffer.

    w[i] = CODE[q[i]] * absmax[i // blocksize]
    absmax[b] = nested_code[a[b]] * nested_absmax[b // nested_blocksize] + nested_offset     (doubly quantized)

Dettmers et al. 2023, arXiv:2305.14314. The layout is bitsandbytes': q in row-major order of the [N, K] weight, two to a
byte with the first in the high bits. Each step is rounded to float32 as written and the product once more, to the
result's dtype, so the values are bitsandbytes' bit for bit. No gradient: the weight is frozen.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastlm_kernels._case import Case, build
from fastlm_kernels._launch import runs_triton, tl, triton
from fastlm_kernels._nf4_weight import BLOCK_ITEMS, NF4Weight

__all__ = ["CODE", "NF4Weight", "nf4_decode", "nf4_decode_reference", "nf4_decode_stacked"]

# N rows (output features), K columns (input features)

# QLoRA, appendix E, at the precision of float32
CODE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_NUM_WARPS = 4
# weights that one launch decodes
_MAX_WEIGHTS = 4


@triton.jit
def _code_table():
    # CODE as a [16] tensor; literals, since a kernel cannot index a Python tuple by a tensor
    index = tl.arange(0, 16)
    table = tl.where(index == 0, -1.0, tl.where(index == 15, 1.0, 0.0))
    table = tl.where(index == 1, -0.6961928009986877, table)
    table = tl.where(index == 2, -0.5250730514526367, table)
    table = tl.where(index == 3, -0.39491748809814453, table)
    table = tl.where(index == 4, -0.28444138169288635, table)
    table = tl.where(index == 5, -0.18477343022823334, table)
    table = tl.where(index == 6, -0.09105003625154495, table)
    table = tl.where(index == 8, 0.07958029955625534, table)
    table = tl.where(index == 9, 0.16093020141124725, table)
    table = tl.where(index == 10, 0.24611230194568634, table)
    table = tl.where(index == 11, 0.33791524171829224, table)
    table = tl.where(index == 12, 0.44070982933044434, table)
    table = tl.where(index == 13, 0.5626170039176941, table)
    return tl.where(index == 14, 0.7229568362236023, table)


@triton.jit
def _decode_program(
    program, packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, n_rows, n_cols,
    out_ptr, out_row, stride_out_row,
    BLOCKSIZE: tl.constexpr, NESTED_BLOCKSIZE: tl.constexpr, IS_NESTED: tl.constexpr, IS_CONTIGUOUS: tl.constexpr,
    ITEM_VALUES: tl.constexpr, BLOCK_ITEMS: tl.constexpr,
):  # fmt: skip
    # items program * BLOCK_ITEMS and following of a weight whose first row is row out_row of out
    # Only scalars are 64 bits wide: within a program, offsets are small.
    first_item = program.to(tl.int64) * BLOCK_ITEMS
    first_value = first_item * ITEM_VALUES
    first_block = first_value // BLOCKSIZE
    n_values = tl.cast(n_rows, tl.int64) * n_cols
    # words are whole; the last byte of an odd number of values is half full
    n_items = n_values // 8 if ITEM_VALUES == 8 else (n_values + 1) // 2
    item = tl.arange(0, BLOCK_ITEMS)
    mask_item = item < n_items - first_item
    bits = tl.load(packed_ptr + first_item + item, mask=mask_item, other=0).to(tl.int32)
    PROGRAM_BLOCKS: tl.constexpr = max(1, BLOCK_ITEMS * ITEM_VALUES // BLOCKSIZE)
    block = tl.arange(0, PROGRAM_BLOCKS)
    mask_block = block < (n_values + BLOCKSIZE - 1) // BLOCKSIZE - first_block
    absmax = tl.load(absmax_ptr + first_block + block, mask=mask_block, other=0)
    if IS_NESTED:
        absmax = tl.load(nested_code_ptr + absmax.to(tl.int32))
        absmax = absmax * tl.load(nested_absmax_ptr + first_block // NESTED_BLOCKSIZE) + tl.load(nested_offset_ptr)
    # value j of an item: bytes go up from the lowest bits of a word, the first value of a byte is its high half
    within = tl.arange(0, ITEM_VALUES)[None, :]
    index = (bits[:, None] >> ((within * 4) ^ 4)) & 15  # [BLOCK_ITEMS, ITEM_VALUES]
    values = tl.gather(_code_table(), tl.reshape(index, (BLOCK_ITEMS * ITEM_VALUES,)), 0)
    values = tl.reshape(values, (PROGRAM_BLOCKS, BLOCK_ITEMS * ITEM_VALUES // PROGRAM_BLOCKS)) * absmax[:, None]
    values = tl.reshape(values, (BLOCK_ITEMS, ITEM_VALUES))
    offs = item[:, None] * ITEM_VALUES + within
    mask = mask_item[:, None]
    if ITEM_VALUES == 2:
        mask = mask & (offs < n_values - first_value)
    if IS_CONTIGUOUS:
        out_ptrs = out_ptr + tl.cast(out_row, tl.int64) * n_cols + first_value + offs
    else:
        first_row = first_value // n_cols
        first_col = (first_value - first_row * n_cols).to(tl.int32)
        if ITEM_VALUES == 2:
            # a byte may hold the end of one row and the start of the next
            col = first_col + offs
            row = col // n_cols
            offs = col - row * n_cols + row.to(tl.int64) * stride_out_row
        else:
            # rows are whole words
            col = first_col + item * ITEM_VALUES
            row = col // n_cols
            offs = (col - row * n_cols + row.to(tl.int64) * stride_out_row)[:, None] + within
        out_ptrs = out_ptr + (out_row + first_row) * stride_out_row + offs
    tl.store(out_ptrs, values.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _nf4_decode_kernel(
    packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, n_rows,
    out_ptr, n_cols, stride_out_row,
    BLOCKSIZE: tl.constexpr, NESTED_BLOCKSIZE: tl.constexpr, IS_NESTED: tl.constexpr, IS_CONTIGUOUS: tl.constexpr,
    ITEM_VALUES: tl.constexpr, BLOCK_ITEMS: tl.constexpr,
):  # fmt: skip
    _decode_program(
        tl.program_id(0), packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, n_rows, n_cols,
        out_ptr, 0, stride_out_row,
        BLOCKSIZE, NESTED_BLOCKSIZE, IS_NESTED, IS_CONTIGUOUS, ITEM_VALUES, BLOCK_ITEMS,
    )  # fmt: skip


@triton.jit
def _n_programs(n_rows, n_cols, ITEM_VALUES: tl.constexpr, BLOCK_ITEMS: tl.constexpr):
    return tl.cdiv(tl.cast(n_rows, tl.int64) * n_cols, ITEM_VALUES * BLOCK_ITEMS).to(tl.int32)


@triton.jit
def _nf4_decode_stacked_kernel(
    packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, n_rows,
    packed_1_ptr, absmax_1_ptr, nested_absmax_1_ptr, nested_code_1_ptr, nested_offset_1_ptr, n_rows_1,
    packed_2_ptr, absmax_2_ptr, nested_absmax_2_ptr, nested_code_2_ptr, nested_offset_2_ptr, n_rows_2,
    packed_3_ptr, absmax_3_ptr, nested_absmax_3_ptr, nested_code_3_ptr, nested_offset_3_ptr, n_rows_3,
    out_ptr, n_cols, stride_out_row,
    COUNT: tl.constexpr, BLOCKSIZE: tl.constexpr, NESTED_BLOCKSIZE: tl.constexpr, IS_NESTED: tl.constexpr,
    IS_CONTIGUOUS: tl.constexpr, ITEM_VALUES: tl.constexpr, BLOCK_ITEMS: tl.constexpr,
):  # fmt: skip
    # the first programs decode the first of COUNT weights, and so on: `stop` is where the programs so far end
    program = tl.program_id(0)
    first_program = 0
    out_row = 0
    # Triton makes a constant of an argument that is 1, which a branch could not turn into another weight's number
    n_rows = tl.cast(n_rows, tl.int32)
    next_row = n_rows
    stop = _n_programs(n_rows, n_cols, ITEM_VALUES, BLOCK_ITEMS)
    if program >= stop:
        packed_ptr, absmax_ptr, n_rows = packed_1_ptr, absmax_1_ptr, n_rows_1
        first_program, out_row = stop, next_row
        if IS_NESTED:
            nested_absmax_ptr, nested_code_ptr = nested_absmax_1_ptr, nested_code_1_ptr
            nested_offset_ptr = nested_offset_1_ptr
    if COUNT > 2:
        stop += _n_programs(n_rows_1, n_cols, ITEM_VALUES, BLOCK_ITEMS)
        next_row += n_rows_1
        if program >= stop:
            packed_ptr, absmax_ptr, n_rows = packed_2_ptr, absmax_2_ptr, n_rows_2
            first_program, out_row = stop, next_row
            if IS_NESTED:
                nested_absmax_ptr, nested_code_ptr = nested_absmax_2_ptr, nested_code_2_ptr
                nested_offset_ptr = nested_offset_2_ptr
    if COUNT > 3:
        stop += _n_programs(n_rows_2, n_cols, ITEM_VALUES, BLOCK_ITEMS)
        next_row += n_rows_2
        if program >= stop:
            packed_ptr, absmax_ptr, n_rows = packed_3_ptr, absmax_3_ptr, n_rows_3
            first_program, out_row = stop, next_row
            if IS_NESTED:
                nested_absmax_ptr, nested_code_ptr = nested_absmax_3_ptr, nested_code_3_ptr
                nested_offset_ptr = nested_offset_3_ptr
    _decode_program(
        program - first_program, packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, n_rows,
        n_cols, out_ptr, out_row, stride_out_row,
        BLOCKSIZE, NESTED_BLOCKSIZE, IS_NESTED, IS_CONTIGUOUS, ITEM_VALUES, BLOCK_ITEMS,
    )  # fmt: skip


def _decode_torch(weight: NF4Weight, dtype: torch.dtype) -> Tensor:
    absmax = weight.absmax
    if weight.nested_absmax is not None and weight.nested_code is not None and weight.nested_offset is not None:
        nested = weight.nested_absmax.repeat_interleave(weight.nested_blocksize)[: absmax.numel()]
        absmax = weight.nested_code[absmax.int()] * nested + weight.nested_offset
    n_values = math.prod(weight.shape)
    values = _code_pairs(absmax.device).index_select(0, weight.packed.reshape(-1).int()).view(torch.float32)[:n_values]
    if n_values % weight.blocksize:
        values = torch.nn.functional.pad(values, (0, -n_values % weight.blocksize))
    values = values.view(-1, weight.blocksize).mul_(absmax.reshape(-1, 1))
    return values.to(dtype).reshape(-1)[:n_values].view(weight.shape)


@functools.lru_cache(maxsize=8)
def _code_pairs(device: torch.device) -> Tensor:
    """The two float32 values of each byte as one int64 [256]: gathering words is several times faster than pairs of floats."""
    code = torch.tensor(CODE)
    return torch.stack((code.repeat_interleave(16), code.repeat(16)), -1).view(torch.int64).view(-1).to(device)


def _decode_into(weights: Sequence[NF4Weight], out: Tensor) -> None:
    """Decode weights of one K below each other into the first rows and columns of `out`, which fits them."""
    if not runs_triton(out):
        first_row = 0
        for weight in weights:
            n_rows, n_cols = weight.shape
            out[first_row : first_row + n_rows, :n_cols].copy_(_decode_torch(weight, out.dtype))
            first_row += n_rows
        return
    n_weights = len(weights)
    start = first_row = 0
    while start < n_weights:
        layout, stop = weights[start].layout, start + 1
        while stop < n_weights and stop < start + _MAX_WEIGHTS and weights[stop].layout == layout:
            stop += 1
        group = weights[start:stop] if stop - start < n_weights else weights
        _launch(group, out[first_row:] if first_row else out)
        start = stop
        if start < n_weights:
            first_row += sum(weight.shape[0] for weight in group)


def _launch(weights: Sequence[NF4Weight], out: Tensor) -> None:
    """One kernel for up to _MAX_WEIGHTS weights of one layout and K."""
    n_programs = sum([weight.n_programs for weight in weights])
    if not n_programs:
        return
    first = weights[0]
    n_cols, stride = first.shape[1], out.stride(0)
    blocksize, item_values, is_nested = first.layout
    constants: dict[str, Any] = dict(
        BLOCKSIZE=blocksize, NESTED_BLOCKSIZE=first.nested_blocksize, IS_NESTED=is_nested,
        IS_CONTIGUOUS=stride == n_cols, ITEM_VALUES=item_values, BLOCK_ITEMS=BLOCK_ITEMS[item_values],
        # a fused multiply-add would skip the rounding between nested_code * nested_absmax and the offset
        num_warps=_NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    if len(weights) == 1:
        _nf4_decode_kernel[(n_programs,)](*first.operands, out, n_cols, stride, **constants)
        return
    operands = [operand for weight in weights for operand in weight.operands]
    operands += [None] * (len(first.operands) * (_MAX_WEIGHTS - len(weights)))
    _nf4_decode_stacked_kernel[(n_programs,)](*operands, out, n_cols, stride, COUNT=len(weights), **constants)


def nf4_decode(weight: NF4Weight, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Decode an NF4 weight to a dense one, in one launch and without waiting for the device.

    Args:
        weight: [N, K]. Its values are bitsandbytes' exactly where `dtype` is weight.dtype.
        dtype: of the result: float16, bfloat16 or float32.
        out: [N, K] of that dtype, unit column stride and any row stride (rows of a larger buffer); overwritten. None
            makes a new one.

    Returns:
        [N, K], `out` if given.

    Raises:
        ValueError: if `out` has another shape, dtype or device, or its columns have another stride than 1.
        TypeError: for a dtype that the device's kernels do not take.

    Reference: Dettmers et al. 2023, arXiv:2305.14314.
    """
    n_rows, n_cols = weight.shape
    if out is None:
        out = torch.empty((n_rows, n_cols), dtype=dtype, device=weight.device)
    elif out.shape != (n_rows, n_cols) or out.dtype != dtype or out.device != weight.device:
        raise ValueError(
            f"out must be [{n_rows}, {n_cols}] {dtype} on {weight.device}, got {tuple(out.shape)} "
            f"{out.dtype} on {out.device}"
        )
    elif out.stride(1) != 1 and n_cols > 1:
        raise ValueError(f"out must have unit column stride, got strides {out.stride()}")
    _decode_into((weight,), out)
    return out


def nf4_decode_stacked(weights: Sequence[NF4Weight], out: Tensor) -> Tensor:
    """Decode NF4 weights that share their input below each other, up to four in a launch, without waiting for the device.

    Args:
        weights: [N_i, K] each, at least one. Those of one block size and kind of absmax that follow each other are
            decoded together.
        out: [sum N or more, K or more], float16, bfloat16 or float32, unit column stride and any row stride. Its first
            sum N rows and K columns are overwritten, the rest is left as it is. Values are bitsandbytes' exactly
            where its dtype is the weight's.

    Returns:
        `out`.

    Raises:
        ValueError: without a weight, if the weights differ in K, or if `out` is too small, lies on another device or
            has another column stride than 1.
        TypeError: for a dtype of `out` that the device's kernels do not take.

    Reference: Dettmers et al. 2023, arXiv:2305.14314.
    """
    if not weights:
        raise ValueError("at least one weight is needed, got none")
    n_rows, n_cols, device = 0, weights[0].shape[1], out.device
    for weight in weights:
        n, k = weight.shape
        if k != n_cols or weight.device != device:
            raise ValueError(
                f"weights must have {n_cols} columns, as the first has, and lie on {device}, as out does; got "
                f"{tuple(weight.shape)} on {weight.device}"
            )
        n_rows += n
    shape = out.shape
    if len(shape) != 2 or shape[0] < n_rows or shape[1] < n_cols or (out.stride(1) != 1 and n_cols > 1):
        raise ValueError(
            f"out must have at least {n_rows} rows and {n_cols} columns and unit column stride, got shape "
            f"{tuple(out.shape)} and strides {out.stride()}"
        )
    _decode_into(weights, out)
    return out


def nf4_decode_reference(weight, dtype=None, out=None):
    """The weight in float64, whatever `dtype`: its exact value."""
    absmax = weight.absmax.double()
    if weight.is_nested:
        nested = weight.nested_absmax.double().repeat_interleave(weight.nested_blocksize)[: absmax.numel()]
        absmax = weight.nested_code.double()[weight.absmax.long()] * nested + weight.nested_offset.double()
    n_values = math.prod(weight.shape)
    first, second = weight.packed.reshape(-1) >> 4, weight.packed.reshape(-1) & 15
    index = torch.stack((first, second), -1).reshape(-1)[:n_values].long()
    code = torch.tensor(CODE, dtype=torch.float64, device=absmax.device)
    return (code[index] * absmax.repeat_interleave(weight.blocksize)[:n_values]).view(weight.shape)


def _make(shape, dtype, device, generator, is_nested, blocksize=64):
    n_values = math.prod(shape)
    n_blocks = -(-n_values // blocksize)

    def integers(n):
        return torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator).to(device)

    def floats(*size):
        return torch.rand(size, generator=generator).add_(0.01).to(device)

    nested = dict(nested_absmax=floats(-(-n_blocks // 256)), nested_code=floats(256), nested_offset=floats())
    weight = NF4Weight(
        packed=integers((n_values + 1) // 2),
        absmax=integers(n_blocks) if is_nested else floats(n_blocks),
        shape=shape,
        blocksize=blocksize,
        dtype=dtype,
        **(nested if is_nested else {}),
    )
    return dict(weight=weight, dtype=dtype)


def _strided(inputs):
    # rows of a larger buffer, as in a weight augmented by extra columns
    n_rows, n_cols = inputs["weight"].shape
    buffer = torch.empty((n_rows + 1, n_cols + 8), dtype=inputs["dtype"], device=inputs["weight"].packed.device)
    return dict(inputs, out=buffer[:n_rows, :n_cols])


def _builds(cc, dtype, counts):
    kinds = ("packed", "absmax", "nested_absmax", "nested_code", "nested_offset")
    for (item_values, packed), count in itertools.product(((8, "*i32"), (2, "*u8")), counts):
        # fewer weights only leave branches out
        for is_nested, is_contiguous in ((True, True), (False, False)) if count == counts[0] else ((True, False),):
            constants: dict[str, Any] = dict(
                BLOCKSIZE=64, NESTED_BLOCKSIZE=256, IS_NESTED=is_nested, IS_CONTIGUOUS=is_contiguous,
                ITEM_VALUES=item_values, BLOCK_ITEMS=BLOCK_ITEMS[item_values],
            )  # fmt: skip
            constants |= dict(COUNT=count) if count > 1 else {}
            types: dict[str, str] = {}
            n_rows = []
            for i in range(_MAX_WEIGHTS if count > 1 else 1):
                number = f"_{i}" if i else ""
                pointers = [f"{kind}{number}_ptr" for kind in kinds]
                types |= dict.fromkeys(pointers, "*fp32") | {pointers[0]: packed}
                types |= {pointers[1]: "*u8"} if is_nested else {}
                n_rows.append(f"n_rows{number}")
                absent = [*pointers, n_rows[-1]] if i >= count else [] if is_nested else pointers[2:]
                constants |= dict.fromkeys(absent)
            kernel = _nf4_decode_stacked_kernel if count > 1 else _nf4_decode_kernel
            made = build(kernel, dtype, constants, _NUM_WARPS, types)
            aligned = tuple(name for name in (*made.multiples_of_16, *n_rows) if name not in constants)
            yield dataclasses.replace(made, multiples_of_16=aligned, enable_fp_fusion=False)


def nf4_decode_stacked_reference(weights, out):
    return torch.cat([nf4_decode_reference(weight) for weight in weights])


def _make_stack(shape, dtype, device, generator):
    # as q, k and v with grouped heads
    n_rows, n_cols = shape
    rows = (n_rows - 2 * (n_rows // 6), n_rows // 6, n_rows // 6)
    weights = [_make((n, n_cols), dtype, device, generator, is_nested=True)["weight"] for n in rows]
    return dict(weights=weights, out=torch.empty(shape, dtype=dtype, device=device))


def _strided_stack(inputs):
    out = inputs["out"]
    return dict(inputs, out=out.new_empty((out.shape[0], out.shape[1] + 8))[:, : out.shape[1]])


def _case(name, is_nested):
    return Case(
        name=name,
        op=nf4_decode,
        reference=nf4_decode_reference,
        eager=lambda weight, dtype: nf4_decode_reference(weight).float().to(dtype),
        make=functools.partial(_make, is_nested=is_nested),
        shapes={
            "typical": (24, 256), "several-programs": (48, 704), "odd": (7, 41), "rows-of-bytes": (5, 46),
            "one-row": (1, 128), "one-value": (1, 1), "empty": (0, 64),
        },
        gradients=(),
        strided=_strided,
        bench_shapes={
            "Llama-8B-q": (4096, 4096), "Llama-8B-k": (1024, 4096), "Llama-8B-up": (14336, 4096),
            "Llama-1B-up": (8192, 2048), "Qwen3-4B-up": (9728, 2560),
        },
        ideal=lambda shape, size: ((0.5 + 1 / 64 + size) * shape[0] * shape[1], 1.0 * shape[0] * shape[1]),
        builds=functools.partial(_builds, counts=(1,)) if is_nested else None,
    )  # fmt: skip


CASE = _case("nf4_decode", is_nested=True)
PLAIN_CASE = _case("nf4_decode_plain", is_nested=False)
STACKED_CASE = Case(
    name="nf4_decode_stacked",
    op=nf4_decode_stacked,
    reference=nf4_decode_stacked_reference,
    eager=lambda weights, out: nf4_decode_stacked_reference(weights, out).float().to(out.dtype),
    make=_make_stack,
    shapes={
        "typical": (48, 128), "several-programs": (60, 704), "odd": (9, 41), "rows-of-bytes": (6, 46),
        "one-row": (1, 128), "empty": (0, 64),
    },
    gradients=(),
    strided=_strided_stack,
    bench_shapes={"Llama-8B-qkv": (6144, 4096), "Llama-1B-qkv": (3072, 2048), "Qwen3-4B-qkv": (6144, 2560)},
    ideal=CASE.ideal,
    builds=functools.partial(_builds, counts=(4, 3, 2)),
)  # fmt: skip
