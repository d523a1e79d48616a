// Products of codes on vectors (VNNI): up to 2 rows per K head, up to 8 where there is no tile unit. Measured
// with caches in memory: 1.3 to 1.7 times the rate of products of floats; with one row 1.15 to 1.3 times that
// of tiles, with two the same.
//
// Scores: flash_code_lanes.hpp. Outputs: four cells at a time, one element to a lane. Codes are made unsigned
// by adding an offset; sums start at minus the offset times the sum of the other factor, and remain exact.
#include <cstring>

#include "ikpy/ops.hpp"
#include "kernels/attention/flash_code_lanes.hpp"
#include "kernels/cache/kv_types.hpp"

namespace ikpy {
namespace flash {

#if defined(__AVX512VNNI__) && defined(__linux__)

namespace {

constexpr int kOutputRowsAtOnce = 4;

struct Work {
    float* scales;      // [blocks, one with row scales][kCodeCells]
    int16_t* words;     // [blocks, one with row scales][kCodeCells]: scales relative to the largest
    float* largest;     // [blocks]
    uint8_t* cells;     // 16 rows: cells at the end, filled up
    int8_t* weights;    // [blocks][rows][upper, lower][kCodeCells]
    int32_t* starts;    // [blocks][rows]
    int16_t* relative;  // [rows][kCodeCells]
    float* factors;     // [rows]
};

Work work_at(uint8_t*& at, int64_t rows, int64_t d) {
    const int64_t n_blocks = d / 32;
    Work w;
    w.scales = take<float>(at, n_blocks * kCodeCells);
    w.words = take<int16_t>(at, n_blocks * kCodeCells);
    w.largest = take<float>(at, n_blocks);
    w.cells = take<uint8_t>(at, 16 * (2 * d + 64));
    w.weights = take<int8_t>(at, n_blocks * rows * 2 * kCodeCells);
    w.starts = take<int32_t>(at, n_blocks * rows);
    w.relative = take<int16_t>(at, rows * kCodeCells);
    w.factors = take<float>(at, rows);
    return w;
}

size_t work_bytes(int64_t rows, int64_t d) {
    uint8_t* end = nullptr;
    work_at(end, rows, (d + 31) / 32 * 32);
    return reinterpret_cast<uintptr_t>(end);
}

// scores

template <class Codes, int S>
void score_cells(const CodeQuery& q, const uint8_t* k, int64_t stride, int64_t n_blocks, const float* scales,
                 float* s, int64_t lds, PrefetchLines& next) {
    static constexpr decltype(&scores_of_cells<Codes, 0, S>) kernels[] = {
        scores_of_cells<Codes, 0, S>, scores_of_cells<Codes, 1, S>, scores_of_cells<Codes, 2, S>,
        scores_of_cells<Codes, 3, S>};
    kernels[q.rows % 4](q, k, stride, n_blocks, scales, s, lds, next);
    for (int64_t r = 0; r < q.rows; ++r)
        for (int i = 0; i < S; ++i) {
            float* to = s + r * lds + 16 * i;
            _mm512_storeu_ps(to, _mm512_mul_ps(_mm512_loadu_ps(to), _mm512_set1_ps(q.factors[r])));
        }
}

template <class Codes>
void vector_scores(const CodeQuery& q, const uint8_t* k, int64_t stride, int64_t dk, int64_t n, float* s,
                   int64_t lds, uint8_t* work, PrefetchLines next) {
    const int64_t n_blocks = dk / 32, row_bytes = Codes::kHeader + n_blocks * Codes::kBytes;
    const Work w = work_at(work, q.rows, dk);
    read_scales<Codes>(k, stride, n, n_blocks, w.scales);
    int64_t c = 0;
    for (; c + 32 <= n; c += 32, k += 32 * stride)
        score_cells<Codes, 2>(q, k, stride, n_blocks, w.scales + c, s + c, lds, next);
    for (; c < n; c += 16, k += 16 * stride) {
        const uint8_t* cells = k;
        int64_t apart = stride;
        if (n - c < 16) {
            for (int64_t i = 0; i < n - c; ++i)
                std::memcpy(w.cells + i * row_bytes, k + i * stride, size_t(row_bytes));
            cells = w.cells;
            apart = row_bytes;
        }
        score_cells<Codes, 1>(q, cells, apart, n_blocks, w.scales + c, s + c, lds, next);
    }
    next.advance(next.lines());
}

// outputs

// Four cells. upper, lower: [R][half of the block]; weights: [R][upper, lower][kCodeCells].
template <class Codes, int R>
IKPY_CODES void add_four(const kv::RowsOfFour& cells, const int8_t* weights, __m512i (*upper)[2],
                         __m512i (*lower)[2]) {
    __m512i x[2];
    Codes::unsigned_four(cells, x);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r, weights += 2 * kCodeCells) {
        const __m512i hi = four_bytes(weights), lo = four_bytes(weights + kCodeCells);
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) add_products(upper[r][i], x[i], hi);
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) add_products(lower[r][i], x[i], lo);
    }
}

// Rows of cells of V: up to three at the end of n are in a copy of four.
struct ValueRows {
    const uint8_t *at, *rest;
    int64_t stride, rest_stride, n;
};

// One block of n cells and R rows. weights: [R][upper, lower][kCodeCells].
template <class Codes, int R>
IKPY_BYTE_PERMUTES void outputs_of_block(const ValueRows& v, int64_t column, const int8_t* weights,
                                         const int32_t* starts, const float* factors, float largest,
                                         const float* alpha, float* o, int64_t ldo, PrefetchLines& next) {
    constexpr int kLines = lines_of(4 * Codes::kBytes), kOfFour = lines_of(16 * Codes::kBytes);
    __m512i upper[R][2], lower[R][2];
    StraightLines ahead(next, v.at + column);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        upper[r][0] = upper[r][1] = _mm512_setzero_si512();
        lower[r][0] = lower[r][1] = _mm512_set1_epi32(starts[r]);
    }
    const uint8_t* at = v.at + column;
    int64_t stride = v.stride;
    const int8_t* end = weights + v.n;
    const int8_t* whole = weights + v.n / 4 * 4;
    for (; weights < end; weights += 4, at += 4 * stride) {
        if (weights == whole) {
            at = v.rest + column;
            stride = v.rest_stride;
        }
        // Of four times four cells, what rounding has left.
        ahead.fetch((end - weights) % 16 ? kLines : kOfFour - 3 * kLines);
        add_four<Codes, R>({at, stride}, weights, upper, lower);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        __m512 x[2];
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) x[i] = _mm512_cvtepi32_ps(joined(upper[r][i], lower[r][i]));
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) add_scaled(x[i], factors[r] * largest, alpha[r], o + r * ldo + i * 16);
    }
    ahead.leave(next);
}

// The weights of all blocks before the first product: each takes a chain of some 100 cycles, which is too
// long for the products of the block before to hide.
template <class Codes>
IKPY_BYTE_PERMUTES void prepare_weights(const float* p, int64_t ldp, int64_t rows, int64_t n,
                                        int64_t n_scales, const Work& w) {
    relative_weights(p, ldp, rows, n, w.relative, w.factors);
    for (int64_t b = 0; b < n_scales; ++b)
        w.largest[b] = scale_words(w.scales + b * kCodeCells, n, w.words + b * kCodeCells);
    for (int64_t b = 0; b < n_scales; ++b)
        for (int64_t r = 0; r < rows; ++r) {
            int8_t* to = w.weights + (b * rows + r) * 2 * kCodeCells;
            const __m512i sums =
                round_weights(w.relative + r * kCodeCells, w.words + b * kCodeCells, to, to + kCodeCells);
            w.starts[b * rows + r] = start_of<Codes>(_mm512_reduce_add_epi32(sums));
        }
}

template <class Codes>
IKPY_BYTE_PERMUTES void vector_outputs(const float* p, int64_t ldp, int64_t rows, int64_t n, const uint8_t* v,
                                       int64_t stride, int64_t dv, const float* alpha, float* o, int64_t ldo,
                                       uint8_t* work, PrefetchLines next) {
    static constexpr decltype(&outputs_of_block<Codes, 1>) kernels[] = {
        outputs_of_block<Codes, 1>, outputs_of_block<Codes, 2>, outputs_of_block<Codes, 3>,
        outputs_of_block<Codes, 4>};
    const int64_t n_blocks = dv / 32, row_bytes = Codes::kHeader + n_blocks * Codes::kBytes;
    const Work w = work_at(work, rows, dv);
    const ValueRows cells{v, w.cells, stride, row_bytes, n};
    for (int64_t c = n / 4 * 4; c < n; ++c)
        std::memcpy(w.cells + c % 4 * row_bytes, v + c * stride, size_t(row_bytes));
    read_scales<Codes>(v, stride, n, n_blocks, w.scales);
    prepare_weights<Codes>(p, ldp, rows, n, Codes::kRowScale ? 1 : n_blocks, w);
    for (int64_t b = 0; b < n_blocks; ++b) {
        const int64_t scale = Codes::kRowScale ? 0 : b;
        for (int64_t r = 0; r < rows; r += kOutputRowsAtOnce)
            kernels[std::min<int64_t>(kOutputRowsAtOnce, rows - r) - 1](
                cells, Codes::kHeader + b * Codes::kBytes, w.weights + (scale * rows + r) * 2 * kCodeCells,
                w.starts + scale * rows + r, w.factors + r, w.largest[scale], alpha + r, o + r * ldo + 32 * b,
                ldo, next);
    }
    next.advance(next.lines());
}

void nothing_to_begin(int64_t) {}
void nothing_to_end() {}

template <class Codes>
const CodeProducts* products_of() {
    static const CodeProducts products = {
        vector_scores<Codes>, vector_outputs<Codes>, vector_query_bytes, pack_vector_query<Codes>,
        work_bytes,           nothing_to_begin,      nothing_to_end};
    return &products;
}

}  // namespace

const CodeProducts* vector_code_products(int type) {
    if (!has_byte_permutes()) return nullptr;
    return kv::with_codes(type, [](auto codes) { return products_of<decltype(codes)>(); });
}

#elif defined(__AVX512VNNI__) || !defined(__AVX2__)

const CodeProducts* vector_code_products(int) { return nullptr; }

#endif

}  // namespace flash
}  // namespace ikpy
