// Runs a compiled plan: one OpenMP region per call, a spin barrier between ops.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "ikpy/ops.hpp"

namespace ikpy {

class Executor {
  public:
    Executor(const Op* ops, int64_t n_ops, Tensor* tensors, int64_t n_tensors);

    // Work memory (bytes) that run() needs with this many threads. To be asked for first while dynamic
    // dimensions are at their maximum; the same number of threads gets the same answer from then on.
    size_t work_bytes(int n_threads);

    // Executes ops first .. last-1, of known kinds, in order. Returns the seconds it took. work: memory of
    // the caller, 64-byte aligned, of at least work_bytes(n_threads) bytes; null: memory of its own.
    double run(const Runtime& runtime, int n_threads, int64_t first, int64_t last, uint8_t* work = nullptr);

    // Which settings of ikpy/affinity.hpp hold for its threads.
    void set_thread_set(int set) { thread_set_ = set; }

    // Seconds spent in each op of the last run; filled only while profiling is on.
    void set_profiling(bool on) { profiling_ = on; }
    const double* op_seconds() const { return op_seconds_.get(); }

  private:
    size_t shared_bytes(int n_threads) const;
    void plan(int n_threads);
    uint8_t* own_work(int n_threads);
    void run_thread(const ThreadContext& base, const Runtime& runtime, std::atomic<int64_t>* counters,
                    int64_t first, int64_t last);

    const Op* ops_;
    int64_t n_ops_;
    Tensor* tensors_;
    size_t scratch_bytes_ = 0;
    struct Free {
        void operator()(void* p) const { std::free(p); }
    };
    std::unique_ptr<uint8_t, Free> work_;
    size_t work_size_ = 0;
    size_t shared_size_ = 0;
    int planned_threads_ = 0;
    std::unique_ptr<TakenItems[]> taken_;  // two sets for planned_threads_, zero between runs
    Barrier barrier_;
    int thread_set_ = 0;
    bool profiling_ = false;
    std::unique_ptr<double[]> op_seconds_;
};

const char* op_name(int kind);

}  // namespace ikpy
