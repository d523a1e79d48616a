// BF16 weights with bf16 activations, on CPUs that multiply bf16 pairs.
#pragma once
#include "kernels/weights/weight_kernels.hpp"

namespace ikpy {

constexpr int kTypeBf16R16 = 230;

// Kernels of BF16 and BF16_R16; nullptr for other types and where the build or the CPU has no bf16 dot
// products.
const WeightKernels* bf16_dot_kernels(int type);

}  // namespace ikpy
