// Lattices of the grid types with 1024 points of eight elements and more, which no longer fit into registers.
// Points are gathered as words of short codes: 16 points take 3.4 cycles of the vector units, as many points
// in bytes 6.
#pragma once
#include "unpack/points.hpp"

#if defined(__AVX512VNNI__)

namespace ikpy::points {

// Word p holds the codes of point p, so that dword lanes belong to groups of 16 columns.
struct Gathered : ByElement4 {
    __m512i codes;

    // Indices are the low bits of the words.
    template <int N>
    IKPY_VBMI_INLINE void gather(const WordCodes<N>& table, __m512i words) {
        const __m512i mask = _mm512_set1_epi32(N - 1);
        const __m512i even = gathered(table.of, _mm512_and_si512(words, mask));
        const __m512i odd = gathered(table.of, _mm512_and_si512(_mm512_srli_epi32(words, 16), mask));
        codes = _mm512_mask_blend_epi16(0xAAAAAAAA, even, odd);
    }
    static IKPY_VBMI_INLINE __m512i gathered(const uint32_t* table, __m512i index) {
        // With a mask that the compiler knows to be full it leaves the target as it is, and every gather
        // waits for the last use of its register.
        uint32_t all = 0xFFFF;
        asm("" : "+r"(all));
        return _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), static_cast<__mmask16>(all), index,
                                           reinterpret_cast<const int*>(table), 4);
    }
    IKPY_VBMI_INLINE __m512i magnitudes_of(const Bytes64& levels, int v) const {
        return magnitudes(levels, _mm512_srli_epi16(codes, static_cast<unsigned>(2 * v)));
    }
};

// Low bytes from p, high bytes from fields of the quadwords `high`.
inline constexpr Bytes64 kTwoBitFields([](int i) { return i / 8 * 8 + i % 8 / 2 * 2; });
inline constexpr Bytes64 kThreeBitFields([](int i) { return i % 8 / 2 * 3; });
inline constexpr Bytes64 kFourBitFields([](int i) { return i % 8 / 2 * 4; });
IKPY_VBMI_INLINE __m512i words_of(const uint8_t* p, __m512i high, const Bytes64& fields) {
    return _mm512_mask_multishift_epi64_epi8(_mm512_cvtepu8_epi16(load32(p)), 0xAAAAAAAAAAAAAAAA,
                                             fields.load(), high);
}

// Eight words at p, each in all words of its quadword.
IKPY_VBMI_INLINE __m512i words_in_quads(const uint8_t* p) {
    static constexpr struct {
        alignas(64) int16_t at[32] = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3,
                                      4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7};
    } kQuad;
    return _mm512_permutexvar_epi16(
        _mm512_load_si512(kQuad.at),
        _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

// Scales in 16 nibbles.
IKPY_VBMI_INLINE __m512 nibble_scales(const uint8_t* p, __m512 d) {
    static constexpr Bytes64 kNibbles([](int i) { return i / 4 * 4; });
    const __m512i s =
        _mm512_multishift_epi64_epi8(kNibbles.load(), _mm512_set1_epi64(load_unaligned<int64_t>(p)));
    return _mm512_mul_ps(d, odd_scales<4>(s, 0.125f));
}

// 30 cycles per 256 weights, 18 of them for the micro-operations of two gathers.
struct IQ2_S : Plain, Gathered {
    static constexpr int kType = 22, kRowsAtOnce = 1, kBlockBytes = 82;

    IKPY_VBMI_INLINE IQ2_S(const uint8_t* const* rows, int) {
        const uint8_t* p = rows[0];
        const __m512i high = _mm512_set1_epi64(load_unaligned<int64_t>(p + 66));
        gather(iq2s_codes, words_of(p + 2, high, kTwoBitFields));
        signs = each_twice(load32(p + 34));
        scale = nibble_scales(p + 74, wide::f16_lanes(p));
    }
    IKPY_VBMI_INLINE __m512i weights(int v) const { return magnitudes_of(kMagnitudes2, v); }
};

// Ternary points t = -1, 0, 1 moved by an eighth are multiplied as 8 * t + 8: what is too much, 7 or 9 times
// the sum of the activations, is taken off in advance.
struct Ternary : Gathered {
    IKPY_VBMI_INLINE __m512i weights(int v) const { return magnitudes_of(kMagnitudes1, v); }
};

struct IQ1_S : Plain, Ternary {
    static constexpr int kType = 19, kRowsAtOnce = 1, kBlockBytes = 50;
    static constexpr bool kSigned = false;
    __mmask8 down;

    // Two vectors of -7 and -9 times the sums of the sub-blocks.
    static IKPY_VBMI void bias(const uint8_t* x, const ActQ8Layout& at, int64_t c, uint8_t* out) {
        const __m256i sums = _mm256_srai_epi32(load32(x + at.neg32 + 32 * c), 7);
        for (int i = 0; i < 2; ++i)
            _mm512_store_si512(out + 64 * i,
                               _mm512_cvtepu32_epi64(_mm256_mullo_epi32(sums, _mm256_set1_epi32(7 + 2 * i))));
    }
    IKPY_VBMI_INLINE IQ1_S(const uint8_t* const* rows, int) {
        const uint8_t* p = rows[0];
        const __m512i words = words_in_quads(p + 34);
        gather(iq1s_codes, words_of(p + 2, words, kThreeBitFields));
        down = _mm512_test_epi64_mask(words, _mm512_set1_epi64(0x8000));
        scale = _mm512_mul_ps(wide::f16_lanes(p), odd_scales<3>(_mm512_srli_epi32(words, 12), 0.125f));
    }
    IKPY_VBMI_INLINE __m512i start(const uint8_t* bias, int) const {
        return _mm512_mask_load_epi64(_mm512_load_si512(bias), down, bias + 64);
    }
};

struct IQ1_M : Plain, Ternary {
    static constexpr int kType = 29, kRowsAtOnce = 1, kBlockBytes = 56;
    static constexpr bool kSigned = false;
    __m512i down;

    // -7 times the sums of the 16-groups, and words of -2 times the sums of the 8-groups.
    static IKPY_VBMI void bias(const uint8_t* x, const ActQ8Layout& at, int64_t c, uint8_t* out) {
        const __m512i sums = _mm512_srai_epi32(load64(x + at.neg16 + 64 * c), 7);
        _mm512_store_si512(out, _mm512_mullo_epi32(sums, _mm512_set1_epi32(7)));
        for (int i = 0; i < 4; ++i) {
            const __m512i fours =
                _mm512_dpbusd_epi32(_mm512_setzero_si512(), wide::bytes(2), load64(x + kChunk * c + 64 * i));
            const __m512i eights = _mm512_add_epi32(fours, _mm512_srli_epi64(fours, 32));
            const __m128i words = _mm512_cvtepi64_epi16(_mm512_sub_epi32(_mm512_setzero_si512(), eights));
            _mm_store_si128(reinterpret_cast<__m128i*>(out + 64 + 16 * i), words);
        }
    }
    IKPY_VBMI_INLINE IQ1_M(const uint8_t* const* rows, int) {
        static constexpr Bytes64 kScales([](int i) { return 16 * (i / 16) + 3 * (i / 4 & 3); });
        const uint8_t* p = rows[0];
        const __m512i words = words_of(p, words_in_quads(p + 32), kFourBitFields);
        gather(iq1s_codes, words);
        down = _mm512_srli_epi16(_mm512_and_si512(words, _mm512_set1_epi16(2048)), 11);
        const auto fields = load_unaligned<uint64_t>(p + 48);
        const auto d = static_cast<short>(_pext_u64(fields, 0xF000F000F000F000));
        const __m512i s =
            _mm512_multishift_epi64_epi8(kScales.load(), _mm512_set1_epi64(static_cast<int64_t>(fields)));
        scale = _mm512_mul_ps(_mm512_cvtph_ps(_mm256_set1_epi16(d)), odd_scales<3>(s, 0.125f));
    }
    IKPY_VBMI_INLINE __m512i start(const uint8_t* bias, int) const {
        return _mm512_dpwssd_epi32(_mm512_load_si512(bias), down, _mm512_load_si512(bias + 64));
    }
};

}  // namespace ikpy::points

#endif
