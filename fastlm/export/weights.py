"""The weights that a live model computes with, under the names of its base architecture.

A model under PEFT holds a weight in several pieces: the base layer (dense or bitsandbytes), low-rank factors of the
active adapters, a fully trained copy, single trained rows. `effective_weights` walks over the modules and describes
each checkpoint tensor as a `Source`; `Source.compute` puts the pieces together in float32 and rounds once. Nothing is
merged in place: the live model keeps every bit.

    plain LoRA   W' = W + s B A                                   Hu et al. 2021, arXiv:2106.09685
    DoRA         W' = m (W' + s B A) / |W + s B A|  row by row     Liu et al. 2024, arXiv:2402.09353

Several active adapters apply one after the other, as PEFT's forward does. R rank, N output rows, K input columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fastlm import adapters, quant

PLAIN_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# rows are merged in blocks of this many elements, so that float32 temporaries stay small beside the weight
BLOCK_ELEMENTS = 2**22


@dataclass(frozen=True)
class LowRank:
    """One active adapter on one weight: scaling * b @ a, with DoRA's magnitude if it has one."""

    a: Tensor  # [R, K]
    b: Tensor  # [N, R]
    scaling: float
    magnitude: Tensor | None  # [N]

    def delta(self, rows: slice, device: torch.device) -> Tensor:
        # float64: the sum over R is exact to float32 whatever TF32 setting the process runs under
        product = self.b[rows].to(device, torch.float64) @ self.a.to(device, torch.float64)
        return (product * self.scaling).float()

    def is_zero(self) -> bool:
        return not (self.b.any() and self.a.any())


@dataclass(frozen=True)
class Source:
    """Where one checkpoint tensor comes from.

    tensor: the live base tensor, packed if it is a bitsandbytes weight.
    shape: of the checkpoint tensor.
    packed: the module that `quant.decode_weight` decodes, None for a dense tensor.
    updates: adapters on this weight, in the order in which they apply.
    is_transposed: the [N, K] of the updates is the tensor's transpose.
    added: (vector, scaling) pairs added to a bias.
    rows: (indices, values) pairs that replace rows.
    other_base: reads the dense weight, [shape], that the updates are added to instead of the live one.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    is_parameter: bool
    packed: nn.Linear | None = None
    updates: tuple[LowRank, ...] = ()
    is_transposed: bool = False
    added: tuple[tuple[Tensor, float], ...] = ()
    rows: tuple[tuple[tuple[int, ...], Tensor], ...] = ()
    other_base: Callable[[], Tensor] | None = None

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.packed is not None else self.tensor.dtype

    @property
    def is_adapted(self) -> bool:
        return bool(self.updates or self.added or self.rows)

    def is_zero(self) -> bool:
        """No low-rank product and no bias of an adapter moves this tensor."""
        return all(update.is_zero() for update in self.updates) and not any(vector.any() for vector, _ in self.added)

    def same_tensors(self, other: Source) -> bool:
        """Both read the same live tensors, so their values are equal without a look at them."""
        if self.tensor is not other.tensor:
            return False
        mine, theirs = _pieces(self), _pieces(other)
        return len(mine) == len(theirs) and all(x is y for x, y in zip(mine, theirs, strict=True))

    @torch.no_grad()
    def compute(self, dtype: torch.dtype) -> tuple[Tensor, bool]:
        """The effective value, rounded once.

        Returns:
            the tensor [shape] in `dtype` (integer tensors keep theirs) on the CPU, possibly sharing memory with the
            live one, and whether adapters changed any entry of it after the rounding.

        Raises:
            ValueError: if a parameter is offloaded, or its value is not finite or does not fit `dtype`.
        """
        if self.tensor.device.type == "meta":
            raise ValueError("the weight is offloaded (on the meta device); load the model without disk or CPU offload")
        if self.dtype.is_floating_point and self.dtype not in PLAIN_DTYPES:
            raise ValueError(f"the weight is {self.dtype}, whose scale is not known; load the model in 16 bits")
        if not self.dtype.is_floating_point:
            return self.tensor.detach().cpu().contiguous(), False
        base = self._base()
        if base.shape != self.shape:
            raise ValueError(f"the decoded weight has shape {tuple(base.shape)}, expected {self.shape}")
        saved, changed = self._merge(base, dtype) if self.is_adapted else (base.to(dtype), False)
        if self.is_parameter and not _is_finite(saved):
            hint = "; dtype=torch.bfloat16 holds larger values" if dtype == torch.float16 else ""
            raise ValueError(f"the weight has values that are not finite in {dtype}{hint}")
        return saved.cpu().contiguous(), changed

    def _base(self) -> Tensor:
        """The weight without adapters, in the dtype that it is stored or decoded in."""
        if self.other_base is not None:
            return self.other_base()
        return self.tensor.detach() if self.packed is None else quant.decode_weight(self.packed)

    def _merge(self, base: Tensor, dtype: torch.dtype) -> tuple[Tensor, bool]:
        changed = False
        if self.added:
            total = base.float()
            for vector, scaling in self.added:
                total = total + vector.to(base.device, torch.float32) * scaling
            saved = total.to(dtype)
            changed = not torch.equal(saved, base.to(dtype))
        elif self.updates:
            # what was decoded for this call alone is overwritten row by row
            is_own = self.packed is not None and self.other_base is None and base.dtype == dtype
            is_own = is_own and base.data_ptr() != self.tensor.data_ptr()
            saved = base if is_own else torch.empty(self.shape, dtype=dtype, device=base.device)
            weight, out = (base.t(), saved.t()) if self.is_transposed else (base, saved)  # [N, K]
            for block in _row_blocks(weight.shape):
                new = _merged_rows(weight[block].float(), self.updates, block).to(dtype)
                changed = changed or not torch.equal(new, weight[block].to(dtype))
                out[block] = new
        else:
            saved = base.to(dtype, copy=True)
        for indices, values in self.rows:
            index = torch.tensor(indices, device=base.device)
            new = values.to(base.device, dtype)
            changed = changed or not torch.equal(saved[index], new)
            saved[index] = new
        return saved, changed


def _is_finite(tensor: Tensor) -> bool:
    # the extremes carry NaN and infinity, at a fraction of the cost of a look at every entry
    return not tensor.numel() or all(map(math.isfinite, torch.stack(tensor.aminmax()).tolist()))


def _pieces(source: Source) -> list[object]:
    pieces: list[object] = []
    for update in source.updates:
        pieces += [update.a, update.b, update.magnitude]
    return pieces + [vector for vector, _ in source.added] + [values for _, values in source.rows]


def _row_blocks(shape: torch.Size) -> Iterator[slice]:
    n_rows, n_cols = shape
    step = max(1, BLOCK_ELEMENTS // max(1, n_cols))
    for start in range(0, n_rows, step):
        yield slice(start, min(start + step, n_rows))


def _merged_rows(weight: Tensor, updates: tuple[LowRank, ...], rows: slice) -> Tensor:
    """weight [rows, K] float32, before any adapter -> the same rows after all of them."""
    total = weight
    for update in updates:
        delta = update.delta(rows, weight.device)
        total = total + delta
        if update.magnitude is not None:
            # the norm is that of the base weight plus this adapter alone, whatever other adapters came before
            norm = torch.linalg.vector_norm(weight + delta, dim=1, dtype=torch.float64)
            factor = update.magnitude[rows].to(weight.device, torch.float64) / norm
            total = (total * factor[:, None]).float()
    return total


def effective_weights(base: nn.Module) -> dict[str, Source]:
    """Every persistent tensor of a model, by the name it has in a checkpoint without adapters.

    Args:
        base: the transformers model, the one inside a PeftModel; its layers may be PEFT's.

    Returns:
        name -> Source in module order; tied weights appear once per name.

    Raises:
        ValueError: if adapters are switched off, or of a kind that has no merged form here.
    """
    found: dict[str, Source] = {}
    _collect(base, "", found)
    return found


def _is_peft_layer(module: nn.Module) -> bool:
    peft = adapters.peft()
    return isinstance(module, (peft.tuners.tuners_utils.BaseTunerLayer, peft.utils.other.AuxiliaryTrainingWrapper))


def _collect(module: Any, prefix: str, found: dict[str, Source]) -> None:
    if not _is_peft_layer(module):
        found.update(_own_tensors(module, prefix))
        for child_name, child in module.named_children():
            _collect(child, f"{prefix}{child_name}.", found)
        return
    wrappers, name = adapters.peft().utils.other, prefix.rstrip(".")
    if module.disable_adapters:
        raise ValueError(
            f"the adapter at {name} is switched off, so the merged weights would not hold what was trained; "
            f"save outside of disable_adapter() or after enable_adapter_layers()"
        )
    if isinstance(module, wrappers.ModulesToSaveWrapper):
        active = [adapter for adapter in module.active_adapters if adapter in module.modules_to_save]
        _collect(module.modules_to_save[active[0]] if active else module.original_module, prefix, found)
    elif isinstance(module, wrappers.TrainableTokensWrapper):
        found.update(_token_rows(module.token_adapter, prefix))
    else:
        found.update(_lora(module, prefix))


def _own_tensors(module: Any, prefix: str, **weight_pieces: Any) -> dict[str, Source]:
    """Parameters and persistent buffers of this module alone; `weight_pieces` go to its weight."""
    found = {}
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        # bitsandbytes' weights are subclasses of Parameter with a shape of their own
        is_packed = isinstance(module, nn.Linear) and name == "weight" and type(parameter) is not nn.Parameter
        found[prefix + name] = Source(
            tensor=parameter,
            shape=(module.out_features, module.in_features) if is_packed else tuple(parameter.shape),
            is_parameter=True,
            packed=module if is_packed else None,
            **(weight_pieces if name == "weight" else {}),
        )
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if name not in module._non_persistent_buffers_set:
            found[prefix + name] = Source(tensor=buffer, shape=tuple(buffer.shape), is_parameter=False)
    return found


def _lora(layer: Any, prefix: str) -> dict[str, Source]:
    lora, name = adapters.peft().tuners.lora, prefix.rstrip(".")
    kinds = [lora.Linear, lora.Embedding] + ([lora.Linear4bit, lora.Linear8bitLt] if quant.is_installed() else [])
    if type(layer) not in kinds or layer.base_layer is not layer.get_base_layer():
        raise ValueError(
            f"{name} has an adapter of type {type(layer).__module__}.{type(layer).__name__}, which has no merged form "
            f"here: LoRA on linear and embedding layers has. Save it with save_method='lora'"
        )
    updates, added = [], []
    is_embedding = isinstance(layer, lora.Embedding)
    a, b = (layer.lora_embedding_A, layer.lora_embedding_B) if is_embedding else (layer.lora_A, layer.lora_B)
    # a layer that PEFT merged computes with its base weight alone
    for adapter in [] if layer.merged else layer.active_adapters:
        if adapter not in a:
            continue
        magnitude = None
        if adapter in layer.lora_variant:
            variant = type(layer.lora_variant[adapter])
            if variant not in (lora.variants.DoraLinearVariant, lora.variants.DoraEmbeddingVariant):
                raise ValueError(
                    f"the adapter {adapter!r} at {name} is a {variant.__name__}, which has no merged form here: LoRA, "
                    f"rsLoRA and DoRA have. Save it with save_method='lora'"
                )
            magnitude = layer.lora_magnitude_vector[adapter].weight
        factors = (a[adapter], b[adapter]) if is_embedding else (a[adapter].weight, b[adapter].weight)
        updates.append(LowRank(*factors, float(layer.scaling[adapter]), magnitude))
        if layer.lora_bias[adapter]:
            added.append((b[adapter].bias, float(layer.scaling[adapter])))
    is_transposed = is_embedding or (isinstance(layer, lora.Linear) and layer.fan_in_fan_out)
    found = _own_tensors(layer.base_layer, prefix, updates=tuple(updates), is_transposed=is_transposed)
    if added:
        found[prefix + "bias"] = replace(found[prefix + "bias"], added=tuple(added))
    return found


def _token_rows(layer: Any, prefix: str) -> dict[str, Source]:
    active = [] if layer.merged else layer.active_adapters
    rows = tuple(
        (tuple(layer.token_indices[adapter]), layer.trainable_tokens_delta[adapter])
        for adapter in active
        if adapter in layer.trainable_tokens_delta
    )
    return _own_tensors(layer.base_layer, prefix, rows=rows)
