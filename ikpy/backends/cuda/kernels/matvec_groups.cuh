// Groups of 32 elements of a row times 32 activations (dp4a), a group per lane.
#pragma once
#include "matvec_work.cuh"
#include "quantize_q8.cuh"

namespace ikpy::cuda {

// 32 activations of a token with their scale and the sums that offsets are multiplied with. start: of integer
// sums, what the bias of levels takes from them.
struct ActGroup {
    unsigned q[8];
    int start[2];
    float scale;
    float sums[2];
};

template <class U>
__device__ __forceinline__ void load_activations(const uint8_t* x, const ActQ8Layout& at, int g,
                                                 ActGroup& out) {
    *reinterpret_cast<uint4*>(out.q) = __ldg(reinterpret_cast<const uint4*>(x + 32 * g));
    *reinterpret_cast<uint4*>(out.q + 4) = __ldg(reinterpret_cast<const uint4*>(x + 32 * g + 16));
    out.start[0] = out.start[1] = 0;
    if constexpr (U::kBias != 0) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            int& start = out.start[U::kHalves ? i / 4 : 0];
            start = __dp4a(static_cast<int>(out.q[i]), static_cast<int>((256u - U::kBias) * kOnes), start);
        }
    }
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
    int low = x.start[0], high = x.start[1];
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

template <class U, int N>
__device__ __forceinline__ void add_products(const Product& p, const VectorWork<U, N>& work,
                                             VectorSums<U, N>& sum) {
    const ActQ8Layout at(p.n_in);
    constexpr int kStep = 32 / U::kRows;
    const int lane = lane_id(), k = lane % U::kRows;
#pragma unroll 1
    for (int g = work.part * kStep + lane / U::kRows; g < p.n_in / 32; g += p.split * kStep) {
        Group w[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) unpack_levels<U>(work.weight[i][0], k, g, w[i]);
#pragma unroll
        for (int c = 0; c < N; ++c) {
            ActGroup x;
            load_activations<U>(work.x[c], at, g, x);
#pragma unroll
            for (int i = 0; i < 2; ++i) sum.of[0][i][c] += group_product<U>(w[i], x);
        }
    }
}

}  // namespace ikpy::cuda
