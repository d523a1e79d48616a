// Floats as sums of two bf16 halves, hi + lo: 16 significant bits.
#pragma once
#include "kernels/simd/amx_tiles.hpp"

#if defined(__AVX512F__) && defined(__linux__)

namespace ikpy {

struct FloatHalves {
    __m512 hi, lo;  // hi is a bf16 number, lo what it lacks
};

inline FloatHalves split_rounded(__m512 x) {
    const __m512i rounded = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
    const __m512 hi = _mm512_castsi512_ps(_mm512_and_si512(rounded, _mm512_set1_epi32(int(0xFFFF0000))));
    return {hi, _mm512_sub_ps(x, hi)};
}

}  // namespace ikpy

#endif
