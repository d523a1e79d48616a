// What a kernel knows about the thread it runs on.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ikpy {

// Sense-reversing barrier for the threads of one parallel region. It spins for a bounded number of
// iterations and then yields, so an over-committed machine still makes progress.
class Barrier {
  public:
    // n: threads of the region, the same in every call.
    void wait(int n);

  private:
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> generation_{0};
};

// How many items of a thread's range are taken: from its front in the low half, from its end in the high one.
struct alignas(64) TakenItems {
    std::atomic<uint64_t> ends{0};
};

struct ThreadContext {
    int ith;
    int nth;
    Barrier* barrier;
    uint8_t* shared;   // work area common to all threads, as asked for by shared_bytes()
    uint8_t* scratch;  // work area of this thread, as asked for by scratch_bytes(); 64-byte aligned
    std::atomic<int64_t>* counters;  // kCountersPerOp work-sharing counters, zero when the op starts
    TakenItems* taken;               // one per thread, zero when the op starts

    void sync() const {
        if (nth > 1) barrier->wait(nth);
    }
};

constexpr int kCountersPerOp = 4;

// Splits n items into nth nearly equal contiguous ranges whose borders are multiples of step.
inline void split_range(int64_t n, int ith, int nth, int64_t step, int64_t* begin, int64_t* end) {
    const int64_t units = (n + step - 1) / step;
    *begin = units * ith / nth * step;
    *end = units * (ith + 1) / nth * step;
    if (*begin > n) *begin = n;
    if (*end > n) *end = n;
}

}  // namespace ikpy
