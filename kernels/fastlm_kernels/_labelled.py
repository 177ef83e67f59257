"""Which rows of a batch have a label, found without making the device's queue run dry."""

from __future__ import annotations

import torch
from torch import Tensor


class LabelledRows:
    """The rows whose label counts. Made early, their number reaches the host while the device still works on other things.

    Attributes:
        labels: [T], any integer dtype.
        ignore_index: label of rows that take no part.
    """

    def __init__(self, labels: Tensor, ignore_index: int = -100) -> None:
        self.labels, self.ignore_index = labels, ignore_index
        self._counts = labels != ignore_index
        self._is_known: torch.cuda.Event | None = None
        self._number = self._counts.sum()
        if labels.is_cuda:
            # pinned, so that the copy does not wait
            number = torch.empty((), dtype=torch.int64, pin_memory=True)
            self._number = number.copy_(self._number, non_blocking=True)
            self._is_known = torch.cuda.Event()
            self._is_known.record()

    def index(self) -> Tensor | None:
        """Positions [N] int64 of the labels that count, in order, or None if all do."""
        if self._is_known is not None:
            self._is_known.synchronize()
        number = int(self._number)
        if number == len(self.labels):
            return None
        # a sort has a size that is known, unlike nonzero
        return torch.sort(self._counts, descending=True, stable=True).indices[:number]
