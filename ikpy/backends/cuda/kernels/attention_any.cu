// Attention for any cache type and head size: the plain form, for what the fast kernels do not take.
#include "attention.cuh"

using namespace ikpy::cuda;

namespace {
constexpr int kWarps = 4;
}

// One block per (token, head). Warps take cells in turn; lanes share a head. Dynamic shared memory: the query
// [dk], then per warp sums [dv]; f32.
IKPY_KERNEL __launch_bounds__(128) attention_any(Attention a) {
    IKPY_DYNAMIC_SHARED(memory);
    __shared__ float maxima[kWarps], denominators[kWarps];
    auto* q = reinterpret_cast<float*>(memory);
    const int token = blockIdx.x, head = blockIdx.y, d0 = a.k.ne[0], d1 = a.k1.data ? a.k1.ne[0] : 0;
    const int dk = d0 + d1, dv = a.v.ne[0], lane = lane_id(), warp = warp_id();
    float* sums = q + dk + warp * dv;
    const float* query = a.q.row<const float>(head, token);
    for (int i = threadIdx.x; i < dk; i += blockDim.x) q[i] = query[i];
    for (int i = lane; i < dv; i += 32) sums[i] = 0.0f;
    __syncthreads();
    const int kv_head = head / (a.q.ne[1] / a.k.ne[1]);
    const int k1_head = d1 ? kv_head * a.k1.ne[1] / a.k.ne[1] : 0, v_head = kv_head * a.v.ne[1] / a.k.ne[1];
    int first, last;
    cell_range(a, token, &first, &last);
    const uint16_t* mask = mask_row(a, token);
    const bool biased = a.max_bias != 0.0f;
    const float slope = biased ? bias_slope(a, head) : 0.0f;
    const int own = biased || a.biases ? a.pos[token] : 0, middle = bias_middle(a, head);
    float maximum = -INFINITY, denominator = 0.0f;
    for (int c = first + warp; c < last; c += kWarps) {
        if (mask && mask[c] >= 0x8000) continue;
        const auto* k = a.k.row<const uint8_t>(kv_head, c);
        float dot = 0;
        for (int i = lane; i < d0; i += 32) dot += q[i] * kv_element(a.k_type, k, i);
        if (d1) {
            const auto* k1 = a.k1.row<const uint8_t>(k1_head, c);
            for (int i = lane; i < d1; i += 32) dot += q[d0 + i] * kv_element(a.k1_type, k1, i);
        }
        float s = score_of(a, warp_sum(dot));
        if (biased) s -= slope * distance(own, a.cell_pos[c]);
        if (a.biases) s += bias_at(a, middle, a.cell_pos[c] - own);
        const float top = fmaxf(maximum, s), old = exp2f(maximum - top), p = exp2f(s - top);
        maximum = top;
        denominator = denominator * old + p;
        const auto* v = a.v.row<const uint8_t>(v_head, c);
        for (int i = lane; i < dv; i += 32) sums[i] = sums[i] * old + p * kv_element(a.v_type, v, i);
    }
    if (lane == 0) {
        maxima[warp] = maximum;
        denominators[warp] = denominator;
    }
    __syncthreads();
    float top = maxima[0], sum = 0, weight[kWarps];
    for (int w = 1; w < kWarps; ++w) top = fmaxf(top, maxima[w]);
    for (int w = 0; w < kWarps; ++w) {
        weight[w] = denominators[w] > 0 ? exp2f(maxima[w] - top) : 0.0f;
        sum += weight[w] * denominators[w];
    }
    const float norm = normalizer(a, head, top, sum);
    float* out = a.dst.row<float>(head, token);
    for (int i = threadIdx.x; i < dv; i += blockDim.x) {
        float v = 0;
        for (int w = 0; w < kWarps; ++w) v += weight[w] * q[dk + w * dv + i];
        out[i] = norm * v;
    }
}
IKPY_EXPORT(attention_any);
