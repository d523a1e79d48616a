// Types of 32-element blocks with a searched scale: Q4_0, Q4_1, Q5_0, Q5_1, Q6_0, IQ4_NL; and NVFP4
// (quant-formats.md#blocks-with-one-scale).
#include "encoders.hpp"
#include "magnitude.hpp"
#include "scale_min.hpp"
#include "scaled_codebook.hpp"
#include "tables.hpp"

namespace ikpy::quantize {
namespace {

// f16 neighbours of v: bit patterns of the same sign, `steps` apart.
float neighbour(float v, int steps) {
    const int bits = f32_to_f16(v) & 0x7fff;
    const int moved = std::clamp(bits + steps, 0, 0x7bff);
    return std::copysign(f16_to_f32(static_cast<uint16_t>(moved)), v);
}

// Best f16 scale of one block: candidates of both signs, two Lloyd steps, then its f16 neighbours exactly.
template <class Codec>
float fit_single_scale(Codec& codec, const float* x, const float* w, float narrowest, float widest) {
    float max = 0;
    for (int j = 0; j < Codec::SIZE; j++) {
        if (std::fabs(x[j]) > std::fabs(max)) max = x[j];
    }
    if (!(std::fabs(max) > 1e-16f)) return 0;
    float best = 0, best_score = 0;
    Scan s;
    alignas(64) float dl[LANES];
    const auto improve = [&](int passes) {
        for (int pass = 0; pass < passes; pass++) {
            codec.scan(0, x, w, 0, dl, s);
            for (int l = 0; l < LANES; l++) {
                if (!(s.tt[l] > 0)) continue;
                dl[l] = s.xt[l] / s.tt[l];
                const float score = dl[l] * s.xt[l];
                if (score > best_score) {
                    best_score = score;
                    best = dl[l];
                }
            }
        }
    };
    const bool may_be_small = one_outweighs(w, Codec::SIZE);
    for (int sign = 1; sign >= -1; sign -= 2) {
        const float unit = sign * std::fabs(max) / codec.extent(0, (max > 0) == (sign > 0));
        for (int l = 0; l < LANES; l++) dl[l] = unit * (narrowest + (widest - narrowest) * l / (LANES - 1));
        improve(3);
        if (may_be_small) {
            start_below(unit * narrowest, dl);
            improve(3);
        }
    }
    best = round_to_f16(best);
    for (int l = 0; l < LANES; l++) dl[l] = neighbour(best, l - LANES / 2);
    codec.scan(0, x, w, 0, dl, s);
    return dl[std::min_element(s.error, s.error + LANES) - s.error];
}

// Low nibbles: byte j holds element j low and element j + 16 high.
void pack_low_nibbles(uint8_t* qs, const uint8_t* levels) {
    for (int j = 0; j < 16; j++) qs[j] = static_cast<uint8_t>((levels[j] & 15) | (levels[j + 16] & 15) << 4);
}

void pack_fifth_bits(uint8_t* qh, const uint8_t* levels) {
    uint32_t bits = 0;
    for (int e = 0; e < 32; e++) bits |= static_cast<uint32_t>(levels[e] >> 4) << e;
    put(qh, bits);
}

struct Q4_0 {
    using Codec = IntegerCodec<-8, 7, 32>;
    static Codec codec() { return {}; }
    static constexpr float NARROWEST = 0.6f, WIDEST = 1.15f;
    static constexpr int BLOCK_BYTES = 18;
    static void pack(uint8_t* block, const uint8_t* levels) { pack_low_nibbles(block + 2, levels); }
};

struct Q5_0 {
    using Codec = IntegerCodec<-16, 15, 32>;
    static Codec codec() { return {}; }
    static constexpr float NARROWEST = 0.75f, WIDEST = 1.1f;
    static constexpr int BLOCK_BYTES = 22;
    static void pack(uint8_t* block, const uint8_t* levels) {
        pack_fifth_bits(block + 2, levels);
        pack_low_nibbles(block + 6, levels);
    }
};

struct Q6_0 {
    using Codec = IntegerCodec<-32, 31, 32>;
    static Codec codec() { return {}; }
    static constexpr float NARROWEST = 0.85f, WIDEST = 1.05f;
    static constexpr int BLOCK_BYTES = 26;
    static void pack(uint8_t* block, const uint8_t* levels) {
        std::memset(block + 2, 0, 8);
        for (int e = 0; e < 32; e++) {
            block[2 + (e & 7)] |=
                static_cast<uint8_t>((levels[e] >> 4) << (4 * ((e >> 3) & 1) + 2 * (e >> 4)));
        }
        pack_low_nibbles(block + 10, levels);
    }
};

struct Iq4Nl {
    using Codec = LevelCodec<16, 32, 1>;
    static Codec codec() { return Codec(tables::iq4k_values); }
    static constexpr float NARROWEST = 0.6f, WIDEST = 1.15f;
    static constexpr int BLOCK_BYTES = 18;
    static void pack(uint8_t* block, const uint8_t* levels) { pack_low_nibbles(block + 2, levels); }
};

template <class Format>
void encode_single_scale(const Rows& r) {
    auto codec = Format::codec();
    uint8_t levels[32];
    for (int64_t row = 0; row < r.n_rows; row++) {
        uint8_t* block = r.dst + row * r.row_bytes;
        for (int64_t i = 0; i < r.ne0; i += 32, block += Format::BLOCK_BYTES) {
            const float* x = r.src + row * r.ne0 + i;
            const float d = fit_single_scale(codec, x, r.w + i, Format::NARROWEST, Format::WIDEST);
            codec.assign(0, x, r.w + i, 0, d, levels);
            put(block, f32_to_f16(d));
            Format::pack(block, levels);
        }
    }
}

// Scale and offset rounded to f16: the offsets nearest to the fitted one with the scales nearest to the
// fitted one.
template <int LEVELS>
ScaleOffset fit_f16_scale_offset(const float* x, const float* w) {
    const float unlimited = std::numeric_limits<float>::infinity();
    const ScaleOffset free =
        fit_scale_offset<LEVELS, 32, LEVELS == 32 ? 2 : 1>(x, w, unlimited, LEVELS == 16 ? 0.87f : 0.945f, 5);
    ScaleOffsetLanes<LEVELS, 32> lanes;
    ScaleOffset best = {round_to_f16(free.scale), round_to_f16(free.offset)};
    for (int round = 0; round < 3; round++) {
        const ScaleOffset centre = best;
        for (int l = 0; l < LANES; l++) {
            // Moving the scale moves the middle of the range; the offset follows it.
            lanes.scale[l] = neighbour(centre.scale, (l & 3) - (round == 1 ? 1 : 2));
            const float follow = 0.5f * (LEVELS - 1) * (centre.scale - lanes.scale[l]);
            lanes.offset[l] = neighbour(round_to_f16(centre.offset + (round ? follow : 0.0f)), (l >> 2) - 2);
        }
        lanes.evaluate(x, w);
        const int l = lanes.best();
        if (lanes.error[l] < best.error) best = {lanes.scale[l], lanes.offset[l], lanes.error[l]};
    }
    return best;
}

template <int LEVELS>
void encode_scale_offset(const Rows& r) {
    constexpr int BLOCK_BYTES = LEVELS == 16 ? 20 : 24;
    uint8_t levels[32];
    for (int64_t row = 0; row < r.n_rows; row++) {
        uint8_t* block = r.dst + row * r.row_bytes;
        for (int64_t i = 0; i < r.ne0; i += 32, block += BLOCK_BYTES) {
            const float* x = r.src + row * r.ne0 + i;
            const ScaleOffset f = fit_f16_scale_offset<LEVELS>(x, r.w + i);
            assign_scale_offset<LEVELS, 32>(x, f.scale, f.offset, levels);
            put(block, f32_to_f16(f.scale));
            put(block + 2, f32_to_f16(f.offset));
            if constexpr (LEVELS == 32) pack_fifth_bits(block + 4, levels);
            pack_low_nibbles(block + BLOCK_BYTES - 16, levels);
        }
    }
}

// Levels of NVFP4 are those of e2m1, doubled: magnitudes 0 1 2 3 4 6 8 12.
constexpr float kFp4Middles[7] = {0.5f, 1.5f, 2.5f, 3.5f, 5.0f, 7.0f, 10.0f};
constexpr float kFp4Steps[7] = {1, 1, 1, 1, 2, 2, 4};
constexpr int kLastUe4m3 = 126;

// Code of the largest scale up to d.
int ue4m3_below(float d) {
    int code = 0;
    for (int bit = 64; bit > 0; bit >>= 1)
        if ((code | bit) <= kLastUe4m3 && half_ue4m3(static_cast<uint8_t>(code | bit)) <= d) code |= bit;
    return code;
}

// The best of LANES scales of 16 elements from a code on, in `best` if it errs less than `error`.
void try_fp4_scales(const float* x, const float* w, int first, float& error, int& best) {
    alignas(64) float d[LANES], inverse[LANES], sum[LANES] = {};
    first = std::clamp(first, 1, kLastUe4m3 + 1 - LANES);
    for (int l = 0; l < LANES; l++) {
        d[l] = half_ue4m3(static_cast<uint8_t>(first + l));
        inverse[l] = 1.0f / d[l];
    }
    for (int j = 0; j < 16; j++) {
        const float magnitude = std::fabs(x[j]), weight = w[j];
        for (int l = 0; l < LANES; l++) {
            const float scaled = magnitude * inverse[l];
            float level = 0;
            for (int i = 0; i < 7; i++) level += scaled > kFp4Middles[i] ? kFp4Steps[i] : 0.0f;
            const float off = magnitude - d[l] * level;
            sum[l] += weight * off * off;
        }
    }
    const int l = static_cast<int>(std::min_element(sum, sum + LANES) - sum);
    if (sum[l] < error) {
        error = sum[l];
        best = first + l;
    }
}

void encode_nvfp4_block(const float* x, const float* w, uint8_t* block) {
    std::memset(block, 0, 36);
    for (int g = 0; g < 4; g++, x += 16, w += 16) {
        const float outermost = largest_magnitude(x, 16) / 12.0f;
        if (outermost == 0) continue;
        float error = std::numeric_limits<float>::infinity();
        int scale = 1;
        try_fp4_scales(x, w, ue4m3_below(0.55f * outermost), error, scale);
        if (one_outweighs(w, 16)) try_fp4_scales(x, w, ue4m3_below(0.14f * outermost), error, scale);
        block[g] = static_cast<uint8_t>(scale);
        const float inverse = 1.0f / half_ue4m3(block[g]);
        for (int j = 0; j < 16; j++) {
            const float scaled = x[j] * inverse;
            int code = 0;
            for (float middle : kFp4Middles) code += std::fabs(scaled) > middle;
            if (scaled < -kFp4Middles[0]) code += 8;
            block[4 + 8 * g + (j & 7)] |= static_cast<uint8_t>(code << 4 * (j >> 3));
        }
    }
}

void encode_nvfp4(const Rows& r) {
    for (int64_t row = 0; row < r.n_rows; row++)
        for (int64_t i = 0; i < r.ne0; i += 64)
            encode_nvfp4_block(r.src + row * r.ne0 + i, r.w + i, r.dst + row * r.row_bytes + i / 64 * 36);
}

}  // namespace

Encoder legacy_encoder(int type) {
    switch (type) {
        case 2:
            return encode_single_scale<Q4_0>;
        case 3:
            return encode_scale_offset<16>;
        case 6:
            return encode_single_scale<Q5_0>;
        case 7:
            return encode_scale_offset<32>;
        case 20:
            return encode_single_scale<Iq4Nl>;
        case 40:
            return encode_nvfp4;
        case 133:
            return encode_single_scale<Q6_0>;
        default:
            return nullptr;
    }
}

}  // namespace ikpy::quantize
