// Few tokens times grid types on AVX2: points go from the tables into registers and the signs of the weights
// to the activations. The codes of the unpackers, which panels want, would be stored, loaded and taken apart
// into magnitude and sign again: that took 1.4 to 3 times as long.
#pragma once
#include "kernels/quant_product.hpp"
#include "kernels/weight_prefetch.hpp"
#include "unpack/codes32.hpp"
#include "unpack/grids.hpp"

#if defined(__AVX2__) && !defined(__AVX512VNNI__)

namespace ikpy {
namespace signed_points {

template <class L, class = void>
struct HasPoints32 : std::false_type {};
template <class L>
struct HasPoints32<L, std::void_t<decltype(L::kPointsOf32)>> : std::true_type {};

template <class L, class = void>
struct HasMasks : std::false_type {};
template <class L>
struct HasMasks<L, std::void_t<decltype(&L::masks)>> : std::true_type {};

// Points that carry their signs.
template <class L, class = void>
struct HasSignedPoints : std::false_type {};
template <class L>
struct HasSignedPoints<L, std::void_t<decltype(L::kSignedPoints)>> : std::true_type {};

// Magnitudes (or signed points) of elements 32 * i .. + 31 of row k.
template <class L>
inline __m256i points32(const uint8_t* p, [[maybe_unused]] int k, int i) {
    if constexpr (HasPoints32<L>::value || HasSignedPoints<L>::value) {
        return L::points32(p, i);
    } else {
        typedef uint64_t Points __attribute__((vector_size(32)));
        return reinterpret_cast<__m256i>(Points{L::point(p, k, 4 * i), L::point(p, k, 4 * i + 1),
                                                L::point(p, k, 4 * i + 2), L::point(p, k, 4 * i + 3)});
    }
}

// Sign masks of the 32 8-groups.
template <class L>
inline void sign_masks(const uint8_t* p, [[maybe_unused]] int k, uint8_t* out) {
    if constexpr (HasSignedPoints<L>::value) {
        return;
    } else if constexpr (HasMasks<L>::value) {
        L::masks(p, out);
    } else {
        for (int i = 0; i < 4; ++i) {
            const uint64_t masks = L::signs(p, k, i);
            std::memcpy(out + 8 * i, &masks, 8);
        }
    }
}

template <class L, int NT>
void multiply_row(const uint8_t* row, int k, int64_t n_in, const uint8_t* const* x, const ActQ8Layout& at,
                  float* out) {
    __m256 total[NT][2];
#pragma GCC unroll 4
    for (int t = 0; t < NT; ++t) total[t][0] = total[t][1] = _mm256_setzero_ps();
    alignas(32) uint8_t masks[32];
    alignas(32) float d[16];
    for (int64_t c = 0; c < n_in / kChunk; ++c) {
        const uint8_t* p = row + c * L::kBlockBytes;
        prefetch_weights<L::kBlockBytes>(p);
        sign_masks<L>(p, k, masks);
        L::scales(p, k, d);
#pragma GCC unroll 8
        for (int i = 0; i < kChunk / 32; ++i) {
            __m256i points = points32<L>(p, k, i), sign = points;
            if (HasSignedPoints<L>::value) {
                points = _mm256_abs_epi8(points);
            } else {
                sign = reinterpret_cast<__m256i>(c32::bits(load_unaligned<uint32_t>(masks + 4 * i)));
            }
            const __m256 lanes = scale_lanes<L>(d, i);
#pragma GCC unroll 4
            for (int t = 0; t < NT; ++t) {
                const auto* from = reinterpret_cast<const __m256i*>(x[t] + kChunk * c + 32 * i);
                const __m256i v = _mm256_loadu_si256(from);
                const __m256i a = HasSignedPoints<L>::value
                                      ? _mm256_sign_epi8(v, sign)
                                      : _mm256_sub_epi8(_mm256_xor_si256(v, sign), sign);
                const __m256i dot = _mm256_madd_epi16(_mm256_maddubs_epi16(points, a), _mm256_set1_epi16(1));
                const auto* x_scale = reinterpret_cast<const float*>(x[t] + at.scale) + 8 * c + i;
                const __m256 scale = _mm256_mul_ps(lanes, _mm256_broadcast_ss(x_scale));
                total[t][i & 1] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, total[t][i & 1]);
            }
        }
    }
#pragma GCC unroll 4
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

template <class L>
void gemv(const RowBlock& rows, const uint8_t* const* x, int n_tokens, float* out, uint8_t*) {
    multiply<L, kGemvTokens>(rows, x, n_tokens, out);
}

}  // namespace signed_points
}  // namespace ikpy

#endif
