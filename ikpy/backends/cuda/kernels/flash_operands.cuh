// Queries and tiles of cells of any cache type as f16 in shared memory.
#pragma once
#include "cell_pieces.cuh"
#include "flash_rows.cuh"

namespace ikpy::cuda {

// Pieces of a tile of cells, numbered by row; zeros from cell `last` on.
struct CellRows {
    const View& v;
    int head, c0, last, per_row, stride;

    __device__ __forceinline__ CellPiece piece(int i) const {
        const int c = i / per_row, e = i % per_row * 8;
        return {v.row<const uint8_t>(head, min(c0 + c, last - 1)), e, c * stride + e, c0 + c < last};
    }
};

// Rows of a type that its kind of pieces converts. All loads of a batch are asked for before one is waited
// for: a piece at a time, a multiprocessor would have a few KiB under way, a fifth of what the memory of
// large devices wants.
template <class F, class Piece>
__device__ __forceinline__ void load_pieces_of_cells(const CellRows& rows, int type, uint16_t* to) {
    const int n = F::kCells * rows.per_row;
#pragma unroll 1
    for (int i0 = threadIdx.x; i0 < n; i0 += F::kLoads * F::kThreads) {
        Piece pieces[F::kLoads];
        int place[F::kLoads];
#pragma unroll
        for (int b = 0; b < F::kLoads; ++b) {
            const int i = i0 + b * F::kThreads;
            const CellPiece piece = rows.piece(min(i, n - 1));
            pieces[b] = Piece(type, piece);
            place[b] = i < n ? piece.to : -1;
        }
#pragma unroll
        for (int b = 0; b < F::kLoads; ++b)
            if (place[b] >= 0) pieces[b].store(type, to + place[b]);
    }
}

// Elements of a tile of cells from c0 on to rows of `to`; zeros from cell `last` on. Short: rows that are too
// short for several pieces per thread.
template <class F, bool Short = false>
__device__ __forceinline__ void load_cells(const View& v, int type, int head, int c0, int last, int length,
                                           uint16_t* to, int stride) {
    const CellRows rows{v, head, c0, last, length / 8, stride};
    if (F::kLoads > 1 &&
        with_piece_kind(type, [&](auto kind) { load_pieces_of_cells<F, decltype(kind)>(rows, type, to); }))
        return;
    for (int i = threadIdx.x; i < F::kCells * rows.per_row; i += F::kThreads) {
        const CellPiece piece = rows.piece(i);
        copy8(type, piece, to + piece.to);
    }
}

// Cache heads that belong to the key head of a block.
struct FlashHeads {
    int k, k1, v;
};

__device__ __forceinline__ FlashHeads flash_heads(const Attention& a, int kv_head) {
    return {kv_head, a.k1.data ? kv_head * a.k1.ne[1] / a.k.ne[1] : 0, kv_head * a.v.ne[1] / a.k.ne[1]};
}

// Queries times the factor of the scores, as f16; zeros beyond the last row and the head size.
template <class F>
__device__ __forceinline__ void load_queries(const Attention& a, const FlashRows& rows, uint16_t* q) {
    const float factor = a.softcap != 0.0f ? a.scale / a.softcap : a.scale * kLog2e;
    for (int i = threadIdx.x; i < F::kRows * F::kDk / 2; i += F::kThreads) {
        const int r = i / (F::kDk / 2), e = i % (F::kDk / 2) * 2, row = rows.row0 + r;
        unsigned pair = 0;
        if (row < rows.n_rows && e < F::kHeadK) {
            const float* x = a.q.row<const float>(rows.head(row), rows.token(row)) + e;
            pair = pack_f16(to_f16_range(factor * x[0]), to_f16_range(factor * x[1]));
        }
        *reinterpret_cast<unsigned*>(q + r * F::kStrideK + e) = pair;
    }
}

// Columns of the keys' tile behind the head size, which no copy writes.
template <class F>
__device__ __forceinline__ void clear_padding(uint16_t* k) {
    constexpr int kPadding = F::kDk - F::kHeadK;
    if constexpr (kPadding > 0) {
        for (int i = threadIdx.x; i < F::kCells * kPadding; i += F::kThreads)
            k[i / kPadding * F::kStrideK + F::kHeadK + i % kPadding] = 0;
    }
}

// Starts to copy a tile of keys, of both segments.
template <class F>
__device__ __forceinline__ void load_keys(const Attention& a, const FlashHeads& heads, int tile, int last,
                                          uint16_t* k) {
    const int d0 = a.k.ne[0], c0 = tile * F::kCells;
    load_cells<F>(a.k, a.k_type, heads.k, c0, last, d0, k, F::kStrideK);
    // Only latent attention has keys of two segments; behind expanded keys the second is the short one.
    if (F::kHeadK != F::kHeadV && a.k1.data)
        load_cells<F, !F::kVInK>(a.k1, a.k1_type, heads.k1, c0, last, F::kHeadK - d0, k + d0, F::kStrideK);
    commit_copies();
}

}  // namespace ikpy::cuda
