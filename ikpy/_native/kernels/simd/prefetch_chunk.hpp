// Fetching the next weights while some are unpacked.
#pragma once
#include "kernels/matmul/unpacked.hpp"

namespace ikpy {

#if defined(__AVX2__)
// The chunk behind the one at p, as the rows of a panel are more streams than the hardware prefetcher
// follows, and this one of the next row block: with few tokens, nothing would be read while panels are
// multiplied. Only every Parts-th line, from that of `part` on, where large chunks are unpacked in parts.
template <class U, int Parts = 1>
inline void prefetch_chunk(const uint8_t* p, int64_t to_next_block, int part = 0) {
    constexpr int kBytes = kChunk / U::kBlock * U::kBlockBytes;
    for (int b = 64 * part; b < kBytes; b += 64 * Parts) {
        _mm_prefetch(reinterpret_cast<const char*>(p + kBytes + b), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(p + to_next_block + b), _MM_HINT_T1);
    }
}
#endif

}  // namespace ikpy
