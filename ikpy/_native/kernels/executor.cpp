#include "ikpy/executor.hpp"

#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <new>

#include "ikpy/affinity.hpp"
#include "kernels/work_guard.hpp"

namespace ikpy {

namespace {

const Kernel kKernels[kOpCount] = {
#define X(id, name, fn) fn,
    IKPY_OPS(X)
#undef X
};

const char* const kNames[kOpCount] = {
#define X(id, name, fn) #name,
    IKPY_OPS(X)
#undef X
};

// Of the plan that runs; where several run at once, of the last one that began.
std::atomic<int> spin_limit{kSpins};

constexpr size_t kAlign = 64;
using Clock = std::chrono::steady_clock;
size_t align_up(size_t n) { return (n + kAlign - 1) / kAlign * kAlign; }

bool is_matmul(int kind) {
    return kind == kOpActPrepare || kind == kOpMulMat || kind == kOpMulMatUpGate || kind == kOpMulMatId ||
           kind == kOpMulMatIdUpGate;
}

size_t thread_bytes(const Op& op, const Tensor* tensors) {
    if (is_matmul(op.kind)) return matmul_scratch_bytes(op, tensors);
    if (op.kind == kOpAttention) return attention_scratch_bytes(op, tensors);
    if (op.kind == kOpKvShift) return kv_shift_scratch_bytes(op, tensors);
    if (op.kind == kOpCausalConv) return causal_conv_scratch_bytes(op, tensors);
    if (op.kind == kOpGatedDeltaRule) return gated_delta_rule_scratch_bytes(op, tensors);
    if (op.kind == kOpSsmScan) return ssm_scan_scratch_bytes(op, tensors);
    if (op.kind == kOpWkv) return wkv_scratch_bytes(op, tensors);
    if (op.kind == kOpChooseCells) return choose_cells_scratch_bytes(op, tensors);
    if (op.kind == kOpStretchCells) return stretch_cells_scratch_bytes(op, tensors);
    if (op.kind == kOpChooseBlocks) return choose_blocks_scratch_bytes(op, tensors);
    if (op.kind == kOpCompressCells) return compress_cells_scratch_bytes(op, tensors);
    return 0;
}

bool runs(const Op& op, const Runtime& runtime) {
    return (op.above == 0 || runtime.n_kv > op.above) && (op.upto == 0 || runtime.n_kv <= op.upto);
}

}  // namespace

const char* op_name(int kind) { return kind >= 0 && kind < kOpCount ? kNames[kind] : "?"; }

void Barrier::reserve(int n_threads) {
    int total = 0;
    for (int n = n_threads; total == 0 || n > 1; total += n) n = n_groups(n);
    groups_.reset(new Group[total]);
}

// The last of a group goes on to the group of groups, and lets its own go when it returns from there.
void Barrier::meet(Group* level, int place, int n) {
    const int groups = n_groups(n), own = place / kGroup;
    const int members = std::min(kGroup, n - own * kGroup);
    Group& group = level[own];
    const uint32_t generation = group.generation.load(std::memory_order_acquire);
    if (group.arrived.fetch_add(1, std::memory_order_acq_rel) == members - 1) {
        if (groups > 1) meet(level + groups, own, groups);
        group.arrived.store(0, std::memory_order_relaxed);
        group.generation.store(generation + 1, std::memory_order_release);
        return;
    }
    const int limit = spin_limit.load(std::memory_order_relaxed);
    for (int spins = 0; group.generation.load(std::memory_order_acquire) == generation; ++spins) {
#if defined(__x86_64__)
        _mm_pause();
#endif
        if (spins > limit) {  // a thread has probably lost its core
            sched_yield();
            spins = 0;
        }
    }
}

Executor::Executor(const Op* ops, int64_t n_ops, Tensor* tensors, int64_t)
    : ops_(ops), n_ops_(n_ops), tensors_(tensors), op_seconds_(new double[n_ops]()) {
    for (int64_t i = 0; i < n_ops; ++i)
        scratch_bytes_ = std::max(scratch_bytes_, align_up(thread_bytes(ops[i], tensors)));
    scratch_bytes_ += kWorkGap;
}

size_t Executor::shared_bytes(int n_threads) const {
    size_t shared = 0;
    for (int64_t i = 0; i < n_ops_; ++i) {
        size_t need = 0;
        if (is_matmul(ops_[i].kind)) need = matmul_shared_bytes(ops_[i], tensors_, n_threads);
        if (ops_[i].kind == kOpAttention) need = attention_shared_bytes(ops_[i], tensors_, n_threads);
        if (ops_[i].kind == kOpChooseCells) need = choose_cells_shared_bytes(ops_[i], tensors_, n_threads);
        if (ops_[i].kind == kOpChooseBlocks) need = choose_blocks_shared_bytes(ops_[i], tensors_);
        shared = std::max(shared, align_up(need));
    }
    return shared + kWorkGap;
}

void Executor::plan(int n_threads) {
    if (n_threads == planned_threads_) return;
    shared_size_ = shared_bytes(n_threads);
    taken_.reset(new TakenItems[2 * n_threads]);
    barrier_.reserve(n_threads);
    planned_threads_ = n_threads;
}

size_t Executor::work_bytes(int n_threads) {
    plan(n_threads);
    return shared_size_ + scratch_bytes_ * n_threads;
}

uint8_t* Executor::own_work(int n_threads) {
    const size_t total = shared_size_ + scratch_bytes_ * n_threads;
    if (total > work_size_) {
        work_.reset(static_cast<uint8_t*>(std::aligned_alloc(kAlign, align_up(total))));
        if (!work_) throw std::bad_alloc();
        work_size_ = total;
    }
    return work_.get();
}

void Executor::run_thread(const ThreadContext& base, const Runtime& runtime, std::atomic<int64_t>* counters,
                          int64_t first, int64_t last) {
    ThreadContext ctx = base;
    TakenItems* const both = base.taken;
    Clock::time_point started;
    int set = 0;
    for (int64_t i = first; i < last; ++i) {
        if (profiling_ && ctx.ith == 0) op_seconds_[i] = 0.0;
        if (!runs(ops_[i], runtime)) continue;
        // Two counter sets alternate: the set of the next op is cleared while nobody uses it.
        ctx.counters = counters + set * kCountersPerOp;
        ctx.taken = both + set * ctx.nth;
        set ^= 1;
        both[set * ctx.nth + ctx.ith].ends.store(0, std::memory_order_relaxed);
        if (ctx.ith == 0) {
            std::atomic<int64_t>* next = counters + set * kCountersPerOp;
            for (int c = 0; c < kCountersPerOp; ++c) next[c].store(0, std::memory_order_relaxed);
            if (profiling_) started = Clock::now();
        }
        kKernels[ops_[i].kind](ctx, ops_[i], tensors_, runtime);
        ctx.sync();
        if (profiling_ && ctx.ith == 0) {
            op_seconds_[i] = std::chrono::duration<double>(Clock::now() - started).count();
        }
    }
    for (int s = 0; s < 2; ++s) both[s * ctx.nth + ctx.ith].ends.store(0, std::memory_order_relaxed);
}

double Executor::run(const Runtime& runtime, int n_threads, int64_t first, int64_t last, uint8_t* work) {
    const Clock::time_point started = Clock::now();
    plan(n_threads);
    if (!work) work = own_work(n_threads);
    alignas(64) std::atomic<int64_t> counters[2 * kCountersPerOp] = {};
    uint8_t* const scratch = work + shared_size_;
    spin_limit.store(thread_spins(thread_set_), std::memory_order_relaxed);
    const WorkGuard guard(work, shared_size_, scratch_bytes_, n_threads);
#pragma omp parallel num_threads(n_threads)
    {
        // OpenMP may give fewer threads than asked for: OMP_THREAD_LIMIT, OMP_DYNAMIC, a region around this
        // one.
        const int ith = omp_get_thread_num(), nth = omp_get_num_threads();
        bind_thread(ith, thread_set_);
        const ThreadContext ctx{ith,       nth,         place_of_thread(ith, nth, thread_set_),
                                &barrier_, work,        scratch + scratch_bytes_ * ith,
                                nullptr,   taken_.get()};
        run_thread(ctx, runtime, counters, first, last);
    }
    return std::chrono::duration<double>(Clock::now() - started).count();
}

}  // namespace ikpy
