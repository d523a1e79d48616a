// Lattices of the grid types for kernels/gemv/gemv_points.hpp. Layouts: quant-formats.md#grid-types. Find:
// how points are found (point_lookups.hpp); counts of instructions and cycles are those of OneRegister on
// Intel's CPUs.
#pragma once
#include "kernels/gemv/gemv_points.hpp"
#include "unpack/point_lookups.hpp"
#include "unpack/wide.hpp"

#if defined(__AVX512VNNI__)

namespace ikpy::points {

// Odd scales 2 * s + 1 times `unit`, by the low four bits of a lane; Bits of them count.
template <int Bits>
IKPY_VBMI_INLINE __m512 odd_scales(__m512i s, float unit) {
    constexpr int m = (1 << Bits) - 1;
    const __m512 table = _mm512_setr_ps(1, 3, 5, 7, 9, 11, 13, 15, 2 * (8 & m) + 1, 2 * (9 & m) + 1,
                                        2 * (10 & m) + 1, 2 * (11 & m) + 1, 2 * (12 & m) + 1,
                                        2 * (13 & m) + 1, 2 * (14 & m) + 1, 2 * (15 & m) + 1);
    return _mm512_permutexvar_ps(s, _mm512_mul_ps(table, _mm512_set1_ps(unit)));
}

// Completes sign indices of 7 bits to masks of even parity.
IKPY_VBMI_INLINE __m512i even_masks(__m512i indices) {
    return _mm512_gf2p8affine_epi64_epi8(indices, _mm512_set1_epi64(0x010204081020407F), 0);
}

IKPY_VBMI_INLINE __m512i load64(const uint8_t* p) { return _mm512_loadu_si512(p); }
IKPY_VBMI_INLINE __m256i load32(const uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

// types by the number of elements per point

struct Plain {
    static constexpr int kHeaderBytes = 0, kSteps = 1;
    static constexpr bool kInterleaved = false;
};

// Signed levels + 64 by six bits: the codes of two elements, then their signs. E: which of the two.
template <int E>
inline constexpr Bytes64 kSignedLevels2([](int i) {
    const int level = kLevels2[std::min(i >> 2 * E & 3, 2)];
    return 64 + (i >> (4 + E) & 1 ? -level : level);
});

// Words of codes of eight elements: vectors of 32 bytes. Two neighbouring elements share the vector of
// six-bit indices.
struct EightElements {
    static constexpr int kVectors = 8;
    static constexpr bool kRaisedOdd = false;
    static constexpr Order kOrder = kByElement8;
    __m512i first, second, signs;
    __m512 scale;

    IKPY_VBMI_INLINE __m512i weights(int v) const {
        const int pair = v >> 1;
        const __m512i codes = pair < 2 ? first : second;
        const __m512i own = pair == 0   ? _mm512_slli_epi16(signs, 4)
                            : pair == 1 ? _mm512_slli_epi16(signs, 2)
                            : pair == 2 ? signs
                                        : _mm512_srli_epi16(signs, 2);
        const __m512i index = _mm512_ternarylogic_epi32(pair & 1 ? _mm512_srli_epi16(codes, 4) : codes, own,
                                                        wide::bytes(15), 0xE4);
        return _mm512_permutexvar_epi8(index, (v & 1 ? kSignedLevels2<1> : kSignedLevels2<0>).load());
    }
    // -64 times the sums of the sub-blocks.
    static IKPY_VBMI void bias(const uint8_t* x, const ActQ8Layout& at, int64_t c, uint8_t* out) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(out), _mm256_srai_epi32(minus_sums32(x, at, c), 1));
    }
};

// The scales of two rows in the halves of a vector.
IKPY_VBMI_INLINE __m512 two_row_scales(const uint8_t* const* p) {
    return _mm512_cvtph_ps(_mm256_mask_set1_epi16(_mm256_set1_epi16(load_unaligned<int16_t>(p[0])), 0xFF00,
                                                  load_unaligned<int16_t>(p[1])));
}

// Two rows: 52 vector operations per 512 weights, 24 of them on the shuffle unit: 26 cycles if two start per
// cycle (18 GB/s at 3.5 GHz, measured 14); gathering the points takes 13 more.
template <class Find>
struct IQ2_XXS : Plain, EightElements {
    static constexpr int kType = 16, kBlockBytes = 66, kRowsAtOnce = 2;

    IKPY_VBMI_INLINE IQ2_XXS(const uint8_t* const* p, int) {
        static constexpr Bytes64 kFields([](int i) { return (i & 4) * 8 + (i & 3) * 7; });
        const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        const __m512i a = load64(p[0] + 2), b = load64(p[1] + 2);
        const __m512i index = _mm512_permutex2var_epi32(a, even, b);
        const __m512i words = _mm512_permutex2var_epi32(a, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b);
        const __mmask64 upper = _mm512_movepi8_mask(index);
        first = Find::bytes256(iq2xxs_codes.first, index, upper);
        second = Find::bytes256(iq2xxs_codes.second, index, upper);
        signs = even_masks(_mm512_multishift_epi64_epi8(kFields.load(), words));
        scale = _mm512_mul_ps(two_row_scales(p), odd_scales<4>(_mm512_srli_epi32(words, 28), 0.125f));
    }
};

// By 4-groups: dword lanes belong to groups of 16 columns.
struct ByElement4 {
    static constexpr int kVectors = 4;
    static constexpr bool kRaisedOdd = false;
    static constexpr Order kOrder = kByElement4;
    __m512 scale;

    // -64 times the sums of the 16-groups.
    static IKPY_VBMI void bias(const uint8_t* x, const ActQ8Layout& at, int64_t c, uint8_t* out) {
        _mm512_store_si512(out, _mm512_srai_epi32(minus_sums16(x, at, c), 1));
    }
};

// Points of four elements: two bytes of two codes of three bits each. With its sign a code becomes the place
// of the level among all sixteen: 8 + code, or 7 - code where it is negative.
struct FourElements : ByElement4 {
    __m512i first, second;

    // Byte g holds the signs of 4-group g in its low bits.
    IKPY_VBMI_INLINE void set_signs(__m512i signs) {
        constexpr int64_t kFirst = 0x0101010102020202, kSecond = 0x0404040408080808;
        first =
            _mm512_xor_si512(first, _mm512_gf2p8affine_epi64_epi8(signs, _mm512_set1_epi64(kFirst), 0x88));
        second =
            _mm512_xor_si512(second, _mm512_gf2p8affine_epi64_epi8(signs, _mm512_set1_epi64(kSecond), 0x88));
    }
};

// Fields of four bits from the lower halves of quadwords.
IKPY_VBMI_INLINE __m512i nibbles_of_quads(__m512i v) {
    static constexpr Bytes64 kNibbles([](int i) { return 4 * (i & 7); });
    return _mm512_multishift_epi64_epi8(kNibbles.load(), v);
}

// Levels + 64 by the place of a level.
inline constexpr Bytes64 kSignedLevels3XXS([](int i) {
    return i & 8 ? 64 + kLevels3XXS[i & 7] : 64 - kLevels3XXS[7 - (i & 7)];
});
struct Points3XXS : FourElements {
    IKPY_VBMI_INLINE __m512i weights(int v) const {
        const __m512i codes = v < 2 ? first : second;
        return _mm512_permutexvar_epi8(v & 1 ? _mm512_srli_epi16(codes, 4) : codes, kSignedLevels3XXS.load());
    }
};

// 40 vector operations, 18 of them on the shuffle unit: 20 cycles per 256 weights (17 GB/s at 3.6 GHz),
// measured 23. With masks that gave the signs to the activations, 21 operations of the shuffle unit, 25.
template <class Find>
struct IQ3_XXS : Plain, Points3XXS {
    static constexpr int kType = 18, kRowsAtOnce = 1, kBlockBytes = 98;

    IKPY_VBMI_INLINE IQ3_XXS(const uint8_t* const* rows, int) {
        static constexpr Bytes64 kFields([](int i) { return (i & 3) * 7; });
        const uint8_t* p = rows[0];
        const __m512i index = load64(p + 2);
        const __mmask64 upper = _mm512_movepi8_mask(index);
        first = Find::bytes256(iq3xxs_codes.first, index, upper);
        second = Find::bytes256(iq3xxs_codes.second, index, upper);
        const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
        const __m512i words = _mm512_permutexvar_epi32(twice, _mm512_castsi256_si512(load32(p + 66)));
        set_signs(nibbles_of_quads(even_masks(_mm512_multishift_epi64_epi8(kFields.load(), words))));
        scale = _mm512_mul_ps(wide::f16_lanes(p), odd_scales<4>(_mm512_srli_epi32(words, 28), 0.25f));
    }
};

// Levels are odd numbers: place p among them means 2 * p - 15, which need not be looked up.
struct Points3S : FourElements {
    static constexpr bool kRaisedOdd = true;
    static constexpr float kUnit = 0.125f;  // the sums are those of 16 * p

    // -120 times the sums of the 16-groups.
    static IKPY_VBMI void bias(const uint8_t* x, const ActQ8Layout& at, int64_t c, uint8_t* out) {
        const __m512i sums = minus_sums16(x, at, c);
        _mm512_store_si512(out, _mm512_sub_epi32(sums, _mm512_srai_epi32(sums, 4)));
    }
    IKPY_VBMI_INLINE __m512i weights(int v) const {
        return _mm512_and_si512(v < 2 ? first : second, wide::bytes(v & 1 ? 0xF0 : 0x0F));
    }
};

// 54 vector operations, 21 of them on the shuffle unit (16 for points): 27 cycles per 256 weights (15 GB/s at
// 3.6 GHz), measured 30. With looked-up magnitudes and masks of signs the shuffle unit had 28, measured 31.
template <class Find>
struct IQ3_S : Plain, Points3S {
    static constexpr int kType = 21, kRowsAtOnce = 1, kBlockBytes = 110;

    IKPY_VBMI_INLINE IQ3_S(const uint8_t* const* rows, int) {
        const uint8_t* p = rows[0];
        const __m512i index = load64(p + 2);
        const __mmask64 upper = _mm512_movepi8_mask(index), ninth = load_unaligned<uint64_t>(p + 66);
        first = Find::bytes512(iq3s_codes.first, index, upper, ninth);
        second = Find::bytes512(iq3s_codes.second, index, upper, ninth);
        set_signs(nibbles_of_quads(_mm512_cvtepu32_epi64(load32(p + 74))));
        const __m512i counts = _mm512_setr_epi32(0, 0, 4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 28, 28);
        const __m512i s = _mm512_srlv_epi32(_mm512_set1_epi32(load_unaligned<int32_t>(p + 106)), counts);
        scale = _mm512_mul_ps(wide::f16_lanes(p), odd_scales<4>(s, kUnit));
    }
};

}  // namespace ikpy::points

#endif
