// Products of the tile attention kernel on the tile unit (AMX), as exact as f32 ones for all that matters:
// factors are sums of two numbers, hi + lo, and hi hi + hi lo + lo hi keeps 16 significant bits of bf16, 22
// of halves. Three tile products cost a third of what f32 multiply-adds cost.
#pragma once
#include <cstdint>

#include "kernels/attention/flash_prefetch.hpp"
#include "kernels/matmul/tile_factors.hpp"
#include "kernels/simd/simd_f32.hpp"

namespace ikpy {
namespace flash {

// Of the factors there are two kinds (TileFactors): kSplit, and kF16 where the unit multiplies halves. K and
// V of F16 caches are halves as they are and queries and weights keep 22 bits, with two products instead of
// three.

// A matrix of factors; lo is null when the values have no low half.
struct Halves {
    uint16_t* hi;
    uint16_t* lo;
};

// left operands
// bf16 of rows [n_rows][n] as left operand [n_rows][ld_out], zeros from n to ld_out (a multiple of 32).
void split_rows(const float* x, int64_t ld, int64_t n_rows, int64_t n, const Halves& out, int64_t ld_out);

// bf16 of the transpose of x [n_rows][n] as left operand [n rounded up to 16][ld_out], zeros from n_rows to
// ld_out.
void split_transposed(const float* x, int64_t ld, int64_t n_rows, int64_t n, const Halves& out,
                      int64_t ld_out);

// Rows of n halves, `stride` bytes apart: the same two, of which the first leaves what lies behind n alone.
void copy_halves(const uint8_t* x, int64_t stride, int64_t n_rows, int64_t n, uint16_t* out, int64_t ld_out);
void transpose_halves(const uint8_t* x, int64_t stride, int64_t n_rows, int64_t n, uint16_t* out,
                      int64_t ld_out);

// right operands
// Powers of two that make 16 lanes, x [n_rows][ld], fit for halves: the largest is 2^10 to 2^11 where that
// takes a factor of 2^-20 to 2^20.
simd::V half_scale(const float* x, int64_t ld, int64_t n_rows);

// Rows [n_rows][16] as right operand [depth / 2][16][2], zeros from n_rows to depth (a multiple of 32).
void split_pairs(TileFactors factors, const float* x, int64_t n_rows, int64_t depth, const Halves& out);

// Weights 2^(factor s[r][.] - top) of 16 lanes, s [n_rows][16], as right operand, zeros from n_rows to the
// next multiple of 32; returns their sums.
simd::V exp2_pairs(TileFactors factors, const float* s, int64_t n_rows, simd::V factor, simd::V top,
                   const Halves& out);

// The new references of 16 lanes whose maximum so far is `top`: the old ones unless they lie more than
// 8 + lift below, then `lift` below. Weights of up to 2^(8 + lift) are as exact as others, and outputs need
// no factor as long as references stay.
simd::V raised(simd::V reference, simd::V top, float lift);

// Of weights as halves, whose precision ends at 2^-24.
constexpr float kHalfLift = 7.0f;

// products
// o[r][.] *= factor for n_rows rows of 16 lanes.
void scale_lanes(float* o, int64_t n_rows, simd::V factor);

// A left operand [n_rows][ld], right operands [depth / 2][16][2] of 16 lanes each, and sums [n_rows][16];
// to_next: from 16 lanes to the next.
struct LeftTiles {
    Halves at;
    int64_t ld, n_rows;
};
struct RightTiles {
    Halves at;
    int64_t to_next;
};
struct SumTiles {
    float* at;
    int64_t to_next;
};

// c[r][m] = (or +=) sum over depth of a[r][.] b[.][m] for all rows of a and n_lanes lanes (multiples of 16).
// next: fetched meanwhile, a few lines at a time: more at once than a core waits for delay the products.
// Tiles must be configured.
void tile_product(TileFactors factors, const LeftTiles& a, const RightTiles& b, int64_t n_lanes,
                  int64_t depth, const SumTiles& c, bool add, Prefetch& next);

void begin_tiles();
void end_tiles();

}  // namespace flash
}  // namespace ikpy
