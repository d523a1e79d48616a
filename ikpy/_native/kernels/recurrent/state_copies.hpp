// Copies of recurrent states that are not read soon.
#pragma once
#include <algorithm>
#include <cstdint>

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace ikpy {

// n floats to memory that is not read soon: whole lines go past the caches and are not fetched first.
// finish_copies() must follow.
inline void copy_away(const float* from, int64_t n, float* to) {
#if defined(__AVX__)
    if ((reinterpret_cast<uintptr_t>(to) | static_cast<uintptr_t>(4 * n)) % 64 == 0) {
        for (int64_t i = 0; i < n; i += 8) _mm256_stream_ps(to + i, _mm256_loadu_ps(from + i));
        return;
    }
#endif
    std::copy_n(from, n, to);
}

inline void finish_copies() {
#if defined(__AVX__)
    _mm_sfence();
#endif
}

}  // namespace ikpy
