// Which ops are latent attention, how threads share one, and the memory that they need.
#include <algorithm>

#include "kernels/attention/flash_latent_item.hpp"

namespace ikpy {
namespace latent {
namespace {

// First column of V in the rows of a K segment, -1 if it is not in there.
int64_t column_of(const Tensor& v, const Tensor& k) {
    if (v.type != k.type || v.nb[2] != k.nb[2] || v.data < k.data) return -1;
    const int64_t bytes = v.data - k.data, block = kv::row_bytes(k.type, 1);
    if (k.type == kv::kTypeQ8_KV) return bytes == 0 ? 0 : -1;
    return bytes % block ? -1 : bytes / block * kv::block_elements(k.type);
}

const Products* products_for(int type) {
    for (const auto of : {half_products, code_products, word_products, float_products})
        if (const Products* products = of(type)) return products;
    return nullptr;
}

template <typename T>
T* take(uint8_t*& at, int64_t n) {
    T* p = reinterpret_cast<T*>(at);
    at += round_up(n * int64_t(sizeof(T)), 64);
    return p;
}

}  // namespace

Problem::Problem(const AttentionArgs& args)
    : a(args), products(nullptr), shape{}, keys{a.k, a.k1}, has_middles(kv::middle_code(a.k->type)) {
    if (!a.flash || a.n_kv_heads != 1 || (a.k1 && a.k1->type != a.k->type)) return;
    shape.n_segments = a.k1 ? 2 : 1;
    shape.size[0] = a.d0;
    shape.size[1] = a.d1;
    shape.dv = a.dv;
    const Tensor& last = *keys[shape.n_segments - 1];
    shape.column = column_of(*a.v, last);
    if (shape.column < 0 || shape.column + a.dv > last.ne[0]) return;
    const Products* p = products_for(a.k->type);
    if (!p || shape.n_segments > p->max_segments) return;
    for (const int64_t size : {a.d0, a.d1, a.dv, shape.column})
        if (size % p->granularity) return;
    const int64_t rows = a.rows_per_kv_head(), items = (rows + kRows - 1) / kRows;
    shape.rows = round_up((rows + items - 1) / items, kRowUnit);
    products = p;
}

// Making operands of cells takes about as long as 16 rows meet them. A token of 128 heads that sees 1,024
// cells has 16 ranges: with many threads, tiles of fewer rows make more items.
Plan plan_of(const Problem& problem, int n_threads) {
    const int64_t rows = problem.a.rows_per_kv_head(), range = problem.products->blocks * kCells;
    const auto tiles = [&](int64_t of_rows) { return (rows + of_rows - 1) / of_rows; };
    Plan plan{problem.shape.rows, tiles(problem.shape.rows), 1};
    if (n_threads > 1 && plan.tiles == 1) plan.splits = n_threads;
    if (n_threads > 1 && plan.tiles > 1 && plan.tiles < 2 * n_threads)
        plan.splits = (4 * n_threads + plan.tiles - 1) / plan.tiles;
    plan.splits = std::clamp<int64_t>((problem.a.n_kv + range - 1) / range, 1, plan.splits);
    const auto busiest = [&](int64_t of_rows) {
        return (tiles(of_rows) * plan.splits + n_threads - 1) / n_threads * (of_rows + kRowUnit);
    };
    for (int64_t n = plan.rows - kRowUnit; n_threads >= kManyThreads && n > 0; n -= kRowUnit)
        if (busiest(n) < busiest(plan.rows)) plan.rows = n;
    plan.tiles = tiles(plan.rows);
    return plan;
}

Buffers layout(uint8_t* at, const Problem& problem) {
    const Shape& shape = problem.shape;
    Buffers b;
    // The queries are only read before the first scores.
    b.q = b.s = take<float>(at, std::max(shape.dk(), kCells) * shape.rows);
    b.o = take<float>(at, shape.rows * shape.dv);
    b.top = take<float>(at, shape.rows);
    b.block_top = take<float>(at, shape.rows);
    b.sum = take<float>(at, shape.rows);
    b.alpha = take<float>(at, shape.rows);
    b.bits = take<uint32_t>(at, kWords * shape.rows);
    b.q_sums = b.middles = b.means = nullptr;
    if (problem.has_middles) {
        b.q_sums = take<float>(at, problem.blocks() * shape.rows);
        b.middles = take<float>(at, problem.blocks() * kCells);
        b.means = take<float>(at, problem.value_blocks() * shape.rows);
    }
    for (int i = 0; i < shape.n_segments; ++i) {
        uint8_t* rows = take<uint8_t>(at, kCells * (problem.row_bytes(i) + 64));
        if (i == 0) b.rest = rows;
    }
    b.work = at;
    b.end = at + problem.products->work_bytes(shape);
    return b;
}

}  // namespace latent

bool uses_latent(const AttentionArgs& a) {
    return a.rows_per_kv_head() > kRowKernelMax && latent::Problem(a).products;
}

int64_t latent_tokens_alone(const AttentionArgs& a) {
    return latent::Problem(a).products ? std::max<int64_t>(1, latent::kRows / a.heads_per_kv) : 0;
}

// Enough for any part of the tokens too, which may make items of more rows.
size_t latent_scratch_bytes(const AttentionArgs& a) {
    latent::Problem problem(a);
    if (!problem.products) return 0;
    problem.shape.rows = std::min(round_up(a.rows_per_kv_head(), latent::kRowUnit), latent::kRows);
    return size_t(latent::layout(nullptr, problem).end - static_cast<uint8_t*>(nullptr));
}

size_t latent_shared_bytes(const AttentionArgs& a, int n_threads) {
    size_t most = 0;
    if (!latent::Problem(a).products) return most;
    for (int64_t n = 1; n <= a.n_tokens; ++n) {
        const AttentionArgs part = a.part(0, n);
        const latent::Problem problem(part);
        const latent::Plan plan = latent::plan_of(problem, n_threads);
        if (plan.splits == 1) break;
        most = std::max(most, partials_bytes(part, plan.splits));
    }
    return most;
}

}  // namespace ikpy
