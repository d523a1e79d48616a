// Latent attention on caches of codes on vectors, for CPUs with VNNI and without a tile unit: queries and
// weights are words of 16 bits, codes are widened to words where they are multiplied, and `vpdpwssd` adds up
// pairs of products exactly. That is half as many instructions as multiply-adds of floats, and codes need no
// scales before they are summed up.
//
// Roofline of one core of a Xeon at 3.4 GHz, ns per cell of 576 elements (V: 512) of Q8_0. It starts two
// products per cycle (Zen 4: one), 6.8 per ns; with the loads of their operands 5.0 (16 rows) to 5.4 per ns
// remain, measured for 16 to 28 sums in registers of 1 to 4 vectors of rows.
//                                      16 rows: on paper  measured   128 rows: on paper  measured
//   scores: products 58, 427                     72           85              480           548
//   softmax                                       4            7               27            28
//   outputs: products 49, 379                    62           68              416           470
// Unrolling, fetching sums ahead and groups of rows whose scores stay in the first-level cache changed
// nothing.
#include <type_traits>

#include "kernels/attention/flash_code_lanes.hpp"
#include "kernels/attention/flash_latent_scales.hpp"
#include "kernels/simd/byte_permutes.hpp"
#include "kernels/simd/simd_f32.hpp"

namespace ikpy {
namespace latent {

#if defined(__AVX512VNNI__)

namespace codes {
namespace {

#define IKPY_WORDS __attribute__((target("avx512vbmi")))

constexpr int64_t kChunk = 64;  // elements of K at a time: operands and scores stay in the first-level cache
constexpr int64_t kPairs = kCells / 2;
constexpr int64_t kRowsAtOnce = 8;  // of outputs

struct WordWork {
    int32_t* q;      // [dk / 2][rows]: pairs of words
    float* factors;  // [rows]: what a unit of q is worth
    int16_t* k;      // [kCells][kChunk]
    float* scales;   // [dk / 32][kCells] or [segments][kCells]
    ValueScales values;
    int32_t* weights;  // [rows / 16][kPairs][16]: pairs of words
    float* worth;      // [rows]: of a unit of those
    int32_t* scaled;   // [kPairs][16]: weights of a block
    int32_t* v;        // [2][kPairs][16]: pairs of words
    uint8_t* end;
};

WordWork word_work(const Shape& shape, uint8_t* at) {
    using flash::take;
    const int64_t blocks = shape.dk() / kBlock;
    WordWork w;
    w.q = take<int32_t>(at, shape.dk() / 2 * shape.rows);
    w.factors = take<float>(at, shape.rows);
    w.k = take<int16_t>(at, kCells * kChunk);
    w.scales = take<float>(at, std::max<int64_t>(2, blocks) * kCells);
    w.values.relative = take<int16_t>(at, shape.dv / kBlock * kCells);
    w.values.largest = take<float>(at, shape.dv / kBlock);
    w.weights = take<int32_t>(at, shape.rows * kPairs);
    w.worth = take<float>(at, shape.rows);
    w.scaled = take<int32_t>(at, kPairs * 16);
    w.v = take<int32_t>(at, 2 * kPairs * 16);
    w.end = at;
    return w;
}

size_t word_work_bytes(const Shape& shape) {
    return size_t(word_work(shape, nullptr).end - static_cast<uint8_t*>(nullptr));
}

inline __m512i pair_at(const int32_t* x) { return _mm512_set1_epi32(*x); }

// Adds products of pairs. Written out because g++ moves the sums of its intrinsic between registers and
// memory.
inline void add_pairs(__m512i& sums, __m512i x, __m512i y) {
    asm("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(x), "v"(y));
}
inline void add_pairs(__m512i& sums, __m512i x, const int32_t* pair) {
    asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(x), "m"(*pair));
}

void pack_words(const Shape& shape, const float* q, uint8_t* work) {
    const WordWork w = word_work(shape, work);
    for (int64_t m = 0; m < shape.rows; m += 16) {
        __m512 top = _mm512_set1_ps(kTiny), undefined = _mm512_setzero_ps();
        for (int64_t d = 0; d < shape.dk(); ++d) {
            const __m512 x = _mm512_loadu_ps(q + d * shape.rows + m);
            top = _mm512_max_ps(top, _mm512_abs_ps(x));
            undefined = _mm512_fmadd_ps(x, _mm512_setzero_ps(), undefined);
        }
        const __m512 highest = _mm512_set1_ps(kHighest), inverse = _mm512_div_ps(highest, top);
        // Rows with infinite and undefined elements get undefined scores.
        _mm512_storeu_ps(w.factors + m, _mm512_add_ps(_mm512_div_ps(top, highest), undefined));
        for (int64_t d = 0; d < shape.dk(); d += 2) {
            const float* at = q + d * shape.rows + m;
            const __m512i x = rounded(_mm512_mul_ps(_mm512_loadu_ps(at), inverse));
            const __m512i y = rounded(_mm512_mul_ps(_mm512_loadu_ps(at + shape.rows), inverse));
            _mm512_storeu_si512(w.q + d / 2 * shape.rows + m, join_words(x, y));
        }
    }
}

// scores

// Groups of up to 64 rows: vectors of the next one.
int64_t vectors_at_once(int64_t rows) { return std::min<int64_t>(4, rows / 16); }
constexpr int cells_at_once(int vectors) { return vectors == 1 ? 16 : vectors == 2 ? 8 : 4; }

// Whether codes are stored as bytes, at the end of their block.
template <class Codes>
constexpr bool kBytes = std::is_same_v<Codes, kv::CodesQ8_0> || std::is_same_v<Codes, kv::CodesQ8_KV>;

inline __m512i words_at(const uint8_t* bytes) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes)));
}

template <class Codes>
IKPY_WORDS void widen_keys(const uint8_t* k, int64_t stride, int16_t* to, Background& next) {
    for (int64_t c = 0; c < kCells; ++c, k += stride, to += kChunk) {
        if constexpr (kBytes<Codes>) {
            _mm512_storeu_si512(to, words_at(k + Codes::kBytes - kBlock));
            _mm512_storeu_si512(to + 32, words_at(k + 2 * Codes::kBytes - kBlock));
        } else {
            const __m512i x = Codes::pair(k);
            _mm512_storeu_si512(to, _mm512_cvtepi8_epi16(_mm512_castsi512_si256(x)));
            _mm512_storeu_si512(to + 32, _mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64(x, 1)));
        }
        if (c % 8 == 0) next.tick();
    }
}

// A chunk of K at a time meets some rows.
struct Chunk {
    const int32_t* q;  // of its first pair and row
    int64_t rows;
    const int16_t* k;
    const float* scales;  // of its first block
};

// Adds to 16 vectors of scores: kVectors of rows for each of `cells_at_once` cells. s: of the first cell and
// row.
template <int kVectors, int kScales>
inline void score_cells(const Chunk& chunk, int64_t c0, float* s) {
    constexpr int C = cells_at_once(kVectors), kSums = C * kVectors, kSteps = int(kChunk) / 2 / kScales;
    const int32_t* k = reinterpret_cast<const int32_t*>(chunk.k + c0 * kChunk);
    const int32_t* q = chunk.q;
    for (int block = 0; block < kScales; ++block, k += kSteps) {
        __m512i sums[kSums];
#pragma GCC unroll 16
        for (int i = 0; i < kSums; ++i) sums[i] = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int j = 0; j < kSteps; ++j, q += chunk.rows) {
            __m512i x[kVectors];
#pragma GCC unroll 4
            for (int i = 0; i < kVectors; ++i) x[i] = _mm512_loadu_si512(q + 16 * i);
#pragma GCC unroll 16
            for (int c = 0; c < C; ++c) {
                const int32_t* pair = k + j + c * kChunk / 2;
                if constexpr (kVectors == 1) {
                    add_pairs(sums[c], x[0], pair);
                    continue;
                }
                const __m512i y = pair_at(pair);
#pragma GCC unroll 4
                for (int i = 0; i < kVectors; ++i) add_pairs(sums[c * kVectors + i], x[i], y);
            }
        }
        const float* scales = chunk.scales + block * kCells + c0;
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) {
            // Loads before stores: vectors of rows lie 4 KiB apart, and a load waits for such a store.
            float* to = s + (c0 + c) * 16;
            __m512 out[kVectors];
#pragma GCC unroll 4
            for (int i = 0; i < kVectors; ++i)
                out[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[c * kVectors + i]),
                                         _mm512_set1_ps(scales[c]), _mm512_loadu_ps(to + i * 16 * kCells));
#pragma GCC unroll 4
            for (int i = 0; i < kVectors; ++i) _mm512_storeu_ps(to + i * 16 * kCells, out[i]);
        }
    }
}

template <int kVectors, int kScales>
void score_rows(const Chunk& chunk, float* s, Background& next) {
    constexpr int C = cells_at_once(kVectors);
    for (int64_t c = 0; c < kCells; c += C) {
        score_cells<kVectors, kScales>(chunk, c, s);
        next.tick();
    }
}

template <class Codes>
void scores(const Shape& shape, const Cells& cells, int64_t, float* s, uint8_t* work, Background& next) {
    constexpr int kScales = Codes::kRowScale ? 1 : 2;
    static constexpr decltype(&score_rows<1, kScales>) kernels[] = {
        score_rows<1, kScales>, score_rows<2, kScales>, score_rows<3, kScales>, score_rows<4, kScales>};
    const WordWork w = word_work(shape, work);
    float* of_segment = w.scales;
    for (int64_t i = 0; i < shape.n_segments; ++i) {
        flash::read_scales<Codes>(cells.rows[i], cells.stride[i], kCells, shape.size[i] / kBlock, of_segment);
        of_segment += (Codes::kRowScale ? 1 : shape.size[i] / kBlock) * kCells;
    }
    std::fill(s, s + shape.rows * kCells, 0.0f);
    int64_t before = 0;  // elements of earlier chunks
    for (int64_t i = 0; i < shape.n_segments; ++i)
        for (int64_t d = 0; d < shape.size[i]; d += kChunk, before += kChunk) {
            widen_keys<Codes>(cells.rows[i] + Codes::kHeader + d / kBlock * Codes::kBytes, cells.stride[i],
                              w.k, next);
            const float* scales = w.scales + (Codes::kRowScale ? i : before / kBlock) * kCells;
            for (int64_t m = 0, n; m < shape.rows; m += 16 * n) {
                n = vectors_at_once(shape.rows - m);
                kernels[n - 1]({w.q + before / 2 * shape.rows + m, shape.rows, w.k, scales}, s + m * kCells,
                               next);
            }
        }
    for (int64_t m = 0; m < shape.rows; m += 16) {
        const __m512 factors = _mm512_loadu_ps(w.factors + m);
        for (int64_t c = 0; c < kCells; ++c, s += 16)
            _mm512_storeu_ps(s, _mm512_mul_ps(_mm512_loadu_ps(s), factors));
    }
}

// weights

// Pair j of a row: its weights of the cells j and j + 16, from pair 16 on of those from cell 32 on.
template <class Codes>
void weigh(const Shape& shape, int64_t, const float* s, const Softmax& softmax, uint8_t* work) {
    const WordWork w = word_work(shape, work);
    float of_weights[kCells];
    const float unit = row_scales<Codes>(shape, w.scales, of_weights) / kHighest;
    if (!Codes::kRowScale) prepare_scales(shape, w.scales, 1, w.values);
    if (Codes::kRowScale) std::fill(w.values.largest, w.values.largest + shape.dv / kBlock, 1.0f);
    for (float& x : of_weights) x *= kHighest;
    for (int64_t m = 0; m < shape.rows; m += 16, s += 16 * kCells) {
        const __m512 block_top = _mm512_loadu_ps(softmax.block_top + m);
        __m512 total = _mm512_setzero_ps();
        for (int64_t j = 0; j < kPairs; ++j) {
            __m512i x[2];
            for (int64_t i = 0; i < 2; ++i) {
                const int64_t c = j / 16 * 32 + 16 * i + j % 16;
                const __m512 p = simd::exp2(_mm512_sub_ps(_mm512_loadu_ps(s + 16 * c), block_top));
                total = _mm512_add_ps(total, p);
                x[i] = rounded(_mm512_mul_ps(p, _mm512_set1_ps(of_weights[c])));
            }
            _mm512_storeu_si512(w.weights + m * kPairs + 16 * j, join_words(x[0], x[1]));
        }
        const __m512 worth = simd::exp2(_mm512_sub_ps(block_top, _mm512_loadu_ps(softmax.top + m)));
        _mm512_storeu_ps(w.worth + m, _mm512_mul_ps(worth, _mm512_set1_ps(unit)));
        _mm512_storeu_ps(softmax.sum + m, _mm512_fmadd_ps(total, worth, _mm512_loadu_ps(softmax.sum + m)));
    }
}

// outputs

// A block of the cells as pairs of words in the order of the weights.
template <class Codes>
IKPY_WORDS void widen_values(const uint8_t* v, int64_t stride, int32_t* to, Background& next) {
    for (int64_t j = 0; j < 16; ++j, v += stride, to += 16) {
        const uint8_t* blocks[4] = {v, v + 32 * stride, v + 16 * stride, v + 48 * stride};
        __m512i x[2];
        Codes::template four<true>(blocks, x);
        for (int64_t h = 0; h < 2; ++h) {
            int32_t* at = to + h * kPairs * 16;
            _mm512_storeu_si512(at, _mm512_srai_epi16(_mm512_slli_epi16(x[h], 8), 8));
            _mm512_storeu_si512(at + 16 * 16, _mm512_srai_epi16(x[h], 8));
        }
        if (j % 2 == 0) next.tick();
    }
}

// Weights of 16 rows times the scales of a block over 2^15.
inline void scale_weights(const int32_t* weights, const int16_t* relative, int32_t* to) {
    const int32_t* scales = reinterpret_cast<const int32_t*>(relative);
#pragma GCC unroll 4
    for (int64_t j = 0; j < kPairs; ++j)
        _mm512_storeu_si512(to + 16 * j,
                            _mm512_mulhrs_epi16(_mm512_loadu_si512(weights + 16 * j), pair_at(scales + j)));
}

// Rows r of weights [kPairs][16] times v; o: [2][16][16], units: what a sum of a row is worth.
inline void add_rows(const int32_t* weights, const int32_t* v, const float* units, float* o) {
    __m512i sums[2 * kRowsAtOnce];
#pragma GCC unroll 16
    for (int i = 0; i < 2 * kRowsAtOnce; ++i) sums[i] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int64_t j = 0; j < kPairs; ++j) {
        const __m512i low = _mm512_loadu_si512(v + 16 * j);
        const __m512i high = _mm512_loadu_si512(v + 16 * (kPairs + j));
#pragma GCC unroll 8
        for (int r = 0; r < kRowsAtOnce; ++r) {
            const __m512i x = pair_at(weights + 16 * j + r);
            add_pairs(sums[2 * r], low, x);
            add_pairs(sums[2 * r + 1], high, x);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < 2 * kRowsAtOnce; ++i) {
        float* to = o + i % 2 * 256 + i / 2 * 16;
        _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[i]), _mm512_set1_ps(units[i / 2]),
                                             _mm512_loadu_ps(to)));
    }
}

template <class Codes>
void outputs(const Shape& shape, const Blocks& blocks, float* o, uint8_t* work, Background& next) {
    const WordWork w = word_work(shape, work);
    const Cells& cells = blocks.cells;
    const int64_t last = shape.n_segments - 1;
    const uint8_t* v = cells.rows[last] + Codes::kHeader + shape.column / kBlock * Codes::kBytes;
    for (int64_t b = 0; b < shape.dv / kBlock; ++b, v += Codes::kBytes) {
        widen_values<Codes>(v, cells.stride[last], w.v, next);
        for (int64_t m = 0; m < shape.rows; m += 16) {
            const int32_t* weights = w.weights + m * kPairs;
            if constexpr (!Codes::kRowScale) {
                scale_weights(weights, w.values.relative + b * kCells, w.scaled);
                weights = w.scaled;
            }
            alignas(64) float units[16];
            _mm512_store_ps(units,
                            _mm512_mul_ps(_mm512_loadu_ps(w.worth + m), _mm512_set1_ps(w.values.largest[b])));
            for (int64_t r = 0; r < 16; r += kRowsAtOnce) {
                add_rows(weights + r, w.v, units + r, o + m * shape.dv + 2 * b * 256 + 16 * r);
                next.tick();
            }
        }
    }
}

template <class Codes>
int64_t word_ticks(const Shape& shape) {
    int64_t of_chunk = kCells / 8;
    for (int64_t m = 0, n; m < shape.rows; m += 16 * n) {
        n = vectors_at_once(shape.rows - m);
        of_chunk += kCells / cells_at_once(int(n));
    }
    return shape.dk() / kChunk * of_chunk + shape.dv / kBlock * (8 + shape.rows / kRowsAtOnce);
}

template <class Codes>
const Products* words_of() {
    static const Products products = {kChunk,
                                      2,
                                      1,
                                      word_work_bytes,
                                      word_ticks<Codes>,
                                      pack_words,
                                      scores<Codes>,
                                      weigh<Codes>,
                                      outputs<Codes>,
                                      nullptr,
                                      nullptr};
    return &products;
}

}  // namespace
}  // namespace codes

const Products* word_products(int type) {
    if (!has_byte_permutes()) return nullptr;
    return kv::with_codes(type, [](auto of) { return codes::words_of<decltype(of)>(); });
}

#else

const Products* word_products(int) { return nullptr; }

#endif

}  // namespace latent
}  // namespace ikpy
