"""AdamW whose step is a few launches however many tensors there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fastlm_kernels import adamw
from fastlm_kernels._dynamic_map import QUANT_BLOCK, dynamic_map

# of one parameter's state: torch.optim.AdamW's names, and those of bitsandbytes, which keeps its own in a dict of their own in a state_dict
_TORCH_MOMENTS = ("exp_avg", "exp_avg_sq")
_BNB_MOMENTS = ("state1", "state2")
_BNB_ABSMAX = ("absmax1", "absmax2")
_BNB_MAPS = ("qmap1", "qmap2")
_BNB_NEST = "__bnb_optimizer_quant_state__"
# settings of torch.optim.AdamW that a state_dict names; the first two change what a step does
_TORCH_SETTINGS = dict(
    amsgrad=False,
    maximize=False,
    foreach=None,
    capturable=False,
    differentiable=False,
    fused=None,
    decoupled_weight_decay=True,
)


class _Slot(adamw.Slot):
    """A parameter, its moments and the state that they are in."""

    def __init__(self, param: Tensor, state: dict[str, Any]) -> None:
        self._names = [name for name in (*_TORCH_MOMENTS, *_BNB_MOMENTS, *_BNB_ABSMAX) if name in state]
        super().__init__(param, [state[name] for name in self._names])
        self.state = state

    def has_moved(self) -> bool:
        state = self.state
        return [self.param.data_ptr(), *[state[name].data_ptr() for name in self._names]] != self.places


class _Work:
    """What one step works on: the tensors, with contiguous gradients and the number of their row of scalars.

    Attributes:
        keys: of each row, the number of its group and of the step.
        slots: all that have a gradient.
        fused: of each kernel's kind: slots, gradients, rows.
        others: what no kernel takes.
        has_copies: some gradient here is a copy, made to be contiguous.
    """

    def __init__(self) -> None:
        self.keys: list[tuple[int, int]] = []
        self.slots: list[_Slot] = []
        self.fused: dict[adamw.Kind, tuple[list[adamw.Slot], list[Tensor], list[int]]] = {}
        self.others: list[tuple[_Slot, Tensor, int]] = []
        self.has_copies = False

    def add(self, slot: _Slot, grad: Tensor, row: int) -> None:
        self.slots.append(slot)
        if not grad.is_contiguous():
            grad, self.has_copies = grad.contiguous(), True
        kind = slot.kind(grad)
        if kind is None:
            self.others.append((slot, grad, row))
            return
        parts = self.fused.get(kind)
        if parts is None:
            parts = self.fused[kind] = ([], [], [])
        parts[0].append(slot)
        parts[1].append(grad)
        parts[2].append(row)

    def drop_grads(self) -> bool:
        """Lets go of the gradients. Returns whether the step needs no more of them than where they are."""
        for _, grads, _ in self.fused.values():
            grads.clear()
        return not (self.others or self.has_copies)


class Verdict:
    """Whether a step is taken, decided on the device. The step obeys it there; the host hears of it when it asks.

    Args:
        is_taken: [] bool on a device.
        sums: of some tensors: their parameters, which of them each sum of squares is of, and the sums.

    Attributes:
        slots: what the step works on, once it was called.
    """

    def __init__(self, is_taken: Tensor, sums: list[tuple[list[Tensor], Tensor, Tensor]]) -> None:
        self._sums, self.slots = sums, list[_Slot]()
        self._on_device = is_taken.to(torch.int32)
        self._told = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=is_taken.is_cuda)
        self._told.copy_(is_taken, non_blocking=True)
        self._arrival = torch.cuda.Event() if is_taken.is_cuda else None
        if self._arrival is not None:
            self._arrival.record(torch.cuda.current_stream(is_taken.device))

    def on(self, device: torch.device) -> Tensor:
        """[] int32 on this device: 1 if the step is taken, else 0."""
        return self._on_device.to(device, non_blocking=True)

    def is_taken(self) -> bool:
        """Waits for the device until it has come as far as to decide."""
        if self._arrival is not None and not self._arrival.query():
            self._arrival.synchronize()
        return bool(self._told)

    def not_finite(self) -> set[Tensor]:
        """The parameters whose gradients' squares had no finite sum. Reads them from the device."""
        found = [(params, of[~sums.isfinite()].unique().tolist()) for params, of, sums in self._sums]
        return {params[number] for params, numbers in found for number in numbers}


class FusedAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW, or bitsandbytes' AdamW8bit, over all tensors in a few launches; nothing waits for the GPU.

    Computes in float32 (`fastlm_kernels.adamw`). Its `state_dict` is that of the optimizer whose moments it keeps, so that checkpoints
    move both ways. Weights decay before the update, as in the paper and in torch; bitsandbytes' CUDA kernel decays them afterwards, which
    shrinks the update too, by lr * weight_decay of it.

    Args:
        params: parameters or groups of them, of any float dtype and on any devices.
        lr, betas, eps, weight_decay: as torch.optim.AdamW's.
        state_dtype: of the moments. None: the parameter's, as torch.optim.AdamW; torch.float32; torch.uint8: bitsandbytes' 8-bit codes.
        min_8bit_size: with torch.uint8, smaller tensors keep float32 moments, as in bitsandbytes.
        full_precision: with torch.uint8, parameters that keep float32 moments whatever their size.

    Raises:
        ValueError: for a setting out of its range.
        TypeError: for a parameter that is not of a real float dtype.

    Reference: Loshchilov and Hutter 2019, arXiv:1711.05101; Dettmers et al. 2021, arXiv:2110.02861.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state_dtype: torch.dtype | None = None,
        min_8bit_size: int = 4096,
        full_precision: Iterable[Tensor] = (),
    ) -> None:
        if state_dtype not in (None, torch.float32, torch.uint8):
            raise ValueError(f"state_dtype must be None, torch.float32 or torch.uint8, got {state_dtype}")
        self.state_dtype, self.min_8bit_size = state_dtype, min_8bit_size
        self._full_precision = set(full_precision)
        self._forget()
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, defaults if self.is_8bit else defaults | _TORCH_SETTINGS)

    @property
    def is_8bit(self) -> bool:
        return self.state_dtype is torch.uint8

    def _forget(self) -> None:
        """Drops what is kept between calls and can be made again."""
        self._slots: dict[Tensor, _Slot] = {}
        self._sets: dict[adamw.Kind, adamw.TensorSet] = {}
        self._measured: tuple[list[Any], _Work] | None = None
        # what the next step multiplies gradients by
        self._factors: dict[torch.device, Tensor] = {}
        # the sums of squares that the last clip took, as Verdict takes them
        self._sums: list[tuple[list[Tensor], Tensor, Tensor]] = []
        # of the next step, and of the last one, if it was not yet heard
        self._verdict: Verdict | None = None
        self._unheard: Verdict | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as every torch optimizer does; its own settings stand before the defaults.

        Raises:
            ValueError, TypeError: as the constructor.
        """
        group = self.defaults | param_group
        for name in ("lr", "eps", "weight_decay"):
            if not group[name] >= 0:
                raise ValueError(f"{name} must be at least 0, got {group[name]}")
        if len(group["betas"]) != 2 or not all(0 <= beta < 1 for beta in group["betas"]):
            raise ValueError(f"betas must be two numbers in [0, 1), got {group['betas']}")
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if not param.is_floating_point():
                raise TypeError(f"parameters must have a real float dtype, got {param.dtype}")

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        own = dict(state_dtype=self.state_dtype, min_8bit_size=self.min_8bit_size, _full_precision=self._full_precision)
        return super().__getstate__() | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()
        for group in self.param_groups:
            for name, value in ({} if self.is_8bit else _TORCH_SETTINGS).items():
                group.setdefault(name, value)
            for name in ("amsgrad", "maximize"):
                if group.get(name, False):
                    raise ValueError(f"FusedAdamW has no {name}: train on with the optimizer that wrote this state")

    def _zeros(self, param: Tensor, dtype: torch.dtype) -> Tensor:
        # codes and what stands beside them are counted in blocks of the values in order, whatever the parameter's strides
        order = torch.contiguous_format if self.is_8bit else torch.preserve_format
        return torch.zeros_like(param, dtype=dtype, memory_format=order, requires_grad=False)

    def _new_state(self, param: Tensor) -> dict[str, Any]:
        if not self.is_8bit:
            dtype = self.state_dtype or param.dtype
            return dict(step=0, **{name: self._zeros(param, dtype) for name in _TORCH_MOMENTS})
        is_small = param.numel() < self.min_8bit_size or param in self._full_precision
        state: dict[str, Any] = dict(step=0)
        state |= {name: self._zeros(param, torch.float32 if is_small else torch.uint8) for name in _BNB_MOMENTS}
        if not is_small:
            n_blocks = -(-param.numel() // QUANT_BLOCK)
            zeros = lambda: torch.zeros(n_blocks, dtype=torch.float32, device=param.device)
            state |= {name: zeros() for name in _BNB_ABSMAX}
        return state

    def _slot(self, param: Tensor) -> _Slot:
        """The parameter with its moments; made anew where one of them is not where it was."""
        state = self.state[param]
        if not state:
            state.update(self._new_state(param))
        known = self._slots.get(param)
        if known is None or known.state is not state or known.has_moved():
            known = self._slots[param] = _Slot(param, state)
        return known

    def _row(self, number: int, step: int) -> list[float]:
        group = self.param_groups[number]
        lr, eps, weight_decay = (float(group[name]) for name in ("lr", "eps", "weight_decay"))
        beta1, beta2 = map(float, group["betas"])
        return adamw.scalars(lr, (beta1, beta2), eps, weight_decay, step)

    def _places(self) -> list[tuple[int, torch.dtype] | None]:
        """Where the gradient of each parameter is."""
        grads = (param.grad for group in self.param_groups for param in group["params"])
        return [None if grad is None else (grad.data_ptr(), grad.dtype) for grad in grads]

    def _gather(self) -> _Work:
        """What the next step works on."""
        work, row_of = _Work(), dict[tuple[int, int], int]()
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                grad = param.grad
                if grad is None:
                    continue
                if grad.layout is not torch.strided:
                    raise TypeError(
                        f"FusedAdamW takes no sparse gradients, got {grad.layout}: use torch.optim.SparseAdam"
                    )
                slot = self._slot(param)
                key = (number, slot.state["step"] + 1)
                work.add(slot, grad, row_of.setdefault(key, len(row_of)))
        work.keys = list(row_of)
        known, self._sets = self._sets, {}
        for kind, parts in work.fused.items():
            self._sets[kind] = known.get(kind) or adamw.TensorSet(kind)
            self._sets[kind].hold(*parts)
        return work

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float = float("inf")) -> Tensor:
        """Measures the gradients' norm and lets the next `step` clip them to it, as torch.nn.utils.clip_grad_norm_ would have.

        The gradients themselves stay as they are: the step scales them as it reads them.

        Args:
            max_norm: infinity only measures.

        Returns:
            [] float32, or float64 if a gradient is: the 2-norm of all gradients, on a device of theirs; nobody has waited for it.

        Raises:
            TypeError: for a sparse gradient.
            ValueError: if max_norm is not positive.
        """
        self._settle()
        if not max_norm > 0:
            raise ValueError(f"max_norm must be positive, got {max_norm}; leave the call out for no clip")
        work = self._gather()
        is_clip = max_norm != float("inf")
        found = self._clips(work, max_norm)
        self._measured = (self._places(), work) if work.drop_grads() else None
        if len(found) == 1 and not work.others:
            ((device, clip),) = found.items()
            self._factors = {device: clip.factor} if is_clip else {}
            return clip.norm
        norms = [clip.norm for clip in found.values()]
        for slot, grad, _ in work.others:
            norms.append(torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32)))
            sums = norms[-1].detach()[None]
            self._sums.append(([slot.param], torch.zeros_like(sums, dtype=torch.int32), sums))
        if not norms:
            return torch.zeros(())
        norm = torch.linalg.vector_norm(torch.stack([part.to(norms[0].device, non_blocking=True) for part in norms]))
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        devices = {*found, *(grad.device for _, grad, _ in work.others)} if is_clip else ()
        self._factors = {device: factor.to(device, non_blocking=True) for device in devices}
        return norm

    def _clips(self, work: _Work, max_norm: float) -> dict[torch.device, adamw.Clip]:
        """Of each device with gradients for the kernels. Keeps the sums of squares."""
        by_device: dict[torch.device, list[adamw.Kind]] = {}
        for kind in self._sets:
            by_device.setdefault(kind.device, []).append(kind)
        found, self._sums = {}, []
        for device, kinds in by_device.items():
            parts = [self._sets[kind] for kind in kinds]
            found[device] = adamw.clip_of(parts, max_norm, device)
            sums = found[device].partial.split([part.n_blocks for part in parts])
            for kind, part, own in zip(kinds, parts, sums, strict=True):
                self._sums.append(([slot.param for slot in work.fused[kind][0]], part.blocks, own))
        return found

    def step_only_if(self, finite: Tensor) -> Verdict:
        """Makes the next `step` leave everything as it is where this says so; nobody waits for it.

        Args:
            finite: [] bool, on the device of a gradient.

        Returns:
            The verdict, to be asked once the device has come so far: before the next `clip_grad_norm` by whoever cares when it waits.
        """
        self._verdict = Verdict(finite, self._sums)
        return self._verdict

    def _settle(self) -> None:
        """A step that was not taken does not count: the next one has its number."""
        unheard, self._unheard = self._unheard, None
        if unheard is not None and not unheard.is_taken():
            for slot in unheard.slots:
                slot.state["step"] -= 1

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step over all parameters that have a gradient. Returns what the closure returns, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._settle()
        factors, self._factors = self._factors, {}
        verdict, self._verdict = self._verdict, None
        # what was measured is still held by the tables, unless somebody touched the gradients since
        measured, self._measured = self._measured, None
        work = measured[1] if measured is not None and measured[0] == self._places() else self._gather()
        rows, sent = [self._row(*key) for key in work.keys], dict[torch.device, Tensor]()
        for part in self._sets.values():
            if part.device not in sent:
                sent[part.device] = adamw.send_scalars(rows, part.device)
            factor = factors.get(part.device)
            taken = None if verdict is None else verdict.on(part.device)
            part.step(sent[part.device], None if factor is None else factor.float(), taken)
        for slot, grad, row in work.others:
            if verdict is not None and not verdict.is_taken():
                break
            adamw.adamw_torch_(slot.param, grad, slot.moments, rows[row], factors.get(grad.device))
        for slot in work.slots:
            slot.state["step"] += 1
        if verdict is not None:
            verdict.slots, self._unheard = work.slots, verdict
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state, laid out as the optimizer of the same moments lays it out."""
        self._settle()
        packed = super().state_dict()
        packed["state"] = {key: self._packed(state) for key, state in packed["state"].items()}
        return packed

    def _packed(self, state: dict[str, Any]) -> dict[str, Any]:
        if not self.is_8bit:
            return state | dict(step=torch.tensor(float(state["step"]), dtype=torch.float32, device="cpu"))
        tensors = {name: value for name, value in state.items() if name != "step"}
        if _BNB_ABSMAX[0] in tensors:
            device = tensors[_BNB_ABSMAX[0]].device
            tensors |= {name: dynamic_map(name == _BNB_MAPS[0]).to(device) for name in _BNB_MAPS}
        return {"step": state["step"], _BNB_NEST: tensors}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state that this class, torch.optim.AdamW or bitsandbytes' AdamW wrote.

        Raises:
            ValueError: if groups or shapes differ, or the state is of another kind of moments or another optimizer.
        """
        # torch's own cast would turn codes and float32 moments into the parameters' dtype: it gets the groups alone
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        ours = chain.from_iterable(group["params"] for group in self.param_groups)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = dict(zip(saved, ours, strict=True))
        for key, state in state_dict["state"].items():
            if state and key in params:
                self.state[params[key]] = self._unpacked(params[key], state)

    def _unpacked(self, param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        state = {**state, **state.get(_BNB_NEST, {})}
        names = _BNB_MOMENTS if self.is_8bit else _TORCH_MOMENTS
        if not all(name in state for name in ("step", *names)):
            raise ValueError(
                f"the state has {sorted(map(str, state))}, FusedAdamW with state_dtype={self.state_dtype} needs {sorted(names)}: "
                "train on with the optimizer that wrote it"
            )
        is_codes = state[names[0]].dtype is torch.uint8
        if not all(state[name].shape == param.shape for name in names):
            shapes = [tuple(state[name].shape) for name in names]
            raise ValueError(f"the state's moments are {shapes}, the parameter is {tuple(param.shape)}")
        dtype = torch.float32 if self.is_8bit else self.state_dtype or param.dtype
        moments = {name: self._zeros(param, torch.uint8 if is_codes else dtype) for name in names}
        if is_codes:
            for name in _BNB_MAPS:
                ours = dynamic_map(name == _BNB_MAPS[0])
                if not torch.allclose(state[name].cpu(), ours, rtol=1e-5, atol=0.0):
                    raise ValueError(f"the state's {name} is not the dynamic map that FusedAdamW decodes by")
            moments |= {name: torch.empty_like(state[name], device=param.device) for name in _BNB_ABSMAX}
        for name, moment in moments.items():
            moment.copy_(state[name])
        return dict(step=int(state["step"]), **moments)
