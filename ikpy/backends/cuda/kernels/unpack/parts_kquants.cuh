// Parts of super-blocks of Q2_K and Q3_K.
#pragma once
#include "parts.cuh"

namespace ikpy::cuda {

struct PartQ2_K : PartTraits {
    static constexpr float kSum = 1.0f;
    __device__ static constexpr float factor(int i) { return 1.0f / static_cast<float>(1 << 2 * i); }
    __device__ __forceinline__ static float product(const uint8_t* block, int part, const PartActs& x,
                                                    const Constants&) {
        const auto& b = *reinterpret_cast<const BlockQ2_K*>(block);
        const uint8_t* codes = b.scales + 8 * (part >> 1);
        const unsigned both = bytes_of_half(word_at(codes), word_at(codes + 4), part & 1);
        const unsigned scales = both & kNibbles, minima = both >> 4 & kNibbles;
        const unsigned factors = word_at(b.d.bytes);
        float high = 0.0f, low = 0.0f;
        unsigned q[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) q[n] = word_at(b.qs + 16 * part + 4 * n);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int sum = kSumStart;
#pragma unroll
            for (int n = 0; n < 4; ++n) sum = dot_unsigned(q[n] & kPairs << 2 * i, x.q[4 * i + n], sum);
            high += byte_value(scales, i) * (sum_value(sum) * x.scale[i]);
            low += byte_value(minima, i) * x.sum[i];
        }
        const float d = f16_to_f32(static_cast<uint16_t>(factors));
        return d * high - f16_to_f32(static_cast<uint16_t>(factors >> 16)) * low;
    }
};

struct PartQ3_K : PartTraits {
    static constexpr float kSum = -4.0f;
    __device__ static constexpr float factor(int i) { return 1.0f / static_cast<float>(1 << 2 * i); }
    __device__ __forceinline__ static float product(const uint8_t* block, int part, const PartActs& x,
                                                    const Constants&) {
        const auto& b = *reinterpret_cast<const BlockQ3_K*>(block);
        const int half = part >> 1, h = part & 1;
        const unsigned odd = odd_half(block);
        // The lower four bits of sixteen scales, the upper two, and d.
        unsigned tail[4];
        words_at<4, 14>(b.scales, odd, 0, tail);
        const unsigned low = bytes_of_half(tail[0], tail[1], h) >> 4 * half & kNibbles;
        const unsigned high = bytes_of_half(tail[2] >> 4 * half, tail[2] >> (4 * half + 2), h) & kPairs;
        const unsigned scales = low | high << 4;
        unsigned q[4], upper[4];
        words_at(b.qs + 16 * part, odd, 0, q);
        words_at(b.hmask + 16 * h, odd, 4 * half, upper);
        int sum[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int ones = 0;
#pragma unroll
            for (int n = 0; n < 4; ++n) ones = dot_unsigned(upper[n] & kOnes << i, x.q[4 * i + n], ones);
            sum[i] = kSumStart + ones * (4 << i);
#pragma unroll
            for (int n = 0; n < 4; ++n) sum[i] = dot_unsigned(q[n] & kPairs << 2 * i, x.q[4 * i + n], sum[i]);
        }
        return f16_to_f32(static_cast<uint16_t>(tail[3])) * scaled_runs<PartQ3_K, 32>(sum, scales, 0, x);
    }
};

}  // namespace ikpy::cuda
