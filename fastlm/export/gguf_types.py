"""Which format each tensor of a GGUF file gets, and its bytes.

A quantization method is a default format and a mixture: some tensors get more bits, by their part and layer. The mixtures, and what
replaces a format whose blocks do not fit a tensor's rows, are those of llama-quant.cpp in llama.cpp without an importance matrix
(https://github.com/ggml-org/llama.cpp, MIT licence).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastlm.export import gguf_kquants

# method -> the file type that the file names, the format of most tensors
METHODS: Mapping[str, tuple[str, str]] = {
    "f32": ("ALL_F32", "F32"),
    "f16": ("MOSTLY_F16", "F16"),
    "bf16": ("MOSTLY_BF16", "BF16"),
    "q8_0": ("MOSTLY_Q8_0", "Q8_0"),
    "q4_0": ("MOSTLY_Q4_0", "Q4_0"),
    "q4_1": ("MOSTLY_Q4_1", "Q4_1"),
    "q5_0": ("MOSTLY_Q5_0", "Q5_0"),
    "q5_1": ("MOSTLY_Q5_1", "Q5_1"),
    "q2_k": ("MOSTLY_Q2_K", "Q2_K"),
    "q3_k_s": ("MOSTLY_Q3_K_S", "Q3_K"),
    "q3_k_m": ("MOSTLY_Q3_K_M", "Q3_K"),
    "q3_k_l": ("MOSTLY_Q3_K_L", "Q3_K"),
    "q4_k_s": ("MOSTLY_Q4_K_S", "Q4_K"),
    "q4_k_m": ("MOSTLY_Q4_K_M", "Q4_K"),
    "q5_k_s": ("MOSTLY_Q5_K_S", "Q5_K"),
    "q5_k_m": ("MOSTLY_Q5_K_M", "Q5_K"),
    "q6_k": ("MOSTLY_Q6_K", "Q6_K"),
}
ALIASES: Mapping[str, str] = {
    "q3_k": "q3_k_m",
    "q4_k": "q4_k_m",
    "q5_k": "q5_k_m",
    "not_quantized": "f16",
    "fast_quantized": "q8_0",
    "quantized": "q4_k_m",
}
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCK = dict.fromkeys(gguf_kquants.KQUANTS, gguf_kquants.SUPER) | dict.fromkeys(_PLAIN, 1)
# a format whose blocks do not fit -> the one with shorter blocks; what does not fit either is stored as F16
_SMALLER = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
# rows are quantized in blocks of this many values, so that float32 temporaries stay small beside the tensor
_ROWS_AT_ONCE = 2**24


def library() -> Any:
    """The package `gguf`.

    Raises:
        ImportError: with the way out, if it is not installed.
    """
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise ImportError("writing GGUF files needs the package gguf: install it with `pip install gguf`") from error


def parse_methods(given: Any) -> list[str]:
    """Names of METHODS, in the order given, each once.

    Raises:
        TypeError, ValueError: for anything else.
    """
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names) or not names:
        raise TypeError(f"quantization_method must be a name or a list of names, got {given!r}")
    found = []
    for name in names:
        method = ALIASES.get(name.lower(), name.lower())
        if method not in METHODS:
            raise ValueError(
                f"quantization_method must be one of {', '.join(map(repr, METHODS))} (or {', '.join(map(repr, ALIASES))}), "
                f"got {name!r}"
            )
        if method not in found:
            found.append(method)
    return found


@dataclass(frozen=True)
class Shape:
    """What the mixtures ask of a model.

    Attributes:
        n_layers: decoder layers.
        n_groups: query heads to a key head.
        is_70b: the 80-layer models with grouped queries, whose value projection is worth more bits.
        has_head: the file holds an output matrix of its own.
    """

    n_layers: int
    n_groups: int
    is_70b: bool
    has_head: bool


def _more_bits(layer: int, n_layers: int) -> bool:
    first = n_layers // 8
    return layer < first or layer >= 7 * n_layers // 8 or (layer - first) % 3 == 2


def _value_format(method: str, default: str, layer: int, shape: Shape) -> str:
    found = default
    if method == "q2_k":
        found = "Q4_K" if shape.n_groups >= 4 else "Q3_K"
    elif method == "q3_k_m":
        found = "Q5_K" if layer < 2 else "Q4_K"
    elif method == "q3_k_l" or (method == "q4_k_s" and layer < 4):
        found = "Q5_K"
    elif method in ("q4_k_m", "q5_k_m") and _more_bits(layer, shape.n_layers):
        found = "Q6_K"
    return "Q5_K" if shape.is_70b and found in ("Q3_K", "Q4_K") else found


def _down_format(method: str, default: str, layer: int, shape: Shape) -> str:
    if method == "q2_k":
        return "Q3_K"
    if method == "q3_k_m":
        return "Q5_K" if layer < shape.n_layers // 16 else "Q4_K"
    if method == "q3_k_l" or (method == "q4_k_s" and layer < shape.n_layers // 8):
        return "Q5_K"
    if method in ("q4_k_m", "q5_k_m") and _more_bits(layer, shape.n_layers):
        return "Q6_K"
    return default


def choose_format(method: str, name: str, n_dims: int, n_columns: int, shape: Shape) -> str:
    """The format of one tensor: "F32", "F16", "Q4_K", …

    Args:
        method: of METHODS.
        name: of the tensor in the file.
        n_dims: vectors and norms stay float32.
        n_columns: values in a row.
        shape: of the model.
    """
    default = METHODS[method][1]
    if n_dims < 2 or name.endswith("_norm.weight"):
        return "F32"
    if default in _PLAIN:
        return default
    parts = name.split(".")
    layer, part = (int(parts[1]), parts[2]) if parts[0] == "blk" else (-1, parts[0])
    found = default
    if part == "output" or (part == "token_embd" and not shape.has_head):
        if n_columns % _block(default):
            found = "Q8_0"
        elif default != "Q8_0":
            found = "Q6_K"
    elif part in ("attn_v", "attn_qkv"):
        found = _value_format(method, default, layer, shape)
    elif part == "ffn_down":
        found = _down_format(method, default, layer, shape)
    elif part == "attn_output":
        found = {"q2_k": "Q3_K", "q3_k_m": "Q4_K", "q3_k_l": "Q5_K"}.get(method, default)
    if n_columns % _block(found):
        found = _SMALLER.get(found, found)
    return "F16" if n_columns % _block(found) else found


def _block(name: str) -> int:
    """Values that one block of a format holds."""
    return _BLOCK.get(name, 32)


def byte_shape(shape: tuple[int, ...], name: str) -> tuple[int, ...]:
    """Shape of a tensor in the file, as bytes."""
    gguf = library()
    return tuple(gguf.quants.quant_shape_to_byte_shape(shape, gguf.GGMLQuantizationType[name]))


def announce(writer: Any, name: str, shape: tuple[int, ...], kind: str) -> None:
    """Give a gguf.GGUFWriter a tensor's place in the table of tensors; its values follow later, in the same order."""
    size = byte_shape(shape, kind)
    writer.add_tensor_info(name, size, np.dtype("uint8"), math.prod(size), library().GGMLQuantizationType[kind])


def _row_blocks(tensor: Tensor) -> Iterable[Tensor]:
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows.split(max(1, _ROWS_AT_ONCE // rows.shape[1]))


def encode(tensor: Tensor, name: str, device: torch.device) -> Any:
    """A tensor in one of the formats.

    Args:
        tensor: of any float dtype, on the CPU.
        name: of the format.
        device: where K-quants are computed.

    Returns:
        a numpy array: float32 or float16 of the same shape, else uint8 of `byte_shape`.

    Raises:
        ValueError: if a value does not fit float16.
    """
    gguf = library()
    if name == "F32":
        return tensor.float().numpy()
    if name == "F16":
        half = tensor.to(torch.float16)
        if not half.isfinite().all():
            raise ValueError("the weight has values beyond float16's range; use quantization_method='bf16'")
        return half.numpy()
    if name == "BF16":
        return tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
    if name in gguf_kquants.KQUANTS:
        parts = [gguf_kquants.quantize(rows.to(device), name) for rows in _row_blocks(tensor)]
    else:
        kind = gguf.GGMLQuantizationType[name]
        parts = [torch.from_numpy(gguf.quants.quantize(rows.float().numpy(), kind)) for rows in _row_blocks(tensor)]
    return torch.cat(parts).reshape(byte_shape(tuple(tensor.shape), name)).numpy()
