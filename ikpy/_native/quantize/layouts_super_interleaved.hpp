// Super-blocks of 256 levels in interleaved rows: the types of layouts_super.hpp
// (quant-formats.md#interleaved-k-quants, quant-formats.md#interleaved-non-linear-types).
#pragma once

#include "layouts_super.hpp"

namespace ikpy::formats {

constexpr BitOrder kRisingBits = {{0, 4, 8, 12, 16, 20, 24, 28}};
constexpr BitOrder kQ5Bits = {{0, 8, 4, 12, 16, 24, 20, 28}};
constexpr BitOrder kIQ5Bits = {{0, 8, 16, 24, 4, 12, 20, 28}};

struct Q2_K_R4 : InterleavedInfo<Q2_K, 210, BlockQ2_K_R4, 4> {
    template <class Io, class B, class C>
    static void layout(B& b, int k, C& c) {
        Io::word(b.d[k], c.d);
        Io::word(b.dmin[k], c.dmin);
        for (int s = 0; s < 16; ++s) {
            Io::template bits<4>(b.scales[position16(s, k)], 0, c.scale[s]);
            Io::template bits<4>(b.scales[position16(s, k)], 4, c.min[s]);
        }
        p4<Io>(b.qs, k, c.q);
    }
};

struct Q3_K_R4 : InterleavedInfo<Q3_K, 211, BlockQ3_K_R4, 4> {
    template <class Io, class B, class C>
    static void layout(B& b, int k, C& c) {
        Io::word(b.d[k], c.d);
        s8<Io>(b.scales_l, b.scales_h, k, c.scale);
        p4<Io>(b.qs, k, c.q);
        b4<Io>(b.qh, k, c.q, kRisingBits, 2);
    }
};

template <class Io, class B, class C>
inline void scales_q45_r4(B& b, int k, C& c) {
    Io::word(b.d[k], c.d);
    Io::word(b.dmin[k], c.dmin);
    for (int s = 0; s < 8; ++s) {
        const int p = 4 * s + k;
        Io::template bits<4>(b.scales_l[p], 0, c.scale[s], 0);
        Io::template bits<4>(b.scales_l[p], 4, c.min[s], 0);
        Io::template bits<2>(b.scales_h[p & 15], 4 * (p >> 4), c.scale[s], 4);
        Io::template bits<2>(b.scales_h[p & 15], 4 * (p >> 4) + 2, c.min[s], 4);
    }
}

struct Q4_K_R4 : InterleavedInfo<Q4_K, 212, BlockQ4_K_R4, 4> {
    template <class Io, class B, class C>
    static void layout(B& b, int k, C& c) {
        scales_q45_r4<Io>(b, k, c);
        n4<Io>(b.qs, k, c.q);
    }
};

struct Q5_K_R4 : InterleavedInfo<Q5_K, 213, BlockQ5_K_R4, 4> {
    template <class Io, class B, class C>
    static void layout(B& b, int k, C& c) {
        scales_q45_r4<Io>(b, k, c);
        n4<Io>(b.qs, k, c.q);
        b4<Io>(b.qh, k, c.q, kQ5Bits, 4);
    }
};

struct Q6_K_R4 : InterleavedInfo<Q6_K, 214, BlockQ6_K_R4, 4> {
    template <class Io, class B, class C>
    static void layout(B& b, int k, C& c) {
        Io::word(b.d[k], c.d);
        for (int s = 0; s < 16; ++s) Io::byte(b.scales[position16(s, k)], c.scale[s]);
        n4<Io>(b.qs, k, c.q);
        p4<Io>(b.qh, k, c.q, 4, {{0, 2, 1, 3}});
    }
};

struct IQ4_XS_R8 : InterleavedInfo<IQ4_XS, 223, BlockIQ4_XS_R8, 8> {
    template <class Io, class B, class C>
    static void layout(B& b, int k, C& c) {
        Io::word(b.d[k], c.d);
        for (int s = 0; s < 8; ++s) six_bits<Io>(b.scales_l, b.scales_h, 8 * s + k, c.scale[s]);
        for (int run = 0; run < 32; ++run)  // eight columns: four in low, four in high nibbles
            for (int i = 0; i < 4; ++i) {
                auto& byte = b.qs[32 * run + 4 * k + i];
                Io::template bits<4>(byte, 0, c.q[8 * run + i]);
                Io::template bits<4>(byte, 4, c.q[8 * run + 4 + i]);
            }
    }
};

struct IQ2_K_R4 : InterleavedInfo<IQ2_K, 337, BlockIQ2_K_R4, 4> {
    template <class Io, class B, class C>
    static void layout(B& b, int k, C& c) {
        Io::word(b.d[k], c.d);
        x4<Io>(b.extra, k, c.extra);
        for (int s = 0; s < 16; ++s) {
            const int p = position16(s, k);
            Io::template bits<4>(b.scales[p & 31], 4 * (p >> 5), c.scale[s]);
        }
        p4<Io>(b.qs, k, c.q);
    }
};

struct IQ3_K_R4 : InterleavedInfo<IQ3_K, 338, BlockIQ3_K_R4, 4> {
    template <class Io, class B, class C>
    static void layout(B& b, int k, C& c) {
        Io::word(b.d[k], c.d);
        x4<Io>(b.extra, k, c.extra);
        for (int s = 0; s < 16; ++s) {
            const int p = position16(s, k);
            Io::template bits<4>(b.scales_l[p & 31], 4 * (p >> 5), c.scale[s]);
        }
        x4<Io>(b.scales_h, k, c.scale, 4);
        p4<Io>(b.qs, k, c.q);
        b4<Io>(b.qh, k, c.q, kRisingBits, 2);
    }
};

struct IQ4_K_R4 : InterleavedInfo<IQ4_K, 339, BlockIQ4_K_R4, 4> {
    template <class Io, class B, class C>
    static void layout(B& b, int k, C& c) {
        Io::word(b.d[k], c.d);
        x4<Io>(b.extra, k, c.extra);
        s8<Io>(b.scales_l, b.scales_h, k, c.scale);
        n4<Io>(b.qs, k, c.q);
    }
};

struct IQ5_K_R4 : InterleavedInfo<IQ5_K, 340, BlockIQ5_K_R4, 4> {
    template <class Io, class B, class C>
    static void layout(B& b, int k, C& c) {
        Io::word(b.d[k], c.d);
        x4<Io>(b.extra, k, c.extra);
        s8<Io>(b.scales_l, b.scales_h, k, c.scale);
        n4<Io>(b.qs, k, c.q);
        b4<Io>(b.qh, k, c.q, kIQ5Bits, 4);
    }
};

struct IQ4_KS_R4 : InterleavedInfo<IQ4_KS, 344, BlockIQ4_KS_R4, 4> {
    template <class Io, class B, class C>
    static void layout(B& b, int k, C& c) {
        for (int s = 0; s < 8; ++s) Io::byte(b.scales[4 * s + k], c.scale[s]);
        n4<Io>(b.qs, k, c.q);
    }
};

struct IQ5_KS_R4 : InterleavedInfo<IQ5_KS, 352, BlockIQ5_KS_R4, 4> {
    template <class Io, class B, class C>
    static void layout(B& b, int k, C& c) {
        for (int s = 0; s < 8; ++s) Io::byte(b.scales[4 * s + k], c.scale[s]);
        n4<Io>(b.qs, k, c.q);
        b4<Io>(b.qh, k, c.q, kIQ5Bits, 4);
    }
};

}  // namespace ikpy::formats
