#include "kernels/matmul/activations.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "ikpy/ops.hpp"
#include "kernels/matmul/activation_chunk.hpp"
#include "kernels/simd/half_rows.hpp"

namespace ikpy {
namespace {

// A group with an infinity or a NaN: every product with it is NaN. Integers would hide it, and a broken model
// would go on with numbers that mean nothing.
void mark_group(int8_t* q, float* scale, int32_t* sum_low, int32_t* sum_high) {
    std::memset(q, 0, 32);
    *scale = std::numeric_limits<float>::quiet_NaN();
    *sum_low = *sum_high = 0;
}

// Quantizes 32 floats: scale = amax / 127 rounded to bf16, q = round to nearest even of x / scale. The
// reference's activation blocks hold such scales; with the same rounding both programs' products agree to the
// order of sums.
void quantize_group(const float* x, int8_t* q, float* scale, int32_t* sum_low, int32_t* sum_high) {
    // Compared by their bits, infinities and NaN are the largest magnitudes.
    uint32_t top = 0;
    for (int i = 0; i < 32; ++i) top = std::max(top, f32_bits(x[i]) & 0x7FFFFFFF);
    const float amax = f32_from_bits(top);
    if (!std::isfinite(amax)) return mark_group(q, scale, sum_low, sum_high);
    // Below 1e-35 the inverse overflows; such a group counts as zero.
    const bool counts = amax > 1e-35f;
    *scale = counts ? bf16_to_f32(f32_to_bf16(amax / 127.0f)) : 0.0f;
    const float inverse = counts ? 1.0f / *scale : 0.0f;
    float scaled[32];
    for (int i = 0; i < 32; ++i) scaled[i] = x[i] * inverse;
    // Keeps the product from being fused with the addition: all tiers shall round alike.
    asm("" : "+m"(scaled));
    int32_t values[32];
    for (int i = 0; i < 32; ++i) {
        const float shifted = scaled[i] + kStartValue;  // rounds to an integer, half to even
        int32_t bits;
        std::memcpy(&bits, &shifted, 4);
        values[i] = bits - kStartBits;
    }
    int32_t low = 0, high = 0;
    for (int i = 0; i < 16; ++i) low += values[i];
    for (int i = 16; i < 32; ++i) high += values[i];
    for (int i = 0; i < 32; ++i) q[i] = static_cast<int8_t>(values[i]);
    *sum_low = low;
    *sum_high = high;
}

// Makes 16 integers and their unit of sums over 16 columns and the scales of 32. A group that is not finite
// has a scale that says so.
void weigh_sums(const float* sum16, const float* scale, int16_t* weighted, float* unit) {
    float v[16], largest = 0.0f, all = 0.0f;
    for (int i = 0; i < 16; ++i) v[i] = sum16[i] * scale[i / 2];
    for (int i = 0; i < 16; ++i) largest = std::max(largest, std::fabs(v[i]));
    for (int i = 0; i < 16; ++i) all += std::fabs(v[i]);
    const float least = std::max(largest / 32767.0f, all * (kLargestWeight / float((1 << 22) - 256)));
    const bool counts = least > 1e-37f && std::isfinite(all);
    *unit = counts ? least : 0.0f;
    const float inverse = counts ? 1.0f / least : 0.0f;
    for (int i = 0; i < 16; ++i) {
        const float shifted = (counts ? v[i] * inverse : 0.0f) + kStartValue;
        weighted[i] = static_cast<int16_t>(static_cast<int32_t>(f32_bits(shifted)) - kStartBits);
    }
}

void prepare_group(const float* x, int64_t n_in, int64_t g, const ActQ8Layout& at, uint8_t* out) {
    auto* sum16 = reinterpret_cast<float*>(out + at.sum16);
    auto* start16 = reinterpret_cast<int32_t*>(out + at.start16);
    const float* group = x + 32 * g;
    float padded[32];
    if (32 * g + 32 > n_in) {
        std::memset(padded, 0, sizeof(padded));
        if (32 * g < n_in) std::memcpy(padded, group, sizeof(float) * (n_in - 32 * g));
        group = padded;
    }
    int32_t low, high;
    quantize_group(group, reinterpret_cast<int8_t*>(out) + 32 * g,
                   reinterpret_cast<float*>(out + at.scale) + g, &low, &high);
    reinterpret_cast<float*>(out + at.sum32)[g] = static_cast<float>(low + high);
    reinterpret_cast<int32_t*>(out + at.start32)[g] = kStartBits - 128 * (low + high);
    sum16[2 * g] = static_cast<float>(low);
    sum16[2 * g + 1] = static_cast<float>(high);
    start16[2 * g] = kStartBits - 128 * low;
    start16[2 * g + 1] = kStartBits - 128 * high;
}

// Groups first .. last - 1 of a row, whole chunks.
void prepare_q8(const float* x, int64_t n_in, int64_t first, int64_t last, uint8_t* out) {
    const ActQ8Layout at(n_in);
    for (int64_t c = first / 8; c < last / 8; ++c) {
#if defined(__AVX512VNNI__)
        const bool is_done = 256 * (c + 1) <= n_in && quantize_chunk(x, c, at, out);
#else
        const bool is_done = false;
#endif
        for (int64_t g = 8 * c; !is_done && g < 8 * c + 8; ++g) prepare_group(x, n_in, g, at, out);
        if (!kByteDots) continue;
        weigh_sums(reinterpret_cast<const float*>(out + at.sum16) + 16 * c,
                   reinterpret_cast<const float*>(out + at.scale) + 8 * c,
                   reinterpret_cast<int16_t*>(out + at.weighted) + 16 * c,
                   reinterpret_cast<float*>(out + at.weighted_unit) + c);
    }
}

void prepare_split(const float* x, int64_t n_in, uint8_t* out) {
    auto* hi = reinterpret_cast<uint16_t*>(out);
    for (int64_t g = 0; g < n_in; g += 32, hi += 64) {
        uint16_t* lo = hi + 32;
        float v[32] = {};
        std::memcpy(v, x + g, sizeof(float) * std::min<int64_t>(32, n_in - g));
        uint32_t upper[32], lower[32];  // loops that become vectors
        for (int i = 0; i < 32; ++i) {
            upper[i] = f32_to_bf16(v[i]);
            lower[i] = f32_to_bf16(v[i] - bf16_to_f32(uint16_t(upper[i])));
        }
        for (int j = 0; j < 16; ++j) {
            const uint32_t pairs[2] = {upper[j] | upper[j + 16] << 16, lower[j] | lower[j + 16] << 16};
            std::memcpy(hi + 2 * j, pairs, 4);
            std::memcpy(lo + 2 * j, pairs + 1, 4);
        }
    }
}

// The exponent of infinities and NaN is above all others: they stay what they are.
void prepare_f16(const float* x, int64_t n_in, uint8_t* out) {
    uint32_t top = 0;
    for (int64_t i = 0; i < n_in; ++i) top = std::max(top, f32_bits(x[i]) & 0x7FFFFFFF);
    // Both factors are normal numbers: below 2^-112 magnitudes no longer reach the top of the range.
    const uint32_t exponent = std::max(top >> 23, uint32_t{15});
    const float scale = f32_from_bits((127 + 141 - exponent) << 23);
    const float inverse = f32_from_bits((exponent - 14) << 23);
    constexpr int64_t kStep = 64;
    float scaled[kStep];
    auto* y = reinterpret_cast<uint16_t*>(out);
    for (int64_t k = 0; k < n_in; k += kStep) {
        const int64_t n = std::min(kStep, n_in - k);
        for (int64_t i = 0; i < n; ++i) scaled[i] = x[k + i] * scale;
        f32_to_f16_row(scaled, y + k, n);
    }
    std::memset(y + n_in, 0, sizeof(uint16_t) * (round_up(n_in, 32) - n_in));
    std::memcpy(out + act_scale_at(kActF16, n_in), &inverse, sizeof(inverse));
}

void prepare_row(int format, const float* x, int64_t n_in, uint8_t* out) {
    if (format == kActQ8) {
        prepare_q8(x, n_in, 0, ActQ8Layout(n_in).n / 32, out);
    } else if (format == kActSplit) {
        prepare_split(x, n_in, out);
    } else if (format == kActF16) {
        prepare_f16(x, n_in, out);
    } else if (format == kActBf16) {
        auto* y = reinterpret_cast<uint16_t*>(out);
        f32_to_bf16_row(x, y, n_in);
        std::memset(y + n_in, 0, sizeof(uint16_t) * (round_up(n_in, 32) - n_in));
    } else {
        auto* y = reinterpret_cast<float*>(out);
        std::memcpy(y, x, sizeof(float) * n_in);
        std::memset(y + n_in, 0, sizeof(float) * (round_up(n_in, 16) - n_in));
    }
}

}  // namespace

int64_t act_row_bytes(int format, int64_t n_in) {
    int64_t n = 0;
    if (format == kActQ8) {
        n = ActQ8Layout(n_in).nbytes;
    } else if (format == kActBf16) {
        n = round_up(n_in, 32) * 2;
    } else if (format == kActF16) {
        n = act_scale_at(format, n_in) + static_cast<int64_t>(sizeof(float));
    } else if (format == kActSplit) {
        n = round_up(n_in, 32) * 4;
    } else {
        n = round_up(n_in, 16) * 4;
    }
    return (round_up(n, 64) / 64 | 1) * 64;
}

size_t act_nbytes(int format, int64_t n_in, int64_t n_rows, int64_t n_batch) {
    return static_cast<size_t>(act_row_bytes(format, n_in) * n_rows * n_batch);
}

namespace {

constexpr int64_t kLineGroups = 16;  // whose scales fill a cache line

// Parts into which many threads divide each of a few rows: 16,384 columns take one thread 14 microseconds.
int64_t parts_of_row(const ThreadContext& ctx, int format, int64_t n_in, int64_t n_rows) {
    if (format != kActQ8 || ctx.nth < kManyThreads || n_rows == 0 || n_rows >= ctx.nth) return 1;
    const int64_t most = (ActQ8Layout(n_in).n / 32 + kLineGroups - 1) / kLineGroups;
    return std::min(ctx.nth / n_rows, most);
}

}  // namespace

void op_act_prepare(const ThreadContext& ctx, const Op& op, const Tensor* tensors, const Runtime&) {
    const Tensor& x = tensors[op.src[0]];
    uint8_t* out = tensors[op.dst].data;
    const int format = op.ip[0];
    const int64_t n_in = x.ne[0], n_tokens = x.ne[1], n_batch = x.ne[2];
    const int64_t stride = act_row_bytes(format, n_in);
    const int64_t n_rows = n_tokens * n_batch, parts = parts_of_row(ctx, format, n_in, n_rows);
    int64_t begin, end;
    split_range(n_rows * parts, ctx.ith, ctx.nth, 1, &begin, &end);
    for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t r = unit / parts;
        const float* from = row<float>(x, r % n_tokens, r / n_tokens);
        if (parts == 1) {
            prepare_row(format, from, n_in, out + r * stride);
            continue;
        }
        int64_t first, last;
        split_range(ActQ8Layout(n_in).n / 32, int(unit % parts), int(parts), kLineGroups, &first, &last);
        prepare_q8(from, n_in, first, last, out + r * stride);
    }
}

}  // namespace ikpy
