// What AVX2 makes of one block of four interleaved rows of a grid type before it looks up the points.
#pragma once
#include <cstdint>

#include "kernels/simd/half_rows.hpp"

#if defined(__AVX2__)

namespace ikpy {

struct FourRows {
    alignas(32) uint32_t masks[8][4];   // [32 columns][row]
    alignas(32) float d[16][4];         // [scale group][row]
    alignas(32) uint16_t index[8][32];  // [32 columns], of points; in which order is up to the type
};

namespace four_rows {

// Numbers of the four rows, twice.
inline __m256 row_scales(const uint8_t* p, float factor) {
    const __m128 v = _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return _mm256_mul_ps(_mm256_set_m128(v, v), _mm256_set1_ps(factor));
}

// Odd scales 2 * s + 1 of two groups.
inline void put_odd(__m256 rows, __m256i s, float* at) {
    const __m256i odd = _mm256_add_epi32(_mm256_add_epi32(s, s), _mm256_set1_epi32(1));
    _mm256_store_ps(at, _mm256_mul_ps(rows, _mm256_cvtepi32_ps(odd)));
}

// Bytes of a sign code z above one bit of the scale; masks are z ^ z << 1, the four bytes of 32 columns give
// the bits of the scale.
inline void signs_and_scales(const uint8_t* sas, __m256 rows, FourRows* out) {
    for (int i = 0; i < 8; i += 2) {
        const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sas + 16 * i));
        const __m256i z = _mm256_and_si256(_mm256_srli_epi16(v, 1), _mm256_set1_epi8(0x7F));
        _mm256_store_si256(reinterpret_cast<__m256i*>(out->masks[i]),
                           _mm256_xor_si256(z, _mm256_add_epi8(z, z)));
        const __m256i bits = _mm256_and_si256(v, _mm256_set1_epi32(0x01010101));
        put_odd(rows, _mm256_srli_epi32(_mm256_mullo_epi32(bits, _mm256_set1_epi32(0x10204080)), 28),
                out->d[i]);
    }
}

// Scale bytes [32 columns][row]: low nibble of the left, high nibble of the right 16 columns.
inline void half_scales(const uint8_t* list, __m256 rows, FourRows* out) {
    const __m128i nibble = _mm_set1_epi8(15);
    for (int i = 0; i < 8; i += 4) {
        const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(list + 4 * i));
        const __m128i left = _mm_and_si128(v, nibble), right = _mm_and_si128(_mm_srli_epi16(v, 4), nibble);
        const __m128i a = _mm_unpacklo_epi32(left, right), b = _mm_unpackhi_epi32(left, right);
        put_odd(rows, _mm256_cvtepu8_epi32(a), out->d[2 * i]);
        put_odd(rows, _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(a, a)), out->d[2 * i + 2]);
        put_odd(rows, _mm256_cvtepu8_epi32(b), out->d[2 * i + 4]);
        put_odd(rows, _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(b, b)), out->d[2 * i + 6]);
    }
}

}  // namespace four_rows
}  // namespace ikpy

#endif
