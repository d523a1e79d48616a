// Unpackers of IQ4_NL and IQ4_XS. Layouts: quant-formats section 6.1.
#pragma once
#include "kernels/unpacked.hpp"
#include "unpack/level_tables.hpp"

namespace ikpy {

struct UnpackIQ4_NL {
    static constexpr int kType = 20, kGroup = 32, kBlock = 32, kBlockBytes = 18, kZero = 128;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        for (int j = 0; j < 16; ++j) {
            codes[j] = kIq4Codes[p[2 + j] & 15];
            codes[j + 16] = kIq4Codes[p[2 + j] >> 4];
        }
        *d = load_f16(p);
    }
};

struct UnpackIQ4_XS {
    static constexpr int kType = 23, kGroup = 32, kBlock = 256, kBlockBytes = 136, kZero = 128;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        const float scale = load_f16(p);
        const int high = load_as<uint16_t>(p + 2);
        for (int g = 0; g < 8; ++g) {
            const int s = (p[4 + g / 2] >> (4 * (g & 1)) & 15) | (high >> (2 * g) & 3) << 4;
            d[g] = scale * static_cast<float>(s - 32);
            for (int j = 0; j < 16; ++j) {
                codes[32 * g + j] = kIq4Codes[p[8 + 16 * g + j] & 15];
                codes[32 * g + j + 16] = kIq4Codes[p[8 + 16 * g + j] >> 4];
            }
        }
    }
};

}  // namespace ikpy
