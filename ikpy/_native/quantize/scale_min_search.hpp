// Search for 256-element blocks of sub-blocks with integer scales and minimums: Q2_K, Q4_K, Q5_K.
#pragma once

#include "even_steps.hpp"
#include "scale_min.hpp"

namespace ikpy::quantize {

struct MinCodes {
    int scale = 0, min = 0;
};

// The code below a multiple of a scale, which is beyond any int, or no number, for weights far above what F16
// scales can stand for.
inline int code_below(float multiple) { return static_cast<int>(std::max(0.0f, std::min(1e6f, multiple))); }

// Search for y = d*scale*q - dmin*min with common d and dmin of a block.
template <int LEVELS, int SIZE, int MAX_CODE>
class ScaleMinSearch {
  public:
    static constexpr int COUNT = 256 / SIZE;

    void fit(const float* x, const float* w) {
        x_ = x;
        w_ = w;
        float largest_scale = 0, largest_min = 0;
        int n_met = 0;
        for (int b = 0; b < COUNT; b++) {
            free_[b] = fit_scale_offset<LEVELS, SIZE>(x + b * SIZE, w + b * SIZE, 0.0f, NARROWEST, REFITS);
            largest_scale = std::max(largest_scale, free_[b].scale);
            largest_min = std::max(largest_min, -free_[b].offset);
            n_met += free_[b].meets;
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
        if (4 * n_met >= COUNT) try_even_steps(next_d, next_dmin);
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
    bool try_scales(float& d, float& dmin, const EvenSteps* even = nullptr) {
        d = round_to_f16(d);
        dmin = round_to_f16(dmin);
        float next_d = d, next_dmin = dmin;
        const float error = choose_codes(d, dmin, even, next_d, next_dmin);
        if (!(error < best_error_)) return false;
        best_error_ = error;
        d_ = d;
        dmin_ = dmin;
        std::copy_n(trial_, COUNT, best_);
        d = next_d;
        dmin = next_dmin;
        return true;
    }

    // The codes around those of the free fit, 4 scales by 4 minimums.
    void codes_around(const ScaleOffset& free, float d, float dmin, MinCodes* codes) const {
        const int first_scale = d > 0 ? code_below(free.scale / d) - 1 : 0;
        for (int l = 0; l < LANES; l++) {
            codes[l].scale = std::clamp(first_scale + (l & 3), 0, MAX_CODE);
            // A larger scale goes with a lower offset: the middle of the range stays where it is.
            const float s = d * codes[l].scale;
            const float offset = free.offset + 0.5f * (LEVELS - 1) * (free.scale - s);
            const int centre = dmin > 0 ? code_below(-offset / dmin) : 0;
            codes[l].min = std::clamp(centre - 1 + (l >> 2), 0, MAX_CODE);
        }
    }

    // The codes of even steps whose lowest value is at level 0, 1, 2 ... Few steps may be several of the
    // levels'.
    [[gnu::noinline]] void codes_of_steps(const EvenSteps& even, float d, float dmin, MinCodes* codes) const {
        const int parts = std::max(split(even, d, LEVELS - 1, MAX_CODE), 1);
        const float step = even.step / static_cast<float>(parts);
        const int scale = std::min(code_below(step / d + 0.5f), MAX_CODE);
        for (int l = 0; l < LANES; l++) {
            const float min = static_cast<float>(l * scale) * d - even.low;
            codes[l].scale = scale;
            codes[l].min = dmin > 0 ? std::min(code_below(min / dmin + 0.5f), MAX_CODE) : 0;
        }
    }

    // Fills trial_; returns the error and the least-squares (d, dmin) of the chosen codes and levels.
    float choose_codes(float d, float dmin, const EvenSteps* even, float& next_d, float& next_dmin) {
        double total = 0, a = 0, b2 = 0, c = 0, xa = 0, xc = 0;
        for (int b = 0; b < COUNT; b++) {
            const float* x = x_ + b * SIZE;
            const float* w = w_ + b * SIZE;
            ScaleOffsetLanes<LEVELS, SIZE> lanes;
            MinCodes codes[LANES];
            codes_around(free_[b], d, dmin, codes);
            if (even && even[b].step > 0) codes_of_steps(even[b], d, dmin, codes);
            for (int l = 0; l < LANES; l++) {
                lanes.scale[l] = d * codes[l].scale;
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

    // Tries the scales of a block that was encoded before: the units of the steps and of the offsets.
    [[gnu::noinline]] void try_even_steps(float& next_d, float& next_dmin) {
        EvenSteps even[COUNT];
        for (int b = 0; b < COUNT; b++) even[b] = even_steps<SIZE>(x_ + b * SIZE, LEVELS - 1);
        float d = common_step(even, COUNT, LEVELS - 1, MAX_CODE);
        float dmin = common_offset(even, COUNT, LEVELS - 1, MAX_CODE);
        if (!(d > 0) || !try_scales(d, dmin, even)) return;
        next_d = d;
        next_dmin = dmin;
    }

    const float* x_ = nullptr;
    const float* w_ = nullptr;
    ScaleOffset free_[COUNT];
    MinCodes best_[COUNT], trial_[COUNT];
    float best_error_ = 0, d_ = 0, dmin_ = 0;
};

}  // namespace ikpy::quantize
