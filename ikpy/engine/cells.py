"""Cells of a KV cache: which position and which sequences each of them holds (model semantics 7.4, 7.5)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ikpy.errors import ResourceError, UsageError

MAX_SEQUENCES = 64


class KVCacheFullError(ResourceError):
    """No empty cells are left for the tokens of a batch."""


BLOCK = 64
"""Cells that go to one sequence if there are enough: attention skips blocks of which a token sees nothing."""


class Cells:
    """n_cells cells. pos: int32, -1 = empty; seq: uint64 bit mask of sequence ids; delta: pending position shifts, 0
    in empty cells. They are changed by the methods only, which keep count of what is used."""

    def __init__(self, n_cells: int) -> None:
        self.n_cells = n_cells
        self.pos = np.full(n_cells, -1, np.int32)
        self.seq = np.zeros(n_cells, np.uint64)
        self.delta = np.zeros(n_cells, np.int32)
        self._pos, self._seq = self.pos.data, self.seq.data  # single entries at a fraction of the cost
        self._used: int | None = 0
        self._end: int | None = 0
        """None: to be found again, as after an interruption."""
        self._shifted = False
        self._last: dict[int, int] = {}
        """Mask -> cell that got the latest token of these sequences."""

    @property
    def used(self) -> int:
        """Cells that hold a token."""
        if self._used is None:
            self._used = int(np.count_nonzero(self.pos >= 0))
        return self._used

    @property
    def shifted(self) -> bool:
        """Whether shifts are pending."""
        if self._shifted:  # cells with a shift may have been emptied since
            self._shifted = bool(self.delta.any())
        return self._shifted

    @property
    def end(self) -> int:
        """The cell behind the last used one."""
        if self._end is None:
            used = self.pos[::-1] >= 0
            behind = int(used.argmax())  # stops at the first used cell from the end
            self._end = self.n_cells - behind if used[behind] else 0
        return self._end

    def find(self, masks: Sequence[int]) -> list[int]:
        """Indices of empty cells for tokens of these sequences; fewer if there are too few.

        Tokens go behind the latest one of the same sequences up to the end of its block, then to empty blocks, and to
        any empty cells only when no block is empty.
        """
        cells: list[int] = []
        for mask in masks:
            cell = self._following(mask)
            if cell is None or cell in cells:
                return self._search(masks).tolist()
            cells.append(cell)
        return cells

    def _following(self, mask: int) -> int | None:
        """The cell behind the latest token of these sequences, if it is empty and in the same block."""
        last = self._last.get(mask)
        if last is None or self._pos[last] < 0 or self._seq[last] != mask:
            own = np.flatnonzero((self.seq & np.uint64(mask)) != 0)
            if not len(own):
                return None
            last = int(own[self.pos[own].argmax()])
        cell = last + 1
        return cell if cell % BLOCK and cell < self.n_cells and self._pos[cell] < 0 else None

    def _search(self, wanted: Sequence[int]) -> np.ndarray:
        free = self.pos < 0
        found = np.full(len(wanted), -1, np.int64)
        for mask in dict.fromkeys(wanted):
            tokens = [i for i, other in enumerate(wanted) if other == mask]
            cells = self._cells_of_blocks(free, self._following(mask), len(tokens))
            free[cells] = False
            found[tokens[: len(cells)]] = cells
        left = np.flatnonzero(found < 0)
        others = np.flatnonzero(free)[: len(left)]
        found[left[: len(others)]] = others
        return found[found >= 0]

    @staticmethod
    def _cells_of_blocks(free: np.ndarray, following: int | None, n: int) -> np.ndarray:
        """At most n cells: those from `following` to the end of its block, then those of empty blocks."""
        cells = np.empty(0, np.int64)
        if following is not None and free[following]:
            cells = np.arange(following, min(len(free), following + BLOCK - following % BLOCK))
            cells = cells[: n if free[cells].all() else int(free[cells].argmin())][:n]
        missing = n - len(cells)
        empty = np.flatnonzero(free[: len(free) // BLOCK * BLOCK].reshape(-1, BLOCK).all(axis=1))
        blocks = empty[: -(-missing // BLOCK), None] * BLOCK + np.arange(BLOCK)
        return np.concatenate([cells, blocks.ravel()[:missing]])

    def fill(self, cells: Sequence[int], pos: Sequence[int], masks: Sequence[int]) -> None:
        """Puts tokens into empty cells."""
        used, end = self.used, self._end
        self._used = self._end = None
        for i, cell in enumerate(cells):
            self._pos[cell] = pos[i]
            self._seq[cell] = masks[i]
            self._last[masks[i]] = cell
            if end is not None and end <= cell:
                end = cell + 1
        self._used, self._end = used + len(cells), end

    def shift(self, cells: Sequence[int] | np.ndarray, deltas: np.ndarray) -> None:
        """Sets the pending shifts (int32) of filled cells."""
        self.delta[cells] = deltas
        self._shifted = True

    def settle(self) -> None:
        """Forgets the shifts, which have been made."""
        self.delta[:] = 0
        self._shifted = False

    def empty(self, cells: np.ndarray | Sequence[int]) -> None:
        """Empties cells."""
        left = self.used - int(np.count_nonzero(self.pos[cells] >= 0))
        self._used = self._end = None
        self.pos[cells] = -1
        self.seq[cells] = 0
        self.delta[cells] = 0
        self._used = left

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
        self._last.clear()

    def remove(self, seq_id: int, p0: int, p1: int) -> None:
        """Removes the sequence (all if negative) from the matching cells."""
        match = self.matching(seq_id, p0, p1)
        if seq_id >= 0:
            self.seq[match] &= ~sequence_bit(seq_id)
            match &= self.seq == 0
        self.empty(np.flatnonzero(match))

    def share(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Adds sequence dst to the matching cells of src; nothing is copied."""
        self.seq[self.matching(src, p0, p1)] |= sequence_bit(dst)

    def shared(self, seq_id: int) -> np.ndarray:
        """Indices of the cells that the sequence has in common with others."""
        bit = sequence_bit(seq_id)
        return np.flatnonzero(((self.seq & bit) != 0) & ((self.seq & ~bit) != 0))

    def keep(self, seq_id: int) -> None:
        """Empties every cell that does not belong to the sequence; the others belong to it alone."""
        kept = self.matching(seq_id, -1, -1)
        self.empty(np.flatnonzero(~kept))
        self.seq[kept] = sequence_bit(seq_id)

    def move(self, match: np.ndarray, moved: np.ndarray) -> None:
        """Gives the matching cells new positions; those below 0 are emptied."""
        cells = np.flatnonzero(match)
        self.empty(cells[moved < 0])
        cells, moved = cells[moved >= 0], moved[moved >= 0]
        self.shift(cells, self.delta[cells] + moved - self.pos[cells])
        self.pos[cells] = moved


class WindowCells(Cells):
    """Cells of layers that attend to a window: tokens that no query can see any more make room for new ones.

    kind: "sliding" (the last `size` positions) or "chunked" (positions of the same stretch of `size`).
    lost: int64 [64], per sequence the position below which tokens may have been dropped.
    """

    def __init__(self, n_cells: int, kind: str, size: int) -> None:
        super().__init__(n_cells)
        self.kind = kind
        self.size = size
        self.lost = np.zeros(MAX_SEQUENCES, np.int64)

    def lowest_visible(self, pos: int) -> int:
        """The smallest position that a query at pos attends to."""
        if self.kind == "chunked":
            return pos - pos % self.size
        return max(0, pos - self.size + 1)

    def holds_window(self, seq_id: int, pos: int) -> bool:
        """Whether everything that a query of the sequence at pos attends to is still here."""
        return bool(self.lost[seq_id] <= self.lowest_visible(pos))

    def make_room(self, n: int, next_pos: dict[int, int]) -> None:
        """Empties as many cells as n tokens lack, those first that fell out of their windows longest ago.

        next_pos: sequence -> position of its next token. No more cells than needed go, so that the last few tokens
        can be taken back.
        """
        missing = n - (self.n_cells - self.used)
        if missing <= 0:
            return
        behind = np.full(self.n_cells, np.iinfo(np.int64).max, np.int64)
        for seq_id, pos in next_pos.items():
            own = (self.seq & sequence_bit(seq_id)) != 0
            behind[own] = np.minimum(behind[own], self.lowest_visible(pos) - self.pos[own].astype(np.int64))
        outdated = np.flatnonzero((self.pos >= 0) & (behind > 0) & (behind < np.iinfo(np.int64).max))
        dropped = outdated[np.argsort(-behind[outdated], kind="stable")][:missing]
        for seq_id in next_pos:
            own = dropped[(self.seq[dropped] & sequence_bit(seq_id)) != 0]
            if len(own):
                self.lost[seq_id] = max(self.lost[seq_id], int(self.pos[own].max()) + 1)
        self.empty(np.sort(dropped))

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


def mask_of(ids: Sequence[int]) -> int:
    """Mask of several sequences. Raises UsageError for none and for ids out of range."""
    mask = 0
    for seq_id in ids:
        if not 0 <= seq_id < MAX_SEQUENCES:
            raise UsageError(f"sequence id {seq_id} of a token is outside 0..{MAX_SEQUENCES - 1}")
        mask |= 1 << int(seq_id)
    if not mask:
        raise UsageError("a token of a batch belongs to no sequence")
    return mask


def sequences_of(mask: int) -> list[int]:
    """Ids in a mask."""
    return [i for i in range(MAX_SEQUENCES) if mask >> i & 1]
