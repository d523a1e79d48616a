// Matrix product of bf16 tiles on the tensor cores of sm_90: what gemm_bf16.cu does there, with operands that
// were written as tiles (tiles.cuh). Built for sm_90a only.
//
// A block multiplies 128 rows (or 64 of up and 64 of gate, in turns of eight) with 128 tokens, 64 columns at
// a time. One thread of the last warp keeps three stages of bulk copies under way; two groups of four warps
// multiply 64 rows each. Two blocks share a multiprocessor: one stores its sums while the other multiplies.
#include "store_tile.cuh"
#include "tiles.cuh"
#include "wgmma.cuh"

using namespace ikpy::cuda;

namespace {

constexpr int kStages = 3, kMultiplyingWarps = 8, kThreads = 32 * (kMultiplyingWarps + 1);
constexpr int kSums = 64, kAtom = 1024;

struct Stage {
    uint8_t weights[kTiledBytes], x[kTiledBytes];
};

static_assert(kTiledRows * kTileTokenPitch * sizeof(float) <= kStages * sizeof(Stage));

struct Pipeline {
    Stage* stages;
    Barrier *full, *empty;
};

// Stage of step k, and how often it was used before.
struct Turn {
    int stage, round;
};
__device__ __forceinline__ Turn turn(int k) { return {k % kStages, k / kStages}; }

__device__ __forceinline__ void load(const Product& p, const Pipeline& pipeline, int n_steps) {
    const uint8_t* weights = p.up + static_cast<long long>(blockIdx.x) * n_steps * kTiledBytes;
    const uint8_t* x = p.x + static_cast<long long>(blockIdx.y) * n_steps * kTiledBytes;
    for (int k = 0; k < n_steps; ++k) {
        const auto [s, round] = turn(k);
        if (round > 0) barrier_wait(&pipeline.empty[s], (round - 1) & 1);
        barrier_expect(&pipeline.full[s], sizeof(Stage));
        copy_bulk(pipeline.stages[s].weights, weights + static_cast<long long>(k) * kTiledBytes, kTiledBytes,
                  &pipeline.full[s]);
        copy_bulk(pipeline.stages[s].x, x + static_cast<long long>(k) * kTiledBytes, kTiledBytes,
                  &pipeline.full[s]);
    }
}

__device__ __forceinline__ void multiply(const Pipeline& pipeline, int n_steps, float (&sums)[kSums]) {
    const int half = warp_id() / 4 * (kTiledBytes / 2);
    for (int k = 0; k < n_steps; ++k) {
        const auto [s, round] = turn(k);
        barrier_wait(&pipeline.full[s], round & 1);
        const unsigned long long a = matrix_descriptor(pipeline.stages[s].weights + half);
        const unsigned long long b = matrix_descriptor(pipeline.stages[s].x);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kTiledDepth / 16; ++i)
            wgmma_bf16_n128(sums, a + i * kNextK, b + i * kNextK, k > 0 || i > 0);
        wgmma_commit();
        wgmma_wait<1>();  // the products of the step before are done with their stage
        if (k > 0 && lane_id() == 0) barrier_arrive(&pipeline.empty[turn(k - 1).stage]);
    }
    wgmma_finish(sums);
}

// The sums of a tile, by token, in the memory of the stages.
__device__ __forceinline__ void exchange(const float (&sums)[kSums], float* tile) {
    const int lane = lane_id(), line = 16 * warp_id() + lane / 4, token = 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < kSums; ++i)
        tile[(token + i / 4 * 8 + i % 2) * kTileTokenPitch + line + 8 * (i / 2 % 2)] = sums[i];
}

}  // namespace

// grid (row tiles, tiles of tokens); one matrix for all tokens, whose number is known. up: the tiles of all
// weights; gate: not null if they hold a gate.
IKPY_KERNEL __launch_bounds__(kThreads, 2) gemm_wgmma(Product p) {
    IKPY_DYNAMIC_SHARED(shared);
    __shared__ Barrier barriers[2 * kStages];
    auto* stages = reinterpret_cast<Stage*>(shared + (kAtom - shared_address(shared) % kAtom) % kAtom);
    const Pipeline pipeline{stages, barriers, barriers + kStages};
    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; ++s) {
            barrier_init(&pipeline.full[s], 1);
            barrier_init(&pipeline.empty[s], kMultiplyingWarps);
        }
        fence_async();
    }
    __syncthreads();
    const int n_steps = p.n_in / kTiledDepth;
    auto* tile = reinterpret_cast<float*>(stages);
    if (warp_id() == kMultiplyingWarps) {
        if (lane_id() == 0) load(p, pipeline, n_steps);
        __syncwarp();
        __syncthreads();
    } else {
        float sums[kSums];
        multiply(pipeline, n_steps, sums);
        __syncthreads();  // nobody reads the stages any more
        exchange(sums, tile);
    }
    __syncthreads();
    store_tile(p, tile, blockIdx.y * kTiledRows, kTiledRows, 8,
               [&p](int r) { return tile_line(r, p.gate ? kTilesUp : kTiles); });
}
IKPY_EXPORT(gemm_wgmma);
