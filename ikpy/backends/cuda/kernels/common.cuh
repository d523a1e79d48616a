// What all kernels share: strided views, warp and block reductions, 16-bit floats, loads of any alignment.
//
// Kernels are written in a small dialect of CUDA that shim/cuda_shim.hpp also gives a host meaning.
#pragma once

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#define IKPY_EXPORT(kernel)
// Of a parameter that is read by a number known at run time only, which stays where it is.
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1107
#define IKPY_PARAMETER __grid_constant__
#else
#define IKPY_PARAMETER
#endif
#define IKPY_DYNAMIC_SHARED(name) extern __shared__ __align__(128) uint8_t name[]
#else
#include "cuda_shim.hpp"
#include "ikpy/half.hpp"
#define IKPY_PARAMETER
#define IKPY_DYNAMIC_SHARED(name) uint8_t* const name = ::ikpy::shim::dynamic_shared()
#endif

#define IKPY_KERNEL extern "C" __global__ void

namespace ikpy::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;

// Type ids of the table of tensor types that kernels treat in code rather than by template.
enum Type {
    kF32 = 0,
    kF16 = 1,
    kQ4_0 = 2,
    kQ4_1 = 3,
    kQ5_0 = 6,
    kQ5_1 = 7,
    kQ8_0 = 8,
    kIQ4_NL = 20,
    kBF16 = 30,
    kQ6_0 = 133,
    kQ8_KV = 151
};

// A strided tensor; dynamic: the dimension whose extent is n_kv at run time, or -1.
struct View {
    uint8_t* data;
    long long nb[4];
    int ne[4];
    int dynamic;
    int unused;

    __host__ __device__ int extent(int dim, const int* runtime) const {
        return dim == dynamic ? runtime[0] : ne[dim];
    }
    __host__ __device__ int rows(const int* runtime) const {
        return extent(1, runtime) * extent(2, runtime) * extent(3, runtime);
    }
    template <class T>
    __host__ __device__ T* row(int i1, int i2 = 0, int i3 = 0) const {
        return reinterpret_cast<T*>(data + i1 * nb[1] + i2 * nb[2] + i3 * nb[3]);
    }
};

struct RowIndex {
    int i1, i2, i3;
};

__device__ __forceinline__ RowIndex row_index(const View& v, int r, const int* runtime) {
    const int n1 = v.extent(1, runtime), n2 = v.extent(2, runtime);
    return {r % n1, r / n1 % n2, r / (n1 * n2)};
}

__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp_id() { return threadIdx.x >> 5; }

// 16-bit floats by their bits

__device__ __forceinline__ float f16_to_f32(uint16_t h) {
#if defined(__CUDACC__)
    return __half2float(__ushort_as_half(h));
#else
    return ikpy::f16_to_f32(h);
#endif
}
__device__ __forceinline__ uint16_t f32_to_f16(float x) {
#if defined(__CUDACC__)
    return __half_as_ushort(__float2half_rn(x));
#else
    return ikpy::f32_to_f16(x);
#endif
}
// Numbers that f16 cannot hold become its largest; infinities and NaN stay, so that they are not taken for
// numbers.
__device__ __forceinline__ float to_f16_range(float x) {
    return fabsf(x) < INFINITY ? fminf(fmaxf(x, -65504.0f), 65504.0f) : x;
}
__device__ __forceinline__ float bf16_to_f32(uint16_t h) {
    return __uint_as_float(static_cast<unsigned>(h) << 16);
}
// Round to nearest even; NaN stays NaN.
__device__ __forceinline__ uint16_t f32_to_bf16(float x) {
    const unsigned bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Nearest integer, ties to even. Here and below numbers beyond an integer become the largest or the smallest
// one, and NaN 0.
__device__ __forceinline__ int round_even(float x) {
#if defined(__CUDACC__)
    return __float2int_rn(x);
#else
    return shim::saturated(std::nearbyint(x));
#endif
}
// Without what is behind the point.
__device__ __forceinline__ int truncated(float x) {
#if defined(__CUDACC__)
    return __float2int_rz(x);
#else
    return shim::saturated(std::trunc(x));
#endif
}

// loads

// Four bytes at p whose alignment is known to be at least Align.
template <int Align>
__device__ __forceinline__ unsigned load4(const void* p) {
    const auto* bytes = static_cast<const uint8_t*>(p);
    if constexpr (Align >= 4) {
        return __ldg(reinterpret_cast<const unsigned*>(bytes));
    } else if constexpr (Align == 2) {
        const auto* words = reinterpret_cast<const unsigned short*>(bytes);
        return __ldg(words) | static_cast<unsigned>(__ldg(words + 1)) << 16;
    } else {
        return __ldg(bytes) | static_cast<unsigned>(__ldg(bytes + 1)) << 8 |
               static_cast<unsigned>(__ldg(bytes + 2)) << 16 | static_cast<unsigned>(__ldg(bytes + 3)) << 24;
    }
}
template <int Align>
__device__ __forceinline__ unsigned load2(const void* p) {
    const auto* bytes = static_cast<const uint8_t*>(p);
    if constexpr (Align >= 2) return __ldg(reinterpret_cast<const unsigned short*>(bytes));
    return __ldg(bytes) | static_cast<unsigned>(__ldg(bytes + 1)) << 8;
}
// N words from the word on that `address` is in, out of aligned pieces of 16 or 8 bytes; `bytes` of data
// begin at the address. Only pieces that hold data are read. Neighbouring lanes read blocks that lie apart,
// so that a load of whatever size takes the memory as many turns as it meets cache lines.
template <int Align, int Piece, int N, int Bytes>
__device__ __forceinline__ void load_pieces(uintptr_t address, unsigned (&out)[N]) {
    constexpr int kPieces = (Bytes + Piece - Align + Piece - 1) / Piece, kWords = Piece / 4;
    const auto offset = static_cast<unsigned>(address & (Piece - 1));
    const auto* start = reinterpret_cast<const uint8_t*>(address - offset);
    unsigned w[kWords * kPieces + 3] = {};
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
        if (Piece * i >= Bytes && offset + Bytes <= Piece * i) continue;
        if constexpr (Piece == 16) {
            const uint4 v = __ldg(reinterpret_cast<const uint4*>(start) + i);
            w[4 * i] = v.x, w[4 * i + 1] = v.y, w[4 * i + 2] = v.z, w[4 * i + 3] = v.w;
        } else {
            const uint2 v = __ldg(reinterpret_cast<const uint2*>(start) + i);
            w[2 * i] = v.x, w[2 * i + 1] = v.y;
        }
    }
    if constexpr (Piece == 16) {
#pragma unroll
        for (int i = 0; i < N + 1; ++i) w[i] = offset & 8 ? w[i + 2] : w[i];
    }
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = offset & 4 ? w[i + 1] : w[i];
}

// N words at p whose alignment is known to be at least Align, with as few loads as possible. What is not
// aligned is cut out of words or pieces that are; these reach beyond the data by less than one that it has a
// part in.
template <int Align, int N, int Piece = 16>
__device__ __forceinline__ void load_words(const void* p, unsigned* out) {
    if constexpr (Align >= 16) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const uint4 v = __ldg(static_cast<const uint4*>(p) + i / 4);
            out[i] = v.x, out[i + 1] = v.y, out[i + 2] = v.z, out[i + 3] = v.w;
        }
    } else if constexpr (Align >= 8) {
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            const uint2 v = __ldg(static_cast<const uint2*>(p) + i / 2);
            out[i] = v.x, out[i + 1] = v.y;
        }
    } else if constexpr (Align >= 4 && N < 8) {
#pragma unroll
        for (int i = 0; i < N; ++i) out[i] = __ldg(static_cast<const unsigned*>(p) + i);
    } else if constexpr (N >= 4) {
        const auto address = reinterpret_cast<uintptr_t>(p);
        constexpr int kWords = Align >= 4 ? N : N + 1;
        unsigned words[kWords];
        load_pieces<Align, Piece, kWords, 4 * N>(address, words);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if constexpr (Align >= 4) {
                out[i] = words[i];
            } else {
                out[i] = __funnelshift_r(words[i], words[i + 1], static_cast<unsigned>(address & 3) * 8);
            }
        }
    } else {
        const auto address = reinterpret_cast<uintptr_t>(p);
        const auto* words = reinterpret_cast<const unsigned*>(address & ~uintptr_t(3));
        const unsigned shift = static_cast<unsigned>(address & 3) * 8;
        unsigned word = __ldg(words);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const unsigned next = i + 1 < N || shift ? __ldg(words + i + 1) : 0;
            out[i] = __funnelshift_r(word, next, shift);
            word = next;
        }
    }
}
template <int Align = 2>
__device__ __forceinline__ float load_f16(const void* p) {
    return f16_to_f32(static_cast<uint16_t>(load2<Align>(p)));
}

// reductions

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int m = 16; m > 0; m >>= 1) x += __shfl_xor_sync(kAllLanes, x, m);
    return x;
}
__device__ __forceinline__ int warp_sum(int x) {
#pragma unroll
    for (int m = 16; m > 0; m >>= 1) x += __shfl_xor_sync(kAllLanes, x, m);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int m = 16; m > 0; m >>= 1) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, m));
    return x;
}

// Sum over a block of up to 1024 threads, given to all of them. May be called again at once.
template <class T>
__device__ __forceinline__ T block_sum(T x) {
    __shared__ T partial[32];
    x = warp_sum(x);
    if (blockDim.x <= 32) return x;
    __syncthreads();
    if (lane_id() == 0) partial[warp_id()] = x;
    __syncthreads();
    const T own = lane_id() < static_cast<int>(blockDim.x >> 5) ? partial[lane_id()] : T(0);
    return warp_sum(own);
}
__device__ __forceinline__ float block_max(float x) {
    __shared__ float partial[32];
    x = warp_max(x);
    if (blockDim.x <= 32) return x;
    __syncthreads();
    if (lane_id() == 0) partial[warp_id()] = x;
    __syncthreads();
    return warp_max(lane_id() < static_cast<int>(blockDim.x >> 5) ? partial[lane_id()] : -INFINITY);
}

// activation functions; kinds as UnaryKind of the native ops

enum Unary {
    kSilu = 0,
    kGelu = 1,
    kRelu = 2,
    kReluSquared = 3,
    kSigmoid = 4,
    kTanh = 5,
    kSwigluOai = 6,
    kGeluErf = 7,
    kSoftplus = 8
};

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ __forceinline__ float unary_value(int kind, float x) {
    switch (kind) {
        case kSilu:
            return x / (1.0f + expf(-x));
        case kGelu:  // tanh form
            return x * sigmoid(2.0f * 0.7978845608f * x * (1.0f + 0.044715f * x * x));
        case kRelu:
            return x > 0 ? x : 0.0f;
        case kReluSquared:
            return x > 0 ? x * x : 0.0f;
        case kSigmoid:
            return sigmoid(x);
        case kGeluErf:
            return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
        case kSoftplus:
            return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
        default:
            return tanhf(x);
    }
}

// act(gate) * up; SWIGLU_OAI clamps both.
__device__ __forceinline__ float gated_value(int kind, float gate, float up) {
    if (kind == kSwigluOai) {
        gate = fminf(gate, 7.0f);
        up = fminf(fmaxf(up, -7.0f), 7.0f);
        return gate / (1.0f + expf(-1.702f * gate)) * (up + 1.0f);
    }
    return unary_value(kind, gate) * up;
}

}  // namespace ikpy::cuda
