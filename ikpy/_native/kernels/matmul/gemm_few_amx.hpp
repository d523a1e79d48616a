// Tile products (AMX) with rows of 16-bit weights, made for small batches.
//
// Weights are the left operand, as they lie in the file, so only the tokens have to be transposed: once per
// thread and set of tokens and not per panel of weights. The cost of a row hardly depends on the number of
// tokens up to 16; at most kFewTokens are taken.
#pragma once
#include <cstdint>

#include "kernels/matmul/tile_factors.hpp"
#include "kernels/weights/weight_kernels.hpp"

namespace ikpy {

constexpr int kFewTokens = 64;
constexpr int64_t kFewColumns = 128;  // 16 KiB of split weights at a time: a third of the first-level cache
constexpr int kFewRows = 4;           // rows that are filled between the products of two steps

// Fills rows first .. first + kFewRows - 1 of tiles [kFewColumns / 32][part][16 rows][32] with n columns (a
// multiple of 32) of half h from column k0 on, zeros beyond n_in.
using RowTileFn = void (*)(const RowBlock&, int h, int first, int64_t k0, int64_t n, uint16_t* tiles);

// out[b][t][kBlockRows] = rows of blocks[b] times tokens, whose rows hold 32 values per part and step.
void few_tokens_product(TileFactors factors, RowTileFn fill, const RowBlock* blocks, int n_blocks,
                        const TokenSet& tokens, float* out, uint8_t* work);

size_t few_tokens_work_bytes(TileFactors factors, int64_t n_in);

}  // namespace ikpy
