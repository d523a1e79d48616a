// Element-wise ops over strided views: one thread per 4 elements of a row where rows are aligned, else per 1.
#include "common.cuh"

using namespace ikpy::cuda;

namespace {

enum UnaryOp { kXielu = 9, kSignedRoot = 10, kExponential = 11, kScale = 16, kSoftCap = 17 };
enum BinaryOp { kAdd = 16, kMul = 17 };

__device__ __forceinline__ float unary_op(int kind, float x, const float4& p) {
    if (kind == kScale) return x * p.x + p.y;
    if (kind == kSoftCap) return p.x * tanhf(x / p.x);
    if (kind == kXielu) return p.z * x + (x > 0 ? p.x * x * x : p.y * (expm1f(x < p.w ? x : p.w) - x));
    if (kind == kSignedRoot) return x == 0 ? 0.0f : copysignf(sqrtf(fabsf(x) < p.x ? p.x : fabsf(x)), x);
    if (kind == kExponential) return expf(x);
    return unary_value(kind, x);
}

// Both are bounded before an activation; comparisons leave NaN as they are.
__device__ __forceinline__ float binary_op(int kind, float x, float y, float limit) {
    if (kind == kAdd) return x + y;
    if (kind == kMul) return x * y;
    y = y > limit ? limit : y;
    return gated_value(kind, x > limit ? limit : x, y < -limit ? -limit : y);
}

// Calls f(row, column) for groups of `width` columns of v, one per thread in turn.
template <class F>
__device__ __forceinline__ void for_columns(const View& v, int width, const int* runtime, F f) {
    const int per_row = v.ne[0] / width;
    const long long n = static_cast<long long>(per_row) * v.rows(runtime);
    const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step)
        f(row_index(v, static_cast<int>(i / per_row), runtime), static_cast<int>(i % per_row) * width);
}

}  // namespace

// dst = f(src); width: 4 if all rows are 16-byte aligned and their length is a multiple of 4, else 1.
IKPY_KERNEL unary_f32(View dst, View src, int kind, float a, float b, float c, float d, int width,
                      const int* runtime) {
    const float4 p = make_float4(a, b, c, d);
    for_columns(dst, width, runtime, [&](RowIndex r, int column) {
        const float* x = src.row<const float>(r.i1, r.i2, r.i3) + column;
        float* y = dst.row<float>(r.i1, r.i2, r.i3) + column;
        if (width == 4) {
            const float4 v = *reinterpret_cast<const float4*>(x);
            *reinterpret_cast<float4*>(y) = make_float4(unary_op(kind, v.x, p), unary_op(kind, v.y, p),
                                                        unary_op(kind, v.z, p), unary_op(kind, v.w, p));
        } else {
            *y = unary_op(kind, *x, p);
        }
    });
}
IKPY_EXPORT(unary_f32);

// dst = f(a, b); b is repeated along dimensions it lacks. limit: of both before an activation.
IKPY_KERNEL binary_f32(View dst, View a, View b, int kind, float limit, int width, const int* runtime) {
    for_columns(dst, width, runtime, [&](RowIndex r, int c) {
        const float* x = a.row<const float>(r.i1, r.i2, r.i3) + c;
        const float* y = b.row<const float>(r.i1 % b.extent(1, runtime), r.i2 % b.extent(2, runtime),
                                            r.i3 % b.extent(3, runtime));
        float* z = dst.row<float>(r.i1, r.i2, r.i3) + c;
        const auto f = [&](float u, float v) { return binary_op(kind, u, v, limit); };
        if (width == 4) {
            const float4 u = *reinterpret_cast<const float4*>(x);
            const float4 v =
                b.ne[0] == 1 ? make_float4(y[0], y[0], y[0], y[0]) : *reinterpret_cast<const float4*>(y + c);
            *reinterpret_cast<float4*>(z) = make_float4(f(u.x, v.x), f(u.y, v.y), f(u.z, v.z), f(u.w, v.w));
        } else {
            *z = f(*x, b.ne[0] == 1 ? y[0] : y[c]);
        }
    });
}
IKPY_EXPORT(binary_f32);

// dst f32 = src f32
IKPY_KERNEL copy_f32(View dst, View src, int width, const int* runtime) {
    for_columns(dst, width, runtime, [&](RowIndex r, int c) {
        const float* x = src.row<const float>(r.i1, r.i2, r.i3) + c;
        float* y = dst.row<float>(r.i1, r.i2, r.i3) + c;
        if (width == 4) {
            *reinterpret_cast<float4*>(y) = *reinterpret_cast<const float4*>(x);
        } else {
            *y = *x;
        }
    });
}
IKPY_EXPORT(copy_f32);

// dst f32 [1, 1, T] = 1 + scale * ln(1 + (pos + offset) / period), the quotient an integer
IKPY_KERNEL attention_temperature(float* dst, const int* pos, int n, int period, int offset, float scale) {
    const int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t < n) dst[t] = 1.0f + scale * logf(1.0f + static_cast<float>((pos[t] + offset) / period));
}
IKPY_EXPORT(attention_temperature);
