// Unpackers of Q2_K .. Q6_K. Layouts: quant-formats.md#k-quants.
#pragma once
#include "kernels/matmul/unpacked.hpp"
#include "kernels/simd/byte_dots.hpp"
#include "unpack/codes32.hpp"
#include "unpack/level_tables.hpp"
#include "unpack/wide.hpp"

namespace ikpy {

// The twelve bytes of six-bit scales and minima of Q4_K and Q5_K, behind f16 d and f16 dmin, a byte each.
struct SixBitFields {
    uint64_t scales, mins;
};
inline SixBitFields six_bit_fields(const uint8_t* p) {
    constexpr uint32_t kSix = 0x3F3F3F3F, kFour = 0x0F0F0F0F, kTwo = 0x03030303;
    const uint32_t a = load_unaligned<uint32_t>(p + 4), b = load_unaligned<uint32_t>(p + 8),
                   c = load_unaligned<uint32_t>(p + 12);
    const uint64_t upper_scales = (c & kFour) | (a >> 6 & kTwo) << 4;
    const uint64_t upper_mins = (c >> 4 & kFour) | (b >> 6 & kTwo) << 4;
    return {(a & kSix) | upper_scales << 32, (b & kSix) | upper_mins << 32};
}
inline void scales_and_mins(const uint8_t* p, float* d, float* m) {
    const SixBitFields fields = six_bit_fields(p);
    c32::scaled8(load_f16(p), fields.scales, 0, d);
    c32::scaled8(-load_f16(p + 2), fields.mins, 0, m);
}

#if defined(__AVX512VNNI__)
// The same with scales in the lower lanes of r->d, in a third of the instructions that scalars take.
inline void wide_scales_and_mins(const uint8_t* p, Codes512* r) {
    // Lanes 0 .. 3 and 8 .. 11 are six bits of one byte, the others a nibble and the upper bits of such a
    // byte.
    constexpr int kNone = -4;
    const auto lanes = [](int a, int b, int c, int d) {
        const auto at = [](int byte) { return byte < 0 ? -1 : byte | ~0xFF; };
        return _mm512_setr_epi32(at(a), at(a + 1), at(a + 2), at(a + 3), at(b), at(b + 1), at(b + 2),
                                 at(b + 3), at(c), at(c + 1), at(c + 2), at(c + 3), at(d), at(d + 1),
                                 at(d + 2), at(d + 3));
    };
    const __m512i bytes = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m512i counts = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4);
    const __m512i masks = _mm512_setr_epi32(63, 63, 63, 63, 15, 15, 15, 15, 63, 63, 63, 63, 15, 15, 15, 15);
    const __m512i low = _mm512_srlv_epi32(_mm512_shuffle_epi8(bytes, lanes(4, 12, 8, 12)), counts);
    const __m512i high = _mm512_srli_epi32(_mm512_shuffle_epi8(bytes, lanes(kNone, 4, kNone, 8)), 2);
    const __m512i s = _mm512_ternarylogic_epi32(_mm512_and_si512(low, masks), high, _mm512_set1_epi32(0x30),
                                                0xF8);  // low & masks | high & 0x30
    const __m256i minus = _mm256_setr_epi32(0, 0, 0, 0, INT32_MIN | 0x8000, INT32_MIN | 0x8000,
                                            INT32_MIN | 0x8000, INT32_MIN | 0x8000);
    const __m256i words = _mm256_shuffle_epi8(
        _mm512_castsi512_si256(bytes),
        _mm256_setr_epi64x(0x0100010001000100, 0x0100010001000100, 0x0302030203020302, 0x0302030203020302));
    r->d = wide::scaled(_mm512_cvtph_ps(_mm256_xor_si256(words, minus)), s);
    r->m = _mm512_castps256_ps512(_mm512_extractf32x8_ps(r->d, 1));
}
#endif

struct UnpackQ2_K {
    static constexpr int kType = 10, kGroup = 16, kBlock = 256, kBlockBytes = 84, kZero = 0;
    static constexpr int kLow = 0, kHigh = 3;
    template <class C>
    static void block(const uint8_t* p, C codes, float* d, float* m) {
        block_with_factor(p, load_f16(p + 80), codes, d, m);
    }
    template <class C>
    static void block_with_factor(const uint8_t* p, float factor, C codes, float* d, float* m) {
        const auto s = load_unaligned<c32::Codes16>(p);
        c32::scaled16(factor, s & 15, d);
        c32::scaled16(-load_f16(p + 82), s >> 4, m);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) c32::store(codes + 32 * i, c32::two_bit_fields(p + 16, i));
    }
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p) { return with_factor(p, wide::f16_lanes(p + 80)); }
    static Codes512 with_factor(const uint8_t* p, __m512 factor) {
        Codes512 r;
        for (int i = 0; i < 4; ++i) r.q[i] = wide::two_bit_fields(p + 16, i);
        const __m512i s = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        r.d = wide::scaled(factor, _mm512_and_si512(s, _mm512_set1_epi32(15)));
        r.m = wide::scaled(_mm512_sub_ps(_mm512_setzero_ps(), wide::f16_lanes(p + 82)),
                           _mm512_srli_epi32(s, 4));
        return r;
    }
#endif
};

struct UnpackQ3_K {
    static constexpr int kType = 11, kGroup = 16, kBlock = 256, kBlockBytes = 110, kZero = 4;
    static constexpr int kLow = 0, kHigh = 7;
    template <class C>
    static void block(const uint8_t* p, C codes, float* d, float* m) {
        block_with_factor(p, load_f16(p + 108), codes, d, m);
    }
    // Scales plus 32 of the groups.
    static c32::Codes16 scale_codes(const uint8_t* p) {
        // Low nibbles of eight bytes, then the high ones; two bits of four bytes, lowest bits first.
        constexpr uint64_t kNibble = 0x0F0F0F0F0F0F0F0F;
        typedef uint64_t Pair __attribute__((vector_size(16)));
        typedef uint32_t Dwords __attribute__((vector_size(16)));
        const uint64_t nibbles = load_unaligned<uint64_t>(p + 96);
        const uint32_t v = load_unaligned<uint32_t>(p + 104);
        const Pair low = {nibbles & kNibble, nibbles >> 4 & kNibble};
        const Dwords high = Dwords{v << 4, v << 2, v, v >> 2} & 0x30303030u;
        return reinterpret_cast<c32::Codes16>(low) | reinterpret_cast<c32::Codes16>(high);
    }
    template <class C>
    static void block_with_factor(const uint8_t* p, float factor, C codes, float* d, float*) {
        c32::scaled16(factor, scale_codes(p) - 32, d);
        const c32::Codes32 high_bits = c32::load(p);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i)
            c32::store(codes + 32 * i, c32::two_bit_fields(p + 32, i) | c32::moved_bit(high_bits, i, 2));
    }
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p) { return with_factor(p, wide::f16_lanes(p + 108)); }
    static Codes512 with_factor(const uint8_t* p, __m512 factor) {
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
        r.d = wide::scaled(factor, _mm512_sub_epi32(_mm512_cvtepu8_epi32(s), _mm512_set1_epi32(32)));
        return r;
    }
#endif
};

#if defined(IKPY_BYTE_DOTS)
template <class U>
struct UnpackIntegerScales : U {
    template <class C>
    static void block(const uint8_t* p, C codes, float* d, float* m) {
        U::block_with_factor(p, 1.0f, codes, d, m);
    }
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p) { return U::with_factor(p, _mm512_set1_ps(1.0f)); }
#endif
};

template <>
struct IntegerScaled<UnpackQ2_K> {
    using Unpack = UnpackIntegerScales<UnpackQ2_K>;
    static constexpr int kLowScale = 0, kHighScale = 15;
    static float factor(const uint8_t* block, int) { return load_f16(block + 80); }
    static float offset_factor(const uint8_t* block, int) { return -load_f16(block + 82); }
};

template <>
struct IntegerScaled<UnpackQ3_K> {
    using Unpack = UnpackIntegerScales<UnpackQ3_K>;
    static constexpr int kLowScale = -32, kHighScale = 31;
    static float factor(const uint8_t* block, int) { return load_f16(block + 108); }
};
#endif

struct UnpackQ4_K {
    static constexpr int kType = 12, kGroup = 32, kBlock = 256, kBlockBytes = 144, kZero = 0;
    static constexpr int kLow = 0, kHigh = 15;
    template <class C>
    static void block(const uint8_t* p, C codes, float* d, float* m) {
        scales_and_mins(p, d, m);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) c32::store(codes + 32 * i, c32::nibble_fields(p + 16, i));
    }
#if defined(__AVX512VNNI__)
    static constexpr const uint8_t* kLevels = kPlainLevels;
    static constexpr int kLevelCount = 16;
    static Codes512 wide(const uint8_t* p) { return level_numbers(p); }
    template <int Place = 0>
    static Codes512 level_numbers(const uint8_t* p) {
        Codes512 r;
        for (int i = 0; i < 4; ++i) r.q[i] = wide::nibbles32<Place>(p + 16 + 32 * i);
        wide_scales_and_mins(p, &r);
        return r;
    }
    static constexpr Pairs kPairs = Pairs::kAlternating;
    static Codes512 halves(const uint8_t* p) {
        Codes512 r;
        wide::alternating_nibble_halves(p + 16, r.q);
        wide_scales_and_mins(p, &r);
        return r;
    }
#endif
};

struct UnpackQ5_K {
    static constexpr int kType = 13, kGroup = 32, kBlock = 256, kBlockBytes = 176, kZero = 0;
    static constexpr int kLow = 0, kHigh = 31;
    template <class C>
    static void block(const uint8_t* p, C codes, float* d, float* m) {
        scales_and_mins(p, d, m);
        const c32::Codes32 high = c32::load(p + 16);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i)
            c32::store(codes + 32 * i, c32::nibble_fields(p + 48, i) | c32::moved_bit(high, i, 4));
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
    static constexpr Pairs kPairs = Pairs::kAlternating;
    static Codes512 halves(const uint8_t* p) {
        Codes512 r;
        wide::alternating_nibble_halves(p + 48, r.q);
        for (int i = 0; i < 4; ++i)
            r.q[i] = _mm512_mask_add_epi8(r.q[i], wide::alternating_bits(p + 16, i), r.q[i], wide::bytes(16));
        wide_scales_and_mins(p, &r);
        return r;
    }
#endif
};

struct UnpackQ6_K {
    static constexpr int kType = 14, kGroup = 16, kBlock = 256, kBlockBytes = 210, kZero = 32;
    static constexpr int kLow = 0, kHigh = 63;
    template <class C>
    static void block(const uint8_t* p, C codes, float* d, float*) {
        c32::scaled16(load_f16(p + 208), load_unaligned<c32::Codes16>(p + 192), d);
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h)
#pragma GCC unroll 4
            for (int t = 0; t < 4; ++t)
                c32::store(codes + 128 * h + 32 * t,
                           c32::field(c32::load(p + 64 * h + 32 * (t & 1)), 4 * (t >> 1), 15) |
                               c32::left(c32::two_bits(p + 128 + 32 * h, t), 4));
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
