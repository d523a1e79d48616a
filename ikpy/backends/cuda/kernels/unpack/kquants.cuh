// The k-quants (quant-formats 6.1).
#pragma once
#include "core.cuh"

namespace ikpy::cuda {

struct UnpackQ2_K : UnpackerTraits<256, 84, 1, 0, true, true> {
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        const auto& b = as<BlockQ2_K>(p);
        const float d = half_of(b.d), m = -half_of(b.dmin);
        const unsigned scales = load2<2>(b.scales + 2 * s);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            g.d[h] = d * static_cast<float>(scales >> 8 * h & 15);
            g.m[h] = m * static_cast<float>(scales >> (8 * h + 4) & 15);
        }
        pairs32<4>(b.qs, s, g.q, 0);
    }
};

struct UnpackQ3_K : UnpackerTraits<256, 110, 1, 0, true> {
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        const auto& b = as<BlockQ3_K>(p);
        const float d = half_of(b.d);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int i = 2 * s + h;
            const int low = b.scales[i & 7] >> 4 * (i >> 3) & 15,
                      high = b.scales[8 + (i & 3)] >> 2 * (i >> 2) & 3;
            g.d[h] = d * static_cast<float>((low | high << 4) - 32);
        }
        pairs32<2>(b.qs, s, g.q, 0);
        plane32<2>(b.hmask, s, g.q, 2);
        sub_all<4>(g.q);
    }
};

// Scale and minimum j of the eight in twelve bytes.
__device__ __forceinline__ void scale_and_min(const uint8_t* scales, int j, float d, float dmin, Group& g) {
    const int a = j < 4 ? scales[j] & 63 : (scales[j + 4] & 15) | (scales[j - 4] >> 6) << 4;
    const int b = j < 4 ? scales[j + 4] & 63 : scales[j + 4] >> 4 | (scales[j] >> 6) << 4;
    g.d[0] = d * static_cast<float>(a);
    g.m[0] = -dmin * static_cast<float>(b);
}

struct UnpackQ4_K : UnpackerTraits<256, 144, 1, 0, false, true> {
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        const auto& b = as<BlockQ4_K>(p);
        scale_and_min(b.scales, s, half_of(b.d), half_of(b.dmin), g);
        nibbles32<16>(b.qs, s, g.q);
    }
};

struct UnpackQ5_K : UnpackerTraits<256, 176, 1, 0, false, true> {
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        const auto& b = as<BlockQ5_K>(p);
        scale_and_min(b.scales, s, half_of(b.d), half_of(b.dmin), g);
        nibbles32<16>(b.qs, s, g.q);
        plane32<16>(b.qh, s, g.q, 4);
    }
};

struct UnpackQ6_K : UnpackerTraits<256, 210, 1, 0, true> {
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        const auto& b = as<BlockQ6_K>(p);
        const float d = half_of(b.d);
        const int half = s >> 2, t = s & 3;
        g.d[0] = d * static_cast<float>(static_cast<int8_t>(b.scales[2 * s]));
        g.d[1] = d * static_cast<float>(static_cast<int8_t>(b.scales[2 * s + 1]));
        load_words<2, 8>(b.ql + 64 * half + 32 * (t & 1), g.q);
#pragma unroll
        for (int i = 0; i < 8; ++i) g.q[i] = g.q[i] >> 4 * (t >> 1) & kNibbles;
        pairs32<2>(b.qh, s, g.q, 4);
        sub_all<32>(g.q);
    }
};

}  // namespace ikpy::cuda
