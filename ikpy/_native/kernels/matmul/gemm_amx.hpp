// Tile products (AMX) for batches: weights of any type, unpacked to bf16 once per panel, or f16 as stored.
//
// Eight times the rate of int8 dot products in vector registers and closer to the float product than int8
// activations are: both factors keep 8 significant bits per value instead of 7 per group of 32.
#pragma once
#include <cstdint>

#include "ikpy/ops.hpp"
#include "kernels/matmul/gemm_int8.hpp"
#include "kernels/matmul/tile_factors.hpp"
#include "kernels/weights/weight_kernels.hpp"

namespace ikpy {

// Columns unpacked at a time: the panel of a row block takes 16 KiB of the first-level cache, in two
// parts 32.
constexpr int64_t kTileColumns = 256;

// Fills panel [half][kTileColumns / 32][part][16 pairs][16 rows][2] with n columns (a multiple of 32) from
// column k0 on, zeros beyond n_in.
using TilePanelFn = void (*)(const RowBlock&, int64_t k0, int64_t n, uint16_t* panel, uint8_t* work);

// out[b][t][kBlockRows] = rows of blocks[b] times tokens x[t], whose rows hold 32 values per part and step.
void amx_product(TileFactors factors, TilePanelFn fill, const RowBlock* blocks, int n_blocks,
                 const uint8_t* const* x, int n_tokens, float* out, uint8_t* work);

// Work memory of amx_product, `work` of the panel function included.
size_t amx_work_bytes(int64_t n_in);

// Codes, scales and offsets of a panel as bf16 weights.
void decode_panel(const Int8Panel& p, int n_halves, int group, bool symmetric, uint16_t* panel);

}  // namespace ikpy
