// F16 weights of prompts on the tile unit: 16-bit integers times 16-bit integers, byte by byte. Per row and
// 512 columns the integers share a power of two, so all weights are exact that are no smaller than 1/32 of
// the largest, and others to 1/65000 of it.
#pragma once
#include "kernels/weight_kernels.hpp"

namespace ikpy {

// Kernels for activations in format kActWords; without a product where the build has none.
TileKernels word_tile_kernels();

}  // namespace ikpy
