#include "kernels/ops/hadamard.hpp"

#include "ikpy/ops.hpp"

namespace ikpy {

// dst = src0 = f32 rows, transformed in place in blocks of ip[0] elements along dimension 0.
void op_hadamard(const ThreadContext& ctx, const Op& op, const Tensor* tensors, const Runtime&) {
    const Tensor& x = tensors[op.dst];
    const int64_t rows = n_rows(x);
    int64_t begin, end;
    split_range(rows, ctx.ith, ctx.nth, 1, &begin, &end);
    for (int64_t r = begin; r < end; ++r) {
        const int64_t i1 = r % x.ne[1], i2 = r / x.ne[1] % x.ne[2], i3 = r / (x.ne[1] * x.ne[2]);
        hadamard_row(row<float>(x, i1, i2, i3), x.ne[0], op.ip[0]);
    }
}

}  // namespace ikpy
