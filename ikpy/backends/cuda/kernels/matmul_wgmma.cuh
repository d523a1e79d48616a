// Matrix product of quantized weights on the int8 tensor cores of sm_90 by wgmma: what matmul_
// (matmul_mma.cuh) does, with the same integer sums and the same arithmetic behind them, dense or by experts.
// Included before the list of a family's types; compiled for sm_90a only.
//
// A block multiplies 64 weight rows with 128 tokens, 128 columns at a time. Two groups of four warps share
// the rows and take every other eight tokens each, so that few tokens keep both busy. Rows go from shared
// memory to registers (ldmatrix) and from there into wgmma, because scales per 16 columns, of which m64nNk32
// knows nothing, are two products whose registers of the other half are zero. Tokens are read by descriptor.
//
// Arithmetic per 32 columns of a block and multiprocessor: 64 x 128 x 32 products are 64 cycles of the tensor
// cores (4096 per cycle), 128 with halves. Scaling takes three instructions per sum (five with halves; four
// warps' issue 128 a cycle), 192 cycles (320): the tensor cores wait. So nothing but the number of
// instructions beside the scaling counts, of which mma.sync has a product and two loads for four sums and
// wgmma one load for 32; and bf16 products (gemm_wgmma.cu), without scaling, win once decoding is paid off.
//
// Shared memory: two stages of 29 to 34 KiB, 60 to 69 KiB; at most 128 registers: two blocks of 256 threads
// on a multiprocessor (228 KiB, 65536 registers), whose four warp groups scale while others wait for sums.
#pragma once
#include "weight_tiles.cuh"
#include "weights.cuh"
#include "wgmma.cuh"

namespace ikpy::cuda {

constexpr int kStagesS8 = 2, kGroupTokens = 64, kAtomBytes = 1024;
constexpr int kSharedS8 = 70656;  // mirrored in launch/products.py; of the types that need most
constexpr int kSumPitch = kTileRows + 4;

// Rows of 128 bytes, swizzled as matrix_descriptor says.
struct SwizzledRows {
    __align__(16) uint8_t weights[kTileRows * kTileDepth];
    uint8_t x[kTileColumns * kTileDepth];
};

// Shared memory of a stage, which starts at a multiple of kAtomBytes.
template <class U>
struct SwizzledTile : SwizzledRows, TileScales<U> {
    static constexpr int kStageBytes =
        (sizeof(SwizzledRows) + sizeof(TileScales<U>) + kAtomBytes - 1) / kAtomBytes * kAtomBytes;

    __device__ static __forceinline__ int swizzled(int row, int depth) {
        return row * kTileDepth + ((depth / 16 ^ row % 8) * 16 | depth % 16);
    }
    __device__ __forceinline__ uint8_t* weights_at(int i, int depth) {
        return this->weights + swizzled(i, depth);
    }
    // The columns of a group of warps follow each other.
    __device__ __forceinline__ uint8_t* x_at(int column, int depth) {
        return this->x + swizzled(column / 8 % 2 * kGroupTokens + column / 16 * 8 + column % 8, depth);
    }
    // Up and gate rows take turns by eight, so that a thread has both sums of an output.
    __device__ static __forceinline__ TileLine line(const Product& p, int i) {
        if (!p.gate) return {static_cast<int>(blockIdx.x) * kTileRows + i, false};
        return {static_cast<int>(blockIdx.x) * (kTileRows / 2) + i / 16 * 8 + i % 8, i / 8 % 2 == 1};
    }
};

// A warp's 16 rows, 32 columns; half 0 or 1: the others as zeros, -1: all.
template <class AnyTile>
__device__ __forceinline__ void load_rows(AnyTile& tile, int g, int half, unsigned (&a)[4]) {
    const int lane = lane_id(), row = 16 * (warp_id() % 4) + lane % 16;
    load_matrix4(a, tile.weights_at(row, 32 * g + 16 * (lane / 16)));
    if (half >= 0) a[2 - 2 * half] = a[3 - 2 * half] = 0;
}

// Adds the products of 32 columns to a thread's 32 sums.
template <class U>
__device__ __forceinline__ void add_scaled(const SwizzledTile<U>& tile, int g, int n_columns,
                                           const int (&first)[32], const int (&second)[32],
                                           float (&sums)[32]) {
    const int lane = lane_id(), row = 16 * (warp_id() % 4) + lane / 4;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const int column0 = (2 * j + warp_id() / 4) * 8, column = column0 + 2 * (lane % 4);
        if (column0 >= n_columns) break;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int line = row + 8 * (i / 2);
            const float value = static_cast<float>(first[4 * j + i]);
            if constexpr (U::kHalves || U::kOffset) {
                sums[4 * j + i] +=
                    scaled<U>(tile, g, line, column + i % 2, value, static_cast<float>(second[4 * j + i]));
            } else {
                sums[4 * j + i] += scaled<U>(tile, g, line, tile.x_scale[column + i % 2][g] * value);
            }
        }
    }
}

// The products of a stage. Types with a scale per 32 columns keep the products of the next 32 under way while
// sums are scaled; those with two scales need both sets of registers at once.
template <class U>
__device__ __forceinline__ void multiply_stage(SwizzledTile<U>& tile, int n_columns, float (&sums)[32]) {
    int products[2][32];
    const unsigned long long x = matrix_descriptor(tile.x + warp_id() / 4 * kGroupTokens * kTileDepth);
    unsigned a[2][4];
    const auto start = [&](int g, int half, int set) {
        load_rows(tile, g, half, a[set]);
        wgmma_fence(a[set]);
        wgmma_s8_n64(products[set], a[set], x + g * kNextK);
        wgmma_commit();
    };
    if constexpr (U::kHalves) {
#pragma unroll
        for (int g = 0; g < kTileGroups; ++g) {
            start(g, 0, 0);
            start(g, 1, 1);
            wgmma_finish(products[0]);
            wgmma_finish(products[1]);
            add_scaled<U>(tile, g, n_columns, products[0], products[1], sums);
        }
    } else {
        start(0, -1, 0);
#pragma unroll
        for (int g = 0; g < kTileGroups; ++g) {
            int (&of_group)[32] = products[g % 2];
            if (g + 1 < kTileGroups) {
                start(g + 1, -1, (g + 1) % 2);
                wgmma_finish<1>(of_group);
            } else {
                wgmma_finish(of_group);
            }
            add_scaled<U>(tile, g, n_columns, of_group, of_group, sums);
        }
    }
}

// A number of which the compiler knows nothing: what follows from it is computed in every step. Kept through
// the products, addresses of rows would need registers that the sums have.
__device__ __forceinline__ int recomputed(int x) {
#if defined(__CUDACC__)
    asm volatile("" : "+r"(x));
#endif
    return x;
}

// The sums of all threads, [128 tokens][kSumPitch], in the memory of the stages.
__device__ __forceinline__ void exchange_sums(const float (&sums)[32], float* tile) {
    const int lane = lane_id(), line = 16 * (warp_id() % 4) + lane / 4;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        const int column = (2 * (i / 4) + warp_id() / 4) * 8 + 2 * (lane % 4) + i % 2;
        tile[column * kSumPitch + line + 8 * (i / 2 % 2)] = sums[i];
    }
}

// grid (row tiles, column tiles, batches or experts); 256 threads.
template <class U>
__device__ __forceinline__ void matmul_wgmma_body(const Product& p) {
    using Stage = SwizzledTile<U>;
    static_assert(sizeof(Stage) <= Stage::kStageBytes);
    static_assert(kStagesS8 * Stage::kStageBytes + kAtomBytes <= kSharedS8);
    static_assert(kTileColumns * kSumPitch * sizeof(float) <= kStagesS8 * Stage::kStageBytes);
    IKPY_DYNAMIC_SHARED(shared);
    __shared__ const uint8_t* sources[kTileColumns];
    uint8_t* const stages = shared + (kAtomBytes - shared_address(shared) % kAtomBytes) % kAtomBytes;
    const auto stage = [stages](int k) -> Stage& {
        return *reinterpret_cast<Stage*>(stages + k % kStagesS8 * Stage::kStageBytes);
    };
    const BlockColumns block = tile_columns<kTileColumns>(p, sources);
    const Columns& columns = block.columns;
    const int first = block.first, n_columns = block.count;
    if (n_columns == 0) return;
    float sums[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) sums[i] = 0.0f;
    __syncthreads();
    const auto load = [&](int k) {
        const int thread = recomputed(threadIdx.x), depth = k * kTileDepth;
        load_x_tile<U>(p, thread, sources, depth, n_columns, stage(k));
        load_weight_tile<U>(p, thread, columns.matrix, depth, stage(k));
    };
    // What was loaded becomes known to all threads and to wgmma.
    const auto publish = [] {
        wait_copies<0>();
        fence_async();
        __syncthreads();
    };
    // Step k is loaded before the one in front of it is multiplied.
    const int n_steps = (p.n_in + kTileDepth - 1) / kTileDepth;
    for (int k = 0; k <= n_steps; ++k) {
        if (k < n_steps) load(k);
        if (k > 0) multiply_stage<U>(stage(k - 1), n_columns, sums);
        publish();
    }
    auto* tile = reinterpret_cast<float*>(stages);
    exchange_sums(sums, tile);
    __syncthreads();
    const int rows = p.gate ? kTileRows / 2 : kTileRows;
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * n_columns; i += kTileThreads) {
        const int r = i % rows, row = blockIdx.x * rows + r, line = p.gate ? r / 8 * 16 + r % 8 : r;
        const float* sum = tile + i / rows * kSumPitch + line;
        if (row < p.n_out)
            store_sum(p, column_at(p, columns, first + i / rows).dst, columns.matrix, row, sum[0],
                      p.gate ? sum[8] : 0.0f);
    }
}

}  // namespace ikpy::cuda

// The kernel of a type in place of those that weights.cuh makes.
#undef IKPY_WEIGHT_TYPE
#define IKPY_WEIGHT_TYPE(name, U)                                               \
    IKPY_KERNEL __launch_bounds__(256, 2) wgmma_##name(ikpy::cuda::Product p) { \
        ikpy::cuda::matmul_wgmma_body<ikpy::cuda::U>(p);                        \
    }                                                                           \
    IKPY_EXPORT(wgmma_##name)
