from libc.stdint cimport int32_t, int64_t
from libcpp.vector cimport vector

from ikpy._native.batches cimport Batch
from ikpy._native.tables cimport Taken


cdef class InputArrays:
    cdef readonly object arrays, turned, scales, scales_by_sequence
    cdef int32_t[:, ::1] _arrays
    cdef int32_t[::1] _turned
    cdef float[:, ::1] _scales, _by_sequence
    cdef vector[int64_t] _stretches

    cdef int64_t set(self, Batch batch, Taken taken) except -1
    cdef int set_stretch(self, Batch batch, Taken taken, int64_t k, int64_t further) except -1
