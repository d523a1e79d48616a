// Latent attention on caches of codes: the codes are multiplied as they are, on int8 tiles. Queries and
// weights are integers of 16 bits in two bytes, as in flash_codes.hpp.
#include <algorithm>

#include "kernels/amx_tiles.hpp"
#include "kernels/flash_code_weights.hpp"
#include "kernels/flash_latent.hpp"
#include "kernels/flash_pack.hpp"
#include "kernels/kv_codes.hpp"

namespace ikpy {
namespace latent {

#if defined(__AVX512VNNI__) && defined(__linux__)

namespace {

#define IKPY_CODE_TILES __attribute__((target("amx-tile,amx-int8,avx512vbmi")))

using flash::kHighest;
using flash::kTiny;

constexpr int64_t kBlock = 32;  // codes that share a scale
constexpr int64_t kTileSums = 256;
constexpr int64_t kBlocksAtOnce = 6;  // of scores: their sums stay in the first-level cache

struct Work {
    int8_t* q;          // [rows / 16][dk / depth][hi, lo][depth / 4][16 rows][4]
    float* factors;     // [rows]: what a unit of q is worth
    int8_t* k;          // [kCells][dk], of types that are not plain
    uint16_t* halves;   // [dk / 32][kCells]
    float* scales;      // the same as floats, or [segments][kCells]
    int32_t* sums;      // [2][kBlocksAtOnce][hi, lo][16][16]
    int16_t* relative;  // [dv / 32][kCells]: scales of V over the largest of the block, in the order of weights
    float* largest;     // [dv / 32]
    int16_t* weights;   // [rows][kCells]
    float* units;       // [rows]: what a unit of those is worth
    int8_t* bytes;      // [hi, lo][16 rows][kCells]: weights of a block
    int8_t* v;          // [2][16 groups of 4 cells][16][4]
    uint8_t* end;
};

Work work_at(const Shape& shape, uint8_t* at) {
    using flash::take;
    const int64_t blocks = shape.dk() / kBlock;
    Work w;
    w.q = take<int8_t>(at, 2 * shape.rows * shape.dk());
    w.factors = take<float>(at, shape.rows);
    w.k = take<int8_t>(at, kCells * shape.dk());
    w.halves = take<uint16_t>(at, blocks * kCells);
    w.scales = take<float>(at, blocks * kCells);
    w.sums = take<int32_t>(at, 2 * kBlocksAtOnce * 2 * kTileSums);
    w.relative = take<int16_t>(at, shape.dv / kBlock * kCells);
    w.largest = take<float>(at, shape.dv / kBlock);
    w.weights = take<int16_t>(at, shape.rows * kCells);
    w.units = take<float>(at, shape.rows);
    w.bytes = take<int8_t>(at, 2 * 16 * kCells);
    w.v = take<int8_t>(at, 2 * kTileBytes);
    w.end = at;
    return w;
}

size_t work_bytes(const Shape& shape) {
    return size_t(work_at(shape, nullptr).end - static_cast<uint8_t*>(nullptr));
}

// Codes per tile of scores: those that share a scale, as far as a tile has room for them.
template <class Codes>
constexpr int64_t kDepth = Codes::kRowScale ? 64 : kBlock;

// Left tiles of scores in 4 and 5, right ones in 6 and 7; outputs fill all of them.
TileConfig score_config(int64_t depth) {
    TileConfig config(kTileHeight);
    for (const int left : {4, 5}) config.row_bytes[left] = uint16_t(depth);
    for (const int right : {6, 7}) config.rows[right] = uint8_t(depth / 4);
    return config;
}

// ---- queries ----

// The lower bytes of four vectors side by side.
inline __m512i join_bytes(const __m512i* x) {
    const __m512i byte = _mm512_set1_epi32(255);
    const __m512i low = _mm512_or_si512(_mm512_and_si512(x[0], byte),
                                        _mm512_slli_epi32(_mm512_and_si512(x[1], byte), 8));
    const __m512i high = _mm512_or_si512(_mm512_and_si512(x[2], byte), _mm512_slli_epi32(x[3], 8));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

template <class Codes>
void pack(const Shape& shape, const float* q, uint8_t* work) {
    constexpr int64_t depth = kDepth<Codes>;
    const Work w = work_at(shape, work);
    const int64_t dk = shape.dk();
    for (int64_t m = 0; m < shape.rows; m += 16) {
        __m512 top = _mm512_set1_ps(kTiny), undefined = _mm512_setzero_ps();
        for (int64_t d = 0; d < dk; ++d) {
            const __m512 x = _mm512_loadu_ps(q + d * shape.rows + m);
            top = _mm512_max_ps(top, _mm512_abs_ps(x));
            undefined = _mm512_fmadd_ps(x, _mm512_setzero_ps(), undefined);
        }
        const __m512 highest = _mm512_set1_ps(kHighest), inverse = _mm512_div_ps(highest, top);
        // Rows with infinite and undefined elements get undefined scores.
        _mm512_storeu_ps(w.factors + m, _mm512_add_ps(_mm512_div_ps(top, highest), undefined));
        for (int64_t d = 0; d < dk; d += 4) {
            __m512i levels[4], upper[4];
            for (int i = 0; i < 4; ++i) {
                const __m512 x = _mm512_loadu_ps(q + (d + i) * shape.rows + m);
                levels[i] = _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse));
                upper[i] = flash::upper_bytes(levels[i]);
            }
            int8_t* to = w.q + 2 * m * dk + d / depth * depth * 32 + d % depth * 16;
            _mm512_storeu_si512(to, join_bytes(upper));
            _mm512_storeu_si512(to + depth * 16, join_bytes(levels));
        }
    }
}

// ---- scores ----

template <class Codes>
void read_scales(const Shape& shape, const Cells& cells, const Work& w) {
    if constexpr (Codes::kRowScale) {
        for (int64_t i = 0; i < shape.n_segments; ++i)
            for (int64_t c = 0; c < kCells; ++c)
                w.scales[i * kCells + c] = load_unaligned<float>(cells.rows[i] + c * cells.stride[i]);
        return;
    }
    uint16_t* to = w.halves;
    for (int64_t i = 0; i < shape.n_segments; ++i) {
        const int64_t blocks = shape.size[i] / kBlock;
        for (int64_t c = 0; c < kCells; ++c) {
            const uint8_t* b = cells.rows[i] + c * cells.stride[i];
            for (int64_t j = 0; j < blocks; ++j, b += Codes::kBytes)
                to[j * kCells + c] = load_unaligned<uint16_t>(b);
        }
        to += blocks * kCells;
    }
    flash::widen_scales(w.halves, shape.dk() / kBlock * kCells, w.scales);
}

template <class Codes>
IKPY_CODE_TILES void unpack_keys(const Shape& shape, const Cells& cells, const Work& w, Background& next) {
    for (int64_t c = 0; c < kCells; ++c) {
        int8_t* to = w.k + c * shape.dk();
        next.tick();
        for (int64_t i = 0; i < shape.n_segments; ++i) {
            const uint8_t* b = cells.rows[i] + c * cells.stride[i] + Codes::kHeader;
            for (int64_t d = 0; d < shape.size[i]; d += 64, b += 2 * Codes::kBytes, to += 64)
                _mm512_storeu_si512(to, Codes::pair(b));
        }
    }
}

// Left tiles of 16 cells: the codes of depth n are n * step bytes behind the first.
struct KeyTiles {
    const uint8_t* at;
    int64_t stride, step;
};

template <class Codes>
KeyTiles key_tiles(const Shape& shape, const Cells& cells, const Work& w, int segment, int64_t c) {
    if constexpr (Codes::kPlainAt >= 0)
        return {cells.rows[segment] + c * cells.stride[segment] + Codes::kHeader + Codes::kPlainAt,
                cells.stride[segment], kDepth<Codes> / kBlock * Codes::kBytes};
    const int8_t* at = w.k + c * shape.dk() + (segment ? shape.size[0] : 0);
    return {reinterpret_cast<const uint8_t*>(at), shape.dk(), kDepth<Codes>};
}

// sums[i] = hi and lo products of tile i; n is even.
IKPY_CODE_TILES void multiply_keys(const KeyTiles& k, const int8_t* q, int64_t depth, int64_t n,
                                   int32_t* sums) {
    for (int64_t i = 0; i < n; i += 2, q += 64 * depth, sums += 4 * kTileSums) {
        const uint8_t* left = k.at + i * k.step;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        _tile_loadd(4, left, k.stride);
        _tile_loadd(6, q, 64);
        _tile_dpbssd(0, 4, 6);
        _tile_loadd(7, q + 16 * depth, 64);
        _tile_dpbssd(1, 4, 7);
        _tile_loadd(5, left + k.step, k.stride);
        _tile_loadd(6, q + 32 * depth, 64);
        _tile_dpbssd(2, 5, 6);
        _tile_loadd(7, q + 48 * depth, 64);
        _tile_dpbssd(3, 5, 7);
        _tile_stored(0, sums, 64);
        _tile_stored(1, sums + kTileSums, 64);
        _tile_stored(2, sums + 2 * kTileSums, 64);
        _tile_stored(3, sums + 3 * kTileSums, 64);
    }
}

// One sum of all n tiles.
IKPY_CODE_TILES void multiply_rows(const KeyTiles& k, const int8_t* q, int64_t depth, int64_t n,
                                   int32_t* sums) {
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t i = 0; i < n; ++i, q += 32 * depth) {
        _tile_loadd(4, k.at + i * k.step, k.stride);
        _tile_loadd(6, q, 64);
        _tile_dpbssd(0, 4, 6);
        _tile_loadd(7, q + 16 * depth, 64);
        _tile_dpbssd(1, 4, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + kTileSums, 64);
}

// 256 hi + lo. Sums of 64 products fit in 32 bits, those of whole rows might not.
template <bool kWide>
inline __m512 join_sums(const int32_t* hi, const int32_t* lo) {
    const __m512i h = _mm512_loadu_si512(hi), l = _mm512_loadu_si512(lo);
    if (!kWide) return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(h, 8), l));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(h), _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(l));
}

// Sums of n_sums tiles of 16 cells, whose scales are kCells apart.
struct ScoreSums {
    const int32_t* sums;
    const float *scales, *factors;
    float* s;
    int64_t n_sums;
    bool first, last;  // of the tiles of these cells
};

template <bool kWide>
void finish_scores(const ScoreSums& item, int64_t ld, Background& next) {
    const __m512 factors = _mm512_loadu_ps(item.factors);
    for (int64_t c = 0; c < 16; c += 4) {
        float* s = item.s + c * ld;
        __m512 v[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) v[i] = item.first ? _mm512_setzero_ps() : _mm512_loadu_ps(s + i * ld);
        for (int64_t j = 0; j < item.n_sums; ++j) {
            const int32_t* sums = item.sums + (2 * j * 16 + c) * 16;
            const float* scales = item.scales + j * kCells + c;
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i)
                v[i] = _mm512_fmadd_ps(join_sums<kWide>(sums + 16 * i, sums + kTileSums + 16 * i),
                                       _mm512_set1_ps(scales[i]), v[i]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
            _mm512_storeu_ps(s + i * ld, item.last ? _mm512_mul_ps(v[i], factors) : v[i]);
        next.tick();
    }
}

// The sums of an item are read while the next one is on the tile unit.
template <class Codes>
void scores(const Shape& shape, const Cells& cells, float* s, uint8_t* work, Background& next) {
    constexpr int64_t depth = kDepth<Codes>;
    constexpr bool wide = Codes::kRowScale;
    const Work w = work_at(shape, work);
    load_tile_config(score_config(depth));
    read_scales<Codes>(shape, cells, w);
    if constexpr (Codes::kPlainAt < 0) unpack_keys<Codes>(shape, cells, w, next);
    ScoreSums before{};
    int64_t n_items = 0;
    for (int64_t m = 0; m < shape.rows; m += 16)
        for (int64_t c = 0; c < kCells; c += 16)
            for (int64_t d = 0, n; d < shape.dk(); d += n * depth) {
                const int segment = d >= shape.size[0];
                const int64_t start = segment ? shape.size[0] : 0;
                n = (start + shape.size[segment] - d) / depth;
                if (!wide) n = std::min(n, kBlocksAtOnce);
                KeyTiles k = key_tiles<Codes>(shape, cells, w, segment, c);
                k.at += (d - start) / depth * k.step;
                int32_t* sums = w.sums + n_items++ % 2 * kBlocksAtOnce * 2 * kTileSums;
                asm volatile("" ::: "memory");  // tile loads do not tell the compiler what they read
                const auto multiply = wide ? multiply_rows : multiply_keys;
                multiply(k, w.q + 2 * m * shape.dk() + d * 32, depth, n, sums);
                asm volatile("" ::: "memory");
                if (n_items > 1) finish_scores<wide>(before, shape.rows, next);
                before = {sums,
                          w.scales + (wide ? segment : d / kBlock) * kCells + c,
                          w.factors + m,
                          s + c * shape.rows + m,
                          wide ? 1 : n,
                          d == 0,
                          d + n * depth == shape.dk()};
            }
    finish_scores<wide>(before, shape.rows, next);
}

// ---- outputs ----

// Words of two vectors of dwords, the first below.
inline __m512i join_words(__m512i low, __m512i high) {
    return _mm512_mask_blend_epi16(0xAAAAAAAA, low, _mm512_slli_epi32(high, 16));
}

inline __m512i rounded(__m512 x) { return _mm512_cvtps_epi32(x); }

// Scales of 64 cells relative to the largest, which is returned.
inline float relative_scales(const float* scales, __m512* relative) {
    __m512 top = _mm512_set1_ps(kTiny);
    for (int i = 0; i < 4; ++i) top = _mm512_max_ps(top, _mm512_abs_ps(_mm512_loadu_ps(scales + 16 * i)));
    const float largest = _mm512_reduce_max_ps(top);
    for (int i = 0; i < 4; ++i)
        relative[i] = _mm512_div_ps(_mm512_loadu_ps(scales + 16 * i), _mm512_set1_ps(largest));
    return largest;
}

// Weights of 16 rows, 2^(s - step_top) times kHighest and, with row scales, those of V. Words 2 j and 2 j + 1
// of a row are the cells j and j + 16, behind them the same from cell 32 on.
inline void round_rows(const float* s, int64_t ld, const float* scales, const Softmax& softmax, int64_t m,
                       const Work& w) {
    const __m512 step_top = _mm512_loadu_ps(softmax.step_top + m);
    __m512 total = _mm512_setzero_ps();
    for (int64_t half = 0; half < 2; ++half) {
        __m512 x[16];
        for (int64_t j = 0; j < 16; ++j) {
            __m512 p[2];
            for (int64_t i = 0; i < 2; ++i) {
                const int64_t c = 32 * half + 16 * i + j;
                p[i] = simd::exp2(_mm512_sub_ps(_mm512_loadu_ps(s + c * ld), step_top));
                total = _mm512_add_ps(total, p[i]);
                p[i] = _mm512_mul_ps(p[i], _mm512_set1_ps(kHighest * scales[c]));
            }
            x[j] = _mm512_castsi512_ps(join_words(rounded(p[0]), rounded(p[1])));
        }
        flash::transpose16(x);
        for (int64_t r = 0; r < 16; ++r)
            _mm512_storeu_ps(w.weights + (m + r) * kCells + 32 * half, x[r]);
    }
    const __m512 worth = simd::exp2(_mm512_sub_ps(step_top, _mm512_loadu_ps(softmax.top + m)));
    _mm512_storeu_ps(w.units + m, _mm512_mul_ps(worth, _mm512_set1_ps(1.0f / kHighest)));
    _mm512_storeu_ps(softmax.sum + m, _mm512_fmadd_ps(total, worth, _mm512_loadu_ps(softmax.sum + m)));
}

// Weights of 16 rows as tiles of upper and lower bytes: bytes 4 j .. 4 j + 3 of a row are the cells j, j + 32,
// j + 16 and j + 48. kScaled: times the scales of a block over 2^15.
template <bool kScaled>
inline void split_weights(const int16_t* weights, const int16_t* relative, int8_t* to) {
    const __m512i half = _mm512_set1_epi16(128);
    __m512i scale[2];
    if (kScaled)
        for (int i = 0; i < 2; ++i) scale[i] = _mm512_loadu_si512(relative + 32 * i);
    for (int64_t r = 0; r < 16; ++r, weights += kCells, to += 64) {
        __m512i x = _mm512_loadu_si512(weights), y = _mm512_loadu_si512(weights + 32);
        if (kScaled) {
            x = _mm512_mulhrs_epi16(x, scale[0]);
            y = _mm512_mulhrs_epi16(y, scale[1]);
        }
        constexpr __mmask64 odd = 0xAAAAAAAAAAAAAAAA;
        const __m512i upper = _mm512_mask_blend_epi8(odd, _mm512_srli_epi16(_mm512_add_epi16(x, half), 8),
                                                     _mm512_add_epi16(y, half));
        _mm512_storeu_si512(to, upper);
        _mm512_storeu_si512(to + kTileBytes, _mm512_mask_blend_epi8(odd, x, _mm512_slli_epi16(y, 8)));
    }
}

// A block of the cells as two right tiles, cells in the order of the weights.
template <class Codes>
IKPY_CODE_TILES void interleave_values(const uint8_t* v, int64_t stride, int8_t* to, Background& next) {
    for (int64_t j = 0; j < 16; ++j, v += stride, to += 64) {
        const uint8_t* blocks[4] = {v, v + 32 * stride, v + 16 * stride, v + 48 * stride};
        __m512i codes[2];
        Codes::template four<true>(blocks, codes);
        _mm512_storeu_si512(to, codes[0]);
        _mm512_storeu_si512(to + kTileBytes, codes[1]);
        if (j % 4 == 0) next.tick();
    }
}

// sums: [2 halves of the block][hi, lo]
IKPY_CODE_TILES void multiply_values(const int8_t* weights, const int8_t* v, int32_t* sums) {
    asm volatile("" ::: "memory");  // tile loads do not tell the compiler what they read
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, weights, 64);
    _tile_loadd(6, v, 64);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(5, weights + kTileBytes, 64);
    _tile_dpbssd(1, 5, 6);
    _tile_loadd(7, v + kTileBytes, 64);
    _tile_dpbssd(2, 4, 7);
    _tile_dpbssd(3, 5, 7);
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + kTileSums, 64);
    _tile_stored(2, sums + 2 * kTileSums, 64);
    _tile_stored(3, sums + 3 * kTileSums, 64);
    asm volatile("" ::: "memory");
}

void add_sums(const int32_t* sums, const float* units, float largest, float* o, int64_t ld, Background& next) {
    for (int64_t r = 0; r < 16; ++r, o += ld, sums += 16) {
        const __m512 unit = _mm512_set1_ps(units[r] * largest);
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            const __m512 x = join_sums<false>(sums + 2 * i * kTileSums, sums + (2 * i + 1) * kTileSums);
            _mm512_storeu_ps(o + 16 * i, _mm512_fmadd_ps(x, unit, _mm512_loadu_ps(o + 16 * i)));
        }
        if (r % 4 == 0) next.tick();
    }
}

// Scales of V: those of each block relative to its largest, or factors of the weights where a row has one.
template <class Codes>
void prepare_scales(const Shape& shape, const Work& w, float* of_weights) {
    const int64_t last = shape.n_segments - 1;
    __m512 relative[4];
    std::fill(of_weights, of_weights + kCells, 1.0f);
    if constexpr (Codes::kRowScale) {
        const float largest = relative_scales(w.scales + last * kCells, relative);
        std::fill(w.largest, w.largest + shape.dv / kBlock, largest);
        for (int i = 0; i < 4; ++i) _mm512_storeu_ps(of_weights + 16 * i, relative[i]);
        return;
    }
    const float* scales = w.scales + ((last ? shape.size[0] : 0) + shape.column) / kBlock * kCells;
    const __m512 highest = _mm512_set1_ps(32767.0f);
    for (int64_t b = 0; b < shape.dv / kBlock; ++b) {
        // The product with weights is divided by 2^15.
        w.largest[b] = relative_scales(scales + b * kCells, relative) * (32768.0f / 32767.0f);
        for (int64_t half = 0; half < 2; ++half) {
            const __m512i x = rounded(_mm512_mul_ps(relative[2 * half], highest));
            const __m512i y = rounded(_mm512_mul_ps(relative[2 * half + 1], highest));
            _mm512_storeu_si512(w.relative + b * kCells + 32 * half, join_words(x, y));
        }
    }
}

template <class Codes>
void outputs(const Shape& shape, const Cells& cells, const float* s, const Softmax& softmax, float* o,
             uint8_t* work, Background& next) {
    const Work w = work_at(shape, work);
    const int64_t last = shape.n_segments - 1, ld = shape.ldo(), row_tiles = shape.rows / 16;
    load_tile_config(kTileHeight);
    float of_weights[kCells];
    prepare_scales<Codes>(shape, w, of_weights);
    for (int64_t m = 0; m < shape.rows; m += 16) round_rows(s + m, shape.rows, of_weights, softmax, m, w);
    const uint8_t* v = cells.rows[last] + Codes::kHeader + shape.column / kBlock * Codes::kBytes;
    const auto finish = [&](int64_t item) {
        const int64_t b = item / row_tiles, m = item % row_tiles * 16;
        add_sums(w.sums + item % 2 * 4 * kTileSums, w.units + m, w.largest[b], o + m * ld + b * kBlock, ld,
                 next);
    };
    const int64_t n_items = shape.dv / kBlock * row_tiles;
    for (int64_t item = 0; item < n_items; ++item) {
        const int64_t b = item / row_tiles, m = item % row_tiles * 16;
        if (m == 0) interleave_values<Codes>(v + b * Codes::kBytes, cells.stride[last], w.v, next);
        split_weights<!Codes::kRowScale>(w.weights + m * kCells, w.relative + b * kCells, w.bytes);
        multiply_values(w.bytes, w.v, w.sums + item % 2 * 4 * kTileSums);
        if (item > 0) finish(item - 1);
    }
    finish(n_items - 1);
}

template <class Codes>
int64_t ticks(const Shape& shape) {
    const int64_t row_tiles = shape.rows / 16, blocks = shape.dv / kBlock;
    const int64_t sums = Codes::kRowScale ? shape.n_segments : (shape.dk() / kBlock + 5) / kBlocksAtOnce;
    return (Codes::kPlainAt < 0 ? kCells : 0) + row_tiles * kCells / 4 * sums + blocks * 4 * (1 + row_tiles);
}

template <class Codes>
const Products* products_of() {
    static const Products products = {64,          2,           work_bytes, ticks<Codes>, pack<Codes>, scores<Codes>,
                                      outputs<Codes>, nullptr};
    return &products;
}

}  // namespace

const Products* code_products(int type) {
    if (!flash::tile_code_products(type)) return nullptr;
    return kv::with_codes(type, [](auto codes) { return products_of<decltype(codes)>(); });
}

#else

const Products* code_products(int) { return nullptr; }

#endif

}  // namespace latent
}  // namespace ikpy
