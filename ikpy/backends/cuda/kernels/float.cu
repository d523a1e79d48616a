// Weights that are floats: rows, matrix-vector products in f32, matrix products on tensor cores. Activations
// are prepared rows of f32 or bf16. For tensor cores f32 activations are split into two 16-bit parts, so that
// products keep about 22 (f16) or 16 (bf16) bits.
#include "mma.cuh"
#include "product.cuh"
#include "tiles.cuh"

using namespace ikpy::cuda;

namespace {

// storage of weights: eight elements of row r from element e on

struct WeightsF32 {
    static constexpr int kRows = 1;
    static constexpr bool kBf16 = false;
    __device__ static float at(const uint8_t* row, int, int e) {
        return reinterpret_cast<const float*>(row)[e];
    }
    __device__ static void load8(const uint8_t* row, int, int e, float* v) {
        *reinterpret_cast<float4*>(v) = *reinterpret_cast<const float4*>(row + 4 * e);
        *reinterpret_cast<float4*>(v + 4) = *reinterpret_cast<const float4*>(row + 4 * e + 16);
    }
};

template <bool Bf16>
struct Weights16 {
    static constexpr int kRows = 1;
    static constexpr bool kBf16 = Bf16;
    __device__ static float value(unsigned h) {
        return Bf16 ? bf16_to_f32(static_cast<uint16_t>(h)) : f16_to_f32(static_cast<uint16_t>(h));
    }
    __device__ static float at(const uint8_t* row, int, int e) {
        return value(reinterpret_cast<const uint16_t*>(row)[e]);
    }
    __device__ static void load8(const uint8_t* row, int, int e, float* v) {
        const uint4 w = *reinterpret_cast<const uint4*>(row + 2 * e);
        const unsigned words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            v[2 * i] = value(words[i] & 0xffff);
            v[2 * i + 1] = value(words[i] >> 16);
        }
    }
};

// Sixteen rows in pairs of columns; row points to the group, k is the row inside it.
struct WeightsBF16_R16 {
    static constexpr int kRows = 16;
    static constexpr bool kBf16 = true;
    __device__ static float at(const uint8_t* group, int k, int e) {
        return bf16_to_f32(reinterpret_cast<const uint16_t*>(group)[(e >> 1) * 32 + 2 * k + (e & 1)]);
    }
    __device__ static void load8(const uint8_t* group, int k, int e, float* v) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned w = reinterpret_cast<const unsigned*>(group)[(e / 2 + i) * 16 + k];
            v[2 * i] = bf16_to_f32(static_cast<uint16_t>(w));
            v[2 * i + 1] = bf16_to_f32(static_cast<uint16_t>(w >> 16));
        }
    }
};

template <class W>
__device__ __forceinline__ const uint8_t* weight_row(const uint8_t* matrix, long long row_bytes, int r) {
    return matrix + static_cast<long long>(r / W::kRows * W::kRows) * row_bytes;
}

// Rows of 16-byte multiples can be read eight elements at a time.
template <class W>
__device__ __forceinline__ void load8_checked(const uint8_t* row, int k, int e, int n_in, bool aligned,
                                              float* v) {
    if (aligned && e + 8 <= n_in) {
        W::load8(row, k, e, v);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = e + i < n_in ? W::at(row, k, e + i) : 0.0f;
    }
}

__device__ __forceinline__ void load8_x(const uint8_t* x, int e, bool bf16, float* v) {
    if (bf16) {
        Weights16<true>::load8(x, 0, e, v);
    } else {
        WeightsF32::load8(x, 0, e, v);
    }
}

// Whether all rows of the weights start at multiples of 16 bytes.
__device__ __forceinline__ bool rows_aligned(const Product& p) {
    const auto starts = reinterpret_cast<uintptr_t>(p.up) | reinterpret_cast<uintptr_t>(p.gate);
    return (starts | static_cast<uintptr_t>(p.row_bytes | p.matrix_bytes)) % 16 == 0;
}

// matrix-vector: a warp takes rows (or rows of the up and of the gate matrix) in turn

template <class W, int N>
__device__ __forceinline__ void matvec(const Products& ps, int x_bf16) {
    const int lane = lane_id(), number = block_product(ps);
    const Product& p = ps.product[number];
    const auto [columns, first, n_columns] = vector_columns<N>(p);
    if (n_columns == 0) return;
    const bool aligned = rows_aligned(p);
    const long long matrix = columns.matrix * p.matrix_bytes;
    const uint8_t* x[N];
#pragma unroll
    for (int c = 0; c < N; ++c) x[c] = column_at(p, columns, first + min(c, n_columns - 1)).x;
    const int warps = blockDim.x >> 5;
    for (int r = (blockIdx.y - ps.first[number]) * warps + warp_id(); r < p.n_out; r += gridDim.y * warps) {
        const int k = r % W::kRows;
        const uint8_t* up = weight_row<W>(p.up + matrix, p.row_bytes, r);
        const uint8_t* gate = p.gate ? weight_row<W>(p.gate + matrix, p.row_bytes, r) : nullptr;
        float up_sum[N], gate_sum[N];
#pragma unroll
        for (int c = 0; c < N; ++c) up_sum[c] = gate_sum[c] = 0.0f;
        for (int e = 8 * lane; e < p.n_in; e += 256) {
            float u[8], g[8];
            load8_checked<W>(up, k, e, p.n_in, aligned, u);
            if (gate) load8_checked<W>(gate, k, e, p.n_in, aligned, g);
#pragma unroll
            for (int c = 0; c < N; ++c) {
                float v[8];
                load8_x(x[c], e, x_bf16, v);
#pragma unroll
                for (int i = 0; i < 8; ++i) up_sum[c] += u[i] * v[i];
                if (gate) {
#pragma unroll
                    for (int i = 0; i < 8; ++i) gate_sum[c] += g[i] * v[i];
                }
            }
        }
#pragma unroll
        for (int c = 0; c < N; ++c) {
            up_sum[c] = warp_sum(up_sum[c]);
            if (gate) gate_sum[c] = warp_sum(gate_sum[c]);
        }
#pragma unroll
        for (int c = 0; c < N; ++c) {
            if (lane == c && c < n_columns)
                store_sum(p, column_at(p, columns, first + c).dst, columns.matrix, r, up_sum[c], gate_sum[c]);
        }
    }
}

// matrix product on tensor cores: 64 rows by 64 columns, 64 deep

constexpr int kSize = 64, kStride = 72;  // 16-bit elements; 8 more than the depth against bank conflicts

struct FloatTile {
    __align__(16) uint16_t weights[kSize][kStride];
    __align__(16) uint16_t high[kSize][kStride];
    __align__(16) uint16_t low[kSize][kStride];
    const uint8_t* source[kSize];
};

__device__ __forceinline__ int tile_row(const Product& p, int i) {
    return p.gate ? blockIdx.x * (kSize / 2) + i % (kSize / 2) : blockIdx.x * kSize + i;
}

template <bool Bf16>
__device__ __forceinline__ uint16_t to_16(float x) {
    return Bf16 ? f32_to_bf16(x) : f32_to_f16(to_f16_range(x));
}

template <class W>
__device__ __forceinline__ void load_tile(const Product& p, int matrix, int depth, int n_columns, int x_bf16,
                                          FloatTile& tile) {
    constexpr bool kBf16 = W::kBf16;
    const bool aligned = rows_aligned(p);
    for (int i = threadIdx.x; i < kSize * kSize / 8; i += blockDim.x) {
        const int row = i / 8, e = i % 8 * 8, r = tile_row(p, row);
        float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (r < p.n_out && depth + e < p.n_in) {
            const uint8_t* base = p.gate && row >= kSize / 2 ? p.gate : p.up;
            load8_checked<W>(weight_row<W>(base + matrix * p.matrix_bytes, p.row_bytes, r), r % W::kRows,
                             depth + e, p.n_in, aligned, v);
        }
        unsigned w[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) w[j] = to_16<kBf16>(v[2 * j]) | to_16<kBf16>(v[2 * j + 1]) << 16;
        *reinterpret_cast<uint4*>(&tile.weights[row][e]) = uint4{w[0], w[1], w[2], w[3]};
    }
    for (int i = threadIdx.x; i < kSize * kSize / 8; i += blockDim.x) {
        const int column = i / 8, e = i % 8 * 8;
        float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (column < n_columns && depth + e < p.n_in) load8_x(tile.source[column], depth + e, x_bf16, v);
        unsigned high[4], low[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            uint16_t h[2], l[2];
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                h[b] = to_16<kBf16>(v[2 * j + b]);
                l[b] = to_16<kBf16>(v[2 * j + b] - (kBf16 ? bf16_to_f32(h[b]) : f16_to_f32(h[b])));
            }
            high[j] = h[0] | static_cast<unsigned>(h[1]) << 16;
            low[j] = l[0] | static_cast<unsigned>(l[1]) << 16;
        }
        *reinterpret_cast<uint4*>(&tile.high[column][e]) = uint4{high[0], high[1], high[2], high[3]};
        *reinterpret_cast<uint4*>(&tile.low[column][e]) = uint4{low[0], low[1], low[2], low[3]};
    }
}

// Tiles of 16 rows of one warp: t = 0, 1 are 32 rows apart (up and gate); two tiles of 8 columns.
template <class W>
__device__ __forceinline__ void matmul16(const Product& p, int x_bf16) {
    __shared__ FloatTile tile;
    const int lane = lane_id(), wm = warp_id() & 1, wn = warp_id() >> 1;
    const auto [columns, first, n_columns] = tile_columns<kSize>(p, tile.source);
    if (n_columns == 0) return;
    float sums[2][2][4] = {};
    __syncthreads();
    for (int depth = 0; depth < p.n_in; depth += kSize) {
        load_tile<W>(p, columns.matrix, depth, n_columns, x_bf16, tile);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < kSize; k += 16) {
            unsigned a[2][4];
#pragma unroll
            for (int t = 0; t < 2; ++t)
                load_matrix4(a[t], &tile.weights[32 * t + 16 * wm + lane % 16][k + 8 * (lane / 16)]);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int column = (4 * j + wn) * 8;
                if (column >= n_columns) break;
                unsigned b[4];  // high and low parts
                const uint16_t* row = lane < 16 ? tile.high[column + lane % 8] : tile.low[column + lane % 8];
                load_matrix4(b, row + k + 8 * (lane / 8 % 2));
#pragma unroll
                for (int t = 0; t < 2; ++t) {
                    if (W::kBf16) {
                        mma_bf16(sums[t][j], a[t], b);
                        if (!x_bf16) mma_bf16(sums[t][j], a[t], b + 2);
                    } else {
                        mma_f16(sums[t][j], a[t], b);
                        mma_f16(sums[t][j], a[t], b + 2);
                    }
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int column = (4 * j + wn) * 8 + 2 * (lane % 4) + i % 2;
            if (column >= n_columns) continue;
            uint8_t* dst = column_at(p, columns, first + column).dst;
            const int row = tile_row(p, 16 * wm + lane / 4 + 8 * (i / 2));
            if (row < p.n_out) store_sum(p, dst, columns.matrix, row, sums[0][j][i], sums[1][j][i]);
            if (!p.gate && row + 32 < p.n_out)
                store_sum(p, dst, columns.matrix, row + 32, sums[1][j][i], 0.0f);
        }
}

// matrix product in f32: 64 rows by 64 columns, 16 deep, 4 x 4 sums per thread

constexpr int kDepth32 = 16;

__device__ __forceinline__ void matmul32(const Product& p, int x_bf16) {
    __shared__ float weights[kDepth32][kSize + 4], x[kDepth32][kSize + 4];
    const Columns columns = block_columns(p);
    const int first = blockIdx.y * kSize;
    if (first >= columns.count) return;
    const int n_columns = min(kSize, columns.count - first), tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    // Thread: 4 neighbouring depths of one row, and of one column.
    const int line = threadIdx.x / 4, e = threadIdx.x % 4 * 4, r = tile_row(p, line);
    const uint8_t* base = p.gate && line >= kSize / 2 ? p.gate : p.up;
    const auto* w = reinterpret_cast<const float*>(base + columns.matrix * p.matrix_bytes +
                                                   static_cast<long long>(min(r, p.n_out - 1)) * p.row_bytes);
    const uint8_t* source = column_at(p, columns, first + min(line, n_columns - 1)).x;
    float sums[4][4] = {};
    for (int depth = 0; depth < p.n_in; depth += kDepth32) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = depth + e + i;
            weights[e + i][line] = at < p.n_in ? w[at] : 0.0f;
            x[e + i][line] = at >= p.n_in ? 0.0f
                             : x_bf16     ? bf16_to_f32(reinterpret_cast<const uint16_t*>(source)[at])
                                          : reinterpret_cast<const float*>(source)[at];
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < kDepth32; ++k) {
            float a[4], b[4];
            *reinterpret_cast<float4*>(a) = *reinterpret_cast<const float4*>(&weights[k][4 * tx]);
            *reinterpret_cast<float4*>(b) = *reinterpret_cast<const float4*>(&x[k][4 * ty]);
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) sums[i][j] += a[i] * b[j];
        }
        __syncthreads();
    }
    // Up and gate rows are 32 apart, in threads 8 lanes apart: the lower eight of sixteen store.
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float other = __shfl_xor_sync(kAllLanes, sums[i][j], 8);
            const int row = tile_row(p, 4 * tx + i), column = 4 * ty + j;
            if (column >= n_columns || row >= p.n_out || (p.gate && tx >= 8)) continue;
            store_sum(p, column_at(p, columns, first + column).dst, columns.matrix, row, sums[i][j], other);
        }
}

__device__ __forceinline__ float float_at(int type, const uint8_t* matrix, long long row_bytes, int r,
                                          int e) {
    switch (type) {
        case kF32:
            return WeightsF32::at(matrix + r * row_bytes, 0, e);
        case kF16:
            return Weights16<false>::at(matrix + r * row_bytes, 0, e);
        case kBF16:
            return Weights16<true>::at(matrix + r * row_bytes, 0, e);
        default:
            return WeightsBF16_R16::at(weight_row<WeightsBF16_R16>(matrix, row_bytes, r), r % 16, e);
    }
}

// Rows of bf16 as tiles; both can be read 16 bytes at a time. One thread per 8 elements.
__device__ __forceinline__ void copy_to_tiles(const View& dst, const View& src, int out_type) {
    const int per_row = dst.ne[0] / 8, n = per_row * dst.ne[1];
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        const int r = i / per_row, e = i % per_row * 8;
        const auto* from = reinterpret_cast<const uint4*>(src.row<uint8_t>(r) + 2 * e);
        *reinterpret_cast<uint4*>(tile_element(dst.data, dst.ne[0], tile_line(r, out_type), e)) = __ldg(from);
    }
}

}  // namespace

// dst rows = rows of src (ids: those picked by ids[i1], zeros for -1); type: f32, f16, bf16 or bf16_r16.
// out_type: F32, F16, BF16, or tiles from dst.data on (of bf16, all rows).
IKPY_KERNEL rows_float(View dst, View src, const int* ids, int out_type, int type, const int* runtime) {
    if (is_tiled(out_type)) return copy_to_tiles(dst, src, out_type);
    const long long n = static_cast<long long>(dst.ne[0]) * dst.rows(runtime);
    const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step) {
        const int e = static_cast<int>(i % dst.ne[0]);
        const RowIndex at = row_index(dst, static_cast<int>(i / dst.ne[0]), runtime);
        const int from = ids ? ids[at.i1] : at.i1;
        const float v =
            from < 0 ? 0.0f : float_at(type, src.row<uint8_t>(0, at.i2, at.i3), src.nb[1], from, e);
        uint8_t* out = dst.row<uint8_t>(at.i1, at.i2, at.i3);
        if (out_type == kF32) {
            reinterpret_cast<float*>(out)[e] = v;
        } else {
            reinterpret_cast<uint16_t*>(out)[e] = out_type == kF16 ? f32_to_f16(v) : f32_to_bf16(v);
        }
    }
}
IKPY_EXPORT(rows_float);

#define IKPY_FLOAT_TYPE(name, W)                                                                         \
    IKPY_KERNEL __launch_bounds__(128, 4) matvec1_##name(const IKPY_PARAMETER Products ps, int x_bf16) { \
        matvec<W, 1>(ps, x_bf16);                                                                        \
    }                                                                                                    \
    IKPY_EXPORT(matvec1_##name);                                                                         \
    IKPY_KERNEL __launch_bounds__(128, 4) matvec4_##name(const IKPY_PARAMETER Products ps, int x_bf16) { \
        matvec<W, 4>(ps, x_bf16);                                                                        \
    }                                                                                                    \
    IKPY_EXPORT(matvec4_##name)

IKPY_FLOAT_TYPE(f32, WeightsF32);
IKPY_FLOAT_TYPE(f16, Weights16<false>);
IKPY_FLOAT_TYPE(bf16, Weights16<true>);
IKPY_FLOAT_TYPE(bf16_r16, WeightsBF16_R16);

IKPY_KERNEL __launch_bounds__(256, 2) matmul_f32(Product p, int x_bf16) { matmul32(p, x_bf16); }
IKPY_EXPORT(matmul_f32);
IKPY_KERNEL __launch_bounds__(256, 2) matmul_f16(Product p, int x_bf16) {
    matmul16<Weights16<false>>(p, x_bf16);
}
IKPY_EXPORT(matmul_f16);
IKPY_KERNEL __launch_bounds__(256, 2) matmul_bf16(Product p, int x_bf16) {
    matmul16<Weights16<true>>(p, x_bf16);
}
IKPY_EXPORT(matmul_bf16);
IKPY_KERNEL __launch_bounds__(256, 2) matmul_bf16_r16(Product p, int x_bf16) {
    matmul16<WeightsBF16_R16>(p, x_bf16);
}
IKPY_EXPORT(matmul_bf16_r16);
