// Decoders of the trellis types (quant-formats.md#trellis-types).
#include <cstdlib>

#include "tables.hpp"
#include "trellis.hpp"
#include "type_traits.hpp"

namespace ikpy::formats {

namespace {

// Sub-blocks of 32: n groups of V values each, y = scale * value.
template <int V>
inline void scaled_groups(const uint32_t* seeds, float scale, float* y) {
    int values[32];
    for (int g = 0; g < 32 / V; ++g) trellis_values<V>(seeds[g], values + V * g);
    for (int i = 0; i < 32; ++i) y[i] = scale * static_cast<float>(values[i]);
}

struct IQ1_KT : TypeInfo<158, 256, BlockIQ1_KT, void, Header::kF32> {
    static void decode(const Block& b, int, float d, float* y) {
        for (int s = 0; s < 8; ++s) {
            uint32_t seeds[4];
            for (int t = 0; t < 4; ++t) {
                const int g = 4 * s + t;
                seeds[t] = kTrellisOffset + b.ql[g] + 256 * (b.qh[g & 15] >> 4 * (g >> 4) & 15) +
                           4096 * (b.sh[s] >> (4 + t) & 1);
            }
            scaled_groups<8>(seeds, d * tables::iq4k_values[b.sh[s] & 15], y + 32 * s);
        }
    }
};

struct IQ2_KT : TypeInfo<153, 256, BlockIQ2_KT, void, Header::kF32> {
    static constexpr float kComputeScale = 1.05f;
    static void decode(const Block& b, int, float d, float* y) {
        for (int s = 0; s < 8; ++s) {
            uint32_t seeds[4];
            for (int t = 0; t < 4; ++t) seeds[t] = kTrellisOffset + b.ql[4 * s + t].get();
            const int code = b.scales[s & 3] >> 4 * (s >> 2) & 15;
            scaled_groups<8>(seeds, d * tables::iq4k_values[code], y + 32 * s);
        }
    }
};

struct IQ3_KT : TypeInfo<154, 256, BlockIQ3_KT, void, Header::kF32> {
    static constexpr float kComputeScale = 1.01f;
    static void decode(const Block& b, int, float d, float* y) {
        for (int s = 0; s < 8; ++s) {
            int values[32];
            for (int t = 0; t < 4; ++t)
                trellis_values<8>(kTrellisOffset + b.ql[4 * s + t].get(), values + 8 * t);
            const float scale = d * static_cast<float>(b.scales[s & 3] >> 4 * (s >> 2) & 15);
            for (int i = 0; i < 32; ++i) {
                const float magnitude = scale * static_cast<float>(std::abs(values[i]));
                y[32 * s + i] = b.qh[i] >> s & 1 ? -magnitude : magnitude;
            }
        }
    }
};

struct IQ4_KT : TypeInfo<155, 256, BlockIQ4_KT, void, Header::kF32> {
    static void decode(const Block& b, int, float d, float* y) {
        for (int s = 0; s < 8; ++s) {
            const uint32_t word = load_unaligned<uint32_t>(b.shb[s]);
            const uint32_t offset = word & 1 ? kTrellisOffsetIQ4 : kTrellisOffset;
            uint32_t seeds[8];
            for (int t = 0; t < 8; ++t) {
                const int g = 8 * s + t;
                seeds[t] = offset + b.ql[g] + 256 * (b.qh[g & 31] >> 4 * (g >> 5) & 15) +
                           4096 * (word >> (8 + 3 * t) & 7);
            }
            scaled_groups<4>(seeds, d * static_cast<float>(static_cast<int>((word & 255) >> 1) - 64),
                             y + 32 * s);
        }
    }
};

constexpr DecoderRow kRows[] = {decoder_row<IQ1_KT>(), decoder_row<IQ2_KT>(), decoder_row<IQ3_KT>(),
                                decoder_row<IQ4_KT>()};

}  // namespace

DecoderTable trellis_decoders() { return {kRows, sizeof kRows / sizeof *kRows}; }

}  // namespace ikpy::formats
