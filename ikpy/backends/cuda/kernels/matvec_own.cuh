// Matrix-vector product of one token with rows that share the activations of a lane: several of an
// interleaved group, or plain ones.
#pragma once
#include "matvec_work.cuh"
#include "quantize_q8.cuh"
#include "unpack/own_rows.cuh"

namespace ikpy::cuda {

// x, scale, sums: of the lane's 32 activations.
template <class Own>
__device__ __forceinline__ void load_own_acts(const uint8_t* x, const uint8_t* scale, const uint8_t* sums,
                                              OwnActs& out) {
    unsigned q[8];
    load_words<16, 8>(x, q);
    int quarters[4] = {};
    if constexpr (Own::kStart != 0 || Own::kShift != 0) {
#pragma unroll
        for (int i = 0; i < 8; ++i) quarters[i / 2] = dot_signed(q[i], kOnes, quarters[i / 2]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) out.shift_of_quarter[i] = Own::kShift * quarters[i];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        int sum = quarters[2 * h] + quarters[2 * h + 1];
        if (!Own::kHalves) sum += quarters[2] + quarters[3];
        out.start[h] = kSumStart + Own::kStart * sum;
        out.shift[h] = Own::kShift * sum;
    }
    const float d = __ldg(reinterpret_cast<const float*>(scale));
    if constexpr (Own::kSum && Own::kHalves) {
        const float2 sum = __ldg(reinterpret_cast<const float2*>(sums));
        out.sum[0] = sum.x * d, out.sum[1] = sum.y * d;
    } else if constexpr (Own::kSum) {
        out.sum[0] = __ldg(reinterpret_cast<const float*>(sums)) * d;
    }
    out.scale = d * (1.0f / static_cast<float>(Own::kFactor));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int first = Own::kPair ? first_of_pair<Own::kPair>(i) : 2 * i;
        const unsigned a = q[first], b = q[first + (Own::kPair ? Own::kPair : 1)];
        out.q[2 * i] = Own::kPair ? permute_bytes(a, b, 0x5140) : a;
        out.q[2 * i + 1] = Own::kPair ? permute_bytes(a, b, 0x7362) : b;
    }
}

// The lane's sums of its rows: neighbouring lanes have the other rows of the groups, then groups of 32
// columns. A step has whole super-blocks, so a lane stays at its place in them.
template <class U>
__device__ __forceinline__ void add_own(const Product& p, const VectorWork<U, 1>& work, const unsigned* table,
                                        VectorSums<U, 1>& sum) {
    using L = Lanes<U, 1>;
    using Own = typename U::Own;
    constexpr unsigned kStep = 32 / L::kLanes, kPerBlock = U::kBlock / 32;
    constexpr unsigned kSumBytes = Own::kHalves ? 8 : 4;
    static_assert(kStep % kPerBlock == 0);
    const ActQ8Layout layout(p.n_in);
    const unsigned at = lane_id() % L::kLanes, step = p.split * kStep;
    const unsigned first = work.part * kStep + lane_id() / L::kLanes;
    const uint8_t *block[2][L::kStarts], *x = work.x[0] + 32 * first,
                                         *scale = work.x[0] + layout.scale + 4 * first;
    const uint8_t* sums = work.x[0] + (Own::kHalves ? layout.sum16 : layout.sum32) + kSumBytes * first;
#pragma unroll
    for (int i = 0; i < 2 * L::kStarts; ++i)
        block[i % 2][i / 2] = block_of<U>(work.weight[i % 2][i / 2], first);
    OwnActs acts;
    acts.zero = p.n_in & 0x80000000u;
    acts.table = reinterpret_cast<const uint8_t*>(table);
#pragma unroll 1
    for (int left = p.n_in / 32 - static_cast<int>(first); left > 0; left -= step) {
        load_own_acts<Own>(x, scale, sums, acts);
#pragma unroll
        for (int i = 0; i < 2 * L::kStarts; ++i) {
            const uint8_t*& weights = block[i % 2][i / 2];
            float v[Own::kRows];
            Own::products(weights, at, first % kPerBlock, acts, v);
#pragma unroll
            for (int k = 0; k < Own::kRows; ++k) sum.of[i / 2 * Own::kRows + k][i % 2][0] += v[k];
            weights += step / kPerBlock * U::kBytes;
        }
        x += 32 * step, scale += 4 * step, sums += kSumBytes * step;
    }
}

// Joins the sums of the lanes that share rows, and puts them where those of the warp belong. Lanes exchange
// the sums that the other one goes on with, so that each has a single one at the end.
template <class U>
__device__ __forceinline__ void put_own(const VectorWork<U, 1>& work, const VectorSums<U, 1>& sum,
                                        float (&out)[2][1][Lanes<U, 1>::kRows]) {
    using L = Lanes<U, 1>;
    constexpr int kSums = 2 * L::kOwn,
                  kSame = 32 / kSums;  // lanes with one sum at the end, of different rows
    const int lane = lane_id();
    float s[kSums];
#pragma unroll
    for (int i = 0; i < kSums; ++i) s[i] = sum.of[i / 2][i % 2][0];
    int number = 0;  // of the sum: 2 row + set
#pragma unroll
    for (int n = kSums / 2, m = 16; n > 0; n /= 2, m /= 2) {
        const bool upper = lane & m;
        number |= upper ? n : 0;
#pragma unroll
        for (int i = 0; i < n; ++i) {
            const float other = upper ? s[i] : s[i + n];
            s[i] = (upper ? s[i + n] : s[i]) + __shfl_xor_sync(kAllLanes, other, m);
        }
    }
#pragma unroll
    for (int m = kSame / 2; m >= L::kLanes; m /= 2) s[0] += __shfl_xor_sync(kAllLanes, s[0], m);
    if (work.active && lane % kSame < L::kLanes) {
        const int set = number % 2, row = lane % L::kLanes * L::kOwn + number / 2;
        out[set][0][row] = s[0] * U::row_scale(set ? work.weight[1][0] : work.weight[0][0], row);
    }
}

}  // namespace ikpy::cuda
