// Products of codes on vectors (VNNI): up to 2 rows per K head, up to 8 where there is no tile unit. Measured
// with caches in memory: 1.3 to 1.7 times the rate of products of floats; with one row 1.15 to 1.3 times that
// of tiles, with two the same.
//
// Scores: 16 cells are transposed, one to a lane, so that sums need no adding up and a block's scales are one
// vector. Outputs: four cells at a time, one element to a lane. Codes are made unsigned by adding an offset;
// sums start at minus the offset times the sum of the other factor, and remain exact.
#include <cstring>

#include "ikpy/ops.hpp"
#include "kernels/flash_code_weights.hpp"
#include "kernels/kv_codes.hpp"
#include "kernels/kv_types.hpp"

namespace ikpy {
namespace flash {

#if defined(__AVX512VNNI__) && defined(__linux__)

namespace {

#define IKPY_BYTE_PERMUTES __attribute__((target("avx512vbmi")))

// Scores of 8 rows take 0.93 x the time of twice 4: cells are transposed once. Outputs would not fit into the
// registers.
constexpr int kScoreRowsAtOnce = 8, kOutputRowsAtOnce = 4;
constexpr int64_t kQueryBytes = 64;  // of a block of a row: 32 upper, 32 lower bytes

struct Work {
    uint16_t* halves;   // [blocks][kCodeCells]: scales
    float* scales;      // [kCodeCells], of rows
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
    w.halves = take<uint16_t>(at, n_blocks * kCodeCells);
    w.scales = take<float>(at, kCodeCells);
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

// Adds the products of unsigned codes with four signed bytes.
inline void add_products(__m512i& sums, __m512i codes, const int8_t* four) {
    sums = _mm512_dpbusd_epi32(
        sums, codes, _mm512_set1_epi32(load_unaligned<int32_t>(reinterpret_cast<const uint8_t*>(four))));
}
// Minus the offset times the sum of the levels; wraps around for undefined ones.
template <class Codes>
int32_t start_of(int32_t levels) {
    return int32_t(0u - uint32_t(Codes::kOffset) * uint32_t(levels));
}
inline int32_t sum_of_eight(__m256i x) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    s = _mm_add_epi32(s, _mm_unpackhi_epi64(s, s));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 1)));
}
inline __m512i joined(__m512i upper, __m512i lower) {
    return _mm512_add_epi32(_mm512_slli_epi32(upper, 8), lower);
}

// scores

// 16 cells and R rows. query: [blocks][rows of the head][kQueryBytes]; starts: [blocks][rows][upper, lower].
// halves, scales: of the first of the cells.
template <class Codes, int R>
IKPY_BYTE_PERMUTES void scores_of_sixteen(const CodeQuery& q, int64_t r0, const uint8_t* k, int64_t stride,
                                          int64_t n_blocks, const uint16_t* halves, const float* scales,
                                          float* s, int64_t lds, PrefetchLines& ahead) {
    constexpr bool kRowScale = Codes::kRowScale;
    __m512i upper[R], lower[R];
    __m512 sums[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        upper[r] = lower[r] = _mm512_setzero_si512();
        sums[r] = _mm512_setzero_ps();
    }
    PrefetchLines next = ahead;
    constexpr int kLines = lines_of(16 * Codes::kBytes);
    const int8_t* query = q.codes + r0 * kQueryBytes;
    const int32_t* starts = q.starts + 2 * r0;
    const int64_t query_step = q.rows * kQueryBytes, starts_step = 2 * q.rows;
    k += Codes::kHeader;
    for (int64_t b = 0; b < n_blocks; ++b, k += Codes::kBytes, halves += kCodeCells) {
        __m512i x[8];
        Codes::sixteen(k, stride, x);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m512i first = _mm512_set1_epi32(starts[2 * r]),
                          second = _mm512_set1_epi32(starts[2 * r + 1]);
            upper[r] = kRowScale ? _mm512_add_epi32(upper[r], first) : first;
            lower[r] = kRowScale ? _mm512_add_epi32(lower[r], second) : second;
        }
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g) {
            if (g < kLines) next.one();
            if (g + 8 < kLines) next.one();
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                add_products(upper[r], x[g], query + r * kQueryBytes + 4 * g);
                add_products(lower[r], x[g], query + r * kQueryBytes + 32 + 4 * g);
            }
        }
        query += query_step;
        starts += starts_step;
        if constexpr (!kRowScale) {
            const __m512 scale =
                _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(joined(upper[r], lower[r])), scale, sums[r]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        if constexpr (kRowScale)
            sums[r] = _mm512_mul_ps(_mm512_loadu_ps(scales),
                                    _mm512_fmadd_ps(_mm512_cvtepi32_ps(upper[r]), _mm512_set1_ps(256.0f),
                                                    _mm512_cvtepi32_ps(lower[r])));
        _mm512_storeu_ps(s + (r0 + r) * lds, _mm512_mul_ps(sums[r], _mm512_set1_ps(q.factors[r0 + r])));
    }
    ahead = next;
}

template <class Codes>
IKPY_BYTE_PERMUTES void vector_scores(const CodeQuery& q, const uint8_t* k, int64_t stride, int64_t dk,
                                      int64_t n, float* s, int64_t lds, uint8_t* work, PrefetchLines next) {
    static constexpr decltype(&scores_of_sixteen<Codes, 1>) kernels[] = {
        scores_of_sixteen<Codes, 1>, scores_of_sixteen<Codes, 2>, scores_of_sixteen<Codes, 3>,
        scores_of_sixteen<Codes, 4>, scores_of_sixteen<Codes, 5>, scores_of_sixteen<Codes, 6>,
        scores_of_sixteen<Codes, 7>, scores_of_sixteen<Codes, 8>};
    const int64_t n_blocks = dk / 32, row_bytes = Codes::kHeader + n_blocks * Codes::kBytes;
    const Work w = work_at(work, q.rows, dk);
    copy_scales<Codes>(k, stride, n, n_blocks, w.halves, w.scales);
    for (int64_t c = 0; c < n; c += 16, k += 16 * stride) {
        const uint8_t* cells = k;
        int64_t apart = stride;
        if (n - c < 16) {
            for (int64_t i = 0; i < n - c; ++i)
                std::memcpy(w.cells + i * row_bytes, k + i * stride, size_t(row_bytes));
            cells = w.cells;
            apart = row_bytes;
        }
        for (int64_t r = 0; r < q.rows; r += kScoreRowsAtOnce)
            kernels[std::min<int64_t>(kScoreRowsAtOnce, q.rows - r) - 1](
                q, r, cells, apart, n_blocks, w.halves + c, w.scales + c, s + c, lds, next);
    }
}

size_t vector_query_bytes(int64_t rows, int64_t dk) {
    return size_t(rows * dk / 32 * kQueryBytes + (rows * dk / 32 * 8 + 63) / 64 * 64 +
                  (rows * 4 + 63) / 64 * 64);
}

template <class Codes>
CodeQuery pack_vector_query(const float* q, int64_t ldq, int64_t rows, int64_t dk, uint8_t* to) {
    CodeQuery out;
    out.rows = rows;
    out.codes = take<int8_t>(to, rows * dk / 32 * kQueryBytes);
    out.starts = take<int32_t>(to, rows * dk / 32 * 2);
    out.factors = take<float>(to, rows);
    for (int64_t r = 0; r < rows; ++r) {
        const RoundedRow rounded(q + r * ldq, dk);
        out.factors[r] = rounded.unit;
        for (int64_t b = 0; b < dk / 32; ++b) {
            int8_t* to_block = out.codes + (b * rows + r) * kQueryBytes;
            for (int i = 0; i < 2; ++i) {
                const __m512i level = rounded.levels(q + r * ldq + 32 * b + 16 * i);
                store_bytes(upper_bytes(level), to_block + 16 * i);
                store_bytes(level, to_block + 32 + 16 * i);
            }
        }
    }
    // Behind all stores: a load that meets several of them waits.
    for (int64_t i = 0; i < rows * dk / 32; ++i) {
        const __m512i bytes = _mm512_loadu_si512(out.codes + i * kQueryBytes);
        const __m512i fours = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), bytes);
        out.starts[2 * i] = start_of<Codes>(sum_of_eight(_mm512_castsi512_si256(fours)));
        out.starts[2 * i + 1] = start_of<Codes>(sum_of_eight(_mm512_extracti64x4_epi64(fours, 1)));
    }
    return out;
}

// outputs

// Four cells. upper, lower: [R][half of the block]; weights: [R][upper, lower][kCodeCells].
template <class Codes, int R>
IKPY_CODES void add_four(const uint8_t* const* cells, const int8_t* weights, __m512i* upper, __m512i* lower) {
    __m512i x[2];
    Codes::template four<false>(cells, x);
#pragma GCC unroll 8
    for (int i = 0; i < 2 * R; ++i) {
        add_products(upper[i], x[i % 2], weights + i / 2 * 2 * kCodeCells);
        add_products(lower[i], x[i % 2], weights + (i / 2 * 2 + 1) * kCodeCells);
    }
}

// One block of n cells and R rows. weights: [R][upper, lower][kCodeCells].
template <class Codes, int R>
IKPY_BYTE_PERMUTES void outputs_of_block(const uint8_t* v, int64_t stride, int64_t n, const int8_t* weights,
                                         const int32_t* starts, const float* factors, float largest,
                                         const float* alpha, float* o, int64_t ldo, PrefetchLines& ahead) {
    PrefetchLines next = ahead;
    __m512i upper[2 * R], lower[2 * R];
#pragma GCC unroll 8
    for (int i = 0; i < 2 * R; ++i) {
        upper[i] = _mm512_setzero_si512();
        lower[i] = _mm512_set1_epi32(starts[i / 2]);
    }
    int64_t c = 0;
    for (; c + 16 <= n; c += 16) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i, v += 4 * stride) {
            for (int m = lines_of(16 * Codes::kBytes); m > i; m -= 4) next.one();
            const uint8_t* cells[4] = {v, v + stride, v + 2 * stride, v + 3 * stride};
            add_four<Codes, R>(cells, weights + c + 4 * i, upper, lower);
        }
    }
    for (; c < n; c += 4, v += 4 * stride) {
        const uint8_t* cells[4];
        for (int m = 0; m < 4; ++m) cells[m] = v + std::min<int64_t>(m, n - 1 - c) * stride;
        add_four<Codes, R>(cells, weights + c, upper, lower);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 2 * R; ++i)
        add_scaled(_mm512_cvtepi32_ps(joined(upper[i], lower[i])), factors[i / 2] * largest, alpha[i / 2],
                   o + i / 2 * ldo + i % 2 * 16);
    ahead = next;
}

// The weights of all blocks before the first product: each takes a chain of some 100 cycles, which is too
// long for the products of the block before to hide.
template <class Codes>
IKPY_BYTE_PERMUTES void prepare_weights(const float* p, int64_t ldp, int64_t rows, int64_t n,
                                        int64_t n_scales, const Work& w) {
    relative_weights(p, ldp, rows, n, w.relative, w.factors);
    for (int64_t b = 0; b < n_scales; ++b)
        w.largest[b] = Codes::kRowScale ? scale_words(w.scales, n, w.words)
                                        : scale_words(w.halves + b * kCodeCells, n, w.words + b * kCodeCells);
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
    const int64_t n_blocks = dv / 32;
    const Work w = work_at(work, rows, dv);
    copy_scales<Codes>(v, stride, n, n_blocks, w.halves, w.scales);
    prepare_weights<Codes>(p, ldp, rows, n, Codes::kRowScale ? 1 : n_blocks, w);
    for (int64_t b = 0; b < n_blocks; ++b) {
        const int64_t scale = Codes::kRowScale ? 0 : b;
        for (int64_t r = 0; r < rows; r += kOutputRowsAtOnce)
            kernels[std::min<int64_t>(kOutputRowsAtOnce, rows - r) - 1](
                v + Codes::kHeader + b * Codes::kBytes, stride, n,
                w.weights + (scale * rows + r) * 2 * kCodeCells, w.starts + scale * rows + r, w.factors + r,
                w.largest[scale], alpha + r, o + r * ldo + 32 * b, ldo, next);
    }
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
