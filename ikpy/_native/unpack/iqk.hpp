// Unpackers of IQ2_K .. IQ6_K. Layouts: quant-formats sections 6.7 to 6.11.
#pragma once
#include "kernels/unpacked.hpp"
#include "unpack/level_tables.hpp"
#include "unpack/wide.hpp"

namespace ikpy {

inline int nibble(const uint8_t* p, int i) { return p[i >> 1] >> (4 * (i & 1)) & 15; }

// Scale of group g of IQ4_K and IQ5_K: 4 low bits at p + 8, 2 high bits at p + 4.
inline int six_bit_scale(const uint8_t* p, int g) {
    return (nibble(p + 8, g) | (p[4 + (g >> 2)] >> (2 * (g & 3)) & 3) << 4) - 32;
}

#if defined(__AVX512VNNI__)
inline __m512 wide_six_bit_scales(const uint8_t* p) {
    const __m512i high = _mm512_slli_epi32(wide::two_bit_lanes(load_unaligned<uint32_t>(p + 4)), 4);
    const __m512i s =
        _mm512_sub_epi32(_mm512_or_si512(wide::nibble_lanes(p + 8), high), _mm512_set1_epi32(32));
    return wide::scaled(wide::f16_lanes(p), s);
}
#endif

struct UnpackIQ2_K {
    static constexpr int kType = 137, kGroup = 16, kBlock = 256, kBlockBytes = 76, kZero = 128;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        const float scale = load_f16(p);
        const int extra = load_unaligned<uint16_t>(p + 2);
        for (int g = 0; g < 16; ++g) d[g] = scale * static_cast<float>(nibble(p + 4, g) - 8);
        for (int e = 0; e < 256; ++e) {
            const int q = p[12 + 32 * (e >> 7) + (e & 31)] >> (2 * (e >> 5 & 3)) & 3;
            codes[e] = kIq2Codes[q + 4 * (extra >> (e >> 4) & 1)];
        }
    }
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p) {
        const __m512i table = wide::table16(kIq2Codes);
        const wide::ShiftedGroups shifted(load_unaligned<uint16_t>(p + 2));
        Codes512 r;
        for (int i = 0; i < 4; ++i)
            r.q[i] = shifted.add(_mm512_shuffle_epi8(table, wide::two_bit_fields(p + 12, i)), i, 5);
        r.d = wide::scaled(wide::f16_lanes(p),
                           _mm512_sub_epi32(wide::nibble_lanes(p + 4), _mm512_set1_epi32(8)));
        return r;
    }
#endif
};

struct UnpackIQ3_K {
    static constexpr int kType = 138, kGroup = 16, kBlock = 256, kBlockBytes = 110, kZero = 128;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        const float scale = load_f16(p);
        const int extra = load_unaligned<uint16_t>(p + 2), signs = load_unaligned<uint16_t>(p + 4);
        for (int g = 0; g < 16; ++g) {
            const int s = 2 * nibble(p + 6, g) + 1;
            d[g] = scale * static_cast<float>(signs >> g & 1 ? -s : s);
        }
        for (int e = 0; e < 256; ++e) {
            const int low = p[14 + 32 * (e >> 7) + (e & 31)] >> (2 * (e >> 5 & 3)) & 3;
            const int high = p[78 + (e & 31)] >> (e >> 5) & 1;
            codes[e] = kIq3Codes[low + 4 * high + 8 * (extra >> (e >> 4) & 1)];
        }
    }
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p) {
        const __m512i table = wide::table16(kIq3Codes);
        const __m512i high = wide::twice(p + 78);
        const wide::ShiftedGroups shifted(load_unaligned<uint16_t>(p + 2));
        Codes512 r;
        for (int i = 0; i < 4; ++i) {
            const __m512i low = wide::two_bit_fields(p + 14, i);
            const __mmask64 bits = wide::test_halves(high, 2 * i, 2 * i + 1);
            r.q[i] = shifted.add(
                _mm512_shuffle_epi8(table, _mm512_mask_add_epi8(low, bits, low, wide::bytes(4))), i, 4);
        }
        const __m512i s = wide::nibble_lanes(p + 6);
        const __m512i odd = _mm512_add_epi32(_mm512_add_epi32(s, s), _mm512_set1_epi32(1));
        r.d = wide::scaled(wide::f16_lanes(p), odd);
        r.d = _mm512_mask_sub_ps(r.d, load_unaligned<uint16_t>(p + 4), _mm512_setzero_ps(), r.d);
        return r;
    }
#endif
};

struct UnpackIQ4_K {
    static constexpr int kType = 139, kGroup = 16, kBlock = 256, kBlockBytes = 144, kZero = 128;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        const float scale = load_f16(p);
        const int extra = load_unaligned<uint16_t>(p + 2);
        for (int g = 0; g < 16; ++g) {
            d[g] = scale * static_cast<float>(six_bit_scale(p, g));
            const uint8_t* table = kIq4Codes + 16 * (extra >> g & 1);
            for (int j = 0; j < 16; ++j)
                codes[16 * g + j] = table[p[16 + 16 * (g >> 1) + j] >> (4 * (g & 1)) & 15];
        }
    }
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p) {
        const __m512i table = wide::table16(kIq4Codes);
        const wide::ShiftedGroups shifted(load_unaligned<uint16_t>(p + 2));
        Codes512 r;
        for (int i = 0; i < 4; ++i)
            r.q[i] = shifted.add(
                _mm512_shuffle_epi8(table, wide::nibbles16(wide::lanes_aabb(p + 16 + 32 * i))), i, 4);
        r.d = wide_six_bit_scales(p);
        return r;
    }
#endif
};

struct UnpackIQ5_K {
    static constexpr int kType = 140, kGroup = 16, kBlock = 256, kBlockBytes = 176, kZero = 128;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        const float scale = load_f16(p);
        const int extra = load_unaligned<uint16_t>(p + 2);
        for (int g = 0; g < 16; ++g) d[g] = scale * static_cast<float>(six_bit_scale(p, g));
        for (int e = 0; e < 256; ++e) {
            const int low = p[16 + 32 * (e >> 6) + (e & 31)] >> (4 * (e >> 5 & 1)) & 15;
            const int high = p[144 + (e & 31)] >> (e >> 5) & 1;
            codes[e] = kIq5Codes[low + 16 * high + 32 * (extra >> (e >> 4) & 1)];
        }
    }
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p) {
        const __m512i low_table = wide::table16(kIq5Codes), high_table = wide::table16(kIq5Codes + 16);
        const __m512i high = wide::twice(p + 144);
        const wide::ShiftedGroups shifted(load_unaligned<uint16_t>(p + 2));
        Codes512 r;
        for (int i = 0; i < 4; ++i) {
            const __m512i q = wide::nibbles32(p + 16 + 32 * i);
            const __mmask64 bits = wide::test_halves(high, 2 * i, 2 * i + 1);
            const __m512i codes =
                _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(low_table, q), bits, high_table, q);
            r.q[i] = shifted.add(codes, i, 2);
        }
        r.d = wide_six_bit_scales(p);
        return r;
    }
#endif
};

struct UnpackIQ6_K {
    static constexpr int kType = 141, kGroup = 16, kBlock = 256, kBlockBytes = 212, kZero = 128;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        const float scale = load_f16(p);
        const int extra = load_unaligned<uint16_t>(p + 2);
        for (int g = 0; g < 16; ++g) d[g] = scale * static_cast<float>(static_cast<int8_t>(p[4 + g]));
        for (int e = 0; e < 256; ++e) {
            const int low = p[20 + 32 * (e >> 6) + (e & 31)] >> (4 * (e >> 5 & 1)) & 15;
            const int high = p[148 + 32 * (e >> 7) + (e & 31)] >> (2 * (e >> 5 & 3)) & 3;
            codes[e] = static_cast<uint8_t>(kIq6Codes[low + 16 * high] + (extra >> (e >> 4) & 1));
        }
    }
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p) {
        const wide::ShiftedGroups shifted(load_unaligned<uint16_t>(p + 2));
        Codes512 r;
        for (int i = 0; i < 4; ++i) {
            const __m512i q = wide::nibbles32(p + 20 + 32 * i), high = wide::twice(p + 148 + 32 * (i >> 1));
            const int bit = 4 * (i & 1);
            const __mmask64 first = wide::test_halves(high, bit, bit + 2);
            const __mmask64 second = wide::test_halves(high, bit + 1, bit + 3);
            const __m512i a = _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(wide::table16(kIq6Codes), q),
                                                       first, wide::table16(kIq6Codes + 16), q);
            const __m512i b = _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(wide::table16(kIq6Codes + 32), q),
                                                       first, wide::table16(kIq6Codes + 48), q);
            r.q[i] = shifted.add(_mm512_mask_blend_epi8(second, a, b), i, 1);
        }
        const __m128i s = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 4));
        r.d = wide::scaled(wide::f16_lanes(p), _mm512_cvtepi8_epi32(s));
        return r;
    }
#endif
};

}  // namespace ikpy
