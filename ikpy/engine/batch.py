"""Batches of tokens handed to Context.decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass
class Batch:
    """n tokens with positions, sequence ids (one or several per token) and whether logits are wanted.

    tokens, pos: int32 [n]; logits: bool [n]; seq_ids: one tuple of ids per token, the first of which decides what the
    token attends to.
    """

    tokens: np.ndarray
    pos: np.ndarray
    seq_ids: Sequence[tuple[int, ...]]
    logits: np.ndarray

    def __post_init__(self) -> None:
        self.tokens = np.ascontiguousarray(self.tokens, np.int32)
        self.pos = np.ascontiguousarray(self.pos, np.int32)
        self.logits = np.ascontiguousarray(self.logits, np.bool_)
        self.seq_ids = [(int(s),) if np.isscalar(s) else tuple(s) for s in self.seq_ids]  # type: ignore[arg-type, call-overload]
        if not len(self.tokens) == len(self.pos) == len(self.logits) == len(self.seq_ids):
            raise ValueError("tokens, pos, seq_ids and logits of a batch differ in length")

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def single(cls, tokens: Sequence[int], pos: int = 0, seq_id: int = 0, logits: str = "last") -> Batch:
        """Consecutive tokens of one sequence from position pos. logits: "last", "all" or "none"."""
        n = len(tokens)
        wanted = np.full(n, logits == "all")
        if logits == "last" and n:
            wanted[-1] = True
        return cls(np.asarray(tokens), np.arange(pos, pos + n), [(seq_id,)] * n, wanted)
