// Arithmetic, logic and comparisons (PTX ISA, "Instruction Set").
#include <cfenv>
#include <cmath>
#include <limits>
#include <tuple>

#include "machine.hpp"

namespace ptx {
namespace {

using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;
template <class T>
using Unsigned = std::make_unsigned_t<T>;

// integers

template <class T>
void add_integer(const std::string& t) {
    using U = Unsigned<T>;
    constexpr int bits = 8 * sizeof(T);
    add_lanewise<T, T, T>("add." + t, [](T a, T b) { return T(U(a) + U(b)); });
    add_lanewise<T, T, T>("sub." + t, [](T a, T b) { return T(U(a) - U(b)); });
    // U is widened to int where it has 16 bits, which would overflow.
    add_lanewise<T, T, T>("mul.lo." + t, [](T a, T b) { return T(u64(a) * u64(b)); });
    add_lanewise<T, T, T, T>("mad.lo." + t, [](T a, T b, T c) { return T(u64(a) * u64(b) + u64(c)); });
    add_lanewise<T, T, T>("mul.hi." + t, [](T a, T b) {
        using Double = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
        return T((Double(a) * Double(b)) >> bits);
    });
    // What division by zero gives is undefined by the ISA; devices give ones.
    add_lanewise<T, T, T>("div." + t, [](T a, T b) {
        if (b == 0) return T(-1);
        if (std::is_signed_v<T> && b == T(-1)) return T(-U(a));
        return T(a / b);
    });
    add_lanewise<T, T, T>("rem." + t, [](T a, T b) {
        if (b == 0) return a;
        if (std::is_signed_v<T> && b == T(-1)) return T(0);
        return T(a % b);
    });
    add_lanewise<T, T, T>("min." + t, [](T a, T b) { return a < b ? a : b; });
    add_lanewise<T, T, T>("max." + t, [](T a, T b) { return a > b ? a : b; });
    // Amounts beyond the width shift everything out.
    add_lanewise<T, T, u32>("shr." + t, [](T a, u32 n) {
        return n < bits ? T(a >> n) : a < 0 ? T(-1) : T(0);
    });
    if constexpr (std::is_signed_v<T>) {
        add_lanewise<T, T>("neg." + t, [](T a) { return T(-U(a)); });
        add_lanewise<T, T>("abs." + t, [](T a) { return a < 0 ? T(-U(a)) : a; });
    }
}

template <class T, class Double>
void add_widening(const std::string& t) {
    add_lanewise<Double, T, T>("mul.wide." + t, [](T a, T b) { return Double(Double(a) * Double(b)); });
    add_lanewise<Double, T, T, Double>(
        "mad.wide." + t, [](T a, T b, Double c) { return Double(u64(Double(a) * Double(b)) + u64(c)); });
}

template <class T>
void add_logic(const std::string& t) {
    constexpr u32 bits = 8 * sizeof(T);
    add_lanewise<T, T, T>("and." + t, [](T a, T b) { return T(a & b); });
    add_lanewise<T, T, T>("or." + t, [](T a, T b) { return T(a | b); });
    add_lanewise<T, T, T>("xor." + t, [](T a, T b) { return T(a ^ b); });
    add_lanewise<T, T>("not." + t, [](T a) { return T(~a); });
    add_lanewise<T, T, u32>("shl." + t, [](T a, u32 n) { return n < bits ? T(a << n) : T(0); });
    add_lanewise<T, T, T, u32>("selp." + t, [](T a, T b, u32 p) { return p ? a : b; });
    add_lanewise<T, T>("mov." + t, [](T a) { return a; });
}

template <class T>
T insert_field(T a, T b, u32 position, u32 length) {
    constexpr u32 bits = 8 * sizeof(T);
    position &= 0xff, length &= 0xff;
    if (position >= bits || length == 0) return b;
    const T field = length >= bits ? ~T(0) : (T(1) << length) - 1;
    const T mask = field << position;
    return (b & ~mask) | (a << position & mask);
}

u32 permute(u32 a, u32 b, u32 selector) {
    const u64 bytes = a | u64(b) << 32;
    u32 out = 0;
    for (int k = 0; k < 4; ++k) {
        const u32 nibble = selector >> 4 * k & 15;
        u32 byte = u32(bytes >> 8 * (nibble & 7)) & 0xff;
        if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;
        out |= byte << 8 * k;
    }
    return out;
}

template <class A, class B>
u32 dot4(u32 a, u32 b, u32 sum) {
    for (int k = 0; k < 4; ++k) sum += u32(s32(A(a >> 8 * k)) * s32(B(b >> 8 * k)));
    return sum;
}

// Two numbers of 16 bits with two bytes from `first` on.
u32 dot2(u32 a, u32 b, u32 sum, int first) {
    for (int k = 0; k < 2; ++k) sum += u32(s32(int16_t(a >> 16 * k)) * s32(uint8_t(b >> 8 * (first + k))));
    return sum;
}

u32 reverse_bits(u32 a) {
    u32 out = 0;
    for (int k = 0; k < 32; ++k) out |= (a >> k & 1) << (31 - k);
    return out;
}

void add_bits() {
    add_lanewise<u32, u32, u32, u32, u32>(
        "bfi.b32", [](u32 a, u32 b, u32 at, u32 n) { return insert_field(a, b, at, n); });
    add_lanewise<u64, u64, u64, u32, u32>(
        "bfi.b64", [](u64 a, u64 b, u32 at, u32 n) { return insert_field(a, b, at, n); });
    add_lanewise<u32, u32>("popc.b32", [](u32 a) { return u32(std::popcount(a)); });
    add_lanewise<u32, u32>("clz.b32", [](u32 a) { return u32(std::countl_zero(a)); });
    add_lanewise<u32, u32>("brev.b32", [](u32 a) { return reverse_bits(a); });
    add_lanewise<u32, u32>("bfind.u32", [](u32 a) { return 31u - u32(std::countl_zero(a)); });
    add_lanewise<u32, u32>("bfind.shiftamt.u32", [](u32 a) { return a ? u32(std::countl_zero(a)) : ~0u; });
    add_lanewise<u32, u32, u32, u32>("prmt.b32", [](u32 a, u32 b, u32 c) { return permute(a, b, c); });
    add_lanewise<u32, u32, u32, u32>("shf.r.wrap.b32",
                                     [](u32 a, u32 b, u32 n) { return u32((a | u64(b) << 32) >> (n & 31)); });
    add_lanewise<u32, u32, u32, u32>(
        "shf.l.wrap.b32", [](u32 a, u32 b, u32 n) { return u32((a | u64(b) << 32) << (n & 31) >> 32); });
    add_lanewise<u32, u32, u32, u32, u32>("lop3.b32", [](u32 a, u32 b, u32 c, u32 table) {
        u32 out = 0;
        for (int k = 0; k < 8; ++k)
            if (table >> k & 1) out |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
        return out;
    });
    add_lanewise<u32, u32, u32, u32>("dp4a.s32.s32",
                                     [](u32 a, u32 b, u32 c) { return dot4<int8_t, int8_t>(a, b, c); });
    add_lanewise<u32, u32, u32, u32>("dp4a.u32.u32",
                                     [](u32 a, u32 b, u32 c) { return dot4<uint8_t, uint8_t>(a, b, c); });
    add_lanewise<u32, u32, u32, u32>("dp4a.u32.s32",
                                     [](u32 a, u32 b, u32 c) { return dot4<uint8_t, int8_t>(a, b, c); });
    add_lanewise<u32, u32, u32, u32>("dp4a.s32.u32",
                                     [](u32 a, u32 b, u32 c) { return dot4<int8_t, uint8_t>(a, b, c); });
    add_lanewise<u32, u32, u32, u32>("dp2a.lo.s32.u32", [](u32 a, u32 b, u32 c) { return dot2(a, b, c, 0); });
    add_lanewise<u32, u32, u32, u32>("dp2a.hi.s32.u32", [](u32 a, u32 b, u32 c) { return dot2(a, b, c, 2); });
    add_lanewise<u32, u32, u32>("and.pred", [](u32 a, u32 b) { return a & b; });
    add_lanewise<u32, u32, u32>("or.pred", [](u32 a, u32 b) { return a | b; });
    add_lanewise<u32, u32, u32>("xor.pred", [](u32 a, u32 b) { return a ^ b; });
    add_lanewise<u32, u32>("not.pred", [](u32 a) { return u32(!a); });
    add_lanewise<u32, u32>("mov.pred", [](u32 a) { return a; });
    // Halves of registers; encode.py takes {a, b} apart.
    add_lanewise<u64, u32, u32>("pack.b64", [](u32 a, u32 b) { return a | u64(b) << 32; });
    add_lanewise<u32, u16, u16>("pack.b32", [](u16 a, u16 b) { return a | u32(b) << 16; });
    add_lanewise<u32, u64>("low.b64", [](u64 a) { return u32(a); });
    add_lanewise<u32, u64>("high.b64", [](u64 a) { return u32(a >> 32); });
    add_lanewise<u16, u32>("low.b32", [](u32 a) { return u16(a); });
    add_lanewise<u16, u32>("high.b32", [](u32 a) { return u16(a >> 16); });
}

// floats

// Of results that are NaN, the ISA says which.
float canonical(float x) { return x == x ? x : std::bit_cast<float>(0x7fffffffu); }
double canonical(double x) { return x; }

float flush(float x) { return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x; }

// The number if one is NaN, and -0 < +0.
template <class T>
T larger(T a, T b) {
    if (a != a) return canonical(b);
    if (b != b) return a;
    if (a == b) return std::signbit(a) ? b : a;
    return a > b ? a : b;
}
template <class T>
T smaller(T a, T b) {
    if (a != a) return canonical(b);
    if (b != b) return a;
    if (a == b) return std::signbit(a) ? a : b;
    return a < b ? a : b;
}

template <class T>
void add_float(const std::string& t) {
    for (const std::string round : {".", ".rn."}) {
        add_lanewise<T, T, T>("add" + round + t, [](T a, T b) { return canonical(a + b); });
        add_lanewise<T, T, T>("sub" + round + t, [](T a, T b) { return canonical(a - b); });
        add_lanewise<T, T, T>("mul" + round + t, [](T a, T b) { return canonical(a * b); });
    }
    add_lanewise<T, T, T, T>("fma.rn." + t, [](T a, T b, T c) { return canonical(std::fma(a, b, c)); });
    add_lanewise<T, T, T>("div.rn." + t, [](T a, T b) { return canonical(a / b); });
    add_lanewise<T, T>("rcp.rn." + t, [](T a) { return canonical(1 / a); });
    add_lanewise<T, T>("sqrt.rn." + t, [](T a) { return canonical(std::sqrt(a)); });
    add_lanewise<T, T, T>("min." + t, [](T a, T b) { return smaller(a, b); });
    add_lanewise<T, T, T>("max." + t, [](T a, T b) { return larger(a, b); });
    add_lanewise<T, T>("neg." + t, [](T a) { return -a; });
    add_lanewise<T, T>("abs." + t, [](T a) { return std::fabs(a); });
    // The sign is that of the first operand.
    add_lanewise<T, T, T>("copysign." + t, [](T a, T b) { return std::copysign(b, a); });
    add_lanewise<T, T, T, u32>("selp." + t, [](T a, T b, u32 p) { return p ? a : b; });
    add_lanewise<T, T>("mov." + t, [](T a) { return a; });
}

// Another rounding mode than to nearest; the file is compiled with -frounding-math.
template <int Mode, class Body>
void rounded(Body body) {
    const int before = std::fegetround();
    std::fesetround(Mode);
    body();
    std::fesetround(before);
}
template <int Mode>
void add_rounded(const std::string& round) {
    add("fma." + round + ".f32", [](Warp& w, const Instruction& i) {
        rounded<Mode>([&] {
            for (int l = 0; l < kLanes; ++l)
                if (w.mask[l]) {
                    const float r =
                        std::fma(value<float>(w.in<float>(i, 1), l), value<float>(w.in<float>(i, 2), l),
                                 value<float>(w.in<float>(i, 3), l));
                    w.out<float>(i, 0)[l] = word(canonical(r));
                }
        });
    });
    add("add." + round + ".f32", [](Warp& w, const Instruction& i) {
        rounded<Mode>([&] {
            for (int l = 0; l < kLanes; ++l)
                if (w.mask[l]) {
                    const float r = value<float>(w.in<float>(i, 1), l) + value<float>(w.in<float>(i, 2), l);
                    w.out<float>(i, 0)[l] = word(canonical(r));
                }
        });
    });
}

// Approximations are exact here (rounded to nearest); devices err by the last bits that the ISA allows.
template <class F>
void add_approximation(const std::string& name, F) {
    add_lanewise<float, float>(name + ".approx.f32",
                               [](float a) { return canonical(float(F{}(double(a)))); });
    add_lanewise<float, float>(name + ".approx.ftz.f32",
                               [](float a) { return canonical(flush(float(F{}(double(flush(a)))))); });
}

template <class T>
void add_comparisons(const std::string& t) {
    add_lanewise<u32, T, T>("setp.eq." + t, [](T a, T b) { return u32(a == b); });
    add_lanewise<u32, T, T>("setp.ne." + t, [](T a, T b) { return u32(a < b || a > b); });
    add_lanewise<u32, T, T>("setp.lt." + t, [](T a, T b) { return u32(a < b); });
    add_lanewise<u32, T, T>("setp.le." + t, [](T a, T b) { return u32(a <= b); });
    add_lanewise<u32, T, T>("setp.gt." + t, [](T a, T b) { return u32(a > b); });
    add_lanewise<u32, T, T>("setp.ge." + t, [](T a, T b) { return u32(a >= b); });
    if constexpr (std::is_floating_point_v<T>) {
        add_lanewise<u32, T, T>("setp.equ." + t, [](T a, T b) { return u32(!(a < b || a > b)); });
        add_lanewise<u32, T, T>("setp.neu." + t, [](T a, T b) { return u32(!(a == b)); });
        add_lanewise<u32, T, T>("setp.ltu." + t, [](T a, T b) { return u32(!(a >= b)); });
        add_lanewise<u32, T, T>("setp.leu." + t, [](T a, T b) { return u32(!(a > b)); });
        add_lanewise<u32, T, T>("setp.gtu." + t, [](T a, T b) { return u32(!(a <= b)); });
        add_lanewise<u32, T, T>("setp.geu." + t, [](T a, T b) { return u32(!(a < b)); });
        add_lanewise<u32, T, T>("setp.num." + t, [](T a, T b) { return u32(a == a && b == b); });
        add_lanewise<u32, T, T>("setp.nan." + t, [](T a, T b) { return u32(a != a || b != b); });
    }
}

}  // namespace

void add_scalar_forms() {
    add_integer<s16>("s16"), add_integer<u16>("u16");
    add_integer<s32>("s32"), add_integer<u32>("u32");
    add_integer<s64>("s64"), add_integer<u64>("u64");
    add_widening<s16, s32>("s16"), add_widening<u16, u32>("u16");
    add_widening<s32, s64>("s32"), add_widening<u32, u64>("u32");
    add_logic<u16>("b16"), add_logic<u32>("b32"), add_logic<u64>("b64");
    add_bits();
    add_float<float>("f32"), add_float<double>("f64");
    add_rounded<FE_DOWNWARD>("rm"), add_rounded<FE_UPWARD>("rp"), add_rounded<FE_TOWARDZERO>("rz");
    add_approximation("ex2", [](double x) { return std::exp2(x); });
    add_approximation("lg2", [](double x) { return std::log2(x); });
    add_approximation("rcp", [](double x) { return 1 / x; });
    add_approximation("sqrt", [](double x) { return std::sqrt(x); });
    add_approximation("rsqrt", [](double x) { return 1 / std::sqrt(x); });
    add_approximation("sin", [](double x) { return std::sin(x); });
    add_approximation("cos", [](double x) { return std::cos(x); });
    add_lanewise<float, float>("tanh.approx.f32", [](float x) { return float(std::tanh(double(x))); });
    add_comparisons<s16>("s16"), add_comparisons<u16>("u16"), add_comparisons<s32>("s32"),
        add_comparisons<u32>("u32");
    add_comparisons<s64>("s64"), add_comparisons<u64>("u64");
    add_comparisons<float>("f32"), add_comparisons<double>("f64");
}

}  // namespace ptx
