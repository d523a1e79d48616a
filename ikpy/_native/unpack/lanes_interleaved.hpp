// Layouts of kernels/gemv/gemv_row_groups.hpp (quant-formats.md#interleaved-rows).
#pragma once
#include "kernels/gemv/gemv_row_groups.hpp"
#include "unpack/interleaved_super.hpp"
#include "unpack/lane_codes.hpp"
#include "unpack/lane_scales.hpp"

#if defined(__AVX512VNNI__)

namespace ikpy {
namespace row_groups {

// codes

// Lanes a a b b of the halves of 32 bytes.
IKPY_VBMI_INLINE __m512i halves_twice(const uint8_t* p) {
    const __m512i v = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_shuffle_i64x2(v, v, 0x50);
}
// Lanes a b a b.
IKPY_VBMI_INLINE __m512i twice32(const uint8_t* p) {
    return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
IKPY_VBMI_INLINE __m512i four_times16(const uint8_t* p) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// GCC would load again for every shift, and most of these loads touch two lines.
IKPY_VBMI_INLINE __m512i load_once(const uint8_t* p) {
    __m512i v = _mm512_loadu_si512(p);
    asm("" : "+v"(v));
    return v;
}

// N4: low and high nibbles of 64 bytes are 32 columns.
struct Nibbles {
    static constexpr int kVectors = 2, kLowBits = 15;
    static constexpr int column(int v, int j) { return 16 * (j % 2) + 4 * (j / 2) + 8 * v; }
    // Field v of every byte; other bits mean nothing.
    static IKPY_VBMI_INLINE __m512i field(__m512i bytes, int v) {
        return v == 0 ? bytes : _mm512_srli_epi16(bytes, 4);
    }
};

// P4: two-bit fields of 64 bytes are 64 columns.
struct Pairs {
    static constexpr int kVectors = 4, kLowBits = 3;
    static constexpr int column(int v, int j) { return 16 * j + 4 * v; }
    static IKPY_VBMI_INLINE __m512i field(__m512i bytes, int v) {
        return v == 0 ? bytes : _mm512_srli_epi16(bytes, 2 * v);
    }
};

// Fields of F at `At` alone.
template <class F, int At>
IKPY_VBMI_INLINE void codes_of_fields(const uint8_t* p, int sum, __m512i* q) {
    const __m512i bytes = load_once(p + At + 64 * sum);
#pragma GCC unroll 4
    for (int v = 0; v < F::kVectors; ++v)
        q[v] = _mm512_and_si512(F::field(bytes, v), wide::bytes(F::kLowBits));
}
template <class F, int At, class Levels>
IKPY_VBMI_INLINE void levels_of_fields(const uint8_t* p, int sum, const Levels& levels, __m512i* q) {
    const __m512i bytes = load_once(p + At + 64 * sum);
#pragma GCC unroll 4
    for (int v = 0; v < F::kVectors; ++v) q[v] = levels.at(F::field(bytes, v));
}

// Fields of F at `At` with `N` bits on top of them, those of a column from bit O::bit(column) of `upper` on.
template <class F, int N, class O>
struct UpperBits {
    struct Moves {
        alignas(64) int64_t of[F::kVectors][8] = {};
        constexpr Moves() {
            constexpr int kTo = F::kLowBits == 15 ? 4 : 2;
            for (int v = 0; v < F::kVectors; ++v)
                for (int q = 0; q < 8; ++q)
                    for (int i = 0; i < N; ++i)
                        of[v][q] |= int64_t{1} << (8 * (7 - kTo - i) + O::bit(F::column(v, q / 2)) + i);
        }
    };
    template <int At>
    static IKPY_VBMI_INLINE void join(const uint8_t* p, int sum, __m512i upper, __m512i* q) {
        static constexpr Moves kMoves;
        const __m512i bytes = load_once(p + At + 64 * sum);
#pragma GCC unroll 4
        for (int v = 0; v < F::kVectors; ++v) {
            constexpr int kLowOrUpper = 0xCA;  // of the first operand's bits
            const __m512i high = _mm512_gf2p8affine_epi64_epi8(upper, _mm512_load_si512(kMoves.of[v]), 0);
            q[v] = _mm512_ternarylogic_epi32(wide::bytes(F::kLowBits), F::field(bytes, v), high, kLowOrUpper);
        }
    }
};

struct OrderQ5_K {
    static constexpr int bit(int column) { return interleaved::kQ5_KBits.of[column / 4]; }
};
struct OrderIQ5_K {
    static constexpr int bit(int column) { return interleaved::kIQ5_KBits.of[column / 4]; }
};
struct OrderQ6_K {
    static constexpr int bit(int column) { return column / 8 % 2 * 2 + column / 4 % 2 * 4; }
};
struct OrderQ3_K {
    static constexpr int bit(int column) { return column % 32 / 4; }
};

// scales

IKPY_VBMI_INLINE void store(int8_t* at, __m512i v) { _mm512_store_si512(at, v); }

// v with bits mask, which are unsigned numbers below 2 * zero, less zero.
IKPY_VBMI_INLINE __m512i less(__m512i v, int mask, int zero) {
    return _mm512_ternarylogic_epi32(v, wide::bytes(mask), wide::bytes(zero), 0x6A);  // v & mask ^ zero
}

// Entry e of 64 nibbles is in byte e % 32, nibble e / 32, here from bit `To` on.
template <int To>
IKPY_VBMI_INLINE __m512i nibbles64(const uint8_t* p) {
    static constexpr Bytes64 kFrom([](int e) { return (8 * (e % 8) + 4 * (e / 32) - To) & 63; });
    return _mm512_multishift_epi64_epi8(kFrom.load(), twice32(p));
}

// S8, times four.
template <int Low, int High>
struct SixBits {
    static constexpr float kScale = 0.25f;
    static IKPY_VBMI_INLINE void scales(const uint8_t* p, int8_t* at) {
        static constexpr Bytes64 kHigh([](int e) { return (8 * (e % 8) + 2 * (e / 16) - 6) & 63; });
        const __m512i high = _mm512_multishift_epi64_epi8(kHigh.load(), four_times16(p + High));
        const __m512i six = _mm512_ternarylogic_epi32(wide::bytes(0x3C), nibbles64<2>(p + Low), high, 0xCA);
        store(at, less(six, 0xFC, 0x80));
    }
};

// X4, bit g of its 64.
IKPY_VBMI_INLINE __mmask16 extra_bits(const uint8_t* p, int i) {
    const __m128i bits = _mm_set_epi64x(0x0202020202020202ll << (2 * i), 0x0101010101010101ll << (2 * i));
    return _mm_test_epi8_mask(lanes::quadword_twice(p), bits);
}
struct ExtraBits {
    static IKPY_VBMI_INLINE __mmask16 shifted(const uint8_t* p, int i) { return extra_bits(p + 8, i); }
};

// Scale bytes whose lowest bit selects the table.
struct OddScales {
    static constexpr float kScale = 1.0f;
    static IKPY_VBMI_INLINE void scales(const uint8_t* p, int8_t* at) {
        const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        constexpr int kOddLess128 = 0x56;  // (v | 1) ^ 128
        _mm256_store_si256(
            reinterpret_cast<__m256i*>(at),
            _mm256_ternarylogic_epi32(v, _mm256_set1_epi8(1), _mm256_set1_epi8(-128), kOddLess128));
    }
    static IKPY_VBMI_INLINE __mmask16 shifted(const uint8_t* p, int i) {
        return _mm_test_epi8_mask(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * i)),
                                  _mm_set1_epi8(1));
    }
};

// Of Q4_K_R4 and Q5_K_R4, with offsets.
struct ScalesAndMins {
    static constexpr float kScale = 1.0f;
    static IKPY_VBMI_INLINE void scales(const uint8_t* p, int8_t* at) {
        static constexpr Bytes64 kLow([](int e) { return 8 * (e % 8) + 4 * (e / 32); });
        static constexpr Bytes64 kHigh(
            [](int e) { return (8 * (e % 8) + 2 * (e / 32) + 4 * (e / 16 % 2) - 4) & 63; });
        const __m512i low = _mm512_multishift_epi64_epi8(kLow.load(), twice32(p + 32));
        const __m512i high = _mm512_multishift_epi64_epi8(kHigh.load(), four_times16(p + 16));
        const __m512i six = _mm512_ternarylogic_epi32(wide::bytes(15), low, high, 0xCA);
        store(at, _mm512_and_si512(six, wide::bytes(63)));
    }
};

// types

struct Q2_K : Pairs {
    using Plain = UnpackQ2_K_R4;
    static constexpr int kZero = 0;
    static constexpr float kScale = 1.0f;
    static IKPY_VBMI_INLINE void codes(const uint8_t* p, int sum, __m512i* q) {
        codes_of_fields<Pairs, 80>(p, sum, q);
    }
    static IKPY_VBMI_INLINE void scales(const uint8_t* p, int8_t* at) {
        const __m512i v = _mm512_loadu_si512(p + 16);
        store(at, wide::low_nibbles(v));
        store(at + 64, wide::high_nibbles(v));
    }
};

struct Q3_K : Pairs, SixBits<24, 8> {
    using Plain = UnpackQ3_K_R4;
    static constexpr int kZero = 4;
    static IKPY_VBMI_INLINE void codes(const uint8_t* p, int sum, __m512i* q) {
        UpperBits<Pairs, 1, OrderQ3_K>::join<184>(p, sum, halves_twice(p + 56 + 32 * sum), q);
    }
};

struct Q4_K : Nibbles, ScalesAndMins {
    using Plain = UnpackQ4_K_R4;
    static constexpr int kZero = 0;
    static IKPY_VBMI_INLINE void codes(const uint8_t* p, int sum, __m512i* q) {
        codes_of_fields<Nibbles, 64>(p, sum, q);
    }
};

struct Q5_K : Nibbles, ScalesAndMins {
    using Plain = UnpackQ5_K_R4;
    static constexpr int kZero = 0;
    static IKPY_VBMI_INLINE void codes(const uint8_t* p, int sum, __m512i* q) {
        UpperBits<Nibbles, 1, OrderQ5_K>::join<192>(p, sum, four_times16(p + 64 + 16 * sum), q);
    }
};

struct Q6_K : Nibbles {
    using Plain = UnpackQ6_K_R4;
    static constexpr int kZero = 32;
    static constexpr float kScale = 1.0f;
    static IKPY_VBMI_INLINE void codes(const uint8_t* p, int sum, __m512i* q) {
        UpperBits<Nibbles, 2, OrderQ6_K>::join<328>(p, sum, twice32(p + 72 + 32 * sum), q);
    }
    static IKPY_VBMI_INLINE void scales(const uint8_t* p, int8_t* at) {
        store(at, _mm512_loadu_si512(p + 8));
    }
};

inline constexpr lanes::Levels kLevels2(kIq2Codes, 4), kLevels3(kIq3Codes, 8);

struct IQ2_K : Pairs, ExtraBits {
    using Plain = UnpackIQ2_K_R4;
    static constexpr int kZero = 128;
    static constexpr float kScale = 1.0f / 16;
    static IKPY_VBMI_INLINE void codes(const uint8_t* p, int sum, __m512i* q) {
        levels_of_fields<Pairs, 48>(p, sum, kLevels2, q);
    }
    static IKPY_VBMI_INLINE void scales(const uint8_t* p, int8_t* at) {
        store(at, less(nibbles64<4>(p + 16), 0xF0, 0x80));
    }
};

struct IQ3_K : Pairs, ExtraBits {
    using Plain = UnpackIQ3_K_R4;
    static constexpr int kZero = 128;
    static constexpr float kScale = 1.0f;
    static IKPY_VBMI_INLINE void codes(const uint8_t* p, int sum, __m512i* q) {
        __m512i index[4];
        UpperBits<Pairs, 1, OrderQ3_K>::join<56>(p, sum, halves_twice(p + 312 + 32 * sum), index);
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) q[v] = kLevels3.at(index[v]);
    }
    // Odd magnitudes; bit e / 8 of byte e % 8 is the sign.
    static IKPY_VBMI_INLINE void scales(const uint8_t* p, int8_t* at) {
        static constexpr Bytes64 kBits([](int e) { return 1 << (e / 8); });
        constexpr int kMaskedOr = 0xEA;
        const __m512i odd =
            _mm512_ternarylogic_epi32(nibbles64<1>(p + 24), wide::bytes(30), wide::bytes(1), kMaskedOr);
        const __mmask64 negative =
            _mm512_test_epi8_mask(_mm512_set1_epi64(load_unaligned<int64_t>(p + 16)), kBits.load());
        store(at, _mm512_mask_sub_epi8(odd, negative, _mm512_setzero_si512(), odd));
    }
};

struct IQ4_K : Nibbles, SixBits<32, 16>, ExtraBits {
    using Plain = UnpackIQ4_K_R4;
    static constexpr int kZero = 128;
    static IKPY_VBMI_INLINE void codes(const uint8_t* p, int sum, __m512i* q) {
        levels_of_fields<Nibbles, 64>(p, sum, lanes::kLevels4, q);
    }
};

template <int At, int High>
struct FiveBits : Nibbles {
    static constexpr int kZero = 128;
    static IKPY_VBMI_INLINE void codes(const uint8_t* p, int sum, __m512i* q) {
        __m512i index[2];
        UpperBits<Nibbles, 1, OrderIQ5_K>::join<At>(p, sum, four_times16(p + High + 16 * sum), index);
        for (int v = 0; v < 2; ++v) q[v] = lanes::kLevels5.at(index[v]);
    }
};

struct IQ5_K : FiveBits<64, 576>, SixBits<32, 16>, ExtraBits {
    using Plain = UnpackIQ5_K_R4;
};

struct IQ4_XS : SixBits<32, 16> {
    using Plain = UnpackIQ4_XS_R8;
    static constexpr int kZero = 128, kVectors = 4;
    static constexpr int column(int v, int j) { return 16 * (v / 2) + 8 * j + 4 * (v % 2); }
    static IKPY_VBMI_INLINE void codes(const uint8_t* p, int sum, __m512i* q) {
        for (int i = 0; i < 2; ++i) levels_of_fields<Nibbles, 64>(p, 2 * sum + i, lanes::kLevels4, q + 2 * i);
    }
};

struct IQ4_KS : Nibbles, OddScales {
    using Plain = UnpackIQ4_KS_R4;
    static constexpr int kZero = 128;
    static IKPY_VBMI_INLINE void codes(const uint8_t* p, int sum, __m512i* q) {
        levels_of_fields<Nibbles, 32>(p, sum, lanes::kLevels4, q);
    }
};

struct IQ5_KS : FiveBits<32, 544>, OddScales {
    using Plain = UnpackIQ5_KS_R4;
};

}  // namespace row_groups
}  // namespace ikpy

#endif
