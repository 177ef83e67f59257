"""Where the sequences of a batch lie: packed rows, or padded ones, as cumulative lengths."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# B batch, S tokens of a row


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """Where the sequences lie in a batch of rows; each attends to itself only, causally.

    Attributes:
        cu_seqlens: [n + 1] int32 on the batch's device: the first token of each of the n sequences, then their sum.
        max_seqlen: length of the longest sequence.
        indices: [tokens] int64, the positions of the tokens in the flattened [B * S], in order, where only some of them
            are real (padded batches); None where the sequences fill the rows in order (packed batches).
        lengths: the n lengths on the host. Read from `cu_seqlens` when somebody asks, which waits for the device, unless given.
        n_tokens: their sum. Taken from the lengths if not given.
        has_holes: padding lies between the tokens of a row.

    Raises:
        ValueError: if they contradict each other. What lies on a GPU is not looked at.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    indices: Tensor | None = None
    lengths: tuple[int, ...] | None = None
    n_tokens: int | None = None
    has_holes: bool = False

    def __post_init__(self) -> None:
        cu = self.cu_seqlens
        if cu.ndim != 1 or not len(cu) or cu.dtype is not torch.int32:
            raise ValueError(f"cu_seqlens must be int32 [n + 1], got {cu.dtype} {tuple(cu.shape)}")
        if self.lengths is None and not cu.is_cuda:
            object.__setattr__(self, "lengths", self._read())
        if self.lengths is not None:
            self._check_lengths()
        if self.indices is not None and (self.indices.shape != (self.tokens,) or self.indices.dtype is not torch.int64):
            raise ValueError(
                f"indices must be int64 [{self.tokens}], one a token of cu_seqlens, "
                f"got {self.indices.dtype} {tuple(self.indices.shape)}"
            )

    def _read(self) -> tuple[int, ...]:
        bounds = self.cu_seqlens.tolist()
        if bounds[0] != 0:
            raise ValueError(f"cu_seqlens must start at 0, got {bounds[0]}")
        return tuple(end - start for start, end in itertools.pairwise(bounds))

    def _check_lengths(self) -> None:
        lengths = self.sequence_lengths
        if len(lengths) != len(self.cu_seqlens) - 1 or min(lengths, default=0) < 0:
            raise ValueError(f"cu_seqlens [{len(self.cu_seqlens)}] must never fall, got lengths {lengths[:16]}")
        longest = max(lengths, default=0)
        if self.max_seqlen < longest:
            raise ValueError(f"max_seqlen must be at least the longest sequence, {longest}, got {self.max_seqlen}")
        if self.n_tokens is not None and self.n_tokens != sum(lengths):
            raise ValueError(f"n_tokens must be the sum of the lengths, {sum(lengths)}, got {self.n_tokens}")

    @property
    def sequence_lengths(self) -> tuple[int, ...]:
        if self.lengths is None:
            object.__setattr__(self, "lengths", self._read())
            self._check_lengths()
        assert self.lengths is not None
        return self.lengths

    @property
    def tokens(self) -> int:
        return sum(self.sequence_lengths) if self.n_tokens is None else self.n_tokens


def _layout(
    lengths: list[int], device: torch.device, indices: Tensor | None = None, has_holes: bool = False
) -> SequenceLayout:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32).to(device, non_blocking=True)
    return SequenceLayout(cu_seqlens, max(lengths, default=0), indices, tuple(lengths), sum(lengths), has_holes)


def packed_layout(position_ids: Tensor) -> SequenceLayout | None:
    """The layout of a packed batch, from positions that do not go on by one where a sample starts.

    A sample starts with each row and wherever a position is not the one before it plus one, whether it falls back, stays
    or leaves a gap: 0, 0 are two samples of one token, and so are 0, 2. This is transformers' own rule
    (`masking_utils.find_packed_sequence_indices`).

    Args:
        position_ids: [B, S], any integer dtype. The device is waited for once.

    Returns:
        The layout, or None if every row is one sample.

    Raises:
        ValueError: if position_ids is not [B, S].
    """
    if position_ids.ndim != 2:
        raise ValueError(f"position_ids must be [B, S], got {tuple(position_ids.shape)}")
    is_start = (position_ids.diff(dim=1) != 1).cpu()
    if not is_start.any():
        return None
    starts = F.pad(is_start, (1, 0), value=True).flatten().nonzero().squeeze(1)
    end = torch.tensor([position_ids.numel()])
    return _layout(torch.diff(starts, append=end).tolist(), position_ids.device)


def padded_layout(attention_mask: Tensor) -> SequenceLayout | None:
    """The layout of a padded batch: one sequence a row, made of the row's real tokens in order.

    Args:
        attention_mask: [B, S] bool or 0/1, true for real tokens, padded on any side. The device is waited for once.

    Returns:
        The layout, or None if nothing is padded. A row of padding alone has no sequence.

    Raises:
        ValueError: if attention_mask is not [B, S].
    """
    if attention_mask.ndim != 2:
        raise ValueError(f"attention_mask must be [B, S], got {tuple(attention_mask.shape)}; pass others as `mask`")
    is_real = attention_mask.bool().cpu()
    if is_real.all():
        return None
    lengths = [length for length in is_real.sum(1).tolist() if length]
    indices = is_real.flatten().nonzero().squeeze(1).to(attention_mask.device, non_blocking=True)
    runs = (is_real[:, 1:] & ~is_real[:, :-1]).sum(1) + is_real[:, :1].sum(1)
    return _layout(lengths, attention_mask.device, indices, has_holes=bool((runs > 1).any()))


def layout_from_cu_seqlens(
    cu_seqlens: Tensor, max_seqlen: int | None = None, n_tokens: int | None = None
) -> SequenceLayout:
    """The layout of a packed batch, from the cumulative lengths that a collator made.

    Args:
        cu_seqlens: [n + 1], any integer dtype. On a GPU it is neither checked nor waited for if the other two are given.
        max_seqlen: length of the longest sequence; None to take it from `cu_seqlens`.
        n_tokens: how many tokens there are; None to take it from `cu_seqlens`.

    Raises:
        ValueError: as `SequenceLayout`.
    """
    cu = cu_seqlens.to(torch.int32)
    if cu.ndim != 1 or not len(cu):
        raise ValueError(f"cu_seqlens must be [n + 1], got {tuple(cu.shape)}")
    if cu.is_cuda and max_seqlen is not None and n_tokens is not None:
        return SequenceLayout(cu, int(max_seqlen), n_tokens=n_tokens)
    bounds = cu.cpu()
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens must be [n + 1] and start at 0, got {bounds.tolist()}")
    lengths = tuple(torch.diff(bounds).tolist())
    longest = max(lengths, default=0)
    return SequenceLayout(cu, longest if max_seqlen is None else int(max_seqlen), None, lengths, n_tokens)
