// Where the blocks of a quantized weight are: rows, groups of interleaved rows, groups of 32 elements.
#pragma once
#include "unpack/core.cuh"

namespace ikpy::cuda {

// Start of the blocks of the group of interleaved rows that row r is in.
template <class U>
__device__ __forceinline__ const uint8_t* row_group(const uint8_t* matrix, long long row_bytes, int r) {
    return matrix + static_cast<long long>(r / U::kRows) * U::kRows * row_bytes;
}
// Block of group g of 32 elements.
template <class U>
__device__ __forceinline__ const uint8_t* block_of(const uint8_t* group, int g) {
    return group + U::kRows * U::kHeader + static_cast<long long>(g / (U::kBlock / 32)) * U::kBytes;
}
// Levels from which kBias is to be subtracted yet.
template <class U>
__device__ __forceinline__ void unpack_levels(const uint8_t* group, int k, int g, Group& out) {
    U::group(block_of<U>(group, g), k, g % (U::kBlock / 32), out);
}
template <class U>
__device__ __forceinline__ void unpack(const uint8_t* group, int k, int g, Group& out) {
    unpack_levels<U>(group, k, g, out);
    if constexpr (U::kBias != 0) {
#pragma unroll
        for (int i = 0; i < 8; ++i) out.q[i] = sub_bytes(out.q[i], U::kBias);
    }
}

}  // namespace ikpy::cuda
