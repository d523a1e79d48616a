// The op of the gated delta rule: shares heads and their columns among threads, prepares tokens.
#include "kernels/recurrent/delta_rule.hpp"

#include <algorithm>
#include <cmath>

#include "ikpy/ops.hpp"
#include "ikpy/vecmath.hpp"
#include "kernels/item_ranges.hpp"
#include "kernels/recurrent/state_copies.hpp"
#include "kernels/token_runs.hpp"

namespace ikpy {
namespace {

using delta::kColumns;
using delta::Token;

constexpr int64_t kChunk = 32;  // tokens prepared at a time; the state is read and written once for them
constexpr int64_t kVectorsPerToken = 4;
// So many tokens of a sequence, a draft for example, give the bits of one after the other: each brings the
// tile up to date. That takes 4 operations per element instead of 3.
constexpr int64_t kAlike = 16;
// Decay since a tile was brought up to date: beyond these its rows are multiplied with it. Values of the tile
// then stay far from the ends of f32.
constexpr float kSmallestDecay = 0x1p-40f, kLargestDecay = 0x1p40f;

int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }

float dot(const float* a, const float* b, int64_t n) {
    simd::V sum = simd::zero();
    for (int64_t i = 0; i < n; i += simd::kLanes) sum = simd::fma(simd::load(a + i), simd::load(b + i), sum);
    return simd::sum(sum);
}

struct Sources {
    const Tensor &q, &k, &v, &g, &beta, &state, &dst;
    const KeptStates kept;
    float l2_eps, scale;
    bool interleaved, per_channel;

    Sources(const Op& op, const Tensor* ts)
        : q(ts[op.src[0]]),
          k(ts[op.src[1]]),
          v(ts[op.src[2]]),
          g(ts[op.src[3]]),
          beta(ts[op.src[4]]),
          state(ts[op.src[5]]),
          dst(ts[op.dst]),
          kept(op, ts, 7),
          l2_eps(op.fp[0]),
          scale(op.fp[1]),
          interleaved(op.ip[0] != 0),
          per_channel(op.ip[1] != 0) {}

    int64_t key_head(int64_t head) const { return interleaved ? head / (v.ne[1] / k.ne[1]) : head % k.ne[1]; }
};

// Memory of a thread.
struct Scratch {
    float *key, *query, *decay, *tile, *tokens;

    Scratch(int64_t dk, uint8_t* memory) {
        const int64_t n = padded(dk);
        key = reinterpret_cast<float*>(memory);
        query = key + n;
        decay = query + n;
        tile = decay + n;
        tokens = tile + dk * kColumns;
    }
    static size_t nbytes(int64_t dk) {
        return (padded(dk) * (3 + kVectorsPerToken * kChunk) + dk * kColumns) * sizeof(float);
    }
};

// The vectors of a chunk of tokens of one head.
class Preparation {
  public:
    Preparation(const Sources& sources, int64_t head, const Scratch& scratch)
        : s_(sources), head_(head), key_head_(sources.key_head(head)), dk_(sources.k.ne[0]), m_(scratch) {
        for (float* p : {m_.key, m_.query}) std::fill_n(p, padded(dk_), 0.0f);
    }

    void start() { std::fill_n(m_.decay, padded(dk_), 1.0f); }

    // Token number i of the chunk; due: the tile must be brought up to date, as the last token always does.
    Token token(int64_t i, int64_t t, bool due) {
        normalized(row<const float>(s_.k, key_head_, t), m_.key, 1.0f);
        normalized(row<const float>(s_.q, key_head_, t), m_.query, s_.scale);
        float* const keys = m_.tokens + i * kVectorsPerToken * padded(dk_);
        Token token{};
        token.beta = *(row<const float>(s_.beta, t) + head_);
        token.v = row<const float>(s_.v, head_, t);
        token.out = row<float>(s_.dst, head_, t);
        token.qk = dot(m_.key, m_.query, padded(dk_));
        due |= decay(t);
        scaled(keys, due);
        token.keys = keys;
        token.queries = keys + padded(dk_);
        token.updates = keys + 2 * padded(dk_);
        token.decay = due ? keys + 3 * padded(dk_) : nullptr;
        return token;
    }

    // Products of a chunk's tokens with the updates of those before them in their group.
    void meet(Token* tokens, int64_t n) const {
        for (int64_t i = 0, size; i < n; i += size) {
            size = delta::group_size<delta::kGroup>(tokens + i, n - i);
            for (int64_t g = 1; g < size; ++g)
                for (int64_t p = 0; p < g; ++p) {
                    const float* const updates = tokens[i + p].updates;
                    tokens[i + g].keys_of[p] = dot(updates, tokens[i + g].keys, padded(dk_));
                    tokens[i + g].queries_of[p] = dot(updates, tokens[i + g].queries, padded(dk_));
                }
        }
    }

  private:
    void normalized(const float* x, float* y, float scale) const {
        std::copy_n(x, dk_, y);
        if (s_.l2_eps > 0) scale /= std::sqrt(dot(y, y, padded(dk_)) + s_.l2_eps);
        for (int64_t i = 0; i < dk_; ++i) y[i] *= scale;
    }

    // Multiplies the decay of all rows with the token's; whether the tile must be brought up to date.
    bool decay(int64_t t) {
        float lowest = m_.decay[0], highest = m_.decay[0];
        if (s_.per_channel) {
            const float* const g = row<const float>(s_.g, head_, t);
            for (int64_t i = 0; i < dk_; ++i) m_.decay[i] *= exp_fast(g[i]);
            lowest = *std::min_element(m_.decay, m_.decay + dk_);
            highest = *std::max_element(m_.decay, m_.decay + dk_);
        } else {
            lowest = highest = m_.decay[0] * exp_fast(row<const float>(s_.g, t)[head_]);
            std::fill_n(m_.decay, dk_, lowest);
        }
        return !(lowest > kSmallestDecay && highest < kLargestDecay);
    }

    void scaled(float* keys, bool due) {
        const int64_t n = padded(dk_);
        float *const queries = keys + n, *const updates = queries + n, *const factors = updates + n;
        for (int64_t i = 0; i < n; ++i) {
            keys[i] = m_.key[i] * m_.decay[i];
            queries[i] = m_.query[i] * m_.decay[i];
        }
        if (due) {
            std::copy_n(m_.key, n, updates);
            std::copy_n(m_.decay, n, factors);
            start();
        } else if (s_.per_channel) {
            for (int64_t i = 0; i < n; ++i) updates[i] = m_.key[i] / m_.decay[i];
        } else {
            const float inverse = 1.0f / m_.decay[0];
            for (int64_t i = 0; i < n; ++i) updates[i] = m_.key[i] * inverse;
        }
    }

    const Sources& s_;
    const int64_t head_, key_head_, dk_;
    const Scratch m_;
};

// A chunk of tokens and the blocks of columns [first, last) of a head.
template <int Group>
void meet_tiles(const Sources& s, int32_t slot, int64_t head, int64_t first, int64_t last,
                const Scratch& scratch, const Token* tokens, int64_t n) {
    const int64_t dk = s.k.ne[0], dv = s.v.ne[0];
    for (int64_t b = first; b < last; ++b) {
        const int64_t column = b * kColumns;
        float* const state = row<float>(s.state, 0, head, slot) + column;
        const delta::Columns columns{state, s.state.nb[1] / int64_t(sizeof(float)),
                                     std::min(kColumns, dv - column), column};
        if (columns.n == kColumns) {
            delta::Tile<true, Group>(columns, dk, scratch.tile).run(tokens, n);
        } else {
            delta::Tile<false, Group>(columns, dk, scratch.tile).run(tokens, n);
        }
    }
}

// Copies the columns of blocks [first, last) of a head's state to a kept slot.
void keep_blocks(const Sources& s, int32_t slot, int32_t to, int64_t head, int64_t first, int64_t last) {
    const int64_t begin = first * kColumns, n = std::min(last * kColumns, s.v.ne[0]) - begin;
    for (int64_t i = 0; i < s.k.ne[0]; ++i)
        copy_away(row<const float>(s.state, i, head, slot) + begin, n,
                  row<float>(*s.kept.states, i, head, to) + begin);
    finish_copies();
}

// Blocks of columns [first, last) of a head for all tokens of a slot. A token behind which the state is kept
// is the last of its chunk.
void run_blocks(const Sources& s, const TokenRuns& runs, int32_t slot, int64_t head, int64_t first,
                int64_t last, const Scratch& scratch) {
    const bool few = runs.has_at_most(slot, kAlike);
    Preparation preparation(s, head, scratch);
    Token tokens[kChunk];
    for (int32_t t = runs.first(slot); t >= 0;) {
        preparation.start();
        int64_t n = 0;
        int32_t keep = -1;
        for (; t >= 0 && n < kChunk && keep < 0; t = runs.next(t), ++n) {
            keep = s.kept.behind(t);
            tokens[n] = preparation.token(n, t, few || keep >= 0 || n + 1 == kChunk || runs.next(t) < 0);
        }
        if (!few) preparation.meet(tokens, n);
        if (few) {
            meet_tiles<1>(s, slot, head, first, last, scratch, tokens, n);
        } else {
            meet_tiles<delta::kGroup>(s, slot, head, first, last, scratch, tokens, n);
        }
        if (keep >= 0) keep_blocks(s, slot, keep, head, first, last);
    }
}

// Parts of a head's blocks that are shared out: each prepares the tokens for itself, so no more than it takes
// to give all threads nearly the same.
int64_t parts_per_head(int64_t n_heads, int64_t n_blocks, int n_threads) {
    const int64_t wanted = n_threads == 1 ? 1 : 4 * n_threads;
    return std::min(n_blocks, (wanted + n_heads - 1) / n_heads);
}

}  // namespace

size_t gated_delta_rule_scratch_bytes(const Op& op, const Tensor* ts) {
    const size_t lists = TokenRuns::nbytes(ts[op.src[5]].ne[3], ts[op.src[6]].ne[0]);
    return Scratch::nbytes(ts[op.src[1]].ne[0]) + lists;
}

// src: q, k [dk, Hk, T], v [dv, Hv, T], log decay [Hv, T] or [dk, Hv, T] (ip[1]), beta [Hv, T], states
// [dv, dk, Hv, slots], slots [T], and perhaps kept states and their slots [T]; ip[0]: how heads of v meet
// those of k; fp: l2_eps (0 = q and k are taken as they are), scale. Columns of a state do not depend on each
// other, so results do not depend on the threads.
void op_gated_delta_rule(const ThreadContext& ctx, const Op& op, const Tensor* ts, const Runtime&) {
    const Sources sources(op, ts);
    const Tensor& slots = ts[op.src[6]];
    const int64_t dk = sources.k.ne[0], n_heads = sources.v.ne[1];
    const int64_t n_blocks = (sources.v.ne[0] + kColumns - 1) / kColumns;
    const Scratch scratch(dk, ctx.scratch);
    const TokenRuns runs(row<const int32_t>(slots, 0), sources.state.ne[3], slots.ne[0],
                         ctx.scratch + Scratch::nbytes(dk));
    if (!runs.size()) return;
    const int64_t n_parts = parts_per_head(runs.size() * n_heads, n_blocks, ctx.nth);
    ItemRanges ranges(ctx, runs.size() * n_heads * n_parts);
    for (int64_t item; (item = ranges.next()) >= 0;) {
        const int64_t part = item % n_parts, head = item / n_parts % n_heads;
        run_blocks(sources, runs, runs.slot(item / n_parts / n_heads), head, n_blocks * part / n_parts,
                   n_blocks * (part + 1) / n_parts, scratch);
    }
}

}  // namespace ikpy
