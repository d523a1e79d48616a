// Conversions between f32 and the 16-bit float formats, and unaligned loads.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace ikpy {

template <typename T>
inline T load_unaligned(const void* p) {
    T value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

inline float f32_from_bits(uint32_t bits) { return load_unaligned<float>(&bits); }
inline uint32_t f32_bits(float value) { return load_unaligned<uint32_t>(&value); }

inline float f16_to_f32(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#else
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
    const uint32_t magnitude = h & 0x7FFF;
    if (magnitude > 0x7C00) return f32_from_bits(sign | 0x7FC00000 | magnitude << 13);  // NaN, made quiet
    if (magnitude == 0x7C00) return f32_from_bits(sign | 0x7F800000);
    // In place the exponent is 127 - 15 too small; the multiplication also normalizes subnormals.
    return f32_from_bits(f32_bits(f32_from_bits(magnitude << 13) * 0x1p112f) | sign);
#endif
}

// Round to nearest even; too large becomes infinity, NaN stays NaN.
inline uint16_t f32_to_f16(float value) {
#if defined(__F16C__)
    return static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
#else
    const uint32_t bits = f32_bits(value);
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
    const uint32_t magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return static_cast<uint16_t>(sign | 0x7E00 | ((magnitude >> 13) & 0x3FF));
    if (magnitude >= 0x477FF000) return static_cast<uint16_t>(sign | 0x7C00);
    if (magnitude < 0x38800000) {  // subnormal: adding 0.5 rounds at the right bit and leaves the result low
        const uint32_t sum = f32_bits(f32_from_bits(magnitude) + 0.5f);
        return static_cast<uint16_t>(sign | (sum - 0x3F000000));
    }
    return static_cast<uint16_t>(sign | ((magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13));
#endif
}

// Half the value of an FP8 number e4m3 (bias 7) whose sign does not count; 127 counts as 0.
inline float half_ue4m3(uint8_t code) {
    return code == 127 ? 0.0f : f16_to_f32(static_cast<uint16_t>((code & 127) << 7)) * 128.0f;
}

inline float bf16_to_f32(uint16_t h) { return f32_from_bits(static_cast<uint32_t>(h) << 16); }

// Round to nearest even; NaN stays NaN.
inline uint16_t f32_to_bf16(float value) {
    const uint32_t bits = f32_bits(value);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return static_cast<uint16_t>((bits >> 16) | 0x40);
    return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

}  // namespace ikpy
