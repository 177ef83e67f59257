"""The text of a row of token ids, and which characters of it each token covers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# what a decoder writes for bytes that are no whole character
_REPLACEMENT = "\ufffd"
# a character has at most four bytes; twice that for tokens that end in the middle of the next one
_MAX_PARTS = 8


class TokenText:
    """Decodes rows piece by piece: `text, starts, ends = token_text(ids)`; token i covers `text[starts[i]:ends[i]]`.

    A token is decoded behind a letter, because decoders drop a space at the beginning of a text. Tokens that are
    parts of one character are decoded together, and each of them covers that character. Pieces are kept, so a row
    costs one look-up a token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.anchor = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
        self.anchor_text = self._decode([])
        self.pieces: dict[tuple[int, ...], str] = {}
        # of tokens that are no part of a character, by themselves
        self.whole: dict[int, str] = {}

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(
            [*self.anchor, *ids], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def _piece(self, ids: tuple[int, ...]) -> str:
        if ids not in self.pieces:
            self.pieces[ids] = self._decode(ids)[len(self.anchor_text) :]
        return self.pieces[ids]

    def __call__(self, ids: Sequence[int]) -> tuple[str, list[int], list[int]]:
        known = [self.whole.get(token) for token in ids]
        if None in known:
            return self._one_by_one(ids)
        bounds = list(itertools.accumulate(map(len, known), initial=0))  # type: ignore[arg-type]
        return "".join(known), bounds[:-1], bounds[1:]  # type: ignore[arg-type]

    def _one_by_one(self, ids: Sequence[int]) -> tuple[str, list[int], list[int]]:
        pieces: list[str] = []
        starts: list[int] = []
        ends: list[int] = []
        here = first = 0
        while first < len(ids):
            last = first + 1
            piece = self._piece((ids[first],))
            if not piece.endswith(_REPLACEMENT):
                self.whole[ids[first]] = piece
            # bytes of one character: take further tokens of this kind until the character is whole
            while piece.endswith(_REPLACEMENT) and last < min(len(ids), first + _MAX_PARTS):
                if _REPLACEMENT not in self._piece((ids[last],)):
                    break
                last += 1
                piece = self._piece(tuple(ids[first:last]))
            pieces.append(piece)
            starts += [here] * (last - first)
            here += len(piece)
            ends += [here] * (last - first)
            first = last
        return "".join(pieces), starts, ends

    def round_trip(self, text: str) -> str:
        """How a text comes back from its tokens: some tokenizers add or take a space beside special tokens."""
        return self(self.tokenizer(text, add_special_tokens=False)["input_ids"])[0]
