// Arguments of attention and what its kernels share.
#pragma once
#include "kv_types.cuh"

namespace ikpy::cuda {

constexpr float kLog2e = 1.44269504088896341f;

// Mirrored in launch/attention.py. Views: [head size, heads, cells or tokens].
struct Attention {
    View q, k, k1, v, dst;  // k1.data null: keys have one segment
    const uint16_t* mask;   // f16 rows of 0 and -inf; null: all cells of the range are visible
    const int* ranges;      // [2, T] first and one past the last visible cell; null: all
    const float* sinks;     // [H] or null
    float* partials;        // results of the parts of a split: sums [dv], maximum, denominator
    const int* runtime;
    long long mask_stride;  // bytes
    float scale, softcap;
    int k_type, k1_type, v_type, n_parts;
    // Linear biases (ALiBi): positions of cells and tokens, and which of the heads of the model head 0 is.
    const int *cell_pos, *pos;
    float max_bias;  // of the slopes, 0: no biases
    int slope_head, slope_heads;
    int farthest;         // of the differences that biases are for
    const float* biases;  // instead, of every head by positions' difference (AttentionArgs::biases on the
                          // CPU), or null
};

// What the score of a head loses per position, in units of log2 (AttentionArgs::slope on the CPU).
__device__ __forceinline__ float bias_slope(const Attention& a, int head) {
    int n = 1;
    while (2 * n <= a.slope_heads) n *= 2;
    const int h = a.slope_head + head;
    const float steps = h < n ? h + 1.0f : h - n + 0.5f;
    return exp2f(-a.max_bias * steps / n) * kLog2e;
}
// Number of the bias of a head for equal positions, and what the score gets that many positions from there,
// in the same units.
__device__ __forceinline__ int bias_middle(const Attention& a, int head) {
    return (2 * a.farthest + 1) * (a.slope_head + head) + a.farthest;
}
__device__ __forceinline__ float bias_at(const Attention& a, int middle, int difference) {
    return __ldg(&a.biases[middle + min(max(difference, -a.farthest), a.farthest)]) * kLog2e;
}
__device__ __forceinline__ float distance(int a, int b) { return fabsf(static_cast<float>(a - b)); }

__device__ __forceinline__ int n_cells(const Attention& a) { return a.k.extent(2, a.runtime); }

__device__ __forceinline__ void cell_range(const Attention& a, int token, int* first, int* last) {
    *first = a.ranges ? a.ranges[2 * token] : 0;
    *last = a.ranges ? min(a.ranges[2 * token + 1], n_cells(a)) : n_cells(a);
}
__device__ __forceinline__ const uint16_t* mask_row(const Attention& a, int token) {
    return a.mask ? reinterpret_cast<const uint16_t*>(reinterpret_cast<const uint8_t*>(a.mask) +
                                                      token * a.mask_stride)
                  : nullptr;
}
// Score in units of log2 from q . k
__device__ __forceinline__ float score_of(const Attention& a, float dot) {
    float s = dot * a.scale;
    if (a.softcap != 0.0f) s = a.softcap * tanhf(s / a.softcap);
    return s * kLog2e;
}
// Factor of the sums given maximum (log2 units) and denominator.
__device__ __forceinline__ float normalizer(const Attention& a, int head, float maximum, float sum) {
    if (sum <= 0.0f) return 0.0f;
    if (a.sinks) sum += exp2f(a.sinks[head] * kLog2e - maximum);
    return 1.0f / sum;
}

}  // namespace ikpy::cuda
