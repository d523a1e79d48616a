// Per weight type: how a block of weight rows is multiplied with a set of tokens.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ikpy {

constexpr int kHalfRows = 16;
constexpr int kBlockRows = 2 * kHalfRows;
constexpr int kMaxTokens = 512;  // tokens per call; longer batches are cut
// Row blocks that are multiplied together, so that they share what they read of the tokens: with tiles, whose
// tokens come from the third-level cache, and with panels, where 512 columns of the tokens and the sums of
// these blocks fill half of the second-level cache.
constexpr int kWideBlocks = 8;
constexpr int kPanelBlocks = 4;

// A block of weight rows in two halves of up to 16 rows: 32 consecutive rows of one matrix, or 16 rows of an
// up projection and the same 16 rows of its gate. n[1] may be 0.
struct RowBlock {
    int type;
    const uint8_t* half[2];
    int n[2];
    int64_t stride;  // bytes from row to row
    int64_t n_in;    // elements per row

    // Start of the group of `n_rows` interleaved rows that row i belongs to; rows beyond the last one repeat
    // it. Blocks of interleaved types start at multiples of 16 rows, so a group never straddles two of them.
    const uint8_t* group(int h, int i, int n_rows) const {
        return half[h] + (i < n[h] ? i : n[h] - 1) / n_rows * n_rows * stride;
    }
    int halves() const { return n[1] > 0 ? 2 : 1; }
    const uint8_t* row(int h, int i) const { return group(h, i, 1); }
    // Bytes from a row to that of the next block; the halves belong to one matrix or to two.
    int64_t to_next_block() const {
        return (half[1] == half[0] + kHalfRows * stride ? kBlockRows : kHalfRows) * stride;
    }
};

// Where sums go when nothing is added to them any more.
class SumSink {
  public:
    // The sums of tokens first .. first + n - 1 and a block will be complete soon.
    virtual void expect(int block, int first, int n) const = 0;
    // They are: sums[n][kBlockRows], which may be overwritten.
    virtual void take(int block, int first, int n, float* sums) const = 0;

  protected:
    ~SumSink() = default;
};

// The tokens of a product: one prepared row each. fresh: not those of the thread's previous call with the
// same kernel and matrix, from which `work` still holds what was made of them. sink: set for kernels that
// fill one. shared: what WeightKernels::share made of shared_rows tokens, of which these begin with the
// first_shared-th; null: nothing.
struct TokenSet {
    const uint8_t* const* x;
    int n;
    bool fresh;
    const SumSink* sink = nullptr;
    const uint8_t* shared = nullptr;
    int64_t shared_rows = 0;
    int64_t first_shared = 0;
};

// out[t * kBlockRows + h * kHalfRows + i] = dot(row i of half h, token t).
using ProductFn = void (*)(const RowBlock&, const TokenSet& tokens, float* out, uint8_t* work);

// The same for several blocks of one matrix: out[b][t][kBlockRows].
using BlocksProductFn = void (*)(const RowBlock* blocks, int n_blocks, const TokenSet& tokens, float* out,
                                 uint8_t* work);

// One block after the other, for kernels that gain nothing from several.
template <ProductFn Multiply>
void each_block(const RowBlock* blocks, int n_blocks, const TokenSet& tokens, float* out, uint8_t* work) {
    for (int b = 0; b < n_blocks; ++b)
        Multiply(blocks[b], {tokens.x, tokens.n, tokens.fresh && b == 0},
                 out + static_cast<int64_t>(b) * tokens.n * kBlockRows, work);
}

// Fewer rows of activations per matrix do not pay for the unpacking of panels to bf16.
constexpr int64_t kTileMinTokens = 24;
// Weights unpacked row by row pay earlier, but drafts and slots gain from products that round alike up to 24
// tokens. Experts do not meet so few in small batches. Two layers of qwen3-30b-a3b and deepseek-lite with 12,
// 16 and 18 tokens per expert on average: Q4_K 1.18, 1.34 and 1.29 times as fast as with vectors, IQ4_K 1.15,
// 1.33 and 1.29, Q6_K 1.07, 1.19 and 1.24, IQ3_S 1.01, 1.16 and 1.22; with 8 1.05, 1.00, 0.93 and 0.83.
constexpr int64_t kTileMinExpertTokens = 12;
// Where rows of 12 tokens are better at it, with 12, 14 and 16: IQ2_XXS 0.89, 1.00 and 1.05, IQ3_XXS
// 0.92, 1.09 and 1.17, IQ2_XXS_R4 0.76, 0.92 and 1.00.
constexpr int64_t kTileMinFastRowTokens = 14;

size_t amx_work_bytes(int64_t n_in);

// Products by the tile unit, used where the CPU has one. A null product: none.
struct TileKernels {
    BlocksProductFn product = nullptr;  // of up to kWideBlocks blocks
    int act_format = 0;
    int64_t min_tokens = kTileMinTokens;  // rows of activations per matrix
    size_t (*work_bytes)(int64_t n_in) = amx_work_bytes;
    // Tokens that the product makes something of which it keeps for the next blocks; null or 0: none.
    int64_t (*kept_tokens)(int64_t n_in) = nullptr;
    int64_t min_expert_tokens = kTileMinTokens;  // rows of activations per expert, on average
};

struct WeightKernels {
    int type;
    int act_format;
    int gemv_tokens;  // up to this many tokens gemv is the faster one; 0: there is none
    ProductFn gemv;
    BlocksProductFn gemm;  // of up to kPanelBlocks blocks
    size_t (*work_bytes)(int64_t n_in);
    TileKernels tiles = {};
    // Types with a factor per row: those of a block, scale[kBlockRows], which the sums of gemm and tiles
    // lack. Whoever copies the sums multiplies by them; a pass of its own took 10 % of prompts.
    void (*row_scales)(const RowBlock&, float* scale) = nullptr;
    // Whether gemm hands the sums to tokens.sink as soon as they are complete.
    bool fills_sink = false;
    // Up to this many tokens gemv in passes of gemv_tokens is faster than gemm; 0: none above gemv_tokens.
    // From 2,048 x 2,048 weights in the cache, one thread.
    int pass_tokens = 0;
    // From so many tokens on gemm makes the sums of other panels, which round otherwise; 0: never.
    int many_tokens = 0;
    // Makes rows [first, last) of n_rows prepared rows ready for gemm of many_tokens, once for all threads;
    // null: nothing to do. shared_bytes: of each row.
    void (*share)(const uint8_t* x, int64_t n_in, int64_t n_rows, int64_t first, int64_t last,
                  uint8_t* to) = nullptr;
    int64_t (*shared_bytes)(int64_t n_in) = nullptr;
    // gemv_tokens of AMD's CPUs; 0: the same.
    int amd_gemv_tokens = 0;
};

// Types without an unpacker go through f32. Throws std::invalid_argument for types that cannot be decoded.
WeightKernels weight_kernels(int type);

// One table per family; nullptr when the type is not of that family.
const WeightKernels* lane_weight_kernels(int type);  // before the families: CPUs with byte permutations only
const WeightKernels* float_weight_kernels(int type);
const WeightKernels* legacy_weight_kernels(int type);
const WeightKernels* kquant_weight_kernels(int type);
const WeightKernels* iq4_weight_kernels(int type);
const WeightKernels* iqk_weight_kernels(int type);
const WeightKernels* row_scale_weight_kernels(int type);
const WeightKernels* small_block_weight_kernels(int type);
const WeightKernels* interleaved_weight_kernels(int type);
const WeightKernels* trellis_weight_kernels(int type);
const WeightKernels* grid_weight_kernels(int type);
const WeightKernels* decoded_weight_kernels(int type);  // any type that can be decoded to f32

}  // namespace ikpy
