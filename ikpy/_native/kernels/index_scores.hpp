// Index scores of sparse attention (DeepSeek-V3.2): sum over heads of weight[h] * relu(q[h] . k[cell]).
#pragma once
#include "kernels/kv_types.hpp"

namespace ikpy {
namespace indexer {

constexpr int64_t kCells = 64;  // per block

// The keys of a block as columns: lanes[d * kCells + cell], zeros behind the last cell.
// rows: work memory of kCells * n floats.
void keys_to_lanes(const Tensor& keys, int64_t first_cell, int64_t n_cells, float* rows, float* lanes);

// scores[cell] of a block for one token: q [heads][ldq] of n elements, weights [heads]. Every score is summed
// up in the same order wherever its cell lies and whatever else is computed.
void scores_of_block(const float* q, int64_t ldq, const float* weights, int64_t heads, int64_t n,
                     const float* lanes, float* scores);

// The k best of n scores, the first of equal ones, in rising order; scores of -inf count as none. There are
// at least k others. histogram: work memory of kBins words.
constexpr int kBins = 2048;
void choose_best(const float* scores, int64_t n, int64_t k, uint32_t* histogram, int32_t first_cell,
                 int32_t* chosen);

}  // namespace indexer
}  // namespace ikpy
