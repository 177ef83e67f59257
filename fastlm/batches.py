"""What the rows of a batch are, found while the batch is still on the host: on a GPU the model would have to wait to learn it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fastlm_kernels.attention import packed_layout

# says in a batch that its mask hides nothing; `pop_is_full` takes it out before the model is called
_IS_FULL = "fastlm_mask_is_full"


class DescribedBatches:
    """A data collator that adds to what another one makes: whether a mask is all ones, or where packed samples begin.

    The bounds of samples go by the names that transformers' own collator gives them: cu_seq_lens_q, max_length_q, ….
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, rows: Any) -> Any:
        batch = self.collate(rows)
        mask, positions = batch.get("attention_mask"), batch.get("position_ids")
        if _is_table(mask):
            if bool(mask.all()):
                batch[_IS_FULL] = True
        elif mask is None and _is_table(positions) and len(positions) == 1 and "cu_seq_lens_q" not in batch:
            layout = packed_layout(positions)
            # a single sample is no packed row, and the fastest attention takes it as it is
            if layout is not None:
                bounds, longest = layout.cu_seqlens, layout.max_seqlen
                batch.update(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=longest, max_length_k=longest)
        return batch


def _is_table(value: Any) -> bool:
    """Whether this is a [B, S] tensor on the host."""
    return isinstance(value, Tensor) and value.ndim == 2 and value.device.type == "cpu"


def pop_is_full(batch: dict[str, Any]) -> bool:
    """Whether the batch is known to have a mask that hides nothing; afterwards it holds what its collator made."""
    return batch.pop(_IS_FULL, False)
