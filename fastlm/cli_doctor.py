"""What a bug report needs: versions, the GPU, and which libraries are there."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform

_PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "peft", "trl", "accelerate", "bitsandbytes", "datasets",
    "safetensors", "huggingface_hub", "numpy",
)  # fmt: skip
# what is used where it is installed
_OPTIONAL = (
    "kernels",
    "flash-attn-4",
    "flash-attn",
    "gguf",
    "matplotlib",
    "torchao",
    "wandb",
    "tensorboard",
    "trackio",
)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _gpus() -> list[tuple[str, str]]:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = (
            f"torch is built for {built}, but finds no GPU: is the driver there?"
            if built
            else "torch is built without CUDA"
        )
        return [("GPU", f"none ({why}): everything runs in plain torch")]
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = (properties.major, properties.minor)
        bf16 = "bfloat16" if capability >= (8, 0) else "no bfloat16: train with fp16=True"
        fast = "fast kernels" if capability >= (7, 5) else "too old for the kernels (7.5 is needed): plain torch"
        text = f"{properties.name}, compute capability {capability[0]}.{capability[1]}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        found.append((f"GPU {index}", f"{text}; {bf16}; {fast}"))
    return [*found, ("CUDA of torch", str(torch.version.cuda))]


def _notes() -> list[tuple[str, str]]:
    from transformers.utils import is_kernels_available

    notes = []
    if importlib.util.find_spec("triton") is None:
        notes.append(("look", "triton is missing: on a GPU the kernels need it"))
    if _version("kernels") != "not installed" and not is_kernels_available():
        notes.append(("look", "this transformers takes another release of the package kernels; fastlm needs none"))
    for variable in ("HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "TRITON_INTERPRET"):
        if variable in os.environ:
            notes.append((variable, os.environ[variable]))
    return notes


def facts() -> list[tuple[str, str]]:
    """Names and values, in the order to show."""
    import fastlm

    found = [("fastlm", fastlm.__version__), ("Python", platform.python_version()), ("system", platform.platform())]
    found += [(package, _version(package)) for package in _PACKAGES]
    found += [(package, version) for package in _OPTIONAL if (version := _version(package)) != "not installed"]
    return [*found, *_gpus(), *_notes()]
