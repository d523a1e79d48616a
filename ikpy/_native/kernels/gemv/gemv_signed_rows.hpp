// Few tokens times the row-interleaved grid types on AVX2: a vector holds eight columns of four rows, 64 bits
// per row, so that the columns of a token are one broadcast and the products of 32 columns of all rows are
// added up before they are scaled. With 32 columns of one row in a vector (kernels/gemv/gemv_signed.hpp),
// which takes a conversion and an FMA for every 32 products, and indices handled one by one, IQ3_XXS_R4
// took 1.8 times as long.
//
// A layout gives
//   static void prepare(const uint8_t* p, FourRows* out)   of one block: scales, sign masks if it has any,
//       indices of points if they are not bytes
//   static __m256i points(const uint8_t* p, const FourRows& rows, int i, int g)   magnitudes (or signed
//       points, or trits) of columns 32 * i + 8 * g .. + 7
//   kLargest                 the largest magnitude
//   kSignedPoints            points() carry their signs
//   kTrits                   points() are trits that stand for eight times themselves; the rest is d[1] of
//       all points
//   kOwnSigns, static __m256i signs8(__m256i masks, int g)   for sign masks in an order of its own: masks has
//       that of every row twice
#pragma once
#include "kernels/gemv/gemv_signed.hpp"
#include "unpack/four_rows.hpp"

#if defined(__AVX2__) && !defined(__AVX512VNNI__)

namespace ikpy {
namespace signed_points {

// Trits whose eighths are added by scales of their own.
template <class L, class = void>
struct HasTrits : std::false_type {};
template <class L>
struct HasTrits<L, std::void_t<decltype(L::kTrits)>> : std::true_type {};

// Four numbers, each of them twice.
inline __m256i each_twice(const void* p) {
    const auto v = _mm_load_si128(static_cast<const __m128i*>(p));
    return _mm256_permutevar8x32_epi32(_mm256_castsi128_si256(v), _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
}

// Masks of the negative ones of columns 8 * g .. + 7.
template <class L>
inline __m256i negative_points(const uint32_t* masks, int g) {
    if constexpr (grid::HasOwnSigns<L>::value) {
        return L::signs8(each_twice(masks), g);
    } else {
        const __m256i first =
            _mm256_setr_epi64x(0, 0x0404040404040404, 0x0808080808080808, 0x0C0C0C0C0C0C0C0C);
        const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
        const auto v = _mm_load_si128(reinterpret_cast<const __m128i*>(masks));
        const __m256i bytes = _mm256_shuffle_epi8(
            _mm256_broadcastsi128_si256(v), _mm256_add_epi8(first, _mm256_set1_epi8(static_cast<char>(g))));
        return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit);
    }
}

// Columns 32 * i + 8 * g .. + 7 as factors of 8-bit products: magnitude * sign(x, sign).
struct PointFactors {
    __m256i magnitude, sign;
};
template <class L>
inline PointFactors factors_of_rows(const uint8_t* p, const FourRows& rows, int i, int g) {
    const __m256i points = L::points(p, rows, i, g);
    if constexpr (HasTrits<L>::value) {
        return {_mm256_set1_epi8(1), points};
    } else if constexpr (HasSignedPoints<L>::value) {
        return {_mm256_abs_epi8(points), points};
    } else {
        return {points, signs_of_masks(negative_points<L>(rows.masks[i], g))};
    }
}

// Adds the products of columns 32 * i .. + 31 of a block; x: the tokens' columns of the same place.
template <class L, int NT>
inline void add_columns(const uint8_t* p, const FourRows& rows, int i, const uint8_t* const* x, int64_t k,
                        const ActQ8Layout& at, __m256* total) {
    constexpr int kGroups = 32 / L::kGroup, kVectors = 4 / kGroups;
    constexpr int kPairs = std::min(kVectors, exact_pairs(L::kLargest));
    __m256 value[NT];
#pragma GCC unroll 2
    for (int s = 0; s < kGroups; ++s) {
        __m256i pairs[NT], dot[NT];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            const int g = s * kVectors + v;
            const PointFactors w = factors_of_rows<L>(p, rows, i, g);
#pragma GCC unroll 8
            for (int t = 0; t < NT; ++t) {
                const __m256i columns = _mm256_set1_epi64x(load_unaligned<int64_t>(x[t] + k + 8 * g));
                const __m256i turned = _mm256_sign_epi8(columns, w.sign);
                if (kByteDots) {
                    dot[t] = add_dots(v > 0 ? dot[t] : _mm256_setzero_si256(), w.magnitude, turned);
                    continue;
                }
                const __m256i products = _mm256_maddubs_epi16(w.magnitude, turned);
                pairs[t] = v % kPairs ? _mm256_add_epi16(pairs[t], products) : products;
                asm("" : "+x"(pairs[t]));  // added in another order they leave the registers
                if ((v + 1) % kPairs && v + 1 < kVectors) continue;
                const __m256i sums =
                    _mm256_madd_epi16(pairs[t], _mm256_set1_epi16(HasTrits<L>::value ? 8 : 1));
                dot[t] = v < kPairs ? sums : _mm256_add_epi32(dot[t], sums);
            }
        }
        const __m256 d = _mm256_castsi256_ps(each_twice(rows.d[kGroups * i + s]));
#pragma GCC unroll 8
        for (int t = 0; t < NT; ++t) {
            if (kByteDots && HasTrits<L>::value) dot[t] = _mm256_slli_epi32(dot[t], 3);
            const __m256 sum = _mm256_cvtepi32_ps(dot[t]);
            value[t] = s > 0 ? _mm256_fmadd_ps(sum, d, value[t]) : _mm256_mul_ps(sum, d);
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t)
        total[t] = _mm256_fmadd_ps(value[t], _mm256_broadcast_ss(scales_of(x[t], at, k / 32)), total[t]);
}

// What the points of trits 8 * t + 1 or - 1 have besides 8 * t: the signed scales of the four rows, which
// come second, times the sums of the tokens.
template <int NT>
inline void add_eighths(const FourRows& rows, const uint8_t* const* x, const ActQ8Layout& at, int64_t g,
                        __m128* eighths) {
    const __m128 d = _mm_load_ps(rows.d[1]);
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t) {
        const __m128 scale = _mm_broadcast_ss(scales_of(x[t], at, g));
        const __m128 sum = _mm_broadcast_ss(reinterpret_cast<const float*>(x[t] + at.sum32) + g);
        eighths[t] = _mm_fmadd_ps(d, _mm_mul_ps(scale, sum), eighths[t]);
    }
}

template <class L, int NT>
void multiply_four_rows(const uint8_t* group, int64_t n_in, const uint8_t* const* x, const ActQ8Layout& at,
                        float* out) {
    __m256 total[NT];
    __m128 eighths[NT];
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t) {
        total[t] = _mm256_setzero_ps();
        eighths[t] = _mm_setzero_ps();
    }
    FourRows rows;
    const uint8_t* p = group + RowHeader<L>::kBytes;
    for (int64_t k = 0; k < n_in; k += L::kBlock, p += L::kBlockBytes) {
        prefetch_weights<L::kBlockBytes>(p);
        L::prepare(p, &rows);
        if (HasTrits<L>::value) add_eighths<NT>(rows, x, at, k / 32, eighths);
        for (int i = 0; i < L::kBlock / 32; ++i) add_columns<L, NT>(p, rows, i, x, k + 32 * i, at, total);
    }
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t) {
        const __m128 sums = _mm_hadd_ps(_mm256_castps256_ps128(total[t]), _mm256_extractf128_ps(total[t], 1));
        _mm_storeu_ps(out + t * kBlockRows, _mm_add_ps(sums, eighths[t]));
    }
}

template <class L, int NT>
void multiply_groups(const RowBlock& rows, const uint8_t* const* x, int n_tokens, float* out) {
    if (n_tokens < NT) {
        if constexpr (NT > 1) multiply_groups<L, NT - 1>(rows, x, n_tokens, out);
        return;
    }
    const ActQ8Layout at(rows.n_in);
    for (int h = 0; h < 2; ++h)
        for (int i = 0; i < rows.n[h]; i += 4)
            multiply_four_rows<L, NT>(rows.group(h, i, 4), rows.n_in, x, at, out + h * kHalfRows + i);
}

template <class L, int MaxTokens>
void gemv_of_groups(const RowBlock& rows, const TokenSet& tokens, float* out, uint8_t*) {
    multiply_groups<L, MaxTokens>(rows, tokens.x, tokens.n, out);
    apply_row_scales<L>(rows, rows.halves(), tokens.n, out);
}

}  // namespace signed_points
}  // namespace ikpy

#endif
