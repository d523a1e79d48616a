// Products of the tile attention kernel by dot products of bf16 numbers, for caches of BF16 and of codes:
// elements, queries and weights are rounded to them. What that takes from the scores and outputs is no more
// than what the types of the caches have taken, and a product is half the instructions of one of floats.
#pragma once
#include "kernels/attention/flash_amx.hpp"

namespace ikpy {
namespace flash {

// Whether this build and CPU have such products and they are faster than those of floats.
bool multiplies_bf16();

// The nearest bf16 numbers. Sums of weights are those of rounded ones: many may be rounded to the same side.
simd::V rounded(simd::V x);

// As tile_product, of operands without low halves.
void dot_product(const LeftTiles& a, const RightTiles& b, int64_t n_lanes, int64_t depth, const SumTiles& c,
                 bool add, Prefetch& next);

}  // namespace flash
}  // namespace ikpy
