// Prepared int8 activations. The layout of a row is that of the CPU backend, so that either side can read
// what the other has written.
#pragma once
#include "common.cuh"

namespace ikpy::cuda {

// The bits of the float 1.5 * 2^23, where sums of CPU kernels start.
constexpr int kStartBits = 0x4B400000;

// Byte offsets in one row of n_in elements, padded with zeros to a multiple of 256. x ~ scale[e / 32] * q[e].
struct ActQ8Layout {
    int n;        // padded elements; q int8[n] is at offset 0
    int scale;    // f32[n / 32]
    int sum32;    // f32[n / 32]: sum of q over the group
    int start32;  // i32[n / 32]: kStartBits - 128 * sum
    int sum16;    // f32[n / 16]
    int start16;  // i32[n / 16]

    __host__ __device__ explicit ActQ8Layout(int n_in)
        : n((n_in + 255) / 256 * 256),
          scale(n),
          sum32(scale + n / 8),
          start32(sum32 + n / 8),
          sum16(start32 + n / 8),
          start16(sum16 + n / 4) {}
};

// One warp quantizes elements c .. c + 127 of a row: 4 per lane, 8 lanes per group of 32.
__device__ __forceinline__ void quantize_128(const float* x, int n_in, int c, uint8_t* out,
                                             const ActQ8Layout& at) {
    const int lane = lane_id(), e = c + 4 * lane, group = e / 32;
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = e + i < n_in ? x[e + i] : 0.0f;
    // Compared by their bits, infinities and NaN are the largest magnitudes.
    int top = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) top = max(top, __float_as_int(v[i]) & 0x7fffffff);
#pragma unroll
    for (int m = 4; m > 0; m >>= 1) top = max(top, __shfl_xor_sync(kAllLanes, top, m));
    const float amax = __int_as_float(top);
    // Below 1e-35 the inverse overflows; such a group counts as zero. With an infinity or a NaN in a group
    // every product with it is NaN, as on the CPU.
    const bool finite = top < 0x7f800000, counts = finite && amax > 1e-35f;
    const float rounded = bf16_to_f32(f32_to_bf16(amax / 127.0f));
    const float scale = counts ? rounded : finite ? 0.0f : __int_as_float(0x7fc00000);
    const float inverse = counts ? 1.0f / rounded : 0.0f;
    int sum = 0;
    unsigned packed = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int q = finite ? round_even(__fmul_rn(v[i], inverse)) : 0;
        sum += q;
        packed |= static_cast<unsigned>(q & 255) << (8 * i);
    }
    *reinterpret_cast<unsigned*>(out + e) = packed;
    sum += __shfl_xor_sync(kAllLanes, sum, 1);
    sum += __shfl_xor_sync(kAllLanes, sum, 2);
    const int other = __shfl_xor_sync(kAllLanes, sum, 4);
    if ((lane & 3) == 0) {
        reinterpret_cast<float*>(out + at.sum16)[e / 16] = static_cast<float>(sum);
        reinterpret_cast<int*>(out + at.start16)[e / 16] = kStartBits - 128 * sum;
    }
    if ((lane & 7) == 0) {
        reinterpret_cast<float*>(out + at.scale)[group] = scale;
        reinterpret_cast<float*>(out + at.sum32)[group] = static_cast<float>(sum + other);
        reinterpret_cast<int*>(out + at.start32)[group] = kStartBits - 128 * (sum + other);
    }
}

}  // namespace ikpy::cuda
