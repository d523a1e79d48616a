// Scales and factors that lie together in a block, in one load or two instead of one for each.
#pragma once
#include "core.cuh"

namespace ikpy::cuda {

// Bytes from p on, whose alignment is known to be at least Align, as words. What is behind the bytes in the
// last word is of no meaning.
template <int Align, int Bytes, int N>
__device__ __forceinline__ void load_head(const uint8_t* p, unsigned (&out)[N]) {
    static_assert(N == (Bytes + 3) / 4);
    constexpr int kWords = (Bytes + 3 + (Align >= 4 ? 0 : 2)) / 4;
    const auto address = reinterpret_cast<uintptr_t>(p);
    unsigned words[kWords];
    load_pieces<Align, 16, kWords, Bytes>(address, words);
    const unsigned shift = static_cast<unsigned>(address & 2) * 8;
#pragma unroll
    for (int i = 0; i < N; ++i)
        out[i] = Align >= 4 ? words[i] : __funnelshift_r(words[i], i + 1 < kWords ? words[i + 1] : 0, shift);
}

}  // namespace ikpy::cuda
