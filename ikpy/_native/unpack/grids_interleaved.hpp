// Layouts of the row-interleaved grid types (quant-formats.md#interleaved-grid-types). Rows are unpacked one
// by one: looking up points costs more than the transposition that other interleaved types avoid.
#pragma once
#include "unpack/four_rows.hpp"
#include "unpack/grid_points.hpp"
#include "unpack/grid_signs.hpp"

namespace ikpy {
namespace grid {

// Place of an 8-group in lists ordered by sub-block, row, group.
inline int place(int g, int k) { return 16 * (g >> 2) + 4 * k + (g & 3); }

constexpr uint64_t kBytesOfWords = 0x00FF00FF00FF00FF;

// Two dwords of sub-blocks 2 * i and 2 * i + 1 of row k.
inline uint64_t of_sub_blocks(const uint8_t* list, int k, int i) {
    return load_unaligned<uint32_t>(list + 32 * i + 4 * k) |
           static_cast<uint64_t>(load_unaligned<uint32_t>(list + 32 * i + 16 + 4 * k)) << 32;
}

#if defined(__AVX512VNNI__)
inline __m128i two_quads(const uint8_t* a, const uint8_t* b) {
    return _mm_set_epi64x(load_unaligned<int64_t>(b), load_unaligned<int64_t>(a));
}
#endif

// Bytes with a sign code above one bit of the scale; the four bytes of a sub-block give the four bits.
inline uint64_t coded_signs(const uint8_t* sas, int k, int i) {
    return code_masks(of_sub_blocks(sas, k, i) >> 1 & 0x7F * kOnes);
}
inline int scale_of_low_bits(uint32_t sas) { return static_cast<int>((sas & 0x01010101) * 0x10204080 >> 28); }

inline void scales_of_low_bits(const uint8_t* sas, float scale, int k, float* d) {
    for (int s = 0; s < 8; ++s)
        d[s] = scale * odd(scale_of_low_bits(load_unaligned<uint32_t>(sas + 16 * s + 4 * k)));
}

// Scale bytes of sub-blocks: low nibble of the left, high nibble of the right 16 columns.
inline void half_scales(const uint8_t* list, float scale, int k, float* d) {
    for (int s = 0; s < 16; ++s) d[s] = scale * odd(list[4 * (s >> 1) + k] >> (4 * (s & 1)) & 15);
}

#if defined(__AVX512VNNI__)
// Wide forms of the two functions above.
inline __m512 wide_scales_of_low_bits(const uint8_t* sas, float scale, int k) {
    const __m512i order = _mm512_add_epi32(
        _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 0, 0, 0, 0, 0, 0, 0), _mm512_set1_epi32(k));
    const __m512i v = _mm512_permutex2var_epi32(_mm512_loadu_si512(sas), order, _mm512_loadu_si512(sas + 64));
    const __m256i bits = _mm256_and_si256(_mm512_castsi512_si256(v), _mm256_set1_epi32(0x01010101));
    const __m256i s = _mm256_srli_epi32(_mm256_mullo_epi32(bits, _mm256_set1_epi32(0x10204080)), 28);
    return odd_scales(scale, _mm512_castsi256_si512(s));
}
inline __m512 wide_half_scales(const uint8_t* list, float scale, int k) {
    const auto v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(list));
    const __m128i bytes = _mm256_cvtepi32_epi8(_mm256_srl_epi32(v, _mm_cvtsi32_si128(8 * k)));
    const __m128i low = _mm_and_si128(bytes, _mm_set1_epi8(15));
    const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi8(15));
    return odd_scales(scale, _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(low, high)));
}
#endif

struct IQ2_XXS_R4 {
    static constexpr int kType = 216, kRows = 4, kGroup = 32, kBlock = 256, kBlockBytes = 264, kZero = 128;
    static constexpr int kLow = 128 - kLargestPoint2, kHigh = 128 + kLargestPoint2;
    static uint64_t point(const uint8_t* p, int k, int g) {
        return point8(tables::iq2xxs_grid, p[136 + place(g, k)]);
    }
#if defined(__AVX512VNNI__)
    static __m512i points(const uint8_t* p, int k, int i) {
        return gather8(tables::iq2xxs_grid, byte_quads(of_sub_blocks(p + 136, k, i)));
    }
    static __m512 wide_scales(const uint8_t* p, int k) {
        return wide_scales_of_low_bits(p + 8, load_f16(p + 2 * k) * 0.125f, k);
    }
#endif
    static uint64_t signs(const uint8_t* p, int k, int i) { return coded_signs(p + 8, k, i); }
    static void scales(const uint8_t* p, int k, float* d) {
        scales_of_low_bits(p + 8, load_f16(p + 2 * k) * 0.125f, k, d);
    }
#if defined(__AVX2__)
    static void prepare(const uint8_t* p, FourRows* out) {
        four_rows::signs_and_scales(p + 8, four_rows::row_scales(p, 0.125f), out);
    }
    static constexpr int kLargest = kLargestPoint2;
    static __m256i points(const uint8_t* p, const FourRows&, int i, int g) {
        return points_of_rows<4>(tables::iq2xxs_grid, p + 136 + 16 * i + g);
    }
    static __m256i points32(const uint8_t* p, int k, int i) {
        return points_of_8(tables::iq2xxs_grid,
                           _pdep_u64(load_unaligned<uint32_t>(p + 136 + place(4 * i, k)), kBytesOfWords));
    }
#endif
};

struct IQ3_XXS_R4 {
    static constexpr int kType = 218, kRows = 4, kGroup = 32, kBlock = 256, kBlockBytes = 392, kZero = 128;
    static constexpr int kLow = 128 - kLargestPoint3xxs, kHigh = 128 + kLargestPoint3xxs;
    static uint64_t point(const uint8_t* p, int k, int g) {
        const uint8_t* index = p + 136 + 32 * (g >> 2) + 8 * k + 2 * (g & 3);
        return point4(tables::iq3xxs_grid, index[0], index[1]);
    }
#if defined(__AVX512VNNI__)
    static __m512i points(const uint8_t* p, int k, int i) {
        const uint8_t* index = p + 136 + 64 * i + 8 * k;
        return gather4(tables::iq3xxs_grid, _mm512_cvtepu8_epi32(two_quads(index, index + 32)));
    }
    static __m512 wide_scales(const uint8_t* p, int k) {
        return wide_scales_of_low_bits(p + 8, load_f16(p + 2 * k) * 0.25f, k);
    }
#endif
    static uint64_t signs(const uint8_t* p, int k, int i) { return coded_signs(p + 8, k, i); }
    static void scales(const uint8_t* p, int k, float* d) {
        scales_of_low_bits(p + 8, load_f16(p + 2 * k) * 0.25f, k, d);
    }
#if defined(__AVX2__)
    static void prepare(const uint8_t* p, FourRows* out) {
        four_rows::signs_and_scales(p + 8, four_rows::row_scales(p, 0.25f), out);
    }
    static constexpr int kLargest = kLargestPoint3xxs;
    static __m256i points(const uint8_t* p, const FourRows&, int i, int g) {
        const uint8_t* index = p + 136 + 32 * i + 2 * g;
        const auto at = [index](int j) {
            return load_unaligned<int32_t>(tables::iq3xxs_grid + 4 * static_cast<uint64_t>(index[j]));
        };
        return _mm256_setr_epi32(at(0), at(1), at(8), at(9), at(16), at(17), at(24), at(25));
    }
    static __m256i points32(const uint8_t* p, int k, int i) {
        return points_of_4_at(tables::iq3xxs_grid, p + 136 + 32 * i + 8 * k);
    }
#endif
};

struct IQ2_XS_R4 {
    static constexpr int kType = 217, kRows = 4, kGroup = 16, kBlock = 256, kBlockBytes = 296, kZero = 128;
    static constexpr int kLow = 128 - kLargestPoint2, kHigh = 128 + kLargestPoint2;
    static uint64_t point(const uint8_t* p, int k, int g) {
        return point8(tables::iq2xs_grid, load_unaligned<uint16_t>(p + 8 + 2 * place(g, k)) & 511);
    }
#if defined(__AVX512VNNI__)
    static __m512i points(const uint8_t* p, int k, int i) {
        const uint8_t* index = p + 8 + 64 * i + 8 * k;
        return gather8(tables::iq2xs_grid,
                       _mm512_and_si512(word_quads(two_quads(index, index + 32)), _mm512_set1_epi64(511)));
    }
    static __m512 wide_scales(const uint8_t* p, int k) {
        return wide_half_scales(p + 264, load_f16(p + 2 * k) * 0.125f, k);
    }
#endif
    static uint64_t signs(const uint8_t* p, int k, int i) {
        return code_masks(upper_sevens(p + 8 + 64 * i + 8 * k, 32));
    }
    static void scales(const uint8_t* p, int k, float* d) {
        half_scales(p + 264, load_f16(p + 2 * k) * 0.125f, k, d);
    }
#if defined(__AVX2__)
    static void prepare(const uint8_t* p, FourRows* out) {
        four_rows::half_scales(p + 264, four_rows::row_scales(p, 0.125f), out);
        const auto* words = reinterpret_cast<const __m256i*>(p + 8);
        for (int i = 0; i < 8; i += 2) {
            const __m256i a = _mm256_srli_epi16(_mm256_loadu_si256(words + i), 9);
            const __m256i b = _mm256_srli_epi16(_mm256_loadu_si256(words + i + 1), 9);
            const __m256i z = _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xD8);
            put(_mm256_xor_si256(z, _mm256_add_epi8(z, z)), out->masks[i]);
        }
        for (int i = 0; i < 8; ++i)
            put(_mm256_and_si256(_mm256_loadu_si256(words + i), _mm256_set1_epi16(511)), out->index[i]);
    }
    static constexpr int kLargest = kLargestPoint2;
    static __m256i points(const uint8_t*, const FourRows& rows, int i, int g) {
        return points_of_rows<4>(tables::iq2xs_grid, rows.index[i] + g);
    }
    static __m256i points32(const uint8_t* p, int k, int i) {
        return points_of_8(tables::iq2xs_grid,
                           load_unaligned<uint64_t>(p + 8 + 32 * i + 8 * k) & 0x01FF01FF01FF01FF);
    }
#endif
};

struct IQ2_S_R4 {
    static constexpr int kType = 222, kRows = 4, kGroup = 16, kBlock = 256, kBlockBytes = 328, kZero = 128;
    static constexpr int kLow = 128 - kLargestPoint2, kHigh = 128 + kLargestPoint2;
    static uint64_t point(const uint8_t* p, int k, int g) {
        const int high = p[136 + 4 * (g >> 2) + k] >> (2 * (g & 3)) & 3;
        return point8(tables::iq2s_grid, p[8 + place(g, k)] + 256 * high);
    }
#if defined(__AVX512VNNI__)
    static __m512i points(const uint8_t* p, int k, int i) {
        const uint8_t* fields = p + 136 + 8 * i + k;
        const uint64_t high = _pdep_u64(fields[0] | fields[4] << 8, 0x0303030303030303);
        const __m128i index =
            _mm_unpacklo_epi8(_mm_cvtsi64_si128(static_cast<int64_t>(of_sub_blocks(p + 8, k, i))),
                              _mm_cvtsi64_si128(static_cast<int64_t>(high)));
        return gather8(tables::iq2s_grid, word_quads(index));
    }
    static __m512 wide_scales(const uint8_t* p, int k) {
        return wide_half_scales(p + 296, load_f16(p + 2 * k) * 0.125f, k);
    }
#endif
    static uint64_t signs(const uint8_t* p, int k, int i) { return of_sub_blocks(p + 168, k, i); }
    static void scales(const uint8_t* p, int k, float* d) {
        half_scales(p + 296, load_f16(p + 2 * k) * 0.125f, k, d);
    }
#if defined(__AVX2__)
    static void prepare(const uint8_t* p, FourRows* out) {
        four_rows::half_scales(p + 296, four_rows::row_scales(p, 0.125f), out);
        std::memcpy(out->masks, p + 168, sizeof out->masks);
        // Words of rows 0 .. 3, four each; the upper bits of the four are fields of the row's byte.
        const __m256i order = _mm256_setr_epi32(static_cast<int>(0x80008000), static_cast<int>(0x80008000),
                                                static_cast<int>(0x80018001), static_cast<int>(0x80018001),
                                                static_cast<int>(0x80028002), static_cast<int>(0x80028002),
                                                static_cast<int>(0x80038003), static_cast<int>(0x80038003));
        const __m256i to_high = _mm256_set1_epi64x(0x0004001000400100);
        for (int i = 0; i < 8; ++i) {
            const auto low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8 + 16 * i));
            const __m256i fields = _mm256_set1_epi32(load_unaligned<int32_t>(p + 136 + 4 * i));
            const __m256i high = _mm256_mullo_epi16(_mm256_shuffle_epi8(fields, order), to_high);
            put(_mm256_or_si256(_mm256_cvtepu8_epi16(low), _mm256_and_si256(high, _mm256_set1_epi16(0x300))),
                out->index[i]);
        }
    }
    static constexpr int kLargest = kLargestPoint2;
    static __m256i points(const uint8_t*, const FourRows& rows, int i, int g) {
        return points_of_rows<4>(tables::iq2s_grid, rows.index[i] + g);
    }
    static __m256i points32(const uint8_t* p, int k, int i) {
        const uint64_t low = _pdep_u64(load_unaligned<uint32_t>(p + 8 + place(4 * i, k)), kBytesOfWords);
        return points_of_8(tables::iq2s_grid, low | _pdep_u64(p[136 + 4 * i + k], 0x0300030003000300));
    }
#endif
};

struct IQ3_S_R4 {
    static constexpr int kType = 221, kRows = 4, kGroup = 32, kBlock = 256, kBlockBytes = 440, kZero = 128;
    static constexpr int kLow = 128 - kLargestPoint3s, kHigh = 128 + kLargestPoint3s;
    static uint64_t point(const uint8_t* p, int k, int g) {
        // 4-groups 2 * (g & 3) and the next one; the second half of the list lies between the first.
        const int j = 2 * (g & 3);
        const uint8_t* index = p + 8 + 32 * (g >> 2) + k + 8 * (j & 3) + 4 * (j >> 2);
        const int high = p[264 + 4 * (g >> 2) + k] >> j;
        return point4(tables::iq3s_grid, index[0] + 256 * (high & 1), index[8] + 256 * (high >> 1 & 1));
    }
    // Byte j, bit n is the sign of column 4 * n + j.
    static uint64_t signs_of_columns(uint32_t v) {
#if defined(__BMI2__)
        return _pdep_u32(v, 0x11111111) | _pdep_u32(v >> 8, 0x22222222) | _pdep_u32(v >> 16, 0x44444444) |
               _pdep_u32(v >> 24, 0x88888888);
#else
        uint32_t masks = 0;
        for (int e = 0; e < 32; ++e) masks |= (v >> (8 * (e & 3) + (e >> 2)) & 1) << e;
        return masks;
#endif
    }
#if defined(__AVX512VNNI__)
    // Every fourth byte of 64; 4-groups 0 4 1 5 2 6 3 7 follow each other.
    static __m512i points(const uint8_t* p, int k, int i) {
        const __m512i order = _mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
        const __m512i bytes = _mm512_srlv_epi32(_mm512_loadu_si512(p + 8 + 64 * i), _mm512_set1_epi32(8 * k));
        const __m512i low = _mm512_permutexvar_epi32(order, _mm512_and_si512(bytes, _mm512_set1_epi32(255)));
        const auto high = static_cast<__mmask16>(p[264 + 8 * i + k] | p[268 + 8 * i + k] << 8);
        return gather4(tables::iq3s_grid, _mm512_mask_add_epi32(low, high, low, _mm512_set1_epi32(256)));
    }
    static __m512 wide_scales(const uint8_t* p, int k) {
        const __m128i v = _mm_srl_epi32(load16(p + 424), _mm_cvtsi32_si128(8 * k));
        const __m256i nibbles =
            _mm256_srlv_epi32(_mm256_broadcastsi128_si256(v), _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4));
        const __m256i s = _mm256_and_si256(nibbles, _mm256_set1_epi32(15));
        return odd_scales(load_f16(p + 2 * k), _mm512_castsi256_si512(s));
    }
#endif
    static uint64_t signs(const uint8_t* p, int k, int i) {
#if defined(__AVX512VNNI__)
        const uint8_t* masks = p + 296 + 32 * i + 4 * k;
        const __m512i both = _mm512_mask_set1_epi32(_mm512_set1_epi32(load_unaligned<int32_t>(masks)), 0xFF00,
                                                    load_unaligned<int32_t>(masks + 16));
        const __m256i bit = _mm256_setr_epi32(0x01010101, 0x02020202, 0x04040404, 0x08080808, 0x10101010,
                                              0x20202020, 0x40404040, static_cast<int>(0x80808080));
        return _mm512_test_epi8_mask(both, _mm512_broadcast_i64x4(bit));
#else
        const uint64_t v = of_sub_blocks(p + 296, k, i);
        return signs_of_columns(static_cast<uint32_t>(v)) | signs_of_columns(static_cast<uint32_t>(v >> 32))
                                                                << 32;
#endif
    }
    static void scales(const uint8_t* p, int k, float* d) {
        const float scale = load_f16(p + 2 * k);
        for (int s = 0; s < 8; ++s) d[s] = scale * odd(p[424 + (4 * (s & 3)) + k] >> (4 * (s >> 2)) & 15);
    }
#if defined(__AVX2__)
    static void prepare(const uint8_t* p, FourRows* out) {
        const __m256 rows = four_rows::row_scales(p, 1.0f);
        const auto v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 424));
        const __m128i nibble = _mm_set1_epi8(15);
        const __m128i s[2] = {_mm_and_si128(v, nibble), _mm_and_si128(_mm_srli_epi16(v, 4), nibble)};
        for (int h = 0; h < 2; ++h) {
            four_rows::put_odd(rows, _mm256_cvtepu8_epi32(s[h]), out->d[4 * h]);
            four_rows::put_odd(rows, _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(s[h], s[h])), out->d[4 * h + 2]);
        }
        std::memcpy(out->masks, p + 296, sizeof out->masks);
        // A byte of four rows for each of the 4-groups 0 4 1 5 2 6 3 7, whose ninth bits are those of the
        // rows' bytes.
        const __m256i bit = _mm256_setr_epi32(0x01010101, 0x10101010, 0x02020202, 0x20202020, 0x04040404,
                                              0x40404040, 0x08080808, static_cast<int>(0x80808080));
        for (int i = 0; i < 8; ++i) {
            const auto low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8 + 32 * i));
            const __m256i bits = _mm256_set1_epi32(load_unaligned<int32_t>(p + 264 + 4 * i));
            const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(bits, bit), bit);
            const __m256i ninth = _mm256_abs_epi8(set);
            // 4-groups 0 4 2 6, then 1 5 3 7.
            put(_mm256_unpacklo_epi8(low, ninth), out->index[i]);
            put(_mm256_unpackhi_epi8(low, ninth), out->index[i] + 16);
        }
    }
    static constexpr int kLargest = kLargestPoint3s;
    static __m256i points(const uint8_t*, const FourRows& rows, int i, int g) {
        const uint16_t* index = rows.index[i] + 8 * (g & 1) + 4 * (g >> 1);
        const auto at = [index](int j) {
            return load_unaligned<int32_t>(tables::iq3s_grid + 4 * static_cast<uint64_t>(index[j]));
        };
        return _mm256_setr_epi32(at(0), at(16), at(1), at(17), at(2), at(18), at(3), at(19));
    }
    // Masks of the negative ones of columns 8 * g .. + 7.
    static __m256i signs8(__m256i masks, int g) {
        const __m256i first = _mm256_set1_epi64x(0x0202020201010101);
        const __m256i bit = _mm256_slli_epi16(first, 2 * g);
        return _mm256_cmpeq_epi8(_mm256_and_si256(masks, bit), bit);
    }
    // Byte j, bit n is the sign of column 4 * n + j.
    static constexpr bool kOwnSigns = true;
    static __m256i signs32(uint32_t mask) {
        const __m256i bit = _mm256_setr_epi32(0x01010101, 0x02020202, 0x04040404, 0x08080808, 0x10101010,
                                              0x20202020, 0x40404040, static_cast<int>(0x80808080));
        return _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(mask)), bit), bit);
    }
    static void signed_codes(const uint8_t* p, int k, uint8_t* codes) {
        for (int i = 0; i < 8; ++i) {
            const __m256i negative = signs32(load_unaligned<uint32_t>(p + 296 + 16 * i + 4 * k));
            const __m256i v = _mm256_sub_epi8(_mm256_xor_si256(points32(p, k, i), negative), negative);
            c32::store(codes + 32 * i, reinterpret_cast<c32::Codes32>(v) + 128);
        }
    }
    static __m256i points32(const uint8_t* p, int k, int i) {
        const auto v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8 + 32 * i));
        // Bytes of row k: 4-groups 0 4 1 5 2 6 3 7.
        const __m256i low =
            _mm256_and_si256(_mm256_srl_epi32(v, _mm_cvtsi32_si128(8 * k)), _mm256_set1_epi32(255));
        // Their ninth bits, one after the other in a byte, to bit 8.
        const __m256i counts = _mm256_setr_epi32(8, 4, 7, 3, 6, 2, 5, 1);
        const __m256i high =
            _mm256_sllv_epi32(_mm256_set1_epi8(static_cast<char>(p[264 + 4 * i + k])), counts);
        const __m256i ninth = _mm256_and_si256(high, _mm256_set1_epi32(256));
        alignas(32) uint32_t index[8];
        put(_mm256_or_si256(low, ninth), index);
        const auto at = [&index](int j) {
            return load_unaligned<int32_t>(tables::iq3s_grid + 4 * index[2 * (j & 3) + (j >> 2)]);
        };
        return _mm256_setr_epi32(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7));
    }
#endif
};

}  // namespace grid
}  // namespace ikpy
