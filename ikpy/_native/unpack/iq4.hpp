// Unpackers of IQ4_NL and IQ4_XS. Layouts: quant-formats.md#non-linear-levels.
#pragma once
#include "kernels/matmul/unpacked.hpp"
#include "unpack/codes32.hpp"
#include "unpack/level_tables.hpp"
#include "unpack/wide.hpp"

namespace ikpy {

struct UnpackIQ4_NL {
    static constexpr int kType = 20, kGroup = 32, kBlock = 32, kBlockBytes = 18, kZero = 128;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        c32::store(codes, c32::lookup(kIq4Codes, c32::nibbles(p + 2)));
        *d = load_f16(p);
    }
#if defined(__AVX512VNNI__)
    static constexpr const uint8_t* kLevels = kIq4Codes;
    static constexpr int kLevelCount = 16;
    template <int Place = 0>
    static Codes512 level_numbers(const uint8_t* p) {
        return wide::with_block_scales<kBlockBytes>(wide::block_nibbles<kBlockBytes, Place>(p), p);
    }
    static Codes512 wide(const uint8_t* p) { return wide::levels_of<UnpackIQ4_NL>(level_numbers(p)); }
    static constexpr Pairs kPairs = Pairs::kConsecutive;
    static Codes512 halves(const uint8_t* p) {
        const Codes512 r = wide::with_block_scales<kBlockBytes>(wide::block_nibble_halves<kBlockBytes>(p), p);
        return wide::levels_of<UnpackIQ4_NL>(r);
    }
#endif
};

struct UnpackIQ4_XS {
    static constexpr int kType = 23, kGroup = 32, kBlock = 256, kBlockBytes = 136, kZero = 128;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        const uint64_t high = c32::two_bit_bytes(load_unaligned<uint16_t>(p + 2));
        c32::scaled8(load_f16(p), c32::nibble_bytes(load_unaligned<uint32_t>(p + 4)) | high << 4, 32, d);
        for (int g = 0; g < 8; ++g)
            c32::store(codes + 32 * g, c32::lookup(kIq4Codes, c32::nibbles(p + 8 + 16 * g)));
    }
#if defined(__AVX512VNNI__)
    static constexpr const uint8_t* kLevels = kIq4Codes;
    static constexpr int kLevelCount = 16;
    template <int Place = 0>
    static Codes512 level_numbers(const uint8_t* p) {
        Codes512 r;
        for (int i = 0; i < 4; ++i) r.q[i] = wide::nibbles16<Place>(wide::lanes_aabb(p + 8 + 32 * i));
        r.d = scales(p);
        return r;
    }
    static Codes512 wide(const uint8_t* p) { return wide::levels_of<UnpackIQ4_XS>(level_numbers(p)); }
    static constexpr Pairs kPairs = Pairs::kConsecutive;
    static Codes512 halves(const uint8_t* p) {
        Codes512 r;
        wide::nibble_halves(p + 8, r.q);
        wide::lookup_all(wide::table16(kIq4Codes), r.q);
        r.d = scales(p);
        return r;
    }
    static __m512 scales(const uint8_t* p) {
        // Only the first 8 of 16 lanes count.
        const __m512i counts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 0, 0, 0, 0, 0, 0, 0);
        const __m512i low =
            _mm512_and_si512(_mm512_srlv_epi32(_mm512_set1_epi32(load_unaligned<int32_t>(p + 4)), counts),
                             _mm512_set1_epi32(15));
        const __m512i high = _mm512_slli_epi32(wide::two_bit_lanes(load_unaligned<uint16_t>(p + 2)), 4);
        return wide::scaled(wide::f16_lanes(p),
                            _mm512_sub_epi32(_mm512_or_si512(low, high), _mm512_set1_epi32(32)));
    }
#endif
};

}  // namespace ikpy
