from libc.stdint cimport int64_t


cdef int64_t likeliest(const float* logits, int64_t n, const float* maxima) noexcept nogil
