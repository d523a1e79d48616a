// Search for types with a scale and a minimum per sub-block: y = scale * q + offset, q = 0 .. LEVELS-1.
#pragma once

#include <limits>

#include "search.hpp"

namespace ikpy::quantize {

struct ScaleOffset {
    float scale = 0, offset = 0, error = std::numeric_limits<float>::infinity();
    bool meets = false;  // all values lie on the levels, but for what storing them as f16 changes
};

// LANES candidate (scale, offset) pairs for one sub-block: their weighted errors, and refits to the chosen
// levels.
template <int LEVELS, int SIZE>
struct ScaleOffsetLanes {
    alignas(64) float scale[LANES];
    alignas(64) float offset[LANES];
    alignas(64) float error[LANES];
    // sum w*q, sum w*q*q, sum w*q*x of the levels of each lane
    alignas(64) float q1[LANES];
    alignas(64) float q2[LANES];
    alignas(64) float qx[LANES];

    void evaluate(const float* x, const float* w) {
        for (int p = 0; p < PARTS; p++) {
            const FloatVector s = load(scale + p * VECTOR), o = load(offset + p * VECTOR);
            const IntVector zero = s == 0.0f;
            const FloatVector inverse = select(zero, FloatVector{}, 1.0f / select(zero, broadcast(1.0f), s));
            FloatVector e{}, sum_q{}, sum_qq{}, sum_qx{};
            for (int j = 0; j < SIZE; j++) {
                const FloatVector q = round_nearest(clamp((x[j] - o) * inverse, 0.0f, LEVELS - 1.0f));
                const FloatVector off = x[j] - o - s * q;
                const FloatVector wq = w[j] * q;
                e += w[j] * off * off;
                sum_q += wq;
                sum_qq += wq * q;
                sum_qx += wq * x[j];
            }
            store(error + p * VECTOR, e);
            store(q1 + p * VECTOR, sum_q);
            store(q2 + p * VECTOR, sum_qq);
            store(qx + p * VECTOR, sum_qx);
        }
    }

    // Replaces every pair by the least-squares solution for its levels; sums are those of w and w*x, and
    // offsets above `highest` (0 for formats that can only subtract) are fixed to it.
    void refit(float sum_w, float sum_x, float highest) {
        for (int l = 0; l < LANES; l++) {
            const float det = sum_w * q2[l] - q1[l] * q1[l];
            if (!(det > 1e-6f * sum_w * q2[l])) continue;
            scale[l] = (sum_w * qx[l] - q1[l] * sum_x) / det;
            offset[l] = (q2[l] * sum_x - q1[l] * qx[l]) / det;
            if (offset[l] > highest) {
                offset[l] = highest;
                scale[l] = (qx[l] - highest * q1[l]) / q2[l];
            }
        }
    }

    int best() const { return index_of_least(error); }
};

// 4 x 4 starts: how far the upper and the lower end move inwards, as fractions of the range; later batches
// lie between those of the first. Steps are positive, so that those of the refits are. Not inline: its
// constants would take registers from the sums of evaluate().
template <int LEVELS, int SIZE>
[[gnu::noinline]] void start_inside(ScaleOffsetLanes<LEVELS, SIZE>& lanes, float low, float high,
                                    float highest, float narrowest, int batch, int batches) {
    const float range = high - low, inwards = (1.0f - narrowest) / (3 * batches);
    for (int l = 0; l < LANES; l++) {
        const float bottom = low + range * inwards * (batches * (l >> 2) + batch);
        const float top = high - range * inwards * (batches * (l & 3) + (batch * 2) % batches);
        lanes.scale[l] = std::max(top - bottom, 1e-3f * range) / (LEVELS - 1);
        lanes.offset[l] = std::min(bottom, highest);
    }
}

// Starts whose range spans fewer steps than there are: values of an even number of equal steps, such as those
// of ternary and of symmetric types, are met exactly by these only. With 4 levels the spare ones lie at
// either end.
template <int LEVELS, int SIZE>
void start_with_spare_levels(ScaleOffsetLanes<LEVELS, SIZE>& lanes, float low, float high, float highest) {
    constexpr bool BOTH_ENDS = LEVELS == 4;
    constexpr float STEP = LEVELS == 4 ? 0.25f : LEVELS == 16 ? 0.5f : 1.0f;
    for (int l = 0; l < LANES; l++) {
        const float span = LEVELS - 1 - STEP * ((BOTH_ENDS ? l / 2 : l) + 1);
        const bool at_low_end = BOTH_ENDS && l % 2;
        lanes.scale[l] = (high - low) / span;
        lanes.offset[l] = std::min(at_low_end ? high - (LEVELS - 1) * lanes.scale[l] : low, highest);
    }
}

// Best free (scale, offset): several batches of LANES starts, then refits of all of them.
template <int LEVELS, int SIZE, int BATCHES = 1>
ScaleOffset fit_scale_offset(const float* x, const float* w, float highest, float narrowest, int refits) {
    float low = x[0], high = x[0];
    for (int j = 1; j < SIZE; j++) {
        low = std::min(low, x[j]);
        high = std::max(high, x[j]);
    }
    low = std::min(low, highest);
    ScaleOffset best;
    if (!(high > low)) return {0, low, 0, true};
    float sum_w = 0, sum_x = 0;
    for (int j = 0; j < SIZE; j++) {
        sum_w += w[j];
        sum_x += w[j] * x[j];
    }
    ScaleOffsetLanes<LEVELS, SIZE> lanes;
    const auto refine = [&](int rounds) {
        for (int round = 0; round <= rounds; round++) {
            lanes.evaluate(x, w);
            const int l = lanes.best();
            if (lanes.error[l] < best.error) best = {lanes.scale[l], lanes.offset[l], lanes.error[l]};
            if (round < rounds) lanes.refit(sum_w, sum_x, highest);
        }
    };
    for (int batch = 0; batch < BATCHES; batch++) {
        start_inside(lanes, low, high, highest, narrowest, batch, BATCHES);
        refine(refits);
    }
    start_with_spare_levels(lanes, low, high, highest);
    refine(1);
    best.meets = best.error < 4e-4f * sum_w * best.scale * best.scale;
    return best;
}

template <int LEVELS, int SIZE>
void assign_scale_offset(const float* x, float scale, float offset, uint8_t* levels) {
    const float inverse = scale != 0 ? 1.0f / scale : 0.0f;
    for (int j = 0; j < SIZE; j++) {
        const float q = std::clamp((x[j] - offset) * inverse, 0.0f, LEVELS - 1.0f);
        levels[j] = static_cast<uint8_t>(round_nearest(q));
    }
}

}  // namespace ikpy::quantize
