// Layouts of kernels/gemv/gemv_lanes.hpp: Q4_K and Q5_K, whose 32 bytes hold 32 weights in low nibbles and
// the next 32 in high ones. A quadword of a vector of codes is a group; the bytes of two groups come twice
// and are shifted apart. Zen 4, single tokens from the cache against gemv_halves.hpp: Q4_K 1.04 and Q5_K 1.17
// times as fast, 4 tokens 1.24.
#pragma once
#include "unpack/kquants.hpp"
#include "unpack/lane_codes.hpp"
#include "unpack/lane_scales.hpp"

#if defined(__AVX512VNNI__)

namespace ikpy {
namespace lanes {

struct KNibbles {
    static constexpr bool kUnpacksAhead = true;

    static constexpr int first(int v, int q) { return 32 * q + 8 * v; }

    // Nibbles of the weights of vector V; other bits mean nothing.
    template <int V>
    IKPY_VBMI_INLINE static __m512i fields(__m512i first, __m512i last) {
        const __m512i from = _mm512_setr_epi64(V, V, 4 + V, 4 + V, 8 + V, 8 + V, 12 + V, 12 + V);
        return _mm512_srlv_epi64(_mm512_permutex2var_epi64(first, from, last),
                                 _mm512_setr_epi64(0, 4, 0, 4, 0, 4, 0, 4));
    }
    // The same with the fifth bit: bit g of byte j of `high` belongs to weight j of group g.
    template <int V>
    IKPY_VBMI_INLINE static __m512i fields(__m512i first, __m512i last, const uint8_t* high) {
        const auto move = [](int g) {
            return int64_t{1} << (8 * 3 + g);
        };  // bit g to bit 4, all others to nowhere
        const __m512i fifth = _mm512_gf2p8affine_epi64_epi8(
            _mm512_set1_epi64(load_unaligned<int64_t>(high + 8 * V)),
            _mm512_setr_epi64(move(0), move(1), move(2), move(3), move(4), move(5), move(6), move(7)), 0);
        return _mm512_ternarylogic_epi32(wide::bytes(15), fields<V>(first, last), fifth, 0xCA);
    }

    // d and m from the start of a block: f16 d, f16 dmin, 12 bytes of six-bit scales and minima.
    IKPY_VBMI_INLINE static void scales(const uint8_t* p, Codes* w) {
        // Scales in the lower 16 bytes, minima in the upper ones: six bits of a byte for the first four
        // groups, for the others a nibble and the upper bits of another.
        struct Orders {
            alignas(32) uint8_t low[32] = {}, turn[32] = {}, mask[32] = {}, high[32] = {};
            constexpr Orders() {
                for (int i = 0; i < 32; ++i) {
                    const int g = i % 16 / 2;
                    const bool minimum = i >= 16, split = g >= 4;
                    low[i] = static_cast<uint8_t>(minimum || split ? 8 + g : 4 + g);
                    turn[i] = static_cast<uint8_t>(8 * (i % 8) + (minimum && split ? 4 : 0));
                    mask[i] = split ? 15 : 63;
                    high[i] = static_cast<uint8_t>(!split ? 0x80 : minimum ? 4 + g : g);
                }
            }
        };
        static constexpr Orders kOrders;
        const auto load = [](const uint8_t* at) IKPY_VBMI_LAMBDA {
            return _mm256_load_si256(reinterpret_cast<const __m256i*>(at));
        };
        const __m128i start = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        const __m256i both = _mm256_broadcastsi128_si256(start);
        const __m256i low = _mm256_and_si256(
            _mm256_multishift_epi64_epi8(load(kOrders.turn), _mm256_shuffle_epi8(both, load(kOrders.low))),
            load(kOrders.mask));
        const __m256i high = _mm256_srli_epi16(_mm256_shuffle_epi8(both, load(kOrders.high)), 2);
        const __m256i s = _mm256_ternarylogic_epi32(low, high, _mm256_set1_epi8(0x30), 0xF8);  // a | b & c
        const __m128 factors = _mm_cvtph_ps(start);
        const __m128 minus = _mm_sub_ps(_mm_setzero_ps(), _mm_movehdup_ps(factors));
        w->d = _mm512_mul_ps(signed_lanes(_mm256_castsi256_si128(s)), _mm512_broadcastss_ps(factors));
        w->m = _mm512_mul_ps(signed_lanes(_mm256_extracti128_si256(s, 1)), _mm512_broadcastss_ps(minus));
    }
};

struct Q4_K : KNibbles {
    using Plain = UnpackQ4_K;
    static constexpr float kScale = 1.0f;
    IKPY_VBMI_INLINE static Codes unpack(const uint8_t* p) {
        Codes w;
        scales(p, &w);
        each_vector<Q4_K>([](__m512i v) IKPY_VBMI_LAMBDA { return wide::low_nibbles(v); }, w.q,
                          _mm512_loadu_si512(p + 16), _mm512_loadu_si512(p + 80));
        return w;
    }
};

struct Q5_K : KNibbles {
    using Plain = UnpackQ5_K;
    static constexpr float kScale = 1.0f;
    IKPY_VBMI_INLINE static Codes unpack(const uint8_t* p) {
        Codes w;
        scales(p, &w);
        each_vector<Q5_K>([](__m512i v) IKPY_VBMI_LAMBDA { return v; }, w.q, _mm512_loadu_si512(p + 48),
                          _mm512_loadu_si512(p + 112), p + 16);
        return w;
    }
};

}  // namespace lanes
}  // namespace ikpy

#endif
