// Unpackers of IQ2_K .. IQ6_K. Layouts: quant-formats sections 6.7 to 6.11.
#pragma once
#include "kernels/unpacked.hpp"
#include "unpack/level_tables.hpp"

namespace ikpy {

inline int nibble(const uint8_t* p, int i) { return p[i >> 1] >> (4 * (i & 1)) & 15; }

// Scale of group g of IQ4_K and IQ5_K: 4 low bits at p + 8, 2 high bits at p + 4.
inline int six_bit_scale(const uint8_t* p, int g) {
    return (nibble(p + 8, g) | (p[4 + (g >> 2)] >> (2 * (g & 3)) & 3) << 4) - 32;
}

struct UnpackIQ2_K {
    static constexpr int kType = 137, kGroup = 16, kBlock = 256, kBlockBytes = 76, kZero = 128;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        const float scale = load_f16(p);
        const int extra = load_as<uint16_t>(p + 2);
        for (int g = 0; g < 16; ++g) d[g] = scale * static_cast<float>(nibble(p + 4, g) - 8);
        for (int e = 0; e < 256; ++e) {
            const int q = p[12 + 32 * (e >> 7) + (e & 31)] >> (2 * (e >> 5 & 3)) & 3;
            codes[e] = kIq2Codes[q + 4 * (extra >> (e >> 4) & 1)];
        }
    }
};

struct UnpackIQ3_K {
    static constexpr int kType = 138, kGroup = 16, kBlock = 256, kBlockBytes = 110, kZero = 128;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        const float scale = load_f16(p);
        const int extra = load_as<uint16_t>(p + 2), signs = load_as<uint16_t>(p + 4);
        for (int g = 0; g < 16; ++g) {
            const int s = 2 * nibble(p + 6, g) + 1;
            d[g] = scale * static_cast<float>(signs >> g & 1 ? -s : s);
        }
        for (int e = 0; e < 256; ++e) {
            const int low = p[14 + 32 * (e >> 7) + (e & 31)] >> (2 * (e >> 5 & 3)) & 3;
            const int high = p[78 + (e & 31)] >> (e >> 5) & 1;
            codes[e] = kIq3Codes[low + 4 * high + 8 * (extra >> (e >> 4) & 1)];
        }
    }
};

struct UnpackIQ4_K {
    static constexpr int kType = 139, kGroup = 16, kBlock = 256, kBlockBytes = 144, kZero = 128;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        const float scale = load_f16(p);
        const int extra = load_as<uint16_t>(p + 2);
        for (int g = 0; g < 16; ++g) {
            d[g] = scale * static_cast<float>(six_bit_scale(p, g));
            const uint8_t* table = kIq4Codes + 16 * (extra >> g & 1);
            for (int j = 0; j < 16; ++j)
                codes[16 * g + j] = table[p[16 + 16 * (g >> 1) + j] >> (4 * (g & 1)) & 15];
        }
    }
};

struct UnpackIQ5_K {
    static constexpr int kType = 140, kGroup = 16, kBlock = 256, kBlockBytes = 176, kZero = 128;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        const float scale = load_f16(p);
        const int extra = load_as<uint16_t>(p + 2);
        for (int g = 0; g < 16; ++g) d[g] = scale * static_cast<float>(six_bit_scale(p, g));
        for (int e = 0; e < 256; ++e) {
            const int low = p[16 + 32 * (e >> 6) + (e & 31)] >> (4 * (e >> 5 & 1)) & 15;
            const int high = p[144 + (e & 31)] >> (e >> 5) & 1;
            codes[e] = kIq5Codes[low + 16 * high + 32 * (extra >> (e >> 4) & 1)];
        }
    }
};

struct UnpackIQ6_K {
    static constexpr int kType = 141, kGroup = 16, kBlock = 256, kBlockBytes = 212, kZero = 128;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        const float scale = load_f16(p);
        const int extra = load_as<uint16_t>(p + 2);
        for (int g = 0; g < 16; ++g) d[g] = scale * static_cast<float>(static_cast<int8_t>(p[4 + g]));
        for (int e = 0; e < 256; ++e) {
            const int low = p[20 + 32 * (e >> 6) + (e & 31)] >> (4 * (e >> 5 & 1)) & 15;
            const int high = p[148 + 32 * (e >> 7) + (e & 31)] >> (2 * (e >> 5 & 3)) & 3;
            codes[e] = static_cast<uint8_t>(kIq6Codes[low + 16 * high] + (extra >> (e >> 4) & 1));
        }
    }
};

}  // namespace ikpy
