// Sign masks of the grid types from indices of even parity, and their odd scales.
#pragma once
#include "kernels/matmul/unpacked.hpp"
#include "unpack/wide.hpp"

namespace ikpy {
namespace grid {

constexpr uint64_t kOnes = 0x0101010101010101;

// Four 7-bit fields as bytes.
inline uint64_t seven_bit_fields(uint32_t v) {
#if defined(__BMI2__)
    return _pdep_u64(v, 0x7F7F7F7F);
#else
    return (v & 0x7F) | (v << 1 & 0x7F00) | (v << 2 & 0x7F0000) | (v << 3 & 0x7F000000);
#endif
}

// Sign indices of 7 bits to masks of even parity.
inline uint64_t even_masks(uint64_t indices) {
    uint64_t parity = indices ^ indices >> 4;
    parity ^= parity >> 2;
    parity ^= parity >> 1;
    return indices | (parity & kOnes) << 7;
}

// Sign codes z of the interleaved types: mask = z ^ z << 1.
inline uint64_t code_masks(uint64_t codes) { return codes ^ codes << 1; }

// Eight words' upper seven bits as bytes.
inline uint64_t upper_sevens(const uint8_t* words, int stride) {
#if defined(__AVX2__)
    const __m128i v = _mm_set_epi64x(load_unaligned<int64_t>(words + stride), load_unaligned<int64_t>(words));
    const __m128i sevens = _mm_srli_epi16(v, 9);
    return static_cast<uint64_t>(_mm_cvtsi128_si64(_mm_packus_epi16(sevens, sevens)));
#else
    uint64_t fields = 0;
    for (int j = 0; j < 8; ++j)
        fields |= static_cast<uint64_t>(words[(j >> 2) * stride + 2 * (j & 3) + 1] >> 1) << (8 * j);
    return fields;
#endif
}

#if defined(__AVX2__)
// Sign masks of all 32 8-groups from 7-bit indices: the eighth bit makes their parity even. In general
// registers this took longer than the gathers (IQ2_XXS 9.4e9 weights/s).
inline __m256i even_masks32(__m256i indices) {
    const __m256i parity = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0));
    const __m256i nibble = _mm256_set1_epi8(15);
    const __m256i low = _mm256_shuffle_epi8(parity, _mm256_and_si256(indices, nibble));
    const __m256i high = _mm256_shuffle_epi8(parity, _mm256_and_si256(_mm256_srli_epi16(indices, 4), nibble));
    return _mm256_or_si256(indices, _mm256_xor_si256(low, high));
}

// The same for dwords of four indices and four other bits.
inline __m256i even_masks_of_dwords(__m256i v) {
    const __m256i a = _mm256_and_si256(v, _mm256_set1_epi32(0x7F));
    const __m256i b = _mm256_and_si256(_mm256_slli_epi32(v, 1), _mm256_set1_epi32(0x7F00));
    const __m256i c = _mm256_and_si256(_mm256_slli_epi32(v, 2), _mm256_set1_epi32(0x7F0000));
    const __m256i d = _mm256_and_si256(_mm256_slli_epi32(v, 3), _mm256_set1_epi32(0x7F000000));
    return even_masks32(_mm256_or_si256(_mm256_or_si256(a, b), _mm256_or_si256(c, d)));
}

// at: aligned to 32 bytes.
inline void put(__m256i masks, void* at) { _mm256_store_si256(static_cast<__m256i*>(at), masks); }
#endif

inline float odd(int s) { return static_cast<float>(2 * s + 1); }

#if defined(__AVX512VNNI__)
// Odd scales 2 * s + 1 of 16 (or 8) lanes.
inline __m512 odd_scales(float scale, __m512i s) {
    const __m512i odd = _mm512_add_epi32(_mm512_add_epi32(s, s), _mm512_set1_epi32(1));
    return wide::scaled(_mm512_set1_ps(scale), odd);
}
inline __m512i dword_nibbles(uint32_t v) {
    const __m512i counts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 0, 0, 0, 0, 0, 0, 0);
    return _mm512_and_si512(_mm512_srlv_epi32(_mm512_set1_epi32(static_cast<int32_t>(v)), counts),
                            _mm512_set1_epi32(15));
}
#endif

}  // namespace grid
}  // namespace ikpy
