"""Which fast parts a model gets: the family's row decides, the rest keeps its stock forward and a reason."""

from __future__ import annotations

import logging
import types
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from fastlm import adapters, loading, quant
from fastlm.block.graphs import LayerGraphs
from fastlm.families import FAMILIES, Family, stock_attention_reason
from fastlm.forwards import attention, backbone, causal_lm, layer, linear, mlp, norm
from fastlm.memory.manager import Memory
from fastlm.patching import bind, own_class, patch_of, patched_modules, unbind

logger = logging.getLogger(__name__)

_KEY = "_fastlm_state"


@dataclass
class ModelState:
    """What fastlm knows about one model, kept on the transformers model itself.

    Attributes:
        family: the row that fits, or None.
        reasons: module name -> why it keeps its stock forward. The empty name speaks of the whole model.
        strict: raise where a layer would stay stock.
        stock_config: the config object before the model got its own, or None if it kept it.
        stock_attention: name of the attention implementation before ours.
        checkpointing: True, False or None, as `config.parse_checkpointing`.
        hook: handle of the forward pre-hook on the model, or None.
        max_seq_length: longest row that the model was loaded for, or None.
        head_wrapper: the forward that a trainer put around the head's, when it was last looked at.
        head_reason: why the trainer's own fused head runs instead of ours, or None.
        told_of_cut: it was logged that rows end where a trainer's default length cuts them.
        is_full: the model was loaded for full fine-tuning.
        keep_attention: the user chose the attention implementation.
        deterministic: gradients are equal to the bit between runs.
        rounds_once: an adapter's product is added before the base product is rounded.
        graphs: the layers' CUDA graphs, or None where they are not wanted.
        memory: plans what layers keep.
        new_tokens: ids of tokens that were added, which an adapter has to train.
    """

    family: Family | None
    reasons: dict[str, str] = field(default_factory=dict)
    strict: bool = False
    stock_config: Any = None
    stock_attention: str | None = None
    checkpointing: bool | None = None
    hook: Any = None
    max_seq_length: int | None = None
    head_wrapper: Any = None
    head_reason: str | None = None
    told_of_cut: bool = False
    is_full: bool = False
    keep_attention: bool = False
    deterministic: bool = False
    rounds_once: bool = False
    graphs: LayerGraphs | None = field(default_factory=LayerGraphs)
    memory: Memory = field(default_factory=Memory)
    new_tokens: tuple[int, ...] = ()

    def __setstate__(self, state: dict[str, Any]) -> None:
        # a model that comes out of a pickle names our attention, which this process may not have met yet
        self.__dict__.update(state)
        backbone.register()


def state_of(model: nn.Module) -> ModelState | None:
    """The state of a model that was patched and not reverted."""
    return adapters.base_model(model).__dict__.get(_KEY)


def find_family(base: PreTrainedModel) -> Family | str:
    """The row of the table that describes this model, or why none does."""
    family = FAMILIES.get(base.config.model_type)
    kind = own_class(base)
    if family is None:
        return f"no row for {base.config.model_type!r} in the table of families"
    if kind.__name__ != family.causal_lm or not kind.__module__.startswith("transformers.models."):
        return f"{kind.__module__}.{kind.__name__} is not transformers' {family.causal_lm}"
    return family


def _attention_reason(base: PreTrainedModel, keep_attention: bool) -> str | None:
    """Why the attention of a known family stays stock, or None."""
    implementation = base.config._attn_implementation
    # what transformers takes where nobody asks: since 5.24, models with softcaps refuse SDPA
    default = "sdpa" if base._supports_sdpa else "eager"
    if keep_attention or implementation not in (default, backbone.ATTENTION):
        return f"attention implementation {implementation!r} was asked for"
    return stock_attention_reason(base.config.to_dict())


def _bind_family(base: PreTrainedModel, family: Family, state: ModelState, attention_reason: str | None) -> None:
    parts: dict[str, tuple[str, Any, Any, str | None]] = {
        family.backbone: ("backbone", backbone.forward, family, None),
        family.causal_lm: ("head", causal_lm.forward, family, None),
    }
    if not family.has_layer_norm:
        parts[family.norm] = ("norm", norm.forward, family, None)
    if attention.fits(family):
        parts[family.attention] = ("attention", attention.forward, None, attention_reason)
    if mlp.fits(family):
        parts[family.mlp] = ("mlp", mlp.forward, mlp.make_facts(base.config, family), None)
    for name, module in base.named_modules():
        kind = own_class(module)
        found = parts.get(kind.__name__)
        if found is None or not kind.__module__.startswith("transformers.models."):
            continue
        part, forward, facts, reason = found
        if reason is None and part in ("attention", "mlp"):
            reason = quant.unreadable(module)
        if part == "attention":
            facts = attention.AttentionFacts(family, state.deterministic, attention.is_sliding(module, family))
        if reason is None and part == "mlp":
            reason = mlp.unfit_activation(module, base.config, family)
        if reason is None:
            reason = bind(module, part, forward, facts, state.strict)
        if reason is not None:
            state.reasons[name] = reason


def _bind_layers(base: PreTrainedModel, family: Family, state: ModelState, attention_reason: str | None) -> None:
    """Whole decoder layers as one function."""
    for name, module in base.named_modules():
        kind = own_class(module)
        if kind.__name__ != family.layer or not kind.__module__.startswith("transformers.models."):
            continue
        reason = attention_reason or layer.unfit(module, family) or quant.unreadable(module)
        if reason is None:
            facts = layer.make_facts(module, family, state.deterministic, state.rounds_once, state.graphs, state.memory)
            reason = bind(module, "block", layer.forward, facts, state.strict)
        if reason is not None:
            state.reasons[name] = reason
    _take_checkpointing(base)


def _forget_inner_reasons(base: PreTrainedModel, state: ModelState) -> None:
    """A part that stays stock is no reason where the whole layer is one function."""
    blocks = [f"{name}." for name, _, patch in patched_modules(base) if patch.part == "block" and patch.active]
    state.reasons = {
        name: reason for name, reason in state.reasons.items() if not any(name.startswith(block) for block in blocks)
    }


def _take_checkpointing(base: nn.Module) -> None:
    """Layers that run as a block recompute by their own plan: transformers must not replay them as a whole."""
    for _, module, patch in patched_modules(base):
        if patch.part == "block" and patch.active and module.gradient_checkpointing:
            patch.recomputes, module.gradient_checkpointing = True, False


def _set_gradient_checkpointing(self: Any, enable: bool = True, **kwargs: Any) -> None:
    """Bound on a patched model in the place of transformers' method: same effect, but blocks keep the permission to themselves."""
    state = self.__dict__[_KEY]
    if enable and state.checkpointing is False:
        logger.info("gradient checkpointing stays off: use_gradient_checkpointing=False was given")
        return
    for _, _, patch in patched_modules(self):
        patch.recomputes = False
    type(self)._set_gradient_checkpointing(self, enable=enable, **kwargs)
    _take_checkpointing(self)


def _bind_lora_layers(base: PreTrainedModel, state: ModelState) -> None:
    """Each plain LoRA layer as one function, for models whose attention and MLP have no fast forward."""
    for name, module in base.named_modules():
        if adapters.is_plain_lora_layer(module):
            reason = quant.unreadable(module) or bind(module, "linear", linear.forward, None, state.strict)
            # once is enough where the module around it stays stock for the same reason
            if reason is not None and state.reasons.get(name.rpartition(".")[0]) != reason:
                state.reasons[name] = reason


def _unfit_adapter(base: PreTrainedModel) -> tuple[str, str] | None:
    """Name and reason of the first projection whose adapter keeps its layer from running fast, or None."""
    for name, module, patch in patched_modules(base):
        places = (
            layer.projections(patch.facts.family) if patch.part == "block" else [""] if patch.part == "linear" else []
        )
        for place in places:
            reason = adapters.unfit_adapter(module.get_submodule(place))
            if reason is not None:
                return f"{name}.{place}".rstrip("."), reason
    return None


def patch(
    model: nn.Module,
    strict: bool | None = None,
    keep_attention: bool | None = None,
    deterministic: bool | None = None,
    rounds_once: bool | None = None,
    cuda_graphs: bool | None = None,
    memory: str | float | None = None,
    host_memory: float | None = None,
) -> None:
    """Bind all fast parts that fit this model. Patching again takes in adapters that were added since.

    Args:
        model: a transformers causal language model, or a PEFT model around one.
        strict: raise instead of leaving a layer stock, now or at call time.
        keep_attention: the user chose the attention implementation.
        deterministic: gradients are equal to the bit between runs.
        rounds_once: an adapter's product is added before the base product is rounded.
        cuda_graphs: layers are replayed as CUDA graphs.
        memory, host_memory: as `Memory`.
            None for one of these leaves it as it was: at first, only graphs are on.

    Raises:
        TypeError: if it is not a causal language model of transformers.
        RuntimeError: with `strict`, naming the first layer that would stay stock.
    """
    base = adapters.base_model(model)
    if not loading.is_causal_lm(base):
        raise TypeError(
            f"a causal language model of transformers (or a PEFT model around one) is needed, got {type(base).__name__}"
        )
    family = find_family(base)
    state = state_of(model)
    if state is None:
        state = ModelState(family=family if isinstance(family, Family) else None)
        base.__dict__[_KEY] = state
        base.__dict__["_set_gradient_checkpointing"] = types.MethodType(_set_gradient_checkpointing, base)
    state.reasons = {}
    state.strict = state.strict if strict is None else strict
    state.keep_attention = state.keep_attention if keep_attention is None else keep_attention
    state.deterministic = state.deterministic if deterministic is None else deterministic
    state.rounds_once = state.rounds_once if rounds_once is None else rounds_once
    if cuda_graphs is not None and cuda_graphs != (state.graphs is not None):
        state.graphs = LayerGraphs() if cuda_graphs else None
    state.memory.choose_strategy(memory, host_memory)
    if isinstance(family, str):
        state.reasons[""] = family
    else:
        reason = _attention_reason(base, state.keep_attention)
        if reason is None and base.config._attn_implementation != backbone.ATTENTION:
            backbone.register()
            state.stock_config = loading.own_config(model, base)
            state.stock_attention = base.config._attn_implementation
            base.set_attn_implementation(backbone.ATTENTION)
        _bind_family(base, family, state, reason)
        _bind_layers(base, family, state, reason)
        _forget_inner_reasons(base, state)
    _bind_lora_layers(base, state)
    if state.strict:
        stock = next(iter(state.reasons.items()), None) or _unfit_adapter(base)
        if stock is not None:
            revert(model)
            raise RuntimeError(f"strict=True, but {stock[0] or 'the model'} would stay stock: {stock[1]}")


def release_graphs(model: nn.Module) -> None:
    """Give back the memory of captured layers, and of the host: nobody trains for now."""
    state = state_of(model)
    if state is not None:
        state.memory.release()
        if state.graphs is not None:
            state.graphs.release()


def revert(model: nn.Module) -> None:
    """Give every module of the model its stock forward back, and the model its config.

    The model then computes bit for bit what it did before it was patched, with the weights it has now. Wrappers that a trainer put
    around a fast forward go on working: they reach the stock one. A model that was never patched stays as it is.
    """
    base = adapters.base_model(model)
    state = state_of(model)
    for _, module, patch in list(patched_modules(base)):
        if patch.part == "block" and patch.recomputes:
            module.gradient_checkpointing = True
        unbind(module)
    if state is None:
        return
    if state.hook is not None:
        state.hook.remove()
    if state.stock_config is not None:
        ours = base.config
        for name, value in _changed(ours, state.stock_config).items():
            setattr(state.stock_config, name, value)
        loading.replace_config(model, ours, state.stock_config)
    base.__dict__.pop("_set_gradient_checkpointing", None)
    del base.__dict__[_KEY]


def _changed(ours: Any, stock: Any) -> dict[str, Any]:
    """What the user or a trainer changed on our copy of the config since: it goes with the model."""
    internal = ("_attn_implementation_internal", "_attn_implementation")
    before = vars(stock)
    return {
        name: value
        for name, value in vars(ours).items()
        if name not in internal and isinstance(value, (bool, int, float, str, type(None))) and before.get(name) != value
    }


def set_checkpointing(base: nn.Module, mode: bool | None) -> None:
    """Let the model recompute its layers always (True), never (False), or as the trainer says (None)."""
    state = state_of(base)
    if state is not None:
        state.checkpointing = state.memory.checkpointing = mode
    if mode is True:
        base.gradient_checkpointing_enable()
    elif mode is False:
        base.gradient_checkpointing_disable()


def device_path(module: nn.Module) -> str:
    """ "triton" where the module's tensors run our kernels, else "torch"."""
    from fastlm_kernels._launch import HAS_TRITON

    tensor: torch.Tensor | None = next(module.parameters(), None)
    return "triton" if HAS_TRITON and tensor is not None and tensor.is_cuda else "torch"


__all__ = ["ModelState", "device_path", "find_family", "patch", "patch_of", "revert", "set_checkpointing", "state_of"]
