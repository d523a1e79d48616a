// Row kernel: generation and other small batches. Flash: threads share the cells, every block of cells serves
// all heads before the next is touched. Full softmax: threads share the K heads.
#include <algorithm>
#include <cstring>

#include "kernels/attention/flash_amx.hpp"
#include "kernels/attention/flash_attention.hpp"
#include "kernels/attention/flash_middles.hpp"
#include "kernels/attention/flash_rows.hpp"
#include "kernels/cpu_makers.hpp"

namespace ikpy {
namespace {

using simd::kLanes;
using simd::V;

struct RowBuffers {
    float *q, *k, *v;
    float* s;      // [K heads][score_rows][lds] with flash attention, of one head without
    float* alpha;  // [K heads][rows], filled up to whole vectors
    float* top;    // the same, maxima
    int64_t ldk, ldv, lds;
    const flash::CodeProducts *k_codes, *v_codes;
    flash::CodeQuery* codes;  // query of each K head where K is multiplied as codes
    uint8_t* work;            // of products of codes
    float* q_sums;            // [K heads][rows][blocks]: of K multiplied as codes with a minimum
    float* middles;           // [blocks][kRowCells]: of such K or V
    float* slopes;            // [heads] where scores have biases
};

// Floats of q_sums and middles.
int64_t sum_floats(const AttentionArgs& a) {
    return kv::middle_code(a.k->type) ? round_up(a.n_heads * a.n_tokens * a.dk / 32, 16) : 0;
}
int64_t middle_floats(const AttentionArgs& a) {
    const int64_t of_k = kv::middle_code(a.k->type) ? a.dk : 0, of_v = kv::middle_code(a.v->type) ? a.dv : 0;
    return std::max(of_k, of_v) / 32 * kRowCells;
}

int64_t slope_floats(const AttentionArgs& a) { return a.max_bias != 0.0f ? round_up(a.n_heads, 16) : 0; }

// Rows of scores: products of codes write whole groups of four.
int64_t score_rows(const AttentionArgs& a) { return round_up(a.rows_per_kv_head(), 4); }

// Products of codes with any number of rows up to those of `a`: which kind it is depends on the number.
int64_t code_bytes(const AttentionArgs& a) {
    int64_t bytes = 0;
    for (int64_t n = 1; n <= a.n_tokens; ++n) {
        const AttentionArgs part = a.part(0, n);
        const int64_t rows = part.rows_per_kv_head();
        for (const flash::CodeProducts* codes : {part.k_codes(), part.v_codes()}) {
            if (!codes) continue;
            const int64_t query = int64_t(codes->query_bytes(rows, a.dk)) + int64_t(sizeof(flash::CodeQuery));
            bytes = std::max(bytes, round_up(int64_t(codes->work_bytes(rows, std::max(a.dk, a.dv))), 64) +
                                        a.n_kv_heads * round_up(query, 64) + 64);
        }
    }
    return bytes;
}

RowBuffers layout(uint8_t* scratch, const AttentionArgs& a) {
    RowBuffers b;
    b.ldk = round_up(a.dk, 16);
    b.ldv = round_up(a.dv, 16);
    b.lds = round_up(a.flash ? kRowCells : a.n_kv, kRowCells);
    b.q = reinterpret_cast<float*>(scratch);
    b.k = b.q + a.n_heads * a.n_tokens * b.ldk;
    b.v = b.k + kRowCells * b.ldk;
    b.s = b.v + kRowCells * b.ldv;
    b.alpha = b.s + (a.flash ? a.n_kv_heads : 1) * score_rows(a) * b.lds;
    b.top = b.alpha + round_up(a.n_heads * a.n_tokens, 16);
    // The sums of a head with full softmax follow.
    b.q_sums = b.top + round_up(a.n_heads * a.n_tokens, 16) + a.rows_per_kv_head() * b.ldv;
    b.middles = b.q_sums + sum_floats(a);
    b.slopes = b.middles + middle_floats(a);
    float* end = b.slopes + slope_floats(a);
    b.work = scratch + round_up(reinterpret_cast<uint8_t*>(end) - scratch, 64);
    b.k_codes = a.k_codes();
    b.v_codes = a.v_codes();
    b.codes = nullptr;
    return b;
}

void pack_q(const AttentionArgs& a, const RowBuffers& b) {
    const int64_t rows = a.rows_per_kv_head();
    const float f = a.q_factor();
    if (b.ldk != a.dk) std::memset(b.q, 0, size_t(a.n_heads * a.n_tokens * b.ldk) * sizeof(float));
    for (int64_t h = 0; h < a.n_kv_heads; ++h) {
        for (int64_t r = 0; r < rows; ++r) {
            const float* q = a.q_row(h, r);
            float* to = b.q + (h * rows + r) * b.ldk;
            for (int64_t d = 0; d < a.dk; ++d) to[d] = f * q[d];
        }
    }
}

// The queries as codes, behind the work memory of their products.
void pack_codes(const AttentionArgs& a, const flash::CodeProducts& codes, RowBuffers& b) {
    const int64_t rows = a.rows_per_kv_head();
    uint8_t* at = b.work + round_up(int64_t(codes.work_bytes(rows, std::max(a.dk, a.dv))), 64);
    const int64_t bytes = round_up(int64_t(codes.query_bytes(rows, a.dk)), 64);
    b.codes = reinterpret_cast<flash::CodeQuery*>(at + a.n_kv_heads * bytes);
    for (int64_t h = 0; h < a.n_kv_heads; ++h)
        b.codes[h] = codes.pack(b.q + h * rows * b.ldk, b.ldk, rows, a.dk, at + h * bytes);
    if (!kv::middle_code(a.k->type)) return;
    for (int64_t i = 0; i < a.n_kv_heads * rows; ++i)
        flash::sum_blocks(b.q + i * b.ldk, a.dk / 32, b.q_sums + i * a.dk / 32);
}

// Cells per step with flash attention. Products of codes need 64 cells to fill their tiles.
int64_t step_cells(const AttentionArgs& a, const RowBuffers& b) {
    const AttentionSteps steps = attention_steps(a.rows_per_kv_head());
    int64_t n = kRowCells;
    while (!b.v_codes && n > steps.fewest_cells && n * a.k->nb[2] > steps.bytes) n /= 2;
    return n;
}

// Share of K head `kv_head` in fetching the n cells from c0 on, which all heads read next.
flash::PrefetchLines next_cells(const AttentionArgs& a, const Tensor& cache, int64_t kv_head, int64_t c0,
                                int64_t n) {
    const int64_t lines = (std::max<int64_t>(n, 0) * cache.nb[2] + 63) / 64;
    const int64_t begin = lines * kv_head / a.n_kv_heads, end = lines * (kv_head + 1) / a.n_kv_heads;
    return {cache.data + c0 * cache.nb[2] + begin * 64, cache.data + c0 * cache.nb[2] + end * 64};
}

void scores(const AttentionArgs& a, int64_t kv_head, int64_t c0, int64_t n, const RowBuffers& b, float* s,
            flash::PrefetchLines next) {
    const int64_t rows = a.rows_per_kv_head();
    const float* q = b.q + kv_head * rows * b.ldk;
    const uint8_t* k = row<uint8_t>(*a.k, kv_head, c0);
    if (b.k_codes) {
        b.k_codes->scores(b.codes[kv_head], k, a.k->nb[2], a.dk, n, s, b.lds, b.work, next);
        if (!kv::middle_code(a.k->type)) return;
        flash::read_middles(a.k->type, k, a.k->nb[2], n, a.dk / 32, b.middles);
        flash::add_middles_to_scores(b.middles, b.q_sums + kv_head * rows * a.dk / 32, rows, a.dk / 32, n, s,
                                     b.lds);
        return;
    }
    const flash::RowProducts* direct = a.k1 ? nullptr : flash::row_products(a.k->type, rows);
    if (direct && a.dk % direct->step == 0) {
        direct->scores(q, b.ldk, k, a.k->nb[2], a.dk, n, s, b.lds, next);
        return;
    }
    a.load_k(k, a.k->nb[2], n, a.d0, b.k, b.ldk);
    if (a.k1) a.load_k1(row<uint8_t>(*a.k1, a.k1_head(kv_head), c0), a.k1->nb[2], n, a.d1, b.k + a.d0, b.ldk);
    const uint8_t* expanded = reinterpret_cast<const uint8_t*>(b.k);
    flash::row_products(kF32, rows)->scores(q, b.ldk, expanded, 4 * b.ldk, b.ldk, n, s, b.lds, next);
}

void outputs(const AttentionArgs& a, int64_t kv_head, int64_t c0, int64_t n, const RowBuffers& b,
             const float* p, const float* alpha, float* o, flash::PrefetchLines next) {
    const int64_t rows = a.rows_per_kv_head();
    const uint8_t* v = row<uint8_t>(*a.v, a.v_head(kv_head), c0);
    if (b.v_codes) {
        b.v_codes->outputs(p, b.lds, rows, n, v, a.v->nb[2], a.dv, alpha, o, b.ldv, b.work, next);
        if (!kv::middle_code(a.v->type)) return;
        flash::read_middles(a.v->type, v, a.v->nb[2], n, a.dv / 32, b.middles);
        flash::add_middles_to_outputs(b.middles, p, b.lds, rows, a.dv / 32, n, o, b.ldv);
        return;
    }
    const flash::RowProducts* direct = flash::row_products(a.v->type, rows);
    if (direct && a.dv % direct->step == 0) {
        direct->outputs(p, b.lds, n, v, a.v->nb[2], a.dv, alpha, o, b.ldv, next);
        return;
    }
    a.load_v(v, a.v->nb[2], n, a.dv, b.v, b.ldv);
    const uint8_t* expanded = reinterpret_cast<const uint8_t*>(b.v);
    flash::row_products(kF32, rows)->outputs(p, b.lds, n, expanded, 4 * b.ldv, b.ldv, alpha, o, b.ldv, next);
}

constexpr int kWords = kRowCells / 32;

// Which of a block's cells the tokens see, and where scores have biases the positions of these.
struct BlockMask {
    uint32_t bits[kCodeRowsMax][kWords];
    float cell_pos[kRowCells];

    bool fill(const AttentionArgs& a, int64_t c0, int64_t n) {
        bool any = false;
        for (int64_t t = 0; t < a.n_tokens; ++t) {
            any |= visible_bits(a, t, c0, n, bits[t], kWords) > 0;
        }
        if (any && a.biased()) {
            std::fill_n(cell_pos, kRowCells, 0.0f);
            std::copy_n(a.cell_pos + c0, n, cell_pos);
        }
        return any;
    }
};

// Takes off what the distances of a block's cells from a token cost n scores of a head's row, padded to a
// multiple of kLanes.
void add_biases(const AttentionArgs& a, float slope_of_head, int64_t token, const float* cell_pos, int64_t n,
                float* s) {
    const V slope = simd::set1(-slope_of_head), own = simd::set1(a.position(token));
    for (int64_t c = 0; c < n; c += kLanes) {
        const V distance = simd::abs(simd::sub(own, simd::load(cell_pos + c)));
        simd::store(s + c, simd::fma(slope, distance, simd::load(s + c)));
    }
}

// The same for biases of a head by differences of positions.
void add_differences(const AttentionArgs& a, int64_t head, int64_t token, const float* cell_pos, int64_t n,
                     float* s) {
    const V own = simd::set1(a.position(token)), unit = simd::set1(simd::kLog2e);
    const V most = simd::set1(float(a.farthest)), least = simd::set1(-float(a.farthest));
    const float* const middle = a.biases_of(head);
    for (int64_t c = 0; c < n; c += kLanes) {
        const V difference = simd::max(simd::min(simd::sub(simd::load(cell_pos + c), own), most), least);
        simd::store(s + c, simd::fma(unit, simd::gather(middle, difference), simd::load(s + c)));
    }
}

// Soft cap, bias and mask on n scores of one token's row, padded to a multiple of kLanes; returns the
// maximum.
float finish_scores(const AttentionArgs& a, const RowBuffers& b, const BlockMask& mask, int64_t head,
                    int64_t token, int64_t n, float* s) {
    const uint32_t* bits = mask.bits[token];
    const V cap = simd::set1(a.softcap * simd::kLog2e), masked = simd::set1(kMasked);
    for (int64_t c = 0; c < n && a.softcap != 0.0f; c += kLanes)
        simd::store(s + c, simd::mul(cap, simd::tanh(simd::load(s + c))));
    if (a.biases) {
        add_differences(a, head, token, mask.cell_pos, n, s);
    } else if (a.biased()) {
        add_biases(a, b.slopes[head], token, mask.cell_pos, n, s);
    }
    V top = simd::set1(kNoMaximum);
    for (int64_t c = 0; c < n; c += kLanes) {
        const V x = simd::keep_bits(bits[c >> 5] >> (c & 31), simd::load(s + c), masked);
        simd::store(s + c, x);
        top = simd::max(top, x);
    }
    return simd::highest(top);
}

V weights(float* s, int64_t n, float top) {
    V total = simd::zero();
    for (int64_t c = 0; c < n; c += kLanes) {
        const V p = simd::exp2(simd::sub(simd::load(s + c), simd::set1(top)));
        simd::store(s + c, p);
        total = simd::add(total, p);
    }
    return total;
}

// do_row(i, head, t, s) for every row i with its head, its token and its scores
template <class F>
void for_rows(const AttentionArgs& a, const RowBuffers& b, const F& do_row) {
    int64_t i = 0;
    for (int64_t h = 0; h < a.n_kv_heads; ++h) {
        float* s = b.s + h * score_rows(a) * b.lds;
        for (int64_t t = 0; t < a.n_tokens; ++t)
            for (int64_t j = 0; j < a.heads_per_kv; ++j, ++i, s += b.lds)
                do_row(i, a.heads_per_kv * h + j, t, s);
    }
}

// Maxima and sums of n <= kLanes rows with those of one more block: top, total. Puts into total what
// multiplies earlier sums of outputs.
void add_block(float* maximum, float* sum, int64_t n, const float* top, float* total) {
    float before[kLanes] = {}, sums[kLanes] = {};
    std::copy_n(maximum, n, before);
    std::copy_n(sum, n, sums);
    const V alpha = simd::exp2(simd::sub(simd::load(before), simd::load(top)));
    simd::store(sums, simd::fma(alpha, simd::load(sums), simd::load(total)));
    simd::store(total, alpha);
    std::copy_n(sums, n, sum);
    std::copy_n(top, n, maximum);
}

// Turns the scores of all rows into weights. One pass over the rows for their maxima and one for the weights:
// each of the two is a long chain, and those of several rows overlap.
void online_softmax(const AttentionArgs& a, int64_t n, const BlockMask& mask, const RowBuffers& b,
                    const Partials& p, int64_t part) {
    float *maximum = &p.max_of(part, 0), *sum = &p.sum_of(part, 0);
    for_rows(a, b, [&](int64_t i, int64_t head, int64_t t, float* s) {
        b.top[i] = std::max(maximum[i], finish_scores(a, b, mask, head, t, n, s));
    });
    for_rows(a, b,
             [&](int64_t i, int64_t, int64_t, float* s) { b.alpha[i] = simd::sum(weights(s, n, b.top[i])); });
    for (int64_t i = 0; i < p.n_rows; i += kLanes)
        add_block(maximum + i, sum + i, std::min<int64_t>(kLanes, p.n_rows - i), b.top + i, b.alpha + i);
}

// n cells from c0 on for all heads; those from c0 + n to last follow.
void flash_step(const AttentionArgs& a, int64_t c0, int64_t n, int64_t last, const BlockMask& mask,
                const RowBuffers& b, const Partials& p, int64_t part) {
    const int64_t rows = a.rows_per_kv_head(), head_scores = score_rows(a) * b.lds;
    const int64_t c1 = c0 + n, n1 = std::min(step_cells(a, b), last - c1);
    for (int64_t h = 0; h < a.n_kv_heads; ++h) {
        const flash::PrefetchLines next =
            a.v_in_k ? next_cells(a, *a.k, h, c1, n1) : next_cells(a, *a.v, h, c0, n);
        scores(a, h, c0, n, b, b.s + h * head_scores, next);
    }
    online_softmax(a, n, mask, b, p, part);
    for (int64_t h = 0; h < a.n_kv_heads; ++h) {
        outputs(a, h, c0, n, b, b.s + h * head_scores, b.alpha + h * rows, p.acc_row(part, h * rows),
                next_cells(a, *a.k, h, c1, a.v_in_k ? 0 : n1));
    }
}

void run_flash(const ThreadContext& ctx, const AttentionArgs& a, const RowBuffers& b, const Partials& p) {
    int64_t first, last, begin, end;
    covered_cells(a, 0, a.n_tokens, &first, &last);
    const int64_t step = step_cells(a, b);
    split_range(last - first, ctx.ith, ctx.nth, ctx.nth < kManyThreads ? kRowCells : step, &begin, &end);
    const int64_t part = ctx.ith;
    std::fill(p.acc_row(part, 0), p.acc_row(part, 0) + p.n_rows * p.ld, 0.0f);
    for (int64_t r = 0; r < p.n_rows; ++r) {
        p.max_of(part, r) = kNoMaximum;
        p.sum_of(part, r) = 0.0f;
    }
    BlockMask mask;
    for (int64_t c0 = first + begin; c0 < first + end; c0 += step) {
        const int64_t n = std::min(step, first + end - c0);
        if (!mask.fill(a, c0, n)) continue;
        flash_step(a, c0, n, first + end, mask, b, p, part);
    }
}

void run_full_head(const AttentionArgs& a, int64_t kv_head, const RowBuffers& b, float* acc) {
    const int64_t rows = a.rows_per_kv_head();
    int64_t first, last;
    covered_cells(a, 0, a.n_tokens, &first, &last);
    float top[kCodeRowsMax], alpha[kCodeRowsMax];
    double total[kCodeRowsMax] = {};
    BlockMask mask;
    std::fill(top, top + kCodeRowsMax, kNoMaximum);
    std::fill(alpha, alpha + kCodeRowsMax, 1.0f);
    for (int64_t c0 = first; c0 < last; c0 += kRowCells) {
        const int64_t n = std::min<int64_t>(kRowCells, last - c0);
        float* s = b.s + (c0 - first);
        if (!mask.fill(a, c0, n)) {
            for (int64_t r = 0; r < rows; ++r) std::fill_n(s + r * b.lds, round_up(n, kLanes), kMasked);
            continue;
        }
        scores(a, kv_head, c0, n, b, s, {nullptr, nullptr});
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t t = a.token_of(r);
            top[r] = std::max(top[r], finish_scores(a, b, mask, a.head_of(kv_head, r), t, n, s + r * b.lds));
        }
    }
    for (int64_t r = 0; r < rows; ++r) {
        float* s = b.s + r * b.lds;
        weights(s, last - first, top[r]);
        for (int64_t c = 0; c < last - first; ++c) total[r] += double(s[c]);
    }
    std::memset(acc, 0, size_t(rows * b.ldv) * sizeof(float));
    for (int64_t c0 = first; c0 < last; c0 += kRowCells) {
        const int64_t n = std::min<int64_t>(kRowCells, last - c0);
        if (!mask.fill(a, c0, n)) continue;
        outputs(a, kv_head, c0, n, b, b.s + (c0 - first), alpha, acc, {nullptr, nullptr});
    }
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t head = a.head_of(kv_head, r);
        const float norm = normalizer(a, head, top[r], total[r]);
        float* out = a.out_row(head, a.token_of(r));
        for (int64_t d = 0; d < a.dv; ++d) out[d] = norm * acc[r * b.ldv + d];
    }
}

}  // namespace

size_t row_scratch_bytes(const AttentionArgs& a, int64_t n_kv_max) {
    const int64_t ldk = round_up(a.dk, 16), ldv = round_up(a.dv, 16);
    const int64_t lds = round_up(a.flash ? kRowCells : n_kv_max, kRowCells);
    const int64_t rows = a.rows_per_kv_head();
    const int64_t score_floats = (a.flash ? a.n_kv_heads : 1) * score_rows(a) * lds;
    return size_t(a.n_heads * a.n_tokens * (ldk + 2) + kRowCells * (ldk + ldv) + score_floats + rows * ldv +
                  sum_floats(a) + middle_floats(a) + slope_floats(a) + 96) *
               sizeof(float) +
           size_t(code_bytes(a));
}

void attention_rows(const ThreadContext& ctx, const AttentionArgs& a) {
    RowBuffers b = layout(ctx.scratch, a);
    // The columns that fill up expanded rows are read.
    if (b.ldk != a.dk || b.ldv != a.dv)
        std::memset(b.k, 0, size_t(kRowCells * (b.ldk + b.ldv)) * sizeof(float));
    pack_q(a, b);
    for (int64_t h = 0; a.max_bias != 0.0f && h < a.n_heads; ++h) b.slopes[h] = a.slope(h);
    if (b.k_codes) pack_codes(a, *b.k_codes, b);
    const flash::CodeProducts* codes = b.k_codes ? b.k_codes : b.v_codes;
    if (codes) codes->begin(a.rows_per_kv_head());
    if (a.flash) {
        const Partials p = partials_at(ctx.shared, a, ctx.nth);
        run_flash(ctx, a, b, p);
        if (codes) codes->end();
        ctx.sync();
        combine_partials(ctx, a, p);
        return;
    }
    for (int64_t h; (h = ctx.counters[0].fetch_add(1, std::memory_order_relaxed)) < a.n_kv_heads;) {
        run_full_head(a, h, b, b.alpha + round_up(a.n_heads * a.n_tokens, 16));
    }
    if (codes) codes->end();
}

}  // namespace ikpy
