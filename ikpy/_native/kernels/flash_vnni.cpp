// Products of codes on vectors (VNNI): up to 4 rows per K head, up to 8 where there is no tile unit. Measured
// with caches in memory: 1.3 to 1.7 times the rate of products of floats; with 4 rows 1.15 to 1.4 times that
// of tiles, which wait for the stores of their operands.
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

constexpr int kRowsAtOnce = 4;
constexpr int64_t kQueryBytes = 64;  // of a block of a row: 32 upper, 32 lower bytes

int64_t quads(int64_t rows) { return (rows + kRowsAtOnce - 1) / kRowsAtOnce; }

struct Work {
    uint16_t* halves;  // [2][kCodeCells]: scales of a block
    float* scales;     // [kCodeCells]
    uint8_t* cells;    // 16 rows: cells at the end, filled up
    int8_t* weights;   // [rows][upper, lower][kCodeCells]
    float* relative;   // [rows][kCodeCells]
    float* factors;    // [rows]
    int32_t* starts;   // [rows]
};

Work work_at(uint8_t*& at, int64_t rows, int64_t d) {
    Work w;
    w.halves = take<uint16_t>(at, 2 * kCodeCells);
    w.scales = take<float>(at, kCodeCells);
    w.cells = take<uint8_t>(at, 16 * (2 * d + 64));
    w.weights = take<int8_t>(at, rows * 2 * kCodeCells);
    w.relative = take<float>(at, rows * kCodeCells);
    w.factors = take<float>(at, rows);
    w.starts = take<int32_t>(at, rows);
    return w;
}

size_t work_bytes(int64_t rows, int64_t d) {
    uint8_t* end = nullptr;
    work_at(end, rows, (d + 31) / 32 * 32);
    return reinterpret_cast<uintptr_t>(end);
}

// The scales of the blocks of 16 cells.
inline void copy_scales(const uint8_t* blocks, int64_t stride, uint16_t* halves) {
#pragma GCC unroll 16
    for (int c = 0; c < 16; ++c) halves[c] = load_unaligned<uint16_t>(blocks + c * stride);
}
inline void copy_row_scales(const uint8_t* rows, int64_t stride, int64_t n, float* scales) {
    for (int64_t c = 0; c < n; ++c) scales[c] = load_unaligned<float>(rows + c * stride);
}

// Adds the products of unsigned codes with four signed bytes.
inline void add_products(__m512i& sums, __m512i codes, const int8_t* four) {
    const __m512i bytes = _mm512_set1_epi32(load_unaligned<int32_t>(reinterpret_cast<const uint8_t*>(four)));
    sums = _mm512_dpbusd_epi32(sums, codes, bytes);
}
// Minus the offset times the sum of the levels; wraps around for undefined ones.
template <class Codes>
int32_t start_of(int32_t levels) {
    return int32_t(0u - uint32_t(Codes::kOffset) * uint32_t(levels));
}
inline __m512i joined(__m512i upper, __m512i lower) {
    return _mm512_add_epi32(_mm512_slli_epi32(upper, 8), lower);
}

// ---- scores ----

// 16 cells and R rows. query: [blocks][rows of the head][kQueryBytes]; starts: [blocks][rows][upper, lower].
template <class Codes, int R>
IKPY_BYTE_PERMUTES void scores_of_sixteen(const CodeQuery& q, int64_t r0, const uint8_t* k, int64_t stride,
                                          int64_t n_blocks, const Work& w, float* s, int64_t lds,
                                          PrefetchLines& ahead) {
    constexpr bool kRowScale = Codes::kRowScale;
    __m512i upper[R], lower[R];
    __m512 sums[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        upper[r] = lower[r] = _mm512_setzero_si512();
        sums[r] = _mm512_setzero_ps();
    }
    PrefetchLines next = ahead;
    constexpr int kLines = lines_of(16 * Codes::kBytes);
    if constexpr (kRowScale)
        copy_row_scales(k, stride, 16, w.scales);
    else
        copy_scales(k, stride, w.halves);
    const int8_t* query = q.codes + r0 * kQueryBytes;
    const int32_t* starts = q.starts + 2 * r0;
    k += Codes::kHeader;
    for (int64_t b = 0; b < n_blocks; ++b, k += Codes::kBytes) {
        // The scales of the next block: a load that meets several stores waits until all have been done.
        const int64_t following = b + 1 < n_blocks ? Codes::kBytes : 0;
        if constexpr (!kRowScale) copy_scales(k + following, stride, w.halves + (b + 1) % 2 * 16);
        __m512i x[8];
        Codes::sixteen(k, stride, x);
#pragma GCC unroll 4
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
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                add_products(upper[r], x[g], query + r * kQueryBytes + 4 * g);
                add_products(lower[r], x[g], query + r * kQueryBytes + 32 + 4 * g);
            }
        }
        query += q.rows * kQueryBytes;
        starts += 2 * q.rows;
        if constexpr (!kRowScale) {
            const __m512 scale =
                _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(w.halves + b % 2 * 16)));
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r)
                sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(joined(upper[r], lower[r])), scale, sums[r]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        if constexpr (kRowScale)
            sums[r] = _mm512_mul_ps(_mm512_loadu_ps(w.scales),
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
        scores_of_sixteen<Codes, 4>};
    const int64_t n_blocks = dk / 32, row_bytes = Codes::kHeader + n_blocks * Codes::kBytes;
    const Work w = work_at(work, q.rows, dk);
    for (int64_t c = 0; c < n; c += 16, k += 16 * stride) {
        const uint8_t* cells = k;
        int64_t apart = stride;
        if (n - c < 16) {
            for (int64_t i = 0; i < n - c; ++i)
                std::memcpy(w.cells + i * row_bytes, k + i * stride, size_t(row_bytes));
            cells = w.cells;
            apart = row_bytes;
        }
        for (int64_t r = 0; r < q.rows; r += kRowsAtOnce)
            kernels[std::min<int64_t>(kRowsAtOnce, q.rows - r) - 1](q, r, cells, apart, n_blocks, w, s + c,
                                                                    lds, next);
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
            __m512i level[2], upper[2];
            for (int i = 0; i < 2; ++i) {
                level[i] = rounded.levels(q + r * ldq + 32 * b + 16 * i);
                upper[i] = upper_bytes(level[i]);
                store_bytes(upper[i], to_block + 16 * i);
                store_bytes(level[i], to_block + 32 + 16 * i);
            }
            const int32_t uppers = _mm512_reduce_add_epi32(_mm512_add_epi32(upper[0], upper[1]));
            const __m512i lower =
                _mm512_sub_epi32(_mm512_add_epi32(level[0], level[1]),
                                 _mm512_slli_epi32(_mm512_add_epi32(upper[0], upper[1]), 8));
            const int32_t lowers = _mm512_reduce_add_epi32(lower);
            int32_t* start = out.starts + 2 * (b * rows + r);
            start[0] = start_of<Codes>(uppers);
            start[1] = start_of<Codes>(lowers);
        }
    }
    return out;
}

// ---- outputs ----

template <int R>
struct OutputSums {
    __m512i upper[R][2], lower[R][2];

    // Four cells. weights: their bytes, [R][upper, lower][kCodeCells].
    template <class Codes>
    IKPY_CODES void add(const uint8_t* const* cells, const int8_t* weights) {
        __m512i x[2];
        Codes::template four<false>(cells, x);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
            for (int h = 0; h < 2; ++h) {
                add_products(upper[r][h], x[h], weights + r * 2 * kCodeCells);
                add_products(lower[r][h], x[h], weights + r * 2 * kCodeCells + kCodeCells);
            }
        }
    }
};

// One block of n cells and R rows. The scales of the block `following` bytes further on are copied to halves.
template <class Codes, int R>
IKPY_BYTE_PERMUTES void outputs_of_block(const uint8_t* v, int64_t stride, int64_t n, const int8_t* weights,
                                         const int32_t* starts, const float* factors, float largest,
                                         const float* alpha, float* o, int64_t ldo, int64_t following,
                                         uint16_t* halves, PrefetchLines& ahead) {
    PrefetchLines next = ahead;
    OutputSums<R> sums;
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        sums.upper[r][0] = sums.upper[r][1] = _mm512_setzero_si512();
        sums.lower[r][0] = sums.lower[r][1] = _mm512_set1_epi32(starts[r]);
    }
    int64_t c = 0;
    for (; c + 16 <= n; c += 16, halves += 16) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i, v += 4 * stride) {
            for (int m = lines_of(16 * Codes::kBytes); m > i; m -= 4) next.one();
            const uint8_t* cells[4] = {v, v + stride, v + 2 * stride, v + 3 * stride};
            if constexpr (!Codes::kRowScale)
                for (int m = 0; m < 4; ++m)
                    halves[4 * i + m] = load_unaligned<uint16_t>(cells[m] + following);
            sums.template add<Codes>(cells, weights + c / 4 + 16 * i);
        }
    }
    for (int64_t i = 0; c < n; c += 4, ++i, v += 4 * stride, halves += 4) {
        const uint8_t* cells[4];
        for (int m = 0; m < 4; ++m) {
            cells[m] = v + std::min<int64_t>(m, n - 1 - c) * stride;
            if constexpr (!Codes::kRowScale) halves[m] = load_unaligned<uint16_t>(cells[m] + following);
        }
        sums.template add<Codes>(cells, weights + (c - 4 * i) / 4 + 16 * i);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h)
            add_scaled(_mm512_cvtepi32_ps(joined(sums.upper[r][h], sums.lower[r][h])), factors[r] * largest,
                       alpha[r], o + r * ldo + 16 * h);
    ahead = next;
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
    if constexpr (Codes::kRowScale)
        copy_row_scales(v, stride, n, w.scales);
    else
        for (int64_t c = 0; c < n; ++c) w.halves[c] = load_unaligned<uint16_t>(v + c * stride);
    relative_weights(p, ldp, rows, n, w.relative, w.factors);
    float largest = 0.0f;
    for (int64_t b = 0; b < n_blocks; ++b) {
        const bool last = b + 1 == n_blocks;
        if (!Codes::kRowScale || b == 0) {
            if constexpr (!Codes::kRowScale)
                widen_scales(w.halves + b % 2 * kCodeCells, kCodeCells, w.scales);
            largest = normalize_scales(w.scales, n);
            for (int64_t r = 0; r < rows; ++r) {
                const __m512i sums =
                    round_weights(w.relative + r * kCodeCells, w.scales, w.weights + r * 2 * kCodeCells);
                w.starts[r] = start_of<Codes>(_mm512_reduce_add_epi32(sums));
            }
        }
        for (int64_t r = 0; r < rows; r += kRowsAtOnce)
            kernels[std::min<int64_t>(kRowsAtOnce, rows - r) - 1](
                v + Codes::kHeader + b * Codes::kBytes, stride, n, w.weights + r * 2 * kCodeCells,
                w.starts + r, w.factors + r, largest, alpha + r, o + r * ldo + 32 * b, ldo,
                last ? 0 : Codes::kBytes, w.halves + (b + 1) % 2 * kCodeCells, next);
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

#else

const CodeProducts* vector_code_products(int) { return nullptr; }

#endif

}  // namespace flash
}  // namespace ikpy
