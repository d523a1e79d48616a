// What indexers of sparse attention share: scores of index keys by tensor cores, and the choice of the
// largest.
#pragma once

#include <cfloat>

#include "flash_operands.cuh"

namespace ikpy::cuda {

constexpr int kMaxSize = 128;  // elements of an index key
constexpr int kStride = kMaxSize + 8;
constexpr int kCells = 128;  // of a block of scores: 32 for each of 4 warps
constexpr int kHeads = 16;   // multiplied at once
constexpr int kTokens = 4;   // that meet a block's keys

// Index keys of a block of cells, and queries of some heads of a token as two f16 parts, which keep 22 bits.
struct __align__(16) IndexTile {
    uint16_t keys[kCells][kStride];
    uint16_t high[kHeads][kStride], low[kHeads][kStride];
};

struct Indexer {
    View q, keys;          // [n, H, T], [n, 1, cells]
    const uint16_t* mask;  // f16 rows of 0 and -inf
    const int* ranges;     // [2, T]
    const int* runtime;
    long long mask_stride;  // bytes
    int type;

    __device__ __forceinline__ int n_cells() const { return keys.extent(2, runtime); }
    __device__ __forceinline__ int padded() const { return (q.ne[0] + 31) / 32 * 32; }
    __device__ __forceinline__ bool sees(int token, int cell) const {
        const auto* row =
            reinterpret_cast<const uint16_t*>(reinterpret_cast<const uint8_t*>(mask) + token * mask_stride);
        return cell >= ranges[2 * token] && cell < ranges[2 * token + 1] && row[cell] == 0;
    }
};

__device__ __forceinline__ void load_index_keys(const Indexer& a, int c0, IndexTile& tile) {
    const int per_row = a.padded() / 8, n_kv = a.n_cells();
    for (int i = threadIdx.x; i < kCells * per_row; i += blockDim.x) {
        const int c = i / per_row, e = i % per_row * 8;
        const bool valid = c0 + c < n_kv && e < a.q.ne[0];
        const auto* row = a.keys.row<const uint8_t>(0, min(c0 + c, n_kv - 1));
        copy8(a.type, CellPiece{row, valid ? e : 0, 0, valid}, &tile.keys[c][e]);
    }
    commit_copies();
}

__device__ __forceinline__ void load_index_queries(const Indexer& a, int token, int h0, IndexTile& tile) {
    const int n = a.padded(), heads = a.q.ne[1];
    for (int i = threadIdx.x; i < kHeads * n; i += blockDim.x) {
        const int h = i / n, e = i % n;
        const bool valid = h0 + h < heads && e < a.q.ne[0];
        const float x = valid ? a.q.row<const float>(h0 + h, token)[e] : 0.0f;
        const uint16_t high = f32_to_f16(to_f16_range(x));
        tile.high[h][e] = high;
        tile.low[h][e] = f32_to_f16(to_f16_range(x - f16_to_f32(high)));
    }
}

// q . k of the tile's heads and this warp's cells: of tile j of 8 cells, columns 2 (lane % 4) and one more,
// of the rows lane / 4 and lane / 4 + 8.
__device__ __forceinline__ void index_products(const IndexTile& tile, int n, float (*scores)[4]) {
    const int lane = lane_id();
    for (int d = 0; d < n; d += 32) {
        unsigned high[2][4], low[2][4];
        const int row = lane % 16, column = d + 8 * (lane / 16);
        load_matrix4(high[0], &tile.high[row][column]);
        load_matrix4(high[1], &tile.high[row][column + 16]);
        load_matrix4(low[0], &tile.low[row][column]);
        load_matrix4(low[1], &tile.low[row][column + 16]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            unsigned y[4];
            load_matrix4(y, &tile.keys[32 * warp_id() + 8 * j + lane % 8][d + 8 * (lane / 8)]);
            mma_f16(scores[j], high[0], y);
            mma_f16(scores[j], high[1], y + 2);
            mma_f16(scores[j], low[0], y);
            mma_f16(scores[j], low[1], y + 2);
        }
    }
}

// Unsigned numbers in the order of the floats; those of what is not seen are the lowest.
__device__ __forceinline__ unsigned ordered(float x) {
    const unsigned bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
constexpr unsigned kUnseen = 0x007fffffu;

// How many threads of the block before this one have the flag; total: how many of all.
__device__ __forceinline__ int block_rank(bool flag, int* total) {
    __shared__ int counts[32];
    const unsigned holders = __ballot_sync(kAllLanes, flag);
    __syncthreads();
    if (lane_id() == 0) counts[warp_id()] = __popc(holders);
    __syncthreads();
    int before = 0, all = 0;
    for (int w = 0; w < static_cast<int>(blockDim.x >> 5); ++w) {
        before += w < warp_id() ? counts[w] : 0;
        all += counts[w];
    }
    *total = all;
    return before + __popc(holders & ((1u << lane_id()) - 1));
}

// The k-th largest of more than k seen values key(0 ... n - 1), in eight bits at a time; left: how many of
// those equal to it belong to the k largest.
template <class Key>
__device__ __forceinline__ unsigned threshold(const Key& key, int n, int k, int* left) {
    __shared__ int histogram[256], found[2];
    unsigned prefix = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < 256; i += blockDim.x) histogram[i] = 0;
        __syncthreads();
        const unsigned known = shift == 24 ? 0u : 0xffffffffu << (shift + 8);
        for (int i = threadIdx.x; i < n; i += blockDim.x) {
            const unsigned x = key(i);
            if ((x & known) == prefix) atomicAdd(&histogram[x >> shift & 255], 1);
        }
        __syncthreads();
        if (warp_id() == 0) {  // sums of 8 bins per lane, the largest first
            const int top = 255 - 8 * lane_id();
            int own = 0;
            for (int i = 0; i < 8; ++i) own += histogram[top - i];
            int above = own;
            for (int m = 1; m < 32; m <<= 1) {
                const int other = __shfl_up_sync(kAllLanes, above, m);
                if (lane_id() >= m) above += other;
            }
            above -= own;
            if (above < k && k <= above + own) {
                int bin = top;
                for (; above + histogram[bin] < k; --bin) above += histogram[bin];
                found[0] = bin;
                found[1] = k - above;
            }
        }
        __syncthreads();
        prefix |= static_cast<unsigned>(found[0]) << shift;
        k = found[1];
    }
    *left = k;
    return prefix;
}

}  // namespace ikpy::cuda
