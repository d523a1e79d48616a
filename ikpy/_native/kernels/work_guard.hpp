// Work memory under AddressSanitizer: the parts of all threads are one block of memory, which it knows
// nothing of.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace ikpy {

#ifdef __SANITIZE_ADDRESS__

// Bytes behind each part that nobody may touch while a plan runs.
constexpr size_t kWorkGap = 64;

// While it lives, gaps are faults. What earlier plans have left becomes NaN, so that it cannot be taken for
// this one's.
class WorkGuard {
  public:
    WorkGuard(uint8_t* work, size_t shared, size_t scratch, int n_threads)
        : work_(work), size_(shared + scratch * n_threads) {
        std::memset(work_, 0xff, size_);
        for (size_t end = shared; end <= size_; end += scratch) {
            ASAN_POISON_MEMORY_REGION(work_ + end - kWorkGap, kWorkGap);
        }
    }
    ~WorkGuard() { ASAN_UNPOISON_MEMORY_REGION(work_, size_); }
    WorkGuard(const WorkGuard&) = delete;
    WorkGuard& operator=(const WorkGuard&) = delete;

  private:
    uint8_t* const work_;
    const size_t size_;
};

#else

constexpr size_t kWorkGap = 0;

struct WorkGuard {
    WorkGuard(uint8_t*, size_t, size_t, int) {}
};

#endif

}  // namespace ikpy
