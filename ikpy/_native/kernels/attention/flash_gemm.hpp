// Register-blocked products of the tile kernel. Lanes (rows of the tile) run along the vectors:
//   scores  s[c][m] = sum_d k[c][d] q[d][m]        cells c, head dims d, lanes m
//   output  o[d][m] = alpha[m] o[d][m] + sum_c v[c][d] p[c][m]
#pragma once
#include "kernels/attention/flash_prefetch.hpp"
#include "kernels/simd/simd_f32.hpp"

namespace ikpy {
namespace flash {

// H rows of the result times N vectors of lanes; ldq etc. are floats between rows.
template <int H, int N>
inline void score_block(const float* q, int64_t ldq, const float* k, int64_t ldk, int64_t dk, float* s,
                        int64_t lds) {
    using namespace simd;
    V acc[H][N];
    for (int i = 0; i < H; ++i)
        for (int j = 0; j < N; ++j) acc[i][j] = zero();
    for (int64_t d = 0; d < dk; ++d) {
        V x[N];
        for (int j = 0; j < N; ++j) x[j] = load(q + d * ldq + j * kLanes);
        for (int i = 0; i < H; ++i) {
            const V y = set1(k[i * ldk + d]);
            for (int j = 0; j < N; ++j) acc[i][j] = fma(y, x[j], acc[i][j]);
        }
    }
    for (int i = 0; i < H; ++i)
        for (int j = 0; j < N; ++j) store(s + i * lds + j * kLanes, acc[i][j]);
}

template <int H, int N>
inline void output_block(const float* p, int64_t ldp, int64_t n_cells, const float* v, int64_t ldv,
                         const float* alpha, float* o, int64_t ldo) {
    using namespace simd;
    V acc[H][N];
    for (int j = 0; j < N; ++j) {
        const V f = load(alpha + j * kLanes);
        for (int i = 0; i < H; ++i) acc[i][j] = mul(f, load(o + i * ldo + j * kLanes));
    }
    for (int64_t c = 0; c < n_cells; ++c) {
        V x[N];
        for (int j = 0; j < N; ++j) x[j] = load(p + c * ldp + j * kLanes);
        for (int i = 0; i < H; ++i) {
            const V y = set1(v[c * ldv + i]);
            for (int j = 0; j < N; ++j) acc[i][j] = fma(y, x[j], acc[i][j]);
        }
    }
    for (int i = 0; i < H; ++i)
        for (int j = 0; j < N; ++j) store(o + i * ldo + j * kLanes, acc[i][j]);
}

// Block height for N vectors: 24 accumulators of 32 registers, 12 of 16.
#if defined(__AVX512F__)
constexpr int kMaxVectors = 4;
constexpr int block_height(int n) { return n == 4 ? 6 : n == 3 ? 8 : 12; }
#else
constexpr int kMaxVectors = 2;
constexpr int block_height(int) { return 6; }
#endif

// All products over the result rows rounded up to the block height: callers pad the operands.
template <int N>
void score_lanes(const float* q, int64_t ldq, const float* k, int64_t ldk, int64_t dk, int64_t n_cells,
                 float* s, int64_t lds, Prefetch& next) {
    constexpr int H = block_height(N);
    for (int64_t c = 0; c < n_cells; c += H) {
        next.advance(H);
        score_block<H, N>(q, ldq, k + c * ldk, ldk, dk, s + c * lds, lds);
    }
}

template <int N>
void output_lanes(const float* p, int64_t ldp, int64_t n_cells, const float* v, int64_t ldv, int64_t dv,
                  const float* alpha, float* o, int64_t ldo, Prefetch& next) {
    constexpr int H = block_height(N);
    const int64_t share = next.rows * H / dv + 1;
    for (int64_t d = 0; d < dv; d += H) {
        next.advance(share);
        output_block<H, N>(p, ldp, n_cells, v + d, ldv, alpha, o + d * ldo, ldo);
    }
}

}  // namespace flash
}  // namespace ikpy
