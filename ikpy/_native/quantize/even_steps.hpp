// Values that were encoded before: sub-blocks of even steps, and the number that their steps are multiples
// of.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "search.hpp"

namespace ikpy::quantize {

// Part of a step by which values may lie off it, for those that were stored as f16 in between.
constexpr float OFF_STEP = 0.05f;

struct EvenSteps {
    float step = 0, low = 0;  // 0: the values are not of even steps, or all the same
    int span = 0;             // steps from the lowest to the highest value
};

// The widest steps that meet all values, at most `most` of them.
template <int SIZE>
EvenSteps even_steps(const float* x, int most) {
    float sorted[SIZE];
    std::copy_n(x, SIZE, sorted);
    std::sort(sorted, sorted + SIZE);
    const float low = sorted[0], range = sorted[SIZE - 1] - low;
    float gap = range;
    for (int j = 1; j < SIZE; j++) {
        const float rise = sorted[j] - sorted[j - 1];
        if (rise * static_cast<float>(most) > 0.5f * range) gap = std::min(gap, rise);
    }
    // Neighbouring levels may all be two or three apart.
    for (int part = 1; part <= 3 && range > 0; part++) {
        const int span = static_cast<int>(std::lrintf(range / gap * static_cast<float>(part)));
        if (span > most) break;
        const float step = range / static_cast<float>(span);
        const bool met = std::all_of(sorted, sorted + SIZE, [&](float v) {
            const float steps = (v - low) / step;
            return std::fabs(steps - std::rint(steps)) < OFF_STEP;
        });
        if (met) return {step, low, span};
    }
    return {0, low, 0};
}

inline bool is_multiple(float v, float unit) {
    const float multiple = v / unit;
    return std::fabs(multiple - std::rint(multiple)) < OFF_STEP;
}

// Into how many levels each step has to be split so that they are at most `most` units; 0 if none of the
// levels up to `last` will do.
inline int split(const EvenSteps& even, float unit, int last, int most) {
    for (int parts = 1; parts * even.span <= last; parts++) {
        const float step = even.step / static_cast<float>(parts);
        if (step < (static_cast<float>(most) + 0.5f) * unit && is_multiple(step, unit)) return parts;
    }
    return 0;
}

// The largest part of `whole`, down to one over `most`, that is_met; preferably one that f16 holds, as it was
// stored.
template <class IsMet>
float largest_part(float whole, int most, const IsMet& is_met) {
    for (const bool stored : {true, false}) {
        for (int parts = 1; parts <= most; parts++) {
            const float part = whole / static_cast<float>(parts);
            if (stored && std::fabs(round_to_f16(part) - part) > 1e-5f * part) continue;
            if (is_met(part)) return part;
        }
    }
    return 0;
}

// A number that the steps of all sub-blocks are multiples of, by 1 to `most`; 0 if there is none.
inline float common_step(const EvenSteps* even, int n, int last, int most) {
    float widest = 0;
    for (int b = 0; b < n; b++) {
        if (2 * even[b].span > last) widest = std::max(widest, even[b].step);
    }
    return largest_part(widest, most, [&](float unit) {
        return std::all_of(even, even + n,
                           [&](const EvenSteps& e) { return !e.span || split(e, unit, last, most); });
    });
}

// A number that the offsets of all sub-blocks are multiples of, by 0 to `most`, where the lowest value is at
// level 0 or as far above as levels are left of `last`; 0 if there is none.
inline float common_offset(const EvenSteps* even, int n, int last, int most) {
    const auto is_met = [&](float unit) {
        return std::all_of(even, even + n, [&](const EvenSteps& e) {
            if (2 * e.span <= last) return true;  // steps that may have to be split
            for (int level = 0; level <= last - e.span; level++) {
                const float min = static_cast<float>(level) * e.step - e.low;
                if (is_multiple(min, unit) && min < (static_cast<float>(most) + 0.5f) * unit) return true;
            }
            return false;
        });
    };
    const EvenSteps& surest = *std::max_element(even, even + n, [](const EvenSteps& a, const EvenSteps& b) {
        return std::pair(a.span, -a.low) < std::pair(b.span, -b.low);
    });
    for (int level = 0; level <= last - surest.span; level++) {
        const float min = static_cast<float>(level) * surest.step - surest.low;
        const float unit = min > 0 ? largest_part(min, most, is_met) : 0;
        if (unit > 0) return unit;
    }
    return 0;
}

}  // namespace ikpy::quantize
