// Unpackers of Q2_K .. Q6_K. Layouts: quant-formats section 6.1.
#pragma once
#include "kernels/unpacked.hpp"
#include "unpack/wide.hpp"

namespace ikpy {

// 2-bit fields of 64 bytes in the order of elements: byte 32 * b128 + c, shift 2 * (b32 & 3).
inline uint8_t two_bits(const uint8_t* qs, int e) {
    return qs[32 * (e >> 7) + (e & 31)] >> (2 * (e >> 5 & 3)) & 3;
}

// The eight 6-bit scales and minima of Q4_K and Q5_K.
inline void scales_and_mins(const uint8_t* s, uint8_t* scale, uint8_t* min) {
    for (int j = 0; j < 4; ++j) {
        scale[j] = s[j] & 63;
        min[j] = s[j + 4] & 63;
        scale[j + 4] = static_cast<uint8_t>((s[j + 8] & 15) | (s[j] >> 6) << 4);
        min[j + 4] = static_cast<uint8_t>(s[j + 8] >> 4 | (s[j + 4] >> 6) << 4);
    }
}

#if defined(__AVX512VNNI__)
// d and m of Q4_K and Q5_K from the block start: f16 d, f16 dmin, 12 bytes of six-bit scales and minima.
inline void wide_scales_and_mins(const uint8_t* p, Codes512* r) {
    constexpr uint32_t kSix = 0x3F3F3F3F, kFour = 0x0F0F0F0F, kTwo = 0x03030303;
    const uint32_t a = load_unaligned<uint32_t>(p + 4), b = load_unaligned<uint32_t>(p + 8),
                   c = load_unaligned<uint32_t>(p + 12);
    const __m128i s =
        _mm_setr_epi32(static_cast<int>(a & kSix), static_cast<int>((c & kFour) | (a >> 6 & kTwo) << 4),
                       static_cast<int>(b & kSix), static_cast<int>((c >> 4 & kFour) | (b >> 6 & kTwo) << 4));
    const __m512 d = wide::f16_lanes(p), min = wide::f16_lanes(p + 2);
    const __m512 factors = _mm512_mask_sub_ps(d, 0xFF00, _mm512_setzero_ps(), min);
    r->d = wide::scaled(factors, _mm512_cvtepu8_epi32(s));
    r->m = _mm512_castps256_ps512(_mm512_extractf32x8_ps(r->d, 1));
}
#endif

struct UnpackQ2_K {
    static constexpr int kType = 10, kGroup = 16, kBlock = 256, kBlockBytes = 84, kZero = 0;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float* m) {
        const float scale = load_f16(p + 80), min = load_f16(p + 82);
        for (int g = 0; g < 16; ++g) {
            d[g] = scale * static_cast<float>(p[g] & 15);
            m[g] = -min * static_cast<float>(p[g] >> 4);
        }
        for (int e = 0; e < 256; ++e) codes[e] = two_bits(p + 16, e);
    }
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p) {
        Codes512 r;
        for (int i = 0; i < 4; ++i) r.q[i] = wide::two_bit_fields(p + 16, i);
        const __m512i s = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        r.d = wide::scaled(wide::f16_lanes(p + 80), _mm512_and_si512(s, _mm512_set1_epi32(15)));
        r.m = wide::scaled(_mm512_sub_ps(_mm512_setzero_ps(), wide::f16_lanes(p + 82)),
                           _mm512_srli_epi32(s, 4));
        return r;
    }
#endif
};

struct UnpackQ3_K {
    static constexpr int kType = 11, kGroup = 16, kBlock = 256, kBlockBytes = 110, kZero = 4;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        const uint8_t* scales = p + 96;
        const float scale = load_f16(p + 108);
        for (int g = 0; g < 16; ++g) {
            const int low = scales[g & 7] >> (4 * (g >> 3)) & 15,
                      high = scales[8 + (g & 3)] >> (2 * (g >> 2)) & 3;
            d[g] = scale * static_cast<float>((low | high << 4) - 32);
        }
        for (int e = 0; e < 256; ++e)
            codes[e] = static_cast<uint8_t>(two_bits(p + 32, e) + 4 * (p[e & 31] >> (e >> 5) & 1));
    }
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p) {
        constexpr uint64_t kNibble = 0x0F0F0F0F0F0F0F0F;
        constexpr uint32_t kPair = 0x03030303;
        const __m512i mask = wide::twice(p);
        Codes512 r;
        for (int i = 0; i < 4; ++i) {
            const __m512i low = wide::two_bit_fields(p + 32, i);
            r.q[i] =
                _mm512_mask_add_epi8(low, wide::test_halves(mask, 2 * i, 2 * i + 1), low, wide::bytes(4));
        }
        const uint64_t low = load_unaligned<uint64_t>(p + 96);
        const uint32_t high = load_unaligned<uint32_t>(p + 104);
        const uint64_t first = (high & kPair) | static_cast<uint64_t>(high >> 2 & kPair) << 32;
        const uint64_t second = (high >> 4 & kPair) | static_cast<uint64_t>(high >> 6 & kPair) << 32;
        const __m128i s = _mm_set_epi64x(static_cast<int64_t>((low >> 4 & kNibble) | second << 4),
                                         static_cast<int64_t>((low & kNibble) | first << 4));
        r.d = wide::scaled(wide::f16_lanes(p + 108),
                           _mm512_sub_epi32(_mm512_cvtepu8_epi32(s), _mm512_set1_epi32(32)));
        return r;
    }
#endif
};

struct UnpackQ4_K {
    static constexpr int kType = 12, kGroup = 32, kBlock = 256, kBlockBytes = 144, kZero = 0;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float* m) {
        const float scale = load_f16(p), min = load_f16(p + 2);
        uint8_t sc[8], mn[8];
        scales_and_mins(p + 4, sc, mn);
        for (int g = 0; g < 8; ++g) {
            d[g] = scale * static_cast<float>(sc[g]);
            m[g] = -min * static_cast<float>(mn[g]);
        }
        for (int b = 0; b < 4; ++b)
            for (int c = 0; c < 32; ++c) {
                codes[64 * b + c] = p[16 + 32 * b + c] & 15;
                codes[64 * b + 32 + c] = p[16 + 32 * b + c] >> 4;
            }
    }
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p) {
        Codes512 r;
        for (int i = 0; i < 4; ++i) r.q[i] = wide::nibbles32(p + 16 + 32 * i);
        wide_scales_and_mins(p, &r);
        return r;
    }
#endif
};

struct UnpackQ5_K {
    static constexpr int kType = 13, kGroup = 32, kBlock = 256, kBlockBytes = 176, kZero = 0;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float* m) {
        const float scale = load_f16(p), min = load_f16(p + 2);
        uint8_t sc[8], mn[8];
        scales_and_mins(p + 4, sc, mn);
        for (int g = 0; g < 8; ++g) {
            d[g] = scale * static_cast<float>(sc[g]);
            m[g] = -min * static_cast<float>(mn[g]);
        }
        for (int b = 0; b < 4; ++b)
            for (int c = 0; c < 32; ++c) {
                const int low = p[48 + 32 * b + c], high = p[16 + c] >> (2 * b);
                codes[64 * b + c] = static_cast<uint8_t>((low & 15) + 16 * (high & 1));
                codes[64 * b + 32 + c] = static_cast<uint8_t>((low >> 4) + 16 * (high >> 1 & 1));
            }
    }
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p) {
        const __m512i high = wide::twice(p + 16);
        Codes512 r;
        for (int i = 0; i < 4; ++i) {
            const __m512i low = wide::nibbles32(p + 48 + 32 * i);
            r.q[i] =
                _mm512_mask_add_epi8(low, wide::test_halves(high, 2 * i, 2 * i + 1), low, wide::bytes(16));
        }
        wide_scales_and_mins(p, &r);
        return r;
    }
#endif
};

struct UnpackQ6_K {
    static constexpr int kType = 14, kGroup = 16, kBlock = 256, kBlockBytes = 210, kZero = 32;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        const float scale = load_f16(p + 208);
        for (int g = 0; g < 16; ++g) d[g] = scale * static_cast<float>(static_cast<int8_t>(p[192 + g]));
        for (int h = 0; h < 2; ++h)
            for (int t = 0; t < 4; ++t)
                for (int c = 0; c < 32; ++c) {
                    const int low = p[64 * h + c + 32 * (t & 1)] >> (4 * (t >> 1)) & 15;
                    const int high = p[128 + 32 * h + c] >> (2 * t) & 3;
                    codes[128 * h + 32 * t + c] = static_cast<uint8_t>(low | high << 4);
                }
    }
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p) {
        Codes512 r;
        for (int h = 0; h < 2; ++h) {
            const __m512i low = _mm512_loadu_si512(p + 64 * h), high = wide::twice(p + 128 + 32 * h);
            const __m512i left =
                _mm512_sllv_epi16(high, _mm512_inserti64x4(_mm512_set1_epi16(4), _mm256_set1_epi16(2), 1));
            const __m512i right = wide::shift_halves(high, 0, 2);
            const __m512i four = wide::bytes(15), two = wide::bytes(0x30);
            r.q[2 * h] = _mm512_or_si512(_mm512_and_si512(low, four), _mm512_and_si512(left, two));
            r.q[2 * h + 1] = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(low, 4), four),
                                             _mm512_and_si512(right, two));
        }
        const __m128i s = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 192));
        r.d = wide::scaled(wide::f16_lanes(p + 208), _mm512_cvtepi8_epi32(s));
        return r;
    }
#endif
};

}  // namespace ikpy
