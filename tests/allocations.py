"""How much memory torch tensors of a piece of code use at once, whatever the device: counted, not asked of an allocator."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Bytes of the storages that operators make while it is on.

    Attributes:
        peak: the most bytes that were in use since `reset`.
    """

    def __init__(self):
        super().__init__()
        self._alive = {}
        self._ours = {}
        self.peak = 0

    def now(self):
        """Bytes in use."""
        for key in [key for key, (reference, _) in self._alive.items() if reference.expired()]:
            del self._alive[key]
        return sum(size for _, size in self._alive.values())

    def reset(self):
        self.peak = self.now()
        return self.peak

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                # what was there before
                storage = tensor.untyped_storage()
                if storage._cdata not in self._alive:
                    self._ours.setdefault(storage._cdata, StorageWeakRef(storage))
        made = func(*args, **(kwargs or {}))
        self.now()
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                known = self._ours.get(storage._cdata)
                if known is not None and not known.expired():
                    continue
                self._alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, self.now())
        return made
