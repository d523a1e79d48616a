// Software prefetch of weights that a kernel reads once, from the first to the last.
#pragma once
#include <cstdint>

#include "kernels/simd_f32.hpp"

namespace ikpy {

// From memory into L2 first: prefetches into L1 hold its few fill buffers for the whole way. One core of a
// machine that reads 16.8 GB/s, Q8_0 and Q4_K: 12.9 and 10.9 GB/s with all of it into L1, 13.6 and 11.6 into
// L2, 15.5 and 13.4 into L2 and then into L1.
constexpr int64_t kPrefetchIntoL2 = 3072, kPrefetchIntoL1 = 1024;

// Asks for `Bytes` bytes of weights that come so far after p. Reads nothing.
template <int64_t Bytes>
inline void prefetch_weights_into_l2([[maybe_unused]] const uint8_t* p) {
#if defined(__AVX2__)
    for (int64_t b = 0; b < Bytes; b += 64)
        _mm_prefetch(reinterpret_cast<const char*>(p + kPrefetchIntoL2 + b), _MM_HINT_T1);
#endif
}

template <int64_t Bytes>
inline void prefetch_weights_into_l1([[maybe_unused]] const uint8_t* p) {
#if defined(__AVX2__)
    for (int64_t b = 0; b < Bytes; b += 64)
        _mm_prefetch(reinterpret_cast<const char*>(p + kPrefetchIntoL1 + b), _MM_HINT_T0);
#endif
}

// Both, for kernels that are not bound by arithmetic.
template <int64_t Bytes>
inline void prefetch_weights(const uint8_t* p) {
    prefetch_weights_into_l2<Bytes>(p);
    prefetch_weights_into_l1<Bytes>(p);
}

}  // namespace ikpy
