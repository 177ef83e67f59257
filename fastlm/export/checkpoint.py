"""Weight files as transformers reads them, written and read back tensor by tensor.

Memory: the tensors of one file, and the one in hand. A tensor of a frozen dense layer is the live one; nothing of it is copied.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from fastlm import files
from fastlm.export.weights import Source

logger = logging.getLogger(__name__)

# of a save by transformers or by this module
WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_INDEX = "model.safetensors.index.json"
# bytes read back and compared at a time
_PIECE = 2**26


class Packer(Protocol):
    """A format that stores some of the weights as several tensors."""

    def packs(self, name: str) -> bool:
        """Whether this weight is one of them."""

    def meta(self, name: str, source: Source) -> dict[str, Tensor]:
        """Names, dtypes and about the shapes of the tensors that `pack` will give, on the meta device."""

    def pack(self, name: str, source: Source, dtype: torch.dtype) -> tuple[dict[str, Tensor], bool]:
        """The tensors of one weight on the CPU, and whether adapters changed any of them."""


@dataclass(frozen=True)
class _Group:
    """Tensors that are computed together because the checkpoint may hold them in another form (fused experts)."""

    names: tuple[str, ...]
    saved: dict[str, Tensor]  # checkpoint name -> meta tensor


class Checkpoint:
    """The content of weight files: which tensors by which names, and how each is computed from the live model.

    Args:
        base: the transformers model.
        weights: what to save, by the names of the model.
        dtype_of: the dtype of each.
        packer: of a quantized checkpoint.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        weights: Mapping[str, Source],
        dtype_of: Callable[[str, Source], torch.dtype],
        packer: Packer | None = None,
    ):
        self._base = _without_quantizer(base)
        self._weights = weights
        self._dtypes = {name: dtype_of(name, source) for name, source in weights.items()}
        self._packer = packer
        meta = {n: torch.empty(source.shape, dtype=self._dtypes[n], device="meta") for n, source in weights.items()}
        self._n_parameters = sum(tensor.numel() for tensor in meta.values())
        self._groups = _groups(self._base, meta, self._packs)

    def _packs(self, name: str) -> bool:
        return self._packer is not None and self._packer.packs(name)

    def _meta(self, group: _Group) -> dict[str, Tensor]:
        if self._packer is not None and self._packs(group.names[0]):
            return self._packer.meta(group.names[0], self._weights[group.names[0]])
        return group.saved

    def _content(self, group: _Group) -> tuple[dict[str, Tensor], bool]:
        """The tensors of a group by the names of the checkpoint, and whether adapters changed any.

        Raises:
            ValueError: naming the weight, if it cannot be computed or is not finite.
        """
        tensors, is_changed = {}, False
        for name in group.names:
            source = self._weights[name]
            try:
                if self._packer is not None and self._packs(name):
                    return self._packer.pack(name, source, self._dtypes[name])
                tensors[name], differs = source.compute(self._dtypes[name])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            is_changed = is_changed or differs
        return revert_weight_conversion(self._base, tensors), is_changed

    def write(self, folder: Path, max_shard_size: int | str) -> bool:
        """Write all weight files, and the index if they are several.

        Returns:
            Whether adapters changed any entry of any tensor, after the rounding.
        """
        plan = split_torch_state_dict_into_shards(
            {name: tensor for group in self._groups for name, tensor in self._meta(group).items()},
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
        open_files: dict[str, dict[str, Tensor]] = {}
        is_changed, n_bytes = False, 0
        for group in self._groups:
            content, differs = self._content(group)
            is_changed = is_changed or differs
            while content:
                name, tensor = content.popitem()
                n_bytes += tensor.nbytes
                file = plan.tensor_to_filename[name]
                waiting = open_files.setdefault(file, {})
                # one file must not hold the same memory twice
                is_there = any(tensor.data_ptr() == other.data_ptr() for other in waiting.values())
                waiting[name] = tensor.clone() if is_there else tensor.contiguous()
                del tensor
                if len(waiting) == len(plan.filename_to_tensors[file]):
                    save_file(open_files.pop(file), folder / file, metadata={"format": "pt"})
                    del waiting
        if open_files:
            raise RuntimeError(f"incomplete weight files: {sorted(open_files)}")
        if plan.is_sharded:
            index = {
                "metadata": {"total_parameters": self._n_parameters, **plan.metadata, "total_size": n_bytes},
                "weight_map": plan.tensor_to_filename,
            }
            (folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        return is_changed

    def verify(self, folder: Path) -> int:
        """Compute every tensor once more and compare it with what the files hold, bit for bit.

        Returns:
            How many tensors were compared.

        Raises:
            RuntimeError: naming the first tensor that is missing, superfluous or differs, with numbers.
        """
        where = places(folder)
        for group in self._groups:
            content, _ = self._content(group)
            while content:
                name, tensor = content.popitem()
                if name not in where:
                    raise RuntimeError(f"{name} is in none of the files that were written to {folder}")
                _compare(name, tensor.contiguous(), *where.pop(name))
        if where:
            raise RuntimeError(f"the files that were written to {folder} hold {sorted(where)}, which the model has not")
        return sum(len(self._meta(group)) for group in self._groups)


def _without_quantizer(base: PreTrainedModel) -> PreTrainedModel:
    """The model as `revert_weight_conversion` reads it, without the unpacking of a pre-quantized checkpoint."""
    quantizer, conversions = vars(base).get("hf_quantizer"), vars(base).get("_weight_conversions")
    if quantizer is None or not conversions:
        return base
    unpacking = {
        type(operation) for conversion in quantizer.get_weight_conversions() for operation in conversion.operations
    }
    # a shallow copy shares every module and tensor; only its list of conversions is another one
    view: Any = copy.copy(base)
    view._weight_conversions = [
        conversion
        for conversion in conversions
        if not isinstance(conversion, WeightConverter) or not unpacking & {type(step) for step in conversion.operations}
    ]
    return view


def _groups(base: PreTrainedModel, meta: dict[str, Tensor], packs: Callable[[str], bool]) -> list[_Group]:
    """One group a tensor where its name and shape stay; else one a decoder layer, or a single one if conversions reach across."""
    layers: dict[str, list[str]] = {}
    for name in meta:
        layer = re.match(r".*?\.\d+\.", name)
        layers.setdefault(layer[0] if layer else name, []).append(name)
    groups: list[_Group] = []
    for names in layers.values():
        saved = revert_weight_conversion(base, {name: meta[name] for name in names})
        if {n: t.shape for n, t in saved.items()} == {n: meta[n].shape for n in names}:
            groups += [_Group((name,), {name: meta[name]}) for name in names]
        else:
            alone = [name for name in names if packs(name)]
            groups += [_Group((name,), {name: meta[name]}) for name in alone]
            rest = tuple(name for name in names if name not in alone)
            groups.append(_Group(rest, revert_weight_conversion(base, {name: meta[name] for name in rest})))
    whole = _Group(tuple(meta), revert_weight_conversion(base, dict(meta)))
    apart = [(name, tensor.shape) for group in groups for name, tensor in group.saved.items()]
    if sorted(apart) == sorted((name, tensor.shape) for name, tensor in whole.saved.items()):
        return groups
    if any(map(packs, meta)):
        raise ValueError(f"the layers of a {type(base).__name__} are saved in another form than 4-bit weights can have")
    return [whole]


def places(folder: Path) -> dict[str, tuple[Path, int, dict[str, Any]]]:
    """Tensor name -> the file that holds it, where the file's data begin, and its entry in the header."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        header = files.safetensors_header(str(path))
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
        found.update({name: (path, start, entry) for name, entry in header.items()})
    return found


def _compare(name: str, tensor: Tensor, path: Path, start: int, entry: Mapping[str, Any]) -> None:
    first, last = entry["data_offsets"]
    if list(tensor.shape) != entry["shape"] or tensor.nbytes != last - first:
        raise RuntimeError(
            f"{name} was saved with shape {entry['shape']} and {last - first} bytes, the model's has "
            f"{list(tensor.shape)} and {tensor.nbytes}"
        )
    wanted = tensor.reshape(-1).view(torch.uint8)
    n_differing = 0
    with path.open("rb") as file:
        file.seek(start + first)
        for at in range(0, len(wanted), _PIECE):
            piece = wanted[at : at + _PIECE]
            saved = torch.frombuffer(bytearray(file.read(len(piece))), dtype=torch.uint8)
            if not torch.equal(saved, piece):
                differing = (saved != piece).view(-1, tensor.element_size()).any(1)
                n_differing += int(differing.sum())
    if n_differing:
        raise RuntimeError(
            f"{name}: {n_differing} of {tensor.numel()} saved entries are not the bits of the live model's weight; nothing was saved"
        )


def tied_names(base: PreTrainedModel, weights: Mapping[str, Source], dtype: torch.dtype) -> set[str]:
    """Names that need no tensor because they equal the one they are tied to; none of them if a single one differs."""
    pairs = {name: other for name, other in base.all_tied_weights_keys.items() if name in weights and other in weights}
    for name, other in pairs.items():
        if weights[name].same_tensors(weights[other]):
            continue
        if not torch.equal(weights[name].compute(dtype)[0], weights[other].compute(dtype)[0]):
            logger.info("%s and %s were trained apart: saved as two tensors, tie_word_embeddings=False", name, other)
            return set()
    return set(pairs)


def dtype_rule(base: PreTrainedModel, dtype: torch.dtype) -> Callable[[str, Source], torch.dtype]:
    """Tensors that transformers loads in float32 whatever the dtype of the model (MoE router biases) stay float32."""
    kept: set[str] = set() if dtype == torch.float32 else set(base._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        kept |= set(base._keep_in_fp32_modules or ())
    # the same pattern language as in transformers: a search, in which * stands for anything
    pattern = re.compile("|".join(part.replace("*", ".*") for part in sorted(kept)) or r"(?!)")

    def rule(name: str, source: Source) -> torch.dtype:
        if not source.dtype.is_floating_point:
            return source.dtype
        return torch.float32 if source.dtype == torch.float32 and pattern.search(name) else dtype

    return rule


def common_dtype(sources: Iterable[Source], default: Any) -> torch.dtype:
    """The 16-bit dtype that most dense entries have: float32 norms or heads do not make a float32 model."""
    entries = dict.fromkeys((torch.bfloat16, torch.float16), 0)
    for source in sources:
        if source.packed is None and source.dtype in entries:
            entries[source.dtype] += source.tensor.numel()
    most = max(entries, key=entries.__getitem__)
    if entries[most]:
        return most
    return default if default in entries else torch.bfloat16
