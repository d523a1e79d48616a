// The executor, its barrier and its ways of sharing work, with kernels that have no locks of their own: every
// op reads all that the one before has written. Run under ThreadSanitizer by test_threads.py; returns 0 if
// all sums are right.
#include "ikpy/executor.hpp"

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "ikpy/affinity.hpp"
#include "kernels/item_ranges.hpp"

namespace ikpy {

namespace {

constexpr int64_t kItems = 61;

struct Values {
    const int64_t* from;
    int64_t* to;
};

Values values(const Op& op, const Tensor* ts) {
    return {reinterpret_cast<const int64_t*>(ts[op.src[0]].data),
            reinterpret_cast<int64_t*>(ts[op.dst].data)};
}

// Adds, so that an item done twice, or on top of what is left of an earlier run, is wrong.
void add(const Values& v, int64_t item) {
    for (int64_t i = 0; i < kItems; ++i) v.to[item] += v.from[i] % 1000;
    v.to[item] += item;
}

void ranges(const ThreadContext& ctx, const Op& op, const Tensor* ts, const Runtime&) {
    ItemRanges items(ctx, kItems);
    for (int64_t i; (i = items.next()) >= 0;) add(values(op, ts), i);
}

void counter(const ThreadContext& ctx, const Op& op, const Tensor* ts, const Runtime&) {
    for (int64_t i; (i = ctx.counters[0].fetch_add(1, std::memory_order_relaxed)) < kItems;) {
        add(values(op, ts), i);
    }
}

// Parts that meet in the work memory of all threads, added up by the first one.
void parts(const ThreadContext& ctx, const Op& op, const Tensor* ts, const Runtime&) {
    int64_t* const shared = reinterpret_cast<int64_t*>(ctx.shared);
    const Values v = values(op, ts);
    shared[ctx.ith] = 0;
    for (int64_t i = ctx.ith; i < kItems; i += ctx.nth) shared[ctx.ith] += v.from[i] % 1000;
    ctx.sync();
    if (ctx.ith != 0) return;
    int64_t sum = 0;
    for (int i = 0; i < ctx.nth; ++i) sum += shared[i];
    for (int64_t i = 0; i < kItems; ++i) v.to[i] += sum + i;
}

}  // namespace

#define X(id, name, fn)                                                                         \
    void fn(const ThreadContext& ctx, const Op& op, const Tensor* ts, const Runtime& runtime) { \
        (kOp##id % 3 == 0 ? ranges : kOp##id % 3 == 1 ? counter : parts)(ctx, op, ts, runtime); \
    }
IKPY_OPS(X)
#undef X

size_t matmul_scratch_bytes(const Op&, const Tensor*) { return 0; }
size_t matmul_shared_bytes(const Op&, const Tensor*, int n_threads) { return n_threads * sizeof(int64_t); }
size_t attention_scratch_bytes(const Op&, const Tensor*) { return 0; }
size_t attention_shared_bytes(const Op&, const Tensor*, int) { return 0; }
size_t kv_shift_scratch_bytes(const Op&, const Tensor*) { return 0; }

size_t causal_conv_scratch_bytes(const Op&, const Tensor*) { return 0; }

size_t gated_delta_rule_scratch_bytes(const Op&, const Tensor*) { return 0; }

size_t ssm_scan_scratch_bytes(const Op&, const Tensor*) { return 0; }

size_t wkv_scratch_bytes(const Op&, const Tensor*) { return 0; }

size_t choose_cells_scratch_bytes(const Op&, const Tensor*) { return 0; }

size_t choose_cells_shared_bytes(const Op&, const Tensor*, int) { return 0; }

size_t stretch_cells_scratch_bytes(const Op&, const Tensor*) { return 0; }

size_t choose_blocks_scratch_bytes(const Op&, const Tensor*) { return 0; }

size_t choose_blocks_shared_bytes(const Op&, const Tensor*) { return 0; }

size_t compress_cells_scratch_bytes(const Op&, const Tensor*) { return 0; }

}  // namespace ikpy

namespace {

using namespace ikpy;

// One op of every kind in a chain; runs with changing numbers of threads. Whether all runs gave the same.
bool chain() {
    std::vector<std::vector<int64_t>> memory(kOpCount + 1, std::vector<int64_t>(kItems));
    std::vector<Tensor> tensors(kOpCount + 1);
    std::vector<Op> ops(kOpCount);
    for (int i = 0; i <= kOpCount; ++i) tensors[i].data = reinterpret_cast<uint8_t*>(memory[i].data());
    for (int i = 0; i < kOpCount; ++i) {
        ops[i].kind = i;
        ops[i].src[0] = i;
        ops[i].dst = i + 1;
    }
    Executor executor(ops.data(), kOpCount, tensors.data(), kOpCount + 1);
    std::vector<int64_t> expected;
    for (const int n_threads : {1, 4, 2, 3, 12, 4, 4, 8, 9, 70, 17, 64, 2}) {
        for (std::vector<int64_t>& values : memory) values.assign(kItems, 0);
        executor.run(Runtime{0}, n_threads, 0, kOpCount);
        if (expected.empty()) expected = memory.back();
        if (memory.back() != expected) return false;
    }
    return true;
}

}  // namespace

int main() {
    // Two executors at a time, as two contexts in threads of a program.
    bool same[2] = {};
    std::thread other([&] { same[1] = chain(); });
    same[0] = chain();
    other.join();
    // Groups of threads at the barrier are other ones where threads take turns on nodes. Nodes without CPUs
    // bind nothing.
    set_thread_cpus({{}, {}, {}});
    same[0] = chain() && same[0];
    if (!same[0] || !same[1]) std::puts("a run with several threads differs from the one with one thread");
    return same[0] && same[1] ? EXIT_SUCCESS : EXIT_FAILURE;
}
