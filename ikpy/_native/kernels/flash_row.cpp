// Row kernel: generation and other small batches. Flash: threads share the cells, every block of cells serves
// all heads before the next is touched. Full softmax: threads share the K heads.
#include <algorithm>
#include <cstring>

#include "kernels/flash_attention.hpp"
#include "kernels/flash_rows.hpp"

namespace ikpy {
namespace {

using simd::kLanes;
using simd::V;

struct RowBuffers {
    float *q, *k, *v, *s;
    int64_t ldk, ldv, lds;
};

RowBuffers layout(uint8_t* scratch, const AttentionArgs& a) {
    RowBuffers b;
    b.ldk = round_up(a.dk, 16);
    b.ldv = round_up(a.dv, 16);
    b.lds = round_up(a.flash ? kRowCells : a.n_kv, kRowCells);
    b.q = reinterpret_cast<float*>(scratch);
    b.k = b.q + a.n_heads * a.n_tokens * b.ldk;
    b.v = b.k + kRowCells * b.ldk;
    b.s = b.v + kRowCells * b.ldv;
    return b;
}

void pack_q(const AttentionArgs& a, const RowBuffers& b) {
    const int64_t rows = a.rows_per_kv_head();
    const float f = a.q_factor();
    std::memset(b.q, 0, size_t(a.n_heads * a.n_tokens * b.ldk) * sizeof(float));
    for (int64_t h = 0; h < a.n_kv_heads; ++h) {
        for (int64_t r = 0; r < rows; ++r) {
            const float* q = a.q_row(h, r);
            float* to = b.q + (h * rows + r) * b.ldk;
            for (int64_t d = 0; d < a.dk; ++d) to[d] = f * q[d];
        }
    }
}

// Share of K head `kv_head` in fetching the cells from c0 on, which all heads read next.
flash::Prefetch next_cells(const AttentionArgs& a, const Tensor& cache, int64_t kv_head, int64_t c0,
                           int64_t last) {
    const int64_t n = std::max<int64_t>(0, std::min<int64_t>(kRowCells, last - c0));
    const int64_t lines = (n * cache.nb[2] + 63) / 64;
    const int64_t begin = lines * kv_head / a.n_kv_heads, end = lines * (kv_head + 1) / a.n_kv_heads;
    return {cache.data + c0 * cache.nb[2] + begin * 64, 64, 1, end - begin};
}

void scores(const AttentionArgs& a, int64_t kv_head, int64_t c0, int64_t n, const RowBuffers& b, float* s,
            flash::Prefetch next) {
    const int64_t rows = a.rows_per_kv_head();
    const float* q = b.q + kv_head * rows * b.ldk;
    const uint8_t* k = row<uint8_t>(*a.k, kv_head, c0);
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
             const float* p, const float* alpha, float* o, flash::Prefetch next) {
    const int64_t rows = a.rows_per_kv_head();
    const uint8_t* v = row<uint8_t>(*a.v, a.v_head(kv_head), c0);
    const flash::RowProducts* direct = flash::row_products(a.v->type, rows);
    if (direct && a.dv % direct->step == 0) {
        direct->outputs(p, b.lds, n, v, a.v->nb[2], a.dv, alpha, o, b.ldv, next);
        return;
    }
    a.load_v(v, a.v->nb[2], n, a.dv, b.v, b.ldv);
    const uint8_t* expanded = reinterpret_cast<const uint8_t*>(b.v);
    flash::row_products(kF32, rows)->outputs(p, b.lds, n, expanded, 4 * b.ldv, b.ldv, alpha, o, b.ldv, next);
}

// Soft cap and mask on n scores of one token's row, padded to a multiple of kLanes; returns the maximum.
float finish_scores(const AttentionArgs& a, const uint32_t* bits, bool masked, int64_t n, float* s) {
    for (int64_t c = n; c < round_up(n, kLanes); ++c) s[c] = kMasked;
    if (a.softcap != 0.0f) {
        const V cap = simd::set1(a.softcap * simd::kLog2e);
        for (int64_t c = 0; c < n; c += kLanes) {
            simd::store(s + c, simd::mul(cap, simd::tanh(simd::load(s + c))));
        }
        for (int64_t c = n; c < round_up(n, kLanes); ++c) s[c] = kMasked;
    }
    if (masked) {
        for (int64_t c = 0; c < n; ++c) s[c] = (bits[c >> 5] >> (c & 31)) & 1 ? s[c] : kMasked;
    }
    V top = simd::set1(kNoMaximum);
    for (int64_t c = 0; c < n; c += kLanes) top = simd::max(top, simd::load(s + c));
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

float power_of_two(float x) {
    alignas(64) float lane[kLanes];
    simd::store(lane, simd::exp2(simd::set1(x)));
    return lane[0];
}

constexpr int kWords = kRowCells / 32;

// Which of a block's cells the tokens see.
struct BlockMask {
    uint32_t bits[kRowKernelMax][kWords];
    int visible[kRowKernelMax];

    bool fill(const AttentionArgs& a, int64_t c0, int64_t n) {
        bool any = false;
        for (int64_t t = 0; t < a.n_tokens; ++t) {
            visible[t] = visible_bits(a, t, c0, n, bits[t], kWords);
            any |= visible[t] > 0;
        }
        return any;
    }
};

// One block of cells for one K head: scores, online softmax of each row, weighted sum of V.
void flash_block(const AttentionArgs& a, int64_t kv_head, int64_t c0, int64_t n, int64_t last,
                 const BlockMask& mask, const RowBuffers& b, const Partials& p, int64_t part) {
    const int64_t rows = a.rows_per_kv_head();
    const int64_t first = kv_head * rows;
    float alpha[kRowKernelMax];
    scores(a, kv_head, c0, n, b, b.s, next_cells(a, *a.k, kv_head, c0 + n, last));
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t t = a.token_of(r);
        float* s = b.s + r * b.lds;
        float& maximum = p.max_of(part, first + r);
        float& sum = p.sum_of(part, first + r);
        const float top = std::max(maximum, finish_scores(a, mask.bits[t], mask.visible[t] != n, n, s));
        const float total = simd::sum(weights(s, n, top));
        alpha[r] = top == maximum ? 1.0f : power_of_two(maximum - top);
        sum = sum * alpha[r] + total;
        maximum = top;
    }
    outputs(a, kv_head, c0, n, b, b.s, alpha, p.acc_row(part, first),
            next_cells(a, *a.v, kv_head, c0 + n, last));
}

void run_flash(const ThreadContext& ctx, const AttentionArgs& a, const RowBuffers& b, const Partials& p) {
    int64_t first, last, begin, end;
    covered_cells(a, 0, a.n_tokens, &first, &last);
    split_range(last - first, ctx.ith, ctx.nth, kRowCells, &begin, &end);
    const int64_t part = ctx.ith;
    std::fill(p.acc_row(part, 0), p.acc_row(part, 0) + p.n_rows * p.ld, 0.0f);
    for (int64_t r = 0; r < p.n_rows; ++r) {
        p.max_of(part, r) = kNoMaximum;
        p.sum_of(part, r) = 0.0f;
    }
    BlockMask mask;
    for (int64_t c0 = first + begin; c0 < first + end; c0 += kRowCells) {
        const int64_t n = std::min<int64_t>(kRowCells, first + end - c0);
        if (!mask.fill(a, c0, n)) continue;
        for (int64_t h = 0; h < a.n_kv_heads; ++h) flash_block(a, h, c0, n, first + end, mask, b, p, part);
    }
}

void run_full_head(const AttentionArgs& a, int64_t kv_head, const RowBuffers& b, float* acc) {
    const int64_t rows = a.rows_per_kv_head();
    int64_t first, last;
    covered_cells(a, 0, a.n_tokens, &first, &last);
    float top[kRowKernelMax], alpha[kRowKernelMax];
    double total[kRowKernelMax] = {};
    BlockMask mask;
    std::fill(top, top + kRowKernelMax, kNoMaximum);
    std::fill(alpha, alpha + kRowKernelMax, 1.0f);
    for (int64_t c0 = first; c0 < last; c0 += kRowCells) {
        const int64_t n = std::min<int64_t>(kRowCells, last - c0);
        float* s = b.s + (c0 - first);
        if (!mask.fill(a, c0, n)) {
            for (int64_t r = 0; r < rows; ++r) std::fill_n(s + r * b.lds, round_up(n, kLanes), kMasked);
            continue;
        }
        scores(a, kv_head, c0, n, b, s, {nullptr, 0, 0, 0});
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t t = a.token_of(r);
            top[r] = std::max(top[r], finish_scores(a, mask.bits[t], mask.visible[t] != n, n, s + r * b.lds));
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
        outputs(a, kv_head, c0, n, b, b.s + (c0 - first), alpha, acc, {nullptr, 0, 0, 0});
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
    return size_t(a.n_heads * a.n_tokens * ldk + kRowCells * (ldk + ldv) + rows * lds + rows * ldv + 64) *
           sizeof(float);
}

void attention_rows(const ThreadContext& ctx, const AttentionArgs& a) {
    const RowBuffers b = layout(ctx.scratch, a);
    // The columns that fill up expanded rows are read.
    if (b.ldk != a.dk || b.ldv != a.dv)
        std::memset(b.k, 0, size_t(kRowCells * (b.ldk + b.ldv)) * sizeof(float));
    pack_q(a, b);
    if (a.flash) {
        const Partials p = partials_at(ctx.shared, a, ctx.nth);
        run_flash(ctx, a, b, p);
        ctx.sync();
        combine_partials(ctx, a, p);
        return;
    }
    for (int64_t h; (h = ctx.counters[0].fetch_add(1, std::memory_order_relaxed)) < a.n_kv_heads;) {
        run_full_head(a, h, b, b.s + a.rows_per_kv_head() * b.lds);
    }
}

}  // namespace ikpy
