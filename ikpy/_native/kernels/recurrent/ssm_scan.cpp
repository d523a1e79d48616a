// The op of the selective scan of Mamba-2: shares heads among threads, prepares chunks of tokens.
#include "kernels/recurrent/ssm_scan.hpp"

#include <algorithm>
#include <cmath>

#include "ikpy/ops.hpp"
#include "ikpy/vecmath.hpp"
#include "kernels/item_ranges.hpp"
#include "kernels/recurrent/channel_scan.hpp"
#include "kernels/recurrent/scan_sources.hpp"
#include "kernels/recurrent/state_copies.hpp"
#include "kernels/token_runs.hpp"

namespace ikpy {
namespace {

using ssm::Chunk;
using ssm::Columns;
using ssm::kChunk;
using ssm::kMostColumns;

// So many tokens of a head come one after the other before the next head, with which they share products.
constexpr int64_t kSpan = 128;
// So many tokens of a sequence, a draft for example, give the bits of one after the other: they are chunks of
// their own.
constexpr int64_t kAlike = 16;

float dot(const float* a, const float* b, int64_t n) {
    simd::V sum = simd::zero();
    int64_t i = 0;
    for (; i + simd::kLanes <= n; i += simd::kLanes)
        sum = simd::fma(simd::load(a + i), simd::load(b + i), sum);
    float total = simd::sum(sum);
    for (; i < n; ++i) total += a[i] * b[i];
    return total;
}

// Tokens of a slot, and the products of their C and B within each chunk.
struct Span {
    int64_t n = 0;
    int32_t tokens[kSpan];
    int64_t n_chunks = 0;
    int64_t starts[kSpan + 1];
    float products[kSpan][kChunk];  // C of a token times B of token j of its chunk, j up to itself

    // From token t on, which moves behind it. A token behind which the state is kept is the last of its
    // chunk.
    void take(const TokenRuns& runs, const KeptStates& kept, int64_t longest, int32_t& t) {
        n = n_chunks = 0;
        int64_t size = 0;
        for (; t >= 0 && n < kSpan; t = runs.next(t)) {
            if (size == 0) starts[n_chunks++] = n;
            tokens[n++] = t;
            size = size + 1 == longest || kept.behind(t) >= 0 ? 0 : size + 1;
        }
        starts[n_chunks] = n;
    }

    void multiply(const ScanSources& s, int64_t group) {
        for (int64_t i = 0; i < n_chunks; ++i)
            for (int64_t k = starts[i]; k < starts[i + 1]; ++k)
                for (int64_t j = starts[i]; j <= k; ++j)
                    products[k][j - starts[i]] = dot(row<const float>(s.c, group, tokens[k]),
                                                     row<const float>(s.b, group, tokens[j]), s.rows());
    }
};

// Factors of the tokens of chunk i of a span in a head.
void prepare(const ScanSources& s, const Span& span, int64_t i, int64_t group, int64_t head, Chunk& chunk) {
    const int64_t start = span.starts[i];
    chunk.n = span.starts[i + 1] - start;
    const float rate = *row<const float>(s.a, head), skip = *row<const float>(s.d, head);
    double since[kChunk] = {}, sum = 0;  // logarithms of the decay since the start; later ones cancel them
    float dts[kChunk];
    for (int64_t k = 0; k < chunk.n; ++k) {
        const int32_t t = span.tokens[start + k];
        chunk.b[k] = row<const float>(s.b, group, t);
        chunk.c[k] = row<const float>(s.c, group, t);
        chunk.x[k] = row<const float>(s.x, head, t);
        chunk.y[k] = row<float>(s.dst, head, t);
        dts[k] = row<const float>(s.dt, t)[head];
        since[k] = sum += double(rate) * dts[k];
        chunk.decays[k] = exp_fast(float(sum));
    }
    chunk.decay = chunk.decays[chunk.n - 1];
    for (int64_t k = 0; k < chunk.n; ++k) {
        float factors[kChunk];
        for (int64_t j = 0; j < kChunk; ++j) factors[j] = simd::kLog2e * float(since[k] - since[j]);
        for (int64_t j = 0; j <= k; j += simd::kLanes)
            simd::store(factors + j, simd::exp2(simd::load(factors + j)));
        const bool is_last = k == chunk.n - 1;
        for (int64_t j = 0; j <= k; ++j) {
            const float step = factors[j] * dts[j];
            chunk.weights[k][j] = span.products[start + k][j] * step;
            if (is_last) chunk.steps[j] = step;
        }
        chunk.weights[k][k] += skip;
    }
}

// The only token of a chunk.
void prepare_one(const ScanSources& s, int32_t t, int64_t group, int64_t head, Chunk& chunk) {
    const float dt = row<const float>(s.dt, t)[head];
    chunk.n = 1;
    chunk.b[0] = row<const float>(s.b, group, t);
    chunk.c[0] = row<const float>(s.c, group, t);
    chunk.x[0] = row<const float>(s.x, head, t);
    chunk.y[0] = row<float>(s.dst, head, t);
    chunk.steps[0] = dt;
    chunk.decay = exp_fast(*row<const float>(s.a, head) * dt);
}

void keep(const ScanSources& s, int64_t head, int32_t slot, int32_t to) {
    for (int64_t r = 0; r < s.rows(); ++r)
        copy_away(row<float>(s.state, r, head, slot), s.size(), row<float>(*s.kept.states, r, head, to));
    finish_copies();
}

template <int Vectors>
void run_columns(const Chunk& chunk, float skip, const Columns& columns) {
    if (chunk.n == 1) {
        ssm::token<Vectors>(chunk, skip, columns);
    } else {
        ssm::chunk_on_columns<Vectors>(chunk, columns);
    }
}

// A chunk on all columns of a head. Columns that fill no whole vectors go through a padded tile.
void run_chunk(const ScanSources& s, const Chunk& chunk, int64_t head, int32_t slot, float* tile) {
    const float skip = *row<const float>(s.d, head);
    for (int64_t first = 0; first < s.size(); first += kMostColumns) {
        float* const state = row<float>(s.state, 0, head, slot) + first;
        const int64_t stride = s.state.nb[1] / int64_t(sizeof(float));
        const int64_t n = std::min(kMostColumns, s.size() - first);
        const int64_t n_vectors = (n + simd::kLanes - 1) / simd::kLanes, width = n_vectors * simd::kLanes;
        const bool whole = n == width;
        if (!whole)
            for (int64_t r = 0; r < s.rows(); ++r) {
                std::fill_n(tile + r * width, width, 0.0f);
                std::copy_n(state + r * stride, n, tile + r * width);
            }
        const Columns columns{whole ? state : tile, whole ? stride : width, s.rows(), first, n};
        switch (n_vectors) {
            case 1:
                run_columns<1>(chunk, skip, columns);
                break;
            case 2:
                run_columns<2>(chunk, skip, columns);
                break;
            case 3:
                run_columns<3>(chunk, skip, columns);
                break;
            default:
                run_columns<ssm::kMostVectors>(chunk, skip, columns);
        }
        if (!whole)
            for (int64_t r = 0; r < s.rows(); ++r) std::copy_n(tile + r * width, n, state + r * stride);
    }
}

// Heads [begin, end) of a group for all tokens of a slot.
void run_heads(const ScanSources& s, const TokenRuns& runs, int32_t slot, int64_t group, int64_t begin,
               int64_t end, float* tile) {
    const bool few = runs.has_at_most(slot, kAlike);
    Span span;
    Chunk chunk;
    for (int32_t t = runs.first(slot); t >= 0;) {
        span.take(runs, s.kept, few ? 1 : kChunk, t);
        if (!few) span.multiply(s, group);
        for (int64_t head = begin; head < end; ++head)
            for (int64_t i = 0; i < span.n_chunks; ++i) {
                const int64_t last = span.starts[i + 1] - 1;
                if (last == span.starts[i]) {
                    prepare_one(s, span.tokens[last], group, head, chunk);
                } else {
                    prepare(s, span, i, group, head, chunk);
                }
                run_chunk(s, chunk, head, slot, tile);
                const int32_t to = s.kept.behind(span.tokens[last]);
                if (to >= 0) keep(s, head, slot, to);
            }
    }
}

size_t tile_nbytes(const Tensor& b) { return b.ne[0] * kMostColumns * sizeof(float); }

}  // namespace

size_t ssm_scan_scratch_bytes(const Op& op, const Tensor* ts) {
    if (op.ip[0]) return channel_scan_scratch_bytes(op, ts);
    return tile_nbytes(ts[op.src[3]]) + TokenRuns::nbytes(ts[op.src[6]].ne[3], ts[op.src[7]].ne[0]);
}

// src: x [P, H, T], dt [H, T], A [1, H], B, C [N, G, T], D [1, H], states [P, N, H, slots], slots [T], and
// perhaps kept states and their slots [T]. Of every token of a slot S <- exp(dt A) S + B (dt x)^T and
// y = S^T C + D x; head h reads group h / (H / G). Heads do not depend on each other, so results do not
// depend on the threads. ip: whether rates belong to channels (channel_scan.cpp).
void op_ssm_scan(const ThreadContext& ctx, const Op& op, const Tensor* ts, const Runtime&) {
    if (op.ip[0]) return channel_scan(ctx, op, ts);
    const ScanSources s(op, ts);
    const Tensor& slots = ts[op.src[7]];
    const size_t tile = tile_nbytes(s.b);
    const TokenRuns runs(row<const int32_t>(slots, 0), s.state.ne[3], slots.ne[0], ctx.scratch + tile);
    if (!runs.size()) return;
    const int64_t n_groups = s.groups(), per_group = s.heads() / n_groups, n_sets = runs.size() * n_groups;
    // Each part multiplies B and C for itself, so no more of them than give all threads nearly the same.
    const int64_t wanted = ctx.nth == 1 ? 1 : 4 * ctx.nth;
    const int64_t n_parts = std::min(per_group, (wanted + n_sets - 1) / n_sets);
    ItemRanges ranges(ctx, n_sets * n_parts);
    for (int64_t item; (item = ranges.next()) >= 0;) {
        const int64_t part = item % n_parts, group = item / n_parts % n_groups;
        const int64_t first = group * per_group;
        run_heads(s, runs, runs.slot(item / n_parts / n_groups), group, first + per_group * part / n_parts,
                  first + per_group * (part + 1) / n_parts, reinterpret_cast<float*>(ctx.scratch));
    }
}

}  // namespace ikpy
