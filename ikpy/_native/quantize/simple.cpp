// Types whose encoding is a formula without a search: F16, BF16, Q8_0, MXFP4, Q1_0_G128, Q8_KV, IQ1_BN,
// IQ2_BN.
#include <cmath>

#include "encoders.hpp"
#include "search.hpp"
#include "tables.hpp"

namespace ikpy::quantize {
namespace {

void encode_f16(const Rows& r) {
    for (int64_t i = 0; i < r.n_rows * r.ne0; i++) put(r.dst + 2 * i, f32_to_f16(r.src[i]));
}

void encode_bf16(const Rows& r) {
    for (int64_t i = 0; i < r.n_rows * r.ne0; i++) put(r.dst + 2 * i, f32_to_bf16(r.src[i]));
}

float largest_magnitude(const float* x, int64_t n) {
    float m = 0;
    for (int64_t j = 0; j < n; j++) m = std::max(m, std::fabs(x[j]));
    return m;
}

// Nearest integer, ties away from zero: what Q8_0 files have had from the start, unlike the later 8-bit
// types. Values of f16 sources often lie exactly between two levels.
int round_half_away(float v) {
    const int whole = static_cast<int>(v);
    const float rest = v - static_cast<float>(whole);
    return whole + (rest >= 0.5f) - (rest <= -0.5f);
}

void encode_q8_0(const Rows& r) {
    for (int64_t i = 0; i < r.n_rows * r.ne0; i += 32) {
        uint8_t* block = r.dst + i / 32 * 34;
        const float d = largest_magnitude(r.src + i, 32) / 127.0f, inverse = d > 0 ? 1.0f / d : 0.0f;
        put(block, f32_to_f16(d));
        for (int j = 0; j < 32; j++)
            block[2 + j] = static_cast<uint8_t>(round_half_away(r.src[i + j] * inverse));
    }
}

void encode_q8_kv(const Rows& r) {
    for (int64_t row = 0; row < r.n_rows; row++) {
        const float* x = r.src + row * r.ne0;
        uint8_t* out = r.dst + row * r.row_bytes;
        const float d = largest_magnitude(x, r.ne0) / 127.0f, inverse = d > 0 ? 1.0f / d : 0.0f;
        int32_t sum = 0;
        for (int64_t j = 0; j < r.ne0; j++) {
            const int q = round_nearest(x[j] * inverse);
            out[8 + j] = static_cast<uint8_t>(q);
            sum += q;
        }
        put(out, d);
        put(out + 4, sum);
    }
}

// Code of the nearest of the 16 values; the magnitudes (doubled) are 0 1 2 3 4 6 8 12, code 8 + k is
// negative.
int nearest_mxfp4(float v) {
    static constexpr float middle[7] = {0.5f, 1.5f, 2.5f, 3.5f, 5.0f, 7.0f, 10.0f};
    int code = 0;
    for (float m : middle) code += std::fabs(v) > m;
    return code && v < 0 ? code + 8 : code;
}

void encode_mxfp4(const Rows& r) {
    for (int64_t i = 0; i < r.n_rows * r.ne0; i += 32) {
        uint8_t* block = r.dst + i / 32 * 17;
        std::memset(block, 0, 17);
        const float max = largest_magnitude(r.src + i, 32);
        if (max == 0) continue;
        const int e = std::clamp(std::ilogb(max) - 2 + 127, 0, 254);
        const float inverse = std::ldexp(1.0f, 128 - e);
        block[0] = static_cast<uint8_t>(e);
        for (int j = 0; j < 32; j++)
            block[1 + (j & 15)] |=
                static_cast<uint8_t>(nearest_mxfp4(r.src[i + j] * inverse) << 4 * (j >> 4));
    }
}

// Q8_K is an activation format; its rows are only made to be interleaved (Q8_K_R8, Q8_K_R16).
void encode_q8_k(const Rows& r) {
    for (int64_t i = 0; i < r.n_rows * r.ne0; i += 256) {
        uint8_t* block = r.dst + i / 256 * 296;
        const float* x = r.src + i;
        const float d = largest_magnitude(x, 256) / 127.0f, inverse = d > 0 ? 1.0f / d : 0.0f;
        int16_t sums[16] = {};
        int total = 0;
        for (int j = 0; j < 256; j++) {
            const int q = round_nearest(x[j] * inverse);
            block[8 + j] = static_cast<uint8_t>(q);
            sums[j >> 4] = static_cast<int16_t>(sums[j >> 4] + q);
            total += q;
        }
        put(block, d);
        put(block + 4, d * static_cast<float>(total));
        std::memcpy(block + 264, sums, sizeof sums);
    }
}

void encode_q1_0_g128(const Rows& r) {
    for (int64_t i = 0; i < r.n_rows * r.ne0; i += 128) {
        uint8_t* block = r.dst + i / 128 * 18;
        std::memset(block, 0, 18);
        float sum = 0;
        for (int j = 0; j < 128; j++) {
            sum += std::fabs(r.src[i + j]);
            if (r.src[i + j] >= 0) block[2 + (j >> 3)] |= static_cast<uint8_t>(1 << (j & 7));
        }
        put(block, f32_to_f16(sum / 128));
    }
}

// 0, 1, 2 for negative, zero (|x| < d/2), positive.
int trit(float x, float d) { return std::fabs(x) < 0.5f * d ? 1 : (x < 0 ? 0 : 2); }

void encode_iq2_bn(const Rows& r) {
    std::memset(r.dst, 0, static_cast<size_t>(r.n_rows * r.row_bytes));
    for (int64_t row = 0; row < r.n_rows; row++) {
        const float* x = r.src + row * r.ne0;
        uint8_t* out = r.dst + row * r.row_bytes;
        const float d = largest_magnitude(x, r.ne0);
        put(out, d);
        for (int64_t j = 0; j < r.ne0; j++) {
            out[4 + 16 * (j >> 6) + (j & 15)] |= static_cast<uint8_t>(trit(x[j], d) << 2 * ((j >> 4) & 3));
        }
    }
}

void encode_iq1_bn(const Rows& r) {
    static constexpr int power[5] = {1, 3, 9, 27, 81};
    for (int64_t row = 0; row < r.n_rows; row++) {
        const float* x = r.src + row * r.ne0;
        uint8_t* out = r.dst + row * r.row_bytes;
        const float d = largest_magnitude(x, r.ne0);
        put(out, f32_to_f16(d));
        uint8_t* block = out + 2;
        for (int64_t i = 0; i < r.ne0; i += 64, block += 13) {
            int extra = 0;
            for (int g = 0; g < 4; g++) {
                const float* group = x + i + 16 * g;
                for (int k = 0; k < 3; k++) {
                    int n = 0;
                    for (int j = 0; j < 5; j++) n += power[j] * trit(group[5 * k + j], d);
                    block[3 * g + k] = tables::iq1bn_encode[n];
                }
                extra += power[g] * trit(group[15], d);
            }
            block[12] = tables::iq1bn_encode[extra];
        }
    }
}

}  // namespace

void encode_bf16_truncated(const Rows& r) {
    for (int64_t i = 0; i < r.n_rows * r.ne0; i++)
        put(r.dst + 2 * i, static_cast<uint16_t>(f32_bits(r.src[i]) >> 16));
}

Encoder simple_encoder(int type) {
    switch (type) {
        case 1:
            return encode_f16;
        case 8:
            return encode_q8_0;
        case 15:
            return encode_q8_k;
        case 30:
            return encode_bf16;
        case 39:
            return encode_mxfp4;
        case 41:
            return encode_q1_0_g128;
        case 134:
            return encode_iq1_bn;
        case 135:
            return encode_iq2_bn;
        case 151:
            return encode_q8_kv;
        default:
            return nullptr;
    }
}

}  // namespace ikpy::quantize
