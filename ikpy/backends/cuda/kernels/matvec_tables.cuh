// Matrix-vector product of one token with types whose levels are looked up in a table in shared memory: there
// a load takes the passes that its lanes' words need of one bank, of global memory a turn for every line that
// they lie in.
#pragma once
#include "matvec_groups.cuh"

namespace ikpy::cuda {

// Type: an unpacker, or its `Own`. The table is made by all threads of the block.
template <class Type>
__device__ __forceinline__ void make_table(unsigned* table) {
    for (int i = threadIdx.x; i < Type::kTable; i += blockDim.x) table[i] = Type::table_word(i);
    __syncthreads();
}

// Short tables are copied for every two lanes, which then wait for each other only: a lookup takes two passes
// over the banks, not 3.5. The copies of 256 words take 128, so a block must have columns enough.
template <class U>
__device__ __forceinline__ bool copies_pay(const Product& p) {
    return U::kCopies > 1 && p.n_in >= 2048 * p.split;
}

// Copies are side by side. Neighbouring threads store to different banks.
template <class U>
__device__ __forceinline__ void make_tables(const Product& p, unsigned* words) {
    constexpr unsigned kCopies = U::kCopies;
    if (!copies_pay<U>(p)) {
        make_table<U>(words);
        return;
    }
    for (unsigned i = threadIdx.x; i < U::kTable; i += blockDim.x) {
        const unsigned word = U::table_word(i);
#pragma unroll
        for (unsigned c = 0; c < kCopies; ++c) words[i * kCopies + (c + i / 2) % kCopies] = word;
    }
    __syncthreads();
}

// The lane's sums of its rows, which share its activations.
template <class U>
__device__ __forceinline__ void add_looked_up(const Product& p, const VectorWork<U, 1>& work,
                                              const unsigned* words, VectorSums<U, 1>& sum) {
    const ActQ8Layout at(p.n_in);
    const bool copied = copies_pay<U>(p);
    const Table table{words, p.n_in & 0x80000000u, copied ? 4u * U::kCopies : 4u,
                      copied ? 4u * (lane_id() % U::kCopies) : 0u};
#pragma unroll 1
    for (int g = work.part * 32 + lane_id(); g < p.n_in / 32; g += p.split * 32) {
        ActGroup x;
        load_activations<U>(work.x[0], at, g, x);
#pragma unroll
        for (int i = 0; U::kPaired && i < 8; i += 2) {
            const unsigned first = permute_bytes(x.q[i], x.q[i + 1], 0x5140);
            x.q[i + 1] = permute_bytes(x.q[i], x.q[i + 1], 0x7362);
            x.q[i] = first;
        }
#pragma unroll
        for (int i = 0; i < 2 * kLaneRows; ++i) {
            Group w;
            U::group(table, block_of<U>(work.weight[i % 2][i / 2], g), g % (U::kBlock / 32), w);
            sum.of[i / 2][i % 2][0] += group_product<U>(w, x);
        }
    }
}

}  // namespace ikpy::cuda
