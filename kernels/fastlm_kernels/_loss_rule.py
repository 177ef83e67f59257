"""How the loss ops turn logits into a loss, what they return for a row, and what they accept as labels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossRule:
    """The settings of the formula in `cross_entropy.py`.

    Attributes:
        ignore_index: rows with this label get zeros and no gradient.
        logit_scale: factor on the raw logits.
        softcap: bound of the scaled logits, or None.
        temperature: divisor after the softcap.
        label_smoothing: share of the target spread over the whole vocabulary, as in torch's cross_entropy.
        z_loss: weight of the squared log-sum-exp.

    Raises:
        ValueError: for values outside the ranges that the messages name.
    """

    ignore_index: int = -100
    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.logit_scale):
            raise ValueError(f"logit_scale must be finite, got {self.logit_scale}")
        if self.softcap is not None and not 0.0 < self.softcap < math.inf:
            raise ValueError(f"softcap must be positive and finite, or None for no cap, got {self.softcap}")
        if not 0.0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be positive and finite, got {self.temperature}")
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ValueError(f"label_smoothing must be in 0..1, got {self.label_smoothing}")
        if not 0.0 <= self.z_loss < math.inf:
            raise ValueError(f"z_loss must be zero or positive, got {self.z_loss}")

    @property
    def scale(self) -> float:
        """Factor on the raw logit, before the tanh where there is one."""
        return self.logit_scale / (self.temperature if self.softcap is None else self.softcap)

    @property
    def cap(self) -> float:
        """Factor on the tanh."""
        return 1.0 if self.softcap is None else self.softcap / self.temperature

    @property
    def slope(self) -> float:
        """dz/dx, before the tanh's own derivative."""
        return self.logit_scale / self.temperature


class RowStats(NamedTuple):
    """Per row, [T], zero on ignored rows: float32, is_top1 bool; None where not asked for."""

    loss: Tensor
    log_prob: Tensor
    lse: Tensor
    entropy: Tensor | None
    is_top1: Tensor | None

    @classmethod
    def empty(cls, n_rows: int, device: torch.device, with_entropy: bool = False, with_top1: bool = False) -> RowStats:
        """Room for `n_rows`, to be written by `cross_entropy_fwd`."""
        loss, log_prob, lse = (torch.empty(n_rows, dtype=torch.float32, device=device) for _ in range(3))
        entropy = torch.empty(n_rows, dtype=torch.float32, device=device) if with_entropy else None
        is_top1 = torch.empty(n_rows, dtype=torch.bool, device=device) if with_top1 else None
        return cls(loss, log_prob, lse, entropy, is_top1)

    def of(self, rows: slice) -> RowStats:
        """Views of some rows."""
        entropy = None if self.entropy is None else self.entropy[rows]
        is_top1 = None if self.is_top1 is None else self.is_top1[rows]
        return RowStats(self.loss[rows], self.log_prob[rows], self.lse[rows], entropy, is_top1)


def check_labels(labels: Tensor, owner: Tensor, name: str) -> None:
    """Raises unless `labels` [...] are integers, one for each row of `owner` [..., N], which the kernels can take.

    Raises:
        ValueError: if the shapes do not fit.
        TypeError: for labels that are not integers, or an owner that is not float32, float16 or bfloat16.
    """
    if owner.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"{name} must be float32, float16 or bfloat16, got {owner.dtype}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype is torch.bool:
        raise TypeError(f"labels must be integers, got {labels.dtype}")
    if not owner.ndim or labels.shape != owner.shape[:-1]:
        raise ValueError(
            f"labels must have the shape of {name} {tuple(owner.shape)} without its last dimension, "
            f"got {tuple(labels.shape)}"
        )


def check_label_range(labels: Tensor, n_cols: int, ignore_index: int) -> None:
    """Raises ValueError for a label outside 0..V-1 that is not `ignore_index`; waits for the device."""
    outside = labels[(labels != ignore_index) & ((labels < 0) | (labels >= n_cols))]
    if outside.numel():
        raise ValueError(
            f"labels must be in 0..{n_cols - 1} or ignore_index={ignore_index}, got {int(outside[0])}: "
            "check that the tokenizer belongs to the model"
        )
