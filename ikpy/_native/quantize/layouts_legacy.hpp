// Types with one scale per block, plain and interleaved
// (quant-formats.md#blocks-with-one-scale, quant-formats.md#interleaved-small-blocks).
#pragma once

#include "tables.hpp"
#include "type_traits.hpp"

namespace ikpy::formats {

// y = d * (q - offset)
template <int Offset, int N>
inline void centred_values(const Levels<N>& c, float* y) {
    const float d = f16_to_f32(c.d);
    for (int i = 0; i < N; ++i) y[i] = d * static_cast<float>(c.q[i] - Offset);
}

// y = d * q + m
inline void affine_values(const Levels<32>& c, float* y) {
    const float d = f16_to_f32(c.d), m = f16_to_f32(c.m);
    for (int i = 0; i < 32; ++i) y[i] = d * static_cast<float>(c.q[i]) + m;
}

// y = d * q, q signed bytes
template <int N>
inline void signed_values(const uint8_t* q, float d, float* y) {
    for (int i = 0; i < N; ++i) y[i] = d * static_cast<float>(static_cast<int8_t>(q[i]));
}

struct Q4_0 : TypeInfo<2, 32, BlockQ4_0, Levels<32>> {
    template <class Io, class B, class C>
    static void layout(B& b, int, C& c) {
        Io::word(b.d, c.d);
        nibbles16<Io>(b.qs, c.q, 32);
    }
    static void values(const Content& c, float, float* y) { centred_values<8>(c, y); }
};

struct Q4_1 : TypeInfo<3, 32, BlockQ4_1, Levels<32>> {
    template <class Io, class B, class C>
    static void layout(B& b, int, C& c) {
        Io::word(b.d, c.d);
        Io::word(b.m, c.m);
        nibbles16<Io>(b.qs, c.q, 32);
    }
    static void values(const Content& c, float, float* y) { affine_values(c, y); }
};

struct Q5_0 : TypeInfo<6, 32, BlockQ5_0, Levels<32>> {
    template <class Io, class B, class C>
    static void layout(B& b, int, C& c) {
        Io::word(b.d, c.d);
        nibbles16<Io>(b.qs, c.q, 32);
        bit_list<Io>(b.qh, c.q, 32, 4);
    }
    static void values(const Content& c, float, float* y) { centred_values<16>(c, y); }
};

struct Q5_1 : TypeInfo<7, 32, BlockQ5_1, Levels<32>> {
    template <class Io, class B, class C>
    static void layout(B& b, int, C& c) {
        Io::word(b.d, c.d);
        Io::word(b.m, c.m);
        nibbles16<Io>(b.qs, c.q, 32);
        bit_list<Io>(b.qh, c.q, 32, 4);
    }
    static void values(const Content& c, float, float* y) { affine_values(c, y); }
};

struct Q6_0 : TypeInfo<133, 32, BlockQ6_0, Levels<32>> {
    template <class Io, class B, class C>
    static void layout(B& b, int, C& c) {
        Io::word(b.d, c.d);
        nibbles16<Io>(b.qs, c.q, 32);
        for (int j = 0; j < 16; ++j)
            for (int h = 0; h < 2; ++h)
                Io::template bits<2>(b.qh[j & 7], 4 * (j >> 3) + 2 * h, c.q[j + 16 * h], 4);
    }
    static void values(const Content& c, float, float* y) { centred_values<32>(c, y); }
};

struct Q8_0 : TypeInfo<8, 32, BlockQ8_0, Levels<32>> {
    template <class Io, class B, class C>
    static void layout(B& b, int, C& c) {
        Io::word(b.d, c.d);
        for (int i = 0; i < 32; ++i) Io::byte(b.qs[i], c.q[i]);
    }
    static void values(const Content& c, float, float* y) { signed_values<32>(c.q, f16_to_f32(c.d), y); }
};

struct Q8_KV : TypeInfo<151, 32, BlockQ8_KV, Levels<32>, Header::kF32Sum> {
    template <class Io, class B, class C>
    static void layout(B& b, int, C& c) {
        for (int i = 0; i < 32; ++i) Io::byte(b.qs[i], c.q[i]);
    }
    static void values(const Content& c, float d, float* y) { signed_values<32>(c.q, d, y); }
};

struct IQ4_NL : TypeInfo<20, 32, BlockIQ4_NL, Levels<32>> {
    template <class Io, class B, class C>
    static void layout(B& b, int, C& c) {
        Io::word(b.d, c.d);
        nibbles16<Io>(b.qs, c.q, 32);
    }
    static void values(const Content& c, float, float* y) {
        const float d = f16_to_f32(c.d);
        for (int i = 0; i < 32; ++i) y[i] = d * tables::iq4k_values[c.q[i]];
    }
};

struct MXFP4 : TypeInfo<39, 32, BlockMXFP4, Levels<32>> {
    template <class Io, class B, class C>
    static void layout(B& b, int, C& c) {
        Io::template bits<8>(b.e, 0, c.d);
        nibbles16<Io>(b.qs, c.q, 32);
    }
    static void values(const Content& c, float, float* y) {
        const float d = f32_from_bits(tables::e8m0_half_f32_bits[c.d]);  // the table of levels is doubled
        for (int i = 0; i < 32; ++i) y[i] = d * tables::kvalues_mxfp4[c.q[i]];
    }
};

struct NVFP4 : TypeInfo<40, 64, BlockNVFP4, ScaledLevels> {
    template <class Io, class B, class C>
    static void layout(B& b, int, C& c) {
        for (int g = 0; g < 4; ++g) Io::byte(b.s[g], c.s[g]);
        for (int e = 0; e < 64; ++e)
            Io::template bits<4>(b.qs[8 * (e >> 4) + (e & 7)], 4 * (e >> 3 & 1), c.q[e]);
    }
    static void values(const Content& c, float, float* y) {
        for (int e = 0; e < 64; ++e) y[e] = half_ue4m3(c.s[e >> 4]) * tables::kvalues_mxfp4[c.q[e]];
    }
};

struct IQ2_BN : TypeInfo<135, 64, BlockIQ2_BN, Levels<64>, Header::kF32> {
    template <class Io, class B, class C>
    static void layout(B& b, int, C& c) {
        for (int e = 0; e < 64; ++e) Io::template bits<2>(b.qs[e & 15], 2 * (e >> 4), c.q[e]);
    }
    static void values(const Content& c, float d, float* y) {
        for (int i = 0; i < 64; ++i) y[i] = d * static_cast<float>(c.q[i] - 1);
    }
};

// interleaved

struct IQ4_NL_R4 : InterleavedInfo<IQ4_NL, 220, BlockIQ4_NL_R4, 4> {
    template <class Io, class B, class C>
    static void layout(B& b, int k, C& c) {
        Io::word(b.d[k], c.d);
        n4<Io>(b.qs, k, c.q, 32);
    }
};

struct Q5_0_R4 : InterleavedInfo<Q5_0, 206, BlockQ5_0_R4, 4> {
    template <class Io, class B, class C>
    static void layout(B& b, int k, C& c) {
        Io::word(b.d[k], c.d);
        n4<Io>(b.qs, k, c.q, 32);
        b4<Io>(b.qh, k, c.q, {{0, 16, 4, 20, 8, 24, 12, 28}}, 4, 32);
    }
};

struct Q6_0_R4 : InterleavedInfo<Q6_0, 233, BlockQ6_0_R4, 4> {
    template <class Io, class B, class C>
    static void layout(B& b, int k, C& c) {
        Io::word(b.d[k], c.d);
        n4<Io>(b.qs, k, c.q, 32);
        p4<Io>(b.qh, k, c.q, 4, kRisingPairs, 32);
    }
};

struct Q4_0_R8 : InterleavedInfo<Q4_0, 202, BlockQ4_0_R8, 8> {
    template <class Io, class B, class C>
    static void layout(B& b, int k, C& c) {
        Io::word(b.d[k], c.d);
        nibbles_r8<Io>(b.qs, k, c.q);
    }
};

struct MXFP4_R8 : InterleavedInfo<MXFP4, 353, BlockMXFP4_R8, 8> {
    template <class Io, class B, class C>
    static void layout(B& b, int k, C& c) {
        Io::template bits<8>(b.e[k], 0, c.d);
        nibbles_r8<Io>(b.qs, k, c.q);
    }
};

struct Q8_0_R8 : InterleavedInfo<Q8_0, 208, BlockQ8_0_R8, 8> {
    template <class Io, class B, class C>
    static void layout(B& b, int k, C& c) {
        Io::word(b.d[k], c.d);
        q8x<Io, 8>(b.qs, k, c.q, 32);
    }
};

struct Q8_KV_R8 : InterleavedInfo<Q8_KV, 398, BlockQ8_KV_R8, 8, Header::kF32> {
    template <class Io, class B, class C>
    static void layout(B& b, int k, C& c) {
        q8x<Io, 8>(b.qs, k, c.q, 32);
    }
};

struct IQ2_BN_R4 : InterleavedInfo<IQ2_BN, 335, BlockIQ2_BN_R4, 4> {
    template <class Io, class B, class C>
    static void layout(B& b, int k, C& c) {
        p4<Io>(b.qs, k, c.q, 0, kRisingPairs, 64);
    }
};

// Runs of L bytes of one row after the other; nibbles with the top bit inverted.
template <int Id, int R, int L>
struct Q4_0_Arm : InterleavedInfo<Q4_0, Id, BlockQ4_0_Arm<R>, R> {
    template <class Io, class B, class C>
    static void layout(B& b, int k, C& c) {
        Io::word(b.d[k], c.d);
        uint8_t inverted[32] = {};
        if constexpr (!Io::kReads)
            for (int i = 0; i < 32; ++i) inverted[i] = c.q[i] ^ 8;
        for (int j = 0; j < 16; ++j) {
            auto& byte = b.qs[R * L * (j / L) + L * k + j % L];
            Io::template bits<4>(byte, 0, inverted[j]);
            Io::template bits<4>(byte, 4, inverted[j + 16]);
        }
        if constexpr (Io::kReads)
            for (int i = 0; i < 32; ++i) c.q[i] = inverted[i] ^ 8;
    }
};
using Q4_0_4x4 = Q4_0_Arm<31, 4, 4>;
using Q4_0_4x8 = Q4_0_Arm<32, 4, 8>;
using Q4_0_8x8 = Q4_0_Arm<33, 8, 8>;

}  // namespace ikpy::formats
