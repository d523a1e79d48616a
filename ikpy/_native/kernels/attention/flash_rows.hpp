// Products of the row kernel: R query rows against n cells read in their stored format, vectors along the
// head.
#pragma once
#include "kernels/attention/flash_prefetch.hpp"
#include "kernels/cache/kv_blocks.hpp"
#include "kernels/simd/lane_sums.hpp"

namespace ikpy {
namespace flash {

// s[r * lds + c] = sum_d q[r * ldq + d] k[c][d]
using RowScores = void (*)(const float* q, int64_t ldq, const uint8_t* k, int64_t stride, int64_t dk,
                           int64_t n, float* s, int64_t lds, PrefetchLines next);
// o[r][d] = alpha[r] o[r][d] + sum_c p[r][c] v[c][d]
using RowOutputs = void (*)(const float* p, int64_t ldp, int64_t n, const uint8_t* v, int64_t stride,
                            int64_t dv, const float* alpha, float* o, int64_t ldo, PrefetchLines next);

struct RowProducts {
    RowScores scores;
    RowOutputs outputs;
    int64_t step;  // head sizes must be multiples of this
};

// Products straight from rows of the type, or null: expand to f32 first.
const RowProducts* row_products(int type, int64_t n_rows);

// Cells per step: R * C sums at once. Of rows 4 KiB apart (MHA of 16 heads of 128) more than 8 do not fit
// into one set of the first-level cache, next to the query.
constexpr int cells_at_once(int r) {
#if defined(__AVX512F__)
    return r == 1 ? 8 : r == 2 ? 8 : r <= 4 ? 4 : 2;
#else
    return r <= 2 ? 4 : r <= 4 ? 2 : 1;
#endif
}

template <class Row, int R, int C>
inline void scores_of_cells(const float* q, int64_t ldq, const uint8_t* k, int64_t stride, int64_t dk,
                            float* s, int64_t lds, PrefetchLines& next) {
    using namespace simd;
    constexpr int S = Row::kVectors;
    // Full unrolling keeps the sums in registers; g++ otherwise clears and reads them in memory.
    V acc[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) acc[i] = zero();
    for (int64_t d = 0; d < dk; d += S * kLanes) {
        if (d / (S * kLanes) % steps_per_line(C * Row::kBytes) == 0)
            for (int i = 0; i < lines_of(C * Row::kBytes); ++i) next.one();
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) {
            V x[S];
            Row::load(k + c * stride, d, x);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
                for (int i = 0; i < S; ++i) {
                    acc[r * C + c] = fma(load(q + r * ldq + d + i * kLanes), x[i], acc[r * C + c]);
                }
            }
        }
    }
#if defined(__AVX512F__)
    if (R * C > 2) {
        float sums[16];
        _mm512_storeu_ps(sums, sums16(acc));
        for (int r = 0; r < R; ++r) std::memcpy(s + r * lds, sums + r * C, C * sizeof(float));
        return;
    }
#endif
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) s[r * lds + c] = sum(acc[r * C + c]);
    }
}

template <class Row, int R>
void row_scores(const float* q, int64_t ldq, const uint8_t* k, int64_t stride, int64_t dk, int64_t n,
                float* s, int64_t lds, PrefetchLines next) {
    constexpr int C = cells_at_once(R);
    int64_t c = 0;
    for (; c + C <= n; c += C)
        scores_of_cells<Row, R, C>(q, ldq, k + c * stride, stride, dk, s + c, lds, next);
    for (; c < n; ++c) scores_of_cells<Row, R, 1>(q, ldq, k + c * stride, stride, dk, s + c, lds, next);
    next.advance(next.lines());
}

// D groups of Row::kVectors vectors of the head.
template <class Row, int R, int D>
inline void outputs_of_head(const float* p, int64_t ldp, int64_t n, const uint8_t* v, int64_t stride,
                            int64_t d, const float* alpha, float* o, int64_t ldo, PrefetchLines& next) {
    using namespace simd;
    constexpr int S = Row::kVectors;
    V acc[R][D * S];
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < D * S; ++i) acc[r][i] = mul(set1(alpha[r]), load(o + r * ldo + d + i * kLanes));
    for (int64_t c = 0; c < n; ++c) {
        if (c % steps_per_line(D * Row::kBytes) == 0)
            for (int i = 0; i < lines_of(D * Row::kBytes); ++i) next.one();
        V x[D * S];
        for (int i = 0; i < D; ++i) Row::load(v + c * stride, d + i * S * kLanes, x + i * S);
        for (int r = 0; r < R; ++r) {
            const V w = set1(p[r * ldp + c]);
            for (int i = 0; i < D * S; ++i) acc[r][i] = fma(w, x[i], acc[r][i]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < D * S; ++i) store(o + r * ldo + d + i * kLanes, acc[r][i]);
}

// What remains of a head behind D groups at a time, from d on: one group alone waits for its sums.
template <class Row, int R, int D>
[[gnu::noinline]] void outputs_of_rest(const float* p, int64_t ldp, int64_t n, const uint8_t* v,
                                       int64_t stride, int64_t d, int64_t dv, const float* alpha, float* o,
                                       int64_t ldo, PrefetchLines& next) {
    if constexpr (D > 1) {
        constexpr int64_t step = D / 2 * Row::kVectors * simd::kLanes;
        for (; d + step <= dv; d += step)
            outputs_of_head<Row, R, D / 2>(p, ldp, n, v, stride, d, alpha, o, ldo, next);
        if (d < dv) outputs_of_rest<Row, R, D / 2>(p, ldp, n, v, stride, d, dv, alpha, o, ldo, next);
    }
}

template <class Row, int R>
void row_outputs(const float* p, int64_t ldp, int64_t n, const uint8_t* v, int64_t stride, int64_t dv,
                 const float* alpha, float* o, int64_t ldo, PrefetchLines next) {
    constexpr int S = Row::kVectors;
#if defined(__AVX512F__)
    constexpr int kVectors = R == 1 ? 8 : R == 2 ? 8 : R <= 4 ? 4 : 2;
#else
    constexpr int kVectors = R == 1 ? 4 : R == 2 ? 4 : R <= 4 ? 2 : 1;
#endif
    constexpr int D = kVectors / S > 0 ? kVectors / S : 1;
    const int64_t step = S * simd::kLanes;
    int64_t d = 0;
    for (; d + D * step <= dv; d += D * step) {
        outputs_of_head<Row, R, D>(p, ldp, n, v, stride, d, alpha, o, ldo, next);
    }
    if (d < dv) outputs_of_rest<Row, R, D>(p, ldp, n, v, stride, d, dv, alpha, o, ldo, next);
    next.advance(next.lines());
}

}  // namespace flash
}  // namespace ikpy
