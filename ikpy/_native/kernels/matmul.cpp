// The matrix products: work sharing over (matrix, row block) items, token lists, and what happens to the
// sums.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "ikpy/ops.hpp"
#include "kernels/activations.hpp"
#include "kernels/gated_activation.hpp"
#include "kernels/gemm_amx.hpp"
#include "kernels/gemm_few_amx.hpp"
#include "kernels/half_rows.hpp"
#include "kernels/item_ranges.hpp"
#include "kernels/weight_kernels.hpp"
#include "quantize/dequantize.hpp"

namespace ikpy {
namespace {

// Tokens of an expert that are multiplied together.
struct ExpertSet {
    int32_t expert, begin, n;  // entries begin .. begin + n - 1 of the groups
};

// Work memory of one thread: sums [wide][kMaxTokens][32], pointers to the rows of x and of dst, the scales of
// those of x, sets of experts' tokens, and what the kernels of the type need.
struct Scratch {
    float* sums;
    const uint8_t** x;
    uint8_t** y;
    float* scales;
    ExpertSet* sets;
    uint8_t* work;

    static size_t sum_bytes(int wide) { return kMaxTokens * kBlockRows * sizeof(float) * wide; }
    static size_t fixed_bytes(int64_t n_sets, int wide) {
        return sum_bytes(wide) + kMaxTokens * (2 * sizeof(void*) + sizeof(float)) +
               static_cast<size_t>(round_up(n_sets * static_cast<int64_t>(sizeof(ExpertSet)), 64));
    }

    Scratch(uint8_t* base, int64_t n_sets, int wide) {
        sums = reinterpret_cast<float*>(base);
        x = reinterpret_cast<const uint8_t**>(base + sum_bytes(wide));
        y = reinterpret_cast<uint8_t**>(base + sum_bytes(wide) + kMaxTokens * sizeof(void*));
        scales = reinterpret_cast<float*>(y + kMaxTokens);
        sets = reinterpret_cast<ExpertSet*>(scales + kMaxTokens);
        work = base + fixed_bytes(n_sets, wide);
    }
};

// The weight matrices of one op and the fate of their products.
struct Product {
    WeightKernels kernels;
    const Tensor* up;       // or the only matrix
    const Tensor* gate;     // nullptr when there is one matrix
    const Tensor* up_bias;  // f32 [N, E], nullptr = none
    const Tensor* gate_bias;
    int activation;  // UnaryKind, with gate
    bool f16_out;
    bool tiles;
    int wide;                         // row blocks per work item
    int block_rows;                   // of each matrix
    int64_t scale_at;                 // of rows of activations, see act_scale_at
    const uint8_t* shared = nullptr;  // what all threads share of the tokens, see TokenSet
    int64_t shared_rows = 0;

    int64_t rows_per_item() const { return block_rows * wide; }
    int64_t n_items() const { return (up->ne[1] + rows_per_item() - 1) / rows_per_item(); }
};

bool uses_tiles(const Op& op, const WeightKernels& kernels) {
    const TileKernels& tiles = kernels.tiles;
    if (!tiles.product || op.ip[0] != tiles.act_format || !has_amx()) return false;
    return kernels.act_format != tiles.act_format || op.ip[1] >= tiles.min_tokens;
}

// Tokens of an expert that are multiplied together at most: as many as the kernel can keep.
int64_t set_tokens(const WeightKernels& kernels, bool tiles, int64_t n_in) {
    const int64_t kept = tiles && kernels.tiles.kept_tokens ? kernels.tiles.kept_tokens(n_in) : 0;
    return kept > 0 ? kept : kMaxTokens;
}

// Sets of experts' tokens at most: each expert may have one that is not full.
int64_t max_sets(const Op& op, const Tensor& dst, int64_t set_tokens) {
    return op.ip[4] + dst.ne[1] * dst.ne[2] / set_tokens;
}

int64_t dense_tokens(const Op& op, const Tensor* tensors) {
    return op.ip[1] > 0 ? op.ip[1] : tensors[op.dst].ne[1];
}

// Row blocks per work item: the tokens of experts are few enough to stay in the second-level cache.
int wide_blocks(const Op& op, const Tensor* tensors, bool tiles) {
    const bool by_expert = op.kind == kOpMulMatId || op.kind == kOpMulMatIdUpGate;
    return tiles ? kWideBlocks : by_expert || dense_tokens(op, tensors) <= kFewTokens ? 1 : kPanelBlocks;
}

// What is made of the tokens once for all threads takes no more than this; of more each makes it for itself.
constexpr int64_t kMostShared = int64_t{32} << 20;

// Bytes of it, whether they are too many or not.
int64_t shared_need(const Op& op, const Tensor* tensors, const WeightKernels& kernels, bool tiles) {
    const bool by_expert = op.kind == kOpMulMatId || op.kind == kOpMulMatIdUpGate;
    if (by_expert || tiles || !kernels.share || dense_tokens(op, tensors) < kernels.many_tokens) return 0;
    const int64_t n_batch = std::max<int64_t>(1, tensors[op.dst].ne[2]);
    return dense_tokens(op, tensors) * n_batch * kernels.shared_bytes(tensors[op.src[0]].ne[0]);
}

void share_tokens(const ThreadContext& ctx, Product& p, const uint8_t* x, int64_t n_rows) {
    int64_t begin, end;
    split_range(n_rows, ctx.ith, ctx.nth, 1, &begin, &end);
    p.kernels.share(x, p.up->ne[0], n_rows, begin, end, ctx.shared);
    p.shared = ctx.shared;
    p.shared_rows = n_rows;
    ctx.sync();
}

const Tensor* optional(const Tensor* tensors, int32_t index) { return index < 0 ? nullptr : tensors + index; }

RowBlock block_of(const Product& p, int64_t matrix, int64_t r0) {
    const int64_t left = std::min<int64_t>(p.up->ne[1] - r0, p.block_rows);
    const uint8_t* up = row<uint8_t>(*p.up, r0, matrix);
    RowBlock b;
    b.type = p.up->type;
    b.stride = p.up->nb[1];
    b.n_in = p.up->ne[0];
    b.half[0] = up;
    b.n[0] = static_cast<int>(std::min<int64_t>(left, kHalfRows));
    if (p.gate) {
        b.half[1] = row<uint8_t>(*p.gate, r0, matrix);
        b.n[1] = b.n[0];
    } else {
        b.half[1] = up + kHalfRows * b.stride;
        b.n[1] = static_cast<int>(std::clamp<int64_t>(left - kHalfRows, 0, kHalfRows));
    }
    return b;
}

void add_bias(const Tensor* bias, int64_t matrix, int64_t r0, int n, float* sums) {
    if (!bias) return;
    const float* b = row<float>(*bias, bias->ne[1] > 1 ? matrix : 0) + r0;
    for (int i = 0; i < n; ++i) sums[i] += b[i];
}

void set_token(const Product& p, const Scratch& s, int t, const uint8_t* x, uint8_t* y) {
    s.x[t] = x;
    s.y[t] = y;
    if (p.scale_at > 0) s.scales[t] = load_unaligned<float>(x + p.scale_at);
}

void scale_row(const float* scale, int n_halves, float* sums) {
    for (int i = 0; i < n_halves * kHalfRows; ++i) sums[i] *= scale[i];
}

void scale_token(float scale, float* sums) {
    for (int i = 0; i < kBlockRows; ++i) sums[i] *= scale;
}

// Writes the sums of one token: bias, activation, conversion.
void finish_row(const Product& p, int64_t matrix, int64_t r0, const RowBlock& b, float* sums, uint8_t* y) {
    if (p.gate) {
        add_bias(p.up_bias, matrix, r0, b.n[0], sums);
        add_bias(p.gate_bias, matrix, r0, b.n[0], sums + kHalfRows);
        // All 16 lanes, so that the loop has a constant length; those of rows beyond n are not stored.
        gated_activation(p.activation, sums, sums + kHalfRows, sums, kHalfRows);
        std::memcpy(reinterpret_cast<float*>(y) + r0, sums, sizeof(float) * b.n[0]);
        return;
    }
    const int n = b.n[0] + b.n[1];
    add_bias(p.up_bias, matrix, r0, n, sums);
    if (p.f16_out) {
        f32_to_f16_row(sums, reinterpret_cast<uint16_t*>(y) + r0, n);
    } else if (n == kBlockRows) {  // of a constant length: moves instead of a call
        std::memcpy(reinterpret_cast<float*>(y) + r0, sums, sizeof(float) * kBlockRows);
    } else {
        std::memcpy(reinterpret_cast<float*>(y) + r0, sums, sizeof(float) * n);
    }
}

// Rows of dst of a large matrix lie in different pages and in the same few sets of the caches: every line
// would be waited for. Fetching them this many tokens ahead makes products of 8192 rows and 512 tokens 1.02
// to 1.15 times as fast (AVX-512).
constexpr int kStoresAhead = 8;

void prefetch_stores(const uint8_t* from, int64_t n_bytes) {
    for (int64_t i = 0; i < n_bytes; i += 64) __builtin_prefetch(from + i, 1);
}

// The row blocks of one work item and where their sums go.
struct ItemSums final : SumSink {
    const Product& p;
    const Scratch& s;
    int64_t matrix, r0;
    int n_blocks = 0;
    RowBlock blocks[kWideBlocks];
    float scale[kWideBlocks][kBlockRows];  // of the rows
    bool unscaled = false;                 // sums lack the scales

    ItemSums(const Product& product, const Scratch& scratch, int64_t m, int64_t first)
        : p(product), s(scratch), matrix(m), r0(first) {
        for (int64_t r = r0; n_blocks < p.wide && r < p.up->ne[1]; r += p.block_rows)
            blocks[n_blocks++] = block_of(p, matrix, r);
    }
    int64_t first_row(int block) const { return r0 + block * p.block_rows; }
    int64_t row_bytes(int64_t n) const { return n * (p.f16_out ? sizeof(uint16_t) : sizeof(float)); }

    void read_scales() {
        for (int b = 0; b < n_blocks; ++b) p.kernels.row_scales(blocks[b], scale[b]);
        unscaled = true;
    }
    void finish(int b, int t, float* sums) const {
        if (unscaled) scale_row(scale[b], blocks[b].halves(), sums);
        if (p.scale_at > 0) scale_token(s.scales[t], sums);
        finish_row(p, matrix, first_row(b), blocks[b], sums, s.y[t]);
    }
    void expect(int b, int first, int n) const override {
        for (int t = first; t < first + n; ++t)
            prefetch_stores(s.y[t] + row_bytes(first_row(b)), row_bytes(p.block_rows));
    }
    void take(int b, int first, int n, float* sums) const override {
        for (int t = 0; t < n; ++t) finish(b, first + t, sums + t * kBlockRows);
    }
};

// Whether so many tokens meet unpacked rows one by one.
bool by_rows(const Product& p, int n_tokens) {
    return !p.tiles && n_tokens <= std::max(p.kernels.gemv_tokens, p.kernels.pass_tokens);
}

// Kernels take up to four rows at once, and groups of interleaved rows as far as they lie in a half.
constexpr int kFewestRows = 4;

// Rows of each matrix per item where few tokens meet `n_matrices` matrices: so many that the last thread to
// end has least to do, if an item costs about as much as one more row. Routers of 256 experts are 8 blocks.
int rows_for_threads(const Product& p, int64_t n_matrices, int n_threads) {
    int best = p.block_rows;
    if (n_threads < kManyThreads) return best;
    const int least = interleave(p.up->type) > 1 ? kHalfRows : kFewestRows;
    const auto busiest = [&](int rows) {
        const int64_t items = n_matrices * ((p.up->ne[1] + rows - 1) / rows);
        return (items + n_threads - 1) / n_threads * (rows + 1);
    };
    for (int rows = best / 2; rows >= least; rows /= 2)
        if (busiest(rows) < busiest(best)) best = rows;
    return best;
}

int row_passes(const WeightKernels& kernels, int n_tokens) {
    return (n_tokens + kernels.gemv_tokens - 1) / kernels.gemv_tokens;
}

// Whether the product of so many tokens hands over its sums itself.
bool fills_sink(const Product& p, int n_tokens) {
    return !p.tiles && !by_rows(p, n_tokens) && p.kernels.fills_sink;
}

// What a pass makes of its tokens stays in a part of the work memory of its own.
int64_t pass_bytes(const WeightKernels& kernels, int64_t n_in) {
    return round_up(static_cast<int64_t>(kernels.work_bytes(n_in)), 64);
}

// In passes of nearly equal size.
void multiply_rows(const Product& p, const Scratch& s, const ItemSums& item, const TokenSet& tokens) {
    const int n_passes = row_passes(p.kernels, tokens.n);
    const int64_t bytes = n_passes > 1 ? pass_bytes(p.kernels, p.up->ne[0]) : 0;
    for (int b = 0; b < item.n_blocks; ++b)
        for (int i = 0; i < n_passes; ++i) {
            const int begin = tokens.n * i / n_passes, end = tokens.n * (i + 1) / n_passes;
            p.kernels.gemv(item.blocks[b], {s.x + begin, end - begin, tokens.fresh && b == 0},
                           s.sums + (static_cast<int64_t>(b) * tokens.n + begin) * kBlockRows,
                           s.work + i * bytes);
        }
}

// The sums of the blocks times the tokens.
void multiply_blocks(const Product& p, const Scratch& s, const ItemSums& item, const TokenSet& tokens) {
    if (p.tiles) {
        p.kernels.tiles.product(item.blocks, item.n_blocks, tokens, s.sums, s.work);
    } else if (by_rows(p, tokens.n)) {
        multiply_rows(p, s, item, tokens);
    } else {
        p.kernels.gemm(item.blocks, item.n_blocks, tokens, s.sums, s.work);
    }
}

// Multiplies the row blocks of one item with the tokens listed in s.x and stores to s.y. fresh: not the
// tokens of the item before. first_shared: the first of them among those that all threads share.
void multiply_item(const Product& p, const Scratch& s, int64_t matrix, int64_t r0, int n_tokens, bool fresh,
                   int64_t first_shared = 0) {
    ItemSums item(p, s, matrix, r0);
    if (p.kernels.row_scales && !by_rows(p, n_tokens)) item.read_scales();
    multiply_blocks(p, s, item, {s.x, n_tokens, fresh, &item, p.shared, p.shared_rows, first_shared});
    if (fills_sink(p, n_tokens)) return;
    for (int t = 0; t < n_tokens; ++t) {
        if (t + kStoresAhead < n_tokens)
            prefetch_stores(s.y[t + kStoresAhead] + item.row_bytes(r0),
                            item.row_bytes(item.n_blocks * p.block_rows));
        for (int b = 0; b < item.n_blocks; ++b)
            item.finish(b, t, s.sums + (static_cast<int64_t>(b) * n_tokens + t) * kBlockRows);
    }
}

Product product_of(const Op& op, const Tensor* tensors, bool gated, int first_bias) {
    Product p;
    p.up = tensors + op.src[0];
    p.gate = gated ? tensors + op.src[1] : nullptr;
    p.kernels = weight_kernels(p.up->type);
    p.up_bias = optional(tensors, op.src[first_bias]);
    p.gate_bias = gated ? optional(tensors, op.src[first_bias + 1]) : nullptr;
    p.activation = op.ip[2];
    p.f16_out = tensors[op.dst].type == kF16;
    p.tiles = uses_tiles(op, p.kernels);
    p.wide = wide_blocks(op, tensors, p.tiles);
    p.block_rows = gated ? kHalfRows : kBlockRows;
    p.scale_at = act_scale_at(op.ip[0], p.up->ne[0]);
    return p;
}

// Kernels that round alike take sets of tokens of one kind.
int kind_of_set(const Product& p, int64_t n) {
    if (p.tiles) return 0;
    return by_rows(p, static_cast<int>(n)) ? 1 : n >= p.kernels.many_tokens ? 3 : 2;
}

// Whether sets of so many tokens, a part of kMaxTokens if there are more, are of the kinds of the sets that
// they are cut from, the last one too: sums shall not depend on the number of threads.
bool rounds_alike(const Product& p, int64_t n_tokens, int64_t cut) {
    const auto last_of = [&](int64_t set) { return n_tokens - (n_tokens - 1) / set * set; };
    const int64_t whole = std::min<int64_t>(n_tokens, kMaxTokens), rest = last_of(whole);
    const auto alike = [&](int64_t a, int64_t b) { return kind_of_set(p, a) == kind_of_set(p, b); };
    return alike(cut, whole) && alike(last_of(cut), rest) && (cut >= rest || alike(cut, rest));
}

// Whether sets of so many tokens are worth unpacking the rows.
bool worth_cutting(const Product& p, int64_t cut) {
    constexpr int64_t kFewest = 16;
    return !p.tiles && cut >= kFewest && !by_rows(p, static_cast<int>(cut));
}

void dense_product(const ThreadContext& ctx, const Op& op, const Tensor* tensors, bool gated) {
    Product p = product_of(op, tensors, gated, gated ? 3 : 2);
    const Tensor& dst = tensors[op.dst];
    const uint8_t* x = tensors[op.src[gated ? 2 : 1]].data;
    const int64_t n_tokens = dense_tokens(op, tensors);
    if (n_tokens == 0) return;
    const int64_t x_stride = act_row_bytes(op.ip[0], p.up->ne[0]);
    const int64_t n_batch = dst.ne[2] > 0 ? dst.ne[2] : 1;
    const Scratch s(ctx.scratch, 0, p.wide);
    while (p.wide > 1 && p.n_items() * n_batch < 4 * ctx.nth) p.wide /= 2;
    if (p.wide == 1 && n_tokens <= kMaxTokens && by_rows(p, static_cast<int>(n_tokens)))
        p.block_rows = rows_for_threads(p, n_batch, ctx.nth);

    // Tokens are cut further when there are too few row blocks to keep all threads busy.
    const int64_t n_blocks = p.n_items() * n_batch;
    int64_t cut = std::min<int64_t>(n_tokens, kMaxTokens);
    const auto items_of = [&](int64_t set) { return n_blocks * ((n_tokens + set - 1) / set); };
    const auto can_halve = [&] { return rounds_alike(p, n_tokens, (cut + 1) / 2); };
    while (ctx.nth > 1 && cut >= 2 * (kFewTokens + 1) && items_of(cut) < 4 * ctx.nth && can_halve())
        cut = (cut + 1) / 2;
    while (ctx.nth >= kManyThreads && items_of(cut) < ctx.nth && worth_cutting(p, (cut + 1) / 2) &&
           can_halve())
        cut = (cut + 1) / 2;
    const int64_t n_cuts = (n_tokens + cut - 1) / cut;
    const int64_t n_items = n_blocks * n_cuts;
    int64_t last_tokens = -1;
    const int64_t shared = shared_need(op, tensors, p.kernels, p.tiles);
    if (0 < shared && shared <= kMostShared) share_tokens(ctx, p, x, n_tokens * n_batch);
    ItemRanges items(ctx, n_items);
    for (int64_t item; (item = items.next()) >= 0;) {
        const int64_t t0 = item % n_cuts * cut, block = item / n_cuts;
        const int64_t batch = block / p.n_items(), r0 = block % p.n_items() * p.rows_per_item();
        const int n = static_cast<int>(std::min(cut, n_tokens - t0));
        const int64_t these_tokens = batch * n_tokens + t0;
        const bool fresh = these_tokens != last_tokens;
        for (int t = 0; fresh && t < n; ++t)
            set_token(p, s, t, x + (these_tokens + t) * x_stride, row<uint8_t>(dst, t0 + t, batch));
        multiply_item(p, s, p.up->ne[2] > 1 ? batch : 0, r0, n, fresh, these_tokens);
        last_tokens = these_tokens;
    }
}

// Lists the experts' tokens in sets of nearly equal size; returns their number.
int64_t list_sets(const int32_t* groups, int64_t n_experts, int64_t set_tokens, ExpertSet* sets) {
    int64_t n_sets = 0;
    for (int64_t e = 0; e < n_experts; ++e) {
        const int64_t n = groups[e + 1] - groups[e];
        if (n == 0) continue;  // most of them, where few tokens are divided among hundreds of experts
        const int64_t parts = (n + set_tokens - 1) / set_tokens;
        for (int64_t i = 0; i < parts; ++i) {
            const int64_t begin = n * i / parts, end = n * (i + 1) / parts;
            sets[n_sets++] = {static_cast<int32_t>(e), static_cast<int32_t>(groups[e] + begin),
                              static_cast<int32_t>(end - begin)};
        }
    }
    return n_sets;
}

void expert_product(const ThreadContext& ctx, const Op& op, const Tensor* tensors, bool gated) {
    Product p = product_of(op, tensors, gated, gated ? 4 : 3);
    const Tensor& dst = tensors[op.dst];
    const uint8_t* x = tensors[op.src[gated ? 2 : 1]].data;
    const auto* groups = reinterpret_cast<const int32_t*>(tensors[op.src[gated ? 3 : 2]].data);
    const int64_t n_used = op.ip[3], n_experts = op.ip[4];
    const bool row_per_slot = !gated && op.ip[2] == 1;
    const int32_t* entries = groups + n_experts + 1;
    const int64_t x_stride = act_row_bytes(op.ip[0], p.up->ne[0]);
    const int64_t most = set_tokens(p.kernels, p.tiles, p.up->ne[0]);
    const Scratch s(ctx.scratch, max_sets(op, dst, most), p.wide);

    const int64_t n_sets = list_sets(groups, n_experts, most, s.sets);
    const auto takes_rows = [&](const ExpertSet& set) { return by_rows(p, set.n); };
    if (p.wide == 1 && std::all_of(s.sets, s.sets + n_sets, takes_rows))
        p.block_rows = rows_for_threads(p, n_sets, ctx.nth);
    int64_t last_set = -1;
    ItemRanges items(ctx, n_sets * p.n_items());
    for (int64_t item; (item = items.next()) >= 0;) {
        const int64_t set = item / p.n_items(), r0 = item % p.n_items() * p.rows_per_item();
        const ExpertSet tokens = s.sets[set];
        const bool fresh = set != last_set;
        for (int t = 0; fresh && t < tokens.n; ++t) {
            const int64_t entry = entries[tokens.begin + t];
            set_token(p, s, t, x + (row_per_slot ? entry : entry / n_used) * x_stride,
                      row<uint8_t>(dst, entry % n_used, entry / n_used));
        }
        multiply_item(p, s, tokens.expert, r0, tokens.n, fresh);
        last_set = set;
    }
}

}  // namespace

void op_mul_mat(const ThreadContext& ctx, const Op& op, const Tensor* tensors, const Runtime&) {
    dense_product(ctx, op, tensors, false);
}

void op_mul_mat_up_gate(const ThreadContext& ctx, const Op& op, const Tensor* tensors, const Runtime&) {
    dense_product(ctx, op, tensors, true);
}

void op_mul_mat_id(const ThreadContext& ctx, const Op& op, const Tensor* tensors, const Runtime&) {
    expert_product(ctx, op, tensors, false);
}

void op_mul_mat_id_up_gate(const ThreadContext& ctx, const Op& op, const Tensor* tensors, const Runtime&) {
    expert_product(ctx, op, tensors, true);
}

size_t matmul_scratch_bytes(const Op& op, const Tensor* tensors) {
    if (op.kind == kOpActPrepare) return 0;
    const Tensor& w = tensors[op.src[0]];
    const bool by_expert = op.kind == kOpMulMatId || op.kind == kOpMulMatIdUpGate;
    const WeightKernels kernels = weight_kernels(w.type);
    const bool tiles = uses_tiles(op, kernels);
    const int64_t most = set_tokens(kernels, tiles, w.ne[0]);
    const int64_t n_sets = by_expert ? max_sets(op, tensors[op.dst], most) : 0;
    const size_t fixed = Scratch::fixed_bytes(n_sets, wide_blocks(op, tensors, tiles));
    if (tiles) return fixed + kernels.tiles.work_bytes(w.ne[0]);
    const int n_passes = kernels.pass_tokens > 0 ? row_passes(kernels, kernels.pass_tokens) : 1;
    return fixed + pass_bytes(kernels, w.ne[0]) * n_passes;
}

size_t matmul_shared_bytes(const Op& op, const Tensor* tensors, int) {
    if (op.kind == kOpActPrepare) return 0;
    const Tensor& w = tensors[op.src[0]];
    const WeightKernels kernels = weight_kernels(w.type);
    // Fewer tokens than those of a plan may share what the most are too many for.
    return static_cast<size_t>(
        std::min(shared_need(op, tensors, kernels, uses_tiles(op, kernels)), kMostShared));
}

int act_format(int weight_type, int64_t n_rows, bool by_expert) {
    const WeightKernels kernels = weight_kernels(weight_type);
    const int64_t least = by_expert ? kernels.tiles.min_expert_tokens : kernels.tiles.min_tokens;
    const bool tiles = kernels.tiles.product && n_rows >= least && has_amx();
    return tiles ? kernels.tiles.act_format : kernels.act_format;
}

namespace {

const WeightKernels* unpacking_kernels(int type) {
    using Lookup = const WeightKernels* (*)(int);
    for (Lookup find :
         {lane_weight_kernels, float_weight_kernels, legacy_weight_kernels, kquant_weight_kernels,
          iq4_weight_kernels, iqk_weight_kernels, row_scale_weight_kernels, small_block_weight_kernels,
          interleaved_weight_kernels, trellis_weight_kernels, grid_weight_kernels})
        if (const WeightKernels* k = find(type)) return k;
    return nullptr;
}

}  // namespace

bool has_unpacker(int type) { return unpacking_kernels(type) != nullptr; }

WeightKernels weight_kernels(int type) {
    if (const WeightKernels* k = unpacking_kernels(type)) return *k;
    if (const WeightKernels* k = decoded_weight_kernels(type)) return *k;
    throw std::invalid_argument("no matrix product for tensor type " + std::to_string(type));
}

}  // namespace ikpy
