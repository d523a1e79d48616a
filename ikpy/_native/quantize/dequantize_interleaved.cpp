// Decoders of the row-interleaved types (quant-formats.md#interleaved-rows).
#include "layouts_grid.hpp"
#include "layouts_legacy.hpp"
#include "layouts_super_interleaved.hpp"

namespace ikpy::formats {

namespace {

struct IQ1_S_R4 : TypeInfo<219, 32, BlockIQ1_S_R4, void, Header::kF16, 4> {
    static void decode(const Block& b, int k, float d, float* y) {
        const int h = b.qh[k].get();
        const float scale = d * static_cast<float>(2 * (h >> 12 & 7) + 1);
        const float delta = h & 0x8000 ? -0.125f : 0.125f;
        for (int t = 0; t < 4; ++t) {
            const int8_t* point = tables::iq1s_grid + 8 * (b.qs[4 * t + k] + 256 * (h >> 3 * t & 7));
            for (int i = 0; i < 8; ++i) y[8 * t + i] = scale * (static_cast<float>(point[i]) + delta);
        }
    }
};

struct IQ1_M_R4 : TypeInfo<229, 32, BlockIQ1_M_R4, void, Header::kF16, 4> {
    static void decode(const Block& b, int k, float d, float* y) {
        for (int t = 0; t < 4; ++t) {
            const int half = t >> 1, u = t & 1;
            const float scale = d * static_cast<float>(b.scales[k] >> 4 * half & 15);
            const int h = b.qh[4 * half + k] >> 4 * u;
            const float delta = h & 8 ? -0.125f : 0.125f;
            const int8_t* point = tables::iq1s_grid + 8 * (b.qs[8 * half + 4 * u + k] + 256 * (h & 7));
            for (int i = 0; i < 8; ++i) y[8 * t + i] = scale * (static_cast<float>(point[i]) + delta);
        }
    }
};

struct Q8_K_R8 : TypeInfo<399, 256, BlockQ8_K_R8, void, Header::kNone, 8> {
    static void decode(const Block& b, int k, float, float* y) {
        uint8_t q[256];
        q8x<Reader, 8>(b.qs, k, q, 256);
        signed_values<256>(q, b.d[k].as_f16(), y);
    }
};

struct Q8_K_R16 : TypeInfo<397, 256, BlockQ8_K_R16, void, Header::kNone, 16> {
    static void decode(const Block& b, int k, float, float* y) {
        uint8_t q[256];
        q8x<Reader, 16>(b.qs, k, q, 256);
        const float d = b.d[k].as_f16();
        for (int e = 0; e < 256; ++e) y[e] = d * static_cast<float>(q[e] - 128);
    }
};

struct BF16_R16 : TypeInfo<230, 2, BlockBF16_R16, void, Header::kNone, 16> {
    static void decode(const Block& b, int k, float, float* y) {
        y[0] = bf16_to_f32(b.values[k][0].get());
        y[1] = bf16_to_f32(b.values[k][1].get());
    }
};

constexpr DecoderRow kRows[] = {
    decoder_row<Q4_0_4x4>(),   decoder_row<Q4_0_4x8>(),   decoder_row<Q4_0_8x8>(),  decoder_row<Q4_0_R8>(),
    decoder_row<Q5_0_R4>(),    decoder_row<Q6_0_R4>(),    decoder_row<Q8_0_R8>(),   decoder_row<Q8_KV_R8>(),
    decoder_row<MXFP4_R8>(),   decoder_row<IQ2_BN_R4>(),  decoder_row<Q2_K_R4>(),   decoder_row<Q3_K_R4>(),
    decoder_row<Q4_K_R4>(),    decoder_row<Q5_K_R4>(),    decoder_row<Q6_K_R4>(),   decoder_row<IQ4_NL_R4>(),
    decoder_row<IQ4_XS_R8>(),  decoder_row<IQ2_XXS_R4>(), decoder_row<IQ2_XS_R4>(), decoder_row<IQ2_S_R4>(),
    decoder_row<IQ3_XXS_R4>(), decoder_row<IQ3_S_R4>(),   decoder_row<IQ1_S_R4>(),  decoder_row<IQ1_M_R4>(),
    decoder_row<IQ2_K_R4>(),   decoder_row<IQ3_K_R4>(),   decoder_row<IQ4_K_R4>(),  decoder_row<IQ5_K_R4>(),
    decoder_row<IQ4_KS_R4>(),  decoder_row<IQ5_KS_R4>(),  decoder_row<Q8_K_R8>(),   decoder_row<Q8_K_R16>(),
    decoder_row<BF16_R16>(),
};

}  // namespace

DecoderTable interleaved_decoders() { return {kRows, sizeof kRows / sizeof *kRows}; }

}  // namespace ikpy::formats
