// Tile kernel: one SIMD lane per (query, head) row, online softmax over tiles of cells.
#include <algorithm>
#include <cstring>

#include "kernels/flash_amx.hpp"
#include "kernels/flash_attention.hpp"
#include "kernels/flash_gemm.hpp"
#include "kernels/flash_pack.hpp"

namespace ikpy {
namespace {

using simd::kLanes;
using simd::V;

constexpr int64_t kPad = 24;  // a multiple of every block height
constexpr int kWords = (kTileCells + 31) / 32;
constexpr int64_t kDepth = 32;  // cells or head dims per tile product
constexpr int64_t kFewTiles = 4;
static_assert(kTileCells % kDepth == 0, "tiles of cells are whole tile products");

// Split halves keep 16 significant bits: enough for every cache type but f32.
bool uses_tiles(const AttentionArgs& a) {
    return has_amx() && a.k->type != kF32 && a.v->type != kF32 && (!a.k1 || a.k1->type != kF32);
}

int64_t least_tile_rows(const AttentionArgs& a) { return uses_tiles(a) ? kWideTileRows / 2 : kTileRows; }

// A tile unit has to split K and V once per row tile: the more rows the better, while all of it stays in the
// second-level cache and there are a few tiles. Without flash attention all scores of a row are stored, too.
// More rows never make fewer tiles, which the sizes of memory rely on.
int64_t tile_rows(const AttentionArgs& a) {
    const int64_t least = least_tile_rows(a);
    if (!uses_tiles(a) || a.dk + a.dv > 512 || !a.flash) return least;
    return std::clamp<int64_t>(round_up((a.rows_per_kv_head() + kFewTiles - 1) / kFewTiles, 16), least,
                               kWideTileRows);
}

// Work memory of one thread. K and V are row-major; matrices of lanes are, too, but a tile unit wants 16
// lanes at a time: [lanes / 16][rows][16], so that no load of a tile meets lines of the same few sets of the
// caches.
struct TileBuffers {
    float *q, *k, *v, *s, *o, *maximum, *sum, *alpha;
    double* total;
    uint32_t* bits;                // [kWords][lanes]
    uint8_t* known;                // [row tiles][K/V tiles]: 0 or 1 + Visibility, the same for every K head
    flash::Halves q2, k2, v2, p2;  // operands of tile products, null without a tile unit
    int64_t kv_tiles;
    int64_t ldk, ldv, lanes;
    int64_t row;             // from a row of a matrix of lanes to the next
    int64_t s_rows, o_rows;  // of the scores and of the output

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

// Rows of the output matrix: whole register blocks and whole tiles.
int64_t output_rows(const AttentionArgs& a) { return round_up(round_up(a.dv, kPad), 16); }

// Floats that hold the operands of tile products: two halves per value.
int64_t half_floats(const AttentionArgs& a, int64_t lanes) {
    if (!uses_tiles(a)) return 0;
    return (round_up(a.dk, kDepth) + kTileCells) * lanes +
           kTileCells * (round_up(a.dk, kDepth) + round_up(a.dv, 16)) + 8 * 16;
}

int64_t buffer_floats(const AttentionArgs& a, int64_t lanes, int64_t n_kv_max) {
    const int64_t cells = a.flash ? kTileCells : round_up(n_kv_max, kTileCells);
    const int64_t known_bytes = plan_tiles(a, 1).tiles * (n_kv_max / kTileCells + 1);
    return known_bytes / 4 + 1 + a.dk * lanes +
           kTileCells * (round_up(a.dk, 16) + round_up(a.dv, kPad) + 64) + cells * lanes +
           output_rows(a) * lanes + (5 + kWords) * lanes + 10 * 16 + half_floats(a, lanes);
}

float* take(float*& at, int64_t n) {
    float* p = at;
    at += round_up(n, 16);
    return p;
}

// n values in two halves; without a low half where the stored values are bf16.
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

TileBuffers layout(uint8_t* scratch, const AttentionArgs& a, int64_t lanes) {
    TileBuffers b;
    float* at = reinterpret_cast<float*>(scratch);
    b.lanes = lanes;
    b.row = uses_tiles(a) ? 16 : lanes;
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
    b.total = reinterpret_cast<double*>(take(at, 2 * lanes));
    b.bits = reinterpret_cast<uint32_t*>(take(at, kWords * lanes));
    b.q2 = b.k2 = b.v2 = b.p2 = {};
    if (uses_tiles(a)) {
        const bool low = a.k->type != kBF16 || (a.k1 && a.k1->type != kBF16);
        b.q2 = take_halves(at, round_up(a.dk, kDepth) * lanes);
        b.k2 = take_halves(at, kTileCells * round_up(a.dk, kDepth), low);
        b.v2 = take_halves(at, kTileCells * round_up(a.dv, 16), a.v->type != kBF16);
        b.p2 = take_halves(at, kTileCells * lanes);
    }
    if (!uses_tiles(a)) clear_padding(a, b);
    b.kv_tiles = a.n_kv / kTileCells + 1;
    b.known = reinterpret_cast<uint8_t*>(at);
    std::memset(b.known, 0, size_t(plan_tiles(a, 1).tiles * b.kv_tiles));
    return b;
}

flash::Halves offset(const flash::Halves& h, int64_t n) { return {h.hi + n, h.lo ? h.lo + n : nullptr}; }

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

// Tiles to fetch ahead; the segment of K shared by all heads is small and left to the hardware.
flash::Prefetch k_rows(const AttentionArgs& a, const Tile& tile, int64_t c0, int64_t last) {
    const int64_t n = std::max<int64_t>(0, std::min<int64_t>(kTileCells, last - c0));
    return {row<uint8_t>(*a.k, tile.kv_head, c0), a.k->nb[2], a.k_row_bytes, n};
}

flash::Prefetch v_rows(const AttentionArgs& a, const Tile& tile, int64_t c0, int64_t n) {
    return {row<uint8_t>(*a.v, a.v_head(tile.kv_head), c0), a.v->nb[2], a.v_row_bytes, a.v_in_k ? 0 : n};
}

template <typename Call>
void for_lane_groups(const Part& part, Call call) {
    using flash::kMaxVectors;
    for (int64_t m = part.m; m < part.m + part.lanes;) {
        const int64_t n = std::min<int64_t>(kMaxVectors, (part.m + part.lanes - m) / kLanes);
        call(m, int(n));
        m += n * kLanes;
    }
}

// Scores of whole groups of 16 cells: the tile has room for them, nobody reads those beyond the part.
void score_tiles(const TileBuffers& b, int64_t dk, const Part& part, float* s, flash::Prefetch& next) {
    const int64_t ld = round_up(dk, kDepth);
    next.advance(next.rows);
    flash::tile_product(offset(b.k2, part.begin * ld), ld, round_up(part.end - part.begin, 16),
                        {offset(b.q2, part.m * ld), ld * 16}, part.lanes, ld,
                        {s + part.begin * b.row + b.lane(part.m, b.s_rows), b.s_rows * 16}, false);
}

// The weights are in p2.
void output_tiles(const TileBuffers& b, int64_t dv, const Part& part, flash::Prefetch& next) {
    next.advance(next.rows);
    for (int64_t m = part.m; m < part.m + part.lanes; m += kLanes)
        flash::scale_lanes(b.o + b.lane(m, b.o_rows), dv, simd::load(b.alpha + m));
    flash::tile_product(offset(b.v2, part.begin), kTileCells, round_up(dv, 16),
                        {offset(b.p2, part.m * kTileCells), kTileCells * 16}, part.lanes,
                        round_up(part.end - part.begin, kDepth),
                        {b.o + b.lane(part.m, b.o_rows), b.o_rows * 16}, true);
}

void scores(const TileBuffers& b, int64_t dk, const Part& part, float* s, flash::Prefetch& next) {
    if (b.k2.hi) return score_tiles(b, dk, part, s, next);
    const int64_t w = b.lanes, n = part.end - part.begin;
    const float* k = b.k + part.begin * b.ldk;
    s += part.begin * w;
    for_lane_groups(part, [&](int64_t m, int n_vectors) {
        const float* q = b.q + m;
        switch (n_vectors) {
            case 1:
                return flash::score_lanes<1>(q, w, k, b.ldk, dk, n, s + m, w, next);
            case 2:
                return flash::score_lanes<2>(q, w, k, b.ldk, dk, n, s + m, w, next);
#if defined(__AVX512F__)
            case 3:
                return flash::score_lanes<3>(q, w, k, b.ldk, dk, n, s + m, w, next);
            case 4:
                return flash::score_lanes<4>(q, w, k, b.ldk, dk, n, s + m, w, next);
#endif
        }
    });
}

void outputs(const TileBuffers& b, int64_t dv, const Part& part, const float* p, flash::Prefetch& next) {
    if (b.v2.hi) return output_tiles(b, dv, part, next);
    const int64_t w = b.lanes, n = part.end - part.begin;
    const float* v = b.v + part.begin * b.ldv;
    p += part.begin * w;
    for_lane_groups(part, [&](int64_t m, int n_vectors) {
        const float* alpha = b.alpha + m;
        float* o = b.o + m;
        switch (n_vectors) {
            case 1:
                return flash::output_lanes<1>(p + m, w, n, v, b.ldv, dv, alpha, o, w, next);
            case 2:
                return flash::output_lanes<2>(p + m, w, n, v, b.ldv, dv, alpha, o, w, next);
#if defined(__AVX512F__)
            case 3:
                return flash::output_lanes<3>(p + m, w, n, v, b.ldv, dv, alpha, o, w, next);
            case 4:
                return flash::output_lanes<4>(p + m, w, n, v, b.ldv, dv, alpha, o, w, next);
#endif
        }
    });
}

enum class Visibility { kNone, kSome, kAll };

// Visibility of the cells [c0, c0 + n); fills bits[w][lane] unless all rows see all or none of them.
Visibility tile_visibility(const AttentionArgs& a, const Tile& tile, int64_t c0, int64_t n,
                           const TileBuffers& b) {
    uint32_t words[kWideTileRows][kWords];
    const int64_t first = a.token_of(tile.first_row), last = a.token_of(tile.first_row + tile.n_rows - 1);
    bool none = true, all = true;
    for (int64_t t = first; t <= last; ++t) {
        const int visible = visible_bits(a, t, c0, n, words[t - first], kWords);
        none &= visible == 0;
        all &= visible == n;
    }
    if (all) return Visibility::kAll;
    if (none && a.flash) return Visibility::kNone;
    int64_t token = 0, in_token = tile.first_row % a.heads_per_kv;
    for (int64_t m = 0; m < b.lanes; ++m) {
        for (int w = 0; w < kWords; ++w) b.bits[w * b.lanes + m] = words[token][w];
        if (++in_token == a.heads_per_kv && m + 1 < tile.n_rows) {
            in_token = 0;
            ++token;
        }
    }
    return Visibility::kSome;
}

// The same for the i-th tile of the row tile's range, reading the mask again only where the bits are needed.
Visibility tile_visibility(const AttentionArgs& a, const Tile& tile, int64_t i, int64_t c0, int64_t n,
                           const TileBuffers& b) {
    uint8_t& known = b.known[tile.index * b.kv_tiles + i];
    if (known && Visibility(known - 1) != Visibility::kSome) return Visibility(known - 1);
    const Visibility seen = tile_visibility(a, tile, c0, n, b);
    known = uint8_t(1 + int(seen));
    return seen;
}

// Splits a partly visible tile into groups of 16 lanes, each with the cells that any of its rows sees.
// Neighbours whose cells end nearly together make one part: products of 32 lanes take less than two of 16.
int visible_parts(const TileBuffers& b, Part* parts) {
    int n_parts = 0;
    int64_t first_end = 0;  // of the 16 lanes that the last part began with
    for (int64_t m = 0; m < b.lanes; m += 16) {
        int64_t begin = kTileCells, end = 0;
        for (int w = 0; w < kWords; ++w) {
            uint32_t any = 0;
            for (int i = 0; i < 16; ++i) any |= b.bits[w * b.lanes + m + i];
            if (!any) continue;
            begin = std::min<int64_t>(begin, 32 * w + __builtin_ctz(any));
            end = 32 * w + 32 - __builtin_clz(any);
        }
        // Starts at a multiple of the block height keep the rounded-up last block inside the tile.
        const int64_t step = b.k2.hi ? kDepth : kPad;
        if (end == 0) continue;
        begin = begin / step * step;
        Part* const last = parts + n_parts - 1;
        if (n_parts > 0 && last->m + last->lanes == m && last->begin == begin && end >= first_end &&
            end <= first_end + 16) {
            last->lanes += 16;
            last->end = std::max(last->end, end);
        } else {
            parts[n_parts++] = {m, 16, begin, end};
            first_end = end;
        }
    }
    return n_parts;
}

// Soft cap and mask on the scores of one vector of lanes; returns their maximum.
template <bool kMask, bool kCap>
V finish_vector(float* s, const TileBuffers& b, const Part& part, int64_t m, float softcap) {
    using namespace simd;
    V top = set1(kNoMaximum);
    const V cap = set1(softcap * kLog2e), low = set1(kMasked);
    for (int64_t c = part.begin; c < part.end; ++c) {
        V x = load(s + c * b.row);
        if (kCap) x = mul(cap, simd::tanh(x));
        if (kMask) x = keep_if_bit(b.bits + (c >> 5) * b.lanes + m, 1u << (c & 31), x, low);
        if (kMask || kCap) store(s + c * b.row, x);
        top = simd::max(top, x);
    }
    return top;
}

V finish_scores(const AttentionArgs& a, float* s, const TileBuffers& b, const Part& part, int64_t m,
                bool masked) {
    if (a.softcap != 0.0f) {
        return masked ? finish_vector<true, true>(s, b, part, m, a.softcap)
                      : finish_vector<false, true>(s, b, part, m, a.softcap);
    }
    return masked ? finish_vector<true, false>(s, b, part, m, 0.0f)
                  : finish_vector<false, false>(s, b, part, m, 0.0f);
}

// Turns the scores of one vector of lanes into weights; returns their sum.
V exp2_scores(float* s, const TileBuffers& b, const Part& part, V top) {
    using namespace simd;
    V total = zero();
    for (int64_t c = part.begin; c < part.end; ++c) {
        const V p = simd::exp2(sub(load(s + c * b.row), top));
        store(s + c * b.row, p);
        total = add(total, p);
    }
    return total;
}

// Turns scores into weights (in p2 with a tile unit, else in place), updates maximum, sum and alpha of every
// lane.
void online_softmax(const AttentionArgs& a, const TileBuffers& b, const Part& part, bool masked) {
    using namespace simd;
    for (int64_t m = part.m; m < part.m + part.lanes; m += kLanes) {
        float* s = b.s + b.lane(m, b.s_rows);
        const V before = load(b.maximum + m);
        V top = simd::max(before, finish_scores(a, s, b, part, m, masked));
        if (b.p2.hi) top = flash::raised(before, top);
        const V total = b.p2.hi ? flash::exp2_pairs(s + part.begin * b.row, part.end - part.begin, top,
                                                    offset(b.p2, m * kTileCells))
                                : exp2_scores(s, b, part, top);
        const V alpha = simd::exp2(sub(before, top));
        store(b.alpha + m, alpha);
        store(b.maximum + m, top);
        store(b.sum + m, fma(load(b.sum + m), alpha, total));
    }
}

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
            online_softmax(a, b, parts[i], seen != Visibility::kAll);
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
            const V top = finish_scores(a, s + b.lane(m, b.s_rows), b, part, m, masked);
            simd::store(b.maximum + m, simd::max(simd::load(b.maximum + m), top));
        }
    }
}

void full_weights(const TileBuffers& b, int64_t n_cells) {
    for (int64_t c = 0; c < n_cells; ++c) {
        for (int64_t m = 0; m < b.lanes; m += kLanes) {
            float* s = b.s + c * b.row + b.lane(m, b.s_rows);
            simd::store(s, simd::exp2(simd::sub(simd::load(s), simd::load(b.maximum + m))));
            for (int i = 0; i < kLanes; ++i) b.total[m + i] += double(s[i]);
        }
    }
}

// Full softmax over materialized scores of the row tile: one maximum, sums in double.
void run_full(const AttentionArgs& a, const Tile& tile, int64_t first, int64_t last, const TileBuffers& b) {
    full_scores(a, tile, first, last, b);
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
            flash::split_pairs(weights + b.lane(m, b.s_rows), part.end, round_up(part.end, kDepth),
                               offset(b.p2, m * kTileCells));
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

TilePlan plan_tiles(const AttentionArgs& a, int n_threads) {
    TilePlan plan;
    const int64_t rows = a.rows_per_kv_head();
    plan.tiles = (rows + tile_rows(a) - 1) / tile_rows(a);
    plan.lanes = round_up((rows + plan.tiles - 1) / plan.tiles, 16);
    plan.tiles = (rows + plan.lanes - 1) / plan.lanes;
    plan.splits = 1;
    const int64_t items = plan.tiles * a.n_kv_heads;
    if (a.flash && n_threads > 1 && items < 2 * n_threads) plan.splits = (4 * n_threads + items - 1) / items;
    return plan;
}

// Enough for any part of the tokens too, which may take more lanes at once.
size_t tile_scratch_bytes(const AttentionArgs& a, int64_t n_kv_max) {
    const int64_t lanes = std::min(round_up(a.rows_per_kv_head(), 16), tile_rows(a));
    return size_t(buffer_floats(a, lanes, n_kv_max)) * sizeof(float);
}

// The most for any part of the tokens: with as many row tiles as the ranges of cells allow for, all of them
// full.
size_t tile_shared_bytes(const AttentionArgs& a, int n_threads) {
    size_t most = 0;
    for (int64_t tiles = 1, n = 0; n < a.n_tokens; ++tiles) {
        n = std::clamp<int64_t>(tiles * least_tile_rows(a) / a.heads_per_kv, 1, a.n_tokens);
        const AttentionArgs part = a.part(0, n);
        const TilePlan plan = plan_tiles(part, n_threads);
        if (plan.splits == 1) break;
        most = std::max(most, partials_bytes(part, plan.splits));
    }
    return most;
}

void attention_tiles(const ThreadContext& ctx, const AttentionArgs& a) {
    const TilePlan plan = plan_tiles(a, ctx.nth);
    const TileBuffers buffers = layout(ctx.scratch, a, plan.lanes);
    const Partials partials = partials_at(ctx.shared, a, plan.splits);
    const int64_t items = plan.tiles * a.n_kv_heads * plan.splits;
    if (buffers.k2.hi) flash::begin_tiles();
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
    if (buffers.k2.hi) flash::end_tiles();
    if (plan.splits > 1) {
        ctx.sync();
        combine_partials(ctx, a, partials);
    }
}

}  // namespace ikpy
