// Dot products of pairs of bf16 numbers on vectors (AVX512-BF16), in functions marked IKPY_BF16.
#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>

#define IKPY_BF16 __attribute__((target("avx512bf16")))

namespace ikpy {

IKPY_BF16 inline __m512 add_bf16_dots(__m512 sum, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

}  // namespace ikpy

#endif
