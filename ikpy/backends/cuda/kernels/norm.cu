// Row normalisations: one block per row; rows stay in the L1 cache between the passes.
#include "common.cuh"
#include "quantize_q8.cuh"

using namespace ikpy::cuda;

namespace {

// A row of dst = x * scale * weight.
struct NormRow {
    const float* x;
    const float* weight;  // null = none
    float* y;
    int n;  // 0: no row for this block
    float scale;

    __device__ __forceinline__ float value(int i) const {
        return weight ? (scale * weight[i]) * x[i] : scale * x[i];
    }
};

__device__ __forceinline__ const float* weight_row(const View& w, int i1) {
    return w.data ? w.row<const float>(w.ne[1] > 1 ? i1 : 0) : nullptr;
}

// The row of this block; with an addend, its sum with the source is stored to `total` first. Returns the sum
// of squares.
__device__ __forceinline__ float squares_of_row(const View& src, const View& addend, const View& total,
                                                RowIndex r, int n, const float** x) {
    *x = src.row<const float>(r.i1, r.i2, r.i3);
    float squares = 0;
    if (addend.data) {
        const float* a = addend.row<const float>(r.i1, r.i2, r.i3);
        float* sum = total.row<float>(r.i1, r.i2, r.i3);
        for (int i = threadIdx.x; i < n; i += blockDim.x) {
            const float v = (*x)[i] + a[i];
            sum[i] = v;
            squares += v * v;
        }
        *x = sum;
    } else {
        for (int i = threadIdx.x; i < n; i += blockDim.x) {
            const float v = (*x)[i];
            squares += v * v;
        }
    }
    return block_sum(squares);
}

// The row of this block and its scale.
__device__ __forceinline__ NormRow rms_row(const View& dst, const View& src, const View& weight,
                                           const View& addend, const View& total, float eps,
                                           const int* runtime) {
    if (static_cast<int>(blockIdx.x) >= dst.rows(runtime)) return {nullptr, nullptr, nullptr, 0, 0.0f};
    const RowIndex r = row_index(dst, blockIdx.x, runtime);
    NormRow row{nullptr, weight_row(weight, r.i1), dst.row<float>(r.i1, r.i2, r.i3), dst.ne[0], 0.0f};
    row.scale = 1.0f / sqrtf(squares_of_row(src, addend, total, r, row.n, &row.x) / row.n + eps);
    return row;
}

}  // namespace

namespace {

__device__ __forceinline__ void normalize(const View& dst, const View& src, const View& weight,
                                          const View& addend, const View& total, float eps,
                                          const int* runtime) {
    const NormRow row = rms_row(dst, src, weight, addend, total, eps, runtime);
    // Every thread reads back only what it wrote itself.
    for (int i = threadIdx.x; i < row.n; i += blockDim.x) row.y[i] = row.value(i);
}

}  // namespace

// dst = src / rms(src) * weight. With an addend: src + addend is normalised and stored to total.
IKPY_KERNEL rms_norm(View dst, View src, View weight, View addend, View total, float eps,
                     const int* runtime) {
    normalize(dst, src, weight, addend, total, eps, runtime);
}
IKPY_EXPORT(rms_norm);

// Two launches of rms_norm at once (launch/merging.py), as of queries and keys; blockIdx.y says which.
IKPY_KERNEL rms_norm_two(View dst0, View src0, View weight0, View addend0, View total0, float eps0,
                         const int* runtime0, View dst1, View src1, View weight1, View addend1, View total1,
                         float eps1, const int* runtime1) {
    if (blockIdx.y == 0) {
        normalize(dst0, src0, weight0, addend0, total0, eps0, runtime0);
    } else {
        normalize(dst1, src1, weight1, addend1, total1, eps1, runtime1);
    }
}
IKPY_EXPORT(rms_norm_two);

// As rms_norm, and the result is also written as prepared int8 activations (one row per row of dst).
// Dynamic shared memory: the normalised row, n floats rounded up to 256.
IKPY_KERNEL rms_norm_q8(View dst, View src, View weight, View addend, View total, float eps,
                        uint8_t* prepared, long long stride, const int* runtime) {
    IKPY_DYNAMIC_SHARED(memory);
    auto* normed = reinterpret_cast<float*>(memory);
    const NormRow row = rms_row(dst, src, weight, addend, total, eps, runtime);
    if (row.n == 0) return;
    for (int i = threadIdx.x; i < row.n; i += blockDim.x) row.y[i] = normed[i] = row.value(i);
    __syncthreads();
    const ActQ8Layout at(row.n);
    uint8_t* out = prepared + blockIdx.x * stride;
    for (int c = warp_id() * 128; c < at.n; c += blockDim.x * 4) quantize_128(normed, row.n, c, out, at);
}
IKPY_EXPORT(rms_norm_q8);

// dst = (src - mean) / std * weight + bias
IKPY_KERNEL layer_norm(View dst, View src, View weight, View bias, float eps, const int* runtime) {
    const RowIndex r = row_index(dst, blockIdx.x, runtime);
    if (static_cast<int>(blockIdx.x) >= dst.rows(runtime)) return;
    const int n = dst.ne[0];
    const float* x = src.row<const float>(r.i1, r.i2, r.i3);
    float sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += x[i];
    const float mean = block_sum(sum) / n;
    float squares = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const float v = x[i] - mean;
        squares += v * v;
    }
    const float s = 1.0f / sqrtf(block_sum(squares) / n + eps);
    const float* w = weight_row(weight, r.i1);
    const float* b = weight_row(bias, r.i1);
    float* y = dst.row<float>(r.i1, r.i2, r.i3);
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        float v = (x[i] - mean) * s;
        if (w) v *= w[i];
        if (b) v += b[i];
        y[i] = v;
    }
}
IKPY_EXPORT(layer_norm);
