// Floats as sums of two halves (f16), hi + lo: 22 significant bits within the range of halves.
#pragma once
#include "kernels/simd/amx_tiles.hpp"

#if defined(__AVX512F__) && defined(__linux__)

namespace ikpy {

// Pairs of words, the first in the low half of dwords.
inline __m512i interleaved_words(__m256i first, __m256i second) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i order =
        _mm512_or_si512(lanes, _mm512_add_epi32(_mm512_slli_epi32(lanes, 16), _mm512_set1_epi32(16 << 16)));
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
    return _mm512_permutexvar_epi16(order, both);
}

inline __m512i f16_pairs(__m512 first, __m512 second) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return interleaved_words(_mm512_cvtps_ph(first, kNearest), _mm512_cvtps_ph(second, kNearest));
}

struct HalfPairs {
    __m512i hi, lo;
};

// Pairs of floats as pairs of halves: hi has the upper 11 significant bits.
inline HalfPairs split_to_f16(__m512 first, __m512 second) {
    const __m512i upper = _mm512_set1_epi32(int(0xFFFFE000));
    const __m512 a = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(first), upper));
    const __m512 b = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(second), upper));
    return {f16_pairs(a, b), f16_pairs(_mm512_sub_ps(first, a), _mm512_sub_ps(second, b))};
}

}  // namespace ikpy

#endif
