// Flash attention on tensor cores: tiles of query rows that share a key head against tiles of cells, with a
// running maximum. Rows of a key head are ordered by token, then head of the group, so one pass over the
// cache serves all heads of a token.
//
// Wm warps side by side take 16 rows each. With Wn = 1 a warp keeps its scores in registers; with Wn > 1 (few
// rows, or heads too long for the registers of one warp) Wn warps share rows: each takes a part of the cells
// for the scores and a part of the columns for the sums, and probabilities go through shared memory.
#pragma once
#include "flash_sums.cuh"

namespace ikpy::cuda {

// grid (row tiles, key heads, parts). Dynamic shared memory: Flash::kBytes.
template <int Dk, int Dv, int Wm, int Wn, int Cells, bool VInK, Biases Kind = Biases::kNone>
__device__ __forceinline__ void flash_body(const Attention& a, int v_column) {
    using F = Flash<Dk, Dv, Wm, Wn, Cells, VInK, Kind>;
    IKPY_DYNAMIC_SHARED(memory);
    __shared__ float stat[Wn][F::kRows];
    auto* q = reinterpret_cast<uint16_t*>(memory);
    uint16_t* k = q + F::kBytesQ / 2;
    uint16_t* v = VInK ? k + v_column : k + F::kBytesK / 2;
    uint16_t* probabilities = k + (F::kBytesK + F::kBytesV) / 2;
    FlashThread<F> own;
    own.lane = lane_id();
    own.wm = warp_id() % Wm;
    own.wn = warp_id() / Wm;

    const FlashRows rows = flash_rows<F>(a);
    const FlashHeads heads = flash_heads(a, rows.kv_head);
    load_queries<F>(a, rows, q);
    clear_padding<F>(k);

    int first, last;
    tile_range(a, rows, F::kRows, &first, &last);
    const auto [begin, end] = tiles_of_part<F>(a, first, last);
    begin_rows(a, rows, own);

    // Values arrive while scores are computed, the next keys while values are summed. Values that are a part
    // of the keys allow no such overlap; blocks then overlap each other.
    if (!VInK && begin < end) load_keys<F>(a, heads, begin, last, k);
    for (int tile = begin; tile < end; ++tile) {
        const int c0 = tile * Cells;
        if (VInK) {
            __syncthreads();
            load_keys<F>(a, heads, tile, last, k);
        }
        wait_copies<0>();
        __syncthreads();
        if (!VInK) {
            load_cells<F>(a.v, a.v_type, heads.v, c0, last, Dv, v, F::kStrideV);
            commit_copies();
        }
        FlashScores<F> scores;
        multiply_keys(own, q, k, scores);
        float top[2] = {own.maximum[0], own.maximum[1]};
        mask_scores(a, own, c0, last, scores, top);
        join_maximum(own, top, stat);
        weigh(own, top, scores);
        if (Wn > 1) {
            store_probabilities(own, scores, probabilities);
            if (VInK) __syncthreads();
        }
        if (!VInK) {
            wait_copies<0>();
            __syncthreads();
            if (tile + 1 < end) load_keys<F>(a, heads, tile + 1, last, k);
        }
        add_values(own, scores, probabilities, v);
    }
    join_denominators(own, stat);
    store_rows(a, rows, own);
}

}  // namespace ikpy::cuda

// Blocks: how many shall fit a multiprocessor; without it the compiler may save registers by spilling.
#define IKPY_FLASH(name, Dk, Dv, Wm, Wn, Cells, VInK, Blocks)                                         \
    IKPY_KERNEL __launch_bounds__(32 * Wm * Wn, Blocks) name(ikpy::cuda::Attention a, int v_column) { \
        ikpy::cuda::flash_body<Dk, Dv, Wm, Wn, Cells, VInK>(a, v_column);                             \
    }                                                                                                 \
    IKPY_EXPORT(name)
// With biases.
#define IKPY_FLASH_BIASED(name, Kind, D, Wm, Wn, Cells, Blocks)                                       \
    IKPY_KERNEL __launch_bounds__(32 * Wm * Wn, Blocks) name(ikpy::cuda::Attention a, int v_column) { \
        ikpy::cuda::flash_body<D, D, Wm, Wn, Cells, false, ikpy::cuda::Biases::Kind>(a, v_column);    \
    }                                                                                                 \
    IKPY_EXPORT(name)
