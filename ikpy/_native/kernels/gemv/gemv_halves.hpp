// Few tokens times types with groups of 32 codes, whose first and last 16 are unpacked into different
// vectors.
//
// Each vector holds a half of four groups, so that the dot products of both halves meet in the same lanes:
// two conversions and multiplications with scales per 256 codes instead of four, and nibbles need not be
// brought into natural order. Instead the activations are rearranged, once per thread and product.
#pragma once
#include <algorithm>

#include "kernels/gemv/gemv_int8.hpp"
#include "kernels/simd/lane_sums.hpp"

namespace ikpy {

// Whether U has halves(): Codes512 whose vectors 2 * i and 2 * i + 1 hold the first and the last half of the
// groups pair_group(U::kPairs, i, 0 .. 3).
template <class U, class = void>
struct HasHalves : std::false_type {};

#if defined(__AVX512VNNI__)

template <class U>
struct HasHalves<U, std::void_t<decltype(&U::halves)>> : std::true_type {};

namespace halves {

constexpr int pair_group(Pairs pairs, int i, int j) {
    return pairs == Pairs::kConsecutive ? 4 * i + j : 2 * j + i;
}

// Brings 256 activations into the order of the codes.
template <Pairs P>
inline void rearrange(const uint8_t* x, uint8_t* out) {
    constexpr int kFirst = 0x88, kLast = 0xDD;  // even and odd quarters of two vectors
    __m512i v[4];
    for (int i = 0; i < 4; ++i) v[i] = _mm512_loadu_si512(x + 64 * i);
    if (P == Pairs::kAlternating) {
        constexpr int kEvenGroups = 0x44, kOddGroups = 0xEE;
        const __m512i a = _mm512_shuffle_i64x2(v[0], v[1], kEvenGroups),
                      b = _mm512_shuffle_i64x2(v[2], v[3], kEvenGroups);
        v[2] = _mm512_shuffle_i64x2(v[0], v[1], kOddGroups);
        v[3] = _mm512_shuffle_i64x2(_mm512_loadu_si512(x + 128), v[3], kOddGroups);
        v[0] = a;
        v[1] = b;
    }
    for (int i = 0; i < 4; i += 2) {
        _mm512_store_si512(out + 64 * i, _mm512_shuffle_i64x2(v[i], v[i + 1], kFirst));
        _mm512_store_si512(out + 64 * i + 64, _mm512_shuffle_i64x2(v[i], v[i + 1], kLast));
    }
}

// The group of every lane of the sums of pair i.
template <Pairs P>
inline __m512i lanes_of_pair(int i) {
    const int g0 = pair_group(P, i, 0), g1 = pair_group(P, i, 1), g2 = pair_group(P, i, 2),
              g3 = pair_group(P, i, 3);
    return _mm512_setr_epi32(g0, g0, g0, g0, g1, g1, g1, g1, g2, g2, g2, g2, g3, g3, g3, g3);
}

// Adds one chunk, like add_chunk. x: scales and sums of the activations; codes: rearranged.
template <class U>
inline void add_halves(const Codes512& w, const uint8_t* x, const uint8_t* codes, const ActQ8Layout& at,
                       int64_t c, __m512* total, __m512* correction) {
    const auto eight = [&](int64_t field) {
        return _mm512_castps256_ps512(_mm256_loadu_ps(reinterpret_cast<const float*>(x + field) + 8 * c));
    };
    const __m512 scale = eight(at.scale), d = _mm512_mul_ps(w.d, scale);
    *correction = _mm512_fmadd_ps(zero_factors<U>(w, d, scale), eight(at.sum32), *correction);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        const uint8_t* v = codes + kChunk * c + 128 * i;
        __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), w.q[2 * i], _mm512_load_si512(v));
        dot = _mm512_dpbusd_epi32(dot, w.q[2 * i + 1], _mm512_load_si512(v + 64));
        const __m512 lanes = _mm512_permutexvar_ps(lanes_of_pair<U::kPairs>(i), d);
        total[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), lanes, total[i]);
    }
}

// Products of a row with NT tokens, without its scale, in the lanes of out[t * kHalfRows].
template <class U, int NT>
inline void multiply_row(const uint8_t* p, int64_t n_in, const uint8_t* const* x, const uint8_t* const* codes,
                         const ActQ8Layout& at, __m512* out) {
    constexpr int64_t kBytes = kChunk / U::kBlock * U::kBlockBytes;
    __m512 total[NT][2], correction[NT];
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t) total[t][0] = total[t][1] = correction[t] = _mm512_setzero_ps();
    for (int64_t k = 0; k < n_in; k += kChunk, p += kBytes) {
        prefetch_weights<kBytes>(p);
        const Codes512 w = U::kBlock == kChunk || n_in - k >= kChunk
                               ? U::halves(p)
                               : unpack_short<U>(U::halves, p, n_in - k);
#pragma GCC unroll 8
        for (int t = 0; t < NT; ++t)
            add_halves<U>(w, x[t], codes[t], at, k / kChunk, total[t], &correction[t]);
    }
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t) out[t * kHalfRows] = lanes_of_row<U>(total[t], correction[t]);
}

// Lanes are summed for 16 rows at once: sums at the end of every row of 1024 columns took 5 % of the time.
template <class U, int NT>
void multiply_half(const RowBlock& rows, int h, const uint8_t* const* x, const uint8_t* const* codes,
                   const ActQ8Layout& at, float* out) {
    using Header = RowHeader<U>;
    __m512 lanes[NT][kHalfRows] = {};
    for (int i = 0; i < rows.n[h]; ++i)
        multiply_row<U, NT>(rows.row(h, i) + Header::kBytes, rows.n_in, x, codes, at, &lanes[0][i]);
    for (int t = 0; t < NT; ++t) {
        float* to = out + t * kBlockRows + h * kHalfRows;
        _mm512_storeu_ps(to, sums16(lanes[t]));
        if constexpr (Header::kBytes > 0)
            for (int i = 0; i < rows.n[h]; ++i) to[i] *= Header::scale(rows.row(h, i), 0);
    }
}

template <class U, int NT>
void multiply(const RowBlock& rows, const TokenSet& tokens, float* out, uint8_t* work) {
    if (tokens.n < NT) {
        if constexpr (NT > 1) multiply<U, NT - 1>(rows, tokens, out, work);
        return;
    }
    const ActQ8Layout at(rows.n_in);
    const uint8_t* codes[NT];
    for (int t = 0; t < NT; ++t) {
        uint8_t* to = work + t * at.n;
        if (tokens.fresh)
            for (int64_t k = 0; k < at.n; k += kChunk) rearrange<U::kPairs>(tokens.x[t] + k, to + k);
        codes[t] = to;
    }
    for (int h = 0; h < 2; ++h)
        if (rows.n[h] > 0) multiply_half<U, NT>(rows, h, tokens.x, codes, at, out);
}

}  // namespace halves

#endif

}  // namespace ikpy
