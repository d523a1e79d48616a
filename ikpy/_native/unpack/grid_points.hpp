// Lattice points of the grid types, looked up by index.
#pragma once
#include "kernels/matmul/unpacked.hpp"
#include "quantize/tables.hpp"

namespace ikpy {
namespace grid {

// The largest magnitudes of the tables: of the types of 2 bits, of IQ3_XXS, of IQ3_S.
constexpr int kLargestPoint2 = 43, kLargestPoint3xxs = 62, kLargestPoint3s = 15;

// Indices have 64 bits: two instructions per point less than with sign extension.
inline uint64_t point8(const int8_t* grid, uint64_t index) {
    return load_unaligned<uint64_t>(grid + 8 * index);
}
inline uint64_t point4(const int8_t* grid, uint64_t first, uint64_t second) {
    return load_unaligned<uint32_t>(grid + 4 * first) |
           static_cast<uint64_t>(load_unaligned<uint32_t>(grid + 4 * second)) << 32;
}

#if defined(__AVX2__)
// Four 16-bit indices of points of eight elements, eight of four.
inline __m256i points_of_8(const int8_t* grid, uint64_t index) {
    return _mm256_setr_epi64x(static_cast<int64_t>(point8(grid, index & 0xFFFF)),
                              static_cast<int64_t>(point8(grid, index >> 16 & 0xFFFF)),
                              static_cast<int64_t>(point8(grid, index >> 32 & 0xFFFF)),
                              static_cast<int64_t>(point8(grid, index >> 48)));
}
// The same of four rows whose indices are Stride apart.
template <int Stride, class T>
inline __m256i points_of_rows(const int8_t* grid, const T* index) {
    return _mm256_setr_epi64x(static_cast<int64_t>(point8(grid, index[0])),
                              static_cast<int64_t>(point8(grid, index[Stride])),
                              static_cast<int64_t>(point8(grid, index[2 * Stride])),
                              static_cast<int64_t>(point8(grid, index[3 * Stride])));
}
// Points of four elements at eight indices.
template <class T>
inline __m256i points_of_4_at(const int8_t* grid, const T* index) {
    const auto at = [=](int j) {
        return load_unaligned<int32_t>(grid + 4 * static_cast<uint64_t>(index[j]));
    };
    return _mm256_setr_epi32(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7));
}
inline __m128i points_of_4(const int8_t* grid, uint64_t index) {
    const auto at = [grid](uint64_t i) { return load_unaligned<int32_t>(grid + 4 * i); };
    return _mm_setr_epi32(at(index & 0xFFFF), at(index >> 16 & 0xFFFF), at(index >> 32 & 0xFFFF),
                          at(index >> 48));
}
#endif

#if defined(__AVX512VNNI__)
// Whether points are loaded one by one: 32 tokens of IQ2_XS 166 -> 195 Gop/s of Ice Lake, IQ1_S 183 -> 208.
// The 16 points of IQ3_XXS that a gather finds at once would be slower (191 -> 144).
inline const bool kOneByOne = has_slow_gathers();

inline __m512i gather8(const int8_t* grid, __m512i index) {
    if (!kOneByOne) return _mm512_i64gather_epi64(index, grid, 8);
    alignas(64) uint64_t at[8];
    _mm512_store_si512(at, index);
    return _mm512_inserti64x4(_mm512_castsi256_si512(points_of_rows<1>(grid, at)),
                              points_of_rows<1>(grid, at + 4), 1);
}
inline __m512i gather4(const int8_t* grid, __m512i index) { return _mm512_i32gather_epi32(index, grid, 4); }

// Bytes and words in the lanes that gathers take indices from.
inline __m512i byte_quads(uint64_t v) {
    return _mm512_cvtepu8_epi64(_mm_cvtsi64_si128(static_cast<int64_t>(v)));
}
inline __m512i word_quads(__m128i v) { return _mm512_cvtepu16_epi64(v); }
inline __m512i byte_dwords(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline __m128i load16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

inline uint64_t two_dwords(const uint8_t* a, const uint8_t* b) {
    return load_unaligned<uint32_t>(a) | static_cast<uint64_t>(load_unaligned<uint32_t>(b)) << 32;
}
#endif

}  // namespace grid
}  // namespace ikpy
