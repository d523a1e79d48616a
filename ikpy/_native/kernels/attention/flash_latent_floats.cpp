// Latent attention on F16 and BF16 caches on vectors, for CPUs without a tile unit: multiply-adds of floats.
// Operands of a step stay in the first-level cache, where the tile kernel (flash_tile.cpp) streams them from
// the second.
//
// Roofline of one core that starts two multiply-adds per cycle at 3.4 GHz (a Xeon; Zen 4: one), ns per cell
// of 576 elements (V: 512): 10 for each row; Zen 5 at 4.3 GHz 8.
#include "kernels/attention/flash_code_weights.hpp"
#include "kernels/attention/flash_latent.hpp"
#include "kernels/simd/lane_sums.hpp"
#include "kernels/simd/simd_f32.hpp"
#include "kernels/simd/transpose.hpp"

namespace ikpy {
namespace latent {

#if defined(__AVX512VNNI__)

namespace {

constexpr int64_t kChunk = 32;      // elements of K or V at a time
constexpr int64_t kRowsAtOnce = 8;  // of outputs

struct Work {
    float* q;        // [dk][rows], or [rows][dk] (has_rows_apart)
    float* cells;    // [kCells][kChunk]
    float* weights;  // [rows / 16][kCells][16]
    uint8_t* end;
};

Work work_at(const Shape& shape, uint8_t* at) {
    Work w;
    w.q = flash::take<float>(at, shape.dk() * shape.rows);
    w.cells = flash::take<float>(at, kCells * kChunk);
    w.weights = flash::take<float>(at, kCells * shape.rows);
    w.end = at;
    return w;
}

size_t work_bytes(const Shape& shape) {
    return size_t(work_at(shape, nullptr).end - static_cast<uint8_t*>(nullptr));
}

// Whether a vector of scores holds elements of one row, not of one element of 16 rows.
bool has_rows_apart(const Shape& shape) { return shape.rows == kRowUnit; }

void pack(const Shape& shape, const float* q, uint8_t* work) {
    float* to = work_at(shape, work).q;
    if (!has_rows_apart(shape)) {
        std::copy(q, q + shape.dk() * shape.rows, to);
        return;
    }
    for (int64_t d = 0; d < shape.dk(); d += 16, to += 16) {
        __m512i x[16];
        for (int i = 0; i < 16; ++i) x[i] = _mm512_loadu_si512(q + 16 * (d + i));
        transpose16(x);
        for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * shape.dk(), x[i]);
    }
}

// 16 elements as floats.
template <bool kBf16>
inline __m512 floats_at(const uint8_t* p) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    if constexpr (kBf16) return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
    return _mm512_cvtph_ps(x);
}

// A chunk of all cells as floats.
template <bool kBf16>
void widen(const uint8_t* cells, int64_t stride, float* to, Background& next) {
    for (int64_t c = 0; c < kCells; ++c, cells += stride, to += kChunk) {
#pragma GCC unroll 2
        for (int64_t i = 0; i < kChunk; i += 16) _mm512_storeu_ps(to + i, floats_at<kBf16>(cells + 2 * i));
        if (c % 8 == 0) next.tick();
    }
}

// scores

// Groups of up to 64 rows: vectors of the next one.
int64_t vectors_at_once(int64_t rows) { return std::min<int64_t>(4, rows / 16); }
constexpr int cells_at_once(int vectors) { return vectors == 1 ? 16 : vectors == 2 ? 8 : 4; }

// Adds the products of a chunk to kVectors vectors of rows of all cells.
template <int kVectors>
void score_rows(const float* q, int64_t rows, const float* k, float* s, Background& next) {
    constexpr int C = cells_at_once(kVectors);
    for (int64_t c0 = 0; c0 < kCells; c0 += C, k += C * kChunk, s += C * 16) {
        __m512 sums[C * kVectors];
#pragma GCC unroll 16
        for (int i = 0; i < C * kVectors; ++i)
            sums[i] = _mm512_loadu_ps(s + i % kVectors * 16 * kCells + i / kVectors * 16);
        const float* at = q;
        for (int j = 0; j < kChunk; ++j, at += rows) {
            __m512 x[kVectors];
#pragma GCC unroll 4
            for (int i = 0; i < kVectors; ++i) x[i] = _mm512_loadu_ps(at + 16 * i);
#pragma GCC unroll 16
            for (int i = 0; i < C * kVectors; ++i)
                sums[i] =
                    _mm512_fmadd_ps(x[i % kVectors], _mm512_set1_ps(k[j + i / kVectors * kChunk]), sums[i]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < C * kVectors; ++i)
            _mm512_storeu_ps(s + i % kVectors * 16 * kCells + i / kVectors * 16, sums[i]);
        next.tick();
    }
}

// Four cells times four of 16 rows at a time, all of their elements one after the other: four conversions and
// four loads for 16 multiply-adds, where 16 cells times a vector of rows take as many loads as multiply-adds
// and cells that were made floats before. One core of Zen 5, 16 heads of 576: F16 6.6 -> 7.9 GB/s (9.1 at
// best with two multiply-adds per cycle), 7.0 with V made floats before, 7.3 with the next cells fetched; Ice
// Lake 2.8 -> 3.4 to 3.6 (6.4 at best).
template <bool kBf16>
void scores_of_rows_apart(const Shape& shape, const Cells& cells, const float* q, float* s,
                          Background& next) {
    constexpr int kTile = 4;
    for (int64_t c0 = 0; c0 < kCells; c0 += kTile)
        for (int64_t r0 = 0; r0 < kRowUnit; r0 += kTile) {
            __m512 sums[kTile * kTile];
#pragma GCC unroll 16
            for (int i = 0; i < kTile * kTile; ++i) sums[i] = _mm512_setzero_ps();
            const float* rows = q + r0 * shape.dk();
            for (int64_t i = 0; i < shape.n_segments; ++i) {
                const uint8_t* k = cells.rows[i] + c0 * cells.stride[i];
                // A cell of the next four.
                const uint8_t* later = k + (kTile + r0 / kTile) * cells.stride[i];
                for (int64_t at = 0; at < 2 * shape.size[i]; at += 64)
                    _mm_prefetch(reinterpret_cast<const char*>(later + at), _MM_HINT_T0);
                for (int64_t d = 0; d < shape.size[i]; d += 16, k += 32, rows += 16) {
                    __m512 x[kTile];
#pragma GCC unroll 4
                    for (int r = 0; r < kTile; ++r) x[r] = _mm512_loadu_ps(rows + r * shape.dk());
#pragma GCC unroll 4
                    for (int c = 0; c < kTile; ++c) {
                        const __m512 y = floats_at<kBf16>(k + c * cells.stride[i]);
#pragma GCC unroll 4
                        for (int r = 0; r < kTile; ++r)
                            sums[kTile * c + r] = _mm512_fmadd_ps(x[r], y, sums[kTile * c + r]);
                    }
                }
            }
            const __m512 all = sums16(sums);
            float* to = s + c0 * kRowUnit + r0;
            _mm_storeu_ps(to, _mm512_castps512_ps128(all));
            _mm_storeu_ps(to + kRowUnit, _mm512_extractf32x4_ps(all, 1));
            _mm_storeu_ps(to + 2 * kRowUnit, _mm512_extractf32x4_ps(all, 2));
            _mm_storeu_ps(to + 3 * kRowUnit, _mm512_extractf32x4_ps(all, 3));
            next.tick();
        }
}

template <bool kBf16>
void scores(const Shape& shape, const Cells& cells, int64_t, float* s, uint8_t* work, Background& next) {
    static constexpr decltype(&score_rows<1>) kernels[] = {score_rows<1>, score_rows<2>, score_rows<3>,
                                                           score_rows<4>};
    const Work w = work_at(shape, work);
    if (has_rows_apart(shape)) return scores_of_rows_apart<kBf16>(shape, cells, w.q, s, next);
    std::fill(s, s + shape.rows * kCells, 0.0f);
    const float* q = w.q;
    for (int64_t i = 0; i < shape.n_segments; ++i)
        for (int64_t d = 0; d < shape.size[i]; d += kChunk, q += kChunk * shape.rows) {
            widen<kBf16>(cells.rows[i] + 2 * d, cells.stride[i], w.cells, next);
            for (int64_t m = 0, n; m < shape.rows; m += 16 * n) {
                n = vectors_at_once(shape.rows - m);
                kernels[n - 1](q + m, shape.rows, w.cells, s + m * kCells, next);
            }
        }
}

void weigh(const Shape& shape, int64_t, const float* s, const Softmax& softmax, uint8_t* work) {
    float* to = work_at(shape, work).weights;
    for (int64_t m = 0; m < shape.rows; m += 16) {
        const __m512 top = _mm512_loadu_ps(softmax.top + m);
        __m512 total = _mm512_loadu_ps(softmax.sum + m);
        for (int64_t c = 0; c < kCells; ++c, s += 16, to += 16) {
            const __m512 p = simd::exp2(_mm512_sub_ps(_mm512_loadu_ps(s), top));
            total = _mm512_add_ps(total, p);
            _mm512_storeu_ps(to, p);
        }
        _mm512_storeu_ps(softmax.sum + m, total);
    }
}

// outputs

// Weights [kCells][16] of some rows times a chunk of V; o: [2][16][16]. load(c, i): vector i of cell c.
template <class Load>
inline void add_rows(const float* weights, const Load& load, float* o) {
    __m512 sums[2 * kRowsAtOnce];
#pragma GCC unroll 16
    for (int i = 0; i < 2 * kRowsAtOnce; ++i) sums[i] = _mm512_loadu_ps(o + i % 2 * 256 + i / 2 * 16);
    for (int64_t c = 0; c < kCells; ++c) {
        const __m512 x[2] = {load(c, 0), load(c, 1)};
#pragma GCC unroll 16
        for (int i = 0; i < 2 * kRowsAtOnce; ++i)
            sums[i] = _mm512_fmadd_ps(_mm512_set1_ps(weights[16 * c + i / 2]), x[i % 2], sums[i]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 2 * kRowsAtOnce; ++i) _mm512_storeu_ps(o + i % 2 * 256 + i / 2 * 16, sums[i]);
}

template <bool kBf16>
void outputs(const Shape& shape, const Blocks& blocks, float* o, uint8_t* work, Background& next) {
    const Work w = work_at(shape, work);
    const int64_t last = shape.n_segments - 1, stride = blocks.cells.stride[last];
    const uint8_t* v = blocks.cells.rows[last] + 2 * shape.column;
    const bool direct = has_rows_apart(shape);
    for (int64_t d = 0; d < shape.dv; d += kChunk, v += 2 * kChunk) {
        const auto stored = [=](int64_t c, int i) { return floats_at<kBf16>(v + c * stride + 32 * i); };
        const auto made = [&](int64_t c, int i) { return _mm512_loadu_ps(w.cells + c * kChunk + 16 * i); };
        if (!direct) widen<kBf16>(v, stride, w.cells, next);
        for (int64_t m = 0; m < shape.rows; m += 16)
            for (int64_t r = 0; r < 16; r += kRowsAtOnce) {
                const float* weights = w.weights + m * kCells + r;
                float* to = o + m * shape.dv + 16 * (d + r);
                if (direct)
                    add_rows(weights, stored, to);
                else
                    add_rows(weights, made, to);
                next.tick();
            }
    }
}

int64_t ticks(const Shape& shape) {
    int64_t of_chunk = kCells / 8;
    for (int64_t m = 0, n; m < shape.rows; m += 16 * n) {
        n = vectors_at_once(shape.rows - m);
        of_chunk += kCells / cells_at_once(int(n));
    }
    const int64_t of_v = shape.dv / kChunk * (shape.rows / kRowsAtOnce);
    if (has_rows_apart(shape)) return kCells + of_v;
    return shape.dk() / kChunk * of_chunk + shape.dv / kChunk * (kCells / 8) + of_v;
}

template <bool kBf16>
const Products* products_of() {
    static const Products products = {
        kChunk, 2, 1, work_bytes, ticks, pack, scores<kBf16>, weigh, outputs<kBf16>, nullptr, nullptr};
    return &products;
}

}  // namespace

const Products* float_products(int type) {
    if (type == kF16) return products_of<false>();
    return type == kBF16 ? products_of<true>() : nullptr;
}

#else

const Products* float_products(int) { return nullptr; }

#endif

}  // namespace latent
}  // namespace ikpy
