// Attention kernels. The arguments of one op, and the two kernel families:
//   tile kernel: up to 64 (query, head) rows that share a K head, one row per SIMD lane; K and V tiles are
//     expanded to f32 once per row tile, so every loaded value meets 16 to 64 rows.
//   row kernel: up to 8 rows, vectors run along the head; reads the cache once, straight from its stored
//     format. Quantized caches on a tile unit: up to 16 rows.
// More rows of one K head whose rows contain V meet the cache in flash_latent.hpp where there is a tile unit.
#pragma once
#include "ikpy/ops.hpp"
#include "kernels/attention/flash_codes.hpp"
#include "kernels/cache/kv_types.hpp"

namespace ikpy {

constexpr int kTileCells = 96;      // cells per K/V tile; a multiple of every register block height below
constexpr int kTileRows = 64;       // rows per tile at most
constexpr int kWideTileRows = 512;  // rows per tile at most with operands of halves
constexpr int kRowKernelMax = 8;    // rows per K head up to which the row kernel runs
constexpr int kCodeRowsMax = 16;    // the same where both caches are multiplied as codes
constexpr int kRowCells = 64;       // cells per step of the row kernel at most
constexpr float kMasked = -1e30f;
constexpr float kNoMaximum =
    -1e20f;  // running maximum before any visible cell: above kMasked, below any score

struct AttentionArgs {
    const Tensor* q;
    const Tensor* k;  // segment 0
    const Tensor* v;
    const Tensor* mask;  // may be null: every cell of the range is visible
    const Tensor* k1;    // segment 1, may be null
    const Tensor* out;
    const float* sinks;     // [H] or null
    const int32_t* ranges;  // [2, T] or null
    const Tensor* chosen;   // of choose_cells, or null: the cells that each token attends to
    const Tensor* common;   // mask whose cells tokens of a group have in common: before any were chosen
    int64_t dk, d0, d1, dv;
    int64_t n_tokens, n_heads, n_kv_heads, heads_per_kv, n_kv;
    int64_t first_token;  // of the batch; tokens are counted from it
    float scale, softcap;
    // Linear biases (ALiBi, arXiv:2108.12409): a score loses its head's slope times the distance of
    // positions.
    float max_bias;      // of the slopes, 0: no biases
    int64_t slope_head;  // number of head 0 among the slope_heads of the model
    int64_t slope_heads;
    // Biases of every head by the position of the cell less that of the token (T5, arXiv:1910.10683), from
    // -farthest to farthest and the same beyond: f32 [2 * farthest + 1, slope_heads], or null.
    const Tensor* biases;
    int64_t farthest;
    const int32_t* cell_pos;  // [n_kv] or null
    const int32_t* pos;       // [T] or null
    bool flash;
    bool v_in_k;       // V is a view into the rows of K segment 0 of the same type
    int64_t v_column;  // then: its first column
    int64_t k_row_bytes, v_row_bytes;
    kv::LoadRows load_k, load_k1, load_v;
    bool k_coded, v_coded;  // shapes that products of codes take

    int64_t rows_per_kv_head() const { return heads_per_kv * n_tokens; }
    // Products of codes of the row kernel, null: products of floats.
    const flash::CodeProducts* k_codes() const { return k_coded ? code_products(k->type) : nullptr; }
    const flash::CodeProducts* v_codes() const { return v_coded ? code_products(v->type) : nullptr; }
    const flash::CodeProducts* code_products(int type) const;
    // Rows per K head that the row kernel takes at most.
    int64_t row_kernel_max() const;
    // Rows of a K head are ordered by token, then head.
    int64_t token_of(int64_t r) const { return r / heads_per_kv; }
    int64_t head_of(int64_t kv_head, int64_t r) const { return kv_head * heads_per_kv + r % heads_per_kv; }
    int64_t k1_head(int64_t kv_head) const { return kv_head * k1->ne[1] / n_kv_heads; }
    int64_t v_head(int64_t kv_head) const { return kv_head * v->ne[1] / n_kv_heads; }
    const float* q_row(int64_t kv_head, int64_t r) const {
        return row<float>(*q, head_of(kv_head, r), first_token + token_of(r));
    }
    float* out_row(int64_t head, int64_t token) const { return row<float>(*out, head, first_token + token); }
    const uint16_t* mask_row(int64_t token) const {
        return mask ? row<uint16_t>(*mask, first_token + token) : nullptr;
    }
    int64_t first_cell(int64_t token) const { return ranges ? ranges[2 * (first_token + token)] : 0; }
    int64_t last_cell(int64_t token) const {
        if (!ranges) return n_kv;
        const int64_t last = ranges[2 * (first_token + token) + 1];
        return last < n_kv ? last : n_kv;
    }
    bool biased() const { return max_bias != 0.0f || biases; }
    // What the score of a head loses per position, base-2 logarithm folded in.
    float slope(int64_t head) const;
    // Biases of a head, of cell and token at the same position in the middle.
    const float* biases_of(int64_t head) const { return row<float>(*biases, slope_head + head) + farthest; }
    float position(int64_t token) const { return float(pos[first_token + token]); }
    // The same op for the tokens [first, first + n) alone.
    AttentionArgs part(int64_t first, int64_t n) const {
        AttentionArgs a = *this;
        a.first_token += first;
        a.n_tokens = n;
        return a;
    }
    // Multiplies q before the dot products: base-2 logarithm folded in, unless a soft cap comes between.
    float q_factor() const;
};

AttentionArgs attention_args(const Op& op, const Tensor* tensors);

// The work of one op or of a group of its tokens, with a kernel family that takes it.
void attend(const ThreadContext& ctx, const AttentionArgs& a);
// Makes counters and work memory ready for the next group.
void restart(const ThreadContext& ctx);

// tokens that attend to chosen cells
bool any_chose(const AttentionArgs& a);
size_t chosen_shared_bytes(const AttentionArgs& a, int n_threads);
// Rows of the cells are gathered for one token after the other.
void attention_chosen(const ThreadContext& ctx, const AttentionArgs& a);

// Bytes of partial results of one thread that works alone.
size_t own_partials_bytes(const AttentionArgs& a);
size_t attend_shared_bytes(const AttentionArgs& a, int n_threads);

// Cells visible to any of the tokens [t0, t1): the smallest range around them.
void covered_cells(const AttentionArgs& a, int64_t t0, int64_t t1, int64_t* first, int64_t* last);

// Bit i of words is set iff the token sees cell c0 + i, i < n <= 32 * n_words. Returns the number of visible
// cells.
int visible_bits(const AttentionArgs& a, int64_t token, int64_t c0, int64_t n, uint32_t* words, int n_words);

inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// tile kernel
struct TilePlan {
    int64_t tiles;   // row tiles per K head
    int64_t lanes;   // rows per tile, a multiple of 16
    int64_t splits;  // ranges of cells handled independently and combined at the end
};
TilePlan plan_tiles(const AttentionArgs& a, int n_threads);
size_t tile_scratch_bytes(const AttentionArgs& a, int64_t n_kv_max);
size_t tile_shared_bytes(const AttentionArgs& a, int n_threads);
void attention_tiles(const ThreadContext& ctx, const AttentionArgs& a);

// row kernel
size_t row_scratch_bytes(const AttentionArgs& a, int64_t n_kv_max);
void attention_rows(const ThreadContext& ctx, const AttentionArgs& a);

// partial results of several cell ranges
// Unnormalized sums over `parts` ranges: acc [dv] per row, with the maximum (base 2) and the sum of weights.
struct Partials {
    float* acc;
    float* maximum;
    float* sum;
    int64_t ld;      // floats per acc row
    int64_t n_rows;  // H * T, row = K head * rows_per_kv_head + row of that K head
    int64_t parts;
    float* acc_row(int64_t part, int64_t r) const { return acc + (part * n_rows + r) * ld; }
    float& max_of(int64_t part, int64_t r) const { return maximum[part * n_rows + r]; }
    float& sum_of(int64_t part, int64_t r) const { return sum[part * n_rows + r]; }
};
Partials partials_at(uint8_t* shared, const AttentionArgs& a, int64_t parts);
size_t partials_bytes(const AttentionArgs& a, int64_t parts);
void combine_partials(const ThreadContext& ctx, const AttentionArgs& a, const Partials& p);

// 1 / (sum + sink term), 0 without a visible cell.
float normalizer(const AttentionArgs& a, int64_t head, float maximum, double sum);

}  // namespace ikpy
