// Lattices of IQ1_S whose 2,048 points are found by permutations of bytes over two registers: 64 points at
// once, of two rows or of two sub-blocks of four interleaved ones, in 19 permutations and 16 blends: the
// second half of a point changes at most once among 16 neighbours (Runs). 256 weights take 66 cycles of Zen 4
// with gathers (points_of_words.hpp), 48 with 32 permutations; of Zen 5 21 with 32 and 17 so.
#pragma once
#include "unpack/points_interleaved.hpp"

#if defined(__AVX512VNNI__)

namespace ikpy::points {

// Vectors of 32 bytes as in EightElements; a dword lane is a sub-block.
template <class Find>
struct TernaryBytes {
    static constexpr int kVectors = 8;
    static constexpr bool kRaisedOdd = false;
    static constexpr Order kOrder = kByElement8;
    __m512i first, second;
    __mmask16 down;
    __m512 scale;

    // -7 and -9 times the sums of the sub-blocks.
    static IKPY_VBMI void bias(const uint8_t* x, const ActQ8Layout& at, int64_t c, uint8_t* out) {
        const __m256i sums = _mm256_srai_epi32(minus_sums32(x, at, c), 7);
        for (int i = 0; i < 2; ++i)
            _mm256_store_si256(reinterpret_cast<__m256i*>(out + 64 * i),
                               _mm256_mullo_epi32(sums, _mm256_set1_epi32(7 + 2 * i)));
    }
    // low: bytes of the indices; words: three more bits for each of the four points of a lane, its scale and
    // whether they are moved down.
    IKPY_VBMI_INLINE void set(__m512i low, __m512i words, __m512 row_scale) {
        // Fields come to bit 4.
        static constexpr Bytes64 kFields([](int i) { return (32 * (i / 4 & 1) + 3 * (i & 3) + 60) & 63; });
        const __m512i high = _mm512_multishift_epi64_epi8(kFields.load(), words);
        const __mmask64 bits[4] = {_mm512_movepi8_mask(low), _mm512_test_epi8_mask(high, wide::bytes(16)),
                                   _mm512_test_epi8_mask(high, wide::bytes(32)),
                                   _mm512_test_epi8_mask(high, wide::bytes(64))};
        first = Find::template bytes<2048>(iq1s_codes.halves.first, low, bits);
        second = Find::of_runs(iq1s_second, low, high);
        down = _mm512_test_epi32_mask(words, _mm512_set1_epi32(0x8000));
        scale = _mm512_mul_ps(row_scale, odd_scales<3>(_mm512_srli_epi32(words, 12), 0.125f));
    }
    IKPY_VBMI_INLINE __m512i weights(int v) const { return ternary_weights(v < 4 ? first : second, v % 4); }
    template <class From>
    IKPY_VBMI_INLINE __m512i start(From bias, int step) const {
        return _mm512_mask_blend_epi32(down, bias.load(step), (bias + 64).load(step));
    }
};

template <class Find>
struct ByBytesIQ1_S : Plain, TernaryBytes<Find> {
    static constexpr int kType = 19, kRowsAtOnce = 2, kBlockBytes = 50;

    IKPY_VBMI_INLINE ByBytesIQ1_S(const uint8_t* const* p, int) {
        const auto two = [&](int at) IKPY_VBMI_LAMBDA {
            return _mm256_inserti128_si256(
                _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p[0] + at))),
                _mm_loadu_si128(reinterpret_cast<const __m128i*>(p[1] + at)), 1);
        };
        this->set(_mm512_inserti64x4(_mm512_castsi256_si512(load32(p[0] + 2)), load32(p[1] + 2), 1),
                  _mm512_cvtepu16_epi32(two(34)), two_row_scales(p));
    }
};

// Steps of four blocks of 32 columns.
template <class Find>
struct ByBytesIQ1_S_R4 : Interleaved, TernaryBytes<Find> {
    static constexpr int kType = 219, kHeaderBytes = 8, kBlockBytes = 8 * 24, kSteps = 2;

    IKPY_VBMI_INLINE ByBytesIQ1_S_R4(const uint8_t* const* rows, int step) {
        static constexpr Bytes64 kPoints([](int i) { return 24 * (i / 4 & 3) + 4 * (i & 3) + row_of(i); });
        static constexpr struct Words {
            alignas(64) uint16_t at[32] = {};
            constexpr Words() {
                for (int l = 0; l < 16; ++l) at[2 * l] = static_cast<uint16_t>(12 * (l & 3) + 8 + l / 4);
            }
        } kWords;
        const uint8_t* p = rows[0] + 96 * step;
        const __m512i a = load64(p), b = _mm512_castsi256_si512(load32(p + 64));
        this->set(_mm512_permutex2var_epi8(a, kPoints.load(), b),
                  _mm512_maskz_permutex2var_epi16(0x55555555, a, _mm512_load_si512(kWords.at), b),
                  _mm512_set1_ps(1.0f));
    }
};

}  // namespace ikpy::points

#endif
