// Both products of the tile kernel, of halves or of floats.
#include <algorithm>

#include "kernels/attention/flash_dots.hpp"
#include "kernels/attention/flash_gemm.hpp"
#include "kernels/attention/flash_tile.hpp"

namespace ikpy {
namespace row_tiles {
namespace {

using simd::kLanes;

template <typename Call>
void for_lane_groups(const Part& part, Call call) {
    using flash::kMaxVectors;
    for (int64_t m = part.m; m < part.m + part.lanes;) {
        const int64_t n = std::min<int64_t>(kMaxVectors, (part.m + part.lanes - m) / kLanes);
        call(m, int(n));
        m += n * kLanes;
    }
}

void multiply(TileFactors factors, const flash::LeftTiles& a, const flash::RightTiles& b, int64_t n_lanes,
              int64_t depth, const flash::SumTiles& c, bool add, flash::Prefetch& next) {
    if (factors == TileFactors::kBf16) return flash::dot_product(a, b, n_lanes, depth, c, add, next);
    flash::tile_product(factors, a, b, n_lanes, depth, c, add, next);
}

// Scores of whole groups of 16 cells: the tile has room for them, nobody reads those beyond the part.
void score_tiles(const TileBuffers& b, int64_t dk, const Part& part, float* s, flash::Prefetch& next) {
    const int64_t ld = round_up(dk, kDepth);
    multiply(b.k_factors, {offset(b.k2, part.begin * ld), ld, round_up(part.end - part.begin, 16)},
             {offset(b.q2, part.m * ld), ld * 16}, part.lanes, ld,
             {s + part.begin * b.row + b.lane(part.m, b.s_rows), b.s_rows * 16}, false, next);
}

// The weights are in p2.
void output_tiles(const TileBuffers& b, int64_t dv, const Part& part, flash::Prefetch& next) {
    for (int64_t m = part.m; m < part.m + part.lanes; m += kLanes)
        flash::scale_lanes(b.o + b.lane(m, b.o_rows), dv, simd::load(b.alpha + m));
    multiply(b.v_factors, {offset(b.v2, part.begin), kTileCells, round_up(dv, 16)},
             {offset(b.p2, part.m * kTileCells), kTileCells * 16}, part.lanes,
             round_up(part.end - part.begin, kDepth), {b.o + b.lane(part.m, b.o_rows), b.o_rows * 16}, true,
             next);
}

}  // namespace

void scores(const TileBuffers& b, int64_t dk, const Part& part, float* s, flash::Prefetch& next) {
    if (b.k2.hi) return score_tiles(b, dk, part, s, next);
    const int64_t w = b.lanes, n = part.end - part.begin;
    const float* k = b.k + part.begin * b.ldk;
    s += part.begin * w;
    for_lane_groups(part, [&](int64_t m, int n_vectors) {
        const float* q = b.q + m;
        switch (n_vectors) {
            case 1:
                return flash::score_lanes<1>(q, w, k, b.ldk, dk, n, s + m, w, next);
            case 2:
                return flash::score_lanes<2>(q, w, k, b.ldk, dk, n, s + m, w, next);
#if defined(__AVX512F__)
            case 3:
                return flash::score_lanes<3>(q, w, k, b.ldk, dk, n, s + m, w, next);
            case 4:
                return flash::score_lanes<4>(q, w, k, b.ldk, dk, n, s + m, w, next);
#endif
        }
    });
}

void outputs(const TileBuffers& b, int64_t dv, const Part& part, const float* p, flash::Prefetch& next) {
    if (b.v2.hi) return output_tiles(b, dv, part, next);
    const int64_t w = b.lanes, n = part.end - part.begin;
    const float* v = b.v + part.begin * b.ldv;
    p += part.begin * w;
    for_lane_groups(part, [&](int64_t m, int n_vectors) {
        const float* alpha = b.alpha + m;
        float* o = b.o + m;
        switch (n_vectors) {
            case 1:
                return flash::output_lanes<1>(p + m, w, n, v, b.ldv, dv, alpha, o, w, next);
            case 2:
                return flash::output_lanes<2>(p + m, w, n, v, b.ldv, dv, alpha, o, w, next);
#if defined(__AVX512F__)
            case 3:
                return flash::output_lanes<3>(p + m, w, n, v, b.ldv, dv, alpha, o, w, next);
            case 4:
                return flash::output_lanes<4>(p + m, w, n, v, b.ldv, dv, alpha, o, w, next);
#endif
        }
    });
}

}  // namespace row_tiles

}  // namespace ikpy
