from libc.stdint cimport int32_t, int64_t, uint64_t
from libcpp.vector cimport vector

from ikpy._native.cells cimport CellTable


cdef struct Outdated:
    int64_t behind  # positions between the token and the windows it fell out of
    int64_t cell
    uint64_t mask
    int32_t pos


cdef class WindowTable(CellTable):
    cdef readonly str kind
    cdef readonly int64_t size
    cdef readonly object lost
    cdef int64_t[::1] _lost
    cdef vector[Outdated] oldest
    cdef size_t n_tried  # of the oldest

    cdef int64_t lowest_of(self, int64_t pos)
    cdef int64_t kept(self, uint64_t mask, const int64_t* following)
    cdef int empty_outdated(self, int64_t n, const int64_t* following) except -1
    cdef int find_oldest(self, size_t n, const int64_t* following) except -1
    cdef bint drop(self, const Outdated& item, const int64_t* following)
