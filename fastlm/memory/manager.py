"""The memory of one model: what its layers keep in each call, and what became of it."""

from __future__ import annotations

from typing import Any

from fastlm.block.rescue import Rescue


class Memory:
    """What one model's layers keep.

    Attributes:
        rescue: runs passes of layers again that were short of memory.
    """

    def __init__(self) -> None:
        self.rescue = Rescue()

    def __reduce__(self) -> tuple[Any, ...]:
        # counts and host memory belong to a process
        return Memory, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Memory:
        return Memory()
