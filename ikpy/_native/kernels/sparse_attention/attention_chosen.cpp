// Attention to chosen cells: their rows are gathered, and any kernel family attends to all of them. Gathering
// reads what attention would read; the copy stays in the caches.
#include <algorithm>
#include <cstring>

#include "kernels/attention/flash_attention.hpp"
#include "kernels/cache/kv_blocks.hpp"

namespace ikpy {
namespace {

constexpr int64_t kOwnBytes = 16 << 20;  // of gathered rows up to which every thread has tokens of its own

int32_t n_chosen(const AttentionArgs& a, int64_t token) {
    return *row<int32_t>(*a.chosen, a.first_token + token);
}

int64_t most_cells(const AttentionArgs& a) { return a.chosen->ne[0] - 1; }

int64_t cell_bytes(const Tensor& t) { return (t.ne[1] - 1) * t.nb[1] + kv::row_bytes(t.type, t.ne[0]); }

// Whether the rows of a tensor lie in those of another.
bool lies_in(const Tensor& part, const Tensor& whole) {
    return part.nb[2] == whole.nb[2] && part.data >= whole.data &&
           part.data + cell_bytes(part) <= whole.data + cell_bytes(whole);
}

// Copies of the rows of some cells: the same op on these alone.
struct Gathered {
    Tensor k, k1, v;
    AttentionArgs a;

    Gathered(const AttentionArgs& from, int64_t n_cells, uint8_t* at)
        : k(*from.k), k1{}, v(*from.v), a(from) {
        place(k, at);
        a.k = &k;
        if (from.k1) {
            k1 = *from.k1;
            place(k1, at);
            a.k1 = &k1;
        }
        if (lies_in(*from.v, *from.k)) {
            follow(v, *from.v, *from.k, k);
        } else if (from.k1 && lies_in(*from.v, *from.k1)) {
            follow(v, *from.v, *from.k1, k1);
        } else {
            place(v, at);
        }
        a.v = &v;
        for (Tensor* t : {&k, &k1, &v}) t->ne[2] = n_cells;
        a.n_kv = n_cells;
        a.mask = a.chosen = a.common = nullptr;
        a.ranges = nullptr;
        end = at;
    }
    Gathered(const Gathered&) = delete;
    uint8_t* end;

  private:
    static void follow(Tensor& v, const Tensor& from, const Tensor& whole, const Tensor& copy) {
        v.data = copy.data + (from.data - whole.data);
        v.nb[2] = copy.nb[2];
    }
    void place(Tensor& t, uint8_t*& at) const {
        t.data = at;
        t.nb[2] = round_up(cell_bytes(t), 64);
        at += t.nb[2] * most_cells(a);
    }
};

// Copies of all cells of one token.
int64_t gathered_bytes(const AttentionArgs& a) {
    const Gathered g(a, 0, nullptr);
    return g.end - static_cast<uint8_t*>(nullptr);
}

// 1: all threads work on one token.
int64_t n_buffers(const AttentionArgs& a, int n_threads) {
    return n_threads <= a.n_tokens && gathered_bytes(a) <= kOwnBytes ? n_threads : 1;
}

void copy_cells(const Tensor& from, const Tensor& to, const int32_t* cells, int64_t begin, int64_t end) {
    const size_t bytes = size_t(cell_bytes(from));
    for (int64_t i = begin; i < end; ++i)
        std::memcpy(to.data + i * to.nb[2], from.data + cells[i] * from.nb[2], bytes);
}

// One token, with all threads of the context.
void attend_token(const ThreadContext& ctx, const AttentionArgs& a, int64_t token, uint8_t* memory) {
    const AttentionArgs one = a.part(token, 1);
    const int64_t n = n_chosen(one, 0);
    if (n < 0) return attend(ctx, one);
    const Gathered g(one, n, memory);
    const int32_t* cells = row<int32_t>(*a.chosen, one.first_token) + 1;
    int64_t begin, end;
    split_range(n, ctx.ith, ctx.nth, 1, &begin, &end);
    copy_cells(*a.k, g.k, cells, begin, end);
    if (a.k1) copy_cells(*a.k1, g.k1, cells, begin, end);
    if (!lies_in(*a.v, *a.k) && !(a.k1 && lies_in(*a.v, *a.k1))) copy_cells(*a.v, g.v, cells, begin, end);
    ctx.sync();
    attend(ctx, g.a);
}

}  // namespace

bool any_chose(const AttentionArgs& a) {
    if (a.n_kv <= most_cells(a)) return false;
    for (int64_t t = 0; t < a.n_tokens; ++t)
        if (n_chosen(a, t) >= 0) return true;
    return false;
}

// Gathered rows, for fewer threads than planned too, and what attending to those of one token takes.
size_t chosen_shared_bytes(const AttentionArgs& a, int n_threads) {
    const AttentionArgs one = a.part(0, 1);
    const size_t partials = std::max(attend_shared_bytes(one, n_threads),
                                     attend_shared_bytes(Gathered(one, most_cells(a), nullptr).a, n_threads));
    const int64_t buffers = std::min<int64_t>(n_threads, a.n_tokens), bytes = gathered_bytes(a);
    return size_t(bytes <= kOwnBytes ? buffers * bytes : bytes) + partials;
}

void attention_chosen(const ThreadContext& ctx, const AttentionArgs& a) {
    const int64_t bytes = gathered_bytes(a), buffers = n_buffers(a, ctx.nth);
    ThreadContext own = ctx;
    own.shared = ctx.shared + bytes * buffers;
    if (buffers == 1) {
        for (int64_t t = 0; t < a.n_tokens; ++t) {
            if (t > 0) restart(ctx);
            attend_token(own, a, t, ctx.shared);
        }
        return;
    }
    std::atomic<int64_t> counters[kCountersPerOp] = {};
    own.ith = 0;
    own.nth = 1;
    own.shared += own_partials_bytes(a.part(0, 1)) * ctx.ith;
    own.counters = counters;
    for (int64_t t; (t = ctx.counters[0].fetch_add(1, std::memory_order_relaxed)) < a.n_tokens;) {
        counters[0].store(0, std::memory_order_relaxed);
        attend_token(own, a, t, ctx.shared + bytes * ctx.ith);
    }
}

}  // namespace ikpy
