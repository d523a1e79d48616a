from libc.stdint cimport int64_t, uint64_t
from libcpp.vector cimport vector

from ikpy._native.batches cimport N_SEQUENCES, Batch
from ikpy._native.cells cimport CellTable


cdef class Taken:
    cdef vector[vector[int64_t]] cells
    cdef vector[vector[int64_t]] owners
    cdef readonly int full

    cdef int take(self, list tables, Batch batch) except -1
    cdef int choose_owners(self, CellTable table, size_t k, Batch batch) except -1


cdef class CellTables:
    cdef readonly list tables
    cdef list windows
    cdef CellTable full
    cdef int64_t[N_SEQUENCES] ends
    cdef uint64_t unknown

    cdef int put(self, Batch batch, Taken taken) except -1
    cdef int take_back(self, Taken taken) except -1
    cdef bint has_shifts(self)
    cdef int make_room(self, Batch batch) except -1
    cdef int find_next(self, Batch batch, int64_t* following) except -1
    cdef int look_up_ends(self) except -1
    cdef int grow(self, Batch batch) except -1
