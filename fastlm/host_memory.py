"""What to say where the host's memory is full: what the process holds, what is left, and what would need less."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

# what errors without a type of their own say
_TEXTS = ("DefaultCPUAllocator", "is killed by signal: Killed", "unable to mmap")
_GIB = 1 << 30


def explain(error: BaseException, args: Any) -> MemoryError | None:
    """What to raise in a training whose host's memory is full; None for an error of another kind.

    Args:
        error: what was raised.
        args: the trainer's.
    """
    is_full = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if not is_full and not (isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)):
        return None
    lines = str(error).splitlines()
    said = f" ({lines[0]})" if lines else ""
    return MemoryError(
        f"the memory of the host is full{said}. {_measured()}. Checkpoints that were saved are whole: change something, as "
        f"{_changes(args)}, and go on with resume_from_checkpoint=True"
    )


def _measured() -> str:
    held = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    free, total = kib["MemAvailable"] * 1024, kib["MemTotal"] * 1024
    return f"This process holds {held / _GIB:.2f} GiB, {free / _GIB:.2f} of {total / _GIB:.2f} GiB are available"


def _changes(args: Any) -> str:
    found = []
    if args.dataloader_num_workers:
        found.append(f"fewer dataloader_num_workers than {args.dataloader_num_workers}")
    if args.use_cpu and args.per_device_train_batch_size > 1:
        found.append(
            f"a per_device_train_batch_size below {args.per_device_train_batch_size} with as many more gradient_accumulation_steps"
        )
    if args.dataloader_pin_memory and not args.use_cpu:
        found.append("dataloader_pin_memory=False")
    if "8bit" not in args.optim and args.use_cpu:
        found.append("optim='adamw_8bit'")
    found.append("rows that are streamed instead of held")
    return ", ".join(found)
