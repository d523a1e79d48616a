#include "kernels/cache/kv_types.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cache/kv_blocks.hpp"
#include "kernels/simd/half_rows.hpp"

namespace ikpy {
namespace kv {
namespace {

constexpr int kBlock = 32;

int clamp_level(float x, int low, int high) { return std::min(high, std::max(low, int(std::lrintf(x)))); }

// The code that v is cut to, 0 for NaN: 0 times the inverse of a tiny scale is that, or what a damaged model
// computes.
int code_of(float v, int top) { return int(std::max(0.0f, std::min(v, float(top)))); }

// NaN if any element is: as integers, magnitudes have the order of the numbers, infinity and NaN above them.
float highest_magnitude(const float* x, int64_t n) {
    uint32_t best = 0;
    for (int64_t i = 0; i < n; ++i) {
        uint32_t bits;
        std::memcpy(&bits, x + i, sizeof(bits));
        best = std::max(best, bits & 0x7fffffffu);
    }
    float magnitude;
    std::memcpy(&magnitude, &best, sizeof(best));
    return magnitude;
}

// Element of largest magnitude, with its sign, the first of several; NaN if there is one.
float signed_extreme(const float* x, int n) {
    const float top = highest_magnitude(x, n);
    for (int i = 0; i < n && top != 0.0f; ++i) {
        if (std::fabs(x[i]) == top) return x[i];
    }
    return top;
}

// Least-squares scale for fixed levels, errors weighted by x^2; fallback when all levels are 0.
float refit_scale(const float* x, const int* levels, int n, float fallback) {
    float num = 0.0f, den = 0.0f;
    for (int i = 0; i < n; ++i) {
        const float w = x[i] * x[i];
        num += w * x[i] * float(levels[i]);
        den += w * float(levels[i] * levels[i]);
    }
    return den > 0.0f ? num / den : fallback;
}

void put_f16(uint8_t* dst, float x) {
    const uint16_t h = f32_to_f16(x);
    std::memcpy(dst, &h, sizeof(h));
}

void store_f32(const float* src, int64_t n, uint8_t* dst) {
    std::memcpy(dst, src, size_t(n) * sizeof(float));
}

void store_f16(const float* src, int64_t n, uint8_t* dst) {
    f32_to_f16_row(src, reinterpret_cast<uint16_t*>(dst), n);
}

void store_bf16(const float* src, int64_t n, uint8_t* dst) {
    f32_to_bf16_row(src, reinterpret_cast<uint16_t*>(dst), n);
}

void store_q8_0(const float* src, int64_t n, uint8_t* dst) {
    for (int64_t b = 0; b < n / kBlock; ++b) {
        const float* x = src + b * kBlock;
        uint8_t* y = dst + b * 34;
        const float amax = highest_magnitude(x, kBlock);
        const float inverse = amax > 0.0f ? 127.0f / amax : 0.0f;
        put_f16(y, amax / 127.0f);
        for (int i = 0; i < kBlock; ++i) y[2 + i] = uint8_t(int8_t(clamp_level(x[i] * inverse, -127, 127)));
    }
}

// Codes as blocks of kBytes end: the fifth bits if kFives, then pairs of nibbles.
template <int kBytes, bool kFives>
void put_codes(const int* code, uint8_t* y) {
    for (int j = 0; j < 16; ++j) y[kBytes - 16 + j] = uint8_t((code[j] & 15) | ((code[j + 16] & 15) << 4));
    if (!kFives) return;
    uint32_t bits = 0;
    for (int j = 0; j < kBlock; ++j) bits |= uint32_t(code[j] >> 4) << j;
    std::memcpy(y + kBytes - 20, &bits, sizeof(bits));
}

// Codes 0 .. kTop about their middle, 0 for the element of largest magnitude.
template <int kBytes, int kTop>
void store_about_middle(const float* src, int64_t n, uint8_t* dst) {
    constexpr float kMiddle = (kTop + 1) / 2;
    for (int64_t b = 0; b < n / kBlock; ++b) {
        const float* x = src + b * kBlock;
        uint8_t* y = dst + b * kBytes;
        const float d = signed_extreme(x, kBlock) / -kMiddle;
        const float inverse = d != 0.0f ? 1.0f / d : 0.0f;
        int code[kBlock];
        for (int i = 0; i < kBlock; ++i) code[i] = code_of(x[i] * inverse + (kMiddle + 0.5f), kTop);
        put_f16(y, d);
        put_codes<kBytes, (kTop > 15)>(code, y);
    }
}

// Codes 0 .. kTop from the smallest element to the largest.
template <int kBytes, int kTop>
void store_with_minimum(const float* src, int64_t n, uint8_t* dst) {
    for (int64_t b = 0; b < n / kBlock; ++b) {
        const float* x = src + b * kBlock;
        uint8_t* y = dst + b * kBytes;
        const float low = *std::min_element(x, x + kBlock), high = *std::max_element(x, x + kBlock);
        const float top = highest_magnitude(x, kBlock);
        const float d = std::isfinite(top) ? (high - low) / float(kTop) : top;
        const float inverse = d != 0.0f ? 1.0f / d : 0.0f;
        int code[kBlock];
        for (int i = 0; i < kBlock; ++i) code[i] = code_of((x[i] - low) * inverse + 0.5f, kTop);
        put_f16(y, d);
        put_f16(y + 2, low);
        put_codes<kBytes, (kTop > 15)>(code, y);
    }
}

void store_q6_0(const float* src, int64_t n, uint8_t* dst) {
    for (int64_t b = 0; b < n / kBlock; ++b) {
        const float* x = src + b * kBlock;
        uint8_t* y = dst + b * 26;
        const float d = signed_extreme(x, kBlock) / -32.0f;
        const float inverse = d != 0.0f ? 1.0f / d : 0.0f;
        int level[kBlock];
        for (int i = 0; i < kBlock; ++i) level[i] = clamp_level(x[i] * inverse, -32, 31);
        put_f16(y, refit_scale(x, level, kBlock, d));
        std::memset(y + 2, 0, 8);
        for (int j = 0; j < 16; ++j) {
            const int low = level[j] + 32, high = level[j + 16] + 32;
            const int shift = 4 * (j >> 3);
            y[10 + j] = uint8_t((low & 15) | ((high & 15) << 4));
            y[2 + (j & 7)] = uint8_t(y[2 + (j & 7)] | ((low >> 4) << shift) | ((high >> 4) << (shift + 2)));
        }
    }
}

int nearest_iq4_nl(float x) {
    int best = 0;
    while (best < 15 && x > 0.5f * float(kIq4NlValues[best] + kIq4NlValues[best + 1])) ++best;
    return best;
}

void store_iq4_nl(const float* src, int64_t n, uint8_t* dst) {
    for (int64_t b = 0; b < n / kBlock; ++b) {
        const float* x = src + b * kBlock;
        uint8_t* y = dst + b * 18;
        const float d = signed_extreme(x, kBlock) / float(kIq4NlValues[0]);
        const float inverse = d != 0.0f ? 1.0f / d : 0.0f;
        int code[kBlock], level[kBlock];
        for (int i = 0; i < kBlock; ++i) {
            code[i] = nearest_iq4_nl(x[i] * inverse);
            level[i] = kIq4NlValues[code[i]];
        }
        put_f16(y, d != 0.0f ? refit_scale(x, level, kBlock, d) : 0.0f);
        for (int j = 0; j < 16; ++j) y[2 + j] = uint8_t(code[j] | (code[j + 16] << 4));
    }
}

void store_q8_kv(const float* src, int64_t n, uint8_t* dst) {
    const float amax = highest_magnitude(src, n);
    const float d = amax / 127.0f;
    const float inverse = amax > 0.0f ? 127.0f / amax : 0.0f;
    int32_t sum = 0;
    for (int64_t i = 0; i < n; ++i) {
        const int q = clamp_level(src[i] * inverse, -127, 127);
        dst[8 + i] = uint8_t(int8_t(q));
        sum += q;
    }
    std::memcpy(dst, &d, sizeof(d));
    std::memcpy(dst + 4, &sum, sizeof(sum));
}

template <typename Row>
void load_all(const uint8_t* src, int64_t stride, int64_t n_rows, int64_t n, float* dst, int64_t ld) {
    for (int64_t r = 0; r < n_rows; ++r) Row::expand(src + r * stride, n, dst + r * ld);
}

}  // namespace

LoadRows load_rows(int type) {
    switch (type) {
        case kF32:
            return load_all<RowF32>;
        case kF16:
            return load_all<RowF16>;
        case kBF16:
            return load_all<RowBF16>;
        case kQ8_0:
            return load_all<RowQ8_0>;
        case kTypeQ4_0:
            return load_all<RowQ4_0>;
        case kTypeQ4_1:
            return load_all<RowQ4_1>;
        case kTypeQ5_0:
            return load_all<RowQ5_0>;
        case kTypeQ5_1:
            return load_all<RowQ5_1>;
        case kTypeQ6_0:
            return load_all<RowQ6_0>;
        case kTypeIQ4_NL:
            return load_all<RowIQ4_NL>;
        case kTypeQ8_KV:
            return load_all<RowQ8_KV>;
        default:
            return nullptr;
    }
}

StoreRow store_row(int type) {
    switch (type) {
        case kF32:
            return store_f32;
        case kF16:
            return store_f16;
        case kBF16:
            return store_bf16;
        case kQ8_0:
            return store_q8_0;
        case kTypeQ4_0:
            return store_about_middle<18, 15>;
        case kTypeQ4_1:
            return store_with_minimum<20, 15>;
        case kTypeQ5_0:
            return store_about_middle<22, 31>;
        case kTypeQ5_1:
            return store_with_minimum<24, 31>;
        case kTypeQ6_0:
            return store_q6_0;
        case kTypeIQ4_NL:
            return store_iq4_nl;
        case kTypeQ8_KV:
            return store_q8_kv;
        default:
            return nullptr;
    }
}

int middle_code(int type) { return type == kTypeQ4_1 ? kMiddleQ4_1 : type == kTypeQ5_1 ? kMiddleQ5_1 : 0; }

int64_t block_elements(int type) { return type == kF32 || type == kF16 || type == kBF16 ? 1 : kBlock; }

int64_t row_bytes(int type, int64_t n) {
    const int64_t blocks = (n + block_elements(type) - 1) / block_elements(type);
    switch (type) {
        case kF32:
            return 4 * blocks;
        case kF16:
        case kBF16:
            return 2 * blocks;
        case kQ8_0:
            return 34 * blocks;
        case kTypeQ4_1:
            return 20 * blocks;
        case kTypeQ5_0:
            return 22 * blocks;
        case kTypeQ5_1:
            return 24 * blocks;
        case kTypeQ6_0:
            return 26 * blocks;
        case kTypeQ8_KV:
            return 8 + 32 * blocks;
        default:
            return 18 * blocks;  // q4_0, iq4_nl
    }
}

}  // namespace kv
}  // namespace ikpy
