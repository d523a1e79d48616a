// Grid types: indices of lattice points and signs, plain and interleaved
// (quant-formats.md#grid-types, quant-formats.md#interleaved-grid-types).
#pragma once

#include "tables.hpp"
#include "type_traits.hpp"

namespace ikpy::formats {

// Factors +1 and -1 of the eight elements of a sign mask.
struct SignFactors {
    int8_t of_mask[256][8];
};
constexpr SignFactors make_sign_factors() {
    SignFactors table{};
    for (int mask = 0; mask < 256; ++mask)
        for (int i = 0; i < 8; ++i) table.of_mask[mask][i] = mask >> i & 1 ? -1 : 1;
    return table;
}
inline constexpr SignFactors kSignFactors = make_sign_factors();

// y = d * (2 * scale + 1) * multiplier * point * sign; Points elements per index, scales per 256 / Scales
// elements
template <int Points, int Scales>
inline void grid_values(const GridBlock& c, const int8_t* grid, float multiplier, float* y) {
    const float d = f16_to_f32(c.d);
    for (int g = 0; g < 32; ++g) {
        const float scale = d * static_cast<float>(2 * c.scale[g * Scales / 32] + 1) * multiplier;
        int8_t points[8];
        for (int p = 0; p < 8 / Points; ++p)
            std::memcpy(points + Points * p, grid + Points * c.index[8 / Points * g + p], Points);
        const int8_t* factors = kSignFactors.of_mask[c.sign[g]];
        for (int i = 0; i < 8; ++i) y[8 * g + i] = scale * static_cast<float>(points[i] * factors[i]);
    }
}

// The sign index of seven bits and its mask of eight bits with even parity.
inline uint8_t sign_index(uint8_t mask) { return mask & 127; }
inline uint8_t mask_of_index(int index) { return tables::ksigns_iq2xs[index]; }

// The seven-bit code z of the interleaved types: mask = z XOR (z << 1).
inline uint8_t mask_of_code(int z) { return static_cast<uint8_t>(z ^ (z << 1)); }
inline uint8_t sign_code(uint8_t mask) {
    int z = mask;  // running XOR of the lower bits
    z ^= z << 1;
    z ^= z << 2;
    z ^= z << 4;
    return static_cast<uint8_t>(z & 127);
}

// Moves 32 sign codes through `transfer(group, code)`, translating between codes and masks.
template <class Io, class C, class Encode, class Decode, class Transfer>
inline void signs_coded(C& c, Encode encode, Decode decode, Transfer transfer) {
    for (int g = 0; g < 32; ++g) {
        uint8_t code = 0;
        if constexpr (!Io::kReads) code = encode(c.sign[g]);
        transfer(g, code);
        if constexpr (Io::kReads) c.sign[g] = decode(code);
    }
}

struct IQ2_XXS : TypeInfo<16, 256, BlockIQ2_XXS, GridBlock> {
    template <class Io, class B, class C>
    static void layout(B& b, int, C& c) {
        Io::word(b.d, c.d);
        for (int g = 0; g < 32; ++g) Io::template bits<8>(b.sub[g >> 2].index[g & 3], 0, c.index[g]);
        for (int s = 0; s < 8; ++s) Io::template bits<4>(b.sub[s].signs_scale[3], 4, c.scale[s]);
        signs_coded<Io>(c, sign_index, mask_of_index, [&](int g, uint8_t& code) {
            bit_run<Io, 7>(b.sub[g >> 2].signs_scale, 7 * (g & 3), code);
        });
    }
    static void values(const Content& c, float, float* y) {
        grid_values<8, 8>(c, tables::iq2xxs_grid, 0.125f, y);
    }
};

struct IQ2_XS : TypeInfo<17, 256, BlockIQ2_XS, GridBlock> {
    template <class Io, class B, class C>
    static void layout(B& b, int, C& c) {
        Io::word(b.d, c.d);
        nibble_list<Io>(b.scales, c.scale, 16);
        for (int g = 0; g < 32; ++g) bit_run<Io, 9>(b.qs[g].bytes, 0, c.index[g]);
        signs_coded<Io>(c, sign_index, mask_of_index,
                        [&](int g, uint8_t& code) { Io::template bits<7>(b.qs[g].bytes[1], 1, code); });
    }
    static void values(const Content& c, float, float* y) {
        grid_values<8, 16>(c, tables::iq2xs_grid, 0.125f, y);
    }
};

struct IQ2_S : TypeInfo<22, 256, BlockIQ2_S, GridBlock> {
    template <class Io, class B, class C>
    static void layout(B& b, int, C& c) {
        Io::word(b.d, c.d);
        nibble_list<Io>(b.scales, c.scale, 16);
        for (int g = 0; g < 32; ++g) {
            Io::template bits<8>(b.qs[g], 0, c.index[g], 0);
            Io::template bits<2>(b.qh[g >> 2], 2 * (g & 3), c.index[g], 8);
            Io::byte(b.signs[g], c.sign[g]);
        }
    }
    static void values(const Content& c, float, float* y) {
        grid_values<8, 16>(c, tables::iq2s_grid, 0.125f, y);
    }
};

struct IQ3_XXS : TypeInfo<18, 256, BlockIQ3_XXS, GridBlock> {
    template <class Io, class B, class C>
    static void layout(B& b, int, C& c) {
        Io::word(b.d, c.d);
        for (int g = 0; g < 64; ++g) Io::template bits<8>(b.qs[g], 0, c.index[g]);
        for (int s = 0; s < 8; ++s) Io::template bits<4>(b.signs_scale[s][3], 4, c.scale[s]);
        signs_coded<Io>(c, sign_index, mask_of_index, [&](int g, uint8_t& code) {
            bit_run<Io, 7>(b.signs_scale[g >> 2], 7 * (g & 3), code);
        });
    }
    static void values(const Content& c, float, float* y) {
        grid_values<4, 8>(c, tables::iq3xxs_grid, 0.25f, y);
    }
};

struct IQ3_S : TypeInfo<21, 256, BlockIQ3_S, GridBlock> {
    template <class Io, class B, class C>
    static void layout(B& b, int, C& c) {
        Io::word(b.d, c.d);
        nibble_list<Io>(b.scales, c.scale, 8);
        for (int g = 0; g < 64; ++g) {
            Io::template bits<8>(b.qs[g], 0, c.index[g], 0);
            Io::template bits<1>(b.qh[g >> 3], g & 7, c.index[g], 8);
        }
        for (int g = 0; g < 32; ++g) Io::byte(b.signs[g], c.sign[g]);
    }
    static void values(const Content& c, float, float* y) {
        grid_values<4, 8>(c, tables::iq3s_grid, 1.0f, y);
    }
};

// interleaved

// Place of an 8-group in lists ordered by sub-block, row, group.
inline int group_place(int g, int k) { return 16 * (g >> 2) + 4 * k + (g & 3); }

// Bytes with a sign code above one bit of the scale; the four bytes of a sub-block give the four bits.
template <class Io, class Byte, class C>
inline void signs_and_scales(Byte* sas, int k, C& c) {
    for (int g = 0; g < 32; ++g) Io::template bits<1>(sas[group_place(g, k)], 0, c.scale[g >> 2], g & 3);
    signs_coded<Io>(c, sign_code, mask_of_code,
                    [&](int g, uint8_t& code) { Io::template bits<7>(sas[group_place(g, k)], 1, code); });
}

struct IQ2_XXS_R4 : InterleavedInfo<IQ2_XXS, 216, BlockIQ2_XXS_R4, 4> {
    template <class Io, class B, class C>
    static void layout(B& b, int k, C& c) {
        Io::word(b.d[k], c.d);
        for (int g = 0; g < 32; ++g) Io::template bits<8>(b.qs[group_place(g, k)], 0, c.index[g]);
        signs_and_scales<Io>(b.sas, k, c);
    }
};

struct IQ3_XXS_R4 : InterleavedInfo<IQ3_XXS, 218, BlockIQ3_XXS_R4, 4> {
    template <class Io, class B, class C>
    static void layout(B& b, int k, C& c) {
        Io::word(b.d[k], c.d);
        for (int g = 0; g < 64; ++g)
            Io::template bits<8>(b.qs[32 * (g >> 3) + 8 * k + (g & 7)], 0, c.index[g]);
        signs_and_scales<Io>(b.sas, k, c);
    }
};

// Both halves of a sub-block's scale byte.
template <class Io, class Byte, class C>
inline void half_scales_r4(Byte* scales, int k, C& c) {
    for (int s = 0; s < 16; ++s) Io::template bits<4>(scales[4 * (s >> 1) + k], 4 * (s & 1), c.scale[s]);
}

struct IQ2_XS_R4 : InterleavedInfo<IQ2_XS, 217, BlockIQ2_XS_R4, 4> {
    template <class Io, class B, class C>
    static void layout(B& b, int k, C& c) {
        Io::word(b.d[k], c.d);
        half_scales_r4<Io>(b.scales, k, c);
        for (int g = 0; g < 32; ++g) bit_run<Io, 9>(b.qs[group_place(g, k)].bytes, 0, c.index[g]);
        signs_coded<Io>(c, sign_code, mask_of_code, [&](int g, uint8_t& code) {
            Io::template bits<7>(b.qs[group_place(g, k)].bytes[1], 1, code);
        });
    }
};

struct IQ2_S_R4 : InterleavedInfo<IQ2_S, 222, BlockIQ2_S_R4, 4> {
    template <class Io, class B, class C>
    static void layout(B& b, int k, C& c) {
        Io::word(b.d[k], c.d);
        half_scales_r4<Io>(b.scales, k, c);
        for (int g = 0; g < 32; ++g) {
            Io::template bits<8>(b.qs[group_place(g, k)], 0, c.index[g], 0);
            Io::template bits<2>(b.qh[4 * (g >> 2) + k], 2 * (g & 3), c.index[g], 8);
            Io::byte(b.signs[group_place(g, k)], c.sign[g]);
        }
    }
};

struct IQ3_S_R4 : InterleavedInfo<IQ3_S, 221, BlockIQ3_S_R4, 4> {
    template <class Io, class B, class C>
    static void layout(B& b, int k, C& c) {
        Io::word(b.d[k], c.d);
        for (int g = 0; g < 64; ++g) {
            const int ib = g >> 3, j = g & 7;
            Io::template bits<8>(b.qs[32 * ib + k + 8 * (j & 3) + 4 * (j >> 2)], 0, c.index[g], 0);
            Io::template bits<1>(b.qh[4 * ib + k], j, c.index[g], 8);
        }
        for (int e = 0; e < 256; ++e)
            Io::template bits<1>(b.signs[16 * (e >> 5) + 4 * k + (e & 3)], (e & 31) >> 2, c.sign[e >> 3],
                                 e & 7);
        for (int s = 0; s < 8; ++s) {
            const int p = 4 * s + k;
            Io::template bits<4>(b.scales[p & 15], 4 * (p >> 4), c.scale[s]);
        }
    }
};

}  // namespace ikpy::formats
