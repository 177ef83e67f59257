"""The door to bitsandbytes: its modules as plain tensors, its 4-bit weights as `NF4Weight`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fastlm_kernels.nf4 import NF4Weight, nf4_decode

INSTALL = (
    "4-bit and 8-bit loading needs bitsandbytes, which cannot be imported here: install it with `pip install bitsandbytes`, "
    "or load in 16 bit with load_in_16bit=True"
)


def is_installed() -> bool:
    """Whether bitsandbytes can be found. Does not import it."""
    return importlib.util.find_spec("bitsandbytes") is not None


def bitsandbytes() -> types.ModuleType:
    """bitsandbytes, imported without a look-up on the hub.

    On some CPUs, bitsandbytes asks the hub for a kernel while it is imported. huggingface_hub's own offline constant is set for the
    time of that first import and restored after it. An import that happened before fastlm's is out of reach.

    Raises:
        ImportError: with the two ways out, if it is not installed.
    """
    if not is_installed():
        raise ImportError(INSTALL)
    if "bitsandbytes" in sys.modules:
        return importlib.import_module("bitsandbytes")
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        return importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise ImportError(f"{INSTALL} (its import failed: {error})") from error
    finally:
        constants.HF_HUB_OFFLINE = before


def _linear_class(name: str) -> Any:
    """bitsandbytes' class if the package is loaded: without it, no module can be an instance."""
    module = sys.modules.get("bitsandbytes")
    return () if module is None else getattr(module.nn, name)


def is_4bit(module: nn.Module) -> bool:
    """Whether this is exactly bitsandbytes' Linear4bit, not a class derived from it."""
    return type(module) is _linear_class("Linear4bit")


def is_8bit(module: nn.Module) -> bool:
    return isinstance(module, _linear_class("Linear8bitLt"))


@contextlib.contextmanager
def unrounded_states(optimizer: Any) -> Iterator[None]:
    """Within, one of bitsandbytes' optimizers reads a state as it was saved. Others, and None, are left alone.

    bitsandbytes casts what is no code, so the float32 scales of its codes, to the dtype of the parameters; these are float32 within.
    """
    module = sys.modules.get("bitsandbytes")
    is_ours = module is not None and isinstance(optimizer, module.optim.optimizer.Optimizer8bit)
    params = [p for group in optimizer.param_groups for p in group["params"]] if is_ours else []
    before = [(p, p.data) for p in params if type(p.data) is Tensor and p.dtype in (torch.bfloat16, torch.float16)]
    for p, data in before:
        p.data = data.float()
    try:
        yield
    finally:
        for p, data in before:
            p.data = data


@contextlib.contextmanager
def kept_cpu_layout(model: nn.Module) -> Iterator[None]:
    """`keep_cpu_layout` for the time of a block, also of models that others loaded."""
    layers = [module for module in model.modules() if is_4bit(module)]
    before = [layer.support_avx512bf16_for_cpu for layer in layers]
    keep_cpu_layout(model)
    try:
        yield
    finally:
        for layer, value in zip(layers, before, strict=True):
            layer.support_avx512bf16_for_cpu = value


def keep_cpu_layout(model: nn.Module) -> None:
    """Stops bitsandbytes from rewriting the 4-bit weights of this model in place.

    On a CPU with AVX512-BF16, its first inference repacks a layer's weight; training after it gets no gradients and a saved
    state dict is no longer the loaded one. The switch is an attribute of each layer.
    """
    for module in model.modules():
        if is_4bit(module):
            module.support_avx512bf16_for_cpu = False


def unreadable(module: nn.Module) -> str | None:
    """Why no fast part can ever read something in this module: a quantized layer in another format than NF4. None otherwise."""
    for child in module.modules():
        if is_8bit(child):
            return "its weights are 8-bit"
        state = child.weight.quant_state if is_4bit(child) else None
        if state is not None and state.quant_type != "nf4":
            return f"its weights are stored as {state.quant_type}, not nf4"
    return None


def misshapen(model: nn.Module) -> list[tuple[str, tuple[int, ...], tuple[int, int]]]:
    """Name, shape and wanted shape of the quantized layers whose weights came from a model of another size.

    transformers compares shapes only where it does not quantize.
    """
    found = []
    for name, module in model.named_modules():
        if is_8bit(module) or (is_4bit(module) and module.weight.quant_state is not None):
            shape = tuple(module.weight.shape if is_8bit(module) else module.weight.quant_state.shape)
            if shape != (module.out_features, module.in_features):
                found.append((name, shape, (module.out_features, module.in_features)))
    return found


def is_repacked(state: Any) -> bool:
    """Whether bitsandbytes has rewritten the weight of this quantization state for its CPU inference."""
    return bool(vars(state).get("packing_format_for_cpu"))


# Views of weights that do not change, so that each is checked once: by layer, with the state that it was made from.
_NF4_WEIGHTS: weakref.WeakKeyDictionary[nn.Module, tuple[Any, NF4Weight]] = weakref.WeakKeyDictionary()


def nf4_weight(module: nn.Module) -> NF4Weight | str:
    """The 4-bit weight of a Linear4bit without a copy, or why it cannot be read as one."""
    stored = module._parameters["weight"]
    state = stored.quant_state
    if state is None:
        return "its 4-bit weight is not quantized yet: move the model to its device first"
    if state.quant_type != "nf4":
        return f"its weight is stored as {state.quant_type}, not nf4"
    if is_repacked(state):
        return "bitsandbytes repacked its weight for CPU inference"
    made_from, cached = _NF4_WEIGHTS.get(module, (None, None))
    if cached is not None and made_from is state:
        # a look at the address, without the function that the class of 4-bit weights has for every use of a tensor
        with torch._C.DisableTorchFunctionSubclass():
            if cached.packed.data_ptr() == stored.data_ptr():
                return cached
    nested = state.state2 if state.nested else None
    weight = NF4Weight(
        packed=stored.data.view(torch.uint8) if stored.dtype != torch.uint8 else stored.data,
        absmax=state.absmax,
        shape=(state.shape[0], state.shape[1]),
        blocksize=state.blocksize,
        nested_absmax=nested.absmax if nested is not None else None,
        nested_code=nested.code if nested is not None else None,
        nested_offset=state.offset if nested is not None else None,
        nested_blocksize=nested.blocksize if nested is not None else 256,
        dtype=state.dtype,
    )
    _NF4_WEIGHTS[module] = (state, weight)
    return weight


def statistics_bytes(module: nn.Module) -> int:
    """Bytes of what a 4-bit layer holds beside its packed weight: scales, and the tables that they are read by."""
    state = module._parameters["weight"].quant_state if is_4bit(module) else None
    found = [] if state is None else [state.absmax, state.code]
    if state is not None and state.nested:
        found += [state.state2.absmax, state.state2.code, state.offset]
    return sum(t.numel() * t.element_size() for t in found if t is not None)


def compute_dtype(module: nn.Module, x_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a Linear4bit multiplies an input of `x_dtype`, as its own forward decides it."""
    if module.compute_type_is_set:
        return module.compute_dtype or x_dtype
    return x_dtype


def decode_weight(module: nn.Module, dtype: torch.dtype | None = None) -> Tensor:
    """The weight [N, K] that a linear layer multiplies with, as a plain tensor.

    Args:
        module: nn.Linear or bitsandbytes' Linear4bit or Linear8bitLt.
        dtype: of the result. A 4-bit weight is decoded to the dtype it was quantized from before it is converted, as in training. None
            leaves it in that dtype, 8-bit ones in float32.

    Raises:
        TypeError: for another kind of module.
        ValueError: for a 4-bit weight that bitsandbytes has rewritten in place, from which it cannot be had back.
    """
    decoded = _decoded(module)
    return decoded if dtype is None else decoded.to(dtype)


def _decoded(module: nn.Module) -> Tensor:
    if is_4bit(module):
        weight = nf4_weight(module)
        if isinstance(weight, NF4Weight):
            return nf4_decode(weight, weight.dtype)
        state = module.weight.quant_state
        if state is None or is_repacked(state):
            raise ValueError(f"{weight}. Load the model again with fastlm, which leaves 4-bit weights as they are")
        return bitsandbytes().functional.dequantize_4bit(module.weight.data, state)
    if is_8bit(module):
        functional = bitsandbytes().functional
        # the first forward moves the scales from the weight to the layer's state
        scales = module.weight.SCB if module.state.SCB is None else module.state.SCB
        return functional.int8_vectorwise_dequant(module.weight.data, scales)
    if isinstance(module, nn.Linear):
        return module.weight.detach()
    raise TypeError(f"no weight can be read from a {type(module).__name__}: a linear layer is needed")
