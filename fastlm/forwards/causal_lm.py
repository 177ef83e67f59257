"""The language-model head: the loss from the hidden states, logits only when somebody reads them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast

from fastlm import adapters
from fastlm.families import Family
from fastlm.forwards.backbone import CACHE
from fastlm.patching import Fallback, patch_of
from fastlm_kernels._labelled import LabelledRows
from fastlm_kernels.cross_entropy import cross_entropy
from fastlm_kernels.linear_cross_entropy import TokenStats, linear_cross_entropy, linear_log_probs

IGNORE_INDEX = -100
# Keyword under which a trainer asks for per-token statistics instead of logits; its value builds the output from them.
TOKEN_OUTPUT = "fastlm_token_output"


@dataclass(frozen=True)
class LogitShape:
    """What a model does to the products of its head: softcap * tanh(scale * x / divisor / softcap); None: left out."""

    scale: float | None
    divisor: float | None
    softcap: float | None

    @classmethod
    def of(cls, config: Any, family: Family) -> LogitShape:
        names = (family.logit_scale, family.logit_divisor, family.logit_softcap)
        return cls(*(None if name is None else getattr(config, name) for name in names))

    def logits(self, products: Tensor) -> Tensor:
        """The logits as the stock forward makes them, rounded where it rounds them."""
        logits = products
        if self.scale is not None:
            logits = logits * self.scale
        if self.divisor is not None:
            logits = logits / self.divisor
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    @property
    def loss_settings(self) -> dict[str, Any]:
        """The same as arguments of the loss ops, which compute it in float32."""
        scale = 1.0 if self.scale is None else self.scale
        return dict(logit_scale=scale / (1.0 if self.divisor is None else self.divisor), softcap=self.softcap)


# Asked of logits that are not made yet, these make none.
_KNOWN = frozenset(
    [Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, torch.is_floating_point, Tensor.__hash__]
    + [getattr(Tensor, name).__get__ for name in ("dtype", "device", "shape", "ndim", "requires_grad", "grad_fn")]
)


def _refuse_gradient(gradient: Tensor | None) -> None:
    # DDP that looks for unused parameters leads every output through a function of its own, and no gradient back
    if gradient is not None:
        raise RuntimeError(
            "a gradient arrived at logits that were never made: they were handed to an autograd function as items(), values() or "
            "a tree of the output gave them. Read them as output.logits"
        )


class DeferredLogits(Tensor):
    """Logits that nobody has read yet: whatever is asked of them beside their shape, dtype and device makes them, once.

    What trainers do to every output waits with them: a cast or a copy gives deferred logits again, a hook is registered when they
    are made. All that is computed from them goes through `__torch_function__`, with the graph of those that were made; a gradient
    that finds a way around it raises, for nobody would get it.
    """

    make: Callable[[], Tensor]
    made: Tensor | None
    hooks: list[Callable[[Tensor], Any]]

    @staticmethod
    def __new__(
        cls, make: Callable[[], Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device, has_graph: bool
    ) -> DeferredLogits:
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=has_graph)
        self.make, self.made, self.hooks = make, None, []
        if has_graph:
            with torch._C.DisableTorchFunctionSubclass():
                self.register_hook(_refuse_gradient)
        return self

    def __call__(self) -> Tensor:
        """The logits themselves."""
        if self.made is None:
            self.made = self.make()
            for hook in self.hooks:
                self.made.register_hook(hook)
        return self.made

    def then(self, func: Callable[..., Tensor], args: Sequence[Any], dtype: torch.dtype) -> DeferredLogits:
        """func(logits, *args), which has their shape, when somebody reads it."""
        is_grad_enabled = torch.is_grad_enabled()

        def make() -> Tensor:
            with torch.set_grad_enabled(is_grad_enabled):
                return func(self(), *args)

        return DeferredLogits(make, self.shape, dtype, self.device, self.requires_grad and is_grad_enabled)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        first, others = (args[0], args[1:]) if args else (None, ())
        if isinstance(first, DeferredLogits) and first.made is None and not kwargs:
            if func is Tensor.register_hook:
                return first.hooks.append(*others)
            if func is Tensor.float or (func is Tensor.clone and not others):
                return first.then(func, others, torch.float32 if func is Tensor.float else first.dtype)
            if func is Tensor.to and len(others) == 1 and isinstance(others[0], torch.dtype):
                return first.then(func, others, others[0])
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(DeferredLogits, lambda logits: logits(), (args, kwargs or {}))
        return func(*args, **kwargs)


def _deferred(head: nn.Module, hidden: Tensor, n_logits: int, shape: LogitShape, dtype: torch.dtype) -> DeferredLogits:
    """The logits [B, S, n_logits] of a training step from hidden [B, S, D], in the dtype of the head's GEMM."""
    is_grad_enabled, kind = torch.is_grad_enabled(), hidden.device.type
    mixed = dict(enabled=torch.is_autocast_enabled(kind), dtype=torch.get_autocast_dtype(kind))
    versions = [(p, p._version) for p in head.parameters()]

    def make() -> Tensor:
        if any(p._version != version for p, version in versions):
            raise RuntimeError(
                "the logits of a training step are made when they are read, and the head has been trained or changed since: read "
                "them before the optimizer's step, or call the model without labels"
            )
        dtensor = sys.modules.get("torch.distributed.tensor")
        if dtensor is not None and isinstance(head.weight, dtensor.DTensor) and not adapters.has_hooks(head):
            raise RuntimeError(
                "the logits of a training step are made when they are read, and FSDP has sharded the head's weight again: read "
                "them before the backward with reshard_after_forward=False on the root module, shard the head by itself, or "
                "call the model without labels"
            )
        # with the graph and the precision that the step has, whoever reads them first
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(is_grad_enabled),
            torch.autocast(kind, **mixed),
        ):
            return shape.logits(head(hidden))

    has_graph = is_grad_enabled and (hidden.requires_grad or any(p.requires_grad for p, _ in versions))
    return DeferredLogits(make, (*hidden.shape[:-1], n_logits), dtype, hidden.device, has_graph)


@dataclass
class CausalLMOutput(CausalLMOutputWithPast):
    """transformers' output whose `logits` are made when they are read: by attribute, key, index or `get`.

    A training step that only uses the loss never builds them. `items()`, `values()` and trees, by which accelerate and FSDP walk
    over every output, give `DeferredLogits`, which make themselves when they are used; the dataclass' fields leave them out.

    Attributes:
        deferred: the logits, while nobody has read them. `dataclasses.replace` hands them on.
    """

    deferred: InitVar[DeferredLogits | None] = None

    def __post_init__(self, deferred: DeferredLogits | None) -> None:
        super().__post_init__()
        if deferred is not None:
            self["logits"] = deferred
            # in their place behind the loss
            for name in [key for key in self if key not in ("loss", "logits")]:
                self.move_to_end(name)

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "__dataclass_fields__" and self.deferred is not None:
            return {key: field for key, field in value.items() if key != "logits"}
        if name == "deferred":
            logits = super().__getattribute__("__dict__").get("logits")
            return logits if isinstance(logits, DeferredLogits) else None
        if isinstance(value, DeferredLogits):
            value = value()
            self[name] = value
        return value

    def __reduce__(self) -> Any:
        # the base class pickles the fields
        _ = self.logits
        return super().__reduce__()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "logits" and value is not None:
            self[name] = value
        else:
            super().__setattr__(name, value)

    def get(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            return default
        return self[key]

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            # transformers stores a key's value as the attribute of the same name
            if key not in self:
                raise KeyError(key)
            return getattr(self, key)
        if isinstance(key, int):
            return getattr(self, list(self.keys())[key])
        return self.to_tuple()[key]


def _targets(labels: Tensor | None, shift_labels: Tensor | None, device: torch.device) -> Tensor:
    """The label that each position predicts, [B, S]; the last position of a row has none.

    Labels are moved instead of the hidden states cut, which would copy them.
    """
    if shift_labels is not None:
        return shift_labels.to(device)
    return F.pad(labels[:, 1:].to(device), (0, 1), value=IGNORE_INDEX)


def _denominator(labels: Tensor, num_items_in_batch: Any) -> Any:
    # nothing to train on is a loss of 0, not 0 / 0
    if num_items_in_batch is None:
        return (labels != IGNORE_INDEX).sum().clamp(min=1)
    if isinstance(num_items_in_batch, Tensor):
        return num_items_in_batch.to(labels.device).clamp(min=1)
    return max(num_items_in_batch, 1)


def _head(model: nn.Module, hidden: Tensor, ignores_hooks: bool) -> tuple[Tensor, Tensor, Tensor | None] | str:
    """Hidden states, weight and bias in the dtype of the head's GEMM; or why the head must be called as a module."""
    parts = adapters.head_parts(model.get_output_embeddings())
    if isinstance(parts, str):
        return f"the head cannot be read: {parts}"
    head, weight, bias = parts
    if adapters.has_hooks(head) and not ignores_hooks:
        return "the head has hooks"
    if weight.device != hidden.device:
        return "the head lies on another device"
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    elif hidden.dtype != weight.dtype:
        return f"the head's weight is {weight.dtype} and its input {hidden.dtype}"
    return hidden, weight, bias


def forward(
    self: nn.Module,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
    use_cache: bool | None = None,
    logits_to_keep: int | torch.Tensor = 0,
    **kwargs: Any,
) -> Any:
    patch = patch_of(self)
    token_output: Callable[..., Any] | None = kwargs.pop(TOKEN_OUTPUT, None)
    backbone_inputs: dict[str, Any] = dict(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        inputs_embeds=inputs_embeds,
        use_cache=use_cache,
    )
    backbone_inputs[CACHE] = past_key_values
    shift_labels = kwargs.get("shift_labels")
    if token_output is None:
        if labels is None:
            # nothing to gain without a loss: the stock forward is the head's GEMM
            return patch.stock(self, **backbone_inputs, logits_to_keep=logits_to_keep, **kwargs)
        if self.loss_function is not ForCausalLMLoss:
            raise Fallback("the model has a loss function of its own")
        if self.dtype is torch.float64:
            raise Fallback("the loss in float64 has no kernel")
        if isinstance(logits_to_keep, Tensor) or logits_to_keep:
            raise Fallback("labels and logits_to_keep were given together")
        if kwargs.get("ignore_index", IGNORE_INDEX) != IGNORE_INDEX:
            raise Fallback("another ignore_index was given")
    return_dict = kwargs.pop("return_dict", None)
    num_items_in_batch = kwargs.pop("num_items_in_batch", None)
    kwargs.pop("shift_labels", None)
    kwargs.pop("ignore_index", None)
    if self.training or token_output is not None:
        backbone_inputs["use_cache"] = bool(use_cache) and token_output is None
    # before the layers, so that nobody waits for the number of labels behind them
    targets = _targets(labels, shift_labels, (input_ids if input_ids is not None else inputs_embeds).device)
    labelled: LabelledRows | None = LabelledRows(targets.reshape(-1).long(), IGNORE_INDEX)
    outputs = self.base_model(**backbone_inputs, **kwargs)
    hidden = outputs.last_hidden_state
    if targets.device != hidden.device:
        # the layers lie on several devices
        targets, labelled = targets.to(hidden.device), None
    # a trainer that asks for statistics reads the head's weight itself where it has no other, and hangs hooks of its own on it
    read = _head(self, hidden, ignores_hooks=token_output is not None)
    shape = LogitShape.of(self.config, patch.facts)
    if token_output is not None:
        if isinstance(read, str):
            raise RuntimeError(f"per-token statistics were asked for, but {read}")
        stats = linear_log_probs(
            read[0], read[1], targets, bias=read[2], with_entropy=True, with_top1=True, labelled=labelled,
            **shape.loss_settings,
        )  # fmt: skip
        loss = -stats.log_probs.sum() / _denominator(targets, num_items_in_batch)
        # the trainer's fields have no place for the last position, whose label is nobody's unless it was given shifted
        kept = slice(None) if shift_labels is not None else slice(0, -1)
        fields = TokenStats(*(None if field is None else field[:, kept] for field in stats))
        return token_output(loss=loss, statistics=fields, label_mask=targets[:, kept] != IGNORE_INDEX)
    logits: Any
    if self.training and not isinstance(read, str):
        loss = linear_cross_entropy(
            read[0], read[1], targets, bias=read[2], reduction="sum", labelled=labelled, **shape.loss_settings
        )
        logits = _deferred(self.lm_head, hidden, read[1].shape[0], shape, read[0].dtype)
    else:
        if isinstance(read, str):
            patch.fell_back(read)
        logits = shape.logits(self.lm_head(hidden))
        loss = cross_entropy(logits, targets).sum()
    output = CausalLMOutput(loss=loss / _denominator(targets, num_items_in_batch))
    # set one by one, in transformers' order: its constructor would read the logits
    for name, value in (
        ("logits", logits),
        (CACHE, getattr(outputs, CACHE)),
        ("hidden_states", outputs.hidden_states),
        ("attentions", outputs.attentions),
    ):
        if value is not None:
            output[name] = value
    wants_dict = self.config.return_dict if return_dict is None else return_dict
    return output if wants_dict else output.to_tuple()
