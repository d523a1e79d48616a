// Attention op: arguments, choice of the kernel family, and what both families share.
#include <algorithm>
#include <cmath>

#include "kernels/attention/flash_attention.hpp"
#include "kernels/attention/flash_latent.hpp"
#include "kernels/cache/kv_blocks.hpp"

namespace ikpy {
namespace {

const Tensor* source(const Op& op, const Tensor* tensors, int i) {
    return op.src[i] >= 0 ? &tensors[op.src[i]] : nullptr;
}

// Elements before byte offset `bytes` of a cache row, or -1 if that is not a place where a row of the type
// can start.
int64_t columns_before(int type, int64_t bytes) {
    if (type == kv::kTypeQ8_KV || bytes % kv::row_bytes(type, 1)) return -1;
    return bytes / kv::row_bytes(type, 1) * kv::block_elements(type);
}

void find_v_in_k(AttentionArgs& a) {
    a.v_in_k = false;
    if (a.k->type != a.v->type || a.k->nb[2] != a.v->nb[2] || a.v->data < a.k->data) return;
    if (a.k->ne[1] != a.v->ne[1] || (a.k->ne[1] > 1 && a.k->nb[1] != a.v->nb[1])) return;
    const int64_t column = columns_before(a.k->type, a.v->data - a.k->data);
    if (column < 0 || column + a.dv > a.d0) return;
    a.v_in_k = true;
    a.v_column = column;
}

}  // namespace

AttentionArgs attention_args(const Op& op, const Tensor* tensors) {
    AttentionArgs a{};
    a.q = source(op, tensors, 0);
    a.k = source(op, tensors, 1);
    a.v = source(op, tensors, 2);
    a.mask = source(op, tensors, 3);
    const Tensor* sinks = source(op, tensors, 4);
    a.k1 = source(op, tensors, 5);
    const Tensor* ranges = source(op, tensors, 6);
    a.chosen = source(op, tensors, 7);
    a.common = op.src[8] >= 0 ? &tensors[op.src[8]] : a.mask;
    a.out = &tensors[op.dst];
    a.sinks = sinks ? row<float>(*sinks, 0) : nullptr;
    a.ranges = ranges ? row<int32_t>(*ranges, 0) : nullptr;
    a.d0 = a.k->ne[0];
    a.d1 = a.k1 ? a.k1->ne[0] : 0;
    a.dk = a.d0 + a.d1;
    a.dv = a.v->ne[0];
    a.n_heads = a.q->ne[1];
    a.n_tokens = a.q->ne[2];
    a.n_kv_heads = a.k->ne[1];
    a.heads_per_kv = a.n_heads / a.n_kv_heads;
    a.n_kv = a.k->ne[2];
    a.scale = op.fp[0];
    a.softcap = op.fp[1];
    a.max_bias = op.fp[2];
    a.slope_head = op.ip[2];
    a.slope_heads = op.ip[3];
    const Tensor *cell_pos = source(op, tensors, 9), *pos = source(op, tensors, 10);
    a.cell_pos = cell_pos ? row<int32_t>(*cell_pos, 0) : nullptr;
    a.pos = pos ? row<int32_t>(*pos, 0) : nullptr;
    if (a.cell_pos && a.max_bias == 0.0f) {  // biases in place of another mask
        a.biases = source(op, tensors, 8);
        a.common = a.mask;
    }
    a.farthest = a.biases ? a.biases->ne[0] / 2 : 0;
    a.flash = op.ip[0] != 0;
    a.load_k = kv::load_rows(a.k->type);
    a.load_k1 = a.k1 ? kv::load_rows(a.k1->type) : nullptr;
    a.load_v = kv::load_rows(a.v->type);
    a.k_row_bytes = kv::row_bytes(a.k->type, a.d0);
    a.v_row_bytes = kv::row_bytes(a.v->type, a.dv);
    find_v_in_k(a);
    a.k_coded = !a.k1 && a.dk % 64 == 0;
    a.v_coded = a.dv % 32 == 0;
    return a;
}

const flash::CodeProducts* AttentionArgs::code_products(int type) const {
    const int64_t rows = rows_per_kv_head();
    if (type == kBF16) {
        // The tile unit is set up for both products at once.
        const bool both = k_coded && v_coded && k->type == kBF16 && v->type == kBF16;
        const bool takes = both && rows > flash::kVectorBF16Rows && rows <= kRowKernelMax;
        return takes ? flash::bf16_tile_products() : nullptr;
    }
    const flash::CodeProducts* tiles = flash::tile_code_products(type);
    const bool few = rows <= (tiles ? flash::kVectorCodeRows : kRowKernelMax);
    const flash::CodeProducts* vectors = few ? flash::vector_code_products(type) : nullptr;
    return vectors ? vectors : tiles;
}

int64_t AttentionArgs::row_kernel_max() const {
    const bool tiles =
        k_coded && v_coded && flash::tile_code_products(k->type) && flash::tile_code_products(v->type);
    return tiles ? kCodeRowsMax : kRowKernelMax;
}

float AttentionArgs::q_factor() const { return softcap != 0.0f ? scale / softcap : scale * simd::kLog2e; }

// Slopes fall by powers of 2^(-max_bias / n) for the largest power of two n of heads; those of the other
// heads lie between the first of these.
float AttentionArgs::slope(int64_t head) const {
    int64_t n = 1;
    while (2 * n <= slope_heads) n *= 2;
    const int64_t h = slope_head + head;
    const double steps = h < n ? double(h + 1) : double(2 * (h - n) + 1) / 2;
    return float(std::exp2(-double(max_bias) * steps / double(n)) * double(simd::kLog2e));
}

void covered_cells(const AttentionArgs& a, int64_t t0, int64_t t1, int64_t* first, int64_t* last) {
    *first = a.n_kv;
    *last = 0;
    for (int64_t t = t0; t < t1; ++t) {
        if (a.first_cell(t) >= a.last_cell(t)) continue;
        *first = std::min(*first, a.first_cell(t));
        *last = std::max(*last, a.last_cell(t));
    }
    if (*first > *last) *first = *last;
}

namespace {

// Bits of the cells whose mask is 0 (not -inf), n <= 32.
uint32_t open_cells(const uint16_t* mask, int n) {
#if defined(__AVX512BW__)
    const __mmask32 valid = n >= 32 ? 0xffffffffu : (1u << n) - 1u;
    return _mm512_mask_testn_epi16_mask(valid, _mm512_maskz_loadu_epi16(valid, mask),
                                        _mm512_set1_epi16(-32768));
#else
    uint32_t bits = 0;
    for (int i = 0; i < n; ++i) bits |= uint32_t(mask[i] < 0x8000u) << i;
    return bits;
#endif
}

uint32_t low_bits(int64_t n) { return n <= 0 ? 0u : n >= 32 ? 0xffffffffu : (1u << n) - 1u; }

}  // namespace

int visible_bits(const AttentionArgs& a, int64_t token, int64_t c0, int64_t n, uint32_t* words, int n_words) {
    const uint16_t* mask = a.mask_row(token);
    const int64_t first = a.first_cell(token) - c0, last = std::min(a.last_cell(token) - c0, n);
    int visible = 0;
    for (int w = 0; w < n_words; ++w) {
        const int64_t base = 32 * w;
        uint32_t bits = low_bits(last - base) & ~low_bits(first - base);
        if (bits && mask) bits &= open_cells(mask + c0 + base, int(std::min<int64_t>(32, n - base)));
        words[w] = bits;
        visible += __builtin_popcount(bits);
    }
    return visible;
}

float normalizer(const AttentionArgs& a, int64_t head, float maximum, double sum) {
    if (sum <= 0.0) return 0.0f;
    if (a.sinks) sum += std::exp2(double(a.sinks[head]) * double(simd::kLog2e) - double(maximum));
    return float(1.0 / sum);
}

size_t partials_bytes(const AttentionArgs& a, int64_t parts) {
    return size_t(parts * a.n_heads * a.n_tokens) * size_t(round_up(a.dv, 16) + 2) * sizeof(float);
}

Partials partials_at(uint8_t* shared, const AttentionArgs& a, int64_t parts) {
    Partials p;
    p.ld = round_up(a.dv, 16);
    p.n_rows = a.n_heads * a.n_tokens;
    p.parts = parts;
    p.acc = reinterpret_cast<float*>(shared);
    p.maximum = p.acc + parts * p.n_rows * p.ld;
    p.sum = p.maximum + parts * p.n_rows;
    return p;
}

namespace {

// Factor of a part's sums when they are added up, 1 for the one with the maximum.
float share_of(const Partials& p, int64_t part, int64_t r, float maximum) {
    const float own = p.max_of(part, r);
    return own == maximum ? 1.0f : std::exp2(own - maximum);
}

}  // namespace

void combine_partials(const ThreadContext& ctx, const AttentionArgs& a, const Partials& p) {
    // With more threads than rows, each gets some of the columns.
    const int64_t pieces = std::max<int64_t>(1, ctx.nth / std::max<int64_t>(1, p.n_rows));
    int64_t begin, end;
    split_range(p.n_rows * pieces, ctx.ith, ctx.nth, 1, &begin, &end);
    for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t r = unit / pieces;
        int64_t first, last;
        split_range(a.dv, int(unit % pieces), int(pieces), 16, &first, &last);
        const int64_t kv_head = r / a.rows_per_kv_head(), in_head = r % a.rows_per_kv_head();
        const int64_t head = a.head_of(kv_head, in_head);
        float* out = a.out_row(head, a.token_of(in_head));
        float maximum = kNoMaximum;
        for (int64_t i = 0; i < p.parts; ++i) maximum = std::max(maximum, p.max_of(i, r));
        double sum = 0.0;
        for (int64_t i = 0; i < p.parts; ++i) sum += double(p.sum_of(i, r)) * share_of(p, i, r, maximum);
        const float norm = normalizer(a, head, maximum, sum);
        for (int64_t i = 0; i < p.parts; ++i) {
            const float w = norm * share_of(p, i, r, maximum);
            const float* acc = p.acc_row(i, r);
            if (i == 0) {
#pragma GCC ivdep
                for (int64_t d = first; d < last; ++d) out[d] = w * acc[d];
            } else if (p.sum_of(i, r) != 0.0f) {
#pragma GCC ivdep
                for (int64_t d = first; d < last; ++d) out[d] += w * acc[d];
            }
        }
    }
}

namespace {

bool uses_rows(const AttentionArgs& a) { return a.rows_per_kv_head() <= a.row_kernel_max(); }

// Most tokens that the row kernel takes, 0 = none.
int64_t row_kernel_tokens(const AttentionArgs& a) {
    return std::min(a.n_tokens, a.row_kernel_max() / a.heads_per_kv);
}

bool sees(const AttentionArgs& a, int64_t token, int64_t cell) {
    return cell >= a.first_cell(token) && cell < a.last_cell(token) &&
           row<uint16_t>(*a.common, a.first_token + token)[cell] == 0;
}

// Tokens from `token` on that have cells in common: those of one sequence, or of several with a common
// beginning.
int64_t group_size(const AttentionArgs& a, int64_t token) {
    if (!a.mask || !a.ranges) return a.n_tokens - token;
    int64_t next = token + 1;
    while (next < a.n_tokens &&
           (a.first_cell(next) >= a.last_cell(next) || sees(a, next - 1, a.first_cell(next))))
        ++next;
    return next - token;
}

// Whether there are at least as many groups as threads, all small: then each is the work of one thread.
bool one_thread_each(const AttentionArgs& a, int n_threads) {
    int64_t n_groups = 0;
    const int64_t most = std::max(row_kernel_tokens(a), latent_tokens_alone(a));
    for (int64_t t = 0, n; t < a.n_tokens; t += n, ++n_groups) {
        n = group_size(a, t);
        if (n > most) return false;
    }
    return n_threads > 1 && n_groups >= n_threads;
}

void attend_alone(const ThreadContext& ctx, const AttentionArgs& a) {
    std::atomic<int64_t> counters[kCountersPerOp] = {};
    ThreadContext own = ctx;
    own.ith = 0;
    own.nth = 1;
    own.shared += own_partials_bytes(a) * ctx.ith;
    own.counters = counters;
    const auto take = [&] { return ctx.counters[0].fetch_add(1, std::memory_order_relaxed); };
    int64_t group = 0, mine = take();
    for (int64_t t = 0, n; t < a.n_tokens; t += n, ++group) {
        n = group_size(a, t);
        if (group != mine) continue;
        counters[0].store(0, std::memory_order_relaxed);
        attend(own, a.part(t, n));
        mine = take();
    }
}

}  // namespace

void attend(const ThreadContext& ctx, const AttentionArgs& a) {
    if (uses_latent(a)) {
        attention_latent(ctx, a);
    } else if (uses_rows(a)) {
        attention_rows(ctx, a);
    } else {
        attention_tiles(ctx, a);
    }
}

void restart(const ThreadContext& ctx) {
    ctx.sync();
    if (ctx.ith == 0) ctx.counters[0].store(0, std::memory_order_relaxed);
    ctx.sync();
}

size_t own_partials_bytes(const AttentionArgs& a) {
    return size_t(round_up(int64_t(partials_bytes(a.part(0, row_kernel_tokens(a)), 1)), 64));
}

size_t attend_shared_bytes(const AttentionArgs& a, int n_threads) {
    if (!a.flash) return 0;
    const size_t rows = row_kernel_tokens(a) ? own_partials_bytes(a) * n_threads : 0;
    if (uses_latent(a)) return std::max(rows, latent_shared_bytes(a, n_threads));
    return uses_rows(a) ? rows : std::max(rows, tile_shared_bytes(a, n_threads));
}

size_t attention_scratch_bytes(const Op& op, const Tensor* tensors) {
    const AttentionArgs a = attention_args(op, tensors);
    const int64_t n_rows = row_kernel_tokens(a);
    const size_t rows = n_rows ? row_scratch_bytes(a.part(0, n_rows), a.n_kv) : 0;
    if (uses_latent(a)) return std::max(rows, latent_scratch_bytes(a));
    return uses_rows(a) ? rows : std::max(rows, tile_scratch_bytes(a, a.n_kv));
}

size_t attention_shared_bytes(const Op& op, const Tensor* tensors, int n_threads) {
    const AttentionArgs a = attention_args(op, tensors);
    return attend_shared_bytes(a, n_threads) + (a.chosen ? chosen_shared_bytes(a, n_threads) : 0);
}

// Groups of tokens that have no cells in common are separate problems: each meets its own cells only.
void op_attention(const ThreadContext& ctx, const Op& op, const Tensor* tensors, const Runtime&) {
    const AttentionArgs a = attention_args(op, tensors);
    if (a.chosen && any_chose(a)) return attention_chosen(ctx, a);
    if (one_thread_each(a, ctx.nth)) return attend_alone(ctx, a);
    for (int64_t t = 0, n; t < a.n_tokens; t += n) {
        if (t > 0) restart(ctx);
        n = group_size(a, t);
        attend(ctx, a.part(t, n));
    }
}

}  // namespace ikpy
