// Operands of latent attention on F16 and BF16 caches (flash_latent_halves.cpp): floats and rows of the cache
// as tiles.
#pragma once
#include "kernels/attention/flash_latent_half_products.hpp"
#include "kernels/simd/bf16_halves.hpp"
#include "kernels/simd/f16_halves.hpp"

#if defined(__AVX512VNNI__) && defined(__linux__)

namespace ikpy {
namespace latent {

// Of a tile of values with its low halves, if there are any.
template <TileFactors F>
constexpr int64_t kValueTileBytes = tile_parts(F) * kTileBytes;

inline void store(uint8_t* to, __m512i x) { _mm512_storeu_si512(to, x); }

// Floats in pairs as tiles and those of their low parts.
template <TileFactors F>
inline HalfPairs split_pair(__m512 first, __m512 second) {
    if constexpr (F == TileFactors::kF16) return split_to_f16(first, second);
    const FloatHalves a = split_rounded(first), b = split_rounded(second);
    return {bf16_pairs(a.hi, b.hi), bf16_pairs(a.lo, b.lo)};
}

// 16 f16 values as exact halves: the upper 8 of the 11 significant bits, rounded as the product of lower
// halves is left out, and the others.
struct Expanded {
    __m512i hi, lo;  // bf16 in the upper halves of dwords, with more below in hi
    explicit Expanded(const uint8_t* p) {
        const __m512 x = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
        hi = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
        const __m512i upper = _mm512_and_si512(hi, _mm512_set1_epi32(int(0xFFFF0000)));
        lo = _mm512_castps_si512(_mm512_sub_ps(x, _mm512_castsi512_ps(upper)));
    }
};

inline __m512i pair_of_upper(__m512i low, __m512i high) {
    const __m512i moved =
        _mm512_broadcast_i32x4(_mm_setr_epi8(2, 3, 0, 0, 6, 7, 0, 0, 10, 11, 0, 0, 14, 15, 0, 0));
    return _mm512_mask_shuffle_epi8(high, 0x3333333333333333, low, moved);
}

inline void store_halves(uint8_t* hi, uint8_t* lo, const Expanded& x, const Expanded& y) {
    store(hi, pair_of_upper(x.hi, y.hi));
    store(lo, pair_of_upper(x.lo, y.lo));
}

// n tiles of the depth of a block of F16 rows as halves: dword i of 32 columns holds the columns i and i
// + 16.
inline KeyRows split_keys(const uint8_t* row, int64_t stride, int64_t n, uint8_t* to, Background& next) {
    const int64_t bytes = 64 * n;
    uint8_t *hi = to, *lo = to + kCells * bytes;
    for (int64_t c = 0; c < kCells; ++c, row += stride, hi += bytes, lo += bytes) {
        for (int64_t k = 0; k < bytes; k += 64)
            store_halves(hi + k, lo + k, Expanded(row + k), Expanded(row + k + 32));
        if (c % 4 == 0) next.tick();
    }
    return {to, to + kCells * bytes, bytes};
}

// Row i of four right tiles: 64 columns of the cells i and i + 16 in pairs, each tile followed by its low
// halves if there are any. The columns of rows that are not split stay in their 128 bits, see reorder_pairs.
template <TileFactors F>
inline void pair_row(const uint8_t* v, int64_t stride, uint8_t* to) {
    constexpr int64_t tile = kValueTileBytes<F>;
    const uint8_t* other = v + 16 * stride;
#pragma GCC unroll 4
    for (int64_t j = 0; j < 4; ++j) {
        uint8_t* at = to + j * tile;
        if constexpr (F == TileFactors::kSplit) {
            store_halves(at, at + kTileBytes, Expanded(v + 32 * j), Expanded(other + 32 * j));
        } else {
            const __m512i x = _mm512_loadu_si512(v + 64 * (j / 2));
            const __m512i y = _mm512_loadu_si512(other + 64 * (j / 2));
            store(at, j % 2 ? _mm512_unpackhi_epi16(x, y) : _mm512_unpacklo_epi16(x, y));
        }
    }
}

// 32 cells as right tiles.
template <TileFactors F>
inline void pair_values(const uint8_t* v, int64_t stride, uint8_t* to, Background& next) {
    for (int64_t i = 0; i < 16; ++i, v += stride, to += 64) {
        if (i % 4 == 0) next.tick();
        pair_row<F>(v, stride, to);
    }
}

// Makes right tiles of 32 cells, a quarter of their rows per tick.
template <TileFactors F>
struct PairBeside {
    const uint8_t* v;
    int64_t stride;
    uint8_t* to;  // null: nothing is left to do
    Background& next;

    void tick() {
        next.tick();
        if (!to) return;
#pragma GCC unroll 4
        for (int64_t i = 0; i < 4; ++i, v += stride, to += 64) pair_row<F>(v, stride, to);
    }
};

// Brings the sums of values from pair_row into the order of Products::outputs.
inline void reorder_pairs(const Shape& shape, float* o) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int64_t tile = 0; tile < shape.rows / 16 * (shape.dv / 16); tile += 2, o += 2 * kTileSums)
        for (int64_t i = 0; i < kTileSums; i += 16) {
            const __m512 x = _mm512_loadu_ps(o + i), y = _mm512_loadu_ps(o + kTileSums + i);
            _mm512_storeu_ps(o + i, _mm512_permutex2var_ps(x, low, y));
            _mm512_storeu_ps(o + kTileSums + i, _mm512_permutex2var_ps(x, high, y));
        }
}

// Splits a tile of the depth of a block of F16 rows, a quarter of the cells per tick.
struct SplitBeside {
    const uint8_t* row;
    int64_t stride;
    uint8_t* to;  // [hi, lo][kCells] rows; null: nothing is left to split
    Background& next;

    KeyRows whole() {
        for (int i = 0; i < 4; ++i) tick();
        return {to - kCells * 64, to, 64};
    }
    void tick() {
        next.tick();
        if (!to) return;
#pragma GCC unroll 4
        for (int64_t c = 0; c < kCells / 4; ++c, row += stride, to += 64)
            store_halves(to, to + kCells * 64, Expanded(row), Expanded(row + 32));
    }
};

}  // namespace latent
}  // namespace ikpy

#endif
