// Q2_K ... Q6_K: 256-element blocks whose sub-blocks have integer scales, and integer minimums in Q2_K, Q4_K,
// Q5_K (quant-formats.md#k-quants).
#include "pack.hpp"
#include "scale_min_search.hpp"
#include "superblock.hpp"

namespace ikpy::quantize {
namespace {

struct Q3K {
    using Codec = IntegerCodec<-4, 3, 16>;
    static Codec codec() { return {}; }
    static constexpr UniformCodes CODES{-32, 1, 64};
    static constexpr Effort EFFORT{0.5f, 1.2f, 2, 2};
    static constexpr int BLOCK_BYTES = 110;
    static void pack(uint8_t* block, float d, const SubBlock* s, const uint8_t* levels) {
        pack_bit_plane(block, levels, 2);
        pack_two_bits(block + 32, levels);
        for (int b = 0; b < 16; b++) {
            block[96 + (b & 7)] |= static_cast<uint8_t>((s[b].code & 15) << 4 * (b >> 3));
            block[104 + (b & 3)] |= static_cast<uint8_t>((s[b].code >> 4) << 2 * (b >> 2));
        }
        put(block + 108, f32_to_f16(d));
    }
};

struct Q6K {
    using Codec = IntegerCodec<-32, 31, 16>;
    static Codec codec() { return {}; }
    static constexpr UniformCodes CODES{-128, 1, 256};
    static constexpr Effort EFFORT{0.97f, 1.4f, 1, 2};
    static constexpr int BLOCK_BYTES = 210;
    static void pack(uint8_t* block, float d, const SubBlock* s, const uint8_t* levels) {
        for (int e = 0; e < 256; e++) {
            const int half = e >> 7, t = (e >> 5) & 3, c = e & 31;
            block[64 * half + c + 32 * (t & 1)] |= static_cast<uint8_t>((levels[e] & 15) << 4 * (t >> 1));
            block[128 + 32 * half + c] |= static_cast<uint8_t>((levels[e] >> 4) << 2 * t);
        }
        for (int b = 0; b < 16; b++) block[192 + b] = static_cast<uint8_t>(s[b].code - 128);
        put(block + 208, f32_to_f16(d));
    }
};

struct Q2K {
    using Search = ScaleMinSearch<4, 16, 15>;
    static constexpr int BLOCK_BYTES = 84;
    static void pack(uint8_t* block, float d, float dmin, const MinCodes* s, const uint8_t* levels) {
        for (int b = 0; b < 16; b++) block[b] = static_cast<uint8_t>(s[b].scale | s[b].min << 4);
        pack_two_bits(block + 16, levels);
        put(block + 80, f32_to_f16(d));
        put(block + 82, f32_to_f16(dmin));
    }
};

// d, dmin and the twelve bytes of six-bit scales and minimums of Q4_K and Q5_K.
void pack_scale_min_header(uint8_t* block, float d, float dmin, const MinCodes* s) {
    put(block, f32_to_f16(d));
    put(block + 2, f32_to_f16(dmin));
    uint8_t* scales = block + 4;
    for (int j = 0; j < 4; j++) {
        scales[j] = static_cast<uint8_t>(s[j].scale | (s[j + 4].scale >> 4) << 6);
        scales[j + 4] = static_cast<uint8_t>(s[j].min | (s[j + 4].min >> 4) << 6);
        scales[j + 8] = static_cast<uint8_t>((s[j + 4].scale & 15) | (s[j + 4].min & 15) << 4);
    }
}

struct Q4K {
    using Search = ScaleMinSearch<16, 32, 63>;
    static constexpr int BLOCK_BYTES = 144;
    static void pack(uint8_t* block, float d, float dmin, const MinCodes* s, const uint8_t* levels) {
        pack_scale_min_header(block, d, dmin, s);
        pack_nibbles_32(block + 16, levels);
    }
};

struct Q5K {
    using Search = ScaleMinSearch<32, 32, 63>;
    static constexpr int BLOCK_BYTES = 176;
    static void pack(uint8_t* block, float d, float dmin, const MinCodes* s, const uint8_t* levels) {
        pack_scale_min_header(block, d, dmin, s);
        pack_bit_plane(block + 16, levels, 4);
        pack_nibbles_32(block + 48, levels);
    }
};

template <class Format>
void encode_scale_min(const Rows& r) {
    typename Format::Search search;
    uint8_t levels[256];
    for (int64_t row = 0; row < r.n_rows; row++) {
        uint8_t* block = r.dst + row * r.row_bytes;
        for (int64_t i = 0; i < r.ne0; i += 256, block += Format::BLOCK_BYTES) {
            search.fit(r.src + row * r.ne0 + i, r.w + i);
            search.levels(levels);
            const float factor = search.stored_factor(levels);
            std::memset(block, 0, Format::BLOCK_BYTES);
            Format::pack(block, round_to_f16(factor * search.d()), round_to_f16(factor * search.dmin()),
                         search.codes(), levels);
        }
    }
}

}  // namespace

Encoder kquant_encoder(int type) {
    switch (type) {
        case 10:
            return encode_scale_min<Q2K>;
        case 11:
            return encode_superblocks<Q3K>;
        case 12:
            return encode_scale_min<Q4K>;
        case 13:
            return encode_scale_min<Q5K>;
        case 14:
            return encode_superblocks<Q6K>;
        default:
            return nullptr;
    }
}

}  // namespace ikpy::quantize
