"""Batches of tokens handed to Context.decode."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

SequenceIds = Sequence[int | tuple[int, ...]] | np.ndarray


class Batch:
    """n tokens with positions, sequence ids (one or several per token) and whether logits are wanted.

    tokens, pos: int32 [n]; logits: bool [n]; seq_ids: per token one id or a tuple of ids, the first of which decides
    what the token attends to.
    """

    def __init__(self, tokens: ArrayLike, pos: ArrayLike, seq_ids: SequenceIds, logits: ArrayLike) -> None:
        self.tokens = np.ascontiguousarray(tokens, np.int32)
        self.pos = np.ascontiguousarray(pos, np.int32)
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
