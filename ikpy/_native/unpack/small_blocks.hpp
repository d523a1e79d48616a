// Unpackers of MXFP4, Q1_0_G128, IQ1_BN and IQ2_BN. Layouts: quant-formats sections 6.3 to 6.5 and 6.19.
#pragma once
#include "kernels/unpacked.hpp"
#include "unpack/wide.hpp"

namespace ikpy {

// kvalues_mxfp4 + 12 (the table is twice the e2m1 value).
alignas(16) inline constexpr uint8_t kMxfp4Codes[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                        12, 11, 10, 9,  8,  6,  4,  0};

// 2^(e - 128); subnormal for e = 0 and 1.
inline float half_power(uint8_t e) {
    const uint32_t bits = e > 1 ? static_cast<uint32_t>(e - 1) << 23 : 0x00200000u << e;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

struct UnpackMXFP4 {
    static constexpr int kType = 39, kGroup = 32, kBlock = 32, kBlockBytes = 17, kZero = 12;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        for (int j = 0; j < 16; ++j) {
            codes[j] = kMxfp4Codes[p[1 + j] & 15];
            codes[j + 16] = kMxfp4Codes[p[1 + j] >> 4];
        }
        *d = half_power(*p);
    }
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p) {
        const __m512i table = wide::table16(kMxfp4Codes);
        Codes512 r;
        for (int i = 0; i < 4; ++i)
            r.q[i] = _mm512_shuffle_epi8(table,
                                         wide::nibbles16(wide::lanes_aabb(p + 34 * i + 1, p + 34 * i + 18)));
        const __m128i e =
            _mm_setr_epi8(static_cast<char>(p[0]), static_cast<char>(p[17]), static_cast<char>(p[34]),
                          static_cast<char>(p[51]), static_cast<char>(p[68]), static_cast<char>(p[85]),
                          static_cast<char>(p[102]), static_cast<char>(p[119]), 0, 0, 0, 0, 0, 0, 0, 0);
        const __m512i exponent = _mm512_cvtepu8_epi32(e), one = _mm512_set1_epi32(1);
        const __m512i small = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), exponent);
        r.d = _mm512_castsi512_ps(_mm512_mask_slli_epi32(small, _mm512_cmpgt_epi32_mask(exponent, one),
                                                         _mm512_sub_epi32(exponent, one), 23));
        return r;
    }
#endif
};

struct UnpackQ1_0_G128 {
    static constexpr int kType = 41, kGroup = 32, kBlock = 128, kBlockBytes = 18, kZero = 1;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        for (int g = 0; g < 4; ++g) d[g] = load_f16(p);
        for (int e = 0; e < 128; ++e) codes[e] = static_cast<uint8_t>(2 * (p[2 + (e >> 3)] >> (e & 7) & 1));
    }
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p) {
        Codes512 r;
        for (int i = 0; i < 4; ++i)
            r.q[i] = _mm512_maskz_mov_epi8(load_unaligned<uint64_t>(p + 18 * (i >> 1) + 2 + 8 * (i & 1)),
                                           wide::bytes(2));
        r.d = _mm512_mask_blend_ps(0x00F0, wide::f16_lanes(p), wide::f16_lanes(p + 18));
        return r;
    }
#endif
};

// Trit 0 .. 2 of a base-3 byte that the multiplier 3^n moves to the top.
inline uint8_t trit(uint8_t code, int multiplier) {
    return static_cast<uint8_t>(3 * static_cast<uint8_t>(code * multiplier) >> 8);
}

struct UnpackIQ1_BN {
    static constexpr int kType = 134, kGroup = 32, kBlock = 64, kBlockBytes = 13, kZero = 1;
    static constexpr int kHeaderBytes = 2;
    static float row_scale(const uint8_t* row) { return load_f16(row); }
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        static constexpr uint8_t kPowers[5] = {81, 27, 9, 3, 1};
        d[0] = d[1] = 1.0f;
        for (int g = 0; g < 4; ++g) {
            for (int j = 0; j < 15; ++j) codes[16 * g + j] = trit(p[3 * g + j / 5], kPowers[j % 5]);
            codes[16 * g + 15] = trit(p[12], kPowers[g]);
        }
    }
#if defined(__AVX512VNNI__)
    // 64 elements: bytes 3 * g + j / 5 of lane g, times powers of 3 modulo 256, times 3, upper byte.
    static __m512i trits(const uint8_t* p) {
        alignas(16) static constexpr uint8_t kFirst[16] = {0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 12};
        alignas(64) static constexpr uint8_t kPower[64] = {
            81, 27, 9, 3, 1,  81, 27, 9, 3, 1,  81, 27, 9, 3, 1,  81, 81, 27, 9, 3, 1,  81,
            27, 9,  3, 1, 81, 27, 9,  3, 1, 27, 81, 27, 9, 3, 1,  81, 27, 9,  3, 1, 81, 27,
            9,  3,  1, 9, 81, 27, 9,  3, 1, 81, 27, 9,  3, 1, 81, 27, 9,  3,  1, 3};
        const __m512i step = _mm512_mask_blend_epi8(
            0x7FFF7FFF7FFF7FFF, _mm512_setzero_si512(),
            _mm512_inserti64x4(
                _mm512_castsi256_si512(_mm256_inserti128_si256(_mm256_setzero_si256(), _mm_set1_epi8(3), 1)),
                _mm256_inserti128_si256(_mm256_set1_epi8(6), _mm_set1_epi8(9), 1), 1));
        const __m128i bytes = _mm_insert_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), 0, 15);
        const __m128i rest = _mm_cvtsi32_si128(load_unaligned<int32_t>(p + 8));
        const __m128i all = _mm_insert_epi8(_mm_unpacklo_epi64(bytes, rest), p[12], 12);
        const __m512i index = _mm512_add_epi8(wide::table16(kFirst), step);
        const __m512i v = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(all), index);
        const __m512i power = _mm512_load_si512(kPower), low = _mm512_set1_epi16(255);
        const __m512i three = _mm512_set1_epi16(3);
        const __m512i even = _mm512_and_si512(_mm512_mullo_epi16(v, power), low);
        const __m512i odd =
            _mm512_and_si512(_mm512_mullo_epi16(_mm512_srli_epi16(v, 8), _mm512_srli_epi16(power, 8)), low);
        const __m512i even_trits = _mm512_srli_epi16(_mm512_mullo_epi16(even, three), 8);
        const __m512i odd_trits = _mm512_mullo_epi16(odd, three);
        return _mm512_mask_blend_epi8(0xAAAAAAAAAAAAAAAA, even_trits, odd_trits);
    }
    static Codes512 wide(const uint8_t* p) {
        Codes512 r;
        for (int i = 0; i < 4; ++i) r.q[i] = trits(p + 13 * i);
        r.d = _mm512_set1_ps(1.0f);
        return r;
    }
#endif
};

struct UnpackIQ2_BN {
    static constexpr int kType = 135, kGroup = 32, kBlock = 64, kBlockBytes = 16, kZero = 1;
    static constexpr int kHeaderBytes = 4;
    static float row_scale(const uint8_t* row) { return load_unaligned<float>(row); }
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        d[0] = d[1] = 1.0f;
        for (int t = 0; t < 4; ++t)
            for (int j = 0; j < 16; ++j) codes[16 * t + j] = p[j] >> (2 * t) & 3;
    }
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p) {
        const __m512i counts =
            _mm512_setr_epi64(0, 0, 0x0002000200020002, 0x0002000200020002, 0x0004000400040004,
                              0x0004000400040004, 0x0006000600060006, 0x0006000600060006);
        Codes512 r;
        for (int i = 0; i < 4; ++i) {
            const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * i));
            r.q[i] = _mm512_and_si512(_mm512_srlv_epi16(_mm512_broadcast_i32x4(v), counts), wide::bytes(3));
        }
        r.d = _mm512_set1_ps(1.0f);
        return r;
    }
#endif
};

}  // namespace ikpy
