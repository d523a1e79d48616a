"""Batches of tokens handed to Context.decode."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

SequenceIds = Sequence[int | tuple[int, ...]] | np.ndarray


def _int32(values: ArrayLike, what: str) -> NDArray[np.int32]:
    array = np.asarray(values)
    limits = np.iinfo(np.int32)
    if array.dtype != np.int32 and array.size and not limits.min <= array.min() <= array.max() <= limits.max:
        raise ValueError(f"{what} of a batch are outside {limits.min}..{limits.max}")
    return np.ascontiguousarray(array, np.int32)


class Batch:
    """n tokens with positions, sequence ids (one or several per token) and whether logits are wanted.

    tokens, pos: int32 [n]; logits: bool [n]; seq_ids: per token one id or a tuple of ids, the first of which decides
    what the token attends to. Raises ValueError for lengths that differ and for numbers beyond 32 bits.
    """

    def __init__(self, tokens: ArrayLike, pos: ArrayLike, seq_ids: SequenceIds, logits: ArrayLike) -> None:
        self.tokens, self.pos = _int32(tokens, "tokens"), _int32(pos, "positions")
        self.logits = np.ascontiguousarray(logits, np.bool_)
        self.seq_ids: list[tuple[int, ...]] = [s if isinstance(s, tuple) else (int(s),) for s in seq_ids]
        if not len(self.tokens) == len(self.pos) == len(self.logits) == len(self.seq_ids):
            raise ValueError("tokens, pos, seq_ids and logits of a batch differ in length")

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def single(cls, tokens: Sequence[int] | np.ndarray, pos: int = 0, seq_id: int = 0, logits: str = "last") -> Batch:
        """Consecutive tokens of one sequence from position pos. logits: "last", "all" or "none"."""
        n = len(tokens)
        wanted = np.full(n, logits == "all")
        if logits == "last" and n:
            wanted[-1] = True
        return cls(np.asarray(tokens), np.arange(pos, pos + n), [(seq_id,)] * n, wanted)
