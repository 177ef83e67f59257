"""What runs in a model, layer by layer, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from fastlm import adapters, binding, loading
from fastlm.forwards.backbone import ATTENTION
from fastlm.forwards.layer import trains_own_weights
from fastlm.patching import Patch, patch_of, patched_modules


@dataclass(frozen=True)
class Row:
    """One layer of the model, or one of the parts around the layers.

    Attributes:
        layer: its name in the model.
        path: "block", "parts" (all or some of it runs fast forwards) or "stock".
        device: "triton" or "torch": what the fast forwards run on.
        attention: the backend of its attention, as last called; "" before the first call or without attention.
        parts: the fast parts in it.
        reason: why something in it stays stock; "" if nothing does.
        calls: forwards of this layer or part on this path. A layer that runs in parts was called as often as that of its parts
            that was called most.
        fallback_calls: how many of them ran stock code, in the layer or in that of its parts that did most often.
    """

    layer: str
    path: str
    device: str
    attention: str
    parts: tuple[str, ...]
    reason: str
    calls: int
    fallback_calls: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Report:
    """Rows, in the order of the model. Prints as a table; iterates as rows; `as_dicts()` for programs.

    Attributes:
        family: class and kind of the model.
        rows: of the layers and of what stands around them.
        graphs: how many calls of layers were replayed as CUDA graphs, or why none are; "" where none were wanted or possible so far.
        memory: what layers keep, and what became of it; "" before a call was planned.
    """

    family: str
    rows: tuple[Row, ...]
    graphs: str = ""
    memory: str = ""

    def as_dicts(self) -> list[dict[str, Any]]:
        return [row.as_dict() for row in self.rows]

    def __iter__(self):
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        lines = [f"fastlm report: {self.family}"]
        header = ("layer", "path", "device", "attention", "calls", "fallbacks", "parts", "reason")
        table = [header] + [
            (r.layer, r.path, r.device, r.attention, str(r.calls), str(r.fallback_calls), " ".join(r.parts), r.reason)
            for r in self.rows
        ]
        widths = [max(len(row[i]) for row in table) for i in range(len(header))]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
        if self.memory:
            lines.append(f"memory: {self.memory}")
        if self.graphs:
            lines.append(f"CUDA graphs: {self.graphs}")
        return "\n".join(lines)

    __repr__ = __str__


def _layers(base: nn.Module) -> list[tuple[str, nn.Module]]:
    """The decoder layers: the members of the longest list of modules, by name."""
    lists = [(name, m) for name, m in base.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        return []
    name, longest = max(lists, key=lambda item: len(list(item[1].modules())))
    return [(f"{name}.{i}", layer) for i, layer in enumerate(longest)]


def _row(name: str, modules: list[tuple[str, nn.Module]], stock_reasons: list[str]) -> Row:
    patches: list[tuple[nn.Module, Patch]] = []
    for _, module in modules:
        patch = patch_of(module)
        if patch is not None and patch.active:
            patches.append((module, patch))
    reasons = list(dict.fromkeys(stock_reasons))
    counts: Counter[str] = Counter()
    for _, patch in patches:
        # a call of the layer is one call of each of its parts
        counts |= patch.fallbacks
    reasons += [f"{count} calls: {reason}" for reason, count in counts.items()]
    block = next((patch for _, patch in patches if patch.part == "block"), None)
    path = "parts" if patches else "stock"
    calls = max((patch.calls for _, patch in patches), default=0)
    if block is not None:
        n_elsewhere = sum(block.elsewhere.values())
        has_run = block.calls > block.fallback_calls
        if trains_own_weights(modules[0][1]):
            reasons.append("its own weights are trained, which is autograd's work")
        elif has_run or not block.calls + n_elsewhere:
            path = "block"
        elif n_elsewhere:
            reasons.append(f"no call ran as a block yet: {'; '.join(block.elsewhere)}")
        calls = block.calls + (n_elsewhere if path == "parts" else 0)
    return Row(
        layer=name,
        path=path,
        device=binding.device_path(modules[0][1]) if patches else "torch",
        attention=next((patch.backend for _, patch in patches if patch.backend), ""),
        parts=tuple(dict.fromkeys(p.part for _, p in patches if path == "block" or p.part != "block")),
        reason="; ".join(reasons),
        calls=calls,
        fallback_calls=max((patch.fallback_calls for _, patch in patches), default=0),
    )


def report(model: nn.Module) -> Report:
    """What runs in each layer of a model, and why something does not run fast.

    Args:
        model: any model that was loaded or patched by fastlm; also one that was not, whose layers are all stock.

    Raises:
        TypeError: if it is not a model of transformers, or PEFT's around one.
    """
    base = adapters.base_model(model)
    if not loading.is_transformers_model(base):
        raise TypeError(f"a model of transformers (or a PEFT model around one) is needed, got {type(base).__name__}")
    state = binding.state_of(model)
    reasons = {} if state is None else state.reasons
    whole = "the model is not patched"
    if state is not None:
        # the empty name speaks of the whole model where it has no row in the table of families, else of its head
        whole = reasons.get("", "") if state.family is None else ""
    if not whole and not any(patch.active for _, _, patch in patched_modules(base)):
        whole = "its fast parts did not come along when it was pickled: patch it again"
    layers = _layers(base)
    rows = []
    inside: set[int] = set()
    for name, layer in layers:
        modules = [(f"{name}.{sub}".rstrip("."), m) for sub, m in layer.named_modules()]
        inside.update(id(m) for _, m in modules)
        own = [f"{n.removeprefix(name + '.')}: {reason}" for n, reason in reasons.items() if n.startswith(name + ".")]
        rows.append(_row(name, modules, ([whole] if whole else []) + own))
    for name, module in base.named_modules():
        patch = patch_of(module)
        if id(module) not in inside and patch is not None and patch.active:
            rows.append(_row(f"{name or type(base).__name__} ({patch.part})", [(name, module)], []))
    if state is not None and not any("(head)" in row.layer for row in rows):
        head_reason = whole or reasons.get("", "the head's forward differs from the one that is known")
        rows.append(Row(f"{type(base).__name__} (head)", "stock", "torch", "", (), head_reason, 0, 0))
    family = "not patched" if state is None else (state.family.model_type if state.family else base.config.model_type)
    implementation = base.config._attn_implementation
    suffix = "" if implementation == ATTENTION else f", attention implementation {implementation}"
    graphs = "" if state is None or state.graphs is None else state.graphs.status
    memory = "" if state is None else state.memory.status
    return Report(family=f"{type(base).__name__} ({family}{suffix})", rows=tuple(rows), graphs=graphs, memory=memory)
