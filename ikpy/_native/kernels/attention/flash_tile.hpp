// Inner parts of the tile kernel: one SIMD lane per (query, head) row, online softmax over tiles of cells.
#pragma once
#include "kernels/attention/flash_amx.hpp"
#include "kernels/attention/flash_attention.hpp"
#include "kernels/attention/flash_prefetch.hpp"

namespace ikpy {
namespace row_tiles {

constexpr int64_t kPad = 24;  // a multiple of every block height
constexpr int kWords = (kTileCells + 31) / 32;
constexpr int64_t kDepth = 32;  // cells or head dims per tile product
static_assert(kTileCells % kDepth == 0, "tiles of cells are whole tile products");

// Work memory of one thread. K and V are row-major; matrices of lanes are, too, but a tile unit wants 16
// lanes at a time: [lanes / 16][rows][16], so that no load of a tile meets lines of the same few sets of the
// caches.
struct TileBuffers {
    float *q, *k, *v, *s, *o, *maximum, *sum, *alpha;
    float* factor;  // what scores still lack: queries may be scaled
    // Of every lane where scores have biases, else null: the slope, or where the biases of the head begin (as
    // a number of floats behind those of head 0), and the position of the token.
    float *slope, *position;
    double* total;
    uint32_t* bits;                // [kWords][lanes]
    uint8_t* known;                // [row tiles][K/V tiles]: 0 or 1 + Visibility, the same for every K head
    flash::Halves q2, k2, v2, p2;  // operands of tile products, null without a tile unit
    TileFactors k_factors, v_factors;  // of both products
    bool k_stored, v_stored;           // operands are halves as they are stored
    int64_t kv_tiles;
    int64_t ldk, ldv, lanes;
    int64_t row;             // from a row of a matrix of lanes to the next
    int64_t s_rows, o_rows;  // of the scores and of the output

    // How far weights are lifted above 2^(score - maximum).
    float lift() const { return v_factors == TileFactors::kF16 ? flash::kHalfLift : 0.0f; }
    // Where lane m, the first of a vector, of a matrix of n_rows rows starts.
    int64_t lane(int64_t m, int64_t n_rows) const { return row == lanes ? m : m * n_rows; }
};

// Lanes [m, m + lanes) against the cells [begin, end) of the tile at hand.
struct Part {
    int64_t m, lanes, begin, end;
};

struct Tile {
    int64_t kv_head, index, first_row, n_rows, part;
};

enum class Visibility { kNone, kSome, kAll };

inline flash::Halves offset(const flash::Halves& h, int64_t n) {
    return {h.hi + n, h.lo ? h.lo + n : nullptr};
}

// memory
TileBuffers layout(uint8_t* scratch, const AttentionArgs& a, const TilePlan& plan);

// operands
void pack_q(const AttentionArgs& a, const Tile& tile, const TileBuffers& b);
// The cells [c0, c0 + n).
void load_k_tile(const AttentionArgs& a, const Tile& tile, int64_t c0, int64_t n, const TileBuffers& b);
void load_v_tile(const AttentionArgs& a, const Tile& tile, int64_t c0, int64_t n, const TileBuffers& b);
// Tiles to fetch ahead; the segment of K shared by all heads is small and left to the hardware.
flash::Prefetch k_rows(const AttentionArgs& a, const Tile& tile, int64_t c0, int64_t last);
flash::Prefetch v_rows(const AttentionArgs& a, const Tile& tile, int64_t c0, int64_t n);

// products
void scores(const TileBuffers& b, int64_t dk, const Part& part, float* s, flash::Prefetch& next);
// p: the weights, which are in p2 with a tile unit.
void outputs(const TileBuffers& b, int64_t dv, const Part& part, const float* p, flash::Prefetch& next);

// visibility
// Visibility of the cells [c0, c0 + n); fills bits[w][lane] unless all rows see all or none of them.
Visibility tile_visibility(const AttentionArgs& a, const Tile& tile, int64_t c0, int64_t n,
                           const TileBuffers& b);
// The same for the i-th tile of the row tile's range, reading the mask again only where the bits are needed.
Visibility tile_visibility(const AttentionArgs& a, const Tile& tile, int64_t i, int64_t c0, int64_t n,
                           const TileBuffers& b);
// Splits a partly visible tile into groups of 16 lanes, each with the cells that any of its rows sees.
// Neighbours whose cells end nearly together make one part: products of 32 lanes take less than two of 16.
int visible_parts(const TileBuffers& b, Part* parts);

// softmax
// Soft cap, bias and mask on the scores of the lanes from m on against the tile that starts at cell c0, which
// keep lacking b.factor; returns their maximum times it.
simd::V finish_scores(const AttentionArgs& a, float* s, const TileBuffers& b, const Part& part, int64_t m,
                      int64_t c0, bool masked);
// Turns scores into weights (in p2 with a tile unit, else in place), updates maximum, sum and alpha of every
// lane.
void online_softmax(const AttentionArgs& a, const TileBuffers& b, const Part& part, int64_t c0, bool masked);
// All scores of n_cells cells into weights relative to b.maximum, in place; adds them to the totals.
void full_weights(const TileBuffers& b, int64_t n_cells);

}  // namespace row_tiles
}  // namespace ikpy
