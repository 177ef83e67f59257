"""Replacing forwards on one model's own modules, counting what runs, and putting the stock ones back.

A patched module carries a `Patch` in its instance dictionary and a bound `forward` that asks it what to do, so a deep copy of the
model is patched on its own, a revert reaches calls through wrappers that captured the bound forward, and no class is ever touched.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

_KEY = "_fastlm_patch"
# What newer releases of transformers call an argument -> the name that the fast forwards have for it.
_RENAMED = {"cache": "past_key_values"}


class Fallback(Exception):
    """Raised by a fast forward, before it computes anything, for a call that it cannot take. The message is the reason."""


@dataclass
class Patch:
    """What is bound on one module.

    Attributes:
        part: which part of the model this is ("attention", "mlp", "norm", "head", "backbone", "linear").
        stock: the class's own forward.
        fast: the replacement, same arguments.
        bound: the function that was put on the instance; asks this patch what to run.
        strict: raise instead of falling back for a call that the replacement cannot take.
        facts: what the replacement needs to know about the module's family.
        active: False after a revert.
        calls: forwards of the module on this path, those that ran stock code included.
        fallback_calls: how many of them ran stock code.
        fallbacks: the reasons, each with the number of these calls.
        elsewhere: forwards that by design belong to the module's parts, by reason; not in `calls`.
        backend: the library that an attention last ran.
        recomputes: a decoder layer may make its activations again in the backward instead of keeping them.
    """

    part: str
    stock: Callable[..., Any]
    fast: Callable[..., Any]
    bound: Callable[..., Any] | None = None
    strict: bool = False
    facts: Any = None
    active: bool = True
    calls: int = 0
    fallback_calls: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    elsewhere: Counter[str] = field(default_factory=Counter)
    # why the call that is running ran stock code so far; None between calls
    reasons_now: set[str] | None = field(default=None, repr=False)
    backend: str = ""
    recomputes: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Patch:
        # functions are shared, counts are not; facts may hold what belongs to one model
        return dataclasses.replace(
            self,
            facts=copy.deepcopy(self.facts, memo),
            fallbacks=Counter(self.fallbacks),
            elsewhere=Counter(self.elsewhere),
        )

    def __getstate__(self) -> dict[str, Any]:
        # a bound forward is pickled as its class's: what is loaded from a pickle is a stock module
        return {**self.__dict__, "bound": None, "active": False, "reasons_now": None}

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.active:
            return self.stock(module, *args, **kwargs)
        self.calls += 1
        self.reasons_now = set()
        try:
            return self.fast(module, *args, **{_RENAMED.get(name, name): value for name, value in kwargs.items()})
        except Fallback as fallback:
            self.fell_back(str(fallback))
        finally:
            self.reasons_now = None
        return self.stock(module, *args, **kwargs)

    def fell_back(self, reason: str) -> None:
        """Counts a call that runs stock code, or a part of it that does: once a call, and once for each reason.

        One that never reaches the bound forward is counted as a call here.

        Raises:
            RuntimeError: if the model was patched with `strict=True`.
        """
        if self.strict:
            raise RuntimeError(
                f"the fast {self.part} cannot run for this call: {reason}. "
                "Load with strict=False to let such calls run the stock forward"
            )
        if self.reasons_now is None:
            self.calls += 1
        elif reason in self.reasons_now:
            return
        self.fallback_calls += not self.reasons_now
        self.fallbacks[reason] += 1
        if self.reasons_now is not None:
            self.reasons_now.add(reason)

    def ran_elsewhere(self, reason: str) -> None:
        """Counts a call that belongs to the module's parts, instead of as one on this path."""
        self.calls -= 1
        self.elsewhere[reason] += 1


def patch_of(module: nn.Module) -> Patch | None:
    """The module's patch, active or reverted, or None if it never had one."""
    return module.__dict__.get(_KEY)


def own_class(module: nn.Module) -> type[nn.Module]:
    """The module's class, behind the one that FSDP's `fully_shard` puts before it."""
    fsdp, kind = sys.modules.get("torch.distributed.fsdp"), type(module)
    return kind.__bases__[1] if fsdp is not None and issubclass(kind, fsdp.FSDPModule) else kind


def signature_mismatch(stock: Callable[..., Any], fast: Callable[..., Any]) -> str | None:
    """Why `fast` cannot stand in for `stock`: a difference in the names or the kinds of their parameters; None if there is none.

    A replacement that takes any arguments, or any behind its first, stands in for all.
    """

    def parameters(function: Callable[..., Any]) -> list[tuple[str, Any]]:
        return [(_RENAMED.get(p.name, p.name), p.kind) for p in inspect.signature(function).parameters.values()]

    ours, theirs = parameters(fast), parameters(stock)
    anything = [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]
    if ours == theirs or anything in ([kind for _, kind in ours[1:]], [kind for _, kind in ours[2:]]):
        return None
    return f"forward takes ({', '.join(n for n, _ in theirs)}), not ({', '.join(n for n, _ in ours)})"


def bind(module: nn.Module, part: str, fast: Callable[..., Any], facts: Any = None, strict: bool = False) -> str | None:
    """Bind `fast` as the forward of this one module.

    A module whose forward accelerate hooked keeps the hook: the replacement takes the place of the forward inside it.

    Returns:
        None, or the reason why the module keeps its forward: a signature that differs from the replacement's, or a
        forward that somebody else replaced.
    """
    stock = type(module).forward
    mismatch = signature_mismatch(stock, fast)
    if mismatch:
        return mismatch
    # accelerate keeps the forward that its hook wraps under this name; its hook object marks that it did
    slot = "_old_forward" if "_hf_hook" in module.__dict__ else "forward"
    already = patch_of(module)
    # one that comes out of a pickle is bound to nothing yet
    if already is not None and already.bound is not None:
        already.part, already.fast, already.facts, already.strict, already.active = part, fast, facts, strict, True
        return None
    if already is None and slot == "forward" and "forward" in module.__dict__:
        return "its forward was replaced on the instance before fastlm saw it"

    @functools.wraps(stock)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return _run_opaque(self, args, kwargs)
        return _run(self, args, kwargs)

    module.__dict__[_KEY] = Patch(part=part, stock=stock, fast=fast, bound=forward, strict=strict, facts=facts)
    module.__dict__[slot] = types.MethodType(forward, module)
    return None


# What a compiler that may not break its graph shows its user.
_OPAQUE = (
    "a fast forward of fastlm is nothing that torch.compile or torch.export could trace: call fastlm.revert(model) first, or "
    "compile with fullgraph=False"
)
# Decorates what a compiler must call as it is.
opaque = functools.partial(torch.compiler.disable, reason=_OPAQUE)


def _run(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    patch: Patch = module.__dict__[_KEY]
    return patch.run(module, args, kwargs)


@opaque
def _run_opaque(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`_run` for compilers, which would gain nothing inside hand-written kernels, and compile anew for every layer and count."""
    if torch.compiler.is_exporting():
        raise RuntimeError(_OPAQUE)
    return _run(module, args, kwargs)


def patched_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module, Patch]]:
    """Name, module and patch of every module under `root` that was ever patched."""
    for name, module in root.named_modules():
        patch = patch_of(module)
        if patch is not None:
            yield name, module, patch


def unbind(module: nn.Module) -> None:
    """Give the module its stock forward back. A wrapper that captured the bound forward keeps working: it reaches the stock one."""
    patch = patch_of(module)
    if patch is None:
        return
    patch.active = False
    for slot in ("forward", "_old_forward"):
        value = module.__dict__.get(slot)
        if isinstance(value, types.MethodType) and value.__func__ is patch.bound:
            if slot == "forward":
                del module.__dict__[slot]
            else:
                module.__dict__[slot] = types.MethodType(patch.stock, module)
    if all(module.__dict__.get(slot) is None for slot in ("forward", "_old_forward")):
        del module.__dict__[_KEY]
