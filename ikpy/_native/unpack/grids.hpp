// Layouts of the grid types (quant-formats.md#grid-types).
#pragma once
#include "unpack/grid_block.hpp"
#include "unpack/grid_points.hpp"
#include "unpack/grid_signs.hpp"

namespace ikpy {
namespace grid {

struct IQ2_XXS {
    static constexpr int kType = 16, kGroup = 32, kBlock = 256, kBlockBytes = 66, kZero = 128;
    static constexpr int kLow = 128 - kLargestPoint2, kHigh = 128 + kLargestPoint2;
    static uint64_t point(const uint8_t* p, int, int g) {
        return point8(tables::iq2xxs_grid, p[2 + 8 * (g >> 2) + (g & 3)]);
    }
    static uint32_t signs_scale(const uint8_t* p, int s) { return load_unaligned<uint32_t>(p + 6 + 8 * s); }
#if defined(__AVX2__)
    static void masks(const uint8_t* p, uint8_t* out) {
        const __m256 a = _mm256_loadu_ps(reinterpret_cast<const float*>(p + 2));
        const __m256 b = _mm256_loadu_ps(reinterpret_cast<const float*>(p + 34));
        const __m256i odd = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xDD));
        put(even_masks_of_dwords(_mm256_permute4x64_epi64(odd, 0xD8)), out);
    }
#endif
#if defined(__AVX512VNNI__)
    static __m512i points(const uint8_t* p, int, int i) {
        return gather8(tables::iq2xxs_grid, byte_quads(two_dwords(p + 2 + 16 * i, p + 10 + 16 * i)));
    }
    static __m512 wide_scales(const uint8_t* p, int) {
        const __m512i s = _mm512_srli_epi64(_mm512_loadu_si512(p + 2), 60);
        return odd_scales(load_f16(p) * 0.125f, _mm512_castsi256_si512(_mm512_cvtepi64_epi32(s)));
    }
    static void wide_signs(const uint8_t* p, uint64_t* masks) {
        const __m512i v = _mm512_srli_epi64(_mm512_loadu_si512(p + 2), 32);
        put(even_masks_of_dwords(_mm512_cvtepi64_epi32(v)), masks);
    }
#endif
    static uint64_t signs(const uint8_t* p, int, int i) {
        return even_masks(seven_bit_fields(signs_scale(p, 2 * i)) |
                          seven_bit_fields(signs_scale(p, 2 * i + 1)) << 32);
    }
    static void scales(const uint8_t* p, int, float* d) {
        const float scale = load_f16(p) * 0.125f;
        for (int s = 0; s < 8; ++s) d[s] = scale * odd(static_cast<int>(signs_scale(p, s) >> 28));
    }
};

struct IQ2_XS {
    static constexpr int kType = 17, kGroup = 16, kBlock = 256, kBlockBytes = 74, kZero = 128;
    static constexpr int kLow = 128 - kLargestPoint2, kHigh = 128 + kLargestPoint2;
    static uint64_t point(const uint8_t* p, int, int g) {
        return point8(tables::iq2xs_grid, load_unaligned<uint16_t>(p + 2 + 2 * g) & 511);
    }
#if defined(__AVX2__)
    static void masks(const uint8_t* p, uint8_t* out) {
        const auto* words = reinterpret_cast<const __m256i*>(p + 2);
        const __m256i a = _mm256_srli_epi16(_mm256_loadu_si256(words), 9);
        const __m256i b = _mm256_srli_epi16(_mm256_loadu_si256(words + 1), 9);
        put(even_masks32(_mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xD8)), out);
    }
    static constexpr bool kPointsOf32 = true;
    static __m256i points32(const uint8_t* p, int i) {
        return points_of_8(tables::iq2xs_grid, load_unaligned<uint64_t>(p + 2 + 8 * i) & 0x01FF01FF01FF01FF);
    }
#endif
#if defined(__AVX512VNNI__)
    static __m512i points(const uint8_t* p, int, int i) {
        const __m512i words = word_quads(load16(p + 2 + 16 * i));
        return gather8(tables::iq2xs_grid, _mm512_and_si512(words, _mm512_set1_epi64(511)));
    }
    static __m512 wide_scales(const uint8_t* p, int) {
        return odd_scales(load_f16(p) * 0.125f, wide::nibble_lanes(p + 66));
    }
    static void wide_signs(const uint8_t* p, uint64_t* masks) {
        const __m512i sevens = _mm512_srli_epi16(_mm512_loadu_si512(p + 2), 9);
        put(even_masks32(_mm512_cvtepi16_epi8(sevens)), masks);
    }
#endif
    static uint64_t signs(const uint8_t* p, int, int i) {
        return even_masks(upper_sevens(p + 2 + 16 * i, 8));
    }
    static void scales(const uint8_t* p, int, float* d) {
        c32::scaled16(load_f16(p) * 0.125f, c32::nibbles_in_order(p + 66) * 2 + 1, d);
    }
};

struct IQ2_S {
    static constexpr int kType = 22, kGroup = 16, kBlock = 256, kBlockBytes = 82, kZero = 128;
    static constexpr int kLow = 128 - kLargestPoint2, kHigh = 128 + kLargestPoint2;
    static uint64_t point(const uint8_t* p, int, int g) {
        return point8(tables::iq2s_grid, p[2 + g] + 256 * (p[66 + (g >> 2)] >> (2 * (g & 3)) & 3));
    }
#if defined(__AVX2__)
    static void masks(const uint8_t* p, uint8_t* out) { std::memcpy(out, p + 34, 32); }
    static constexpr bool kPointsOf32 = true;
    static __m256i points32(const uint8_t* p, int i) {
        const uint64_t low = _pdep_u64(load_unaligned<uint32_t>(p + 2 + 4 * i), 0x00FF00FF00FF00FF);
        return points_of_8(tables::iq2s_grid, low | _pdep_u64(p[66 + i], 0x0300030003000300));
    }
#endif
#if defined(__AVX512VNNI__)
    static __m512i points(const uint8_t* p, int, int i) {
        const uint64_t low = load_unaligned<uint64_t>(p + 2 + 8 * i);
        const uint64_t high = _pdep_u64(load_unaligned<uint16_t>(p + 66 + 2 * i), 0x0303030303030303);
        const __m128i index = _mm_unpacklo_epi8(_mm_cvtsi64_si128(static_cast<int64_t>(low)),
                                                _mm_cvtsi64_si128(static_cast<int64_t>(high)));
        return gather8(tables::iq2s_grid, word_quads(index));
    }
    static __m512 wide_scales(const uint8_t* p, int) {
        return odd_scales(load_f16(p) * 0.125f, wide::nibble_lanes(p + 74));
    }
#endif
    static uint64_t signs(const uint8_t* p, int, int i) { return load_unaligned<uint64_t>(p + 34 + 8 * i); }
    static void scales(const uint8_t* p, int, float* d) {
        c32::scaled16(load_f16(p) * 0.125f, c32::nibbles_in_order(p + 74) * 2 + 1, d);
    }
};

struct IQ3_XXS {
    static constexpr int kType = 18, kGroup = 32, kBlock = 256, kBlockBytes = 98, kZero = 128;
    static constexpr int kLow = 128 - kLargestPoint3xxs, kHigh = 128 + kLargestPoint3xxs;
    static uint64_t point(const uint8_t* p, int, int g) {
        return point4(tables::iq3xxs_grid, p[2 + 2 * g], p[3 + 2 * g]);
    }
    static uint32_t signs_scale(const uint8_t* p, int s) { return load_unaligned<uint32_t>(p + 66 + 4 * s); }
#if defined(__AVX2__)
    static void masks(const uint8_t* p, uint8_t* out) {
        put(even_masks_of_dwords(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 66))), out);
    }
    static constexpr bool kPointsOf32 = true;
    static __m256i points32(const uint8_t* p, int i) {
        return points_of_4_at(tables::iq3xxs_grid, p + 2 + 8 * i);
    }
#endif
#if defined(__AVX512VNNI__)
    static __m512i points(const uint8_t* p, int, int i) {
        return gather4(tables::iq3xxs_grid, byte_dwords(p + 2 + 16 * i));
    }
    static __m512 wide_scales(const uint8_t* p, int) {
        const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 66));
        return odd_scales(load_f16(p) * 0.25f, _mm512_castsi256_si512(_mm256_srli_epi32(v, 28)));
    }
    static void wide_signs(const uint8_t* p, uint64_t* masks) {
        put(even_masks_of_dwords(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 66))), masks);
    }
#endif
    static uint64_t signs(const uint8_t* p, int, int i) {
        return even_masks(seven_bit_fields(signs_scale(p, 2 * i)) |
                          seven_bit_fields(signs_scale(p, 2 * i + 1)) << 32);
    }
    static void scales(const uint8_t* p, int, float* d) {
        const float scale = load_f16(p) * 0.25f;
        for (int s = 0; s < 8; ++s) d[s] = scale * odd(static_cast<int>(signs_scale(p, s) >> 28));
    }
};

struct IQ3_S {
    static constexpr int kType = 21, kGroup = 32, kBlock = 256, kBlockBytes = 110, kZero = 128;
    static constexpr int kLow = 128 - kLargestPoint3s, kHigh = 128 + kLargestPoint3s;
    static uint64_t point(const uint8_t* p, int, int g) {
        const int high = p[66 + (g >> 2)] >> (2 * (g & 3));
        return point4(tables::iq3s_grid, p[2 + 2 * g] + 256 * (high & 1),
                      p[3 + 2 * g] + 256 * (high >> 1 & 1));
    }
#if defined(__AVX2__)
    static void masks(const uint8_t* p, uint8_t* out) { std::memcpy(out, p + 74, 32); }
    static constexpr bool kPointsOf32 = true;
    static __m256i points32(const uint8_t* p, int i) {
        const auto four = [p, i](int h) {
            const uint64_t low =
                _pdep_u64(load_unaligned<uint32_t>(p + 2 + 8 * i + 4 * h), 0x00FF00FF00FF00FF);
            return points_of_4(tables::iq3s_grid, low | _pdep_u64(p[66 + i] >> (4 * h), 0x0100010001000100));
        };
        return _mm256_inserti128_si256(_mm256_castsi128_si256(four(0)), four(1), 1);
    }
#endif
#if defined(__AVX512VNNI__)
    static __m512i points(const uint8_t* p, int, int i) {
        const __m512i low = byte_dwords(p + 2 + 16 * i);
        return gather4(tables::iq3s_grid, _mm512_mask_add_epi32(low, load_unaligned<uint16_t>(p + 66 + 2 * i),
                                                                low, _mm512_set1_epi32(256)));
    }
    static __m512 wide_scales(const uint8_t* p, int) {
        return odd_scales(load_f16(p), dword_nibbles(load_unaligned<uint32_t>(p + 106)));
    }
#endif
    static uint64_t signs(const uint8_t* p, int, int i) { return load_unaligned<uint64_t>(p + 74 + 8 * i); }
    static void scales(const uint8_t* p, int, float* d) {
        const float scale = load_f16(p);
        for (int s = 0; s < 8; ++s) d[s] = scale * odd(p[106 + (s >> 1)] >> (4 * (s & 1)) & 15);
    }
};

}  // namespace grid
}  // namespace ikpy
