// Kernels of a quantized weight type, written once over its unpacker: rows decoded to floats, matrix-vector
// product (dp4a), matrix product on int8 tensor cores. Activations are int8 (quantize_q8.cuh).
#pragma once
#include "mma.cuh"
#include "product.cuh"
#include "quantize_q8.cuh"
#include "tiles.cuh"
#include "unpack/core.cuh"

namespace ikpy::cuda {

// Start of the blocks of the group of interleaved rows that row r is in.
template <class U>
__device__ __forceinline__ const uint8_t* row_group(const uint8_t* matrix, long long row_bytes, int r) {
    return matrix + static_cast<long long>(r / U::kRows) * U::kRows * row_bytes;
}
// Block of group g of 32 elements.
template <class U>
__device__ __forceinline__ const uint8_t* block_of(const uint8_t* group, int g) {
    return group + U::kRows * U::kHeader + static_cast<long long>(g / (U::kBlock / 32)) * U::kBytes;
}
template <class U>
__device__ __forceinline__ void unpack(const uint8_t* group, int k, int g, Group& out) {
    U::group(block_of<U>(group, g), k, g % (U::kBlock / 32), out);
}

// ---- rows ----

// dst rows = rows of src (ids: those picked by ids[i1]), decoded. One thread per 32 elements. out_type: F32,
// F16, BF16, or tiles from dst.data on.
template <class U>
__device__ __forceinline__ void rows_body(const View& dst, const View& src, const int* ids, int out_type,
                                          const int* runtime) {
    const int per_row = dst.ne[0] / 32;
    const long long n = static_cast<long long>(per_row) * dst.rows(runtime);
    const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step) {
        const int g = static_cast<int>(i % per_row);
        const RowIndex at = row_index(dst, static_cast<int>(i / per_row), runtime);
        const int r = ids ? ids[at.i1] : at.i1;
        const uint8_t* group = row_group<U>(src.row<uint8_t>(0, at.i2, at.i3), src.nb[1], r);
        Group w;
        unpack<U>(group, r % U::kRows, g, w);
        const float scale = U::row_scale(group, r % U::kRows);
        const bool tiled = is_tiled(out_type);
        const int line = tile_line(at.i1, out_type);
        uint8_t* out = dst.row<uint8_t>(at.i1, at.i2, at.i3);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int half = U::kHalves ? j / 4 : 0;
            float v[4];
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                v[b] = scale * w.d[half] * static_cast<float>(static_cast<int8_t>(w.q[j] >> 8 * b));
                if (U::kOffset) v[b] += scale * w.m[half];
            }
            const int e = 32 * g + 4 * j;
            if (out_type == kF32) {
                *reinterpret_cast<float4*>(out + 4 * e) = make_float4(v[0], v[1], v[2], v[3]);
            } else {
                const bool f16 = out_type == kF16;
                unsigned h[4];
#pragma unroll
                for (int b = 0; b < 4; ++b) h[b] = f16 ? f32_to_f16(v[b]) : f32_to_bf16(v[b]);
                auto* to = reinterpret_cast<unsigned*>(tiled ? tile_element(dst.data, dst.ne[0], line, e)
                                                             : out + 2 * e);
                to[0] = h[0] | h[1] << 16;
                to[1] = h[2] | h[3] << 16;
            }
        }
    }
}

// ---- matrix-vector ----

constexpr int kVectorWarps = 4;

// 32 activations of a token with their scale and the sums that offsets are multiplied with.
struct ActGroup {
    unsigned q[8];
    float scale;
    float sums[2];
};

template <class U>
__device__ __forceinline__ void load_activations(const uint8_t* x, const ActQ8Layout& at, int g,
                                                 ActGroup& out) {
    *reinterpret_cast<uint4*>(out.q) = __ldg(reinterpret_cast<const uint4*>(x + 32 * g));
    *reinterpret_cast<uint4*>(out.q + 4) = __ldg(reinterpret_cast<const uint4*>(x + 32 * g + 16));
    out.scale = __ldg(reinterpret_cast<const float*>(x + at.scale) + g);
    if (U::kOffset && U::kHalves) {
        const float2 s = __ldg(reinterpret_cast<const float2*>(x + at.sum16) + g);
        out.sums[0] = s.x;
        out.sums[1] = s.y;
    } else if (U::kOffset) {
        out.sums[0] = __ldg(reinterpret_cast<const float*>(x + at.sum32) + g);
    }
}

// Products of group w with the same 32 activations of one token.
template <class U>
__device__ __forceinline__ float group_product(const Group& w, const ActGroup& x) {
    int low = 0, high = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        low = __dp4a(static_cast<int>(w.q[i]), static_cast<int>(x.q[i]), low);
        high = __dp4a(static_cast<int>(w.q[4 + i]), static_cast<int>(x.q[4 + i]), high);
    }
    float sum;
    if (U::kHalves) {
        sum = w.d[0] * static_cast<float>(low) + w.d[1] * static_cast<float>(high);
        if (U::kOffset) sum += w.m[0] * x.sums[0] + w.m[1] * x.sums[1];
    } else {
        sum = w.d[0] * static_cast<float>(low + high);
        if (U::kOffset) sum += w.m[0] * x.sums[0];
    }
    return x.scale * sum;
}

// What a warp of matvec multiplies: row group group0 of `weight[0]` and a second one, with N tokens; of the
// columns part `part`. An inactive warp has no rows and takes part in barriers only.
template <int N>
struct VectorWork {
    int part, group0;
    bool active, second;
    const uint8_t* weight[2];
    const uint8_t* x[N];
};

template <class U, int N>
__device__ __forceinline__ void begin_work(const Product& p, const BlockColumns& block, VectorWork<N>& work) {
    const int warp = warp_id(), sets = kVectorWarps / p.split, n_groups = p.n_out / U::kRows;
    const int set = blockIdx.y * sets + warp / p.split;
    work.part = warp % p.split;
    work.group0 = p.gate ? set : 2 * set;
    work.active = work.group0 < n_groups;
    work.second = p.gate || work.group0 + 1 < n_groups;
    if (work.active) {
        const long long matrix = block.columns.matrix * p.matrix_bytes;
        const int row = work.group0 * U::kRows;
        work.weight[0] = row_group<U>(p.up + matrix, p.row_bytes, row);
        work.weight[1] = p.gate ? row_group<U>(p.gate + matrix, p.row_bytes, row)
                                : work.weight[0] + (work.second ? U::kRows * p.row_bytes : 0);
    }
#pragma unroll
    for (int c = 0; c < N; ++c)
        work.x[c] = column_at(p, block.columns, block.first + min(c, block.count - 1)).x;
}

template <class U, int N>
__device__ __forceinline__ void add_products(const Product& p, const VectorWork<N>& work, float (*sum)[N]) {
    const ActQ8Layout at(p.n_in);
    constexpr int kStep = 32 / U::kRows;
    const int lane = lane_id(), k = lane % U::kRows;
    for (int g = work.part * kStep + lane / U::kRows; g < p.n_in / 32; g += p.split * kStep) {
        Group w[2];
        unpack<U>(work.weight[0], k, g, w[0]);
        unpack<U>(work.weight[1], k, g, w[1]);
#pragma unroll
        for (int c = 0; c < N; ++c) {
            ActGroup x;
            load_activations<U>(work.x[c], at, g, x);
            sum[0][c] += group_product<U>(w[0], x);
            sum[1][c] += group_product<U>(w[1], x);
        }
    }
}

// Joins the sums of the lanes that share a row.
template <class U, int N>
__device__ __forceinline__ void join_lanes(const VectorWork<N>& work, float (*sum)[N]) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int c = 0; c < N; ++c) {
#pragma unroll
            for (int m = 16; m >= U::kRows; m >>= 1) sum[i][c] += __shfl_xor_sync(kAllLanes, sum[i][c], m);
            if (work.active) sum[i][c] *= U::row_scale(work.weight[i], lane_id() % U::kRows);
        }
}

// partial: the sums of all warps, of which those that share rows are added up.
template <class U, int N>
__device__ __forceinline__ void store_vector(const Product& p, const BlockColumns& block,
                                             const VectorWork<N>& work,
                                             const float (*partial)[2][N][U::kRows]) {
    const int warp = warp_id(), matrix = block.columns.matrix;
    for (int i = lane_id(); i < block.count * U::kRows; i += 32) {
        const int c = i / U::kRows, in_group = i % U::kRows, row = work.group0 * U::kRows + in_group;
        float first_sum = 0.0f, second_sum = 0.0f;
        for (int w = warp; w < warp + p.split; ++w) {
            first_sum += partial[w][0][c][in_group];
            second_sum += partial[w][1][c][in_group];
        }
        uint8_t* dst = column_at(p, block.columns, block.first + c).dst;
        store_sum(p, dst, matrix, row, first_sum, second_sum);
        if (!p.gate && work.second) store_sum(p, dst, matrix, row + U::kRows, second_sum, 0.0f);
    }
}

// A warp (or `split` warps, each a part of the columns) multiplies two row groups with N tokens: two
// neighbouring groups, or one of the up projection and the same one of the gate. Interleaved rows are spread
// over the lanes. grid (token chunks or assignments, row blocks, batches): chunks that need the same rows run
// side by side and share them in the L2 cache.
template <class U, int N>
__device__ __forceinline__ void matvec_body(const Product& p) {
    __shared__ float partial[kVectorWarps][2][N][U::kRows];
    const BlockColumns block = vector_columns<N>(p);
    if (block.count == 0) return;
    VectorWork<N> work;
    begin_work<U>(p, block, work);
    float sum[2][N];
#pragma unroll
    for (int c = 0; c < N; ++c) sum[0][c] = sum[1][c] = 0.0f;
    if (work.active) add_products<U>(p, work, sum);
    join_lanes<U>(work, sum);
    // Sums that are picked by a number known at run time must not be in registers: the compiler would keep
    // them in local memory from the start.
    const int lane = lane_id();
    if (lane < U::kRows) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int c = 0; c < N; ++c) partial[warp_id()][i][c][lane] = sum[i][c];
    }
    if (p.split > 1) {
        __syncthreads();
    } else {
        __syncwarp();
    }
    if (work.part == 0 && work.active) store_vector<U>(p, block, work, partial);
}

// ---- matrix product ----

constexpr int kTileRows = 64, kTileColumns = 128, kTileDepth = 128, kTileThreads = 256;
constexpr int kTileStride = kTileDepth + 16;  // bytes; the odd 16 keep ldmatrix free of bank conflicts
constexpr int kTileGroups = kTileDepth / 32;

// Scales, offsets and sums of a step of a tile: 64 weight rows by 128 tokens, 128 deep.
template <class U>
struct TileScales {
    static constexpr int kScales = kTileGroups * (U::kHalves ? 2 : 1);
    static constexpr int kSums = U::kOffset ? kScales : 1;
    __align__(16) float x_scale[kTileColumns][kTileGroups];
    __align__(16) float x_sum[kTileColumns][U::kOffset ? kScales : 4];
    float scale[kScales][kTileRows];
    float offset[kSums][kTileRows];
};

// What 32 columns add to a sum, of types with scales per 16 or offsets; second: the integer sum of those
// behind the first 16 if scales are per 16.
template <class U>
__device__ __forceinline__ float scaled(const TileScales<U>& tile, int g, int row, int column, float first,
                                        [[maybe_unused]] float second) {
    float v;
    if constexpr (U::kHalves) {
        v = tile.scale[2 * g][row] * first + tile.scale[2 * g + 1][row] * second;
        if (U::kOffset)
            v += tile.offset[2 * g][row] * tile.x_sum[column][2 * g] +
                 tile.offset[2 * g + 1][row] * tile.x_sum[column][2 * g + 1];
    } else {
        v = tile.scale[g][row] * first;
        if (U::kOffset) v += tile.offset[g][row] * tile.x_sum[column][g];
    }
    return tile.x_scale[column][g] * v;
}

// The same of all other types; first: the integer sum times the scale of the activations. That product is
// rounded once, however it is made.
template <class U>
__device__ __forceinline__ float scaled(const TileScales<U>& tile, int g, int row, float first) {
    return tile.scale[g][row] * first;
}

// Row of the matrices that a line of a tile holds.
struct TileLine {
    int row;
    bool is_gate;
};

// Shared memory of a block of matmul.
template <class U>
struct Tile : TileScales<U> {
    __align__(16) uint8_t weights[kTileRows][kTileStride];
    __align__(16) uint8_t x[kTileColumns][kTileStride];
    // What the sums of a product start at. Of constants the compiler would make them anew for every product.
    int4 start;

    __device__ __forceinline__ uint8_t* weights_at(int i, int depth) { return &weights[i][depth]; }
    __device__ __forceinline__ uint8_t* x_at(int column, int depth) { return &x[column][depth]; }
    // With a gate the lower half are up rows, the upper half gate rows.
    __device__ static __forceinline__ TileLine line(const Product& p, int i) {
        if (!p.gate) return {static_cast<int>(blockIdx.x) * kTileRows + i, false};
        return {static_cast<int>(blockIdx.x) * (kTileRows / 2) + i % (kTileRows / 2), i >= kTileRows / 2};
    }
};

template <class U, class AnyTile>
__device__ __forceinline__ void load_weight_tile(const Product& p, int thread, int matrix, int depth,
                                                 AnyTile& tile) {
    // Neighbouring threads take neighbouring groups of a row.
    const int g = thread % kTileGroups, i = thread / kTileGroups;
    const TileLine line = AnyTile::line(p, i);
    const int row = line.row, group = depth / 32 + g;
    Group w;
    if (row < p.n_out && group < p.n_in / 32) {
        const uint8_t* base = line.is_gate ? p.gate : p.up;
        const uint8_t* rows = row_group<U>(base + matrix * p.matrix_bytes, p.row_bytes, row);
        unpack<U>(rows, row % U::kRows, group, w);
        // The next tile is on its way from memory while this one is multiplied.
        if (group + kTileGroups < p.n_in / 32) prefetch_l2(block_of<U>(rows, group + kTileGroups));
        if (U::kHeader > 0) {
            const float scale = U::row_scale(rows, row % U::kRows);
            w.d[0] *= scale;
            w.d[1] *= scale;
        }
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) w.q[j] = 0;
        w.d[0] = w.d[1] = w.m[0] = w.m[1] = 0.0f;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h)
        *reinterpret_cast<uint4*>(tile.weights_at(i, 32 * g + 16 * h)) =
            uint4{w.q[4 * h], w.q[4 * h + 1], w.q[4 * h + 2], w.q[4 * h + 3]};
    constexpr int kParts = U::kHalves ? 2 : 1;
#pragma unroll
    for (int h = 0; h < kParts; ++h) {
        tile.scale[kParts * g + h][i] = w.d[h];
        if (U::kOffset) tile.offset[kParts * g + h][i] = w.m[h];
    }
}

// sources: the prepared activations of the columns.
template <class U, class AnyTile>
__device__ __forceinline__ void load_x_tile(const Product& p, int thread, const uint8_t* const* sources,
                                            int depth, int n_columns, AnyTile& tile) {
    const ActQ8Layout at(p.n_in);
    for (int i = thread; i < kTileColumns * kTileDepth / 16; i += kTileThreads) {
        const int c = i / (kTileDepth / 16), e = i % (kTileDepth / 16) * 16;
        copy16_async(tile.x_at(c, e), sources[c] + depth + e, c < n_columns);
    }
    const int c = thread % kTileColumns;
    const uint8_t* x = sources[c];
    if (thread < kTileColumns) {
        copy16_async(tile.x_scale[c], x + at.scale + depth / 8, c < n_columns);
    } else if constexpr (U::kOffset) {
        if constexpr (U::kHalves) {
            copy16_async(tile.x_sum[c], x + at.sum16 + depth / 4, c < n_columns);
            copy16_async(tile.x_sum[c] + 4, x + at.sum16 + depth / 4 + 16, c < n_columns);
        } else {
            copy16_async(tile.x_sum[c], x + at.sum32 + depth / 8, c < n_columns);
        }
    }
    commit_copies();
}

// Sums of one warp: two tiles of 16 rows (up and gate, or 32 rows apart) and four of 8 columns.
struct WarpSums {
    float c[2][4][4];
};

template <class U>
__device__ __forceinline__ void multiply_tile(const Tile<U>& tile, int n_columns, WarpSums& sums) {
    const int lane = lane_id(), wm = warp_id() & 1, wn = warp_id() >> 1;
    const int4 start = tile.start;
#pragma unroll
    for (int g = 0; g < kTileGroups; ++g) {
        unsigned a[2][4];
#pragma unroll
        for (int t = 0; t < 2; ++t)
            load_matrix4(a[t], &tile.weights[32 * t + 16 * wm + lane % 16][32 * g + 16 * (lane / 16)]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int column0 = (4 * j + wn) * 8;
            if (column0 >= n_columns) break;
            unsigned b[2];
            const auto* x = reinterpret_cast<const unsigned*>(&tile.x[column0 + lane / 4][32 * g]);
            b[0] = x[lane % 4];
            b[1] = x[4 + lane % 4];
            const int column = column0 + 2 * (lane % 4);
            // Scales have the eight bits of bf16, so that their product with the start of sums is exact.
            const float dx[2] = {tile.x_scale[column][g], tile.x_scale[column + 1][g]};
            const float start_x[2] = {-kSumStartValue * dx[0], -kSumStartValue * dx[1]};
#pragma unroll
            for (int t = 0; t < 2; ++t) {
                const int row = 32 * t + 16 * wm + lane / 4;
                float* c = sums.c[t][j];
                int first[4], second[4];
                if constexpr (U::kHalves) {
                    mma_s8_k16(first, a[t], b[0], start);
                    mma_s8_k16(second, a[t] + 2, b[1], start);
                } else {
                    mma_s8_k32(first, a[t], b, start);
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int line = row + 8 * (i / 2);
                    if constexpr (U::kHalves) {
                        c[i] += scaled<U>(tile, g, line, column + i % 2, sum_value(first[i]),
                                          sum_value(second[i]));
                    } else if constexpr (U::kOffset) {
                        c[i] += scaled<U>(tile, g, line, column + i % 2, sum_value(first[i]), 0.0f);
                    } else {
                        const float bits = __int_as_float(first[i]);
                        c[i] += scaled<U>(tile, g, line, __fmaf_rn(dx[i % 2], bits, start_x[i % 2]));
                    }
                }
            }
        }
    }
}

// grid (row tiles, column tiles, batches or experts); 256 threads.
template <class U>
__device__ __forceinline__ void matmul_body(const Product& p) {
    __shared__ Tile<U> tile;
    __shared__ const uint8_t* sources[kTileColumns];
    const auto [columns, first, n_columns] = tile_columns<kTileColumns>(p, sources);
    if (n_columns == 0) return;
    if (threadIdx.x == 0) tile.start = int4{kSumStart, kSumStart, kSumStart, kSumStart};
    WarpSums sums;
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums.c[t][j][i] = 0.0f;
    __syncthreads();
    for (int depth = 0; depth < p.n_in; depth += kTileDepth) {
        load_x_tile<U>(p, threadIdx.x, sources, depth, n_columns, tile);
        load_weight_tile<U>(p, threadIdx.x, columns.matrix, depth, tile);
        wait_copies<0>();
        __syncthreads();
        multiply_tile<U>(tile, n_columns, sums);
        __syncthreads();
    }
    const int lane = lane_id(), wm = warp_id() & 1, wn = warp_id() >> 1;
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int column = (4 * j + wn) * 8 + 2 * (lane % 4) + i % 2;
            if (column >= n_columns) continue;
            uint8_t* dst = column_at(p, columns, first + column).dst;
            const int in_tile = 16 * wm + lane / 4 + 8 * (i / 2), row = Tile<U>::line(p, in_tile).row;
            if (row < p.n_out) store_sum(p, dst, columns.matrix, row, sums.c[0][j][i], sums.c[1][j][i]);
            if (!p.gate && row + 32 < p.n_out)
                store_sum(p, dst, columns.matrix, row + 32, sums.c[1][j][i], 0.0f);
        }
}

}  // namespace ikpy::cuda

// Four blocks per multiprocessor are asked for where the compiler might else save registers by spilling.
// The kernels of a type; name as in the table of tensor types, in lower case.
#define IKPY_WEIGHT_TYPE(name, U)                                                                     \
    IKPY_KERNEL rows_##name(ikpy::cuda::View dst, ikpy::cuda::View src, const int* ids, int out_type, \
                            const int* runtime) {                                                     \
        ikpy::cuda::rows_body<ikpy::cuda::U>(dst, src, ids, out_type, runtime);                       \
    }                                                                                                 \
    IKPY_EXPORT(rows_##name);                                                                         \
    IKPY_KERNEL __launch_bounds__(128, 4) matvec1_##name(ikpy::cuda::Product p) {                     \
        ikpy::cuda::matvec_body<ikpy::cuda::U, 1>(p);                                                 \
    }                                                                                                 \
    IKPY_EXPORT(matvec1_##name);                                                                      \
    IKPY_KERNEL __launch_bounds__(128, 4) matvec4_##name(ikpy::cuda::Product p) {                     \
        ikpy::cuda::matvec_body<ikpy::cuda::U, 4>(p);                                                 \
    }                                                                                                 \
    IKPY_EXPORT(matvec4_##name);                                                                      \
    IKPY_KERNEL __launch_bounds__(256, 2) matmul_##name(ikpy::cuda::Product p) {                      \
        ikpy::cuda::matmul_body<ikpy::cuda::U>(p);                                                    \
    }                                                                                                 \
    IKPY_EXPORT(matmul_##name)
