"""A whole decoder layer as one autograd function: reads the layer's modules at call time, keeps nothing of its own."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastlm import adapters
from fastlm.block.function import BlockFunction
from fastlm.block.spec import BlockSpec, Layer, MemoryPlan, Norm
from fastlm.families import Family
from fastlm.forwards.backbone import ATTENTION, CACHE, sequence_layout
from fastlm.forwards.projections import is_decode_step
from fastlm.patching import Patch, patch_of
from fastlm_kernels.attention import attention_backend
from fastlm_kernels.lora import group_tensors, make_group


@dataclass(frozen=True)
class LayerFacts:
    """What never changes about a layer: its family's row and its shape."""

    family: Family
    spec: BlockSpec


class _Elsewhere(Exception):
    """This call belongs to the layer's parts, by design: not a fallback."""


class _Stock(Exception):
    """The layer cannot run as a block for this call; the message says why."""


def make_spec(layer: nn.Module, family: Family, window: int | None, activation: str) -> BlockSpec:
    """The block's shape from the layer's own modules and config."""
    attention = layer.self_attn
    return BlockSpec(
        n_heads=attention.config.num_attention_heads,
        n_kv_heads=attention.config.num_key_value_heads,
        head_size=attention.head_dim,
        scale=attention.scaling,
        window=window,
        activation=activation,
        norm_weight_offset=family.norm_weight_offset,
        norm_casts_before_weight=family.norm_casts_before_weight,
        rope_interleaved=family.rope_interleaved,
    )


def trains_own_weights(layer: nn.Module) -> bool:
    """Whether anything but adapters and biases is trained in this layer: its gradients are autograd's work then."""
    return any(
        p.requires_grad and p.ndim > 0 and "lora_" not in name and not name.endswith("bias")
        for name, p in layer.named_parameters()
    )


def _norm(module: nn.Module, x: Tensor, casts: bool) -> Norm:
    if adapters.has_hooks(module):
        raise _Stock("a norm has hooks")
    weight = module.weight
    if weight.requires_grad or (casts and torch.promote_types(x.dtype, weight.dtype) != x.dtype):
        raise _Elsewhere
    return Norm(weight, module.variance_epsilon)


def _views(modules: tuple[nn.Module, ...], x: Tensor) -> list[adapters.LinearView]:
    found = adapters.views(modules, x)
    if found == adapters.TRAINED_WEIGHT:
        raise _Elsewhere
    if isinstance(found, str):
        raise _Stock(found)
    if not found[0].dtype == found[0].out_dtype == x.dtype:
        # mixed precision around this layer: its parts round where the stock modules do
        raise _Elsewhere
    return found


def _describe(
    self: nn.Module, facts: LayerFacts, x: Tensor, mask: Any, recomputes: bool, kwargs: dict[str, Any]
) -> tuple[Layer, list[Tensor | None]]:
    """The layer at this call, and its 21 tensors (bias, A, B of q, k, v, o, gate, up, down)."""
    attn, mlp, casts = self.self_attn, self.mlp, facts.spec.norm_casts_before_weight
    if attn.config._attn_implementation != ATTENTION:
        raise _Stock(f"attention implementation {attn.config._attn_implementation!r} was asked for")
    if mask is not None:
        raise _Stock("an attention mask of its own was given")
    if adapters.has_hooks(attn) or adapters.has_hooks(mlp):
        raise _Stock("a module in it has hooks")
    if x.numel() == 0 or is_decode_step(x):
        raise _Elsewhere
    qk_norms: tuple[Norm | None, Norm | None] = (None, None)
    if facts.family.qk_norms is not None:
        qk_norms = (_norm(attn.q_norm, x, casts), _norm(attn.k_norm, x, casts))
    modules = (
        (attn.q_proj, attn.k_proj, attn.v_proj), (attn.o_proj,), (mlp.gate_proj, mlp.up_proj), (mlp.down_proj,),
    )  # fmt: skip
    found = [_views(group, x) for group in modules]
    projections = [[view.projection for view in views] for views in found]
    groups = [make_group(p, v[0].lora_dtype) for p, v in zip(projections, found, strict=True)]
    layer = Layer(
        spec=facts.spec,
        plan=MemoryPlan(keeps=not recomputes),
        qkv=groups[0],
        out=groups[1],
        gate_up=groups[2],
        down=groups[3],
        input_norm=_norm(self.input_layernorm, x, casts),
        post_norm=_norm(self.post_attention_layernorm, x, casts),
        q_norm=qk_norms[0],
        k_norm=qk_norms[1],
        layout=sequence_layout(kwargs),
    )
    return layer, [tensor for p in projections for tensor in group_tensors(p)]


def _note_backend(patch: Patch, layer: Layer, x: Tensor) -> None:
    """Record the attention library that this call runs, for the report."""
    spec = layer.spec
    q, k = (x.new_empty((*x.shape[:2], n, spec.head_size)) for n in (spec.n_heads, spec.n_kv_heads))
    patch.backend = attention_backend(q, k, k, layer.layout, spec.window)


def forward(
    self: nn.Module,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    past_key_values: Any = None,
    use_cache: bool | None = False,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **kwargs: Any,
) -> Tensor:
    patch = patch_of(self)
    stock = functools.partial(
        patch.stock, self, attention_mask=attention_mask, position_ids=position_ids, **{CACHE: past_key_values},
        use_cache=use_cache, position_embeddings=position_embeddings, **kwargs,
    )  # fmt: skip
    recomputes = patch.recomputes and self.training and torch.is_grad_enabled()
    try:
        if past_key_values is not None and not recomputes:
            raise _Elsewhere
        layer, tensors = _describe(self, patch.facts, hidden_states, attention_mask, recomputes, kwargs)
    except _Elsewhere:
        # the parts count this call
        patch.calls -= 1
    except _Stock as reason:
        patch.fell_back(str(reason))
    else:
        if not patch.backend:
            _note_backend(patch, layer, hidden_states)
        cos, sin = position_embeddings
        return BlockFunction.apply(hidden_states, cos, sin, layer, *tensors)
    if recomputes:
        # the permission that the block would have used serves the parts through transformers' own function
        return self._gradient_checkpointing_func(
            functools.partial(stock.func, *stock.args, **{**stock.keywords, CACHE: None, "use_cache": False}),
            hidden_states,
        )
    return stock(hidden_states)
