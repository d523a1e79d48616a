// What products of codes on tiles and on vectors share: integers of 16 bits in two bytes, 256 hi + lo, for
// the query and for the weights of a block of cells.
#pragma once
#include <algorithm>

#include "kernels/flash_codes.hpp"
#include "kernels/half_rows.hpp"

#if defined(__AVX512VNNI__)

namespace ikpy {
namespace flash {

constexpr float kHighest = 32512.0f;  // 256 * 127: the upper byte of every rounded value fits
constexpr float kTiny = 1e-30f;       // keeps divisions by a largest value of 0 finite

template <typename T>
T* take(uint8_t*& at, int64_t n) {
    T* p = reinterpret_cast<T*>(at);
    at += (n * int64_t(sizeof(T)) + 63) / 64 * 64;
    return p;
}

// A row of n elements, a multiple of 16, as integers: kHighest / largest times each, and what 1 is worth.
struct RoundedRow {
    float inverse, unit;

    RoundedRow(const float* x, int64_t n) {
        __m512 top = _mm512_setzero_ps(), undefined = top;  // not 0 for infinite and undefined elements
        for (int64_t d = 0; d < n; d += 16) {
            const __m512 v = _mm512_loadu_ps(x + d);
            top = _mm512_max_ps(top, _mm512_abs_ps(v));
            undefined = _mm512_fmadd_ps(v, _mm512_setzero_ps(), undefined);
        }
        const float largest = std::max(_mm512_reduce_max_ps(top), kTiny);
        inverse = kHighest / largest;
        unit = largest / kHighest + _mm512_reduce_add_ps(undefined);
    }
    __m512i levels(const float* x) const {
        return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(inverse)));
    }
};
// The upper byte of each level; the lower one is its lowest 8 bits.
inline __m512i upper_bytes(__m512i levels) {
    return _mm512_srai_epi32(_mm512_add_epi32(levels, _mm512_set1_epi32(128)), 8);
}
inline void store_bytes(__m512i x, int8_t* to) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(x));
}

// f32 scales of n f16 ones, rounded up to whole vectors.
inline void widen_scales(const uint16_t* halves, int64_t n, float* out) {
    for (int64_t i = 0; i < n; i += 16)
        _mm512_storeu_ps(out + i,
                         _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves + i))));
}

// Makes the scales of n cells relative to the largest, zeros beyond n; returns the largest.
inline float normalize_scales(float* scales, int64_t n) {
    const __mmask64 valid = n == 64 ? ~0ull : (1ull << n) - 1;
    __m512 x[4], top = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        x[i] = _mm512_maskz_mov_ps(__mmask16(valid >> 16 * i), _mm512_loadu_ps(scales + 16 * i));
        top = _mm512_max_ps(top, _mm512_abs_ps(x[i]));
    }
    const float largest = _mm512_reduce_max_ps(top);
    const __m512 inverse = _mm512_set1_ps(1.0f / std::max(largest, kTiny));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) _mm512_storeu_ps(scales + 16 * i, _mm512_mul_ps(inverse, x[i]));
    return largest;
}

// relative: [rows][kCodeCells], kHighest times p over its largest; factors: what a unit of those is worth.
inline void relative_weights(const float* p, int64_t ldp, int64_t rows, int64_t n, float* relative,
                             float* factors) {
    const __mmask64 valid = n == 64 ? ~0ull : (1ull << n) - 1;
    for (int64_t r = 0; r < rows; ++r) {
        __m512 x[4], top = _mm512_setzero_ps();
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            x[i] = _mm512_maskz_loadu_ps(__mmask16(valid >> 16 * i), p + r * ldp + 16 * i);
            top = _mm512_max_ps(top, x[i]);
        }
        const float largest = std::max(_mm512_reduce_max_ps(top), kTiny);
        factors[r] = largest / kHighest;
        const __m512 inverse = _mm512_set1_ps(kHighest / largest);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
            _mm512_storeu_ps(relative + r * kCodeCells + 16 * i, _mm512_mul_ps(inverse, x[i]));
    }
}

// Weights of 64 cells times their scales as 64 upper bytes and 64 lower ones. Bytes 4 (4 j + i) .. + 3 belong
// to the cells 4 (4 i + j) .. + 3, the order in which packing leaves them. Returns sums of the weights.
inline __m512i round_weights(const float* p, const float* scales, int8_t* out) {
    __m512i x[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
        x[i] =
            _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(p + 16 * i), _mm512_loadu_ps(scales + 16 * i)));
    const __m512i a = _mm512_packs_epi32(x[0], x[1]), b = _mm512_packs_epi32(x[2], x[3]);
    const __m512i half = _mm512_set1_epi16(128), byte = _mm512_set1_epi16(255);
    _mm512_storeu_si512(out, _mm512_packs_epi16(_mm512_srai_epi16(_mm512_add_epi16(a, half), 8),
                                                _mm512_srai_epi16(_mm512_add_epi16(b, half), 8)));
    _mm512_storeu_si512(out + 64, _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte)));
    return _mm512_add_epi32(_mm512_add_epi32(x[0], x[1]), _mm512_add_epi32(x[2], x[3]));
}
// Where the bytes of the cells 4 group .. + 3 are.
inline int64_t bytes_of_group(int64_t group) { return group % 4 * 16 + group / 4 * 4; }

// o = alpha o + factor sums for 16 elements.
inline void add_scaled(__m512 sums, float factor, float alpha, float* o) {
    const __m512 kept = _mm512_mul_ps(_mm512_set1_ps(alpha), _mm512_loadu_ps(o));
    _mm512_storeu_ps(o, _mm512_fmadd_ps(_mm512_set1_ps(factor), sums, kept));
}

}  // namespace flash
}  // namespace ikpy

#endif
