// Numbers as sums of two bf16 halves, hi + lo, in the order in which tile products pair them: dword j of 32
// columns holds columns j and j + 16, so that nothing has to be shuffled.
#pragma once
#include "kernels/simd/amx_tiles.hpp"

#if defined(__AVX512F__) && defined(__linux__)

namespace ikpy {

struct SplitPairs {
    __m512i hi, lo;
};

// 32 f16 values. Exact: hi has the upper 8 of the 11 significant bits, lo the others, and subnormals of f16
// are normal numbers of bf16.
inline SplitPairs split_f16(__m256i first, __m256i second) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
    const __m512 a = _mm512_cvtph_ps(first), b = _mm512_cvtph_ps(second);
    const __m512i hi_a = _mm512_and_si512(_mm512_castps_si512(a), upper);
    const __m512i hi_b = _mm512_and_si512(_mm512_castps_si512(b), upper);
    const __m512 lo_a = _mm512_sub_ps(a, _mm512_castsi512_ps(hi_a));
    const __m512 lo_b = _mm512_sub_ps(b, _mm512_castsi512_ps(hi_b));
    return {_mm512_or_si512(_mm512_srli_epi32(hi_a, 16), hi_b),
            _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(lo_a), 16), _mm512_castps_si512(lo_b))};
}

inline SplitPairs split_f16_at(const uint8_t* p) {
    return split_f16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
                     _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32)));
}

// Columns k .. k + 31 of a row of n f16 values, zeros beyond n.
inline SplitPairs split_f16_row(const uint8_t* row, int64_t k, int64_t n) {
    const uint8_t* p = row + 2 * k;
    if (n - k >= 32) return split_f16_at(p);
    const auto valid = static_cast<__mmask32>((uint64_t{1} << (n > k ? n - k : 0)) - 1);
    return split_f16(_mm256_maskz_loadu_epi16(static_cast<__mmask16>(valid), p),
                     _mm256_maskz_loadu_epi16(static_cast<__mmask16>(valid >> 16), p + 32));
}

// Whether a low part in tiles [n_steps][hi, lo] is not zero. Weights that were bf16 numbers before they were
// f16 have none, and need two products instead of three: 512 tokens take 0.87 of the time.
inline bool has_low_parts(const uint16_t* tiles, int64_t n_steps) {
    for (const uint16_t* lo = tiles + kTileValues; n_steps > 0; --n_steps, lo += 2 * kTileValues) {
        __m512i any = _mm512_loadu_si512(lo);
#pragma GCC unroll 16
        for (int i = 1; i < kTileHeight; ++i)
            any = _mm512_or_si512(any, _mm512_loadu_si512(lo + i * kTileDepth));
        if (_mm512_test_epi32_mask(any, any) != 0) return true;
    }
    return false;
}

}  // namespace ikpy

#endif
