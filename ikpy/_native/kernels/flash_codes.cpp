#include "kernels/flash_codes.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "ikpy/ops.hpp"
#include "kernels/amx_tiles.hpp"
#include "kernels/flash_amx.hpp"
#include "kernels/flash_code_weights.hpp"
#include "kernels/kv_codes.hpp"
#include "kernels/kv_types.hpp"

namespace ikpy {
namespace flash {

#if defined(__AVX512VNNI__) && defined(__linux__)

namespace {

#define IKPY_CODE_TILES __attribute__((target("amx-tile,amx-int8,avx512vbmi")))

constexpr int64_t kTileBytes = 1024;
constexpr int64_t kQuad = 4;         // query rows per tile of scores
constexpr int64_t kTileRowsOfP = 8;  // rows of weights per tile, two bytes each
constexpr int64_t kBlocksAtOnce = 4;

int64_t quads(int64_t rows) { return (rows + kQuad - 1) / kQuad; }

struct ScoreWork {
    int8_t* codes;     // [16 cells][dk]
    int32_t* sums;     // [2][dk / 64][16 cells][16 columns]
    float* scales;     // [2][16 cells][scales, at least 2]
    uint16_t* halves;  // [16 cells][dk / 32]
};

struct OutputWork {
    int8_t* codes;     // [kBlocksAtOnce][2][16 groups of 4 cells][16][4]
    int8_t* weights;   // [kBlocksAtOnce][kTileRowsOfP][hi, lo][kCodeCells]
    int32_t* sums;     // [kBlocksAtOnce][2][kTileRowsOfP][hi, lo][16]
    float* scales;     // [kBlocksAtOnce][kCodeCells], relative to the largest
    float* largest;    // [kBlocksAtOnce]
    float* relative;   // [rows][kCodeCells]: kHighest times p relative to the largest
    float* factors;    // [rows]: what a unit of those is worth
    uint16_t* halves;  // [kBlocksAtOnce][kCodeCells]
};

ScoreWork score_work(uint8_t*& at, int64_t dk) {
    ScoreWork w;
    w.codes = take<int8_t>(at, 16 * dk);
    w.sums = take<int32_t>(at, 2 * dk / 64 * 256);
    w.scales = take<float>(at, 2 * dk / 2);
    w.halves = take<uint16_t>(at, dk / 2);
    return w;
}

OutputWork output_work(uint8_t*& at, int64_t rows) {
    OutputWork w;
    w.codes = take<int8_t>(at, kBlocksAtOnce * 2 * kTileBytes);
    w.weights = take<int8_t>(at, kBlocksAtOnce * kTileBytes);
    w.sums = take<int32_t>(at, kBlocksAtOnce * 2 * 256);
    w.scales = take<float>(at, kBlocksAtOnce * kCodeCells);
    w.largest = take<float>(at, kBlocksAtOnce);
    w.relative = take<float>(at, rows * kCodeCells);
    w.factors = take<float>(at, rows);
    w.halves = take<uint16_t>(at, kBlocksAtOnce * kCodeCells);
    return w;
}

// ---- scores ----

// sums[pair] = 16 cells times the query's tiles of that pair of blocks; one sum of all pairs with kOneSum.
template <bool kOneSum>
IKPY_CODE_TILES void multiply_cells(const int8_t* codes, const int8_t* query, int64_t dk, int32_t* sums) {
    const int64_t n_pairs = dk / 64;
    _tile_zero(0);
    for (int64_t p = 0; p < n_pairs; p += 2) {
        if (!kOneSum) _tile_zero(0);
        _tile_loadd(4, codes + 64 * p, dk);
        _tile_loadd(6, query + p * kTileBytes, 64);
        _tile_dpbssd(0, 4, 6);
        if (!kOneSum) _tile_stored(0, sums + p * 256, 64);
        if (p + 1 == n_pairs) break;
        if (!kOneSum) _tile_zero(1);
        _tile_loadd(4, codes + 64 * (p + 1), dk);
        _tile_loadd(7, query + (p + 1) * kTileBytes, 64);
        if (kOneSum) {
            _tile_dpbssd(0, 4, 7);
        } else {
            _tile_dpbssd(1, 4, 7);
            _tile_stored(1, sums + (p + 1) * 256, 64);
        }
    }
    if (kOneSum) _tile_stored(0, sums, 64);
}

// v[c], c < 16: lanes 4 r + i. Sums over i to s[r * lds + c].
inline void store_quad_sums(const __m512* v, float* s, int64_t lds) {
    __m512 t[8], u[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
        t[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]),
                             _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
        u[i] = _mm512_add_ps(_mm512_shuffle_ps(t[2 * i], t[2 * i + 1], 0x44),
                             _mm512_shuffle_ps(t[2 * i], t[2 * i + 1], 0xee));
    const __m512 a = _mm512_shuffle_f32x4(u[0], u[1], 0x44), b = _mm512_shuffle_f32x4(u[2], u[3], 0x44);
    const __m512 c = _mm512_shuffle_f32x4(u[0], u[1], 0xee), d = _mm512_shuffle_f32x4(u[2], u[3], 0xee);
    _mm512_storeu_ps(s, _mm512_shuffle_f32x4(a, b, 0x88));
    _mm512_storeu_ps(s + lds, _mm512_shuffle_f32x4(a, b, 0xdd));
    _mm512_storeu_ps(s + 2 * lds, _mm512_shuffle_f32x4(c, d, 0x88));
    _mm512_storeu_ps(s + 3 * lds, _mm512_shuffle_f32x4(c, d, 0xdd));
}

// The sums of 16 cells and 4 rows as scores. scales: [16][ld].
inline void finish_cells(const int32_t* sums, int64_t n_sums, const float* scales, int64_t ld,
                         const float* factors, float* s, int64_t lds, PrefetchLines& next, int64_t pace) {
    __m512 v[16];
#pragma GCC unroll 16
    for (int c = 0; c < 16; ++c) v[c] = _mm512_setzero_ps();
    for (int64_t i = 0; i < n_sums; ++i) {
#pragma GCC unroll 16
        for (int c = 0; c < 16; ++c) {
            if (c % 2 == 0) next.advance(pace);
            const __m512 sum = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums + (i * 16 + c) * 16));
            const __m512 scale = _mm512_castpd_ps(_mm512_set1_pd(
                load_unaligned<double>(reinterpret_cast<const uint8_t*>(scales + c * ld + 2 * i))));
            v[c] = _mm512_fmadd_ps(sum, scale, v[c]);
        }
    }
    const __m512 f = _mm512_loadu_ps(factors);
#pragma GCC unroll 16
    for (int c = 0; c < 16; ++c) v[c] = _mm512_mul_ps(v[c], f);
    store_quad_sums(v, s, lds);
}

// Codes [n][dk] of n cells and their scales: [n][dk / 32], or [n][2] with the scale of the row twice.
template <class Codes>
IKPY_CODE_TILES void unpack_keys(const uint8_t* k, int64_t stride, int64_t dk, int64_t n, int8_t* codes,
                                 uint16_t* halves, float* scales, PrefetchLines& next, int64_t share) {
    const int64_t n_pairs = dk / 64;
    for (int64_t c = 0; c < n; ++c, k += stride) {
        next.advance(share);
        if constexpr (Codes::kRowScale) scales[2 * c] = scales[2 * c + 1] = load_unaligned<float>(k);
        const uint8_t* b = k + Codes::kHeader;
        for (int64_t p = 0; p < n_pairs; ++p, b += 2 * Codes::kBytes) {
            _mm512_storeu_si512(codes + c * dk + 64 * p, Codes::pair(b));
            if constexpr (Codes::kRowScale) continue;
            halves[2 * (c * n_pairs + p)] = load_unaligned<uint16_t>(b);
            halves[2 * (c * n_pairs + p) + 1] = load_unaligned<uint16_t>(b + Codes::kBytes);
        }
    }
    if constexpr (!Codes::kRowScale) widen_scales(halves, n * n_pairs * 2, scales);
}

// 16 cells at a time are unpacked, then multiplied with 4 rows at a time; the sums of an item are read while
// the next one is on the tile unit.
template <class Codes>
IKPY_CODE_TILES void code_scores(const CodeQuery& q, const uint8_t* k, int64_t stride, int64_t dk, int64_t n,
                                 float* s, int64_t lds, uint8_t* work, PrefetchLines next) {
    const ScoreWork w = score_work(work, dk);
    const int64_t n_pairs = dk / 64, n_sums = Codes::kRowScale ? 1 : n_pairs, ld = 2 * n_sums;
    const int64_t n_quads = quads(q.rows), n_items = (n + 15) / 16 * n_quads,
                  slots = n + n_items * n_sums * 8;
    const int64_t pace = (next.lines() + slots - 1) / slots;
    const auto finish = [&](int64_t item) {
        const int64_t c = item / n_quads * 16, i = item % n_quads;
        finish_cells(w.sums + item % 2 * n_sums * 256, n_sums, w.scales + c / 16 % 2 * dk / 2, ld,
                     q.factors + 16 * i, s + kQuad * i * lds + c, lds, next, pace);
    };
    for (int64_t item = 0; item < n_items; ++item) {
        const int64_t c = item / n_quads * 16, i = item % n_quads;
        if (i == 0)
            unpack_keys<Codes>(k + c * stride, stride, dk, std::min<int64_t>(16, n - c), w.codes, w.halves,
                               w.scales + c / 16 % 2 * dk / 2, next, pace);
        asm volatile("" ::: "memory");  // tile loads do not tell the compiler what they read
        multiply_cells<Codes::kRowScale>(w.codes, q.codes + i * n_pairs * kTileBytes, dk,
                                         w.sums + item % 2 * n_sums * 256);
        asm volatile("" ::: "memory");
        if (item > 0) finish(item - 1);
    }
    finish(n_items - 1);
}

// ---- outputs ----

// Codes of one block of n cells as right operands, groups of four cells in the order of the weights, and
// their scales.
template <class Codes>
IKPY_CODE_TILES void unpack_values(const uint8_t* v, int64_t stride, int64_t n, int8_t* out, uint16_t* halves,
                                   PrefetchLines& next, int64_t share) {
    for (int64_t c = 0; c < n; c += 4) {
        next.advance(share);
        const uint8_t* cells[4];
        for (int64_t i = 0; i < 4; ++i) cells[i] = v + std::min(c + i, n - 1) * stride;
        if constexpr (!Codes::kRowScale)
            for (int64_t i = 0; i < 4; ++i) halves[c + i] = load_unaligned<uint16_t>(cells[i]);
        __m512i codes[2];
        Codes::template four<true>(cells, codes);
        int8_t* to = out + 16 * bytes_of_group(c / 4);
        _mm512_storeu_si512(to, codes[0]);
        _mm512_storeu_si512(to + kTileBytes, codes[1]);
    }
}

IKPY_CODE_TILES void multiply_weights(const int8_t* weights, const int8_t* codes, int32_t* sums) {
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

// o = alpha o + factor (256 hi + lo) for the 32 elements of a block.
inline void add_sums(const int32_t* sums, float factor, float alpha, float* o) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        const __m512 hi = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums + 256 * i));
        const __m512 lo = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums + 256 * i + 16));
        add_scaled(_mm512_fmadd_ps(hi, _mm512_set1_ps(256.0f), lo), factor, alpha, o + 16 * i);
    }
}

// Blocks [b0, b0 + n_blocks) of n cells as right operands, with their scales.
template <class Codes>
IKPY_CODE_TILES void prepare_values(const uint8_t* v, int64_t stride, int64_t n, int64_t b0, int64_t n_blocks,
                                    const OutputWork& w, PrefetchLines& next, int64_t share) {
    for (int64_t b = 0; b < n_blocks; ++b)
        unpack_values<Codes>(v + Codes::kHeader + (b0 + b) * Codes::kBytes, stride, n,
                             w.codes + b * 2 * kTileBytes, w.halves + b * kCodeCells, next, share);
    if constexpr (Codes::kRowScale) {
        if (b0 > 0) return;
        for (int64_t c = 0; c < n; ++c) w.scales[c] = load_unaligned<float>(v + c * stride);
        w.largest[0] = normalize_scales(w.scales, n);
    } else {
        widen_scales(w.halves, n_blocks * kCodeCells, w.scales);
        for (int64_t b = 0; b < n_blocks; ++b) w.largest[b] = normalize_scales(w.scales + b * kCodeCells, n);
    }
}

template <class Codes>
IKPY_CODE_TILES void code_outputs(const float* p, int64_t ldp, int64_t rows, int64_t n, const uint8_t* v,
                                  int64_t stride, int64_t dv, const float* alpha, float* o, int64_t ldo,
                                  uint8_t* work, PrefetchLines next) {
    const OutputWork w = output_work(work, rows);
    const int64_t slots = dv / 32 * ((n + 3) / 4 + 2 * rows), share = (next.lines() + slots - 1) / slots;
    relative_weights(p, ldp, rows, n, w.relative, w.factors);
    for (int64_t b0 = 0; b0 < dv / 32; b0 += kBlocksAtOnce) {
        const int64_t n_blocks = std::min(kBlocksAtOnce, dv / 32 - b0);
        // Blocks with one scale per row share their weights.
        const int64_t n_scales = Codes::kRowScale ? 1 : n_blocks;
        prepare_values<Codes>(v, stride, n, b0, n_blocks, w, next, share);
        for (int64_t r0 = 0; r0 < rows; r0 += kTileRowsOfP) {
            const int64_t nr = std::min(kTileRowsOfP, rows - r0);
            for (int64_t b = 0; b < n_scales; ++b)
                for (int64_t r = 0; r < nr; ++r, next.advance(share))
                    round_weights(w.relative + (r0 + r) * kCodeCells, w.scales + b * kCodeCells,
                                  w.weights + b * kTileBytes + r * 128);
            asm volatile("" ::: "memory");  // tile loads do not tell the compiler what they read
            for (int64_t b = 0; b < n_blocks; ++b)
                multiply_weights(w.weights + b % n_scales * kTileBytes, w.codes + b * 2 * kTileBytes,
                                 w.sums + b * 512);
            asm volatile("" ::: "memory");
            for (int64_t b = 0; b < n_blocks; ++b)
                for (int64_t r = 0; r < nr; ++r, next.advance(share))
                    add_sums(w.sums + b * 512 + r * 32, w.factors[r0 + r] * w.largest[b % n_scales],
                             alpha[r0 + r], o + (r0 + r) * ldo + (b0 + b) * 32);
        }
    }
}

size_t tile_query_bytes(int64_t rows, int64_t dk) {
    return size_t(quads(rows) * (dk / 64 * kTileBytes + 64));
}

CodeQuery pack_tile_query(const float* q, int64_t ldq, int64_t rows, int64_t dk, uint8_t* to) {
    const int64_t n_pairs = dk / 64;
    CodeQuery out;
    out.rows = rows;
    out.codes = take<int8_t>(to, quads(rows) * n_pairs * kTileBytes);
    out.factors = take<float>(to, quads(rows) * 16);
    std::memset(out.codes, 0, size_t(quads(rows) * n_pairs * kTileBytes));
    std::fill(out.factors, out.factors + quads(rows) * 16, 0.0f);
    for (int64_t r = 0; r < rows; ++r) {
        const RoundedRow rounded(q + r * ldq, dk);
        int8_t* tiles = out.codes + r / kQuad * n_pairs * kTileBytes;
        float* factors = out.factors + r / kQuad * 16;
        // Columns are ordered by row, byte and block of the pair; the codes of the other block meet zeros.
        for (int64_t d = 0; d < dk; d += 16) {
            alignas(16) int8_t upper[16], lower[16];
            const __m512i levels = rounded.levels(q + r * ldq + d);
            store_bytes(upper_bytes(levels), upper);
            store_bytes(levels, lower);
            int8_t* at = tiles + d / 64 * kTileBytes + d % 64 / 4 * 64 + (r % kQuad * 4 + d / 32 % 2) * 4;
            for (int i = 0; i < 4; ++i, at += 64) {
                std::memcpy(at, upper + 4 * i, 4);
                std::memcpy(at + 8, lower + 4 * i, 4);
            }
        }
        for (int g = 0; g < 2; ++g) {
            factors[r % kQuad * 4 + g] = 256.0f * rounded.unit;
            factors[r % kQuad * 4 + 2 + g] = rounded.unit;
        }
    }
    return out;
}

size_t tile_work_bytes(int64_t rows, int64_t d) {
    uint8_t* scores = nullptr;
    uint8_t* outputs = nullptr;
    score_work(scores, (d + 63) / 64 * 64);
    output_work(outputs, rows);
    return std::max(reinterpret_cast<uintptr_t>(scores), reinterpret_cast<uintptr_t>(outputs));
}

void begin_code_tiles(int64_t rows) {
    TileConfig config(kTileHeight);
    for (const int tile : {2, 3, 5}) config.rows[tile] = uint8_t(2 * std::min(rows, kTileRowsOfP));
    load_tile_config(config);
}

template <class Codes>
const CodeProducts* products_of() {
    static const CodeProducts products = {code_scores<Codes>, code_outputs<Codes>, tile_query_bytes,
                                          pack_tile_query,    tile_work_bytes,     begin_code_tiles,
                                          end_tiles};
    return &products;
}

bool has_code_tiles() {
    static const bool available =
        has_amx() && __builtin_cpu_supports("amx-int8") && __builtin_cpu_supports("avx512vbmi");
    return available;
}

}  // namespace

const CodeProducts* tile_code_products(int type) {
    if (!has_code_tiles()) return nullptr;
    return kv::with_codes(type, [](auto codes) { return products_of<decltype(codes)>(); });
}

#else

const CodeProducts* tile_code_products(int) { return nullptr; }

#endif

}  // namespace flash
}  // namespace ikpy
