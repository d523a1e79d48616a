// Scales of row-interleaved blocks that are integers times a number per row, for the rows of a vector at a
// time.
#pragma once
#include <type_traits>
#include <utility>

#include "kernels/matmul/interleaved_quads.hpp"
#include "kernels/simd/simd_f32.hpp"

namespace ikpy {

// Base of unpackers whose scales(p, quad, d, m) also takes ScaleLanes<>::Quad in place of pointers to floats.
struct IntegerScales {};

// Base of unpackers whose groups of a block have the same scales and that with vectors have static simd::V
// lane_scales(quads), for a vector of rows. Stored quad by quad they would be waited for: a load of several
// stores takes its bytes from the cache, after all instructions before it (AVX2 on Zen 5: Q4_0_R8 41 instead
// of 94e9 weights/s).
struct VectorScales {};

#if defined(__AVX2__)

#if defined(__AVX512VNNI__)

inline void put_group(float* at, __m512 rows, __m128i bytes) {
    _mm512_store_ps(at, _mm512_mul_ps(rows, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))));
}

// Floats of four groups from the numbers of the rows and integers, those of a quad in 16 bytes.
inline void put_groups(float* at, __m512 rows, __m512i v) {
    const __m512i by_group = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    v = _mm512_permutexvar_epi32(by_group, v);
    put_group(at, rows, _mm512_castsi512_si128(v));
    put_group(at + kHalfRows, rows, _mm512_extracti32x4_epi32(v, 1));
    put_group(at + 2 * kHalfRows, rows, _mm512_extracti32x4_epi32(v, 2));
    put_group(at + 3 * kHalfRows, rows, _mm512_extracti32x4_epi32(v, 3));
}

// Whether U has scale_integers(), which then are made for the rows of a vector at once.
template <class U, class = void>
struct HasScaleIntegers : std::false_type {};
template <class U>
struct HasScaleIntegers<U, std::void_t<decltype(U::scale_integers(std::declval<Quads<U::kRows>>(), 0))>>
    : std::true_type {};

// The numbers of the rows that integers are multiplied with: 1 where a row has one scale only.
template <class U>
inline __m512 row_numbers(const Quads<U::kRows>& quads) {
    if constexpr (RowHeader<U>::kBytes > 0) return _mm512_set1_ps(1.0f);
    return quads.halves(0);
}

#endif

// Collects the integers quad by quad and widens those of a scale group together: a vector of 16 rows then
// costs four instructions, where quads on their own cost five each (Q4_K_R4: 320 of 750 instructions for 256
// columns on AVX-512).
template <int Groups>
class ScaleLanes {
  public:
    struct Quad {
        ScaleLanes* all;
        int quad;
        // Row numbers and integers of this quad: four rows of group g at s + g * stride.
        void take(__m128 rows, const int8_t* s, int stride) const {
            all->rows_[quad] = rows;
            for (int i = 0; i < Groups / 4; ++i)
                all->part_[i][quad] = four_groups(s + 4 * i * stride, stride);
        }
    };

    Quad of(int quad) { return {this, quad}; }

    // Floats of the rows of a vector for every group: out[g * kHalfRows + row].
    void write(float* out) const {
#if defined(__AVX512VNNI__)
        __m512 rows = _mm512_insertf32x4(_mm512_castps128_ps512(rows_[0]), rows_[1], 1);
        rows = _mm512_insertf32x4(_mm512_insertf32x4(rows, rows_[2], 2), rows_[3], 3);
#pragma GCC unroll 4
        for (int i = 0; i < Groups / 4; ++i) {
            __m512i v = _mm512_inserti32x4(_mm512_castsi128_si512(part_[i][0]), part_[i][1], 1);
            v = _mm512_inserti32x4(_mm512_inserti32x4(v, part_[i][2], 2), part_[i][3], 3);
            put_groups(out + 4 * i * kHalfRows, rows, v);
        }
#else
        const __m256 rows = _mm256_insertf128_ps(_mm256_castps128_ps256(rows_[0]), rows_[1], 1);
#pragma GCC unroll 4
        for (int i = 0; i < Groups / 4; ++i) {
            const __m128i low = _mm_unpacklo_epi32(part_[i][0], part_[i][1]);
            const __m128i high = _mm_unpackhi_epi32(part_[i][0], part_[i][1]);
            float* at = out + 4 * i * kHalfRows;
            put(at, rows, low);
            put(at + kHalfRows, rows, _mm_unpackhi_epi64(low, low));
            put(at + 2 * kHalfRows, rows, high);
            put(at + 3 * kHalfRows, rows, _mm_unpackhi_epi64(high, high));
        }
#endif
    }

  private:
    static __m128i four_groups(const int8_t* s, int stride) {
        if (stride == 4) return _mm_loadu_si128(reinterpret_cast<const __m128i*>(s));
        return _mm_setr_epi32(load_unaligned<int32_t>(s), load_unaligned<int32_t>(s + stride),
                              load_unaligned<int32_t>(s + 2 * stride),
                              load_unaligned<int32_t>(s + 3 * stride));
    }
#if !defined(__AVX512VNNI__)
    static void put(float* at, __m256 rows, __m128i bytes) {
        _mm256_store_ps(at, _mm256_mul_ps(rows, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))));
    }
#endif

    __m128 rows_[kQuads];
    __m128i part_[Groups / 4][kQuads];
};

// Scales and offsets of a block of the rows of a vector: d[g * kHalfRows + row], m alike where the type has
// offsets.
template <class U>
inline void block_scales(const Quads<U::kRows>& quads, float* d, float* m) {
    constexpr int kGroups = U::kBlock / U::kGroup;
#if defined(__AVX512VNNI__)
    if constexpr (HasScaleIntegers<U>::value) {
        const __m512 rows = row_numbers<U>(quads);
#pragma GCC unroll 4
        for (int part = 0; part < kGroups / 4; ++part)
            put_groups(d + 4 * part * kHalfRows, rows,
                       reinterpret_cast<__m512i>(U::scale_integers(quads, part)));
        return;
    }
#endif
    if constexpr (std::is_base_of_v<IntegerScales, U>) {
        ScaleLanes<kGroups> scales, offsets;
#pragma GCC unroll 4
        for (int q = 0; q < kQuads; ++q)
            U::scales(quads.block[q], quads.place[q], scales.of(q), offsets.of(q));
        scales.write(d);
        if (U::kZero == 0) offsets.write(m);
    } else if constexpr (std::is_base_of_v<VectorScales, U>) {
        const simd::V rows = U::lane_scales(quads);
        for (int g = 0; g < kGroups; ++g) simd::store(d + g * kHalfRows, rows);
    } else {
        for (int q = 0; q < kQuads; ++q) U::scales(quads.block[q], quads.place[q], d + 4 * q, m + 4 * q);
    }
}

#endif

}  // namespace ikpy
