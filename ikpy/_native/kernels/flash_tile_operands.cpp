// Queries and tiles of K and V as the products of the tile kernel want them.
#include <algorithm>

#include "kernels/flash_pack.hpp"
#include "kernels/flash_tile.hpp"

namespace ikpy {
namespace row_tiles {

void pack_q(const AttentionArgs& a, const Tile& tile, const TileBuffers& b) {
    for (int64_t m = 0; m < b.lanes; m += 16) {
        const float* rows[16];
        for (int64_t i = 0; i < 16; ++i) {
            rows[i] = m + i < tile.n_rows ? a.q_row(tile.kv_head, tile.first_row + m + i) : nullptr;
        }
        float* const q = b.q + b.lane(m, a.dk);
        flash::rows_to_lanes(rows, a.dk, a.q_factor(), q, b.row);
        const int64_t depth = round_up(a.dk, kDepth);
        if (b.q2.hi) flash::split_pairs(q, a.dk, depth, offset(b.q2, m * depth));
    }
}

void load_k_tile(const AttentionArgs& a, const Tile& tile, int64_t c0, int64_t n, const TileBuffers& b) {
    a.load_k(row<uint8_t>(*a.k, tile.kv_head, c0), a.k->nb[2], n, a.d0, b.k, b.ldk);
    if (a.k1) {
        a.load_k1(row<uint8_t>(*a.k1, a.k1_head(tile.kv_head), c0), a.k1->nb[2], n, a.d1, b.k + a.d0, b.ldk);
    }
    std::fill(b.k + n * b.ldk, b.k + std::min<int64_t>(kTileCells, round_up(n, kPad)) * b.ldk, 0.0f);
    if (b.k2.hi) flash::split_rows(b.k, b.ldk, n, a.dk, b.k2, round_up(a.dk, kDepth));
}

void load_v_tile(const AttentionArgs& a, const Tile& tile, int64_t c0, int64_t n, const TileBuffers& b) {
    if (!a.v_in_k) a.load_v(row<uint8_t>(*a.v, a.v_head(tile.kv_head), c0), a.v->nb[2], n, a.dv, b.v, b.ldv);
    if (b.v2.hi) flash::split_transposed(b.v, b.ldv, n, a.dv, b.v2, kTileCells);
}

flash::Prefetch k_rows(const AttentionArgs& a, const Tile& tile, int64_t c0, int64_t last) {
    const int64_t n = std::max<int64_t>(0, std::min<int64_t>(kTileCells, last - c0));
    return {row<uint8_t>(*a.k, tile.kv_head, c0), a.k->nb[2], a.k_row_bytes, n};
}

flash::Prefetch v_rows(const AttentionArgs& a, const Tile& tile, int64_t c0, int64_t n) {
    return {row<uint8_t>(*a.v, a.v_head(tile.kv_head), c0), a.v->nb[2], a.v_row_bytes, a.v_in_k ? 0 : n};
}

}  // namespace row_tiles

}  // namespace ikpy
