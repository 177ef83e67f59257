"""The output folder of a run: one run at a time, writable, with room for a checkpoint, and no half checkpoint in it."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable
from typing import Any

import filelock
from torch import nn
from transformers import TrainerCallback

from fastlm import adapters, checkpoints

logger = logging.getLogger(__name__)

# uploads of the output folder leave out what begins with an underscore
LOCK = "_fastlm.lock"
# what PyTorch and safetensors, whose errors have no number, say of a disk that takes no more
_DISK_TEXTS = ("PytorchStreamWriter", "inline_container", "No space left", "os error 28", "IoError", "I/O error")


def checkpoint_bytes(model: nn.Module, args: Any) -> int:
    """About what one checkpoint takes: the saved weights, and two moments of every trained one as the Adam family keeps them."""
    trained = [p for p in model.parameters() if p.requires_grad]
    saved = trained if adapters.is_peft_model(model) else list(model.parameters())
    total = sum(p.numel() * p.element_size() for p in saved)
    if not args.save_only_model:
        total += sum(2 * p.numel() * (1 if "8bit" in str(args.optim) else p.element_size()) for p in trained)
    return total


def free_bytes(folder: str) -> int:
    """On the disk of a folder, or of what is left of its path."""
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder) or "."
    return shutil.disk_usage(folder).free


def save_error(error: Exception, final: str, written: int, needed: int) -> OSError | None:
    """What to raise where a save failed because of its disk; None for an error of another kind.

    Args:
        error: what was raised.
        final: the checkpoint that was to be written.
        written: bytes of it that were.
        needed: about how many it has.
    """
    if not isinstance(error, OSError) and not any(text in str(error) for text in _DISK_TEXTS):
        return None
    number = error.errno if isinstance(error, OSError) and error.errno is not None else errno.ENOSPC
    folder = os.path.dirname(os.path.abspath(final))
    text = (
        f"the checkpoint {final} could not be saved: it needs about {max(written, needed):,} bytes, {free_bytes(folder):,} are free on "
        f"the disk of {folder} ({error}). What was written of it is removed; earlier checkpoints are as they were. Make room, then "
        "go on with resume_from_checkpoint=True"
    )
    return OSError(number, text)


class OutputFolder(TrainerCallback):
    """Keeps the output folder for one run while it trains, where it saves, and warns of a disk that is too small for a checkpoint."""

    def __init__(self) -> None:
        self._lock: Any = None

    def __getstate__(self) -> dict[str, Any]:
        # a lock belongs to a process
        return {"_lock": None}

    def release(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """
        Raises:
            OSError: if nothing can be written into the output folder.
            RuntimeError: if another run trains into it.
        """
        if args.save_strategy == "no" or not args.should_save:
            return
        self.release()
        path = os.path.join(args.output_dir, LOCK)
        # one object a path in this process: a run that an error ended does not lock out the next one
        lock = filelock.FileLock(path, timeout=0, is_singleton=True, thread_local=False)
        try:
            os.makedirs(args.output_dir, exist_ok=True)
            lock.acquire()
        except filelock.Timeout as error:
            raise RuntimeError(
                f"another run trains into {args.output_dir}: both would replace each other's checkpoints. Give each its own output_dir"
            ) from error
        except OSError as error:
            raise OSError(
                error.errno,
                f"output_dir {args.output_dir} cannot be written, so no checkpoint could be saved: {error.strerror}. Choose another "
                "folder, or save_strategy='no'",
            ) from error
        except NotImplementedError as error:
            logger.info("%s cannot be locked against a second run: %s", args.output_dir, error)
        else:
            self._lock = lock
        needed, free = checkpoint_bytes(model, args), free_bytes(args.output_dir)
        if free < needed:
            logger.warning(
                "a checkpoint needs about %s bytes, %s are free on the disk of %s: saving will fail. Make room, or choose another folder",
                f"{needed:,}",
                f"{free:,}",
                args.output_dir,
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.release()


class LaterSaves(TrainerCallback):
    """The end of a save in a thread beside the training: hashes, the disk's word that it has all, the final name, older ones removed.

    One save at a time. What goes wrong is raised by the next save or by the end of the training.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def __getstate__(self) -> dict[str, Any]:
        # a thread belongs to a process
        return {"_thread": None, "_error": None}

    def start(self, work: Callable[[], None]) -> None:
        """Begin the end of a save; the one before must have been waited for."""
        if self._thread is not None:
            raise RuntimeError("the save before this one was not waited for: call wait() first")
        # a process that is told to end at once does not wait: what it leaves is no checkpoint
        self._thread = threading.Thread(target=self._run, args=(work,), name="fastlm-save", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until a save that was begun has its name.

        Raises:
            Exception: what went wrong with it, once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def settle(self) -> None:
        """After a training, however it ended: wait, but not where somebody interrupts; what went wrong is logged."""
        if isinstance(sys.exception(), KeyboardInterrupt):
            return
        try:
            self.wait()
        except Exception as error:
            logger.error("%s", error)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # a training that ends looks through the checkpoints that there are
        self.wait()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.wait()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._error = error


class MarkedCheckpoints(TrainerCallback):
    """What a plain Trainer's checkpoints can have: a mark while they are written, then a manifest. Marked leftovers are renamed aside.

    A trainer writes straight into the folder with the final name, and resumes from the highest number it finds.
    """

    def __init__(self) -> None:
        self._marked: str | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.should_save and os.path.isdir(args.output_dir):
            checkpoints.set_marked_aside(args.output_dir)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_save:
            self._mark(args, state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_save:
            self._mark(args, state)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # whether this is the best one is found out after this call
        if args.save_strategy == "best" and control.should_training_stop is False and state.global_step > 0:
            self._mark(args, state)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = _folder(args, state)
        self._marked = None
        if args.should_save and os.path.isdir(folder):
            n_bytes = checkpoints.seal(folder)
            logger.info("%s: %d bytes saved", folder, n_bytes)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._unmark()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._unmark()

    def _mark(self, args: Any, state: Any) -> None:
        if args.should_save:
            self._marked = _folder(args, state)
            checkpoints.mark(self._marked)

    def _unmark(self) -> None:
        marked, self._marked = self._marked, None
        if marked is not None:
            checkpoints.unmark(marked)


def _folder(args: Any, state: Any) -> str:
    return os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
