// Few tokens: every row is unpacked in registers and multiplied at once, bound by memory.
#pragma once
#include <algorithm>

#include "kernels/gemv/gemv_int8_avx2.hpp"
#include "kernels/matmul/activations.hpp"
#include "kernels/matmul/unpacked.hpp"
#include "kernels/matmul/weight_prefetch.hpp"
#include "kernels/simd/byte_dots.hpp"
#include "kernels/weights/weight_kernels.hpp"

namespace ikpy {

#if !defined(__AVX2__) || defined(__AVX512VNNI__)

// Rows of activations are multiplied as they are.
struct RowTokens {
    const uint8_t* const* x;
    const float* const* unused;
};
template <class U>
inline void find_sums(const TokenSet&, const ActQ8Layout&, uint8_t*, const float**) {}
template <class U, int NT>
constexpr size_t sums_work_bytes(int64_t) {
    return 0;
}

#endif

#if defined(__AVX512VNNI__)

constexpr int kGemvTokens = 4;
constexpr int kGemvTokensOfBytes = 6;  // codes of whole bytes need next to no unpacking
constexpr int kAmdTokensOfBytes = 0;
constexpr int kGemvTokensOfUnscaledBytes = kGemvTokensOfBytes;

// Lane index of the group a dword of codes 64 * i .. 64 * i + 63 belongs to.
template <int G>
inline __m512i group_lanes(int i) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_add_epi32(_mm512_srli_epi32(lane, G == 16 ? 2 : 3), _mm512_set1_epi32(i * 64 / G));
}

// What the sum of a group's activations is multiplied with, apart from -kZero of symmetric types.
template <class U>
inline __m512 zero_factors(const Codes512& w, __m512 d, __m512 scale) {
    if (U::kZero == 0) return _mm512_mul_ps(w.m, scale);
    // A missing step is a different code for zero, which costs one instruction for 256 codes.
    constexpr int kStep = StepOf<U>::kStep;
    return kStep > 0 ? _mm512_mask_mul_ps(d, w.shifted, d,
                                          _mm512_set1_ps(1.0f - static_cast<float>(kStep) / U::kZero))
                     : d;
}

// Lanes whose sum is the product of a row, from per-lane sums and the corrections of its groups.
template <class U>
inline __m512 lanes_of_row(const __m512* total, __m512 correction) {
    // 8 groups of 32 per chunk: the upper lanes mean nothing.
    if (U::kGroup == 32) correction = _mm512_insertf32x8(correction, _mm256_setzero_ps(), 1);
    const __m512 factor = _mm512_set1_ps(U::kZero > 0 ? -static_cast<float>(U::kZero) : 1.0f);
    return _mm512_fmadd_ps(correction, factor, _mm512_add_ps(total[0], total[1]));
}

// Adds one chunk: total += per-lane products of codes, correction += per-group products with the sums.
template <class U>
inline void add_chunk(const Codes512& w, const uint8_t* x, const ActQ8Layout& at, int64_t c, __m512* total,
                      __m512* correction) {
    constexpr int G = U::kGroup;
    __m512 scale =
        _mm512_castps256_ps512(_mm256_loadu_ps(reinterpret_cast<const float*>(x + at.scale) + 8 * c));
    __m512 sum;
    if (G == 16) {
        const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
        scale = _mm512_permutexvar_ps(twice, scale);
        sum = _mm512_loadu_ps(reinterpret_cast<const float*>(x + at.sum16) + 16 * c);
    } else {
        sum = _mm512_castps256_ps512(_mm256_loadu_ps(reinterpret_cast<const float*>(x + at.sum32) + 8 * c));
    }
    const __m512 d = _mm512_mul_ps(w.d, scale);
    *correction = _mm512_fmadd_ps(zero_factors<U>(w, d, scale), sum, *correction);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const __m512i v = _mm512_loadu_si512(x + kChunk * c + 64 * i);
        const __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), w.q[i], v);
        const __m512 lanes = _mm512_permutexvar_ps(group_lanes<G>(i), d);
        total[i & 1] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), lanes, total[i & 1]);
    }
}

template <class U>
inline Codes512 unpack_unshifted(const uint8_t* p, int k) {
    if constexpr (StepOf<U>::kStep > 0) {
        return U::unshifted(p);
    } else {
        return unpack_full<U>(p, k);
    }
}

template <class U, int NT>
void gemv_row(const uint8_t* row, int k, int64_t n_in, const RowTokens& tokens, const ActQ8Layout& at,
              float* out) {
    constexpr int64_t kBytes = kChunk / U::kBlock * U::kBlockBytes;
    __m512 total[NT][2], correction[NT];
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t) total[t][0] = total[t][1] = correction[t] = _mm512_setzero_ps();
    const int64_t n_full = n_in / kChunk;
    for (int64_t c = 0; c < n_full; ++c) {
        const uint8_t* p = row + c * kBytes;
        prefetch_weights<kBytes>(p);
        const Codes512 w = unpack_unshifted<U>(p, k);
#pragma GCC unroll 8
        for (int t = 0; t < NT; ++t) add_chunk<U>(w, tokens.x[t], at, c, total[t], &correction[t]);
    }
    if (n_full * kChunk < n_in) {
        const Codes512 w = unpack_tail<U>(row + n_full * kBytes, k, n_in - n_full * kChunk);
#pragma GCC unroll 8
        for (int t = 0; t < NT; ++t) add_chunk<U>(w, tokens.x[t], at, n_full, total[t], &correction[t]);
    }
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t)
        out[t * kBlockRows] = _mm512_reduce_add_ps(lanes_of_row<U>(total[t], correction[t]));
}

#elif !defined(__AVX2__)

constexpr int kGemvTokens = 1;
constexpr int kGemvTokensOfBytes = 1;
constexpr int kAmdTokensOfBytes = 0;
constexpr int kGemvTokensOfUnscaledBytes = 1;

template <class U, int NT>
void gemv_row(const uint8_t* row, int k, int64_t n_in, const RowTokens& tokens, const ActQ8Layout& at,
              float* out) {
    constexpr int G = U::kGroup, kCentre = U::kZero == 128 ? 128 : 0;
    float total[NT] = {};
    Chunk w;
    for (int64_t at_k = 0; at_k < n_in; at_k += kChunk) {
        unpack_chunk<U>(row + at_k / U::kBlock * U::kBlockBytes, k, n_in - at_k, &w);
        for (int t = 0; t < NT; ++t) {
            const auto* q = reinterpret_cast<const int8_t*>(tokens.x[t]) + at_k;
            for (int g = 0; g < kChunk / G; ++g) {
                int32_t dot = 0;
                for (int i = 0; i < G; ++i) dot += (w.codes[g * G + i] - kCentre) * q[g * G + i];
                const float sum =
                    load_unaligned<float>(tokens.x[t] + (G == 16 ? at.sum16 : at.sum32) + (at_k / G + g) * 4);
                if (U::kZero > 0 && U::kZero < 128) dot -= U::kZero * static_cast<int32_t>(sum);
                float value = w.d[g] * static_cast<float>(dot);
                if (U::kZero == 0) value += w.m[g] * sum;
                total[t] += value * load_unaligned<float>(tokens.x[t] + at.scale + (at_k + g * G) / 32 * 4);
            }
        }
    }
    for (int t = 0; t < NT; ++t) out[t * kBlockRows] = total[t];
}

#endif

// Row k of a group with the header that comes before its blocks.
template <class U, int NT>
void gemv_of_row(const uint8_t* group, int k, int64_t n_in, const RowTokens& tokens, const ActQ8Layout& at,
                 float* out) {
    gemv_row<U, NT>(group + RowHeader<U>::kBytes, k, n_in, tokens, at, out);
    if constexpr (RowHeader<U>::kBytes > 0) {
        const float scale = RowHeader<U>::scale(group, k);
        for (int t = 0; t < NT; ++t) out[t * kBlockRows] *= scale;
    }
}

template <class U, int NT>
void gemv_rows(const RowBlock& rows, const RowTokens& tokens, int n_tokens, const ActQ8Layout& at,
               float* out) {
    if (n_tokens == NT) {
        for (int h = 0; h < 2; ++h)
            for (int i = 0; i < rows.n[h]; ++i)
                gemv_of_row<U, NT>(rows.group(h, i, RowsOf<U>::kCount), i % RowsOf<U>::kCount, rows.n_in,
                                   tokens, at, out + h * kHalfRows + i);
    } else if constexpr (NT > 1) {
        gemv_rows<U, NT - 1>(rows, tokens, n_tokens, at, out);
    }
}

template <class U, int MaxTokens>
void quant_gemv(const RowBlock& rows, const TokenSet& tokens, float* out, uint8_t* work) {
    const ActQ8Layout at(rows.n_in);
    const float* sums[MaxTokens];
    find_sums<U>(tokens, at, work, sums);
    gemv_rows<U, MaxTokens>(rows, {tokens.x, sums}, tokens.n, at, out);
}

}  // namespace ikpy
