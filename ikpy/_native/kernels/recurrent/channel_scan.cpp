// Selective scan of Mamba: shares channels among threads; tokens of a sequence come one after the other.
#include "kernels/recurrent/channel_scan.hpp"

#include <algorithm>

#include "kernels/item_ranges.hpp"
#include "kernels/recurrent/scan_sources.hpp"
#include "kernels/simd/simd_f32.hpp"
#include "kernels/token_runs.hpp"

namespace ikpy {
namespace {

constexpr int kVectors = 4;  // that go through the rows of a state together
constexpr int64_t kWidth = kVectors * simd::kLanes;

// kWidth channels of a state, and their rates, skips, inputs and results. Where a layer has fewer, these are
// copies in a tile, padded with zeros.
struct Block {
    float* state;
    const float *rates, *skips;
    int64_t state_stride, rates_stride;
};

// One token: S <- exp(dt A) S + dt B x, y = C S + D x of every channel.
void token(const Block& block, const float* b, const float* c, int64_t n_rows, const float* x,
           const float* dt, float* y) {
    simd::V steps[kVectors], inputs[kVectors], sums[kVectors];
    for (int j = 0; j < kVectors; ++j) {
        const simd::V step = simd::load(dt + j * simd::kLanes), in = simd::load(x + j * simd::kLanes);
        steps[j] = simd::mul(step, simd::set1(simd::kLog2e));
        inputs[j] = simd::mul(step, in);
        sums[j] = simd::mul(simd::load(block.skips + j * simd::kLanes), in);
    }
    for (int64_t r = 0; r < n_rows; ++r) {
        float* const state = block.state + r * block.state_stride;
        const float* const rates = block.rates + r * block.rates_stride;
        const simd::V row_b = simd::set1(b[r]), row_c = simd::set1(c[r]);
        for (int j = 0; j < kVectors; ++j) {
            const simd::V decay = simd::exp2(simd::mul(steps[j], simd::load(rates + j * simd::kLanes)));
            const simd::V kept = simd::mul(decay, simd::load(state + j * simd::kLanes));
            const simd::V next = simd::fma(row_b, inputs[j], kept);
            simd::store(state + j * simd::kLanes, next);
            sums[j] = simd::fma(row_c, next, sums[j]);
        }
    }
    for (int j = 0; j < kVectors; ++j) simd::store(y + j * simd::kLanes, sums[j]);
}

void copy_rows(const float* from, int64_t from_stride, int64_t n, int64_t n_rows, float* to,
               int64_t to_stride) {
    for (int64_t r = 0; r < n_rows; ++r) std::copy_n(from + r * from_stride, n, to + r * to_stride);
}

// Channels from `first` on of all tokens of a slot, in their place.
void run_whole(const ScanSources& s, const TokenRuns& runs, int32_t slot, int64_t first) {
    const int64_t n_rows = s.rows(), stride = s.state.nb[1] / int64_t(sizeof(float));
    const Block block{row<float>(s.state, 0, 0, slot) + first, row<const float>(s.a, 0) + first,
                      row<const float>(s.d, 0) + first, stride, s.a.nb[1] / int64_t(sizeof(float))};
    for (int32_t t = runs.first(slot); t >= 0; t = runs.next(t)) {
        token(block, row<const float>(s.b, 0, t), row<const float>(s.c, 0, t), n_rows,
              row<const float>(s.x, 0, t) + first, row<const float>(s.dt, t) + first,
              row<float>(s.dst, 0, t) + first);
        const int32_t to = s.kept.behind(t);
        if (to >= 0)
            copy_rows(block.state, stride, kWidth, n_rows, row<float>(*s.kept.states, 0, 0, to) + first,
                      s.kept.states->nb[1] / int64_t(sizeof(float)));
    }
}

// The last n channels of a layer, fewer than kWidth, by way of a tile for states and rates.
void run_rest(const ScanSources& s, const TokenRuns& runs, int32_t slot, int64_t first, int64_t n,
              float* tile) {
    const int64_t n_rows = s.rows(), stride = s.state.nb[1] / int64_t(sizeof(float));
    float *const states = tile, *const rates = tile + n_rows * kWidth,
                 *const own = row<float>(s.state, 0, 0, slot);
    std::fill_n(tile, 2 * n_rows * kWidth, 0.0f);
    copy_rows(own + first, stride, n, n_rows, states, kWidth);
    copy_rows(row<const float>(s.a, 0) + first, s.a.nb[1] / int64_t(sizeof(float)), n, n_rows, rates, kWidth);
    float skips[kWidth] = {}, x[kWidth] = {}, dt[kWidth] = {}, y[kWidth];
    std::copy_n(row<const float>(s.d, 0) + first, n, skips);
    for (int32_t t = runs.first(slot); t >= 0; t = runs.next(t)) {
        std::copy_n(row<const float>(s.x, 0, t) + first, n, x);
        std::copy_n(row<const float>(s.dt, t) + first, n, dt);
        token({states, rates, skips, kWidth, kWidth}, row<const float>(s.b, 0, t),
              row<const float>(s.c, 0, t), n_rows, x, dt, y);
        std::copy_n(y, n, row<float>(s.dst, 0, t) + first);
        const int32_t to = s.kept.behind(t);
        if (to >= 0)
            copy_rows(states, kWidth, n, n_rows, row<float>(*s.kept.states, 0, 0, to) + first,
                      s.kept.states->nb[1] / int64_t(sizeof(float)));
    }
    copy_rows(states, kWidth, n, n_rows, own + first, stride);
}

size_t tile_nbytes(const Tensor& b) { return 2 * b.ne[0] * kWidth * sizeof(float); }

}  // namespace

size_t channel_scan_scratch_bytes(const Op& op, const Tensor* ts) {
    return tile_nbytes(ts[op.src[3]]) + TokenRuns::nbytes(ts[op.src[6]].ne[3], ts[op.src[7]].ne[0]);
}

// src: x [P, 1, T], dt [P, T], A [P, N], B, C [N, 1, T], D [P], states [P, N, 1, slots], and what follows
// them as in ssm_scan.cpp. Every token comes for itself, so results depend on neither threads nor batches.
void channel_scan(const ThreadContext& ctx, const Op& op, const Tensor* ts) {
    const ScanSources s(op, ts);
    const Tensor& slots = ts[op.src[7]];
    const size_t tile = tile_nbytes(s.b);
    const TokenRuns runs(row<const int32_t>(slots, 0), s.state.ne[3], slots.ne[0], ctx.scratch + tile);
    if (!runs.size()) return;
    const int64_t n_blocks = (s.size() + kWidth - 1) / kWidth;
    ItemRanges ranges(ctx, runs.size() * n_blocks);
    for (int64_t item; (item = ranges.next()) >= 0;) {
        const int64_t first = item % n_blocks * kWidth, n = std::min(kWidth, s.size() - first);
        const int32_t slot = runs.slot(item / n_blocks);
        if (n == kWidth) {
            run_whole(s, runs, slot, first);
        } else {
            run_rest(s, runs, slot, first, n, reinterpret_cast<float*>(ctx.scratch));
        }
    }
}

}  // namespace ikpy
