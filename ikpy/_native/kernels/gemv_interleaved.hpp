// Products of row-interleaved types with few tokens: the codes of 16 rows are multiplied as they are
// unpacked, one row to a lane, so that the integer sums of a scale group are ready for its scales without any
// shuffling.
#pragma once
#include "kernels/interleaved_scales.hpp"
#include "kernels/weight_prefetch.hpp"

namespace ikpy {

#if defined(__AVX512VNNI__)

constexpr int kInterleavedTokens = 5;  // six are slower than panels: their sums leave the registers

// Takes codes as an unpacker finds them and adds their products to dot[t][scale group].
template <int Group, int NT>
struct GroupDots {
    __m512i (*dot)[32 / Group];
    const uint8_t* const* x;  // the first of the 32 columns
    int64_t k;

    void put(int column, Lanes v) const {
#pragma GCC unroll 8
        for (int t = 0; t < NT; ++t) {
            const __m512i four = _mm512_set1_epi32(load_unaligned<int32_t>(x[t] + k + column));
            __m512i& sum = dot[t][column / Group];
            sum = _mm512_dpbusd_epi32(sum, reinterpret_cast<__m512i>(v), four);
        }
    }
};

// Adds the products of 32 columns from column k of the activations on to total[t]; d and m: their scales and
// offsets.
template <class U, int NT>
inline void add_columns(const Quads<U::kRows>& quads, int ib, const float* d, const float* m,
                        const uint8_t* const* x, const ActQ8Layout& at, int64_t k, __m512* total) {
    constexpr int G = U::kGroup, kGroups = 32 / G;
    const int64_t sums = (G == 16 ? at.sum16 : at.sum32) + k / G * 4;
    const int64_t neg = (G == 16 ? at.neg16 : at.neg32) + k / G * 4;
    __m512i dot[NT][kGroups];
    for (int t = 0; t < NT; ++t)
        for (int g = 0; g < kGroups; ++g)
            dot[t][g] = U::kZero > 0 ? _mm512_set1_epi32(load_unaligned<int32_t>(x[t] + neg + 4 * g))
                                     : _mm512_setzero_si512();
    U::codes(quads, ib, GroupDots<G, NT>{dot, x, k});
    for (int t = 0; t < NT; ++t) {
        __m512 value = _mm512_setzero_ps();
        for (int g = 0; g < kGroups; ++g) {
            value = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[t][g]), _mm512_load_ps(d + g * kHalfRows), value);
            if (U::kZero == 0)
                value = _mm512_fmadd_ps(_mm512_load_ps(m + g * kHalfRows),
                                        _mm512_set1_ps(load_unaligned<float>(x[t] + sums + 4 * g)), value);
        }
        const float scale = load_unaligned<float>(x[t] + at.scale + k / 32 * 4);
        total[t] = _mm512_fmadd_ps(value, _mm512_set1_ps(scale), total[t]);
    }
}

// Where the bytes of 16 rows lie: groups of rows one after the other, each of them read from its first block
// to the last at the same time as the others.
template <int R>
struct RowGroups {
    const uint8_t* first[kHalfRows / R];
    int64_t bytes;  // of a group

    // What to add to an address `ahead` bytes after block `offset` of a group: after the end of a group come
    // the next 16 rows.
    int64_t skip(int64_t offset, int64_t ahead) const {
        return offset + ahead < bytes ? 0 : (kHalfRows / R - 1) * bytes;
    }
};

// Adds the products of one block of 16 rows to total[t].
template <class U, int NT>
inline void add_block(const RowGroups<U::kRows>& groups, const uint8_t* const* x, const ActQ8Layout& at,
                      int64_t k, __m512* total) {
    constexpr int R = U::kRows, kParts = U::kBlock / 32, kPartBytes = U::kBlockBytes / kParts;
    constexpr int kScales = U::kBlock / U::kGroup * kHalfRows;
    const int64_t offset = k / U::kBlock * U::kBlockBytes;
    alignas(64) float d[kScales], m[U::kZero == 0 ? kScales : 1];
    Quads<R> quads;
    for (int q = 0; q < kQuads; ++q) {
        quads.block[q] = groups.first[4 * q / R] + offset;
        quads.place[q] = q % (R / 4);
    }
    block_scales<U>(quads, d, m);
    const int64_t far = groups.skip(offset, kPrefetchIntoL2), near = groups.skip(offset, kPrefetchIntoL1);
    for (int ib = 0; ib < kParts; ++ib) {
        for (int q = 0; q < kQuads; q += R / 4) {
            prefetch_weights_into_l2<kPartBytes>(quads.block[q] + ib * kPartBytes + far);
            prefetch_weights_into_l1<kPartBytes>(quads.block[q] + ib * kPartBytes + near);
        }
        const int scales = ib * kScales / kParts;
        add_columns<U, NT>(quads, ib, d + scales, m + (U::kZero == 0 ? scales : 0), x, at, k + 32 * ib,
                           total);
    }
}

// out[t * kBlockRows + i]: products of the 16 rows of half h with n_tokens <= NT tokens, without row scales.
template <class U, int NT>
void interleaved_dots(const RowBlock& rows, int h, const uint8_t* const* x, int n_tokens,
                      const ActQ8Layout& at, float* out) {
    if constexpr (NT > 1)
        if (n_tokens < NT) return interleaved_dots<U, NT - 1>(rows, h, x, n_tokens, at, out);
    RowGroups<U::kRows> groups;
    groups.bytes = U::kRows * rows.stride;
    for (int i = 0; i < kHalfRows / U::kRows; ++i)
        groups.first[i] = rows.group(h, i * U::kRows, U::kRows) + RowHeader<U>::kBytes;
    __m512 total[NT];
    for (int t = 0; t < NT; ++t) total[t] = _mm512_setzero_ps();
    for (int64_t k = 0; k < rows.n_in; k += U::kBlock) add_block<U, NT>(groups, x, at, k, total);
    for (int t = 0; t < NT; ++t) _mm512_storeu_ps(out + t * kBlockRows, total[t]);
}

#else

constexpr int kInterleavedTokens = 4;

#endif

}  // namespace ikpy
