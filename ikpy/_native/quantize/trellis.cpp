// Trellis types IQ1_KT, IQ2_KT, IQ3_KT, IQ4_KT: codebooks of generated vectors, one scale per row
// (quant-formats.md#trellis-types).
#include "encoders.hpp"
#include "scaled_codebook.hpp"
#include "tables.hpp"
#include "trellis_codec.hpp"

namespace ikpy::quantize {
namespace {

// Codes of IQ1_KT and IQ2_KT: the IQ4_NL levels.
struct NonlinearCodes {
    static constexpr int count = 16;
    static float value(int code) { return tables::iq4k_values[code]; }
    static int nearest(float v) {
        int best = 0;
        for (int c = 1; c < count; c++) {
            if (std::fabs(v - value(c)) < std::fabs(v - value(best))) best = c;
        }
        return best;
    }
    static float lowest() { return value(0); }
    static float highest() { return value(count - 1); }
};

struct Iq1Kt {
    static constexpr NonlinearCodes CODES{};
    static constexpr int DIM = 8, TABLES = 1, BLOCK_BYTES = 56;
    static constexpr bool SIGNED = true;
    static constexpr float READ_FACTOR = 1.0f, ROOT_MEAN_SQUARE = 37.0f, STARTS[] = {1.0f};
    static constexpr int SEARCHES = 1, KEPT = 4, PROBED = 3, PROBED_LAST = 4;
    static const TrellisIndex<8, 6, 2>& index(int) {
        static const TrellisIndex<8, 6, 2> index(8192, 4096, false);
        return index;
    }
    static void pack(uint8_t* block, const SubBlock* s, const TrellisChoice* choices, const float*) {
        for (int b = 0; b < 8; b++) {
            block[b] |= static_cast<uint8_t>(s[b].code);
            for (int t = 0; t < 4; t++) {
                const int g = 4 * b + t, index = choices[g].index;
                block[8 + g] = static_cast<uint8_t>(index);
                block[40 + (g & 15)] |= static_cast<uint8_t>(((index >> 8) & 15) << 4 * (g >> 4));
                block[b] |= static_cast<uint8_t>((index >> 12) << (4 + t));
            }
        }
    }
};

// Scale nibbles and 16-bit vector numbers of IQ2_KT and IQ3_KT.
void pack_indices(uint8_t* block, const SubBlock* s, const TrellisChoice* choices) {
    for (int b = 0; b < 8; b++) {
        block[b & 3] |= static_cast<uint8_t>(s[b].code << 4 * (b >> 2));
        for (int t = 0; t < 4; t++)
            put(block + 4 + 2 * (4 * b + t), static_cast<uint16_t>(choices[4 * b + t].index));
    }
}

struct Iq2Kt {
    static constexpr NonlinearCodes CODES{};
    static constexpr int DIM = 8, TABLES = 1, BLOCK_BYTES = 68;
    static constexpr bool SIGNED = true;
    static constexpr float READ_FACTOR = 1.05f, ROOT_MEAN_SQUARE = 37.0f, STARTS[] = {1.0f};
    static constexpr int SEARCHES = 1, KEPT = 4, PROBED = 2, PROBED_LAST = 4;
    static const TrellisIndex<8, 8, 2>& index(int) {
        static const TrellisIndex<8, 8, 2> index(65536, 4096, false);
        return index;
    }
    static void pack(uint8_t* block, const SubBlock* s, const TrellisChoice* choices, const float*) {
        pack_indices(block, s, choices);
    }
};

struct Iq3Kt {
    static constexpr UniformCodes CODES{0, 1, 16};
    static constexpr int DIM = 8, TABLES = 1, BLOCK_BYTES = 100;
    static constexpr bool SIGNED = false;
    static constexpr float READ_FACTOR = 1.01f, ROOT_MEAN_SQUARE = 37.0f, STARTS[] = {0.9f, 1.1f};
    static constexpr int SEARCHES = 2, KEPT = 4, PROBED = 3, PROBED_LAST = 5;
    static const TrellisIndex<8, 8, 2>& index(int) {
        static const TrellisIndex<8, 8, 2> index(65536, 4096, true);
        return index;
    }
    static void pack(uint8_t* block, const SubBlock* s, const TrellisChoice* choices, const float* x) {
        pack_indices(block, s, choices);
        for (int e = 0; e < 256; e++) block[68 + (e & 31)] |= static_cast<uint8_t>((x[e] < 0) << (e >> 5));
    }
};

struct Iq4Kt {
    static constexpr UniformCodes CODES{-64, 1, 128};
    static constexpr int DIM = 4, TABLES = 2, BLOCK_BYTES = 128;
    static constexpr bool SIGNED = true;
    static constexpr float READ_FACTOR = 1.0f, ROOT_MEAN_SQUARE = 37.0f, STARTS[] = {0.9f, 1.12f};
    static constexpr int SEARCHES = 1, KEPT = 3, PROBED = 2, PROBED_LAST = 4;
    static const TrellisIndex<4, 4, 4>& index(int table) {
        static const TrellisIndex<4, 4, 4> first(32768, 4096, false), second(32768, 36864, false);
        return table ? second : first;
    }
    static void pack(uint8_t* block, const SubBlock* s, const TrellisChoice* choices, const float*) {
        for (int b = 0; b < 8; b++) {
            uint32_t word = static_cast<uint32_t>(2 * s[b].code + s[b].table);
            for (int t = 0; t < 8; t++) {
                const int g = 8 * b + t, index = choices[g].index;
                block[32 + g] = static_cast<uint8_t>(index);
                block[96 + (g & 31)] |= static_cast<uint8_t>(((index >> 8) & 15) << 4 * (g >> 5));
                word |= static_cast<uint32_t>(index >> 12) << (8 + 3 * t);
            }
            put(block + 4 * b, word);
        }
    }
};

template <class Format>
void encode_trellis(const Rows& r) {
    using Codec = TrellisCodec<Format>;
    constexpr int COUNT = 256 / Codec::SIZE;
    Codec codec;
    ScaledCodebookSearch<Codec, decltype(Format::CODES)> search(codec, Format::CODES, ScaleType::F32,
                                                                Effort{0.4f, 1.9f, 2, 2});
    const int total = static_cast<int>(r.ne0 / Codec::SIZE);
    std::vector<TrellisChoice> choices(static_cast<size_t>(total * Codec::OUTPUTS));
    for (int64_t row = 0; row < r.n_rows; row++) {
        const float* x = r.src + row * r.ne0;
        uint8_t* out = r.dst + row * r.row_bytes;
        std::memset(out, 0, static_cast<size_t>(r.row_bytes));
        float d = search.fit(x, r.w, total);
        double product = 0, square = 0;  // sum w*x*y and sum w*y*y at the scale 1
        for (int b = 0; b < total; b++) {
            const double code = Format::CODES.value(search.sub_blocks()[b].code);
            TrellisChoice* of_block = choices.data() + b * Codec::OUTPUTS;
            search.levels(b, d, of_block);
            for (int g = 0; g < Codec::OUTPUTS; g++) {
                product += code * of_block[g].p;
                square += code * code * of_block[g].q;
            }
        }
        if (square > 0) {
            d = static_cast<float>(product / square);
            d *= std::max(1.0f, unshrink(weighted_square(x, r.w, r.ne0), d * product) / Format::READ_FACTOR);
        }
        put(out, d);
        for (int b = 0; b < total; b += COUNT) {
            Format::pack(out + 4 + b / COUNT * Format::BLOCK_BYTES, search.sub_blocks().data() + b,
                         choices.data() + b * Codec::OUTPUTS, x + b * Codec::SIZE);
        }
    }
}

}  // namespace

Encoder trellis_encoder(int type) {
    switch (type) {
        case 153:
            return encode_trellis<Iq2Kt>;
        case 154:
            return encode_trellis<Iq3Kt>;
        case 155:
            return encode_trellis<Iq4Kt>;
        case 158:
            return encode_trellis<Iq1Kt>;
        default:
            return nullptr;
    }
}

}  // namespace ikpy::quantize
