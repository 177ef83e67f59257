"""What a model's layers share: where samples begin and end in a batch, worked out once for all layers.

Padding and packing travel as a `SequenceLayout` in the keyword arguments that transformers hands through to every attention
module; no [S, S] mask is made for them. Steps through a cache get the mask that transformers makes for SDPA.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastlm import adapters
from fastlm.block.graphs import StackCall
from fastlm.block.spec import MemoryPlan
from fastlm.families import Family
from fastlm.forwards.shapes import attention_library, dtype_of, first_trained, layer_shape, model_shape, weights_of
from fastlm.memory.manager import Memory, Weights
from fastlm.memory.planner import Batch, Model
from fastlm.patching import patch_of
from fastlm_kernels.attention import (
    SequenceLayout,
    attention,
    layout_from_cu_seqlens,
    packed_layout,
    padded_layout,
)

# The name in `config._attn_implementation` under which transformers finds our mask and attention functions.
ATTENTION = "fastlm"
_LAYOUT = "sequence_layout"
# The keyword argument that tells a stock attention of its layer's window now; its module read the config's when it was made.
WINDOW = "window_now"
# The keyword argument that tells the first layer whether anybody reads the gradient of its input.
NEEDS_INPUT_GRADIENT = "needs_input_gradient"
# The keyword argument that carries a forward's `RotaryTables` from layer to layer.
TABLES = "rotary_tables"
# The keyword argument that brings the layers the call that they are a part of.
STACK_CALL = "stack_call"
# Hooks that trainers leave on the embeddings: they mark their output, or add noise to it, and read no gradient.
_UNREADING_HOOKS = ("make_inputs_require_grads", "make_inputs_require_grad", "neftune_post_forward_hook")
# What stock forwards and outputs call the key/value cache: transformers renamed it in 5.24.
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"


def sequence_layout(kwargs: dict[str, Any], tokens: Tensor) -> SequenceLayout | None:
    """The layout for tokens [B, S, …]: given by the backbone, or by a collator as cumulative lengths."""
    layout = kwargs.get(_LAYOUT)
    if layout is None and kwargs.get("cu_seq_lens_q") is not None:
        n_tokens = tokens.shape[0] * tokens.shape[1]
        layout = layout_from_cu_seqlens(kwargs["cu_seq_lens_q"], kwargs["max_length_q"], n_tokens)
    return layout


class RotaryTables:
    """A family's rotary tables as its rotation reads them, made for the first layer of a forward and handed to the others."""

    def __init__(self, family: Family) -> None:
        self._family = family
        # by the identity of the cosines, which are kept here so that it stays theirs
        self._made: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def read(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [B or 1, S, R] with each value once in the first half, in the dtype of the rotation."""
        if not self._family.rope_tables_interleaved and not self._family.rope_rounds_once:
            return cos, sin
        if id(cos) not in self._made:
            self._made[id(cos)] = (cos, *(self._converted(table) for table in (cos, sin)))
        return self._made[id(cos)][1:]

    def _converted(self, table: Tensor) -> Tensor:
        if self._family.rope_tables_interleaved:
            table = torch.cat((table[..., ::2], table[..., ::2]), -1)
        return table.float() if self._family.rope_rounds_once else table


def stock_mask(kwargs: dict[str, Any], hidden_states: Tensor, window: int | None, implementation: str) -> Tensor | None:
    """The mask for a stock attention that is not told of the layout: what the call's own says, else what layout and window do.

    [B, 1, S, S], true where a query sees a key; for eager attention, which adds it to the scores, 0 there and very small elsewhere.
    """
    layout, given = sequence_layout(kwargs, hidden_states), kwargs.get("attention_mask")
    if given is not None or (layout is None and window is None and implementation != "eager"):
        return given
    batch, length, _ = hidden_states.shape
    device = hidden_states.device
    i = torch.arange(length, device=device)
    seen = (i[:, None] >= i)[None].expand(batch, -1, -1)
    if layout is not None:
        places = torch.arange(batch * length, device=device) if layout.indices is None else layout.indices
        of_token = torch.bucketize(torch.arange(len(places), device=device), layout.cu_seqlens[1:], right=True)
        sequence = torch.full((batch * length,), -1, device=device).index_copy_(0, places, of_token).view(batch, length)
        seen = seen & (sequence[:, :, None] == sequence[:, None]) & (sequence[:, :, None] >= 0)
    if window is not None:
        seen = seen & (i[:, None] - i < window)
    if implementation != "eager":
        return seen[:, None]
    hidden = torch.finfo(hidden_states.dtype).min
    return torch.zeros_like(seen, dtype=hidden_states.dtype).masked_fill_(~seen, hidden)[:, None]


def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """transformers' mask hook: None for whole rows, whose padding and packing the layout describes, else SDPA's mask.

    A padding mask [B, 1, S] comes from our backbone, which made a layout of it; one [B, S] comes from elsewhere (generation asks for
    masks before it calls the model), and nothing else will tell the attention of it.
    """
    is_described = attention_mask is None or attention_mask.ndim == 3
    if attention_mask is not None and is_described:
        attention_mask = attention_mask[:, 0].bool()
    is_whole_row = isinstance(q_offset, int) and q_offset == 0 and q_length == kv_length
    # `use_vmap` marks a mask that the model combines with one of its own
    if is_whole_row and is_described and not use_vmap:
        return None
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        use_vmap=use_vmap,
        # without a mask, SDPA lets query i see the keys up to i, and ours takes the queries as the last ones: with the empty
        # places of a static cache behind them, only a single query is the same to both
        allow_is_causal_skip=allow_is_causal_skip and q_length == 1,
        **kwargs,
    )


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention hook, for a stock attention module inside a patched model.

    query [B, H, S, E], key and value [B, K, Skv, E] -> [B, S, H, E], None.
    """
    if dropout:
        raise ValueError(
            f"attention dropout {dropout} is not supported by attention implementation {ATTENTION!r}: set "
            "config.attention_dropout to 0 or load with attn_implementation='sdpa'"
        )
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        # as autocast does for torch's own attention: a rotation in float32 may have widened some of them
        query, key, value = (t.to(torch.get_autocast_dtype(kind)) for t in (query, key, value))
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    is_whole_row = attention_mask is None and k.shape[1] == q.shape[1]
    out = attention(
        q, k, v, scaling if scaling is not None else query.shape[-1] ** -0.5,
        layout=sequence_layout(kwargs, q) if is_whole_row else None,
        window=kwargs.get(WINDOW, sliding_window) if attention_mask is None else None, mask=attention_mask, softcap=softcap,
    )  # fmt: skip
    return out, None


def register() -> None:
    """Make our attention known to transformers under its name, through its own registries. No model changes by it."""
    if ATTENTION not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        AttentionInterface.register(ATTENTION, attention_function)
        AttentionMaskInterface.register(ATTENTION, mask_function)


def _packed(positions: Tensor, caches: bool) -> SequenceLayout | None:
    """The layout of packed rows, by transformers' rule; positions [B, S].

    transformers looks for packed rows only where no cache is made. Where one would be, positions that fall back are samples all
    the same, which must not see each other; positions that only grow are one sample, as they are to transformers.
    """
    if caches and not (positions.diff(dim=1) < 1).any():
        return None
    return packed_layout(positions)


def _is_watched(embeddings: nn.Module) -> bool:
    """Whether hooks on the embeddings may read a gradient of their output."""
    hooks = embeddings._forward_hooks.values()
    return bool(embeddings._backward_hooks or embeddings._backward_pre_hooks) or any(
        not isinstance(hook, types.FunctionType) or hook.__name__ not in _UNREADING_HOOKS for hook in hooks
    )


def _unwatched(layers: nn.ModuleList) -> int:
    """The number of layers if only the next one reads what each returns, else 0."""
    for i, layer in enumerate(layers):
        patch = patch_of(layer)
        if patch is None or patch.part != "block" or not patch.active or adapters.has_hooks(layer):
            return 0
        if layer.self_attn.layer_idx != i:
            # somebody took layers out or moved them
            return 0
    return len(layers)


def _plans(
    self: nn.Module, rows: Tensor, layout: SequenceLayout | None
) -> tuple[Memory, tuple[MemoryPlan, ...]] | None:
    """What each layer keeps in this call of the backbone, where plans decide that."""
    patches = [patch_of(layer) for layer in self.layers]
    first = patches[0] if patches else None
    if first is None or not self.training or not torch.is_grad_enabled():
        return None
    if any(patch is None or patch.part != "block" or not patch.active for patch in patches):
        return None
    memory: Memory | None = first.facts.memory
    if memory is None or not memory.is_asked(first.recomputes):
        return None
    devices = {next(self.layers[i].parameters()).device for i in (0, -1)}
    if len(devices) > 1:
        # layers on several devices are not planned
        return None
    (device,) = devices
    length = rows.shape[1] if layout is None else min(layout.max_seqlen, rows.shape[0] * rows.shape[1])
    batch = Batch(rows.shape[0] * rows.shape[1], length, rows.shape[0] * rows.shape[1])
    describe = functools.partial(describe_backbone, self, rows.shape[0], rows.shape[1], layout)
    plans = memory.plans(batch, device, layout is None, describe)
    return None if plans is None else (memory, plans)


def describe_backbone(
    self: nn.Module, rows: int, length: int, layout: SequenceLayout | None = None
) -> tuple[Model, Weights]:
    """The patched layers of a model as numbers, and what lies beside their activations."""
    embeddings = self.get_input_embeddings()
    dtype, device = dtype_of(embeddings), next(self.layers[0].parameters()).device
    like = torch.empty(0, dtype=dtype, device=device)
    made = []
    for layer in self.layers:
        facts = patch_of(layer).facts
        backend = attention_library(facts.spec, like, rows, length, layout, facts.deterministic)
        made.append(layer_shape(layer, facts.family, facts.spec, dtype.itemsize, backend, facts.rounds_once))
    spec = patch_of(self.layers[0]).facts.spec
    model = model_shape(
        made,
        self.config.vocab_size,
        dtype.itemsize,
        spec.head_size,
        first_trained(self.layers, embeddings),
        device.type == "cuda",
    )
    return model, weights_of([self])


def _release_graphs(layers: nn.ModuleList) -> None:
    """Give back the memory of captured layers: an evaluation may need it."""
    for layer in layers:
        patch = patch_of(layer)
        if patch is not None and patch.part == "block" and patch.facts.graphs is not None:
            patch.facts.graphs.release()
            return


def forward(
    self: nn.Module,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: torch.Tensor | None = None,
    use_cache: bool | None = None,
    **kwargs: Any,
) -> Any:
    stock = patch_of(self).stock
    if not self.training:
        _release_graphs(self.layers)
    rows = input_ids if input_ids is not None else inputs_embeds
    if self.config._attn_implementation == ATTENTION and rows is not None and kwargs.get(_LAYOUT) is None:
        layout = None
        if kwargs.get("cu_seq_lens_q") is not None:
            layout = sequence_layout(kwargs, rows)
        elif isinstance(attention_mask, Tensor) and attention_mask.ndim == 2 and attention_mask.shape == rows.shape[:2]:
            layout = padded_layout(attention_mask)
            if layout is None:
                attention_mask = None
            elif patch_of(self).facts.window != "none" and layout.has_holes:
                # a window counts the tokens that a hole hides, and the layout leaves them out
                layout = None
            else:
                attention_mask = attention_mask[:, None]
        elif attention_mask is None and position_ids is not None and past_key_values is None:
            caches = self.config.use_cache if use_cache is None else use_cache
            layout = _packed(position_ids.expand(rows.shape[0], -1), caches)
            # with a cache, the samples would see each other
            use_cache = use_cache if layout is None else False
        if layout is not None:
            kwargs[_LAYOUT] = layout
        if attention_mask is None and past_key_values is None:
            # a mask that hides nothing: without any, transformers looks for packed rows itself, and waits for the device
            attention_mask = torch.ones((), dtype=torch.bool, device=rows.device).expand(
                rows.shape[0], 1, rows.shape[1]
            )
        kwargs[TABLES] = RotaryTables(patch_of(self).facts)
        embeddings = self.get_input_embeddings()
        embeds = embeddings.parameters() if inputs_embeds is None else [inputs_embeds]
        # who gets the hidden states may look at their gradients
        returns_them = kwargs.get("output_hidden_states", self.config.output_hidden_states)
        kwargs[NEEDS_INPUT_GRADIENT] = (
            any(t.requires_grad for t in embeds) or bool(returns_them) or _is_watched(embeddings)
        )
        planned = _plans(self, rows, layout)
        kwargs[STACK_CALL] = StackCall(
            0 if returns_them else _unwatched(self.layers),
            None if planned is None else planned[1],
            None if planned is None else planned[0].host,
        )
    return stock(
        self,
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        inputs_embeds=inputs_embeds,
        use_cache=use_cache,
        **{CACHE: past_key_values},
        **kwargs,
    )
