// Sizes of the tile kernel: rows per tile, ranges of cells, work memory.
#include <algorithm>
#include <cstring>

#include "kernels/attention/flash_dots.hpp"
#include "kernels/attention/flash_tile.hpp"
#include "kernels/weights/weight_kernels.hpp"

namespace ikpy {
namespace row_tiles {
namespace {

constexpr int64_t kFewTiles = 4;
constexpr int64_t kFewRowTiles = 16;  // up to so many of a K head are made smaller
// Drafts and slots gain from products that round as those of single tokens do.
constexpr int64_t kDotTokens = kTileMinTokens;

// Whether K or V, in one or two segments, is stored as this type.
bool stored_as(int type, const Tensor* x, const Tensor* x1 = nullptr) {
    return x->type == type && (!x1 || x1->type == type);
}

// The same with either segment.
bool any_stored_as(int type, const Tensor* x, const Tensor* x1 = nullptr) {
    return x->type == type || (x1 && x1->type == type);
}

// Rounding to bf16 loses less than what all types but f32 and f16 have lost already.
bool uses_dots(const AttentionArgs& a) {
    if (has_amx() || a.n_tokens < kDotTokens || !flash::multiplies_bf16()) return false;
    for (int type : {kF32, kF16})
        if (any_stored_as(type, a.k, a.k1) || any_stored_as(type, a.v)) return false;
    return true;
}

// Split halves keep 16 significant bits: enough for every cache type but f32.
bool uses_halves(const AttentionArgs& a) {
    return has_amx() ? !any_stored_as(kF32, a.k, a.k1) && !any_stored_as(kF32, a.v) : uses_dots(a);
}

int64_t least_tile_rows(const AttentionArgs& a) { return uses_halves(a) ? kWideTileRows / 2 : kTileRows; }

// A tile unit has to split K and V once per row tile: the more rows the better, while all of it stays in the
// second-level cache and there are a few tiles. Without flash attention all scores of a row are stored, too.
// More rows never make fewer tiles, which the sizes of memory rely on.
int64_t tile_rows(const AttentionArgs& a) {
    const int64_t least = least_tile_rows(a);
    if (!uses_halves(a) || a.dk + a.dv > 512 || !a.flash) return least;
    return std::clamp<int64_t>(round_up((a.rows_per_kv_head() + kFewTiles - 1) / kFewTiles, 16), least,
                               kWideTileRows);
}

// Rows per tile with which the last of many threads to end has least to do; the time of a tile goes with its
// rows (AVX2, 16 to 128 rows of 576 columns).
int64_t lanes_for_threads(const AttentionArgs& a, const TilePlan& plan, int n_threads) {
    const auto busiest = [&](int64_t lanes) {
        const int64_t tiles = (a.rows_per_kv_head() + lanes - 1) / lanes;
        return (tiles * a.n_kv_heads * plan.splits + n_threads - 1) / n_threads * (lanes + 1);
    };
    int64_t best = plan.lanes;
    for (int64_t lanes = best - 16; lanes > 0; lanes -= 16)
        if (busiest(lanes) < busiest(best)) best = lanes;
    return best;
}

// The most tokens that meet the smaller tiles of floats even where more do not.
AttentionArgs few_tokens(const AttentionArgs& a) { return a.part(0, std::min(a.n_tokens, kDotTokens - 1)); }

// Rows of the output matrix: whole register blocks and whole tiles.
int64_t output_rows(const AttentionArgs& a) { return round_up(round_up(a.dv, kPad), 16); }

// Floats that hold the operands of tile products: two halves per value.
int64_t half_floats(const AttentionArgs& a, int64_t lanes) {
    if (!uses_halves(a)) return 0;
    return (round_up(a.dk, kDepth) + kTileCells) * lanes +
           kTileCells * (round_up(a.dk, kDepth) + round_up(a.dv, 16)) + 8 * 16;
}

int64_t buffer_floats(const AttentionArgs& a, int64_t lanes, int64_t n_kv_max) {
    const int64_t cells = a.flash ? kTileCells : round_up(n_kv_max, kTileCells);
    const int64_t tiles = std::max(plan_tiles(a, 1).tiles, plan_tiles(few_tokens(a), 1).tiles);
    const int64_t most_tiles = std::max(tiles, std::min(4 * tiles, 4 * kFewRowTiles));
    const int64_t known_bytes = most_tiles * (n_kv_max / kTileCells + 1);
    return known_bytes / 4 + 1 + a.dk * lanes +
           kTileCells * (round_up(a.dk, 16) + round_up(a.dv, kPad) + 64) + cells * lanes +
           output_rows(a) * lanes + (6 + kWords) * lanes + 10 * 16 + (a.biased() ? 2 * lanes + 32 : 0) +
           half_floats(a, lanes);
}

float* take(float*& at, int64_t n) {
    float* p = at;
    at += round_up(n, 16);
    return p;
}

TileFactors factors_of(bool dots, const Tensor* x, const Tensor* x1 = nullptr) {
    if (dots) return TileFactors::kBf16;
    return has_amx_halves() && stored_as(kF16, x, x1) ? TileFactors::kF16 : TileFactors::kSplit;
}

// Whether operands are halves as they are stored.
bool as_stored(TileFactors factors, const Tensor* x, const Tensor* x1 = nullptr) {
    return factors == TileFactors::kF16 || stored_as(kBF16, x, x1);
}

// n values in two halves, or in one.
flash::Halves take_halves(float*& at, int64_t n, bool low = true) {
    auto* p = reinterpret_cast<uint16_t*>(take(at, n));
    return {p, low ? p + n : nullptr};
}

// Columns that fill up whole register blocks are multiplied like all others. What other ops left there may be
// subnormal numbers, each product with which takes some 150 cycles.
void clear_padding(const AttentionArgs& a, const TileBuffers& b) {
    for (int64_t c = 0; c < kTileCells; ++c) std::fill(b.k + c * b.ldk + a.dk, b.k + (c + 1) * b.ldk, 0.0f);
    std::fill_n(b.k + kTileCells * b.ldk, 32, 0.0f);
    for (int64_t c = 0; c < kTileCells && !a.v_in_k; ++c)
        std::fill(b.v + c * b.ldv + a.dv, b.v + (c + 1) * b.ldv, 0.0f);
}

}  // namespace

TileBuffers layout(uint8_t* scratch, const AttentionArgs& a, const TilePlan& plan) {
    const int64_t lanes = plan.lanes;
    TileBuffers b;
    float* at = reinterpret_cast<float*>(scratch);
    b.lanes = lanes;
    b.row = uses_halves(a) ? 16 : lanes;
    b.s_rows = a.flash ? kTileCells : round_up(a.n_kv, kTileCells);
    b.o_rows = output_rows(a);
    b.ldk = round_up(a.dk, 16);
    b.ldv = a.v_in_k ? b.ldk : round_up(a.dv, kPad);
    b.q = take(at, a.dk * lanes);
    b.k = take(at, kTileCells * b.ldk + 32);
    b.v = a.v_in_k ? b.k + a.v_column : take(at, kTileCells * b.ldv);
    b.s = take(at, b.s_rows * lanes);
    b.o = take(at, b.o_rows * lanes);
    b.maximum = take(at, lanes);
    b.sum = take(at, lanes);
    b.alpha = take(at, lanes);
    b.factor = take(at, lanes);
    b.slope = a.biased() ? take(at, lanes) : nullptr;
    b.position = a.biased() ? take(at, lanes) : nullptr;
    b.total = reinterpret_cast<double*>(take(at, 2 * lanes));
    b.bits = reinterpret_cast<uint32_t*>(take(at, kWords * lanes));
    std::fill_n(b.factor, lanes, 1.0f);
    b.q2 = b.k2 = b.v2 = b.p2 = {};
    b.k_factors = b.v_factors = TileFactors::kSplit;
    b.k_stored = b.v_stored = false;
    if (uses_halves(a)) {
        const bool dots = uses_dots(a);
        b.k_factors = factors_of(dots, a.k, a.k1);
        b.v_factors = factors_of(dots, a.v);
        b.k_stored = as_stored(b.k_factors, a.k, a.k1);
        b.v_stored = as_stored(b.v_factors, a.v);
        b.q2 = take_halves(at, round_up(a.dk, kDepth) * lanes, !dots);
        b.k2 = take_halves(at, kTileCells * round_up(a.dk, kDepth), !dots && !b.k_stored);
        b.v2 = take_halves(at, kTileCells * round_up(a.dv, 16), !dots && !b.v_stored);
        b.p2 = take_halves(at, kTileCells * lanes, !dots);
    }
    if (!uses_halves(a)) clear_padding(a, b);
    b.kv_tiles = a.n_kv / kTileCells + 1;
    b.known = reinterpret_cast<uint8_t*>(at);
    std::memset(b.known, 0, size_t(plan.tiles * b.kv_tiles));
    return b;
}

}  // namespace row_tiles

TilePlan plan_tiles(const AttentionArgs& a, int n_threads) {
    TilePlan plan;
    const int64_t rows = a.rows_per_kv_head();
    const int64_t most = row_tiles::tile_rows(a);
    plan.tiles = (rows + most - 1) / most;
    plan.lanes = round_up((rows + plan.tiles - 1) / plan.tiles, 16);
    plan.tiles = (rows + plan.lanes - 1) / plan.lanes;
    plan.splits = 1;
    const int64_t items = plan.tiles * a.n_kv_heads;
    if (!a.flash || n_threads == 1 || items >= 2 * n_threads) return plan;
    plan.splits =
        std::clamp<int64_t>((a.n_kv + kTileCells - 1) / kTileCells, 1, (4 * n_threads + items - 1) / items);
    if (n_threads >= kManyThreads && plan.tiles <= row_tiles::kFewRowTiles && !row_tiles::uses_halves(a))
        plan.lanes = row_tiles::lanes_for_threads(a, plan, n_threads);
    plan.tiles = (rows + plan.lanes - 1) / plan.lanes;
    return plan;
}

// Enough for any part of the tokens too, which may take more lanes at once.
size_t tile_scratch_bytes(const AttentionArgs& a, int64_t n_kv_max) {
    const int64_t lanes = std::min(round_up(a.rows_per_kv_head(), 16), row_tiles::tile_rows(a));
    return size_t(row_tiles::buffer_floats(a, lanes, n_kv_max)) * sizeof(float);
}

// The most for any part of the tokens: with as many row tiles as the ranges of cells allow for, all of them
// full, or as many tokens as meet the smaller tiles of floats.
size_t tile_shared_bytes(const AttentionArgs& a, int n_threads) {
    size_t most = 0;
    const auto part_of = [&](int64_t n) {
        const AttentionArgs part = a.part(0, n);
        const TilePlan plan = plan_tiles(part, n_threads);
        if (plan.splits > 1) most = std::max(most, partials_bytes(part, plan.splits));
    };
    for (int64_t least : {int64_t{kTileRows}, row_tiles::least_tile_rows(a)})
        for (int64_t tiles = 1, n = 0; n < a.n_tokens; ++tiles) {
            n = std::clamp<int64_t>(tiles * least / a.heads_per_kv, 1, a.n_tokens);
            part_of(n);
        }
    part_of(row_tiles::few_tokens(a).n_tokens);
    return most;
}

}  // namespace ikpy
