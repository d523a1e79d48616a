"""Batches of tokens handed to Context.decode.

A batch keeps plain integers: with one token of a few sequences, touching an array costs more than the token's own work.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import numpy as np
from numpy.typing import NDArray

from ikpy.engine.cells import mask_of

Integers = Sequence[int] | np.ndarray
SequenceIds = Sequence[int | tuple[int, ...]] | np.ndarray


class Batch:
    """n tokens with positions, sequence ids (one or several per token) and whether logits are wanted.

    tokens, pos: integers [n]; logits: booleans [n]; seq_ids: per token one id or a tuple of ids, the first of which
    decides what the token attends to. Raises ValueError for lengths that differ, TypeError for tokens and positions
    that are no integers, UsageError for sequence ids out of range. What the model allows is checked by Context.decode.
    """

    def __init__(
        self, tokens: Integers, pos: Integers, seq_ids: SequenceIds, logits: Sequence[bool] | np.ndarray
    ) -> None:
        self.token_list: list[int] = [index(token) for token in tokens]
        """Tokens as plain integers."""
        self.positions: list[int] = [index(position) for position in pos]
        """Positions as plain integers."""
        self.seq_ids: list[tuple[int, ...]] = [ids if isinstance(ids, tuple) else (index(ids),) for ids in seq_ids]
        """Sequences of each token."""
        self.masks: list[int] = [mask_of(ids) for ids in self.seq_ids]
        """Bit masks of the sequences."""
        self.wanted: list[bool] = [bool(wanted) for wanted in logits]
        """Whether the logits of each token are wanted."""
        if not len(self.token_list) == len(self.positions) == len(self.seq_ids) == len(self.wanted):
            raise ValueError("tokens, pos, seq_ids and logits of a batch differ in length")

    def __len__(self) -> int:
        return len(self.token_list)

    @property
    def tokens(self) -> NDArray[np.int64]:
        """A copy of the tokens, int64 [n]."""
        return np.array(self.token_list, np.int64)

    @property
    def pos(self) -> NDArray[np.int64]:
        """A copy of the positions, int64 [n]."""
        return np.array(self.positions, np.int64)

    @property
    def logits(self) -> NDArray[np.bool_]:
        """A copy of what is wanted, bool [n]."""
        return np.array(self.wanted, np.bool_)

    def pieces(self, n: int) -> list[Batch]:
        """The batch in pieces of n tokens, the last one of at most n."""
        if len(self.token_list) <= n:
            return [self]
        return [self._part(slice(start, start + n)) for start in range(0, len(self), n)]

    def _part(self, part: slice) -> Batch:
        batch = Batch.__new__(Batch)
        batch.token_list, batch.positions, batch.wanted = self.token_list[part], self.positions[part], self.wanted[part]
        batch.seq_ids, batch.masks = self.seq_ids[part], self.masks[part]
        return batch

    @classmethod
    def single(cls, tokens: Integers, pos: int = 0, seq_id: int = 0, logits: str = "last") -> Batch:
        """Consecutive tokens of one sequence from position pos. logits: "last", "all" or "none"."""
        n = len(tokens)
        ids = (seq_id,)
        batch = cls.__new__(cls)
        batch.token_list = [index(token) for token in tokens]
        batch.positions = [pos + i for i in range(n)]
        batch.seq_ids, batch.masks = [ids] * n, [mask_of(ids)] * n
        batch.wanted = [logits == "all"] * n
        if logits == "last" and n:
            batch.wanted[-1] = True
        return batch
