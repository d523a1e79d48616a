// Trellis types: values from a generator seeded by the stored index (quant-formats.md#trellis-types). The
// read-time factors of IQ2_KT and IQ3_KT are part of their row scales.
#pragma once
#include "parts_trellis.cuh"

namespace ikpy::cuda {

constexpr unsigned kTrellisOffsetIQ4 = 36864;

// Values N .. N + 3 plus 128. Products add the six-bit parts, of every other state 256 times.
template <int N>
__device__ __forceinline__ unsigned trellis_bytes(unsigned seed) {
    unsigned pairs[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int even = dot_unsigned(trellis_state(seed, N + 2 * i), kOnes, 2 * 257);
        pairs[i] =
            static_cast<unsigned>(dot_unsigned(trellis_state<4>(seed, N + 2 * i + 1), 64 * kOnes, even));
    }
    return permute_bytes(pairs[0], pairs[1], 0x5410);
}
template <int N>
__device__ __forceinline__ unsigned trellis_four(unsigned seed) {
    return trellis_bytes<N>(seed) ^ 0x80808080u;
}

struct UnpackIQ1_KT : UnpackerTraits<256, 56, 1, 4> {
    using Part = PartIQ1_KT;
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
    using Part = PartIQ2_KT;
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

// Magnitudes of the values with explicit signs, in the lowest bits of bytes.
template <int N>
__device__ __forceinline__ unsigned trellis_signed(unsigned seed, unsigned negative) {
    const unsigned u = trellis_bytes<N>(seed), keep = kept_signs(u, negative << 7),
                   flipped = u ^ keep ^ 0x7f7f7f7fu;
    return ((flipped & 0x7f7f7f7fu) + (~keep & kOnes)) ^ (flipped & 0x80808080u);
}

struct UnpackIQ3_KT : UnpackerTraits<256, 100, 1, 4> {
    using Part = PartIQ3_KT;
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
    using Part = PartIQ4_KT;
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
