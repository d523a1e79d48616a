// Transpositions of dwords in registers: 16 x 16, and 8 x 8 on AVX2.
#pragma once
#include "kernels/simd/half_rows.hpp"

#if defined(__AVX512F__)

namespace ikpy {

// Transposes 16 rows of 16 dwords.
inline void transpose16(__m512i* r) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    // r[4 * b + c] holds column 4 * lane128 + c of rows 4 * b .. 4 * b + 3.
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        const __m512i a = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x44),
                      b = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xEE);
        const __m512i e = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x44);
        const __m512i f = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xEE);
        t[c] = _mm512_shuffle_i32x4(a, e, 0x88);
        t[4 + c] = _mm512_shuffle_i32x4(a, e, 0xDD);
        t[8 + c] = _mm512_shuffle_i32x4(b, f, 0x88);
        t[12 + c] = _mm512_shuffle_i32x4(b, f, 0xDD);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) r[i] = t[i];
}

}  // namespace ikpy

#elif defined(__AVX2__)

namespace ikpy {

// Transposes 4 rows of 4 dwords in each half: loading the halves of 8 rows apart takes half of the shuffles
// that transpose8() does.
inline void transpose4(__m256i* r) {
    const __m256i a = _mm256_unpacklo_epi32(r[0], r[1]), b = _mm256_unpackhi_epi32(r[0], r[1]);
    const __m256i c = _mm256_unpacklo_epi32(r[2], r[3]), d = _mm256_unpackhi_epi32(r[2], r[3]);
    r[0] = _mm256_unpacklo_epi64(a, c);
    r[1] = _mm256_unpackhi_epi64(a, c);
    r[2] = _mm256_unpacklo_epi64(b, d);
    r[3] = _mm256_unpackhi_epi64(b, d);
}

// Transposes 8 rows of 8 dwords.
inline void transpose8(__m256i* r) {
    __m256i t[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    // r[4 * b + c] holds column 4 * lane128 + c of rows 4 * b .. 4 * b + 3.
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        t[c] = _mm256_permute2x128_si256(r[c], r[4 + c], 0x20);
        t[4 + c] = _mm256_permute2x128_si256(r[c], r[4 + c], 0x31);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) r[i] = t[i];
}

}  // namespace ikpy

#endif
