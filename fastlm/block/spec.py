"""What a decoder layer is made of, as plain values and tensors: the input of the block's forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fastlm_kernels.attention import SequenceLayout
from fastlm_kernels.lora import Group


@dataclass(frozen=True)
class BlockSpec:
    """The shape of a family's layer: pre-norm attention with rotary embedding, then a pre-norm gated MLP.

    Attributes:
        n_heads, n_kv_heads, head_size: of the attention.
        scale: factor of the attention scores.
        window: sliding window in tokens, or None.
        activation: of the gated MLP, by the op's name.
        norm_weight_offset, norm_casts_before_weight: as `rms_norm`.
        rope_interleaved: rotated pairs are neighbours, not halves.
    """

    n_heads: int
    n_kv_heads: int
    head_size: int
    scale: float
    window: int | None
    activation: str
    norm_weight_offset: float
    norm_casts_before_weight: bool
    rope_interleaved: bool

    @property
    def widths(self) -> list[int]:
        """Columns of q, k and v in the stacked projection."""
        return [n * self.head_size for n in (self.n_heads, self.n_kv_heads, self.n_kv_heads)]


@dataclass(frozen=True)
class Norm:
    """One RMSNorm: weight [D], and eps."""

    weight: Tensor
    eps: float


@dataclass(frozen=True)
class MemoryPlan:
    """What a layer keeps from its forward for its backward; the layer's input always is.

    Attributes:
        keeps: True keeps q, k, v, the attention's output, the residual stream after it, gate and up; False makes them again.
            Norm outputs and the MLP's product are never kept, the down projection is never made again.
    """

    keeps: bool


@dataclass(frozen=True)
class Layer:
    """One layer at one call: frozen weights and everything else that is no input of the autograd function.

    Attributes:
        qkv, out, gate_up, down: the projections by the input they share.
        input_norm, post_norm: before attention and before the MLP.
        q_norm, k_norm: of each head, or None.
        layout: where samples begin and end, or None for whole rows.
    """

    spec: BlockSpec
    plan: MemoryPlan
    qkv: Group
    out: Group
    gate_up: Group
    down: Group
    input_norm: Norm
    post_norm: Norm
    q_norm: Norm | None
    k_norm: Norm | None
    layout: SequenceLayout | None


# The adapters' tensors travel as (bias, A, B) of q, k, v, o, gate, up, down; these are the groups' shares of them.
QKV, OUT, MLP = slice(0, 9), slice(9, 12), slice(12, 21)
GATE_UP, DOWN = slice(12, 18), slice(18, 21)
