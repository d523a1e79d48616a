// Scales in the lanes of kernels/gemv/gemv_lanes.hpp, by the ways in which blocks hold them.
#pragma once
#include <algorithm>

#include "kernels/gemv/gemv_lanes.hpp"

#if defined(__AVX512VNNI__)

namespace ikpy {
namespace lanes {

struct Order16 {
    alignas(16) uint8_t at[16];
    template <class F>
    constexpr explicit Order16(F f) : at() {
        for (int l = 0; l < 16; ++l) at[l] = static_cast<uint8_t>(f(l));
    }
    IKPY_VBMI_INLINE __m128i load() const { return _mm_load_si128(reinterpret_cast<const __m128i*>(at)); }
};

IKPY_VBMI_INLINE __m128i quadword_twice(const uint8_t* p) {
    return _mm_set1_epi64x(load_unaligned<int64_t>(p));
}

IKPY_VBMI_INLINE __m512 signed_lanes(__m128i bytes) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

// A number in half precision in all lanes. Reads eight bytes.
IKPY_VBMI_INLINE __m512 half_lanes(const uint8_t* p) {
    return _mm512_broadcastss_ps(_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

// Four times six-bit integers less 32: nibbles from bits low(g) on of one quadword, two bits from bits
// high(g) on of another. Bits that wrap around are masked away.
template <class L>
struct SixBits {
    Order16 low, high;
    template <class Low, class High>
    constexpr SixBits(Low low_bit, High high_bit)
        : low([&](int l) { return (low_bit(lane_group<L>(l)) - 2) & 63; }),
          high([&](int l) { return (high_bit(lane_group<L>(l)) - 6) & 63; }) {}
    IKPY_VBMI_INLINE __m512 lanes(__m128i nibbles, __m128i pairs) const {
        const __m128i a = _mm_multishift_epi64_epi8(low.load(), nibbles);
        const __m128i b = _mm_multishift_epi64_epi8(high.load(), pairs);
        const __m128i six = _mm_ternarylogic_epi32(_mm_set1_epi8(0x3C), a, b, 0xCA);
        // six & ~3 ^ 0x80
        return signed_lanes(
            _mm_ternarylogic_epi32(six, _mm_set1_epi8(static_cast<char>(0xFC)), _mm_set1_epi8(-128), 0x6A));
    }
};

// Scale bytes of eight groups: bit 0 selects the table, the rest is an odd scale.
template <class L>
IKPY_VBMI_INLINE void odd_scales(__m128i scales, Codes* w) {
    static constexpr Order16 kOrder([](int l) { return lane_group<L>(l); });
    const __m128i s = _mm_shuffle_epi8(scales, kOrder.load());
    w->shifted = _mm_test_epi8_mask(s, _mm_set1_epi8(1));
    w->d = signed_lanes(_mm_sub_epi8(_mm_andnot_si128(_mm_set1_epi8(1), s), _mm_set1_epi8(127)));
}

// Numbers in half precision, word `Field` of eight blocks of up to 20 bytes.
template <class L, int Field = 0>
struct HalvesAtBlocks {
    static constexpr int kSize = L::Plain::kBlockBytes, kSecond = std::min(4 * kSize, 8 * kSize - 64);
    struct Index {
        alignas(64) uint16_t of[32] = {};
        constexpr Index() {
            for (int l = 0; l < 16; ++l) {
                const int g = lane_group<L>(l);
                of[l] =
                    static_cast<uint16_t>(Field + (g < 4 ? kSize * g / 2 : 32 + (kSize * g - kSecond) / 2));
            }
        }
    };
    IKPY_VBMI_INLINE static __m512 lanes(const uint8_t* p) {
        static constexpr Index kIndex;
        const __m512i words = _mm512_permutex2var_epi16(_mm512_loadu_si512(p), _mm512_load_si512(kIndex.of),
                                                        _mm512_loadu_si512(p + kSecond));
        return _mm512_cvtph_ps(_mm512_castsi512_si256(words));
    }
};

// Words of quadwords as numbers in half precision.
struct Order32 {
    alignas(64) uint16_t at[32];
    template <class F>
    constexpr explicit Order32(F f) : at() {
        for (int l = 0; l < 16; ++l) at[l] = static_cast<uint16_t>(f(l));
    }
    IKPY_VBMI_INLINE __m512 half_lanes(__m512i v) const {
        const __m512i words = _mm512_permutexvar_epi16(_mm512_load_si512(at), v);
        return _mm512_cvtph_ps(_mm512_castsi512_si256(words));
    }
};

// Words at the start of eight blocks of 22 or 26 bytes. The first five or six blocks lie in 128 bytes, the
// others in 64.
template <class L, int Words>
class BlockStarts {
    static constexpr int kSize = L::Plain::kBlockBytes / 2, kFirst = (64 - Words) / kSize + 1,
                         kRest = std::min(kFirst * kSize, 8 * kSize - 32);
    struct Index {
        alignas(64) uint16_t of[32] = {};
        // word(i): block * 8 + word of the block that goes to word i; of the loaded words or of those that
        // are collected from the first blocks.
        template <class F>
        constexpr Index(F word, bool loaded) {
            for (int i = 0; i < 32; ++i) {
                const int b = word(i) / 8, w = word(i) % 8, at = kSize * b + w;
                of[i] = static_cast<uint16_t>(loaded ? at : b < kFirst ? Words * b + w : 32 + at - kRest);
            }
        }
    };

  public:
    IKPY_VBMI_INLINE explicit BlockStarts(const uint8_t* p) {
        static constexpr Index kIndex([](int i) { return i / Words % kFirst * 8 + i % Words; }, true);
        first_ = _mm512_permutex2var_epi16(_mm512_loadu_si512(p), _mm512_load_si512(kIndex.of),
                                           _mm512_loadu_si512(p + 64));
        rest_ = _mm512_loadu_si512(p + 2 * kRest);
    }
    // Words A, B, C and D of every block.
    template <int A, int B, int C, int D>
    IKPY_VBMI_INLINE __m512i quadwords() const {
        static constexpr Index kIndex(
            [](int i) {
                const int words[4] = {A, B, C, D};
                return L::first(0, i / 4) / 32 * 8 + words[i % 4];
            },
            false);
        return _mm512_permutex2var_epi16(first_, _mm512_load_si512(kIndex.of), rest_);
    }
    // The first words as numbers in half precision.
    IKPY_VBMI_INLINE __m512 scales() const {
        static constexpr Index kIndex([](int i) { return lane_group<L>(i % 16) * 8; }, false);
        const __m512i words = _mm512_permutex2var_epi16(first_, _mm512_load_si512(kIndex.of), rest_);
        return _mm512_cvtph_ps(_mm512_castsi512_si256(words));
    }

  private:
    __m512i first_, rest_;
};

// Of 16 groups, one bit each.
template <class L>
IKPY_VBMI_INLINE __mmask16 shifted_groups(const uint8_t* p) {
    struct Bits {
        alignas(64) int32_t of[16] = {};
        constexpr Bits() {
            for (int l = 0; l < 16; ++l) of[l] = 1 << lane_group<L>(l);
        }
    };
    static constexpr Bits kBits;
    return _mm512_test_epi32_mask(_mm512_set1_epi32(load_unaligned<int32_t>(p)), _mm512_load_si512(kBits.of));
}

// Scales of IQ4_K and IQ5_K: 4 low bits at p + 8, 2 high bits at p + 4.
template <class L>
IKPY_VBMI_INLINE void k_scales(const uint8_t* p, Codes* w) {
    static constexpr SixBits<L> kScales([](int g) { return 4 * g; }, [](int g) { return 32 + 2 * g; });
    w->d = _mm512_mul_ps(kScales.lanes(quadword_twice(p + 8), quadword_twice(p)), half_lanes(p));
}

}  // namespace lanes
}  // namespace ikpy

#endif
