// One vector of f32 under one set of names for all ISA tiers, with exp2 and tanh.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__GNUC__) && !defined(__clang__)
// g++ 12 warns of the undefined pass-through operands inside its own AVX-512 intrinsics.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

namespace ikpy {
namespace simd {

#if defined(__AVX512F__)

using V = __m512;
constexpr int kLanes = 16;

inline V load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, V v) { _mm512_storeu_ps(p, v); }
inline V set1(float x) { return _mm512_set1_ps(x); }
inline V zero() { return _mm512_setzero_ps(); }
inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
inline V add(V a, V b) { return _mm512_add_ps(a, b); }
inline V sub(V a, V b) { return _mm512_sub_ps(a, b); }
inline V mul(V a, V b) { return _mm512_mul_ps(a, b); }
inline V div(V a, V b) { return _mm512_div_ps(a, b); }
inline V max(V a, V b) { return _mm512_max_ps(a, b); }
inline V min(V a, V b) { return _mm512_min_ps(a, b); }
inline float sum(V v) { return _mm512_reduce_add_ps(v); }
inline float highest(V v) { return _mm512_reduce_max_ps(v); }
inline bool any_above(V v, float bound) {  // or NaN
    return _mm512_cmp_ps_mask(v, _mm512_set1_ps(bound), _CMP_NLE_UQ) != 0;
}
// v where bit `b` of the lane's word is set, else low
inline V keep_if_bit(const uint32_t* words, uint32_t b, V v, V low) {
    const __mmask16 m = _mm512_test_epi32_mask(_mm512_loadu_si512(words), _mm512_set1_epi32(int32_t(b)));
    return _mm512_mask_mov_ps(low, m, v);
}
// v in the lanes whose bits are set, counted from the lowest, else low
inline V keep_bits(uint32_t bits, V v, V low) { return _mm512_mask_mov_ps(low, __mmask16(bits), v); }
// n = nearest integer to t, returns 2^n * p
inline V round_nearest(V t) { return _mm512_roundscale_ps(t, 0x08); }
inline V scale_by_power(V p, V n) { return _mm512_scalef_ps(p, n); }
// p[i] for whole numbers i
inline V gather(const float* p, V i) { return _mm512_i32gather_ps(_mm512_cvtps_epi32(i), p, 4); }

#elif defined(__AVX2__)

using V = __m256;
constexpr int kLanes = 8;

inline V load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, V v) { _mm256_storeu_ps(p, v); }
inline V set1(float x) { return _mm256_set1_ps(x); }
inline V zero() { return _mm256_setzero_ps(); }
inline V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
inline V add(V a, V b) { return _mm256_add_ps(a, b); }
inline V sub(V a, V b) { return _mm256_sub_ps(a, b); }
inline V mul(V a, V b) { return _mm256_mul_ps(a, b); }
inline V div(V a, V b) { return _mm256_div_ps(a, b); }
inline V max(V a, V b) { return _mm256_max_ps(a, b); }
inline V min(V a, V b) { return _mm256_min_ps(a, b); }
inline float sum(V v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float highest(V v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
inline bool any_above(V v, float bound) {  // or NaN
    return _mm256_movemask_ps(_mm256_cmp_ps(v, _mm256_set1_ps(bound), _CMP_NLE_UQ)) != 0;
}
inline V keep_if_bit(const uint32_t* words, uint32_t b, V v, V low) {
    const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
    const __m256i bit = _mm256_set1_epi32(int32_t(b));
    const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(w, bit), bit);
    return _mm256_blendv_ps(low, v, _mm256_castsi256_ps(set));
}
inline V keep_bits(uint32_t bits, V v, V low) {
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int32_t(bits)), bit), bit);
    return _mm256_blendv_ps(low, v, _mm256_castsi256_ps(set));
}
inline V round_nearest(V t) { return _mm256_round_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline V scale_by_power(V p, V n) {
    n = _mm256_max_ps(n, _mm256_set1_ps(-127.0f));  // biased exponent 0: the factor is then 0
    n = _mm256_min_ps(n, _mm256_set1_ps(127.0f));
    const __m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(p, _mm256_castsi256_ps(e));
}
inline V gather(const float* p, V i) { return _mm256_i32gather_ps(p, _mm256_cvtps_epi32(i), 4); }

#else

typedef float V __attribute__((vector_size(16)));
typedef int32_t VI __attribute__((vector_size(16)));
constexpr int kLanes = 4;

inline V load(const float* p) {
    V v;
    std::memcpy(&v, p, sizeof(v));
    return v;
}
inline void store(float* p, V v) { std::memcpy(p, &v, sizeof(v)); }
inline V set1(float x) { return V{x, x, x, x}; }
inline V zero() { return V{0, 0, 0, 0}; }
inline V fma(V a, V b, V c) { return a * b + c; }
inline V add(V a, V b) { return a + b; }
inline V sub(V a, V b) { return a - b; }
inline V mul(V a, V b) { return a * b; }
inline V div(V a, V b) { return a / b; }
inline V max(V a, V b) { return a > b ? a : b; }
inline V min(V a, V b) { return a < b ? a : b; }
inline float sum(V v) { return (v[0] + v[2]) + (v[1] + v[3]); }
inline float highest(V v) {
    const float a = v[0] > v[1] ? v[0] : v[1];
    const float b = v[2] > v[3] ? v[2] : v[3];
    return a > b ? a : b;
}
inline V keep_if_bit(const uint32_t* words, uint32_t b, V v, V low) {
    VI w;
    std::memcpy(&w, words, sizeof(w));
    const int32_t s = int32_t(b);
    return (w & VI{s, s, s, s}) != VI{0, 0, 0, 0} ? v : low;
}
inline V keep_bits(uint32_t bits, V v, V low) {
    const int32_t b = int32_t(bits);
    return (VI{b, b, b, b} & VI{1, 2, 4, 8}) != VI{0, 0, 0, 0} ? v : low;
}
// Adding 1.5 * 2^23 leaves no bits for the fraction; larger magnitudes are clamped first (they only occur
// below the range where 2^n is 0).
inline V round_nearest(V t) {
    const V magic = set1(12582912.0f);
    const V whole = (max(t, set1(-100000.0f)) + magic) - magic;
    return t < set1(-100000.0f) ? t : whole;
}
inline V scale_by_power(V p, V n) {
    n = min(max(n, set1(-127.0f)), set1(127.0f));
    const VI e = (__builtin_convertvector(n, VI) + 127) << 23;
    V f;
    std::memcpy(&f, &e, sizeof(f));
    return p * f;
}
inline V gather(const float* p, V i) {
    return V{p[int64_t(i[0])], p[int64_t(i[1])], p[int64_t(i[2])], p[int64_t(i[3])]};
}

#endif

inline V abs(V x) { return max(x, sub(zero(), x)); }

// 2^t for t <= 127; 0 below about -127. Relative error below 2e-7: minimax polynomial of degree 5 on [-1/2,
// 1/2].
inline V exp2(V t) {
    const V n = round_nearest(t);
    const V f = sub(t, n);
    V p = set1(1.3264727124e-03f);
    p = fma(p, f, set1(9.6715126448e-03f));
    p = fma(p, f, set1(5.5507337435e-02f));
    p = fma(p, f, set1(2.4022242085e-01f));
    p = fma(p, f, set1(6.9314697760e-01f));
    p = fma(p, f, set1(1.0f));
    return scale_by_power(p, n);
}

constexpr float kLog2e = 1.44269504088896340736f;

// tanh(x) = 1 - 2 / (e^{2x} + 1); absolute error about 1e-7
inline V tanh(V x) {
    const V e = exp2(min(mul(x, set1(2.0f * kLog2e)), set1(60.0f)));
    return sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f))));
}

}  // namespace simd
}  // namespace ikpy
