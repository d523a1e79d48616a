// Sizes of a flash attention kernel, and the query rows and cells that its blocks take.
#pragma once
#include "attention.cuh"

namespace ikpy::cuda {

constexpr float kNoMaximum = -1e30f;  // below any score, and finite

// What scores get by the distance of positions: nothing, a multiple of it (ALiBi), a number of a table (T5).
enum class Biases { kNone, kLinear, kTable };

// Wm warps side by side, each with 16 rows; Wn warps share these and the cells of a tile. VInK: values are a
// part of the key rows.
template <int Dk, int Dv, int Wm, int Wn, int Cells, bool VInK, Biases Kind = Biases::kNone>
struct Flash {
    static constexpr int kHeadK = Dk, kHeadV = Dv, kWn = Wn, kCells = Cells;
    static constexpr bool kVInK = VInK;
    static constexpr Biases kBiases = Kind;
    static constexpr int kDk = (Dk + 31) / 32 * 32, kRows = 16 * Wm, kThreads = 32 * Wm * Wn;
    // Rows of 16-bit elements; 8 more than the length keep ldmatrix free of bank conflicts.
    static constexpr int kStrideK = kDk + 8, kStrideV = Dv + 8, kStrideP = Cells + 8;
    static constexpr int kBytesQ = kRows * kStrideK * 2, kBytesK = Cells * kStrideK * 2;
    static constexpr int kBytesV = VInK ? 0 : Cells * kStrideV * 2,
                         kBytesP = Wn > 1 ? kRows * kStrideP * 2 : 0;
    static constexpr int kBytes = kBytesQ + kBytesK + kBytesV + kBytesP;
    // Pieces of rows that a thread has under way: few rows wait for memory, many have no registers left. A
    // tile is a multiple of them for most head sizes.
    static constexpr int kPieces = Cells * Dk / 8 / kThreads;
    static constexpr int kLoads = Wm > 1 ? 1 : kPieces % 6 == 0 ? 6 : kPieces % 5 == 0 ? 5 : 4;
    static constexpr int kScoreTiles = Cells / 8 / Wn;        // of 8 cells, per warp
    static constexpr int kSumTiles = (Dv / 8 + Wn - 1) / Wn;  // of 8 columns, per warp
    static_assert(Cells / 8 % Wn == 0 && Dv % 8 == 0 && Cells % 32 == 0, "tiles");
};

// The rows of a key head, ordered by token, then head of the group; a block takes those from row0 on.
struct FlashRows {
    int heads, tokens, per_kv, kv_head, row0, n_rows;
    __device__ int head(int r) const { return kv_head * per_kv + r % per_kv; }
    __device__ int token(int r) const { return r / per_kv; }
};

template <class F>
__device__ __forceinline__ FlashRows flash_rows(const Attention& a) {
    FlashRows rows;
    rows.heads = a.q.ne[1];
    rows.tokens = a.q.ne[2];
    rows.per_kv = rows.heads / a.k.ne[1];
    rows.kv_head = blockIdx.y;
    rows.row0 = blockIdx.x * F::kRows;
    rows.n_rows = rows.per_kv * rows.tokens;
    return rows;
}

// Cells that any row of the tile may see, given to all threads.
__device__ __forceinline__ void tile_range(const Attention& a, const FlashRows& rows, int tile_rows,
                                           int* first, int* last) {
    const int t0 = rows.token(rows.row0), t1 = rows.token(min(rows.row0 + tile_rows, rows.n_rows) - 1);
    const int n = n_cells(a);
    float low = 0.0f, high = 0.0f;  // cell numbers are exact in f32
    for (int t = t0 + threadIdx.x; t <= t1; t += blockDim.x) {
        int f, l;
        cell_range(a, t, &f, &l);
        if (f < l) {
            low = fmaxf(low, static_cast<float>(n - f));
            high = fmaxf(high, static_cast<float>(l));
        }
    }
    *first = n - static_cast<int>(block_max(low));
    *last = static_cast<int>(block_max(high));
}

// Tiles of cells from begin to end.
struct TileSpan {
    int begin, end;
};

// The share of a block's part in those of the cells from first to last.
template <class F>
__device__ __forceinline__ TileSpan tiles_of_part(const Attention& a, int first, int last) {
    const int tile0 = first / F::kCells;
    const int n_tiles = last > first ? (last + F::kCells - 1) / F::kCells - tile0 : 0;
    const int share = (n_tiles + a.n_parts - 1) / a.n_parts, begin = tile0 + blockIdx.z * share;
    return {begin, min(tile0 + n_tiles, begin + share)};
}

}  // namespace ikpy::cuda
