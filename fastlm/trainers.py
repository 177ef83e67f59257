"""The door to trl: our head under its trainers, and a trainer made in one call."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sized
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastlm import adapters, binding, checkpoints, host_memory, quant
from fastlm.forwards.causal_lm import TOKEN_OUTPUT
from fastlm.patching import opaque, patch_of
from fastlm.steps import CountedOnce, DeviceMetrics, FusedStep, short_walks
from fastlm_kernels.linear_cross_entropy import TokenStats

logger = logging.getLogger(__name__)

# what a layer that was short of memory says, beside what would fit
_TRIED = "The layer was run again"
# What TRL's SFTTrainer asks of its fused head; others ask for more and keep TRL's.
_FIELDS = ("log_probs", "entropy", "is_top1")


def token_output(loss: Tensor, statistics: TokenStats, label_mask: Tensor) -> Any:
    """TRL's output of a fused head, from our per-token statistics. All of shape [B, S]."""
    output = importlib.import_module("trl.trainer.utils").FusedCausalLMOutput
    values = dict(
        loss=loss,
        log_probs=statistics.log_probs,
        entropy=statistics.entropy,
        is_top1=statistics.is_top1,
        label_mask=label_mask,
    )
    return output(**values)


def _head_reason(base: nn.Module) -> str | None:
    """Why TRL's fused head runs instead of ours, or None. Read from the wrapper that TRL put on this model.

    TRL's wrapper bears the name of the forward that it wraps; what it closes over shows what it is and how it was made.
    """
    # accelerate's mixed precision keeps the forward that it wrapped under the second name
    outermost = base.__dict__.get("_original_forward", base.__dict__.get("forward"))
    function = getattr(outermost, "__func__", None)
    made_with = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    if "original_forward" not in made_with or "temperature" not in made_with:
        return "the fused head was asked for, but TRL's wrapper is not on this model"
    if made_with["temperature"] != 1.0:
        return f"TRL's head was made with temperature {made_with['temperature']}"
    if made_with.get("cast_lm_head_to_fp32", False):
        return "TRL's head was made to run in float32"
    further = set(made_with.get("outputs", ())) - set(_FIELDS)
    if further:
        return f"TRL's head was asked for {', '.join(sorted(further))}"
    return None


@opaque
def _redirect_head(base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Forward pre-hook of a patched model: TRL's request for its head becomes a request for ours.

    TRL's wrapper hands calls without its flag to the forward that it captured, which is ours.
    """
    if not kwargs.get("fused_lm_head"):
        return None
    patch = patch_of(base)
    if patch is None or not patch.active:
        return None
    state = binding.state_of(base)
    if state.head_wrapper is not base.__dict__.get("forward"):
        # a new wrapper: look once at how it was made
        state.head_wrapper = base.__dict__.get("forward")
        state.head_reason = _head_reason(base)
    if not state.told_of_cut:
        _log_cut_rows(state, kwargs)
    reason = state.head_reason
    if reason is not None:
        patch.fell_back(reason)
        return None
    kwargs = dict(kwargs)
    del kwargs["fused_lm_head"]
    kwargs[TOKEN_OUTPUT] = token_output
    return args, kwargs


def _log_cut_rows(state: binding.ModelState, kwargs: dict[str, Any]) -> None:
    """Tell once of rows that end exactly where TRL's default length cuts them, if the model was loaded for longer ones."""
    rows, longest = kwargs.get("input_ids"), state.max_seq_length
    if rows is None or longest is None or kwargs.get("cu_seq_lens_q") is not None:
        return
    default = _default_max_length()
    if rows.shape[1] == default < longest:
        state.told_of_cut = True
        logger.warning(
            "rows end exactly at %d tokens, the default max_length of SFTConfig, while the model was loaded for %d: longer rows are "
            "cut. Pass SFTConfig(max_length=%d) to train on all of them",
            default,
            longest,
            longest,
        )


def _default_max_length() -> int:
    return next(f.default for f in dataclasses.fields(sys.modules["trl"].SFTConfig) if f.name == "max_length")


def _log_default_length(state: binding.ModelState, args: Any) -> None:
    """Tell once of a config with TRL's default length, which cannot be told from a chosen one, for a model of another."""
    longest, default = state.max_seq_length, _default_max_length()
    if args.max_length == default and longest not in (None, default) and not state.told_of_cut:
        state.told_of_cut = True
        logger.warning(
            "rows are cut at max_length=%d, the default of the SFTConfig that was given, while the model was loaded with "
            "max_seq_length=%d. Pass SFTConfig(max_length=%d) to train on rows of that length; a dict of arguments takes it by itself",
            default,
            longest,
            longest,
        )


def serve_head(model: nn.Module) -> None:
    """Let the model's own fused head answer TRL's trainers. On this model's instance only."""
    base = adapters.base_model(model)
    state = binding.state_of(model)
    patch = patch_of(base)
    if state is not None and state.hook is None and patch is not None and patch.part == "head":
        state.hook = base.register_forward_pre_hook(_redirect_head, with_kwargs=True)


class WholeCheckpoints:
    """Part of a transformers Trainer: a checkpoint folder appears whole or not at all, and is verified before it is resumed from.

    Trainer's own method writes, but into a folder aside, which is then published by one rename (`fastlm.checkpoints`); uploads and the
    rotation of older checkpoints come after that. Its callbacks (`fastlm.guards`) are told of every loss and gradient. All else is the
    Trainer's.
    """

    # Trainer's
    args: Any
    state: Any
    control: Any
    accelerator: Any
    model: Any
    optimizer: Any
    callback_handler: Any
    # FusedStep's and DeviceMetrics'
    clips_in_step: bool
    fused_optimizer: Any
    filtered_loss: Callable[[Tensor], Tensor]
    filter_on_device: Callable[[], contextlib.AbstractContextManager[None]]
    # where a save is being written instead of in the output folder
    _stage: str | None = None
    # rows and tokens a row of the batch in hand
    _shape: tuple[int, int] | None = None

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._stage is None else self._stage

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # an upload reads the folder long after the save: it must have its name by then
        if self._stage is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        later = self._callbacks_of(output().LaterSaves)
        for one in later:
            one.wait()
        run_dir, name = self._get_output_dir(trial), f"checkpoint-{self.state.global_step}"
        final = os.path.join(run_dir, name)
        stage = checkpoints.stage_of(final)
        start = time.perf_counter()
        if self.args.should_save:
            checkpoints.begin(final)
        self.accelerator.wait_for_everyone()
        self._stage = stage
        try:
            super()._save_checkpoint(model, trial)
            self._stage = None
            self._name_best(run_dir, os.path.join(stage, name))
            # every process has written its part
            self.accelerator.wait_for_everyone()
        except Exception as error:
            self._fail_save(final, error)
        finally:
            self._stage = None
        publish = functools.partial(self._publish, stage, final, start)
        rotate = functools.partial(
            importlib.import_module("transformers.trainer_utils").rotate_checkpoints,
            output_dir=run_dir,
            save_total_limit=self.args.save_total_limit,
            best_model_checkpoint=self.state.best_model_checkpoint,
            use_mtime=True,
        )
        # the last save of a run, also of one that was told to stop, and one that is uploaded, are waited for
        if later and not (self.args.push_to_hub or self.control.should_training_stop):
            if self.args.should_save:
                later[0].start(lambda: (publish(), rotate()))
            return
        if self.args.should_save:
            publish()
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(final)
        if self.args.should_save:
            rotate()

    def _publish(self, stage: str, final: str, start: float) -> None:
        """Give a written checkpoint its name; `start` is when the save began."""
        try:
            n_bytes = checkpoints.publish(os.path.join(stage, os.path.basename(final)), final)
            os.rmdir(stage)
        except Exception as error:
            self._fail_save(final, error)
        logger.info("%s: %d bytes saved in %.2f s", final, n_bytes, time.perf_counter() - start)

    def _fail_save(self, final: str, error: Exception) -> NoReturn:
        """Remove what was written of a checkpoint, and raise: the error, or what it means if the disk is at fault."""
        written = checkpoints.discard(final) if self.args.should_save else 0
        said = output().save_error(error, final, written, output().checkpoint_bytes(self.model, self.args))
        if said is None:
            raise error
        raise said from error

    def _name_best(self, run_dir: str, part: str) -> None:
        """Name the best checkpoint by the folder that it is or will be in, as Trainer does where it finds it."""
        state, best = self.state, self.state.best_global_step
        if self.args.save_strategy == "no" or not best:
            return
        folder = os.path.join(run_dir, f"checkpoint-{best}")
        if state.best_model_checkpoint != folder and (best == state.global_step or os.path.exists(folder)):
            state.best_model_checkpoint = folder
            if self.args.should_save:
                state.save_to_json(os.path.join(part, checkpoints.TRAINER_STATE))

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As the trainer's; then the gradients of a whole step are looked at, before clipping spreads what is wrong in one of them."""
        rows = inputs.get("input_ids")
        self._shape = None if rows is None else (rows.shape[0], rows.shape[1])
        loss = super().training_step(model, inputs, *args, **kwargs)
        for guard in self._callbacks_of(guards().FiniteSteps):
            guard.add_loss(loss)
            if self.accelerator.sync_gradients and not self.clips_in_step:
                guard.look(self.model, has_scaler=self.args.fp16)
        return self.filtered_loss(loss)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[misc]
        if self.clips_in_step:
            # it was measured anyway, and the gradients are still as the backward left them
            for guard in self._callbacks_of(guards().FiniteSteps):
                if self.args.fp16:
                    guard.look(self.model, has_scaler=True, norm=norm)
                else:
                    guard.leave_to(self.fused_optimizer, self.model, norm, self.state.global_step + 1)
        return norm

    def _send_telemetry(self) -> None:
        """Nothing: TRL's trainers tell the hub of every training. Under a plain one, HF_HUB_DISABLE_TELEMETRY=1 is TRL's own switch."""

    def _load_best_model(self) -> None:
        for later in self._callbacks_of(output().LaterSaves):
            later.wait()
        best = self.state.best_model_checkpoint
        _agreed(lambda: checkpoints.verify(best))
        with self._kept_parameters():
            super()._load_best_model()

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._kept_parameters():
            super()._load_from_checkpoint(*args, **kwargs)

    def _memory_advice(self, error: torch.OutOfMemoryError) -> str:
        """What to say of an error of the device's memory: what was measured, what would fit, and how to go on."""
        go_on = "Checkpoints that were saved are whole: go on with resume_from_checkpoint=True"
        if self._shape is None or patch_of(adapters.base_model(self.model)) is None:
            return f"{error} {go_on}"
        text = str(error)
        # a layer's own error has it already
        if _TRIED not in text:
            text = importlib.import_module("fastlm.memory").advice(self.model, *self._shape, text)
        return f"{text} {go_on}"

    def _load_optimizer_and_scheduler(self, *args: Any, **kwargs: Any) -> None:
        # by itself, or in accelerate's wrapper
        with quant.unrounded_states(vars(self.optimizer).get("optimizer", self.optimizer)):
            super()._load_optimizer_and_scheduler(*args, **kwargs)

    @contextlib.contextmanager
    def _kept_parameters(self) -> Iterator[None]:
        """Within, adapters may be read: their values change, the parameters and their dtypes stay.

        PEFT makes 16-bit ones float32 as it reads them, in parameters that an optimizer or whoever cleared their gradients does not know.
        """
        before = {name: (p, p.dtype) for name, p in self.model.named_parameters() if p.requires_grad}
        yield
        for name, now in list(self.model.named_parameters()):
            kept, dtype = before.get(name, (now, now.dtype))
            if now.dtype != dtype or now is not kept:
                kept.data = now.data.to(dtype)
                place, _, own = name.rpartition(".")
                setattr(self.model.get_submodule(place), own, kept)

    def _callbacks_of(self, kind: type) -> list[Any]:
        return [callback for callback in self.callback_handler.callbacks if isinstance(callback, kind)]

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, as Trainer does. A checkpoint is verified first; True takes the newest whole one.

        Raises:
            ValueError: naming the damaged file, if a path is given; naming every checkpoint, if none is whole.
            OSError: if the output folder cannot be written, or a save fails; what was written of the checkpoint is removed.
            RuntimeError: if another run trains into the output folder.
            torch.OutOfMemoryError: with measured numbers and the change that would fit.
            MemoryError: if the host's memory is full, with what is held and left and what would need less.
            FloatingPointError: after too many steps in a row whose gradients or losses were not finite.
            SystemExit, KeyboardInterrupt: after the save that SIGTERM or SIGINT asked for.
        """
        for later in self._callbacks_of(output().LaterSaves):
            # of a training that was interrupted
            later.wait()
        if resume_from_checkpoint is True:
            # None at all: Trainer's own error
            resume_from_checkpoint = _agreed(lambda: checkpoints.newest_whole(self.args.output_dir)) or True
        elif isinstance(resume_from_checkpoint, (str, os.PathLike)):
            given = os.fspath(resume_from_checkpoint)
            _agreed(lambda: checkpoints.verify(given))
        try:
            with self.filter_on_device(), short_walks(self.model):
                return super().train(resume_from_checkpoint, *args, **kwargs)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(self._memory_advice(error)) from error
        except (MemoryError, RuntimeError, OSError) as error:
            said = host_memory.explain(error, self.args)
            if said is None:
                raise
            raise said from error
        finally:
            binding.release_graphs(self.model)
            for later in self._callbacks_of(output().LaterSaves):
                later.settle()
            # an error ends a training without telling its callbacks
            for requests in self._callbacks_of(importlib.import_module("fastlm.signals").StopRequests):
                requests.restore()
            for folder in self._callbacks_of(output().OutputFolder):
                folder.release()


def guards() -> Any:
    """fastlm.guards, imported when a trainer is made: it brings transformers' Trainer, which loading a model does not need."""
    return importlib.import_module("fastlm.guards")


def output() -> Any:
    """fastlm.output, as `guards`."""
    return importlib.import_module("fastlm.output")


def _agreed(look: Callable[[], str | None]) -> str | None:
    """What the first process finds, in every process, its error too: files are hashed once, and all resume from one folder."""
    if not (dist.is_available() and dist.is_initialized()):
        return look()
    said: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            said = [look(), None]
        except (ValueError, OSError) as error:
            said = [None, error]
    dist.broadcast_object_list(said, src=0)
    if said[1] is not None:
        raise said[1]
    return said[0]


@functools.cache
def _trainer_class() -> type:
    """The subclass of TRL's trainer, made when it is first asked for: importing fastlm imports no trl."""
    names = dict(__module__=__name__, __qualname__="CheckpointedSFTTrainer", __doc__=WholeCheckpoints.__doc__)
    parts = (WholeCheckpoints, DeviceMetrics, FusedStep, CountedOnce, importlib.import_module("trl").SFTTrainer)
    return type("CheckpointedSFTTrainer", parts, names)


def __getattr__(name: str) -> Any:
    # pickle finds the class of a trainer by its name here
    if name == "CheckpointedSFTTrainer":
        return _trainer_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def get_trainer(model: nn.Module, train_dataset: Any, args: Any = None, async_save: bool = False, **kwargs: Any) -> Any:
    """A TRL `SFTTrainer` for this model.

    Args:
        model: loaded or patched by fastlm.
        train_dataset: as SFTTrainer takes it; must hold at least one row if its length is known.
        args: an `SFTConfig`, or a dict of its arguments, or None for its defaults. Without a `max_length` in the dict, rows may be as
            long as the model was loaded for; an SFTConfig keeps its own, and a default that differs from the model's is told of. Mixed
            precision follows the model's dtype where the dict does not say it.
        async_save: train on while a checkpoint that is written is hashed, kept by the disk and given its name; the files are the same.
            An error is raised by the next save or the end of the training. The folder may not have its name yet when callbacks hear
            of the save; a run that ends or is told to stop waits for it, and so does an upload.
        **kwargs: SFTTrainer's other arguments (processing_class, eval_dataset, callbacks, …).

    Returns:
        The trainer, of a subclass that computes what a plain SFTTrainer with the same arguments does, steps as
        `fastlm.steps` says, without waiting for the GPU between two logs, and writes checkpoints as `WholeCheckpoints` says, with
        `fastlm.callbacks` in it. Reporting that fails is switched off, and reporting that is slow is not waited for.

    Raises:
        TypeError: if args is neither, or an argument is unknown to SFTConfig.
        ValueError: for a data set without a token to train on, or bf16=True on a GPU without bfloat16.
    """
    trl = importlib.import_module("trl")
    train_dataset = _as_dataset(train_dataset)
    if "eval_dataset" in kwargs:
        kwargs["eval_dataset"] = _as_dataset(kwargs["eval_dataset"])
    if "tokenizer" in kwargs:
        raise TypeError("get_trainer() takes the tokenizer as processing_class, as TRL names it")
    if train_dataset is None or (hasattr(train_dataset, "__len__") and len(train_dataset) == 0):
        raise ValueError("train_dataset is empty or missing: there is nothing to train on")
    state = binding.state_of(model)
    if args is None or isinstance(args, dict):
        settings = dict(args or {})
        if "max_length" not in settings and state is not None and state.max_seq_length is not None:
            settings["max_length"] = state.max_seq_length
        _choose_precision(model, settings)
        args = trl.SFTConfig(**settings)
    elif not isinstance(args, trl.SFTConfig):
        raise TypeError(f"args must be an SFTConfig or a dict of its arguments, got {type(args).__name__}")
    elif state is not None:
        _log_default_length(state, args)
    _refuse_bf16(args.bf16 and not args.use_cpu)
    if args.dataloader_pin_memory and not args.use_cpu:
        # accelerate's own option: batches leave pinned memory without a wait for what the device is doing
        args.accelerator_config.non_blocking = True
    if not isinstance(async_save, bool):
        raise TypeError(f"async_save must be True or False, got {async_save!r}")
    kwargs["callbacks"] = guards().for_whole_checkpoints(kwargs.get("callbacks"))
    if async_save:
        # before those that let the output folder go
        kwargs["callbacks"] = [output().LaterSaves(), *kwargs["callbacks"]]
    trainer = _trainer_class()(model=model, train_dataset=train_dataset, args=args, **kwargs)
    importlib.import_module("fastlm.services").shield(trainer.callback_handler.callbacks)
    if _is_empty(trainer.train_dataset):
        raise ValueError(
            "no row of train_dataset has a token to train on: all labels are -100, in every row. Look at what masks them "
            "(completion_only_loss, assistant_only_loss, train_on_responses_only, or a max_length that cuts every answer)"
        )
    return trainer


def _is_empty(rows: Any) -> bool:
    """Whether a data set that knows its length has no rows."""
    return isinstance(rows, Sized) and len(rows) == 0


def _as_dataset(rows: Any) -> Any:
    """A data set from a list of rows; anything else as it is."""
    return (
        importlib.import_module("datasets").Dataset.from_list(list(rows)) if isinstance(rows, (list, tuple)) else rows
    )


def is_bfloat16_supported() -> bool:
    """Whether bf16=True works here: on a GPU of compute capability 8.0 or newer, and without a GPU."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 0)


def _refuse_bf16(is_asked: bool | None) -> None:
    if is_asked and not is_bfloat16_supported():
        raise ValueError(
            f"bf16=True needs compute capability 8.0, {torch.cuda.get_device_name()} is older: use fp16=True"
        )


def _choose_precision(model: nn.Module, settings: dict[str, Any]) -> None:
    """Fill in bf16 and fp16 by the model's dtype and the device, unless the user said either."""
    _refuse_bf16(settings.get("bf16") and not settings.get("use_cpu"))
    if not torch.cuda.is_available() and "use_cpu" not in settings:
        settings["use_cpu"] = True
    if "bf16" in settings or "fp16" in settings:
        return
    dtype = adapters.base_model(model).dtype
    settings["bf16"] = dtype is torch.bfloat16 and is_bfloat16_supported()
    settings["fp16"] = dtype is torch.float16 and torch.cuda.is_available()
