// Types whose encoding is a formula without a search: F16, BF16, Q8_0, MXFP4, Q1_0_G128, IQ1_BN, IQ2_BN,
// BF16_R16.
#include <cmath>

#include "encoders.hpp"
#include "magnitude.hpp"
#include "search.hpp"
#include "tables.hpp"

namespace ikpy::quantize {
namespace {

// Loops here are written so that the compiler turns them into vector instructions.

void encode_f16(const Rows& r) {
    const int64_t n = r.n_rows * r.ne0;
    int64_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16) {
        const __m256i halves =
            _mm512_maskz_cvtps_ph(0xFFFF, _mm512_loadu_ps(r.src + i), _MM_FROUND_TO_NEAREST_INT);
        std::memcpy(r.dst + 2 * i, &halves, sizeof halves);
    }
#elif defined(__F16C__)
    for (; i + 8 <= n; i += 8) {
        const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(r.src + i), _MM_FROUND_TO_NEAREST_INT);
        std::memcpy(r.dst + 2 * i, &halves, sizeof halves);
    }
#endif
    for (; i < n; i++) put(r.dst + 2 * i, f32_to_f16(r.src[i]));
}

// f32_to_bf16 without a branch.
uint16_t rounded_bf16(float v) {
    const uint32_t bits = f32_bits(v), rounded = bits + 0x7FFF + ((bits >> 16) & 1);
    return static_cast<uint16_t>(((bits & 0x7FFFFFFF) > 0x7F800000 ? bits | 0x400000 : rounded) >> 16);
}

void encode_bf16(const Rows& r) {
    const float* x = r.src;  // bytes written could change the members of r
    uint8_t* out = r.dst;
    const int64_t n = r.n_rows * r.ne0;
    for (int64_t i = 0; i < n; i++) put(out + 2 * i, rounded_bf16(x[i]));
}

// Upper halves of the floats; 16 rows, pairs of columns.
void encode_bf16_r16(const Rows& r) {
    for (int64_t row = 0; row < r.n_rows; row += 16) {
        const float* x = r.src + row * r.ne0;
        uint8_t* out = r.dst + row * r.row_bytes;
        for (int64_t i = 0; i < r.ne0; i += 2, out += 64) {
            uint32_t pairs[16];
            for (int k = 0; k < 16; k++) {
                const float* pair = x + k * r.ne0 + i;
                pairs[k] = f32_bits(pair[0]) >> 16 | (f32_bits(pair[1]) & 0xFFFF0000);
            }
            std::memcpy(out, pairs, sizeof pairs);
        }
    }
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
        const float* x = r.src + i;  // bytes written could change the members of r
        const float d = largest_magnitude(x, 32) / 127.0f, inverse = finite_quotient(1.0f, d);
        put(block, f32_to_f16(d));
        for (int j = 0; j < 32; j++) block[2 + j] = static_cast<uint8_t>(round_half_away(x[j] * inverse));
    }
}

// Code of the nearest of the 16 values; the magnitudes (doubled) are 0 1 2 3 4 6 8 12, code 8 + k is
// negative.
int nearest_mxfp4(float v) {
    static constexpr float middle[7] = {0.5f, 1.5f, 2.5f, 3.5f, 5.0f, 7.0f, 10.0f};
    int code = 0;
    for (float m : middle) code += std::fabs(v) > m;
    return code + (v < -0.5f ? 8 : 0);
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
        uint8_t codes[32];
        for (int j = 0; j < 32; j++) codes[j] = static_cast<uint8_t>(nearest_mxfp4(r.src[i + j] * inverse));
        for (int j = 0; j < 16; j++) block[1 + j] = static_cast<uint8_t>(codes[j] | codes[j + 16] << 4);
    }
}

void encode_q1_0_g128(const Rows& r) {
    for (int64_t i = 0; i < r.n_rows * r.ne0; i += 128) {
        uint8_t* block = r.dst + i / 128 * 18;
        float sum = 0;
        for (int j = 0; j < 128; j++) sum += std::fabs(r.src[i + j]);
        for (int j = 0; j < 128; j += 8) {
            unsigned bits = 0;
            for (int k = 0; k < 8; k++) bits |= static_cast<unsigned>(r.src[i + j + k] >= 0) << k;
            block[2 + j / 8] = static_cast<uint8_t>(bits);
        }
        put(block, f32_to_f16(sum / 128));
    }
}

// 0, 1, 2 for negative, zero (|x| < d/2), positive.
int trit(float x, float d) { return 1 + (std::fabs(x) >= 0.5f * d) * ((x >= 0) - (x < 0)); }

void encode_iq2_bn(const Rows& r) {
    for (int64_t row = 0; row < r.n_rows; row++) {
        const float* x = r.src + row * r.ne0;
        uint8_t* out = r.dst + row * r.row_bytes;
        const float d = largest_magnitude(x, r.ne0);
        put(out, d);
        for (int64_t j = 0; j < r.ne0; j += 64) {
            for (int k = 0; k < 16; k++) {
                const float* v = x + j + k;
                out[4 + j / 4 + k] = static_cast<uint8_t>(trit(v[0], d) | trit(v[16], d) << 2 |
                                                          trit(v[32], d) << 4 | trit(v[48], d) << 6);
            }
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

Encoder simple_encoder(int type) {
    switch (type) {
        case 1:
            return encode_f16;
        case 8:
            return encode_q8_0;
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
        case 230:
            return encode_bf16_r16;
        default:
            return nullptr;
    }
}

}  // namespace ikpy::quantize
