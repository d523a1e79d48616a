// Unpackers of the trellis types. Generator and layouts: quant-formats.md#trellis-types. The read-time
// factors of IQ2_KT and IQ3_KT are part of their row scales here.
#pragma once
#include "kernels/matmul/unpacked.hpp"
#include "unpack/codes32.hpp"
#include "unpack/level_tables.hpp"
#include "unpack/wide.hpp"

namespace ikpy {
namespace trellis {

constexpr uint32_t kOffset = 4096, kOffsetIQ4 = 36864;

// Powers 1 .. 8 of the multiplier: value n of a group comes from seed * multiplier^n, so no value waits for
// another.
struct Powers {
    uint32_t of[16];  // twice, for two groups in one vector
};
constexpr Powers make_powers(int period) {
    Powers p{};
    uint32_t power = 1;
    for (int i = 0; i < 16; ++i) {
        if (i % period == 0) power = 1;
        power *= 0xCBAC1FED;
        p.of[i] = power;
    }
    return p;
}
alignas(64) inline constexpr Powers kPowers8 = make_powers(8), kPowers4 = make_powers(4);

// Codes (value + 128) of groups of V elements; value + 126 is the sum of four bytes below 64.
template <int V>
inline void codes_of(const uint32_t* seeds, int n_groups, uint8_t* codes) {
#if defined(__AVX2__)
    // Eight values per product; 32 codes at a time come to order after two packs.
    const auto powers =
        _mm256_load_si256(reinterpret_cast<const __m256i*>((V == 8 ? kPowers8 : kPowers4).of));
    const __m256i six_bits = _mm256_set1_epi32(0x3F3F3F3F), ones = _mm256_set1_epi8(1);
    for (int g = 0; g < n_groups; g += 32 / V, codes += 32) {
        __m256i v[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            const uint32_t* seed = seeds + g + j * (8 / V);
            const __m256i both =
                V == 8 ? _mm256_set1_epi32(static_cast<int>(*seed))
                       : _mm256_permutevar8x32_epi32(
                             _mm256_castsi128_si256(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(seed))),
                             _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
            const __m256i z = _mm256_and_si256(_mm256_mullo_epi32(both, powers), six_bits);
            v[j] = _mm256_maddubs_epi16(z, ones);  // pairs of bytes, twice per value
        }
        // Sums of two words below 127 are one byte each after packing the words' sums.
        const __m256i a = _mm256_hadd_epi16(v[0], v[1]), b = _mm256_hadd_epi16(v[2], v[3]);
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        const __m256i packed = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(a, b), order);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm256_add_epi8(packed, _mm256_set1_epi8(2)));
    }
#else
    for (int g = 0; g < n_groups; ++g)
        for (int i = 0; i < V; ++i) {
            const uint32_t z = (seeds[g] * kPowers8.of[i]) & 0x3F3F3F3F;
            codes[V * g + i] = static_cast<uint8_t>((z * 0x01010101 >> 24) + 2);
        }
#endif
}

#if defined(__AVX512VNNI__)
// 16 sums of bytes plus `start`, in dwords.
inline __m512i sums(__m512i seeds, __m512i powers, int start) {
    const __m512i z = _mm512_and_si512(_mm512_mullo_epi32(seeds, powers), _mm512_set1_epi32(0x3F3F3F3F));
    return _mm512_dpbusd_epi32(_mm512_set1_epi32(start), z, _mm512_set1_epi32(0x01010101));
}

// Four vectors of dwords below 256 as 64 bytes in order.
inline __m512i pack_bytes(const __m512i* v) {
    const __m512i a = _mm512_packus_epi32(v[0], v[1]), b = _mm512_packus_epi32(v[2], v[3]);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, _mm512_packus_epi16(a, b));
}

// 64 codes from eight groups of eight; their seeds are lanes 8 * half .. + 7.
inline __m512i codes64(__m512i seeds, int half) {
    const __m512i powers = _mm512_load_si512(kPowers8.of);
    __m512i v[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        const __m512i lanes =
            _mm512_add_epi32(_mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1),
                             _mm512_set1_epi32(8 * half + 2 * j));
        v[j] = sums(_mm512_permutexvar_epi32(lanes, seeds), powers, 2);
    }
    return pack_bytes(v);
}

// 64 codes from sixteen groups of four.
inline __m512i codes64_of4(__m512i seeds) {
    const __m512i powers = _mm512_load_si512(kPowers4.of);
    __m512i v[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        const __m512i lanes = _mm512_add_epi32(
            _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), _mm512_set1_epi32(4 * j));
        v[j] = sums(_mm512_permutexvar_epi32(lanes, seeds), powers, 2);
    }
    return pack_bytes(v);
}

// Codes of 256 values from Codes512 whose q are their seeds, V values each.
template <int V>
inline Codes512 codes_of_seeds(const Codes512& seeds) {
    Codes512 r = seeds;
    for (int i = 0; i < 4; ++i) r.q[i] = V == 8 ? codes64(seeds.q[i / 2], i % 2) : codes64_of4(seeds.q[i]);
    return r;
}

inline __m512i bytes_as_lanes(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// 16 words plus the offset.
inline __m512i word_seeds(const uint8_t* p) {
    return _mm512_add_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))),
                            _mm512_set1_epi32(kOffset));
}

// Nibbles of four bytes, those of all low halves first, as lanes 0 .. 7.
inline __m512i split_nibble_lanes(const uint8_t* p) {
    const uint32_t v = load_unaligned<uint32_t>(p);
    const uint64_t nibbles = (v & 0x0F0F0F0F) | static_cast<uint64_t>(v >> 4 & 0x0F0F0F0F) << 32;
    return _mm512_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(nibbles)));
}

// Scales that are levels of the normal 16-level table.
inline __m512 level_scales(__m512i lanes) {
    const __m512i codes = _mm512_shuffle_epi8(wide::table16(kIq4Codes), lanes);
    return _mm512_cvtepi32_ps(
        _mm512_sub_epi32(_mm512_and_si512(codes, _mm512_set1_epi32(255)), _mm512_set1_epi32(128)));
}
#endif

inline float level_scale(int nibble) { return static_cast<float>(kIq4Codes[nibble] - 128); }

inline int split_nibble(const uint8_t* p, int g) { return p[g & 3] >> (4 * (g >> 2)) & 15; }

#if defined(__AVX2__)
// Seeds and scales eight at a time: one by one they took twice as long as the generator.
inline __m256i eight_bytes(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline __m256i field(__m256i v, int shift, int mask) {
    return _mm256_and_si256(_mm256_srl_epi32(v, _mm_cvtsi32_si128(shift)), _mm256_set1_epi32(mask));
}
inline void put_seeds(__m256i offset, __m256i low, __m256i middle, __m256i top, uint32_t* at) {
    const __m256i upper = _mm256_or_si256(_mm256_slli_epi32(middle, 8), _mm256_slli_epi32(top, 12));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at),
                        _mm256_add_epi32(offset, _mm256_or_si256(low, upper)));
}
// Eight nibbles of four bytes: the low ones of all bytes, then the high ones.
inline uint64_t split_nibbles(const uint8_t* p) {
    return c32::split_nibble_bytes(load_unaligned<uint32_t>(p));
}
inline void put_level_scales(uint64_t nibbles, float* d) {
    const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(kIq4Codes));
    const __m128i codes = _mm_shuffle_epi8(table, _mm_cvtsi64_si128(static_cast<int64_t>(nibbles)));
    c32::scaled8(1.0f, static_cast<uint64_t>(_mm_cvtsi128_si64(codes)), 128, d);
}
#endif

}  // namespace trellis

struct UnpackIQ1_KT {
    static constexpr int kType = 158, kGroup = 32, kBlock = 256, kBlockBytes = 56, kZero = 128;
    static constexpr int kHeaderBytes = 4;
    static float row_scale(const uint8_t* row) { return load_unaligned<float>(row); }
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        uint32_t seeds[32];
#if defined(__AVX2__)
        trellis::put_level_scales(load_unaligned<uint64_t>(p) & 0x0F0F0F0F0F0F0F0F, d);
        const __m256i offset = _mm256_set1_epi32(trellis::kOffset);
        const __m256i bits = _mm256_setr_epi32(4, 5, 6, 7, 12, 13, 14, 15), one = _mm256_set1_epi32(1);
        for (int h = 0; h < 4; ++h) {
            const __m256i top = _mm256_set1_epi32(load_unaligned<uint16_t>(p + 2 * h));
            trellis::put_seeds(offset, trellis::eight_bytes(p + 8 + 8 * h),
                               trellis::field(trellis::eight_bytes(p + 40 + 8 * (h & 1)), 4 * (h >> 1), 15),
                               _mm256_and_si256(_mm256_srlv_epi32(top, bits), one), seeds + 8 * h);
        }
#else
        for (int s = 0; s < 8; ++s) d[s] = trellis::level_scale(p[s] & 15);
        for (int g = 0; g < 32; ++g)
            seeds[g] = trellis::kOffset + p[8 + g] + 256 * (p[40 + (g & 15)] >> (4 * (g >> 4)) & 15) +
                       4096 * (p[g >> 2] >> (4 + (g & 3)) & 1);
#endif
        trellis::codes_of<8>(seeds, 32, codes);
    }
#if defined(__AVX512VNNI__)
    static constexpr int kSeedValues = 8;
    static Codes512 wide(const uint8_t* p) { return trellis::codes_of_seeds<8>(seeds(p)); }
    static Codes512 seeds(const uint8_t* p) {
        const __m512i middle = trellis::bytes_as_lanes(p + 40), fifteen = _mm512_set1_epi32(15);
        // Upper nibbles of the first eight bytes are the top bits of the 32 indices.
        const auto top = static_cast<uint32_t>(_pext_u64(load_unaligned<uint64_t>(p), 0xF0F0F0F0F0F0F0F0));
        Codes512 r;
        for (int h = 0; h < 2; ++h) {
            const __m512i nibble = _mm512_and_si512(_mm512_srli_epi32(middle, 4 * h), fifteen);
            const __m512i low =
                _mm512_add_epi32(trellis::bytes_as_lanes(p + 8 + 16 * h), _mm512_slli_epi32(nibble, 8));
            r.q[h] = _mm512_add_epi32(low, _mm512_set1_epi32(trellis::kOffset));
            r.q[h] = _mm512_mask_add_epi32(r.q[h], static_cast<__mmask16>(top >> (16 * h)), r.q[h],
                                           _mm512_set1_epi32(4096));
        }
        const __m128i scales = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
        r.d = trellis::level_scales(_mm512_and_si512(_mm512_cvtepu8_epi32(scales), fifteen));
        return r;
    }
#endif
};

struct UnpackIQ2_KT {
    static constexpr int kType = 153, kGroup = 32, kBlock = 256, kBlockBytes = 68, kZero = 128;
    static constexpr int kHeaderBytes = 4;
    static float row_scale(const uint8_t* row) { return 1.05f * load_unaligned<float>(row); }
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        uint32_t seeds[32];
#if defined(__AVX2__)
        trellis::put_level_scales(trellis::split_nibbles(p), d);
#else
        for (int s = 0; s < 8; ++s) d[s] = trellis::level_scale(trellis::split_nibble(p, s));
#endif
        for (int g = 0; g < 32; ++g) seeds[g] = trellis::kOffset + load_unaligned<uint16_t>(p + 4 + 2 * g);
        trellis::codes_of<8>(seeds, 32, codes);
    }
#if defined(__AVX512VNNI__)
    static constexpr int kSeedValues = 8;
    static Codes512 wide(const uint8_t* p) { return trellis::codes_of_seeds<8>(seeds(p)); }
    static Codes512 seeds(const uint8_t* p) {
        Codes512 r;
        for (int h = 0; h < 2; ++h) r.q[h] = trellis::word_seeds(p + 4 + 32 * h);
        r.d = trellis::level_scales(trellis::split_nibble_lanes(p));
        return r;
    }
#endif
};

// Magnitudes of the generator's values with signs of their own.
struct UnpackIQ3_KT {
    static constexpr int kType = 154, kGroup = 32, kBlock = 256, kBlockBytes = 100, kZero = 128;
    static constexpr int kHeaderBytes = 4;
    static float row_scale(const uint8_t* row) { return 1.01f * load_unaligned<float>(row); }
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        uint32_t seeds[32];
#if defined(__AVX2__)
        c32::scaled8(1.0f, trellis::split_nibbles(p), 0, d);
#else
        for (int s = 0; s < 8; ++s) d[s] = static_cast<float>(trellis::split_nibble(p, s));
#endif
        for (int g = 0; g < 32; ++g) seeds[g] = trellis::kOffset + load_unaligned<uint16_t>(p + 4 + 2 * g);
        trellis::codes_of<8>(seeds, 32, codes);
        const c32::Codes32 signs = c32::load(p + 68);
        for (int s = 0; s < 8; ++s) {
            const c32::Codes32 v = c32::load(codes + 32 * s), below = reinterpret_cast<c32::Codes32>(v < 128);
            // Negated where the value's own sign and the wanted one differ: 256 - code is 128 - value.
            const c32::Codes32 turn = below ^ c32::test(signs, s);
            c32::store(codes + 32 * s, (v ^ turn) - turn);
        }
    }
#if defined(__AVX512VNNI__)
    static constexpr int kSeedValues = 8;
    // Bit s of word e of the third vector: element 32 * s + e is negative.
    static constexpr bool kSignWords = true;
    static Codes512 seeds(const uint8_t* p) {
        Codes512 r;
        for (int h = 0; h < 2; ++h) r.q[h] = trellis::word_seeds(p + 4 + 32 * h);
        r.q[2] = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 68)));
        r.d = _mm512_cvtepi32_ps(trellis::split_nibble_lanes(p));
        return r;
    }
    static Codes512 wide(const uint8_t* p) {
        const __m512i signs = wide::twice(p + 68), zero = wide::bytes(128);
        Codes512 r = trellis::codes_of_seeds<8>(seeds(p));
        for (int i = 0; i < 4; ++i) {
            const __m512i magnitude = _mm512_abs_epi8(_mm512_xor_si512(r.q[i], zero));
            r.q[i] = _mm512_mask_sub_epi8(_mm512_add_epi8(magnitude, zero),
                                          wide::test_halves(signs, 2 * i, 2 * i + 1), zero, magnitude);
        }
        return r;
    }
#endif
};

struct UnpackIQ4_KT {
    static constexpr int kType = 155, kGroup = 32, kBlock = 256, kBlockBytes = 128, kZero = 128;
    static constexpr int kHeaderBytes = 4;
    static float row_scale(const uint8_t* row) { return load_unaligned<float>(row); }
    static uint32_t offset(uint32_t word) { return word & 1 ? trellis::kOffsetIQ4 : trellis::kOffset; }
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        uint32_t seeds[64];
#if defined(__AVX2__)
        const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        const __m256i scale = _mm256_sub_epi32(trellis::field(words, 1, 127), _mm256_set1_epi32(64));
        _mm256_storeu_ps(d, _mm256_cvtepi32_ps(scale));
        const __m256i turns = _mm256_setr_epi32(8, 11, 14, 17, 20, 23, 26, 29), seven = _mm256_set1_epi32(7);
        for (int s = 0; s < 8; ++s) {
            const uint32_t word = load_unaligned<uint32_t>(p + 4 * s);
            const __m256i top = _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int>(word)), turns);
            trellis::put_seeds(_mm256_set1_epi32(static_cast<int>(offset(word))),
                               trellis::eight_bytes(p + 32 + 8 * s),
                               trellis::field(trellis::eight_bytes(p + 96 + 8 * (s & 3)), 4 * (s >> 2), 15),
                               _mm256_and_si256(top, seven), seeds + 8 * s);
        }
#else
        for (int s = 0; s < 8; ++s) {
            const uint32_t word = load_unaligned<uint32_t>(p + 4 * s);
            d[s] = static_cast<float>(static_cast<int>((word & 255) >> 1) - 64);
            for (int t = 0; t < 8; ++t) {
                const int g = 8 * s + t;
                seeds[g] = offset(word) + p[32 + g] + 256 * (p[96 + (g & 31)] >> (4 * (g >> 5)) & 15) +
                           4096 * (word >> (8 + 3 * t) & 7);
            }
        }
#endif
        trellis::codes_of<4>(seeds, 64, codes);
    }
#if defined(__AVX512VNNI__)
    static constexpr int kSeedValues = 4;
    static Codes512 wide(const uint8_t* p) { return trellis::codes_of_seeds<4>(seeds(p)); }
    static Codes512 seeds(const uint8_t* p) {
        const __m512i words = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
        const __m512i turns = _mm512_setr_epi32(8, 11, 14, 17, 20, 23, 26, 29, 8, 11, 14, 17, 20, 23, 26, 29);
        Codes512 r;
        for (int i = 0; i < 4; ++i) {
            const __m512i lanes = _mm512_add_epi32(
                _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1), _mm512_set1_epi32(2 * i));
            const __m512i word = _mm512_permutexvar_epi32(lanes, words);
            const __m512i top = _mm512_and_si512(_mm512_srlv_epi32(word, turns), _mm512_set1_epi32(7));
            const __m512i middle = _mm512_and_si512(
                _mm512_srli_epi32(trellis::bytes_as_lanes(p + 96 + 16 * (i & 1)), 4 * (i >> 1)),
                _mm512_set1_epi32(15));
            __m512i seed = _mm512_add_epi32(trellis::bytes_as_lanes(p + 32 + 16 * i),
                                            _mm512_set1_epi32(trellis::kOffset));
            seed = _mm512_add_epi32(seed, _mm512_slli_epi32(middle, 8));
            seed = _mm512_add_epi32(seed, _mm512_slli_epi32(top, 12));
            r.q[i] = _mm512_mask_add_epi32(seed, _mm512_test_epi32_mask(word, _mm512_set1_epi32(1)), seed,
                                           _mm512_set1_epi32(trellis::kOffsetIQ4 - trellis::kOffset));
        }
        const __m512i s = _mm512_srli_epi32(_mm512_and_si512(words, _mm512_set1_epi32(255)), 1);
        r.d = _mm512_cvtepi32_ps(_mm512_sub_epi32(s, _mm512_set1_epi32(64)));
        return r;
    }
#endif
};

}  // namespace ikpy
