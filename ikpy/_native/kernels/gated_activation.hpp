// Activation functions of gated feed-forward layers over short rows, written for the vectorizer.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "ikpy/ops.hpp"

namespace ikpy {

// e^x within 2 ulp; arguments are limited to what f32 can hold. NaN stays NaN.
inline float exp_f32(float x) {
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    const float shifted = x * 1.44269504f + kRound;
    const float n = shifted - kRound;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits;
    std::memcpy(&bits, &shifted, 4);
    bits = (bits - 0x4B400000 + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return p * power;
}

inline float sigmoid_f32(float x) { return 1.0f / (1.0f + exp_f32(-x)); }

// out[i] = activation(gate[i]) * up[i]; SWIGLU_OAI clamps as model semantics section 0.1 says.
inline void gated_activation(int kind, const float* up, const float* gate, float* out, int n) {
    switch (kind) {
        case kSilu:
            for (int i = 0; i < n; ++i) out[i] = gate[i] * sigmoid_f32(gate[i]) * up[i];
            break;
        case kGelu:  // tanh form; 0.5 * (1 + tanh(u)) = sigmoid(2u)
            for (int i = 0; i < n; ++i) {
                const float g = gate[i];
                out[i] = g * sigmoid_f32(1.5957691216f * g * (1.0f + 0.044715f * g * g)) * up[i];
            }
            break;
        case kRelu:
            for (int i = 0; i < n; ++i) out[i] = (gate[i] > 0.0f ? gate[i] : 0.0f) * up[i];
            break;
        case kReluSquared:
            for (int i = 0; i < n; ++i) {
                const float g = gate[i] > 0.0f ? gate[i] : 0.0f;
                out[i] = g * g * up[i];
            }
            break;
        case kSigmoid:
            for (int i = 0; i < n; ++i) out[i] = sigmoid_f32(gate[i]) * up[i];
            break;
        case kTanh:
            for (int i = 0; i < n; ++i) out[i] = std::tanh(gate[i]) * up[i];
            break;
        case kSwigluOai:
            for (int i = 0; i < n; ++i) {
                const float g = gate[i] < 7.0f ? gate[i] : 7.0f;
                float u = up[i] < 7.0f ? up[i] : 7.0f;
                u = u > -7.0f ? u : -7.0f;
                out[i] = g * sigmoid_f32(1.702f * g) * (u + 1.0f);
            }
            break;
        default:
            break;
    }
}

}  // namespace ikpy
