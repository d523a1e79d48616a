// Elementary functions written so that the compiler vectorizes them in every tier.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace ikpy {

// e^x to about 2 ulp. Range reduction by 2^n, degree-6 polynomial on [-ln2/2, ln2/2]. Results below the
// smallest normal number are flushed to about 1e-38; above 88.7 the value saturates near FLT_MAX.
inline float exp_fast(float x) {
    x = x < -87.3f ? -87.3f : x;
    x = x > 88.3f ? 88.3f : x;
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer
    const float shifted = x * 1.44269504088896341f + magic;
    const float n = shifted - magic;
    const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    int32_t bits;
    std::memcpy(&bits, &shifted, 4);
    bits = static_cast<int32_t>((static_cast<uint32_t>(bits) + 127)
                                << 23);  // drops the bits of the magic number
    float scale;
    std::memcpy(&scale, &bits, 4);
    return p * scale;
}

inline float silu(float x) { return x / (1.0f + exp_fast(-x)); }

inline float sigmoid(float x) { return 1.0f / (1.0f + exp_fast(-x)); }

// Exact GELU by the error function, as BERT defines it.
inline float gelu_erf(float x) { return 0.5f * x * (1.0f + std::erf(x * 0.70710678118654752f)); }

// tanh form of GELU: x * sigmoid(2u), u = sqrt(2/pi) * (x + 0.044715 x^3).
inline float gelu(float x) {
    const float u = 0.7978845608f * x * (1.0f + 0.044715f * x * x);
    return x * sigmoid(2.0f * u);
}

// ln(1 + e^x). The logarithm of 1 + u is 2 atanh(u / (2 + u)); u is at most 1, so its series ends soon and
// loses nothing where u is small.
inline float softplus(float x) {
    const float u = exp_fast(-std::fabs(x));
    const float r = u / (2.0f + u), s = r * r;
    float p = 1.0f / 15;
    p = p * s + 1.0f / 13;
    p = p * s + 1.0f / 11;
    p = p * s + 1.0f / 9;
    p = p * s + 1.0f / 7;
    p = p * s + 1.0f / 5;
    p = p * s + 1.0f / 3;
    p = p * s + 1.0f;
    return (x > 0 ? x : 0.0f) + 2.0f * r * p;
}

inline float relu_squared(float x) {
    const float v = x > 0 ? x : 0;
    return v * v;
}

// SwiGLU of gpt-oss: gate clamped from above, up clamped on both sides.
inline float swiglu_oai(float g, float u) {
    g = g < 7.0f ? g : 7.0f;
    u = u < -7.0f ? -7.0f : (u > 7.0f ? 7.0f : u);
    return g / (1.0f + exp_fast(-1.702f * g)) * (u + 1.0f);
}

}  // namespace ikpy
