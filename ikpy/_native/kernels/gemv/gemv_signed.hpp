// Few tokens times grid types on AVX2: points go from the tables into registers and the signs of the weights
// to the activations. The codes of the unpackers, which panels want, would be stored, loaded and taken apart
// into magnitude and sign again: that took 1.4 to 3 times as long.
#pragma once
#include "kernels/matmul/quant_product.hpp"
#include "kernels/matmul/weight_prefetch.hpp"
#include "unpack/codes32.hpp"
#include "unpack/grid_block.hpp"

#if defined(__AVX2__) && !defined(__AVX512VNNI__)

namespace ikpy {
namespace signed_points {

// Points that carry their signs.
template <class L, class = void>
struct HasSignedPoints : std::false_type {};
template <class L>
struct HasSignedPoints<L, std::void_t<decltype(L::kSignedPoints)>> : std::true_type {};

// Magnitudes (or signed points) of elements 32 * i .. + 31 of row k.
template <class L>
inline __m256i points32(const uint8_t* p, [[maybe_unused]] int k, int i) {
    if constexpr (HasSignedPoints<L>::value) {
        return L::points32(p, i);
    } else {
        return grid::magnitudes32<L>(p, k, i);
    }
}

// -1 and 1 from masks: one instruction per token applies them.
inline __m256i signs_of_masks(__m256i masks) { return _mm256_or_si256(masks, _mm256_set1_epi8(1)); }

// Adds the products of 32 points with a token's columns x; `sign`: any numbers of the points' signs; scale:
// that of the points times that of the columns.
inline __m256 add_products(__m256i points, __m256i sign, __m256 scale, const uint8_t* x, __m256 total) {
    const __m256i a = _mm256_sign_epi8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)), sign);
    const __m256i dot = add_dots(_mm256_setzero_si256(), points, a);
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, total);
}

inline const float* scales_of(const uint8_t* x, const ActQ8Layout& at, int64_t g) {
    return reinterpret_cast<const float*>(x + at.scale) + g;
}

// The scales of a segment times those of NT tokens, and the masks of its signs. They are made together,
// before any product needs one: what the units write number by number can be loaded as a vector only later.
template <class L, int NT>
struct Segment {
    static constexpr int kGroups = kChunk / L::kGroup;
    alignas(32) float d[kSegmentChunks][16];
    alignas(32) uint8_t masks[kSegmentChunks][32];
    alignas(32) float products[NT][kSegmentChunks][kGroups];
};

template <class L, int NT>
[[gnu::always_inline]] inline void read_segment(const uint8_t* p, [[maybe_unused]] int k, int n_chunks,
                                                Segment<L, NT>* to) {
    for (int c = 0; c < n_chunks; ++c, p += L::kBlockBytes) {
        if constexpr (!HasSignedPoints<L>::value) grid::sign_masks<L>(p, k, to->masks[c]);
        L::scales(p, k, to->d[c]);
    }
}

template <class L, int NT>
[[gnu::always_inline]] inline void multiply_scales(const uint8_t* const* x, const ActQ8Layout& at, int64_t c0,
                                                   int n_chunks, Segment<L, NT>* to) {
    const __m256i first = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    const __m256i second = _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7);
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t)
        for (int c = 0; c < n_chunks; ++c) {
            const __m256 xs = _mm256_loadu_ps(scales_of(x[t], at, 8 * (c0 + c)));
            const auto put = [&](int g, __m256 s) {
                _mm256_store_ps(to->products[t][c] + g, _mm256_mul_ps(_mm256_load_ps(to->d[c] + g), s));
            };
            if constexpr (L::kGroup == 32) {
                put(0, xs);
            } else {
                put(0, _mm256_permutevar8x32_ps(xs, first));
                put(8, _mm256_permutevar8x32_ps(xs, second));
            }
        }
}

template <class L, int NT>
void multiply_row(const uint8_t* row, int k, int64_t n_in, const uint8_t* const* x, const ActQ8Layout& at,
                  float* out) {
    __m256 total[NT][2];
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t) total[t][0] = total[t][1] = _mm256_setzero_ps();
    Segment<L, NT> segment;
    const int64_t n_chunks = n_in / kChunk;
    for (int64_t c0 = 0; c0 < n_chunks; c0 += kSegmentChunks) {
        const int n = static_cast<int>(std::min<int64_t>(kSegmentChunks, n_chunks - c0));
        const uint8_t* p = row + c0 * L::kBlockBytes;
        read_segment<L, NT>(p, k, n, &segment);
        multiply_scales<L, NT>(x, at, c0, n, &segment);
        for (int c = 0; c < n; ++c, p += L::kBlockBytes) {
            prefetch_weights<L::kBlockBytes>(p);
#pragma GCC unroll 8
            for (int i = 0; i < kChunk / 32; ++i) {
                __m256i points = points32<L>(p, k, i), sign = points;
                if (HasSignedPoints<L>::value) {
                    points = _mm256_abs_epi8(points);
                } else {
                    const auto masks32 = c32::bits(load_unaligned<uint32_t>(segment.masks[c] + 4 * i));
                    sign = signs_of_masks(reinterpret_cast<__m256i>(masks32));
                }
#pragma GCC unroll 8
                for (int t = 0; t < NT; ++t)
                    total[t][i & 1] = add_products(points, sign, scale_lanes<L>(segment.products[t][c], i),
                                                   x[t] + kChunk * (c0 + c) + 32 * i, total[t][i & 1]);
            }
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t) out[t * kBlockRows] = sum_of_lanes(_mm256_add_ps(total[t][0], total[t][1]));
}

template <class L, int NT>
void multiply(const RowBlock& rows, const uint8_t* const* x, int n_tokens, float* out) {
    if (n_tokens < NT) {
        if constexpr (NT > 1) multiply<L, NT - 1>(rows, x, n_tokens, out);
        return;
    }
    const ActQ8Layout at(rows.n_in);
    constexpr int R = RowsOf<L>::kCount;
    for (int h = 0; h < 2; ++h)
        for (int i = 0; i < rows.n[h]; ++i)
            multiply_row<L, NT>(rows.group(h, i, R), i % R, rows.n_in, x, at, out + h * kHalfRows + i);
}

template <class L, int MaxTokens>
void gemv(const RowBlock& rows, const TokenSet& tokens, float* out, uint8_t*) {
    multiply<L, MaxTokens>(rows, tokens.x, tokens.n, out);
}

}  // namespace signed_points
}  // namespace ikpy

#endif
