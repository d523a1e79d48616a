// Work memory under AddressSanitizer: the parts of all threads are one block of memory, which it knows
// nothing of.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#endif

namespace ikpy {

#ifdef __SANITIZE_ADDRESS__

// Bytes behind each part that nobody may touch while a plan runs.
constexpr size_t kWorkGap = 64;

// While it lives, gaps are faults; what the sanitizer does not see, masked stores and those of tiles, ends
// the process behind the plan. What earlier plans have left becomes NaN, so that it cannot be taken for this
// one's.
class WorkGuard {
  public:
    WorkGuard(uint8_t* work, size_t shared, size_t scratch, int n_threads)
        : work_(work), shared_(shared), scratch_(scratch), n_threads_(n_threads) {
        std::memset(work_, kFill, shared + scratch * n_threads);
        for (int part = 0; part <= n_threads_; ++part) ASAN_POISON_MEMORY_REGION(gap(part), kWorkGap);
    }
    ~WorkGuard() {
        for (int part = 0; part <= n_threads_; ++part) {
            ASAN_UNPOISON_MEMORY_REGION(gap(part), kWorkGap);
            if (std::all_of(gap(part), gap(part) + kWorkGap, [](uint8_t byte) { return byte == kFill; }))
                continue;
            std::fprintf(stderr, "ikpy: an op wrote behind its work memory (%s)\n",
                         part ? "a thread's" : "shared");
            std::abort();
        }
    }
    WorkGuard(const WorkGuard&) = delete;
    WorkGuard& operator=(const WorkGuard&) = delete;

  private:
    static constexpr uint8_t kFill = 0xff;

    // What follows the part shared by all threads (0), or that of a thread (from 1).
    uint8_t* gap(int part) const { return work_ + shared_ + scratch_ * part - kWorkGap; }

    uint8_t* const work_;
    const size_t shared_, scratch_;
    const int n_threads_;
};

#else

constexpr size_t kWorkGap = 0;

struct WorkGuard {
    WorkGuard(uint8_t*, size_t, size_t, int) {}
};

#endif

}  // namespace ikpy
