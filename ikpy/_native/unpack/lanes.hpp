// Layouts of kernels/gemv/gemv_lanes.hpp: types made of nibbles, with tables of levels or upper bits or
// neither.
#pragma once
#include "unpack/iq4.hpp"
#include "unpack/iqk.hpp"
#include "unpack/lane_codes.hpp"
#include "unpack/lane_scales.hpp"
#include "unpack/legacy.hpp"
#include "unpack/row_scale.hpp"
#include "unpack/small_blocks.hpp"

#if defined(__AVX512VNNI__)

namespace ikpy {
namespace lanes {

struct Q4_0 : HalvesOfBlocks {
    using Plain = UnpackQ4_0;
    static constexpr float kScale = 1.0f;
    IKPY_VBMI_INLINE static Codes unpack(const uint8_t* p) {
        Codes w;
        low_nibbles(bytes_of_blocks<18, 2>(p), w.q);
        w.d = HalvesAtBlocks<Q4_0>::lanes(p);
        return w;
    }
};

struct Q4_1 : HalvesOfBlocks {
    using Plain = UnpackQ4_1;
    static constexpr float kScale = 1.0f;
    IKPY_VBMI_INLINE static Codes unpack(const uint8_t* p) {
        Codes w;
        low_nibbles(bytes_of_blocks<20, 4>(p), w.q);
        w.d = HalvesAtBlocks<Q4_1>::lanes(p);
        w.m = HalvesAtBlocks<Q4_1, 1>::lanes(p);
        return w;
    }
};

struct IQ4_NL : HalvesOfBlocks {
    using Plain = UnpackIQ4_NL;
    static constexpr float kScale = 1.0f;
    IKPY_VBMI_INLINE static Codes unpack(const uint8_t* p) {
        Codes w;
        look_up(bytes_of_blocks<18, 2>(p), kLevels4, w.q);
        w.d = HalvesAtBlocks<IQ4_NL>::lanes(p);
        return w;
    }
};

inline constexpr Levels kLevelsMxfp4(kMxfp4Codes, 16);

struct MXFP4 : HalvesOfBlocks {
    using Plain = UnpackMXFP4;
    static constexpr float kScale = 1.0f;
    struct Exponents {
        alignas(64) uint8_t of[64] = {};
        constexpr Exponents() {
            for (int l = 0; l < 16; ++l) of[4 * l] = static_cast<uint8_t>(17 * lane_group<MXFP4>(l));
        }
    };
    IKPY_VBMI_INLINE static Codes unpack(const uint8_t* p) {
        static constexpr Exponents kExponents;
        Codes w;
        look_up(bytes_of_blocks<17, 1>(p), kLevelsMxfp4, w.q);
        const __m512i e =
            _mm512_maskz_permutex2var_epi8(0x1111111111111111, _mm512_loadu_si512(p),
                                           _mm512_load_si512(kExponents.of), _mm512_loadu_si512(p + 64));
        w.d = Plain::half_powers(e);
        return w;
    }
};

struct Q5_0 : HalvesOfBlocks {
    using Plain = UnpackQ5_0;
    static constexpr float kScale = 1.0f;
    static constexpr bool kUnpacksAhead = true;
    IKPY_VBMI_INLINE static Codes unpack(const uint8_t* p) {
        static constexpr Order32 kScales([](int i) { return 4 * (i / 2) + 2; });
        const __m512i starts = BlockStarts<Q5_0, 3>(p).quadwords<1, 2, 0, 0>();
        Codes w;
        join_bits<1>(bytes_of_blocks<22, 6>(p), transposed_bits(starts), {7, 6, 5, 4}, w.q);
        w.d = kScales.half_lanes(starts);
        return w;
    }
};

struct Q5_1 : HalvesOfBlocks {
    using Plain = UnpackQ5_1;
    static constexpr float kScale = 1.0f;
    // Quadword i of every block, of which there are three.
    template <int I>
    IKPY_VBMI_INLINE static __m512i quadwords(const __m512i* v) {
        struct Index {
            alignas(64) int64_t of[2][8] = {};
            constexpr Index() {
                for (int q = 0; q < 8; ++q) {
                    const int at = 3 * (first(0, q) / 32) + I;
                    of[0][q] = at % 16;
                    of[1][q] = at < 16 ? q : at - 8;
                }
            }
        };
        static constexpr Index kIndex;
        const __m512i a = _mm512_permutex2var_epi64(v[0], _mm512_load_si512(kIndex.of[0]), v[1]);
        return _mm512_permutex2var_epi64(a, _mm512_load_si512(kIndex.of[1]), v[2]);
    }
    IKPY_VBMI_INLINE static Codes unpack(const uint8_t* p) {
        static constexpr Order32 kScales([](int i) { return 4 * (i / 2); }),
            kOffsets([](int i) { return 4 * (i / 2) + 1; });
        __m512i v[3];
        for (int i = 0; i < 3; ++i) v[i] = _mm512_loadu_si512(p + 64 * i);
        const __m512i starts = quadwords<0>(v), parts[2] = {quadwords<1>(v), quadwords<2>(v)};
        Codes w;
        join_bits<1>(Bytes16(parts), transposed_bits(starts), {3, 2, 1, 0}, w.q);
        w.d = kScales.half_lanes(starts);
        w.m = kOffsets.half_lanes(starts);
        return w;
    }
};

struct Q6_0 : HalvesOfBlocks {
    using Plain = UnpackQ6_0;
    static constexpr float kScale = 1.0f;
    static constexpr bool kUnpacksAhead = true;
    IKPY_VBMI_INLINE static Codes unpack(const uint8_t* p) {
        const BlockStarts<Q6_0, 5> starts(p);
        Codes w;
        join_bits<2>(bytes_of_blocks<26, 10>(p), starts.template quadwords<1, 2, 3, 4>(), {0, 4, 2, 6}, w.q);
        w.d = starts.scales();
        return w;
    }
};

struct IQ4_XS : HalvesOfBlocks {
    using Plain = UnpackIQ4_XS;
    static constexpr float kScale = 0.25f;
    IKPY_VBMI_INLINE static Codes unpack(const uint8_t* p) {
        static constexpr SixBits<IQ4_XS> kScales([](int g) { return 32 + 4 * g; },
                                                 [](int g) { return 16 + 2 * g; });
        Codes w;
        look_up(load_128(p + 8), kLevels4, w.q);
        const __m128i scales = quadword_twice(p);
        w.d = _mm512_mul_ps(kScales.lanes(scales, scales), half_lanes(p));
        return w;
    }
};

struct IQ4_KS : HalvesOfBlocks {
    using Plain = UnpackIQ4_KS;
    static constexpr float kScale = 1.0f;
    IKPY_VBMI_INLINE static Codes unpack(const uint8_t* p) {
        Codes w;
        look_up(load_128(p + 8), kLevels4, w.q);
        odd_scales<IQ4_KS>(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), &w);
        return w;
    }
};

// The low bits of the eight words of a group are its scale byte.
struct IQ4_KSS : HalvesOfBlocks {
    using Plain = UnpackIQ4_KSS;
    static constexpr float kScale = 1.0f;
    IKPY_VBMI_INLINE static Codes unpack(const uint8_t* p) {
        const Bytes16 words = load_128(p);
        // Products with powers of two put four bits of a byte together in each of two lanes.
        const __m512i powers[2] = {_mm512_set1_epi64(0x0008000400020001),
                                   _mm512_set1_epi64(0x0080004000200010)};
        __m512i s = _mm512_setzero_si512(), even[2];
        for (int i = 0; i < 2; ++i) {
            const __m512i word = words.part[i];
            s = _mm512_dpbusd_epi32(s, powers[i], _mm512_and_si512(word, _mm512_set1_epi16(1)));
            even[i] = Plain::nibbles_of(word);
        }
        s = _mm512_add_epi32(s, _mm512_shuffle_epi32(s, _MM_PERM_CDAB));
        Codes w;
        look_up(Bytes16(even), kLevels4, w.q);
        w.shifted = _mm512_test_epi32_mask(s, _mm512_set1_epi32(1));
        const __m512i odd =
            _mm512_sub_epi32(_mm512_and_si512(s, _mm512_set1_epi32(254)), _mm512_set1_epi32(127));
        w.d = _mm512_cvtepi32_ps(odd);
        return w;
    }
};

struct IQ4_K : HalvesOfBlocks {
    using Plain = UnpackIQ4_K;
    static constexpr float kScale = 0.25f;
    IKPY_VBMI_INLINE static Codes unpack(const uint8_t* p) {
        Codes w;
        look_up(load_128(p + 16), kLevels4, w.q);
        k_scales<IQ4_K>(p, &w);
        w.shifted = shifted_groups<IQ4_K>(p + 2);
        return w;
    }
};

struct IQ5_K : HalvesOfPairs {
    using Plain = UnpackIQ5_K;
    static constexpr float kScale = 0.25f;
    IKPY_VBMI_INLINE static Codes unpack(const uint8_t* p) {
        // Bit i of the 32 bytes belongs to the i-th 32 weights.
        const __m512i high = wide::twice(p + 144);
        const __m512i bits[2] = {_mm512_permutex_epi64(high, 0xA0), _mm512_permutex_epi64(high, 0xF5)};
        const __m512i turns[2] = {_mm512_setr_epi64(4, 0, 4, 0, 2, 62, 2, 62),
                                  _mm512_setr_epi64(3, 63, 3, 63, 1, 61, 1, 61)};
        Codes w;
        look_up(load_128(p + 16), bits, turns, kLevels5, w.q);
        k_scales<IQ5_K>(p, &w);
        w.shifted = shifted_groups<IQ5_K>(p + 2);
        return w;
    }
};

struct IQ6_K : HalvesOfPairs {
    using Plain = UnpackIQ6_K;
    static constexpr float kScale = 1.0f;
    IKPY_VBMI_INLINE static Codes unpack(const uint8_t* p) {
        static constexpr Order16 kOrder([](int l) { return lane_group<IQ6_K>(l); });
        // Two bits from bit 2 * i on of each 32 bytes belong to the i-th 32 of 128 weights.
        const __m512i high = _mm512_loadu_si512(p + 148);
        const __m512i bits[2] = {_mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 2, 6, 0, 4, 2, 6), high),
                                 _mm512_permutexvar_epi64(_mm512_setr_epi64(1, 5, 3, 7, 1, 5, 3, 7), high)};
        const __m512i turns[2] = {_mm512_setr_epi64(4, 4, 4, 4, 0, 0, 0, 0),
                                  _mm512_setr_epi64(2, 2, 2, 2, 62, 62, 62, 62)};
        Codes w;
        look_up(load_128(p + 20), bits, turns, kLevels6, w.q);
        const __m128i scales = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 4));
        w.d = _mm512_mul_ps(signed_lanes(_mm_shuffle_epi8(scales, kOrder.load())), half_lanes(p));
        w.shifted = shifted_groups<IQ6_K>(p + 2);
        return w;
    }
};

}  // namespace lanes
}  // namespace ikpy

#endif
