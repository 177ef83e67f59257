"""Linear layers with low-rank adapters, over dense or 4-bit weights.

    y_i = x W_i^T + bias_i + s_i * dropout_i(x) A_i^T B_i^T          Hu et al. 2021, arXiv:2106.09685

Projections that share their input (query, key and value; gate and up) run as one function: 4-bit weights are decoded into one
stacked buffer and multiplied once, x is read once for all A, and dx is summed inside the GEMMs. Weights are frozen and are decoded
again for the backward, never kept. All GEMMs accumulate in float32 and add into their output before it is rounded for the next one.
Saved for the backward: x, the rank-R products and, in the gated MLP, gate and up; the product act(gate) * up is remade.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastlm_kernels._case import Case, randn
from fastlm_kernels.glu import glu_bwd, glu_fwd
from fastlm_kernels.nf4 import NF4Weight, nf4_decode

# T rows (tokens), K input features, N output features, R LoRA rank, F MLP width


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


def group(projections: Sequence[Projection], lora_dtype: torch.dtype | None) -> Group:
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
    if not p:
        return x
    generator = torch.Generator(x.device).manual_seed(seed)
    keep = torch.empty(x.shape, dtype=x.dtype, device=x.device).bernoulli_(1.0 - p, generator=generator)
    return x * keep.div_(1.0 - p)


def decode_stacked(frozen: Group, dtype: torch.dtype) -> Tensor | None:
    """All weights of the group as one [sum N, K] buffer, or None where a dense weight would have to be copied."""
    weights = frozen.weights
    if len(weights) == 1 and isinstance(weights[0], Tensor):
        return weights[0].to(dtype)
    if any(isinstance(weight, Tensor) for weight in weights):
        return None
    rows, n_cols = sum(frozen.widths), weights[0].shape[1]
    stacked = torch.empty((rows, n_cols), dtype=dtype, device=weights[0].packed.device)
    start = 0
    for weight in weights:
        nf4_decode(weight, dtype, out=stacked[start : start + weight.shape[0]])
        start += weight.shape[0]
    return stacked


def _decode(weight: Tensor | NF4Weight, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype) if isinstance(weight, Tensor) else nf4_decode(weight, dtype)


@dataclass(frozen=True)
class Adapters:
    """The adapters of a group as two matrices, so that each pass over x or dy is one GEMM.

    Attributes:
        a: [sum R, K], the A of all projections below each other; None if none of them may share a pass over x.
        b: [sum N, sum R], s_i B_i on the diagonal and zero elsewhere.
        dtype: of the adapters' GEMMs.
        spans: per projection its columns of `b`, or None for one without an adapter or with a dropout of its own.
    """

    a: Tensor | None
    b: Tensor | None
    dtype: torch.dtype
    spans: tuple[slice | None, ...]


def pack_adapters(frozen: Group, tensors: Sequence[Tensor | None], dtype: torch.dtype) -> Adapters:
    """Gather the adapters of a group. `dtype` is of the base GEMM; adapters keep their own unless `lora_dtype` says another."""
    a = [tensors[3 * i + 1] for i in range(len(frozen.weights))]
    dtype = frozen.lora_dtype or next((t.dtype for t in a if t is not None), dtype)
    together = [i for i, t in enumerate(a) if t is not None and not frozen.dropouts[i]]
    spans: list[slice | None] = [None] * len(a)
    if not together:
        return Adapters(None, None, dtype, tuple(spans))
    stop = 0
    for i in together:
        spans[i] = slice(stop, stop + a[i].shape[0])
        stop = spans[i].stop
    if len(a) == 1:
        scaling, b = frozen.scalings[0], tensors[2].to(dtype)
        return Adapters(a[0].to(dtype), b if scaling == 1.0 else b * scaling, dtype, tuple(spans))
    widths = frozen.widths
    b = torch.zeros((sum(widths), stop), dtype=dtype, device=a[together[0]].device)
    for i in together:
        start = sum(widths[:i])
        torch.mul(tensors[3 * i + 2], frozen.scalings[i], out=b[start : start + widths[i], spans[i]])
    return Adapters(torch.cat([a[i] for i in together]).to(dtype), b, dtype, tuple(spans))


def _add_product(y: Tensor, left: Tensor, right: Tensor) -> None:
    """y += left @ right, in their dtype where it is wider than y's, rounded once."""
    if left.dtype == y.dtype:
        y.addmm_(left, right)
    else:
        y.copy_(torch.addmm(y.to(left.dtype), left, right))


def stacked_linear_fwd(
    x: Tensor,
    frozen: Group,
    tensors: Sequence[Tensor | None],
    adapters: Adapters,
    stacked: Tensor | None = None,
    residual: Tensor | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """x [T, K] -> y [T, sum N], plus `residual` [T, N] if given, and the rank-R products that the backward needs.

    Args:
        stacked: the group's decoded weights, if the caller has them.

    Returns:
        y, and [x A^T of all that share a pass, then one of each projection with a dropout].
    """
    biases = [tensors[3 * i] for i in range(len(frozen.weights))]
    stacked = decode_stacked(frozen, x.dtype) if stacked is None else stacked
    if stacked is not None and residual is not None and biases[0] is None:
        y = torch.addmm(residual, x, stacked.t())
        residual = None
    elif stacked is not None and (len(biases) == 1 or all(b is None for b in biases) or None not in biases):
        bias = None if biases[0] is None else torch.cat([b.to(x.dtype) for b in biases])
        y = F.linear(x, stacked, bias)
    else:
        y = torch.empty((x.shape[0], sum(frozen.widths)), dtype=x.dtype, device=x.device)
        starts = [sum(frozen.widths[:i]) for i in range(len(biases))]
        for start, weight, bias in zip(starts, frozen.weights, biases, strict=True):
            part = y[:, start : start + weight.shape[0]]
            # a decoded group is a stack already: take its rows instead of decoding again
            dense = _decode(weight, x.dtype) if stacked is None else stacked[start : start + weight.shape[0]]
            if bias is None:
                torch.mm(x, dense.t(), out=part)
            else:
                torch.addmm(bias.to(x.dtype), x, dense.t(), out=part)
    del stacked
    low: list[Tensor | None] = [None] * (1 + len(frozen.weights))
    if adapters.a is not None:
        low[0] = x.to(adapters.dtype) @ adapters.a.t()
        _add_product(y, low[0], adapters.b.t())
    for i, part in enumerate(y.split(frozen.widths, dim=1) if any(frozen.dropouts) else ()):
        a, b = tensors[3 * i + 1], tensors[3 * i + 2]
        if frozen.dropouts[i] and a is not None:
            dropped = _dropout(x, frozen.dropouts[i], frozen.seeds[i]).to(adapters.dtype)
            low[1 + i] = dropped @ a.to(adapters.dtype).t()
            _add_product(part, low[1 + i], b.to(adapters.dtype).t() * frozen.scalings[i])
    return (y if residual is None else y.add_(residual)), low


def stacked_linear_dx(
    dy: Tensor,
    frozen: Group,
    tensors: Sequence[Tensor | None],
    adapters: Adapters,
    needs_dx: bool,
    stacked: Tensor | None = None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """dy [T, sum N] -> dx [T, K] or None, and s dy B in the order of `stacked_linear_fwd`'s products."""
    high: list[Tensor | None] = [None] * (1 + len(frozen.weights))
    if adapters.b is not None:
        high[0] = dy.to(adapters.dtype) @ adapters.b
    parts = dy.split(frozen.widths, dim=1)
    for i, part in enumerate(parts):
        b = tensors[3 * i + 2]
        if frozen.dropouts[i] and b is not None:
            high[1 + i] = (part.to(adapters.dtype) @ b.to(adapters.dtype)).mul_(frozen.scalings[i])
    if not needs_dx:
        return None, high
    stacked = decode_stacked(frozen, dy.dtype) if stacked is None else stacked
    if stacked is not None:
        dx = dy @ stacked
    else:
        dx = parts[0] @ _decode(frozen.weights[0], dy.dtype)
        for part, weight in zip(parts[1:], frozen.weights[1:], strict=True):
            dx.addmm_(part, _decode(weight, dy.dtype))
    del stacked
    if adapters.a is not None:
        _add_product(dx, high[0], adapters.a)
    for i, side in enumerate(high[1:]):
        if side is not None:
            product = side @ tensors[3 * i + 1].to(side.dtype)
            dx.copy_(dx.to(side.dtype) + _dropout(product, frozen.dropouts[i], frozen.seeds[i]))
    return dx, high


def stacked_linear_dlora(
    dy: Tensor,
    x: Tensor,
    low: Sequence[Tensor | None],
    high: Sequence[Tensor | None],
    frozen: Group,
    tensors: Sequence[Tensor | None],
    adapters: Adapters,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of (bias, A, B) of each projection, in the order of `group_tensors`; None where nobody asks."""
    grads: list[Tensor | None] = [None] * len(tensors)
    starts = [sum(frozen.widths[:i]) for i in range(len(frozen.weights))]
    if adapters.a is not None:
        if any(needed[3 * i + 1] for i, span in enumerate(adapters.spans) if span is not None):
            da = high[0].t() @ x.to(adapters.dtype)
            for i, span in enumerate(adapters.spans):
                if span is not None and needed[3 * i + 1]:
                    grads[3 * i + 1] = da[span]
        if any(needed[3 * i + 2] for i, span in enumerate(adapters.spans) if span is not None):
            db = dy.to(adapters.dtype).t() @ low[0]
            for i, span in enumerate(adapters.spans):
                if span is not None and needed[3 * i + 2]:
                    block = db[starts[i] : starts[i] + frozen.widths[i], span]
                    grads[3 * i + 2] = block if frozen.scalings[i] == 1.0 else block * frozen.scalings[i]
    for i, start in enumerate(starts):
        bias, a, b = tensors[3 * i : 3 * i + 3]
        part = dy[:, start : start + frozen.widths[i]]
        if needed[3 * i] and bias is not None:
            grads[3 * i] = part.sum(0, dtype=torch.float32)
        if not frozen.dropouts[i] or a is None or b is None:
            continue
        if needed[3 * i + 1]:
            dropped = _dropout(x, frozen.dropouts[i], frozen.seeds[i])
            grads[3 * i + 1] = high[1 + i].t() @ dropped.to(adapters.dtype)
        if needed[3 * i + 2]:
            grads[3 * i + 2] = (part.to(adapters.dtype).t() @ low[1 + i]).mul_(frozen.scalings[i])
    return [None if g is None else g.to(t.dtype) for g, t in zip(grads, tensors, strict=True)]


class LoraLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, frozen, *tensors):  # type: ignore[override]
        adapters = pack_adapters(frozen, tensors, x.dtype)
        y, low = stacked_linear_fwd(x, frozen, tensors, adapters)
        ctx.frozen, ctx.n_tensors = frozen, len(tensors)
        ctx.save_for_backward(x, *tensors, *low)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):  # type: ignore[override]
        x, *rest = ctx.saved_tensors
        frozen, tensors, low = ctx.frozen, rest[: ctx.n_tensors], rest[ctx.n_tensors :]
        adapters = pack_adapters(frozen, tensors, x.dtype)
        dy = dy if dy.stride(1) == 1 else dy.contiguous()
        dx, high = stacked_linear_dx(dy, frozen, tensors, adapters, ctx.needs_input_grad[0])
        grads = stacked_linear_dlora(dy, x, low, high, frozen, tensors, adapters, ctx.needs_input_grad[2:])
        return dx, None, *grads


class LoraGluMlpFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, activation, gate_up, down, *tensors):  # type: ignore[override]
        packed, low = stacked_linear_fwd(x, gate_up, tensors[:6], pack_adapters(gate_up, tensors[:6], x.dtype))
        gate, up = packed.chunk(2, dim=1)
        act = glu_fwd(gate, up, activation)
        y, low_down = stacked_linear_fwd(act, down, tensors[6:], pack_adapters(down, tensors[6:], x.dtype))
        ctx.activation, ctx.gate_up, ctx.down, ctx.n_low = activation, gate_up, down, len(low)
        ctx.save_for_backward(x, packed, *tensors, *low, *low_down)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):  # type: ignore[override]
        x, packed, *rest = ctx.saved_tensors
        tensors, low, low_down = rest[:9], rest[9 : 9 + ctx.n_low], rest[9 + ctx.n_low :]
        dx, grads = glu_mlp_bwd(
            dy, x, packed, low, low_down, ctx.activation, ctx.gate_up, ctx.down, tensors,
            ctx.needs_input_grad[0], ctx.needs_input_grad[4:],
        )  # fmt: skip
        return dx, None, None, None, *grads


def glu_mlp_bwd(
    dy: Tensor,
    x: Tensor,
    packed: Tensor,
    low: Sequence[Tensor | None],
    low_down: Sequence[Tensor | None] | None,
    activation: str,
    gate_up: Group,
    down: Group,
    tensors: Sequence[Tensor | None],
    needs_dx: bool,
    needed: Sequence[bool],
    stacked: Tensor | None = None,
    owns_packed: bool = False,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Backward of the gated MLP.

    Args:
        dy: [T, D].
        x: [T, D], its input; packed: [T, 2F], gate and up side by side.
        low, low_down: the rank-R products of the forward; None for `low_down` makes them again from the remade product.
        stacked: decoded gate and up, if the caller has them.
        owns_packed: `packed` may be overwritten by its gradient.

    Returns:
        dx [T, D] or None, and the gradients of the nine tensors.
    """
    dy = dy if dy.stride(1) == 1 else dy.contiguous()
    adapters = pack_adapters(down, tensors[6:], x.dtype)
    dact, high_down = stacked_linear_dx(dy, down, tensors[6:], adapters, True)
    gate, up = packed.chunk(2, dim=1)
    dpacked = packed if owns_packed else torch.empty_like(packed)
    dgate, dup = dpacked.chunk(2, dim=1)
    # dact is ours alone, so the remade product takes its place
    act = glu_bwd(dact, gate, up, activation, dgate=dgate, dup=dup, h=dact)[2]
    if low_down is None:
        low_down = [None, None]
        if adapters.a is not None:
            low_down[0] = act.to(adapters.dtype) @ adapters.a.t()
        elif down.dropouts[0] and tensors[7] is not None:
            dropped = _dropout(act, down.dropouts[0], down.seeds[0]).to(adapters.dtype)
            low_down[1] = dropped @ tensors[7].to(adapters.dtype).t()
    grads_down = stacked_linear_dlora(dy, act, low_down, high_down, down, tensors[6:], adapters, needed[6:])
    del act, dact, gate, up
    adapters = pack_adapters(gate_up, tensors[:6], x.dtype)
    dx, high = stacked_linear_dx(dpacked, gate_up, tensors[:6], adapters, needs_dx, stacked)
    grads = stacked_linear_dlora(dpacked, x, low, high, gate_up, tensors[:6], adapters, needed[:6])
    return dx, [*grads, *grads_down]


def _check(x: Tensor, projections: Sequence[Projection]) -> None:
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


def lora_linear(x: Tensor, projections: Sequence[Projection], lora_dtype: torch.dtype | None = None) -> Tensor:
    """Apply projections that share their input, each with its adapter.

    Args:
        x: [..., K], float16, bfloat16 or float32: the dtype of the base GEMM.
        projections: their weights are frozen: no gradient flows into them.
        lora_dtype: dtype of the adapters' GEMMs; None means each adapter's own, as PEFT computes outside autocast.

    Returns:
        [..., sum of N] in x.dtype: the projections' outputs side by side.

    Raises:
        ValueError: if shapes do not fit, or a dropout is outside [0, 1).

    Reference: Hu et al. 2021, arXiv:2106.09685; Dettmers et al. 2023, arXiv:2305.14314.
    """
    _check(x, projections)
    frozen = group(projections, lora_dtype)
    y = LoraLinearFunction.apply(x.reshape(-1, x.shape[-1]), frozen, *group_tensors(projections))
    return y.view(*x.shape[:-1], y.shape[1])


def lora_glu_mlp(
    x: Tensor,
    gate: Projection,
    up: Projection,
    down: Projection,
    activation: str = "silu",
    lora_dtype: torch.dtype | None = None,
) -> Tensor:
    """down(act(gate(x)) * up(x)), each projection with its adapter, as one function.

    Args:
        x: [..., D].
        gate, up: [F, D]; down: [D, F].
        activation: "silu", "gelu_tanh" or "gelu".
        lora_dtype: as in `lora_linear`.

    Returns:
        [..., D] in x.dtype.

    Raises:
        ValueError: as `lora_linear`, and if gate and up differ in width.

    Reference: Shazeer 2020, arXiv:2002.05202.
    """
    _check(x, (gate, up))
    if gate.shape != up.shape or down.shape[1] != up.shape[0]:
        raise ValueError(f"gate {gate.shape}, up {up.shape} and down {down.shape} do not make a gated MLP")
    y = LoraGluMlpFunction.apply(
        x.reshape(-1, x.shape[-1]), activation, group((gate, up), lora_dtype), group((down,), lora_dtype),
        *group_tensors((gate, up, down)),
    )  # fmt: skip
    return y.view(*x.shape[:-1], y.shape[1])


def lora_linear_reference(x, weights, biases, lora_as, lora_bs, scalings):
    parts = []
    for weight, bias, a, b, scaling in zip(weights, biases, lora_as, lora_bs, scalings, strict=True):
        y = x @ weight.t()
        parts.append(y + bias + scaling * (x @ a.t()) @ b.t())
    return torch.cat(parts, dim=-1)


def _flat(prefix_inputs):
    """Case inputs are plain tensors by name; these gather w0, b0, a0, … into lists."""
    n = sum(name.startswith("w") for name in prefix_inputs)
    pick = lambda letter: [prefix_inputs[f"{letter}{i}"] for i in range(n)]
    return pick("w"), pick("b"), pick("a"), pick("c"), [0.5 + i for i in range(n)]


def _case_op(x, **named):
    weights, biases, lora_as, lora_bs, scalings = _flat(named)
    projections = [
        Projection(w, bias, a, b, s) for w, bias, a, b, s in zip(weights, biases, lora_as, lora_bs, scalings, strict=True)
    ]
    return lora_linear(x, projections)


def _case_reference(x, **named):
    return lora_linear_reference(x, *_flat(named))


def _case_make(widths):
    def make(shape, dtype, device, generator):
        *rows, n_cols, rank = shape
        inputs = {"x": randn((*rows, n_cols), dtype, device, generator)}
        for i, width in enumerate(widths):
            inputs[f"w{i}"] = randn((width, n_cols), dtype, device, generator, n_cols**-0.5)
            inputs[f"b{i}"] = randn((width,), dtype, device, generator)
            inputs[f"a{i}"] = randn((rank + i, n_cols), dtype, device, generator, n_cols**-0.5)
            inputs[f"c{i}"] = randn((width, rank + i), dtype, device, generator, 0.3)
        return inputs

    return make


def _case_strided(inputs):
    x = inputs["x"]
    return dict(inputs, x=torch.cat([x, torch.full_like(x, float("nan"))], dim=-1)[..., : x.shape[-1]])


def _mlp_op(x, **named):
    weights, biases, lora_as, lora_bs, scalings = _flat(named)
    gate, up, down = (Projection(*p) for p in zip(weights, biases, lora_as, lora_bs, scalings, strict=True))
    return lora_glu_mlp(x, gate, up, down)


def _mlp_reference(x, **named):
    weights, biases, lora_as, lora_bs, scalings = _flat(named)
    layer = lambda x, i: lora_linear_reference(x, *([each[i]] for each in (weights, biases, lora_as, lora_bs, scalings)))
    return layer(F.silu(layer(x, 0)) * layer(x, 1), 2)


def _mlp_make(shape, dtype, device, generator):
    *rows, n_cols, width, rank = shape
    inputs = _case_make((width, width))((*rows, n_cols, rank), dtype, device, generator)
    down = _case_make((n_cols,))((1, width, rank), dtype, device, generator)
    return inputs | {f"{letter}2": down[f"{letter}0"] for letter in "wbac"}


_SHAPES = {"typical": (2, 12, 64, 8), "odd": (7, 33, 3), "one-row": (1, 32, 4), "empty": (0, 32, 4)}

CASE = Case(
    name="lora_linear",
    op=_case_op,
    reference=_case_reference,
    eager=_case_reference,
    make=_case_make((48, 17, 16)),
    shapes=_SHAPES,
    gradients=("x", "b0", "a0", "c0", "b1", "a1", "c1", "b2", "a2", "c2"),
    strided=_case_strided,
    draws=8,
)

MLP_CASE = Case(
    name="lora_glu_mlp",
    op=_mlp_op,
    reference=_mlp_reference,
    eager=_mlp_reference,
    make=_mlp_make,
    shapes={"typical": (2, 12, 32, 48, 4), "odd": (7, 33, 21, 3), "one-row": (1, 32, 16, 4), "empty": (0, 32, 16, 4)},
    gradients=("x", "b0", "a0", "c0", "b1", "a1", "c1", "b2", "a2", "c2"),
    strided=_case_strided,
    draws=8,
)
