// Non-linear types with one scale per 256-element block: IQ4_XS, IQ2_K ... IQ6_K
// (quant-formats.md#non-linear-levels).
#include "pack.hpp"
#include "superblock.hpp"
#include "tables.hpp"

namespace ikpy::quantize {
namespace {

uint16_t extra_bits(const SubBlock* s, int count) {
    unsigned bits = 0;
    for (int b = 0; b < count; b++) bits |= static_cast<unsigned>(s[b].table) << b;
    return static_cast<uint16_t>(bits);
}

struct Iq4Xs {
    using Codec = LevelCodec<16, 32, 1>;
    static Codec codec() { return Codec(tables::iq4k_values); }
    static constexpr UniformCodes CODES{-32, 1, 64};
    static constexpr Effort EFFORT{0.7f, 1.1f, 2, 2};
    static constexpr int BLOCK_BYTES = 136;
    static void pack(uint8_t* block, float d, const SubBlock* s, const uint8_t* levels) {
        put(block, f32_to_f16(d));
        unsigned high = 0;
        for (int b = 0; b < 8; b++) {
            put_nibble(block + 4, b, s[b].code);
            high |= static_cast<unsigned>(s[b].code >> 4) << 2 * b;
        }
        put(block + 2, static_cast<uint16_t>(high));
        pack_nibbles_16(block + 8, levels);
    }
};

struct Iq2K {
    using Codec = LevelCodec<4, 16, 2>;
    static Codec codec() { return Codec(tables::iq2nl_values); }
    static constexpr UniformCodes CODES{-8, 1, 16};
    static constexpr Effort EFFORT{0.4f, 1.3f, 4, 3};
    static constexpr int BLOCK_BYTES = 76;
    static void pack(uint8_t* block, float d, const SubBlock* s, const uint8_t* levels) {
        put(block, f32_to_f16(d));
        put(block + 2, extra_bits(s, 16));
        for (int b = 0; b < 16; b++) put_nibble(block + 4, b, s[b].code);
        pack_two_bits(block + 12, levels);
    }
};

struct Iq3K {
    using Codec = LevelCodec<8, 16, 2>;
    static Codec codec() { return Codec(tables::iq3nl_values); }
    static constexpr UniformCodes CODES{-31, 2, 32};
    static constexpr Effort EFFORT{0.6f, 1.15f, 2, 2};
    static constexpr int BLOCK_BYTES = 110;
    static void pack(uint8_t* block, float d, const SubBlock* s, const uint8_t* levels) {
        put(block, f32_to_f16(d));
        put(block + 2, extra_bits(s, 16));
        unsigned signs = 0;
        for (int b = 0; b < 16; b++) {
            const bool negative = s[b].code < 16;
            signs |= static_cast<unsigned>(negative) << b;
            put_nibble(block + 6, b, negative ? 15 - s[b].code : s[b].code - 16);
        }
        put(block + 4, static_cast<uint16_t>(signs));
        pack_two_bits(block + 14, levels);
        pack_bit_plane(block + 78, levels, 2);
    }
};

void pack_six_bit_scales(uint8_t* scales_h, uint8_t* scales_l, const SubBlock* s) {
    for (int b = 0; b < 16; b++) {
        put_nibble(scales_l, b, s[b].code);
        scales_h[b >> 2] |= static_cast<uint8_t>((s[b].code >> 4) << 2 * (b & 3));
    }
}

struct Iq4K {
    using Codec = LevelCodec<16, 16, 2>;
    static Codec codec() { return Codec(tables::iq4k_values); }
    static constexpr UniformCodes CODES{-32, 1, 64};
    static constexpr Effort EFFORT{0.7f, 1.1f, 2, 2};
    static constexpr int BLOCK_BYTES = 144;
    static void pack(uint8_t* block, float d, const SubBlock* s, const uint8_t* levels) {
        put(block, f32_to_f16(d));
        put(block + 2, extra_bits(s, 16));
        pack_six_bit_scales(block + 4, block + 8, s);
        pack_nibbles_16(block + 16, levels);
    }
};

struct Iq5K {
    using Codec = LevelCodec<32, 16, 2>;
    static Codec codec() { return Codec(tables::iq5nl_values); }
    static constexpr UniformCodes CODES{-32, 1, 64};
    static constexpr Effort EFFORT{0.8f, 1.08f, 2, 2};
    static constexpr int BLOCK_BYTES = 176;
    static void pack(uint8_t* block, float d, const SubBlock* s, const uint8_t* levels) {
        put(block, f32_to_f16(d));
        put(block + 2, extra_bits(s, 16));
        pack_six_bit_scales(block + 4, block + 8, s);
        pack_nibbles_32(block + 16, levels);
        pack_bit_plane(block + 144, levels, 4);
    }
};

struct Iq6K {
    using Codec = LevelCodec<64, 16, 2>;
    static Codec codec() { return Codec(tables::iq6nl_values); }
    static constexpr UniformCodes CODES{-127, 1, 255};
    static constexpr Effort EFFORT{0.97f, 1.35f, 1, 2};
    static constexpr int BLOCK_BYTES = 212;
    static void pack(uint8_t* block, float d, const SubBlock* s, const uint8_t* levels) {
        put(block, f32_to_f16(d));
        put(block + 2, extra_bits(s, 16));
        for (int b = 0; b < 16; b++) block[4 + b] = static_cast<uint8_t>(s[b].code - 127);
        pack_nibbles_32(block + 20, levels);
        for (int e = 0; e < 256; e++) {
            block[148 + 32 * (e >> 7) + (e & 31)] |=
                static_cast<uint8_t>((levels[e] >> 4) << 2 * ((e >> 5) & 3));
        }
    }
};

}  // namespace

Encoder iqk_encoder(int type) {
    switch (type) {
        case 23:
            return encode_superblocks<Iq4Xs>;
        case 137:
            return encode_superblocks<Iq2K>;
        case 138:
            return encode_superblocks<Iq3K>;
        case 139:
            return encode_superblocks<Iq4K>;
        case 140:
            return encode_superblocks<Iq5K>;
        case 141:
            return encode_superblocks<Iq6K>;
        default:
            return nullptr;
    }
}

}  // namespace ikpy::quantize
