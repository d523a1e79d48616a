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

void scores(const AttentionArgs& a, int64_t kv_head, int64_t c0, int64_t n, const RowBuffers& b, float* s) {
    const int64_t rows = a.rows_per_kv_head();
    const float* q = b.q + kv_head * rows * b.ldk;
    a.load_k(row<uint8_t>(*a.k, kv_head, c0), a.k->nb[2], n, a.d0, b.k, b.ldk);
    if (a.k1) a.load_k1(row<uint8_t>(*a.k1, a.k1_head(kv_head), c0), a.k1->nb[2], n, a.d1, b.k + a.d0, b.ldk);
    switch (rows) {
#define CASE(R)                                                         \
    case R:                                                             \
        flash::row_scores<R>(q, b.ldk, b.k, b.ldk, b.ldk, n, s, b.lds); \
        break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
    }
}

void outputs(const AttentionArgs& a, int64_t kv_head, int64_t c0, int64_t n, const RowBuffers& b,
             const float* p, const float* alpha, float* o) {
    a.load_v(row<uint8_t>(*a.v, a.v_head(kv_head), c0), a.v->nb[2], n, a.dv, b.v, b.ldv);
    switch (a.rows_per_kv_head()) {
#define CASE(R)                                                                 \
    case R:                                                                     \
        flash::row_outputs<R>(p, b.lds, n, b.v, b.ldv, b.ldv, alpha, o, b.ldv); \
        break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
    }
}

// Soft cap and mask on n scores of one token's row, padded to a multiple of kLanes; returns the maximum.
float finish_scores(const AttentionArgs& a, const uint32_t* bits, int64_t n, float* s) {
    if (a.softcap != 0.0f) {
        const V cap = simd::set1(a.softcap * simd::kLog2e);
        for (int64_t c = 0; c < n; c += kLanes) {
            simd::store(s + c, simd::mul(cap, simd::tanh(simd::load(s + c))));
        }
    }
    float top = kNoMaximum;
    for (int64_t c = 0; c < n; ++c) {
        if (!((bits[c >> 5] >> (c & 31)) & 1)) s[c] = kMasked;
        top = std::max(top, s[c]);
    }
    for (int64_t c = n; c < round_up(n, kLanes); ++c) s[c] = kMasked;
    return top;
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

// One block of cells for one K head: scores, online softmax of each row, weighted sum of V.
void flash_block(const AttentionArgs& a, int64_t kv_head, int64_t c0, int64_t n, const uint32_t* bits,
                 const RowBuffers& b, const Partials& p, int64_t part) {
    const int64_t rows = a.rows_per_kv_head();
    const int64_t first = kv_head * rows;
    float alpha[kRowKernelMax];
    scores(a, kv_head, c0, n, b, b.s);
    for (int64_t r = 0; r < rows; ++r) {
        float* s = b.s + r * b.lds;
        float& maximum = p.max_of(part, first + r);
        float& sum = p.sum_of(part, first + r);
        const float top = std::max(maximum, finish_scores(a, bits + a.token_of(r) * kWords, n, s));
        const float total = simd::sum(weights(s, n, top));
        alpha[r] = power_of_two(maximum - top);
        sum = sum * alpha[r] + total;
        maximum = top;
    }
    outputs(a, kv_head, c0, n, b, b.s, alpha, p.acc_row(part, first));
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
    uint32_t bits[kRowKernelMax * kWords];
    for (int64_t c0 = first + begin; c0 < first + end; c0 += kRowCells) {
        const int64_t n = std::min<int64_t>(kRowCells, first + end - c0);
        int64_t visible = 0;
        for (int64_t t = 0; t < a.n_tokens; ++t)
            visible += visible_bits(a, t, c0, n, bits + t * kWords, kWords);
        if (visible == 0) continue;
        for (int64_t h = 0; h < a.n_kv_heads; ++h) flash_block(a, h, c0, n, bits, b, p, part);
    }
}

void run_full_head(const AttentionArgs& a, int64_t kv_head, const RowBuffers& b, float* acc) {
    const int64_t rows = a.rows_per_kv_head();
    int64_t first, last;
    covered_cells(a, 0, a.n_tokens, &first, &last);
    float top[kRowKernelMax], alpha[kRowKernelMax];
    double total[kRowKernelMax] = {};
    std::fill(top, top + kRowKernelMax, kNoMaximum);
    std::fill(alpha, alpha + kRowKernelMax, 1.0f);
    for (int64_t c0 = first; c0 < last; c0 += kRowCells) {
        const int64_t n = std::min<int64_t>(kRowCells, last - c0);
        float* s = b.s + (c0 - first);
        scores(a, kv_head, c0, n, b, s);
        for (int64_t r = 0; r < rows; ++r) {
            uint32_t bits[kWords];
            visible_bits(a, a.token_of(r), c0, n, bits, kWords);
            top[r] = std::max(top[r], finish_scores(a, bits, n, s + r * b.lds));
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
        outputs(a, kv_head, c0, n, b, b.s + (c0 - first), alpha, acc);
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

size_t row_shared_bytes(const AttentionArgs& a, int n_threads) {
    return a.flash ? partials_bytes(a, n_threads) : 0;
}

void attention_rows(const ThreadContext& ctx, const AttentionArgs& a) {
    const RowBuffers b = layout(ctx.scratch, a);
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
