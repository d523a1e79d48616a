// Decoders of the non-linear types with shifted tables (quant-formats.md#non-linear-levels).
#include "layouts_super.hpp"

namespace ikpy::formats {

namespace {

struct IQ6_K : TypeInfo<141, 256, BlockIQ6_K, void> {
    static void decode(const Block& b, int, float, float* y) {
        uint8_t q[256] = {}, extra[16] = {};
        nibbles32<Reader>(b.qs, q);
        pairs32<Reader>(b.qh, q, 4);
        bit_list<Reader>(b.extra, extra, 16);
        int scale[16];
        for (int s = 0; s < 16; ++s) scale[s] = static_cast<int8_t>(b.scales[s]);
        table_values<16>(q, scale, extra, tables::iq6nl_values, 64, b.d.as_f16(), y);
    }
};

struct IQ2_KS : TypeInfo<145, 256, BlockIQ2_KS, void, Header::kF16> {
    static void decode(const Block& b, int, float d, float* y) {
        uint8_t q[256] = {}, extra[8] = {}, code[8] = {};
        pairs32<Reader>(b.qs, q);
        bit_list<Reader>(b.extra, extra, 8);
        nibble_list<Reader>(b.scales, code, 8);
        bit_list<Reader>(b.extra + 1, code, 8, 4);
        int scale[8];
        for (int s = 0; s < 8; ++s) scale[s] = code[s] - 16;
        table_values<32>(q, scale, extra, tables::iq2nl_values, 4, d, y);
    }
};

// Eight nibbles in four bytes, the upper four in the high halves.
template <class V>
inline void split_nibbles(const uint8_t* bytes, V* values) {
    for (int s = 0; s < 8; ++s) values[s] = static_cast<V>(bytes[s & 3] >> 4 * (s >> 2) & 15);
}

struct IQ3_KS : TypeInfo<156, 256, BlockIQ3_KS, void, Header::kF16> {
    static void decode(const Block& b, int, float d, float* y) {
        uint8_t q[256] = {}, extra[8] = {}, code[8];
        pairs32<Reader>(b.qs, q);
        plane32<Reader>(b.qh, q, 2);
        split_nibbles(b.scales, code);
        bit_list<Reader>(b.extra, code, 8, 4);
        bit_list<Reader>(b.extra + 1, extra, 8);
        int scale[8];
        for (int s = 0; s < 8; ++s) scale[s] = code[s] - 16;
        table_values<32>(q, scale, extra, tables::iq3nl_values, 8, d, y);
    }
};

// Words of even parity; the freed low bits of eight words are the scale byte.
struct IQ4_KSS : TypeInfo<146, 256, BlockIQ4_KSS, void, Header::kF32> {
    static void decode(const Block& b, int, float d, float* y) {
        uint8_t q[256], code[8] = {};
        for (int s = 0; s < 8; ++s)
            for (int n = 0; n < 8; ++n) {
                const int word = b.qs[8 * s + n].get();
                code[s] = static_cast<uint8_t>(code[s] | (word & 1) << n);
                const int even = word & 0xFFFE, v = even ^ even >> 1;
                uint8_t* pair = q + 32 * s + 2 * n;
                pair[0] = v & 15;
                pair[16] = v >> 4 & 15;
                pair[1] = v >> 8 & 15;
                pair[17] = static_cast<uint8_t>(v >> 12 & 15);
            }
        odd_scale_values(q, code, tables::iq4k_values, 16, d, y);
    }
};

struct IQ2_KL : TypeInfo<157, 256, BlockIQ2_KL, void, Header::kF16> {
    static void decode(const Block& b, int, float d, float* y) {
        int low[8];
        split_nibbles(b.scales_l, low);
        for (int s = 0; s < 8; ++s) {
            const int code = low[s] + 16 * (b.scales_h[s >> 2] >> 2 * (s & 3) & 3);
            const float scale = d * static_cast<float>(code - 32);
            for (int j = 0; j < 16; ++j) {
                const int nibble = b.qs[16 * (s >> 1) + j] >> 4 * (s & 1) & 15;
                const int8_t* pair = tables::iq2kl_pairs + 2 * (nibble + 16 * (b.qh[j] >> s & 1));
                y[32 * s + 2 * j] = scale * pair[0];
                y[32 * s + 2 * j + 1] = scale * pair[1];
            }
        }
    }
};

constexpr DecoderRow kRows[] = {
    decoder_row<IQ2_K>(),  decoder_row<IQ3_K>(),  decoder_row<IQ4_K>(),   decoder_row<IQ5_K>(),
    decoder_row<IQ6_K>(),  decoder_row<IQ2_KS>(), decoder_row<IQ3_KS>(),  decoder_row<IQ4_KS>(),
    decoder_row<IQ5_KS>(), decoder_row<IQ2_KL>(), decoder_row<IQ4_KSS>(),
};

}  // namespace

DecoderTable iqk_decoders() { return {kRows, sizeof kRows / sizeof *kRows}; }

}  // namespace ikpy::formats
