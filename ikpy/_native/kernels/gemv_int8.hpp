// Few tokens: every row is unpacked in registers and multiplied at once, bound by memory.
#pragma once
#include <algorithm>

#include "kernels/activations.hpp"
#include "kernels/byte_dots.hpp"
#include "kernels/unpacked.hpp"
#include "kernels/weight_kernels.hpp"
#include "kernels/weight_prefetch.hpp"

namespace ikpy {

#if defined(__AVX512VNNI__)

constexpr int kGemvTokens = 4;
constexpr int kGemvTokensOfBytes = 6;  // codes of whole bytes need next to no unpacking
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
void gemv_row(const uint8_t* row, int k, int64_t n_in, const uint8_t* const* x, const ActQ8Layout& at,
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
        for (int t = 0; t < NT; ++t) add_chunk<U>(w, x[t], at, c, total[t], &correction[t]);
    }
    if (n_full * kChunk < n_in) {
        const Codes512 w = unpack_tail<U>(row + n_full * kBytes, k, n_in - n_full * kChunk);
#pragma GCC unroll 8
        for (int t = 0; t < NT; ++t) add_chunk<U>(w, x[t], at, n_full, total[t], &correction[t]);
    }
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t)
        out[t * kBlockRows] = _mm512_reduce_add_ps(lanes_of_row<U>(total[t], correction[t]));
}

#else

#if defined(__AVX2__)

constexpr int kGemvTokens = 8;
constexpr int kGemvTokensOfBytes = 2;
constexpr int kGemvTokensOfUnscaledBytes = 7;

// Whether codes beyond 127 are multiplied as signed values; dot products of bytes take them as they are.
template <class U>
constexpr bool kSignedCodes = U::kZero == 128 && !kByteDots;

// 32 codes as factors of 8-bit products. Signed values are multiplied as |w| * sign(x, w): two products stay
// below 2^15, so the 16-bit pair sums are exact.
template <bool Signed>
struct Factors {
    __m256i magnitude, sign;
    explicit Factors(__m256i w) {
        sign = Signed ? _mm256_xor_si256(w, _mm256_set1_epi8(-128)) : w;
        magnitude = Signed ? _mm256_abs_epi8(sign) : w;
    }
    // Dot products in eight lanes.
    __m256i dot(__m256i x) const {
        const __m256i v = Signed ? _mm256_sign_epi8(x, sign) : x;
        return add_dots(_mm256_setzero_si256(), magnitude, v);
    }
};

// The two scales of 32 codes in groups of 16 in the lanes of their products.
template <class U>
inline __m256 scale_lanes(const float* d, int i) {
    if (U::kGroup == 32) return _mm256_broadcast_ss(d + i);
    const __m256d pair = _mm256_broadcast_sd(reinterpret_cast<const double*>(d + 2 * i));
    return _mm256_permutevar_ps(_mm256_castpd_ps(pair), _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
}

// Scales of a chunk times those of the activations; returns what their offsets add to the product.
template <class U>
inline __m256 scale_products(const Chunk& w, const float* x_scale, const float* x_sum, float* scale) {
    constexpr int kVectors = kChunk / U::kGroup / 8;
    const __m256 xs = _mm256_loadu_ps(x_scale);
    __m256 offset = _mm256_setzero_ps();
    for (int j = 0; j < kVectors; ++j) {
        const __m256i first = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
        const __m256 s =
            kVectors == 1 ? xs
                          : _mm256_permutevar8x32_ps(xs, _mm256_add_epi32(first, _mm256_set1_epi32(4 * j)));
        const __m256 d = _mm256_mul_ps(_mm256_load_ps(w.d + 8 * j), s);
        _mm256_store_ps(scale + 8 * j, d);
        const __m256 m = U::kZero > 0 ? d : _mm256_mul_ps(_mm256_load_ps(w.m + 8 * j), s);
        if (!kSignedCodes<U>) offset = _mm256_fmadd_ps(m, _mm256_loadu_ps(x_sum + 8 * j), offset);
    }
    return offset;
}

// The same for blocks shorter than a chunk. Their scales are read as they were written: a vector load of
// floats that were stored one by one waits until they reach the cache.
template <class U>
inline __m256 short_scale_products(const Chunk& w, const float* x_scale, const float* x_sum, float* scale) {
    float offset = 0.0f;
    for (int g = 0; g < kChunk / U::kGroup; ++g) {
        const float s = x_scale[g * U::kGroup / 32];
        scale[g] = w.d[g] * s;
        if (!kSignedCodes<U>) offset += (U::kZero > 0 ? scale[g] : w.m[g] * s) * x_sum[g];
    }
    return _mm256_zextps128_ps256(_mm_set_ss(offset));
}

// Products of a chunk with NT tokens. The codes are loaded and made factors once for all of them.
template <class U, int NT>
inline void add_chunk(const Chunk& w, const uint8_t* const* x, const ActQ8Layout& at, int64_t k,
                      __m256* total, __m256* offset) {
    constexpr bool kSigned = kSignedCodes<U>;
    alignas(32) float products[UnitScales<U>::value ? 1 : NT][16];
    const float* scale[NT];
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t) {
        const auto* x_scale = reinterpret_cast<const float*>(x[t] + at.scale) + k / 32;
        const auto* x_sum =
            reinterpret_cast<const float*>(x[t] + (U::kGroup == 32 ? at.sum32 : at.sum16)) + k / U::kGroup;
        if constexpr (UnitScales<U>::value) {
            scale[t] = x_scale;
            if (!kSigned)
                offset[t] = _mm256_fmadd_ps(_mm256_loadu_ps(x_scale), _mm256_loadu_ps(x_sum), offset[t]);
        } else {
            scale[t] = products[t];
            const __m256 added = U::kBlock == kChunk
                                     ? scale_products<U>(w, x_scale, x_sum, products[t])
                                     : short_scale_products<U>(w, x_scale, x_sum, products[t]);
            if (!kSigned) offset[t] = _mm256_add_ps(offset[t], added);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kChunk / 32; ++i) {
        const Factors<kSigned> factors(_mm256_load_si256(reinterpret_cast<const __m256i*>(w.codes + 32 * i)));
#pragma GCC unroll 8
        for (int t = 0; t < NT; ++t) {
            const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x[t] + k + 32 * i));
            total[t] =
                _mm256_fmadd_ps(_mm256_cvtepi32_ps(factors.dot(v)), scale_lanes<U>(scale[t], i), total[t]);
        }
    }
}

inline float sum_of_lanes(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

template <class U, int NT>
void gemv_row(const uint8_t* row, int k, int64_t n_in, const uint8_t* const* x, const ActQ8Layout& at,
              float* out) {
    constexpr int64_t kBytes = kChunk / U::kBlock * U::kBlockBytes;
    __m256 total[NT], offset[NT];
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t) total[t] = offset[t] = _mm256_setzero_ps();
    Chunk w;
    int64_t at_k = 0;
    for (; at_k + kChunk <= n_in; at_k += kChunk, row += kBytes) {
        prefetch_weights<kBytes>(row);
        unpack_whole_chunk<U>(row, k, &w);
        add_chunk<U, NT>(w, x, at, at_k, total, offset);
    }
    if (at_k < n_in) {
        unpack_chunk<U>(row, k, n_in - at_k, &w);
        add_chunk<U, NT>(w, x, at, at_k, total, offset);
    }
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t)
        out[t * kBlockRows] = sum_of_lanes(_mm256_fmadd_ps(
            offset[t], _mm256_set1_ps(U::kZero > 0 ? -static_cast<float>(U::kZero) : 1.0f), total[t]));
}

#else

constexpr int kGemvTokens = 1;
constexpr int kGemvTokensOfBytes = 1;
constexpr int kGemvTokensOfUnscaledBytes = 1;

template <class U, int NT>
void gemv_row(const uint8_t* row, int k, int64_t n_in, const uint8_t* const* x, const ActQ8Layout& at,
              float* out) {
    constexpr int G = U::kGroup, kCentre = U::kZero == 128 ? 128 : 0;
    float total[NT] = {};
    Chunk w;
    for (int64_t at_k = 0; at_k < n_in; at_k += kChunk) {
        unpack_chunk<U>(row + at_k / U::kBlock * U::kBlockBytes, k, n_in - at_k, &w);
        for (int t = 0; t < NT; ++t) {
            const auto* q = reinterpret_cast<const int8_t*>(x[t]) + at_k;
            for (int g = 0; g < kChunk / G; ++g) {
                int32_t dot = 0;
                for (int i = 0; i < G; ++i) dot += (w.codes[g * G + i] - kCentre) * q[g * G + i];
                const float sum =
                    load_unaligned<float>(x[t] + (G == 16 ? at.sum16 : at.sum32) + (at_k / G + g) * 4);
                if (U::kZero > 0 && U::kZero < 128) dot -= U::kZero * static_cast<int32_t>(sum);
                float value = w.d[g] * static_cast<float>(dot);
                if (U::kZero == 0) value += w.m[g] * sum;
                total[t] += value * load_unaligned<float>(x[t] + at.scale + (at_k + g * G) / 32 * 4);
            }
        }
    }
    for (int t = 0; t < NT; ++t) out[t * kBlockRows] = total[t];
}

#endif

#endif

// Row k of a group with the header that comes before its blocks.
template <class U, int NT>
void gemv_of_row(const uint8_t* group, int k, int64_t n_in, const uint8_t* const* x, const ActQ8Layout& at,
                 float* out) {
    gemv_row<U, NT>(group + RowHeader<U>::kBytes, k, n_in, x, at, out);
    if constexpr (RowHeader<U>::kBytes > 0) {
        const float scale = RowHeader<U>::scale(group, k);
        for (int t = 0; t < NT; ++t) out[t * kBlockRows] *= scale;
    }
}

template <class U, int NT>
void gemv_rows(const RowBlock& rows, const uint8_t* const* x, int n_tokens, const ActQ8Layout& at,
               float* out) {
    if (n_tokens == NT) {
        for (int h = 0; h < 2; ++h)
            for (int i = 0; i < rows.n[h]; ++i)
                gemv_of_row<U, NT>(rows.group(h, i, RowsOf<U>::kCount), i % RowsOf<U>::kCount, rows.n_in, x,
                                   at, out + h * kHalfRows + i);
    } else if constexpr (NT > 1) {
        gemv_rows<U, NT - 1>(rows, x, n_tokens, at, out);
    }
}

template <class U, int MaxTokens>
void quant_gemv(const RowBlock& rows, const TokenSet& tokens, float* out, uint8_t*) {
    gemv_rows<U, MaxTokens>(rows, tokens.x, tokens.n, ActQ8Layout(rows.n_in), out);
}

}  // namespace ikpy
