// Matrix-vector product of one token with trellis types on int8 tensor cores: a value is the sum of four
// bytes of a state, so a product with the activation in all bytes adds them up, and nothing is packed.
#pragma once
#include "matvec_stages.cuh"
#include "unpack/states.cuh"

namespace ikpy::cuda {

// Rows of the operand A are those of the stage, each twice, with two groups of 32; columns of B are the
// activations of all eight groups of a block, of which one is right for a row of A. Lane 4 r + q so has
// quarter q of all groups of row r, and the sums of groups 2 q and 2 q + 1.

// x: of the lane's group and quarter; scales: of the lane's two groups.
__device__ __forceinline__ void load_states(const uint8_t* x, const uint8_t* scales, StateActs& out) {
    const uint2 q = __ldg(reinterpret_cast<const uint2*>(x));
    const float2 scale = __ldg(reinterpret_cast<const float2*>(scales));
    out.q[0] = q.x, out.q[1] = q.y;
    out.scale[0] = scale.x, out.scale[1] = scale.y;
}

// The lane's sum of its row, in a place where join_lanes finds it.
template <class U>
__device__ __forceinline__ void add_states(const Product& p, const VectorWork<U, 1>& work,
                                           PartStage<U> (&stages)[2], VectorSums<U, 1>& sum) {
    using Stage = PartStage<U>;
    constexpr int kBlocks = Stage::kBlocks, kOwn = Stage::kOwn;
    const int row = lane_id() / 4, q = lane_id() % 4;
    const int turn = row / (2 * kOwn), set = row / kOwn % 2, own = row % kOwn;
    unsigned start = 0;  // of the row
#pragma unroll
    for (int i = 0; i < 2 * kOwn; ++i) {
        const auto address = reinterpret_cast<uintptr_t>(work.weight[i / kOwn][i % kOwn]);
        const unsigned of_turn = __shfl_sync(kAllLanes, static_cast<unsigned>(address), turn);
        if (kOwn * set + own == i) start = of_turn;
    }
    const int first = work.part * kBlocks, step = p.split * kBlocks;
    const uint8_t* x = work.x[0] + 256 * first + 32 * row + 8 * q;
    const uint8_t* scales = work.x[0] + ActQ8Layout(p.n_in).scale + 32 * first + 8 * q;
    const float level = U::Part::level(lane_id() % 16);
    StateActs acts[kBlocks];
    float total = 0.0f;
    over_stages<U>(
        p, work, stages, row * Stage::kStride,
        [&](int left) {
#pragma unroll
            for (int b = 0; b < kBlocks; ++b)
                if (b < left) load_states(x + 256 * b, scales + 32 * b, acts[b]);
            x += 256 * step, scales += 32 * step;
        },
        [&](int left, const uint8_t* data, unsigned done) {
            data += (start + done) & 15;
#pragma unroll
            for (int b = 0; b < kBlocks; ++b)
                if (b < left) total += U::Part::product(data + b * U::kBytes, q, level, acts[b]);
        });
    total += __shfl_xor_sync(kAllLanes, total, 1);
    total += __shfl_xor_sync(kAllLanes, total, 2);
#pragma unroll
    for (int i = 0; i < 2 * kOwn; ++i)
        sum.of[i % kOwn][i / kOwn][0] = q == turn && kOwn * set + own == i ? total : 0.0f;
}

}  // namespace ikpy::cuda
