// Unpackers of IQ1_S and IQ1_M and the row-interleaved formats of these names: points of trits t moved by an
// eighth, so that codes are 9 + 8 * t + 1 or - 1 with an eighth of the scale. Layouts: quant-formats
// sections 6.1 and 8.7.
#pragma once
#include "kernels/unpacked.hpp"
#include "quantize/tables.hpp"
#include "unpack/wide.hpp"

namespace ikpy {
namespace ternary {

constexpr uint64_t kOnes = 0x0101010101010101;

// Eight codes: trits -1, 0, 1 become 0, 1, 2 without a borrow between bytes.
inline uint64_t codes(int index, bool down) {
    const uint64_t trits = load_unaligned<uint64_t>(tables::iq1s_grid + 8 * index);
    const uint64_t counts = (trits ^ 0x80 * kOnes) - 0x7F * kOnes;
    return (counts << 3) + (down ? 0 : 2) * kOnes;
}

inline void put(uint8_t* at, uint64_t v) { std::memcpy(at, &v, 8); }

inline float odd_eighth(int s) { return static_cast<float>(2 * s + 1) * 0.125f; }

}  // namespace ternary

struct UnpackIQ1_S {
    static constexpr int kType = 19, kGroup = 32, kBlock = 256, kBlockBytes = 50, kZero = 9;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        const float scale = load_f16(p);
        for (int s = 0; s < 8; ++s) {
            const int h = load_unaligned<uint16_t>(p + 34 + 2 * s);
            d[s] = scale * ternary::odd_eighth(h >> 12 & 7);
            for (int t = 0; t < 4; ++t)
                ternary::put(codes + 32 * s + 8 * t,
                             ternary::codes(p[2 + 4 * s + t] + 256 * (h >> (3 * t) & 7), h >> 15));
        }
    }
};

struct UnpackIQ1_M {
    static constexpr int kType = 29, kGroup = 16, kBlock = 256, kBlockBytes = 56, kZero = 9;
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        uint16_t words[4], bits = 0;
        std::memcpy(words, p + 48, 8);
        for (int w = 0; w < 4; ++w) bits = static_cast<uint16_t>(bits | (words[w] >> 12) << (4 * w));
        const float scale = f16_to_f32(bits);
        for (int s = 0; s < 16; ++s) {
            d[s] = scale * ternary::odd_eighth(words[s >> 2] >> (3 * (s & 3)) & 7);
            const int h = p[32 + s];
            ternary::put(codes + 16 * s, ternary::codes(p[2 * s] + 256 * (h & 7), h & 8));
            ternary::put(codes + 16 * s + 8, ternary::codes(p[2 * s + 1] + 256 * (h >> 4 & 7), h & 128));
        }
    }
};

struct UnpackIQ1_S_R4 {
    static constexpr int kType = 219, kRows = 4, kGroup = 32, kBlock = 32, kBlockBytes = 24, kZero = 9;
    static constexpr int kHeaderBytes = 2;
    static float row_scale(const uint8_t* group, int k) { return load_f16(group + 2 * k); }
    static void block(const uint8_t* p, int k, uint8_t* codes, float* d, float*) {
        const int h = load_unaligned<uint16_t>(p + 16 + 2 * k);
        *d = ternary::odd_eighth(h >> 12 & 7);
        for (int t = 0; t < 4; ++t)
            ternary::put(codes + 8 * t, ternary::codes(p[4 * t + k] + 256 * (h >> (3 * t) & 7), h >> 15));
    }
};

struct UnpackIQ1_M_R4 {
    static constexpr int kType = 229, kRows = 4, kGroup = 16, kBlock = 32, kBlockBytes = 28, kZero = 9;
    static constexpr int kHeaderBytes = 2;
    static float row_scale(const uint8_t* group, int k) { return load_f16(group + 2 * k); }
    static void block(const uint8_t* p, int k, uint8_t* codes, float* d, float*) {
        for (int s = 0; s < 2; ++s) {
            d[s] = static_cast<float>(p[24 + k] >> (4 * s) & 15) * 0.125f;
            const int h = p[16 + 4 * s + k];
            const uint8_t* index = p + 8 * s + k;
            ternary::put(codes + 16 * s, ternary::codes(index[0] + 256 * (h & 7), h & 8));
            ternary::put(codes + 16 * s + 8, ternary::codes(index[4] + 256 * (h >> 4 & 7), h & 128));
        }
    }
};

}  // namespace ikpy
