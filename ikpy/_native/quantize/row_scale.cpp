// Non-linear types with one scale per row: IQ2_KS, IQ3_KS, IQ4_KS, IQ5_KS, IQ4_KSS, IQ2_KL
// (quant-formats.md#scales-per-row).
#include "pack.hpp"
#include "pair_codecs.hpp"
#include "superblock.hpp"
#include "tables.hpp"

namespace ikpy::quantize {
namespace {

struct Iq2Ks {
    using Codec = LevelCodec<4, 32, 2>;
    static Codec codec() { return Codec(tables::iq2nl_values); }
    static constexpr UniformCodes CODES{-16, 1, 32};
    static constexpr Effort EFFORT{0.35f, 1.3f, 3, 3};
    static constexpr int HEADER_BYTES = 2, BLOCK_BYTES = 70;
    static void pack(uint8_t* block, float, const SubBlock* s, const uint8_t* levels) {
        unsigned extra = 0;
        for (int b = 0; b < 8; b++) {
            put_nibble(block + 2, b, s[b].code);
            extra |= static_cast<unsigned>(s[b].table) << b | static_cast<unsigned>(s[b].code >> 4)
                                                                  << (8 + b);
        }
        put(block, static_cast<uint16_t>(extra));
        pack_two_bits(block + 6, levels);
    }
};

struct Iq3Ks {
    using Codec = LevelCodec<8, 32, 2>;
    static Codec codec() { return Codec(tables::iq3nl_values); }
    static constexpr UniformCodes CODES{-16, 1, 32};
    static constexpr Effort EFFORT{0.5f, 1.15f, 3, 3};
    static constexpr int HEADER_BYTES = 2, BLOCK_BYTES = 102;
    static void pack(uint8_t* block, float, const SubBlock* s, const uint8_t* levels) {
        unsigned extra = 0;
        for (int b = 0; b < 8; b++) {
            put_nibble(block + 2, 2 * (b & 3) + (b >> 2), s[b].code);
            extra |= static_cast<unsigned>(s[b].code >> 4) << b | static_cast<unsigned>(s[b].table)
                                                                      << (8 + b);
        }
        put(block, static_cast<uint16_t>(extra));
        pack_two_bits(block + 6, levels);
        pack_bit_plane(block + 70, levels, 2);
    }
};

// Scale byte: odd multiplier 2*code - 127 in the upper seven bits, table selector in bit 0.
void pack_odd_scales(uint8_t* scales, const SubBlock* s) {
    for (int b = 0; b < 8; b++) scales[b] = static_cast<uint8_t>(2 * s[b].code + s[b].table);
}

struct Iq4Ks {
    using Codec = LevelCodec<16, 32, 2>;
    static Codec codec() { return Codec(tables::iq4k_values); }
    static constexpr UniformCodes CODES{-127, 2, 128};
    static constexpr Effort EFFORT{0.6f, 1.1f, 1, 2};
    static constexpr int HEADER_BYTES = 4, BLOCK_BYTES = 136;
    static void pack(uint8_t* block, float, const SubBlock* s, const uint8_t* levels) {
        pack_odd_scales(block, s);
        pack_nibbles_16(block + 8, levels);
    }
};

struct Iq5Ks {
    using Codec = LevelCodec<32, 32, 2>;
    static Codec codec() { return Codec(tables::iq5nl_values); }
    static constexpr UniformCodes CODES{-127, 2, 128};
    static constexpr Effort EFFORT{0.75f, 1.08f, 1, 2};
    static constexpr int HEADER_BYTES = 4, BLOCK_BYTES = 168;
    static void pack(uint8_t* block, float, const SubBlock* s, const uint8_t* levels) {
        pack_odd_scales(block, s);
        pack_nibbles_32(block + 8, levels);
        pack_bit_plane(block + 136, levels, 4);
    }
};

struct Iq4Kss {
    using Codec = EvenParityCodec;
    static Codec codec() { return {}; }
    static constexpr UniformCodes CODES{-127, 2, 128};
    static constexpr Effort EFFORT{0.6f, 1.1f, 1, 2};
    static constexpr int HEADER_BYTES = 4, BLOCK_BYTES = 128;
    static void pack(uint8_t* block, float, const SubBlock* s, const uint8_t* levels) {
        for (int b = 0; b < 8; b++) {
            const int scale_byte = 2 * s[b].code + s[b].table;
            for (int n = 0; n < 8; n++) {
                unsigned v = 0, prefix = 0;
                for (int i = 0; i < 4; i++)
                    v |= static_cast<unsigned>(levels[32 * b + EvenParityCodec::element(n, i)]) << 4 * i;
                // Bits 15..1 hold v's prefix XOR from the top; bit 0 of v follows from the parity.
                for (int i = 15; i >= 1; i--) prefix |= (((v >> i) ^ (prefix >> (i + 1))) & 1) << i;
                put(block + 16 * b + 2 * n, static_cast<uint16_t>(prefix | ((scale_byte >> n) & 1)));
            }
        }
    }
};

struct Iq2Kl {
    using Codec = PairCodec;
    static Codec codec() { return {}; }
    static constexpr UniformCodes CODES{-32, 1, 64};
    static constexpr Effort EFFORT{0.5f, 1.25f, 2, 2};
    static constexpr int HEADER_BYTES = 2, BLOCK_BYTES = 86;
    static void pack(uint8_t* block, float, const SubBlock* s, const uint8_t* pairs) {
        unsigned high = 0;
        for (int b = 0; b < 8; b++) {
            high |= static_cast<unsigned>(s[b].code >> 4) << 2 * b;
            put_nibble(block + 2, 2 * (b & 3) + (b >> 2), s[b].code);
            for (int j = 0; j < 16; j++) {
                const int pair = pairs[16 * b + j];
                block[6 + 16 * (b >> 1) + j] |= static_cast<uint8_t>((pair & 15) << 4 * (b & 1));
                block[70 + j] |= static_cast<uint8_t>((pair >> 4) << b);
            }
        }
        put(block, static_cast<uint16_t>(high));
    }
};

}  // namespace

Encoder row_scale_encoder(int type) {
    switch (type) {
        case 144:
            return encode_row_scale<Iq4Ks>;
        case 145:
            return encode_row_scale<Iq2Ks>;
        case 146:
            return encode_row_scale<Iq4Kss>;
        case 152:
            return encode_row_scale<Iq5Ks>;
        case 156:
            return encode_row_scale<Iq3Ks>;
        case 157:
            return encode_row_scale<Iq2Kl>;
        default:
            return nullptr;
    }
}

}  // namespace ikpy::quantize
