// Sparse attention (DeepSeek-V3.2, arXiv:2512.02556): the op that chooses cells, its scores and the choice.
//
// Score of a cell for a token: sum over index heads of weight[h] * relu(q[h] . k[cell]).
//
// One core of a Xeon at 3.1 GHz, 64 heads of 128 elements, ns per cell and token: 123 as multiply-adds of
// floats (peak: 83), 61 as products of bf16 halves on the tile unit (51 with several tokens of a sequence).
#pragma once
#include <algorithm>

#include "ikpy/ops.hpp"
#include "kernels/attention/flash_latent.hpp"

namespace ikpy {
namespace indexer {

constexpr int64_t kCells = 64;       // of a block
constexpr int64_t kItemBlocks = 8;   // that a thread takes at once
constexpr int64_t kGroupRows = 256;  // heads of tokens that meet keys on tiles together
constexpr int32_t kAll = -1;         // in place of a number of cells: all visible ones
static_assert(kCells == latent::kCells);

struct Problem {
    const Tensor &q, &weights, &keys, &mask, &ranges, &chosen;
    int64_t n, heads, n_tokens, n_kv, top_k;

    Problem(const Op& op, const Tensor* tensors);
    int32_t& count(int64_t token) const { return *row<int32_t>(chosen, token); }
    int64_t first(int64_t token) const { return row<int32_t>(ranges, token)[0]; }
    int64_t last(int64_t token) const { return std::min<int64_t>(row<int32_t>(ranges, token)[1], n_kv); }
    const uint16_t* mask_of(int64_t token) const { return row<uint16_t>(mask, token); }
    int64_t blocks() const { return (n_kv + kCells - 1) / kCells; }
    int64_t items() const { return (blocks() + kItemBlocks - 1) / kItemBlocks; }
};

// Tokens whose scores are kept at once, in the work memory of all threads.
struct Round {
    const Problem& p;
    int64_t t0, t1;
    float* scores;  // [token][cell]

    float* of(int64_t token) const { return scores + (token - t0) * p.blocks() * kCells; }
    bool any_chooses() const;
    // Whether a token that chooses sees a cell of the block; -inf as its scores if not.
    bool sees(int64_t token, int64_t block) const;
    // -inf as the scores of the cells of a block that a token does not see, the lowest number where those it
    // sees have -inf or NaN: hidden cells stay behind them.
    void hide(int64_t token, int64_t block) const;
};

// scores of the blocks [begin, end) for all tokens of a round that see cells of them
// Sums run in the same order wherever a cell lies, and whatever else is computed.

// As floats.
size_t float_scores_bytes(const Problem& p);
void score_by_floats(const Round& round, int64_t begin, int64_t end, uint8_t* work);
// On the tile unit; null for types and sizes that it does not take, and without one.
const latent::Products* tile_products(const Problem& p);
size_t tile_scores_bytes(const Problem& p);
void score_on_tiles(const Round& round, int64_t begin, int64_t end, uint8_t* work);

// the choice

constexpr int kBins = 2048;

// The k best of n scores in rising order of their cells, the first of equal ones. There are more than k.
// histogram: work memory of kBins words.
void choose_best(const float* scores, int64_t n, int64_t k, uint32_t* histogram, int32_t first_cell,
                 int32_t* chosen);

}  // namespace indexer
}  // namespace ikpy
