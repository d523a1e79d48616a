// Unpackers of the types with a scale per row: IQ2_KS, IQ3_KS, IQ4_KS, IQ5_KS, IQ4_KSS, IQ2_KL, Q8_KV.
// Layouts: quant-formats.md#scales-per-row.
#pragma once
#include "kernels/matmul/unpacked.hpp"
#include "unpack/codes32.hpp"
#include "unpack/level_tables.hpp"
#include "unpack/wide.hpp"

namespace ikpy {

// Scale bytes of IQ4_KS, IQ5_KS and IQ4_KSS: bit 0 selects the table, the rest is an odd scale.
inline void odd_scales(uint64_t codes, float* d) { c32::scaled8(1.0f, codes & 0xFEFEFEFEFEFEFEFE, 127, d); }

#if defined(__AVX512VNNI__)
namespace wide {

inline __mmask16 odd_scale_tables(uint64_t codes) {
    return static_cast<__mmask16>(_pext_u64(codes, 0x0101010101010101));
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
    static constexpr int kType = 145, kGroup = 32, kBlock = 256, kBlockBytes = 70, kZero = kIq2Zero;
    static constexpr int kLow = 0, kHigh = kIq2Codes[7] - kIq2Codes[0];
    static constexpr int kHeaderBytes = 2;
    static float row_scale(const uint8_t* row) { return load_f16(row); }
    template <class C>
    static void block(const uint8_t* p, C codes, float* d, float*) {
        c32::scaled8(1.0f, c32::nibble_bytes(load_unaligned<uint32_t>(p + 2)) | c32::bit_bytes(p[1]) << 4, 16,
                     d);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i)
            c32::store(codes + 32 * i,
                       c32::lookup(kIq2Low.of + 4 * (p[0] >> i & 1), c32::two_bit_fields(p + 6, i)));
    }
#if defined(__AVX512VNNI__)
    static constexpr int kStep = 5;
    static Codes512 wide(const uint8_t* p) { return wide::with_steps<UnpackIQ2_KS>(unshifted(p)); }
    static constexpr const uint8_t* kLevels = kIq2Low.of;
    static constexpr int kLevelCount = 4;
    static Codes512 unshifted(const uint8_t* p) { return wide::levels_of<UnpackIQ2_KS>(level_numbers(p)); }
    static Codes512 level_numbers(const uint8_t* p) {
        Codes512 r;
        for (int i = 0; i < 4; ++i) r.q[i] = wide::two_bit_fields(p + 6, i);
        r.d = wide::five_bit_scales(wide::nibble_bytes(load_unaligned<uint32_t>(p + 2)), p[1]);
        r.shifted = p[0];
        return r;
    }
#endif
};

struct UnpackIQ3_KS {
    static constexpr int kType = 156, kGroup = 32, kBlock = 256, kBlockBytes = 102, kZero = kIq3Zero;
    static constexpr int kLow = 0, kHigh = kIq3Codes[15] - kIq3Codes[0];
    static constexpr int kHeaderBytes = 2;
    static float row_scale(const uint8_t* row) { return load_f16(row); }
    template <class C>
    static void block(const uint8_t* p, C codes, float* d, float*) {
        const uint64_t low = c32::split_nibble_bytes(load_unaligned<uint32_t>(p + 2));
        c32::scaled8(1.0f, low | c32::bit_bytes(p[0]) << 4, 16, d);
        const c32::Codes32 high = c32::load(p + 70);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            const c32::Codes32 q = c32::two_bit_fields(p + 6, i) | c32::moved_bit(high, i, 2);
            c32::store(codes + 32 * i, c32::lookup(kIq3Low.of + 8 * (p[1] >> i & 1), q));
        }
    }
#if defined(__AVX512VNNI__)
    static constexpr int kStep = 4;
    static Codes512 wide(const uint8_t* p) { return wide::with_steps<UnpackIQ3_KS>(unshifted(p)); }
    static constexpr const uint8_t* kLevels = kIq3Low.of;
    static constexpr int kLevelCount = 8;
    static Codes512 unshifted(const uint8_t* p) { return wide::levels_of<UnpackIQ3_KS>(level_numbers(p)); }
    static Codes512 level_numbers(const uint8_t* p) {
        const __m512i high = wide::twice(p + 70);
        Codes512 r;
        for (int i = 0; i < 4; ++i) {
            const __m512i low = wide::two_bit_fields(p + 6, i);
            const __mmask64 bits = wide::test_halves(high, 2 * i, 2 * i + 1);
            r.q[i] = _mm512_mask_add_epi8(low, bits, low, wide::bytes(4));
        }
        r.d = wide::five_bit_scales(wide::split_nibble_bytes(load_unaligned<uint32_t>(p + 2)), p[0]);
        r.shifted = p[1];
        return r;
    }
#endif
};

struct UnpackIQ4_KS {
    static constexpr int kType = 144, kGroup = 32, kBlock = 256, kBlockBytes = 136, kZero = 128;
    static constexpr int kHeaderBytes = 4;
    static float row_scale(const uint8_t* row) { return load_unaligned<float>(row); }
    template <class C>
    static void block(const uint8_t* p, C codes, float* d, float*) {
        odd_scales(load_unaligned<uint64_t>(p), d);
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g) {
            const uint8_t* table = kIq4Codes + 16 * (p[g] & 1);
            c32::store(codes + 32 * g, c32::lookup(table, c32::nibbles(p + 8 + 16 * g)));
        }
    }
#if defined(__AVX512VNNI__)
    static constexpr int kStep = 4;
    static Codes512 wide(const uint8_t* p) { return wide::with_steps<UnpackIQ4_KS>(unshifted(p)); }
    static constexpr const uint8_t* kLevels = kIq4Codes;
    static constexpr int kLevelCount = 16;
    static Codes512 unshifted(const uint8_t* p) { return wide::levels_of<UnpackIQ4_KS>(level_numbers(p)); }
    template <int Place = 0>
    static Codes512 level_numbers(const uint8_t* p) {
        const uint64_t scales = load_unaligned<uint64_t>(p);
        Codes512 r;
        for (int i = 0; i < 4; ++i) r.q[i] = wide::nibbles16<Place>(wide::lanes_aabb(p + 8 + 32 * i));
        r.d = wide::odd_scales(scales);
        r.shifted = wide::odd_scale_tables(scales);
        return r;
    }
    static constexpr Pairs kPairs = Pairs::kConsecutive;
    static Codes512 halves(const uint8_t* p) {
        const uint64_t scales = load_unaligned<uint64_t>(p);
        Codes512 r;
        wide::nibble_halves(p + 8, r.q);
        wide::lookup_all(wide::table16(kIq4Codes), r.q);
        r.d = wide::odd_scales(scales);
        r.shifted = wide::odd_scale_tables(scales);
        return r;
    }
#endif
};

struct UnpackIQ5_KS {
    static constexpr int kType = 152, kGroup = 32, kBlock = 256, kBlockBytes = 168, kZero = 128;
    static constexpr int kHeaderBytes = 4;
    static float row_scale(const uint8_t* row) { return load_unaligned<float>(row); }
    template <class C>
    static void block(const uint8_t* p, C codes, float* d, float*) {
        odd_scales(load_unaligned<uint64_t>(p), d);
        const c32::Codes32 high = c32::load(p + 136);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            const c32::Codes32 q = c32::nibble_fields(p + 8, i);
            const uint8_t* table = kIq5Codes + 32 * (p[i] & 1);
            c32::store(codes + 32 * i,
                       c32::select_by_bit(high, i, c32::lookup(table + 16, q), c32::lookup(table, q)));
        }
    }
#if defined(__AVX512VNNI__)
    static constexpr int kStep = 2;
    static Codes512 wide(const uint8_t* p) { return wide::with_steps<UnpackIQ5_KS>(unshifted(p)); }
    static constexpr const uint8_t* kLevels = kIq5Codes;
    static constexpr int kLevelCount = 32;
    static Codes512 level_numbers(const uint8_t* p) {
        return made_of_numbers(p, [](__m512i low, __mmask64 bits) {
            return _mm512_mask_add_epi8(low, bits, low, wide::bytes(16));
        });
    }
    static Codes512 unshifted(const uint8_t* p) {
        const __m512i low_table = wide::table16(kIq5Codes), high_table = wide::table16(kIq5Codes + 16);
        return made_of_numbers(p, [&](__m512i low, __mmask64 bits) {
            return _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(low_table, low), bits, high_table, low);
        });
    }
    // code(low, bits): the codes of 64 numbers, of which low has four bits and bits the fifth.
    template <class F>
    static Codes512 made_of_numbers(const uint8_t* p, F code) {
        const __m512i high = wide::twice(p + 136);
        const uint64_t scales = load_unaligned<uint64_t>(p);
        Codes512 r;
        for (int i = 0; i < 4; ++i)
            r.q[i] = code(wide::nibbles32(p + 8 + 32 * i), wide::test_halves(high, 2 * i, 2 * i + 1));
        r.d = wide::odd_scales(scales);
        r.shifted = wide::odd_scale_tables(scales);
        return r;
    }
    static constexpr Pairs kPairs = Pairs::kAlternating;
    static Codes512 halves(const uint8_t* p) {
        const __m512i low_table = wide::table16(kIq5Codes), high_table = wide::table16(kIq5Codes + 16);
        const uint64_t scales = load_unaligned<uint64_t>(p);
        Codes512 r;
        wide::alternating_nibble_halves(p + 8, r.q);
        for (int i = 0; i < 4; ++i)
            r.q[i] = _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(low_table, r.q[i]),
                                              wide::alternating_bits(p + 136, i), high_table, r.q[i]);
        r.d = wide::odd_scales(scales);
        r.shifted = wide::odd_scale_tables(scales);
        return r;
    }
#endif
};

// Words of even parity; the freed low bits of eight words are the scale byte.
struct UnpackIQ4_KSS {
    static constexpr int kType = 146, kGroup = 32, kBlock = 256, kBlockBytes = 128, kZero = 128;
    static constexpr int kHeaderBytes = 4;
    static float row_scale(const uint8_t* row) { return load_unaligned<float>(row); }
    template <class C>
    static void block(const uint8_t* p, C codes, float* d, float*) {
        uint64_t scales = 0;
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g) {
            // The low bits of the four words of a quadword, moved to its top by the product.
            constexpr uint64_t kLowBits = 0x0001000100010001, kGather = 0x1000200040008000;
            const uint64_t a = load_unaligned<uint64_t>(p + 16 * g) & kLowBits,
                           b = load_unaligned<uint64_t>(p + 16 * g + 8) & kLowBits;
            const uint64_t scale = (a * kGather >> 60) | (b * kGather >> 60) << 4;
            scales |= scale << 8 * g;
            const auto words = reinterpret_cast<c32::Words32>(c32::twice(p + 16 * g)) & 0xFFFE;
            const auto v = reinterpret_cast<c32::Codes32>(words ^ words >> 1);
            c32::store(codes + 32 * g,
                       c32::lookup(kIq4Codes + 16 * (scale & 1), c32::shift_halves(v, 0, 4) & 15));
        }
        odd_scales(scales, d);
    }
#if defined(__AVX512VNNI__)
    static constexpr int kStep = 4;
    // Words without their low bits, which no longer depend on each other.
    static __m512i nibbles_of(__m512i words) {
        // words & ~1 ^ words >> 1
        return _mm512_ternarylogic_epi32(words, _mm512_set1_epi16(-2), _mm512_srli_epi16(words, 1), 0x6A);
    }
    // The nibbles of groups 4 * h .. + 3; adds their scale bytes.
    static __m512i four_groups(const uint8_t* p, int h, uint64_t* scales) {
        const __m512i words = _mm512_loadu_si512(p + 64 * h);
        *scales |= static_cast<uint64_t>(_mm512_test_epi16_mask(words, _mm512_set1_epi16(1))) << (32 * h);
        return nibbles_of(words);
    }
    static Codes512 wide(const uint8_t* p) { return wide::with_steps<UnpackIQ4_KSS>(unshifted(p)); }
    static constexpr const uint8_t* kLevels = kIq4Codes;
    static constexpr int kLevelCount = 16;
    static Codes512 unshifted(const uint8_t* p) { return wide::levels_of<UnpackIQ4_KSS>(level_numbers(p)); }
    template <int Place = 0>
    static Codes512 level_numbers(const uint8_t* p) {
        const __m512i first = _mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3);
        const __m512i second = _mm512_setr_epi64(4, 5, 4, 5, 6, 7, 6, 7);
        Codes512 r;
        uint64_t scales = 0;
        for (int h = 0; h < 2; ++h) {
            const __m512i v = four_groups(p, h, &scales);
            r.q[2 * h] = wide::nibbles16<Place>(_mm512_permutexvar_epi64(first, v));
            r.q[2 * h + 1] = wide::nibbles16<Place>(_mm512_permutexvar_epi64(second, v));
        }
        r.d = wide::odd_scales(scales);
        r.shifted = wide::odd_scale_tables(scales);
        return r;
    }
    static constexpr Pairs kPairs = Pairs::kConsecutive;
    static Codes512 halves(const uint8_t* p) {
        Codes512 r;
        uint64_t scales = 0;
        for (int h = 0; h < 2; ++h) {
            const __m512i v = four_groups(p, h, &scales);
            r.q[2 * h] = wide::low_nibbles(v);
            r.q[2 * h + 1] = wide::high_nibbles(v);
        }
        wide::lookup_all(wide::table16(kIq4Codes), r.q);
        r.d = wide::odd_scales(scales);
        r.shifted = wide::odd_scale_tables(scales);
        return r;
    }
#endif
};

// The 32 pairs of IQ2_KL as codes (level + 63): first elements, then second elements.
alignas(64) inline constexpr uint8_t kIq2klCodes[64] = {
    0,  0,  23,  23, 23, 23, 40, 40, 40,  40,  40, 53, 53, 53, 53, 64,  64, 64,  64, 64, 76, 76,
    76, 76, 76,  91, 91, 91, 91, 91, 110, 110, 40, 76, 0,  53, 76, 110, 23, 40,  64, 76, 91, 0,
    64, 76, 110, 40, 53, 64, 76, 91, 23,  40,  53, 64, 76, 0,  40, 64,  91, 110, 40, 76};

struct Iq2klPairs {
    uint16_t of[32];
};
constexpr Iq2klPairs make_iq2kl_pairs() {
    Iq2klPairs pairs{};
    for (int j = 0; j < 32; ++j)
        pairs.of[j] = static_cast<uint16_t>(kIq2klCodes[j] | kIq2klCodes[32 + j] << 8);
    return pairs;
}
alignas(64) inline constexpr Iq2klPairs kIq2klPairs = make_iq2kl_pairs();

struct UnpackIQ2_KL {
    static constexpr int kType = 157, kGroup = 32, kBlock = 256, kBlockBytes = 86, kZero = kIq3Zero;
    static constexpr int kLow = 0, kHigh = 110;
    static constexpr int kHeaderBytes = 2;
    static float row_scale(const uint8_t* row) { return load_f16(row); }
    template <class C>
    static void block(const uint8_t* p, C codes, float* d, float*) {
        const uint64_t low = c32::split_nibble_bytes(load_unaligned<uint32_t>(p + 2));
        c32::scaled8(1.0f, low | c32::two_bit_bytes(load_unaligned<uint16_t>(p)) << 4, 32, d);
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g) {
            // First elements of the pairs in the left half, second ones in the right half.
            const c32::Codes32 q = c32::field(c32::twice(p + 6 + 16 * (g >> 1)), 4 * (g & 1), 15);
            const c32::Codes32 levels = c32::select_by_bit(
                c32::twice(p + 70), g, c32::lookup_halves(kIq2klCodes + 16, kIq2klCodes + 48, q),
                c32::lookup_halves(kIq2klCodes, kIq2klCodes + 32, q));
            c32::store(codes + 32 * g, c32::zipped_halves(levels));
        }
    }
#if defined(__AVX512VNNI__)
    // 16 bytes as words, twice over.
    static __m512i words(const uint8_t* p) {
        return _mm512_cvtepu8_epi16(
            _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
    }
    static Codes512 wide(const uint8_t* p) {
        // A pair is one word of a table of 32: only the low five bits of the index count.
        const __m512i table = _mm512_load_si512(kIq2klPairs.of);
        const __m512i high = _mm512_slli_epi16(words(p + 70), 4), fifth = _mm512_set1_epi16(16);
        Codes512 r;
        for (int i = 0; i < 4; ++i) {
            const __m512i nibbles = wide::shift_halves(words(p + 6 + 16 * i), 0, 4);
            const __m512i top = wide::shift_halves(high, 2 * i, 2 * i + 1);
            // Bit 4 from the high bits, all others from the nibbles.
            const __m512i index = _mm512_ternarylogic_epi32(nibbles, top, fifth, 0xD8);
            r.q[i] = _mm512_permutexvar_epi16(index, table);
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
    static constexpr bool kUnitScales = true;
    static float row_scale(const uint8_t* row) { return load_unaligned<float>(row); }
    template <class C>
    static void block(const uint8_t* p, C codes, float* d, float*) {
        c32::store(codes, c32::load(p) ^ 0x80);
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
