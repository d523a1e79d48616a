// BF16 weights with bf16 activations, on CPUs that multiply bf16 pairs.
#pragma once
#include "kernels/weight_kernels.hpp"

namespace ikpy {

// nullptr where the build or the CPU has no bf16 dot products.
const WeightKernels* bf16_dot_kernels();

}  // namespace ikpy
