// Matrix-vector product of one token with super-blocks in shared memory (matvec_stages.cuh), of which a lane
// takes 64 elements.
#pragma once
#include "matvec_stages.cuh"
#include "unpack/parts.cuh"

namespace ikpy::cuda {

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
    if constexpr (Part::kWide) {
        out.sum[0] += out.sum[1], out.shift[0] += out.shift[1];
        out.sum[2] += out.sum[3], out.shift[2] += out.shift[3];
    }
}

// The lane's sums of its rows.
template <class U>
__device__ __forceinline__ void add_parts(const Product& p, const VectorWork<U, 1>& work,
                                          PartStage<U> (&stages)[2], VectorSums<U, 1>& sum) {
    using Stage = PartStage<U>;
    constexpr int kOwn = Stage::kOwn, kRowLanes = Stage::kRowLanes;
    const int row = lane_id() % kRowLanes, part = lane_id() / kRowLanes % kPartsOfBlock;
    const int block = lane_id() / (kRowLanes * kPartsOfBlock);
    const int first = work.part * Stage::kBlocks, step = p.split * Stage::kBlocks;
    const uint8_t* x = work.x[0] + 256 * (first + block);
    const uint8_t* scales = work.x[0] + ActQ8Layout(p.n_in).scale + 32 * (first + block);
    const typename U::Part::Constants constants;
    PartActs acts;
    over_stages<U>(
        p, work, stages, row * static_cast<int>(sizeof Stage::data[0]) + block * U::kBytes,
        [&](int left) {
            if (block < left) load_part<U>(x, scales, part, acts);
            x += 256 * step, scales += 32 * step;
        },
        [&](int left, const uint8_t* data, unsigned done) {
            if (block >= left) return;
#pragma unroll
            for (int i = 0; i < 2 * kOwn; ++i) {
                const auto start = reinterpret_cast<uintptr_t>(work.weight[i / kOwn][i % kOwn]);
                const unsigned head = (static_cast<unsigned>(start) + done) & 15;
                sum.of[i % kOwn][i / kOwn][0] +=
                    U::Part::product(data + i * Stage::kStride + head, part, acts, constants);
            }
        });
}

}  // namespace ikpy::cuda
