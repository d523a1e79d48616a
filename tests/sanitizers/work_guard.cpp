// A write that AddressSanitizer does not see, to a byte of work memory of two threads: argument 1 counts from
// its start. Returns 0 if it was allowed.
#include "kernels/work_guard.hpp"

#include <cstdlib>

namespace {

__attribute__((no_sanitize("address"), noinline)) void write_unseen(uint8_t* at) { *at = 1; }

}  // namespace

int main(int, char** arguments) {
    constexpr size_t kShared = 192, kScratch = 128;
    uint8_t* const work = static_cast<uint8_t*>(std::aligned_alloc(64, kShared + 2 * kScratch));
    {
        const ikpy::WorkGuard guard(work, kShared, kScratch, 2);
        write_unseen(work + std::atol(arguments[1]));
    }
    std::free(work);
    return 0;
}
