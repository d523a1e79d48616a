"""Which cells tokens take, in numpy and plain Python: what the native tables are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ikpy.engine.cells import BLOCK, WindowCells


class ReferenceCells:
    """n_cells cells. pos: int32, -1 = empty; seq: uint64 bit mask of sequence ids."""

    def __init__(self, n_cells: int) -> None:
        self.pos = np.full(n_cells, -1, np.int32)
        self.seq = np.zeros(n_cells, np.uint64)
        self._latest: dict[int, int] = {}

    @property
    def used(self) -> int:
        """Cells that hold a token."""
        return int(np.count_nonzero(self.pos >= 0))

    @property
    def end(self) -> int:
        """The cell behind the last used one."""
        return int(np.flatnonzero(self.pos >= 0).max(initial=-1)) + 1

    def find(self, masks: Sequence[int]) -> list[int]:
        """Cells behind the latest tokens of the same sequences, else as `_search` finds them."""
        cells = [self._following(mask) for mask in masks]
        if None in cells or len(set(cells)) < len(cells):
            return self._search(masks)
        return [cell for cell in cells if cell is not None]

    def _following(self, mask: int) -> int | None:
        latest = self._latest.get(mask)
        if latest is None or self.pos[latest] < 0 or self.seq[latest] != mask:
            own = np.flatnonzero((self.seq & np.uint64(mask)) != 0)
            if not len(own):
                return None
            latest = int(own[self.pos[own].argmax()])
        cell = latest + 1
        return cell if cell % BLOCK and cell < len(self.pos) and self.pos[cell] < 0 else None

    def _search(self, wanted: Sequence[int]) -> list[int]:
        """The rest of the block of each set of sequences and empty blocks, then any empty cells."""
        free = self.pos < 0
        found = np.full(len(wanted), -1)
        for mask in dict.fromkeys(wanted):
            tokens = [i for i, other in enumerate(wanted) if other == mask]
            cells = self._own_cells(free, self._following(mask))[: len(tokens)]
            free[cells] = False
            found[tokens[: len(cells)]] = cells
        left = np.flatnonzero(found < 0)
        others = np.flatnonzero(free)[: len(left)]
        found[left[: len(others)]] = others
        return found[found >= 0].tolist()

    @staticmethod
    def _own_cells(free: np.ndarray, following: int | None) -> list[int]:
        """All cells that may go to one set of sequences, in order."""
        cells: list[int] = []
        if following is not None:
            for cell in range(following, min(len(free), following + BLOCK - following % BLOCK)):
                if not free[cell]:
                    break
                cells.append(cell)
        for start in range(0, len(free) - BLOCK + 1, BLOCK):
            if free[start : start + BLOCK].all():
                cells += range(start, start + BLOCK)
        return cells

    def fill(self, cells: Sequence[int], pos: Sequence[int], masks: Sequence[int]) -> None:
        """Puts tokens into empty cells."""
        for cell, position, mask in zip(cells, pos, masks, strict=True):
            self.pos[cell], self.seq[cell], self._latest[mask] = position, mask, cell

    def empty(self, cells: Sequence[int]) -> None:
        """Empties cells."""
        self.pos[cells] = -1
        self.seq[cells] = 0


def dropped_tokens(cells: WindowCells, n: int, following: dict[int, int]) -> tuple[np.ndarray, list[int]]:
    """Cells that must be emptied for n tokens, and what the first four sequences have lost then.

    following: sequence -> position of its next token.
    """
    behind: list[tuple[int, int]] = []
    for cell in np.flatnonzero(cells.pos >= 0).tolist():
        own = [seq_id for seq_id in following if int(cells.seq[cell]) >> seq_id & 1]
        starts = [following[i] - cells.size + 1 for i in own]
        if own and min(starts) > cells.pos[cell]:
            behind.append((int(cells.pos[cell]) - min(starts), cell))
    missing = max(0, n - int(np.count_nonzero(cells.pos < 0)))
    dropped = np.array([cell for _, cell in sorted(behind)[:missing]], np.int64)
    lost = []
    for seq_id in range(4):
        own = dropped[(cells.seq[dropped] >> np.uint64(seq_id) & np.uint64(1)) != 0]
        lost.append(int(cells.pos[own].max(initial=-1)) + 1 if seq_id in following else 0)
    return dropped, lost
