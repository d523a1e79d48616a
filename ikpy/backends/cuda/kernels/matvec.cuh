// Matrix-vector product of quantized weights (dp4a). Activations are int8 (quantize_q8.cuh).
#pragma once
#include "product.cuh"
#include "quantize_q8.cuh"
#include "weight_blocks.cuh"

namespace ikpy::cuda {

constexpr int kVectorWarps = 4;

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

// What a warp of matvec multiplies: row group group0 of `weight[0]` and a second one, with N tokens; of the
// columns part `part`. An inactive warp has no rows and takes part in barriers only.
template <int N>
struct VectorWork {
    int part, group0;
    bool active, second;
    const uint8_t* weight[2];
    const uint8_t* x[N];
};

template <class U, int N>
__device__ __forceinline__ void begin_work(const Product& p, int row_block, const BlockColumns& block,
                                           VectorWork<N>& work) {
    const int warp = warp_id(), sets = kVectorWarps / p.split, n_groups = p.n_out / U::kRows;
    const int set = row_block * sets + warp / p.split;
    work.part = warp % p.split;
    work.group0 = p.gate ? set : 2 * set;
    work.active = work.group0 < n_groups;
    work.second = p.gate || work.group0 + 1 < n_groups;
    if (work.active) {
        const long long matrix = block.columns.matrix * p.matrix_bytes;
        const int row = work.group0 * U::kRows;
        work.weight[0] = row_group<U>(p.up + matrix, p.row_bytes, row);
        work.weight[1] = p.gate ? row_group<U>(p.gate + matrix, p.row_bytes, row)
                                : work.weight[0] + (work.second ? U::kRows * p.row_bytes : 0);
    }
#pragma unroll
    for (int c = 0; c < N; ++c)
        work.x[c] = column_at(p, block.columns, block.first + min(c, block.count - 1)).x;
}

template <class U, int N>
__device__ __forceinline__ void add_products(const Product& p, const VectorWork<N>& work, float (*sum)[N]) {
    const ActQ8Layout at(p.n_in);
    constexpr int kStep = 32 / U::kRows;
    const int lane = lane_id(), k = lane % U::kRows;
    for (int g = work.part * kStep + lane / U::kRows; g < p.n_in / 32; g += p.split * kStep) {
        Group w[2];
        unpack_levels<U>(work.weight[0], k, g, w[0]);
        unpack_levels<U>(work.weight[1], k, g, w[1]);
#pragma unroll
        for (int c = 0; c < N; ++c) {
            ActGroup x;
            load_activations<U>(work.x[c], at, g, x);
            sum[0][c] += group_product<U>(w[0], x);
            sum[1][c] += group_product<U>(w[1], x);
        }
    }
}

// Joins the sums of the lanes that share a row.
template <class U, int N>
__device__ __forceinline__ void join_lanes(const VectorWork<N>& work, float (*sum)[N]) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int c = 0; c < N; ++c) {
#pragma unroll
            for (int m = 16; m >= U::kRows; m >>= 1) sum[i][c] += __shfl_xor_sync(kAllLanes, sum[i][c], m);
            if (work.active) sum[i][c] *= U::row_scale(work.weight[i], lane_id() % U::kRows);
        }
}

// partial: the sums of all warps, of which those that share rows are added up.
template <class U, int N>
__device__ __forceinline__ void store_vector(const Product& p, const BlockColumns& block,
                                             const VectorWork<N>& work,
                                             const float (*partial)[2][N][U::kRows]) {
    const int warp = warp_id(), matrix = block.columns.matrix;
    for (int i = lane_id(); i < block.count * U::kRows; i += 32) {
        const int c = i / U::kRows, in_group = i % U::kRows, row = work.group0 * U::kRows + in_group;
        float first_sum = 0.0f, second_sum = 0.0f;
        for (int w = warp; w < warp + p.split; ++w) {
            first_sum += partial[w][0][c][in_group];
            second_sum += partial[w][1][c][in_group];
        }
        uint8_t* dst = column_at(p, block.columns, block.first + c).dst;
        store_sum(p, dst, matrix, row, first_sum, second_sum);
        if (!p.gate && work.second) store_sum(p, dst, matrix, row + U::kRows, second_sum, 0.0f);
    }
}

// A warp (or `split` warps, each a part of the columns) multiplies two row groups with N tokens: two
// neighbouring groups, or one of the up projection and the same one of the gate. Interleaved rows are spread
// over the lanes. grid (token chunks or assignments, row blocks, batches): chunks that need the same rows run
// side by side and share them in the L2 cache.
template <class U, int N>
__device__ __forceinline__ void matvec_body(const Products& ps) {
    const int number = block_product(ps);
    const Product& p = ps.product[number];
    __shared__ float partial[kVectorWarps][2][N][U::kRows];
    const BlockColumns block = vector_columns<N>(p);
    if (block.count == 0) return;
    VectorWork<N> work;
    begin_work<U>(p, blockIdx.y - ps.first[number], block, work);
    float sum[2][N];
#pragma unroll
    for (int c = 0; c < N; ++c) sum[0][c] = sum[1][c] = 0.0f;
    if (work.active) add_products<U>(p, work, sum);
    join_lanes<U>(work, sum);
    // Sums that are picked by a number known at run time must not be in registers: the compiler would keep
    // them in local memory from the start.
    const int lane = lane_id();
    if (lane < U::kRows) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int c = 0; c < N; ++c) partial[warp_id()][i][c][lane] = sum[i][c];
    }
    if (p.split > 1) {
        __syncthreads();
    } else {
        __syncwarp();
    }
    if (work.part == 0 && work.active) store_vector<U>(p, block, work, partial);
}

}  // namespace ikpy::cuda
