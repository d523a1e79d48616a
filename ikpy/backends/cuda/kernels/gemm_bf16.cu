// Matrix product of bf16 rows and bf16 activations on tensor cores, for large prompts: weights of this type,
// or quantized ones that were decoded to it. A block of 8 warps multiplies 128 rows (or 64 of up and 64 of
// gate) with 128 tokens, 32 columns at a time; the next ones arrive by asynchronous copies meanwhile.
#include "mma.cuh"
#include "store_tile.cuh"

using namespace ikpy::cuda;

// Devices before sm_80 have no bf16 products and are not given this kernel.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

namespace {

constexpr int kSize = 128, kDepth = 32, kThreads = 256;
constexpr int kStride = kDepth + 8;  // elements; the odd 16 bytes keep ldmatrix free of bank conflicts

struct Stage {
    __align__(16) uint16_t weights[kSize][kStride];
    __align__(16) uint16_t x[kSize][kStride];
};

// Row of the matrices that tile row i holds: with a gate the lower half are up rows, the upper half gate
// rows.
__device__ __forceinline__ int tile_row(const Product& p, int i) {
    return p.gate ? blockIdx.x * (kSize / 2) + i % (kSize / 2) : blockIdx.x * kSize + i;
}

__device__ __forceinline__ void load_stage(const Product& p, int first, int depth, Stage& stage) {
    constexpr int kParts = kDepth / 8;  // of 16 bytes
    for (int i = threadIdx.x; i < kSize * kParts; i += kThreads) {
        const int line = i / kParts, e = i % kParts * 8, row = tile_row(p, line), token = first + line;
        const uint8_t* matrix = p.gate && line >= kSize / 2 ? p.gate : p.up;
        const bool inside = depth + e < p.n_in;
        const uint8_t* w = matrix + min(row, p.n_out - 1) * p.row_bytes + 2 * (inside ? depth + e : 0);
        copy16_async(&stage.weights[line][e], w, inside && row < p.n_out);
        const uint8_t* x = p.x + min(token, p.n_tokens - 1) * p.x_stride + 2 * (inside ? depth + e : 0);
        copy16_async(&stage.x[line][e], x, inside && token < p.n_tokens);
    }
}

// Sums of one warp: four tiles of 16 rows, 32 apart (with a gate: two of up and the same two of gate), and
// four neighbouring ones of 8 tokens.
struct Sums {
    float c[4][4][4];
};

__device__ __forceinline__ void multiply_stage(const Stage& stage, Sums& sums) {
    const int lane = lane_id(), wm = warp_id() & 1, wn = warp_id() >> 1;
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
        unsigned b[2][4];  // of two tiles of tokens each
#pragma unroll
        for (int j = 0; j < 2; ++j)
            load_matrix4(b[j], &stage.x[32 * wn + 16 * j + lane / 16 * 8 + lane % 8][k + 8 * (lane / 8 % 2)]);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            unsigned a[4];
            load_matrix4(a, &stage.weights[32 * t + 16 * wm + lane % 16][k + 8 * (lane / 16)]);
#pragma unroll
            for (int j = 0; j < 4; ++j) mma_bf16(sums.c[t][j], a, b[j / 2] + 2 * (j % 2));
        }
    }
}

// The sums of half of the tokens, by token, in the memory of the stages.
constexpr int kHalf = kSize / 2;
static_assert(kHalf * kTileTokenPitch * sizeof(float) <= 2 * sizeof(Stage));

__device__ __forceinline__ void exchange(const Sums& sums, int half, float* tile) {
    const int lane = lane_id(), wm = warp_id() & 1, wn = warp_id() >> 1;
    if (wn / 2 != half) return;
#pragma unroll
    for (int t = 0; t < 4; ++t)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int token = 32 * (wn % 2) + 8 * j + 2 * (lane % 4) + i % 2;
                const int line = 32 * t + 16 * wm + lane / 4 + 8 * (i / 2);
                tile[token * kTileTokenPitch + line] = sums.c[t][j][i];
            }
}

__device__ __forceinline__ void gemm(const Product& p) {
    __shared__ Stage stages[2];
    const int first = blockIdx.y * kSize;
    Sums sums = {};
    load_stage(p, first, 0, stages[0]);
    commit_copies();
    for (int depth = 0, now = 0; depth < p.n_in; depth += kDepth, now ^= 1) {
        if (depth + kDepth < p.n_in) load_stage(p, first, depth + kDepth, stages[now ^ 1]);
        commit_copies();
        wait_copies<1>();
        __syncthreads();
        multiply_stage(stages[now], sums);
        __syncthreads();
    }
    auto* tile = reinterpret_cast<float*>(stages);
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
        exchange(sums, half, tile);
        __syncthreads();
        store_tile(p, tile, first + half * kHalf, kHalf, kHalf, [](int r) { return r; });
        __syncthreads();
    }
}

}  // namespace

#endif

// grid (row tiles, tiles of tokens); one matrix for all tokens, whose number is known.
IKPY_KERNEL __launch_bounds__(256, 2) gemm_bf16([[maybe_unused]] Product p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    gemm(p);
#endif
}
IKPY_EXPORT(gemm_bf16);
