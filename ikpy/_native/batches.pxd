from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint64_t
from libcpp.vector cimport vector

cdef extern from *:
    int lowest_bit "__builtin_ctzll"(unsigned long long) noexcept nogil

cdef enum:
    N_SEQUENCES = 64


cdef struct Token:
    int64_t id
    int64_t pos
    uint64_t mask  # sequences it belongs to
    int32_t turn    # difference between rotation position and pos
    int16_t seq     # the one that decides what it attends to
    uint8_t wanted  # whether its logits are


cdef class Batch:
    cdef vector[Token] items

    cdef int append(self, tokens, pos, seq_id, str logits, turn) except -1
    cdef int64_t invalid(self, int64_t n_vocab, int64_t n_positions)
    cdef int64_t n_wanted(self)
    cdef Batch part(self, size_t start, size_t end)
