// Flash attention on tensor cores: tiles of query rows that share a key head against tiles of cells, with a
// running maximum. Rows of a key head are ordered by token, then head of the group, so one pass over the
// cache serves all heads of a token.
//
// WM warps side by side take 16 rows each. With WN = 1 a warp keeps its scores in registers; with WN > 1 (few
// rows, or heads too long for the registers of one warp) WN warps share rows: each takes a part of the cells
// for the scores and a part of the columns for the sums, and probabilities go through shared memory.
#pragma once
#include "attention.cuh"
#include "mma.cuh"

namespace ikpy::cuda {

constexpr float kNoMaximum = -1e30f;  // below any score, and finite

template <int Dk, int Dv, int Wm, int Wn, int Cells, bool VInK>
struct Flash {
    static constexpr int kDk = (Dk + 31) / 32 * 32, kRows = 16 * Wm, kThreads = 32 * Wm * Wn;
    // Rows of 16-bit elements; 8 more than the length keep ldmatrix free of bank conflicts.
    static constexpr int kStrideK = kDk + 8, kStrideV = Dv + 8, kStrideP = Cells + 8;
    static constexpr int kBytesQ = kRows * kStrideK * 2, kBytesK = Cells * kStrideK * 2;
    static constexpr int kBytesV = VInK ? 0 : Cells * kStrideV * 2,
                         kBytesP = Wn > 1 ? kRows * kStrideP * 2 : 0;
    static constexpr int kBytes = kBytesQ + kBytesK + kBytesV + kBytesP;
    static constexpr int kScoreTiles = Cells / 8 / Wn;        // of 8 cells, per warp
    static constexpr int kSumTiles = (Dv / 8 + Wn - 1) / Wn;  // of 8 columns, per warp
    static_assert(Cells / 8 % Wn == 0 && Dv % 8 == 0 && Cells % 32 == 0, "tiles");
};

__device__ __forceinline__ unsigned pack_f16(float a, float b) {
#if defined(__CUDACC__)
    const __half2 h = __floats2half2_rn(a, b);
    return *reinterpret_cast<const unsigned*>(&h);
#else
    return f32_to_f16(a) | static_cast<unsigned>(f32_to_f16(b)) << 16;
#endif
}

// Elements e .. e + 7 of a cache row as f16 to shared memory; e is a multiple of 8. f16 rows are copied
// asynchronously.
__device__ __forceinline__ void copy8(int type, const uint8_t* row, int e, uint16_t* to, bool valid) {
    if (type == kF16) return copy16_async(to, row + 2 * e, valid);
    float v[8];
    if (!valid) {
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = 0.0f;
    } else if (type == kQ8_0) {
        const uint8_t* block = row + e / 32 * 34;
        const float d = load_f16(block);
        const unsigned q[2] = {load4<2>(block + 2 + e % 32), load4<2>(block + 6 + e % 32)};
#pragma unroll
        for (int i = 0; i < 8; ++i)
            v[i] = d * static_cast<float>(static_cast<int8_t>(q[i / 4] >> 8 * (i % 4)));
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = to_f16_range(kv_element(type, row, e + i));
    }
    *reinterpret_cast<uint4*>(to) =
        uint4{pack_f16(v[0], v[1]), pack_f16(v[2], v[3]), pack_f16(v[4], v[5]), pack_f16(v[6], v[7])};
}

struct FlashRows {
    int heads, tokens, per_kv, kv_head, row0, n_rows;
    __device__ int head(int r) const { return kv_head * per_kv + r % per_kv; }
    __device__ int token(int r) const { return r / per_kv; }
};

// Cells that any row of the tile may see, given to all threads.
__device__ __forceinline__ void tile_range(const Attention& a, const FlashRows& rows, int tile_rows,
                                           int* first, int* last) {
    const int t0 = rows.token(rows.row0), t1 = rows.token(min(rows.row0 + tile_rows, rows.n_rows) - 1);
    const int n = n_cells(a);
    float low = 0.0f, high = 0.0f;  // cell numbers are exact in f32
    for (int t = t0 + threadIdx.x; t <= t1; t += blockDim.x) {
        int f, l;
        cell_range(a, t, &f, &l);
        if (f < l) {
            low = fmaxf(low, static_cast<float>(n - f));
            high = fmaxf(high, static_cast<float>(l));
        }
    }
    *first = n - static_cast<int>(block_max(low));
    *last = static_cast<int>(block_max(high));
}

template <class F>
__device__ __forceinline__ void load_cells(const View& v, int type, int head, int c0, int last, int n_cells,
                                           int length, uint16_t* to, int stride, F) {
    const int per_row = length / 8;
    for (int i = threadIdx.x; i < n_cells * per_row; i += F::kThreads) {
        const int c = i / per_row, e = i % per_row * 8;
        copy8(type, v.row<const uint8_t>(head, min(c0 + c, last - 1)), e, to + c * stride + e, c0 + c < last);
    }
}

// grid (row tiles, key heads, parts). Dynamic shared memory: Flash::kBytes.
template <int Dk, int Dv, int Wm, int Wn, int Cells, bool VInK>
__device__ __forceinline__ void flash_body(const Attention& a, int v_column) {
    using F = Flash<Dk, Dv, Wm, Wn, Cells, VInK>;
    IKPY_DYNAMIC_SHARED(memory);
    __shared__ float shared_stat[Wn][F::kRows];
    auto* q = reinterpret_cast<uint16_t*>(memory);
    uint16_t* k = q + F::kBytesQ / 2;
    uint16_t* v = VInK ? k + v_column : k + F::kBytesK / 2;
    uint16_t* probabilities = k + (F::kBytesK + F::kBytesV) / 2;
    constexpr int kStrideV = VInK ? F::kStrideK : F::kStrideV;
    const int lane = lane_id(), wm = warp_id() % Wm, wn = warp_id() / Wm;

    FlashRows rows;
    rows.heads = a.q.ne[1];
    rows.tokens = a.q.ne[2];
    rows.per_kv = rows.heads / a.k.ne[1];
    rows.kv_head = blockIdx.y;
    rows.row0 = blockIdx.x * F::kRows;
    rows.n_rows = rows.per_kv * rows.tokens;
    const int d0 = a.k.ne[0], k1_head = a.k1.data ? rows.kv_head * a.k1.ne[1] / a.k.ne[1] : 0;
    const int v_head = rows.kv_head * a.v.ne[1] / a.k.ne[1];
    const float factor = a.softcap != 0.0f ? a.scale / a.softcap : a.scale * kLog2e;

    for (int i = threadIdx.x; i < F::kRows * F::kDk / 2; i += F::kThreads) {
        const int r = i / (F::kDk / 2), e = i % (F::kDk / 2) * 2, row = rows.row0 + r;
        unsigned pair = 0;
        if (row < rows.n_rows && e < Dk) {
            const float* x = a.q.row<const float>(rows.head(row), rows.token(row)) + e;
            pair = pack_f16(to_f16_range(factor * x[0]), to_f16_range(factor * x[1]));
        }
        *reinterpret_cast<unsigned*>(q + r * F::kStrideK + e) = pair;
    }
    if constexpr (F::kDk > Dk) {
        for (int i = threadIdx.x; i < Cells * (F::kDk - Dk); i += F::kThreads)
            k[i / (F::kDk - Dk) * F::kStrideK + Dk + i % (F::kDk - Dk)] = 0;
    }

    int first, last;
    tile_range(a, rows, F::kRows, &first, &last);
    // This part's share of the tiles of cells.
    const int tile0 = first / Cells, n_tiles = last > first ? (last + Cells - 1) / Cells - tile0 : 0;
    const int share = (n_tiles + a.n_parts - 1) / a.n_parts;
    const int begin = tile0 + blockIdx.z * share, end = min(tile0 + n_tiles, begin + share);

    // Rows of this thread: 16 wm + lane / 4 and 8 more.
    int row_first[2], row_last[2];
    const uint16_t* row_mask[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = min(rows.row0 + 16 * wm + lane / 4 + 8 * h, rows.n_rows - 1), token = rows.token(row);
        cell_range(a, token, &row_first[h], &row_last[h]);
        row_mask[h] = mask_row(a, token);
    }
    float maximum[2] = {kNoMaximum, kNoMaximum}, denominator[2] = {0.0f, 0.0f};
    float sums[F::kSumTiles][4];
#pragma unroll
    for (int t = 0; t < F::kSumTiles; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[t][i] = 0.0f;

    // Values arrive while scores are computed, the next keys while values are summed. Values that are a part
    // of the keys allow no such overlap; blocks then overlap each other.
    const auto load_keys = [&](int tile) {
        load_cells(a.k, a.k_type, rows.kv_head, tile * Cells, last, Cells, d0, k, F::kStrideK, F{});
        if (a.k1.data)
            load_cells(a.k1, a.k1_type, k1_head, tile * Cells, last, Cells, Dk - d0, k + d0, F::kStrideK,
                       F{});
        commit_copies();
    };
    if (!VInK && begin < end) load_keys(begin);
    for (int tile = begin; tile < end; ++tile) {
        const int c0 = tile * Cells;
        if (VInK) {
            __syncthreads();
            load_keys(tile);
        }
        wait_copies<0>();
        __syncthreads();
        if (!VInK) {
            load_cells(a.v, a.v_type, v_head, c0, last, Cells, Dv, v, F::kStrideV, F{});
            commit_copies();
        }

        float scores[F::kScoreTiles][4];
#pragma unroll
        for (int j = 0; j < F::kScoreTiles; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) scores[j][i] = 0.0f;
#pragma unroll 2
        for (int d = 0; d < F::kDk; d += 32) {
            unsigned x[2][4];
            const uint16_t* query = q + (16 * wm + lane % 16) * F::kStrideK + d + 8 * (lane / 16);
            load_matrix4(x[0], query);
            load_matrix4(x[1], query + 16);
#pragma unroll
            for (int j = 0; j < F::kScoreTiles; ++j) {
                unsigned y[4];
                load_matrix4(
                    y, k + (8 * (wn * F::kScoreTiles + j) + lane % 8) * F::kStrideK + d + 8 * (lane / 8));
                mma_f16(scores[j], x[0], y);
                mma_f16(scores[j], x[1], y + 2);
            }
        }
        float top[2] = {maximum[0], maximum[1]};
#pragma unroll
        for (int j = 0; j < F::kScoreTiles; ++j) {
            const int cell = c0 + 8 * (wn * F::kScoreTiles + j) + 2 * (lane % 4);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                unsigned open = 0;
                if (row_mask[h] && cell < last) {
                    open = *reinterpret_cast<const unsigned*>(row_mask[h] + cell);
                }
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& s = scores[j][2 * h + i];
                    if (a.softcap != 0.0f) s = a.softcap * kLog2e * tanhf(s);
                    const bool hidden = open >> (16 * i + 15) & 1;
                    if (hidden || cell + i < row_first[h] || cell + i >= row_last[h]) s = -INFINITY;
                    top[h] = fmaxf(top[h], s);
                }
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            top[h] = fmaxf(top[h], __shfl_xor_sync(kAllLanes, top[h], 1));
            top[h] = fmaxf(top[h], __shfl_xor_sync(kAllLanes, top[h], 2));
        }
        if (Wn > 1) {
            if (lane % 4 == 0) {
                shared_stat[wn][16 * wm + lane / 4] = top[0];
                shared_stat[wn][16 * wm + lane / 4 + 8] = top[1];
            }
            __syncthreads();
#pragma unroll
            for (int w = 0; w < Wn; ++w) {
                top[0] = fmaxf(top[0], shared_stat[w][16 * wm + lane / 4]);
                top[1] = fmaxf(top[1], shared_stat[w][16 * wm + lane / 4 + 8]);
            }
        }
        const float decay[2] = {exp2f(maximum[0] - top[0]), exp2f(maximum[1] - top[1])};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            maximum[h] = top[h];
            denominator[h] *= decay[h];
        }
#pragma unroll
        for (int j = 0; j < F::kScoreTiles; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                scores[j][i] = exp2f(scores[j][i] - top[i / 2]);
                denominator[i / 2] += scores[j][i];
            }
#pragma unroll
        for (int t = 0; t < F::kSumTiles; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[t][i] *= decay[i / 2];

        if (Wn > 1) {
#pragma unroll
            for (int j = 0; j < F::kScoreTiles; ++j) {
                uint16_t* p = probabilities + (16 * wm + lane / 4) * F::kStrideP +
                              8 * (wn * F::kScoreTiles + j) + 2 * (lane % 4);
                *reinterpret_cast<unsigned*>(p) = pack_f16(scores[j][0], scores[j][1]);
                *reinterpret_cast<unsigned*>(p + 8 * F::kStrideP) = pack_f16(scores[j][2], scores[j][3]);
            }
            if (VInK) __syncthreads();
        }
        if (!VInK) {
            wait_copies<0>();
            __syncthreads();
            if (tile + 1 < end) load_keys(tile + 1);
        }
#pragma unroll
        for (int c = 0; c < Cells; c += 32) {
            unsigned x[2][4];
            if (Wn > 1) {
                const uint16_t* p = probabilities + (16 * wm + lane % 16) * F::kStrideP + c + 8 * (lane / 16);
                load_matrix4(x[0], p);
                load_matrix4(x[1], p + 16);
            } else {
                // Two tiles of 8 score columns are one fragment of 16 cells.
#pragma unroll
                for (int s = 0; s < 2; ++s)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float* pair = &scores[(c / 8 + 2 * s + i / 2) % F::kScoreTiles][2 * (i % 2)];
                        x[s][i] = pack_f16(pair[0], pair[1]);
                    }
            }
#pragma unroll
            for (int t = 0; t < F::kSumTiles; ++t) {
                const int column = 8 * (wn + Wn * t);
                if (column >= Dv) break;
                unsigned y[4];
                load_matrix4_transposed(y, v + (c + lane) * kStrideV + column);
                mma_f16(sums[t], x[0], y);
                mma_f16(sums[t], x[1], y + 2);
            }
        }
    }

#pragma unroll
    for (int h = 0; h < 2; ++h) {
        denominator[h] += __shfl_xor_sync(kAllLanes, denominator[h], 1);
        denominator[h] += __shfl_xor_sync(kAllLanes, denominator[h], 2);
    }
    if (Wn > 1) {
        __syncthreads();
        if (lane % 4 == 0) {
            shared_stat[wn][16 * wm + lane / 4] = denominator[0];
            shared_stat[wn][16 * wm + lane / 4 + 8] = denominator[1];
        }
        __syncthreads();
        denominator[0] = denominator[1] = 0.0f;
#pragma unroll
        for (int w = 0; w < Wn; ++w) {
            denominator[0] += shared_stat[w][16 * wm + lane / 4];
            denominator[1] += shared_stat[w][16 * wm + lane / 4 + 8];
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = rows.row0 + 16 * wm + lane / 4 + 8 * h;
        if (row >= rows.n_rows) continue;
        const int head = rows.head(row), token = rows.token(row);
        float *out, norm = 1.0f;
        if (a.n_parts > 1) {
            const long long place =
                (static_cast<long long>(blockIdx.z) * rows.tokens + token) * rows.heads + head;
            out = a.partials + place * (Dv + 2);
            if (lane % 4 == 0 && wn == 0) {
                out[Dv] = maximum[h];
                out[Dv + 1] = denominator[h];
            }
        } else {
            out = a.dst.row<float>(head, token);
            norm = normalizer(a, head, maximum[h], denominator[h]);
        }
#pragma unroll
        for (int t = 0; t < F::kSumTiles; ++t) {
            const int column = 8 * (wn + Wn * t) + 2 * (lane % 4);
            if (column >= Dv) break;
            *reinterpret_cast<float2*>(out + column) =
                float2{norm * sums[t][2 * h], norm * sums[t][2 * h + 1]};
        }
    }
}

}  // namespace ikpy::cuda

// Blocks: how many shall fit a multiprocessor; without it the compiler may save registers by spilling.
#define IKPY_FLASH(name, Dk, Dv, Wm, Wn, Cells, VInK, Blocks)                                         \
    IKPY_KERNEL __launch_bounds__(32 * Wm * Wn, Blocks) name(ikpy::cuda::Attention a, int v_column) { \
        ikpy::cuda::flash_body<Dk, Dv, Wm, Wn, Cells, VInK>(a, v_column);                             \
    }                                                                                                 \
    IKPY_EXPORT(name)
