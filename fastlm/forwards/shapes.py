"""A patched model's layers as numbers, from which its plans follow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fastlm import quant
from fastlm.block.spec import BlockSpec
from fastlm.families import Family
from fastlm.memory.manager import Weights
from fastlm.memory.planner import HeadShape, Model
from fastlm.memory.sizes import GroupShape, LayerShape
from fastlm_kernels.attention import SequenceLayout, attention_backend

# bytes of an optimizer's states for a parameter: of an 8-bit Adam, and of one in float32
_OPTIMIZER_BYTES = (2, 8)


def attention_library(
    spec: BlockSpec, like: Tensor, rows: int, length: int, layout: SequenceLayout | None, deterministic: bool
) -> str:
    """The attention library that a call of a layer runs. like: a tensor of the layer's dtype and device."""
    one = like.new_empty(1)
    q, k = (one.expand(rows, length, n, spec.head_size) for n in (spec.n_heads, spec.n_kv_heads))
    return attention_backend(q, k, k, layout, spec.window, deterministic=deterministic, softcap=spec.softcap)


def _group(projections: Sequence[nn.Module], rank: int | None, is_decoded: bool | None) -> GroupShape:
    widths, ranks, has_bias = [], 0, False
    for module in projections:
        base = module.get_submodule("base_layer") if "base_layer" in module._modules else module
        widths.append(int(base.out_features))
        is_decoded = quant.is_4bit(base) if is_decoded is None else is_decoded
        has_bias = has_bias or base.bias is not None
        found = [p.shape[0] for name, p in module.named_parameters() if "lora_A." in name and p.requires_grad]
        ranks += sum(found) if rank is None else rank
    return GroupShape(tuple(widths), int(base.in_features), ranks, bool(is_decoded), has_bias)


def layer_shape(
    layer: nn.Module,
    family: Family,
    spec: BlockSpec,
    itemsize: int,
    backend: str,
    rounds_once: bool = False,
    rank: int | None = None,
    is_decoded: bool | None = None,
) -> LayerShape:
    """The shape of one layer.

    Args:
        rank: of the adapters on every projection, of a layer that has none yet; None reads them.
        is_decoded: its weights will be 4-bit; None reads it.
    """
    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    names = ((attention, family.qkv), (attention, (family.out,)), (mlp, family.gate_up), (mlp, (family.down,)))
    groups = [_group([module.get_submodule(n) for n in members], rank, is_decoded) for module, members in names]
    norms = (
        family.attention_norm,
        family.attention_out_norm,
        None if spec.is_parallel else family.mlp_norm,
        family.mlp_out_norm,
    )
    has_dropout = any(isinstance(m, nn.Dropout) and m.p > 0 for name, m in layer.named_modules() if "lora_" in name)
    loras = [p for name, p in layer.named_parameters() if "lora_A." in name]
    has_qk_norms = family.qk_norms is not None and all(name in attention._modules for name in family.qk_norms)
    return LayerShape(
        *groups,
        n_heads=spec.n_heads,
        n_kv_heads=spec.n_kv_heads,
        head_size=spec.head_size,
        is_gated=spec.is_gated,
        is_parallel=spec.is_parallel,
        copies_heads=has_qk_norms,
        turned_heads=has_qk_norms * _turned_heads(family, spec),
        norms=(norms[0] is not None, norms[1] is not None, norms[2] is not None, norms[3] is not None),
        are_layer_norms=family.has_layer_norm,
        is_scaled=spec.residual_multiplier != 1.0,
        rounds_once=rounds_once,
        draws_masks=has_dropout,
        itemsize=itemsize,
        lora_itemsize=loras[0].element_size() if loras else itemsize,
        backend=backend,
    )


def _turned_heads(family: Family, spec: BlockSpec) -> int:
    if family.qk_norm_place == "after":
        # beside a copy of what was normed
        return max(2 * spec.n_heads, spec.n_heads + 2 * spec.n_kv_heads)
    is_fused = family.qk_norm_place == "head" and not family.has_layer_norm
    return 0 if is_fused else 2 * spec.n_heads + spec.n_kv_heads


def weights_of(modules: Sequence[nn.Module]) -> Weights:
    """Bytes of what some modules hold and, where they are trained, of what training adds."""
    parameters = {id(p): p for module in modules for p in module.parameters()}
    trained = [p for p in parameters.values() if p.requires_grad]
    n_trained = sum(p.numel() for p in trained)
    frozen = sum(p.numel() * p.element_size() for p in parameters.values() if not p.requires_grad)
    buffers = sum(b.numel() * b.element_size() for module in modules for b in module.buffers())
    return Weights(
        weights=frozen + buffers + sum(quant.statistics_bytes(m) for module in modules for m in module.modules()),
        trained=sum(p.numel() * p.element_size() for p in trained),
        gradients=sum(p.numel() * p.element_size() for p in trained if p.grad is None),
        optimizer=(_OPTIMIZER_BYTES[0] * n_trained, _OPTIMIZER_BYTES[1] * n_trained),
    )


def model_shape(
    layers: Sequence[LayerShape], vocabulary: int, itemsize: int, head_size: int, n_frozen_first: int, on_cuda: bool
) -> Model:
    head = HeadShape(vocabulary, layers[0].hidden, itemsize, on_cuda=on_cuda)
    return Model(tuple(layers), head, 2 * head_size * itemsize, n_frozen_first)


def first_trained(layers: Sequence[nn.Module], embeddings: nn.Module) -> int:
    """How many layers run forward only, because nothing in or below them is trained."""
    if any(p.requires_grad for p in embeddings.parameters()):
        return 0
    trains = [any(p.requires_grad for p in layer.parameters()) for layer in layers]
    return trains.index(True) if any(trains) else len(layers)


def dtype_of(embeddings: nn.Module) -> torch.dtype:
    weight = embeddings.get_parameter("weight") if "weight" in embeddings._parameters else next(embeddings.parameters())
    return weight.dtype
