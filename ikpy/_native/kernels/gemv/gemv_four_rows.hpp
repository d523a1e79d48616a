// Few tokens times the types with trits on AVX2: a vector holds eight columns of four rows, 64 bits per row,
// which meet the columns of a token by one broadcast, so that the products of 32 columns of all rows are
// added up in 16 bits before they are scaled. With 32 columns of one row in a vector, every 32 products take
// a sum in 32 bits, a conversion and an FMA: IQ2_BN takes 1.4 times as long.
//
// A type gives
//   struct Columns, made from two vectors with 16 bytes of rows 0 | 2 and 1 | 3 (bytes_of_64(p) of a row)
//       of(g)   codes of columns 8 * g .. + 7 of the four rows
#pragma once
#include <algorithm>

#include "kernels/gemv/gemv_int8.hpp"

#if defined(__AVX2__) && !defined(__AVX512VNNI__)

namespace ikpy {
namespace four_rows {

// Adds the products of 64 columns; x: the tokens' columns of the same place.
template <class U, int NT>
inline void add_columns(const typename U::Columns& w, const uint8_t* const* x, int64_t k,
                        const ActQ8Layout& at, __m256* total) {
    static_assert(exact_pairs(U::kHigh) >= 4);
#pragma GCC unroll 2
    for (int s = 0; s < 2; ++s) {
        __m256i pairs[NT], dot[NT];
#pragma GCC unroll 8
        for (int t = 0; t < NT; ++t) dot[t] = _mm256_setzero_si256();
#pragma GCC unroll 4
        for (int g = 0; g < 4; ++g) {
            const __m256i codes = w.of(4 * s + g);
#pragma GCC unroll 8
            for (int t = 0; t < NT; ++t) {
                const __m256i columns =
                    _mm256_set1_epi64x(load_unaligned<int64_t>(x[t] + k + 32 * s + 8 * g));
                if (kByteDots) {
                    dot[t] = add_dots(dot[t], codes, columns);
                    continue;
                }
                const __m256i products = _mm256_maddubs_epi16(codes, columns);
                pairs[t] = g == 0 ? products : _mm256_add_epi16(pairs[t], products);
                asm("" : "+x"(pairs[t]));  // added in another order they leave the registers
            }
        }
#pragma GCC unroll 8
        for (int t = 0; t < NT; ++t) {
            if (!kByteDots) dot[t] = _mm256_madd_epi16(pairs[t], _mm256_set1_epi16(1));
            const auto* scale = reinterpret_cast<const float*>(x[t] + at.scale) + k / 32 + s;
            total[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[t]), _mm256_broadcast_ss(scale), total[t]);
        }
    }
}

template <class U>
inline __m256i two_rows(const uint8_t* a, const uint8_t* b) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(U::bytes_of_64(a)), U::bytes_of_64(b), 1);
}

// Products of four rows with NT tokens; zeros: what the zero of the codes adds to them.
template <class U, int NT>
void multiply_rows(const uint8_t* const* rows, int64_t n_in, const uint8_t* const* x, const ActQ8Layout& at,
                   const float* zeros, __m128* out) {
    __m256 total[NT];
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t) total[t] = _mm256_setzero_ps();
    int64_t offset = U::kHeaderBytes;
    for (int64_t k = 0; k < n_in; k += 64, offset += U::kBlockBytes) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) prefetch_weights<U::kBlockBytes>(rows[i] + offset);
        const typename U::Columns w(two_rows<U>(rows[0] + offset, rows[2] + offset),
                                    two_rows<U>(rows[1] + offset, rows[3] + offset));
        add_columns<U, NT>(w, x, k, at, total);
    }
    const __m128 scale = _mm_setr_ps(U::row_scale(rows[0]), U::row_scale(rows[1]), U::row_scale(rows[2]),
                                     U::row_scale(rows[3]));
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t) {
        const __m128 sums = _mm_hadd_ps(_mm256_castps256_ps128(total[t]), _mm256_extractf128_ps(total[t], 1));
        out[t] = _mm_mul_ps(_mm_add_ps(sums, _mm_set1_ps(zeros[t])), scale);
    }
}

// Sum of a token's activations.
inline float sum_of_token(const uint8_t* x, const ActQ8Layout& at) {
    const auto *scale = reinterpret_cast<const float*>(x + at.scale),
               *sum = reinterpret_cast<const float*>(x + at.sum32);
    __m256 total = _mm256_setzero_ps();
    for (int64_t g = 0; g < at.n / 32; g += 8)
        total = _mm256_fmadd_ps(_mm256_loadu_ps(scale + g), _mm256_loadu_ps(sum + g), total);
    return sum_of_lanes(total);
}

template <class U, int NT>
void multiply(const RowBlock& rows, const uint8_t* const* x, int n_tokens, float* out) {
    if (n_tokens < NT) {
        if constexpr (NT > 1) multiply<U, NT - 1>(rows, x, n_tokens, out);
        return;
    }
    const ActQ8Layout at(rows.n_in);
    float zeros[NT];
    for (int t = 0; t < NT; ++t) zeros[t] = -static_cast<float>(U::kZero) * sum_of_token(x[t], at);
    for (int h = 0; h < 2; ++h)
        for (int i = 0; i < rows.n[h]; i += 4) {
            const uint8_t* row[4];
            for (int j = 0; j < 4; ++j) row[j] = rows.group(h, std::min(i + j, rows.n[h] - 1), 1);
            __m128 four[NT];
            multiply_rows<U, NT>(row, rows.n_in, x, at, zeros, four);
            for (int t = 0; t < NT; ++t) _mm_storeu_ps(out + t * kBlockRows + h * kHalfRows + i, four[t]);
        }
}

template <class U, int MaxTokens>
void gemv(const RowBlock& rows, const TokenSet& tokens, float* out, uint8_t*) {
    multiply<U, MaxTokens>(rows, tokens.x, tokens.n, out);
}

}  // namespace four_rows
}  // namespace ikpy

#endif
