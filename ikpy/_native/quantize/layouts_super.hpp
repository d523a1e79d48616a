// Super-blocks of 256 levels with quantized scales: k-quants, IQ4_XS, IQ2_K … IQ5_K, IQ4_KS, IQ5_KS, plain
// and interleaved (quant-formats 6.1, 6.7 - 6.15, 8.3 - 8.5).
#pragma once

#include "tables.hpp"
#include "type_traits.hpp"

namespace ikpy::formats {

// y = d * scale * q - dmin * min over sub-blocks of Sub elements
template <int Sub>
inline void min_values(const SuperBlock& c, float* y) {
    const float d = f16_to_f32(c.d), dmin = f16_to_f32(c.dmin);
    for (int s = 0; s < 256 / Sub; ++s) {
        const float scale = d * c.scale[s], min = dmin * c.min[s];
        for (int i = 0; i < Sub; ++i) y[Sub * s + i] = scale * c.q[Sub * s + i] - min;
    }
}

// y = d * scale * (q - Offset) over sub-blocks of 16; scales already signed
template <int Offset>
inline void centred_values16(const SuperBlock& c, const int* scale, float* y) {
    const float d = f16_to_f32(c.d);
    for (int s = 0; s < 16; ++s) {
        const float dl = d * static_cast<float>(scale[s]);
        for (int i = 0; i < 16; ++i) y[16 * s + i] = dl * static_cast<float>(c.q[16 * s + i] - Offset);
    }
}

// y = d * scale * table[q + Stride * extra] over sub-blocks of Sub elements
template <int Sub>
inline void table_values(const uint8_t* q, const int* scale, const uint8_t* extra, const int8_t* table,
                         int stride, float d, float* y) {
    for (int s = 0; s < 256 / Sub; ++s) {
        const float dl = d * static_cast<float>(scale[s]);
        const int8_t* values = table + stride * extra[s];
        for (int i = 0; i < Sub; ++i) y[Sub * s + i] = dl * values[q[Sub * s + i]];
    }
}

// ---- k-quants ----

struct Q2_K : TypeInfo<10, 256, BlockQ2_K, SuperBlock> {
    template <class Io, class B, class C>
    static void layout(B& b, int, C& c) {
        Io::word(b.d, c.d);
        Io::word(b.dmin, c.dmin);
        for (int s = 0; s < 16; ++s) {
            Io::template bits<4>(b.scales[s], 0, c.scale[s]);
            Io::template bits<4>(b.scales[s], 4, c.min[s]);
        }
        pairs32<Io>(b.qs, c.q);
    }
    static void values(const Content& c, float, float* y) { min_values<16>(c, y); }
};

struct Q3_K : TypeInfo<11, 256, BlockQ3_K, SuperBlock> {
    template <class Io, class B, class C>
    static void layout(B& b, int, C& c) {
        Io::word(b.d, c.d);
        for (int s = 0; s < 16; ++s) {
            Io::template bits<4>(b.scales[s & 7], 4 * (s >> 3), c.scale[s], 0);
            Io::template bits<2>(b.scales[8 + (s & 3)], 2 * (s >> 2), c.scale[s], 4);
        }
        pairs32<Io>(b.qs, c.q);
        plane32<Io>(b.hmask, c.q, 2);
    }
    static void values(const Content& c, float, float* y) {
        int scale[16];
        for (int s = 0; s < 16; ++s) scale[s] = c.scale[s] - 32;
        centred_values16<4>(c, scale, y);
    }
};

// Eight six-bit scales and minima in twelve bytes.
template <class Io, class Byte, class C>
inline void scales12(Byte* scales, C& c) {
    for (int j = 0; j < 4; ++j) {
        Io::template bits<6>(scales[j], 0, c.scale[j]);
        Io::template bits<6>(scales[j + 4], 0, c.min[j]);
        Io::template bits<4>(scales[j + 8], 0, c.scale[j + 4], 0);
        Io::template bits<2>(scales[j], 6, c.scale[j + 4], 4);
        Io::template bits<4>(scales[j + 8], 4, c.min[j + 4], 0);
        Io::template bits<2>(scales[j + 4], 6, c.min[j + 4], 4);
    }
}

struct Q4_K : TypeInfo<12, 256, BlockQ4_K, SuperBlock> {
    template <class Io, class B, class C>
    static void layout(B& b, int, C& c) {
        Io::word(b.d, c.d);
        Io::word(b.dmin, c.dmin);
        scales12<Io>(b.scales, c);
        nibbles32<Io>(b.qs, c.q);
    }
    static void values(const Content& c, float, float* y) { min_values<32>(c, y); }
};

struct Q5_K : TypeInfo<13, 256, BlockQ5_K, SuperBlock> {
    template <class Io, class B, class C>
    static void layout(B& b, int, C& c) {
        Io::word(b.d, c.d);
        Io::word(b.dmin, c.dmin);
        scales12<Io>(b.scales, c);
        nibbles32<Io>(b.qs, c.q);
        plane32<Io>(b.qh, c.q, 4);
    }
    static void values(const Content& c, float, float* y) { min_values<32>(c, y); }
};

struct Q6_K : TypeInfo<14, 256, BlockQ6_K, SuperBlock> {
    template <class Io, class B, class C>
    static void layout(B& b, int, C& c) {
        Io::word(b.d, c.d);
        for (int s = 0; s < 16; ++s) Io::byte(b.scales[s], c.scale[s]);
        for (int h = 0; h < 2; ++h)
            for (int t = 0; t < 4; ++t)
                for (int j = 0; j < 32; ++j)
                    Io::template bits<4>(b.ql[64 * h + j + 32 * (t & 1)], 4 * (t >> 1),
                                         c.q[128 * h + 32 * t + j]);
        pairs32<Io>(b.qh, c.q, 4);
    }
    static void values(const Content& c, float, float* y) {
        int scale[16];
        for (int s = 0; s < 16; ++s) scale[s] = static_cast<int8_t>(c.scale[s]);
        centred_values16<32>(c, scale, y);
    }
};

// ---- non-linear levels ----

struct IQ4_XS : TypeInfo<23, 256, BlockIQ4_XS, SuperBlock> {
    template <class Io, class B, class C>
    static void layout(B& b, int, C& c) {
        Io::word(b.d, c.d);
        nibble_list<Io>(b.scales_l, c.scale, 8);
        for (int s = 0; s < 8; ++s) Io::template bits<2>(b.scales_h[s >> 2], 2 * (s & 3), c.scale[s], 4);
        nibbles16<Io>(b.qs, c.q, 256);
    }
    static void values(const Content& c, float, float* y) {
        int scale[8];
        for (int s = 0; s < 8; ++s) scale[s] = c.scale[s] - 32;
        table_values<32>(c.q, scale, c.extra, tables::iq4k_values, 0, f16_to_f32(c.d), y);
    }
};

struct IQ2_K : TypeInfo<137, 256, BlockIQ2_K, SuperBlock> {
    template <class Io, class B, class C>
    static void layout(B& b, int, C& c) {
        Io::word(b.d, c.d);
        bit_list<Io>(b.extra, c.extra, 16);
        nibble_list<Io>(b.scales, c.scale, 16);
        pairs32<Io>(b.qs, c.q);
    }
    static void values(const Content& c, float, float* y) {
        int scale[16];
        for (int s = 0; s < 16; ++s) scale[s] = c.scale[s] - 8;
        table_values<16>(c.q, scale, c.extra, tables::iq2nl_values, 4, f16_to_f32(c.d), y);
    }
};

// Bit 4 of the scale is its sign.
struct IQ3_K : TypeInfo<138, 256, BlockIQ3_K, SuperBlock> {
    template <class Io, class B, class C>
    static void layout(B& b, int, C& c) {
        Io::word(b.d, c.d);
        bit_list<Io>(b.extra, c.extra, 16);
        nibble_list<Io>(b.scales_l, c.scale, 16);
        bit_list<Io>(b.scales_h, c.scale, 16, 4);
        pairs32<Io>(b.qs, c.q);
        plane32<Io>(b.qh, c.q, 2);
    }
    static void values(const Content& c, float, float* y) {
        int scale[16];
        for (int s = 0; s < 16; ++s) scale[s] = (2 * (c.scale[s] & 15) + 1) * (c.scale[s] & 16 ? -1 : 1);
        table_values<16>(c.q, scale, c.extra, tables::iq3nl_values, 8, f16_to_f32(c.d), y);
    }
};

template <class Io, class B, class C>
inline void scales_iq45(B& b, C& c) {
    Io::word(b.d, c.d);
    bit_list<Io>(b.extra, c.extra, 16);
    nibble_list<Io>(b.scales_l, c.scale, 16);
    for (int s = 0; s < 16; ++s) Io::template bits<2>(b.scales_h[s >> 2], 2 * (s & 3), c.scale[s], 4);
}

struct IQ4_K : TypeInfo<139, 256, BlockIQ4_K, SuperBlock> {
    template <class Io, class B, class C>
    static void layout(B& b, int, C& c) {
        scales_iq45<Io>(b, c);
        nibbles16<Io>(b.qs, c.q, 256);
    }
    static void values(const Content& c, float, float* y) {
        int scale[16];
        for (int s = 0; s < 16; ++s) scale[s] = c.scale[s] - 32;
        table_values<16>(c.q, scale, c.extra, tables::iq4k_values, 16, f16_to_f32(c.d), y);
    }
};

struct IQ5_K : TypeInfo<140, 256, BlockIQ5_K, SuperBlock> {
    template <class Io, class B, class C>
    static void layout(B& b, int, C& c) {
        scales_iq45<Io>(b, c);
        nibbles32<Io>(b.qs, c.q);
        plane32<Io>(b.qh, c.q, 4);
    }
    static void values(const Content& c, float, float* y) {
        int scale[16];
        for (int s = 0; s < 16; ++s) scale[s] = c.scale[s] - 32;
        table_values<16>(c.q, scale, c.extra, tables::iq5nl_values, 32, f16_to_f32(c.d), y);
    }
};

// Scale bytes of the KS types: bit 0 selects the table, the rest is an odd scale.
inline void odd_scale_values(const uint8_t* q, const uint8_t* codes, const int8_t* table, int stride, float d,
                             float* y) {
    int scale[8];
    uint8_t extra[8];
    for (int s = 0; s < 8; ++s) {
        scale[s] = (codes[s] & 254) - 127;
        extra[s] = codes[s] & 1;
    }
    table_values<32>(q, scale, extra, table, stride, d, y);
}

struct IQ4_KS : TypeInfo<144, 256, BlockIQ4_KS, SuperBlock, Header::kF32> {
    template <class Io, class B, class C>
    static void layout(B& b, int, C& c) {
        for (int s = 0; s < 8; ++s) Io::byte(b.scales[s], c.scale[s]);
        nibbles16<Io>(b.qs, c.q, 256);
    }
    static void values(const Content& c, float d, float* y) {
        odd_scale_values(c.q, c.scale, tables::iq4k_values, 16, d, y);
    }
};

struct IQ5_KS : TypeInfo<152, 256, BlockIQ5_KS, SuperBlock, Header::kF32> {
    template <class Io, class B, class C>
    static void layout(B& b, int, C& c) {
        for (int s = 0; s < 8; ++s) Io::byte(b.scales[s], c.scale[s]);
        nibbles32<Io>(b.qs, c.q);
        plane32<Io>(b.qh, c.q, 4);
    }
    static void values(const Content& c, float d, float* y) {
        odd_scale_values(c.q, c.scale, tables::iq5nl_values, 32, d, y);
    }
};

// ---- interleaved ----

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
