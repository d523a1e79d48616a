// Tokens as the right operand of tile products, and the sums that such products leave behind.
#pragma once
#include <cstring>

#include "kernels/simd/amx_tiles.hpp"
#include "kernels/simd/transpose.hpp"
#include "kernels/weights/weight_kernels.hpp"

#if defined(__AVX512F__) && defined(__linux__)

namespace ikpy {

// Rows of activations as tile loads of left operands want them: equally spaced.
struct TokenRows {
    const uint8_t* base;
    int64_t stride;
};

// n_bytes of the tokens from `begin` on; rows that are not equally spaced are copied to `copy`, unless it
// holds them already.
inline TokenRows token_rows(const uint8_t* const* x, int n, int64_t begin, int64_t n_bytes, uint8_t* copy,
                            int64_t copy_stride, bool copied = false) {
    const int64_t stride = n > 1 ? x[1] - x[0] : 64;
    bool regular = stride > 0;
    for (int t = 2; t < n; ++t) regular = regular && x[t] - x[t - 1] == stride;
    if (regular) return {x[0] + begin, stride};
    for (int t = 0; !copied && t < n; ++t) std::memcpy(copy + t * copy_stride, x[t] + begin, n_bytes);
    asm volatile("" ::: "memory");  // tile loads do not tell the compiler what they read
    return {copy, copy_stride};
}

// 16 tokens' dwords step by step: right operand [n_steps][16 pairs][16 tokens][2].
inline void transpose_tokens(const uint8_t* const* x, int n, int n_parts, int part, int64_t n_steps,
                             uint16_t* out) {
    for (int64_t s = 0; s < n_steps; ++s, out += kTileValues) {
        __m512i r[kTileHeight];
#pragma GCC unroll 16
        for (int t = 0; t < kTileHeight; ++t)
            r[t] = t < n ? _mm512_loadu_si512(x[t] + (s * n_parts + part) * 64) : _mm512_setzero_si512();
        transpose16(r);
#pragma GCC unroll 16
        for (int t = 0; t < kTileHeight; ++t) _mm512_storeu_si512(out + t * 32, r[t]);
    }
}

// Sums [16 rows][16 tokens], plus those of `more`, as rows of n tokens.
inline void store_sums(const float* sums, const float* more, int n, float* out) {
    __m512i r[kTileHeight];
#pragma GCC unroll 16
    for (int i = 0; i < kTileHeight; ++i) {
        __m512 v = _mm512_loadu_ps(sums + i * kTileHeight);
        if (more) v = _mm512_add_ps(v, _mm512_loadu_ps(more + i * kTileHeight));
        r[i] = _mm512_castps_si512(v);
    }
    transpose16(r);
    for (int t = 0; t < n; ++t) _mm512_storeu_si512(out + t * kBlockRows, r[t]);
}

}  // namespace ikpy

#endif
