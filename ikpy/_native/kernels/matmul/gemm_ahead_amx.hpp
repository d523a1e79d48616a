// Tile products (AMX) with quantized weights for sets of tokens that stay in the second-level cache: those of
// an expert, or a small batch.
//
// Weights are the left operand, row by row, so that unpacking needs no transposition, and the vector units
// unpack the next weights between the products of the last ones: 16 cycles per 256 weights and 32 tokens.
// Sums stay in registers over a whole row. Against amx_product(), experts of the shape of Qwen3-30B-A3B with
// 32 tokens on average are 1.35 times as fast, with 128 tokens 1.25 times.
#pragma once
#include <cstdint>

#include "kernels/weights/weight_kernels.hpp"

namespace ikpy {

constexpr int64_t kAheadColumns = 256;  // unpacked at a time
constexpr int kAheadRows = 4;           // of as many rows

// Fills rows i .. i + kAheadRows - 1 of half h of tiles [8 steps][half][16 rows][32] with 256 columns from k0
// on, zeros beyond n_in.
using AheadFn = void (*)(const RowBlock&, int h, int i, int64_t k0, uint16_t* tiles);

// Tokens of a set at most: their rows shall take up to half of the second-level cache.
int64_t ahead_tokens(int64_t n_in);

// The same, 0 for rows so long that panels do better than such small sets if there are more tokens.
int64_t ahead_kept_tokens(int64_t n_in);

// out[b][t][kBlockRows] = rows of blocks[b] times up to ahead_tokens() tokens, whose rows hold bf16 values.
void ahead_product(AheadFn fill, const RowBlock* blocks, int n_blocks, const TokenSet& tokens, float* out,
                   uint8_t* work);

size_t ahead_work_bytes(int64_t n_in);

}  // namespace ikpy
