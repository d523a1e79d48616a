// Matrix-vector product of quantized weights (dp4a). Activations are int8 (quantize_q8.cuh).
#pragma once
#include "matvec_own.cuh"
#include "matvec_parts.cuh"
#include "matvec_states.cuh"

namespace ikpy::cuda {

// 32 activations of a token with their scale and the sums that offsets are multiplied with. start: of integer
// sums, what the bias of levels takes from them.
struct ActGroup {
    unsigned q[8];
    int start[2];
    float scale;
    float sums[2];
};

template <class U>
__device__ __forceinline__ void load_activations(const uint8_t* x, const ActQ8Layout& at, int g,
                                                 ActGroup& out) {
    *reinterpret_cast<uint4*>(out.q) = __ldg(reinterpret_cast<const uint4*>(x + 32 * g));
    *reinterpret_cast<uint4*>(out.q + 4) = __ldg(reinterpret_cast<const uint4*>(x + 32 * g + 16));
    out.start[0] = out.start[1] = 0;
    if constexpr (U::kBias != 0) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            int& start = out.start[U::kHalves ? i / 4 : 0];
            start = __dp4a(static_cast<int>(out.q[i]), static_cast<int>((256u - U::kBias) * kOnes), start);
        }
    }
    out.scale = __ldg(reinterpret_cast<const float*>(x + at.scale) + g);
    if (U::kOffset && U::kHalves) {
        const float2 s = __ldg(reinterpret_cast<const float2*>(x + at.sum16) + g);
        out.sums[0] = s.x;
        out.sums[1] = s.y;
    } else if (U::kOffset) {
        out.sums[0] = __ldg(reinterpret_cast<const float*>(x + at.sum32) + g);
    }
}

// Products of group w with the same 32 activations of one token.
template <class U>
__device__ __forceinline__ float group_product(const Group& w, const ActGroup& x) {
    int low = x.start[0], high = x.start[1];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        low = __dp4a(static_cast<int>(w.q[i]), static_cast<int>(x.q[i]), low);
        high = __dp4a(static_cast<int>(w.q[4 + i]), static_cast<int>(x.q[4 + i]), high);
    }
    float sum;
    if (U::kHalves) {
        sum = w.d[0] * static_cast<float>(low) + w.d[1] * static_cast<float>(high);
        if (U::kOffset) sum += w.m[0] * x.sums[0] + w.m[1] * x.sums[1];
    } else {
        sum = w.d[0] * static_cast<float>(low + high);
        if (U::kOffset) sum += w.m[0] * x.sums[0];
    }
    return x.scale * sum;
}

template <class U, int N>
__device__ __forceinline__ void add_products(const Product& p, const VectorWork<U, N>& work,
                                             VectorSums<U, N>& sum) {
    const ActQ8Layout at(p.n_in);
    constexpr int kStep = 32 / U::kRows;
    const int lane = lane_id(), k = lane % U::kRows;
#pragma unroll 1
    for (int g = work.part * kStep + lane / U::kRows; g < p.n_in / 32; g += p.split * kStep) {
        Group w[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) unpack_levels<U>(work.weight[i][0], k, g, w[i]);
#pragma unroll
        for (int c = 0; c < N; ++c) {
            ActGroup x;
            load_activations<U>(work.x[c], at, g, x);
#pragma unroll
            for (int i = 0; i < 2; ++i) sum.of[0][i][c] += group_product<U>(w[i], x);
        }
    }
}

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
    } else if constexpr (L::kTogether > 1) {
        using Own = typename U::Own;
        __shared__ unsigned table[Own::kTable > 0 ? Own::kTable : 1];
        if constexpr (Own::kTable > 0) make_table<Own>(table);
        if (work.active) add_own<U>(p, work, table, sum);
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
