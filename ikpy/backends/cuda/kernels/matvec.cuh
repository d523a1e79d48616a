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

// How the lanes of a warp divide rows. Neighbouring groups of 32 of a row share bytes in types that have
// kNeighbours of them: with one token a lane takes these, so that the bytes are loaded and cut once, and as
// many neighbouring lanes take as many rows.
template <class U, int N>
struct Lanes {
    static constexpr int kGroups = N == 1 ? U::kNeighbours : 1;  // of a row, per lane and step
    static constexpr int kRows = U::kRows * kGroups;             // in turn over the lanes
    static_assert(U::kRows == 1 || kGroups == 1);
};

// What a warp of matvec multiplies: rows group0 * Lanes::kRows on and a second time as many, of which a lane
// has one each (weight), with N tokens; of the columns part `part`. An inactive warp has no rows and takes
// part in barriers only.
template <int N>
struct VectorWork {
    int part, group0;
    bool active, second;
    const uint8_t* weight[2];
    const uint8_t* x[N];
};

// Row of the lane; the last one where there are no more.
template <class U, int N>
__device__ __forceinline__ int lane_row(const Product& p, int group) {
    using L = Lanes<U, N>;
    if (L::kGroups == 1) return group * L::kRows;
    return min(group * L::kRows + lane_id() % L::kGroups, p.n_out - 1);
}

template <class U, int N>
__device__ __forceinline__ void begin_work(const Product& p, int row_block, const BlockColumns& block,
                                           VectorWork<N>& work) {
    constexpr int kRows = Lanes<U, N>::kRows;
    const int warp = warp_id(), sets = kVectorWarps / p.split, n_groups = (p.n_out + kRows - 1) / kRows;
    const int set = row_block * sets + warp / p.split;
    work.part = warp % p.split;
    work.group0 = p.gate ? set : 2 * set;
    work.active = work.group0 < n_groups;
    work.second = p.gate || work.group0 + 1 < n_groups;
    if (work.active) {
        const long long matrix = block.columns.matrix * p.matrix_bytes;
        const int row = lane_row<U, N>(p, work.group0), second = lane_row<U, N>(p, work.group0 + 1);
        work.weight[0] = row_group<U>(p.up + matrix, p.row_bytes, row);
        work.weight[1] = p.gate        ? row_group<U>(p.gate + matrix, p.row_bytes, row)
                         : work.second ? row_group<U>(p.up + matrix, p.row_bytes, second)
                                       : work.weight[0];
    }
#pragma unroll
    for (int c = 0; c < N; ++c)
        work.x[c] = column_at(p, block.columns, block.first + min(c, block.count - 1)).x;
}

// Sums of the lane's two rows, with groups that have the same place among neighbours.
template <class U, int N>
struct VectorSums {
    float of[2][N][Lanes<U, N>::kGroups];
};

template <class U, int N>
__device__ __forceinline__ void add_products(const Product& p, const VectorWork<N>& work,
                                             VectorSums<U, N>& sum) {
    using L = Lanes<U, N>;
    const ActQ8Layout at(p.n_in);
    constexpr int kStep = 32 / U::kRows;
    const int lane = lane_id(), k = lane % U::kRows;
    const int first = work.part * kStep + lane / L::kRows * L::kGroups;
#pragma unroll 1
    for (int g = first; g < p.n_in / 32; g += p.split * kStep) {
        Group w[2][L::kGroups];
#pragma unroll
        for (int i = 0; i < 2; ++i) unpack_neighbours<U>(work.weight[i], k, g, w[i]);
#pragma unroll
        for (int c = 0; c < N; ++c)
#pragma unroll
            for (int j = 0; j < L::kGroups; ++j) {
                ActGroup x;
                load_activations<U>(work.x[c], at, g + j, x);
#pragma unroll
                for (int i = 0; i < 2; ++i) sum.of[i][c][j] += group_product<U>(w[i][j], x);
            }
    }
}

// Joins the sums of the lanes that share a row, in the order that lanes with one group each would.
template <class U, int N>
__device__ __forceinline__ void join_lanes(const VectorWork<N>& work, VectorSums<U, N>& sum) {
    using L = Lanes<U, N>;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int c = 0; c < N; ++c) {
            float (&s)[L::kGroups] = sum.of[i][c];
#pragma unroll
            for (int m = 16; m >= L::kRows; m >>= 1)
#pragma unroll
                for (int j = 0; j < L::kGroups; ++j) s[j] += __shfl_xor_sync(kAllLanes, s[j], m);
#pragma unroll
            for (int m = L::kGroups / 2; m > 0; m >>= 1)
#pragma unroll
                for (int j = 0; j < m; ++j) s[j] += s[j + m];
            if (work.active) s[0] *= U::row_scale(work.weight[i], lane_id() % U::kRows);
        }
}

// partial: the sums of all warps, of which those that share rows are added up.
template <class U, int N>
__device__ __forceinline__ void store_vector(const Product& p, const BlockColumns& block,
                                             const VectorWork<N>& work,
                                             const float (*partial)[2][N][Lanes<U, N>::kRows]) {
    constexpr int kRows = Lanes<U, N>::kRows;
    const int warp = warp_id(), matrix = block.columns.matrix;
    for (int i = lane_id(); i < block.count * kRows; i += 32) {
        const int c = i / kRows, in_group = i % kRows, row = work.group0 * kRows + in_group;
        if (row >= p.n_out) continue;
        float first_sum = 0.0f, second_sum = 0.0f;
        for (int w = warp; w < warp + p.split; ++w) {
            first_sum += partial[w][0][c][in_group];
            second_sum += partial[w][1][c][in_group];
        }
        uint8_t* dst = column_at(p, block.columns, block.first + c).dst;
        store_sum(p, dst, matrix, row, first_sum, second_sum);
        if (!p.gate && row + kRows < p.n_out) store_sum(p, dst, matrix, row + kRows, second_sum, 0.0f);
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
    constexpr int kRows = Lanes<U, N>::kRows;
    __shared__ float partial[kVectorWarps][2][N][kRows];
    const BlockColumns block = vector_columns<N>(p);
    if (block.count == 0) return;
    VectorWork<N> work;
    begin_work<U>(p, blockIdx.y - ps.first[number], block, work);
    VectorSums<U, N> sum = {};
    if (work.active) add_products<U>(p, work, sum);
    join_lanes<U>(work, sum);
    // Sums that are picked by a number known at run time must not be in registers: the compiler would keep
    // them in local memory from the start.
    const int lane = lane_id();
    if (lane < kRows) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int c = 0; c < N; ++c) partial[warp_id()][i][c][lane] = sum.of[i][c][0];
    }
    if (p.split > 1) {
        __syncthreads();
    } else {
        __syncwarp();
    }
    if (work.part == 0 && work.active) store_vector<U>(p, block, work, partial);
}

}  // namespace ikpy::cuda
