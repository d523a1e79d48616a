// Products of the row kernel with quantized caches: the stored codes are multiplied as they are, as int8, and
// no value of the cache is ever expanded to a float. On vectors (VNNI) for few rows, on the tile unit (AMX)
// for more.
//
// The other factor, a query or the weights of a block of cells, is an integer of 16 bits times one scale,
// split into two bytes, 256 hi + lo. Its error is at most 1/65000 of the largest element, as small as that of
// the split bf16 halves of the tile kernel. Scales of the cache meet the sums of 32 codes (scores) or go into
// the weights before these are rounded (outputs).
#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/attention/flash_prefetch.hpp"

namespace ikpy {
namespace flash {

constexpr int64_t kCodeCells = 64;      // cells per call at most: the depth of one tile product
constexpr int64_t kVectorCodeRows = 2;  // rows per K head up to which vectors are faster than tiles

// Rows of queries as bytes, in an order of each kind of products.
struct CodeQuery {
    int64_t rows;
    int8_t* codes;
    int32_t* starts;
    float* factors;
};

struct CodeProducts {
    // s[r * lds + c] = sum_d q[r][d] k[c][d] for n <= kCodeCells cells; lds >= kCodeCells. Cells up to the
    // next multiple of 16 and rows up to the next multiple of 4 may be written too. dk must be a multiple
    // of 64.
    void (*scores)(const CodeQuery& q, const uint8_t* k, int64_t stride, int64_t dk, int64_t n, float* s,
                   int64_t lds, uint8_t* work, PrefetchLines next);
    // o[r][d] = alpha[r] o[r][d] + sum_c p[r][c] v[c][d] for n <= kCodeCells cells, p >= 0. dv must be a
    // multiple of 32.
    void (*outputs)(const float* p, int64_t ldp, int64_t rows, int64_t n, const uint8_t* v, int64_t stride,
                    int64_t dv, const float* alpha, float* o, int64_t ldo, uint8_t* work, PrefetchLines next);
    size_t (*query_bytes)(int64_t rows, int64_t dk);
    // q: f32 [rows][ldq]
    CodeQuery (*pack)(const float* q, int64_t ldq, int64_t rows, int64_t dk, uint8_t* to);
    // Work memory of one thread for heads up to d elements and `rows` rows.
    size_t (*work_bytes)(int64_t rows, int64_t d);
    // Around all calls for `rows` rows.
    void (*begin)(int64_t rows);
    void (*end)();
};

// Null for types that are no codes, and where the CPU lacks VBMI or int8 tiles.
const CodeProducts* vector_code_products(int type);
const CodeProducts* tile_code_products(int type);

// The same interface for BF16 caches, any multiple of 32 elements and up to 8 rows, of which up to
// kVectorBF16Rows are as fast on vectors. Null where the CPU lacks bf16 tiles.
constexpr int64_t kVectorBF16Rows = 4;
const CodeProducts* bf16_tile_products();

}  // namespace flash
}  // namespace ikpy
