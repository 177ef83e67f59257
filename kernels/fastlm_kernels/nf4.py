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
import math

import torch
from torch import Tensor

from fastlm_kernels._case import Case, build
from fastlm_kernels._launch import runs_triton, tl, triton

# N rows (output features), K columns (input features)

# QLoRA, appendix E, at the precision of float32
CODE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
# items that one program decodes; its values divide blocksize * nested_blocksize, so that it lies in one nested block
_BLOCK_ITEMS = {8: 512, 2: 1024}
_NUM_WARPS = 4


@dataclasses.dataclass(frozen=True)
class NF4Weight:
    """A weight [N, K] in NF4, by reference: nothing is copied.

    Attributes:
        packed: uint8, contiguous, ceil(N * K / 2) values in any shape.
        absmax: one value a block of `blocksize` weights: float32, or uint8 with the nested fields.
        shape: (N, K).
        blocksize: weights that share one absmax.
        nested_absmax: float32, one value for `nested_blocksize` blocks; None where absmax is float32.
        nested_code: float32 [256], what the values of a uint8 absmax stand for.
        nested_offset: float32 scalar on the weight's device, added to each absmax. It is read there, never by the host.
        nested_blocksize: blocks that share one nested absmax.
        dtype: of the weight that was quantized.

    Raises:
        ValueError: for fields of other sizes or dtypes than these.
    """

    packed: Tensor
    absmax: Tensor
    shape: tuple[int, int]
    blocksize: int = 64
    nested_absmax: Tensor | None = None
    nested_code: Tensor | None = None
    nested_offset: Tensor | None = None
    nested_blocksize: int = 256
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.blocksize not in _BLOCK_SIZES or self.nested_blocksize != 256:
            raise ValueError(
                f"blocksize must be one of {_BLOCK_SIZES} and nested_blocksize 256, got {self.blocksize} and "
                f"{self.nested_blocksize}"
            )
        nested = (self.nested_absmax, self.nested_code, self.nested_offset)
        if any((tensor is None) != (self.nested_absmax is None) for tensor in nested):
            raise ValueError("give nested_absmax, nested_code and nested_offset together, or none of them")
        n_values = math.prod(self.shape)
        n_blocks = -(-n_values // self.blocksize)
        for name, tensor, size, dtype in (
            ("packed", self.packed, (n_values + 1) // 2, torch.uint8),
            ("absmax", self.absmax, n_blocks, torch.uint8 if self.is_nested else torch.float32),
            ("nested_absmax", self.nested_absmax, -(-n_blocks // self.nested_blocksize), torch.float32),
            ("nested_code", self.nested_code, 256, torch.float32),
            ("nested_offset", self.nested_offset, 1, torch.float32),
        ):
            if tensor is not None and (tensor.numel() != size or tensor.dtype != dtype or not tensor.is_contiguous()):
                raise ValueError(
                    f"{name} of a weight {tuple(self.shape)} must be {size} contiguous {dtype} values, got "
                    f"{tensor.numel()} of {tensor.dtype}"
                )

    @property
    def is_nested(self) -> bool:
        """Whether absmax is itself quantized."""
        return self.nested_absmax is not None


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
def _nf4_decode_kernel(
    packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, out_ptr,
    n_items, n_values, n_cols, stride_out_row,
    BLOCKSIZE: tl.constexpr, NESTED_BLOCKSIZE: tl.constexpr, IS_NESTED: tl.constexpr, IS_CONTIGUOUS: tl.constexpr,
    ITEM_VALUES: tl.constexpr, BLOCK_ITEMS: tl.constexpr,
):  # fmt: skip
    # An item is what is loaded at once: a word of 8 values, or a byte of 2 where words would not fit. Only scalars are
    # 64 bits wide: within a program, offsets are small.
    first_item = tl.program_id(0).to(tl.int64) * BLOCK_ITEMS
    first_value = first_item * ITEM_VALUES
    first_block = first_value // BLOCKSIZE
    item = tl.arange(0, BLOCK_ITEMS)
    mask_item = item < n_items - first_item
    bits = tl.load(packed_ptr + first_item + item, mask=mask_item, other=0).to(tl.int32)
    absmax = tl.load(absmax_ptr + first_block + item * ITEM_VALUES // BLOCKSIZE, mask=mask_item, other=0)
    if IS_NESTED:
        absmax = tl.load(nested_code_ptr + absmax.to(tl.int32))
        absmax = absmax * tl.load(nested_absmax_ptr + first_block // NESTED_BLOCKSIZE) + tl.load(nested_offset_ptr)
    # value j of an item: bytes go up from the lowest bits of a word, the first value of a byte is its high half
    within = tl.arange(0, ITEM_VALUES)[None, :]
    index = (bits[:, None] >> ((within * 4) ^ 4)) & 15  # [BLOCK_ITEMS, ITEM_VALUES]
    values = tl.gather(_code_table(), tl.reshape(index, (BLOCK_ITEMS * ITEM_VALUES,)), 0)
    values = tl.reshape(values, (BLOCK_ITEMS, ITEM_VALUES)) * absmax[:, None]
    offs = item[:, None] * ITEM_VALUES + within
    mask = mask_item[:, None]
    if ITEM_VALUES == 2:
        # the last byte of an odd number of values is half full
        mask = mask & (offs < n_values - first_value)
    if IS_CONTIGUOUS:
        out_ptrs = out_ptr + first_value + offs
    else:
        # rows are whole items: all values of an item share its row
        first_row = first_value // n_cols
        col = (first_value - first_row * n_cols).to(tl.int32) + item * ITEM_VALUES
        row = col // n_cols
        row_offs = (col - row * n_cols) + row.to(tl.int64) * stride_out_row
        out_ptrs = out_ptr + first_row * stride_out_row + row_offs[:, None] + within
    tl.store(out_ptrs, values.to(out_ptr.dtype.element_ty), mask=mask)


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
        out = torch.empty((n_rows, n_cols), dtype=dtype, device=weight.packed.device)
    elif tuple(out.shape) != (n_rows, n_cols) or out.dtype != dtype or out.device != weight.packed.device:
        raise ValueError(
            f"out must be [{n_rows}, {n_cols}] {dtype} on {weight.packed.device}, got {tuple(out.shape)} "
            f"{out.dtype} on {out.device}"
        )
    if out.stride(1) != 1 and n_cols > 1:
        raise ValueError(f"out must have unit column stride, got strides {out.stride()}")
    if not runs_triton(weight.packed, dtype):
        return out.copy_(_decode_torch(weight, dtype))
    is_contiguous = out.is_contiguous()
    if not is_contiguous and n_cols % 2:
        # a byte may hold the end of one row and the start of the next
        return out.copy_(nf4_decode(weight, dtype))
    n_values = n_rows * n_cols
    # words need rows of whole words and memory that they divide
    packed = weight.packed.view(-1)
    has_words = (
        n_values if is_contiguous else n_cols
    ) % 8 == 0 and packed.data_ptr() % 4 == 0 == packed.storage_offset() % 4
    packed = packed.view(torch.int32) if has_words else packed
    item_values = 8 if has_words else 2
    if n_values:
        block_items = _BLOCK_ITEMS[item_values]
        _nf4_decode_kernel[(triton.cdiv(packed.numel(), block_items),)](
            packed, weight.absmax, weight.nested_absmax, weight.nested_code, weight.nested_offset, out,
            packed.numel(), n_values, n_cols, out.stride(0),
            BLOCKSIZE=weight.blocksize, NESTED_BLOCKSIZE=weight.nested_blocksize, IS_NESTED=weight.is_nested,
            IS_CONTIGUOUS=is_contiguous, ITEM_VALUES=item_values, BLOCK_ITEMS=block_items,
            # a fused multiply-add would skip the rounding between nested_code * nested_absmax and the offset
            num_warps=_NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
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


def _builds(cc, dtype):
    types = dict(absmax_ptr="*fp32", nested_absmax_ptr="*fp32", nested_code_ptr="*fp32", nested_offset_ptr="*fp32")
    for item_values, packed in ((8, "*i32"), (2, "*u8")):
        for is_nested, is_contiguous in ((True, True), (True, False), (False, True)):
            constants = dict(
                BLOCKSIZE=64, NESTED_BLOCKSIZE=256, IS_NESTED=is_nested, IS_CONTIGUOUS=is_contiguous,
                ITEM_VALUES=item_values, BLOCK_ITEMS=_BLOCK_ITEMS[item_values],
            )  # fmt: skip
            kinds = dict(types, packed_ptr=packed, absmax_ptr="*u8" if is_nested else "*fp32")
            made = build(_nf4_decode_kernel, dtype, constants, _NUM_WARPS, kinds)
            aligned = (*made.multiples_of_16, "n_items", "n_values")
            yield dataclasses.replace(made, multiples_of_16=aligned, enable_fp_fusion=False)


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
        builds=_builds if is_nested else None,
    )  # fmt: skip


CASE = _case("nf4_decode", is_nested=True)
PLAIN_CASE = _case("nf4_decode_plain", is_nested=False)
