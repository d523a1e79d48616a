// Lattices of the grid types with 512 points of eight elements and more, which are found as words of short
// codes.
//
// On Intel's CPUs a gather of 16 points takes 8 cycles, in which little else is issued: 256 weights take 17
// cycles for two gathers and, with some 24 other vector operations, 27 to 29 in all. Neither fewer loads of
// activations (two rows at a time), nor fewer prefetches, nor points as eight bytes make that less; 512
// points out of 16 registers take 27 as well, alone or in turn with gathers.
#pragma once
#include "unpack/points.hpp"

#if defined(__AVX512VNNI__)

namespace ikpy::points {

// Word p holds the codes of point p, before find() its index, so that dword lanes belong to groups of 16
// columns.
struct WordPoints : ByElement4 {
    __m512i codes;
};
template <class Find, int N, class P, int T>
IKPY_VBMI_INLINE void find_words(const WordCodes<N>& table, P (&w)[T]) {
    __m512i index[T], codes[T];
    for (int i = 0; i < T; ++i) index[i] = w[i].codes;
    Find::words(table, index, codes);
    for (int i = 0; i < T; ++i) w[i].codes = codes[i];
}

// Points with signs: six bits of two codes and their signs find the level.
struct SignedPoints : WordPoints {
    __m512i signs;  // of the elements of every byte in its high nibble

    // Byte p of the lower halves of quadwords (Stride 8), or of all of them (16: the high bytes of words)
    // holds the signs of a point.
    template <int Stride>
    IKPY_VBMI_INLINE void set_signs(__m512i masks) {
        static constexpr Bytes64 kFields(
            [](int i) { return (Stride * (i / 2 & 3) + Stride - 8 + 4 * (i & 1) + 60) & 63; });
        signs = _mm512_multishift_epi64_epi8(kFields.load(), masks);
    }
    IKPY_VBMI_INLINE __m512i weights(int v) const {
        const __m512i index =
            v < 2 ? _mm512_ternarylogic_epi32(codes, signs, wide::bytes(15), 0xE4)
                  : _mm512_ternarylogic_epi32(_mm512_srli_epi16(codes, 4), _mm512_srli_epi16(signs, 2),
                                              wide::bytes(15), 0xE4);
        return _mm512_permutexvar_epi8(index, (v & 1 ? kSignedLevels2<1> : kSignedLevels2<0>).load());
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

// Masks of even parity in the high bytes of words, made of the seven bits there.
IKPY_VBMI_INLINE __m512i even_masks_of_words(__m512i words) {
    return _mm512_gf2p8affine_epi64_epi8(words, _mm512_set1_epi64(0x02040810204080FE), 0);
}

template <class Find>
struct IQ2_XS : Plain, SignedPoints {
    static constexpr int kType = 17, kRowsAtOnce = 1, kBlockBytes = 74, kTogether = Find::kTogether;

    IKPY_VBMI_INLINE IQ2_XS(const uint8_t* const* rows, int) {
        const uint8_t* p = rows[0];
        codes = load64(p + 2);
        set_signs<16>(even_masks_of_words(codes));
        scale = nibble_scales(p + 66, wide::f16_lanes(p));
    }
    template <int T>
    IKPY_VBMI_INLINE static void find(IQ2_XS (&w)[T]) {
        find_words<Find>(iq2xs_codes, w);
    }
};

template <class Find>
struct IQ2_S : Plain, SignedPoints {
    static constexpr int kType = 22, kRowsAtOnce = 1, kBlockBytes = 82, kTogether = Find::kTogether;

    IKPY_VBMI_INLINE IQ2_S(const uint8_t* const* rows, int) {
        const uint8_t* p = rows[0];
        const __m512i high = _mm512_set1_epi64(load_unaligned<int64_t>(p + 66));
        codes = words_of(p + 2, high, kTwoBitFields);
        set_signs<8>(_mm512_cvtepu32_epi64(load32(p + 34)));
        scale = nibble_scales(p + 74, wide::f16_lanes(p));
    }
    template <int T>
    IKPY_VBMI_INLINE static void find(IQ2_S (&w)[T]) {
        find_words<Find>(iq2s_codes, w);
    }
};

// Ternary points t = -1, 0, 1 moved by an eighth are multiplied as 8 * t + 8: what is too much, 7 or 9 times
// the sum of the activations, is taken off in advance.
// The two bits of code v come to bits 3 and 4.
IKPY_VBMI_INLINE __m512i ternary_weights(__m512i codes, int v) {
    const int64_t field = int64_t{1} << 32 << (2 * v) | int64_t{2} << 24 << (2 * v);
    return _mm512_gf2p8affine_epi64_epi8(codes, _mm512_set1_epi64(field), 0);
}

struct Ternary : WordPoints {
    IKPY_VBMI_INLINE __m512i weights(int v) const { return ternary_weights(codes, v); }
};

struct IQ1_S : Plain, Ternary {
    static constexpr int kType = 19, kRowsAtOnce = 1, kBlockBytes = 50;
    __mmask8 down;

    // Two vectors of -7 and -9 times the sums of the sub-blocks.
    static IKPY_VBMI void bias(const uint8_t* x, const ActQ8Layout& at, int64_t c, uint8_t* out) {
        const __m256i sums = _mm256_srai_epi32(minus_sums32(x, at, c), 7);
        for (int i = 0; i < 2; ++i)
            _mm512_store_si512(out + 64 * i,
                               _mm512_cvtepu32_epi64(_mm256_mullo_epi32(sums, _mm256_set1_epi32(7 + 2 * i))));
    }
    IKPY_VBMI_INLINE IQ1_S(const uint8_t* const* rows, int) {
        const uint8_t* p = rows[0];
        const __m512i words = words_in_quads(p + 34);
        codes = words_of(p + 2, words, kThreeBitFields);
        down = _mm512_test_epi64_mask(words, _mm512_set1_epi64(0x8000));
        scale = _mm512_mul_ps(wide::f16_lanes(p), odd_scales<3>(_mm512_srli_epi32(words, 12), 0.125f));
    }
    template <int T>
    IKPY_VBMI_INLINE static void find(IQ1_S (&w)[T]) {
        find_words<OneRegister>(iq1s_codes, w);
    }
    template <class From>
    IKPY_VBMI_INLINE __m512i start(From bias, int) const {
        return _mm512_mask_blend_epi64(down, bias.load(0), (bias + 64).load(0));
    }
};

struct TernaryOf16 : Ternary {
    __m512i down;  // words: whether a point is moved down

    // -7 times the sums of the 16-groups, and words of -2 times the sums of the 8-groups.
    static IKPY_VBMI void bias(const uint8_t* x, const ActQ8Layout& at, int64_t c, uint8_t* out) {
        const __m512i sums = _mm512_srai_epi32(minus_sums16(x, at, c), 7);
        _mm512_store_si512(out, _mm512_mullo_epi32(sums, _mm512_set1_epi32(7)));
        for (int i = 0; i < 4; ++i) {
            const __m512i fours =
                _mm512_dpbusd_epi32(_mm512_setzero_si512(), wide::bytes(2), load64(x + kChunk * c + 64 * i));
            const __m512i eights = _mm512_add_epi32(fours, _mm512_srli_epi64(fours, 32));
            const __m128i words = _mm512_cvtepi64_epi16(_mm512_sub_epi32(_mm512_setzero_si512(), eights));
            _mm_store_si128(reinterpret_cast<__m128i*>(out + 64 + 16 * i), words);
        }
    }
    // Indices of points, and in bit 11 whether they are moved down.
    IKPY_VBMI_INLINE void set_words(__m512i words) {
        codes = words;
        down = _mm512_srli_epi16(_mm512_and_si512(words, _mm512_set1_epi16(2048)), 11);
    }
};

template <class Find>
struct IQ1_M : Plain, TernaryOf16 {
    static constexpr int kType = 29, kRowsAtOnce = 1, kBlockBytes = 56, kTogether = Find::kTogether;

    IKPY_VBMI_INLINE IQ1_M(const uint8_t* const* rows, int) {
        static constexpr Bytes64 kScales([](int i) { return 16 * (i / 16) + 3 * (i / 4 & 3); });
        const uint8_t* p = rows[0];
        set_words(words_of(p, words_in_quads(p + 32), kFourBitFields));
        const auto fields = load_unaligned<uint64_t>(p + 48);
        const auto d = static_cast<short>(_pext_u64(fields, 0xF000F000F000F000));
        const __m512i s =
            _mm512_multishift_epi64_epi8(kScales.load(), _mm512_set1_epi64(static_cast<int64_t>(fields)));
        scale = _mm512_mul_ps(_mm512_cvtph_ps(_mm256_set1_epi16(d)), odd_scales<3>(s, 0.125f));
    }
    template <int T>
    IKPY_VBMI_INLINE static void find(IQ1_M (&w)[T]) {
        find_words<Find>(iq1s_codes, w);
    }
    template <class From>
    IKPY_VBMI_INLINE __m512i start(From bias, int) const {
        return _mm512_dpwssd_epi32(bias.load(0), down, (bias + 64).load(0));
    }
};

}  // namespace ikpy::points

#endif
