// Hyper-connections: weights of residual streams, their sum in front of a block and their mixture behind it.
#include "common.cuh"

using namespace ikpy::cuda;

namespace {

constexpr int kMaxStreams = 8;
constexpr int kOwn = kMaxStreams * kMaxStreams / 32;  // elements of a matrix that a lane has

// Elements of a matrix [j, k] of n x n in shared memory by the warp's lanes, when all have read the old ones.
__device__ __forceinline__ void replace_elements(float* matrix, int n, const float (&value)[kOwn]) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        const int e = lane_id() + 32 * i;
        if (e < n * n) matrix[e] = value[i];
    }
    __syncwarp();
}

// By one warp: every element divided by the sum of its row or column plus eps.
__device__ __forceinline__ void normalize_lines(float* matrix, int n, bool rows, float eps) {
    float value[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        const int e = lane_id() + 32 * i;
        if (e >= n * n) break;
        const float* line = matrix + (rows ? e / n * n : e % n);
        float sum = 0;
        for (int k = 0; k < n; ++k) sum += line[rows ? k : k * n];
        value[i] = matrix[e] / (sum + eps);
    }
    replace_elements(matrix, n, value);
}

// Every row of the matrix becomes its softmax plus eps.
__device__ __forceinline__ void softmax_rows(float* matrix, int n, float eps) {
    float value[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        const int e = lane_id() + 32 * i;
        if (e >= n * n) break;
        const float* line = matrix + e / n * n;
        float top = line[0], sum = 0;
        for (int k = 1; k < n; ++k) top = fmaxf(top, line[k]);
        for (int k = 0; k < n; ++k) sum += expf(line[k] - top);
        value[i] = expf(matrix[e] - top) / sum + eps;
    }
    replace_elements(matrix, n, value);
}

}  // namespace

// Weights [(2 + n) n, T], [2 n, T] or [n, T], of n streams from mix of the same shape; one warp per token.
IKPY_KERNEL hyper_weights(View dst, View mix, const float* base, const float* scale, int n, int iterations,
                          float eps, float magnitude) {
    __shared__ float matrix[kMaxStreams * kMaxStreams];
    const int t = blockIdx.x, lane = lane_id();
    const float* x = mix.row<const float>(t);
    float* out = dst.row<float>(t);
    if (lane < n) out[lane] = sigmoid(x[lane] * scale[0] + base[lane]) + eps;
    if (dst.ne[0] == n) return;
    const bool mixes = dst.ne[0] > 2 * n;
    if (lane < n) {
        const float weight = sigmoid(x[n + lane] * scale[1] + base[n + lane]);
        out[n + lane] = magnitude * weight + (mixes ? 0.0f : eps);
    }
    if (!mixes) return;
    for (int e = lane; e < n * n; e += 32) matrix[e] = x[2 * n + e] * scale[2] + base[2 * n + e];
    __syncwarp();
    softmax_rows(matrix, n, eps);
    normalize_lines(matrix, n, false, eps);
    for (int i = 1; i < iterations; ++i) {
        normalize_lines(matrix, n, true, eps);
        normalize_lines(matrix, n, false, eps);
    }
    for (int e = lane; e < n * n; e += 32) out[2 * n + e] = matrix[e];
}
IKPY_EXPORT(hyper_weights);

// dst [D, T] = sum over streams [D, n, T] times weight. grid (tokens, blocks of columns).
IKPY_KERNEL hyper_collapse(View dst, View streams, View weights) {
    const int t = blockIdx.x, d = blockIdx.y * blockDim.x + threadIdx.x;
    if (d >= dst.ne[0]) return;
    const float* w = weights.row<const float>(t);
    float sum = 0;
    for (int i = 0; i < streams.ne[1]; ++i) sum += w[i] * streams.row<const float>(i, t)[d];
    dst.row<float>(t)[d] = sum;
}
IKPY_EXPORT(hyper_collapse);

// dst[:, k] = weights[n + k] * y + sum_j weights[2 n + j n + k] * streams[:, j], or, with 2 n weights,
// + streams[:, k]; with n weights they are those of y. grid (tokens, blocks of columns).
IKPY_KERNEL hyper_expand(View dst, View streams, View y, View weights) {
    const int t = blockIdx.x, d = blockIdx.y * blockDim.x + threadIdx.x, n = streams.ne[1];
    if (d >= dst.ne[0]) return;
    const float *post = weights.row<const float>(t) + (weights.ne[0] > n ? n : 0), *matrix = post + n;
    const float output = y.row<const float>(t)[d];
    float x[kMaxStreams];
#pragma unroll
    for (int j = 0; j < kMaxStreams; ++j) x[j] = j < n ? streams.row<const float>(j, t)[d] : 0.0f;
    const bool mixes = weights.ne[0] > 2 * n;
    for (int k = 0; k < n; ++k) {
        float sum = post[k] * output;
        if (!mixes) sum += streams.row<const float>(k, t)[d];
#pragma unroll
        for (int j = 0; j < kMaxStreams; ++j)
            if (mixes && j < n) sum += matrix[j * n + k] * x[j];
        dst.row<float>(k, t)[d] = sum;
    }
}
IKPY_EXPORT(hyper_expand);
