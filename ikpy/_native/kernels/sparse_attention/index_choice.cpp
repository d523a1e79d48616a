// The best of many scores, by the bits of the k-th largest.
#include <cstring>

#include "kernels/sparse_attention/choose_cells.hpp"

namespace ikpy {
namespace indexer {
namespace {

// Unsigned numbers in the order of the floats.
uint32_t ordered(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Where the k-th largest lies among the scores whose upper bits are those of `prefix`: finds its next bits,
// and takes from k what lies above them.
struct Search {
    uint32_t prefix = 0;
    int known = 0;  // upper bits of prefix that count
    int64_t k;

    void next_bits(const float* scores, int64_t n, int bits, uint32_t* histogram) {
        std::fill_n(histogram, size_t(1) << bits, 0u);
        const int shift = 32 - known - bits;
        const uint32_t mask = (1u << bits) - 1u;
        for (int64_t i = 0; i < n; ++i) {
            const uint32_t x = ordered(scores[i]);
            if (known == 0 || x >> (32 - known) == prefix) ++histogram[x >> shift & mask];
        }
        uint32_t bin = mask;
        for (; bin > 0 && histogram[bin] < k; --bin) k -= histogram[bin];
        prefix = prefix << bits | bin;
        known += bits;
    }
};

}  // namespace

void choose_best(const float* scores, int64_t n, int64_t k, uint32_t* histogram, int32_t first_cell,
                 int32_t* chosen) {
    Search search;
    search.k = k;
    for (const int bits : {11, 11, 10}) search.next_bits(scores, n, bits, histogram);
    int64_t equal = search.k;
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t x = ordered(scores[i]);
        if (x < search.prefix || (x == search.prefix && equal-- <= 0)) continue;
        *chosen++ = first_cell + int32_t(i);
    }
}

}  // namespace indexer
}  // namespace ikpy
