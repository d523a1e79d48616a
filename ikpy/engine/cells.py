"""Cells of a KV cache: which position and which sequences each of them holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ikpy._native.batches import MAX_SEQUENCES
from ikpy._native.cells import BLOCK, CellTable
from ikpy._native.windows import WindowTable
from ikpy.errors import ResourceError

__all__ = ["BLOCK", "MAX_SEQUENCES", "Cells", "KVCacheFullError", "PlannedCells", "WindowCells"]


class KVCacheFullError(ResourceError):
    """No empty cells are left for the tokens of a batch."""


class Cells(CellTable):
    """What is done with whole sequences; taking and emptying single cells is native."""

    def matching(self, seq_id: int, p0: int, p1: int) -> np.ndarray:
        """Boolean [n_cells]: cells of the sequence (any if negative) with p0 <= pos < p1; negative bounds are open."""
        match = self.pos >= 0
        if seq_id >= 0:
            match &= (self.seq & sequence_bit(seq_id)) != 0
        if p0 > 0:
            match &= self.pos >= p0
        if p1 >= 0:
            match &= self.pos < p1
        return match

    def clear(self) -> None:
        """Empties all cells."""
        self.empty(np.arange(self.n_cells))

    def remove(self, seq_id: int, p0: int, p1: int) -> None:
        """Removes the sequence (all if negative) from the matching cells."""
        match = self.matching(seq_id, p0, p1)
        if seq_id < 0:
            self.empty(np.flatnonzero(match))
            return
        bit = sequence_bit(seq_id)
        self.empty(np.flatnonzero(match & (self.seq == bit)))  # first: no interruption leaves cells of no sequence
        self.seq[match] &= ~bit

    def share(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Adds sequence dst to the matching cells of src; nothing is copied."""
        self.seq[self.matching(src, p0, p1)] |= sequence_bit(dst)

    def shared(self, seq_id: int) -> np.ndarray:
        """Indices of the cells that the sequence has in common with others."""
        bit = sequence_bit(seq_id)
        return np.flatnonzero(((self.seq & bit) != 0) & ((self.seq & ~bit) != 0))

    def move(self, match: np.ndarray, moved: np.ndarray) -> None:
        """Gives the matching cells new positions; those below 0 are emptied."""
        cells = np.flatnonzero(match)
        self.empty(cells[moved < 0])
        cells, moved = cells[moved >= 0], moved[moved >= 0]
        self.shift(cells, self.delta[cells] + moved - self.pos[cells])
        self.pos[cells] = moved


class PlannedCells(Cells):
    """Stands for n_cells cells that are only measured: arrays of their sizes without memory, and no cell to take."""

    def __init__(self, n_cells: int, stretch: int = 1) -> None:
        super().__init__(0, stretch)
        self._n_planned = n_cells
        self._arrays = [np.broadcast_to(array, n_cells) for array in (np.int32(-1), np.uint64(0), np.int32(0))]

    @property
    def n_cells(self) -> int:
        """Cells that there would be."""
        return self._n_planned

    @property
    def pos(self) -> np.ndarray:
        """As many positions, all -1."""
        return self._arrays[0]

    @property
    def seq(self) -> np.ndarray:
        """As many masks, all 0."""
        return self._arrays[1]

    @property
    def delta(self) -> np.ndarray:
        """As many shifts, all 0."""
        return self._arrays[2]


def lowest_visible(kind: str, size: int, pos: int) -> int:
    """The smallest position that a query at pos attends to through a window of this kind and size."""
    return pos - pos % size if kind == "chunked" else max(0, pos - size + 1)


def whole_from(pos: np.ndarray, full: np.ndarray, following: int) -> int:
    """The position from which on a window has all tokens of a sequence, of positions `full`; both int32 [n], rising.

    following: the sequence's next position. Cells of a beginning may have outlived others as those of another sequence.
    """
    n = min(len(pos), len(full))
    different = np.flatnonzero(pos[len(pos) - n :] != full[len(full) - n :])
    kept = pos[len(pos) - n + (int(different[-1]) + 1 if len(different) else 0) :]
    return int(kept[0]) if len(kept) else following


class WindowCells(Cells, WindowTable):
    """Cells of layers that attend to a window: tokens that no query can see any more make room for new ones."""

    def holds_window(self, seq_id: int, pos: int) -> bool:
        """Whether everything that a query of the sequence at pos attends to is still here."""
        return bool(self.lost[seq_id] <= lowest_visible(self.kind, self.size, pos))

    def forget(self, seq_id: int, pos: int) -> None:
        """Removes the sequence from the cells of positions below pos."""
        super().remove(seq_id, -1, pos)
        self.lost[seq_id] = max(self.lost[seq_id], pos)

    def clear(self) -> None:
        super().clear()
        self.lost[:] = 0

    def remove(self, seq_id: int, p0: int, p1: int) -> None:
        super().remove(seq_id, p0, p1)
        if p0 <= 0 and p1 < 0:
            self.lost[slice(None) if seq_id < 0 else seq_id] = 0

    def share(self, src: int, dst: int, p0: int, p1: int) -> None:
        super().share(src, dst, p0, p1)
        self.lost[dst] = max(self.lost[dst], self.lost[src])

    def note_move(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Keeps `lost` in step with a move of the positions p0..p1.

        A move towards 0 closes the gap below p0: what was dropped there is no longer missing.
        """
        ids: Sequence[int] = range(MAX_SEQUENCES) if seq_id < 0 else [seq_id]
        start = max(p0, 0)
        for i in ids:
            lost = int(self.lost[i])
            if lost > start and (p1 < 0 or lost <= p1):
                self.lost[i] = max(0, lost + delta)
            elif lost <= start:
                self.lost[i] = min(lost, max(0, start + delta))


def sequence_bit(seq_id: int) -> np.uint64:
    """Mask of one sequence."""
    if not 0 <= seq_id < MAX_SEQUENCES:
        raise ValueError(f"sequence id {seq_id} is outside 0..{MAX_SEQUENCES - 1}")
    return np.uint64(1 << seq_id)
