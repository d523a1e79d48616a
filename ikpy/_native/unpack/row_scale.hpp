// Unpackers of the types with a scale per row: IQ2_KS, IQ3_KS, IQ4_KS, IQ5_KS, IQ4_KSS, IQ2_KL, Q8_KV.
// Layouts: quant-formats sections 6.12 to 6.18.
#pragma once
#include "kernels/unpacked.hpp"
#include "unpack/level_tables.hpp"
#include "unpack/wide.hpp"

namespace ikpy {

// Low and high half of the 4-bit field of sub-block g: nibbles of bytes 0 .. 3, the upper four in the high
// ones.
inline int split_nibble(const uint8_t* p, int g) { return p[g & 3] >> (4 * (g >> 2)) & 15; }

inline int two_bit_field(const uint8_t* qs, int e) {
    return qs[32 * (e >> 7) + (e & 31)] >> (2 * (e >> 5 & 3)) & 3;
}

// Scale bytes of IQ4_KS, IQ5_KS and IQ4_KSS: bit 0 selects the table, the rest is an odd scale.
inline float odd_scale(uint8_t code) { return static_cast<float>((code & 254) - 127); }

#if defined(__AVX512VNNI__)
namespace wide {

// Groups of 32 whose bit is set in `extra`.
inline ShiftedGroups shifted_groups32(uint32_t extra) { return ShiftedGroups(_pdep_u32(extra, 0x5555) * 3); }

inline ShiftedGroups odd_scale_tables(uint64_t codes) {
    return shifted_groups32(static_cast<uint32_t>(_pext_u64(codes, 0x0101010101010101)));
}

inline __m512i lanes_of_bytes(uint64_t bytes) {
    return _mm512_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(bytes)));
}

inline __m512 odd_scales(uint64_t codes) {
    return _mm512_cvtepi32_ps(
        _mm512_sub_epi32(lanes_of_bytes(codes & 0xFEFEFEFEFEFEFEFE), _mm512_set1_epi32(127)));
}

// Eight codes of five bits less 16: low nibbles in order, then the fifth bits.
inline __m512 five_bit_scales(uint64_t low, uint32_t high) {
    const uint64_t codes = low | _pdep_u64(high, 0x1010101010101010);
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(lanes_of_bytes(codes), _mm512_set1_epi32(16)));
}

// Eight nibbles of four bytes as bytes: low first within a byte, and low of all bytes first.
inline uint64_t nibble_bytes(uint32_t v) { return _pdep_u64(v, 0x0F0F0F0F0F0F0F0F); }
inline uint64_t split_nibble_bytes(uint32_t v) {
    return (v & 0x0F0F0F0F) | static_cast<uint64_t>(v >> 4 & 0x0F0F0F0F) << 32;
}

}  // namespace wide
#endif

struct UnpackIQ2_KS {
    static constexpr int kType = 145, kGroup = 32, kBlock = 256, kBlockBytes = 70, kZero = 128;
    static constexpr int kHeaderBytes = 2;
    static float row_scale(const uint8_t* row) { return load_f16(row); }
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        for (int g = 0; g < 8; ++g)
            d[g] = static_cast<float>((p[2 + g / 2] >> (4 * (g & 1)) & 15) + 16 * (p[1] >> g & 1) - 16);
        for (int e = 0; e < 256; ++e)
            codes[e] = kIq2Codes[two_bit_field(p + 6, e) + 4 * (p[0] >> (e >> 5) & 1)];
    }
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p) {
        const __m512i table = wide::table16(kIq2Codes);
        const wide::ShiftedGroups shifted = wide::shifted_groups32(p[0]);
        Codes512 r;
        for (int i = 0; i < 4; ++i)
            r.q[i] = shifted.add(_mm512_shuffle_epi8(table, wide::two_bit_fields(p + 6, i)), i, 5);
        r.d = wide::five_bit_scales(wide::nibble_bytes(load_unaligned<uint32_t>(p + 2)), p[1]);
        return r;
    }
#endif
};

struct UnpackIQ3_KS {
    static constexpr int kType = 156, kGroup = 32, kBlock = 256, kBlockBytes = 102, kZero = 128;
    static constexpr int kHeaderBytes = 2;
    static float row_scale(const uint8_t* row) { return load_f16(row); }
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        for (int g = 0; g < 8; ++g)
            d[g] = static_cast<float>(split_nibble(p + 2, g) + 16 * (p[0] >> g & 1) - 16);
        for (int e = 0; e < 256; ++e) {
            const int high = p[70 + (e & 31)] >> (e >> 5) & 1, extra = p[1] >> (e >> 5) & 1;
            codes[e] = kIq3Codes[two_bit_field(p + 6, e) + 4 * high + 8 * extra];
        }
    }
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p) {
        const __m512i table = wide::table16(kIq3Codes), high = wide::twice(p + 70);
        const wide::ShiftedGroups shifted = wide::shifted_groups32(p[1]);
        Codes512 r;
        for (int i = 0; i < 4; ++i) {
            const __m512i low = wide::two_bit_fields(p + 6, i);
            const __mmask64 bits = wide::test_halves(high, 2 * i, 2 * i + 1);
            r.q[i] = shifted.add(
                _mm512_shuffle_epi8(table, _mm512_mask_add_epi8(low, bits, low, wide::bytes(4))), i, 4);
        }
        r.d = wide::five_bit_scales(wide::split_nibble_bytes(load_unaligned<uint32_t>(p + 2)), p[0]);
        return r;
    }
#endif
};

struct UnpackIQ4_KS {
    static constexpr int kType = 144, kGroup = 32, kBlock = 256, kBlockBytes = 136, kZero = 128;
    static constexpr int kHeaderBytes = 4;
    static float row_scale(const uint8_t* row) { return load_unaligned<float>(row); }
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        for (int g = 0; g < 8; ++g) {
            d[g] = odd_scale(p[g]);
            const uint8_t* table = kIq4Codes + 16 * (p[g] & 1);
            for (int j = 0; j < 16; ++j) {
                codes[32 * g + j] = table[p[8 + 16 * g + j] & 15];
                codes[32 * g + j + 16] = table[p[8 + 16 * g + j] >> 4];
            }
        }
    }
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p) {
        const __m512i table = wide::table16(kIq4Codes);
        const uint64_t scales = load_unaligned<uint64_t>(p);
        const wide::ShiftedGroups shifted = wide::odd_scale_tables(scales);
        Codes512 r;
        for (int i = 0; i < 4; ++i)
            r.q[i] = shifted.add(
                _mm512_shuffle_epi8(table, wide::nibbles16(wide::lanes_aabb(p + 8 + 32 * i))), i, 4);
        r.d = wide::odd_scales(scales);
        return r;
    }
#endif
};

struct UnpackIQ5_KS {
    static constexpr int kType = 152, kGroup = 32, kBlock = 256, kBlockBytes = 168, kZero = 128;
    static constexpr int kHeaderBytes = 4;
    static float row_scale(const uint8_t* row) { return load_unaligned<float>(row); }
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        for (int g = 0; g < 8; ++g) d[g] = odd_scale(p[g]);
        for (int e = 0; e < 256; ++e) {
            const int low = p[8 + 32 * (e >> 6) + (e & 31)] >> (4 * (e >> 5 & 1)) & 15;
            const int high = p[136 + (e & 31)] >> (e >> 5) & 1;
            codes[e] = kIq5Codes[low + 16 * high + 32 * (p[e >> 5] & 1)];
        }
    }
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p) {
        const __m512i low_table = wide::table16(kIq5Codes), high_table = wide::table16(kIq5Codes + 16);
        const __m512i high = wide::twice(p + 136);
        const uint64_t scales = load_unaligned<uint64_t>(p);
        const wide::ShiftedGroups shifted = wide::odd_scale_tables(scales);
        Codes512 r;
        for (int i = 0; i < 4; ++i) {
            const __m512i q = wide::nibbles32(p + 8 + 32 * i);
            const __mmask64 bits = wide::test_halves(high, 2 * i, 2 * i + 1);
            const __m512i codes =
                _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(low_table, q), bits, high_table, q);
            r.q[i] = shifted.add(codes, i, 2);
        }
        r.d = wide::odd_scales(scales);
        return r;
    }
#endif
};

// Words of even parity; the freed low bits of eight words are the scale byte.
struct UnpackIQ4_KSS {
    static constexpr int kType = 146, kGroup = 32, kBlock = 256, kBlockBytes = 128, kZero = 128;
    static constexpr int kHeaderBytes = 4;
    static float row_scale(const uint8_t* row) { return load_unaligned<float>(row); }
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        for (int g = 0; g < 8; ++g) {
            int scale = 0;
            for (int n = 0; n < 8; ++n) scale |= (p[16 * g + 2 * n] & 1) << n;
            d[g] = odd_scale(static_cast<uint8_t>(scale));
            const uint8_t* table = kIq4Codes + 16 * (scale & 1);
            for (int n = 0; n < 8; ++n) {
                const int even = load_unaligned<uint16_t>(p + 16 * g + 2 * n) & 0xFFFE, v = even ^ even >> 1;
                uint8_t* at = codes + 32 * g + 2 * n;
                at[0] = table[v & 15];
                at[16] = table[v >> 4 & 15];
                at[1] = table[v >> 8 & 15];
                at[17] = table[v >> 12];
            }
        }
    }
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p) {
        const __m512i table = wide::table16(kIq4Codes);
        const __m512i first = _mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3);
        const __m512i second = _mm512_setr_epi64(4, 5, 4, 5, 6, 7, 6, 7);
        Codes512 r;
        uint64_t scales = 0;
        for (int h = 0; h < 2; ++h) {
            const __m512i words = _mm512_loadu_si512(p + 64 * h);
            scales |= static_cast<uint64_t>(_mm512_test_epi16_mask(words, _mm512_set1_epi16(1))) << (32 * h);
            const __m512i even = _mm512_and_si512(words, _mm512_set1_epi16(-2));
            const __m512i v = _mm512_xor_si512(even, _mm512_srli_epi16(even, 1));
            r.q[2 * h] = wide::nibbles16(_mm512_permutexvar_epi64(first, v));
            r.q[2 * h + 1] = wide::nibbles16(_mm512_permutexvar_epi64(second, v));
        }
        const wide::ShiftedGroups shifted = wide::odd_scale_tables(scales);
        for (int i = 0; i < 4; ++i) r.q[i] = shifted.add(_mm512_shuffle_epi8(table, r.q[i]), i, 4);
        r.d = wide::odd_scales(scales);
        return r;
    }
#endif
};

// The 32 pairs of IQ2_KL as codes (level + 128): first elements, then second elements.
alignas(64) inline constexpr uint8_t kIq2klCodes[64] = {
    65,  65,  88,  88,  88,  88,  105, 105, 105, 105, 105, 118, 118, 118, 118, 129,
    129, 129, 129, 129, 141, 141, 141, 141, 141, 156, 156, 156, 156, 156, 175, 175,
    105, 141, 65,  118, 141, 175, 88,  105, 129, 141, 156, 65,  129, 141, 175, 105,
    118, 129, 141, 156, 88,  105, 118, 129, 141, 65,  105, 129, 156, 175, 105, 141};

struct UnpackIQ2_KL {
    static constexpr int kType = 157, kGroup = 32, kBlock = 256, kBlockBytes = 86, kZero = 128;
    static constexpr int kHeaderBytes = 2;
    static float row_scale(const uint8_t* row) { return load_f16(row); }
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        const int high = load_unaligned<uint16_t>(p);
        for (int g = 0; g < 8; ++g) {
            d[g] = static_cast<float>(split_nibble(p + 2, g) + 16 * (high >> (2 * g) & 3) - 32);
            for (int j = 0; j < 16; ++j) {
                const int q = (p[6 + 16 * (g >> 1) + j] >> (4 * (g & 1)) & 15) + 16 * (p[70 + j] >> g & 1);
                codes[32 * g + 2 * j] = kIq2klCodes[q];
                codes[32 * g + 2 * j + 1] = kIq2klCodes[32 + q];
            }
        }
    }
#if defined(__AVX512VNNI__)
    // 16 bytes twice over: every byte at the places of both elements of its pair.
    static __m512i pairs(const uint8_t* p) {
        const __m512i order =
            _mm512_setr_epi64(0x0303020201010000, 0x0707060605050404, 0x0B0B0A0A09090808, 0x0F0F0E0E0D0D0C0C,
                              0x0303020201010000, 0x0707060605050404, 0x0B0B0A0A09090808, 0x0F0F0E0E0D0D0C0C);
        return _mm512_shuffle_epi8(
            _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), order);
    }
    static Codes512 wide(const uint8_t* p) {
        constexpr __mmask64 kSecond = 0xAAAAAAAAAAAAAAAA;
        const __m512i high = pairs(p + 70);
        Codes512 r;
        for (int i = 0; i < 4; ++i) {
            const __m512i q =
                _mm512_and_si512(wide::shift_halves(pairs(p + 6 + 16 * i), 0, 4), wide::bytes(15));
            const __m512i a = _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(wide::table16(kIq2klCodes), q),
                                                       kSecond, wide::table16(kIq2klCodes + 32), q);
            const __m512i b =
                _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(wide::table16(kIq2klCodes + 16), q), kSecond,
                                         wide::table16(kIq2klCodes + 48), q);
            r.q[i] = _mm512_mask_blend_epi8(wide::test_halves(high, 2 * i, 2 * i + 1), a, b);
        }
        const uint64_t codes = wide::split_nibble_bytes(load_unaligned<uint32_t>(p + 2)) |
                               _pdep_u64(load_unaligned<uint16_t>(p), 0x3030303030303030);
        r.d = _mm512_cvtepi32_ps(_mm512_sub_epi32(wide::lanes_of_bytes(codes), _mm512_set1_epi32(32)));
        return r;
    }
#endif
};

struct UnpackQ8_KV {
    static constexpr int kType = 151, kGroup = 32, kBlock = 32, kBlockBytes = 32, kZero = 128;
    static constexpr int kHeaderBytes = 8;
    static float row_scale(const uint8_t* row) { return load_unaligned<float>(row); }
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        for (int j = 0; j < 32; ++j) codes[j] = p[j] ^ 0x80;
        *d = 1.0f;
    }
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p) {
        Codes512 r;
        for (int i = 0; i < 4; ++i)
            r.q[i] = _mm512_xor_si512(_mm512_loadu_si512(p + 64 * i), wide::bytes(0x80));
        r.d = _mm512_set1_ps(1.0f);
        return r;
    }
#endif
};

}  // namespace ikpy
