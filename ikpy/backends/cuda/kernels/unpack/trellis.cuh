// Trellis types: values from a generator seeded by the stored index (quant-formats.md#trellis-types). The
// read-time factors of IQ2_KT and IQ3_KT are part of their row scales.
#pragma once
#include "core.cuh"

namespace ikpy::cuda {

constexpr unsigned kTrellisOffset = 4096, kTrellisOffsetIQ4 = 36864;

// Value n of a group is the sum of four six-bit parts of seed * multiplier^(n + 1), minus 126; as powers are
// constants, no value waits for another.
__host__ __device__ constexpr unsigned trellis_power(int n) {
    unsigned power = 1;
    for (int i = 0; i <= n; ++i) power *= 0xcbac1fedu;
    return power;
}
__device__ __forceinline__ int trellis_value(unsigned state) {
    return __dp4a(static_cast<int>(state & 0x3f3f3f3fu), static_cast<int>(kOnes), -126);
}
template <int N>
__device__ __forceinline__ unsigned trellis_four(unsigned seed) {
    constexpr unsigned p0 = trellis_power(N), p1 = trellis_power(N + 1), p2 = trellis_power(N + 2),
                       p3 = trellis_power(N + 3);
    const unsigned low = (trellis_value(seed * p0) & 255) | (trellis_value(seed * p1) & 255) << 8;
    const unsigned high = (trellis_value(seed * p2) & 255) | (trellis_value(seed * p3) & 255) << 8;
    return low | high << 16;
}

__device__ __forceinline__ float level_scale(int code) {
    const unsigned word = code < 8 ? (code < 4 ? TableIq4k::word(0) : TableIq4k::word(1))
                                   : (code < 12 ? TableIq4k::word(2) : TableIq4k::word(3));
    return static_cast<float>(static_cast<int8_t>(word >> 8 * (code & 3)));
}

struct UnpackIQ1_KT : UnpackerTraits<256, 56, 1, 4> {
    __device__ static float row_scale(const uint8_t* row, int) { return float_at(row); }
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        const auto& b = as<BlockIQ1_KT>(p);
        const unsigned head = b.sh[s], low = load4<4>(b.ql + 4 * s);
        const unsigned middle = load4<4>(b.qh + 4 * (s & 3)) >> 4 * (s >> 2);
        g.d[0] = level_scale(head & 15);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const unsigned seed = kTrellisOffset + (low >> 8 * t & 255) + ((middle >> 8 * t & 15) << 8) +
                                  ((head >> (4 + t) & 1) << 12);
            g.q[2 * t] = trellis_four<0>(seed);
            g.q[2 * t + 1] = trellis_four<4>(seed);
        }
    }
};

struct UnpackIQ2_KT : UnpackerTraits<256, 68, 1, 4> {
    __device__ static float row_scale(const uint8_t* row, int) { return 1.05f * float_at(row); }
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        const auto& b = as<BlockIQ2_KT>(p);
        g.d[0] = level_scale(split_nibble(b.scales, s));
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const unsigned seed = kTrellisOffset + load2<2>(b.ql[4 * s + t].bytes);
            g.q[2 * t] = trellis_four<0>(seed);
            g.q[2 * t + 1] = trellis_four<4>(seed);
        }
    }
};

// Magnitudes of the values with explicit signs.
template <int N>
__device__ __forceinline__ unsigned trellis_signed(unsigned seed, unsigned negative) {
    constexpr unsigned p[4] = {trellis_power(N), trellis_power(N + 1), trellis_power(N + 2),
                               trellis_power(N + 3)};
    unsigned q = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int v = trellis_value(seed * p[i]), magnitude = v < 0 ? -v : v;
        q |= static_cast<unsigned>((negative >> 8 * i & 1 ? -magnitude : magnitude) & 255) << 8 * i;
    }
    return q;
}

struct UnpackIQ3_KT : UnpackerTraits<256, 100, 1, 4> {
    __device__ static float row_scale(const uint8_t* row, int) { return 1.01f * float_at(row); }
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        const auto& b = as<BlockIQ3_KT>(p);
        g.d[0] = static_cast<float>(split_nibble(b.scales, s));
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const unsigned seed = kTrellisOffset + load2<2>(b.ql[4 * s + t].bytes);
            g.q[2 * t] = trellis_signed<0>(seed, load4<4>(b.qh + 8 * t) >> s);
            g.q[2 * t + 1] = trellis_signed<4>(seed, load4<4>(b.qh + 8 * t + 4) >> s);
        }
    }
};

struct UnpackIQ4_KT : UnpackerTraits<256, 128, 1, 4> {
    __device__ static float row_scale(const uint8_t* row, int) { return float_at(row); }
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        const auto& b = as<BlockIQ4_KT>(p);
        const unsigned head = load4<4>(b.shb[s]);
        const unsigned offset = head & 1 ? kTrellisOffsetIQ4 : kTrellisOffset;
        g.d[0] = static_cast<float>(static_cast<int>((head & 255) >> 1) - 64);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const unsigned low = load4<4>(b.ql + 8 * s + 4 * h);
            const unsigned middle = load4<4>(b.qh + 8 * (s & 3) + 4 * h) >> 4 * (s >> 2);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const unsigned seed = offset + (low >> 8 * i & 255) + ((middle >> 8 * i & 15) << 8) +
                                      ((head >> (8 + 3 * (4 * h + i)) & 7) << 12);
                g.q[4 * h + i] = trellis_four<0>(seed);
            }
        }
    }
};

}  // namespace ikpy::cuda
