"""What a decoder layer is made of, as plain values and tensors: the input of the block's forward and backward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from fastlm.block.offload import Parcel
from fastlm_kernels.attention import SequenceLayout
from fastlm_kernels.lora import Group

if TYPE_CHECKING:
    from fastlm.block.rescue import Rescue


@dataclass(frozen=True)
class BlockSpec:
    """The shape of a family's layer; the norms that it has are told by `Layer`.

    Attributes:
        n_heads, n_kv_heads, head_size: of the attention.
        scale: factor of the attention scores.
        window: sliding window in tokens, or None.
        softcap: cap of the attention scores, or None.
        rotates: queries and keys are turned by their positions.
        rope_interleaved: rotated pairs are neighbours, not halves.
        qk_norm_place: as `Family`.
        activation: of the MLP, by the op's name.
        is_gated: the MLP multiplies act(gate) by up.
        is_parallel: attention and MLP read one norm and add to one residual stream.
        residual_multiplier: factor of what each half adds to the residual stream.
    """

    n_heads: int
    n_kv_heads: int
    head_size: int
    scale: float
    window: int | None
    softcap: float | None
    rotates: bool
    rope_interleaved: bool
    qk_norm_place: str
    activation: str
    is_gated: bool
    is_parallel: bool
    residual_multiplier: float

    @property
    def widths(self) -> list[int]:
        """Columns of q, k and v in the stacked projection."""
        return [n * self.head_size for n in (self.n_heads, self.n_kv_heads, self.n_kv_heads)]


@dataclass(frozen=True)
class Norm:
    """One RMSNorm, or LayerNorm: weight [D] (of heads also [heads, E]) and bias [D] or None; the rest as `rms_norm`."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    weight_offset: float
    casts_before_weight: bool
    is_layer_norm: bool


@dataclass(frozen=True)
class MemoryPlan:
    """What a layer keeps from its forward for its backward beside its input, which it always does; the rest it makes again.

    Norm outputs and the MLP's product are never kept. What is kept waits on the device or, where `offloads` names it, on the host. A
    plan changes no value.

    Attributes:
        qkv: queries, keys and values.
        attention: the attention's output and its log-sum-exp.
        residual: the residual stream after the attention and, where it is normed before it is added, what the attention added.
        gate_up: the MLP's input projections.
        down: what the MLP's norm reads before its output is added; of use only where there is such a norm.
        offloads: names of the fields above that are kept on the host, and "input".
        holds_weights: what is decoded to make something again stays decoded for the gradients; else it is decoded twice.
    """

    qkv: bool
    attention: bool
    residual: bool
    gate_up: bool
    down: bool
    offloads: frozenset[str] = frozenset()
    holds_weights: bool = True


# What a plan may send to the host.
OFFLOADABLE = ("input", "qkv", "attention", "residual", "gate_up", "down")
KEEP_ALL = MemoryPlan(qkv=True, attention=True, residual=True, gate_up=True, down=True)
# all but what is widest and cheapest to make again
SELECTIVE = MemoryPlan(qkv=True, attention=True, residual=True, gate_up=False, down=True)
RECOMPUTE_ALL = MemoryPlan(qkv=False, attention=False, residual=False, gate_up=False, down=False)
# nothing that can be made again is held
SMALLEST = replace(RECOMPUTE_ALL, holds_weights=False)


@dataclass(frozen=True)
class Layer:
    """One layer at one call: frozen weights and everything else that is no input of the autograd function.

    Attributes:
        qkv, out, gate_up, down: the projections by the input they share.
        attention_norm, attention_out_norm, mlp_norm, mlp_out_norm: before and after each half, or None.
        q_norm, k_norm: of queries and keys, or None.
        layout: where samples begin and end, or None for whole rows.
        deterministic: the backward of the attention adds in a fixed order.
        rounds_once: an adapter's product is added before the base product is rounded, where that is one GEMM.
        parcel: takes what the plan sends to the host; None where it sends nothing.
        rescue: runs passes again that were short of memory; None lets the error out.
    """

    spec: BlockSpec
    plan: MemoryPlan
    qkv: Group
    out: Group
    gate_up: Group
    down: Group
    attention_norm: Norm | None
    attention_out_norm: Norm | None
    mlp_norm: Norm | None
    mlp_out_norm: Norm | None
    q_norm: Norm | None
    k_norm: Norm | None
    layout: SequenceLayout | None
    deterministic: bool
    rounds_once: bool
    parcel: Parcel | None = None
    rescue: Rescue | None = None

    @property
    def groups(self) -> tuple[Group, Group, Group, Group]:
        return self.qkv, self.out, self.gate_up, self.down

    @property
    def norms(self) -> tuple[Norm | None, ...]:
        return (
            self.attention_norm, self.attention_out_norm, self.mlp_norm, self.mlp_out_norm, self.q_norm, self.k_norm,
        )  # fmt: skip
