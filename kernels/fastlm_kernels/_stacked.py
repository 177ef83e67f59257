"""Projections that share their input, with their adapters, as plain functions over stacked tensors.

    y_i = x W_i^T + bias_i + s_i * dropout_i(x) A_i^T B_i^T          Hu et al. 2021, arXiv:2106.09685

4-bit weights are decoded into one stacked buffer and multiplied once; x and dy are read once for all adapters, whose B lie on the
diagonal of one matrix. Weights are frozen and never kept decoded longer than a pass. GEMMs accumulate in float32 and add into their
output.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastlm_kernels._lora_pack import pack_adapters
from fastlm_kernels.nf4 import NF4Weight, nf4_decode, nf4_decode_stacked

# T rows (tokens), K input features, N output features, R LoRA rank


class Projection(NamedTuple):
    """One linear layer and the adapter that is active on it.

    Attributes:
        weight: frozen, [N, K]: a tensor or a 4-bit weight.
        bias: [N] or None; may be trained.
        lora_a: [R, K], or None without an adapter.
        lora_b: [N, R], or None without an adapter.
        scaling: factor of the adapter's output.
        dropout: probability of zeroing an input of the adapter, 0 outside training.
    """

    weight: Tensor | NF4Weight
    bias: Tensor | None = None
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None
    scaling: float = 1.0
    dropout: float = 0.0

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.weight.shape
        return n, k


@dataclass(frozen=True)
class Group:
    """Projections that share their input: what they hold beside the tensors that autograd sees.

    Attributes:
        versions: of frozen tensors that the backward reads again and autograd does not watch: each with its version in the forward.
            None are watched without gradients, and none of 4-bit weights, which bitsandbytes' own backward does not watch either.
    """

    weights: tuple[Tensor | NF4Weight, ...]
    scalings: tuple[float, ...]
    dropouts: tuple[float, ...]
    seeds: tuple[int, ...]
    lora_dtype: torch.dtype | None
    versions: tuple[tuple[Tensor, int], ...] = ()

    def refuse_changes(self) -> None:
        """What autograd says of a tensor of its own that was written to between forward and backward.

        Raises:
            RuntimeError: if a frozen weight was.
        """
        for tensor, version in self.versions:
            if tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: a frozen "
                    f"weight {list(tensor.shape)} is at version {tensor._version}; expected version {version} instead"
                )

    @functools.cached_property
    def widths(self) -> list[int]:
        return [weight.shape[0] for weight in self.weights]

    @functools.cached_property
    def rows(self) -> list[slice]:
        """Where each projection lies in the stacked output."""
        stops = list(itertools.accumulate(self.widths, initial=0))
        return [slice(*bounds) for bounds in itertools.pairwise(stops)]


def make_group(
    projections: Sequence[Projection], lora_dtype: torch.dtype | None, others: Sequence[Tensor] = ()
) -> Group:
    """Projections as a group. `others`: further frozen tensors that the same backward reads."""
    weights, _, _, _, scalings, dropouts = zip(*projections, strict=True)
    # The seed of a dropout mask comes from torch's CPU generator, which checkpointing restores for a replay.
    seeds = tuple([int(torch.randint(2**62, ())) if p else 0 for p in dropouts])
    versions: list[tuple[Tensor, int]] = []
    if torch.is_grad_enabled():
        watched = [*others, *(w for w in weights if isinstance(w, Tensor))]
        versions = [(t, t._version) for t in watched if not t.is_inference()]
    return Group(weights, scalings, dropouts, seeds, lora_dtype, tuple(versions))


def group_tensors(projections: Sequence[Projection]) -> list[Tensor | None]:
    """Per projection bias, A, B: the inputs of the Function, so that hooks, DDP and optimizers see the parameters."""
    return [tensor for _, bias, lora_a, lora_b, _, _ in projections for tensor in (bias, lora_a, lora_b)]


def _dropout(x: Tensor, p: float, seed: int) -> Tensor:
    """x with each value zeroed with probability p and the others scaled by 1 / (1 - p); the same seed, the same mask."""
    generator = torch.Generator(x.device).manual_seed(seed)
    keep = torch.empty(x.shape, dtype=x.dtype, device=x.device).bernoulli_(1.0 - p, generator=generator)
    # a number is not rounded to x's precision, as a mask that holds it would be: all values would be off by the same share
    return (x * keep).mul_(1.0 / (1.0 - p))


def _add_product(y: Tensor, left: Tensor, right: Tensor) -> None:
    """y += left @ right. Rounded once where the factors are as wide as y or wider, else the product is rounded first, as in PEFT."""
    if left.dtype == y.dtype:
        y.addmm_(left, right)
    elif torch.promote_types(left.dtype, y.dtype) == left.dtype:
        y.copy_(torch.addmm(y.to(left.dtype), left, right))
    else:
        y.add_(left @ right)


# The key under which a pass keeps the rank-R product of all adapters that share it; others go by their projection's index.
_TOGETHER = -1
# Augmented GEMMs: columns are added in multiples of this, and only where they are few beside the GEMM's own (measured on H200: +0 to +2 %
# of the frozen GEMM against +7 to +15 % for a product of its own).
_PAD = 64
_MIN_TOKENS, _MIN_FEATURES = 512, 1024


def _widened(x: Tensor, columns: int) -> Tensor:
    """x [T, K], made by `input` or `gradient`, with the columns of its buffer that stand beside it."""
    return x.as_strided((x.shape[0], x.shape[1] + columns), x.stride())


def padding(tokens: int, features: int, rank: int) -> int:
    """Columns that carry the adapters through a GEMM with `features` columns or rows of its own; 0: a product of its own is as good."""
    pad = -(-rank // _PAD) * _PAD
    return pad if tokens >= _MIN_TOKENS and features >= max(_MIN_FEATURES, 8 * pad) else 0


class StackedLinear:
    """A group of projections during one pass: forward, backward, or both.

    Where weights are decoded, the adapters may ride in the base GEMM: with B beside the weight and x A^T beside x,

        y = [x, x A^T] [W, B]^T        dx = [dy, dy B] [[W], [A]]

    are one GEMM each with one accumulator. For that, x and dy must be written into the room that `input` and `gradient` give.
    y is then rounded once, where PEFT rounds the base product first and so loses what an adapter adds below half a unit of it.

    Attributes:
        a: [sum R, K], the A of all adapters that share a pass over x, below each other; None without any.
        b: [sum N, sum R], their s_i B_i on the diagonal and zero elsewhere; None without any. Where adapters ride, both are
            filled up with zeros.
        low: rank-R products of the forward that the backward needs: x A^T of all adapters that share a pass over x, then of each
            that has a dropout of its own. `saved` and `restore` carry them from one pass to the next.
    """

    def __init__(
        self,
        group: Group,
        tensors: Sequence[Tensor | None],
        dtype: torch.dtype,
        x_room: int = 0,
        dy_room: int = 0,
        holds: bool = False,
    ) -> None:
        """
        Args:
            tensors: bias, A, B of each projection, as `group_tensors` orders them.
            dtype: of the base GEMMs; adapters keep their own unless the group names one.
            x_room, dy_room: tokens of the pass if x comes from `input`, and dy from `gradient`; else 0.
            holds: keep the decoded weights from the forward for the backward of the same pass.
        """
        group.refuse_changes()
        self.group, self.tensors, self.dtype, self.holds = group, tensors, dtype, holds
        self.width, self.features = sum(group.widths), group.weights[0].shape[1]
        self.low: dict[int, Tensor] = {}
        self.high: dict[int, Tensor] = {}
        adapted = [i for i in range(len(group.weights)) if tensors[3 * i + 1] is not None]
        self.lora_dtype = group.lora_dtype or next((self._lora(i)[0].dtype for i in adapted), dtype)
        self.alone = [i for i in adapted if group.dropouts[i]]
        self.spans: dict[int, slice] = {}
        rank = 0
        for i in adapted:
            if not group.dropouts[i]:
                self.spans[i] = slice(rank, rank + self._lora(i)[0].shape[0])
                rank = self.spans[i].stop
        quantized = [w for w in group.weights if not isinstance(w, Tensor)]
        self.quantized = quantized if len(quantized) == len(group.weights) else None
        rides = rank and self.quantized is not None and self.lora_dtype == dtype
        # biases ride too, in the last column
        columns = rank + any(b is not None for b in tensors[::3])
        self.x_pad = padding(x_room, self.features, columns) if rides else 0
        self.dy_pad = padding(dy_room, self.width, columns) if rides else 0
        self.rank = max(self.x_pad, self.dy_pad) or rank
        self._decoded: Tensor | None = None
        self.a: Tensor | None = None
        self.b: Tensor | None = None

    def _lora(self, i: int) -> tuple[Tensor, Tensor]:
        """A and B of a projection that has an adapter."""
        a, b = self.tensors[3 * i + 1], self.tensors[3 * i + 2]
        assert a is not None and b is not None
        return a, b

    def input(self, tokens: int, device: torch.device) -> Tensor:
        """A new [T, K] for x, of unit column stride."""
        return torch.empty((tokens, self.features + self.x_pad), dtype=self.dtype, device=device)[:, : self.features]

    def gradient(self, tokens: int, device: torch.device) -> Tensor:
        """A new [T, sum N] for dy, of unit column stride."""
        return torch.empty((tokens, self.width + self.dy_pad), dtype=self.dtype, device=device)[:, : self.width]

    def saved(self) -> list[Tensor]:
        """The forward's products, for `restore` in the backward. Copies of what lies beside x, which they would keep."""
        return [low.contiguous() for low in self.low.values()]

    def restore(self, saved: Sequence[Tensor]) -> None:
        keys = ([_TOGETHER] if self.spans else []) + self.alone
        self.low = dict(zip(keys, saved, strict=True))

    def _pack(self) -> None:
        """Gather the adapters that share a pass over x into `a` and `b`, in the room beside the weights where they ride."""
        if self.a is not None or not self.spans:
            return
        loras, scalings = [self._lora(i) for i in self.spans], [self.group.scalings[i] for i in self.spans]
        if len(self.group.weights) == 1 and not self.x_pad and not self.dy_pad:
            self.a, self.b = (t.to(self.lora_dtype) for t in loras[0])
            self.b = self.b if scalings[0] == 1.0 else self.b * scalings[0]
            return
        a, b = self._factors(loras[0][0].device)
        pack_adapters(loras, scalings, [self.group.rows[i] for i in self.spans], a, b)
        self.a, self.b = a, b

    def _factors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Room for `a` and `b`: beside the decoded weights where the adapters ride."""
        if self.dy_pad:
            a = self._room()[self.width :, : self.features]
        else:
            a = torch.empty((self.rank, self.features), dtype=self.lora_dtype, device=device)
        if self.x_pad:
            return a, self._room()[: self.width, self.features :]
        return a, torch.empty((self.width, self.rank), dtype=self.lora_dtype, device=device)

    def _room(self) -> Tensor:
        """The decoded weights [sum N, K], with B's columns beside and A's rows below them where adapters ride."""
        if self._decoded is None:
            assert self.quantized is not None
            shape = (self.width + self.dy_pad, self.features + self.x_pad)
            self._decoded = torch.empty(shape, dtype=self.dtype, device=self.quantized[0].device)
            if all(w.dtype == self.dtype for w in self.quantized):
                nf4_decode_stacked(self.quantized, self._decoded[: self.width, : self.features])
            else:
                # by way of the dtype it was quantized from, as bitsandbytes rounds it
                for i, weight in enumerate(self.quantized):
                    self._decoded[self.group.rows[i], : self.features] = nf4_decode(weight, weight.dtype)
        return self._decoded

    def _stacked(self) -> Tensor | None:
        """All weights as one [sum N, K], or None where a dense weight would have to be copied."""
        if self.quantized is not None:
            return self._room()[: self.width, : self.features]
        return self._dense(0) if len(self.group.weights) == 1 else None

    def _dense(self, i: int) -> Tensor:
        weight = self.group.weights[i]
        if isinstance(weight, Tensor):
            return weight.to(self.dtype)
        return nf4_decode(weight, weight.dtype).to(self.dtype)

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x [T, K] -> y [T, sum N], where a backward follows with the room of `gradient`. Leaves the low-rank products in `low`.

        out: where to write y, of unit column stride; there is no room beside it.
        """
        self.make_low(x)
        y = self.gradient(x.shape[0], x.device) if out is None else out
        if self.x_pad:
            self._riding(_widened(x, self.x_pad), y)
        else:
            self._beside(x, y)
        for i in self.alone:
            side = self._lora(i)[1].to(self.lora_dtype).t() * self.group.scalings[i]
            _add_product(y[:, self.group.rows[i]], self.low[i], side)
        if not self.holds:
            self._decoded = None
        return y

    def forward_add(self, x: Tensor, residual: Tensor, owns: bool) -> Tensor:
        """`forward` plus residual [T, sum N], which may be overwritten if `owns`.

        Where no adapter has to be added behind the GEMM, the sum is the GEMM's own and rounded once.
        """
        has_bias = any(b is not None for b in self.tensors[::3])
        stands_behind = self.alone or has_bias or (self.spans and not self.x_pad)
        weights = None if stands_behind else self._room()[: self.width] if self.x_pad else self._stacked()
        if weights is None:
            return self.forward(x).add_(residual)
        self.make_low(x)
        left = _widened(x, self.x_pad)
        y = residual.addmm_(left, weights.t()) if owns else torch.addmm(residual, left, weights.t())
        if not self.holds:
            self._decoded = None
        return y

    def _riding(self, x: Tensor, y: Tensor) -> None:
        """[x, x A^T] -> y."""
        weights, bias = self._room()[: self.width], self._bias(x)
        if bias is not None:
            # torch would write the bias into y first, and let the GEMM read it there: cuBLAS may round once more for that
            x[:, -1].fill_(1.0)
            weights[:, -1] = bias
        torch.mm(x, weights.t(), out=y)
        if bias is not None and self.holds:
            # where the backward reads B, which has nothing there
            weights[:, -1] = 0.0

    def _beside(self, x: Tensor, y: Tensor) -> None:
        """x -> y, rounded where PEFT rounds: the base product first, then the adapters' added to it."""
        bias, stacked = self._bias(x), self._stacked()
        if stacked is None:
            for i, rows in enumerate(self.group.rows):
                part, dense = y[:, rows], self._dense(i).t()
                if bias is None:
                    torch.mm(x, dense, out=part)
                else:
                    torch.addmm(bias[rows], x, dense, out=part)
        elif bias is None:
            torch.mm(x, stacked.t(), out=y)
        else:
            torch.addmm(bias, x, stacked.t(), out=y)
        if self.b is not None:
            _add_product(y, self.low[_TOGETHER], self.b.t())

    def _bias(self, x: Tensor) -> Tensor | None:
        biases = self.tensors[::3]
        if all(b is None for b in biases):
            return None
        filled = [x.new_zeros(n) if b is None else b for b, n in zip(biases, self.group.widths, strict=True)]
        return torch.cat([b.to(x.dtype) for b in filled])

    def make_low(self, x: Tensor) -> None:
        """Make the low-rank products of x [T, K], without the projections themselves."""
        self._pack()
        if self.a is not None and self.x_pad:
            self.low[_TOGETHER] = torch.mm(x, self.a.t(), out=_widened(x, self.x_pad)[:, self.features :])
        elif self.a is not None:
            self.low[_TOGETHER] = x.to(self.lora_dtype) @ self.a.t()
        for i in self.alone:
            self.low[i] = self._dropped(x, i) @ self._lora(i)[0].to(self.lora_dtype).t()

    def _dropped(self, x: Tensor, i: int) -> Tensor:
        # the mask is its own transpose: a gradient passes where the input did
        return _dropout(x.to(self.lora_dtype), self.group.dropouts[i], self.group.seeds[i])

    def make_high(self, dy: Tensor) -> None:
        """Make s dy B of each adapter from dy [T, sum N], as `low` holds x A^T."""
        self._pack()
        if self.b is not None and self.dy_pad:
            self.high[_TOGETHER] = torch.mm(dy, self.b, out=_widened(dy, self.dy_pad)[:, self.width :])
        elif self.b is not None:
            self.high[_TOGETHER] = dy.to(self.lora_dtype) @ self.b
        for i in self.alone:
            side = dy[:, self.group.rows[i]].to(self.lora_dtype) @ self._lora(i)[1].to(self.lora_dtype)
            self.high[i] = side.mul_(self.group.scalings[i])

    def backward_x(self, dy: Tensor) -> Tensor:
        """dy [T, sum N] -> dx [T, K]. Leaves its rank-R products in `high` and lets go of the decoded weights."""
        self.make_high(dy)
        is_riding = self.dy_pad > 0
        dx = _widened(dy, self.dy_pad) @ self._room()[:, : self.features] if is_riding else self._backward_beside(dy)
        self._decoded = None
        for i in self.alone:
            side = self.high[i] @ self._lora(i)[0].to(self.lora_dtype)
            dx.copy_(dx.to(side.dtype) + self._dropped(side, i))
        return dx

    def _backward_beside(self, dy: Tensor) -> Tensor:
        # the adapters' share first, then the GEMMs add to it: dx is rounded once where a stack is one GEMM
        is_one_dtype = self.a is not None and self.lora_dtype == dy.dtype
        dx = self.high[_TOGETHER] @ self.a if self.a is not None and is_one_dtype else None
        stacked = self._stacked()
        if stacked is not None:
            dx = dy @ stacked if dx is None else dx.addmm_(dy, stacked)
        else:
            for i in range(len(self.group.weights)):
                dense, part = self._dense(i), dy[:, self.group.rows[i]]
                dx = part @ dense if dx is None else dx.addmm_(part, dense)
        assert dx is not None  # a group has a projection
        if self.a is not None and not is_one_dtype:
            _add_product(dx, self.high[_TOGETHER], self.a)
        return dx

    def backward_adapters(self, dy: Tensor, x: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
        """Gradients of (bias, A, B) of each projection, in the order of `group_tensors`; None where nobody asks."""
        scalings = self.group.scalings
        grads: dict[int, Tensor] = {}
        if any(needed[3 * i + 1] for i in self.spans):
            da = self.high[_TOGETHER].t() @ x.to(self.lora_dtype)
            grads |= {3 * i + 1: da[span] for i, span in self.spans.items()}
        if any(needed[3 * i + 2] for i in self.spans):
            db = dy.to(self.lora_dtype).t() @ self.low[_TOGETHER]
            for i, span in self.spans.items():
                block = db[self.group.rows[i], span]
                grads[3 * i + 2] = block if scalings[i] == 1.0 else block * scalings[i]
        for i in self.alone:
            part = dy[:, self.group.rows[i]].to(self.lora_dtype)
            grads[3 * i + 1] = self.high[i].t() @ self._dropped(x, i)
            grads[3 * i + 2] = (part.t() @ self.low[i]).mul_(scalings[i])
        for i in range(len(self.group.weights)):
            if needed[3 * i]:
                grads[3 * i] = dy[:, self.group.rows[i]].sum(0, dtype=torch.float32)
        return [
            grads[i].to(t.dtype) if t is not None and needed[i] and i in grads else None
            for i, t in enumerate(self.tensors)
        ]


def check_projections(x: Tensor, projections: Sequence[Projection]) -> None:
    if not projections:
        raise ValueError("at least one projection is needed")
    for i, p in enumerate(projections):
        n, k = p.shape
        if x.ndim == 0 or x.shape[-1] != k:
            raise ValueError(f"projection {i}: weight [{n}, {k}] does not fit x {tuple(x.shape)}")
        if (p.lora_a is None) != (p.lora_b is None):
            raise ValueError(f"projection {i}: lora_a and lora_b go together, got only one of them")
        if p.lora_a is not None and p.lora_b is not None:
            rank = p.lora_a.shape[0]
            if tuple(p.lora_a.shape) != (rank, k) or tuple(p.lora_b.shape) != (n, rank):
                raise ValueError(
                    f"projection {i}: lora_a must be [R, {k}] and lora_b [{n}, R], "
                    f"got {tuple(p.lora_a.shape)} and {tuple(p.lora_b.shape)}"
                )
        if p.bias is not None and tuple(p.bias.shape) != (n,):
            raise ValueError(f"projection {i}: bias must be [{n}], got {tuple(p.bias.shape)}")
        if not 0.0 <= p.dropout < 1.0:
            raise ValueError(f"projection {i}: dropout must be in [0, 1), got {p.dropout}")
