// Products of the row kernel with BF16 caches on the tile unit (AMX). The other factor, queries or weights,
// is a sum of three bf16 numbers, which keeps all bits of a float. The parts of all rows are columns of one
// right tile (queries) or rows of one left tile (weights), of two from 6 rows on; their products are added up
// afterwards. K is multiplied where it lies; V needs pairs of cells, a shuffle per line.
//
// 8 rows of 128 elements, ns per line of 64 bytes, of which memory delivers one in 3.9: K 2.5, V 3.7, softmax
// 1; multiply-adds of floats took 6.2. 16 cells at a time meet the queries, as tile loads of more rows are no
// stream to the CPU: 15 GB/s instead of 12. F16 caches, split into exact halves, gained nothing here.
#include <algorithm>
#include <cstring>

#include "ikpy/ops.hpp"
#include "kernels/attention/flash_amx.hpp"
#include "kernels/attention/flash_code_weights.hpp"
#include "kernels/attention/flash_codes.hpp"
#include "kernels/simd/bf16_halves.hpp"
#include "kernels/simd/transpose.hpp"

namespace ikpy {
namespace flash {

#if defined(__AVX512VNNI__) && defined(__linux__)

namespace {

constexpr int64_t kTileBytes = 1024;
constexpr int64_t kTileSums = 256;
constexpr int64_t kParts = 3;
constexpr int64_t kKeyRows = 16;  // of a left tile
constexpr int64_t kColumns = 64;  // of V at a time
constexpr int64_t kColumnTiles = kColumns / 16;

// Parts of all rows that lie in one tile, and the tiles of all parts.
int64_t parts_per_tile(int64_t rows) { return std::min<int64_t>(kParts, kTileHeight / rows); }
int64_t tiles_of(int64_t rows) { return (kParts + parts_per_tile(rows) - 1) / parts_per_tile(rows); }

inline void store(uint8_t* to, __m512i x) { _mm512_storeu_si512(to, x); }

// The parts of pairs of floats, the first in the low halves of dwords.
inline void split_pairs(__m512 x, __m512 y, __m512i* parts) {
    const FloatHalves a = split_rounded(x), b = split_rounded(y);
    const FloatHalves c = split_rounded(a.lo), d = split_rounded(b.lo);
    parts[0] = bf16_pairs(a.hi, b.hi);
    parts[1] = bf16_pairs(c.hi, d.hi);
    parts[2] = bf16_pairs(c.lo, d.lo);
}

struct Work {
    uint8_t* keys;  // [kKeyRows][dk]: the last cells, filled up
    uint8_t* p;     // [kCodeCells / kTileDepth][tiles] left tiles
    uint8_t* v;     // [2][kColumnTiles] right tiles
    float* sums;    // [4] tiles
    uint8_t* end;

    Work(uint8_t* at, int64_t rows, int64_t d) {
        keys = take<uint8_t>(at, kKeyRows * 2 * d);
        p = take<uint8_t>(at, kCodeCells / kTileDepth * tiles_of(rows) * kTileBytes);
        v = take<uint8_t>(at, 2 * kColumnTiles * kTileBytes);
        sums = take<float>(at, 4 * kTileSums);
        end = at;
    }
};

size_t work_bytes(int64_t rows, int64_t d) { return reinterpret_cast<uintptr_t>(Work(nullptr, rows, d).end); }

// scores

size_t query_bytes(int64_t rows, int64_t dk) { return size_t(dk / kTileDepth * tiles_of(rows) * kTileBytes); }

// Right tiles [dk / kTileDepth][tiles] of pairs of elements.
CodeQuery pack_query(const float* q, int64_t ldq, int64_t rows, int64_t dk, uint8_t* to) {
    const int64_t per_tile = parts_per_tile(rows), tiles = tiles_of(rows);
    CodeQuery out{};
    out.rows = rows;
    out.codes = take<int8_t>(to, int64_t(query_bytes(rows, dk)));
    std::memset(out.codes, 0, query_bytes(rows, dk));
    const __m512i count = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i even = _mm512_slli_epi32(count, 1), odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    const __m512i lines = _mm512_slli_epi32(count, 4);
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t k = 0; k < dk / kTileDepth; ++k) {
            const float* from = q + r * ldq + k * kTileDepth;
            const __m512 x = _mm512_loadu_ps(from), y = _mm512_loadu_ps(from + 16);
            __m512i parts[kParts];
            split_pairs(_mm512_permutex2var_ps(x, even, y), _mm512_permutex2var_ps(x, odd, y), parts);
            for (int64_t i = 0; i < kParts; ++i) {
                int8_t* tile = out.codes + (k * tiles + i / per_tile) * kTileBytes;
                _mm512_i32scatter_epi32(tile + 4 * (i % per_tile * rows + r), lines, parts[i], 4);
            }
        }
    return out;
}

// kKeyRows cells times queries, n tiles deep.
template <int kTiles>
IKPY_AMX void multiply_keys(const uint8_t* k, int64_t stride, const uint8_t* q, int64_t n, float* c,
                            PacedLines& next) {
    _tile_zero(0);
    for (int64_t i = 0; i < n; ++i, k += 64, q += kTiles * kTileBytes) {
        _tile_loadd(6, q, 64);
        if (kTiles > 1) _tile_loadd(7, q + kTileBytes, 64);
        next.tick();
        _tile_loadd(4, k, stride);
        next.tick();
        _tile_dpbf16ps(0, 4, 6);
        if (kTiles > 1) _tile_dpbf16ps(0, 4, 7);
    }
    _tile_stored(0, c, 64);
}

// Scores of 16 cells from their sums [cells][parts][rows].
inline void store_scores(const float* c, int64_t rows, int64_t per_tile, float* s, int64_t lds) {
    __m512i v[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) v[i] = _mm512_loadu_si512(c + 16 * i);
    transpose16(v);
    for (int64_t r = 0; r < rows; ++r) {
        __m512 x = _mm512_castsi512_ps(v[r]);
        for (int64_t i = 1; i < per_tile; ++i) x = _mm512_add_ps(x, _mm512_castsi512_ps(v[i * rows + r]));
        _mm512_storeu_ps(s + r * lds, x);
    }
}

void bf16_scores(const CodeQuery& q, const uint8_t* k, int64_t stride, int64_t dk, int64_t n, float* s,
                 int64_t lds, uint8_t* work, PrefetchLines lines) {
    const Work w(work, q.rows, dk);
    const int64_t depth = dk / kTileDepth;
    const auto multiply = tiles_of(q.rows) == 1 ? multiply_keys<1> : multiply_keys<2>;
    PacedLines next(lines, lines.lines(), (n + 15) / 16 * depth * 2);
    for (int64_t c = 0; c < n; c += kKeyRows, k += kKeyRows * stride) {
        const uint8_t* keys = k;
        int64_t apart = stride;
        if (n - c < kKeyRows) {
            for (int64_t i = 0; i < n - c; ++i)
                std::memcpy(w.keys + i * 2 * dk, k + i * stride, size_t(2 * dk));
            keys = w.keys;
            apart = 2 * dk;
        }
        asm volatile("" ::: "memory");  // tile loads do not tell the compiler what they read
        multiply(keys, apart, reinterpret_cast<const uint8_t*>(q.codes), depth, w.sums + c * 16, next);
        asm volatile("" ::: "memory");
    }
    for (int64_t c = 0; c < n; c += kKeyRows)
        store_scores(w.sums + c * 16, q.rows, parts_per_tile(q.rows), s + c, lds);
    next.finish();
}

// outputs

// Weights of n cells as left tiles of pairs, the cells i and i + 16 of 32.
void pack_weights(const float* p, int64_t ldp, int64_t rows, int64_t n, uint8_t* tile) {
    const int64_t per_tile = parts_per_tile(rows), tiles = tiles_of(rows);
    for (int64_t c = 0; c < n; c += kTileDepth, tile += tiles * kTileBytes) {
        const auto valid = uint32_t((uint64_t{1} << std::min(kTileDepth, n - c)) - 1);
        for (int64_t r = 0; r < rows; ++r) {
            const float* x = p + r * ldp + c;
            __m512i parts[kParts];
            split_pairs(_mm512_maskz_loadu_ps(__mmask16(valid), x),
                        _mm512_maskz_loadu_ps(__mmask16(valid >> 16), x + 16), parts);
            for (int64_t i = 0; i < kParts; ++i)
                store(tile + i / per_tile * kTileBytes + (i % per_tile * rows + r) * 64, parts[i]);
        }
        // What lies beside the last part is added to the sums of the others.
        if (tiles > 1) std::memset(tile + kTileBytes + rows * 64, 0, size_t(rows * 64));
    }
}

// kTiles * 16 columns of 32 cells, of which there are n, as right tiles. Columns stay in their 128 bits.
template <int kTiles>
void pair_values(const uint8_t* v, int64_t stride, int64_t n, uint8_t* to, PacedLines& ahead) {
    PacedLines next = ahead;
    for (int64_t i = 0; i < 16; ++i, to += 64) {
        const uint8_t* first = v + std::min(i, n - 1) * stride;
        const uint8_t* second = v + std::min(i + 16, n - 1) * stride;
        next.tick();
#pragma GCC unroll 2
        for (int64_t j = 0; j < kTiles; j += 2) {
            const __m512i x = _mm512_loadu_si512(first + 32 * j), y = _mm512_loadu_si512(second + 32 * j);
            store(to + j * kTileBytes, _mm512_unpacklo_epi16(x, y));
            store(to + (j + 1) * kTileBytes, _mm512_unpackhi_epi16(x, y));
        }
    }
    ahead = next;
}

// Adds weights of 32 cells times values of kColumns columns to the tiles 0 to 3.
template <int kTiles>
IKPY_AMX inline void multiply_values(const uint8_t* p, const uint8_t* v, PacedLines& next) {
    _tile_loadd(4, p, 64);
    if (kTiles > 1) _tile_loadd(5, p + kTileBytes, 64);
    next.tick();
    _tile_loadd(6, v, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (kTiles > 1) _tile_dpbf16ps(0, 5, 6);
    next.tick();
    _tile_loadd(7, v + kTileBytes, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (kTiles > 1) _tile_dpbf16ps(1, 5, 7);
    next.tick();
    _tile_loadd(6, v + 2 * kTileBytes, 64);
    _tile_dpbf16ps(2, 4, 6);
    if (kTiles > 1) _tile_dpbf16ps(2, 5, 6);
    next.tick();
    _tile_loadd(7, v + 3 * kTileBytes, 64);
    _tile_dpbf16ps(3, 4, 7);
    if (kTiles > 1) _tile_dpbf16ps(3, 5, 7);
}

// kPaired * 16 columns of n cells; what the tiles behind them give is not read.
template <int kTiles, int kPaired>
IKPY_AMX void multiply_columns(const uint8_t* v, int64_t stride, int64_t n, const Work& w, PacedLines& next) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const uint8_t* p = w.p;
    for (int64_t c = 0; c < n; c += kTileDepth, p += kTiles * kTileBytes) {
        uint8_t* to = w.v + c / kTileDepth % 2 * kColumnTiles * kTileBytes;
        pair_values<kPaired>(v + c * stride, stride, n - c, to, next);
        asm volatile("" ::: "memory");  // tile loads do not tell the compiler what they read
        multiply_values<kTiles>(p, to, next);
    }
    _tile_stored(0, w.sums, 64);
    _tile_stored(1, w.sums + kTileSums, 64);
    _tile_stored(2, w.sums + 2 * kTileSums, 64);
    _tile_stored(3, w.sums + 3 * kTileSums, 64);
    asm volatile("" ::: "memory");
}

// o = alpha o + sums for 32 columns; c: two tiles.
inline void add_sums(const float* c, int64_t rows, int64_t per_tile, const float* alpha, float* o,
                     int64_t ldo) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int64_t r = 0; r < rows; ++r, c += 16, o += ldo) {
        __m512 x = _mm512_loadu_ps(c), y = _mm512_loadu_ps(c + kTileSums);
        for (int64_t i = 1; i < per_tile; ++i) {
            x = _mm512_add_ps(x, _mm512_loadu_ps(c + i * rows * 16));
            y = _mm512_add_ps(y, _mm512_loadu_ps(c + i * rows * 16 + kTileSums));
        }
        add_scaled(_mm512_permutex2var_ps(x, low, y), 1.0f, alpha[r], o);
        add_scaled(_mm512_permutex2var_ps(x, high, y), 1.0f, alpha[r], o + 16);
    }
}

void bf16_outputs(const float* p, int64_t ldp, int64_t rows, int64_t n, const uint8_t* v, int64_t stride,
                  int64_t dv, const float* alpha, float* o, int64_t ldo, uint8_t* work, PrefetchLines lines) {
    const Work w(work, rows, dv);
    const bool one = tiles_of(rows) == 1;
    const auto whole = one ? multiply_columns<1, 4> : multiply_columns<2, 4>;
    const auto half = one ? multiply_columns<1, 2> : multiply_columns<2, 2>;
    const int64_t ticks =
        (dv + kColumns - 1) / kColumns * ((n + kTileDepth - 1) / kTileDepth) * (16 + kColumnTiles);
    PacedLines next(lines, lines.lines(), ticks);
    pack_weights(p, ldp, rows, n, w.p);
    for (int64_t d = 0; d < dv; d += kColumns) {
        const int64_t columns = std::min(kColumns, dv - d);
        (columns == kColumns ? whole : half)(v + 2 * d, stride, n, w, next);
        for (int64_t j = 0; j < columns; j += 32)
            add_sums(w.sums + j * 16, rows, parts_per_tile(rows), alpha, o + d + j, ldo);
    }
    next.finish();
}

void begin_bf16_tiles(int64_t) { load_tile_config(kTileHeight); }

}  // namespace

const CodeProducts* bf16_tile_products() {
    static const CodeProducts products = {bf16_scores, bf16_outputs,     query_bytes, pack_query,
                                          work_bytes,  begin_bf16_tiles, end_tiles};
    return has_amx() ? &products : nullptr;
}

#else

const CodeProducts* bf16_tile_products() { return nullptr; }

#endif

}  // namespace flash
}  // namespace ikpy
