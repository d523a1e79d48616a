// Software prefetch of cache rows while another step computes.
#pragma once
#include <cstdint>

namespace ikpy {
namespace flash {

// Rows that a later step reads, fetched into L2 a few at a time.
struct Prefetch {
    const uint8_t* at;
    int64_t stride, bytes, rows;

    void advance(int64_t n) {
        for (; n > 0 && rows > 0; --n, --rows, at += stride) {
            for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(at + b, 0, 2);
        }
    }
};

}  // namespace flash
}  // namespace ikpy
