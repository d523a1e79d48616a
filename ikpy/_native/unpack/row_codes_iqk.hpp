// RowCodes (unpack/row_codes.hpp) of the IQ*_K, IQ*_KS, IQ2_KL and IQ4_KSS types.
#pragma once
#include "unpack/iqk.hpp"
#include "unpack/row_codes.hpp"
#include "unpack/row_scale.hpp"

#if defined(__AVX2__) && !defined(__AVX512VNNI__)

namespace ikpy {
namespace row_codes {

inline __m256i masks(__m256i bits, __m256i own) {
    return _mm256_cmpeq_epi32(_mm256_and_si256(bits, own), own);
}

// Masks of eight bits, and of the even and odd ones of 16.
inline __m256i masks_of_8(int bits) {
    return masks(all(bits), _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128));
}
inline void masks_of_16(int bits, __m256i* out) {
    out[0] = masks(all(bits), _mm256_setr_epi32(1, 4, 16, 64, 256, 1024, 4096, 16384));
    out[1] = masks(all(bits), _mm256_setr_epi32(2, 8, 32, 128, 512, 2048, 8192, 32768));
}

// The same of 16 bits as words, those of even bits first.
inline __m256i word_masks_of_16(int bits) {
    const __m256i own = _mm256_setr_epi16(1, 4, 16, 64, 256, 1024, 4096, 16384, 2, 8, 32, 128, 512, 2048,
                                          8192, static_cast<int16_t>(32768));
    return _mm256_cmpeq_epi16(_mm256_and_si256(_mm256_set1_epi16(static_cast<int16_t>(bits)), own), own);
}

// Scales of IQ4_K and IQ5_K: 4 low bits at p + 8, 2 high bits at p + 4.
inline void six_bits(const uint8_t* p, __m256* out) {
    const __m256i low = bytes_as_dwords(p + 8);
    const __m256i high = _mm256_srlv_epi32(all(load_unaligned<int32_t>(p + 4)),
                                           _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    const __m256i even = _mm256_slli_epi32(_mm256_and_si256(high, all(3)), 4);
    const __m256i odd = _mm256_slli_epi32(_mm256_and_si256(high, all(12)), 2);
    out[0] = floats_less(_mm256_or_si256(low_nibble(low), even), 32);
    out[1] = floats_less(_mm256_or_si256(high_nibble(low), odd), 32);
}

// Odd scales whose lowest bit selects the table.
inline void odd_scales(__m256i bytes, BlockScales* out) {
    out->d[0] = floats_less(_mm256_and_si256(bytes, all(254)), 127);
    out->shifted[0] = _mm256_srai_epi32(_mm256_slli_epi32(bytes, 31), 31);
}

alignas(16) inline constexpr Levels<32> kIq5 = levels_of<32>(kIq5Codes);
alignas(16) inline constexpr Levels<64> kIq6 = levels_of<64>(kIq6Codes);

// Levels of the lower and of the upper two bits of a nibble.
struct TwoBitLevels {
    uint8_t lower[16], upper[16];
};
constexpr TwoBitLevels two_bit_levels(const uint8_t* codes) {
    TwoBitLevels levels{};
    for (int i = 0; i < 16; ++i) {
        levels.lower[i] = codes[i & 3];
        levels.upper[i] = codes[i >> 2];
    }
    return levels;
}
alignas(16) inline constexpr TwoBitLevels kIq2 = two_bit_levels(kIq2Low.of);

// Two fields of two bits are looked up at a time: neither is cut out of its nibble.
template <class C>
inline void two_bit_codes(const uint8_t* qs, C to) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
        const Codes32 v = c32::load(qs + 32 * h), low = v & 15, high = c32::field(v, 4, 15);
        c32::store(to + 128 * h, c32::lookup(kIq2.lower, low));
        c32::store(to + 128 * h + 32, c32::lookup(kIq2.upper, low));
        c32::store(to + 128 * h + 64, c32::lookup(kIq2.lower, high));
        c32::store(to + 128 * h + 96, c32::lookup(kIq2.upper, high));
    }
}

// Two bits of 256 columns and a third one of `high`.
template <class C>
inline void iq3_codes(const uint8_t* qs, const uint8_t* high, C to) {
    const Codes32 third = c32::load(high);
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
        const c32::ThreeBits v = c32::three_bit_fields(c32::load(qs + 32 * h), third, h);
        // Look-ups see four bits and the highest one, which fields of three bits leave free.
        c32::store(to + 128 * h, c32::lookup(kIq3Low.of, v.even));
        c32::store(to + 128 * h + 32, c32::lookup(kIq3Low.of, v.odd));
        c32::store(to + 128 * h + 64, c32::lookup(kIq3Low.of, c32::right(v.even, 4)));
        c32::store(to + 128 * h + 96, c32::lookup(kIq3Low.of, c32::right(v.odd, 4)));
    }
}

// Nibbles of 256 columns and a fifth bit of `high`.
template <class C>
inline void iq5_codes(const uint8_t* qs, const uint8_t* high, C to) {
    const Codes32 fifth = c32::load(high);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        const Codes32 q = c32::nibble_fields(qs, i);
        c32::store(to + 32 * i,
                   c32::select_by_bit(fifth, i, c32::lookup(kIq5.of + 16, q), c32::lookup(kIq5.of, q)));
    }
}

// Of IQ4_K and IQ5_K.
struct SixBitScales {
    static BlockScales scales(const uint8_t* p) {
        BlockScales s;
        six_bits(p, s.d);
        masks_of_16(load_unaligned<uint16_t>(p + 2), s.shifted);
        s.factor = load_f16(p);
        return s;
    }
};

// Of IQ4_KS and IQ5_KS.
struct OddScales {
    static BlockScales scales(const uint8_t* p) {
        BlockScales s;
        odd_scales(bytes_as_dwords(p), &s);
        return s;
    }
};

}  // namespace row_codes

template <>
struct RowCodes<UnpackIQ2_K> {
    static constexpr int kStep = 5, kLargestScale = 8;
    static BlockScales scales(const uint8_t* p) {
        using namespace row_codes;
        const __m256i v = bytes_as_dwords(p + 4);
        BlockScales s;
        s.d[0] = floats_less(low_nibble(v), 8);
        s.d[1] = floats_less(high_nibble(v), 8);
        masks_of_16(load_unaligned<uint16_t>(p + 2), s.shifted);
        s.factor = load_f16(p);
        return s;
    }
    static BlockWords words(const uint8_t* p) {
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 4));
        const __m128i both = _mm_unpacklo_epi64(bytes, _mm_srli_epi16(bytes, 4));
        const __m128i s = _mm_sub_epi8(_mm_and_si128(both, _mm_set1_epi8(15)), _mm_set1_epi8(8));
        BlockWords w;
        w.d = _mm256_cvtepi8_epi16(s);
        w.shifted = row_codes::word_masks_of_16(load_unaligned<uint16_t>(p + 2));
        w.factor = load_f16(p);
        return w;
    }
    template <class C>
    static void codes(const uint8_t* p, C to) {
        row_codes::two_bit_codes(p + 12, to);
    }
};

template <>
struct RowCodes<UnpackIQ3_K> {
    static constexpr int kStep = 4;
    static BlockScales scales(const uint8_t* p) {
        using namespace row_codes;
        const __m256i twice = _mm256_slli_epi32(bytes_as_dwords(p + 6), 1);
        const __m256i negative = all(load_unaligned<uint16_t>(p + 4));
        const __m256i to_sign[2] = {_mm256_setr_epi32(31, 29, 27, 25, 23, 21, 19, 17),
                                    _mm256_setr_epi32(30, 28, 26, 24, 22, 20, 18, 16)};
        BlockScales s;
        const __m256i odd[2] = {
            _mm256_or_si256(_mm256_and_si256(twice, all(30)), all(1)),
            _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi32(twice, 4), all(30)), all(1))};
        for (int i = 0; i < 2; ++i) {
            const __m256 sign = _mm256_castsi256_ps(_mm256_sllv_epi32(negative, to_sign[i]));
            s.d[i] = _mm256_xor_ps(floats(odd[i]), _mm256_and_ps(sign, _mm256_set1_ps(-0.0f)));
        }
        masks_of_16(load_unaligned<uint16_t>(p + 2), s.shifted);
        s.factor = load_f16(p);
        return s;
    }
    template <class C>
    static void codes(const uint8_t* p, C to) {
        row_codes::iq3_codes(p + 14, p + 78, to);
    }
};

template <>
struct RowCodes<UnpackIQ4_K> : row_codes::SixBitScales {
    static constexpr int kStep = 4;
    template <class C>
    static void codes(const uint8_t* p, C to) {
        row_codes::iq4_codes<16>(p + 16, to);
    }
};

template <>
struct RowCodes<UnpackIQ5_K> : row_codes::SixBitScales {
    static constexpr int kStep = 2;
    template <class C>
    static void codes(const uint8_t* p, C to) {
        row_codes::iq5_codes(p + 16, p + 144, to);
    }
};

template <>
struct RowCodes<UnpackIQ6_K> {
    static constexpr int kStep = 1;
    static BlockScales scales(const uint8_t* p) {
        BlockScales s;
        row_codes::signed_by_parity(load_unaligned<c32::Codes16>(p + 4), s.d);
        row_codes::masks_of_16(load_unaligned<uint16_t>(p + 2), s.shifted);
        s.factor = load_f16(p);
        return s;
    }
    template <class C>
    static void codes(const uint8_t* p, C to) {
        const uint8_t* table = row_codes::kIq6.of;
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            const c32::Codes32 q = c32::nibble_fields(p + 20, i), high = c32::load(p + 148 + 32 * (i >> 2));
            const int bit = 2 * (i & 3);
            const c32::Codes32 a =
                c32::select_by_bit(high, bit, c32::lookup(table + 16, q), c32::lookup(table, q));
            const c32::Codes32 b =
                c32::select_by_bit(high, bit, c32::lookup(table + 48, q), c32::lookup(table + 32, q));
            c32::store(to + 32 * i, c32::select_by_bit(high, bit + 1, b, a));
        }
    }
};

template <>
struct RowCodes<UnpackIQ2_KS> {
    static constexpr int kStep = 5;
    static BlockScales scales(const uint8_t* p) {
        using namespace row_codes;
        const __m256i low = _mm256_srlv_epi32(all(load_unaligned<int32_t>(p + 2)),
                                              _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
        // 16 less where the fifth bit is missing.
        const __m256i fifth = _mm256_andnot_si256(masks_of_8(p[1]), all(16));
        BlockScales s;
        s.d[0] = floats(_mm256_sub_epi32(low_nibble(low), fifth));
        s.shifted[0] = masks_of_8(p[0]);
        return s;
    }
    template <class C>
    static void codes(const uint8_t* p, C to) {
        row_codes::two_bit_codes(p + 6, to);
    }
};

template <>
struct RowCodes<UnpackIQ3_KS> {
    static constexpr int kStep = 4;
    static BlockScales scales(const uint8_t* p) {
        using namespace row_codes;
        // Nibble g & 3 of byte g / 4: low ones of four bytes, then the high ones.
        const __m256i low = _mm256_srlv_epi32(all(load_unaligned<int32_t>(p + 2)),
                                              _mm256_setr_epi32(0, 8, 16, 24, 4, 12, 20, 28));
        const __m256i fifth = _mm256_andnot_si256(masks_of_8(p[0]), all(16));
        BlockScales s;
        s.d[0] = floats(_mm256_sub_epi32(low_nibble(low), fifth));
        s.shifted[0] = masks_of_8(p[1]);
        return s;
    }
    template <class C>
    static void codes(const uint8_t* p, C to) {
        row_codes::iq3_codes(p + 6, p + 70, to);
    }
};

template <>
struct RowCodes<UnpackIQ4_KS> : row_codes::OddScales {
    static constexpr int kStep = 4;
    template <class C>
    static void codes(const uint8_t* p, C to) {
        row_codes::iq4_codes<16>(p + 8, to);
    }
};

template <>
struct RowCodes<UnpackIQ5_KS> : row_codes::OddScales {
    static constexpr int kStep = 2;
    template <class C>
    static void codes(const uint8_t* p, C to) {
        row_codes::iq5_codes(p + 8, p + 136, to);
    }
};

template <>
struct RowCodes<UnpackIQ2_KL> : row_codes::CodesOfBlock<UnpackIQ2_KL> {
    static constexpr int kStep = 0;
    static BlockScales scales(const uint8_t* p) {
        using namespace row_codes;
        const __m256i low = _mm256_srlv_epi32(all(load_unaligned<int32_t>(p + 2)),
                                              _mm256_setr_epi32(0, 8, 16, 24, 4, 12, 20, 28));
        // Two bits each, where bits 4 and 5 of the scale are.
        const __m256i high = _mm256_srlv_epi32(all(load_unaligned<uint16_t>(p) << 4),
                                               _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14));
        BlockScales s;
        s.d[0] = floats_less(_mm256_or_si256(low_nibble(low), _mm256_and_si256(high, all(48))), 32);
        return s;
    }
};

template <>
struct RowCodes<UnpackIQ4_KSS> {
    static constexpr int kStep = 4;
    static BlockScales scales(const uint8_t* p) {
        // The low bits of eight words are the scale byte of a group.
        __m256i words[4];
        for (int i = 0; i < 4; ++i)
            words[i] =
                _mm256_slli_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * i)), 15);
        const auto bits = [](__m256i a, __m256i b) {
            const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi16(a, b), 0xD8);
            return static_cast<uint32_t>(_mm256_movemask_epi8(packed));
        };
        const uint64_t scales = bits(words[0], words[1]) | static_cast<uint64_t>(bits(words[2], words[3]))
                                                               << 32;
        BlockScales s;
        row_codes::odd_scales(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(scales))), &s);
        return s;
    }
    template <class C>
    static void codes(const uint8_t* p, C to) {
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g) {
            const auto words = reinterpret_cast<c32::Words32>(c32::twice(p + 16 * g)) & 0xFFFE;
            const auto v = reinterpret_cast<c32::Codes32>(words ^ words >> 1);
            c32::store(to + 32 * g, c32::lookup(row_codes::kIq4.of, c32::shift_halves(v, 0, 4) & 15));
        }
    }
};

}  // namespace ikpy

#endif
