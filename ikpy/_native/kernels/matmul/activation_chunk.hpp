// 256 activations at once, in the order of ActQ8Layout, on AVX-512: the largest magnitudes of eight groups
// meet in one vector, and so do the sums of sixteen. 0.25 ns per activation instead of 1.06 as
// loops over a group, which the compiler turns into shuffles.
#pragma once
#include "kernels/matmul/activations.hpp"

#if defined(__AVX512VNNI__)

// GCC 12 reports variables of its own intrinsics as uninitialized.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

namespace ikpy {

// Lane i of the result: the largest unsigned number of a[i].
inline __m256i largest_of_each(const __m512i* a) {
    const auto pair = [](__m512i x, __m512i y) {
        return _mm512_max_epu32(_mm512_unpacklo_epi32(x, y), _mm512_unpackhi_epi32(x, y));
    };
    const auto quad = [](__m512i x, __m512i y) {
        return _mm512_max_epu32(_mm512_unpacklo_epi64(x, y), _mm512_unpackhi_epi64(x, y));
    };
    const __m512i low = quad(pair(a[0], a[1]), pair(a[2], a[3])),
                  high = quad(pair(a[4], a[5]), pair(a[6], a[7]));
    const __m512i halves =
        _mm512_max_epu32(_mm512_shuffle_i32x4(low, high, 0x44), _mm512_shuffle_i32x4(low, high, 0xEE));
    const __m512i all = _mm512_max_epu32(halves, _mm512_shuffle_i32x4(halves, halves, 0xB1));
    return _mm512_castsi512_si256(_mm512_shuffle_i32x4(all, all, 0x08));
}

// Lane 4 * q + r of the result: the sum of lanes r, 4 + r, 8 + r and 12 + r of a[q].
inline __m512i int_sums_of_quads(const __m512i* a) {
    const auto halves = [](__m512i x, __m512i y) {
        return _mm512_add_epi32(_mm512_shuffle_i32x4(x, y, 0x88), _mm512_shuffle_i32x4(x, y, 0xDD));
    };
    return halves(halves(a[0], a[1]), halves(a[2], a[3]));
}

// amax / 127, rounded to bf16, and its inverse; both 0 where the inverse would overflow.
inline __m256 chunk_scales(__m256i top, __m256* inverse) {
    const __m256 amax = _mm256_castsi256_ps(top);
    const __mmask8 counts = _mm256_cmp_ps_mask(amax, _mm256_set1_ps(1e-35f), _CMP_GT_OQ);
    const __m256i bits = _mm256_castps_si256(_mm256_div_ps(amax, _mm256_set1_ps(127.0f)));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7FFF));
    const __m256i scale = _mm256_maskz_and_epi32(counts, up, _mm256_set1_epi32(static_cast<int>(0xFFFF0000)));
    *inverse = _mm256_maskz_div_ps(counts, _mm256_set1_ps(1.0f), _mm256_castsi256_ps(scale));
    return _mm256_castsi256_ps(scale);
}

// Quantizes the columns of chunk c of a row that starts at x; false, and nothing is written, where one of
// them is not finite.
inline bool quantize_chunk(const float* x, int64_t c, const ActQ8Layout& at, uint8_t* out) {
    x += 256 * c;
    __m512i top[8];
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g)
        top[g] = _mm512_max_epu32(_mm512_slli_epi32(_mm512_loadu_si512(x + 32 * g), 1),
                                  _mm512_slli_epi32(_mm512_loadu_si512(x + 32 * g + 16), 1));
    const __m256i largest = _mm256_srli_epi32(largest_of_each(top), 1);
    if (_mm256_cmpge_epi32_mask(largest, _mm256_set1_epi32(0x7F800000))) return false;
    __m256 inverse;
    _mm256_storeu_ps(reinterpret_cast<float*>(out + at.scale) + 8 * c, chunk_scales(largest, &inverse));
    alignas(32) float factor[8];
    _mm256_store_ps(factor, inverse);

    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i sums[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const auto sixteen = [&](int j) {  // rounded half to even
            return _mm512_cvtps_epi32(
                _mm512_mul_ps(_mm512_loadu_ps(x + 64 * i + 16 * j), _mm512_set1_ps(factor[2 * i + j / 2])));
        };
        const __m512i bytes = _mm512_packs_epi16(_mm512_packs_epi32(sixteen(0), sixteen(1)),
                                                 _mm512_packs_epi32(sixteen(2), sixteen(3)));
        _mm512_storeu_si512(out + 256 * c + 64 * i, _mm512_permutexvar_epi32(order, bytes));
        sums[i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), bytes);
    }
    const __m512i sum16 = int_sums_of_quads(sums);
    const __m256i sum32 = _mm512_cvtepi64_epi32(_mm512_add_epi64(sum16, _mm512_srli_epi64(sum16, 32)));
    const __m512i start16 = _mm512_sub_epi32(_mm512_set1_epi32(kStartBits), _mm512_slli_epi32(sum16, 7));
    const __m256i start32 = _mm256_sub_epi32(_mm256_set1_epi32(kStartBits), _mm256_slli_epi32(sum32, 7));
    _mm512_storeu_ps(out + at.sum16 + 64 * c, _mm512_cvtepi32_ps(sum16));
    _mm512_storeu_si512(out + at.start16 + 64 * c, start16);
    _mm256_storeu_ps(reinterpret_cast<float*>(out + at.sum32) + 8 * c, _mm256_cvtepi32_ps(sum32));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + at.start32) + c, start32);
    return true;
}

}  // namespace ikpy

#endif
