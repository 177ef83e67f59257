"""What a run will need, before it: of a model, or of a config alone, with or without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fastlm import adapters, binding, loading
from fastlm.block.spec import KEEP_ALL, RECOMPUTE_ALL
from fastlm.config import parse_checkpointing
from fastlm.forwards import backbone, layer, shapes
from fastlm.memory import budget
from fastlm.memory.budget import GIB
from fastlm.memory.manager import HEADROOM, LIBRARY_BYTES, Strategy, parse_host, parse_strategy
from fastlm.memory.planner import Batch, Choice, Model, choose, minimal, peak_of

# optimizer -> bytes of its states on the device, by bytes of a trained parameter
_OPTIMIZERS: dict[str, Callable[[int], float]] = {
    "adamw_8bit": lambda size: 2 + 8 / 256,
    "adamw_bnb_8bit": lambda size: 2 + 8 / 256,
    "paged_adamw_8bit": lambda size: 0.0,
    "adamw_torch": lambda size: 2 * size,
    "adamw_torch_fused": lambda size: 2 * size,
    "sgd": lambda size: 0.0,
}
MODES = ("4bit", "16bit")
# of NF4 with nested absmax: the packed values, a byte for 64 of them, and four for 256 of these
_NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)


@dataclass(frozen=True)
class Estimate:
    """Bytes that a training run needs at once on its device, by part, and on the host.

    Attributes:
        weights, adapters, gradients, optimizer: of the model and of what is trained; `adapters` are all trained parameters.
        kept, working, head, libraries: at the moment when most is in use: activations that wait for their backward, what the running
            layer holds, what the head holds, and what cuBLAS keeps.
        where: that moment: "forward", "head" or "backward".
        host: of activations in host memory, which is pinned where it can be.
        available: of the device, for this process; None where no device is known.
        choice: what each layer keeps.
    """

    weights: int
    adapters: int
    gradients: int
    optimizer: int
    kept: int
    working: int
    head: int
    libraries: int
    where: str
    host: int
    available: int | None
    choice: Choice

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        names = ("weights", "adapters", "gradients", "optimizer", "kept", "working", "head", "libraries")
        return {name: getattr(self, name) for name in names}

    @property
    def fits(self) -> bool:
        return self.choice.fits and (self.available is None or self.total <= self.available)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {n_bytes / GIB:.2f}" for name, n_bytes in self.parts.items())
        of = "" if self.available is None else f" of {self.available / GIB:.2f}"
        host = f"; {self.host / GIB:.2f} GiB on the host" if self.host else ""
        return f"{self.total / GIB:.2f}{of} GiB ({parts}; most in the {self.where}){host}; {self.choice}"


@dataclass(frozen=True)
class _Run:
    """A run as numbers: all but its batch.

    Attributes:
        fixed: weights, adapters, gradients and optimizer, in bytes.
    """

    model: Model
    fixed: tuple[int, int, int, int]
    strategy: Strategy
    checkpointing: bool | None
    available: int | None
    host: int

    def estimate(self, batch: Batch) -> Estimate:
        n_layers = len(self.model.layers)
        limit = self.available
        if isinstance(self.strategy, float):
            limit = min(int(self.strategy * GIB), limit or int(self.strategy * GIB))
        beside = sum(self.fixed) + LIBRARY_BYTES
        if self.checkpointing is not None and not (self.checkpointing and self.strategy == "minimal"):
            plans = (RECOMPUTE_ALL if self.checkpointing else KEEP_ALL,) * n_layers
            choice = Choice(plans, peak_of(self.model, batch, plans), True)
        elif self.strategy == "minimal":
            choice = minimal(self.model, batch, self.host)
        elif limit is None:
            choice = Choice((KEEP_ALL,) * n_layers, peak_of(self.model, batch, (KEEP_ALL,) * n_layers), True)
        else:
            free = limit - beside
            share, least = HEADROOM["minimal" if isinstance(self.strategy, float) else self.strategy]
            choice = choose(self.model, batch, max(0, free - max(int(free * share), least)), self.host)
            if not choice.fits:
                # without headroom
                choice = replace(choice, fits=choice.peak.total <= free)
        peak = choice.peak
        return Estimate(
            *self.fixed, kept=peak.kept, working=peak.working, head=peak.head, libraries=LIBRARY_BYTES, where=peak.where,
            host=peak.host, available=limit, choice=choice,
        )  # fmt: skip


def _of_config(config: Any, mode: str, r: int, dtype: torch.dtype) -> tuple[Model, tuple[int, int, int]]:
    """The model of a config with adapters on every projection: its shape, and bytes of weights, adapters and their number."""
    base = loading.empty_model(config, dtype)
    family = binding.find_family(base)
    if isinstance(family, str):
        raise ValueError(f"its memory cannot be estimated: {family}")
    body = base.get_submodule(base.base_model_prefix)
    layers = list(body.get_submodule("layers").children())
    made, quantized = [], 0
    for module in layers:
        spec = layer.make_facts(module, family, False, False, None).spec
        made.append(
            shapes.layer_shape(
                module, family, spec, dtype.itemsize, _fastest(spec.head_size), rank=r, is_decoded=mode == "4bit"
            )
        )
        quantized += sum(group.n_weights for group in made[-1].groups)
    total = sum(p.numel() for p in {id(p): p for p in base.parameters()}.values())
    weights = int((total - quantized) * dtype.itemsize + quantized * (_NF4_BYTES if mode == "4bit" else dtype.itemsize))
    n_trained = sum(
        group.rank // len(group.widths) * (group.features * len(group.widths) + group.width)
        for s in made
        for group in s.groups
    )
    settings = config.get_text_config()
    model = shapes.model_shape(made, settings.vocab_size, dtype.itemsize, made[0].head_size, 0, True)
    return model, (weights, n_trained * dtype.itemsize, n_trained)


def _fastest(head_size: int) -> str:
    """The library that a GPU of today runs whole rows with."""
    return "flash_attention_4" if head_size <= 256 else "efficient"


def _run(
    model_or_config: Any,
    mode: str,
    r: int,
    optim: str,
    memory: Any,
    host_memory: Any,
    use_gradient_checkpointing: Any,
    device_gib: float | None,
    dtype: torch.dtype,
    batch: Batch,
) -> _Run:
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    if optim not in _OPTIMIZERS:
        raise ValueError(f"optim must be one of {', '.join(_OPTIMIZERS)}, got {optim!r}")
    if device_gib is not None and not device_gib > 0:
        raise ValueError(f"device_gib must be a number of GiB above 0, got {device_gib!r}")
    strategy, host_gib = parse_strategy(memory), parse_host(host_memory)
    checkpointing = parse_checkpointing(use_gradient_checkpointing)
    if isinstance(model_or_config, nn.Module):
        base: Any = adapters.base_model(model_or_config)
        state = binding.state_of(base)
        if state is None:
            raise ValueError("the model is not patched: load it with fastlm, or call fastlm.patch_model first")
        strategy = state.memory.strategy if strategy is None else strategy
        checkpointing = state.checkpointing if use_gradient_checkpointing == "auto" else checkpointing
        model, _ = backbone.describe_backbone(base.base_model, batch.tokens // batch.row_tokens, batch.row_tokens)
        held = shapes.weights_of([base])
        trained = [p for p in base.parameters() if p.requires_grad]
        fixed = (held.weights, held.trained, sum(p.numel() * p.element_size() for p in trained))
        n_trained = sum(p.numel() for p in trained)
        size = trained[0].element_size() if trained else 2
    else:
        config = loading.read_config(model_or_config) if isinstance(model_or_config, str) else model_or_config
        model, (weights, adapter_bytes, n_trained) = _of_config(config, mode, r, dtype)
        fixed, size = (weights, adapter_bytes, adapter_bytes), dtype.itemsize
    available = int(device_gib * GIB) if device_gib is not None else _device_bytes()
    host = budget.host_bytes(host_gib)
    optimizer = int(n_trained * _OPTIMIZERS[optim](size))
    return _Run(model, (*fixed, optimizer), strategy or "balanced", checkpointing, available, host)


def _device_bytes() -> int | None:
    """What this process may allocate on the current GPU, what it has already included; None without one."""
    if not torch.cuda.is_available():
        return None
    now = budget.device_memory(torch.device("cuda", torch.cuda.current_device()))
    return None if now is None else min(now.total, now.in_use + now.available)


def _checked(**numbers: Any) -> None:
    for name, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {number!r}")


def estimate(
    model_or_config: Any,
    batch: int,
    seq: int,
    *,
    mode: str = "4bit",
    r: int = 16,
    optim: str = "adamw_8bit",
    memory: Strategy | None = None,
    host_memory: float | None = None,
    use_gradient_checkpointing: bool | str = "auto",
    device_gib: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Estimate:
    """Memory that training with LoRA needs, by part.

    Args:
        model_or_config: a model that fastlm loaded or patched, with its adapter; or a transformers config, or the directory of one, for
            which adapters on every projection are assumed. A config needs no weights and no GPU.
        batch, seq: rows of a micro-batch, and tokens of a row.
        mode: of a config: "4bit" or "16bit".
        r: of a config: the rank of its adapters.
        optim: the trainer's optimizer: adamw_8bit, paged_adamw_8bit, adamw_torch, adamw_torch_fused or sgd.
        memory, host_memory, use_gradient_checkpointing: as in `from_pretrained`; None and "auto" take a model's own.
        device_gib: memory of the device; None is that of the GPU here. Where there is none, no limit is assumed and everything is kept.
        dtype: of a config: of what is not quantized.

    Raises:
        ValueError, TypeError: for bad values, a model that is not patched, or one of a family without a row in the table.
    """
    _checked(batch=batch, seq=seq, r=r)
    of = Batch.of(batch, seq)
    run = _run(
        model_or_config, mode, r, optim, memory, host_memory, use_gradient_checkpointing, device_gib, dtype, of
    )  # fmt: skip
    return run.estimate(of)


def _largest(fits: Callable[[int], bool]) -> int:
    """The largest number for which a claim holds that holds for all smaller ones; 0 if for none."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
        if high > 1 << 30:
            return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _bounded(model_or_config: Any, of: Batch, settings: dict[str, Any]) -> _Run:
    names = dict(
        mode="4bit", r=16, optim="adamw_8bit", memory=None, host_memory=None, use_gradient_checkpointing="auto",
        device_gib=None, dtype=torch.bfloat16,
    )  # fmt: skip
    unknown = set(settings) - set(names)
    if unknown:
        raise TypeError(f"unknown arguments {', '.join(sorted(unknown))}: take those of fastlm.estimate")
    run = _run(model_or_config, **(names | settings), batch=of)  # type: ignore[arg-type]
    if run.available is None and not isinstance(run.strategy, float):
        raise ValueError("there is no GPU here: say how much memory it has, as in device_gib=24")
    return run


def max_batch_size(model_or_config: Any, seq: int, **settings: Any) -> int:
    """The most rows of `seq` tokens that fit into a micro-batch; 0 if none does.

    Args:
        model_or_config, seq, settings: as `estimate`.

    Raises:
        ValueError, TypeError: as `estimate`, and without a GPU or `device_gib`.
    """
    _checked(seq=seq)
    run = _bounded(model_or_config, Batch.of(1, seq), settings)
    return _largest(lambda n: run.estimate(Batch.of(n, seq)).fits)


def max_seq_length(model_or_config: Any, batch: int = 1, **settings: Any) -> int:
    """The most tokens that `batch` rows of a micro-batch may have each; 0 if not even one fits.

    Args:
        model_or_config, batch, settings: as `estimate`.

    Raises:
        ValueError, TypeError: as `estimate`, and without a GPU or `device_gib`.
    """
    _checked(batch=batch)
    run = _bounded(model_or_config, Batch.of(batch, 2048), settings)
    return _largest(lambda n: run.estimate(Batch.of(batch, n)).fits)


def advice(model: nn.Module, batch: int, seq: int, message: str = "") -> str:
    """What to say of an out-of-memory error: what was measured, and the change that would fit.

    Args:
        model: patched by fastlm.
        batch, seq: of the micro-batch that was too much.
        message: of the error.
    """
    said = [message] if message else []
    if torch.cuda.is_available():
        peak, in_use = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        said.append(f"{in_use / GIB:.2f} GiB are allocated, {peak / GIB:.2f} GiB were at most.")
    try:
        here = estimate(model, batch, seq, memory="minimal")
    except ValueError as error:
        return " ".join([*said, f"({error})"])
    said.append(f"{batch} x {seq} tokens need {here.total / GIB:.2f} GiB at least, with memory='minimal'")
    if here.available is None:
        return " ".join(said) + "."
    if here.fits:
        return " ".join(said) + f", which {here.available / GIB:.2f} GiB hold: load with memory='minimal'."
    rows, longest = max_batch_size(model, seq, memory="minimal"), max_seq_length(model, batch, memory="minimal")
    changes = [f"a batch size of {rows}"] if rows else []
    changes += [f"rows of at most {longest} tokens"] if longest else []
    would = " or ".join(changes) or "a smaller model, or weights in 4 bit"
    return " ".join(said) + f", and there are {here.available / GIB:.2f} GiB. What would fit: {would}."


__all__ = ["Estimate", "advice", "estimate", "max_batch_size", "max_seq_length"]
