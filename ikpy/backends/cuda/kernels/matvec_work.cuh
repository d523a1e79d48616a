// What the warps of a matrix-vector product have: rows, and the sums of their lanes.
#pragma once
#include <type_traits>

#include "product.cuh"
#include "weight_blocks.cuh"

namespace ikpy::cuda {

constexpr int kVectorWarps = 4;

// How the lanes of a warp divide rows. Of types with parts (matvec_stages.cuh) a set has kPartRows rows, of
// which a lane multiplies half, or one. Of interleaved rows with one token a lane takes several neighbours,
// if the type says how (matvec_own.cuh). Of plain ones with it, and of types with tables (matvec_tables.cuh),
// a set has kLaneRows rows, of all lanes.
constexpr int kPartRows = 4, kLaneRows = 2;
template <class Part>
struct PartSizes {
    static constexpr int kBlocks = Part::kBlocks, kResident = Part::kResident;
};
template <>
struct PartSizes<void> {
    static constexpr int kBlocks = 0, kResident = 4;
};
template <class Own>
struct RowsTogether {
    static constexpr int kRows = Own::kRows;
};
template <>
struct RowsTogether<void> {
    static constexpr int kRows = 1;
};
template <class U, int N>
struct Lanes {
    static constexpr int kBlocks = N == 1 ? PartSizes<typename U::Part>::kBlocks : 0;
    static constexpr bool kParts = kBlocks > 0;
    static constexpr int kTogether = N == 1 ? RowsTogether<typename U::Own>::kRows : 1;
    static constexpr bool kTables = N == 1 && U::kTable > 0;
    static constexpr bool kHasOwn = N == 1 && !std::is_void_v<typename U::Own>;
    // Rows of a set that a lane has, by address, and all of them.
    static constexpr int kStarts = kParts                                  ? kBlocks / 2
                                   : kTables || (kHasOwn && U::kRows == 1) ? kLaneRows
                                                                           : 1;
    static constexpr int kOwn = kStarts * kTogether;
    static constexpr int kInTurn = kParts ? kPartRows / kStarts : 1;  // plain rows over the lanes
    static constexpr int kLanes = U::kRows / kTogether * kInTurn;     // with different rows
    static constexpr int kRows = kLanes * kOwn;                       // of a set
    static_assert(U::kRows == 1 || !(kParts || kTables));
};

// Blocks per multiprocessor that registers are to suffice for: unasked, the compiler saves some by spilling,
// or, of types with parts, takes more than it needs.
template <class U, int N>
constexpr int kVectorBlocks = N == 1 ? PartSizes<typename U::Part>::kResident : 4;

// What a warp of matvec multiplies: the set of rows number group0 and a second one, of which a lane has
// kStarts each (weight), with N tokens; of the columns part `part`. An inactive warp has no rows and takes
// part in barriers only.
template <class U, int N>
struct VectorWork {
    int part, group0;
    bool active, second;
    const uint8_t* weight[2][Lanes<U, N>::kStarts];
    const uint8_t* x[N];
};

// Row k of the lane's in a set; the last one where there are no more.
template <class U, int N>
__device__ __forceinline__ int lane_row(const Product& p, int group, int k) {
    using L = Lanes<U, N>;
    if (L::kStarts == 1 && L::kInTurn == 1) return group * L::kRows;
    return min(group * L::kRows + k * L::kInTurn + lane_id() % L::kInTurn, p.n_out - 1);
}

template <class U, int N>
__device__ __forceinline__ void begin_work(const Product& p, int row_block, const BlockColumns& block,
                                           VectorWork<U, N>& work) {
    constexpr int kRows = Lanes<U, N>::kRows;
    const int warp = warp_id(), sets = kVectorWarps / p.split, n_groups = (p.n_out + kRows - 1) / kRows;
    const int set = row_block * sets + warp / p.split;
    work.part = warp % p.split;
    work.group0 = p.gate ? set : 2 * set;
    work.active = work.group0 < n_groups;
    work.second = p.gate || work.group0 + 1 < n_groups;
    if (work.active) {
        const long long matrix = block.columns.matrix * p.matrix_bytes;
#pragma unroll
        for (int k = 0; k < Lanes<U, N>::kStarts; ++k) {
            const int row = lane_row<U, N>(p, work.group0, k), second = lane_row<U, N>(p, work.group0 + 1, k);
            work.weight[0][k] = row_group<U>(p.up + matrix, p.row_bytes, row);
            work.weight[1][k] = p.gate        ? row_group<U>(p.gate + matrix, p.row_bytes, row)
                                : work.second ? row_group<U>(p.up + matrix, p.row_bytes, second)
                                              : work.weight[0][k];
        }
    }
#pragma unroll
    for (int c = 0; c < N; ++c)
        work.x[c] = column_at(p, block.columns, block.first + min(c, block.count - 1)).x;
}

// Sums of the lane's rows.
template <class U, int N>
struct VectorSums {
    float of[Lanes<U, N>::kOwn][2][N];
};

// Joins the sums of the lanes that share a row.
template <class U, int N>
__device__ __forceinline__ void join_lanes(const VectorWork<U, N>& work, VectorSums<U, N>& sum) {
    using L = Lanes<U, N>;
#pragma unroll
    for (int i = 0; i < 2 * L::kOwn; ++i)
#pragma unroll
        for (int c = 0; c < N; ++c) {
            float& s = sum.of[i / 2][i % 2][c];
#pragma unroll
            for (int m = 16; m >= L::kLanes; m >>= 1) s += __shfl_xor_sync(kAllLanes, s, m);
            if (work.active) s *= U::row_scale(work.weight[i % 2][i / 2], lane_id() % U::kRows);
        }
}

// partial: the sums of all warps, of which those that share rows are added up.
template <class U, int N>
__device__ __forceinline__ void store_vector(const Product& p, const BlockColumns& block,
                                             const VectorWork<U, N>& work,
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

}  // namespace ikpy::cuda
