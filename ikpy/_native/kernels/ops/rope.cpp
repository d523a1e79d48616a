// Rotary position embedding: one table of cosines and sines per batch, then rotations (arXiv:2104.09864).
#include <algorithm>
#include <cmath>

#include "ikpy/ops.hpp"

namespace ikpy {

namespace {

// Which of a token's four positions turns pair i: sections one behind the other (1), or height and width
// every third pair each (2), as far as their sections go.
int part_of_pair(const int32_t* ip, int64_t i) {
    const int64_t time = ip[2], height = ip[3], width = ip[4];
    if (ip[1] == 1) {
        const int64_t total = time + height + width + ip[5], at = i % total;
        return at < time ? 0 : at < time + height ? 1 : at < time + height + width ? 2 : 3;
    }
    if (i % 3 == 1 && i < 3 * height) return 1;
    return i % 3 == 2 && i < 3 * width ? 2 : 0;
}

}  // namespace

// src0 = positions i32 [T], or [4, T] with sections, src1 = frequency factors f32 [n/2] (optional), dst = f32
// [n, T] of (cos, sin) pairs. fp: base, freq_scale, ext_factor, attn_factor, low corner, high corner; ip: 1
// for negative sines, the kind of sections and their four lengths in pairs.
void op_rope_table(const ThreadContext& ctx, const Op& op, const Tensor* ts, const Runtime&) {
    const Tensor& dst = ts[op.dst];
    const int32_t* pos = reinterpret_cast<const int32_t*>(ts[op.src[0]].data);
    const int n_parts = op.ip[1] ? 4 : 1;
    const float* factors = op.src[1] >= 0 ? reinterpret_cast<const float*>(ts[op.src[1]].data) : nullptr;
    const int64_t n = dst.ne[0];
    const float base = op.fp[0], freq_scale = op.fp[1], ext = op.fp[2], low = op.fp[4], high = op.fp[5];
    const float magnitude = ext == 0 ? op.fp[3] : op.fp[3] * (1.0f + 0.1f * std::log(1.0f / freq_scale));
    const float theta_scale = std::pow(base, -2.0f / n), direction = op.ip[0] ? -1.0f : 1.0f;
    int64_t begin, end;
    split_range(dst.ne[1], ctx.ith, ctx.nth, 1, &begin, &end);
    for (int64_t t = begin; t < end; ++t) {
        float* out = row<float>(dst, t);
        float thetas[4];
        for (int p = 0; p < n_parts; ++p) thetas[p] = static_cast<float>(pos[n_parts * t + p]);
        for (int64_t i = 0; i < n / 2; ++i) {
            const int part = op.ip[1] ? part_of_pair(op.ip, i) : 0;
            const float theta = thetas[part];
            for (int p = 0; p < n_parts; ++p) thetas[p] *= theta_scale;
            const float extrapolated = factors ? theta / factors[i] : theta;
            float angle = freq_scale * extrapolated;
            if (ext != 0) {
                const float ramp = (i - low) / std::max(0.001f, high - low);
                const float mix = (1.0f - std::min(1.0f, std::max(0.0f, ramp))) * ext;
                angle = angle * (1.0f - mix) + extrapolated * mix;
            }
            out[2 * i] = std::cos(angle) * magnitude;
            out[2 * i + 1] = std::sin(angle) * magnitude * direction;
        }
    }
}

// dst = src0 [d, H, T] with n = ip[0] elements from offset ip[2] of every head rotated by the table src1;
// ip[1]: 0 pairs (2i, 2i+1), 1 pairs (i, i + n/2). May run in place.
void op_rope(const ThreadContext& ctx, const Op& op, const Tensor* ts, const Runtime&) {
    const Tensor& dst = ts[op.dst];
    const Tensor& src = ts[op.src[0]];
    const Tensor& table = ts[op.src[1]];
    const int64_t n = op.ip[0], offset = op.ip[2];
    const bool neox = op.ip[1] == 1;
    const int64_t heads = dst.ne[1];
    int64_t begin, end;
    split_range(heads * dst.ne[2], ctx.ith, ctx.nth, 1, &begin, &end);
    for (int64_t r = begin; r < end; ++r) {
        const int64_t h = r % heads, t = r / heads;
        const float* x = row<const float>(src, h, t);
        float* y = row<float>(dst, h, t);
        const float* cs = row<const float>(table, t);
        if (x != y) std::copy(x, x + dst.ne[0], y);
        float* z = y + offset;
        const int64_t half = n / 2;
        for (int64_t i = 0; i < half; ++i) {
            float& a = neox ? z[i] : z[2 * i];
            float& b = neox ? z[i + half] : z[2 * i + 1];
            const float c = cs[2 * i], s = cs[2 * i + 1], a0 = a, b0 = b;
            a = a0 * c - b0 * s;
            b = a0 * s + b0 * c;
        }
    }
}

// dst f32 [1, 1, T] = 1 + fp[0] * ln(1 + floor((pos + ip[1]) / ip[0])); src0 = positions i32 [T].
void op_attention_temperature(const ThreadContext& ctx, const Op& op, const Tensor* ts, const Runtime&) {
    if (ctx.ith != 0) return;
    const int32_t* pos = reinterpret_cast<const int32_t*>(ts[op.src[0]].data);
    float* out = reinterpret_cast<float*>(ts[op.dst].data);
    for (int64_t t = 0; t < ts[op.dst].ne[2]; ++t) {
        const int32_t periods = (pos[t] + op.ip[1]) / op.ip[0];
        out[t] = 1.0f + op.fp[0] * std::log(1.0f + static_cast<float>(periods));
    }
}

}  // namespace ikpy
