// Super-blocks that share bytes among their groups of 32 elements, and lie at no multiple of 16: a warp
// brings whole lines of rows to shared memory, those that it multiplies next while it multiplies others.
#pragma once
#include "matvec_work.cuh"
#include "mma.cuh"
#include "quantize_q8.cuh"

namespace ikpy::cuda {

// What a warp multiplies at a time: kBlocks blocks of two sets of rows, of which a lane has kOwn each. Lanes
// are ordered by block, part, row. Rows are apart so that lanes with the same part of different rows meet
// different banks; whatever a row's first byte is in its 16.
constexpr int kPartsOfBlock = 4;
template <class U>
struct PartStage {
    static constexpr int kOwn = Lanes<U, 1>::kOwn, kRowLanes = Lanes<U, 1>::kInTurn;
    static constexpr int kBlocks = Lanes<U, 1>::kBlocks, kBytes = kBlocks * U::kBytes;
    static constexpr int kNeeded = (kBytes + 14 + 15) / 16 * 16, kOdd = (kNeeded + 15) / 32 * 32 + 16;
    static constexpr int kStride = kOdd % 128 == 16 ? kOdd + 32 : kOdd;
    static constexpr int kLines = (kBytes + 126 + 127) / 128;  // of the cache
    static_assert(U::kBlock == 256 && U::kRows == 1 && kStride >= kNeeded && U::kBytes % 2 == 0);
    static_assert(kRowLanes * kPartsOfBlock * kBlocks == 32);
    alignas(16) uint8_t data[kRowLanes][2][kOwn][kStride];
};

// The copies of a warp's rows: lanes 8 i to 8 i + 7 copy two of set i % 2, those of lane i / 2, or of lanes
// i / 2 and i / 2 + 2, to one stage and the other in turn, a line of the cache at a time, of which a lane has
// 16 bytes. Bytes keep their place in pieces of 16. Addresses are carried from step to step here and below:
// computed anew they take more instructions than the products.
template <class U>
struct PartCopies {
    static constexpr int kOwn = PartStage<U>::kOwn, kRows = 2;
    const uint8_t* from[kRows];  // the lane's piece of the line that the next byte of the row is in
    int head[kRows];             // place of that byte in the line
    int own;                     // and of the piece
    uint8_t *to, *next;

    __device__ __forceinline__ PartCopies(const VectorWork<U, 1>& work, PartStage<U> (&stages)[2], int first)
        : own(16 * (lane_id() % 8)) {
        const int row = lane_id() / 16, set = lane_id() / 8 % 2;
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
            unsigned long long rows[2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
                rows[i] =
                    __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(work.weight[i][k % kOwn]),
                                row + k / kOwn * 2);
            from[k] = reinterpret_cast<const uint8_t*>(set ? rows[1] : rows[0]) + U::kHeader +
                      static_cast<long long>(first) * U::kBytes;
            head[k] = static_cast<int>(reinterpret_cast<uintptr_t>(from[k]) & 127);
            from[k] += own - head[k];
        }
        to = stages[0].data[row][set][0] + own;
        next = stages[1].data[row][set][0] + own;
    }
    // Starts those of as many blocks, or of none; `step` blocks further on with the next call.
    __device__ __forceinline__ void start(int n_blocks, int step) {
        const int n = min(PartStage<U>::kBlocks, n_blocks) * U::kBytes;
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
            const int end = head[k] + n - own;
            uint8_t* const place = to + (k % kOwn + k / kOwn * 4) * PartStage<U>::kStride - (head[k] & ~15);
#pragma unroll
            for (int i = 0; i < PartStage<U>::kLines; ++i)
                if ((i > 0 || (n > 0 && own + 16 > head[k])) && 128 * i < end)
                    copy16_async(place + 128 * i, from[k] + 128 * i, true);
            head[k] += step * U::kBytes;
            from[k] += head[k] & ~127;
            head[k] &= 127;
        }
        commit_copies();
        uint8_t* const other = to;
        to = next, next = other;
    }
};

// Walks over the blocks of the warp's rows. load(n): n or more blocks are left; they are on their way.
// multiply(n, data, done): they are in shared memory; data: `offset` bytes behind the first row's, done:
// bytes of a row in front of them.
template <class U, class Load, class Multiply>
__device__ __forceinline__ void over_stages(const Product& p, const VectorWork<U, 1>& work,
                                            PartStage<U> (&stages)[2], int offset, Load load,
                                            Multiply multiply) {
    constexpr int kBlocks = PartStage<U>::kBlocks;
    const int first = work.part * kBlocks, step = p.split * kBlocks;
    const uint8_t *data = stages[0].data[0][0][0] + offset, *next = stages[1].data[0][0][0] + offset;
    unsigned done = U::kHeader + first * U::kBytes;
    int left = p.n_in / 256 - first;
    PartCopies<U> copies(work, stages, first);
    copies.start(left, step);
#pragma unroll 1
    for (; left > 0; left -= step) {
        copies.start(left - step, step);
        load(left);
        wait_copies<1>();
        __syncwarp();
        multiply(left, data, done);
        __syncwarp();
        done += step * U::kBytes;
        const uint8_t* const other = data;
        data = next, next = other;
    }
}

}  // namespace ikpy::cuda
