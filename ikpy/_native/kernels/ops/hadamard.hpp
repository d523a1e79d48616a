// Blockwise orthonormal Walsh-Hadamard transform in natural order; it is its own inverse.
#pragma once
#include <cmath>
#include <cstdint>

namespace ikpy {

// n is a power of two.
inline void hadamard_block(float* x, int64_t n) {
    for (int64_t half = 1; half < n; half *= 2) {
        for (int64_t start = 0; start < n; start += 2 * half) {
#pragma GCC ivdep
            for (int64_t i = start; i < start + half; ++i) {
                const float a = x[i], b = x[i + half];
                x[i] = a + b;
                x[i + half] = a - b;
            }
        }
    }
    const float scale = 1.0f / std::sqrt(float(n));
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) x[i] *= scale;
}

// All blocks of a row whose length is a multiple of block.
inline void hadamard_row(float* x, int64_t n, int64_t block) {
    for (int64_t start = 0; start < n; start += block) hadamard_block(x + start, block);
}

}  // namespace ikpy
