// Causal convolution along the tokens of each sequence, one filter per channel.
#include <algorithm>

#include "ikpy/ops.hpp"
#include "ikpy/vecmath.hpp"
#include "kernels/token_runs.hpp"

namespace ikpy {
namespace {

// Channels whose taps and past inputs are transposed at a time: 2 KiB for four.
constexpr int64_t kBlock = 64;
constexpr int64_t kMaxTaps = 16;

// Sources and result of the op; taps and past inputs of a channel lie side by side.
struct Convolution {
    const Tensor &x, &weight, &state, &dst;
    const TokenRuns& runs;
    const float* bias;  // null: none
    const KeptStates kept;
    bool silu;
    int64_t dilation;  // tokens from one tap to the next

    int64_t n_past() const { return (weight.ne[0] - 1) * dilation; }

    // n channels from `channel` on, for all tokens.
    void channels(int64_t channel, int64_t n) const {
        const int64_t taps = weight.ne[0];
        float factors[kMaxTaps][kBlock], past[kMaxTaps][kBlock];
        for (int64_t j = 0; j < taps; ++j)
            for (int64_t c = 0; c < n; ++c) factors[j][c] = row<const float>(weight, channel + c)[j];
        for (int64_t i = 0; i < runs.size(); ++i) {
            const int32_t slot = runs.slot(i);
            for (int64_t j = 0; j < n_past(); ++j)
                for (int64_t c = 0; c < n; ++c) past[j][c] = row<const float>(state, channel + c, slot)[j];
            sequence(slot, channel, n, factors, past);
        }
    }

  private:
    void sequence(int32_t slot, int64_t channel, int64_t n, const float (*factors)[kBlock],
                  const float (*past)[kBlock]) const {
        const int64_t taps = weight.ne[0], newest = n_past();
        const float* inputs[kMaxTaps];  // of the token before, oldest first
        for (int64_t j = 0; j < newest; ++j) inputs[j + 1] = past[j];
        for (int32_t t = runs.first(slot); t >= 0; t = runs.next(t)) {
            for (int64_t j = 0; j < newest; ++j) inputs[j] = inputs[j + 1];
            inputs[newest] = row<const float>(x, t) + channel;
            float* const y = row<float>(dst, t) + channel;
            for (int64_t c = 0; c < n; ++c) y[c] = factors[0][c] * inputs[0][c];
            for (int64_t j = 1; j < taps; ++j)
                for (int64_t c = 0; c < n; ++c) y[c] += factors[j][c] * inputs[j * dilation][c];
            if (bias)
                for (int64_t c = 0; c < n; ++c) y[c] += bias[channel + c];
            if (silu)
                for (int64_t c = 0; c < n; ++c) y[c] = ikpy::silu(y[c]);
            if (kept.behind(t) >= 0) write(*kept.states, kept.behind(t), channel, n, inputs + 1);
        }
        write(state, slot, channel, n, inputs + 1);
    }

    // Past inputs of n channels of a slot.
    void write(const Tensor& states, int32_t slot, int64_t channel, int64_t n,
               const float* const* inputs) const {
        for (int64_t j = 0; j < n_past(); ++j)
            for (int64_t c = 0; c < n; ++c) row<float>(states, channel + c, slot)[j] = inputs[j][c];
    }
};

}  // namespace

size_t causal_conv_scratch_bytes(const Op& op, const Tensor* ts) {
    return TokenRuns::nbytes(ts[op.src[2]].ne[2], ts[op.src[3]].ne[0]);
}

// src: inputs [C, T], taps [n, C], past inputs [(n-1) d, C, slots], slots [T], and perhaps a bias [C], kept
// past inputs and their slots [T]; ip: SiLU of the result, and d. y[c, t] = sum_j taps[j, c] *
// input[c, t - (n - 1 - j) d] + bias[c] over the tokens of the slot, where inputs before the batch are the
// slot's past ones; the last (n-1) d become its past ones. Threads share the channels.
void op_causal_conv(const ThreadContext& ctx, const Op& op, const Tensor* ts, const Runtime&) {
    const Tensor& slots = ts[op.src[3]];
    const TokenRuns runs(row<const int32_t>(slots, 0), ts[op.src[2]].ne[2], slots.ne[0], ctx.scratch);
    const float* const bias = op.src[4] < 0 ? nullptr : row<const float>(ts[op.src[4]], 0);
    const KeptStates kept(op, ts, 5);
    const Convolution conv{ts[op.src[0]], ts[op.src[1]], ts[op.src[2]], ts[op.dst], runs,
                           bias,          kept,          op.ip[0] != 0, op.ip[1]};
    int64_t begin, end;
    split_range(ts[op.dst].ne[0], ctx.ith, ctx.nth, 16, &begin, &end);
    for (int64_t c = begin; c < end; c += kBlock) conv.channels(c, std::min(kBlock, end - c));
}

}  // namespace ikpy
