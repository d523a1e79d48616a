// Arguments of a matrix product and where its columns (tokens or expert assignments) come from.
#pragma once
#include "common.cuh"

namespace ikpy::cuda {

// Mirrored in launch/product.py.
struct Product {
    const uint8_t* up;    // or the only weight
    const uint8_t* gate;  // null: one matrix
    const uint8_t* x;     // prepared activations
    uint8_t* dst;
    const float* up_bias;
    const float* gate_bias;
    const int* groups;  // experts: offsets [E + 1], entries; null: dense
    const int* runtime;
    long long row_bytes, matrix_bytes;  // of the weights
    long long x_stride;                 // bytes from one prepared row to the next
    long long dst_nb1, dst_nb2;         // bytes between tokens and batches; experts: slots and tokens
    long long bias_stride;              // floats between the biases of two matrices
    int n_in, n_out;
    int n_tokens;    // 0: n_kv at run time; experts: assignments
    int n_matrices;  // weights: 1 = shared by all batches
    int activation, f16_out;
    int n_used, n_experts, per_slot;  // experts
    int split;                        // warps that share a row in the matrix-vector kernels
};

// Products that one launch of a matrix-vector kernel computes; blockIdx.y numbers the blocks of all of them.
// Mirrored in launch/product.py.
constexpr int kMaxProducts = 4;
struct Products {
    Product product[kMaxProducts];
    int first[kMaxProducts];  // block of each; of those that are not there beyond the last one
};

// Number of the product that the block belongs to.
__device__ __forceinline__ int block_product(const Products& ps) {
    int i = 0;
#pragma unroll
    for (int k = 1; k < kMaxProducts; ++k) i += static_cast<int>(blockIdx.y) >= ps.first[k];
    return i;
}

// The columns of one block of work: all those of a matrix.
struct Columns {
    int matrix;        // index of the weight matrix
    int first, count;  // range among the tokens or assignments
    int batch;
    int n_tokens;
};

__device__ __forceinline__ Columns dense_columns(const Product& p, int batch) {
    const int n = p.n_tokens > 0 ? p.n_tokens : p.runtime[0];
    return {p.n_matrices > 1 ? batch : 0, 0, n, batch, n};
}
__device__ __forceinline__ Columns expert_columns(const Product& p, int expert) {
    const int first = p.groups[expert];
    return {expert, first, p.groups[expert + 1] - first, 0, 0};
}

// Those of the matrix that blockIdx.z numbers: an expert, or a batch.
__device__ __forceinline__ Columns block_columns(const Product& p) {
    return p.groups ? expert_columns(p, blockIdx.z) : dense_columns(p, blockIdx.z);
}

struct Column {
    const uint8_t* x;
    uint8_t* dst;
};
__device__ __forceinline__ Column column_at(const Product& p, const Columns& c, int i) {
    if (p.groups) {
        const int entry = p.groups[p.n_experts + 1 + c.first + i];
        const int slot = entry % p.n_used, token = entry / p.n_used;
        return {p.x + (p.per_slot ? entry : token) * p.x_stride,
                p.dst + slot * p.dst_nb1 + token * p.dst_nb2};
    }
    return {p.x + (static_cast<long long>(c.batch) * c.n_tokens + i) * p.x_stride,
            p.dst + i * p.dst_nb1 + c.batch * p.dst_nb2};
}

// Expert of assignment i (sorted): all lanes of the warp look at offsets. -1 beyond the last assignment.
__device__ __forceinline__ int expert_of(const Product& p, int i) {
    if (i >= p.groups[p.n_experts]) return -1;
    int before = 0;
    for (int e0 = 0; e0 < p.n_experts; e0 += 32) {
        const int e = e0 + lane_id();
        before += __popc(__ballot_sync(kAllLanes, e < p.n_experts && p.groups[e + 1] <= i));
    }
    return before;
}

// What a block multiplies: `count` of the columns from `first` on, 0 = nothing.
struct BlockColumns {
    Columns columns;
    int first, count;
};
// blockIdx.x numbers chunks of N tokens, or single assignments of experts.
template <int N>
__device__ __forceinline__ BlockColumns vector_columns(const Product& p) {
    if (p.groups) {
        const int expert = expert_of(p, blockIdx.x);
        if (expert < 0) return {{}, 0, 0};
        const Columns columns = expert_columns(p, expert);
        return {columns, static_cast<int>(blockIdx.x) - columns.first, 1};
    }
    const Columns columns = dense_columns(p, blockIdx.z);
    const int first = blockIdx.x * N;
    return {columns, first, min(N, max(0, columns.count - first))};
}

// blockIdx.y numbers tiles of N columns. Their activations are put in sources [N] in shared memory, which all
// threads know behind a block barrier; those beyond the last column repeat it.
template <int N>
__device__ __forceinline__ BlockColumns tile_columns(const Product& p, const uint8_t** sources) {
    const Columns columns = block_columns(p);
    const int first = blockIdx.y * N, count = min(N, max(0, columns.count - first));
    if (count > 0 && threadIdx.x < N)
        sources[threadIdx.x] = column_at(p, columns, first + min(static_cast<int>(threadIdx.x), count - 1)).x;
    return {columns, first, count};
}

__device__ __forceinline__ void store_output(const Product& p, uint8_t* dst, int row, float value) {
    if (p.f16_out) {
        reinterpret_cast<uint16_t*>(dst)[row] = f32_to_f16(value);
    } else {
        reinterpret_cast<float*>(dst)[row] = value;
    }
}
// Sum of one row, or the sums of an up and a gate row, with biases and activation.
__device__ __forceinline__ void store_sum(const Product& p, uint8_t* dst, int matrix, int row, float up,
                                          float gate) {
    if (p.up_bias) up += p.up_bias[matrix * p.bias_stride + row];
    if (p.gate) {
        if (p.gate_bias) gate += p.gate_bias[matrix * p.bias_stride + row];
        up = gated_value(p.activation, gate, up);
    }
    store_output(p, dst, row, up);
}

}  // namespace ikpy::cuda
