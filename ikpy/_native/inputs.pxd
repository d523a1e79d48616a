from libc.stdint cimport int32_t, int64_t

from ikpy._native.batches cimport Batch
from ikpy._native.tables cimport Taken


cdef class InputArrays:
    cdef readonly object arrays, scales, scales_by_sequence
    cdef int32_t[:, ::1] _arrays
    cdef float[:, ::1] _scales, _by_sequence

    cdef int64_t set(self, Batch batch, Taken taken) except -1
