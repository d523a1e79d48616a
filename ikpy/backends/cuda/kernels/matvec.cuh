// Matrix-vector product of quantized weights (dp4a). Activations are int8 (quantize_q8.cuh).
#pragma once
#include "matvec_own.cuh"
#include "matvec_parts.cuh"
#include "matvec_states.cuh"
#include "matvec_tables.cuh"

namespace ikpy::cuda {

// A warp (or `split` warps, each a part of the columns) multiplies two sets of rows (Lanes::kRows each) with
// N tokens: neighbouring ones, or one of the up projection and the same one of the gate. grid (token chunks
// or assignments, row blocks, batches): chunks that need the same rows run side by side and share them in the
// L2 cache.
template <class U, int N>
__device__ __forceinline__ void matvec_body(const Products& ps) {
    const int number = block_product(ps);
    const Product& p = ps.product[number];
    using L = Lanes<U, N>;
    __shared__ float partial[kVectorWarps][2][N][L::kRows];
    const BlockColumns block = vector_columns<N>(p);
    if (block.count == 0) return;
    VectorWork<U, N> work;
    begin_work<U>(p, blockIdx.y - ps.first[number], block, work);
    VectorSums<U, N> sum = {};
    if constexpr (L::kParts) {
        __shared__ PartStage<U> stages[kVectorWarps][2];
        if (work.active) {
            if constexpr (U::Part::kStates) {
                add_states<U>(p, work, stages[warp_id()], sum);
            } else {
                add_parts<U>(p, work, stages[warp_id()], sum);
            }
        }
    } else if constexpr (L::kHasOwn) {
        using Own = typename U::Own;
        __shared__ unsigned table[Own::kTable > 0 ? Own::kTable : 1];
        if constexpr (Own::kTable > 0) make_table<Own>(table);
        if (work.active) add_own<U>(p, work, table, sum);
    } else if constexpr (L::kTables) {
        __shared__ unsigned table[U::kTable * U::kCopies];
        make_tables<U>(p, table);
        if (work.active) add_looked_up<U>(p, work, table, sum);
    } else {
        if (work.active) add_products<U>(p, work, sum);
    }
    if constexpr (L::kTogether > 1) {
        put_own<U>(work, sum, partial[warp_id()]);
    } else {
        join_lanes<U>(work, sum);
        // Sums that are picked by a number known at run time must not be in registers: the compiler would
        // keep them in local memory from the start.
        const int lane = lane_id();
        if (lane < L::kLanes) {
#pragma unroll
            for (int i = 0; i < 2 * L::kOwn; ++i)
#pragma unroll
                for (int c = 0; c < N; ++c)
                    partial[warp_id()][i % 2][c][i / 2 * L::kLanes + lane] = sum.of[i / 2][i % 2][c];
        }
    }
    if (p.split > 1) {
        __syncthreads();
    } else {
        __syncwarp();
    }
    if (work.part == 0 && work.active) store_vector<U>(p, block, work, partial);
}

}  // namespace ikpy::cuda
