from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libcpp.vector cimport vector

from ikpy._native.batches cimport Token

cdef enum:
    CELLS_PER_BLOCK = 64


cdef struct Latest:
    uint64_t mask
    int64_t cell  # that got the latest token of these sequences


cdef class CellTable:
    cdef readonly int64_t n_cells, stretch
    cdef readonly object pos, seq, delta
    cdef int32_t[::1] _pos, _delta
    cdef uint64_t[::1] _seq
    cdef int64_t _used, _end
    cdef bint _shifted
    cdef vector[Latest] _latest

    cdef int64_t end_of_used(self)
    cdef bint has_shifts(self)
    cdef int check(self, int64_t cell) except -1
    cdef void put(self, int64_t cell, int32_t pos, uint64_t mask)
    cdef size_t place_of(self, uint64_t mask)
    cdef void empty_cell(self, int64_t cell)
    cdef void find_cells(self, const vector[Token]& tokens, vector[int64_t]& cells)
    cdef int64_t following(self, uint64_t mask)
    cdef void search(self, const vector[Token]& tokens, vector[int64_t]& found)
    cdef void cells_of_blocks(
        self, const vector[uint8_t]& free, int64_t following, size_t n, vector[int64_t]& found
    )
