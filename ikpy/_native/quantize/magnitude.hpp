// The largest magnitude of a row, which the closed-form types scale by.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "ikpy/half.hpp"

namespace ikpy::quantize {

// Magnitudes of finite floats are ordered like their bits, and integer comparisons become vector
// instructions.
inline float largest_magnitude(const float* x, int64_t n) {
    uint32_t m = 0;
    for (int64_t j = 0; j < n; j++) m = std::max(m, f32_bits(x[j]) & 0x7FFFFFFF);
    return f32_from_bits(m);
}

// a / b, of numbers that are not negative; 0 where that is infinite: 1 / 1e-39 is, and levels of so small
// values are zeros.
inline float finite_quotient(float a, float b) {
    const float quotient = a / b;
    return quotient <= std::numeric_limits<float>::max() ? quotient : 0.0f;
}

}  // namespace ikpy::quantize
