// Index scores on the tile unit, by the products that latent attention has for its scores.
#include <cstring>

#include "kernels/attention/flash_pack.hpp"
#include "kernels/simd/simd_f32.hpp"
#include "kernels/sparse_attention/choose_cells.hpp"

namespace ikpy {
namespace indexer {
namespace {

using simd::kLanes;
using simd::V;

constexpr int64_t kUnit = latent::kRowUnit;

// Heads of a token, filled up with zeros.
int64_t token_rows(const Problem& p) { return round_up(p.heads, kUnit); }

int64_t most_tokens(const Problem& p) { return std::max<int64_t>(1, kGroupRows / token_rows(p)); }

latent::Shape shape_of(const Problem& p, int64_t n_tokens) {
    latent::Shape shape{};
    shape.rows = n_tokens * token_rows(p);
    shape.n_segments = 1;
    shape.size[0] = shape.dv = p.n;  // of values nothing is asked for
    return shape;
}

struct Buffers {
    float* q;        // [n][rows]
    float* s;        // [rows / 16][kCells][16]
    float* weights;  // [rows]
    uint8_t* rest;   // the last cells
    uint8_t* work;
    uint8_t* end;

    Buffers(const Problem& p, const latent::Shape& shape, uint8_t* at) {
        q = s = reinterpret_cast<float*>(at);  // queries are only read before the first scores
        weights = s + std::max(p.n, kCells) * shape.rows;
        rest = reinterpret_cast<uint8_t*>(weights + shape.rows);
        work = rest + kCells * round_up(kv::row_bytes(p.keys.type, p.n), 64);
        end = work + tile_products(p)->work_bytes(shape);
    }
};

// Tokens [t0, t0 + n) of a round that choose and have cells in common.
struct Group {
    const Round& round;
    int64_t t0, n;
    latent::Shape shape;
    Buffers b;

    void pack() const;
    void score(int64_t block, latent::Background& next) const;
    void add_heads(int64_t token, int64_t block) const;
};

void Group::pack() const {
    const Problem& p = round.p;
    const int64_t rows_each = token_rows(p);
    for (int64_t m = 0; m < shape.rows; m += 16) {
        const int64_t token = t0 + m / rows_each, head = m % rows_each;
        const float* rows[16];
        for (int64_t i = 0; i < 16; ++i) {
            rows[i] = head + i < p.heads ? row<float>(p.q, head + i, token) : nullptr;
            b.weights[m + i] = head + i < p.heads ? row<float>(p.weights, token)[head + i] : 0.0f;
        }
        flash::rows_to_lanes(rows, p.n, 1.0f, b.q + m, shape.rows);
    }
    tile_products(p)->pack(shape, b.q, b.work);
}

// The cells of a block: in the cache, or copied and filled up with zeros where they are less.
latent::Cells cells_at(const Problem& p, int64_t block, uint8_t* rest) {
    const int64_t c0 = block * kCells, n = std::min(kCells, p.n_kv - c0);
    latent::Cells cells{};
    cells.rows[0] = row<uint8_t>(p.keys, 0, c0);
    cells.stride[0] = p.keys.nb[2];
    if (n == kCells) return cells;
    const int64_t bytes = kv::row_bytes(p.keys.type, p.n), stride = round_up(bytes, 64);
    std::memset(rest, 0, size_t(kCells * stride));
    for (int64_t c = 0; c < n; ++c)
        std::memcpy(rest + c * stride, cells.rows[0] + c * p.keys.nb[2], size_t(bytes));
    cells.rows[0] = rest;
    cells.stride[0] = stride;
    return cells;
}

void Group::add_heads(int64_t token, int64_t block) const {
    const int64_t first = (token - t0) * token_rows(round.p), last = first + token_rows(round.p);
    float* const scores = round.of(token) + block * kCells;
    for (int64_t c = 0; c < kCells; ++c) {
        V total = simd::zero();
        for (int64_t m = first; m < last; m += kUnit)
            for (int64_t i = 0; i < kUnit; i += kLanes) {
                const V s = simd::load(b.s + (m * kCells) + c * kUnit + i);
                total = simd::fma(simd::load(b.weights + m + i), simd::max(s, simd::zero()), total);
            }
        scores[c] = simd::sum(total);
    }
}

void Group::score(int64_t block, latent::Background& next) const {
    bool seen = false;
    for (int64_t t = t0; t < t0 + n; ++t) seen |= round.sees(t, block);
    if (!seen) return;
    tile_products(round.p)->scores(shape, cells_at(round.p, block, b.rest), 0, b.s, b.work, next);
    for (int64_t t = t0; t < t0 + n; ++t) {
        add_heads(t, block);
        round.hide(t, block);
    }
}

// Tokens from t on that meet keys together.
int64_t group_size(const Round& round, int64_t t) {
    const Problem& p = round.p;
    const int64_t most = std::min(round.t1 - t, most_tokens(p));
    int64_t n = 1;
    while (n < most && p.count(t + n) != kAll && p.first(t) < p.last(t + n) &&
           p.mask_of(t + n)[p.first(t)] == 0)
        ++n;
    return n;
}

}  // namespace

const latent::Products* tile_products(const Problem& p) {
    const latent::Products* products = latent::half_products(p.keys.type);
    if (!products && !kv::middle_code(p.keys.type)) products = latent::code_products(p.keys.type);
    return products && p.n % products->granularity == 0 ? products : nullptr;
}

size_t tile_scores_bytes(const Problem& p) {
    return size_t(Buffers(p, shape_of(p, most_tokens(p)), nullptr).end - static_cast<uint8_t*>(nullptr));
}

void score_on_tiles(const Round& round, int64_t begin, int64_t end, uint8_t* work) {
    const Problem& p = round.p;
    const latent::Products& products = *tile_products(p);
    for (int64_t t = round.t0, n; t < round.t1; t += n) {
        n = 1;
        if (p.count(t) == kAll) continue;
        n = group_size(round, t);
        const latent::Shape shape = shape_of(p, n);
        const Group group{round, t, n, shape, Buffers(p, shape, work)};
        group.pack();
        const int64_t last = std::min(p.n_kv, end * kCells);
        const flash::PrefetchLines keys{row<uint8_t>(p.keys, 0, begin * kCells),
                                        row<uint8_t>(p.keys, 0, last)};
        latent::Background next(keys, kCells * p.keys.nb[2] / 64, products.ticks(shape));
        for (int64_t block = begin; block < end; ++block) {
            next.skip_to(row<uint8_t>(p.keys, 0, std::min(last, (block + 1) * kCells)));
            group.score(block, next);
        }
        if (products.end) products.end();
    }
}

}  // namespace indexer
}  // namespace ikpy
