// Layouts of kernels/gemv/gemv_lanes.hpp: types of two bits, some with a third one in bytes of their own.
//
// Their 64 bytes hold weights 128 * i + 32 * s + j in two bits from 2 * s on of byte j of half i. A vector of
// codes has quadwords of each half more than once, each with its own shift, so that all products of a group
// meet in one or two lanes, groups in their natural order. Cycles per 256 weights of Zen 4 before
// (kernels/gemv/gemv_int8.hpp) and now: Q2_K 27 and 19, Q3_K 29 and 22, IQ2_K 28 and 18, IQ3_K 36 and 25,
// IQ2_KS 28 and 16, IQ3_KS 32 and 24.
#pragma once
#include "unpack/iqk.hpp"
#include "unpack/kquants.hpp"
#include "unpack/lane_codes.hpp"
#include "unpack/lane_scales.hpp"
#include "unpack/row_scale.hpp"

#if defined(__AVX512VNNI__)

namespace ikpy {
namespace lanes {

inline constexpr Levels kLevels2(kIq2Low.of, 4), kLevels3(kIq3Low.of, 8);

// Quadwords of 64 bytes, or of 32 bytes twice, where vector V wants them.
struct Groups16 {
    static constexpr int first(int v, int q) {
        return 64 * (q / 2) + 32 * (v / 2) + 16 * (q % 2) + 8 * (v % 2);
    }
    template <int V>
    IKPY_VBMI_INLINE static __m512i placed(__m512i bytes) {
        return _mm512_permutex_epi64(bytes, V % 2 ? 0xDD : 0x88);
    }
    IKPY_VBMI_INLINE static __mmask16 lanes_of_groups(const uint8_t* p) {
        return load_unaligned<uint16_t>(p);
    }
};

struct Groups32 {
    static constexpr int first(int v, int q) { return 32 * q + 8 * ((v + q) % 4); }
    template <int V>
    IKPY_VBMI_INLINE static __m512i placed(__m512i bytes) {
        return V == 0 ? bytes : _mm512_permutex_epi64(bytes, V == 1 ? 0x39 : V == 2 ? 0x4E : 0x93);
    }
    IKPY_VBMI_INLINE static __mmask16 lanes_of_groups(const uint8_t* p) {
        return static_cast<__mmask16>(3 * _pdep_u32(*p, 0x5555));
    }
};

template <class Groups>
struct TwoBits : Groups {
    static constexpr bool kUnpacksAhead = true;

    template <int V>
    struct Places {
        alignas(64) int64_t shift[8] = {};
        alignas(64)
            int64_t move[8] = {};  // 8 x 8 bits that move that of the 32 weights to bit 2 and drop all others
        constexpr Places() {
            for (int q = 0; q < 8; ++q) {
                const int block = Groups::first(V, q) / 32;
                shift[q] = 2 * (block % 4);
                move[q] = int64_t{1} << (8 * 5 + block);
            }
        }
    };

    // Two bits of the weights of vector V; other bits mean nothing.
    template <int V>
    IKPY_VBMI_INLINE static __m512i fields(__m512i bytes) {
        static constexpr Places<V> kPlaces;
        return _mm512_srlv_epi64(Groups::template placed<V>(bytes), _mm512_load_si512(kPlaces.shift));
    }
    // The same with the third bit: bit g of byte j of `high`, 32 bytes twice, belongs to weight j of the
    // g-th 32.
    template <int V>
    IKPY_VBMI_INLINE static __m512i fields(__m512i bytes, __m512i high) {
        static constexpr Places<V> kPlaces;
        const __m512i third = _mm512_gf2p8affine_epi64_epi8(Groups::template placed<V>(high),
                                                            _mm512_load_si512(kPlaces.move), 0);
        return _mm512_ternarylogic_epi32(wide::bytes(3), fields<V>(bytes), third, 0xCA);
    }
    IKPY_VBMI_INLINE static void look_up(const uint8_t* p, __m512i* q) {
        each_vector<TwoBits>([](__m512i v) IKPY_VBMI_LAMBDA { return kLevels2.at(v); }, q,
                             _mm512_loadu_si512(p));
    }
    IKPY_VBMI_INLINE static void look_up(const uint8_t* p, const uint8_t* high, __m512i* q) {
        each_vector<TwoBits>([](__m512i v) IKPY_VBMI_LAMBDA { return kLevels3.at(v); }, q,
                             _mm512_loadu_si512(p), wide::twice(high));
    }
};

// Fields of a quadword from bit(g) on.
template <class L>
struct Fields {
    Order16 from;
    template <class Bit>
    constexpr explicit Fields(Bit bit) : from([&](int l) { return bit(lane_group<L>(l)) & 63; }) {}
    IKPY_VBMI_INLINE __m128i of(__m128i quadwords) const {
        return _mm_multishift_epi64_epi8(from.load(), quadwords);
    }
};

IKPY_VBMI_INLINE __m128i masked(__m128i v, int mask) {
    return _mm_and_si128(v, _mm_set1_epi8(static_cast<char>(mask)));
}

struct Q2_K : TwoBits<Groups16> {
    using Plain = UnpackQ2_K;
    static constexpr float kScale = 1.0f;
    IKPY_VBMI_INLINE static Codes unpack(const uint8_t* p) {
        const __m128i s = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        const __m128 factors = _mm_cvtph_ps(_mm_cvtsi32_si128(load_unaligned<int32_t>(p + 80)));
        const __m128 minus = _mm_sub_ps(_mm_setzero_ps(), _mm_movehdup_ps(factors));
        Codes w;
        each_vector<Q2_K>([](__m512i v) IKPY_VBMI_LAMBDA { return _mm512_and_si512(v, wide::bytes(3)); }, w.q,
                          _mm512_loadu_si512(p + 16));
        w.d = _mm512_mul_ps(signed_lanes(masked(s, 15)), _mm512_broadcastss_ps(factors));
        w.m = _mm512_mul_ps(signed_lanes(masked(_mm_srli_epi16(s, 4), 15)), _mm512_broadcastss_ps(minus));
        return w;
    }
};

struct Q3_K : TwoBits<Groups16> {
    using Plain = UnpackQ3_K;
    static constexpr float kScale = 0.25f;
    IKPY_VBMI_INLINE static Codes unpack(const uint8_t* p) {
        static constexpr SixBits<Q3_K> kScales([](int g) { return 8 * (g % 8) + 4 * (g / 8); },
                                               [](int g) { return 32 + 8 * (g % 4) + 2 * (g / 4); });
        Codes w;
        each_vector<Q3_K>([](__m512i v) IKPY_VBMI_LAMBDA { return v; }, w.q, _mm512_loadu_si512(p + 32),
                          wide::twice(p));
        w.d = _mm512_mul_ps(kScales.lanes(quadword_twice(p + 96), quadword_twice(p + 100)),
                            wide::f16_lanes(p + 108));
        return w;
    }
};

struct IQ2_K : TwoBits<Groups16> {
    using Plain = UnpackIQ2_K;
    static constexpr float kScale = 1.0f;
    IKPY_VBMI_INLINE static Codes unpack(const uint8_t* p) {
        static constexpr Fields<IQ2_K> kNibbles([](int g) { return 4 * g; });
        Codes w;
        look_up(p + 12, w.q);
        const __m128i s = _mm_sub_epi8(masked(kNibbles.of(quadword_twice(p + 4)), 15), _mm_set1_epi8(8));
        w.d = _mm512_mul_ps(signed_lanes(s), half_lanes(p));
        w.shifted = lanes_of_groups(p + 2);
        return w;
    }
};

struct IQ3_K : TwoBits<Groups16> {
    using Plain = UnpackIQ3_K;
    static constexpr float kScale = 1.0f;
    IKPY_VBMI_INLINE static Codes unpack(const uint8_t* p) {
        static constexpr Fields<IQ3_K> kTwiceNibbles([](int g) { return 4 * g - 1; });
        Codes w;
        look_up(p + 14, p + 78, w.q);
        const __m128i odd = _mm_ternarylogic_epi32(kTwiceNibbles.of(quadword_twice(p + 6)),
                                                   _mm_set1_epi8(0x1E), _mm_set1_epi8(1), 0xEA);  // a & b | c
        const __m512 d = _mm512_mul_ps(signed_lanes(odd), half_lanes(p));
        w.d = _mm512_mask_sub_ps(d, lanes_of_groups(p + 4), _mm512_setzero_ps(), d);
        w.shifted = lanes_of_groups(p + 2);
        return w;
    }
};

// Scales of five bits less 16: nibbles from bits low(g) on and a bit of a byte from bit high on.
template <class L>
struct FiveBits {
    Fields<L> low, high;
    template <class Low>
    constexpr FiveBits(Low low_bit, int high_byte)
        : low(low_bit), high([=](int g) { return high_byte + g - 4; }) {}
    IKPY_VBMI_INLINE __m512 lanes(const uint8_t* p) const {
        const __m128i v = quadword_twice(p);
        const __m128i five = _mm_ternarylogic_epi32(_mm_set1_epi8(15), low.of(v), high.of(v), 0xCA);
        return signed_lanes(_mm_sub_epi8(masked(five, 31), _mm_set1_epi8(16)));
    }
};

struct IQ2_KS : TwoBits<Groups32> {
    using Plain = UnpackIQ2_KS;
    static constexpr float kScale = 1.0f;
    IKPY_VBMI_INLINE static Codes unpack(const uint8_t* p) {
        static constexpr FiveBits<IQ2_KS> kScales([](int g) { return 16 + 4 * g; }, 8);
        Codes w;
        look_up(p + 6, w.q);
        w.d = kScales.lanes(p);
        w.shifted = lanes_of_groups(p);
        return w;
    }
};

struct IQ3_KS : TwoBits<Groups32> {
    using Plain = UnpackIQ3_KS;
    static constexpr float kScale = 1.0f;
    IKPY_VBMI_INLINE static Codes unpack(const uint8_t* p) {
        static constexpr FiveBits<IQ3_KS> kScales([](int g) { return 16 + 8 * (g % 4) + 4 * (g / 4); }, 0);
        Codes w;
        look_up(p + 6, p + 70, w.q);
        w.d = kScales.lanes(p);
        w.shifted = lanes_of_groups(p + 1);
        return w;
    }
};

}  // namespace lanes
}  // namespace ikpy

#endif
