// Types with one scale per 32 elements, and the small-block types
// (quant-formats.md#blocks-with-one-scale, quant-formats.md#ternary-types).
#pragma once
#include "own_plain.cuh"

namespace ikpy::cuda {

struct UnpackQ4_0 : UnpackerTraits<32, 18> {
    static constexpr int kBias = 8;
    __device__ static void group(const uint8_t* p, int, int, Group& g) {
        unsigned v[4];
        g.d[0] = load_block<4>(p, v);
        nibbles_of(v, g.q);
    }
};

struct UnpackQ4_1 : UnpackerTraits<32, 20, 1, 0, false, true> {
    __device__ static void group(const uint8_t* p, int, int, Group& g) {
        const auto& b = as<BlockQ4_1>(p);
        g.d[0] = half_of(b.d);
        g.m[0] = half_of(b.m);
        nibbles16<4>(b.qs, g.q);
    }
};

__device__ __forceinline__ void fifth_bits(unsigned bits, unsigned* q) {
#pragma unroll
    for (int i = 0; i < 8; ++i) q[i] |= spread_bits(bits >> 4 * i) << 4;
}

struct UnpackQ5_0 : UnpackerTraits<32, 22> {
    static constexpr int kBias = 16;
    __device__ static void group(const uint8_t* p, int, int, Group& g) {
        unsigned v[5];
        g.d[0] = load_block<5>(p, v);
        nibbles_of(v + 1, g.q);
        fifth_bits(v[0], g.q);
    }
};

struct UnpackQ5_1 : UnpackerTraits<32, 24, 1, 0, false, true> {
    __device__ static void group(const uint8_t* p, int, int, Group& g) {
        const auto& b = as<BlockQ5_1>(p);
        g.d[0] = half_of(b.d);
        g.m[0] = half_of(b.m);
        nibbles16<4>(b.qs, g.q);
        fifth_bits(load4<4>(b.qh), g.q);
    }
};

struct UnpackQ6_0 : UnpackerTraits<32, 26> {
    static constexpr int kBias = 32;
    __device__ static void group(const uint8_t* p, int, int, Group& g) {
        unsigned high[6];
        g.d[0] = load_block<6>(p, high);
        nibbles_of(high + 2, g.q);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned v = high[i & 1] >> 4 * (i >> 1);
            g.q[i] |= (v & kPairs) << 4;
            g.q[4 + i] |= (v >> 2 & kPairs) << 4;
        }
    }
};

struct UnpackQ8_0 : UnpackerTraits<32, 34> {
    __device__ static void group(const uint8_t* p, int, int, Group& g) { g.d[0] = load_block<8>(p, g.q); }
};

struct UnpackQ8_KV : UnpackerTraits<32, 32, 1, 8> {
    __device__ static float row_scale(const uint8_t* row, int) { return float_at(row); }
    __device__ static void group(const uint8_t* p, int, int, Group& g) {
        g.d[0] = 1.0f;
        load_words<8, 8>(p, g.q);
    }
};

struct CodesIQ4_NL {
    using Levels = TableIq4k;
    __device__ __forceinline__ static float load(const uint8_t* p, unsigned, unsigned (&w)[4]) {
        return load_block<4>(p, w);
    }
};
struct UnpackIQ4_NL : UnpackerTraits<32, 18> {
    using Own = OwnNibbles<CodesIQ4_NL>;
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        nibble_levels<CodesIQ4_NL>(p, s, g);
    }
};

struct CodesMXFP4 {
    using Levels = TableMxfp4;
    __device__ __forceinline__ static float load(const uint8_t* p, unsigned, unsigned (&w)[4]) {
        load_words<1, 4>(as<BlockMXFP4>(p).qs, w);
        return half_power(as<BlockMXFP4>(p).e);
    }
};
struct UnpackMXFP4 : UnpackerTraits<32, 17> {
    using Own = OwnNibbles<CodesMXFP4>;
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        nibble_levels<CodesMXFP4>(p, s, g);
    }
};

__device__ __forceinline__ float half_ue4m3(unsigned code) {
    return code == 127 ? 0.0f : f16_to_f32(static_cast<uint16_t>((code & 127) << 7)) * 128.0f;
}
struct OwnNVFP4 : OwnTraits<1> {
    static constexpr int kPair = 2;
    static constexpr bool kHalves = true;
    __device__ __forceinline__ static void products(const uint8_t* p, unsigned, unsigned s, const OwnActs& x,
                                                    float (&v)[1]) {
        unsigned w[4];
        load_words<4, 4>(p + 4 + 16 * s, w);
        const unsigned codes = load2<2>(p + 2 * s);
        const int first = sum_levels<TableMxfp4, 2>({w[0], w[1]}, {0, 1}, x, kSumStart);
        const int second = sum_levels<TableMxfp4, 2>({w[2], w[3]}, {2, 3}, x, kSumStart);
        v[0] = x.scale *
               (half_ue4m3(codes & 255) * sum_value(first) + half_ue4m3(codes >> 8) * sum_value(second));
    }
};
struct UnpackNVFP4 : UnpackerTraits<64, 36, 1, 0, true> {
    using Own = OwnNVFP4;
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        unsigned v[4];
        load_words<4, 4>(p + 4 + 16 * s, v);
        g.d[0] = half_ue4m3(p[2 * s]);
        g.d[1] = half_ue4m3(p[2 * s + 1]);
#pragma unroll
        for (int i = 0; i < 8; ++i) g.q[i] = v[i & 1 | i >> 1 & 2] >> 4 * (i >> 1 & 1) & kNibbles;
        table_levels<16, TableMxfp4, false>(false, false, g.q);
    }
};

struct UnpackQ1_0_G128 : UnpackerTraits<128, 18> {
    static constexpr int kBias = 1;
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        const auto& b = as<BlockQ1_0_G128>(p);
        g.d[0] = half_of(b.d);
        const unsigned bits = load4<2>(b.qs + 4 * s);
#pragma unroll
        for (int i = 0; i < 8; ++i) g.q[i] = spread_bits(bits >> 4 * i) << 1;
    }
};

// Trits of four base-3 bytes that the multiplier moves to the top.
__device__ __forceinline__ unsigned trits(unsigned codes, unsigned multiplier) {
    const unsigned low = (codes & 0x00ff00ffu) * multiplier & 0x00ff00ffu;
    const unsigned high = (codes >> 8 & 0x00ff00ffu) * multiplier & 0x00ff00ffu;
    return (low * 3 >> 8 & 0x00ff00ffu) | (high * 3 & 0xff00ff00u);
}

struct UnpackIQ1_BN : UnpackerTraits<64, 13, 1, 2> {
    static constexpr int kBias = 1;
    __device__ static float row_scale(const uint8_t* row, int) { return load_f16<1>(row); }
    __device__ static unsigned power(int n) {
        return n == 0 ? 81 : n == 1 ? 27 : n == 2 ? 9 : n == 3 ? 3 : 1;
    }
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        const auto& b = as<BlockIQ1_BN>(p);
        g.d[0] = 1.0f;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int run = 2 * s + h;
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                unsigned q = 0;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int j = 4 * w + i;
                    const unsigned code = j == 15 ? b.extra : b.ql[3 * run + j / 5];
                    const unsigned v = code * power(j == 15 ? run : j % 5) & 255;
                    q |= (v * 3 >> 8) << 8 * i;
                }
                g.q[4 * h + w] = q;
            }
        }
    }
};

struct UnpackIQ2_BN : UnpackerTraits<64, 16, 1, 4> {
    static constexpr int kBias = 1;
    __device__ static float row_scale(const uint8_t* row, int) { return float_at(row); }
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        g.d[0] = 1.0f;
        unsigned words[4];
        load_words<4, 4>(p, words);
#pragma unroll
        for (int i = 0; i < 8; ++i) g.q[i] = words[i & 3] >> 2 * (2 * s + (i >> 2)) & kPairs;
    }
};

struct UnpackTQ1_0 : UnpackerTraits<256, 54> {
    static constexpr int kBias = 1;
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        const auto& b = as<BlockTQ1_0>(p);
        g.d[0] = half_of(b.d);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int e = 32 * s + 4 * i;  // runs of 32, 16 and 4 bytes with 5, 5 and 4 trits
            const int n = e < 160 ? e / 32 : e < 240 ? (e - 160) / 16 : (e - 240) / 4;
            const int byte = e < 160 ? e % 32 : e < 240 ? 32 + (e - 160) % 16 : 48;
            const unsigned power = n == 0 ? 1 : n == 1 ? 3 : n == 2 ? 9 : n == 3 ? 27 : 81;
            g.q[i] = trits(load4<2>(b.qs + byte), power);
        }
    }
};

struct UnpackTQ2_0 : UnpackerTraits<256, 66> {
    static constexpr int kBias = 1;
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        const auto& b = as<BlockTQ2_0>(p);
        g.d[0] = half_of(b.d);
        pairs32<2>(b.qs, s, g.q, 0);
    }
};

}  // namespace ikpy::cuda
