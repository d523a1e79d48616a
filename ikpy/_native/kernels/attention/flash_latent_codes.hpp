// Work memory, queries and scores of latent attention on caches of codes (flash_latent_codes.cpp, which says
// how).
#pragma once
#include "kernels/attention/flash_latent_scales.hpp"
#include "kernels/simd/amx_tiles.hpp"

#if defined(__AVX512VNNI__) && defined(__linux__)

#define IKPY_CODE_TILES __attribute__((target("amx-tile,amx-int8,avx512vbmi")))

namespace ikpy {
namespace latent {
namespace codes {

constexpr int64_t kDepth = 64;  // codes per tile
constexpr int64_t kTileSums = 256;
constexpr int64_t kSumsAtOnce = 5 * kTileSums;  // of four tiles: sums of two items must not lie 4 KiB apart
constexpr int64_t kBlocks = 2;                  // of cells that meet V together
constexpr int kScoreSums = 3;  // hi hi, hi lo + lo hi, lo lo; without lo halves of K two of them

struct Work {
    int8_t* q;           // [rows / 16][dk / 64][hi, lo] tiles
    float* factors;      // [rows]: what a unit of q is worth
    int8_t* k;           // [dk / 64][hi, lo] tiles of 16 cells
    float* scales;       // [kBlocks][dk / 32][kCells], or [segments][kCells]
    int32_t* multiples;  // [dk / 32][kCells]: scales over the largest of the row, twice in 16 bits
    float* units;        // [parts][kCells]: what a unit of k is worth
    int32_t* sums;       // [2][kSumsAtOnce]
    ValueScales values;
    int16_t* weights;  // [kBlocks][rows][kCells]
    float* worth;      // [rows]: of a unit of those
    int64_t* waiting;  // blocks that have weights and have not met V
    int8_t* bytes;     // [kBlocks][hi, lo][16 rows][kCells]: weights of a block of codes
    int8_t* v;         // [kBlocks][2][16 groups of 4 cells][16][4]
    uint8_t* end;

    // Of a block of cells where blocks of codes have scales.
    float* scales_of(const Shape& shape, int64_t block) const {
        return scales + block * (shape.dk() / kBlock) * kCells;
    }
};

inline Work work_at(const Shape& shape, uint8_t* at) {
    using flash::take;
    const int64_t blocks = shape.dk() / kBlock;
    Work w;
    w.q = take<int8_t>(at, 2 * shape.rows * shape.dk());
    w.factors = take<float>(at, shape.rows);
    w.k = take<int8_t>(at, 2 * 16 * shape.dk());
    w.scales = take<float>(at, kBlocks * std::max<int64_t>(2, blocks) * kCells);
    w.multiples = take<int32_t>(at, blocks * kCells);
    w.units = take<float>(at, 2 * kCells);
    w.sums = take<int32_t>(at, 2 * kSumsAtOnce);
    w.values.relative = take<int16_t>(at, shape.dv / kBlock * kBlocks * kCells);
    w.values.largest = take<float>(at, shape.dv / kBlock);
    w.weights = take<int16_t>(at, kBlocks * shape.rows * kCells);
    w.worth = take<float>(at, shape.rows);
    w.waiting = take<int64_t>(at, 1);
    w.bytes = take<int8_t>(at, kBlocks * 2 * 16 * kCells);
    w.v = take<int8_t>(at, kBlocks * 2 * kTileBytes);
    w.end = at;
    return w;
}

inline size_t work_bytes(const Shape& shape) {
    return size_t(work_at(shape, nullptr).end - static_cast<uint8_t*>(nullptr));
}

// queries

// The lower bytes of four vectors side by side.
inline __m512i join_bytes(const __m512i* x) {
    const __m512i byte = _mm512_set1_epi32(255);
    const __m512i low =
        _mm512_or_si512(_mm512_and_si512(x[0], byte), _mm512_slli_epi32(_mm512_and_si512(x[1], byte), 8));
    const __m512i high = _mm512_or_si512(_mm512_and_si512(x[2], byte), _mm512_slli_epi32(x[3], 8));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

// The element at a byte of a tile row: K that is brought to one scale has bytes i and i + 8 of 16 side by
// side.
template <class Codes>
int64_t element_at(int64_t byte) {
    if (Codes::kRowScale) return byte;
    return byte / 16 * 16 + byte % 2 * 8 + byte % 16 / 2;
}

template <class Codes>
void pack(const Shape& shape, const float* q, uint8_t* work) {
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
                const int64_t element = d / kDepth * kDepth + element_at<Codes>(d % kDepth + i);
                const __m512 x = _mm512_loadu_ps(q + element * shape.rows + m);
                levels[i] = _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse));
                upper[i] = flash::upper_bytes(levels[i]);
            }
            int8_t* to = w.q + 2 * m * dk + d / kDepth * 2 * kTileBytes + d % kDepth * 16;
            _mm512_storeu_si512(to, join_bytes(upper));
            _mm512_storeu_si512(to + kTileBytes, join_bytes(levels));
        }
    }
    *w.waiting = 0;
    load_tile_config(kTileHeight);
}

// scores

// Bits by which codes can be shifted while their products with -1 still fit.
template <class Codes>
constexpr int kSpareBits = Codes::kOffset >= 128  ? 0
                           : Codes::kOffset >= 32 ? 1
                           : Codes::kOffset >= 16 ? 2
                                                  : 3;

// Parts of a row that are brought to a scale of their own: what is before V is often much larger.
struct Parts {
    int64_t n, begin[3];
    Parts(const Shape& shape, bool segments) : n(0), begin{} {
        const int64_t border = shape.n_segments > 1 ? shape.size[0] : segments ? 0 : shape.column;
        if (border > 0) begin[++n] = border;
        begin[++n] = shape.dk();
    }
};

// Scales of the blocks [b0, b0 + blocks) of each row over the largest.
template <class Codes>
void share_scales(int64_t b0, int64_t blocks, float* units, const Work& w) {
    for (int64_t c = 0; c < kCells; c += 16) {
        __m512 top = _mm512_set1_ps(kTiny);
        for (int64_t b = b0; b < b0 + blocks; ++b)
            top = _mm512_max_ps(top, _mm512_abs_ps(_mm512_loadu_ps(w.scales + b * kCells + c)));
        const __m512 inverse = _mm512_div_ps(_mm512_set1_ps(32767.0f), top);
        for (int64_t b = b0; b < b0 + blocks; ++b) {
            const __m512i x = rounded(_mm512_mul_ps(_mm512_loadu_ps(w.scales + b * kCells + c), inverse));
            _mm512_storeu_si512(w.multiples + b * kCells + c, join_words(x, x));
        }
        // Codes are shifted by 8 and the spare bits, multiplied, and divided by 2^15.
        constexpr float unit = 128.0f / 32767.0f / (1 << kSpareBits<Codes>);
        _mm512_storeu_ps(units + c, _mm512_mul_ps(top, _mm512_set1_ps(unit)));
    }
}

// Words as tiles of upper bytes and of lower ones, which have no sign: that takes no rounding. Those of y lie
// between those of x.
inline void store_bytes(__m512i x, __m512i y, int8_t* to) {
    constexpr __mmask64 odd = 0xAAAAAAAAAAAAAAAA;
    _mm512_storeu_si512(to, _mm512_mask_blend_epi8(odd, _mm512_srli_epi16(x, 8), y));
    _mm512_storeu_si512(to + kTileBytes, _mm512_mask_blend_epi8(odd, x, _mm512_slli_epi16(y, 8)));
}

// 16 cells from c0 on as left tiles.
template <class Codes>
IKPY_CODE_TILES void expand_keys(const Shape& shape, const Cells& cells, int64_t c0, const Work& w,
                                 Background& next) {
    for (int64_t c = c0; c < c0 + 16; ++c) {
        int8_t* to = w.k + (c - c0) * 64;
        const int32_t* multiples = w.multiples + c;
        for (int64_t i = 0; i < shape.n_segments; ++i) {
            const uint8_t* b = cells.rows[i] + c * cells.stride[i];
            for (int64_t d = 0; d < shape.size[i]; d += kDepth) {
                const __m512i codes = Codes::pair(b);
                const __m512i scale =
                    _mm512_mask_set1_epi32(_mm512_set1_epi32(multiples[0]), 0xff00, multiples[kCells]);
                const __m512i zero = _mm512_setzero_si512();
                __m512i x = _mm512_unpacklo_epi8(zero, codes), y = _mm512_unpackhi_epi8(zero, codes);
                if constexpr (kSpareBits<Codes> > 0) {
                    x = _mm512_slli_epi16(x, kSpareBits<Codes>);
                    y = _mm512_slli_epi16(y, kSpareBits<Codes>);
                }
                store_bytes(_mm512_mulhrs_epi16(x, scale), _mm512_mulhrs_epi16(y, scale), to);
                b += 2 * Codes::kBytes;
                multiples += 2 * kCells;
                to += 2 * kTileBytes;
            }
        }
        if (c % 2 == 0) next.tick();
    }
}

// Products of n tiles of keys in two halves.
IKPY_CODE_TILES inline void multiply_halves(const int8_t* k, const int8_t* q, int64_t n, int32_t* sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    for (int64_t i = 0; i < n; ++i, k += 2 * kTileBytes, q += 2 * kTileBytes) {
        _tile_loadd(4, k, 64);
        _tile_loadd(6, q, 64);
        _tile_dpbssd(0, 4, 6);
        _tile_loadd(7, q + kTileBytes, 64);
        _tile_dpbssd(1, 4, 7);
        _tile_loadd(5, k + kTileBytes, 64);
        _tile_dpbusd(2, 5, 7);
        _tile_dpbusd(1, 5, 6);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + kTileSums, 64);
    _tile_stored(2, sums + 2 * kTileSums, 64);
}

// Products of n tiles of keys where they lie.
IKPY_CODE_TILES inline void multiply_codes(const uint8_t* k, int64_t stride, const int8_t* q, int64_t n,
                                           int32_t* sums) {
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t i = 0; i < n; ++i, k += kDepth, q += 2 * kTileBytes) {
        _tile_loadd(4, k, stride);
        _tile_loadd(6, q, 64);
        _tile_dpbssd(0, 4, 6);
        _tile_loadd(7, q + kTileBytes, 64);
        _tile_dpbssd(1, 4, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + kTileSums, 64);
}

inline __m512 floats(const int32_t* x) { return _mm512_cvtepi32_ps(_mm512_loadu_si512(x)); }

// Sums of 16 cells and rows.
struct ScoreSums {
    const int32_t* sums;
    const float *units, *factors;
    float* s;  // [16][16]
    bool add;
};

template <int kSums>
void finish_scores(const ScoreSums& item, Background& next) {
    const __m512 factors = _mm512_loadu_ps(item.factors), byte = _mm512_set1_ps(256.0f);
#pragma GCC unroll 4
    for (int64_t c = 0; c < 16; ++c) {
        __m512 x = floats(item.sums + 16 * c);
        for (int i = 1; i < kSums; ++i)
            x = _mm512_fmadd_ps(x, byte, floats(item.sums + i * kTileSums + 16 * c));
        const __m512 unit = _mm512_mul_ps(factors, _mm512_set1_ps(item.units[c]));
        float* s = item.s + c * 16;
        _mm512_storeu_ps(s, item.add ? _mm512_fmadd_ps(x, unit, _mm512_loadu_ps(s)) : _mm512_mul_ps(x, unit));
    }
    next.tick();
}

// The sums of an item are read while the next one is on the tile unit.
template <class Codes>
void scores(const Shape& shape, const Cells& cells, int64_t block, float* s, uint8_t* work,
            Background& next) {
    constexpr bool plain = Codes::kRowScale;
    constexpr int n_sums = plain ? 2 : kScoreSums;
    Work w = work_at(shape, work);
    if (!plain) w.scales = w.scales_of(shape, block);
    read_scales<Codes>(shape, cells, w.scales);
    if (plain) std::copy(w.scales, w.scales + shape.n_segments * kCells, w.units);
    const Parts parts(shape, plain);
    for (int64_t i = 0; i < parts.n && !plain; ++i)
        share_scales<Codes>(parts.begin[i] / kBlock, (parts.begin[i + 1] - parts.begin[i]) / kBlock,
                            w.units + i * kCells, w);
    ScoreSums before{};
    int64_t n_items = 0;
    for (int64_t c = 0; c < kCells; c += 16) {
        if constexpr (!plain) expand_keys<Codes>(shape, cells, c, w, next);
        for (int64_t m = 0; m < shape.rows; m += 16)
            for (int64_t i = 0; i < parts.n; ++i) {
                int32_t* sums = w.sums + n_items++ % 2 * kSumsAtOnce;
                const int64_t d = parts.begin[i], n = (parts.begin[i + 1] - d) / kDepth;
                const int8_t* q = w.q + 2 * m * shape.dk() + 32 * d;
                asm volatile("" ::: "memory");  // tile loads do not tell the compiler what they read
                if constexpr (plain) {
                    multiply_codes(cells.rows[i] + c * cells.stride[i] + Codes::kHeader, cells.stride[i], q,
                                   n, sums);
                } else {
                    multiply_halves(w.k + 32 * d, q, n, sums);
                }
                asm volatile("" ::: "memory");
                if (n_items > 1) finish_scores<n_sums>(before, next);
                before = {sums, w.units + i * kCells + c, w.factors + m, s + m * kCells + c * 16, i > 0};
            }
    }
    finish_scores<n_sums>(before, next);
}

}  // namespace codes
}  // namespace latent
}  // namespace ikpy

#endif
