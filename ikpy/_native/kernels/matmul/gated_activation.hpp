// Activation functions of gated feed-forward layers over short rows, written for the vectorizer.
#pragma once
#include <cmath>

#include "ikpy/ops.hpp"
#include "ikpy/vecmath.hpp"

namespace ikpy {

// out[i] = activation(gate[i]) * up[i]; SWIGLU_OAI clamps both (swiglu_oai).
inline void gated_activation(int kind, const float* up, const float* gate, float* out, int n) {
    switch (kind) {
        case kSilu:
            for (int i = 0; i < n; ++i) out[i] = silu(gate[i]) * up[i];
            break;
        case kGelu:
            for (int i = 0; i < n; ++i) out[i] = gelu(gate[i]) * up[i];
            break;
        case kRelu:
            for (int i = 0; i < n; ++i) out[i] = (gate[i] > 0.0f ? gate[i] : 0.0f) * up[i];
            break;
        case kReluSquared:
            for (int i = 0; i < n; ++i) out[i] = relu_squared(gate[i]) * up[i];
            break;
        case kSigmoid:
            for (int i = 0; i < n; ++i) out[i] = sigmoid(gate[i]) * up[i];
            break;
        case kTanh:
            for (int i = 0; i < n; ++i) out[i] = std::tanh(gate[i]) * up[i];
            break;
        case kSwigluOai:
            for (int i = 0; i < n; ++i) out[i] = swiglu_oai(gate[i], up[i]);
            break;
        case kGeluErf:
            for (int i = 0; i < n; ++i) out[i] = gelu_erf(gate[i]) * up[i];
            break;
        case kSoftplus:
            for (int i = 0; i < n; ++i) out[i] = softplus(gate[i]) * up[i];
            break;
        default:
            break;
    }
}

}  // namespace ikpy
