// What single tokens on AVX2 make of a block of 256 columns where it takes fewer instructions than block()
// does: scales of eight groups in a vector, those of groups of 16 by parity, and codes of the first of two
// level tables, whose distance the sums of the activations make up for.
//
// RowCodes<U> has
//   kStep                    what the codes of the second table have more; 0: there is none
//   kLargestScale            of types of kernels/gemv/gemv_word_scales.hpp: the largest magnitude of scales,
//                            without their factor
//   static BlockScales scales(const uint8_t* p)
//   static BlockWords words(const uint8_t* p)   of the same types
//   template <class C> static void codes(const uint8_t* p, C to)   of the first table; of types with
//                            kZero = 128 less 128 where there are no dot products of bytes
#pragma once
#include "kernels/simd/byte_dots.hpp"
#include "unpack/iq4.hpp"
#include "unpack/kquants.hpp"
#include "unpack/legacy.hpp"

#if defined(__AVX2__) && !defined(__AVX512VNNI__)

namespace ikpy {

// Of groups of 16: d[0] of even groups, d[1] of odd ones. Of groups of 32: d[0].
struct BlockScales {
    __m256 d[2];
    __m256i shifted[2];  // all bits of groups that use the second table
    __m256 m[2];         // of types with offsets
    float factor = 1.0f, offset_factor = 1.0f;
};

// Of groups of 16 with small integers as scales, as words: those of eight even groups, then of odd ones.
struct BlockWords {
    __m256i d;
    __m256i shifted;  // all bits of groups that use the second table
    __m256i m;        // of types with offsets
    float factor, offset_factor;
};

template <class U>
struct RowCodes;

namespace row_codes {

using c32::Codes16;
using c32::Codes32;

inline __m256i all(int v) { return _mm256_set1_epi32(v); }
inline __m256i bytes_as_dwords(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline __m256i low_nibble(__m256i v) { return _mm256_and_si256(v, all(15)); }
inline __m256i high_nibble(__m256i v) { return _mm256_srli_epi32(v, 4); }
inline __m256 floats(__m256i v) { return _mm256_cvtepi32_ps(v); }
inline __m256 floats_less(__m256i v, int n) { return floats(_mm256_sub_epi32(v, all(n))); }

// Bytes of 16 groups.
inline void signed_by_parity(Codes16 s, __m256* out) {
    const __m256i v = _mm256_cvtepi16_epi32(reinterpret_cast<__m128i>(s));
    out[0] = floats(_mm256_srai_epi32(_mm256_slli_epi32(v, 24), 24));
    out[1] = floats(_mm256_srai_epi32(v, 8));
}

// Bytes of 16 groups, by parity.
inline __m128i by_parity(__m128i s) {
    return _mm_shuffle_epi8(s, _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
}

// Numbers in half precision `Stride` bytes apart.
template <int Stride>
inline __m256 halves(const uint8_t* p) {
    const auto at = [p](int g) { return load_unaligned<int16_t>(p + Stride * g); };
    return _mm256_cvtph_ps(_mm_setr_epi16(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7)));
}

// Codes as the products want them: signed without dot products of bytes.
template <int N>
struct Levels {
    alignas(16) uint8_t of[N];
};
template <int N>
constexpr Levels<N> levels_of(const uint8_t* codes) {
    Levels<N> levels{};
    for (int i = 0; i < N; ++i) levels.of[i] = static_cast<uint8_t>(codes[i] ^ (kByteDots ? 0 : 128));
    return levels;
}
alignas(16) inline constexpr Levels<16> kIq4 = levels_of<16>(kIq4Codes);

// 16 bytes of nibbles for 32 columns, `Stride` bytes apart.
template <int Stride, class C>
inline void iq4_codes(const uint8_t* qs, C to) {
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) c32::store(to + 32 * g, c32::lookup(kIq4.of, c32::nibbles(qs + Stride * g)));
}

// The codes of block(), whose scales are not used and never made.
template <class U>
struct CodesOfBlock {
    template <class C>
    static void codes(const uint8_t* p, C to) {
        float unused[16];
        U::block(p, to, unused, unused);
    }
};

}  // namespace row_codes

// Eight blocks of 32 columns with a scale in half precision, whose codes are those of block(); Offset: of a
// second number, 0: there is none.
template <class U, int Offset = 0>
struct HalfScales {
    static constexpr int kStep = 0;
    static BlockScales scales(const uint8_t* p) {
        BlockScales s;
        s.d[0] = row_codes::halves<U::kBlockBytes>(p);
        if (Offset > 0) s.m[0] = row_codes::halves<U::kBlockBytes>(p + Offset);
        return s;
    }
    template <class C>
    static void codes(const uint8_t* p, C to) {
        float unused;
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g) U::block(p + U::kBlockBytes * g, to + 32 * g, &unused, &unused);
    }
};

template <>
struct RowCodes<UnpackQ4_0> : HalfScales<UnpackQ4_0> {};
template <>
struct RowCodes<UnpackQ4_1> : HalfScales<UnpackQ4_1, 2> {};
template <>
struct RowCodes<UnpackQ5_0> : HalfScales<UnpackQ5_0> {};
template <>
struct RowCodes<UnpackQ5_1> : HalfScales<UnpackQ5_1, 2> {};
template <>
struct RowCodes<UnpackQ6_0> : HalfScales<UnpackQ6_0> {};

template <>
struct RowCodes<UnpackQ8_0> : HalfScales<UnpackQ8_0> {
    template <class C>
    static void codes(const uint8_t* p, C to) {
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g)
            c32::store(to + 32 * g, c32::load(p + 34 * g + 2) ^ (kByteDots ? uint8_t{128} : uint8_t{0}));
    }
};

template <>
struct RowCodes<UnpackIQ4_NL> : HalfScales<UnpackIQ4_NL> {
    template <class C>
    static void codes(const uint8_t* p, C to) {
        row_codes::iq4_codes<18>(p + 2, to);
    }
};

template <>
struct RowCodes<UnpackIQ4_XS> {
    static constexpr int kStep = 0;
    static BlockScales scales(const uint8_t* p) {
        using namespace row_codes;
        const __m256i low = _mm256_srlv_epi32(all(load_unaligned<int32_t>(p + 4)),
                                              _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
        // Two bits each, where bits 4 and 5 of the scale are.
        const __m256i high = _mm256_srlv_epi32(all(load_unaligned<uint16_t>(p + 2) << 4),
                                               _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14));
        BlockScales s;
        s.d[0] = floats_less(_mm256_or_si256(low_nibble(low), _mm256_and_si256(high, all(48))), 32);
        s.factor = load_f16(p);
        return s;
    }
    template <class C>
    static void codes(const uint8_t* p, C to) {
        row_codes::iq4_codes<16>(p + 8, to);
    }
};

template <>
struct RowCodes<UnpackQ2_K> : row_codes::CodesOfBlock<UnpackQ2_K> {
    static constexpr int kStep = 0, kLargestScale = 15;
    static BlockScales scales(const uint8_t* p) {
        using namespace row_codes;
        // Words of two bytes: a nibble of the scale and one of the offset each.
        const __m256i v = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        BlockScales s;
        s.d[0] = floats(low_nibble(v));
        s.d[1] = floats(low_nibble(_mm256_srli_epi32(v, 8)));
        s.m[0] = floats(low_nibble(high_nibble(v)));
        s.m[1] = floats(_mm256_srli_epi32(v, 12));
        s.factor = load_f16(p + 80);
        s.offset_factor = -load_f16(p + 82);
        return s;
    }
    static BlockWords words(const uint8_t* p) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        const __m256i v = _mm256_cvtepu8_epi16(row_codes::by_parity(bytes));
        BlockWords w;
        w.d = _mm256_and_si256(v, _mm256_set1_epi16(15));
        w.m = _mm256_srli_epi16(v, 4);
        w.factor = load_f16(p + 80);
        w.offset_factor = -load_f16(p + 82);
        return w;
    }
};

template <>
struct RowCodes<UnpackQ3_K> {
    typedef c32::Codes16 Codes16;
    static constexpr int kStep = 0, kLargestScale = 32;
    static Codes16 scale_codes(const uint8_t* p) {
        // Nibbles of eight bytes, the low ones first; two bits of four bytes, the lowest first.
        const __m128i nibbles =
            _mm_srlv_epi64(_mm_set1_epi64x(load_unaligned<int64_t>(p + 96)), _mm_set_epi64x(4, 0));
        const __m128i low = _mm_and_si128(nibbles, _mm_set1_epi8(15));
        const __m128i pairs =
            _mm_srlv_epi32(_mm_set1_epi32(load_unaligned<int32_t>(p + 104)), _mm_setr_epi32(0, 2, 4, 6));
        const __m128i high = _mm_slli_epi16(_mm_and_si128(pairs, _mm_set1_epi8(3)), 4);
        return reinterpret_cast<Codes16>(_mm_or_si128(low, high)) - 32;
    }
    static BlockScales scales(const uint8_t* p) {
        BlockScales s;
        row_codes::signed_by_parity(scale_codes(p), s.d);
        s.factor = load_f16(p + 108);
        return s;
    }
    static BlockWords words(const uint8_t* p) {
        BlockWords w;
        w.d = _mm256_cvtepi8_epi16(row_codes::by_parity(reinterpret_cast<__m128i>(scale_codes(p))));
        w.factor = load_f16(p + 108);
        return w;
    }
    template <class C>
    static void codes(const uint8_t* p, C to) {
        const c32::Codes32 third = c32::load(p);
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
            const c32::ThreeBits v = c32::three_bit_fields(c32::load(p + 32 + 32 * h), third, h);
            c32::store(to + 128 * h, v.even & 7);
            c32::store(to + 128 * h + 32, v.odd & 7);
            c32::store(to + 128 * h + 64, c32::field(v.even, 4, 7));
            c32::store(to + 128 * h + 96, c32::field(v.odd, 4, 7));
        }
    }
};

// Of Q4_K and Q5_K.
inline BlockScales six_bit_scales_and_mins(const uint8_t* p) {
    const SixBitFields fields = six_bit_fields(p);
    const auto of = [](uint64_t bytes) {
        return row_codes::floats(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(bytes))));
    };
    BlockScales s;
    s.d[0] = of(fields.scales);
    s.m[0] = of(fields.mins);
    s.factor = load_f16(p);
    s.offset_factor = -load_f16(p + 2);
    return s;
}

template <>
struct RowCodes<UnpackQ4_K> : row_codes::CodesOfBlock<UnpackQ4_K> {
    static constexpr int kStep = 0;
    static BlockScales scales(const uint8_t* p) { return six_bit_scales_and_mins(p); }
};

template <>
struct RowCodes<UnpackQ5_K> : row_codes::CodesOfBlock<UnpackQ5_K> {
    static constexpr int kStep = 0;
    static BlockScales scales(const uint8_t* p) { return six_bit_scales_and_mins(p); }
};

template <>
struct RowCodes<UnpackQ6_K> : row_codes::CodesOfBlock<UnpackQ6_K> {
    static constexpr int kStep = 0;
    static BlockScales scales(const uint8_t* p) {
        BlockScales s;
        row_codes::signed_by_parity(load_unaligned<c32::Codes16>(p + 192), s.d);
        s.factor = load_f16(p + 208);
        return s;
    }
};

}  // namespace ikpy

#endif
