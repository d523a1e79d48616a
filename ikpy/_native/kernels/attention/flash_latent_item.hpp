// What the parts of latent attention share: the op as they see it, its memory, and what they do with it.
#pragma once
#include "kernels/attention/flash_latent.hpp"
#include "kernels/cache/kv_types.hpp"

namespace ikpy {
namespace latent {

constexpr int kWords = kCells / 32;  // of bits of the cells of a block

// Latent attention as its kernels see it; products are null if they do not take the op.
struct Problem {
    const AttentionArgs& a;
    const Products* products;
    Shape shape;            // rows: of a full item
    const Tensor* keys[2];  // segments
    bool has_middles;       // which the products leave out (flash_middles.hpp)

    explicit Problem(const AttentionArgs& args);
    int64_t blocks() const { return shape.dk() / 32; }
    int64_t value_blocks() const { return shape.dv / 32; }
    // The first block of V in those of a row.
    int64_t first_value_block() const {
        return ((shape.n_segments > 1 ? shape.size[0] : 0) + shape.column) / 32;
    }
    int64_t row_bytes(int i) const { return kv::row_bytes(keys[i]->type, shape.size[i]); }
};

// Items are tiles of `rows` rows; splits: ranges of the cells of each.
struct Plan {
    int64_t rows, tiles, splits;
};

Plan plan_of(const Problem& problem, int n_threads);

// Work memory of a thread.
struct Buffers {
    float *q, *s, *o, *top, *block_top, *sum, *alpha;
    uint32_t* bits;  // [kWords][rows]
    float* q_sums;   // [blocks][rows]: queries, where there are middles
    float* middles;  // [blocks][kCells]
    float* means;    // [rows / 16][blocks of V][16]: sums of weights times middles
    uint8_t* rest;   // the last cells of a range
    uint8_t* work;
    uint8_t* end;
};

Buffers layout(uint8_t* at, const Problem& problem);

// Rows [first_row, first_row + n_rows) and part `part` of their cells.
struct Item {
    int64_t first_row, n_rows, part;
};

// Sums of a row: kRowUnit floats of every kRowUnit^2, dv / kRowUnit times.
inline float* sums_of(const Shape& shape, int64_t row, float* o) {
    return o + row / kRowUnit * kRowUnit * shape.dv + row % kRowUnit * kRowUnit;
}

// flash_latent_softmax.cpp

enum class Visibility { kNone, kSome, kAll };

// Which of the cells [c0, c0 + n) each row sees, in bits unless it is all or none.
Visibility visibility(const Problem& problem, const Item& item, int64_t c0, int64_t n, const Buffers& b);
// Soft caps and masks the scores of n cells and finds the maxima. Returns whether sums have to follow, by the
// factors alpha.
bool find_maxima(const Problem& problem, int64_t n, bool masked, const Buffers& b);
// Brings what was summed up down to the new maxima.
void scale_sums(const Problem& problem, const Buffers& b);

// flash_latent_middles.cpp: types whose blocks have a minimum

// Sums of the queries per block of 32 columns.
void sum_query_blocks(const Problem& problem, const Buffers& b);
void read_middles(const Problem& problem, const Cells& cells, const Buffers& b);
void add_middles_to_scores(const Problem& problem, const Buffers& b);
// Adds weights times middles to the means.
void add_weighted_middles(const Problem& problem, const Buffers& b);
// At the end, in the order of the sums.
void add_means_to_sums(const Problem& problem, const Buffers& b);

}  // namespace latent
}  // namespace ikpy
