"""Cells of layers that attend to a window: tokens that no query can see any more make room for new ones."""

import numpy as np

from libc.stdint cimport INT64_MAX
from libcpp.algorithm cimport nth_element, sort

from ikpy._native.batches cimport N_SEQUENCES, lowest_bit
from ikpy._native.cells cimport CELLS_PER_BLOCK, CellTable


cdef bint is_older(const Outdated& a, const Outdated& b) noexcept nogil:
    return a.behind > b.behind or (a.behind == b.behind and a.cell < b.cell)


cdef class WindowTable(CellTable):
    """n_cells cells of a window.

    kind: "sliding" (the last `size` positions) or "chunked" (positions of the same stretch of `size`).
    lost: int64 [64], per sequence the position below which tokens may have been dropped.
    """

    def __init__(self, int64_t n_cells, str kind, int64_t size):
        CellTable.__init__(self, n_cells)
        self.kind, self.size = kind, size
        self.lost = np.zeros(N_SEQUENCES, np.int64)
        self._lost = self.lost

    def lowest_kept(self, int64_t pos):
        """The smallest position that a sequence keeps whose next query is at pos.

        Of chunks more than the query attends to: a shift of positions makes tokens of two chunks those of one.
        """
        return self.lowest_of(pos)

    cdef int64_t lowest_of(self, int64_t pos):
        return max(0, pos - self.size + 1)

    cdef int64_t kept(self, uint64_t mask, const int64_t* following):
        """The smallest position kept for the next queries of these sequences; INT64_MAX if they have none."""
        cdef int64_t lowest = INT64_MAX
        cdef int i
        while mask:
            i = lowest_bit(mask)
            mask &= mask - 1
            if following[i] >= 0:
                lowest = min(lowest, self.lowest_of(following[i]))
        return lowest

    def make_room(self, int64_t n, dict next_pos):
        """Empties as many cells as n tokens lack, those first that fell out of their windows longest ago.

        next_pos: sequence -> position of its next token. No more cells than needed go, so that the last few tokens
        can be taken back.
        """
        cdef int64_t[N_SEQUENCES] following
        cdef int i
        for i in range(N_SEQUENCES):
            following[i] = next_pos.get(i, -1)
        self.empty_outdated(n, following)

    cdef int empty_outdated(self, int64_t n, const int64_t* following) except -1:
        """make_room; following [64]: position of every sequence's next token, -1 if it has none.

        A look at all cells finds those for many single tokens, which are emptied when it is their turn.
        """
        cdef int64_t missing = n - (self.n_cells - self._used)
        cdef bint has_looked = False
        while missing > 0:
            if self.n_tried < self.oldest.size():
                missing -= self.drop(self.oldest[self.n_tried], following)
                self.n_tried += 1
            elif has_looked:
                break
            else:
                self.find_oldest(max(missing, CELLS_PER_BLOCK), following)
                has_looked = True
        return 0

    cdef int find_oldest(self, size_t n, const int64_t* following) except -1:
        """Lists at most n cells of tokens that fell out of all windows."""
        cdef int64_t cell, kept = INT64_MAX
        cdef uint64_t mask = 0
        self.n_tried = 0
        self.oldest.clear()
        for cell in range(self.n_cells):
            if self._seq[cell] != mask:  # neighbours mostly belong to the same sequences
                mask = self._seq[cell]
                kept = self.kept(mask, following)
            if 0 <= self._pos[cell] < kept < INT64_MAX:
                self.oldest.push_back(Outdated(kept - self._pos[cell], cell, mask, self._pos[cell]))
        if n < self.oldest.size():
            nth_element(self.oldest.begin(), self.oldest.begin() + n, self.oldest.end(), is_older)
            self.oldest.resize(n)
        sort(self.oldest.begin(), self.oldest.end(), is_older)
        return 0

    cdef bint drop(self, const Outdated& item, const int64_t* following):
        """Empties a cell if it still holds this token and no next query sees it; whether it did."""
        cdef uint64_t left = item.mask
        cdef int64_t kept = self.kept(left, following)
        cdef int i
        if self._pos[item.cell] != item.pos or self._seq[item.cell] != item.mask:
            return False
        if not item.pos < kept < INT64_MAX:
            return False
        while left:
            i = lowest_bit(left)
            left &= left - 1
            if following[i] >= 0:
                self._lost[i] = max(self._lost[i], <int64_t> item.pos + 1)
        self.empty_cell(item.cell)
        return True
