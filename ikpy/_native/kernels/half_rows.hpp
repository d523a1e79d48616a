// Conversions between f32 and the two 16-bit float formats, for single values and rows.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
// GCC 12 reports variables of its own intrinsics as uninitialized.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#endif

namespace ikpy {

template <typename T>
inline T load_as(const void* p) {
    T v;
    std::memcpy(&v, p, sizeof(T));
    return v;
}

inline float bf16_bits_to_f32(uint16_t h) {
    const uint32_t bits = static_cast<uint32_t>(h) << 16;
    return load_as<float>(&bits);
}

// Round to nearest even; NaN stays NaN.
inline uint16_t f32_to_bf16_bits(float f) {
    const uint32_t u = load_as<uint32_t>(&f);
    const uint32_t rounded = (u + 0x7FFF + ((u >> 16) & 1)) >> 16;
    const uint32_t quiet = (u >> 16) | 0x40;
    return static_cast<uint16_t>((u & 0x7FFFFFFF) > 0x7F800000 ? quiet : rounded);
}

inline float f16_bits_to_f32(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#else
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
    const uint32_t magnitude = h & 0x7FFF;
    // Shifted into place the exponent is off by 127 - 15; multiplying by 2^112 also normalizes subnormals.
    uint32_t bits = magnitude << 13;
    float value = load_as<float>(&bits) * 0x1p112f;
    bits = load_as<uint32_t>(&value) | sign;
    if (magnitude >= 0x7C00) bits |= 0x7F800000;
    return load_as<float>(&bits);
#endif
}

inline uint16_t f32_to_f16_bits(float f) {
#if defined(__F16C__)
    return static_cast<uint16_t>(_cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT));
#else
    const uint32_t u = load_as<uint32_t>(&f);
    const uint32_t sign = (u >> 16) & 0x8000;
    const uint32_t a = u & 0x7FFFFFFF;
    if (a > 0x7F800000) return static_cast<uint16_t>(sign | 0x7E00);
    if (a >= 0x477FF000) return static_cast<uint16_t>(sign | 0x7C00);
    if (a < 0x38800000) {  // subnormal or zero: adding 0.5 leaves the value in the low bits
        float shifted = load_as<float>(&a) + 0.5f;
        return static_cast<uint16_t>(sign | (load_as<uint32_t>(&shifted) - 0x3F000000));
    }
    return static_cast<uint16_t>(sign | ((a - 0x38000000 + 0xFFF + ((a >> 13) & 1)) >> 13));
#endif
}

inline float load_f16(const uint8_t* p) { return f16_bits_to_f32(load_as<uint16_t>(p)); }

inline void f16_to_f32_row(const uint16_t* x, float* y, int64_t n) {
    int64_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(y + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i))));
#elif defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(y + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))));
#endif
    for (; i < n; ++i) y[i] = f16_bits_to_f32(load_as<uint16_t>(x + i));
}

inline void bf16_to_f32_row(const uint16_t* x, float* y, int64_t n) {
    for (int64_t i = 0; i < n; ++i) y[i] = bf16_bits_to_f32(load_as<uint16_t>(x + i));
}

inline void f32_to_bf16_row(const float* x, uint16_t* y, int64_t n) {
    for (int64_t i = 0; i < n; ++i) y[i] = f32_to_bf16_bits(x[i]);
}

inline void f32_to_f16_row(const float* x, uint16_t* y, int64_t n) {
    int64_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(y + i),
                            _mm512_cvtps_ph(_mm512_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(y + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; ++i) y[i] = f32_to_f16_bits(x[i]);
}

}  // namespace ikpy
