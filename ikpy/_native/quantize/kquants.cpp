// Q2_K ... Q6_K: 256-element blocks whose sub-blocks have integer scales, and integer minimums in Q2_K, Q4_K,
// Q5_K (quant-formats 6.1).
#include "pack.hpp"
#include "scale_min.hpp"
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

struct MinCodes {
    int scale = 0, min = 0;
};

// The code below a multiple of a scale, which is beyond any int, or no number, for weights far above what F16
// scales can stand for.
int code_below(float multiple) { return static_cast<int>(std::max(0.0f, std::min(1e6f, multiple))); }

// Search for y = d*scale*q - dmin*min with common d and dmin of a block.
template <int LEVELS, int SIZE, int MAX_CODE>
class ScaleMinSearch {
  public:
    static constexpr int COUNT = 256 / SIZE;

    void fit(const float* x, const float* w) {
        x_ = x;
        w_ = w;
        float largest_scale = 0, largest_min = 0;
        for (int b = 0; b < COUNT; b++) {
            free_[b] = fit_scale_offset<LEVELS, SIZE>(x + b * SIZE, w + b * SIZE, 0.0f, NARROWEST, REFITS);
            largest_scale = std::max(largest_scale, free_[b].scale);
            largest_min = std::max(largest_min, -free_[b].offset);
        }
        best_error_ = std::numeric_limits<float>::infinity();
        // With few codes the largest scale need not be met exactly; with 63 of them it makes no difference.
        constexpr int STARTS = MAX_CODE < 32 ? 2 : 1;
        float next_d = 0, next_dmin = 0;
        for (int i = 0; i < STARTS * STARTS; i++) {
            const float shrink_scale = 1.0f - 0.12f * (i % STARTS), shrink_min = 1.0f - 0.12f * (i / STARTS);
            float d = shrink_scale * largest_scale / MAX_CODE, dmin = shrink_min * largest_min / MAX_CODE;
            if (!try_scales(d, dmin)) continue;
            next_d = d;
            next_dmin = dmin;
        }
        for (int round = 0; round < 3; round++) {
            if (round_to_f16(next_d) == d_ && round_to_f16(next_dmin) == dmin_) break;
            if (!try_scales(next_d, next_dmin)) break;
        }
    }

    // What d and dmin are stored multiplied by (see unshrink).
    float stored_factor(const uint8_t* levels) const {
        double product = 0;
        for (int b = 0; b < COUNT; b++) {
            const float scale = d_ * best_[b].scale, offset = -dmin_ * best_[b].min;
            float sum = 0;
            for (int j = b * SIZE; j < (b + 1) * SIZE; j++)
                sum += w_[j] * x_[j] * (scale * levels[j] + offset);
            product += sum;
        }
        return unshrink(weighted_square(x_, w_, 256), product);
    }

    float d() const { return d_; }
    float dmin() const { return dmin_; }
    const MinCodes* codes() const { return best_; }

    void levels(uint8_t* out) const {
        for (int b = 0; b < COUNT; b++) {
            assign_scale_offset<LEVELS, SIZE>(x_ + b * SIZE, d_ * best_[b].scale, -dmin_ * best_[b].min,
                                              out + b * SIZE);
        }
    }

  private:
    static constexpr float NARROWEST = LEVELS == 4 ? 0.5f : (LEVELS == 16 ? 0.75f : 0.88f);
    static constexpr int REFITS = LEVELS == 32 ? 2 : 3;

    // Keeps the codes chosen with these scales if they are the best so far; then they become the refitted
    // ones.
    bool try_scales(float& d, float& dmin) {
        d = round_to_f16(d);
        dmin = round_to_f16(dmin);
        float next_d = d, next_dmin = dmin;
        const float error = choose_codes(d, dmin, next_d, next_dmin);
        if (!(error < best_error_)) return false;
        best_error_ = error;
        d_ = d;
        dmin_ = dmin;
        std::copy_n(trial_, COUNT, best_);
        d = next_d;
        dmin = next_dmin;
        return true;
    }

    // Fills trial_; returns the error and the least-squares (d, dmin) of the chosen codes and levels.
    float choose_codes(float d, float dmin, float& next_d, float& next_dmin) {
        double total = 0, a = 0, b2 = 0, c = 0, xa = 0, xc = 0;
        for (int b = 0; b < COUNT; b++) {
            const float* x = x_ + b * SIZE;
            const float* w = w_ + b * SIZE;
            ScaleOffsetLanes<LEVELS, SIZE> lanes;
            const int first_scale = d > 0 ? code_below(free_[b].scale / d) - 1 : 0;
            MinCodes codes[LANES];
            for (int l = 0; l < LANES; l++) {
                codes[l].scale = std::clamp(first_scale + (l & 3), 0, MAX_CODE);
                // A larger scale goes with a lower offset: the middle of the range stays where it is.
                const float s = d * codes[l].scale;
                const float offset = free_[b].offset + 0.5f * (LEVELS - 1) * (free_[b].scale - s);
                const int centre = dmin > 0 ? code_below(-offset / dmin) : 0;
                codes[l].min = std::clamp(centre - 1 + (l >> 2), 0, MAX_CODE);
                lanes.scale[l] = s;
                lanes.offset[l] = -dmin * codes[l].min;
            }
            lanes.evaluate(x, w);
            const int l = lanes.best();
            trial_[b] = codes[l];
            float sum_w = 0, sum_x = 0;
            for (int j = 0; j < SIZE; j++) {
                sum_w += w[j];
                sum_x += w[j] * x[j];
            }
            const double sc = codes[l].scale, mn = codes[l].min;
            total += lanes.error[l];
            a += sc * sc * lanes.q2[l];
            b2 += sc * mn * lanes.q1[l];
            c += mn * mn * sum_w;
            xa += sc * lanes.qx[l];
            xc += mn * sum_x;
        }
        const double det = a * c - b2 * b2;
        if (det > 1e-9 * a * c) {
            next_d = static_cast<float>((xa * c - b2 * xc) / det);
            next_dmin = static_cast<float>((b2 * xa - a * xc) / det);
        } else if (a > 0) {
            next_d = static_cast<float>((xa + dmin * b2) / a);
        }
        return static_cast<float>(total);
    }

    const float* x_ = nullptr;
    const float* w_ = nullptr;
    ScaleOffset free_[COUNT];
    MinCodes best_[COUNT], trial_[COUNT];
    float best_error_ = 0, d_ = 0, dmin_ = 0;
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
