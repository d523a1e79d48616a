// Latent attention (MLA) on the tile unit: all heads share one row of the cache, whose end, or part of it, is
// V, so that a block of cells is two matrix products, [cells x dk] [dk x rows] and [rows x cells] [cells x
// dv].
//
// Roofline of one core of a Xeon at 3.1 GHz with 16 GB/s, ns per cell of 576 elements (V: 512). Tile products
// take 5.2 ns, and what they wait for nearly adds to that: tile loads of 2.5 (6.3 from the second-level
// cache), stores of 4.7. `rows`: for each 16 rows.
//              memory   making operands   rows: products   with loads and stores, softmax
//   F16            72         85               33                  70    three products of halves
//   BF16           72         25               22                  50    two; K is multiplied where it lies
//   F16 on a unit that multiplies halves: as BF16
//   Q8_0           38         50               17                  50    four of bytes for K, two for V
//   Q6_0           29         60               17                  50
//   Q4_0, IQ4_NL   20         60               17                  50
//   Q8_KV          37         12               12                  40    two; K is multiplied where it lies
// Operands stay in the first-level cache: what goes through the second one costs more than making it again.
// With 16 rows, F16 and BF16 make the operands of a step while the one before is multiplied. Cutting halves
// of F16 off instead of rounding them would save a tenth of all, but adds a quarter to the error, as the
// product of lower halves is left out. Tile stores keep vectors from running beside products: four products
// and their loads take 26 ns, with 96 additions, 64 loads and 32 stores of vectors (24 ns alone) 34, with
// four tile stores as well 52.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/attention/flash_attention.hpp"
#include "kernels/attention/flash_prefetch.hpp"

namespace ikpy {
namespace latent {

constexpr int64_t kCells = 64;    // per block
constexpr int64_t kRows = 128;    // rows per item at most: their sums stay in the second-level cache
constexpr int64_t kRowUnit = 16;  // lanes
constexpr int64_t kTileBytes = 1024;

// Rows of the cache in one or two segments; V is in the last one.
struct Shape {
    int64_t rows;  // a multiple of kRowUnit
    int64_t n_segments;
    int64_t size[2];     // elements
    int64_t dv, column;  // V: elements column .. column + dv - 1 of the last segment

    int64_t dk() const { return size[0] + (n_segments > 1 ? size[1] : 0); }
};

// A block of kCells cells.
struct Cells {
    const uint8_t* rows[2];  // of each segment
    int64_t stride[2];
};

// Blocks that meet V together, the first of them and its number.
struct Blocks {
    Cells cells;
    int64_t begin, n;
};

// Lines of the cache that later blocks read.
using Background = flash::PacedLines;

// Weights are 2^(s - top); block_top is the largest score of the block.
struct Softmax {
    const float *top, *block_top;
    float* sum;
};

struct Products {
    int64_t granularity;  // sizes of segments, dv and column are multiples of it
    int64_t max_segments;
    int64_t blocks;  // that meet V together, at most
    size_t (*work_bytes)(const Shape& shape);
    int64_t (*ticks)(const Shape& shape);  // of that many
    // q: f32 [dk][rows]. Sets the tile unit up.
    void (*pack)(const Shape& shape, const float* q, uint8_t* work);
    // s[row / 16][c][row % 16] = sum_d k[c][d] q[d][row]
    void (*scores)(const Shape& shape, const Cells& cells, int64_t block, float* s, uint8_t* work,
                   Background& next);
    // Turns them into weights, which stay in work, and adds these to the sums.
    void (*weigh)(const Shape& shape, int64_t block, const float* s, const Softmax& softmax, uint8_t* work);
    // o[row / 16][d / 16][row % 16][d % 16] += sum_c weight[row][c] v[c][d]
    void (*outputs)(const Shape& shape, const Blocks& blocks, float* o, uint8_t* work, Background& next);
    // Brings the elements of o into that order; null: they are.
    void (*reorder)(const Shape& shape, float* o);
    void (*end)();      // after all; null: nothing to do
    float lift = 0.0f;  // how far references of weights lie below the largest score
};

// On the tile unit; null for other types and without one.
const Products* half_products(int type);
const Products* code_products(int type);
// On vectors of 512 bits; null for other types, without these, and codes where the CPU lacks VNNI or VBMI.
const Products* word_products(int type);
const Products* float_products(int type);

}  // namespace latent

// Whether the op is latent attention that this kernel takes, with more rows than the row kernel does.
bool uses_latent(const AttentionArgs& a);
// Tokens that one thread takes alone at most where a batch has several sequences.
int64_t latent_tokens_alone(const AttentionArgs& a);
size_t latent_scratch_bytes(const AttentionArgs& a);
size_t latent_shared_bytes(const AttentionArgs& a, int n_threads);
void attention_latent(const ThreadContext& ctx, const AttentionArgs& a);

}  // namespace ikpy
