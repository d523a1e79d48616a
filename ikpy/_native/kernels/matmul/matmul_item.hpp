// One item of work of a matrix product: blocks of rows of one matrix and a set of tokens.
#pragma once
#include <algorithm>

#include "ikpy/ops.hpp"
#include "kernels/matmul/activations.hpp"
#include "kernels/weights/weight_kernels.hpp"

namespace ikpy {

// Tokens of an expert that are multiplied together.
struct ExpertSet {
    int32_t expert, begin, n;  // entries begin .. begin + n - 1 of the groups
};

// Work memory of one thread: sums [wide][kMaxTokens][32], pointers to the rows of x and of dst, the scales of
// those of x, sets of experts' tokens, and what the kernels of the type need.
struct MatmulScratch {
    float* sums;
    const uint8_t** x;
    uint8_t** y;
    float* scales;
    ExpertSet* sets;
    uint8_t* work;

    static size_t sum_bytes(int wide) { return kMaxTokens * kBlockRows * sizeof(float) * wide; }
    static size_t fixed_bytes(int64_t n_sets, int wide) {
        return sum_bytes(wide) + kMaxTokens * (2 * sizeof(void*) + sizeof(float)) +
               static_cast<size_t>(round_up(n_sets * static_cast<int64_t>(sizeof(ExpertSet)), 64));
    }

    MatmulScratch(uint8_t* base, int64_t n_sets, int wide) {
        sums = reinterpret_cast<float*>(base);
        x = reinterpret_cast<const uint8_t**>(base + sum_bytes(wide));
        y = reinterpret_cast<uint8_t**>(base + sum_bytes(wide) + kMaxTokens * sizeof(void*));
        scales = reinterpret_cast<float*>(y + kMaxTokens);
        sets = reinterpret_cast<ExpertSet*>(scales + kMaxTokens);
        work = base + fixed_bytes(n_sets, wide);
    }
};

// The weight matrices of one op and the fate of their products.
struct MatmulProduct {
    WeightKernels kernels;
    const Tensor* up;       // or the only matrix
    const Tensor* gate;     // nullptr when there is one matrix
    const Tensor* up_bias;  // f32 [N, E], nullptr = none
    const Tensor* gate_bias;
    int activation;  // UnaryKind, with gate
    bool f16_out;
    bool tiles;
    int wide;                         // row blocks per work item
    int block_rows;                   // of each matrix
    int64_t scale_at;                 // of rows of activations, see act_scale_at
    const uint8_t* shared = nullptr;  // what all threads share of the tokens, see TokenSet
    int64_t shared_rows = 0;

    int64_t rows_per_item() const { return block_rows * wide; }
    int64_t n_items() const { return (up->ne[1] + rows_per_item() - 1) / rows_per_item(); }
};

inline void set_token(const MatmulProduct& p, const MatmulScratch& s, int t, const uint8_t* x, uint8_t* y) {
    s.x[t] = x;
    s.y[t] = y;
    if (p.scale_at > 0) s.scales[t] = load_unaligned<float>(x + p.scale_at);
}

// Whether so many tokens meet unpacked rows one by one.
inline bool by_rows(const MatmulProduct& p, int n_tokens) {
    return !p.tiles && n_tokens <= std::max(p.kernels.gemv_tokens, p.kernels.pass_tokens);
}

inline int row_passes(const WeightKernels& kernels, int n_tokens) {
    return (n_tokens + kernels.gemv_tokens - 1) / kernels.gemv_tokens;
}

// What a pass makes of its tokens stays in a part of the work memory of its own.
inline int64_t pass_bytes(const WeightKernels& kernels, int64_t n_in) {
    return round_up(static_cast<int64_t>(kernels.work_bytes(n_in)), 64);
}

// Multiplies the row blocks of one item with the tokens listed in s.x and stores to s.y. fresh: not the
// tokens of the item before. first_shared: the first of them among those that all threads share.
void multiply_item(const MatmulProduct& p, const MatmulScratch& s, int64_t matrix, int64_t r0, int n_tokens,
                   bool fresh, int64_t first_shared = 0);

}  // namespace ikpy
