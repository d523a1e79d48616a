// Super-blocks of 256 levels with quantized scales: k-quants, IQ4_XS, IQ2_K … IQ5_K, IQ4_KS, IQ5_KS
// (quant-formats.md#k-quants, quant-formats.md#non-linear-levels).
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

// k-quants

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

// non-linear levels

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

}  // namespace ikpy::formats
