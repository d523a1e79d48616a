// Products of the row kernel over f32 cells: R rows against n cells, vectors along the head dimension.
#pragma once
#include "kernels/simd_f32.hpp"

namespace ikpy {
namespace flash {

// s[r * lds + c] = sum_d q[r][d] k[c][d]; dk is a multiple of kLanes (operands padded with zeros).
template <int R>
void row_scores(const float* q, int64_t ldq, const float* k, int64_t ldk, int64_t dk, int64_t n, float* s,
                int64_t lds) {
    using namespace simd;
    for (int64_t c = 0; c < n; ++c) {
        V acc[R];
        for (int r = 0; r < R; ++r) acc[r] = zero();
        for (int64_t d = 0; d < dk; d += kLanes) {
            const V x = load(k + c * ldk + d);
            for (int r = 0; r < R; ++r) acc[r] = fma(load(q + r * ldq + d), x, acc[r]);
        }
        for (int r = 0; r < R; ++r) s[r * lds + c] = sum(acc[r]);
    }
}

// o[r][d] = alpha[r] o[r][d] + sum_c p[r][c] v[c][d]; dv is a multiple of kLanes.
template <int R>
void row_outputs(const float* p, int64_t ldp, int64_t n, const float* v, int64_t ldv, int64_t dv,
                 const float* alpha, float* o, int64_t ldo) {
    using namespace simd;
    constexpr int D = R == 1 ? 8 : R == 2 ? 6 : R <= 4 ? 4 : 2;
    int64_t d = 0;
    for (; d + D * kLanes <= dv; d += D * kLanes) {
        V acc[R][D];
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < D; ++i) acc[r][i] = mul(set1(alpha[r]), load(o + r * ldo + d + i * kLanes));
        for (int64_t c = 0; c < n; ++c) {
            V x[D];
            for (int i = 0; i < D; ++i) x[i] = load(v + c * ldv + d + i * kLanes);
            for (int r = 0; r < R; ++r) {
                const V w = set1(p[r * ldp + c]);
                for (int i = 0; i < D; ++i) acc[r][i] = fma(w, x[i], acc[r][i]);
            }
        }
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < D; ++i) store(o + r * ldo + d + i * kLanes, acc[r][i]);
    }
    for (; d < dv; d += kLanes) {
        V acc[R];
        for (int r = 0; r < R; ++r) acc[r] = mul(set1(alpha[r]), load(o + r * ldo + d));
        for (int64_t c = 0; c < n; ++c) {
            const V x = load(v + c * ldv + d);
            for (int r = 0; r < R; ++r) acc[r] = fma(set1(p[r * ldp + c]), x, acc[r]);
        }
        for (int r = 0; r < R; ++r) store(o + r * ldo + d, acc[r]);
    }
}

}  // namespace flash
}  // namespace ikpy
