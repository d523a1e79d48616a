// Scores of codes on tiles (flash_codes.cpp): 16 cells are transposed, one to a column, and meet as right
// operand a tile of queries.
#pragma once
#include <cstring>

#include "kernels/attention/flash_code_tiles.hpp"

#if defined(__AVX512VNNI__) && defined(__linux__)

namespace ikpy {
namespace flash {

constexpr int64_t kQuad = 4;  // query rows per tile of scores, two bytes and two blocks each

// Rows of queries that share a tile.
template <class Codes>
constexpr int64_t rows_per_tile() {
    return Codes::kRowScale ? kTileRowsOfP : kQuad;
}
// Groups of 16 cells
inline int64_t groups_at_once(int64_t n_pairs) { return std::max<int64_t>(1, kTilesAtOnce / n_pairs); }

struct ScoreWork {
    int8_t* codes;     // [groups][pairs of blocks][16 fours of codes][16 cells][4]
    int32_t* sums;     // [groups][tiles of rows][pairs of blocks][16][16 cells]
    uint16_t* halves;  // [blocks][kCodeCells]
    float* scales;     // [kCodeCells], of rows
    uint8_t* cells;    // 16 rows: cells at the end, filled up
};

inline ScoreWork score_work(uint8_t*& at, int64_t rows, int64_t dk) {
    // Tiles at once of the heads that need most of them: longer ones never need less memory, which is sized
    // for the longer of keys and values.
    const int64_t n_tiles = std::max(kTilesAtOnce, dk / 64);
    ScoreWork w;
    w.codes = take<int8_t>(at, n_tiles * kTileBytes);
    w.sums = take<int32_t>(at, n_tiles * tiles_of(rows, kQuad) * 256);
    w.halves = take<uint16_t>(at, dk / 32 * kCodeCells);
    w.scales = take<float>(at, kCodeCells);
    w.cells = take<uint8_t>(at, 16 * (2 * dk + 64));
    return w;
}

// queries

inline size_t tile_query_bytes(int64_t rows, int64_t dk) {
    return size_t(tiles_of(rows, kQuad) * dk / 64 * kTileBytes + (rows * 4 + 63) / 64 * 64);
}

// Tiles [tiles of rows][pairs of blocks]. Their rows: [row][upper, lower], or where blocks have scales [block
// of the pair][row][upper, lower], with zeros for the codes of the other block.
template <class Codes>
CodeQuery pack_tile_query(const float* q, int64_t ldq, int64_t rows, int64_t dk, uint8_t* to) {
    constexpr int64_t kRows = rows_per_tile<Codes>();
    const int64_t n_pairs = dk / 64, n_bytes = tiles_of(rows, kRows) * n_pairs * kTileBytes;
    const int64_t in_tile = std::min(rows, kRows);
    CodeQuery out;
    out.rows = rows;
    out.starts = nullptr;
    out.codes = take<int8_t>(to, n_bytes);
    out.factors = take<float>(to, rows);
    std::memset(out.codes, 0, size_t(n_bytes));
    for (int64_t r = 0; r < rows; ++r) {
        const RoundedRow rounded(q + r * ldq, dk);
        int8_t* tiles = out.codes + r / kRows * n_pairs * kTileBytes;
        for (int64_t d = 0; d < dk; d += 16) {
            const __m512i levels = rounded.levels(q + r * ldq + d);
            const int64_t row = Codes::kRowScale ? r % kRows : d / 32 % 2 * in_tile + r % kRows;
            int8_t* at = tiles + d / 64 * kTileBytes + 2 * row * 64 + d % 64;
            store_bytes(upper_bytes(levels), at);
            store_bytes(levels, at + 64);
        }
        out.factors[r] = rounded.unit / Codes::kTileUnit;
    }
    return out;
}

// products

// Queries of one tile of rows times 16 cells; one sum of all pairs of blocks where rows have one scale.
template <bool kOneSum>
IKPY_CODE_TILES void multiply_cells(const int8_t* query, const int8_t* codes, int64_t n_pairs, int32_t* sums,
                                    PrefetchLines& next, int64_t lines) {
    if constexpr (kOneSum) {
        _tile_zero(2);
        for (int64_t p = 0; p < n_pairs; ++p) {
            next.advance(lines);
            _tile_loadd(5, query + p * kTileBytes, 64);
            _tile_loadd(6, codes + p * kTileBytes, 64);
            _tile_dpbssd(2, 5, 6);
        }
        _tile_stored(2, sums, 64);
        return;
    }
    for (int64_t p = 0; p < n_pairs; ++p) {
        next.advance(lines);
        _tile_zero(0);
        _tile_loadd(4, query + p * kTileBytes, 64);
        _tile_loadd(6, codes + p * kTileBytes, 64);
        _tile_dpbssd(0, 4, 6);
        _tile_stored(0, sums + p * 256, 64);
        if (++p == n_pairs) break;
        next.advance(lines);
        _tile_zero(1);
        _tile_loadd(4, query + p * kTileBytes, 64);
        _tile_loadd(7, codes + p * kTileBytes, 64);
        _tile_dpbssd(1, 4, 7);
        _tile_stored(1, sums + p * 256, 64);
    }
}

// The sums of 16 cells and R <= kQuad rows, [pairs][2 blocks][R][upper, lower][16], as scores.
template <int R>
void finish_cells(const int32_t* sums, int64_t n_pairs, const uint16_t* halves, const float* factors,
                  float* s, int64_t lds) {
    __m512 total[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) total[r] = _mm512_setzero_ps();
    for (int64_t b = 0; b < 2 * n_pairs; ++b, halves += kCodeCells) {
        const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
        const int32_t* of_block = sums + b / 2 * 256 + b % 2 * R * 32;
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
            total[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(joined(of_block + 32 * r)), scale, total[r]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
        _mm512_storeu_ps(s + r * lds, _mm512_mul_ps(total[r], _mm512_set1_ps(factors[r])));
}

// The same with one scale per row: sums [rows][upper, lower][16], which may need more than 32 bits together.
inline void finish_cells_of_rows(const int32_t* sums, int64_t rows, const float* scales, const float* factors,
                                 float* s, int64_t lds) {
    const __m512 scale = _mm512_loadu_ps(scales);
    for (int64_t r = 0; r < rows; ++r, sums += 32) {
        const __m512 upper = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums));
        const __m512 lower = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums + 16));
        const __m512 total = _mm512_fmadd_ps(upper, _mm512_set1_ps(256.0f), lower);
        _mm512_storeu_ps(s + r * lds, _mm512_mul_ps(total, _mm512_mul_ps(scale, _mm512_set1_ps(factors[r]))));
    }
}

template <class Codes>
void finish_sixteen(const CodeQuery& q, const ScoreWork& w, int64_t group, const int32_t* sums,
                    int64_t n_pairs, float* s, int64_t lds) {
    constexpr int64_t kRows = rows_per_tile<Codes>();
    static constexpr decltype(&finish_cells<1>) kernels[] = {finish_cells<1>, finish_cells<2>,
                                                             finish_cells<3>, finish_cells<4>};
    s += 16 * group;
    for (int64_t r = 0; r < q.rows; r += kRows, sums += n_pairs * 256) {
        if constexpr (Codes::kRowScale)
            finish_cells_of_rows(sums, std::min(kRows, q.rows - r), w.scales + 16 * group, q.factors + r,
                                 s + r * lds, lds);
        else
            kernels[std::min(kRows, q.rows) - 1](sums, n_pairs, w.halves + 16 * group, q.factors + r,
                                                 s + r * lds, lds);
    }
}

template <class Codes>
IKPY_CODE_TILES void unpack_keys(const uint8_t* k, int64_t stride, int64_t n_blocks, int8_t* out,
                                 PrefetchLines& ahead) {
    constexpr int kLines = (2 * lines_of(16 * Codes::kBytes) + 4) / 5;
    PrefetchLines next = ahead;
    for (int64_t b = 0; b < n_blocks; ++b, out += kTileBytes / 2) {
        __m512i x[8];
        Codes::tile_sixteen(k + b * Codes::kBytes, stride, x);
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g) {
            if (g < kLines) next.one();
            _mm512_storeu_si512(out + 64 * g, x[g]);
        }
    }
    ahead = next;
}

// Codes of group g of 16 cells as right operands.
template <class Codes>
IKPY_CODE_TILES void unpack_group(const uint8_t* k, int64_t stride, int64_t dk, int64_t n, int64_t g,
                                  const ScoreWork& w, int8_t* out, PrefetchLines& next) {
    const int64_t n_blocks = dk / 32, row_bytes = Codes::kHeader + n_blocks * Codes::kBytes;
    const uint8_t* cells = k + 16 * g * stride;
    if (n - 16 * g < 16) {
        for (int64_t i = 0; i < n - 16 * g; ++i)
            std::memcpy(w.cells + i * row_bytes, cells + i * stride, size_t(row_bytes));
        cells = w.cells;
        stride = row_bytes;
    }
    unpack_keys<Codes>(cells + Codes::kHeader, stride, n_blocks, out, next);
}

// Several groups of 16 cells are unpacked, then all multiplied, then all sums become scores: what a tile load
// or a load of sums reads has long been stored, or they wait for each other. Two fifths of the lines are
// fetched with each of the first two steps and one with the last, as long as these take: a core has 16 misses
// under way at most.
template <class Codes>
IKPY_CODE_TILES void code_scores(const CodeQuery& q, const uint8_t* k, int64_t stride, int64_t dk, int64_t n,
                                 float* s, int64_t lds, uint8_t* work, PrefetchLines next) {
    const ScoreWork w = score_work(work, q.rows, dk);
    const int64_t n_pairs = dk / 64, n_groups = (n + 15) / 16, at_once = groups_at_once(n_pairs);
    const int64_t n_tiles = tiles_of(q.rows, rows_per_tile<Codes>());
    const int64_t codes_step = n_pairs * kTileBytes, sums_step = n_pairs * 256;
    constexpr int64_t kLines = lines_of(16 * Codes::kBytes);  // per block of 16 cells
    copy_scales<Codes>(k, stride, n, dk / 32, w.halves, w.scales);
    for (int64_t g0 = 0; g0 < n_groups; g0 += at_once) {
        const int64_t count = std::min(at_once, n_groups - g0);
        for (int64_t g = 0; g < count; ++g)
            unpack_group<Codes>(k, stride, dk, n, g0 + g, w, w.codes + g * codes_step, next);
        asm volatile("" ::: "memory");  // tile loads do not tell the compiler what they read
        for (int64_t i = 0; i < count * n_tiles; ++i)
            multiply_cells<Codes::kRowScale>(
                q.codes + i % n_tiles * codes_step, w.codes + i / n_tiles * codes_step, n_pairs,
                w.sums + i * sums_step, next, i % n_tiles == 0 ? (4 * kLines + 4) / 5 : 0);
        asm volatile("" ::: "memory");
        for (int64_t g = 0; g < count; ++g) {
            next.advance(n_pairs * 2 * kLines / 5);
            finish_sixteen<Codes>(q, w, g0 + g, w.sums + g * n_tiles * sums_step, n_pairs, s, lds);
        }
    }
    next.advance(next.lines());
}

}  // namespace flash
}  // namespace ikpy

#endif
