#include "kernels/flash_latent.hpp"

#include <algorithm>
#include <cstring>

#include "kernels/flash_amx.hpp"
#include "kernels/flash_middles.hpp"
#include "kernels/flash_pack.hpp"

namespace ikpy {
namespace latent {
namespace {

using simd::kLanes;
using simd::V;

constexpr int kWords = kCells / 32;
// Sums are scaled anew when a score exceeds the maximum by more than this many powers of two.
constexpr float kSlack = 8.0f;

// The op as this kernel sees it; products are null if it does not take it.
struct Problem {
    const AttentionArgs& a;
    const Products* products;
    Shape shape;            // rows: of a full item
    const Tensor* keys[2];  // segments
    bool has_middles;       // which the products leave out (flash_middles.hpp)

    explicit Problem(const AttentionArgs& args);
    int64_t blocks() const { return shape.dk() / 32; }
    int64_t value_blocks() const { return shape.dv / 32; }
    // The first block of V in those of a row.
    int64_t first_value_block() const {
        return ((shape.n_segments > 1 ? shape.size[0] : 0) + shape.column) / 32;
    }
    int64_t row_bytes(int i) const { return kv::row_bytes(keys[i]->type, shape.size[i]); }
};

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

struct Plan {
    int64_t tiles, splits;  // of rows, of the cells of each
};

Plan plan_of(const Problem& problem, int n_threads) {
    Plan plan;
    const int64_t rows = problem.a.rows_per_kv_head();
    plan.tiles = (rows + problem.shape.rows - 1) / problem.shape.rows;
    plan.splits = 1;
    if (n_threads > 1 && plan.tiles == 1) plan.splits = n_threads;
    if (n_threads > 1 && plan.tiles > 1 && plan.tiles < 2 * n_threads)
        plan.splits = (4 * n_threads + plan.tiles - 1) / plan.tiles;
    return plan;
}

struct Buffers {
    float *q, *s, *o, *top, *block_top, *sum, *alpha;
    uint32_t* bits;  // [kWords][rows]
    float* q_sums;   // [blocks][rows]: queries, where there are middles
    float* middles;  // [blocks][kCells]
    float* means;    // [rows / 16][blocks of V][16]: sums of weights times middles
    uint8_t* rest;   // the last cells of a range
    uint8_t* work;
    uint8_t* end;
};

template <typename T>
T* take(uint8_t*& at, int64_t n) {
    T* p = reinterpret_cast<T*>(at);
    at += round_up(n * int64_t(sizeof(T)), 64);
    return p;
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

struct Item {
    int64_t first_row, n_rows, part;
};

// ---- middles ----

constexpr int kChains = 8;  // of additions at once

void sum_query_blocks(const Problem& problem, const Buffers& b) {
    const int64_t rows = problem.shape.rows;
    std::memset(b.q_sums, 0, size_t(problem.blocks() * rows) * sizeof(float));
    for (int64_t d = 0; d < problem.shape.dk(); ++d)
        for (int64_t m = 0; m < rows; m += kLanes) {
            float* sums = b.q_sums + d / 32 * rows + m;
            simd::store(sums, simd::add(simd::load(sums), simd::load(b.q + d * rows + m)));
        }
}

void read_middles(const Problem& problem, const Cells& cells, const Buffers& b) {
    float* to = b.middles;
    for (int i = 0; i < problem.shape.n_segments; ++i) {
        const int64_t n_blocks = problem.shape.size[i] / 32;
        flash::read_middles(problem.keys[i]->type, cells.rows[i], cells.stride[i], kCells, n_blocks, to);
        to += n_blocks * kCells;
    }
}

void add_middles_to_scores(const Problem& problem, const Buffers& b) {
    const int64_t rows = problem.shape.rows, n_blocks = problem.blocks();
    for (int64_t m = 0; m < rows; m += kLanes) {
        float* s = b.s + m / kRowUnit * kRowUnit * kCells + m % kRowUnit;
        for (int64_t c = 0; c < kCells; c += kChains, s += kChains * kRowUnit) {
            V x[kChains];
            for (int j = 0; j < kChains; ++j) x[j] = simd::load(s + j * kRowUnit);
            for (int64_t i = 0; i < n_blocks; ++i) {
                const V sums = simd::load(b.q_sums + i * rows + m);
                const float* middles = b.middles + i * kCells + c;
                for (int j = 0; j < kChains; ++j) x[j] = simd::fma(sums, simd::set1(middles[j]), x[j]);
            }
            for (int j = 0; j < kChains; ++j) simd::store(s + j * kRowUnit, x[j]);
        }
    }
}

void add_weighted_middles(const Problem& problem, const Buffers& b) {
    const int64_t n_blocks = problem.value_blocks();
    const float* middles = b.middles + problem.first_value_block() * kCells;
    for (int64_t m = 0; m < problem.shape.rows; m += kLanes) {
        V weight[kCells];
        const float* s = b.s + m / kRowUnit * kRowUnit * kCells + m % kRowUnit;
        for (int64_t c = 0; c < kCells; ++c)
            weight[c] = simd::exp2(simd::sub(simd::load(s + c * kRowUnit), simd::load(b.top + m)));
        float* mean = b.means + m / kRowUnit * kRowUnit * n_blocks + m % kRowUnit;
        for (int64_t i = 0; i < n_blocks; i += kChains) {
            const int n = int(std::min<int64_t>(kChains, n_blocks - i));
            V x[kChains];
            // Blocks that do not exist are another time the last one.
            const float* of[kChains];
            for (int j = 0; j < kChains; ++j) {
                x[j] = simd::zero();
                of[j] = middles + (i + std::min(j, n - 1)) * kCells;
            }
            for (int64_t c = 0; c < kCells; ++c)
                for (int j = 0; j < kChains; ++j) x[j] = simd::fma(weight[c], simd::set1(of[j][c]), x[j]);
            for (int j = 0; j < n; ++j, mean += kRowUnit)
                simd::store(mean, simd::add(simd::load(mean), x[j]));
        }
    }
}

void add_means_to_sums(const Problem& problem, const Buffers& b) {
    const Shape& shape = problem.shape;
    float* o = b.o;
    for (int64_t m = 0; m < shape.rows; m += kRowUnit)
        for (int64_t d = 0; d < shape.dv; d += kRowUnit)
            for (int64_t r = 0; r < kRowUnit; ++r, o += kRowUnit) {
                const V mean = simd::set1(b.means[(m * problem.value_blocks() + d / 32 * kRowUnit) + r]);
                for (int64_t i = 0; i < kRowUnit; i += kLanes)
                    simd::store(o + i, simd::add(simd::load(o + i), mean));
            }
}

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

enum class Visibility { kNone, kSome, kAll };

// Which of the cells [c0, c0 + n) each row sees, in bits unless it is all or none.
Visibility visibility(const Problem& problem, const Item& item, int64_t c0, int64_t n, const Buffers& b) {
    const AttentionArgs& a = problem.a;
    uint32_t words[kWords];
    int64_t n_tokens = 0, n_all = 0, n_none = 0;
    for (int64_t r = 0; r < item.n_rows;) {
        const int64_t t = a.token_of(item.first_row + r);
        const int64_t end = std::min(item.n_rows, (t + 1) * a.heads_per_kv - item.first_row);
        const int visible = visible_bits(a, t, c0, n, words, kWords);
        n_all += visible == n;
        n_none += visible == 0;
        ++n_tokens;
        for (int w = 0; w < kWords; ++w)
            std::fill(b.bits + w * problem.shape.rows + r, b.bits + w * problem.shape.rows + end, words[w]);
        r = end;
    }
    return n_all == n_tokens ? Visibility::kAll : n_none == n_tokens ? Visibility::kNone : Visibility::kSome;
}

// Soft cap and mask on the scores of 16 rows; cells from n on are masked. Returns the maxima. ld:
// between words of bits.
template <bool kMask, bool kCap>
V finish(float* s, int64_t n, float softcap, const uint32_t* bits, int64_t ld) {
    using namespace simd;
    const V cap = set1(softcap * kLog2e), low = set1(kMasked);
    for (int64_t c = n; c < kCells; ++c) store(s + c * kLanes, low);
    V top[4];
    for (V& each : top) each = set1(kNoMaximum);
    for (int64_t c = 0; c < kCells; c += 4) {
#pragma GCC unroll 4
        for (int64_t i = 0; i < 4; ++i) {
            float* at = s + (c + i) * kLanes;
            V x = load(at);
            if (kCap && c + i < n) x = mul(cap, simd::tanh(x));
            if (kMask) x = keep_if_bit(bits + ((c + i) >> 5) * ld, 1u << ((c + i) & 31), x, low);
            if (kMask || kCap) store(at, x);
            top[i] = simd::max(top[i], x);
        }
    }
    return simd::max(simd::max(top[0], top[1]), simd::max(top[2], top[3]));
}

V finish_lanes(const AttentionArgs& a, float* s, int64_t n, const uint32_t* bits, int64_t ld, bool masked) {
    const float cap = a.softcap;
    if (cap != 0.0f)
        return masked ? finish<true, true>(s, n, cap, bits, ld) : finish<false, true>(s, n, cap, bits, ld);
    return masked ? finish<true, false>(s, n, cap, bits, ld) : finish<false, false>(s, n, cap, bits, ld);
}

// Sums of a row: 16 floats of every kLanes^2, dv / 16 times.
float* sums_of(const Shape& shape, int64_t row, float* o) {
    return o + row / kRowUnit * kRowUnit * shape.dv + row % kRowUnit * kRowUnit;
}

void scale_sums(const Problem& problem, const Buffers& b) {
    const Shape& shape = problem.shape;
    for (int64_t r = 0; r < shape.rows; ++r) {
        if (b.alpha[r] == 1.0f) continue;
        b.sum[r] *= b.alpha[r];
        float* o = sums_of(shape, r, b.o);
        const V alpha = simd::set1(b.alpha[r]);
        for (int64_t d = 0; d < shape.dv; d += kLanes, o += kRowUnit * kRowUnit)
            simd::store(o, simd::mul(alpha, simd::load(o)));
        if (!problem.has_middles) continue;
        float* mean = b.means + r / kRowUnit * kRowUnit * problem.value_blocks() + r % kRowUnit;
        for (int64_t i = 0; i < problem.value_blocks(); ++i) mean[i * kRowUnit] *= b.alpha[r];
    }
}

// Maxima of a block. Returns whether sums have to follow, by the factors alpha.
bool find_maxima(const Problem& problem, int64_t n, bool masked, const Buffers& b) {
    const int64_t rows = problem.shape.rows;
    for (int64_t m = 0; m < rows; m += kRowUnit) {
        const V top = finish_lanes(problem.a, b.s + m * kCells, n, b.bits + m, rows, masked);
        simd::store(b.block_top + m, top);
    }
    bool rises = false;
    for (int64_t r = 0; r < rows; ++r) {
        const float reference = b.block_top[r] - problem.products->lift;
        const bool above = reference > b.top[r] + kSlack;
        const float top = above ? reference : b.top[r];
        b.alpha[r] = above ? b.top[r] - top : 0.0f;
        b.top[r] = top;
        rises |= above;
    }
    if (!rises) return false;
    for (int64_t m = 0; m < rows; m += kLanes) simd::store(b.alpha + m, simd::exp2(simd::load(b.alpha + m)));
    return true;
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
    split_range(last - first, int(item.part), int(plan.splits), kCells, &begin, &end);
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

void attention_latent(const ThreadContext& ctx, const AttentionArgs& a) {
    const latent::Problem problem(a);
    const latent::Plan plan = latent::plan_of(problem, ctx.nth);
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
