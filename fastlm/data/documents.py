"""Long documents as rows of tokens that fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Chunks:
    """For `datasets.map`, batched: texts to `input_ids` of at most `length` tokens; no token is lost.

    A document begins with the tokenizer's begin token, if it writes one, and ends with the end-of-sequence token, so that
    a model learns where documents end. Each further chunk repeats the last `overlap` tokens of the one before, as
    context; their labels are -100, so each token is trained once.
    """

    tokenizer: PreTrainedTokenizerBase
    length: int
    overlap: int

    @classmethod
    def checked(cls, tokenizer: Any, length: int | None, overlap: int) -> Chunks | None:
        if length is None:
            if overlap:
                raise ValueError(f"overlap={overlap} is of chunks: give chunk_length and tokenizer with it")
            return None
        from transformers import PreTrainedTokenizerBase

        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise TypeError(
                f"chunk_length counts tokens of tokenizer, which must be one, got {type(tokenizer).__name__}"
            )
        if not isinstance(length, int) or not isinstance(overlap, int) or not 0 <= overlap < length:
            raise ValueError(f"0 <= overlap < chunk_length is needed, got overlap={overlap}, chunk_length={length}")
        return cls(tokenizer, length, overlap)

    def __call__(self, batch: dict[str, list]) -> dict[str, list]:
        made: dict[str, list] = {"input_ids": [], "labels": []}
        for text in batch["text"]:
            ids = self.tokenizer(text, verbose=False)["input_ids"]
            eos = self.tokenizer.eos_token_id
            if eos is not None and ids[-1:] != [eos]:
                ids = [*ids, eos]
            start = 0
            while start == 0 or start + self.overlap < len(ids):
                chunk = ids[start : start + self.length]
                seen = self.overlap if start else 0
                made["input_ids"].append(chunk)
                made["labels"].append([-100] * seen + chunk[seen:])
                start += self.length - self.overlap
        return made
