// Row-interleaved types (quant-formats.md#interleaved-rows) except those of grids.
#pragma once
#include "iqk.cuh"
#include "legacy.cuh"
#include "own_iqk.cuh"

namespace ikpy::cuda {

// one scale per 32

struct UnpackIQ4_NL_R4 : UnpackerTraits<32, 72, 4> {
    using Own = OwnIQ4_NL_R4;
    __device__ static void group(const uint8_t* p, int k, int, Group& g) {
        const auto& b = as<BlockIQ4_NL_R4>(p);
        g.d[0] = half_of(b.d[k]);
        n4(b.qs, k, 0, g.q);
        table_levels<16, TableIq4k, false>(false, false, g.q);
    }
};

struct UnpackQ5_0_R4 : UnpackerTraits<32, 88, 4> {
    using Own = OwnQ5_0_R4;
    static constexpr int kBias = 16;
    __device__ static void group(const uint8_t* p, int k, int, Group& g) {
        const auto& b = as<BlockQ5_0_R4>(p);
        g.d[0] = half_of(b.d[k]);
        n4(b.qs, k, 0, g.q);
        b4<Q5_0Bits>(b.qh, k, 0, g.q, 4);
    }
};

struct UnpackQ6_0_R4 : UnpackerTraits<32, 104, 4> {
    using Own = OwnQ6_0_R4;
    static constexpr int kBias = 32;
    __device__ static void group(const uint8_t* p, int k, int, Group& g) {
        const auto& b = as<BlockQ6_0_R4>(p);
        g.d[0] = half_of(b.d[k]);
        n4(b.qs, k, 0, g.q);
        p4(b.qh, k, 0, g.q, 4);
    }
};

struct UnpackQ4_0_R8 : UnpackerTraits<32, 144, 8> {
    using Own = OwnQ4_0_R8;
    static constexpr int kBias = 8;
    __device__ static void group(const uint8_t* p, int k, int, Group& g) {
        const auto& b = as<BlockQ4_0_R8>(p);
        g.d[0] = half_of(b.d[k]);
        nibbles_r8(b.qs, k, g.q);
    }
};

// Runs of L bytes of one row after the other; nibbles with the top bit inverted.
template <int R, int L>
struct UnpackQ4_0_Arm : UnpackerTraits<32, 18 * R, R> {
    static constexpr int kBias = 8;
    __device__ static void group(const uint8_t* p, int k, int, Group& g) {
        const auto& b = as<BlockQ4_0_Arm<R>>(p);
        g.d[0] = half_of(b.d[k]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned v = load4<4>(b.qs + R * L * (4 * i / L) + L * k + 4 * i % L);
            g.q[i] = (v & kNibbles) ^ 8 * kOnes;
            g.q[4 + i] = (v >> 4 & kNibbles) ^ 8 * kOnes;
        }
    }
};
using UnpackQ4_0_4x4 = UnpackQ4_0_Arm<4, 4>;
using UnpackQ4_0_4x8 = UnpackQ4_0_Arm<4, 8>;
using UnpackQ4_0_8x8 = UnpackQ4_0_Arm<8, 8>;

struct UnpackMXFP4_R8 : UnpackerTraits<32, 136, 8> {
    using Own = OwnMXFP4_R8;
    __device__ static void group(const uint8_t* p, int k, int, Group& g) {
        const auto& b = as<BlockMXFP4_R8>(p);
        g.d[0] = half_power(b.e[k]);
        nibbles_r8(b.qs, k, g.q);
        table_levels<16, TableMxfp4, false>(false, false, g.q);
    }
};

struct UnpackQ8_0_R8 : UnpackerTraits<32, 272, 8> {
    using Own = OwnQ8<BlockQ8_0_R8, 8>;
    __device__ static void group(const uint8_t* p, int k, int, Group& g) {
        const auto& b = as<BlockQ8_0_R8>(p);
        g.d[0] = half_of(b.d[k]);
        q8x<8>(b.qs, k, 0, g.q);
    }
};

struct UnpackQ8_KV_R8 : UnpackerTraits<32, 256, 8, 4> {
    using Own = OwnQ8_KV_R8;
    __device__ static float row_scale(const uint8_t* group, int k) { return float_at(group + 4 * k); }
    __device__ static void group(const uint8_t* p, int k, int, Group& g) {
        g.d[0] = 1.0f;
        q8x<8>(p, k, 0, g.q);
    }
};

struct UnpackQ8_K_R8 : UnpackerTraits<256, 2064, 8> {
    using Own = OwnQ8<BlockQ8_K_R8, 8>;
    __device__ static void group(const uint8_t* p, int k, int s, Group& g) {
        const auto& b = as<BlockQ8_K_R8>(p);
        g.d[0] = half_of(b.d[k]);
        q8x<8>(b.qs, k, s, g.q);
    }
};

struct UnpackQ8_K_R16 : UnpackerTraits<256, 4128, 16> {
    using Own = OwnQ8<BlockQ8_K_R16, 16, 128>;
    __device__ static void group(const uint8_t* p, int k, int s, Group& g) {
        const auto& b = as<BlockQ8_K_R16>(p);
        g.d[0] = half_of(b.d[k]);
        q8x<16>(b.qs, k, s, g.q);
#pragma unroll
        for (int i = 0; i < 8; ++i) g.q[i] ^= 0x80808080u;  // levels are offset by 128
    }
};

struct UnpackIQ2_BN_R4 : UnpackerTraits<64, 64, 4, 4> {
    using Own = OwnIQ2_BN_R4;
    static constexpr int kBias = 1;
    __device__ static float row_scale(const uint8_t* group, int k) { return float_at(group + 4 * k); }
    __device__ static void group(const uint8_t* p, int k, int s, Group& g) {
        g.d[0] = 1.0f;
        p4(p, k, s, g.q, 0);
    }
};

// super-blocks

struct UnpackQ2_K_R4 : UnpackerTraits<256, 336, 4, 0, true, true> {
    using Own = OwnQ2_K_R4;
    __device__ static void group(const uint8_t* p, int k, int s, Group& g) {
        const auto& b = as<BlockQ2_K_R4>(p);
        const float d = half_of(b.d[k]), m = -half_of(b.dmin[k]);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int code = b.scales[8 * s + 4 * h + k];
            g.d[h] = d * static_cast<float>(code & 15);
            g.m[h] = m * static_cast<float>(code >> 4);
        }
        p4(b.qs, k, s, g.q, 0);
    }
};

// Six-bit scales minus 32 of the two halves.
template <class B>
__device__ __forceinline__ void scales_r4(const B& b, int k, int s, Group& g) {
    const float d = half_of(b.d[k]);
    g.d[0] = d * static_cast<float>(six_bits(b.scales_l, b.scales_h, 8 * s + k) - 32);
    g.d[1] = d * static_cast<float>(six_bits(b.scales_l, b.scales_h, 8 * s + 4 + k) - 32);
}

struct UnpackQ3_K_R4 : UnpackerTraits<256, 440, 4, 0, true> {
    using Own = OwnQ3_K_R4;
    static constexpr int kBias = 4;
    __device__ static void group(const uint8_t* p, int k, int s, Group& g) {
        const auto& b = as<BlockQ3_K_R4>(p);
        scales_r4(b, k, s, g);
        p4(b.qs, k, s, g.q, 0);
        b4<RisingBits>(b.qh, k, s, g.q, 2);
    }
};

template <class B>
__device__ __forceinline__ void scales_and_mins_r4(const B& b, int k, int s, Group& g) {
    const int place = 4 * s + k, low = b.scales_l[place], high = b.scales_h[place & 15] >> 4 * (place >> 4);
    g.d[0] = half_of(b.d[k]) * static_cast<float>((low & 15) | (high & 3) << 4);
    g.m[0] = -half_of(b.dmin[k]) * static_cast<float>(low >> 4 | (high & 12) << 2);
}

struct UnpackQ4_K_R4 : UnpackerTraits<256, 576, 4, 0, false, true> {
    using Own = OwnQ4_K_R4;
    __device__ static void group(const uint8_t* p, int k, int s, Group& g) {
        const auto& b = as<BlockQ4_K_R4>(p);
        scales_and_mins_r4(b, k, s, g);
        n4(b.qs, k, s, g.q);
    }
};

struct UnpackQ5_K_R4 : UnpackerTraits<256, 704, 4, 0, false, true> {
    using Own = OwnQ5_K_R4;
    __device__ static void group(const uint8_t* p, int k, int s, Group& g) {
        const auto& b = as<BlockQ5_K_R4>(p);
        scales_and_mins_r4(b, k, s, g);
        n4(b.qs, k, s, g.q);
        b4<Q5_KBits>(b.qh, k, s, g.q, 4);
    }
};

struct UnpackQ6_K_R4 : UnpackerTraits<256, 840, 4, 0, true> {
    using Own = OwnQ6_K_R4;
    static constexpr int kBias = 32;
    __device__ static void group(const uint8_t* p, int k, int s, Group& g) {
        const auto& b = as<BlockQ6_K_R4>(p);
        const float d = half_of(b.d[k]);
        g.d[0] = d * static_cast<float>(static_cast<int8_t>(b.scales[8 * s + k]));
        g.d[1] = d * static_cast<float>(static_cast<int8_t>(b.scales[8 * s + 4 + k]));
        n4(b.qs, k, s, g.q);
        p4<0, 2, 1, 3>(b.qh, k, s, g.q, 4);
    }
};

struct UnpackIQ4_XS_R8 : UnpackerTraits<256, 1088, 8> {
    using Own = OwnIQ4_XS_R8;
    __device__ static void group(const uint8_t* p, int k, int s, Group& g) {
        const auto& b = as<BlockIQ4_XS_R8>(p);
        g.d[0] = half_of(b.d[k]) * static_cast<float>(six_bits(b.scales_l, b.scales_h, 8 * s + k) - 32);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned v = load4<4>(b.qs + 128 * s + 32 * i + 4 * k);
            g.q[2 * i] = v & kNibbles;
            g.q[2 * i + 1] = v >> 4 & kNibbles;
        }
        table_levels<16, TableIq4k, false>(false, false, g.q);
    }
};

// Four-bit code of 16-column group b.
__device__ __forceinline__ int code4(const uint8_t* scales, int k, int b) {
    const int place = 4 * b + k;
    return scales[place & 31] >> 4 * (place >> 5) & 15;
}

struct UnpackIQ2_K_R4 : UnpackerTraits<256, 304, 4, 0, true> {
    using Own = OwnIQ2_K_R4;
    __device__ static void group(const uint8_t* p, int k, int s, Group& g) {
        const auto& b = as<BlockIQ2_K_R4>(p);
        const float d = half_of(b.d[k]);
        g.d[0] = d * static_cast<float>(code4(b.scales, k, 2 * s) - 8);
        g.d[1] = d * static_cast<float>(code4(b.scales, k, 2 * s + 1) - 8);
        p4(b.qs, k, s, g.q, 0);
        table_levels<4, TableIq2nl, true>(x4(b.extra, k, 2 * s), x4(b.extra, k, 2 * s + 1), g.q);
    }
};

struct UnpackIQ3_K_R4 : UnpackerTraits<256, 440, 4, 0, true> {
    using Own = OwnIQ3_K_R4;
    __device__ static void group(const uint8_t* p, int k, int s, Group& g) {
        const auto& b = as<BlockIQ3_K_R4>(p);
        const float d = half_of(b.d[k]);
        g.d[0] = d * signed_odd(code4(b.scales_l, k, 2 * s), x4(b.scales_h, k, 2 * s));
        g.d[1] = d * signed_odd(code4(b.scales_l, k, 2 * s + 1), x4(b.scales_h, k, 2 * s + 1));
        p4(b.qs, k, s, g.q, 0);
        b4<RisingBits>(b.qh, k, s, g.q, 2);
        table_levels<8, TableIq3nl, true>(x4(b.extra, k, 2 * s), x4(b.extra, k, 2 * s + 1), g.q);
    }
};

struct UnpackIQ4_K_R4 : UnpackerTraits<256, 576, 4, 0, true> {
    using Own = OwnIQ4_K_R4;
    __device__ static void group(const uint8_t* p, int k, int s, Group& g) {
        const auto& b = as<BlockIQ4_K_R4>(p);
        scales_r4(b, k, s, g);
        n4(b.qs, k, s, g.q);
        table_levels<16, TableIq4k, true>(x4(b.extra, k, 2 * s), x4(b.extra, k, 2 * s + 1), g.q);
    }
};

struct UnpackIQ5_K_R4 : UnpackerTraits<256, 704, 4, 0, true> {
    using Own = OwnIQ5_K_R4;
    __device__ static void group(const uint8_t* p, int k, int s, Group& g) {
        const auto& b = as<BlockIQ5_K_R4>(p);
        scales_r4(b, k, s, g);
        n4(b.qs, k, s, g.q);
        b4<IQ5Bits>(b.qh, k, s, g.q, 4);
        table_levels<32, TableIq5nl, true>(x4(b.extra, k, 2 * s), x4(b.extra, k, 2 * s + 1), g.q);
    }
};

struct UnpackIQ4_KS_R4 : UnpackerTraits<256, 544, 4, 4> {
    using Own = OwnIQ4_KS_R4;
    __device__ static float row_scale(const uint8_t* group, int k) { return float_at(group + 4 * k); }
    __device__ static void group(const uint8_t* p, int k, int s, Group& g) {
        const auto& b = as<BlockIQ4_KS_R4>(p);
        const int code = b.scales[4 * s + k];
        g.d[0] = odd_scale(code);
        n4(b.qs, k, s, g.q);
        table_levels<16, TableIq4k, false>(code & 1, false, g.q);
    }
};

struct UnpackIQ5_KS_R4 : UnpackerTraits<256, 672, 4, 4> {
    using Own = OwnIQ5_KS_R4;
    __device__ static float row_scale(const uint8_t* group, int k) { return float_at(group + 4 * k); }
    __device__ static void group(const uint8_t* p, int k, int s, Group& g) {
        const auto& b = as<BlockIQ5_KS_R4>(p);
        const int code = b.scales[4 * s + k];
        g.d[0] = odd_scale(code);
        n4(b.qs, k, s, g.q);
        b4<IQ5Bits>(b.qh, k, s, g.q, 4);
        table_levels<32, TableIq5nl, false>(code & 1, false, g.q);
    }
};

}  // namespace ikpy::cuda
