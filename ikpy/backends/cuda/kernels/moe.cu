// Mixture of experts: choice of experts, assignments sorted by expert, weighted sum of outputs.
#include "common.cuh"

using namespace ikpy::cuda;

namespace {

constexpr int kMaxExperts = 1024;

enum Gating {
    kGateSoftmax = 1,
    kGateSigmoid = 2,
    kGateSelectedSoftmax = 3,
    kGateSqrtSoftplus = 4,
    kGateSelectedSigmoid = 5,
    kGateSparseMixer = 6
};
constexpr float kNear = 0.02f;  // of a sparse mixer, as on the CPU

struct Best {
    float value;
    int index;
};

// Largest value; of equal ones the larger index.
__device__ __forceinline__ Best better(Best a, Best b) {
    return b.value > a.value || (b.value == a.value && b.index > a.index) ? b : a;
}
__device__ __forceinline__ Best warp_best(Best x) {
#pragma unroll
    for (int m = 16; m > 0; m >>= 1)
        x = better(x, Best{__shfl_xor_sync(kAllLanes, x.value, m), __shfl_xor_sync(kAllLanes, x.index, m)});
    return x;
}

// p = exp(p - max) / sum over n values in shared memory, by one warp.
__device__ __forceinline__ void softmax(float* p, int n) {
    float top = -INFINITY, sum = 0;
    for (int i = lane_id(); i < n; i += 32) top = fmaxf(top, p[i]);
    top = warp_max(top);
    for (int i = lane_id(); i < n; i += 32) sum += p[i] = expf(p[i] - top);
    const float scale = 1.0f / warp_sum(sum);
    for (int i = lane_id(); i < n; i += 32) p[i] *= scale;
    __syncwarp();
}

__device__ __forceinline__ float gate_value(int gating, float x) {
    if (gating == kGateSigmoid) return sigmoid(x);
    if (gating == kGateSqrtSoftplus) return sqrtf(fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))));
    return x;  // the selected-... kinds and the sparse mixer choose by logits
}

// Scores of experts outside the n_used best groups become -inf and are no candidates; a group's score is the
// sum of its two largest. Returns the number of candidates.
__device__ __forceinline__ int limit_groups(float* scores, float* groups, int n_expert, int n_group,
                                            int n_used) {
    const int size = n_expert / n_group;
    for (int g = lane_id(); g < n_group; g += 32) {
        float first = -INFINITY, second = -INFINITY;
        for (int i = g * size; i < (g + 1) * size; ++i) {
            const float v = scores[i];
            second = fmaxf(second, fminf(first, v));
            first = fmaxf(first, v);
        }
        groups[g] = size > 1 ? first + second : first;
    }
    __syncwarp();
    unsigned kept_low = 0, kept_high = 0;  // groups 0..31 and 32..63
    for (int k = 0; k < n_used; ++k) {
        Best best{-INFINITY, -1};
        for (int g = lane_id(); g < n_group; g += 32) {
            const bool taken = (g < 32 ? kept_low >> g : kept_high >> (g - 32)) & 1;
            if (!taken) best = better(best, Best{groups[g], g});
        }
        best = warp_best(best);
        if (best.index >= 32) {
            kept_high |= 1u << (best.index - 32);
        } else if (best.index >= 0) {
            kept_low |= 1u << best.index;
        }
    }
    for (int e = lane_id(); e < n_expert; e += 32) {
        const int g = e / size;
        if (!((g < 32 ? kept_low >> g : kept_high >> (g - 32)) & 1)) scores[e] = -INFINITY;
    }
    __syncwarp();
    return n_used * size;
}

}  // namespace

struct RouteParameters {
    int n_expert, k, gating, normalize, n_group, n_group_used, ser_min;
    float scale, ser_threshold, epsilon;
};

namespace {

// Experts of a token as its row of a table says; -1 where there is no such token or expert.
__device__ __forceinline__ void fixed_experts(const View& table, int token, const RouteParameters& a,
                                              int* id) {
    const bool is_known = token >= 0 && token < table.ne[1];
    for (int j = lane_id(); j < a.k; j += 32) {
        const int e = is_known ? table.row<const int>(token)[j] : -1;
        id[j] = e >= 0 && e < a.n_expert ? e : -1;
    }
    __syncwarp();
}

// The k experts with the best scores, which it changes.
__device__ __forceinline__ void best_experts(float* scores, float* groups, const RouteParameters& a,
                                             int* id) {
    int candidates = a.n_expert;
    if (a.n_group > 1) candidates = limit_groups(scores, groups, a.n_expert, a.n_group, a.n_group_used);
    float top = 0;
    for (int j = 0; j < a.k; ++j) {
        Best best{-INFINITY, -1};
        for (int e = lane_id(); e < a.n_expert; e += 32) best = better(best, Best{scores[e], e});
        best = warp_best(best);
        if (j == 0) top = best.value;
        __syncwarp();  // all lanes have read the scores
        if (lane_id() == 0) {
            const bool drop =
                a.ser_min > 0 && a.ser_threshold > 0 && j >= a.ser_min && best.value < a.ser_threshold * top;
            id[j] = drop ? -1 : candidates >= a.k ? best.index : j;
            if (best.index >= 0) scores[best.index] = -INFINITY;
        }
        __syncwarp();
    }
}

// Weights of a sparse mixer: the share of each chosen expert in the softmax over those that are not chosen
// before it and whose logits are near its own. left: memory for as many logits.
__device__ __forceinline__ void mix_sparsely(const float* logits, float* left, const RouteParameters& a,
                                             const int* id, float* w) {
    for (int e = lane_id(); e < a.n_expert; e += 32) left[e] = logits[e];
    __syncwarp();
    for (int j = 0; j < a.k; ++j) {
        if (id[j] < 0) continue;
        const float own = logits[id[j]];
        float sum = 0;
        for (int e = lane_id(); e < a.n_expert; e += 32) {
            const bool is_far = (own - left[e]) / fmaxf(fabsf(left[e]), own) > kNear;
            if (left[e] > -INFINITY && !is_far) sum += expf(left[e] - own);
        }
        sum = warp_sum(sum);
        __syncwarp();  // all lanes have read what is left
        if (lane_id() == 0) {
            w[j] = 1.0f / sum;
            left[id[j]] = -INFINITY;
        }
        __syncwarp();
    }
}

}  // namespace

// Expert ids i32 [K, T] and weights f32 [K, T] of router logits [E, T]; one warp per token. With a table i32
// [K, V] the experts are those of its rows of the tokens.
IKPY_KERNEL moe_route(View ids, View weights, View logits, const float* bias, View table, const int* tokens,
                      RouteParameters a) {
    __shared__ float p[kMaxExperts], scores[kMaxExperts], w[kMaxExperts], groups[64];
    __shared__ int id[kMaxExperts];
    const int t = blockIdx.x, lane = lane_id();
    const float* x = logits.row<const float>(t);
    for (int e = lane; e < a.n_expert; e += 32) p[e] = gate_value(a.gating, x[e]);
    __syncwarp();
    if (a.gating == kGateSoftmax) softmax(p, a.n_expert);
    if (table.data) {
        fixed_experts(table, tokens[t], a, id);
    } else {
        for (int e = lane; e < a.n_expert; e += 32) scores[e] = bias ? p[e] + bias[e] : p[e];
        __syncwarp();
        best_experts(scores, groups, a, id);
    }
    const float none = a.gating == kGateSelectedSoftmax ? -INFINITY : 0.0f;  // no part of the softmax
    for (int j = lane; j < a.k; j += 32) w[j] = id[j] >= 0 ? p[id[j]] : none;
    __syncwarp();
    if (a.gating == kGateSelectedSoftmax) softmax(w, a.k);
    if (a.gating == kGateSparseMixer) mix_sparsely(p, scores, a, id, w);
    for (int j = lane; j < a.k; j += 32) {
        const float value = a.gating == kGateSelectedSigmoid ? sigmoid(w[j]) : w[j];
        w[j] = id[j] >= 0 ? value : 0.0f;
    }
    __syncwarp();
    float factor = 1.0f;
    if (a.normalize) {
        float sum = 0;
        for (int j = lane; j < a.k; j += 32) sum += w[j];
        sum = warp_sum(sum) + a.epsilon;
        factor = sum > 0 ? 1.0f / sum : 0.0f;
    }
    if (fabsf(a.scale - 1.0f) > 1e-5f) factor *= a.scale;
    for (int j = lane; j < a.k; j += 32) {
        ids.row<int>(t)[j] = id[j];
        weights.row<float>(t)[j] = w[j] * factor;
    }
}
IKPY_EXPORT(moe_route);

namespace {

// Offsets [E + 1] of the experts' assignments, to count as well. By all threads of the only block; ends with
// a barrier.
__device__ __forceinline__ void store_offsets(int* offsets, int* count, const View& ids, int n_expert) {
    const int k = ids.ne[0], n = k * ids.ne[1];
    for (int e = threadIdx.x; e < n_expert; e += blockDim.x) count[e] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const int e = ids.row<const int>(i / k)[i % k];
        if (e >= 0) atomicAdd(&count[e], 1);
    }
    __syncthreads();
    if (warp_id() == 0) {  // prefix sums, 32 experts at a time
        int before = 0;
        for (int e0 = 0; e0 < n_expert; e0 += 32) {
            const int e = e0 + lane_id(), own = e < n_expert ? count[e] : 0;
            int sum = own;
            for (int m = 1; m < 32; m <<= 1) {
                const int left = __shfl_up_sync(kAllLanes, sum, m);
                if (lane_id() >= m) sum += left;
            }
            if (e < n_expert) offsets[e] = count[e] = before + sum - own;
            before += __shfl_sync(kAllLanes, sum, 31);
        }
        if (lane_id() == 0) offsets[n_expert] = before;
    }
    __syncthreads();
}

constexpr int kFewEntries = 256;  // mirrored in launch/experts.py

}  // namespace

// All of moe_offsets and moe_entries for few assignments, one per thread. One block of kFewEntries threads.
IKPY_KERNEL moe_group(int* groups, View ids, int n_expert) {
    __shared__ int first[kMaxExperts], experts[kFewEntries];
    const int k = ids.ne[0], n = k * ids.ne[1], i = threadIdx.x;
    const int own = i < n ? ids.row<const int>(i / k)[i % k] : -1;
    experts[i] = own;
    store_offsets(groups, first, ids, n_expert);
    if (own < 0) return;
    int place = first[own];
    for (int j = 0; j < i; ++j) place += experts[j] == own;
    groups[n_expert + 1 + place] = i;
}
IKPY_EXPORT(moe_group);

// Offsets [E + 1] of the experts' assignments. One block.
IKPY_KERNEL moe_offsets(int* offsets, View ids, int n_expert) {
    __shared__ int count[kMaxExperts];
    store_offsets(offsets, count, ids, n_expert);
}
IKPY_EXPORT(moe_offsets);

// Entries token * K + slot of every expert in rising order; one warp per expert.
IKPY_KERNEL moe_entries(int* groups, View ids, int n_expert) {
    const int e = blockIdx.x * (blockDim.x >> 5) + warp_id();
    if (e >= n_expert) return;
    int at = groups[e];
    if (at == groups[e + 1]) return;
    int* entries = groups + n_expert + 1;
    const int k = ids.ne[0], n = k * ids.ne[1], lane = lane_id();
    constexpr int kLoads = 4;  // asked for before one is waited for
    for (int i0 = 0; i0 < n; i0 += 32 * kLoads) {
        bool own[kLoads];
#pragma unroll
        for (int l = 0; l < kLoads; ++l) {
            const int i = i0 + 32 * l + lane;
            own[l] = i < n && ids.row<const int>(i / k)[i % k] == e;
        }
#pragma unroll
        for (int l = 0; l < kLoads; ++l) {
            const unsigned holders = __ballot_sync(kAllLanes, own[l]);
            if (own[l]) entries[at + __popc(holders & ((1u << lane) - 1))] = i0 + 32 * l + lane;
            at += __popc(holders);
        }
    }
}
IKPY_EXPORT(moe_entries);

// dst [D, T] = sum over slots of weight * output [D, K, T], plus addend. grid (tokens, blocks of columns).
IKPY_KERNEL moe_combine(View dst, View outputs, View weights, View ids, View addend) {
    const int t = blockIdx.x, d = blockIdx.y * blockDim.x + threadIdx.x, k = outputs.ne[1];
    if (d >= dst.ne[0]) return;
    const int* id = ids.row<const int>(t);
    const float* w = weights.data ? weights.row<const float>(t) : nullptr;
    float sum = 0;
    for (int j = 0; j < k; ++j) {
        if (id[j] >= 0) sum += (w ? w[j] : 1.0f) * outputs.row<const float>(j, t)[d];
    }
    if (addend.data) sum += addend.row<const float>(t)[d];
    dst.row<float>(t)[d] = sum;
}
IKPY_EXPORT(moe_combine);
