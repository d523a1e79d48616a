// What kernels of recurrent layers share: copies of states, tokens of a slot, columns of a head's state.
#pragma once
#include "common.cuh"

namespace ikpy {
namespace cuda {

constexpr int kTokens = 8;  // prepared at a time
constexpr int kWarps = 4;   // of a block

// Copies of the states behind tokens, in slots of their own; slots: null if there are none, -1 for tokens
// without a copy.
struct Kept {
    View states;
    const int* slots;

    __device__ __forceinline__ int behind(int token) const { return slots ? slots[token] : -1; }
};

// The next tokens of a slot from `at` on, which moves behind them; by one warp.
template <class Prepared>
__device__ __forceinline__ void take_tokens(const int* slots, int n_tokens, int slot, int& at, Prepared& p) {
    int n = 0;
    while (at < n_tokens && n < kTokens) {
        const int t = at + lane_id();
        const bool own = t < n_tokens && slots[t] == slot;
        const unsigned holders = __ballot_sync(kAllLanes, own);
        const int place = n + __popc(holders & ((1u << lane_id()) - 1));
        if (own && place < kTokens) p.token[place] = t;
        const unsigned left = __ballot_sync(kAllLanes, own && place >= kTokens);
        at += left ? __ffs(static_cast<int>(left)) - 1 : 32;
        n += __popc(holders & ~left);
    }
    if (lane_id() == 0) p.n = n;
}

// One column of a head's state, divided among kParts lanes, which are 32 / kParts apart: every one of them
// holds four rows of every 4 * kParts.
template <int kRows, int kParts>
class Column {
  public:
    // state: the column's first element; rows are `stride` floats apart, and there are n of them.
    __device__ __forceinline__ Column(float* state, int stride, int n)
        : part_(lane_id() / (32 / kParts)),
          state_(state + 4 * part_ * stride),
          stride_(stride),
          n_(n - 4 * part_) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) rows_[i] = row(i) < n_ ? state_[row(i) * stride_] : 0.0f;
    }

    __device__ __forceinline__ void store() const { store_at(state_); }

    // To another state whose rows are as far apart.
    __device__ __forceinline__ void store_to(float* state) const { store_at(state + 4 * part_ * stride_); }

    __device__ __forceinline__ bool is_first_part() const { return part_ == 0; }

    // S <- decay S
    __device__ __forceinline__ void decay(float decay) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) rows_[i] *= decay;
    }
    __device__ __forceinline__ void decay(const float* decays) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) rows_[i] *= decays[row(i) + 4 * part_];
    }

    // S^T x. Four chains, as one would wait for its own sums.
    __device__ __forceinline__ float product(const float* x) const {
        float sums[4] = {};
#pragma unroll
        for (int i = 0; i < kOwn; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(x + row(i) + 4 * part_);
            sums[0] += rows_[i] * four.x;
            sums[1] += rows_[i + 1] * four.y;
            sums[2] += rows_[i + 2] * four.z;
            sums[3] += rows_[i + 3] * four.w;
        }
        float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
#pragma unroll
        for (int m = 16; m >= 32 / kParts; m >>= 1) sum += __shfl_xor_sync(kAllLanes, sum, m);
        return sum;
    }

    // S <- S + x change
    __device__ __forceinline__ void add(const float* x, float change) {
#pragma unroll
        for (int i = 0; i < kOwn; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(x + row(i) + 4 * part_);
            rows_[i] += four.x * change;
            rows_[i + 1] += four.y * change;
            rows_[i + 2] += four.z * change;
            rows_[i + 3] += four.w * change;
        }
    }

  private:
    static constexpr int kOwn = kRows / kParts;
    // Row number i of a part, counted from the part's first row.
    __device__ static constexpr int row(int i) { return i / 4 * 4 * kParts + i % 4; }

    __device__ __forceinline__ void store_at(float* first) const {
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
            if (row(i) < n_) first[row(i) * stride_] = rows_[i];
    }

    float rows_[kOwn];
    int part_;
    float* state_;
    int stride_, n_;
};

}  // namespace cuda
}  // namespace ikpy
