// What products of codes leave out where a type has a minimum (Q4_1, Q5_1): an element is scale * level +
// middle, so that a block adds its middle times the sum of the query's elements to a score, and the middles
// of the cells times their weights to 32 elements of the output. That is one number in 32: it is done in
// floats behind the products of any kind.
//
// Measured with AVX-512, one core, cells per second next to the type of as many bits without a minimum
// (`python -m benchmarks.attention`): heads of 128 elements 0.83 to 0.85, latents of 16 heads 0.9; AVX2 0.9.
#pragma once
#include <cstdint>

namespace ikpy {
namespace flash {

// to[b * kCodeCells + c] = middle of block b of the row at rows + c * stride, c < n; 0 up to kCodeCells.
// type: one with kv::middle_code.
void read_middles(int type, const uint8_t* rows, int64_t stride, int64_t n, int64_t n_blocks, float* to);

// to[b] = sum of the elements of block b
void sum_blocks(const float* x, int64_t n_blocks, float* to);

// s[r * lds + c] += sum_b sums[r * n_blocks + b] middles[b][c] for c < n, rounded up to a vector
void add_middles_to_scores(const float* middles, const float* sums, int64_t rows, int64_t n_blocks, int64_t n,
                           float* s, int64_t lds);

// o[r * ldo + d] += sum_c p[r * ldp + c] middles[d / 32][c]; p is 0 from n on up to a vector.
void add_middles_to_outputs(const float* middles, const float* p, int64_t ldp, int64_t rows, int64_t n_blocks,
                            int64_t n, float* o, int64_t ldo);

}  // namespace flash
}  // namespace ikpy
