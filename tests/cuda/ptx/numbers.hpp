// Number formats of the matrix instructions and the suffixes that name them.
#pragma once

#include <cstdint>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

namespace ptx {

inline float float_of_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float float_of_bf16(uint16_t bits) { return float_of_bits(uint32_t(bits) << 16); }

/// The tensor cores read 19 bits of a tf32 operand.
inline float float_of_tf32(uint32_t bits) { return float_of_bits(bits & ~0x1fffu); }

inline float float_of_half(uint16_t bits) {
    const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, mantissa = bits & 1023;
    if (exponent == 31) return float_of_bits(sign | 0x7f800000 | mantissa << 13);
    if (exponent) return float_of_bits(sign | (exponent + 112) << 23 | mantissa << 13);
    const float magnitude = float(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
}

/// To nearest even.
inline uint16_t half_of_float(float value) {
    const uint32_t bits = bits_of_float(value);
    const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
    const uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return 0x7fff;          // the canonical NaN of PTX
    if (magnitude >= 0x477ff000) return sign | 0x7c00;  // 65520 and above
    if (magnitude < 0x38800000) {  // subnormal or zero: adding 0.5 rounds to units of 2^-24
        const float shifted = float_of_bits(magnitude) + 0.5f;
        return sign | uint16_t(bits_of_float(shifted) - 0x3f000000);
    }
    const uint32_t odd = magnitude >> 13 & 1;
    return sign | uint16_t((magnitude - 0x38000000 + 0xfff + odd) >> 13);
}

enum Element { f16, bf16, tf32, s8, u8, f32, s32, unknown };

constexpr const char* kElementNames[] = {"f16", "bf16", "tf32", "s8", "u8", "f32", "s32"};

inline Element element_of(const std::string& name) {
    for (int i = 0; i < unknown; ++i)
        if (name == kElementNames[i]) return Element(i);
    return unknown;
}

inline int bits_of(Element element) {
    return element == s8 || element == u8 ? 8 : element == f16 || element == bf16 ? 16 : 32;
}

/// Value of element i of a register, or of bytes that one element fills.
inline float floating(Element element, uint32_t word, int i) {
    if (element == tf32) return float_of_tf32(word);
    if (element == f32) return float_of_bits(word);
    const uint16_t bits = uint16_t(word >> 16 * i);
    return element == f16 ? float_of_half(bits) : float_of_bf16(bits);
}

inline int64_t integer(Element element, uint32_t word, int i) {
    const uint8_t byte = uint8_t(word >> 8 * i);
    return element == s8 ? int64_t(int8_t(byte)) : int64_t(byte);
}

/// Parts of an instruction's suffix, without .sync and .aligned.
inline std::vector<std::string> parts_of(const std::string& suffix) {
    std::vector<std::string> parts;
    std::stringstream stream(suffix);
    for (std::string part; std::getline(stream, part, '.');)
        if (!part.empty() && part != "sync" && part != "aligned") parts.push_back(part);
    return parts;
}

}  // namespace ptx
