"""Files of a checkpoint on disk, checked before any library reads them, so that a damaged one is named."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any


def read_json(path: str) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ValueError: naming the file, if it holds anything else.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def safetensors_header(path: str) -> dict[str, Any]:
    """Names, dtypes and shapes in a safetensors file, which is checked to be whole.

    Raises:
        ValueError: naming the file, if it is empty, cut or something else. Format: github.com/huggingface/safetensors, README.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= size - 8:
            raise ValueError(
                f"{path} is damaged: {size} bytes that do not start with a safetensors header. Download or save it again"
            )
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        except (ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
            # no JSON, or JSON of another shape
            raise ValueError(f"{path} is damaged: its safetensors header cannot be read ({error})") from error
    needed = 8 + length + end
    if size != needed:
        raise ValueError(
            f"{path} is damaged: {size} bytes, but its header describes {needed}. Download or save it again"
        )
    return header


def check_weights(directory: str, stem: str, allow_pickle: bool) -> None:
    """Check the weight files of a local model or adapter before anything is loaded.

    Args:
        directory: to look in.
        stem: "model" or "adapter_model".
        allow_pickle: whether the user asked for pickled weights.

    Raises:
        FileNotFoundError: if there are none, or the index names a file that is missing.
        ValueError: if a file is damaged, or weights are pickled and nobody asked for that.
    """
    files = sorted(os.listdir(directory))
    index = os.path.join(directory, f"{stem}.safetensors.index.json")
    if os.path.exists(index):
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index} is damaged: it holds no weight_map")
        wanted = sorted(set(map(str, weight_map.values())))
        missing = [name for name in wanted if name not in files]
        if missing:
            raise FileNotFoundError(f"{directory} lacks {', '.join(missing)}, which {os.path.basename(index)} names")
    else:
        wanted = [name for name in files if name == f"{stem}.safetensors"]
    for name in wanted:
        safetensors_header(os.path.join(directory, name))
    if wanted or allow_pickle:
        return
    pickled = [name for name in files if name.endswith((".bin", ".pt", ".pth"))]
    if pickled:
        raise ValueError(
            f"{directory} holds only pickled weights ({', '.join(pickled)}), which can run code when they are loaded. "
            "If you trust their author, pass use_safetensors=False"
        )
    raise FileNotFoundError(f"{directory} holds no weights: {stem}.safetensors or its shards are missing")
