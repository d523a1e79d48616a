// The k-quants (quant-formats.md#k-quants).
#pragma once
#include "heads.cuh"
#include "parts_kquants.cuh"

namespace ikpy::cuda {

struct UnpackQ2_K : UnpackerTraits<256, 84, 1, 0, true, true> {
    using Part = PartQ2_K;
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        const auto& b = as<BlockQ2_K>(p);
        const unsigned factors = load4<4>(b.d.bytes);
        const float d = f16_to_f32(static_cast<uint16_t>(factors));
        const float m = -f16_to_f32(static_cast<uint16_t>(factors >> 16));
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
    static constexpr int kBias = 4;
    using Part = PartQ3_K;
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        const auto& b = as<BlockQ3_K>(p);
        unsigned tail[4];  // the lower four bits of sixteen scales, the upper two, and d
        load_head<2, 14>(b.scales, tail);
        const float d = f16_to_f32(static_cast<uint16_t>(tail[3]));
        const unsigned low = (s & 2 ? tail[1] : tail[0]) >> (16 * (s & 1) + 4 * (s >> 2));
        const unsigned high = tail[2] >> (16 * (s & 1) + 2 * (s >> 1));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const unsigned scale = (low >> 8 * h & 15) | (high >> 8 * h & 3) << 4;
            g.d[h] = d * static_cast<float>(static_cast<int>(scale) - 32);
        }
        pairs32<2>(b.qs, s, g.q, 0);
        plane32<2>(b.hmask, s, g.q, 2);
    }
};

// Scale and minimum s of the eight in a block's first 16 bytes, which one load brings: factors of all scales
// and minima, and twelve bytes of them.
__device__ __forceinline__ void scale_and_min(const uint8_t* block, int s, Group& g) {
    unsigned head[4];
    load_words<16, 4>(block, head);
    const int shift = 8 * (s & 3);
    const unsigned low = head[1] >> shift, middle = head[2] >> shift, high = head[3] >> shift;
    const unsigned scale = s < 4 ? low & 63 : (high & 15) | (low >> 2 & 48);
    const unsigned minimum = s < 4 ? middle & 63 : (high >> 4 & 15) | (middle >> 2 & 48);
    g.d[0] = f16_to_f32(static_cast<uint16_t>(head[0])) * static_cast<float>(scale);
    g.m[0] = -f16_to_f32(static_cast<uint16_t>(head[0] >> 16)) * static_cast<float>(minimum);
}

struct UnpackQ4_K : UnpackerTraits<256, 144, 1, 0, false, true> {
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        scale_and_min(p, s, g);
        nibbles32<16>(as<BlockQ4_K>(p).qs, s, g.q);
    }
};

struct UnpackQ5_K : UnpackerTraits<256, 176, 1, 0, false, true> {
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        const auto& b = as<BlockQ5_K>(p);
        scale_and_min(p, s, g);
        nibbles32<16>(b.qs, s, g.q);
        plane32<16>(b.qh, s, g.q, 4);
    }
};

struct UnpackQ6_K : UnpackerTraits<256, 210, 1, 0, true> {
    static constexpr int kBias = 32;
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        const auto& b = as<BlockQ6_K>(p);
        const float d = half_of(b.d);
        const int half = s >> 2, t = s & 3;
        scales_of_halves(b.scales, s, d, g);
        Bytes32<2>(b.ql + 64 * half + 32 * (t & 1)).bits(4 * (t >> 1), kNibbles, 0, g.q);
        pairs32<2>(b.qh, s, g.q, 4);
    }
};

}  // namespace ikpy::cuda
