// Matrix-vector product of one token with super-blocks whose bytes are shared by several groups of 32
// elements, and lie at no multiple of 16: a warp brings whole lines of rows to shared memory, where a lane
// takes 64 elements.
#pragma once
#include "matvec_work.cuh"
#include "mma.cuh"
#include "quantize_q8.cuh"
#include "unpack/parts.cuh"

namespace ikpy::cuda {

// What a warp multiplies at a time: kBlocks blocks of two sets of rows, of which a lane has kOwnRows each.
// Lanes are ordered by block, part, row.
constexpr int kOwnRows = 2, kPartLanes = kPartRows / kOwnRows, kPartsOfBlock = 4;

// Rows are apart so that lanes with the same part of different rows meet different banks; whatever a row's
// first byte is in its 16.
template <class U>
struct PartStage {
    static constexpr int kBlocks = 32 / (kPartLanes * kPartsOfBlock), kBytes = kBlocks * U::kBytes;
    static constexpr int kNeeded = (kBytes + 14 + 15) / 16 * 16, kStride = (kNeeded + 15) / 32 * 32 + 16;
    static constexpr int kLines = (kBytes + 126 + 127) / 128;  // of the cache
    static_assert(U::kBlock == 256 && U::kRows == 1 && kStride >= kNeeded && U::kBytes % 2 == 0);
    alignas(16) uint8_t data[kPartLanes][2][kOwnRows][kStride];
};

// Starts the copy of n_bytes of a row: 8 lanes bring a line of the cache at a time. Bytes keep their place in
// pieces of 16. from, to: of the first bytes, and 16 further on for every lane.
template <class U>
__device__ __forceinline__ void copy_row(const uint8_t* from, int n_bytes, uint8_t* to) {
    const int own = 16 * (lane_id() % 8),
              head = static_cast<int>(reinterpret_cast<uintptr_t>(from - own) & 127);
    from -= head;
    to -= head & ~15;
    const int end = head + n_bytes - own;
#pragma unroll
    for (int i = 0; i < PartStage<U>::kLines; ++i)
        if ((i > 0 || own + 16 > head) && 128 * i < end) copy16_async(to + 128 * i, from + 128 * i, true);
}

// x, scales: of the lane's block.
template <class U>
__device__ __forceinline__ void load_part(const uint8_t* x, const uint8_t* scales, int part, PartActs& out) {
    using Part = typename U::Part;
    float scale[4];
    if constexpr (Part::kConsecutive) {
        const float2 two = __ldg(reinterpret_cast<const float2*>(scales) + part);
        scale[0] = scale[1] = two.x, scale[2] = scale[3] = two.y;
    } else {
        const float4 four = __ldg(reinterpret_cast<const float4*>(scales) + part / 2);
        scale[0] = four.x, scale[1] = four.y, scale[2] = four.z, scale[3] = four.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int e = Part::kConsecutive ? 64 * part + 16 * i : 128 * (part / 2) + 32 * i + 16 * (part % 2);
        unsigned* q = out.q + 4 * i;
        *reinterpret_cast<uint4*>(q) = __ldg(reinterpret_cast<const uint4*>(x + e));
        if constexpr (Part::kSum != 0.0f || Part::kShift != 0.0f) {
            int sum = kSumStart;
#pragma unroll
            for (int n = 0; n < 4; ++n) sum = dot_signed(q[n], kOnes, sum);
            const float scaled = scale[i] * sum_value(sum);
            out.sum[i] = scaled * Part::kSum;
            out.shift[i] = scaled * (Part::kShift / static_cast<float>(1 << Part::shift_bit(i)));
        }
        out.scale[i] = scale[i] * Part::factor(i);
        if constexpr (Part::kPaired) {
#pragma unroll
            for (int n = 0; n < 4; n += 2) {
                const unsigned first = permute_bytes(q[n], q[n + 1], 0x5140);
                q[n + 1] = permute_bytes(q[n], q[n + 1], 0x7362);
                q[n] = first;
            }
        }
    }
}

// The copies of a warp's rows: lanes 8 i to 8 i + 7 copy set i % 2 of the rows that lane i / 2 multiplies, to
// one stage and the other in turn. Addresses are carried from step to step here and below: computed anew they
// take more instructions than the products.
template <class U>
struct PartCopies {
    const uint8_t* from[kOwnRows];
    uint8_t *to, *next;

    __device__ __forceinline__ PartCopies(const VectorWork<U, 1>& work, PartStage<U> (&stages)[2],
                                          int first) {
        const int row = lane_id() / 16, set = lane_id() / 8 % 2, own = 16 * (lane_id() % 8);
#pragma unroll
        for (int k = 0; k < kOwnRows; ++k) {
            unsigned long long rows[2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
                rows[i] =
                    __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(work.weight[i][k]), row);
            from[k] = reinterpret_cast<const uint8_t*>(set ? rows[1] : rows[0]) + U::kHeader + own +
                      static_cast<long long>(first) * U::kBytes;
        }
        to = stages[0].data[row][set][0] + own;
        next = stages[1].data[row][set][0] + own;
    }
    // Starts those of as many blocks, or of none; `step` blocks further on with the next call.
    __device__ __forceinline__ void start(int n_blocks, int step) {
        const int n = min(PartStage<U>::kBlocks, n_blocks) * U::kBytes;
#pragma unroll
        for (int k = 0; k < kOwnRows; ++k) {
            if (n > 0) copy_row<U>(from[k], n, to + k * PartStage<U>::kStride);
            from[k] += step * U::kBytes;
        }
        commit_copies();
        uint8_t* const other = to;
        to = next, next = other;
    }
};

// The lane's sums of its rows. Blocks that are multiplied next are on their way meanwhile.
template <class U>
__device__ __forceinline__ void add_parts(const Product& p, const VectorWork<U, 1>& work,
                                          PartStage<U> (&stages)[2], VectorSums<U, 1>& sum) {
    constexpr int kBlocks = PartStage<U>::kBlocks;
    const int row = lane_id() % kPartLanes, part = lane_id() / kPartLanes % kPartsOfBlock;
    const int block = lane_id() / (kPartLanes * kPartsOfBlock);
    const int first = work.part * kBlocks, step = p.split * kBlocks;
    const uint8_t *data = stages[0].data[row][0][0] + block * U::kBytes,
                  *next = stages[1].data[row][0][0] + block * U::kBytes;
    const uint8_t* x = work.x[0] + 256 * (first + block);
    const uint8_t* scales = work.x[0] + ActQ8Layout(p.n_in).scale + 32 * (first + block);
    unsigned done = U::kHeader + first * U::kBytes;  // bytes of a row
    int left = p.n_in / 256 - first;
    PartCopies<U> copies(work, stages, first);
    copies.start(left, step);
#pragma unroll 1
    for (; left > 0; left -= step) {
        copies.start(left - step, step);
        PartActs acts;
        if (block < left) load_part<U>(x, scales, part, acts);
        wait_copies<1>();
        __syncwarp();
        if (block < left) {
#pragma unroll
            for (int i = 0; i < 2 * kOwnRows; ++i) {
                const auto start = reinterpret_cast<uintptr_t>(work.weight[i / kOwnRows][i % kOwnRows]);
                const unsigned head = (static_cast<unsigned>(start) + done) & 15;
                sum.of[i % kOwnRows][i / kOwnRows][0][0] +=
                    U::Part::product(data + i * PartStage<U>::kStride + head, part, acts);
            }
        }
        __syncwarp();
        x += 256 * step, scales += 32 * step, done += step * U::kBytes;
        const uint8_t* const other = data;
        data = next, next = other;
    }
}

}  // namespace ikpy::cuda
