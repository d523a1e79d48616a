// Unpackers of Q2_K .. Q6_K. Layouts: quant-formats section 6.1.
#pragma once
#include "kernels/unpacked.hpp"
#include "unpack/codes32.hpp"
#include "unpack/wide.hpp"

namespace ikpy {

// d and m of Q4_K and Q5_K from the block start: f16 d, f16 dmin, 12 bytes of six-bit scales and minima.
inline void scales_and_mins(const uint8_t* p, float* d, float* m) {
    constexpr uint32_t kSix = 0x3F3F3F3F, kFour = 0x0F0F0F0F, kTwo = 0x03030303;
    const uint32_t a = load_unaligned<uint32_t>(p + 4), b = load_unaligned<uint32_t>(p + 8),
                   c = load_unaligned<uint32_t>(p + 12);
    const uint64_t upper_scales = (c & kFour) | (a >> 6 & kTwo) << 4;
    const uint64_t upper_mins = (c >> 4 & kFour) | (b >> 6 & kTwo) << 4;
    c32::scaled8(load_f16(p), (a & kSix) | upper_scales << 32, 0, d);
    c32::scaled8(-load_f16(p + 2), (b & kSix) | upper_mins << 32, 0, m);
}

#if defined(__AVX512VNNI__)
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
        const auto s = load_unaligned<c32::Codes16>(p);
        c32::scaled16(load_f16(p + 80), s & 15, d);
        c32::scaled16(-load_f16(p + 82), s >> 4, m);
        for (int i = 0; i < 8; ++i) c32::store(codes + 32 * i, c32::two_bit_fields(p + 16, i));
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
        // Low nibbles of eight bytes, then the high ones; two bits of four bytes, lowest bits first.
        constexpr uint64_t kNibble = 0x0F0F0F0F0F0F0F0F;
        typedef uint64_t Pair __attribute__((vector_size(16)));
        typedef uint32_t Dwords __attribute__((vector_size(16)));
        const uint64_t nibbles = load_unaligned<uint64_t>(p + 96);
        const uint32_t v = load_unaligned<uint32_t>(p + 104);
        const Pair low = {nibbles & kNibble, nibbles >> 4 & kNibble};
        const Dwords high = Dwords{v << 4, v << 2, v, v >> 2} & 0x30303030u;
        const auto s = reinterpret_cast<c32::Codes16>(low) | reinterpret_cast<c32::Codes16>(high);
        c32::scaled16(load_f16(p + 108), s - 32, d);
        const c32::Codes32 high_bits = c32::load(p);
        for (int i = 0; i < 8; ++i)
            c32::store(codes + 32 * i, c32::two_bit_fields(p + 32, i) | c32::moved_bit(high_bits, i, 2));
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
        scales_and_mins(p, d, m);
        for (int i = 0; i < 8; ++i) c32::store(codes + 32 * i, c32::nibble_fields(p + 16, i));
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
        scales_and_mins(p, d, m);
        const c32::Codes32 high = c32::load(p + 16);
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
#endif
};

struct UnpackQ6_K {
    static constexpr int kType = 14, kGroup = 16, kBlock = 256, kBlockBytes = 210, kZero = 32;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        c32::scaled16(load_f16(p + 208), load_unaligned<c32::Codes16>(p + 192), d);
        for (int h = 0; h < 2; ++h)
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
