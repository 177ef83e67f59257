"""What a decoder layer allocates: the lifetimes of `block/function.py`, line by line, as numbers.

Tensors count with their own bytes; what the allocator rounds up and what kernels keep in registers do not count.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastlm.block.attention import n_groups
from fastlm.block.mlp import tile_rows
from fastlm.block.spec import KEEP_ALL, MemoryPlan
from fastlm_kernels._stacked import padding

# T tokens, D hidden size, H query heads, K key/value heads, E head size, F MLP width, R LoRA rank
_FLOAT = 4


@dataclass(frozen=True)
class GroupShape:
    """Projections that share their input.

    Attributes:
        widths: outputs of each.
        features: inputs.
        rank: of all their adapters; 0 without any.
        is_decoded: 4-bit weights, which a pass decodes.
        has_bias: some of them have one.
        scaled: an adapter's factor is not 1.
    """

    widths: tuple[int, ...]
    features: int
    rank: int
    is_decoded: bool
    has_bias: bool = False
    scaled: bool = False

    @property
    def width(self) -> int:
        return sum(self.widths)

    @property
    def n_weights(self) -> int:
        return self.width * self.features


@dataclass(frozen=True)
class LayerShape:
    """What a layer's memory depends on beside the tokens.

    Attributes:
        qkv, out, gate_up, down: the projections.
        n_heads, n_kv_heads, head_size: of the attention.
        is_gated, is_parallel: as `BlockSpec`.
        copies_heads: queries and keys have norms, whose outputs are tensors of their own.
        turned_heads: heads whose gradient stands between these norms and the rotation, where they are kernels of their own.
        norms: attention_norm, attention_out_norm, mlp_norm, mlp_out_norm: which of them there are.
        are_layer_norms: they are LayerNorms, which make their own output.
        is_scaled: what each half adds is multiplied by a factor.
        rounds_once: as `Layer`.
        draws_masks: adapters have dropout.
        itemsize, lora_itemsize: bytes of a value of an activation, and of an adapter's product.
        backend: the attention library.
    """

    qkv: GroupShape
    out: GroupShape
    gate_up: GroupShape
    down: GroupShape
    n_heads: int
    n_kv_heads: int
    head_size: int
    is_gated: bool = True
    is_parallel: bool = False
    copies_heads: bool = False
    turned_heads: int = 0
    norms: tuple[bool, bool, bool, bool] = (True, False, True, False)
    are_layer_norms: bool = False
    is_scaled: bool = False
    rounds_once: bool = False
    draws_masks: bool = False
    itemsize: int = 2
    lora_itemsize: int = 2
    backend: str = "flash_attention_4"

    @property
    def hidden(self) -> int:
        return self.qkv.features

    @property
    def groups(self) -> tuple[GroupShape, GroupShape, GroupShape, GroupShape]:
        return self.qkv, self.out, self.gate_up, self.down


def kept_bytes(shape: LayerShape, tokens: int) -> dict[str, int]:
    """Bytes of each thing that a layer may keep, by its name in `MemoryPlan`, and "input"."""
    size, low = shape.itemsize, shape.lora_itemsize
    has_out_norm = shape.norms[1]
    qkv, out, gate_up, down = (
        linear.x_pad or linear.rank
        for linear in _linears(shape, tokens, _tile(shape, tokens), KEEP_ALL, _Ledger(), is_forward=True)
    )
    return {
        "input": tokens * shape.hidden * size,
        "qkv": tokens * (shape.qkv.width * size + qkv * low),
        "attention": tokens * shape.n_heads * (shape.head_size * size + _FLOAT),
        "residual": tokens * ((1 + has_out_norm) * shape.hidden * size + out * low),
        "gate_up": tokens * (shape.gate_up.width * size + (gate_up + down) * low),
        "down": tokens * shape.hidden * size if shape.norms[3] else 0,
    }


def kept_on_device(shape: LayerShape, tokens: int, plan: MemoryPlan) -> int:
    """Bytes that a layer with this plan leaves on the device between its forward and its backward."""
    sizes = kept_bytes(shape, tokens)
    names = [n for n in sizes if (n == "input" or getattr(plan, n)) and n not in plan.offloads]
    return sum(sizes[n] for n in names)


def kept_on_host(shape: LayerShape, tokens: int, plan: MemoryPlan) -> int:
    """Bytes that it sends to the host."""
    sizes = kept_bytes(shape, tokens)
    return sum(sizes[n] for n in plan.offloads if n == "input" or getattr(plan, n))


class _Ledger:
    """Bytes in use, and the most there were."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def take(self, n_bytes: int) -> int:
        self.now += n_bytes
        self.peak = max(self.peak, self.now)
        return n_bytes

    def give(self, *n_bytes: int) -> None:
        self.now -= sum(n_bytes)

    def touch(self, n_bytes: int) -> None:
        """Taken and given at once."""
        self.give(self.take(n_bytes))


class _Linear:
    """`StackedLinear` in a pass."""

    def __init__(
        self, group: GroupShape, shape: LayerShape, ledger: _Ledger, x_room: int, dy_room: int, held: bool, holds: bool
    ) -> None:
        self.group, self.shape, self._ledger, self._held, self._holds = group, shape, ledger, held, holds
        rides = group.rank and group.is_decoded and shape.lora_itemsize == shape.itemsize and not shape.draws_masks
        columns = group.rank + group.has_bias
        self.x_pad = padding(x_room, group.features, columns) if rides else 0
        self.dy_pad = padding(dy_room, group.width, columns) if rides else 0
        self.rank = max(self.x_pad, self.dy_pad) or group.rank
        self._decoded = self._packed = self._low = 0

    def row(self, width: int, pad: int = 0) -> int:
        return (width + pad) * self.shape.itemsize

    def decode(self) -> None:
        if self.group.is_decoded and not self._decoded:
            values = (self.group.width + self.dy_pad) * (self.group.features + self.x_pad)
            self._decoded = self._ledger.take(values * self.shape.itemsize)

    def let_go(self, finally_: bool = False) -> None:
        """After a pass's product: decoded weights go, unless tiles share them, or adapters lie in their room."""
        if finally_ or not (self._held or self.x_pad or self.dy_pad):
            self._ledger.give(self._decoded)
            self._decoded = 0

    def pack(self) -> None:
        if self._packed or not self.group.rank:
            return
        values = 0
        is_whole = len(self.group.widths) == 1 and not self.x_pad and not self.dy_pad
        if not is_whole:
            values += 0 if self.dy_pad else self.rank * self.group.features
        if not is_whole or self.group.scaled:
            values += 0 if self.x_pad else self.rank * self.group.width
        if self.dy_pad or self.x_pad:
            self.decode()
        self._packed = self._ledger.take(max(1, values * self.shape.lora_itemsize))

    def make_low(self, tokens: int) -> None:
        self.pack()
        self._ledger.give(self._low)
        self._low = 0 if self.x_pad else self._ledger.take(tokens * self.rank * self.shape.lora_itemsize)

    def forward(self, tokens: int, holds: bool, has_room: bool = False) -> int:
        """Bytes of y: none if there is room for it."""
        self.make_low(tokens)
        self.decode()
        y = self._ledger.take(0 if has_room else tokens * self.row(self.group.width, self.dy_pad))
        if not holds:
            self.let_go()
        return y

    def replay(self, tokens: int) -> int:
        """`forward`, after which the weights stay if the pass holds them, or tiles share them."""
        y = self.forward(tokens, holds=True)
        if not (self._holds or self._held):
            self.let_go(True)
            self._ledger.give(self._packed)
            self._packed = 0
        return y

    def backward_x(self, tokens: int) -> int:
        """Bytes of dx."""
        self.pack()
        # the products of dy with B, beside dy where they ride
        self._ledger.take(0 if self.dy_pad else tokens * self.rank * self.shape.lora_itemsize)
        self.decode()
        dx = self._ledger.take(tokens * self.row(self.group.features))
        self.let_go()
        return dx

    def end(self, kept_tokens: int = 0) -> None:
        """Nobody holds it any more. kept_tokens: of its low-rank products, which stay."""
        self._ledger.take(kept_tokens * (self.x_pad or self.rank) * self.shape.lora_itemsize if self.x_pad else 0)
        self.let_go(True)
        self._ledger.give(self._packed, 0 if kept_tokens else self._low)
        self._packed = self._low = 0


def _linears(
    shape: LayerShape, tokens: int, step: int, plan: MemoryPlan, ledger: _Ledger, is_forward: bool
) -> list[_Linear]:
    has_norm, has_out_norm, has_mlp_norm, has_mlp_out_norm = shape.norms
    writes_x, writes_n = has_norm and not shape.are_layer_norms, has_mlp_norm and not shape.are_layer_norms
    writes_dh = writes_n and not has_out_norm and not shape.is_scaled
    writes_act = shape.is_gated and (is_forward or has_mlp_out_norm)
    once, back = shape.rounds_once, not is_forward
    rooms = (
        (tokens, once and writes_x and (is_forward or not plan.qkv), back),
        (tokens, False, writes_dh and back),
        (step, once and writes_n and (is_forward or not plan.gate_up), back),
        (step, once and writes_act, False),
    )
    return [
        _Linear(
            group, shape, ledger, rows * x_room, rows * dy_room, held=i >= 2 and step < tokens, holds=plan.holds_weights
        )
        for i, (group, (rows, x_room, dy_room)) in enumerate(zip(shape.groups, rooms, strict=True))
    ]


def _tile(shape: LayerShape, tokens: int) -> int:
    return tokens if shape.draws_masks else tile_rows(tokens, shape.gate_up.width, shape.itemsize)


def _n_groups(shape: LayerShape, tokens: int) -> int:
    return n_groups(tokens, shape.n_heads, shape.n_kv_heads, shape.head_size)


def forward_peak(shape: LayerShape, tokens: int, plan: MemoryPlan) -> int:
    """The most that a layer's forward holds beside its input, what it keeps included."""
    ledger, step = _Ledger(), _tile(shape, tokens)
    qkv, out_linear, gate_up, down = _linears(shape, tokens, step, plan, ledger, is_forward=True)
    size, hidden = shape.itemsize, shape.hidden
    width = shape.n_heads * shape.head_size
    row, attended = tokens * hidden * size, tokens * width * size
    lse = tokens * shape.n_heads * _FLOAT
    has_norm, has_out_norm, has_mlp_norm, has_mlp_out_norm = shape.norms
    n = ledger.take(tokens * qkv.row(hidden, qkv.x_pad) + tokens * _FLOAT) if has_norm else 0
    packed = qkv.forward(tokens, holds=False)
    heads = ledger.take(_head_copies(shape, tokens))
    groups = _n_groups(shape, tokens)
    out = ledger.take(attended)
    if plan.attention:
        ledger.take(lse)
    else:
        ledger.touch(lse // groups)
    if groups > 1:
        ledger.touch((attended + lse) // groups)
    ledger.give(heads)
    if not plan.qkv:
        ledger.give(packed)
    qkv.end(tokens if plan.qkv else 0)
    if not shape.is_parallel:
        ledger.give(n)
    o = out_linear.forward(tokens, holds=False)
    normed = ledger.take(row) if has_out_norm else 0
    read = ledger.take(tokens * gate_up.row(hidden, gate_up.x_pad) + tokens * _FLOAT) if has_mlp_norm else 0
    # the sum with the residual stream
    ledger.take(row)
    ledger.give(normed)
    if not (has_out_norm and plan.residual):
        ledger.give(o)
    if not plan.attention:
        ledger.give(out)
    out_linear.end(tokens if plan.residual else 0)
    is_tiled = step < tokens
    if is_tiled and plan.residual:
        ledger.take(row)
    whole = ledger.take(tokens * shape.gate_up.width * size) if is_tiled and plan.gate_up else 0
    if is_tiled and plan.down and has_mlp_out_norm:
        ledger.take(row)
    if is_tiled:
        # from the tile before
        down.pack()
        down.decode()
    wide = gate_up.forward(step, holds=False, has_room=whole > 0)
    act = ledger.take(step * down.row(shape.down.features, down.x_pad))
    ledger.touch(0 if shape.is_gated else act)
    if not plan.gate_up:
        ledger.give(wide)
    # in place, where nobody keeps the stream and the GEMM may add to it
    down.make_low(step)
    down.decode()
    is_own_sum = (
        not shape.down.has_bias and (not shape.down.rank or down.x_pad) and not has_mlp_out_norm and not shape.is_scaled
    )
    y = ledger.take(0 if is_own_sum and (is_tiled or not plan.residual) else step * hidden * size)
    if has_mlp_out_norm:
        ledger.touch(step * hidden * size)
    ledger.give(act, y, read)
    return ledger.peak


def _head_copies(shape: LayerShape, tokens: int) -> int:
    """Queries and keys behind norms of their own."""
    n = shape.n_heads + shape.n_kv_heads
    return tokens * n * (shape.head_size * shape.itemsize + _FLOAT) if shape.copies_heads else 0


def _library_bytes(shape: LayerShape, tokens: int) -> int:
    """What an attention library's backward holds beside its results: sums in float32, and copies of shared heads.

    Sources: flash_attn/cute/interface.py of flash-attn-4 4.0.0b36; aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp.
    """
    width, kv_width = shape.n_heads * shape.head_size, shape.n_kv_heads * shape.head_size
    is_shared = shape.n_heads != shape.n_kv_heads
    statistics = tokens * shape.n_heads * _FLOAT
    if shape.backend in ("flash_attention_4", "cudnn"):
        return tokens * (width + 2 * kv_width * is_shared) * _FLOAT + 2 * statistics
    if shape.backend in ("flash", "torch_varlen"):
        return tokens * (width * _FLOAT + 2 * width * shape.itemsize * is_shared) + statistics
    return statistics if shape.backend == "triton" else 0


def backward_peak(shape: LayerShape, tokens: int, plan: MemoryPlan, needs_dx: bool = True) -> int:
    """The most that a layer's backward holds beside what was kept and the gradient of its output."""
    ledger, step = _Ledger(), _tile(shape, tokens)
    qkv, out_linear, gate_up, down = _linears(shape, tokens, step, plan, ledger, is_forward=False)
    size, hidden = shape.itemsize, shape.hidden
    width = shape.n_heads * shape.head_size
    row, attended, lse = tokens * hidden * size, tokens * width * size, tokens * shape.n_heads * _FLOAT
    has_norm, has_out_norm, has_mlp_norm, has_mlp_out_norm = shape.norms
    is_tiled, groups = step < tokens, _n_groups(shape, tokens)
    remakes_n = is_tiled and has_norm and not shape.is_parallel and not qkv.x_pad
    n = ledger.take(tokens * qkv.row(hidden, qkv.x_pad) + tokens * _FLOAT) if has_norm else 0
    packed = 0 if plan.qkv else qkv.replay(tokens)
    if remakes_n:
        ledger.give(n)
    heads = ledger.take(_head_copies(shape, tokens))
    out = 0 if plan.attention else ledger.take(attended + lse)
    if groups > 1 and not plan.attention:
        ledger.touch(attended // groups)
    o = 0
    if not plan.residual:
        o = out_linear.replay(tokens)
    normed = ledger.take(row) if has_out_norm else 0
    read = ledger.take(tokens * gate_up.row(hidden, gate_up.x_pad) + tokens * _FLOAT) if has_mlp_norm else 0
    h = 0 if plan.residual else ledger.take(row)
    ledger.give(normed)
    if not has_out_norm:
        ledger.give(o)
        o = 0
    # --- the MLP
    dread = ledger.take(row) if is_tiled else 0
    sums = (
        shape.gate_up.rank * (shape.gate_up.features + shape.gate_up.width)
        + shape.down.rank * (hidden + shape.down.features)
    ) * _FLOAT
    kept_sums = ledger.take(sums) if is_tiled else 0
    if is_tiled:
        down.pack()
        down.decode()
    wide = 0 if plan.gate_up else gate_up.replay(step)
    row_step, z = step * hidden * size, 0
    if has_mlp_out_norm and not plan.down:
        act = ledger.take(step * down.row(shape.down.features, down.x_pad))
        z = down.replay(step)
        ledger.give(act)
    dz = ledger.take(row_step * (shape.is_scaled or has_mlp_out_norm))
    ledger.give(z)
    dact = down.backward_x(step)
    dwide = ledger.take(step * gate_up.row(shape.gate_up.width, gate_up.dy_pad)) if plan.gate_up else 0
    if not shape.is_gated:
        # torch's own functions: the product remade, and the gradient before it is written to its place
        act = ledger.take(dact)
        ledger.touch(dact)
        ledger.give(dact)
        dact = act
    down.make_low(step)
    ledger.touch(shape.down.rank * (hidden + shape.down.features) * shape.lora_itemsize)
    ledger.give(dact)
    dx = gate_up.backward_x(step)
    ledger.touch(shape.gate_up.rank * (shape.gate_up.features + shape.gate_up.width) * shape.lora_itemsize)
    ledger.give(wide, dwide, dz)
    if is_tiled:
        ledger.give(dx, kept_sums)
    else:
        dread = dx
    gate_up.end()
    down.end()
    ledger.give(read)
    # --- the residual stream
    dh = 0
    if not shape.is_parallel and has_mlp_norm:
        dh = ledger.take(tokens * out_linear.row(hidden, out_linear.dy_pad))
    if not shape.is_parallel:
        ledger.give(dread if has_mlp_norm else 0)
        dh = dh or dread
        dread = 0
    da = ledger.take(row * (shape.is_scaled + has_out_norm))
    ledger.give(h, o)
    # --- the attention
    dflat = out_linear.backward_x(tokens)
    ledger.give(da)
    out_linear.end()
    results = tokens * shape.qkv.width * size
    if groups == 1:
        dheads = ledger.take(results)
        ledger.touch(_library_bytes(shape, tokens))
    else:
        dheads = ledger.take(results) if plan.qkv else 0
        ledger.touch((attended + results + _library_bytes(shape, tokens)) // groups)
    ledger.give(dflat, out)
    dpacked = ledger.take(tokens * qkv.row(shape.qkv.width, qkv.dy_pad)) if plan.qkv else 0
    ledger.touch(tokens * shape.turned_heads * shape.head_size * size)
    ledger.give(dheads, heads)
    # --- the input
    dn = qkv.backward_x(tokens) if needs_dx else 0
    dx = ledger.take(row) if needs_dx else 0
    ledger.give(dn, dh)
    if remakes_n:
        ledger.take(n)
    ledger.touch(shape.qkv.rank * (hidden + shape.qkv.width) * shape.lora_itemsize)
    assert dpacked or packed or plan.qkv
    return ledger.peak


def recompute_flops(shape: LayerShape, tokens: int, row_tokens: int) -> dict[str, float]:
    """Floating-point operations that keeping each thing saves in a layer's backward. row_tokens: tokens of the rows that attend."""
    pairs = tokens * row_tokens / 2
    return {
        "qkv": 2.0 * tokens * shape.qkv.n_weights,
        "attention": 4.0 * pairs * shape.n_heads * shape.head_size,
        "residual": 2.0 * tokens * shape.out.n_weights,
        "gate_up": 2.0 * tokens * shape.gate_up.n_weights,
        "down": 2.0 * tokens * shape.down.n_weights if shape.norms[3] else 0.0,
    }
