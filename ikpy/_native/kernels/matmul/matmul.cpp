// The matrix products: work sharing over (matrix, row block) items, and token lists.
#include <algorithm>

#include "ikpy/ops.hpp"
#include "kernels/item_ranges.hpp"
#include "kernels/matmul/activations.hpp"
#include "kernels/matmul/gemm_few_amx.hpp"
#include "kernels/matmul/matmul_item.hpp"
#include "kernels/weights/weight_kernels.hpp"
#include "quantize/dequantize.hpp"

namespace ikpy {
namespace {

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

void share_tokens(const ThreadContext& ctx, MatmulProduct& p, const uint8_t* x, int64_t n_rows) {
    int64_t begin, end;
    split_range(n_rows, ctx.ith, ctx.nth, 1, &begin, &end);
    p.kernels.share(x, p.up->ne[0], n_rows, begin, end, ctx.shared);
    p.shared = ctx.shared;
    p.shared_rows = n_rows;
    ctx.sync();
}

const Tensor* optional(const Tensor* tensors, int32_t index) { return index < 0 ? nullptr : tensors + index; }

// Kernels take up to four rows at once, and groups of interleaved rows as far as they lie in a half.
constexpr int kFewestRows = 4;

// Rows of each matrix per item where few tokens meet `n_matrices` matrices: so many that the last thread to
// end has least to do, if an item costs about as much as one more row. Routers of 256 experts are 8 blocks.
int rows_for_threads(const MatmulProduct& p, int64_t n_matrices, int n_threads) {
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

MatmulProduct product_of(const Op& op, const Tensor* tensors, bool gated, int first_bias) {
    MatmulProduct p;
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
int kind_of_set(const MatmulProduct& p, int64_t n) {
    if (p.tiles) return 0;
    return by_rows(p, static_cast<int>(n)) ? 1 : n >= p.kernels.many_tokens ? 3 : 2;
}

// Whether sets of so many tokens, a part of kMaxTokens if there are more, are of the kinds of the sets that
// they are cut from, the last one too: sums shall not depend on the number of threads.
bool rounds_alike(const MatmulProduct& p, int64_t n_tokens, int64_t cut) {
    const auto last_of = [&](int64_t set) { return n_tokens - (n_tokens - 1) / set * set; };
    const int64_t whole = std::min<int64_t>(n_tokens, kMaxTokens), rest = last_of(whole);
    const auto alike = [&](int64_t a, int64_t b) { return kind_of_set(p, a) == kind_of_set(p, b); };
    return alike(cut, whole) && alike(last_of(cut), rest) && (cut >= rest || alike(cut, rest));
}

// Whether sets of so many tokens are worth unpacking the rows.
bool worth_cutting(const MatmulProduct& p, int64_t cut) {
    constexpr int64_t kFewest = 16;
    return !p.tiles && cut >= kFewest && !by_rows(p, static_cast<int>(cut));
}

void dense_product(const ThreadContext& ctx, const Op& op, const Tensor* tensors, bool gated) {
    MatmulProduct p = product_of(op, tensors, gated, gated ? 3 : 2);
    const Tensor& dst = tensors[op.dst];
    const uint8_t* x = tensors[op.src[gated ? 2 : 1]].data;
    const int64_t n_tokens = dense_tokens(op, tensors);
    if (n_tokens == 0) return;
    const int64_t x_stride = act_row_bytes(op.ip[0], p.up->ne[0]);
    const int64_t n_batch = dst.ne[2] > 0 ? dst.ne[2] : 1;
    const MatmulScratch s(ctx.scratch, 0, p.wide);
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
    MatmulProduct p = product_of(op, tensors, gated, gated ? 4 : 3);
    const Tensor& dst = tensors[op.dst];
    const uint8_t* x = tensors[op.src[gated ? 2 : 1]].data;
    const auto* groups = reinterpret_cast<const int32_t*>(tensors[op.src[gated ? 3 : 2]].data);
    const int64_t n_used = op.ip[3], n_experts = op.ip[4];
    const bool row_per_slot = !gated && op.ip[2] == 1;
    const int32_t* entries = groups + n_experts + 1;
    const int64_t x_stride = act_row_bytes(op.ip[0], p.up->ne[0]);
    const int64_t most = set_tokens(p.kernels, p.tiles, p.up->ne[0]);
    const MatmulScratch s(ctx.scratch, max_sets(op, dst, most), p.wide);

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
    const size_t fixed = MatmulScratch::fixed_bytes(n_sets, wide_blocks(op, tensors, tiles));
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

}  // namespace ikpy
