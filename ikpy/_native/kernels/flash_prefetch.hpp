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
        if (n > rows) n = rows;
        for (int64_t i = 0; i < n; ++i)
            for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(at + i * stride + b, 0, 2);
        at += n * stride;
        rows -= n;
    }
};

}  // namespace flash
}  // namespace ikpy
