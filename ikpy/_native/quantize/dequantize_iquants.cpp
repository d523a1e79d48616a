// Decoders of the mainline i-quants.
#include "layouts_grid.hpp"
#include "layouts_legacy.hpp"
#include "layouts_super.hpp"

namespace ikpy::formats {

namespace {

struct IQ1_S : TypeInfo<19, 256, BlockIQ1_S, void> {
    static void decode(const Block& b, int, float, float* y) {
        const float d = b.d.as_f16();
        for (int s = 0; s < 8; ++s) {
            const int h = b.qh[s].get();
            const float scale = d * static_cast<float>(2 * (h >> 12 & 7) + 1);
            const float delta = h & 0x8000 ? -0.125f : 0.125f;
            for (int t = 0; t < 4; ++t) {
                const int8_t* point = tables::iq1s_grid + 8 * (b.qs[4 * s + t] + 256 * (h >> 3 * t & 7));
                for (int i = 0; i < 8; ++i)
                    y[32 * s + 8 * t + i] = scale * (static_cast<float>(point[i]) + delta);
            }
        }
    }
};

struct IQ1_M : TypeInfo<29, 256, BlockIQ1_M, void> {
    static void decode(const Block& b, int, float, float* y) {
        uint16_t bits = 0;
        for (int w = 0; w < 4; ++w) bits = static_cast<uint16_t>(bits | (b.scales[w].get() >> 12) << 4 * w);
        const float d = f16_to_f32(bits);
        for (int g = 0; g < 32; ++g) {
            const int half = g >> 1;  // 16 elements
            const float scale =
                d * static_cast<float>(2 * (b.scales[half >> 2].get() >> 3 * (half & 3) & 7) + 1);
            const int h = b.qh[half] >> 4 * (g & 1);
            const float delta = h & 8 ? -0.125f : 0.125f;
            const int8_t* point = tables::iq1s_grid + 8 * (b.qs[g] + 256 * (h & 7));
            for (int i = 0; i < 8; ++i) y[8 * g + i] = scale * (static_cast<float>(point[i]) + delta);
        }
    }
};

constexpr DecoderRow kRows[] = {
    decoder_row<IQ1_S>(),   decoder_row<IQ1_M>(),  decoder_row<IQ2_XXS>(),
    decoder_row<IQ2_XS>(),  decoder_row<IQ2_S>(),  decoder_row<IQ3_S>(),
    decoder_row<IQ3_XXS>(), decoder_row<IQ4_NL>(), decoder_row<IQ4_XS>(),
};

}  // namespace

DecoderTable iquant_decoders() { return {kRows, sizeof kRows / sizeof *kRows}; }

}  // namespace ikpy::formats
