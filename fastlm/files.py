"""Files of a checkpoint on disk, checked before any library reads them, so that a damaged one is named."""

from __future__ import annotations

import json
import os
import re
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
    except (ValueError, RecursionError) as error:
        # no JSON, no UTF-8, a number too long to read, or brackets too deep
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
            spans = sorted((tensor["data_offsets"][0], tensor["data_offsets"][1]) for tensor in header.values())
            end = spans[-1][1] if spans else 0
            is_seamless = all(
                before[1] == after[0] for before, after in zip([(0, 0), *spans], [*spans, (end, end)], strict=True)
            )
        except (ValueError, AttributeError, KeyError, TypeError, IndexError, RecursionError) as error:
            # no JSON, or JSON of another shape
            raise ValueError(f"{path} is damaged: its safetensors header cannot be read ({error})") from error
    needed = 8 + length + end
    if size != needed:
        raise ValueError(
            f"{path} is damaged: {size} bytes, but its header describes {needed}. Download or save it again"
        )
    if not is_seamless:
        raise ValueError(f"{path} is damaged: its tensors overlap or leave holes. Download or save it again")
    return header


def _shards(index: str) -> list[str]:
    """Names of the files that an index names.

    Raises:
        ValueError: if it names anything that is not a file beside it.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index} is damaged: it holds no weight_map")
    names = sorted(set(map(str, weight_map.values())))
    outside = [name for name in names if name != os.path.basename(name) or name in ("", ".", "..") or "\0" in name]
    if outside:
        raise ValueError(
            f"{index} names {outside[0]!r}, which is no file beside it: nothing outside the folder is read"
        )
    return names


def check_weights(directory: str, stem: str, allow_pickle: bool) -> None:
    """Check the weight files of a local model or adapter before anything is loaded.

    Args:
        directory: to look in.
        stem: "model" or "adapter_model".
        allow_pickle: whether the user asked for pickled weights.

    Raises:
        FileNotFoundError: if there are none, or the index names a file that is missing.
        ValueError: if a file is damaged, an index names a file elsewhere, or weights are pickled and nobody asked for that.
    """
    files = sorted(os.listdir(directory))
    index = os.path.join(directory, f"{stem}.safetensors.index.json")
    for other in (name for name in files if name.endswith(".index.json")):
        _shards(os.path.join(directory, other))
    if os.path.exists(index):
        wanted = _shards(index)
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


def check_sizes(directory: str, settings: dict[str, Any]) -> None:
    """Check that the model that a config describes is not far larger than its weights: it would be made before anybody compares them.

    Args:
        directory: of the model, whose safetensors headers are whole.
        settings: of its text model, as in config.json.

    Raises:
        ValueError: naming the setting.
    """
    headers = [safetensors_header(str(path)) for path in sorted(Path(directory).glob("*.safetensors"))]
    if not headers:
        return
    n_tensors = sum(map(len, headers))
    layers = settings.get("num_hidden_layers")
    if isinstance(layers, int) and layers > n_tensors:
        raise ValueError(f"{directory}/config.json has num_hidden_layers={layers}, its weights are {n_tensors} tensors")
    # 4-bit weights have two entries a byte
    most = 2 * sum(
        tensor["data_offsets"][1] - tensor["data_offsets"][0] for header in headers for tensor in header.values()
    )
    width = settings.get("hidden_size")
    for name in (
        "vocab_size",
        "intermediate_size",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    ):
        length = settings.get(name)
        if isinstance(length, int) and length < 0:
            raise ValueError(f"{directory}/config.json has {name}={length}, which must not be negative")
        if isinstance(length, int) and isinstance(width, int) and length * width > most:
            raise ValueError(
                f"{directory}/config.json has {name}={length} beside hidden_size={width}: a matrix of more entries than all of "
                f"its weights have ({most})"
            )


_NONE = type(None)
_NUMBER, _NAMES, _TABLE = (int, float), (str, list, _NONE), (dict, _NONE)
# what peft's LoraConfig takes from JSON, where another type is an error deep inside it
_LORA_TYPES: dict[str, tuple[type, ...]] = {
    "r": (int,), "lora_alpha": _NUMBER, "lora_dropout": _NUMBER, "bias": (str,), "target_modules": _NAMES, "exclude_modules": _NAMES,
    "rank_pattern": (dict,), "alpha_pattern": (dict,), "modules_to_save": (list, _NONE), "init_lora_weights": (bool, str),
    "layers_pattern": _NAMES, "layers_to_transform": (int, list, _NONE), "target_parameters": (list, _NONE),
    "trainable_token_indices": (list, dict, _NONE), "layer_replication": (list, _NONE),
    "eva_config": _TABLE, "loftq_config": _TABLE, "kasa_config": _TABLE, "velora_config": _TABLE,
    "monteclora_config": _TABLE, "use_bdlora": _TABLE,
}  # fmt: skip
_PEFT_TYPES: dict[str, tuple[type, ...]] = {
    "peft_type": (str, _NONE), "peft_version": (str, _NONE), "revision": (str, _NONE), "auto_mapping": _TABLE,
}  # fmt: skip
# settings that import a module by name, or read further files or adapters: of use to who makes an adapter, not to who loads one
_LORA_REFUSED = ("megatron_config", "corda_config", "lora_ga_config", "arrow_config")
MAX_RANK = 4096


def check_adapter(path: str, settings: dict[str, Any]) -> None:
    """Check what an adapter_config.json asks for before peft reads it.

    Raises:
        ValueError: naming the file and the setting.
    """
    _check_types(path, settings, _PEFT_TYPES)
    if str(settings.get("peft_type")).upper() != "LORA":
        return
    for name in _LORA_REFUSED:
        if settings.get(name) is not None:
            raise ValueError(
                f"{path} has {name}={settings[name]!r}, which imports or reads more than the adapter: remove it from the file"
            )
    _check_types(path, settings, _LORA_TYPES)
    for name in ("target_modules", "modules_to_save"):
        names = settings.get(name)
        if isinstance(names, list) and not all(isinstance(one, str) for one in names):
            raise ValueError(f"{path} has {name}={names!r:.200}, which are no names of modules")
    rows = settings.get("trainable_token_indices")
    if isinstance(rows, dict) and not all(name and isinstance(numbers, list) for name, numbers in rows.items()):
        raise ValueError(f"{path} has trainable_token_indices={rows!r:.200}, which are no rows of named embeddings")
    patterns = settings.get("rank_pattern") or {}
    regular = [settings.get(name) for name in ("target_modules", "exclude_modules")]
    for pattern in [*regular, *patterns, *(settings.get("alpha_pattern") or {})]:
        if isinstance(pattern, str):
            _check_pattern(path, pattern)
    for rank in [settings.get("r", 1), *patterns.values()]:
        # one that is too small is refused by peft; one that is too large is memory first
        if isinstance(rank, bool) or not isinstance(rank, int) or rank > MAX_RANK:
            raise ValueError(f"{path} has a rank of {rank!r:.200}: ranks are integers in 1..{MAX_RANK}")


# an escape, a class of characters, or one character
_REGEX_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)


def _check_pattern(path: str, pattern: str) -> None:
    """Refuse what is no regular expression, and the repetition of a repetition, whose search may never end."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} has {pattern!r:.200}, which is no regular expression: {error}") from error
    # of every open group, whether it holds a repetition
    open_groups, closed = [False], False
    for part in _REGEX_PARTS.findall(pattern):
        if part in ("*", "+", "{"):
            if closed:
                raise ValueError(
                    f"{path} has {pattern!r:.200}, which repeats a repetition: a search for it may never end"
                )
            open_groups[-1] = True
        closed = False
        if part == "(":
            open_groups.append(False)
        elif part == ")" and len(open_groups) > 1:
            closed = open_groups.pop()
            open_groups[-1] = open_groups[-1] or closed


def _check_types(path: str, settings: dict[str, Any], types: dict[str, tuple[type, ...]]) -> None:
    for name, kinds in types.items():
        value = settings.get(name)
        if name in settings and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            raise ValueError(f"{path} has {name}={value!r:.200}, which no adapter has")
