// Outputs of codes on tiles (flash_codes.cpp): four cells at a time are interleaved and meet weights that
// contain the scales.
#pragma once
#include "kernels/attention/flash_code_tiles.hpp"

#if defined(__AVX512VNNI__) && defined(__linux__)

namespace ikpy {
namespace flash {

constexpr int64_t kBlocksAtOnce = kTilesAtOnce / 2;

struct OutputWork {
    int8_t* codes;      // [kBlocksAtOnce][2][16 fours of cells][16][4]
    int8_t* weights;    // [kBlocksAtOnce][tiles of rows][kTileRowsOfP][upper, lower][kCodeCells]
    int32_t* sums;      // [kBlocksAtOnce][tiles of rows][2][kTileRowsOfP][upper, lower][16]
    uint16_t* halves;   // [blocks][kCodeCells]
    float* scales;      // [kCodeCells], of rows
    int16_t* words;     // [blocks][kCodeCells]: scales relative to the largest
    float* largest;     // [blocks]
    int16_t* relative;  // [rows][kCodeCells]
    float* factors;     // [rows]: what a unit of those is worth
};

inline OutputWork output_work(uint8_t*& at, int64_t rows, int64_t dv) {
    const int64_t n_tiles = tiles_of(rows, kTileRowsOfP), n_blocks = dv / 32;
    OutputWork w;
    w.codes = take<int8_t>(at, kBlocksAtOnce * 2 * kTileBytes);
    w.weights = take<int8_t>(at, kBlocksAtOnce * n_tiles * kTileBytes);
    w.sums = take<int32_t>(at, kBlocksAtOnce * n_tiles * 2 * 256);
    w.halves = take<uint16_t>(at, n_blocks * kCodeCells);
    w.scales = take<float>(at, kCodeCells);
    w.words = take<int16_t>(at, n_blocks * kCodeCells);
    w.largest = take<float>(at, n_blocks);
    w.relative = take<int16_t>(at, rows * kCodeCells);
    w.factors = take<float>(at, rows);
    return w;
}

template <class Codes>
IKPY_CODES void unpack_four(const uint8_t* const* cells, int8_t* out) {
    __m512i codes[2];
    Codes::tile_four(cells, codes);
    _mm512_storeu_si512(out, codes[0]);
    _mm512_storeu_si512(out + kTileBytes, codes[1]);
}

// Codes of one block of n cells as right operands.
template <class Codes>
IKPY_CODE_TILES void unpack_values(const uint8_t* v, int64_t stride, int64_t n, int8_t* out,
                                   PrefetchLines& ahead) {
    PrefetchLines next = ahead;
    int64_t c = 0;
    for (; c + 16 <= n; c += 16) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i, v += 4 * stride, out += 64) {
            for (int m = lines_of(8 * Codes::kBytes); m > i; m -= 4) next.one();
            const uint8_t* cells[4] = {v, v + stride, v + 2 * stride, v + 3 * stride};
            unpack_four<Codes>(cells, out);
        }
    }
    for (; c < n; c += 4, v += 4 * stride, out += 64) {
        const uint8_t* cells[4];
        for (int64_t i = 0; i < 4; ++i) cells[i] = v + std::min(i, n - 1 - c) * stride;
        unpack_four<Codes>(cells, out);
    }
    ahead = next;
}

IKPY_CODE_TILES inline void multiply_weights(const int8_t* weights, const int8_t* codes, int32_t* sums) {
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(5, weights, 64);
    _tile_loadd(6, codes, 64);
    _tile_dpbssd(2, 5, 6);
    _tile_loadd(7, codes + kTileBytes, 64);
    _tile_dpbssd(3, 5, 7);
    _tile_stored(2, sums, 64);
    _tile_stored(3, sums + 256, 64);
}

// o += factor (256 upper + lower) for the 32 elements of a block.
inline void add_sums(const int32_t* sums, float factor, float* o) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        const __m512 total = _mm512_cvtepi32_ps(joined(sums + 256 * i));
        _mm512_storeu_ps(o + 16 * i,
                         _mm512_fmadd_ps(_mm512_set1_ps(factor), total, _mm512_loadu_ps(o + 16 * i)));
    }
}

// The scales of all blocks as words, and the weights without them.
template <class Codes>
void prepare_weights(const float* p, int64_t ldp, int64_t rows, int64_t n, const uint8_t* v, int64_t stride,
                     int64_t n_blocks, const OutputWork& w, PrefetchLines& next) {
    copy_scales<Codes>(v, stride, n, n_blocks, w.halves, w.scales);
    relative_weights(p, ldp, rows, n, w.relative, w.factors);
    if constexpr (Codes::kRowScale) {
        w.largest[0] = scale_words(w.scales, n, w.words);
    } else {
        for (int64_t b = 0; b < n_blocks; ++b) {
            next.advance(lines_of(16 * Codes::kBytes));
            w.largest[b] =
                scale_words(w.halves + b * kCodeCells, n, w.words + b * kCodeCells) / Codes::kTileUnit;
        }
    }
}

// Weights of all rows for one block.
IKPY_CODE_TILES inline void weights_of_block(const OutputWork& w, int64_t rows, const int16_t* words,
                                             int8_t* out) {
    for (int64_t r = 0; r < rows; ++r, out += 2 * kCodeCells)
        round_weights(w.relative + r * kCodeCells, words, out, out + kCodeCells);
}

// As with scores, several blocks at once; a quarter of the lines each with the scales and the products, half
// of them with the codes.
template <class Codes>
IKPY_CODE_TILES void code_outputs(const float* p, int64_t ldp, int64_t rows, int64_t n, const uint8_t* v,
                                  int64_t stride, int64_t dv, const float* alpha, float* o, int64_t ldo,
                                  uint8_t* work, PrefetchLines next) {
    const OutputWork w = output_work(work, rows, dv);
    const int64_t n_blocks = dv / 32, n_tiles = tiles_of(rows, kTileRowsOfP);
    prepare_weights<Codes>(p, ldp, rows, n, v, stride, n_blocks, w, next);
    scale_rows(alpha, rows, dv, o, ldo);
    for (int64_t b0 = 0; b0 < n_blocks; b0 += kBlocksAtOnce) {
        const int64_t count = std::min(kBlocksAtOnce, n_blocks - b0);
        // Blocks of rows with one scale share their weights.
        const int64_t n_scales = Codes::kRowScale ? 1 : count;
        for (int64_t b = 0; b < n_scales && (!Codes::kRowScale || b0 == 0); ++b)
            weights_of_block(w, rows, w.words + (b0 + b) * kCodeCells, w.weights + b * n_tiles * kTileBytes);
        for (int64_t b = 0; b < count; ++b)
            unpack_values<Codes>(v + Codes::kHeader + (b0 + b) * Codes::kBytes, stride, n,
                                 w.codes + b * 2 * kTileBytes, next);
        asm volatile("" ::: "memory");  // tile loads do not tell the compiler what they read
        for (int64_t b = 0; b < count; ++b) {
            next.advance(lines_of(16 * Codes::kBytes));
            for (int64_t t = 0; t < n_tiles; ++t)
                multiply_weights(w.weights + (b % n_scales * n_tiles + t) * kTileBytes,
                                 w.codes + b * 2 * kTileBytes, w.sums + (b * n_tiles + t) * 512);
        }
        asm volatile("" ::: "memory");
        for (int64_t b = 0; b < count; ++b)
            for (int64_t r = 0; r < rows; ++r)
                add_sums(w.sums + (b * n_tiles + r / kTileRowsOfP) * 512 + r % kTileRowsOfP * 32,
                         w.factors[r] * w.largest[Codes::kRowScale ? 0 : b0 + b],
                         o + r * ldo + (b0 + b) * 32);
    }
    next.advance(next.lines());
}

}  // namespace flash
}  // namespace ikpy

#endif
