// Statistics of matmul inputs for the importance matrix: sums of squares per column, cosine similarity of
// rows.
#include <cmath>

#include "ikpy/ops.hpp"

namespace ikpy {

namespace {

constexpr int64_t kColumnStep = 64;

// sums[j] += x[j]^2 for columns [begin, end); f64, because the squares of many tokens are added up.
void add_squares(const float* x, int64_t begin, int64_t end, double* sums) {
    for (int64_t j = begin; j < end; ++j) {
        const double v = x[j];
        sums[j] += v * v;
    }
}

struct MatrixRows {
    const Tensor* x;
    const int32_t* entries;  // null: all rows of one or of every slice
    int64_t first, last;     // range of entries, or of flattened rows
    int64_t rows_per_entry;  // divides an entry to get its row

    const float* at(int64_t i) const {
        const int64_t r = entries ? entries[i] / rows_per_entry : i;
        return row<const float>(*x, r % x->ne[1], r / x->ne[1]);
    }
};

MatrixRows rows_of(const Op& op, const Tensor* ts, int64_t matrix, int64_t n_matrices) {
    const Tensor& x = ts[op.src[0]];
    if (op.src[1] >= 0) {
        const int32_t* offsets = reinterpret_cast<const int32_t*>(ts[op.src[1]].data);
        return {&x, offsets + n_matrices + 1, offsets[matrix], offsets[matrix + 1], op.ip[1]};
    }
    const int64_t rows = n_matrices == 1 ? n_rows(x) : x.ne[1];
    return {&x, nullptr, matrix * rows, (matrix + 1) * rows, 1};
}

}  // namespace

// src0 = x f32 [K, T, B], src1 = moe_group's result (experts only); dst f64 [(K + 1) * M + 1], added to: per
// matrix (expert, head, or the whole of x if M = 1) K sums of squares and the number of rows; last, the
// number of calls. ip: M, assignments per row of x (slots used if x has one row per token, 1 if one per
// assignment).
void op_act_stats(const ThreadContext& ctx, const Op& op, const Tensor* ts, const Runtime&) {
    double* sums = reinterpret_cast<double*>(ts[op.dst].data);
    const int64_t k = ts[op.src[0]].ne[0], n_matrices = op.ip[0];
    const int64_t blocks = (k + kColumnStep - 1) / kColumnStep;
    int64_t begin, end;
    split_range(n_matrices * blocks, ctx.ith, ctx.nth, 1, &begin, &end);
    for (int64_t unit = begin; unit < end;) {
        const int64_t matrix = unit / blocks, first = unit % blocks;
        const int64_t last = first + end - unit < blocks ? first + end - unit : blocks;
        const int64_t stop = last * kColumnStep < k ? last * kColumnStep : k;
        const MatrixRows rows = rows_of(op, ts, matrix, n_matrices);
        double* target = sums + matrix * (k + 1);
        for (int64_t i = rows.first; i < rows.last; ++i)
            add_squares(rows.at(i), first * kColumnStep, stop, target);
        if (last == blocks) target[k] += static_cast<double>(rows.last - rows.first);
        unit += last - first;
    }
    if (ctx.ith == 0) sums[n_matrices * (k + 1)] += 1;
}

// src0, src1 = f32 [K, T]; dst f64 [2, S], added to: sum of the cosines of equal rows, number of rows; one
// pair per thread. ip: S. Rows of zeros have no direction and are left out.
void op_act_similarity(const ThreadContext& ctx, const Op& op, const Tensor* ts, const Runtime&) {
    const Tensor& a = ts[op.src[0]];
    const Tensor& b = ts[op.src[1]];
    const int slots = op.ip[0] < ctx.nth ? op.ip[0] : ctx.nth;
    if (ctx.ith >= slots) return;
    double* result = reinterpret_cast<double*>(ts[op.dst].data) + 2 * ctx.ith;
    int64_t begin, end;
    split_range(a.ne[1], ctx.ith, slots, 1, &begin, &end);
    for (int64_t t = begin; t < end; ++t) {
        const float* x = row<const float>(a, t);
        const float* y = row<const float>(b, t);
        double xx = 0, yy = 0, xy = 0;
        for (int64_t j = 0; j < a.ne[0]; ++j) {
            xx += static_cast<double>(x[j]) * x[j];
            yy += static_cast<double>(y[j]) * y[j];
            xy += static_cast<double>(x[j]) * y[j];
        }
        if (xx > 0 && yy > 0) {
            result[0] += xy / std::sqrt(xx * yy);
            result[1] += 1;
        }
    }
}

}  // namespace ikpy
