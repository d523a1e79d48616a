// Hyper-connections: n residual streams that are summed to the input of a block, and mixed with each other
// and with its output behind it.
#include <algorithm>

#include "ikpy/ops.hpp"
#include "ikpy/vecmath.hpp"

namespace ikpy {
namespace {

constexpr int kMaxStreams = 8;
constexpr int kMaxWeights = (2 + kMaxStreams) * kMaxStreams;
constexpr int kTokens = 16;        // whose weights are computed side by side
constexpr int64_t kColumns = 256;  // of a stream that are summed at a time
using Lanes = float[kTokens];

// x = factor * sigmoid(x * scale + base) + eps of n weights.
void sigmoid_weights(Lanes* x, int n, const float* base, float scale, float factor, float eps) {
    for (int i = 0; i < n; ++i)
        for (int t = 0; t < kTokens; ++t) x[i][t] = factor * sigmoid(x[i][t] * scale + base[i]) + eps;
}

// A matrix's rows become softmax(row * scale + base) + eps.
void softmax_rows(Lanes* matrix, int n, const float* base, float scale, float eps) {
    for (int j = 0; j < n; ++j) {
        Lanes* const row = matrix + j * n;
        Lanes top, sum = {};
        for (int k = 0; k < n; ++k)
            for (int t = 0; t < kTokens; ++t) row[k][t] = row[k][t] * scale + base[j * n + k];
        std::copy_n(row[0], kTokens, top);
        for (int k = 1; k < n; ++k)
            for (int t = 0; t < kTokens; ++t) top[t] = std::max(top[t], row[k][t]);
        for (int k = 0; k < n; ++k)
            for (int t = 0; t < kTokens; ++t) sum[t] += row[k][t] = exp_fast(row[k][t] - top[t]);
        for (int k = 0; k < n; ++k)
            for (int t = 0; t < kTokens; ++t) row[k][t] = row[k][t] / sum[t] + eps;
    }
}

// Divides every line of a matrix by its sum + eps: its rows (steps n and 1) or columns (steps 1 and n).
void normalize_lines(Lanes* matrix, int n, int step, int inner_step, float eps) {
    for (int i = 0; i < n; ++i) {
        Lanes* const line = matrix + i * step;
        Lanes sum = {};
        for (int k = 0; k < n; ++k)
            for (int t = 0; t < kTokens; ++t) sum[t] += line[k * inner_step][t];
        for (int t = 0; t < kTokens; ++t) sum[t] = 1.0f / (sum[t] + eps);
        for (int k = 0; k < n; ++k)
            for (int t = 0; t < kTokens; ++t) line[k * inner_step][t] *= sum[t];
    }
}

// Calls f(token, first column, last column) for this thread's share of rows of n_columns.
template <typename F>
void for_columns(const ThreadContext& ctx, int64_t n_tokens, int64_t n_columns, F&& f) {
    if (n_tokens == 0) return;
    // A few shares for each thread: they need not be equally many.
    const int64_t parts = std::min(4 * ctx.nth / n_tokens + 1, (n_columns + kColumns - 1) / kColumns);
    int64_t begin, end, first, last;
    split_range(n_tokens * parts, ctx.ith, ctx.nth, 1, &begin, &end);
    for (int64_t unit = begin; unit < end; ++unit) {
        split_range(n_columns, int(unit % parts), int(parts), 16, &first, &last);
        for (int64_t c = first; c < last; c += kColumns) f(unit / parts, c, std::min(last - c, kColumns));
    }
}

// sum += factor * x
void add_scaled(const float* x, float factor, int64_t n, float* sum) {
    for (int64_t i = 0; i < n; ++i) sum[i] += factor * x[i];
}

// out[k] = post[k] * y + sum_j matrix[j, k] * x[j] over some columns. The numbers of streams are constants,
// so that all of them are in registers at once.
template <int N>
void mix_streams(const float* weights, const float* y, const float* const* streams, int64_t n,
                 float* const* outputs) {
    float post[N], matrix[N * N];
    const float* x[N];
    float* out[N];
    std::copy_n(weights, N, post);
    std::copy_n(weights + N, N * N, matrix);
    std::copy_n(streams, N, x);
    std::copy_n(outputs, N, out);
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
#pragma GCC unroll 8
        for (int k = 0; k < N; ++k) {
            float sum = post[k] * y[i];
#pragma GCC unroll 8
            for (int j = 0; j < N; ++j) sum += matrix[j * N + k] * x[j][i];
            out[k][i] = sum;
        }
    }
}

// out[k] = post[k] * y + x[k]: streams that are not mixed.
template <int N>
void add_output(const float* weights, const float* y, const float* const* streams, int64_t n,
                float* const* outputs) {
    for (int k = 0; k < N; ++k) {
        const float post = weights[k];
        const float* const x = streams[k];
        float* const out = outputs[k];
#pragma GCC ivdep
        for (int64_t i = 0; i < n; ++i) out[i] = post * y[i] + x[i];
    }
}

using Mix = void (*)(const float*, const float*, const float* const*, int64_t, float* const*);
constexpr Mix kMix[kMaxStreams] = {mix_streams<1>, mix_streams<2>, mix_streams<3>, mix_streams<4>,
                                   mix_streams<5>, mix_streams<6>, mix_streams<7>, mix_streams<8>};
constexpr Mix kAdd[kMaxStreams] = {add_output<1>, add_output<2>, add_output<3>, add_output<4>,
                                   add_output<5>, add_output<6>, add_output<7>, add_output<8>};

}  // namespace

// src: mix [(2+n)*n, T], [2*n, T] or [n, T], base of as many elements as a row, scale [3], [2] or [1]; ip: n,
// iterations; fp: eps, magnitude. dst as mix: n weights sigmoid(mix * scale + base) + eps of the streams in
// the sum, n weights magnitude * sigmoid of the output in every stream (plus eps where no matrix follows),
// and the matrix [k, j] of stream j in the new stream k: softmax of its rows plus eps, columns and then rows
// and columns in turns divided by their sum plus eps.
void op_hyper_weights(const ThreadContext& ctx, const Op& op, const Tensor* ts, const Runtime&) {
    const Tensor &mix = ts[op.src[0]], &dst = ts[op.dst];
    const float* base = row<const float>(ts[op.src[1]], 0);
    const float* scale = row<const float>(ts[op.src[2]], 0);
    const int n = op.ip[0], iterations = op.ip[1];
    const float eps = op.fp[0];
    const int64_t n_weights = dst.ne[0];
    alignas(64) Lanes x[kMaxWeights];
    int64_t begin, end;
    split_range(dst.ne[1], ctx.ith, ctx.nth, kTokens, &begin, &end);
    for (int64_t t0 = begin; t0 < end; t0 += kTokens) {
        const int64_t tokens = std::min<int64_t>(kTokens, end - t0);
        // Lanes without a token repeat the last one.
        for (int64_t t = 0; t < kTokens; ++t) {
            const float* from = row<const float>(mix, t0 + std::min(t, tokens - 1));
            for (int64_t i = 0; i < n_weights; ++i) x[i][t] = from[i];
        }
        sigmoid_weights(x, n, base, scale[0], 1.0f, eps);
        const bool mixes = n_weights > 2 * n;
        if (n_weights > n) sigmoid_weights(x + n, n, base + n, scale[1], op.fp[1], mixes ? 0.0f : eps);
        if (mixes) {
            Lanes* const matrix = x + 2 * n;
            softmax_rows(matrix, n, base + 2 * n, scale[2], eps);
            normalize_lines(matrix, n, 1, n, eps);
            for (int i = 1; i < iterations; ++i) {
                normalize_lines(matrix, n, n, 1, eps);
                normalize_lines(matrix, n, 1, n, eps);
            }
        }
        for (int64_t t = 0; t < tokens; ++t) {
            float* const to = row<float>(dst, t0 + t);
            for (int64_t i = 0; i < n_weights; ++i) to[i] = x[i][t];
        }
    }
}

// src: streams [D, n, T], weights [.., T] of hyper_weights; dst [D, T] = sum_i weights[i] * streams[:, i]
void op_hyper_collapse(const ThreadContext& ctx, const Op& op, const Tensor* ts, const Runtime&) {
    const Tensor &streams = ts[op.src[0]], &weights = ts[op.src[1]], &dst = ts[op.dst];
    for_columns(ctx, dst.ne[1], dst.ne[0], [&](int64_t t, int64_t column, int64_t n) {
        const float* w = row<const float>(weights, t);
        float sum[kColumns] = {};
        for (int64_t i = 0; i < streams.ne[1]; ++i)
            add_scaled(row<const float>(streams, i, t) + column, w[i], n, sum);
        std::copy_n(sum, n, row<float>(dst, t) + column);
    });
}

// src: streams [D, n, T], y [D, T], weights of hyper_weights; dst [D, n, T]:
// dst[:, k] = weights[n + k] * y + sum_j weights[2 n + j n + k] * streams[:, j], or, with 2 n weights,
// + streams[:, k]; with n weights they are those of y
void op_hyper_expand(const ThreadContext& ctx, const Op& op, const Tensor* ts, const Runtime&) {
    const Tensor &streams = ts[op.src[0]], &y = ts[op.src[1]], &weights = ts[op.src[2]], &dst = ts[op.dst];
    const int64_t n = streams.ne[1];
    const Mix mix = (weights.ne[0] > 2 * n ? kMix : kAdd)[n - 1];
    const int64_t first = weights.ne[0] > n ? n : 0;  // weights of the input come before
    for_columns(ctx, dst.ne[2], dst.ne[0], [&](int64_t t, int64_t column, int64_t length) {
        const float* x[kMaxStreams];
        float* out[kMaxStreams];
        for (int64_t i = 0; i < n; ++i) {
            x[i] = row<const float>(streams, i, t) + column;
            out[i] = row<float>(dst, i, t) + column;
        }
        mix(row<const float>(weights, t) + first, row<const float>(y, t) + column, x, length, out);
    });
}

}  // namespace ikpy
