// What products of codes on tiles and on vectors share: integers of 16 bits in two bytes, 256 hi + lo, for
// the query and for the weights of a block of cells.
#pragma once
#include <algorithm>

#include "kernels/attention/flash_codes.hpp"
#include "kernels/cache/kv_codes.hpp"
#include "kernels/simd/half_rows.hpp"

#if defined(__AVX512VNNI__)

namespace ikpy {
namespace flash {

constexpr float kHighest = 32512.0f;  // 256 * 127: the upper byte of every rounded value fits
constexpr float kHighestScale = 32767.0f;
constexpr float kTiny = 1e-30f;  // keeps divisions by a largest value of 0 finite

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

// The first four bytes of n rows, up to 16 of them, `stride` bytes apart.
inline __m512i gather_rows(const uint8_t* rows, int64_t stride, int64_t n) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i at = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(int32_t(stride)));
    if (n >= 16) return _mm512_i32gather_epi32(at, rows, 1);
    return _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), __mmask16((1u << n) - 1), at, rows, 1);
}

// The scales of n cells, rounded up to whole vectors: f32 of rows that have one, else f16
// [n_blocks][kCodeCells].
template <class Codes>
inline void copy_scales(const uint8_t* rows, int64_t stride, int64_t n, int64_t n_blocks, uint16_t* halves,
                        float* scales) {
    for (int64_t c = 0; c < n; c += 16, rows += 16 * stride) {
        if constexpr (Codes::kRowScale) {
            _mm512_storeu_si512(scales + c, gather_rows(rows, stride, n - c));
            continue;
        }
        for (int64_t b = 0; b < n_blocks; ++b)
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(halves + b * kCodeCells + c),
                                _mm512_cvtepi32_epi16(gather_rows(rows + b * Codes::kBytes, stride, n - c)));
    }
}

// Words of 32 cells, in the order in which words of two vectors are packed; bytes of cells are in their
// order.
inline __m512i packed_words(__m512 first, __m512 second) {
    return _mm512_packs_epi32(_mm512_cvtps_epi32(first), _mm512_cvtps_epi32(second));
}
// 32 lower bytes of such words, then the upper ones.
struct BytesOfWords {
    uint8_t from[64];
    constexpr BytesOfWords() : from() {
        for (int c = 0; c < 32; ++c) {
            const int word = c % 16 / 4 * 8 + c / 16 * 4 + c % 4;
            from[c] = uint8_t(2 * word);
            from[32 + c] = uint8_t(2 * word + 1);
        }
    }
};
inline constexpr BytesOfWords kBytesOfWords;

// x as words of kCodeCells cells, `highest` times each over the largest magnitude, which is returned.
inline float words_of_cells(const __m512* x, float highest, int16_t* out) {
    __m512 top = _mm512_abs_ps(x[0]);
#pragma GCC unroll 4
    for (int i = 1; i < 4; ++i) top = _mm512_max_ps(top, _mm512_abs_ps(x[i]));
    const float largest = std::max(_mm512_reduce_max_ps(top), kTiny);
    const __m512 inverse = _mm512_set1_ps(highest / largest);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i)
        _mm512_storeu_si512(out + 32 * i, packed_words(_mm512_mul_ps(inverse, x[2 * i]),
                                                       _mm512_mul_ps(inverse, x[2 * i + 1])));
    return largest;
}

inline __mmask64 first_cells(int64_t n) { return n >= 64 ? ~0ull : (1ull << n) - 1; }

// Scales of n cells as words, zeros behind them; returns what 2^15 stands for.
inline float scale_words(const __m512* scales, int64_t n, int16_t* out) {
    __m512 x[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) x[i] = _mm512_maskz_mov_ps(__mmask16(first_cells(n) >> 16 * i), scales[i]);
    return words_of_cells(x, kHighestScale, out) * (32768.0f / kHighestScale);
}
inline float scale_words(const float* scales, int64_t n, int16_t* out) {
    __m512 x[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) x[i] = _mm512_loadu_ps(scales + 16 * i);
    return scale_words(x, n, out);
}
inline float scale_words(const uint16_t* halves, int64_t n, int16_t* out) {
    __m512 x[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
        x[i] = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves + 16 * i)));
    return scale_words(x, n, out);
}

// relative: [rows][kCodeCells], the weights of n cells as words; factors: what a unit of those is worth.
inline void relative_weights(const float* p, int64_t ldp, int64_t rows, int64_t n, int16_t* relative,
                             float* factors) {
    for (int64_t r = 0; r < rows; ++r) {
        __m512 x[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
            x[i] = _mm512_maskz_loadu_ps(__mmask16(first_cells(n) >> 16 * i), p + r * ldp + 16 * i);
        factors[r] = words_of_cells(x, kHighest, relative + r * kCodeCells) / kHighest;
    }
}

// Weights of kCodeCells cells times their scales as bytes, 256 upper + lower: one multiplication of words per
// 32 cells in place of two of floats with their rounding and packing. Returns sums of the weights.
IKPY_CODES __m512i round_weights(const int16_t* relative, const int16_t* scales, int8_t* upper,
                                 int8_t* lower) {
    const __m512i from = _mm512_loadu_si512(kBytesOfWords.from);
    __m512i sums = _mm512_setzero_si512();
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        const __m512i x =
            _mm512_mulhrs_epi16(_mm512_loadu_si512(relative + 32 * i), _mm512_loadu_si512(scales + 32 * i));
        sums = _mm512_dpwssd_epi32(sums, x, _mm512_set1_epi16(1));
        // The lower byte less 128 after adding it: both bytes are signed.
        const __m512i both =
            _mm512_xor_si512(_mm512_add_epi16(x, _mm512_set1_epi16(128)), _mm512_set1_epi16(128));
        const __m512i bytes = _mm512_permutexvar_epi8(from, both);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(lower + 32 * i), _mm512_castsi512_si256(bytes));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(upper + 32 * i), _mm512_extracti64x4_epi64(bytes, 1));
    }
    return sums;
}

// o = alpha o + factor sums for 16 elements.
inline void add_scaled(__m512 sums, float factor, float alpha, float* o) {
    const __m512 kept = _mm512_mul_ps(_mm512_set1_ps(alpha), _mm512_loadu_ps(o));
    _mm512_storeu_ps(o, _mm512_fmadd_ps(_mm512_set1_ps(factor), sums, kept));
}

// o = alpha o; most steps leave the maximum of a row, and with it alpha = 1, alone.
inline void scale_rows(const float* alpha, int64_t rows, int64_t dv, float* o, int64_t ldo) {
    for (int64_t r = 0; r < rows; ++r) {
        if (alpha[r] == 1.0f) continue;
        for (float* at = o + r * ldo; at < o + r * ldo + dv; at += 16)
            _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_set1_ps(alpha[r]), _mm512_loadu_ps(at)));
    }
}

}  // namespace flash
}  // namespace ikpy

#endif
