// Writing rows into the key/value cache and re-rotating cached keys after positions have moved.
#include <cmath>

#include "ikpy/ops.hpp"
#include "kernels/cache/kv_types.hpp"
#include "kernels/ops/hadamard.hpp"

namespace ikpy {

void op_kv_store(const ThreadContext& ctx, const Op& op, const Tensor* tensors, const Runtime&) {
    const Tensor& x = tensors[op.src[0]];
    const Tensor& cells = tensors[op.src[1]];
    const Tensor& cache = tensors[op.dst];
    const kv::StoreRow store = kv::store_row(cache.type);
    const int32_t* cell = row<int32_t>(cells, 0);
    int64_t begin, end;
    split_range(x.ne[1] * x.ne[2], ctx.ith, ctx.nth, 1, &begin, &end);
    for (int64_t r = begin; r < end; ++r) {
        const int64_t t = r / x.ne[1], h = r % x.ne[1];
        if (cell[t] < 0) continue;
        store(row<float>(x, h, t), x.ne[0], row<uint8_t>(cache, h, cell[t]));
    }
}

namespace {

// (a, b) -> (a c - b s, a s + b c); table holds c, s pairs.
void rotate(float* x, const float* table, int n_rot, bool neox) {
    const int half = n_rot / 2;
    for (int i = 0; i < half; ++i) {
        float& a = neox ? x[i] : x[2 * i];
        float& b = neox ? x[i + half] : x[2 * i + 1];
        const float c = table[2 * i], s = table[2 * i + 1];
        const float rotated = a * c - b * s;
        b = a * s + b * c;
        a = rotated;
    }
}

}  // namespace

// One row of the cache in f32.
size_t kv_shift_scratch_bytes(const Op& op, const Tensor* tensors) {
    return tensors[op.dst].ne[0] * sizeof(float);
}

// ip: rotated elements, neox, first rotated element, Hadamard block of the stored rows (0 = none).
void op_kv_shift(const ThreadContext& ctx, const Op& op, const Tensor* tensors, const Runtime&) {
    const Tensor& table = tensors[op.src[0]];
    const Tensor& deltas = tensors[op.src[1]];
    const Tensor& cache = tensors[op.dst];
    const kv::LoadRows load = kv::load_rows(cache.type);
    const kv::StoreRow store = kv::store_row(cache.type);
    const int32_t* delta = row<int32_t>(deltas, 0);
    float* const x = reinterpret_cast<float*>(ctx.scratch);
    int64_t begin, end;
    split_range(cache.ne[2], ctx.ith, ctx.nth, 1, &begin, &end);
    for (int64_t c = begin; c < end; ++c) {
        if (delta[c] == 0) continue;
        for (int64_t h = 0; h < cache.ne[1]; ++h) {
            uint8_t* stored = row<uint8_t>(cache, h, c);
            load(stored, 0, 1, cache.ne[0], x, 0);
            if (op.ip[3]) hadamard_row(x, cache.ne[0], op.ip[3]);
            rotate(x + op.ip[2], row<float>(table, c), op.ip[0], op.ip[1] == 1);
            if (op.ip[3]) hadamard_row(x, cache.ne[0], op.ip[3]);
            store(x, cache.ne[0], stored);
        }
    }
}

}  // namespace ikpy
