// Unpackers of IQ2_K .. IQ6_K. Layouts: quant-formats.md#non-linear-levels.
#pragma once
#include "kernels/matmul/unpacked.hpp"
#include "unpack/codes32.hpp"
#include "unpack/level_tables.hpp"
#include "unpack/wide.hpp"

namespace ikpy {

// Scales of IQ4_K and IQ5_K: 4 low bits at p + 8, 2 high bits at p + 4.
inline void six_bit_scales(const uint8_t* p, float* d) {
    const c32::Codes16 high = c32::two_bits_in_order(load_unaligned<uint32_t>(p + 4));
    c32::scaled16(load_f16(p), (c32::nibbles_in_order(p + 8) | high * 16) - 32, d);
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
    static constexpr int kType = 137, kGroup = 16, kBlock = 256, kBlockBytes = 76, kZero = kIq2Zero;
    static constexpr int kLow = 0, kHigh = kIq2Codes[7] - kIq2Codes[0];
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        const auto extra = load_unaligned<uint16_t>(p + 2);
        c32::scaled16(load_f16(p), c32::nibbles_in_order(p + 4) - 8, d);
        const c32::ShiftedGroups shifted(extra, 5);
        for (int i = 0; i < 8; ++i)
            c32::store(codes + 32 * i,
                       c32::lookup(kIq2Low.of, c32::two_bit_fields(p + 12, i)) + shifted.of(i));
    }
#if defined(__AVX512VNNI__)
    static constexpr int kStep = 5;
    static Codes512 wide(const uint8_t* p) { return wide::with_steps<UnpackIQ2_K>(unshifted(p)); }
    static constexpr const uint8_t* kLevels = kIq2Low.of;
    static constexpr int kLevelCount = 4;
    static Codes512 unshifted(const uint8_t* p) { return wide::levels_of<UnpackIQ2_K>(level_numbers(p)); }
    static Codes512 level_numbers(const uint8_t* p) {
        Codes512 r;
        for (int i = 0; i < 4; ++i) r.q[i] = wide::two_bit_fields(p + 12, i);
        r.d = wide::scaled(wide::f16_lanes(p),
                           _mm512_sub_epi32(wide::nibble_lanes(p + 4), _mm512_set1_epi32(8)));
        r.shifted = load_unaligned<uint16_t>(p + 2);
        return r;
    }
#endif
};

struct UnpackIQ3_K {
    static constexpr int kType = 138, kGroup = 16, kBlock = 256, kBlockBytes = 110, kZero = kIq3Zero;
    static constexpr int kLow = 0, kHigh = kIq3Codes[15] - kIq3Codes[0];
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        const auto extra = load_unaligned<uint16_t>(p + 2);
        const c32::Codes16 odd = c32::nibbles_in_order(p + 6) * 2 + 1;
        const c32::Codes16 negative = c32::bits16(load_unaligned<uint16_t>(p + 4));
        c32::scaled16(load_f16(p), (odd ^ negative) - negative, d);
        const c32::Codes32 high = c32::load(p + 78);
        const c32::ShiftedGroups shifted(extra, 4);
        for (int i = 0; i < 8; ++i) {
            const c32::Codes32 q = c32::two_bit_fields(p + 14, i) | c32::moved_bit(high, i, 2);
            c32::store(codes + 32 * i, c32::lookup(kIq3Low.of, q) + shifted.of(i));
        }
    }
#if defined(__AVX512VNNI__)
    static constexpr int kStep = 4;
    static Codes512 wide(const uint8_t* p) { return wide::with_steps<UnpackIQ3_K>(unshifted(p)); }
    static constexpr const uint8_t* kLevels = kIq3Low.of;
    static constexpr int kLevelCount = 8;
    static Codes512 unshifted(const uint8_t* p) { return wide::levels_of<UnpackIQ3_K>(level_numbers(p)); }
    static Codes512 level_numbers(const uint8_t* p) {
        const __m512i high = wide::twice(p + 78);
        Codes512 r;
        for (int i = 0; i < 4; ++i) {
            const __m512i low = wide::two_bit_fields(p + 14, i);
            const __mmask64 bits = wide::test_halves(high, 2 * i, 2 * i + 1);
            r.q[i] = _mm512_mask_add_epi8(low, bits, low, wide::bytes(4));
        }
        const __m512i s = wide::nibble_lanes(p + 6);
        const __m512i odd = _mm512_add_epi32(_mm512_add_epi32(s, s), _mm512_set1_epi32(1));
        r.d = wide::scaled(wide::f16_lanes(p), odd);
        r.d = _mm512_mask_sub_ps(r.d, load_unaligned<uint16_t>(p + 4), _mm512_setzero_ps(), r.d);
        r.shifted = load_unaligned<uint16_t>(p + 2);
        return r;
    }
#endif
};

struct UnpackIQ4_K {
    static constexpr int kType = 139, kGroup = 16, kBlock = 256, kBlockBytes = 144, kZero = 128;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        const auto extra = load_unaligned<uint16_t>(p + 2);
        const c32::ShiftedGroups shifted(extra, 4);
        six_bit_scales(p, d);
        for (int i = 0; i < 8; ++i)
            c32::store(codes + 32 * i, c32::lookup(kIq4Codes, c32::nibbles(p + 16 + 16 * i)) + shifted.of(i));
    }
#if defined(__AVX512VNNI__)
    static constexpr int kStep = 4;
    static Codes512 wide(const uint8_t* p) { return wide::with_steps<UnpackIQ4_K>(unshifted(p)); }
    static constexpr const uint8_t* kLevels = kIq4Codes;
    static constexpr int kLevelCount = 16;
    static Codes512 unshifted(const uint8_t* p) { return wide::levels_of<UnpackIQ4_K>(level_numbers(p)); }
    template <int Place = 0>
    static Codes512 level_numbers(const uint8_t* p) {
        Codes512 r;
        for (int i = 0; i < 4; ++i) r.q[i] = wide::nibbles16<Place>(wide::lanes_aabb(p + 16 + 32 * i));
        r.d = wide_six_bit_scales(p);
        r.shifted = load_unaligned<uint16_t>(p + 2);
        return r;
    }
#endif
};

struct UnpackIQ5_K {
    static constexpr int kType = 140, kGroup = 16, kBlock = 256, kBlockBytes = 176, kZero = 128;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        const auto extra = load_unaligned<uint16_t>(p + 2);
        six_bit_scales(p, d);
        const c32::Codes32 high = c32::load(p + 144);
        const c32::ShiftedGroups shifted(extra, 2);
        for (int i = 0; i < 8; ++i) {
            const c32::Codes32 q = c32::nibble_fields(p + 16, i);
            const c32::Codes32 levels =
                c32::select_by_bit(high, i, c32::lookup(kIq5Codes + 16, q), c32::lookup(kIq5Codes, q));
            c32::store(codes + 32 * i, levels + shifted.of(i));
        }
    }
#if defined(__AVX512VNNI__)
    static constexpr int kStep = 2;
    static Codes512 wide(const uint8_t* p) { return wide::with_steps<UnpackIQ5_K>(unshifted(p)); }
    static Codes512 unshifted(const uint8_t* p) {
        const __m512i low_table = wide::table16(kIq5Codes), high_table = wide::table16(kIq5Codes + 16);
        const __m512i high = wide::twice(p + 144);
        Codes512 r;
        for (int i = 0; i < 4; ++i) {
            const __m512i q = wide::nibbles32(p + 16 + 32 * i);
            const __mmask64 bits = wide::test_halves(high, 2 * i, 2 * i + 1);
            r.q[i] = _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(low_table, q), bits, high_table, q);
        }
        r.d = wide_six_bit_scales(p);
        r.shifted = load_unaligned<uint16_t>(p + 2);
        return r;
    }
#endif
};

struct UnpackIQ6_K {
    static constexpr int kType = 141, kGroup = 16, kBlock = 256, kBlockBytes = 212, kZero = 128;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        const auto extra = load_unaligned<uint16_t>(p + 2);
        c32::scaled16(load_f16(p), load_unaligned<c32::Codes16>(p + 4), d);
        const c32::ShiftedGroups shifted(extra, 1);
        for (int i = 0; i < 8; ++i) {
            const c32::Codes32 q = c32::nibble_fields(p + 20, i), high = c32::load(p + 148 + 32 * (i >> 2));
            const int bit = 2 * (i & 3);
            const c32::Codes32 a =
                c32::select_by_bit(high, bit, c32::lookup(kIq6Codes + 16, q), c32::lookup(kIq6Codes, q));
            const c32::Codes32 b =
                c32::select_by_bit(high, bit, c32::lookup(kIq6Codes + 48, q), c32::lookup(kIq6Codes + 32, q));
            c32::store(codes + 32 * i, c32::select_by_bit(high, bit + 1, b, a) + shifted.of(i));
        }
    }
#if defined(__AVX512VNNI__)
    static constexpr int kStep = 1;
    static Codes512 wide(const uint8_t* p) { return wide::with_steps<UnpackIQ6_K>(unshifted(p)); }
    static Codes512 unshifted(const uint8_t* p) {
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
            r.q[i] = _mm512_mask_blend_epi8(second, a, b);
        }
        const __m128i s = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 4));
        r.d = wide::scaled(wide::f16_lanes(p), _mm512_cvtepi8_epi32(s));
        r.shifted = load_unaligned<uint16_t>(p + 2);
        return r;
    }
#endif
};

}  // namespace ikpy
