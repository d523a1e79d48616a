"""Cells of a cache: which position and which sequences each holds, and where tokens go."""

import numpy as np

from libc.stdint cimport uint8_t
from libcpp.algorithm cimport find

BLOCK = CELLS_PER_BLOCK
"""Cells that go to one sequence if there are enough: attention skips blocks of which a token sees nothing."""


cdef class CellTable:
    """Which position and which sequences each of n_cells cells holds.

    pos: int32, -1 = empty; seq: uint64 bit mask of sequence ids; delta: int32 pending position shifts, 0 in empty
    cells. Which cells are in use is changed by the methods only, which keep count. stretch: only the last token of
    every stretch of so many positions has a cell.
    """

    def __init__(self, int64_t n_cells, int64_t stretch=1):
        self.n_cells, self.stretch = n_cells, stretch
        self.pos = np.full(n_cells, -1, np.int32)
        self.seq = np.zeros(n_cells, np.uint64)
        self.delta = np.zeros(n_cells, np.int32)
        self._pos, self._seq, self._delta = self.pos, self.seq, self.delta

    @property
    def used(self):
        """Cells that hold a token."""
        return self._used

    @property
    def end(self):
        """The cell behind the last used one."""
        return self.end_of_used()

    cdef int64_t end_of_used(self):
        while self._end > 0 and self._pos[self._end - 1] < 0:  # emptied since
            self._end -= 1
        return self._end

    @property
    def shifted(self):
        """Whether shifts are pending."""
        return self.has_shifts()

    cdef bint has_shifts(self):
        if self._shifted:  # cells with a shift may have been emptied since
            self._shifted = self.delta.any()
        return self._shifted

    def find(self, masks):
        """Indices of empty cells for tokens of these sequences; fewer if there are too few.

        Tokens go behind the latest one of the same sequences up to the end of its block, then to empty blocks, and to
        any empty cells only when no block is empty.
        """
        cdef vector[int64_t] cells
        cdef vector[Token] tokens
        cdef Token token
        for mask in masks:
            token.mask = mask
            tokens.push_back(token)
        self.find_cells(tokens, cells)
        return cells

    def fill(self, cells, pos, masks):
        """Puts tokens into empty cells. IndexError for cells that do not exist."""
        cdef vector[int64_t] chosen = cells
        cdef vector[int32_t] positions = pos
        cdef vector[uint64_t] sequences = masks
        if not chosen.size() == positions.size() == sequences.size():
            raise ValueError("cells, pos and masks differ in length")
        cdef size_t i
        for i in range(chosen.size()):
            self.check(chosen[i])
        for i in range(chosen.size()):
            self.put(chosen[i], positions[i], sequences[i])

    def empty(self, cells):
        """Empties cells. IndexError for cells that do not exist."""
        cdef const int64_t[::1] chosen = np.ascontiguousarray(cells, np.int64)
        cdef int64_t cell
        for cell in chosen:
            self.check(cell)
        for cell in chosen:
            self.empty_cell(cell)

    def shift(self, cells, deltas):
        """Sets the pending shifts (int32) of filled cells."""
        self.delta[cells] = deltas
        self._shifted = True

    def settle(self):
        """Forgets the shifts, which have been made."""
        self.delta[:] = 0
        self._shifted = False

    cdef int check(self, int64_t cell) except -1:
        if not 0 <= cell < self.n_cells:
            raise IndexError(f"cell {cell} of {self.n_cells}")
        return 0

    cdef void put(self, int64_t cell, int32_t pos, uint64_t mask):
        self._used += self._pos[cell] < 0
        self._pos[cell], self._seq[cell] = pos, mask
        cdef size_t i = self.place_of(mask)
        if i == self._latest.size():
            self._latest.push_back(Latest(mask, cell))
        self._latest[i].cell = cell
        self._end = max(self._end, cell + 1)

    cdef size_t place_of(self, uint64_t mask):
        """Of the latest token of these sequences; behind the last place if there was none."""
        cdef size_t i = 0
        while i < self._latest.size() and self._latest[i].mask != mask:
            i += 1
        return i

    cdef void empty_cell(self, int64_t cell):
        self._used -= self._pos[cell] >= 0
        self._pos[cell], self._seq[cell], self._delta[cell] = -1, 0, 0

    cdef void find_cells(self, const vector[Token]& tokens, vector[int64_t]& cells):
        """Appends the cells for tokens, fewer if there are too few."""
        cdef size_t i
        cdef int64_t cell
        for i in range(tokens.size()):
            cell = self.following(tokens[i].mask)
            if cell < 0 or find(cells.begin(), cells.end(), cell) != cells.end():
                cells.clear()
                self.search(tokens, cells)
                return
            cells.push_back(cell)

    cdef int64_t following(self, uint64_t mask):
        """The cell behind the latest token of these sequences, if it is empty and in the same block; else -1."""
        cdef int64_t latest = -1, cell
        cdef size_t i = self.place_of(mask)
        if i < self._latest.size():
            latest = self._latest[i].cell
        if latest < 0 or self._pos[latest] < 0 or self._seq[latest] != mask:
            latest = -1
            for cell in range(self.n_cells):
                if self._seq[cell] & mask and (latest < 0 or self._pos[cell] > self._pos[latest]):
                    latest = cell
            if latest < 0:
                return -1
        cell = latest + 1
        return cell if cell % CELLS_PER_BLOCK and cell < self.n_cells and self._pos[cell] < 0 else -1

    cdef void search(self, const vector[Token]& tokens, vector[int64_t]& found):
        """Cells for tokens that do not all follow others: blocks for each set of sequences, then any empty cells."""
        cdef vector[uint8_t] free = vector[uint8_t](self.n_cells)
        cdef vector[uint64_t] distinct
        cdef vector[int64_t] chosen = vector[int64_t](tokens.size(), -1), own
        cdef size_t i, n
        cdef uint64_t mask
        cdef int64_t cell = 0
        for i in range(free.size()):
            free[i] = self._pos[i] < 0
        for i in range(tokens.size()):
            mask = tokens[i].mask
            if find(distinct.begin(), distinct.end(), mask) == distinct.end():
                distinct.push_back(mask)
        for mask in distinct:
            n = 0
            for i in range(tokens.size()):
                n += tokens[i].mask == mask
            own.clear()
            self.cells_of_blocks(free, self.following(mask), n, own)
            n = 0
            for i in range(tokens.size()):
                if tokens[i].mask == mask and n < own.size():
                    chosen[i] = own[n]
                    free[own[n]] = False
                    n += 1
        for i in range(tokens.size()):
            if chosen[i] < 0:
                while cell < self.n_cells and not free[cell]:
                    cell += 1
                if cell == self.n_cells:
                    continue
                chosen[i] = cell
                cell += 1
            found.push_back(chosen[i])

    cdef void cells_of_blocks(
        self, const vector[uint8_t]& free, int64_t following, size_t n, vector[int64_t]& found
    ):
        """At most n cells: those from `following` to the end of its block, then those of empty blocks."""
        cdef int64_t cell = following, block, last
        if following >= 0:
            last = min(self.n_cells, following + CELLS_PER_BLOCK - following % CELLS_PER_BLOCK)
            while cell < last and free[cell] and found.size() < n:
                found.push_back(cell)
                cell += 1
        for block in range(self.n_cells // CELLS_PER_BLOCK):
            if found.size() == n:
                return
            cell, last = block * CELLS_PER_BLOCK, (block + 1) * CELLS_PER_BLOCK
            while cell < last and free[cell]:
                cell += 1
            if cell < last:
                continue
            for cell in range(block * CELLS_PER_BLOCK, last):
                if found.size() < n:
                    found.push_back(cell)
