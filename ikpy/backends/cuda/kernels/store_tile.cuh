// The end of a product whose sums are spread over the registers of a block.
#pragma once
#include "product.cuh"

namespace ikpy::cuda {

constexpr int kTileTokenPitch = 128 + 4;  // floats; keeps the exchange of sums free of bank conflicts

// Stores sums [tokens][kTileTokenPitch] from shared memory: 128 rows, or 64 of up and 64 of gate. line(r):
// where row r stands, gate_offset behind it the gate's. One value per thread at a time: activation functions
// are long, and a copy for every register would be 100 times as much code as the product.
template <class Line>
__device__ __forceinline__ void store_tile(const Product& p, const float* sums, int first_token, int n_tokens,
                                           int gate_offset, Line line) {
    const int rows = p.gate ? 64 : 128;
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * n_tokens; i += blockDim.x) {
        const int r = i % rows, row = blockIdx.x * rows + r, token = first_token + i / rows;
        const float* sum = sums + i / rows * kTileTokenPitch + line(r);
        if (row < p.n_out && token < p.n_tokens)
            store_sum(p, p.dst + token * p.dst_nb1, 0, row, sum[0], p.gate ? sum[gate_offset] : 0.0f);
    }
}

}  // namespace ikpy::cuda
