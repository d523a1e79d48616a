// Element-wise ops over strided views: add, mul, scale, unary, gated unary, soft cap, copy.
#include <algorithm>
#include <cmath>
#include <limits>

#include "ikpy/ops.hpp"
#include "ikpy/vecmath.hpp"
#include "kernels/cache/kv_types.hpp"
#include "quantize/dequantize.hpp"

namespace ikpy {

namespace {

struct RowIndex {
    int64_t i1, i2, i3;
};

RowIndex unravel(const Tensor& t, int64_t r) {
    return {r % t.ne[1], r / t.ne[1] % t.ne[2], r / (t.ne[1] * t.ne[2])};
}

// Calls f(i1, i2, i3) for this thread's share of the rows of t.
template <typename F>
void for_rows(const ThreadContext& ctx, const Tensor& t, F&& f) {
    int64_t begin, end;
    split_range(n_rows(t), ctx.ith, ctx.nth, 1, &begin, &end);
    for (int64_t r = begin; r < end; ++r) {
        const RowIndex i = unravel(t, r);
        f(i.i1, i.i2, i.i3);
    }
}

// For a single long row the columns are shared instead: [begin, end) of this thread.
template <typename F>
void for_row_parts(const ThreadContext& ctx, const Tensor& t, F&& f) {
    const int64_t rows = n_rows(t);
    if (rows >= ctx.nth || t.ne[0] < 4096) {
        for_rows(ctx, t, [&](int64_t a, int64_t b, int64_t c) { f(a, b, c, int64_t{0}, t.ne[0]); });
        return;
    }
    int64_t begin, end;
    split_range(t.ne[0], ctx.ith, ctx.nth, 16, &begin, &end);
    for (int64_t r = 0; r < rows; ++r) {
        const RowIndex i = unravel(t, r);
        f(i.i1, i.i2, i.i3, begin, end);
    }
}

template <typename F>
void binary(const ThreadContext& ctx, const Op& op, const Tensor* ts, F&& f) {
    const Tensor& dst = ts[op.dst];
    const Tensor& a = ts[op.src[0]];
    const Tensor& b = ts[op.src[1]];
    for_row_parts(ctx, dst, [&](int64_t i1, int64_t i2, int64_t i3, int64_t c0, int64_t c1) {
        const float* x = row<const float>(a, i1, i2, i3);
        const float* y = row<const float>(b, i1 % b.ne[1], i2 % b.ne[2], i3 % b.ne[3]);
        float* z = row<float>(dst, i1, i2, i3);
        if (b.ne[0] == 1) {
            const float s = y[0];
            for (int64_t i = c0; i < c1; ++i) z[i] = f(x[i], s);
        } else {
            for (int64_t i = c0; i < c1; ++i) z[i] = f(x[i], y[i]);
        }
    });
}

template <typename F>
void unary(const ThreadContext& ctx, const Op& op, const Tensor* ts, F&& f) {
    const Tensor& dst = ts[op.dst];
    const Tensor& a = ts[op.src[0]];
    for_row_parts(ctx, dst, [&](int64_t i1, int64_t i2, int64_t i3, int64_t c0, int64_t c1) {
        const float* x = row<const float>(a, i1, i2, i3);
        float* z = row<float>(dst, i1, i2, i3);
        for (int64_t i = c0; i < c1; ++i) z[i] = f(x[i]);
    });
}

}  // namespace

void op_add(const ThreadContext& ctx, const Op& op, const Tensor* ts, const Runtime&) {
    binary(ctx, op, ts, [](float x, float y) { return x + y; });
}

void op_mul(const ThreadContext& ctx, const Op& op, const Tensor* ts, const Runtime&) {
    binary(ctx, op, ts, [](float x, float y) { return x * y; });
}

// dst = src0 * fp[0] + fp[1]
void op_scale(const ThreadContext& ctx, const Op& op, const Tensor* ts, const Runtime&) {
    const float s = op.fp[0], o = op.fp[1];
    unary(ctx, op, ts, [=](float x) { return x * s + o; });
}

// dst = fp[0] * tanh(src0 / fp[0])
void op_softcap(const ThreadContext& ctx, const Op& op, const Tensor* ts, const Runtime&) {
    const float cap = op.fp[0];
    unary(ctx, op, ts, [=](float x) { return cap * std::tanh(x / cap); });
}

namespace {

// Kinds of op_unary that products do not apply, some with parameters: fp = positive, negative, beta, eps; and
// the least magnitude whose root is taken.
constexpr int32_t kXielu = 9, kSignedRoot = 10, kExponential = 11;

// xIELU (arXiv:2411.13010)
void xielu(const ThreadContext& ctx, const Op& op, const Tensor* ts) {
    const float positive = op.fp[0], negative = op.fp[1], beta = op.fp[2], eps = op.fp[3];
    unary(ctx, op, ts, [=](float x) {
        const float bent = x > 0 ? positive * x * x : negative * (exp_fast(x < eps ? x : eps) - 1.0f - x);
        return bent + beta * x;
    });
}

// The root of the magnitude with the sign of x; 0 of 0. Comparisons leave NaN as they are.
float signed_root(float x, float least) {
    const float magnitude = std::fabs(x);
    return x == 0 ? 0.0f : std::copysign(std::sqrt(magnitude < least ? least : magnitude), x);
}

}  // namespace

void op_unary(const ThreadContext& ctx, const Op& op, const Tensor* ts, const Runtime&) {
    switch (op.ip[0]) {
        case kSilu:
            return unary(ctx, op, ts, [](float x) { return silu(x); });
        case kGelu:
            return unary(ctx, op, ts, [](float x) { return gelu(x); });
        case kRelu:
            return unary(ctx, op, ts, [](float x) { return x > 0 ? x : 0.0f; });
        case kReluSquared:
            return unary(ctx, op, ts, [](float x) { return relu_squared(x); });
        case kSigmoid:
            return unary(ctx, op, ts, [](float x) { return sigmoid(x); });
        case kTanh:
            return unary(ctx, op, ts, [](float x) { return std::tanh(x); });
        case kGeluErf:
            return unary(ctx, op, ts, [](float x) { return gelu_erf(x); });
        case kSoftplus:
            return unary(ctx, op, ts, [](float x) { return softplus(x); });
        case kXielu:
            return xielu(ctx, op, ts);
        case kSignedRoot:
            return unary(ctx, op, ts, [least = op.fp[0]](float x) { return signed_root(x, least); });
        case kExponential:
            return unary(ctx, op, ts, [](float x) { return exp_fast(x); });
    }
}

namespace {

// act(gate) * up, both bounded before. Comparisons leave NaN as they are.
template <typename F>
void gated(const ThreadContext& ctx, const Op& op, const Tensor* ts, F&& f) {
    const float limit = op.fp[0] > 0 ? op.fp[0] : std::numeric_limits<float>::infinity();
    binary(ctx, op, ts, [=](float g, float u) {
        u = u > limit ? limit : u;
        return f(g > limit ? limit : g, u < -limit ? -limit : u);
    });
}

}  // namespace

// dst = act(src0) * src1; with fp[0] > 0 act(min(src0, fp[0])) * clamp(src1, -fp[0], fp[0])
void op_gated_unary(const ThreadContext& ctx, const Op& op, const Tensor* ts, const Runtime&) {
    switch (op.ip[0]) {
        case kSilu:
            return gated(ctx, op, ts, [](float g, float u) { return silu(g) * u; });
        case kGelu:
            return gated(ctx, op, ts, [](float g, float u) { return gelu(g) * u; });
        case kRelu:
            return gated(ctx, op, ts, [](float g, float u) { return (g > 0 ? g : 0.0f) * u; });
        case kReluSquared:
            return gated(ctx, op, ts, [](float g, float u) { return relu_squared(g) * u; });
        case kSigmoid:
            return gated(ctx, op, ts, [](float g, float u) { return sigmoid(g) * u; });
        case kSwigluOai:
            return gated(ctx, op, ts, [](float g, float u) { return swiglu_oai(g, u); });
    }
}

// Strided copy: f32 to f32 or to a cache type, or any other type unpacked to f32.
void op_copy(const ThreadContext& ctx, const Op& op, const Tensor* ts, const Runtime&) {
    const Tensor& dst = ts[op.dst];
    const Tensor& a = ts[op.src[0]];
    const kv::StoreRow store = dst.type == kF32 ? nullptr : kv::store_row(dst.type);
    for_rows(ctx, dst, [&](int64_t i1, int64_t i2, int64_t i3) {
        const float* x = row<const float>(a, i1, i2, i3);
        if (a.type != kF32) {
            dequantize_rows(a.type, row<const uint8_t>(a, i1, i2, i3), dst.ne[0], 0, 1,
                            row<float>(dst, i1, i2, i3), dst.ne[0], true);
        } else if (store) {
            store(x, dst.ne[0], row<uint8_t>(dst, i1, i2, i3));
        } else {
            std::copy(x, x + dst.ne[0], row<float>(dst, i1, i2, i3));
        }
    });
}

}  // namespace ikpy
