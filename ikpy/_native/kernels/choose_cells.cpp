// Sparse attention (DeepSeek-V3.2): which cells each token attends to, and the mask that hides the others.
#include <algorithm>
#include <limits>

#include "ikpy/ops.hpp"
#include "kernels/index_scores.hpp"

namespace ikpy {
namespace {

constexpr int32_t kAll = -1;                 // in place of a number of cells: all visible ones
constexpr uint16_t kMinusInfinity = 0xfc00;  // f16
constexpr int64_t kRoundTokens = 16;         // whose scores are kept at once, at least

struct Problem {
    const Tensor &q, &weights, &keys, &mask, &ranges, &chosen;
    int64_t n, heads, n_tokens, n_kv, top_k;

    Problem(const Op& op, const Tensor* ts)
        : q(ts[op.src[0]]),
          weights(ts[op.src[1]]),
          keys(ts[op.src[2]]),
          mask(ts[op.src[3]]),
          ranges(ts[op.src[4]]),
          chosen(ts[op.dst]),
          n(q.ne[0]),
          heads(q.ne[1]),
          n_tokens(q.ne[2]),
          n_kv(keys.ne[2]),
          top_k(chosen.ne[0] - 1) {}

    int32_t& count(int64_t token) const { return *row<int32_t>(chosen, token); }
    int64_t first(int64_t token) const { return row<int32_t>(ranges, token)[0]; }
    int64_t last(int64_t token) const { return std::min<int64_t>(row<int32_t>(ranges, token)[1], n_kv); }
    int64_t blocks() const { return (n_kv + indexer::kCells - 1) / indexer::kCells; }
    int64_t round_tokens(int n_threads) const {
        return std::min(n_tokens, std::max<int64_t>(kRoundTokens, n_threads));
    }
};

int64_t visible_cells(const uint16_t* mask, int64_t first, int64_t last) {
    int64_t n = 0;
    for (int64_t c = first; c < last; ++c) n += mask[c] == 0;
    return n;
}

// Sets the number of cells of every token of this thread: top_k where it sees more.
void count_cells(const ThreadContext& ctx, const Problem& p) {
    int64_t begin, end;
    split_range(p.n_tokens, ctx.ith, ctx.nth, 1, &begin, &end);
    for (int64_t t = begin; t < end; ++t) {
        const int64_t first = p.first(t), last = p.last(t);
        const bool more = p.n_kv > p.top_k && last - first > p.top_k &&
                          visible_cells(row<uint16_t>(p.mask, t), first, last) > p.top_k;
        p.count(t) = more ? int32_t(p.top_k) : kAll;
    }
}

// A round of tokens. Scores lie in the work memory of all threads: those of cell c at [token][c].
struct Round {
    const Problem& p;
    int64_t t0, t1;
    float* scores;

    float* of(int64_t token) const { return scores + (token - t0) * p.blocks() * indexer::kCells; }
    void score_block(int64_t block, float* rows, float* lanes) const;
};

void hide(const uint16_t* mask, int64_t first, int64_t last, float* scores) {
    for (int64_t i = 0; i < indexer::kCells; ++i)
        if (i < first || i >= last || mask[i] != 0) scores[i] = -std::numeric_limits<float>::infinity();
}

void Round::score_block(int64_t block, float* rows, float* lanes) const {
    const int64_t c0 = block * indexer::kCells, n = std::min(indexer::kCells, p.n_kv - c0);
    bool loaded = false;
    for (int64_t t = t0; t < t1; ++t) {
        if (p.count(t) == kAll) continue;
        const int64_t first = std::max<int64_t>(0, p.first(t) - c0), last = std::min(n, p.last(t) - c0);
        if (first >= last) continue;
        const uint16_t* mask = row<uint16_t>(p.mask, t) + c0;
        float* of_token = of(t) + c0;
        if (visible_cells(mask, first, last) == 0) {
            std::fill_n(of_token, indexer::kCells, -std::numeric_limits<float>::infinity());
            continue;
        }
        if (!loaded) indexer::keys_to_lanes(p.keys, c0, n, rows, lanes);
        loaded = true;
        indexer::scores_of_block(row<float>(p.q, 0, t), p.q.nb[1] / int64_t(sizeof(float)),
                                 row<float>(p.weights, t), p.heads, p.n, lanes, of_token);
        hide(mask, first, last, of_token);
    }
}

void choose(const ThreadContext& ctx, const Round& round, uint32_t* histogram) {
    const Problem& p = round.p;
    for (int64_t t = round.t0 + ctx.ith; t < round.t1; t += ctx.nth) {
        if (p.count(t) == kAll) continue;
        const int64_t first = p.first(t), n = p.last(t) - first;
        indexer::choose_best(round.of(t) + first, n, p.top_k, histogram, int32_t(first), &p.count(t) + 1);
    }
}

bool any_chooses(const Problem& p, int64_t t0, int64_t t1) {
    for (int64_t t = t0; t < t1; ++t)
        if (p.count(t) != kAll) return true;
    return false;
}

}  // namespace

// Rows and columns of a block of keys, and a histogram.
size_t choose_cells_scratch_bytes(const Op& op, const Tensor* tensors) {
    const Problem p(op, tensors);
    return size_t(2 * indexer::kCells * p.n) * sizeof(float) + indexer::kBins * sizeof(uint32_t);
}

// For any number of cells that the plan may run with.
size_t choose_cells_shared_bytes(const Op& op, const Tensor* tensors, int n_threads) {
    const Problem p(op, tensors);
    return size_t(p.round_tokens(n_threads) * (p.mask.ne[0] + indexer::kCells)) * sizeof(float);
}

void op_choose_cells(const ThreadContext& ctx, const Op& op, const Tensor* tensors, const Runtime&) {
    const Problem p(op, tensors);
    count_cells(ctx, p);
    if (p.n_kv <= p.top_k) return;
    ctx.sync();
    float* const rows = reinterpret_cast<float*>(ctx.scratch);
    float* const lanes = rows + indexer::kCells * p.n;
    uint32_t* const histogram = reinterpret_cast<uint32_t*>(lanes + indexer::kCells * p.n);
    const auto take = [&] { return ctx.counters[0].fetch_add(1, std::memory_order_relaxed); };
    int64_t mine = take(), base = 0;  // blocks are counted through all rounds
    const int64_t step = p.round_tokens(ctx.nth);
    for (int64_t t = 0; t < p.n_tokens; t += step) {
        const Round round{p, t, std::min(p.n_tokens, t + step), reinterpret_cast<float*>(ctx.shared)};
        if (!any_chooses(p, round.t0, round.t1)) continue;
        for (; mine < base + p.blocks(); mine = take()) round.score_block(mine - base, rows, lanes);
        base += p.blocks();
        ctx.sync();
        choose(ctx, round, histogram);
        ctx.sync();
    }
}

// The mask with all cells hidden that a token does not attend to.
void op_chosen_mask(const ThreadContext& ctx, const Op& op, const Tensor* tensors, const Runtime& runtime) {
    const Tensor &mask = tensors[op.src[0]], &chosen = tensors[op.src[1]], &out = tensors[op.dst];
    const int64_t n = std::min(runtime.n_kv, mask.ne[0]);
    int64_t begin, end;
    split_range(out.ne[1], ctx.ith, ctx.nth, 1, &begin, &end);
    for (int64_t t = begin; t < end; ++t) {
        const int32_t* cells = row<int32_t>(chosen, t);
        uint16_t* to = row<uint16_t>(out, t);
        if (n < chosen.ne[0] || cells[0] == kAll) {
            std::copy_n(row<uint16_t>(mask, t), n, to);
            continue;
        }
        std::fill_n(to, n, kMinusInfinity);
        for (int32_t i = 1; i <= cells[0]; ++i) to[cells[i]] = 0;
    }
}

}  // namespace ikpy
