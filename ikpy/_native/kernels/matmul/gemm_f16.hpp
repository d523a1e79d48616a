// F16 weights on the tile unit: as they are where it multiplies halves; elsewhere every weight is the exact
// sum of two bf16 numbers.
#pragma once
#include "kernels/weights/weight_kernels.hpp"

namespace ikpy {

// Kernels for activations in format kActF16 or kActSplit; without a product where the build has no tiles.
TileKernels f16_tile_kernels();

}  // namespace ikpy
