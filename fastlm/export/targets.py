"""Merged models in the quantized formats of other libraries, which vLLM and SGLang read: thin calls of those libraries.

Each rounds to nearest, without calibration data. The head and the embedding stay in 16 bits. The libraries are extras.

    compressed_tensors_w4a16  int4 weights in groups of 128 columns
    compressed_tensors_w8a16  int8 weights in groups of 128 columns
    compressed_tensors_fp8    fp8 weights by row, and inputs when it runs
    compressed_tensors_int8   int8 weights by row, and inputs when it runs
    torchao_fp8               fp8 weights by row
    torchao_int8              int8 weights by row
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, TorchAoConfig

from fastlm.export.checkpoint import WEIGHT_FILE

# name -> the preset of compressed_tensors
_PRESETS = {
    "compressed_tensors_w4a16": "W4A16",
    "compressed_tensors_w8a16": "W8A16",
    "compressed_tensors_fp8": "FP8_DYNAMIC",
    "compressed_tensors_int8": "INT8",
}
# name -> the configuration class of torchao.quantization
_TORCHAO = {"torchao_fp8": "Float8WeightOnlyConfig", "torchao_int8": "Int8WeightOnlyConfig"}
TARGETS = (*_PRESETS, *_TORCHAO)


def check_target(save_method: str) -> None:
    """
    Raises:
        ImportError: naming the extra, if the library of this format is not installed.
    """
    module = "torchao" if save_method in _TORCHAO else "compressed_tensors"
    extra = module.replace("_", "-")
    if importlib.util.find_spec(module) is None:
        raise ImportError(
            f"save_method={save_method!r} needs {extra}, which is not installed: pip install 'fastlm[{extra}]', or pip install {extra}"
        )


def quantize_folder(base: PreTrainedModel, folder: Path, save_method: str, max_shard_size: int | str) -> None:
    """Turn a folder with a merged 16-bit model into one with the same model in another format, in memory on the CPU.

    Args:
        base: a model of this class is in the folder.
        folder: its weight files and configuration are replaced, other files stay.
        save_method: one of TARGETS.
        max_shard_size: as in `save_pretrained`.

    Raises:
        ValueError: if a layer's width is no whole number of the format's groups.
    """
    made = folder / ".quantized"
    if save_method in _TORCHAO:
        quantization: Any = importlib.import_module("torchao.quantization")
        config = TorchAoConfig(getattr(quantization, _TORCHAO[save_method])())
        model: Any = type(base).from_pretrained(folder, dtype="auto", quantization_config=config, local_files_only=True)
        model.save_pretrained(made, max_shard_size=max_shard_size)
    else:
        model = type(base).from_pretrained(folder, dtype="auto", local_files_only=True)
        _compress(model, _PRESETS[save_method], made, max_shard_size)
    del model
    for path in folder.iterdir():
        if WEIGHT_FILE.fullmatch(path.name):
            path.unlink()
    for path in made.iterdir():
        if path.name == "config.json" or WEIGHT_FILE.fullmatch(path.name):
            path.replace(folder / path.name)
    shutil.rmtree(made)


@torch.no_grad()
def _compress(model: Any, preset: str, made: Path, max_shard_size: int | str) -> None:
    """The scale of each row or group from its smallest and largest weight, then the library's own compression."""
    library: Any = importlib.import_module("compressed_tensors.quantization")
    calculate: Any = importlib.import_module("compressed_tensors.quantization.utils").calculate_qparams
    compressors: Any = importlib.import_module("compressed_tensors.compressors")
    scheme = library.preset_name_to_scheme(preset, ["Linear"])
    size = scheme.weights.group_size or 0
    head = model.get_output_embeddings()
    linear = {name: module for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    narrow = [name for name, module in linear.items() if size > 0 and module is not head and module.in_features % size]
    if narrow:
        raise ValueError(
            f"{narrow[0]} has {linear[narrow[0]].in_features} inputs, {preset} needs a multiple of {size}: use "
            "compressed_tensors_fp8, which scales whole rows"
        )
    left_out = [name for name, module in linear.items() if module is head]
    settings = library.QuantizationConfig(config_groups={"group_0": scheme}, ignore=left_out)
    library.apply_quantization_config(model, settings)
    quantized: dict[str, Any] = {name: module for name, module in linear.items() if name not in left_out}
    for module in quantized.values():
        groups = module.weight.unflatten(-1, (-1, size)) if size > 0 else module.weight.unsqueeze(1)
        scale, zero = calculate(groups.amin(-1).float(), groups.amax(-1).float(), scheme.weights)
        module.weight_scale.copy_(scale)
        if "weight_zero_point" in module._parameters:
            module.weight_zero_point.copy_(zero)
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(made, max_shard_size=max_shard_size)
    compressor.update_config(str(made))
