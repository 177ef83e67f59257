"""A whole decoder layer as one autograd function: reads the layer's modules at call time, and its shape once."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastlm import adapters
from fastlm.block.function import BlockFunction
from fastlm.block.graphs import LayerGraphs, StackCall
from fastlm.block.spec import KEEP_ALL, RECOMPUTE_ALL, BlockSpec, Layer, MemoryPlan, Norm
from fastlm.families import Family
from fastlm.forwards.attention import is_sliding
from fastlm.forwards.backbone import (
    ATTENTION,
    CACHE,
    NEEDS_INPUT_GRADIENT,
    STACK_CALL,
    TABLES,
    WINDOW,
    RotaryTables,
    sequence_layout,
    stock_mask,
)
from fastlm.forwards.mlp import activation_name, activations, unfit_activation
from fastlm.forwards.projections import DECODE_TOKENS, is_decode_step
from fastlm.forwards.shapes import attention_library
from fastlm.memory.manager import Memory
from fastlm.patching import Patch, patch_of
from fastlm_kernels.lora import group_tensors, make_group


@dataclass(frozen=True)
class LayerFacts:
    """What is known about a layer before a call.

    Attributes:
        family: its row.
        spec: its shape.
        arguments: names of the stock forward's arguments behind the hidden states.
        deterministic: gradients are equal to the bit between runs.
        rounds_once: as `Layer`.
        graphs: replays layers as CUDA graphs; None to run each kernel by itself.
        memory: plans what layers keep.
        slides: its attention has a window.
        of_attention, of_layer: read from them what the stock layer reads at every call, and somebody may change between two.
        read: what they gave when the shape was made.
    """

    family: Family
    spec: BlockSpec
    arguments: tuple[str, ...]
    deterministic: bool
    rounds_once: bool
    graphs: LayerGraphs | None
    memory: Memory | None
    slides: bool
    of_attention: Callable[[Any], Any]
    of_layer: Callable[[Any], Any]
    read: tuple[Any, Any]


class _Elsewhere(Exception):
    """This call belongs to the layer's parts, by design: not a fallback. The message says why."""


class _Stock(Exception):
    """The layer cannot run as a block for this call; the message says why."""


def make_facts(
    layer: nn.Module,
    family: Family,
    deterministic: bool,
    rounds_once: bool,
    graphs: LayerGraphs | None,
    memory: Memory | None = None,
) -> LayerFacts:
    """The block's shape from the layer's own modules and config."""
    attention = layer.self_attn
    attention_names, layer_names = _read_names(layer, family)
    of_attention, of_layer = operator.attrgetter(*attention_names), operator.attrgetter(*layer_names)
    slides = is_sliding(attention, family)
    _, _, *arguments = inspect.signature(type(layer).forward).parameters
    return LayerFacts(
        family, _spec(layer, family, slides), tuple(arguments), deterministic, rounds_once, graphs, memory, slides,
        of_attention, of_layer, (of_attention(attention), of_layer(layer)),
    )  # fmt: skip


def _read_names(layer: nn.Module, family: Family) -> tuple[list[str], list[str]]:
    """The attributes of the attention and of the layer, by dotted names, that its shape and `unfit` depend on."""
    attention = ["scaling", *(name for name in (family.softcap, family.rotates) if name is not None)]
    if family.window != "none" or family.rotates_without_windows:
        attention.append("config.sliding_window")
    names = [f"mlp.{name}" for name, _ in activations(layer.mlp)]
    names += [name for name in (family.residual_multiplier, family.parallel) if isinstance(name, str)]
    for name in (*family.refuses, *family.dropouts):
        head, _, tail = name.partition(".")
        (attention if head == "self_attn" else names).append(tail if head == "self_attn" else name)
    # an activation that is a function of the class has no attribute
    return attention, names or ["mlp"]


def _spec(layer: nn.Module, family: Family, slides: bool) -> BlockSpec:
    attention = layer.self_attn
    config = attention.config
    has_windows = not family.rotates_without_windows or config.sliding_window is not None
    rotates = family.rotates is None or not has_windows or bool(getattr(attention, family.rotates))
    parallel = family.parallel if isinstance(family.parallel, bool) else getattr(layer, family.parallel)
    activation = activation_name(config, family)
    assert activation is not None
    return BlockSpec(
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_size=attention.head_dim,
        scale=attention.scaling,
        # eager attention and SDPA are told by a mask, which is made of the config's window
        window=config.sliding_window if slides else None,
        softcap=getattr(attention, family.softcap) if family.softcap else None,
        rotates=rotates,
        rope_interleaved=family.rope_interleaved,
        qk_norm_place=family.qk_norm_place,
        activation=activation,
        is_gated=family.is_gated,
        is_parallel=parallel,
        residual_multiplier=getattr(layer, family.residual_multiplier) if family.residual_multiplier else 1.0,
    )


def _facts_now(layer: nn.Module, patch: Patch) -> LayerFacts:
    """The facts of a bound layer, made anew if somebody changed what they depend on."""
    facts: LayerFacts = patch.facts
    attention = layer._modules["self_attn"]
    read = facts.of_attention(attention), facts.of_layer(layer)
    if read != facts.read:
        reason = unfit(layer, facts.family)
        if reason is not None:
            raise _Stock(reason)
        spec = _spec(layer, facts.family, facts.slides)
        patch.facts = facts = dataclasses.replace(facts, spec=spec, read=read)
        # another shape may run another attention library
        patch.backend = ""
    return facts


def unfit(layer: nn.Module, family: Family) -> str | None:
    """Why a layer of a known family cannot run as a block, or None."""
    for module, wanted in ((layer.self_attn, family.attention), (layer.mlp, family.mlp)):
        if type(module).__name__ != wanted:
            return f"a {type(module).__name__} stands in the place of its {wanted}"
    reason = unfit_activation(layer.mlp, layer.self_attn.config, family)
    if reason is not None:
        return reason
    for name in family.refuses:
        if _attribute(layer, name):
            return f"{name} is {_attribute(layer, name)}"
    for name in family.dropouts:
        if _attribute(layer, name):
            return f"{name} is {_attribute(layer, name)}, and dropout of activations has no fast path"
    return None


def projections(family: Family) -> list[str]:
    """Dotted names of a layer's projections."""
    return [f"self_attn.{name}" for name in (*family.qkv, family.out)] + [
        f"mlp.{name}" for name in (*family.gate_up, family.down)
    ]


def _attribute(module: nn.Module, name: str) -> Any:
    """An attribute by its dotted name."""
    return functools.reduce(getattr, name.split("."), module)


def has_qk_norms(attention: nn.Module, family: Family) -> bool:
    return family.qk_norms is not None and (family.qk_norm_switch is None or getattr(attention, family.qk_norm_switch))


def trains_own_weights(layer: nn.Module) -> bool:
    """Whether anything but adapters and biases is trained in this layer: its gradients are autograd's work then."""
    return any(
        p.requires_grad and p.ndim > 0 and "lora_" not in name and not name.endswith("bias")
        for name, p in layer.named_parameters()
    )


def _norm(module: nn.Module, x: Tensor, family: Family, may_train_bias: bool = False) -> Norm:
    if type(module).__name__ != family.norm:
        raise _Stock(f"a norm is a {type(module).__name__}")
    if adapters.has_hooks(module):
        raise _Stock("a norm has hooks")
    weight = adapters.tensor_of(module, "weight")
    bias = adapters.tensor_of(module, "bias") if isinstance(module, nn.LayerNorm) else None
    casts = family.norm_casts_before_weight and not family.has_layer_norm
    if weight.requires_grad or (bias is not None and bias.requires_grad and not may_train_bias):
        raise _Elsewhere("a norm of it is trained, which is autograd's work")
    if casts and weight.dtype != x.dtype and torch.promote_types(x.dtype, weight.dtype) != x.dtype:
        raise _Elsewhere(f"mixed precision: its norms are {weight.dtype}, its input {x.dtype}")
    eps = getattr(module, family.norm_eps)
    return Norm(weight, bias, eps, family.norm_weight_offset, family.norm_casts_before_weight, family.has_layer_norm)


def _views(modules: list[nn.Module], x: adapters.Input) -> list[adapters.LinearView]:
    found = adapters.views(modules, x)
    if found == adapters.TRAINED_WEIGHT:
        raise _Elsewhere("its own weights are trained, which is autograd's work")
    if isinstance(found, str):
        raise _Stock(found)
    if not found[0].dtype == found[0].out_dtype == x.dtype:
        # its parts round where the stock modules do
        raise _Elsewhere(f"mixed precision: it multiplies in {found[0].dtype}, its input is {x.dtype}")
    return found


def _describe(
    self: nn.Module, facts: LayerFacts, x: Tensor, call: StackCall | None, plan: MemoryPlan, kwargs: dict[str, Any]
) -> tuple[Layer, list[Tensor | None]]:
    """The layer at this call, (bias, A, B) of each of its projections, and the biases of its attention's and MLP's norm."""
    # read from here, modules cost less time than as attributes
    children, family = self._modules, facts.family
    attn: Any = children["self_attn"]
    mlp: Any = children["mlp"]
    if type(attn).__name__ != family.attention or type(mlp).__name__ != family.mlp:
        raise _Stock(f"its halves are a {type(attn).__name__} and a {type(mlp).__name__}")
    if attn.config._attn_implementation != ATTENTION:
        raise _Stock(f"attention implementation {attn.config._attn_implementation!r} was asked for")
    if kwargs.get("attention_mask") is not None:
        raise _Stock("an attention mask of its own was given")
    if adapters.has_hooks(attn) or adapters.has_hooks(mlp):
        raise _Stock("a module in it has hooks")
    if x.numel() == 0:
        raise _Elsewhere("its input has no tokens")
    if is_decode_step(x):
        raise _Elsewhere(f"at most {DECODE_TOKENS} tokens without gradients")
    if self.training and attn.attention_dropout:
        raise _Stock("attention dropout is on")
    mlp_norm = None if facts.spec.is_parallel else family.mlp_norm
    names = (family.attention_norm, family.attention_out_norm, mlp_norm, family.mlp_out_norm)
    # the block gives a gradient to the biases of norms before the halves
    norms = [
        None if name is None else _norm(children[name], x, family, may_train_bias=i % 2 == 0)
        for i, name in enumerate(names)
    ]
    qk_norms: list[Norm | None] = [None, None]
    if has_qk_norms(attn, family):
        assert family.qk_norms is not None
        qk_norms = [_norm(attn._modules[name], x, family) for name in family.qk_norms]
    of_attention, of_mlp = attn._modules, mlp._modules
    modules = (
        [of_attention[name] for name in family.qkv], [of_attention[family.out]],
        [of_mlp[name] for name in family.gate_up], [of_mlp[family.down]],
    )  # fmt: skip
    given = adapters.Input.of(x)
    found = [_views(group, given) for group in modules]
    projections = [[view.projection for view in views] for views in found]
    # frozen weights of norms, which the backward reads beside the projections
    read_again = [norm.weight for norm in (*norms, *qk_norms) if norm is not None and norm.weight is not None]
    groups = [
        make_group(p, v[0].lora_dtype, read_again if i == 0 else ())
        for i, (p, v) in enumerate(zip(projections, found, strict=True))
    ]
    layer = Layer(
        facts.spec, plan, *groups, *norms, *qk_norms, layout=sequence_layout(kwargs, x),
        deterministic=facts.deterministic, rounds_once=facts.rounds_once,
        parcel=None if call is None else call.parcel(plan, x.device),
        rescue=None if facts.memory is None else facts.memory.rescue,
    )  # fmt: skip
    biases = [None if norm is None else norm.bias for norm in (layer.attention_norm, layer.mlp_norm)]
    return layer, [*(tensor for p in projections for tensor in group_tensors(p)), *biases]


def _plan(self: nn.Module, call: StackCall | None, recomputes: bool) -> MemoryPlan:
    """What this layer keeps."""
    # without gradients nothing is kept, and inference mode has no graph to record one in
    if not torch.is_grad_enabled():
        return RECOMPUTE_ALL
    planned = call.plan(self.self_attn.layer_idx) if call is not None and self.training else None
    return planned or (RECOMPUTE_ALL if recomputes else KEEP_ALL)


def _note_backend(patch: Patch, layer: Layer, x: Tensor) -> None:
    """Record the attention library that this call runs, for the report."""
    patch.backend = attention_library(layer.spec, x.detach(), x.shape[0], x.shape[1], layer.layout, layer.deterministic)


def _run(
    self: nn.Module,
    graphs: LayerGraphs | None,
    call: StackCall | None,
    inputs: tuple[Tensor, Tensor, Tensor],
    layer: Layer,
    tensors: list[Tensor | None],
) -> Tensor:
    """The block, replayed where it was captured."""
    if graphs is not None and call is not None and self.training:
        return graphs.apply(self, call, self.self_attn.layer_idx, inputs, layer, tensors)
    return BlockFunction.apply(*inputs, layer, *tensors)


def forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    patch = patch_of(self)
    facts: LayerFacts = patch.facts
    kwargs |= zip(facts.arguments, args, strict=False)
    recomputes = patch.recomputes and self.training and torch.is_grad_enabled()
    needs_input_gradient = kwargs.pop(NEEDS_INPUT_GRADIENT, True)
    call = kwargs.pop(STACK_CALL, None)
    tables = kwargs.pop(TABLES, None) or RotaryTables(facts.family)
    try:
        if kwargs.get("output_attentions"):
            raise _Stock("attention scores were asked for, which only eager attention returns")
        if kwargs.get("past_key_values") is not None and not recomputes:
            raise _Elsewhere("a key/value cache was given")
        facts = _facts_now(self, patch)
        plan = _plan(self, call, recomputes)
        layer, tensors = _describe(self, facts, hidden_states, call, plan, kwargs)
    except _Elsewhere as reason:
        patch.ran_elsewhere(str(reason))
    except _Stock as reason:
        patch.fell_back(str(reason))
    else:
        if not patch.backend:
            _note_backend(patch, layer, hidden_states)
        is_marked_leaf = hidden_states.is_leaf and not hidden_states._backward_hooks and not self._backward_hooks
        # checkpointing from elsewhere hands leaves to later layers too
        if not needs_input_gradient and is_marked_leaf and self.self_attn.layer_idx == 0:
            # only a trainer's hook on the embeddings asks for its gradient, and nobody reads it
            hidden_states = hidden_states.detach()
        cos, sin = tables.read(*kwargs["position_embeddings"])
        return _run(self, facts.graphs, call, (hidden_states, cos, sin), layer, tensors)
    if call is not None and call.n_unwatched and facts.graphs is not None and not facts.graphs.is_empty:
        # modules that run instead may be looked into: what they read or pass on must not lie where a captured neighbour writes
        hidden_states, call.n_unwatched = hidden_states.clone(), 0
    if recomputes:
        kwargs |= {"past_key_values": None, "use_cache": False}
    config = self.self_attn.config
    implementation, window = config._attn_implementation, config.sliding_window if facts.slides else None
    if implementation == ATTENTION and facts.family.layer_keeps_kwargs:
        kwargs[WINDOW] = window
    else:
        # a layer with a config of its own, say
        kwargs["attention_mask"] = stock_mask(kwargs, hidden_states, window, implementation)
    if "past_key_values" in kwargs:
        kwargs[CACHE] = kwargs.pop("past_key_values")
    if recomputes:
        # the permission that the block would have used serves the parts through transformers' own function
        return self._gradient_checkpointing_func(functools.partial(patch.stock, self, **kwargs), hidden_states)
    return patch.stock(self, hidden_states, **kwargs)
