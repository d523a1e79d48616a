// Latent attention on caches of codes, on int8 tiles: queries, keys and weights are integers of 16 bits in
// two bytes, 256 hi + lo (lo of keys and weights without a sign); values are the codes as they are stored.
// Keys whose blocks have scales of their own are brought to one scale per row, so that the products of a
// whole row are one sum; codes with one scale per row are multiplied where they lie.
// Two blocks of cells meet V together: sums of tiles are stored and turned to floats half as often. Their
// weights share a unit, which costs a quarter of the precision of the outputs.
#include "kernels/attention/flash_latent_codes.hpp"

#include "kernels/attention/flash_amx.hpp"
#include "kernels/attention/flash_pack.hpp"

namespace ikpy {
namespace latent {

#if defined(__AVX512VNNI__) && defined(__linux__)

namespace codes {
namespace {

// What a unit of the weights of 16 rows is worth with those of one more block, which would have `own`.
// Weights that wait for V are brought to it.
inline __m512 share_worth(const Shape& shape, int64_t m, __m512 own, int16_t* weights, const Work& w) {
    if (*w.waiting == 0) return own;
    const __m512 before = _mm512_loadu_ps(w.worth + m), worth = _mm512_max_ps(own, before);
    float shares[16];
    _mm512_storeu_ps(shares, _mm512_div_ps(before, worth));
    for (uint32_t rising = _mm512_cmp_ps_mask(own, before, _CMP_GT_OQ); rising; rising &= rising - 1) {
        const int r = __builtin_ctz(rising);
        for (int64_t j = 1; j <= *w.waiting; ++j) {
            int16_t* at = weights + (m + r - j * shape.rows) * kCells;
            for (int64_t i = 0; i < kCells; i += 16) {
                auto* to = reinterpret_cast<__m256i*>(at + i);
                const __m512 x = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm256_loadu_si256(to)));
                _mm256_storeu_si256(
                    to, _mm512_cvtepi32_epi16(rounded(_mm512_mul_ps(x, _mm512_set1_ps(shares[r])))));
            }
        }
    }
    return worth;
}

// Weights of 16 rows, 2^(s - top) over what a unit is worth and, with row scales, times those of V over
// `unit`. Words 2 j and 2 j + 1 of a row are the cells j and j + 16, behind them the same from cell 32 on.
inline void round_rows(const Shape& shape, const float* s, const float* scales, float unit,
                       const Softmax& softmax, int64_t m, int16_t* weights, const Work& w) {
    const __m512 block_top = _mm512_loadu_ps(softmax.block_top + m);
    const __m512 share = simd::exp2(_mm512_sub_ps(block_top, _mm512_loadu_ps(softmax.top + m)));
    const __m512 own = _mm512_mul_ps(share, _mm512_set1_ps(unit / kHighest));
    const __m512 worth = share_worth(shape, m, own, weights, w);
    const __m512 units = _mm512_div_ps(_mm512_mul_ps(own, _mm512_set1_ps(kHighest)), worth);
    __m512 total = _mm512_setzero_ps();
    for (int64_t half = 0; half < 2; ++half) {
        __m512 x[16];
        for (int64_t j = 0; j < 16; ++j) {
            __m512 p[2];
            for (int64_t i = 0; i < 2; ++i) {
                const int64_t c = 32 * half + 16 * i + j;
                p[i] = simd::exp2(_mm512_sub_ps(_mm512_loadu_ps(s + c * 16), block_top));
                total = _mm512_add_ps(total, p[i]);
                p[i] = _mm512_mul_ps(p[i], _mm512_mul_ps(units, _mm512_set1_ps(scales[c])));
            }
            x[j] = _mm512_castsi512_ps(join_words(rounded(p[0]), rounded(p[1])));
        }
        flash::transpose16(x);
        for (int64_t r = 0; r < 16; ++r) _mm512_storeu_ps(weights + (m + r) * kCells + 32 * half, x[r]);
    }
    _mm512_storeu_ps(w.worth + m, worth);
    _mm512_storeu_ps(softmax.sum + m, _mm512_fmadd_ps(total, share, _mm512_loadu_ps(softmax.sum + m)));
}

// Weights of 16 rows as tiles of upper and lower bytes: bytes 4 j .. 4 j + 3 of a row are the cells j, j +
// 32, j + 16 and j + 48. kScaled: times the scales of a block over 2^15.
template <bool kScaled>
inline void split_weights(const int16_t* weights, const int16_t* relative, int8_t* to) {
    __m512i scale[2];
    if (kScaled)
        for (int i = 0; i < 2; ++i) scale[i] = _mm512_loadu_si512(relative + 32 * i);
    for (int64_t r = 0; r < 16; ++r, weights += kCells, to += 64) {
        __m512i x = _mm512_loadu_si512(weights), y = _mm512_loadu_si512(weights + 32);
        if (kScaled) {
            x = _mm512_mulhrs_epi16(x, scale[0]);
            y = _mm512_mulhrs_epi16(y, scale[1]);
        }
        store_bytes(x, y, to);
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

// n blocks of cells; sums: [2 halves of the block][hi, lo]
IKPY_CODE_TILES void multiply_values(const int8_t* weights, const int8_t* v, int64_t n, int32_t* sums) {
    asm volatile("" ::: "memory");  // tile loads do not tell the compiler what they read
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t j = 0; j < n; ++j, weights += 2 * kTileBytes, v += 2 * kTileBytes) {
        _tile_loadd(4, weights, 64);
        _tile_loadd(6, v, 64);
        _tile_dpbssd(0, 4, 6);
        _tile_loadd(5, weights + kTileBytes, 64);
        _tile_dpbusd(1, 5, 6);
        _tile_loadd(7, v + kTileBytes, 64);
        _tile_dpbssd(2, 4, 7);
        _tile_dpbusd(3, 5, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + kTileSums, 64);
    _tile_stored(2, sums + 2 * kTileSums, 64);
    _tile_stored(3, sums + 3 * kTileSums, 64);
    asm volatile("" ::: "memory");
}

// o: [2][16][16]
void add_sums(const int32_t* sums, const float* worth, float largest, float* o, Background& next) {
    for (int64_t r = 0; r < 16; ++r, o += 16, sums += 16) {
        const __m512 unit = _mm512_set1_ps(worth[r] * largest);
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            const __m512i hi = _mm512_loadu_si512(sums + 2 * i * kTileSums);
            const __m512i lo = _mm512_loadu_si512(sums + (2 * i + 1) * kTileSums);
            const __m512 x = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(hi, 8), lo));
            float* to = o + i * kTileSums;
            _mm512_storeu_ps(to, _mm512_fmadd_ps(x, unit, _mm512_loadu_ps(to)));
        }
        if (r % 4 == 0) next.tick();
    }
}

template <class Codes>
void weigh(const Shape& shape, int64_t block, const float* s, const Softmax& softmax, uint8_t* work) {
    const Work w = work_at(shape, work);
    float of_weights[kCells];
    const float unit = row_scales<Codes>(shape, w.scales, of_weights);
    int16_t* weights = w.weights + block * shape.rows * kCells;
    for (int64_t m = 0; m < shape.rows; m += 16)
        round_rows(shape, s + m * kCells, of_weights, unit, softmax, m, weights, w);
    ++*w.waiting;
}

template <class Codes>
void outputs(const Shape& shape, const Blocks& blocks, float* o, uint8_t* work, Background& next) {
    const Work w = work_at(shape, work);
    const Cells& cells = blocks.cells;
    const int64_t last = shape.n_segments - 1, row_tiles = shape.rows / 16, n = blocks.n;
    const uint8_t* v = cells.rows[last] + Codes::kHeader + shape.column / kBlock * Codes::kBytes;
    if (!Codes::kRowScale) prepare_scales(shape, w.scales_of(shape, blocks.begin), n, w.values);
    const auto finish = [&](int64_t item) {
        const int64_t b = item / row_tiles, m = item % row_tiles * 16;
        add_sums(w.sums + item % 2 * kSumsAtOnce, w.worth + m, Codes::kRowScale ? 1.0f : w.values.largest[b],
                 o + m * shape.dv + 2 * b * kTileSums, next);
    };
    const int64_t n_items = shape.dv / kBlock * row_tiles;
    for (int64_t item = 0; item < n_items; ++item) {
        const int64_t b = item / row_tiles, m = item % row_tiles * 16;
        for (int64_t j = 0; j < n; ++j) {
            if (m == 0)
                interleave_values<Codes>(v + b * Codes::kBytes + j * kCells * cells.stride[last],
                                         cells.stride[last], w.v + j * 2 * kTileBytes, next);
            // Rows with one scale share the weights of their blocks.
            if (!Codes::kRowScale || b == 0 || row_tiles > 1)
                split_weights<!Codes::kRowScale>(w.weights + ((blocks.begin + j) * shape.rows + m) * kCells,
                                                 w.values.relative + (b * n + j) * kCells,
                                                 w.bytes + j * 2 * kTileBytes);
        }
        multiply_values(w.bytes, w.v, n, w.sums + item % 2 * kSumsAtOnce);
        if (item > 0) finish(item - 1);
    }
    finish(n_items - 1);
    *w.waiting = 0;
}

template <class Codes>
int64_t ticks(const Shape& shape) {
    const int64_t row_tiles = shape.rows / 16, blocks = shape.dv / kBlock, tiles = kCells / 16;
    const int64_t of_scores = (Codes::kRowScale ? 0 : 8) + row_tiles * Parts(shape, Codes::kRowScale).n;
    return kBlocks * tiles * of_scores + blocks * 4 * (kBlocks + row_tiles);
}

template <class Codes>
const Products* products_of() {
    static const Products products = {64,
                                      2,
                                      kBlocks,
                                      work_bytes,
                                      ticks<Codes>,
                                      pack<Codes>,
                                      scores<Codes>,
                                      weigh<Codes>,
                                      outputs<Codes>,
                                      nullptr,
                                      flash::end_tiles};
    return &products;
}

}  // namespace
}  // namespace codes

const Products* code_products(int type) {
    if (!flash::tile_code_products(type)) return nullptr;
    return kv::with_codes(type, [](auto of) { return codes::products_of<decltype(of)>(); });
}

#else

const Products* code_products(int) { return nullptr; }

#endif

}  // namespace latent
}  // namespace ikpy
