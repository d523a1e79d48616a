// What this machine can do at best, measured: the yardsticks of the kernel benchmarks.
#pragma once

#include <cstdint>

namespace ikpy {

// 10^9 operations per second (a multiply-add counts as two) of independent instructions on registers.
double ceiling_int8_dot(
    int n_threads);  // exact int8 dot products, as the int8 kernels of this tier form them
double ceiling_bf16_dot(int n_threads);  // 0 where neither the build nor the CPU has bf16 dot products
double ceiling_amx_bf16(int n_threads);  // bf16 products of the tile unit; 0 where it is absent or turned off
double ceiling_fp32_fma(int n_threads);

// 10^9 bytes per second read from a buffer larger than the caches: the best of several access patterns.
double ceiling_read_bandwidth(int n_threads);

// Bytes of that buffer: four times the last-level cache, between 256 MiB and 2 GiB.
int64_t uncached_bytes();

}  // namespace ikpy
