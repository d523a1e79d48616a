// Grid types: IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ1_S, IQ1_M (quant-formats.md#grid-types), and
// IQ1_S_R4, IQ1_M_R4 (quant-formats.md#one-bit-types-with-row-scales).
#include "grid_codec.hpp"
#include "pack.hpp"
#include "superblock.hpp"
#include "tables.hpp"
#include "ternary_codec.hpp"

namespace ikpy::quantize {
namespace {

// The grids are built on first use and never change.
const Grid& iq2xxs_grid() {
    static const Grid grid(tables::iq2xxs_grid, 8, 256, 0.125f);
    return grid;
}
const Grid& iq2xs_grid() {
    static const Grid grid(tables::iq2xs_grid, 8, 512, 0.125f);
    return grid;
}
const Grid& iq2s_grid() {
    static const Grid grid(tables::iq2s_grid, 8, 1024, 0.125f);
    return grid;
}
const Grid& iq3xxs_grid() {
    static const Grid grid(tables::iq3xxs_grid, 4, 256, 0.25f);
    return grid;
}
const Grid& iq3s_grid() {
    static const Grid grid(tables::iq3s_grid, 4, 512, 1.0f);
    return grid;
}
const TernaryGrid& iq1s_grid() {
    static const TernaryGrid grid(tables::iq1s_grid, 2048);
    return grid;
}

constexpr float IQ2_EXTENT = 43.0f / 8, IQ3XXS_EXTENT = 62.0f / 4, IQ3S_EXTENT = 15.0f;

// Four 7-bit sign indices (the eighth sign follows from the even parity) and the scale code in the top four
// bits.
uint32_t signs_and_scale(const GridCode* codes, int scale_code) {
    uint32_t word = static_cast<uint32_t>(scale_code) << 28;
    for (int t = 0; t < 4; t++) word |= static_cast<uint32_t>(codes[t].signs & 127) << 7 * t;
    return word;
}

struct Iq2Xxs {
    using Codec = SignedGridCodec<8, 32, true>;
    static Codec codec() { return Codec(iq2xxs_grid(), IQ2_EXTENT); }
    static constexpr UniformCodes CODES{1, 2, 16};
    static constexpr Effort EFFORT{0.3f, 1.5f, 4, 3};
    static constexpr int BLOCK_BYTES = 66;
    static void pack(uint8_t* block, float d, const SubBlock* s, const GridCode* codes) {
        put(block, f32_to_f16(d));
        for (int b = 0; b < 8; b++) {
            for (int t = 0; t < 4; t++)
                block[2 + 8 * b + t] = static_cast<uint8_t>(codes[4 * b + t].index[0]);
            put(block + 2 + 8 * b + 4, signs_and_scale(codes + 4 * b, s[b].code));
        }
    }
};

struct Iq2Xs {
    using Codec = SignedGridCodec<8, 16, true>;
    static Codec codec() { return Codec(iq2xs_grid(), IQ2_EXTENT); }
    static constexpr UniformCodes CODES{1, 2, 16};
    static constexpr Effort EFFORT{0.3f, 1.5f, 4, 3};
    static constexpr int BLOCK_BYTES = 74;
    static void pack(uint8_t* block, float d, const SubBlock* s, const GridCode* codes) {
        put(block, f32_to_f16(d));
        for (int g = 0; g < 32; g++) {
            put(block + 2 + 2 * g, static_cast<uint16_t>(codes[g].index[0] | (codes[g].signs & 127) << 9));
        }
        for (int b = 0; b < 16; b++) put_nibble(block + 66, b, s[b].code);
    }
};

struct Iq2S {
    using Codec = SignedGridCodec<8, 16, false>;
    static Codec codec() { return Codec(iq2s_grid(), IQ2_EXTENT); }
    static constexpr UniformCodes CODES{1, 2, 16};
    static constexpr Effort EFFORT{0.3f, 1.5f, 4, 3};
    static constexpr int BLOCK_BYTES = 82;
    static void pack(uint8_t* block, float d, const SubBlock* s, const GridCode* codes) {
        put(block, f32_to_f16(d));
        for (int g = 0; g < 32; g++) {
            block[2 + g] = static_cast<uint8_t>(codes[g].index[0]);
            block[34 + g] = codes[g].signs;
            block[66 + (g >> 2)] |= static_cast<uint8_t>((codes[g].index[0] >> 8) << 2 * (g & 3));
        }
        for (int b = 0; b < 16; b++) put_nibble(block + 74, b, s[b].code);
    }
};

struct Iq3Xxs {
    using Codec = SignedGridCodec<4, 32, true>;
    static Codec codec() { return Codec(iq3xxs_grid(), IQ3XXS_EXTENT); }
    static constexpr UniformCodes CODES{1, 2, 16};
    static constexpr Effort EFFORT{0.4f, 1.4f, 4, 3};
    static constexpr int BLOCK_BYTES = 98;
    static void pack(uint8_t* block, float d, const SubBlock* s, const GridCode* codes) {
        put(block, f32_to_f16(d));
        for (int g = 0; g < 64; g++) block[2 + g] = static_cast<uint8_t>(codes[g >> 1].index[g & 1]);
        for (int b = 0; b < 8; b++) put(block + 66 + 4 * b, signs_and_scale(codes + 4 * b, s[b].code));
    }
};

struct Iq3S {
    using Codec = SignedGridCodec<4, 32, false>;
    static Codec codec() { return Codec(iq3s_grid(), IQ3S_EXTENT); }
    static constexpr UniformCodes CODES{1, 2, 16};
    static constexpr Effort EFFORT{0.4f, 1.4f, 4, 3};
    static constexpr int BLOCK_BYTES = 110;
    static void pack(uint8_t* block, float d, const SubBlock* s, const GridCode* codes) {
        put(block, f32_to_f16(d));
        for (int g = 0; g < 64; g++) {
            const int index = codes[g >> 1].index[g & 1];
            block[2 + g] = static_cast<uint8_t>(index);
            block[66 + (g >> 3)] |= static_cast<uint8_t>((index >> 8) << (g & 7));
        }
        for (int g = 0; g < 32; g++) block[74 + g] = codes[g].signs;
        for (int b = 0; b < 8; b++) put_nibble(block + 106, b, s[b].code);
    }
};

struct Iq1S {
    using Codec = TernaryGridCodec<32, false>;
    static Codec codec() { return Codec(iq1s_grid()); }
    static constexpr UniformCodes CODES{1, 2, 8};
    static constexpr Effort EFFORT{0.3f, 1.3f, 4, 3};
    static constexpr int BLOCK_BYTES = 50;
    static void pack(uint8_t* block, float d, const SubBlock* s, const TernaryCode* codes) {
        put(block, f32_to_f16(d));
        for (int b = 0; b < 8; b++) {
            unsigned high = static_cast<unsigned>(s[b].code) << 12 | static_cast<unsigned>(s[b].table) << 15;
            for (int t = 0; t < 4; t++) {
                block[2 + 4 * b + t] = static_cast<uint8_t>(codes[4 * b + t].index);
                high |= static_cast<unsigned>(codes[4 * b + t].index >> 8) << 3 * t;
            }
            put(block + 34 + 2 * b, static_cast<uint16_t>(high));
        }
    }
};

// High index bits and offset sign of the two groups of a 16-element sub-block.
uint8_t iq1m_high(const TernaryCode* codes) {
    return static_cast<uint8_t>((codes[0].index >> 8) | codes[0].negative << 3 | (codes[1].index >> 8) << 4 |
                                codes[1].negative << 7);
}

struct Iq1M {
    using Codec = TernaryGridCodec<16, true>;
    static Codec codec() { return Codec(iq1s_grid()); }
    static constexpr UniformCodes CODES{1, 2, 8};
    static constexpr Effort EFFORT{0.3f, 1.3f, 4, 3};
    static constexpr int BLOCK_BYTES = 56;
    static void pack(uint8_t* block, float d, const SubBlock* s, const TernaryCode* codes) {
        const unsigned half = f32_to_f16(d);
        unsigned scales[4];
        for (int i = 0; i < 4; i++)
            scales[i] = ((half >> 4 * i) & 15) << 12;  // d is spread over the top nibbles
        for (int b = 0; b < 16; b++) {
            block[2 * b] = static_cast<uint8_t>(codes[2 * b].index);
            block[2 * b + 1] = static_cast<uint8_t>(codes[2 * b + 1].index);
            block[32 + b] = iq1m_high(codes + 2 * b);
            scales[b >> 2] |= static_cast<unsigned>(s[b].code) << 3 * (b & 3);
        }
        for (int i = 0; i < 4; i++) put(block + 48 + 2 * i, static_cast<uint16_t>(scales[i]));
    }
};

struct Iq1SR4 {
    using Codec = TernaryGridCodec<32, false>;
    static constexpr UniformCodes CODES{1, 2, 8};
    static constexpr Effort EFFORT{0.3f, 1.3f, 4, 3};
    static constexpr int GROUP_BYTES = 24;
    // Writes sub-block b of row k of the group.
    static void pack(uint8_t* blocks, int b, int k, const SubBlock& s, const TernaryCode* codes) {
        uint8_t* block = blocks + b * GROUP_BYTES;
        unsigned high = static_cast<unsigned>(s.code) << 12 | static_cast<unsigned>(s.table) << 15;
        for (int t = 0; t < 4; t++) {
            block[4 * t + k] = static_cast<uint8_t>(codes[t].index);
            high |= static_cast<unsigned>(codes[t].index >> 8) << 3 * t;
        }
        put(block + 16 + 2 * k, static_cast<uint16_t>(high));
    }
};

struct Iq1MR4 {
    using Codec = TernaryGridCodec<16, true>;
    static constexpr UniformCodes CODES{0, 1, 16};
    static constexpr Effort EFFORT{0.3f, 1.3f, 4, 3};
    static constexpr int GROUP_BYTES = 28;
    static void pack(uint8_t* blocks, int b, int k, const SubBlock& s, const TernaryCode* codes) {
        uint8_t* block = blocks + (b >> 1) * GROUP_BYTES;
        const int h = b & 1;
        block[8 * h + k] = static_cast<uint8_t>(codes[0].index);
        block[8 * h + 4 + k] = static_cast<uint8_t>(codes[1].index);
        block[16 + 4 * h + k] = iq1m_high(codes);
        block[24 + k] |= static_cast<uint8_t>(s.code << 4 * h);
    }
};

// Four rows with their f16 scales first, then blocks of 32 columns that hold all four.
template <class Format>
void encode_four_rows(const Rows& r) {
    using Codec = typename Format::Codec;
    const int total = static_cast<int>(r.ne0 / Codec::SIZE);
    Codec codec(iq1s_grid());
    ScaledCodebookSearch<Codec, UniformCodes> search(codec, Format::CODES, ScaleType::F16, Format::EFFORT);
    TernaryCode codes[Codec::OUTPUTS];
    std::memset(r.dst, 0, static_cast<size_t>(r.n_rows * r.row_bytes));
    for (int64_t row = 0; row < r.n_rows; row++) {
        uint8_t* group = r.dst + row / 4 * 4 * r.row_bytes;
        const int k = static_cast<int>(row % 4);
        const float d = search.fit(r.src + row * r.ne0, r.w, total);
        put(group + 2 * k, f32_to_f16(search.stored_scale(d)));
        for (int b = 0; b < total; b++) {
            search.levels(b, d, codes);
            Format::pack(group + 8, b, k, search.sub_blocks()[b], codes);
        }
    }
}

}  // namespace

Encoder iquant_encoder(int type) {
    switch (type) {
        case 16:
            return encode_superblocks<Iq2Xxs>;
        case 17:
            return encode_superblocks<Iq2Xs>;
        case 18:
            return encode_superblocks<Iq3Xxs>;
        case 19:
            return encode_superblocks<Iq1S>;
        case 21:
            return encode_superblocks<Iq3S>;
        case 22:
            return encode_superblocks<Iq2S>;
        case 29:
            return encode_superblocks<Iq1M>;
        case 219:
            return encode_four_rows<Iq1SR4>;
        case 229:
            return encode_four_rows<Iq1MR4>;
        default:
            return nullptr;
    }
}

}  // namespace ikpy::quantize
