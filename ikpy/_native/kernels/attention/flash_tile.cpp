// Tile kernel: one SIMD lane per (query, head) row, online softmax over tiles of cells.
#include "kernels/attention/flash_tile.hpp"

#include <algorithm>
#include <cstring>

#include "kernels/attention/flash_pack.hpp"

namespace ikpy {
namespace row_tiles {
namespace {

using simd::kLanes;
using simd::V;

void clear_state(const AttentionArgs& a, const TileBuffers& b) {
    std::fill(b.maximum, b.maximum + b.lanes, kNoMaximum);
    std::fill(b.sum, b.sum + b.lanes, 0.0f);
    std::fill(b.total, b.total + b.lanes, 0.0);
    std::memset(b.o, 0, size_t(b.o_rows * b.lanes) * sizeof(float));
}

// Cells [first, last), a part of the row tile's range that starts at origin.
void run_flash(const AttentionArgs& a, const Tile& tile, int64_t origin, int64_t first, int64_t last,
               const TileBuffers& b) {
    for (int64_t c0 = first; c0 < last; c0 += kTileCells) {
        const int64_t n = std::min<int64_t>(kTileCells, last - c0);
        const Visibility seen = tile_visibility(a, tile, (c0 - origin) / kTileCells, c0, n, b);
        if (seen == Visibility::kNone) continue;
        Part parts[kWideTileRows / 16] = {{0, b.lanes, 0, n}};
        const int n_parts = seen == Visibility::kAll ? 1 : visible_parts(b, parts);
        flash::Prefetch next_v = v_rows(a, tile, c0, n), next_k = k_rows(a, tile, c0 + n, last);
        load_k_tile(a, tile, c0, n, b);
        for (int i = 0; i < n_parts; ++i) {
            scores(b, a.dk, parts[i], b.s, next_v);
            online_softmax(a, b, parts[i], c0, seen != Visibility::kAll);
        }
        load_v_tile(a, tile, c0, n, b);
        for (int i = 0; i < n_parts; ++i) outputs(b, a.dv, parts[i], b.s, next_k);
    }
    for (int64_t m = 0; m < b.lanes; ++m) b.total[m] = double(b.sum[m]);
}

// First pass of the full softmax: all scores and their maxima.
void full_scores(const AttentionArgs& a, const Tile& tile, int64_t first, int64_t last,
                 const TileBuffers& b) {
    for (int64_t c0 = first; c0 < last; c0 += kTileCells) {
        const Part part{0, b.lanes, 0, std::min<int64_t>(kTileCells, last - c0)};
        float* s = b.s + (c0 - first) * b.row;
        const bool masked = tile_visibility(a, tile, c0, part.end, b) != Visibility::kAll;
        flash::Prefetch next = k_rows(a, tile, c0 + part.end, last);
        load_k_tile(a, tile, c0, part.end, b);
        scores(b, a.dk, part, s, next);
        for (int64_t m = 0; m < b.lanes; m += kLanes) {
            const V top = finish_scores(a, s + b.lane(m, b.s_rows), b, part, m, c0, masked);
            simd::store(b.maximum + m, simd::max(simd::load(b.maximum + m), top));
        }
    }
}

// Full softmax over materialized scores of the row tile: one maximum, sums in double.
void run_full(const AttentionArgs& a, const Tile& tile, int64_t first, int64_t last, const TileBuffers& b) {
    full_scores(a, tile, first, last, b);
    for (int64_t m = 0; m < b.lanes; ++m) b.maximum[m] -= b.lift();
    full_weights(b, last - first);
    std::fill(b.alpha, b.alpha + b.lanes, 1.0f);
    for (int64_t c0 = first; c0 < last; c0 += kTileCells) {
        const Part part{0, b.lanes, 0, std::min<int64_t>(kTileCells, last - c0)};
        const int64_t c1 = c0 + part.end;
        flash::Prefetch next = v_rows(a, tile, c1, std::min<int64_t>(kTileCells, last - c1));
        if (a.v_in_k) load_k_tile(a, tile, c0, part.end, b);
        load_v_tile(a, tile, c0, part.end, b);
        const float* weights = b.s + (c0 - first) * b.row;
        for (int64_t m = 0; b.p2.hi && m < b.lanes; m += kLanes)
            flash::split_pairs(b.v_factors, weights + b.lane(m, b.s_rows), part.end,
                               round_up(part.end, kDepth), offset(b.p2, m * kTileCells));
        outputs(b, a.dv, part, weights, next);
    }
}

// Rows of the tile to where `place` puts them, times b.alpha.
template <typename Place>
void write_rows(const AttentionArgs& a, const Tile& tile, const TileBuffers& b, Place place) {
    for (int64_t m = 0; m < tile.n_rows; m += 16) {
        float* rows[16];
        for (int64_t i = 0; i < 16; ++i)
            rows[i] = m + i < tile.n_rows ? place(tile.first_row + m + i) : nullptr;
        flash::lanes_to_rows(b.o + b.lane(m, b.o_rows), b.row, a.dv, b.alpha + m, rows);
    }
}

void write_output(const AttentionArgs& a, const Tile& tile, const TileBuffers& b) {
    for (int64_t m = 0; m < tile.n_rows; ++m) {
        b.alpha[m] = normalizer(a, a.head_of(tile.kv_head, tile.first_row + m), b.maximum[m], b.total[m]);
    }
    write_rows(a, tile, b, [&](int64_t r) { return a.out_row(a.head_of(tile.kv_head, r), a.token_of(r)); });
}

void write_partial(const AttentionArgs& a, const Tile& tile, const TileBuffers& b, const Partials& p) {
    const int64_t first = tile.kv_head * a.rows_per_kv_head();
    std::fill(b.alpha, b.alpha + b.lanes, 1.0f);
    write_rows(a, tile, b, [&](int64_t r) { return p.acc_row(tile.part, first + r); });
    for (int64_t m = 0; m < tile.n_rows; ++m) {
        p.max_of(tile.part, first + tile.first_row + m) = b.maximum[m];
        p.sum_of(tile.part, first + tile.first_row + m) = b.sum[m];
    }
}

void run_tile(const AttentionArgs& a, const TilePlan& plan, const Tile& tile, const TileBuffers& b,
              const Partials& partials) {
    int64_t first, last, begin, end;
    covered_cells(a, a.token_of(tile.first_row), a.token_of(tile.first_row + tile.n_rows - 1) + 1, &first,
                  &last);
    split_range(last - first, int(tile.part), int(plan.splits), kTileCells, &begin, &end);
    pack_q(a, tile, b);
    clear_state(a, b);
    if (a.flash) {
        run_flash(a, tile, first, first + begin, first + end, b);
    } else {
        run_full(a, tile, first + begin, first + end, b);
    }
    if (plan.splits > 1) {
        write_partial(a, tile, b, partials);
    } else {
        write_output(a, tile, b);
    }
}

}  // namespace
}  // namespace row_tiles

void attention_tiles(const ThreadContext& ctx, const AttentionArgs& a) {
    using namespace row_tiles;
    const TilePlan plan = plan_tiles(a, ctx.nth);
    const TileBuffers buffers = layout(ctx.scratch, a, plan);
    const Partials partials = partials_at(ctx.shared, a, plan.splits);
    const int64_t items = plan.tiles * a.n_kv_heads * plan.splits;
    const bool tiles = buffers.k2.hi && buffers.k_factors != TileFactors::kBf16;
    if (tiles) flash::begin_tiles();
    for (int64_t i; (i = ctx.counters[0].fetch_add(1, std::memory_order_relaxed)) < items;) {
        Tile tile;
        tile.part = i % plan.splits;
        // One K head after the other, so that its cells stay in cache; later queries see more cells, and the
        // short tiles left for the end even out the threads.
        tile.kv_head = i / plan.splits / plan.tiles;
        const int64_t t = plan.tiles - 1 - i / plan.splits % plan.tiles;
        tile.index = t;
        tile.first_row = t * plan.lanes;
        tile.n_rows = std::min(plan.lanes, a.rows_per_kv_head() - tile.first_row);
        run_tile(a, plan, tile, buffers, partials);
    }
    if (tiles) flash::end_tiles();
    if (plan.splits > 1) {
        ctx.sync();
        combine_partials(ctx, a, partials);
    }
}

}  // namespace ikpy
