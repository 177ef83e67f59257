"""Merged weights in bitsandbytes' 4-bit form, as transformers loads them: `save_method="merged_4bit"`.

A weight that adapters change is decoded, merged and quantized again, by bitsandbytes; one that they leave alone keeps its bytes.
Format: bitsandbytes.functional.QuantState.as_dict, beside each packed weight. N rows, K columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from fastlm import quant
from fastlm.export.weights import Source

_BLOCK, _NESTED_BLOCK = 64, 256
# about the bytes of a weight's settings, as JSON
_SETTINGS_BYTES = 160


class FourBit:
    """Which weights of a model become 4-bit ones, and how.

    Args:
        base: the transformers model: one in 4 bits gives its settings, for another they are NF4 with nested quantization.
        weights: its tensors.
        dtype: of everything else, and of the multiplications.

    Raises:
        ValueError: if no weight can be stored in 4 bits.
    """

    def __init__(self, base: PreTrainedModel, weights: Mapping[str, Source], dtype: torch.dtype):
        quant.bitsandbytes()
        live = {name for name, source in weights.items() if source.packed is not None and quant.is_4bit(source.packed)}
        linear, head = _linear_weights(base, weights)
        self._names = live or linear - {head}
        if not self._names:
            raise ValueError(f"a {type(base).__name__} has no linear layers that bitsandbytes could store in 4 bits")
        given: Any = base.config.quantization_config if live else None
        self.config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=given.bnb_4bit_quant_type if live else "nf4",
            bnb_4bit_use_double_quant=given.bnb_4bit_use_double_quant if live else True,
            bnb_4bit_compute_dtype=given.bnb_4bit_compute_dtype if live else dtype,
            bnb_4bit_quant_storage=given.bnb_4bit_quant_storage if live else torch.uint8,
            # whole names: transformers quantizes every other linear layer when it loads
            llm_int8_skip_modules=sorted(name.removesuffix(".weight") for name in linear - self._names),
        )

    def packs(self, name: str) -> bool:
        return name in self._names

    def meta(self, name: str, source: Source) -> dict[str, Tensor]:
        n_entries = math.prod(source.shape)
        n_blocks = -(-n_entries // _BLOCK)
        sizes = {"": n_entries // 2, "quant_map": 64, f"quant_state.bitsandbytes__{self._quant_type}": _SETTINGS_BYTES}
        if self.config.bnb_4bit_use_double_quant:
            sizes |= {"absmax": n_blocks, "nested_absmax": 4 * -(-n_blocks // _NESTED_BLOCK), "nested_quant_map": 1024}
        else:
            sizes |= {"absmax": 4 * n_blocks}
        return {
            f"{name}.{part}" if part else name: torch.empty(size, dtype=torch.uint8, device="meta")
            for part, size in sizes.items()
        }

    @property
    def _quant_type(self) -> str:
        return str(self.config.bnb_4bit_quant_type)

    def pack(self, name: str, source: Source, dtype: torch.dtype) -> tuple[dict[str, Tensor], bool]:
        """
        Raises:
            ValueError: as `Source.compute`.
        """
        live = _stored(name, source.packed) if source.packed is not None else None
        if live is not None and not source.is_adapted and source.other_base is None:
            return live, False
        merged, is_changed = source.compute(dtype)
        made = _quantized(name, merged.to(source.tensor.device), self.config)
        if live is not None:
            # what an adapter adds may be too small for steps of 4 bits; scales move a little by being rounded again
            is_changed = is_changed and not torch.equal(made[name], live[name])
        return made, is_changed


def _stored(name: str, module: Any) -> dict[str, Tensor]:
    """A live 4-bit weight as bitsandbytes saves it."""
    state = module.weight.quant_state
    if state is None or quant.is_repacked(state):
        raise ValueError(
            "its 4-bit weight was rewritten for CPU inference, or is not quantized yet; load the model again"
        )
    return _named(name, module.weight.data, state)


def _quantized(name: str, weight: Tensor, config: BitsAndBytesConfig) -> dict[str, Tensor]:
    packed, state = quant.bitsandbytes().functional.quantize_4bit(
        weight,
        blocksize=_BLOCK,
        compress_statistics=config.bnb_4bit_use_double_quant,
        quant_type=config.bnb_4bit_quant_type,
        quant_storage=config.bnb_4bit_quant_storage,
    )
    return _named(name, packed, state)


def _named(name: str, packed: Tensor, state: Any) -> dict[str, Tensor]:
    parts = {f"{name}.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}
    return {key: tensor.detach().cpu().contiguous() for key, tensor in {name: packed, **parts}.items()}


def _linear_weights(base: PreTrainedModel, weights: Mapping[str, Source]) -> tuple[set[str], str | None]:
    """Weights of linear layers, by the names of the model without adapters, and which of them is the head's."""
    head = base.get_output_embeddings()
    found, of_head = set(), None
    for path, module in base.named_modules():
        name = path.removesuffix(".base_layer").removesuffix(".original_module") + ".weight"
        if module is head:
            of_head = name
        if isinstance(module, nn.Linear) and name in weights:
            found.add(name)
    return found, of_head
