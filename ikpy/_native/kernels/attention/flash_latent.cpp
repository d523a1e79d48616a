// Latent attention: the pass over the cells of an item, and the items of an op.
#include <algorithm>
#include <cstring>

#include "kernels/attention/flash_latent_item.hpp"
#include "kernels/attention/flash_pack.hpp"
#include "kernels/simd/simd_f32.hpp"

namespace ikpy {
namespace latent {
namespace {

using simd::kLanes;

void pack(const Problem& problem, const Item& item, const Buffers& b) {
    const AttentionArgs& a = problem.a;
    for (int64_t m = 0; m < problem.shape.rows; m += 16) {
        const float* rows[16];
        for (int64_t i = 0; i < 16; ++i)
            rows[i] = m + i < item.n_rows ? a.q_row(0, item.first_row + m + i) : nullptr;
        flash::rows_to_lanes(rows, a.dk, a.q_factor(), b.q + m, problem.shape.rows);
    }
    problem.products->pack(problem.shape, b.q, b.work);
    if (problem.has_middles) sum_query_blocks(problem, b);
}

// The cells [c0, c0 + n): in the cache, or copied and filled up with zeros where they are less than a step.
Cells cells_at(const Problem& problem, int64_t c0, int64_t n, const Buffers& b) {
    Cells cells{};
    uint8_t* to = b.rest;
    for (int i = 0; i < problem.shape.n_segments; ++i) {
        const Tensor& k = *problem.keys[i];
        cells.rows[i] = row<uint8_t>(k, 0, c0);
        cells.stride[i] = k.nb[2];
        if (n == kCells) continue;
        const int64_t bytes = problem.row_bytes(i), stride = round_up(bytes, 64);
        std::memset(to + n * stride, 0, size_t((kCells - n) * stride));
        for (int64_t c = 0; c < n; ++c)
            std::memcpy(to + c * stride, cells.rows[i] + c * k.nb[2], size_t(bytes));
        cells.rows[i] = to;
        cells.stride[i] = stride;
        to += kCells * stride;
    }
    return cells;
}

// The blocks of a range; those that wait for V are in `pending`.
struct Range {
    const Problem& problem;
    const Item& item;
    const Buffers& b;
    Background next;
    Blocks pending;

    void flush() {
        if (pending.n > 0) problem.products->outputs(problem.shape, pending, b.o, b.work, next);
        pending.begin += pending.n;
        pending.n = 0;
    }
    void add(int64_t c0, int64_t n);
};

void Range::add(int64_t c0, int64_t n) {
    const Shape& shape = problem.shape;
    const Visibility seen = visibility(problem, item, c0, n, b);
    // Blocks that meet V together lie behind each other.
    if (seen == Visibility::kNone || n < kCells) flush();
    if (seen == Visibility::kNone) return;
    if (pending.begin + pending.n == problem.products->blocks) {
        flush();
        pending.begin = 0;
    }
    const Tensor& k = *problem.keys[shape.n_segments - 1];
    next.skip_to(k.data + (c0 + n) * k.nb[2]);
    const Cells cells = cells_at(problem, c0, n, b);
    const int64_t block = pending.begin + pending.n;
    problem.products->scores(shape, cells, block, b.s, b.work, next);
    if (problem.has_middles) {
        read_middles(problem, cells, b);
        add_middles_to_scores(problem, b);
    }
    if (find_maxima(problem, n, seen == Visibility::kSome, b)) {
        flush();
        scale_sums(problem, b);
    }
    problem.products->weigh(shape, block, b.s, {b.top, b.block_top, b.sum}, b.work);
    if (problem.has_middles) add_weighted_middles(problem, b);
    if (pending.n++ == 0) pending.cells = cells;
}

void attend_to(const Problem& problem, const Item& item, int64_t first, int64_t last, const Buffers& b) {
    const Products& products = *problem.products;
    const Tensor& k = *problem.keys[problem.shape.n_segments - 1];
    const int64_t lines = products.blocks * kCells * k.nb[2] / 64;
    const flash::PrefetchLines cache{k.data + first * k.nb[2], k.data + last * k.nb[2]};
    Range range{problem, item, b, Background(cache, lines, products.ticks(problem.shape)), {}};
    for (int64_t c0 = first; c0 < last; c0 += kCells) range.add(c0, std::min(kCells, last - c0));
    range.flush();
    if (products.reorder) products.reorder(problem.shape, b.o);
    if (problem.has_middles) add_means_to_sums(problem, b);
}

// The sums of a row times a factor.
void copy_scaled(const float* o, float factor, int64_t n, float* to) {
    for (int64_t d = 0; d < n; d += kLanes, o += kRowUnit * kRowUnit)
        simd::store(to + d, simd::mul(simd::set1(factor), simd::load(o)));
}

void write(const Problem& problem, const Plan& plan, const Item& item, const Buffers& b,
           const Partials& partials) {
    const AttentionArgs& a = problem.a;
    for (int64_t m = 0; m < item.n_rows; ++m) {
        const int64_t r = item.first_row + m, head = a.head_of(0, r);
        const float* o = sums_of(problem.shape, m, b.o);
        if (plan.splits > 1) {
            copy_scaled(o, 1.0f, a.dv, partials.acc_row(item.part, r));
            partials.max_of(item.part, r) = b.top[m];
            partials.sum_of(item.part, r) = b.sum[m];
            continue;
        }
        const float norm = normalizer(a, head, b.top[m], double(b.sum[m]));
        copy_scaled(o, norm, a.dv, a.out_row(head, a.token_of(r)));
    }
}

void run_item(const Problem& problem, const Plan& plan, const Item& item, const Buffers& b,
              const Partials& partials) {
    const AttentionArgs& a = problem.a;
    int64_t first, last, begin, end;
    covered_cells(a, a.token_of(item.first_row), a.token_of(item.first_row + item.n_rows - 1) + 1, &first,
                  &last);
    // Blocks that meet V together are the same for any number of threads.
    split_range(last - first, int(item.part), int(plan.splits), problem.products->blocks * kCells, &begin,
                &end);
    const int64_t rows = problem.shape.rows;
    std::fill(b.top, b.top + rows, kNoMaximum);
    std::fill(b.sum, b.sum + rows, 0.0f);
    std::memset(b.o, 0, size_t(rows * problem.shape.dv) * sizeof(float));
    if (problem.has_middles) std::memset(b.means, 0, size_t(rows * problem.value_blocks()) * sizeof(float));
    if (begin < end) {
        pack(problem, item, b);
        attend_to(problem, item, first + begin, first + end, b);
    }
    write(problem, plan, item, b, partials);
}

}  // namespace
}  // namespace latent

void attention_latent(const ThreadContext& ctx, const AttentionArgs& a) {
    latent::Problem problem(a);
    const latent::Plan plan = latent::plan_of(problem, ctx.nth);
    problem.shape.rows = plan.rows;
    const latent::Buffers b = latent::layout(ctx.scratch, problem);
    const Partials partials = partials_at(ctx.shared, a, plan.splits);
    for (int64_t i;
         (i = ctx.counters[0].fetch_add(1, std::memory_order_relaxed)) < plan.tiles * plan.splits;) {
        const int64_t first_row = (plan.tiles - 1 - i / plan.splits) * problem.shape.rows;
        const int64_t n_rows = std::min(problem.shape.rows, a.rows_per_kv_head() - first_row);
        latent::run_item(problem, plan, {first_row, n_rows, i % plan.splits}, b, partials);
    }
    if (problem.products->end) problem.products->end();
    if (plan.splits > 1) {
        ctx.sync();
        combine_partials(ctx, a, partials);
    }
}

}  // namespace ikpy
