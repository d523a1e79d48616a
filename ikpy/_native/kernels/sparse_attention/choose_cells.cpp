// Which cells each token attends to, and the mask that hides the others.
#include "kernels/sparse_attention/choose_cells.hpp"

#include <limits>

namespace ikpy {
namespace indexer {
namespace {

constexpr uint16_t kMinusInfinity = 0xfc00;  // f16
constexpr int64_t kRoundTokens = 16;         // at least, if there are so many
constexpr float kLowest = std::numeric_limits<float>::lowest();

int64_t round_tokens(const Problem& p, int n_threads) {
    return std::min(p.n_tokens, std::max<int64_t>(kRoundTokens, n_threads));
}

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
        const bool more = last - first > p.top_k && visible_cells(p.mask_of(t), first, last) > p.top_k;
        p.count(t) = more ? int32_t(p.top_k) : kAll;
    }
}

void choose(const ThreadContext& ctx, const Round& round, uint32_t* histogram) {
    const Problem& p = round.p;
    for (int64_t t = round.t0 + ctx.ith; t < round.t1; t += ctx.nth) {
        if (p.count(t) == kAll) continue;
        const int64_t first = p.first(t), n = p.last(t) - first;
        choose_best(round.of(t) + first, n, p.top_k, histogram, int32_t(first), &p.count(t) + 1);
    }
}

size_t scores_bytes(const Problem& p) {
    return size_t(round_up(int64_t(tile_products(p) ? tile_scores_bytes(p) : float_scores_bytes(p)), 64));
}

}  // namespace

Problem::Problem(const Op& op, const Tensor* ts)
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

bool Round::any_chooses() const {
    for (int64_t t = t0; t < t1; ++t)
        if (p.count(t) != kAll) return true;
    return false;
}

bool Round::sees(int64_t token, int64_t block) const {
    const int64_t c0 = block * kCells;
    const int64_t first = std::max(c0, p.first(token)), last = std::min(c0 + kCells, p.last(token));
    if (p.count(token) == kAll || first >= last) return false;
    if (visible_cells(p.mask_of(token), first, last) > 0) return true;
    std::fill_n(of(token) + c0, kCells, -std::numeric_limits<float>::infinity());
    return false;
}

void Round::hide(int64_t token, int64_t block) const {
    const uint16_t* mask = p.mask_of(token);
    float* const scores = of(token);
    for (int64_t c = block * kCells; c < (block + 1) * kCells; ++c) {
        if (c < p.first(token) || c >= p.last(token) || mask[c] != 0)
            scores[c] = -std::numeric_limits<float>::infinity();
        else if (!(scores[c] >= kLowest))
            scores[c] = kLowest;
    }
}

}  // namespace indexer

using namespace indexer;

size_t choose_cells_scratch_bytes(const Op& op, const Tensor* tensors) {
    return scores_bytes(Problem(op, tensors)) + kBins * sizeof(uint32_t);
}

// For any number of cells that the plan may run with.
size_t choose_cells_shared_bytes(const Op& op, const Tensor* tensors, int n_threads) {
    const Problem p(op, tensors);
    return size_t(round_tokens(p, n_threads) * (p.mask.ne[0] + kCells)) * sizeof(float);
}

void op_choose_cells(const ThreadContext& ctx, const Op& op, const Tensor* tensors, const Runtime&) {
    const Problem p(op, tensors);
    count_cells(ctx, p);
    if (p.n_kv <= p.top_k) return;
    ctx.sync();
    const auto score = tile_products(p) ? score_on_tiles : score_by_floats;
    uint32_t* const histogram = reinterpret_cast<uint32_t*>(ctx.scratch + scores_bytes(p));
    const auto take = [&] { return ctx.counters[0].fetch_add(1, std::memory_order_relaxed); };
    int64_t mine = take(), base = 0;  // items are counted through all rounds
    const int64_t step = round_tokens(p, ctx.nth);
    for (int64_t t = 0; t < p.n_tokens; t += step) {
        const Round round{p, t, std::min(p.n_tokens, t + step), reinterpret_cast<float*>(ctx.shared)};
        if (!round.any_chooses()) continue;
        for (; mine < base + p.items(); mine = take()) {
            const int64_t begin = (mine - base) * kItemBlocks;
            score(round, begin, std::min(p.blocks(), begin + kItemBlocks), ctx.scratch);
        }
        base += p.items();
        ctx.sync();
        choose(ctx, round, histogram);
        ctx.sync();
    }
}

// The mask with all cells hidden that a token does not attend to. ip: the first cell that may be chosen; with
// one all cells count, not only those that are attended.
void op_chosen_mask(const ThreadContext& ctx, const Op& op, const Tensor* tensors, const Runtime& runtime) {
    const Tensor &mask = tensors[op.src[0]], &chosen = tensors[op.src[1]], &out = tensors[op.dst];
    const int64_t first = op.ip[0], n_all = std::min(mask.ne[0], out.ne[0]);
    const int64_t n = first ? n_all : std::min(runtime.n_kv, n_all);
    int64_t begin, end;
    split_range(out.ne[1], ctx.ith, ctx.nth, 1, &begin, &end);
    for (int64_t t = begin; t < end; ++t) {
        const int32_t* cells = row<int32_t>(chosen, t);
        uint16_t* to = row<uint16_t>(out, t);
        if (n - first < chosen.ne[0] || cells[0] == kAll) {
            std::copy_n(row<uint16_t>(mask, t), n, to);
            continue;
        }
        std::copy_n(row<uint16_t>(mask, t), first, to);
        std::fill_n(to + first, n - first, kMinusInfinity);
        for (int32_t i = 1; i <= cells[0]; ++i) to[first + cells[i]] = 0;
    }
}

// Chosen cells with those before the first of them (ip[0]) that the mask shows, as lists.
void op_chosen_list(const ThreadContext& ctx, const Op& op, const Tensor* tensors, const Runtime&) {
    const Tensor &mask = tensors[op.src[0]], &chosen = tensors[op.src[1]], &out = tensors[op.dst];
    const int32_t first = op.ip[0], most = int32_t(out.ne[0] - chosen.ne[0]);
    int64_t begin, end;
    split_range(out.ne[1], ctx.ith, ctx.nth, 1, &begin, &end);
    for (int64_t t = begin; t < end; ++t) {
        const int32_t* cells = row<int32_t>(chosen, t);
        const uint16_t* shown = row<uint16_t>(mask, t);
        int32_t* to = row<int32_t>(out, t);
        to[0] = kAll;
        if (cells[0] == kAll) continue;
        int32_t n = 0;
        for (int32_t c = 0; c < first && n < most; ++c)
            if (shown[c] == 0) to[1 + n++] = c;
        for (int32_t i = 1; i <= cells[0]; ++i) to[1 + n++] = first + cells[i];
        to[0] = n;
    }
}

}  // namespace ikpy
