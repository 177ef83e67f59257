"""A weight in NF4 as plain tensors, and what its kernels ask of it."""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from torch import Tensor

_BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
# items that one program decodes; its values divide blocksize * nested_blocksize, so that it lies in one nested block
BLOCK_ITEMS = {8: 512, 2: 1024}


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

    # What every decoding asks is answered once: fields never change.

    @functools.cached_property
    def is_nested(self) -> bool:
        """Whether absmax is itself quantized."""
        return self.nested_absmax is not None

    @functools.cached_property
    def device(self) -> torch.device:
        return self.packed.device

    @functools.cached_property
    def layout(self) -> tuple[int, int, bool]:
        """What weights must share to be decoded by one launch: blocksize, values of an item, whether absmax is nested.

        An item is what the kernel loads at once: a word of 8 values, or a byte of 2 where rows are not whole words of
        aligned memory.
        """
        packed = self.packed.view(-1)
        has_words = self.shape[1] % 8 == 0 and packed.data_ptr() % 4 == 0 == packed.storage_offset() % 4
        return self.blocksize, 8 if has_words else 2, self.is_nested

    @functools.cached_property
    def n_programs(self) -> int:
        """Kernel programs that decode this weight."""
        item_values = self.layout[1]
        return -(-math.prod(self.shape) // (item_values * BLOCK_ITEMS[item_values]))

    @functools.cached_property
    def operands(self) -> tuple[Tensor | int | None, ...]:
        """The kernel's arguments for this weight, in its order."""
        packed = self.packed.view(-1).view(torch.int32) if self.layout[1] == 8 else self.packed
        return packed, self.absmax, self.nested_absmax, self.nested_code, self.nested_offset, self.shape[0]
