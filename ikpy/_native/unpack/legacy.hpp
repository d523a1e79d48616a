// Unpackers of the 32-element types: Q4_0, Q4_1, Q5_0, Q5_1, Q6_0, Q8_0. Layouts: quant-formats sections 6.1, 6.2.
#pragma once
#include "kernels/unpacked.hpp"

namespace ikpy {

struct UnpackQ4_0 {
    static constexpr int kType = 2, kGroup = 32, kBlock = 32, kBlockBytes = 18, kZero = 8;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        for (int j = 0; j < 16; ++j) {
            codes[j] = p[2 + j] & 15;
            codes[j + 16] = p[2 + j] >> 4;
        }
        *d = load_f16(p);
    }
};

struct UnpackQ4_1 {
    static constexpr int kType = 3, kGroup = 32, kBlock = 32, kBlockBytes = 20, kZero = 0;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float* m) {
        for (int j = 0; j < 16; ++j) {
            codes[j] = p[4 + j] & 15;
            codes[j + 16] = p[4 + j] >> 4;
        }
        *d = load_f16(p);
        *m = load_f16(p + 2);
    }
};

struct UnpackQ5_0 {
    static constexpr int kType = 6, kGroup = 32, kBlock = 32, kBlockBytes = 22, kZero = 16;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        const uint32_t high = load_as<uint32_t>(p + 2);
        for (int j = 0; j < 16; ++j) {
            codes[j] = static_cast<uint8_t>((p[6 + j] & 15) + 16 * (high >> j & 1));
            codes[j + 16] = static_cast<uint8_t>((p[6 + j] >> 4) + 16 * (high >> (j + 16) & 1));
        }
        *d = load_f16(p);
    }
};

struct UnpackQ5_1 {
    static constexpr int kType = 7, kGroup = 32, kBlock = 32, kBlockBytes = 24, kZero = 0;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float* m) {
        const uint32_t high = load_as<uint32_t>(p + 4);
        for (int j = 0; j < 16; ++j) {
            codes[j] = static_cast<uint8_t>((p[8 + j] & 15) + 16 * (high >> j & 1));
            codes[j + 16] = static_cast<uint8_t>((p[8 + j] >> 4) + 16 * (high >> (j + 16) & 1));
        }
        *d = load_f16(p);
        *m = load_f16(p + 2);
    }
};

struct UnpackQ6_0 {
    static constexpr int kType = 133, kGroup = 32, kBlock = 32, kBlockBytes = 26, kZero = 32;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        for (int j = 0; j < 16; ++j) {
            const int high = p[2 + (j & 7)] >> (4 * (j >> 3));
            codes[j] = static_cast<uint8_t>((p[10 + j] & 15) + 16 * (high & 3));
            codes[j + 16] = static_cast<uint8_t>((p[10 + j] >> 4) + 16 * (high >> 2 & 3));
        }
        *d = load_f16(p);
    }
};

struct UnpackQ8_0 {
    static constexpr int kType = 8, kGroup = 32, kBlock = 32, kBlockBytes = 34, kZero = 128;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        for (int j = 0; j < 32; ++j) codes[j] = p[2 + j] ^ 0x80;
        *d = load_f16(p);
    }
};

}  // namespace ikpy
