// Ops of recurrent layers, whose states belong to slots: causal convolution and gated delta rule.
#include "recurrent.cuh"

using namespace ikpy::cuda;

namespace {

constexpr int kMaxTaps = 16;  // as of the CPU's kernel

// The tokens of a slot before token `end`, latest first, at most `most` of them; by one warp. Returns how
// many there are.
__device__ __forceinline__ int latest_tokens(const int* slots, int slot, int end, int most, int* tokens) {
    int n = 0;
    for (int last = end - 1; last >= 0 && n < most; last -= 32) {
        const int t = last - lane_id();
        const bool own = t >= 0 && slots[t] == slot;
        const unsigned holders = __ballot_sync(kAllLanes, own);
        const int place = n + __popc(holders & ((1u << lane_id()) - 1));
        if (own && place < most) tokens[place] = t;
        n += __popc(holders);
    }
    return min(n, most);
}

// bias: null if there is none.
__device__ __forceinline__ float result_of(float y, const float* bias, int channel, int silu) {
    if (bias) y += bias[channel];
    return silu ? unary_value(kSilu, y) : y;
}

}  // namespace

// y[c, t] = sum_j taps[j, c] * input[c, t - (n - 1 - j) dilation] + bias[c] over the tokens of t's slot,
// where inputs before the batch are the slot's past ones [(n - 1) dilation, C, slots], oldest first, which
// are brought up to date. A thread per channel takes one token after the other: for few of them.
IKPY_KERNEL causal_conv_few(View dst, View x, View taps, View past, const int* slots, const float* bias,
                            int silu, int dilation, View kept_past, const int* kept_slots) {
    const Kept kept{kept_past, kept_slots};
    const int c = blockIdx.x * blockDim.x + threadIdx.x, n_past = (taps.ne[0] - 1) * dilation;
    if (c >= dst.ne[0]) return;
    const float* w = taps.row<const float>(c);
    for (int t = 0; t < dst.ne[1]; ++t) {
        float* inputs = past.row<float>(c, slots[t]);
        const float newest = x.row<const float>(t)[c];
        const float* tap = w;
        float y = 0;
        for (int j = 0; j < n_past; j += dilation) y += *tap++ * inputs[j];
        for (int j = 0; j < n_past; ++j) inputs[j] = j + 1 < n_past ? inputs[j + 1] : newest;
        dst.row<float>(t)[c] = result_of(y + *tap * newest, bias, c, silu);
        if (kept.behind(t) < 0) continue;
        float* copy = kept.states.row<float>(c, kept.behind(t));
        for (int j = 0; j < n_past; ++j) copy[j] = inputs[j];
    }
}
IKPY_EXPORT(causal_conv_few);

// The same for any number of tokens, without the update of past inputs. Grid (blocks of channels, tokens).
IKPY_KERNEL causal_conv(View dst, View x, View taps, View past, const int* slots, const float* bias, int silu,
                        int dilation, View kept_past, const int* kept_slots) {
    __shared__ int before[kMaxTaps], n_before;
    const Kept kept{kept_past, kept_slots};
    const int t = blockIdx.y, n_past = (taps.ne[0] - 1) * dilation;
    if (warp_id() == 0) {
        const int n = latest_tokens(slots, slots[t], t, n_past, before);
        if (lane_id() == 0) n_before = n;
    }
    __syncthreads();
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= dst.ne[0]) return;
    const float* w = taps.row<const float>(c);
    const float* older = past.row<const float>(c, slots[t]) + n_before;
    float y = 0;
    for (int j = 0; j < n_past - n_before; j += dilation) y += *w++ * older[j];
    // Taps before the newest one are multiples of the dilation behind it.
    for (int i = n_before / dilation * dilation; i > 0; i -= dilation)
        y += *w++ * x.row<const float>(before[i - 1])[c];
    dst.row<float>(t)[c] = result_of(y + *w * x.row<const float>(t)[c], bias, c, silu);
    if (kept.behind(t) < 0 || n_past == 0) return;
    float* copy = kept.states.row<float>(c, kept.behind(t));
    for (int j = 1; j < n_past - n_before; ++j) copy[j - 1] = older[j];
    for (int i = min(n_before, n_past - 1); i > 0; --i)
        copy[n_past - 1 - i] = x.row<const float>(before[i - 1])[c];
    copy[n_past - 1] = x.row<const float>(t)[c];
}
IKPY_EXPORT(causal_conv);

// Past inputs [n, C, slots] behind the tokens of a batch. Grid (blocks of channels, slots).
IKPY_KERNEL causal_conv_past(View past, View x, const int* slots) {
    __shared__ int latest[kMaxTaps], n_latest;
    const int n_past = past.ne[0], slot = blockIdx.y;
    if (warp_id() == 0) {
        const int n = latest_tokens(slots, slot, x.ne[1], n_past, latest);
        if (lane_id() == 0) n_latest = n;
    }
    __syncthreads();
    const int c = blockIdx.x * blockDim.x + threadIdx.x, n = n_latest;
    if (c >= past.ne[1] || n == 0) return;
    float* inputs = past.row<float>(c, slot);
    for (int j = 0; j < n_past - n; ++j) inputs[j] = inputs[j + n];
    for (int i = n; i > 0; --i) inputs[n_past - i] = x.row<const float>(latest[i - 1])[c];
}
IKPY_EXPORT(causal_conv_past);

namespace {

// What the delta rule reads and writes: q, k [dk, Hk, T], v [dv, Hv, T], log decay [Hv, T] or [dk, Hv, T],
// beta [Hv, T], states [dv, dk, Hv, slots], result [dv, Hv, T].
struct DeltaRule {
    View dst, q, k, v, decay, beta, state;
    const int* slots;
    float l2_eps, scale;
    int interleaved, per_row;
    Kept kept;

    __device__ __forceinline__ int key_head(int head) const {
        return interleaved ? head / (v.ne[1] / k.ne[1]) : head % k.ne[1];
    }
};

// What all columns of a head need of some tokens. Rows behind dk are zero.
template <int kRows, int kColumns>
struct __align__(16) PreparedTokens {
    float keys[kTokens][kRows], queries[kTokens][kRows], decays[kTokens][kRows];
    float values[kTokens][kColumns];
    float beta[kTokens], decay[kTokens], key_query[kTokens];
    int token[kTokens], n;
};

// Keys and queries of token number i with their length and scale, their product, and the values of the
// block's columns from `first` on; by one warp.
template <int kRows, int kColumns>
__device__ __forceinline__ void prepare_token(const DeltaRule& d, int head, int first, int i,
                                              PreparedTokens<kRows, kColumns>& p) {
    const int t = p.token[i], dk = d.k.ne[0], kh = d.key_head(head), lane = lane_id();
    const float *k = d.k.row<const float>(kh, t), *q = d.q.row<const float>(kh, t);
    float kk = 0, qq = 0, kq = 0;
    for (int r = lane; r < dk; r += 32) {
        kk += k[r] * k[r];
        qq += q[r] * q[r];
        kq += k[r] * q[r];
    }
    kk = warp_sum(kk), qq = warp_sum(qq), kq = warp_sum(kq);
    const bool unit = d.l2_eps > 0;
    const float key_factor = unit ? 1.0f / sqrtf(kk + d.l2_eps) : 1.0f;
    const float query_factor = unit ? d.scale / sqrtf(qq + d.l2_eps) : d.scale;
    for (int r = lane; r < kRows; r += 32) {
        p.keys[i][r] = r < dk ? k[r] * key_factor : 0.0f;
        p.queries[i][r] = r < dk ? q[r] * query_factor : 0.0f;
    }
    if (d.per_row) {
        const float* g = d.decay.row<const float>(head, t);
        for (int r = lane; r < kRows; r += 32) p.decays[i][r] = r < dk ? expf(g[r]) : 0.0f;
    }
    const float* v = d.v.row<const float>(head, t) + first;
    if (lane < kColumns) p.values[i][lane] = first + lane < d.v.ne[0] ? v[lane] : 0.0f;
    if (lane == 0) {
        p.beta[i] = d.beta.row<const float>(t)[head];
        p.decay[i] = d.per_row ? 1.0f : expf(d.decay.row<const float>(t)[head]);
        p.key_query[i] = kq * key_factor * query_factor;
    }
}

// Of every token: S <- exp(g) S; change = beta (v - S^T k); o = scale (S^T q + (k.q) change); S <- S + k
// change^T.
template <int kRows, int kParts>
__device__ __forceinline__ void delta_rule(const DeltaRule& d) {
    constexpr int kPerWarp = 32 / kParts, kColumns = kWarps * kPerWarp;
    __shared__ PreparedTokens<kRows, kColumns> p;
    const int head = blockIdx.y, slot = blockIdx.z, first = blockIdx.x * kColumns;
    const int own = warp_id() * kPerWarp + lane_id() % kPerWarp, column = first + own, dv = d.v.ne[0];
    int at = 0;
    if (warp_id() == 0) take_tokens(d.slots, d.v.ne[2], slot, at, p);
    __syncthreads();
    if (p.n == 0) return;
    Column<kRows, kParts> state(d.state.row<float>(0, head, slot) + column,
                                static_cast<int>(d.state.nb[1] / sizeof(float)), column < dv ? d.k.ne[0] : 0);
    while (const int n = p.n) {
        for (int i = warp_id(); i < n; i += kWarps) prepare_token(d, head, first, i, p);
        __syncthreads();
        for (int i = 0; i < n; ++i) {
            if (d.per_row) {
                state.decay(p.decays[i]);
            } else {
                state.decay(p.decay[i]);
            }
            const float change = p.beta[i] * (p.values[i][own] - state.product(p.keys[i]));
            const float out = state.product(p.queries[i]) + p.key_query[i] * change;
            state.add(p.keys[i], change);
            if (state.is_first_part() && column < dv) d.dst.row<float>(head, p.token[i])[column] = out;
            const int keep = d.kept.behind(p.token[i]);
            if (keep >= 0) state.store_to(d.kept.states.row<float>(0, head, keep) + column);
        }
        __syncthreads();
        if (warp_id() == 0) take_tokens(d.slots, d.v.ne[2], slot, at, p);
        __syncthreads();
    }
    state.store();
}

}  // namespace

// The gated delta rule for heads of at most so many key elements, of which `parts` lanes share a column. Grid
// (blocks of columns, heads, slots). With eight, 32 heads of 128 columns are 256 blocks, two for each
// multiprocessor of an H100: one prepares tokens while the other multiplies.
#define IKPY_DELTA_RULE(name, dk, parts)                                                            \
    IKPY_KERNEL __launch_bounds__(32 * kWarps)                                                      \
        name(View dst, View q, View k, View v, View decay, View beta, View state, const int* slots, \
             float l2_eps, float scale, int interleaved, int per_row, View copies, const int* to) { \
        const Kept kept{copies, to};                                                                \
        delta_rule<dk, parts>(                                                                      \
            {dst, q, k, v, decay, beta, state, slots, l2_eps, scale, interleaved, per_row, kept});  \
    }                                                                                               \
    IKPY_EXPORT(name)

IKPY_DELTA_RULE(gated_delta_rule_32, 32, 4);
IKPY_DELTA_RULE(gated_delta_rule_64, 64, 4);
IKPY_DELTA_RULE(gated_delta_rule_128, 128, 8);
IKPY_DELTA_RULE(gated_delta_rule_256, 256, 8);
