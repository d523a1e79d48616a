// Statistics of matmul inputs for the importance matrix, in f64.
#include "common.cuh"

using namespace ikpy::cuda;

namespace {

__device__ __forceinline__ const float* flat_row(const View& x, int r) {
    return x.row<const float>(r % x.ne[1], r / x.ne[1]);
}

}  // namespace

// sums f64 [(K + 1) * M + 1] += per matrix K sums of squares and the number of rows, last the number of
// calls. groups: assignments by expert, or null. grid (blocks of columns, M).
IKPY_KERNEL act_stats(double* sums, View x, const int* groups, int n_matrices, int rows_per_entry) {
    const int k = x.ne[0], j = blockIdx.x * blockDim.x + threadIdx.x, matrix = blockIdx.y;
    const int rows = n_matrices == 1 ? x.ne[1] * x.ne[2] * x.ne[3] : x.ne[1];
    const int first = groups ? groups[matrix] : matrix * rows;
    const int last = groups ? groups[matrix + 1] : first + rows;
    const int* entries = groups + n_matrices + 1;
    double* target = sums + static_cast<long long>(matrix) * (k + 1);
    if (j < k) {
        double sum = 0;
        for (int i = first; i < last; ++i) {
            const double v = flat_row(x, groups ? entries[i] / rows_per_entry : i)[j];
            sum += v * v;
        }
        target[j] += sum;
    }
    if (j == 0) target[k] += last - first;
    if (j == 0 && matrix == 0) sums[static_cast<long long>(n_matrices) * (k + 1)] += 1;
}
IKPY_EXPORT(act_stats);

// result f64 [2, S] += sum of the cosines of equal rows, number of rows. One block per pair, rows in turn.
IKPY_KERNEL act_similarity(double* result, View a, View b) {
    double cosines = 0, count = 0;
    for (int t = blockIdx.x; t < a.ne[1]; t += gridDim.x) {
        const float *x = a.row<const float>(t), *y = b.row<const float>(t);
        double xx = 0, yy = 0, xy = 0;
        for (int j = threadIdx.x; j < a.ne[0]; j += blockDim.x) {
            xx += static_cast<double>(x[j]) * x[j];
            yy += static_cast<double>(y[j]) * y[j];
            xy += static_cast<double>(x[j]) * y[j];
        }
        xx = block_sum(xx);
        yy = block_sum(yy);
        xy = block_sum(xy);
        if (xx > 0 && yy > 0) {
            cosines += xy / sqrt(xx * yy);
            count += 1;
        }
    }
    if (threadIdx.x == 0) {
        result[2 * blockIdx.x] += cosines;
        result[2 * blockIdx.x + 1] += count;
    }
}
IKPY_EXPORT(act_similarity);
