// Tiles of quantized weights and int8 activations in shared memory, for products on int8 tensor cores.
#pragma once
#include "mma.cuh"
#include "product.cuh"
#include "quantize_q8.cuh"
#include "weight_blocks.cuh"

namespace ikpy::cuda {

constexpr int kTileRows = 64, kTileColumns = 128, kTileDepth = 128, kTileThreads = 256;
constexpr int kTileGroups = kTileDepth / 32;

// Scales, offsets and sums of a step of a tile: 64 weight rows by 128 tokens, 128 deep.
template <class U>
struct TileScales {
    static constexpr int kScales = kTileGroups * (U::kHalves ? 2 : 1);
    static constexpr int kSums = U::kOffset ? kScales : 1;
    __align__(16) float x_scale[kTileColumns][kTileGroups];
    __align__(16) float x_sum[kTileColumns][U::kOffset ? kScales : 4];
    float scale[kScales][kTileRows];
    float offset[kSums][kTileRows];
};

// What 32 columns add to a sum, of types with scales per 16 or offsets; second: the integer sum of those
// behind the first 16 if scales are per 16.
template <class U>
__device__ __forceinline__ float scaled(const TileScales<U>& tile, int g, int row, int column, float first,
                                        [[maybe_unused]] float second) {
    float v;
    if constexpr (U::kHalves) {
        v = tile.scale[2 * g][row] * first + tile.scale[2 * g + 1][row] * second;
        if (U::kOffset)
            v += tile.offset[2 * g][row] * tile.x_sum[column][2 * g] +
                 tile.offset[2 * g + 1][row] * tile.x_sum[column][2 * g + 1];
    } else {
        v = tile.scale[g][row] * first;
        if (U::kOffset) v += tile.offset[g][row] * tile.x_sum[column][g];
    }
    return tile.x_scale[column][g] * v;
}

// The same of all other types; first: the integer sum times the scale of the activations. That product is
// rounded once, however it is made.
template <class U>
__device__ __forceinline__ float scaled(const TileScales<U>& tile, int g, int row, float first) {
    return tile.scale[g][row] * first;
}

// Row of the matrices that a line of a tile holds.
struct TileLine {
    int row;
    bool is_gate;
};

// A group of 32 weights per thread, unpacked, with its scales and offsets; zeros beyond the last row or
// column.
template <class U, class AnyTile>
__device__ __forceinline__ void load_weight_tile(const Product& p, int thread, int matrix, int depth,
                                                 AnyTile& tile) {
    // Neighbouring threads take neighbouring groups of a row.
    const int g = thread % kTileGroups, i = thread / kTileGroups;
    const TileLine line = AnyTile::line(p, i);
    const int row = line.row, group = depth / 32 + g;
    Group w;
    if (row < p.n_out && group < p.n_in / 32) {
        const uint8_t* base = line.is_gate ? p.gate : p.up;
        const uint8_t* rows = row_group<U>(base + matrix * p.matrix_bytes, p.row_bytes, row);
        unpack<U>(rows, row % U::kRows, group, w);
        // The next tile is on its way from memory while this one is multiplied.
        if (group + kTileGroups < p.n_in / 32) prefetch_l2(block_of<U>(rows, group + kTileGroups));
        if (U::kHeader > 0) {
            const float scale = U::row_scale(rows, row % U::kRows);
            w.d[0] *= scale;
            w.d[1] *= scale;
        }
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) w.q[j] = 0;
        w.d[0] = w.d[1] = w.m[0] = w.m[1] = 0.0f;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h)
        *reinterpret_cast<uint4*>(tile.weights_at(i, 32 * g + 16 * h)) =
            uint4{w.q[4 * h], w.q[4 * h + 1], w.q[4 * h + 2], w.q[4 * h + 3]};
    constexpr int kParts = U::kHalves ? 2 : 1;
#pragma unroll
    for (int h = 0; h < kParts; ++h) {
        tile.scale[kParts * g + h][i] = w.d[h];
        if (U::kOffset) tile.offset[kParts * g + h][i] = w.m[h];
    }
}

// sources: the prepared activations of the columns.
template <class U, class AnyTile>
__device__ __forceinline__ void load_x_tile(const Product& p, int thread, const uint8_t* const* sources,
                                            int depth, int n_columns, AnyTile& tile) {
    const ActQ8Layout at(p.n_in);
    for (int i = thread; i < kTileColumns * kTileDepth / 16; i += kTileThreads) {
        const int c = i / (kTileDepth / 16), e = i % (kTileDepth / 16) * 16;
        copy16_async(tile.x_at(c, e), sources[c] + depth + e, c < n_columns);
    }
    const int c = thread % kTileColumns;
    const uint8_t* x = sources[c];
    if (thread < kTileColumns) {
        copy16_async(tile.x_scale[c], x + at.scale + depth / 8, c < n_columns);
    } else if constexpr (U::kOffset) {
        if constexpr (U::kHalves) {
            copy16_async(tile.x_sum[c], x + at.sum16 + depth / 4, c < n_columns);
            copy16_async(tile.x_sum[c] + 4, x + at.sum16 + depth / 4 + 16, c < n_columns);
        } else {
            copy16_async(tile.x_sum[c], x + at.sum32 + depth / 8, c < n_columns);
        }
    }
    commit_copies();
}

}  // namespace ikpy::cuda
