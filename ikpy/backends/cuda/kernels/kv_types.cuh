// Cache row formats: storing 32 elements per warp, reading single elements.
#pragma once
#include "common.cuh"

namespace ikpy::cuda {

static __constant__ int8_t kLevelsIQ4_NL[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                1,    13,   25,  38,  53,  69,  89,  113};

__host__ __device__ inline int kv_block_bytes(int type) {
    switch (type) {
        case kQ8_0:
            return 34;
        case kQ8_KV:
            return 32;
        case kQ6_0:
            return 26;
        case kQ5_1:
            return 24;
        case kQ5_0:
            return 22;
        case kQ4_1:
            return 20;
        default:
            return 18;  // q4_0, iq4_nl
    }
}

// Largest magnitude in the warp, NaN if any element is: as integers, magnitudes have the order of the
// numbers, infinity and NaN above them.
__device__ __forceinline__ unsigned magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

__device__ __forceinline__ float highest_magnitude(float x) {
    unsigned bits = magnitude_bits(x);
#pragma unroll
    for (int m = 16; m > 0; m >>= 1) bits = max(bits, __shfl_xor_sync(kAllLanes, bits, m));
    return __uint_as_float(bits);
}

// Element of largest magnitude in the warp, with its sign; of equal magnitudes that of the lowest lane.
__device__ __forceinline__ float signed_extreme(float x) {
    const unsigned highest = magnitude_bits(highest_magnitude(x));
    const unsigned holders = __ballot_sync(kAllLanes, magnitude_bits(x) == highest);
    return __shfl_sync(kAllLanes, x, __ffs(static_cast<int>(holders)) - 1);
}

// Least-squares scale for fixed levels, errors weighted by x^2.
__device__ __forceinline__ float refit_scale(float x, int level, float fallback) {
    const float w = x * x;
    const float num = warp_sum(w * x * static_cast<float>(level));
    const float den = warp_sum(w * static_cast<float>(level * level));
    return den > 0.0f ? num / den : fallback;
}

__device__ __forceinline__ void put_f16(uint8_t* p, float x) {
    *reinterpret_cast<uint16_t*>(p) = f32_to_f16(x);
}

__device__ __forceinline__ int clamp_int(int x, int low, int high) {
    return x < low ? low : x > high ? high : x;
}

// Bytes of two nibbles: lane j < 16 gets its own code and that of lane j + 16.
__device__ __forceinline__ int paired_nibbles(int code) {
    return (code & 15) | (__shfl_xor_sync(kAllLanes, code, 16) & 15) << 4;
}

__device__ __forceinline__ void store_q4_0(float x, uint8_t* y) {
    const int lane = lane_id();
    const float d = signed_extreme(x) / -8.0f;
    const float inverse = d != 0.0f ? 1.0f / d : 0.0f;
    const int code = min(15, truncated(__fadd_rn(__fmul_rn(x, inverse), 8.5f)));
    const int byte = paired_nibbles(code);
    if (lane == 0) put_f16(y, d);
    if (lane < 16) y[2 + lane] = static_cast<uint8_t>(byte);
}

// Codes as blocks of kBytes end: the fifth bits if kFives, then pairs of nibbles.
template <int kBytes, bool kFives>
__device__ __forceinline__ void put_codes(int code, uint8_t* y) {
    const int lane = lane_id(), byte = paired_nibbles(code);
    if (lane < 16) y[kBytes - 16 + lane] = static_cast<uint8_t>(byte);
    if (!kFives) return;
    const unsigned bits = __ballot_sync(kAllLanes, code >> 4 & 1);
    if (lane < 4) y[kBytes - 20 + lane] = static_cast<uint8_t>(bits >> 8 * lane);
}

__device__ __forceinline__ void store_q5_0(float x, uint8_t* y) {
    const float d = signed_extreme(x) / -16.0f;
    const float inverse = d != 0.0f ? 1.0f / d : 0.0f;
    if (lane_id() == 0) put_f16(y, d);
    put_codes<22, true>(min(31, truncated(__fadd_rn(__fmul_rn(x, inverse), 16.5f))), y);
}

// Codes 0 .. kTop from the smallest element to the largest.
template <int kBytes, int kTop>
__device__ __forceinline__ void store_with_minimum(float x, uint8_t* y) {
    const float low = -warp_max(-x), high = warp_max(x), top = highest_magnitude(x);
    const float d = top < INFINITY ? (high - low) / static_cast<float>(kTop) : top;
    const float inverse = d != 0.0f ? 1.0f / d : 0.0f;
    if (lane_id() == 0) {
        put_f16(y, d);
        put_f16(y + 2, low);
    }
    const int code = truncated(__fadd_rn(__fmul_rn(x - low, inverse), 0.5f));
    put_codes<kBytes, (kTop > 15)>(min(kTop, code), y);
}

__device__ __forceinline__ void store_q6_0(float x, uint8_t* y) {
    const int lane = lane_id();
    const float d = signed_extreme(x) / -32.0f;
    const float inverse = d != 0.0f ? 1.0f / d : 0.0f;
    const int level = clamp_int(round_even(__fmul_rn(x, inverse)), -32, 31);
    const float scale = refit_scale(x, level, d);
    const int code = level + 32, byte = paired_nibbles(code);
    int high = (code >> 4) | (__shfl_xor_sync(kAllLanes, code, 16) >> 4) << 2;
    high |= __shfl_xor_sync(kAllLanes, high, 8) << 4;
    if (lane == 0) put_f16(y, scale);
    if (lane < 8) y[2 + lane] = static_cast<uint8_t>(high);
    if (lane < 16) y[10 + lane] = static_cast<uint8_t>(byte);
}

__device__ __forceinline__ void store_iq4_nl(float x, uint8_t* y) {
    const int lane = lane_id();
    const float d = signed_extreme(x) / -127.0f;
    const float inverse = d != 0.0f ? 1.0f / d : 0.0f;
    const float v = __fmul_rn(x, inverse);
    int code = 0;
    while (code < 15 && v > 0.5f * static_cast<float>(kLevelsIQ4_NL[code] + kLevelsIQ4_NL[code + 1])) ++code;
    const float scale = refit_scale(x, kLevelsIQ4_NL[code], d);
    const int byte = paired_nibbles(code);
    if (lane == 0) put_f16(y, d != 0.0f ? scale : 0.0f);
    if (lane < 16) y[2 + lane] = static_cast<uint8_t>(byte);
}

__device__ __forceinline__ void store_q8_0(float x, uint8_t* y) {
    const int lane = lane_id();
    const float amax = highest_magnitude(x);
    const float inverse = amax > 0.0f ? 127.0f / amax : 0.0f;
    if (lane == 0) put_f16(y, amax / 127.0f);
    y[2 + lane] = static_cast<uint8_t>(clamp_int(round_even(__fmul_rn(x, inverse)), -127, 127));
}

// One warp stores a whole row of n elements with one scale.
__device__ __forceinline__ void store_q8_kv(const float* x, int n, uint8_t* y) {
    unsigned bits = 0;
    for (int i = lane_id(); i < n; i += 32) bits = max(bits, magnitude_bits(x[i]));
    const float amax = highest_magnitude(__uint_as_float(bits));
    const float inverse = amax > 0.0f ? 127.0f / amax : 0.0f;
    int sum = 0;
    for (int i = lane_id(); i < n; i += 32) {
        const int q = clamp_int(round_even(__fmul_rn(x[i], inverse)), -127, 127);
        y[8 + i] = static_cast<uint8_t>(q);
        sum += q;
    }
    sum = warp_sum(sum);
    if (lane_id() == 0) {
        *reinterpret_cast<float*>(y) = amax / 127.0f;
        *reinterpret_cast<int*>(y + 4) = sum;
    }
}

// Parts of a row that warps can store on their own.
__host__ __device__ inline int store_parts(int type, int n) { return type == kQ8_KV ? 1 : (n + 31) / 32; }

// One warp stores part p of a row of n elements of a cache type; n is a multiple of the type's block.
__device__ __forceinline__ void store_part(int type, const float* x, int n, int p, uint8_t* y) {
    if (type == kQ8_KV) return store_q8_kv(x, n, y);
    const int i = 32 * p + lane_id();
    const float v = i < n ? x[i] : 0.0f;
    uint8_t* block = y + p * kv_block_bytes(type);
    switch (type) {
        case kF32:
            if (i < n) reinterpret_cast<float*>(y)[i] = v;
            break;
        case kF16:
            if (i < n) reinterpret_cast<uint16_t*>(y)[i] = f32_to_f16(v);
            break;
        case kBF16:
            if (i < n) reinterpret_cast<uint16_t*>(y)[i] = f32_to_bf16(v);
            break;
        case kQ8_0:
            store_q8_0(v, block);
            break;
        case kQ6_0:
            store_q6_0(v, block);
            break;
        case kQ5_1:
            store_with_minimum<24, 31>(v, block);
            break;
        case kQ5_0:
            store_q5_0(v, block);
            break;
        case kQ4_1:
            store_with_minimum<20, 15>(v, block);
            break;
        case kQ4_0:
            store_q4_0(v, block);
            break;
        case kIQ4_NL:
            store_iq4_nl(v, block);
            break;
        default:
            break;
    }
}

// An f16 of a cache row. Not by a load for constant memory: kv_shift writes the rows it has read.
__device__ __forceinline__ float stored_f16(const uint8_t* p) {
    return f16_to_f32(*reinterpret_cast<const uint16_t*>(p));
}

// Element j of a block that ends with 16 pairs of nibbles.
__device__ __forceinline__ float nibble_element(int type, const uint8_t* block, int j) {
    const uint8_t* nibbles = block + kv_block_bytes(type) - 16;
    const bool minimum = type == kQ4_1 || type == kQ5_1;
    int code = nibbles[j & 15] >> (j >> 4 << 2) & 15;
    if (type == kQ5_0 || type == kQ5_1) code |= (nibbles[(j >> 3) - 4] >> (j & 7) & 1) << 4;
    if (type == kQ6_0) code |= (nibbles[(j & 7) - 8] >> ((j >> 3 & 1) * 4 + (j >> 4) * 2) & 3) << 4;
    if (!minimum) code -= type == kQ4_0 ? 8 : type == kQ5_0 ? 16 : 32;
    return stored_f16(block) * static_cast<float>(code) + (minimum ? stored_f16(block + 2) : 0.0f);
}

// Element i of a cache row.
__device__ __forceinline__ float kv_element(int type, const uint8_t* row, int i) {
    const int j = i & 31;
    const uint8_t* block = row + i / 32 * kv_block_bytes(type);
    switch (type) {
        case kF32:
            return reinterpret_cast<const float*>(row)[i];
        case kF16:
            return f16_to_f32(reinterpret_cast<const uint16_t*>(row)[i]);
        case kBF16:
            return bf16_to_f32(reinterpret_cast<const uint16_t*>(row)[i]);
        case kQ8_0:
            return stored_f16(block) * static_cast<float>(static_cast<int8_t>(block[2 + j]));
        case kQ8_KV:
            return *reinterpret_cast<const float*>(row) * static_cast<float>(static_cast<int8_t>(row[8 + i]));
        case kIQ4_NL:
            return stored_f16(block) *
                   static_cast<float>(kLevelsIQ4_NL[block[2 + (j & 15)] >> (j >> 4 << 2) & 15]);
        default:
            return nibble_element(type, block, j);
    }
}

}  // namespace ikpy::cuda
