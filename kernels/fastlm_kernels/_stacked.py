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


class StackedLinear:
    """A group of projections during one pass: forward, then backward.

    Attributes:
        a: [sum R, K], the A of all adapters that share a pass over x, below each other; None without any.
        b: [sum N, sum R], their s_i B_i on the diagonal and zero elsewhere; None without any.
        low: the rank-R products of the forward that the backward needs: x A^T of all that share a pass, then one of each
            projection with a dropout; None where there is none.
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
        self.low: list[Tensor | None] = [None] * (1 + len(group.weights))
        self.high: list[Tensor | None] = [None] * (1 + len(group.weights))
        adapted = [i for i in range(len(group.weights)) if tensors[3 * i + 1] is not None]
        self.lora_dtype = group.lora_dtype or next((tensors[3 * i + 1].dtype for i in adapted), dtype)
        self.alone = [i for i in adapted if group.dropouts[i]]
        self._pack([i for i in adapted if not group.dropouts[i]])

    def _pack(self, together: list[int]) -> None:
        """Gather the adapters that share a pass over x into `a` and `b`; `spans` are their columns of `b`."""
        group, tensors, dtype = self.group, self.tensors, self.lora_dtype
        self.spans: dict[int, slice] = {}
        self.a: Tensor | None = None
        self.b: Tensor | None = None
        if not together:
            return
        stop = 0
        for i in together:
            self.spans[i] = slice(stop, stop + tensors[3 * i + 1].shape[0])
            stop = self.spans[i].stop
        if len(group.weights) == 1:
            b = tensors[2].to(dtype)
            self.a, self.b = tensors[1].to(dtype), b if group.scalings[0] == 1.0 else b * group.scalings[0]
            return
        self.a = torch.cat([tensors[3 * i + 1] for i in together]).to(dtype)
        self.b = torch.zeros((sum(group.widths), stop), dtype=dtype, device=self.a.device)
        for i in together:
            torch.mul(tensors[3 * i + 2], group.scalings[i], out=self.b[self._rows(i), self.spans[i]])

    def _rows(self, i: int) -> slice:
        """Where projection i lies in the stacked output."""
        start = sum(self.group.widths[:i])
        return slice(start, start + self.group.widths[i])

    def _stacked(self) -> Tensor | None:
        """All weights as one [sum N, K] buffer, or None where a dense weight would have to be copied."""
        if self.decoded is not None:
            return self.decoded
        weights = self.group.weights
        if len(weights) == 1:
            stacked = _decode(weights[0], self.dtype)
        elif any(isinstance(weight, Tensor) for weight in weights):
            return None
        else:
            rows, n_cols = sum(self.group.widths), weights[0].shape[1]
            stacked = torch.empty((rows, n_cols), dtype=self.dtype, device=weights[0].packed.device)
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
        biases = self.tensors[::3]
        y = self._small_terms(x, biases)
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
            _add_product(y, self.low[0], self.b.t())
        for i in self.alone:
            side = self.tensors[3 * i + 2].to(self.lora_dtype).t() * self.group.scalings[i]
            _add_product(y[:, self._rows(i)], self.low[1 + i], side)
        return y

    def _small_terms(self, x: Tensor, biases: Sequence[Tensor | None]) -> Tensor | None:
        """Biases and, if they have x's dtype, the adapters' products: what the base GEMM is added to; None without either."""
        has_product = self.b is not None and self.lora_dtype == x.dtype
        bias = None
        if any(b is not None for b in biases):
            zeros = [x.new_zeros(n) if b is None else b for b, n in zip(biases, self.group.widths, strict=True)]
            bias = torch.cat([b.to(x.dtype) for b in zeros])
        if has_product:
            return self.low[0] @ self.b.t() if bias is None else torch.addmm(bias, self.low[0], self.b.t())
        return None if bias is None else bias.expand(x.shape[0], -1).contiguous()

    def make_low(self, x: Tensor) -> None:
        """Make the low-rank products of x [T, K], without the projections themselves."""
        if self.a is not None:
            self.low[0] = x.to(self.lora_dtype) @ self.a.t()
        for i in self.alone:
            self.low[1 + i] = self._dropped(x, i) @ self.tensors[3 * i + 1].to(self.lora_dtype).t()

    def _dropped(self, x: Tensor, i: int) -> Tensor:
        return _dropout(x, self.group.dropouts[i], self.group.seeds[i]).to(self.lora_dtype)

    def backward_x(self, dy: Tensor, needs_dx: bool = True) -> Tensor | None:
        """dy [T, sum N] -> dx [T, K] or None. To be called before `backward_adapters`; lets go of the decoded weights."""
        if self.b is not None:
            self.high[0] = dy.to(self.lora_dtype) @ self.b
        for i in self.alone:
            side = dy[:, self._rows(i)].to(self.lora_dtype) @ self.tensors[3 * i + 2].to(self.lora_dtype)
            self.high[1 + i] = side.mul_(self.group.scalings[i])
        if not needs_dx:
            self.decoded = None
            return None
        # the adapters' share first, then the GEMMs add to it: dx is rounded once where a stack is one GEMM
        is_one_dtype = self.a is not None and self.lora_dtype == dy.dtype
        dx = self.high[0] @ self.a if is_one_dtype else None
        stacked = self._stacked()
        self.decoded = None
        if stacked is not None:
            dx = dy @ stacked if dx is None else dx.addmm_(dy, stacked)
        else:
            for i, weight in enumerate(self.group.weights):
                dense = _decode(weight, dy.dtype)
                part = dy[:, self._rows(i)]
                dx = part @ dense if dx is None else dx.addmm_(part, dense)
        del stacked
        if self.a is not None and not is_one_dtype:
            _add_product(dx, self.high[0], self.a)
        for i in self.alone:
            side = self.high[1 + i] @ self.tensors[3 * i + 1].to(self.lora_dtype)
            dx.copy_(dx.to(side.dtype) + self._undropped(side, i))
        return dx

    def _undropped(self, side: Tensor, i: int) -> Tensor:
        # the mask is its own transpose: the gradient passes where the input did
        return _dropout(side, self.group.dropouts[i], self.group.seeds[i])

    def backward_adapters(self, dy: Tensor, x: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
        """Gradients of (bias, A, B) of each projection, in the order of `group_tensors`; None where nobody asks."""
        group, tensors = self.group, self.tensors
        grads: list[Tensor | None] = [None] * len(tensors)
        if any(needed[3 * i + 1] for i in self.spans):
            da = self.high[0].t() @ x.to(self.lora_dtype)
            for i, span in self.spans.items():
                grads[3 * i + 1] = da[span]
        if any(needed[3 * i + 2] for i in self.spans):
            db = dy.to(self.lora_dtype).t() @ self.low[0]
            for i, span in self.spans.items():
                block = db[self._rows(i), span]
                grads[3 * i + 2] = block if group.scalings[i] == 1.0 else block * group.scalings[i]
        for i in self.alone:
            part = dy[:, self._rows(i)].to(self.lora_dtype)
            grads[3 * i + 1] = self.high[1 + i].t() @ self._dropped(x, i)
            grads[3 * i + 2] = (part.t() @ self.low[1 + i]).mul_(group.scalings[i])
        for i in range(len(group.weights)):
            if needed[3 * i]:
                grads[3 * i] = dy[:, self._rows(i)].sum(0, dtype=torch.float32)
        return [
            g.to(t.dtype) if g is not None and need else None for g, t, need in zip(grads, tensors, needed, strict=True)
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


