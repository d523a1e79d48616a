// What newer CPUs of the AVX-512 tier add: byte permutations over two registers, bit fields to bytes (VBMI)
// and 8 x 8 bit matrices (GFNI).
#pragma once

#if defined(__AVX512VNNI__)
#include <immintrin.h>

#define IKPY_VBMI __attribute__((target("avx512vbmi,gfni")))
// Steps of a kernel: values stay in registers.
#define IKPY_VBMI_INLINE __attribute__((target("avx512vbmi,gfni"), always_inline)) inline

#endif
