// What newer CPUs of the AVX-512 tier add: byte permutations over two registers, bit fields to bytes (VBMI)
// and 8 x 8 bit matrices (GFNI).
#pragma once
#include <cstdint>

#if defined(__AVX512VNNI__)
#include <immintrin.h>

#define IKPY_VBMI __attribute__((target("avx512vbmi,gfni")))
// Steps of a kernel: values stay in registers.
#define IKPY_VBMI_INLINE __attribute__((target("avx512vbmi,gfni"), always_inline)) inline
#define IKPY_VBMI_LAMBDA __attribute__((always_inline, target("avx512vbmi,gfni")))

namespace ikpy {

struct Bytes64 {
    alignas(64) uint8_t at[64];
    template <class F>
    constexpr explicit Bytes64(F f) : at() {
        for (int i = 0; i < 64; ++i) at[i] = static_cast<uint8_t>(f(i));
    }
    __m512i load() const { return _mm512_load_si512(at); }
};

}  // namespace ikpy

#endif
