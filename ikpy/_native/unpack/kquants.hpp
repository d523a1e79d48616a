// Unpackers of Q2_K .. Q6_K. Layouts: quant-formats section 6.1.
#pragma once
#include "kernels/unpacked.hpp"

namespace ikpy {

// 2-bit fields of 64 bytes in the order of elements: byte 32 * b128 + c, shift 2 * (b32 & 3).
inline uint8_t two_bits(const uint8_t* qs, int e) { return qs[32 * (e >> 7) + (e & 31)] >> (2 * (e >> 5 & 3)) & 3; }

// The eight 6-bit scales and minima of Q4_K and Q5_K.
inline void scales_and_mins(const uint8_t* s, uint8_t* scale, uint8_t* min) {
    for (int j = 0; j < 4; ++j) {
        scale[j] = s[j] & 63;
        min[j] = s[j + 4] & 63;
        scale[j + 4] = static_cast<uint8_t>((s[j + 8] & 15) | (s[j] >> 6) << 4);
        min[j + 4] = static_cast<uint8_t>(s[j + 8] >> 4 | (s[j + 4] >> 6) << 4);
    }
}

struct UnpackQ2_K {
    static constexpr int kType = 10, kGroup = 16, kBlock = 256, kBlockBytes = 84, kZero = 0;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float* m) {
        const float scale = load_f16(p + 80), min = load_f16(p + 82);
        for (int g = 0; g < 16; ++g) {
            d[g] = scale * static_cast<float>(p[g] & 15);
            m[g] = -min * static_cast<float>(p[g] >> 4);
        }
        for (int e = 0; e < 256; ++e) codes[e] = two_bits(p + 16, e);
    }
};

struct UnpackQ3_K {
    static constexpr int kType = 11, kGroup = 16, kBlock = 256, kBlockBytes = 110, kZero = 4;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        const uint8_t* scales = p + 96;
        const float scale = load_f16(p + 108);
        for (int g = 0; g < 16; ++g) {
            const int low = scales[g & 7] >> (4 * (g >> 3)) & 15, high = scales[8 + (g & 3)] >> (2 * (g >> 2)) & 3;
            d[g] = scale * static_cast<float>((low | high << 4) - 32);
        }
        for (int e = 0; e < 256; ++e)
            codes[e] = static_cast<uint8_t>(two_bits(p + 32, e) + 4 * (p[e & 31] >> (e >> 5) & 1));
    }
};

struct UnpackQ4_K {
    static constexpr int kType = 12, kGroup = 32, kBlock = 256, kBlockBytes = 144, kZero = 0;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float* m) {
        const float scale = load_f16(p), min = load_f16(p + 2);
        uint8_t sc[8], mn[8];
        scales_and_mins(p + 4, sc, mn);
        for (int g = 0; g < 8; ++g) {
            d[g] = scale * static_cast<float>(sc[g]);
            m[g] = -min * static_cast<float>(mn[g]);
        }
        for (int b = 0; b < 4; ++b)
            for (int c = 0; c < 32; ++c) {
                codes[64 * b + c] = p[16 + 32 * b + c] & 15;
                codes[64 * b + 32 + c] = p[16 + 32 * b + c] >> 4;
            }
    }
};

struct UnpackQ5_K {
    static constexpr int kType = 13, kGroup = 32, kBlock = 256, kBlockBytes = 176, kZero = 0;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float* m) {
        const float scale = load_f16(p), min = load_f16(p + 2);
        uint8_t sc[8], mn[8];
        scales_and_mins(p + 4, sc, mn);
        for (int g = 0; g < 8; ++g) {
            d[g] = scale * static_cast<float>(sc[g]);
            m[g] = -min * static_cast<float>(mn[g]);
        }
        for (int b = 0; b < 4; ++b)
            for (int c = 0; c < 32; ++c) {
                const int low = p[48 + 32 * b + c], high = p[16 + c] >> (2 * b);
                codes[64 * b + c] = static_cast<uint8_t>((low & 15) + 16 * (high & 1));
                codes[64 * b + 32 + c] = static_cast<uint8_t>((low >> 4) + 16 * (high >> 1 & 1));
            }
    }
};

struct UnpackQ6_K {
    static constexpr int kType = 14, kGroup = 16, kBlock = 256, kBlockBytes = 210, kZero = 32;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        const float scale = load_f16(p + 208);
        for (int g = 0; g < 16; ++g) d[g] = scale * static_cast<float>(static_cast<int8_t>(p[192 + g]));
        for (int h = 0; h < 2; ++h)
            for (int t = 0; t < 4; ++t)
                for (int c = 0; c < 32; ++c) {
                    const int low = p[64 * h + c + 32 * (t & 1)] >> (4 * (t >> 1)) & 15;
                    const int high = p[128 + 32 * h + c] >> (2 * t) & 3;
                    codes[128 * h + 32 * t + c] = static_cast<uint8_t>(low | high << 4);
                }
    }
};

}  // namespace ikpy
