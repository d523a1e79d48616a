// Row normalisations and row look-up.
#include <algorithm>
#include <cmath>

#include "ikpy/ops.hpp"
#include "quantize/dequantize.hpp"

namespace ikpy {

namespace {

// Sum of f(x[i]) in double, with independent partial sums so that it vectorizes.
template <typename F>
double sum_rows(const float* x, int64_t n, F&& f) {
    double part[8] = {};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        for (int j = 0; j < 8; ++j) part[j] += static_cast<double>(f(x[i + j]));
    }
    double total = 0;
    for (; i < n; ++i) total += static_cast<double>(f(x[i]));
    for (double p : part) total += p;
    return total;
}

// Weight row for dimension-1 index i1: one vector for all rows or one per head.
const float* weight_row(const Tensor* ts, int index, int64_t i1) {
    if (index < 0) return nullptr;
    const Tensor& w = ts[index];
    return row<const float>(w, w.ne[1] > 1 ? i1 : 0);
}

template <typename F>
void for_each_row(const ThreadContext& ctx, const Tensor& t, F&& f) {
    int64_t begin, end;
    split_range(n_rows(t), ctx.ith, ctx.nth, 1, &begin, &end);
    for (int64_t r = begin; r < end; ++r) f(r % t.ne[1], r / t.ne[1] % t.ne[2], r / (t.ne[1] * t.ne[2]));
}

}  // namespace

// dst = src0 / rms(src0) * src1 (weight, optional); fp[0] = eps. If src2 is given, src0 + src2 is normalised
// and that sum is stored to src3 (the residual stream).
void op_rms_norm(const ThreadContext& ctx, const Op& op, const Tensor* ts, const Runtime&) {
    const Tensor& dst = ts[op.dst];
    const Tensor& src = ts[op.src[0]];
    const int64_t n = dst.ne[0];
    const float eps = op.fp[0];
    for_each_row(ctx, dst, [&](int64_t i1, int64_t i2, int64_t i3) {
        const float* x = row<const float>(src, i1, i2, i3);
        if (op.src[2] >= 0) {
            const float* a = row<const float>(ts[op.src[2]], i1, i2, i3);
            float* sum = row<float>(ts[op.src[3]], i1, i2, i3);
            for (int64_t i = 0; i < n; ++i) sum[i] = x[i] + a[i];
            x = sum;
        }
        float* y = row<float>(dst, i1, i2, i3);
        const float mean = static_cast<float>(sum_rows(x, n, [](float v) { return v * v; }) / n);
        const float s = 1.0f / std::sqrt(mean + eps);
        const float* w = weight_row(ts, op.src[1], i1);
        if (w) {
            for (int64_t i = 0; i < n; ++i) y[i] = (s * w[i]) * x[i];
        } else {
            for (int64_t i = 0; i < n; ++i) y[i] = s * x[i];
        }
    });
}

// dst = (src0 - mean) / std * src1 + src2; weight and bias optional; fp[0] = eps.
void op_layer_norm(const ThreadContext& ctx, const Op& op, const Tensor* ts, const Runtime&) {
    const Tensor& dst = ts[op.dst];
    const Tensor& src = ts[op.src[0]];
    const int64_t n = dst.ne[0];
    const float eps = op.fp[0];
    for_each_row(ctx, dst, [&](int64_t i1, int64_t i2, int64_t i3) {
        const float* x = row<const float>(src, i1, i2, i3);
        float* y = row<float>(dst, i1, i2, i3);
        const float mean = static_cast<float>(sum_rows(x, n, [](float v) { return v; }) / n);
        for (int64_t i = 0; i < n; ++i) y[i] = x[i] - mean;
        const float var = static_cast<float>(sum_rows(y, n, [](float v) { return v * v; }) / n);
        const float s = 1.0f / std::sqrt(var + eps);
        for (int64_t i = 0; i < n; ++i) y[i] *= s;
        if (const float* w = weight_row(ts, op.src[1], i1)) {
            for (int64_t i = 0; i < n; ++i) y[i] *= w[i];
        }
        if (const float* b = weight_row(ts, op.src[2], i1)) {
            for (int64_t i = 0; i < n; ++i) y[i] += b[i];
        }
    });
}

// dst[:, t] = src0[:, src1[t]] as f32; src0 of any type.
void op_get_rows(const ThreadContext& ctx, const Op& op, const Tensor* ts, const Runtime&) {
    const Tensor& dst = ts[op.dst];
    const Tensor& table = ts[op.src[0]];
    const int32_t* ids = reinterpret_cast<const int32_t*>(ts[op.src[1]].data);
    int64_t begin, end;
    split_range(dst.ne[1], ctx.ith, ctx.nth, 1, &begin, &end);
    for (int64_t t = begin; t < end; ++t) {
        float* out = row<float>(dst, t);
        if (ids[t] < 0) {  // of an expert that was dropped
            std::fill(out, out + dst.ne[0], 0.0f);
        } else if (table.type == kF32) {
            const float* x = row<const float>(table, ids[t]);
            std::copy(x, x + dst.ne[0], out);
        } else {
            dequantize_rows(table.type, table.data, dst.ne[0], ids[t], 1, out, dst.ne[0], true);
        }
    }
}

}  // namespace ikpy
