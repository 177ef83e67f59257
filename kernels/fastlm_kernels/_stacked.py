"""Projections that share their input, with their adapters, as plain functions over stacked tensors.

    y_i = x W_i^T + bias_i + s_i * dropout_i(x) A_i^T B_i^T          Hu et al. 2021, arXiv:2106.09685

4-bit weights are decoded into one stacked buffer and multiplied once; x and dy are read once for all adapters, whose B lie on the
diagonal of one matrix. Weights are frozen and never kept decoded longer than a pass. GEMMs accumulate in float32 and add into their
output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastlm_kernels.nf4 import NF4Weight, nf4_decode

# T rows (tokens), K input features, N output features, R LoRA rank


@dataclass(frozen=True)
class Projection:
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
    """Projections that share their input: what they hold beside the tensors that autograd sees."""

    weights: tuple[Tensor | NF4Weight, ...]
    scalings: tuple[float, ...]
    dropouts: tuple[float, ...]
    seeds: tuple[int, ...]
    lora_dtype: torch.dtype | None

    @property
    def widths(self) -> list[int]:
        return [weight.shape[0] for weight in self.weights]


def make_group(projections: Sequence[Projection], lora_dtype: torch.dtype | None) -> Group:
    # The seed of a dropout mask comes from torch's CPU generator, which checkpointing restores for a replay.
    seeds = tuple(int(torch.randint(2**62, ())) if p.dropout else 0 for p in projections)
    return Group(
        weights=tuple(p.weight for p in projections),
        scalings=tuple(p.scaling for p in projections),
        dropouts=tuple(p.dropout for p in projections),
        seeds=seeds,
        lora_dtype=lora_dtype,
    )


def group_tensors(projections: Sequence[Projection]) -> list[Tensor | None]:
    """Per projection bias, A, B: the inputs of the Function, so that hooks, DDP and optimizers see the parameters."""
    return [tensor for p in projections for tensor in (p.bias, p.lora_a, p.lora_b)]


def _dropout(x: Tensor, p: float, seed: int) -> Tensor:
    """x with each value zeroed with probability p and the others scaled by 1 / (1 - p); the same seed, the same mask."""
    generator = torch.Generator(x.device).manual_seed(seed)
    keep = torch.empty(x.shape, dtype=x.dtype, device=x.device).bernoulli_(1.0 - p, generator=generator)
    return x * keep.div_(1.0 - p)


def _decode(weight: Tensor | NF4Weight, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """The weight [N, K] in `dtype`; a 4-bit one by way of the dtype it was quantized from, as bitsandbytes rounds it."""
    if isinstance(weight, Tensor):
        return weight.to(dtype)
    if weight.dtype == dtype:
        return nf4_decode(weight, dtype, out=out)
    decoded = nf4_decode(weight, weight.dtype)
    return decoded.to(dtype) if out is None else out.copy_(decoded)


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


class StackedLinear:
    """A group of projections during one pass: forward, then backward.

    Attributes:
        a: [sum R, K], the A of all adapters that share a pass over x, below each other; None without any.
        b: [sum N, sum R], their s_i B_i on the diagonal and zero elsewhere; None without any.
        low: rank-R products of the forward that the backward needs: x A^T of all adapters that share a pass over x, then of each
            that has a dropout of its own. `saved` and `restore` carry them from one pass to the next.
    """

    def __init__(self, group: Group, tensors: Sequence[Tensor | None], dtype: torch.dtype, holds: bool = False) -> None:
        """
        Args:
            tensors: bias, A, B of each projection, as `group_tensors` orders them.
            dtype: of the base GEMMs; adapters keep their own unless the group names one.
            holds: keep the decoded weights from the forward for the backward of the same pass.
        """
        self.group, self.tensors, self.dtype, self.holds = group, tensors, dtype, holds
        self.decoded: Tensor | None = None
        self.low: dict[int, Tensor] = {}
        self.high: dict[int, Tensor] = {}
        adapted = [i for i in range(len(group.weights)) if tensors[3 * i + 1] is not None]
        self.lora_dtype = group.lora_dtype or next((self._lora(i)[0].dtype for i in adapted), dtype)
        self.alone = [i for i in adapted if group.dropouts[i]]
        self.spans: dict[int, slice] = {}
        self.a: Tensor | None = None
        self.b: Tensor | None = None
        self._pack([i for i in adapted if not group.dropouts[i]])

    def _lora(self, i: int) -> tuple[Tensor, Tensor]:
        """A and B of a projection that has an adapter."""
        a, b = self.tensors[3 * i + 1], self.tensors[3 * i + 2]
        assert a is not None and b is not None
        return a, b

    def _pack(self, together: list[int]) -> None:
        """Gather the adapters that share a pass over x into `a` and `b`; `spans` are their columns of `b`."""
        group, dtype = self.group, self.lora_dtype
        if not together:
            return
        stop = 0
        for i in together:
            self.spans[i] = slice(stop, stop + self._lora(i)[0].shape[0])
            stop = self.spans[i].stop
        if len(group.weights) == 1:
            a, b = (t.to(dtype) for t in self._lora(0))
            self.a, self.b = a, b if group.scalings[0] == 1.0 else b * group.scalings[0]
            return
        self.a = torch.cat([self._lora(i)[0] for i in together]).to(dtype)
        self.b = torch.zeros((sum(group.widths), stop), dtype=dtype, device=self.a.device)
        for i in together:
            torch.mul(self._lora(i)[1], group.scalings[i], out=self.b[self._rows(i), self.spans[i]])

    def saved(self) -> list[Tensor]:
        """The forward's products, for `restore` in the backward."""
        return list(self.low.values())

    def restore(self, saved: Sequence[Tensor]) -> None:
        keys = ([_TOGETHER] if self.a is not None else []) + self.alone
        self.low = dict(zip(keys, saved, strict=True))

    def _rows(self, i: int) -> slice:
        """Where projection i lies in the stacked output."""
        start = sum(self.group.widths[:i])
        return slice(start, start + self.group.widths[i])

    def _stacked(self) -> Tensor | None:
        """All weights as one [sum N, K] buffer, or None where a dense weight would have to be copied."""
        if self.decoded is not None:
            return self.decoded
        weights = self.group.weights
        quantized = [weight for weight in weights if not isinstance(weight, Tensor)]
        if len(weights) == 1:
            stacked = _decode(weights[0], self.dtype)
        elif len(quantized) < len(weights):
            return None
        else:
            shape = (sum(self.group.widths), weights[0].shape[1])
            stacked = torch.empty(shape, dtype=self.dtype, device=quantized[0].packed.device)
            for i, weight in enumerate(weights):
                _decode(weight, self.dtype, out=stacked[self._rows(i)])
        if self.holds:
            self.decoded = stacked
        return stacked

    def forward(self, x: Tensor) -> Tensor:
        """x [T, K] -> y [T, sum N]. Leaves the low-rank products in `low`.

        The adapters' product comes first and the base GEMM adds to it, so that y is rounded once at its own size.
        """
        self.make_low(x)
        y = self._small_terms(x)
        stacked = self._stacked()
        if stacked is not None:
            y = x @ stacked.t() if y is None else y.addmm_(x, stacked.t())
        else:
            is_first = y is None
            y = x.new_empty((x.shape[0], sum(self.group.widths))) if y is None else y
            for i, weight in enumerate(self.group.weights):
                # beta = 0 overwrites what the new buffer holds
                y[:, self._rows(i)].addmm_(x, _decode(weight, x.dtype).t(), beta=0 if is_first else 1)
        if self.b is not None and self.lora_dtype != x.dtype:
            _add_product(y, self.low[_TOGETHER], self.b.t())
        for i in self.alone:
            side = self._lora(i)[1].to(self.lora_dtype).t() * self.group.scalings[i]
            _add_product(y[:, self._rows(i)], self.low[i], side)
        return y

    def _small_terms(self, x: Tensor) -> Tensor | None:
        """Biases and, if they have x's dtype, the adapters' products: what the base GEMM is added to; None without either."""
        biases, bias = self.tensors[::3], None
        if any(b is not None for b in biases):
            filled = [x.new_zeros(n) if b is None else b for b, n in zip(biases, self.group.widths, strict=True)]
            bias = torch.cat([b.to(x.dtype) for b in filled])
        if self.b is not None and self.lora_dtype == x.dtype:
            low = self.low[_TOGETHER]
            return low @ self.b.t() if bias is None else torch.addmm(bias, low, self.b.t())
        return None if bias is None else bias.expand(x.shape[0], -1).contiguous()

    def make_low(self, x: Tensor) -> None:
        """Make the low-rank products of x [T, K], without the projections themselves."""
        if self.a is not None:
            self.low[_TOGETHER] = x.to(self.lora_dtype) @ self.a.t()
        for i in self.alone:
            self.low[i] = self._dropped(x, i) @ self._lora(i)[0].to(self.lora_dtype).t()

    def _dropped(self, x: Tensor, i: int) -> Tensor:
        # the mask is its own transpose: a gradient passes where the input did
        return _dropout(x, self.group.dropouts[i], self.group.seeds[i]).to(self.lora_dtype)

    def make_high(self, dy: Tensor) -> None:
        """Make s dy B of each adapter from dy [T, sum N], as `low` holds x A^T."""
        if self.b is not None:
            self.high[_TOGETHER] = dy.to(self.lora_dtype) @ self.b
        for i in self.alone:
            side = dy[:, self._rows(i)].to(self.lora_dtype) @ self._lora(i)[1].to(self.lora_dtype)
            self.high[i] = side.mul_(self.group.scalings[i])

    def backward_x(self, dy: Tensor) -> Tensor:
        """dy [T, sum N] -> dx [T, K]. Leaves its rank-R products in `high` and lets go of the decoded weights."""
        self.make_high(dy)
        # the adapters' share first, then the GEMMs add to it: dx is rounded once where a stack is one GEMM
        is_one_dtype = self.a is not None and self.lora_dtype == dy.dtype
        dx = self.high[_TOGETHER] @ self.a if self.a is not None and is_one_dtype else None
        stacked = self._stacked()
        self.decoded = None
        if stacked is not None:
            dx = dy @ stacked if dx is None else dx.addmm_(dy, stacked)
        else:
            for i, weight in enumerate(self.group.weights):
                dense, part = _decode(weight, dy.dtype), dy[:, self._rows(i)]
                dx = part @ dense if dx is None else dx.addmm_(part, dense)
        del stacked
        assert dx is not None  # a group has a projection
        if self.a is not None and not is_one_dtype:
            _add_product(dx, self.high[_TOGETHER], self.a)
        for i in self.alone:
            side = self.high[i] @ self._lora(i)[0].to(self.lora_dtype)
            dx.copy_(dx.to(side.dtype) + self._dropped(side, i))
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
                block = db[self._rows(i), span]
                grads[3 * i + 2] = block if scalings[i] == 1.0 else block * scalings[i]
        for i in self.alone:
            part = dy[:, self._rows(i)].to(self.lora_dtype)
            grads[3 * i + 1] = self.high[i].t() @ self._dropped(x, i)
            grads[3 * i + 2] = (part.t() @ self.low[i]).mul_(scalings[i])
        for i in range(len(self.group.weights)):
            if needed[3 * i]:
                grads[3 * i] = dy[:, self._rows(i)].sum(0, dtype=torch.float32)
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
