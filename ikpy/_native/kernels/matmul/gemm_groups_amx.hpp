// Tile products (AMX) with groups of 16 rows that are stored as right operands are: BF16_R16, of which
// nothing has to be unpacked or transposed. Sums stay in registers over whole rows. Against panels that these
// groups are copied to, 2,048 x 8,192 weights: 8 tokens 3.1 times as fast, 16 tokens 4.9 (both without tiles
// before), 32 tokens 1.7, 512 tokens 1.1; against BF16, 1.25 times with 4 to 32 tokens.
#pragma once
#include "kernels/weights/weight_kernels.hpp"

namespace ikpy {

// out[b][t][kBlockRows] = rows of blocks[b] times tokens, whose rows hold bf16 values. n_in: a multiple
// of 32.
void groups_product(const RowBlock* blocks, int n_blocks, const TokenSet& tokens, float* out, uint8_t* work);

size_t groups_work_bytes(int64_t n_in);

}  // namespace ikpy
