"""Where the sequences of a cache end, without a look at all cells for every batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ikpy.engine.cells import MAX_SEQUENCES, Cells, sequences_of


class SequenceEnds:
    """Largest position of every sequence in ``cells``.

    Tokens that are added only move the end of their own sequences. After any other change the cache says whose ends are
    no longer known; these are looked up when they are needed.
    """

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self._ends: dict[int, int] = {}
        self._unknown = 0
        """Mask of sequences whose cells must be searched."""

    def grow(self, pos: Sequence[int], masks: Sequence[int]) -> None:
        """Tokens were added at positions [n] of the sequences in masks [n]."""
        ends: dict[int, int] = {}
        for position, mask in zip(pos, masks, strict=True):
            ends[mask] = max(position, ends.get(mask, -1))
        for mask, end in ends.items():
            for seq_id in sequences_of(mask):
                self._ends[seq_id] = max(end, self._ends.get(seq_id, -1))

    def forget(self, seq_id: int = -1) -> None:
        """The cells of a sequence (of all if negative) have changed."""
        self._unknown = (1 << MAX_SEQUENCES) - 1 if seq_id < 0 else self._unknown | 1 << seq_id

    def present(self) -> dict[int, int]:
        """Largest position of every sequence that has tokens."""
        if self._unknown:
            stored = int(np.bitwise_or.reduce(self._cells.seq))
            for seq_id in sequences_of(self._unknown):
                self._ends.pop(seq_id, None)
                if stored >> seq_id & 1:
                    self._ends[seq_id] = int(self._cells.pos[self._cells.matching(seq_id, -1, -1)].max())
            self._unknown = 0
        return self._ends
