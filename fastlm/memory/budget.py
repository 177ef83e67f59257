"""How much memory there is: of a device, and of the host for this process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

GIB = 1 << 30
# Of the host's memory, what may be taken for activations: the rest of the process and the file cache need some.
_HOST_SHARE = 0.8


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device, as this process may use them.

    Attributes:
        total: what the process may allocate, within its fraction of the device.
        in_use: allocated tensors.
        available: what it can still allocate, blocks that the allocator holds free included.
    """

    total: int
    in_use: int
    available: int


def device_memory(device: torch.device) -> DeviceMemory | None:
    """None for a device without memory of its own."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    in_use, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    cap = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return DeviceMemory(cap, in_use, max(0, min(free + reserved - in_use, cap - in_use)))


def host_bytes(given_gib: float | None = None) -> int:
    """What may go to host memory: as given, else a share of what the cgroup's limit leaves, else of what the system has free."""
    if given_gib is not None:
        return int(given_gib * GIB)
    left = [n for n in (_cgroup_left(), _available()) if n is not None]
    return int(min(left, default=0) * _HOST_SHARE)


def _cgroup_left(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the control group's limit leaves, of version 2 or 1; None without a limit."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limited, in_use = (root / limit).read_text().strip(), int((root / used).read_text())
        except (OSError, ValueError):
            continue
        # version 1 says "no limit" by a number close to the largest
        if limited.isdigit() and int(limited) < 1 << 60:
            return max(0, int(limited) - in_use)
    return None


def _available(path: Path = Path("/proc/meminfo")) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
