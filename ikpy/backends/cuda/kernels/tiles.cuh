// bf16 matrices in global memory as sm_90's tensor cores want them in shared memory: blocks of 128 rows by 64
// columns, each 16 KiB in one piece, so that one bulk copy brings a block.
//
// A row of a block has 128 bytes; its eight pieces of 16 bytes are permuted by the row number (the 128-byte
// swizzle of matrix descriptors). Blocks of the same rows follow each other.
#pragma once
#include "common.cuh"

namespace ikpy::cuda {

constexpr int kTiledRows = 128, kTiledDepth = 64, kTiledBytes = kTiledRows * kTiledDepth * 2;

// Output types of the kernels that decode rows, beside those of the table: mirrored in
// launch/products_bf16.py. Rows of up and gate projections take turns eight by eight.
enum TileOutput { kTiles = 1030, kTilesUp = 1031, kTilesGate = 1032 };

// Formats of prepared activations that kernels tell apart: mirrored in launch/base.py.
enum ActFormat { kActF32 = 0, kActBf16 = 2, kActTiles = 16 };

__device__ __forceinline__ bool is_tiled(int out_type) { return out_type >= kTiles; }

// Row of the tiles that takes row r.
__device__ __forceinline__ int tile_line(int r, int out_type) {
    return out_type == kTiles ? r : 2 * (r & ~7) + (r & 7) + (out_type == kTilesGate ? 8 : 0);
}

// Place of element e of a line, whose neighbours up to the next multiple of eight lie behind it.
__device__ __forceinline__ uint8_t* tile_element(uint8_t* tiles, int n_columns, int line, int e) {
    const long long block =
        static_cast<long long>(line / kTiledRows) * (n_columns / kTiledDepth) + e / kTiledDepth;
    const int piece = (e / 8 % 8) ^ (line % 8);
    return tiles + block * kTiledBytes + line % kTiledRows * 128 + piece * 16 + e % 8 * 2;
}

}  // namespace ikpy::cuda
