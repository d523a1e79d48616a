// Lattices of the row-interleaved grid types (quant-formats.md#interleaved-grid-types): four rows at once,
// each in 128 bits of the vectors. What is said of the plain types in points.hpp and points_of_words.hpp
// holds for these.
#pragma once
#include "unpack/points_of_words.hpp"

#if defined(__AVX512VNNI__)

namespace ikpy::points {

struct Interleaved {
    static constexpr int kHeaderBytes = 0, kRowsAtOnce = 4;
    static constexpr bool kInterleaved = true;
};

// Byte i of 64 belongs to row i / 16; what follows counts inside of the row.
constexpr int row_of(int i) { return i / 16; }

// f16 scales of four rows.
IKPY_VBMI_INLINE __m512 row_scales(const uint8_t* p) {
    const __m128 d = _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
                                 _mm512_castps128_ps512(d));
}

// Sign codes z in bits 1 .. 7 to masks z ^ z << 1.
IKPY_VBMI_INLINE __m512i masks_of_codes(__m512i codes) {
    return _mm512_gf2p8affine_epi64_epi8(codes, _mm512_set1_epi64(0x02060C183060C080), 0);
}

IKPY_VBMI_INLINE __m512i bytes_of(__m512i v, const Bytes64& order) {
    return _mm512_permutexvar_epi8(order.load(), v);
}
IKPY_VBMI_INLINE __m512i bytes_of(__m256i v, const Bytes64& order) {
    return bytes_of(_mm512_castsi256_si512(v), order);
}
IKPY_VBMI_INLINE __m512i eight_bytes(const uint8_t* p) {
    return _mm512_set1_epi64(load_unaligned<int64_t>(p));
}

// Odd scales whose bits are the lowest bits of the four bytes of dwords.
IKPY_VBMI_INLINE __m512 scales_of_low_bits(__m512i sas, float unit) {
    // Bits 7 .. 4 of the bytes are those of the first dword of a quadword, 3 .. 0 those of the second one.
    const __m512i bits = _mm512_gf2p8affine_epi64_epi8(wide::bytes(1), sas, 0);
    const __m512i reversed = _mm512_srlv_epi32(bits, _mm512_set1_epi64(4));
    const __m512 table = _mm512_setr_ps(1, 17, 9, 25, 5, 21, 13, 29, 3, 19, 11, 27, 7, 23, 15, 31);
    return _mm512_permutexvar_ps(reversed, _mm512_mul_ps(table, _mm512_set1_ps(unit)));
}

// Steps of 128 columns: a dword lane is a sub-block.
template <class Find>
struct IQ2_XXS_R4 : Interleaved, EightElements {
    static constexpr int kType = 216, kBlockBytes = 264, kSteps = 2;

    IKPY_VBMI_INLINE IQ2_XXS_R4(const uint8_t* const* rows, int step) {
        const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        const uint8_t* p = rows[0];
        const __m512i index = _mm512_permutexvar_epi32(order, load64(p + 136 + 64 * step));
        const __m512i sas = _mm512_permutexvar_epi32(order, load64(p + 8 + 64 * step));
        const __mmask64 upper = _mm512_movepi8_mask(index);
        first = Find::bytes256(iq2xxs_codes.first, index, upper);
        second = Find::bytes256(iq2xxs_codes.second, index, upper);
        signs = masks_of_codes(sas);
        scale = _mm512_mul_ps(row_scales(p), scales_of_low_bits(sas, 0.125f));
    }
};

// Steps of 64 columns: quadwords of two sub-blocks, ordered by row.
IKPY_VBMI_INLINE __m512i quads_by_row(__m512i v) {
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), v);
}

// The dwords of those sub-blocks in the lower halves of the quadwords.
IKPY_VBMI_INLINE __m512i dwords_by_row(const uint8_t* p) {
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 0, 4, 4, 1, 1, 5, 5, 2, 2, 6, 6, 3, 3, 7, 7),
                                    _mm512_castsi256_si512(load32(p)));
}

// Odd scales in nibbles of the two bytes that each row has at p.
IKPY_VBMI_INLINE __m512 nibble_scales_by_row(const uint8_t* p) {
    static constexpr Bytes64 kNibbles(
        [](int i) { return 32 * (i / 8 & 1) + 8 * row_of(i) + (i / 4 & 1) * 4; });
    return odd_scales<4>(_mm512_multishift_epi64_epi8(kNibbles.load(), eight_bytes(p)), 0.125f);
}

template <class Find>
struct IQ2_XS_R4 : Interleaved, SignedPoints {
    static constexpr int kType = 217, kBlockBytes = 296, kSteps = 4, kTogether = Find::kTogether;

    IKPY_VBMI_INLINE IQ2_XS_R4(const uint8_t* const* rows, int step) {
        const uint8_t* p = rows[0];
        codes = quads_by_row(load64(p + 8 + 64 * step));
        // The mask belongs to bits 1 .. 7 of the high byte.
        set_signs<16>(masks_of_codes(codes));
        scale = _mm512_mul_ps(row_scales(p), nibble_scales_by_row(p + 264 + 8 * step));
    }
    template <int T>
    IKPY_VBMI_INLINE static void find(IQ2_XS_R4 (&w)[T]) {
        find_words<Find>(iq2xs_codes, w);
    }
};

template <class Find>
struct IQ3_XXS_R4 : Interleaved, Points3XXS {
    static constexpr int kType = 218, kBlockBytes = 392, kSteps = 4;

    IKPY_VBMI_INLINE IQ3_XXS_R4(const uint8_t* const* rows, int step) {
        const uint8_t* p = rows[0];
        const __m512i index = quads_by_row(load64(p + 136 + 64 * step));
        const __mmask64 upper = _mm512_movepi8_mask(index);
        first = Find::bytes256(iq3xxs_codes.first, index, upper);
        second = Find::bytes256(iq3xxs_codes.second, index, upper);
        const __m512i sas = dwords_by_row(p + 8 + 32 * step);
        set_signs(nibbles_of_quads(masks_of_codes(sas)));
        scale = _mm512_mul_ps(row_scales(p), scales_of_low_bits(sas, 0.25f));
    }
};

template <class Find>
struct IQ3_S_R4 : Interleaved, Points3S {
    static constexpr int kType = 221, kBlockBytes = 440, kSteps = 4;

    IKPY_VBMI_INLINE IQ3_S_R4(const uint8_t* const* rows, int step) {
        // 4-groups 0 4 1 5 2 6 3 7 follow each other, their rows in neighbouring bytes.
        static constexpr Bytes64 kIndex(
            [](int i) { return 32 * (i / 8 & 1) + 8 * (i & 3) + 4 * (i / 4 & 1) + row_of(i); });
        static constexpr Bytes64 kNinth([](int i) { return 4 * (i / 8 & 1) + row_of(i); });
        // Byte j of a row and sub-block holds the signs of elements j: rows of a matrix, the last one first.
        static constexpr Bytes64 kSigns(
            [](int i) { return 16 * (i / 8 & 1) + 4 * row_of(i) + ((7 - i) & 3); });
        static constexpr Bytes64 kGroups([](int i) { return 1 << (i & 7); });
        const uint8_t* p = rows[0];
        const __m512i index = bytes_of(load64(p + 8 + 64 * step), kIndex);
        const __m512i high = bytes_of(eight_bytes(p + 264 + 8 * step), kNinth);
        const __mmask64 ninth =
            _mm512_test_epi8_mask(high, _mm512_set1_epi64(static_cast<int64_t>(0x8040201008040201)));
        const __mmask64 upper = _mm512_movepi8_mask(index);
        first = Find::bytes512(iq3s_codes.first, index, upper, ninth);
        second = Find::bytes512(iq3s_codes.second, index, upper, ninth);
        const __m512i by_element = bytes_of(load32(p + 296 + 32 * step), kSigns);
        set_signs(_mm512_gf2p8affine_epi64_epi8(kGroups.load(), by_element, 0));
        // Low nibbles belong to the first four sub-blocks.
        const __m512i nibbles = bytes_of(eight_bytes(p + 424 + 8 * (step & 1)), kNinth);
        const __m512i s = step < 2 ? nibbles : _mm512_srli_epi32(nibbles, 4);
        scale = _mm512_mul_ps(row_scales(p), odd_scales<4>(s, kUnit));
    }
};

template <class Find>
struct IQ2_S_R4 : Interleaved, SignedPoints {
    static constexpr int kType = 222, kBlockBytes = 328, kSteps = 4, kTogether = Find::kTogether;

    IKPY_VBMI_INLINE IQ2_S_R4(const uint8_t* const* rows, int step) {
        static constexpr Bytes64 kPoints(
            [](int i) { return 16 * (i / 8 & 1) + 4 * row_of(i) + (i / 2 & 3); });
        static constexpr Bytes64 kFields(
            [](int i) { return 32 * (i / 8 & 1) + 8 * row_of(i) + (i / 2 & 3) * 2; });
        const uint8_t* p = rows[0];
        const __m512i low = bytes_of(load32(p + 8 + 32 * step), kPoints);
        codes = _mm512_mask_multishift_epi64_epi8(low, 0xAAAAAAAAAAAAAAAA, kFields.load(),
                                                  eight_bytes(p + 136 + 8 * step));
        set_signs<8>(dwords_by_row(p + 168 + 32 * step));
        scale = _mm512_mul_ps(row_scales(p), nibble_scales_by_row(p + 296 + 8 * step));
    }
    template <int T>
    IKPY_VBMI_INLINE static void find(IQ2_S_R4 (&w)[T]) {
        find_words<Find>(iq2s_codes, w);
    }
};

// Steps of two blocks of 32 columns.
template <int Bytes>
struct TernaryRows : Interleaved {
    static constexpr int kHeaderBytes = 8, kBlockBytes = 8 * Bytes, kSteps = 4;

    static IKPY_VBMI_INLINE __m512i two_blocks(const uint8_t* p, int step) {
        return _mm512_maskz_loadu_epi8((1ull << (2 * Bytes)) - 1, p + 2 * Bytes * step);
    }
};

struct IQ1_S_R4 : TernaryRows<24>, Ternary {
    static constexpr int kType = 219;
    static constexpr auto bias = IQ1_S::bias;
    __mmask8 down;

    IKPY_VBMI_INLINE IQ1_S_R4(const uint8_t* const* rows, int step) {
        static constexpr Bytes64 kPoints(
            [](int i) { return 24 * (i / 8 & 1) + 4 * (i / 2 & 3) + row_of(i); });
        static constexpr Bytes64 kHigh([](int i) { return 24 * (i / 8 & 1) + 16 + 2 * row_of(i) + (i & 1); });
        const __m512i v = two_blocks(rows[0], step), words = bytes_of(v, kHigh);
        codes = _mm512_mask_multishift_epi64_epi8(bytes_of(v, kPoints), 0xAAAAAAAAAAAAAAAA,
                                                  kThreeBitFields.load(), words);
        down = _mm512_test_epi64_mask(words, _mm512_set1_epi64(0x8000));
        scale = odd_scales<3>(_mm512_srli_epi32(words, 12), 0.125f);
    }
    template <int T>
    IKPY_VBMI_INLINE static void find(IQ1_S_R4 (&w)[T]) {
        find_words<OneRegister>(iq1s_codes, w);
    }
    template <class From>
    IKPY_VBMI_INLINE __m512i start(From bias, int step) const {
        return _mm512_mask_blend_epi64(down, bias.load(step), (bias + 64).load(step));
    }
};

template <class Find>
struct IQ1_M_R4 : TernaryRows<28>, TernaryOf16 {
    static constexpr int kType = 229, kTogether = Find::kTogether;

    IKPY_VBMI_INLINE IQ1_M_R4(const uint8_t* const* rows, int step) {
        static constexpr Bytes64 kPoints(
            [](int i) { return 28 * (i / 8 & 1) + 8 * (i / 4 & 1) + 4 * (i / 2 & 1) + row_of(i); });
        // Nibbles of the quadwords: bytes of both halves, scales.
        static constexpr Bytes64 kHigh([](int i) {
            const int at[8] = {16, 20, 24, 24, 24, 24, 24, 24};
            return 28 * (i / 8 & 1) + at[i & 7] + row_of(i);
        });
        static constexpr Bytes64 kScales([](int i) { return i & 4 ? 20 : 16; });
        const __m512i v = two_blocks(rows[0], step), fields = bytes_of(v, kHigh);
        set_words(_mm512_mask_multishift_epi64_epi8(bytes_of(v, kPoints), 0xAAAAAAAAAAAAAAAA,
                                                    kFourBitFields.load(), fields));
        const __m512 eighths = _mm512_mul_ps(
            _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_ps(0.125f));
        scale = _mm512_permutexvar_ps(_mm512_multishift_epi64_epi8(kScales.load(), fields), eighths);
    }
    template <int T>
    IKPY_VBMI_INLINE static void find(IQ1_M_R4 (&w)[T]) {
        find_words<Find>(iq1s_codes, w);
    }
    template <class From>
    IKPY_VBMI_INLINE __m512i start(From bias, int step) const {
        return _mm512_dpwssd_epi32(bias.load(step), down, (bias + 64).load(step));
    }
};

}  // namespace ikpy::points

#endif
