// The largest of every few logits, so that the search for the likeliest tokens reads few of them: every
// thread looks at those that it has just computed, while they are in its caches.
#include <algorithm>
#include <limits>

#include "ikpy/ops.hpp"

namespace ikpy {
namespace {

constexpr int kLanes = 16;

// NaN if there is one.
float largest(const float* x, int64_t n) {
    float best[kLanes];
    int any_nan = 0;
    std::fill_n(best, kLanes, -std::numeric_limits<float>::infinity());
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        for (int l = 0; l < kLanes; ++l) {
            best[l] = x[i + l] > best[l] ? x[i + l] : best[l];
            any_nan |= x[i + l] != x[i + l];
        }
    for (; i < n; ++i) {
        best[0] = std::max(best[0], x[i]);
        any_nan |= x[i] != x[i];
    }
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int l = 0; l < width; ++l) best[l] = std::max(best[l], best[l + width]);
    return any_nan ? std::numeric_limits<float>::quiet_NaN() : best[0];
}

}  // namespace

void op_block_maxima(const ThreadContext& ctx, const Op& op, const Tensor* tensors, const Runtime&) {
    const Tensor& dst = tensors[op.dst];
    const Tensor& src = tensors[op.src[0]];
    const int64_t size = op.ip[0];
    int64_t begin, end;
    split_range(dst.ne[0], ctx.ith, ctx.nth, 1, &begin, &end);
    for (int64_t r = 0; r < dst.ne[1]; ++r) {
        const float* x = row<const float>(src, r);
        float* y = row<float>(dst, r);
        for (int64_t b = begin; b < end; ++b)
            y[b] = largest(x + b * size, std::min(size, src.ne[0] - b * size));
    }
}

}  // namespace ikpy
