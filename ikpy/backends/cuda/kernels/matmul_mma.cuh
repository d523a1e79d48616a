// Matrix product of quantized weights on int8 tensor cores by mma.sync (matmul_wgmma.cuh: by wgmma).
#pragma once
#include "weight_tiles.cuh"

namespace ikpy::cuda {

constexpr int kTileStride = kTileDepth + 16;  // bytes; the odd 16 keep ldmatrix free of bank conflicts

// Shared memory of a block of matmul.
template <class U>
struct Tile : TileScales<U> {
    __align__(16) uint8_t weights[kTileRows][kTileStride];
    __align__(16) uint8_t x[kTileColumns][kTileStride];
    // What the sums of a product start at. Of constants the compiler would make them anew for every product.
    int4 start;

    __device__ __forceinline__ uint8_t* weights_at(int i, int depth) { return &weights[i][depth]; }
    __device__ __forceinline__ uint8_t* x_at(int column, int depth) { return &x[column][depth]; }
    // With a gate the lower half are up rows, the upper half gate rows.
    __device__ static __forceinline__ TileLine line(const Product& p, int i) {
        if (!p.gate) return {static_cast<int>(blockIdx.x) * kTileRows + i, false};
        return {static_cast<int>(blockIdx.x) * (kTileRows / 2) + i % (kTileRows / 2), i >= kTileRows / 2};
    }
};

// Sums of one warp: two tiles of 16 rows (up and gate, or 32 rows apart) and four of 8 columns.
struct WarpSums {
    float c[2][4][4];
};

// Adds the products of a tile; columns from n_columns on are left out by eight.
template <class U>
__device__ __forceinline__ void multiply_tile(const Tile<U>& tile, int n_columns, WarpSums& sums) {
    const int lane = lane_id(), wm = warp_id() & 1, wn = warp_id() >> 1;
    const int4 start = tile.start;
#pragma unroll
    for (int g = 0; g < kTileGroups; ++g) {
        unsigned a[2][4];
#pragma unroll
        for (int t = 0; t < 2; ++t)
            load_matrix4(a[t], &tile.weights[32 * t + 16 * wm + lane % 16][32 * g + 16 * (lane / 16)]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int column0 = (4 * j + wn) * 8;
            if (column0 >= n_columns) break;
            unsigned b[2];
            const auto* x = reinterpret_cast<const unsigned*>(&tile.x[column0 + lane / 4][32 * g]);
            b[0] = x[lane % 4];
            b[1] = x[4 + lane % 4];
            const int column = column0 + 2 * (lane % 4);
            // Scales have the eight bits of bf16, so that their product with the start of sums is exact.
            const float dx[2] = {tile.x_scale[column][g], tile.x_scale[column + 1][g]};
            const float start_x[2] = {-kSumStartValue * dx[0], -kSumStartValue * dx[1]};
#pragma unroll
            for (int t = 0; t < 2; ++t) {
                const int row = 32 * t + 16 * wm + lane / 4;
                float* c = sums.c[t][j];
                int first[4], second[4];
                if constexpr (U::kHalves) {
                    mma_s8_k16(first, a[t], b[0], start);
                    mma_s8_k16(second, a[t] + 2, b[1], start);
                } else {
                    mma_s8_k32(first, a[t], b, start);
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int line = row + 8 * (i / 2);
                    if constexpr (U::kHalves) {
                        c[i] += scaled<U>(tile, g, line, column + i % 2, sum_value(first[i]),
                                          sum_value(second[i]));
                    } else if constexpr (U::kOffset) {
                        c[i] += scaled<U>(tile, g, line, column + i % 2, sum_value(first[i]), 0.0f);
                    } else {
                        const float bits = __int_as_float(first[i]);
                        c[i] += scaled<U>(tile, g, line, __fmaf_rn(dx[i % 2], bits, start_x[i % 2]));
                    }
                }
            }
        }
    }
}

// grid (row tiles, column tiles, batches or experts); 256 threads.
template <class U>
__device__ __forceinline__ void matmul_body(const Product& p) {
    __shared__ Tile<U> tile;
    __shared__ const uint8_t* sources[kTileColumns];
    const auto [columns, first, n_columns] = tile_columns<kTileColumns>(p, sources);
    if (n_columns == 0) return;
    if (threadIdx.x == 0) tile.start = int4{kSumStart, kSumStart, kSumStart, kSumStart};
    WarpSums sums;
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums.c[t][j][i] = 0.0f;
    __syncthreads();
    for (int depth = 0; depth < p.n_in; depth += kTileDepth) {
        load_x_tile<U>(p, threadIdx.x, sources, depth, n_columns, tile);
        load_weight_tile<U>(p, threadIdx.x, columns.matrix, depth, tile);
        wait_copies<0>();
        __syncthreads();
        multiply_tile<U>(tile, n_columns, sums);
        __syncthreads();
    }
    const int lane = lane_id(), wm = warp_id() & 1, wn = warp_id() >> 1;
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int column = (4 * j + wn) * 8 + 2 * (lane % 4) + i % 2;
            if (column >= n_columns) continue;
            uint8_t* dst = column_at(p, columns, first + column).dst;
            const int in_tile = 16 * wm + lane / 4 + 8 * (i / 2), row = Tile<U>::line(p, in_tile).row;
            if (row < p.n_out) store_sum(p, dst, columns.matrix, row, sums.c[0][j][i], sums.c[1][j][i]);
            if (!p.gate && row + 32 < p.n_out)
                store_sum(p, dst, columns.matrix, row + 32, sums.c[1][j][i], 0.0f);
        }
}

}  // namespace ikpy::cuda
