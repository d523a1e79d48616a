// Rows of a table of hashed n-grams: every token with those before it in its sequence.
#include <algorithm>

#include "ikpy/ops.hpp"
#include "kernels/token_runs.hpp"

namespace ikpy {
namespace {

// n multipliers, then of every head the size of its part of the table and where that begins.
struct Hashes {
    const uint64_t *multipliers, *sizes, *offsets;

    Hashes(const Tensor& table, int64_t n, int64_t n_heads)
        : multipliers(row<const uint64_t>(table, 0)), sizes(multipliers + n), offsets(sizes + n_heads) {}
};

// Rows of a token with n_before tokens before it, these plus 1 and oldest first, 0: none.
void hash_token(const Hashes& h, int32_t token, const float* before, int64_t n_before, int32_t eos,
                int64_t per_length, int32_t* rows) {
    uint64_t mixed = uint64_t(token) * h.multipliers[0];
    bool cut = false;  // by an end of text, or where the sequence begins
    for (int64_t i = 1, head = 0; i <= n_before; ++i) {
        const int32_t past = int32_t(before[n_before - i]) - 1;
        cut = cut || past < 0 || past == eos;
        mixed ^= uint64_t(cut ? eos : past) * h.multipliers[i];
        for (int64_t end = head + per_length; head < end; ++head)
            rows[head] = int32_t(mixed % h.sizes[head] + h.offsets[head]);
    }
}

}  // namespace

// src: tokens [T], constants i64 [n + 2 * heads], tokens plus 1 before the batch [n - 1, slots], slots [T],
// and perhaps copies of these states and their slots [T]; ip[0]: the end of text; dst i32 [heads, T]. One
// thread does it all: tokens follow each other, and a step is some divisions.
void op_ngram_rows(const ThreadContext& ctx, const Op& op, const Tensor* ts, const Runtime&) {
    if (ctx.ith != 0) return;
    const Tensor &state = ts[op.src[2]], &dst = ts[op.dst];
    const int32_t* const tokens = row<const int32_t>(ts[op.src[0]], 0);
    const int32_t* const slots = row<const int32_t>(ts[op.src[3]], 0);
    const KeptStates kept(op, ts, 4);
    const int64_t n_before = state.ne[0];
    const Hashes hashes(ts[op.src[1]], n_before + 1, dst.ne[0]);
    for (int64_t t = 0; t < dst.ne[1]; ++t) {
        float* const before = row<float>(state, slots[t]);
        hash_token(hashes, tokens[t], before, n_before, op.ip[0], dst.ne[0] / n_before, row<int32_t>(dst, t));
        std::copy(before + 1, before + n_before, before);
        before[n_before - 1] = float(tokens[t]) + 1.0f;
        if (kept.behind(t) >= 0) std::copy_n(before, n_before, row<float>(*kept.states, kept.behind(t)));
    }
}

}  // namespace ikpy
