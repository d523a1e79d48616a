// Sparse attention of MiniMax M3: every index head chooses blocks of positions for each token.
//
// A block's score is the largest q . k of its visible cells. The last blocks up to the token's own count as
// better than all others; of equal scores the first blocks count.
#include <algorithm>
#include <cstring>
#include <limits>

#include "ikpy/ops.hpp"
#include "kernels/attention/flash_pack.hpp"
#include "kernels/cache/kv_types.hpp"
#include "kernels/simd/simd_f32.hpp"

namespace ikpy {
namespace {

using simd::kLanes;
using simd::V;

constexpr int64_t kCells = 64;      // of a group, whose keys are columns
constexpr int64_t kItemGroups = 4;  // that a thread takes at once
constexpr int64_t kTokens = 16;     // that meet the keys of a group
constexpr int kHeads = 4;           // that meet a vector of keys at once
constexpr int kVectors = kLanes >= 16 ? 4 : 2;
constexpr int32_t kAll = -1;
constexpr uint32_t kUnseen = 0;  // below every score

// Floats as integers of the same order, above kUnseen; what is no number is the lowest.
uint32_t ordered(float x) {
    uint32_t bits;
    if (!(x >= -std::numeric_limits<float>::max())) x = -std::numeric_limits<float>::max();
    std::memcpy(&bits, &x, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

struct Blocks {
    const Tensor &q, &keys, &mask, &ranges, &cell_pos, &pos, &chosen;
    const int64_t n, heads, n_tokens, n_kv;
    const int32_t size, local;
    const int64_t top_k,
        n_blocks;  // n_blocks: from a token's own backwards; cells of others are never chosen

    Blocks(const Op& op, const Tensor* ts)
        : q(ts[op.src[0]]),
          keys(ts[op.src[1]]),
          mask(ts[op.src[2]]),
          ranges(ts[op.src[3]]),
          cell_pos(ts[op.src[4]]),
          pos(ts[op.src[5]]),
          chosen(ts[op.dst]),
          n(q.ne[0]),
          heads(q.ne[1]),
          n_tokens(q.ne[2]),
          n_kv(keys.ne[2]),
          size(op.ip[0]),
          local(op.ip[1]),
          top_k((chosen.ne[0] - 1) / size),
          n_blocks(mask.ne[0] / size + 2) {}

    int64_t first(int64_t token) const { return row<int32_t>(ranges, token)[0]; }
    int64_t last(int64_t token) const { return std::min<int64_t>(row<int32_t>(ranges, token)[1], n_kv); }
    int64_t groups() const { return (n_kv + kCells - 1) / kCells; }
    int64_t items() const { return (groups() + kItemGroups - 1) / kItemGroups; }
    int32_t own_block(int64_t token) const { return row<int32_t>(pos, 0)[token] / size; }
    int32_t* list(int64_t token, int64_t head) const { return row<int32_t>(chosen, token, head); }
};

// The best scores of blocks of some tokens, [token][head][distance], and the block of every cell.
struct Round {
    const Blocks& p;
    int64_t t0, t1;
    uint32_t* best;
    const int32_t* block;

    uint32_t* of(int64_t token, int64_t head) const {
        return best + ((token - t0) * p.heads + head) * p.n_blocks;
    }
    int64_t n_scores() const { return (t1 - t0) * p.heads * p.n_blocks; }

    // How far the blocks of cells are behind a token's own; n_blocks for those that it does not see. Whether
    // it sees any.
    bool distances(int64_t token, int64_t first, int64_t last, int32_t* to) const {
        const uint16_t* shown = row<uint16_t>(p.mask, token);
        const int32_t own = p.own_block(token), none = int32_t(p.n_blocks);
        bool sees = false;
        for (int64_t c = first; c < last; ++c) {
            const int32_t d = own - block[c];
            const bool seen = shown[c] == 0 && uint32_t(d) < uint32_t(none);
            to[c - first] = seen ? d : none;
            sees |= seen;
        }
        return sees;
    }
};

void raise(uint32_t* to, uint32_t score) {
    uint32_t seen = __atomic_load_n(to, __ATOMIC_RELAXED);
    while (seen < score &&
           !__atomic_compare_exchange_n(to, &seen, score, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

// products[h][cell] = q_h . k for H heads and a group of cells.
template <int H>
void multiply(const float* q, int64_t ldq, int64_t n, const float* lanes, float (*products)[kCells]) {
    for (int64_t c = 0; c < kCells; c += kVectors * kLanes) {
        V sum[H][kVectors];
        for (auto& of_head : sum)
            for (V& v : of_head) v = simd::zero();
        for (int64_t d = 0; d < n; ++d) {
            V k[kVectors];
            for (int i = 0; i < kVectors; ++i) k[i] = simd::load(lanes + d * kCells + c + i * kLanes);
            for (int h = 0; h < H; ++h) {
                const V x = simd::set1(q[h * ldq + d]);
                for (int i = 0; i < kVectors; ++i) sum[h][i] = simd::fma(x, k[i], sum[h][i]);
            }
        }
        for (int h = 0; h < H; ++h)
            for (int i = 0; i < kVectors; ++i) simd::store(products[h] + c + i * kLanes, sum[h][i]);
    }
}

// Raises the best score of every block that cells with these products and distances belong to.
void take_best(const float* products, const int32_t* distance, int64_t n, int32_t n_blocks, uint32_t* best) {
    for (int64_t c = 0; c < n;) {  // a run of cells of the same block
        const int32_t d = distance[c];
        uint32_t score = kUnseen;
        for (; c < n && distance[c] == d; ++c) score = std::max(score, ordered(products[c]));
        if (d < n_blocks) raise(best + d, score);
    }
}

// The keys of a group: lanes[d][cell], zeros behind the last one.
void keys_to_lanes(const Blocks& p, int64_t group, float* rows, float* lanes) {
    const int64_t c0 = group * kCells, n_cells = std::min(kCells, p.n_kv - c0);
    kv::load_rows(p.keys.type)(row<uint8_t>(p.keys, 0, c0), p.keys.nb[2], n_cells, p.n, rows, p.n);
    for (int64_t c = 0; c < kCells; c += 16) {
        const float* of[16];
        for (int64_t i = 0; i < 16; ++i) of[i] = c + i < n_cells ? rows + (c + i) * p.n : nullptr;
        flash::rows_to_lanes(of, p.n, 1.0f, lanes + c, kCells);
    }
}

void score_group(const Round& round, int64_t group, float* rows, float* lanes) {
    const Blocks& p = round.p;
    const int64_t c0 = group * kCells, ldq = p.q.nb[1] / int64_t(sizeof(float));
    bool loaded = false;
    for (int64_t t = round.t0; t < round.t1; ++t) {
        const int64_t first = std::max(c0, p.first(t)), last = std::min(c0 + kCells, p.last(t));
        int32_t distance[kCells];
        if (first >= last || !round.distances(t, first, last, distance)) continue;
        if (!loaded) keys_to_lanes(p, group, rows, lanes);
        loaded = true;
        float products[kHeads][kCells];
        for (int64_t h = 0; h < p.heads;) {
            const bool whole = h + kHeads <= p.heads;
            (whole ? multiply<kHeads> : multiply<1>)(row<float>(p.q, h, t), ldq, p.n, lanes, products);
            for (int i = 0; i < (whole ? kHeads : 1); ++i, ++h)
                take_best(products[i] + (first - c0), distance, last - first, int32_t(p.n_blocks),
                          round.of(t, h));
        }
    }
}

// Marks the best blocks with 1; false where a token sees no more than it may choose.
bool choose(const Blocks& p, const uint32_t* best, int32_t* order, uint8_t* taken) {
    int64_t seen = 0;
    for (int32_t d = 0; d < p.n_blocks; ++d)
        if (best[d] != kUnseen) order[seen++] = d;
    if (seen <= p.top_k) return false;
    const auto score = [&](int32_t d) {
        return d < p.local ? std::numeric_limits<uint32_t>::max() : best[d];
    };
    std::nth_element(order, order + p.top_k, order + seen, [&](int32_t a, int32_t b) {
        return score(a) != score(b) ? score(a) > score(b) : a > b;  // farther back is an earlier block
    });
    std::memset(taken, 0, size_t(p.n_blocks) + 1);
    for (int64_t i = 0; i < p.top_k; ++i) taken[order[i]] = 1;
    return true;
}

void list_cells(const Round& round, int64_t token, int64_t head, int32_t* order, uint8_t* taken) {
    const Blocks& p = round.p;
    int32_t* to = p.list(token, head);
    to[0] = kAll;
    if (!choose(p, round.of(token, head), order, taken)) return;
    const int64_t last = p.last(token), most = p.chosen.ne[0] - 1;
    int32_t n = 0, distance[kCells];
    for (int64_t c0 = p.first(token); c0 < last; c0 += kCells) {
        const int64_t count = std::min(kCells, last - c0);
        if (!round.distances(token, c0, c0 + count, distance)) continue;
        for (int64_t i = 0; i < count && n < most; ++i)
            if (taken[distance[i]]) to[1 + n++] = int32_t(c0 + i);
    }
    to[0] = n;
}

size_t work_bytes(const Blocks& p) {
    return std::max(size_t(2 * kCells * p.n) * sizeof(float), size_t(p.n_blocks + 1) * (sizeof(int32_t) + 1));
}

}  // namespace

size_t choose_blocks_scratch_bytes(const Op& op, const Tensor* ts) { return work_bytes(Blocks(op, ts)); }

// Scores of a round, and the block of every cell.
size_t choose_blocks_shared_bytes(const Op& op, const Tensor* ts) {
    const Blocks p(op, ts);
    return size_t(std::min(p.n_tokens, kTokens) * p.heads * p.n_blocks) * sizeof(uint32_t) +
           size_t(p.cell_pos.ne[0]) * sizeof(int32_t);
}

// src: q f32 [n, H, T], index keys [n, 1, n_kv], mask f16 [cells, T] and ranges i32 [2, T], positions of
// cells i32 [cells] and tokens i32 [T]; ip: positions of a block, and blocks up to the token's own that are
// always chosen. dst i32 [1 + top_k * size, T, H].
void op_choose_blocks(const ThreadContext& ctx, const Op& op, const Tensor* ts, const Runtime&) {
    const Blocks p(op, ts);
    float *const rows = reinterpret_cast<float*>(ctx.scratch), *const lanes = rows + kCells * p.n;
    int32_t* const order = reinterpret_cast<int32_t*>(ctx.scratch);
    uint8_t* const taken = reinterpret_cast<uint8_t*>(order + p.n_blocks + 1);
    int32_t* const block = reinterpret_cast<int32_t*>(ctx.shared);
    uint32_t* const best = reinterpret_cast<uint32_t*>(block + p.cell_pos.ne[0]);
    int64_t begin, end;
    split_range(p.n_kv, ctx.ith, ctx.nth, 16, &begin, &end);
    for (int64_t c = begin; c < end; ++c) block[c] = row<int32_t>(p.cell_pos, 0)[c] / p.size;
    const auto take = [&] { return ctx.counters[0].fetch_add(1, std::memory_order_relaxed); };
    int64_t mine = take(), base = 0;  // items are counted through all rounds
    for (int64_t t = 0; t < p.n_tokens; t += kTokens) {
        const Round round{p, t, std::min(p.n_tokens, t + kTokens), best, block};
        split_range(round.n_scores(), ctx.ith, ctx.nth, 64, &begin, &end);
        std::fill(round.best + begin, round.best + end, kUnseen);
        ctx.sync();
        for (; mine < base + p.items(); mine = take()) {
            const int64_t first = (mine - base) * kItemGroups;
            for (int64_t g = first; g < std::min(p.groups(), first + kItemGroups); ++g)
                score_group(round, g, rows, lanes);
        }
        base += p.items();
        ctx.sync();
        for (int64_t i = ctx.ith; i < (round.t1 - t) * p.heads; i += ctx.nth)
            list_cells(round, t + i / p.heads, i % p.heads, order, taken);
        ctx.sync();
    }
}

}  // namespace ikpy
