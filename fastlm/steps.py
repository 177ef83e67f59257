"""Parts of a transformers Trainer that leave a step to the GPU: no read of it and no walk over the model between two logs."""

from __future__ import annotations

import contextlib
import functools
import logging
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fastlm.batches import DescribedBatches, pop_is_full
from fastlm.optimizers import FusedAdamW

logger = logging.getLogger(__name__)

# TrainingArguments.optim -> the dtype of the moments of what FusedAdamW stands in for
_STANDS_IN_FOR: dict[str, torch.dtype | None] = {
    "adamw_torch": None,
    "adamw_torch_fused": None,
    "adamw_8bit": torch.uint8,
    "adamw_bnb_8bit": torch.uint8,
}
# where launches are what a step costs; on a CPU torch's own step is as fast
_DEVICES: tuple[str, ...] = ("cuda",)
# accelerate's names of runs in which each process has whole parameters and gradients
_WHOLE = ("NO", "MULTI_CPU", "MULTI_GPU")


class FusedStep:
    """Part of a transformers Trainer: on GPUs, AdamW in a few launches, and the clip in the same pass, where the arguments ask for AdamW.

    The clip is done by the optimizer's step as it reads the gradients: callbacks before the step see them unclipped. The norm stays on
    the device until it is logged. All else is the Trainer's.
    """

    # Trainer's
    args: Any
    model: Any
    accelerator: Any
    optimizer: Any
    optimizer_cls_and_kwargs: Any
    # the optimizer made here
    _fused: FusedAdamW | None = None

    @property
    def clips_in_step(self) -> bool:
        """Whether gradients stay as they are until the optimizer's step, which clips what it reads."""
        return self._fused is not None

    @property
    def fused_optimizer(self) -> FusedAdamW | None:
        """The optimizer made here, if any."""
        return self._fused

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        if self.optimizer is not None or self.optimizer_cls_and_kwargs is not None:
            # made or chosen by the user
            return super().create_optimizer(model)  # type: ignore[misc]
        opt_model: nn.Module = self.model if model is None else model
        name = next((name for name in _STANDS_IN_FOR if self.args.optim == name), None)
        reason = f"optim={self.args.optim.value}" if name is None else self._stock_reason(opt_model)
        if name is not None and reason is None:
            self.optimizer_cls_and_kwargs = (FusedAdamW, self._settings(opt_model, _STANDS_IN_FOR[name]))
        try:
            made = super().create_optimizer(model)  # type: ignore[misc]
        finally:
            self.optimizer_cls_and_kwargs = None
        self._fused = made if isinstance(made, FusedAdamW) else None
        if self._fused is None:
            logger.info("optimizer: %s, as transformers makes it (%s)", type(made).__name__, reason)
        else:
            kept = "8-bit moments" if self._fused.is_8bit else "moments in the parameters' dtype"
            logger.info("optimizer: FusedAdamW with %s, in place of %s", kept, name)
        return made

    def _stock_reason(self, model: nn.Module) -> str | None:
        """Why the Trainer's own optimizer stays, or None."""
        if self.accelerator.distributed_type.value not in _WHOLE:
            return f"parameters are not whole under {self.accelerator.distributed_type.value}"
        for param in model.parameters():
            if param.requires_grad and isinstance(param, DTensor):
                return "a trained parameter is a DTensor"
            if param.requires_grad and param.device.type not in _DEVICES:
                return f"a trained parameter is on {param.device}"
        return None

    def _settings(self, model: nn.Module, state_dtype: torch.dtype | None) -> dict[str, Any]:
        args = self.args
        settings = dict(lr=args.learning_rate, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon)
        # Trainer tells bitsandbytes to keep the moments of embeddings in float32
        weights = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
        return settings | dict(state_dtype=state_dtype, full_precision=[w for w in weights if w.requires_grad])

    def _is_fused(self) -> bool:
        """Whether the optimizer made here is the one in use, by itself or in accelerate's wrapper."""
        return self._fused is not None and self._fused in (self.optimizer, vars(self.optimizer).get("optimizer"))

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if self._fused is None or not self._is_fused():
            return super()._clip_grad_norm(model)  # type: ignore[misc]
        # does nothing without a GradScaler
        self.accelerator.unscale_gradients()
        return self._fused.clip_grad_norm(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if self._fused is None or not self._is_fused() or grad_norm is not None:
            return super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[misc]
        self.accelerator.unscale_gradients()
        return self._fused.clip_grad_norm()


class DeviceMetrics:
    """Part of TRL's SFTTrainer: what it logs stays on the device until it is logged. The numbers are the trainer's own.

    Covers training on the loss that SFTTrainer computes from its fused head; every other call is the trainer's.
    """

    # Trainer's
    args: Any
    model: Any
    state: Any
    accelerator: Any
    data_collator: Any
    compute_loss_func: Any
    label_smoother: Any
    _tr_loss: Tensor
    _globalstep_last_logged: int
    # SFTTrainer's
    aux_loss_enabled: bool
    _metrics: Any
    _total_train_tokens: int
    # tokens since the last log
    _tokens: Tensor | int = 0
    # of the batch in hand
    _mask_is_full: bool = False
    # whether a loss that is not finite is replaced here instead of in the Trainer's loop
    _filters_losses: bool = False

    def _is_plain_loss(self, inputs: dict[str, Any]) -> bool:
        special = self.compute_loss_func is not None or self.label_smoother is not None or self.aux_loss_enabled
        parallel = self.accelerator.parallelism_config is not None
        counted = "attention_mask" in inputs or "position_ids" in inputs
        return self.model.training and self.args.loss_type == "nll" and counted and not (special or parallel)

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        if self.args.world_size > 1:
            # processes that share a stream of rows take its batches apart, and know tensors only
            return super()._get_dataloader(*args, **kwargs)  # type: ignore[misc]
        own = self.data_collator
        self.data_collator = DescribedBatches(own)
        try:
            return super()._get_dataloader(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.data_collator = own

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self._mask_is_full = pop_is_full(inputs)
        return super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        pop_is_full(inputs)
        return super().prediction_step(model, inputs, *args, **kwargs)  # type: ignore[misc]

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if return_outputs or not self._is_plain_loss(inputs):
            self._count_tokens()
            return super().compute_loss(  # type: ignore[misc]
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
        inputs["use_cache"] = False
        mask = inputs.get("attention_mask")
        if mask is not None and self._mask_is_full:
            del inputs["attention_mask"]
        outputs = model(**inputs, fused_lm_head=True)
        per_token = -outputs.log_probs
        n_items = outputs.label_mask.sum() if num_items_in_batch is None else num_items_in_batch
        loss = per_token.sum() / torch.as_tensor(n_items).clamp(min=1)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes
        gather = self.accelerator.gather_for_metrics
        n_valid = gather(outputs.label_mask.sum()).sum()
        for name, values in (("entropy", outputs.entropy.detach()), ("mean_token_accuracy", outputs.is_top1)):
            mean = gather(values.sum()).sum() / n_valid
            self._metrics["train"][name].append(torch.where(n_valid > 0, mean, torch.zeros_like(mean)))
        places = inputs["position_ids"].new_ones(inputs["position_ids"].size(1)) if mask is None else mask
        self._tokens = self._tokens + gather(places.sum()).sum()
        return loss

    def _count_tokens(self) -> None:
        self._total_train_tokens += int(self._tokens)
        self._tokens = 0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As SFTTrainer's; the metrics since the last log are read from the device first, all at once."""
        metrics = self._metrics["train"]
        places = [(name, i) for name, values in metrics.items() for i, v in enumerate(values) if torch.is_tensor(v)]
        if places:
            for (name, i), value in zip(places, torch.stack([metrics[n][i] for n, i in places]).tolist(), strict=True):
                metrics[name][i] = value
            self._count_tokens()
            metrics["num_tokens"] = [self._total_train_tokens]
        super().log(logs, start_time)  # type: ignore[misc]

    def filtered_loss(self, loss: Tensor) -> Tensor:
        """What the Trainer adds up for its log: the mean since the last log in place of a loss that is not finite."""
        if not self._filters_losses:
            return loss
        n_steps = 1 + self.state.global_step - self._globalstep_last_logged
        return torch.where(loss.isfinite(), loss, (self._tr_loss / n_steps).to(loss))

    @contextlib.contextmanager
    def filter_on_device(self) -> Iterator[None]:
        """Within, the Trainer's loop leaves `logging_nan_inf_filter` to `filtered_loss`: its own look at a loss waits for the device."""
        self._filters_losses, self.args.logging_nan_inf_filter = self.args.logging_nan_inf_filter, False
        try:
            yield
        finally:
            self._filters_losses, self.args.logging_nan_inf_filter = False, self._filters_losses

    def _save(self, *args: Any, **kwargs: Any) -> None:
        # among what is saved are the arguments: as the user gave them
        now = self.args.logging_nan_inf_filter
        self.args.logging_nan_inf_filter = now or self._filters_losses
        try:
            super()._save(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.args.logging_nan_inf_filter = now


class _Tree:
    """The modules of a model, known from one call to the next as long as nobody puts another in the place of one, or adds one."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: list[nn.Module] = []
        self._children: list[nn.Module | None] = []

    def modules(self) -> list[nn.Module]:
        children = [child for module in self._modules for child in module._modules.values()]
        if not self._modules or children != self._children:
            self._modules = list(self._model.modules())
            self._children = [child for module in self._modules for child in module._modules.values()]
        return self._modules


@contextlib.contextmanager
def short_walks(model: nn.Module) -> Iterator[None]:
    """Within, `model.train()` and `model.zero_grad()`, which a Trainer calls at every step, do not name every module on their way.

    They do what torch's own do, in a tenth of the time; `train` sets no module that is in that mode already. A copy of the model has
    torch's own.
    """
    tree, stock_train, stock_zero_grad = _Tree(model), model.train, model.zero_grad

    # pickled by the names that these take over, and so as the class's own
    @functools.wraps(nn.Module.train)
    def train(self: nn.Module, mode: bool = True) -> nn.Module:
        if self is not model:
            return type(self).train(self, mode)
        return model if all(module.training is mode for module in tree.modules()) else stock_train(mode)

    @functools.wraps(nn.Module.zero_grad)
    def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        if self is not model or not set_to_none:
            (stock_zero_grad if self is model else functools.partial(type(self).zero_grad, self))(set_to_none)
            return
        for module in tree.modules():
            for parameter in module._parameters.values():
                if parameter is not None and parameter.grad is not None:
                    parameter.grad = None

    own = dict(train=types.MethodType(train, model), zero_grad=types.MethodType(zero_grad, model))
    before = {name: vars(model)[name] for name in own if name in vars(model)}
    vars(model).update(own)
    try:
        yield
    finally:
        for name, bound in own.items():
            if vars(model).get(name) is bound:
                del vars(model)[name]
        vars(model).update(before)


class CountedOnce:
    """Part of a transformers Trainer: the model's parameters are counted once, not by a walk over all modules at every step."""

    _flops_per_input: int | None = None

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """6 x inputs x parameters outside the embeddings, as Trainer counts."""
        n_inputs = inputs["input_ids"].numel() if "input_ids" in inputs else 0
        if self._flops_per_input is not None and n_inputs:
            return self._flops_per_input * n_inputs
        counted: int = super().floating_point_ops(inputs)  # type: ignore[misc]
        if n_inputs:
            self._flops_per_input = counted // n_inputs
        return counted
