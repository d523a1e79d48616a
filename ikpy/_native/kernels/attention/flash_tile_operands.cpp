// Queries and tiles of K and V as the products of the tile kernel want them.
#include <algorithm>

#include "kernels/attention/flash_pack.hpp"
#include "kernels/attention/flash_tile.hpp"

namespace ikpy {
namespace row_tiles {

namespace {

// Queries of the lanes from m on, so that halves keep their bits.
void scale_q(const AttentionArgs& a, const TileBuffers& b, int64_t m) {
    float* const q = b.q + b.lane(m, a.dk);
    const simd::V scale = flash::half_scale(q, 16, a.dk);
    flash::scale_lanes(q, a.dk, scale);
    simd::store(b.factor + m, simd::div(simd::set1(1.0f), scale));
}

// K of halves that are multiplied as they are stored.
void load_k_halves(const AttentionArgs& a, const Tile& tile, int64_t c0, int64_t n, const TileBuffers& b) {
    const int64_t ld = round_up(a.dk, kDepth);
    flash::copy_halves(row<uint8_t>(*a.k, tile.kv_head, c0), a.k->nb[2], n, a.d0, b.k2.hi, ld);
    if (a.k1) {
        flash::copy_halves(row<uint8_t>(*a.k1, a.k1_head(tile.kv_head), c0), a.k1->nb[2], n, a.d1,
                           b.k2.hi + a.d0, ld);
    }
    for (int64_t c = 0; c < n; ++c) std::fill(b.k2.hi + c * ld + a.dk, b.k2.hi + (c + 1) * ld, uint16_t(0));
}

// What the biases of the scores of all lanes need. Scores of lanes without a row stay as they are.
void pack_slopes(const AttentionArgs& a, const Tile& tile, const TileBuffers& b) {
    for (int64_t m = 0; m < b.lanes; ++m) {
        const int64_t r = tile.first_row + m;
        const bool is_row = m < tile.n_rows;
        const int64_t head = is_row ? a.head_of(tile.kv_head, r) : 0;
        if (a.biases) {
            b.slope[m] = float(a.biases_of(head) - a.biases_of(0));
        } else {
            b.slope[m] = is_row ? a.slope(head) : 0.0f;
        }
        b.position[m] = is_row ? a.position(a.token_of(r)) : 0.0f;
    }
}

}  // namespace

void pack_q(const AttentionArgs& a, const Tile& tile, const TileBuffers& b) {
    if (a.biased()) pack_slopes(a, tile, b);
    for (int64_t m = 0; m < b.lanes; m += 16) {
        const float* rows[16];
        for (int64_t i = 0; i < 16; ++i) {
            rows[i] = m + i < tile.n_rows ? a.q_row(tile.kv_head, tile.first_row + m + i) : nullptr;
        }
        float* const q = b.q + b.lane(m, a.dk);
        flash::rows_to_lanes(rows, a.dk, a.q_factor(), q, b.row);
        if (!b.q2.hi) continue;
        if (b.k_factors == TileFactors::kF16) scale_q(a, b, m);
        const int64_t depth = round_up(a.dk, kDepth);
        flash::split_pairs(b.k_factors, q, a.dk, depth, offset(b.q2, m * depth));
    }
}

void load_k_tile(const AttentionArgs& a, const Tile& tile, int64_t c0, int64_t n, const TileBuffers& b) {
    if (b.k_stored) return load_k_halves(a, tile, c0, n, b);
    a.load_k(row<uint8_t>(*a.k, tile.kv_head, c0), a.k->nb[2], n, a.d0, b.k, b.ldk);
    if (a.k1) {
        a.load_k1(row<uint8_t>(*a.k1, a.k1_head(tile.kv_head), c0), a.k1->nb[2], n, a.d1, b.k + a.d0, b.ldk);
    }
    std::fill(b.k + n * b.ldk, b.k + std::min<int64_t>(kTileCells, round_up(n, kPad)) * b.ldk, 0.0f);
    if (b.k2.hi) flash::split_rows(b.k, b.ldk, n, a.dk, b.k2, round_up(a.dk, kDepth));
}

void load_v_tile(const AttentionArgs& a, const Tile& tile, int64_t c0, int64_t n, const TileBuffers& b) {
    const uint8_t* const v = row<uint8_t>(*a.v, a.v_head(tile.kv_head), c0);
    if (b.v_stored) return flash::transpose_halves(v, a.v->nb[2], n, a.dv, b.v2.hi, kTileCells);
    if (!a.v_in_k) a.load_v(v, a.v->nb[2], n, a.dv, b.v, b.ldv);
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
