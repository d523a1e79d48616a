// cvt (PTX ISA, "Data Movement and Conversion Instructions: cvt").
#ifdef __F16C__
#include <immintrin.h>
#endif

#include <cmath>
#include <limits>

#include "machine.hpp"

namespace ptx {
namespace {

// Integers beyond the destination lose their high bits.
template <class D, class S>
void add_integer(const std::string& to, const std::string& from) {
    add_lanewise<D, S>("cvt." + to + "." + from, [](S a) { return static_cast<D>(a); });
}
template <class S>
void add_from_integer(const std::string& from) {
    add_integer<uint8_t, S>("u8", from), add_integer<int8_t, S>("s8", from);
    add_integer<uint16_t, S>("u16", from), add_integer<int16_t, S>("s16", from);
    add_integer<uint32_t, S>("u32", from), add_integer<int32_t, S>("s32", from);
    add_integer<uint64_t, S>("u64", from), add_integer<int64_t, S>("s64", from);
    add_lanewise<float, S>("cvt.rn.f32." + from, [](S a) { return static_cast<float>(a); });
    add_lanewise<double, S>("cvt.rn.f64." + from, [](S a) { return static_cast<double>(a); });
}

// Values beyond the destination become its nearest; NaN zero, except to or from 64 bits, where it is the
// highest bit.
template <class D, class S>
D clamp(S a) {
    using Limits = std::numeric_limits<D>;
    if (a != a)
        return sizeof(D) == 8 || sizeof(S) == 8 ? static_cast<D>(uint64_t(1) << (8 * sizeof(D) - 1)) : D(0);
    if (a < static_cast<S>(Limits::min())) return Limits::min();
    // The largest integer itself may not be a float; the power of two above it is.
    if (a >= std::ldexp(S(1), Limits::digits)) return Limits::max();
    return static_cast<D>(a);
}
template <class D, class S>
void add_to_integer(const std::string& to, const std::string& from) {
    const std::string types = "." + to + "." + from;
    add_lanewise<D, S>("cvt.rni" + types, [](S a) { return clamp<D>(std::nearbyint(a)); });
    add_lanewise<D, S>("cvt.rzi" + types, [](S a) { return clamp<D>(std::trunc(a)); });
    add_lanewise<D, S>("cvt.rmi" + types, [](S a) { return clamp<D>(std::floor(a)); });
    add_lanewise<D, S>("cvt.rpi" + types, [](S a) { return clamp<D>(std::ceil(a)); });
}
template <class S>
void add_from_float(const std::string& from) {
    add_to_integer<int32_t, S>("s32", from), add_to_integer<uint32_t, S>("u32", from);
    add_to_integer<int64_t, S>("s64", from), add_to_integer<uint64_t, S>("u64", from);
    const std::string types = "." + from + "." + from;
    add_lanewise<S, S>("cvt.rni" + types, [](S a) { return std::nearbyint(a); });
    add_lanewise<S, S>("cvt.rzi" + types, [](S a) { return std::trunc(a); });
    add_lanewise<S, S>("cvt.rmi" + types, [](S a) { return std::floor(a); });
    add_lanewise<S, S>("cvt.rpi" + types, [](S a) { return std::ceil(a); });
    // NaN becomes +0.
    add_lanewise<S, S>("cvt.sat" + types, [](S a) { return a > 0 ? (a < 1 ? a : S(1)) : S(0); });
}

#ifdef __F16C__  // compilers before GCC 12 have no _Float16
uint16_t to_f16(float x) { return _cvtss_sh(x, _MM_FROUND_CUR_DIRECTION); }
float from_f16(uint16_t x) { return _cvtsh_ss(x); }
#else
uint16_t to_f16(float x) { return std::bit_cast<uint16_t>(static_cast<_Float16>(x)); }
float from_f16(uint16_t x) { return static_cast<float>(std::bit_cast<_Float16>(x)); }
#endif
uint16_t to_bf16(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    if (x != x) return 0x7fff;
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
float from_bf16(uint16_t x) { return std::bit_cast<float>(uint32_t(x) << 16); }

template <class F>
uint32_t both(uint32_t a, uint32_t b, F f) {
    const auto half = [&](int shift) {
        return uint32_t(f(uint16_t(a >> shift), uint16_t(b >> shift))) << shift;
    };
    return half(0) | half(16);
}

// x y + z of f16, rounded once: what the sum loses in f32 sets its last bit, which keeps it off the middle
// between two f16.
uint16_t fused_f16(float x, float y, float z) {
    const double product = double(x) * y, sum = product + z, z_part = sum - product;
    const double lost = (product - (sum - z_part)) + (z - z_part);
    const float near = static_cast<float>(sum);
    const double below = near > sum ? -1 : near < sum ? 1 : lost;
    if (!std::isfinite(near) || below == 0 || (std::bit_cast<uint32_t>(near) & 1)) return to_f16(near);
    return to_f16(std::nextafter(near, below > 0 ? INFINITY : -INFINITY));
}

void add_halves() {
    add_lanewise<float, uint16_t>("cvt.f32.f16", [](uint16_t a) { return from_f16(a); });
    add_lanewise<float, uint16_t>("cvt.f32.bf16", [](uint16_t a) { return from_bf16(a); });
    add_lanewise<uint16_t, float>("cvt.rn.f16.f32", [](float a) { return to_f16(a); });
    add_lanewise<uint16_t, float>("cvt.rn.bf16.f32", [](float a) { return to_bf16(a); });
    // The first source is the upper half.
    add_lanewise<uint32_t, float, float>(
        "cvt.rn.f16x2.f32", [](float a, float b) { return uint32_t(to_f16(a)) << 16 | to_f16(b); });
    add_lanewise<uint32_t, float, float>(
        "cvt.rn.bf16x2.f32", [](float a, float b) { return uint32_t(to_bf16(a)) << 16 | to_bf16(b); });
    // The exact result of two f16 fits into f32 with room for one rounding, so that rounding twice is
    // rounding once.
    add_lanewise<uint32_t, uint32_t, uint32_t>("add.f16x2", [](uint32_t a, uint32_t b) {
        return both(a, b, [](uint16_t x, uint16_t y) { return to_f16(from_f16(x) + from_f16(y)); });
    });
    add_lanewise<uint32_t, uint32_t, uint32_t>("sub.f16x2", [](uint32_t a, uint32_t b) {
        return both(a, b, [](uint16_t x, uint16_t y) { return to_f16(from_f16(x) - from_f16(y)); });
    });
    add_lanewise<uint32_t, uint32_t, uint32_t>("mul.f16x2", [](uint32_t a, uint32_t b) {
        return both(a, b, [](uint16_t x, uint16_t y) { return to_f16(from_f16(x) * from_f16(y)); });
    });
    add_lanewise<uint32_t, uint32_t, uint32_t, uint32_t>(
        "fma.rn.f16x2", [](uint32_t a, uint32_t b, uint32_t c) {
            const auto half = [&](int shift) {
                const auto at = [&](uint32_t x) { return from_f16(static_cast<uint16_t>(x >> shift)); };
                return uint32_t(fused_f16(at(a), at(b), at(c))) << shift;
            };
            return half(0) | half(16);
        });
}

}  // namespace

void add_conversion_forms() {
    add_from_integer<uint8_t>("u8"), add_from_integer<int8_t>("s8");
    add_from_integer<uint16_t>("u16"), add_from_integer<int16_t>("s16");
    add_from_integer<uint32_t>("u32"), add_from_integer<int32_t>("s32");
    add_from_integer<uint64_t>("u64"), add_from_integer<int64_t>("s64");
    add_from_float<float>("f32"), add_from_float<double>("f64");
    add_lanewise<double, float>("cvt.f64.f32", [](float a) { return static_cast<double>(a); });
    add_lanewise<float, double>("cvt.rn.f32.f64", [](double a) { return static_cast<float>(a); });
    add_halves();
}

}  // namespace ptx
