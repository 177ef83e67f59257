"""Merging into another copy of the base model: its 16-bit checkpoint, where training ran on 4-bit or 8-bit weights of it."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from fastlm import files, quant
from fastlm.export.weights import PLAIN_DTYPES, Source

# relative distance, root mean square, between a weight and its quantized form: NF4 makes about 0.09, LLM.int8() 0.01
_FAR = 0.25
_ROWS = 1024


def with_base(weights: Mapping[str, Source], base: str | os.PathLike[str]) -> dict[str, Source]:
    """The same weights, with adapters added to another checkpoint's instead of the live ones.

    Weights that are quantized or have low-rank updates are read from it; what was trained whole, and everything else, stays the live
    model's.

    Args:
        weights: of the live model.
        base: folder of the same model in 16 or 32 bits, as safetensors files.

    Raises:
        ValueError: if a weight is missing there, has another shape, or is quantized itself.
        FileNotFoundError: if there are no weights.
    """
    folder = Path(base)
    if not folder.is_dir():
        raise ValueError(
            f"base must be the folder of the 16-bit model that this one was loaded from, got {os.fspath(base)!r}"
        )
    files.check_weights(str(folder), "model", allow_pickle=False)
    where = {
        name: (path, entry)
        for path in sorted(folder.glob("*.safetensors"))
        for name, entry in files.safetensors_header(str(path)).items()
    }
    found = dict(weights)
    for name, source in weights.items():
        if source.packed is None and not source.updates:
            continue
        if name not in where:
            raise ValueError(f"{folder} has no weight {name}: base must be the model that this one was loaded from")
        path, entry = where[name]
        if tuple(entry["shape"]) != source.shape:
            raise ValueError(
                f"{name} has shape {entry['shape']} in {folder}, and {list(source.shape)} in the live model"
            )
        if entry["dtype"] not in ("BF16", "F16", "F32"):
            raise ValueError(f"{name} is stored as {entry['dtype']} in {folder}: base must be in 16 or 32 bits")
        found[name] = replace(source, other_base=functools.partial(_read, path, name, source))
    if not any(source.other_base for source in found.values()):
        raise ValueError("base was given, but no weight is quantized or has an adapter: leave it out")
    return found


def _read(path: Path, name: str, live: Source) -> Tensor:
    """
    Raises:
        ValueError: if the weight is too far from the live one to be what that was quantized from.
    """
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    tensor = tensor.to(live.tensor.device)
    own = live.tensor.detach() if live.packed is None else quant.decode_weight(live.packed)
    assert own.dtype in PLAIN_DTYPES
    square = torch.zeros(2, dtype=torch.float64, device=tensor.device)
    for start in range(0, len(tensor), _ROWS):
        rows = slice(start, start + _ROWS)
        wanted = tensor[rows].float()
        square[0] += (own[rows].float() - wanted).square().sum()
        square[1] += wanted.square().sum()
    distance = (square[0] / square[1].clamp(min=1e-30)).sqrt().item()
    if not distance <= _FAR:
        raise ValueError(
            f"the live weight is {distance:.2f} of its size away from the one in {path.parent}, quantization alone makes at most "
            f"{_FAR}: base must be the model that this one was loaded from"
        )
    return tensor
