// Products of the row kernel with quantized caches on the tile unit (AMX): the stored codes are multiplied as
// they are, as int8, and no value of the cache is ever expanded to a float.
//
// The other factor, a query or the weights of a block of cells, is an integer of 16 bits times one scale,
// split into two bytes, 256 hi + lo. Its error is at most 1/65000 of the largest element, as small as that of
// the split bf16 halves of the tile kernel. Scales of the cache meet the sums of 32 codes (scores) or go into
// the weights before these are rounded (outputs).
//
// A core reads about 5 bytes per cycle. 64 codes of Q4_0, 36 bytes, are 7 cycles of reading, which f32
// multiply-adds of 4 heads exceed alone (8 cycles, and 6 to widen); a tile product of 16 cells takes 1 cycle
// of the tile unit per 64 codes, for 4 heads or 1.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/flash_prefetch.hpp"

namespace ikpy {
namespace flash {

constexpr int64_t kCodeCells = 64;  // cells per call at most: the depth of one tile product

// Query rows as right operands: tiles [rows / 4][dk / 64][16][64] and the factors of their 16 columns.
struct CodeQuery {
    int8_t* tiles;
    float* factors;  // [rows / 4][16]
    int64_t n_quads;
};
size_t code_query_bytes(int64_t rows, int64_t dk);
// q: f32 [rows][ldq]
CodeQuery pack_code_query(const float* q, int64_t ldq, int64_t rows, int64_t dk, uint8_t* to);

// Work memory of one thread for heads up to d elements and `rows` rows.
size_t code_work_bytes(int64_t rows, int64_t d);

// s[r * lds + c] = sum_d q[r][d] k[c][d] for n <= kCodeCells cells; lds >= kCodeCells. Rows from the last one
// to the next multiple of 4 are written too.
using CodeScores = void (*)(const CodeQuery& q, const uint8_t* k, int64_t stride, int64_t dk, int64_t n,
                            float* s, int64_t lds, uint8_t* work, Prefetch& next);
// o[r][d] = alpha[r] o[r][d] + sum_c p[r][c] v[c][d] for n <= kCodeCells cells, p >= 0
using CodeOutputs = void (*)(const float* p, int64_t ldp, int64_t rows, int64_t n, const uint8_t* v,
                             int64_t stride, int64_t dv, const float* alpha, float* o, int64_t ldo,
                             uint8_t* work, Prefetch& next);

struct CodeProducts {
    CodeScores scores;    // dk must be a multiple of 64
    CodeOutputs outputs;  // dv must be a multiple of 32
};

// Null for types that are no codes, and where the CPU has no int8 tiles.
const CodeProducts* code_products(int type);

// Tiles for these products; rows as in the calls that follow.
void begin_code_tiles(int64_t rows);

}  // namespace flash
}  // namespace ikpy
