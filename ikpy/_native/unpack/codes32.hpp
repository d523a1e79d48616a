// Building blocks of block(): 32 codes at a time as compiler vectors, which AVX2 keeps in one register.
// Written code by code these loops are not vectorized by the compiler: single tokens on AVX2 then ran at 0.2
// to 2e9 weights/s per core instead of 6 to 16e9 (docs/performance-kernels.md).
#pragma once
#include <cstdint>
#include <cstring>

#include "kernels/simd/half_rows.hpp"

#pragma GCC diagnostic ignored "-Wpsabi"  // these vectors only pass between inlined functions

namespace ikpy {
namespace c32 {

typedef uint8_t Codes32 __attribute__((vector_size(32)));
typedef uint16_t Words32 __attribute__((vector_size(32)));

inline Codes32 load(const uint8_t* p) {
    Codes32 v;
    std::memcpy(&v, p, 32);
    return v;
}
inline void store(uint8_t* at, Codes32 v) { std::memcpy(at, &v, 32); }
// To what uses codes as they are unpacked.
template <class Sink>
inline void store(Sink at, Codes32 v) {
    at.take(v);
}
inline Codes32 all(int value) { return Codes32{} + static_cast<uint8_t>(value); }

// Bits of neighbouring bytes come in; they must be masked away.
inline Codes32 right(Codes32 v, int n) {
    return reinterpret_cast<Codes32>(reinterpret_cast<Words32>(v) >> static_cast<uint16_t>(n));
}
inline Codes32 left(Codes32 v, int n) {
    return reinterpret_cast<Codes32>(reinterpret_cast<Words32>(v) << static_cast<uint16_t>(n));
}

// Bit n of every byte moved to bit 0, with the bits above it that `mask` keeps.
inline Codes32 field(Codes32 v, int n, int mask) { return right(v, n) & static_cast<uint8_t>(mask); }

// Bit `from` of every byte at bit `to`.
inline Codes32 moved_bit(Codes32 v, int from, int to) {
    const uint8_t bit = static_cast<uint8_t>(1 << to);
    return (from > to ? right(v, from - to) : left(v, to - from)) & bit;
}

// 16 bytes in both halves.
inline Codes32 twice(const uint8_t* p) {
#if defined(__AVX2__)
    return reinterpret_cast<Codes32>(
        _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
    Codes32 v;
    std::memcpy(&v, p, 16);
    std::memcpy(reinterpret_cast<uint8_t*>(&v) + 16, p, 16);
    return v;
#endif
}

// The left half of v shifted right by `low` bits, the right half by `high`.
inline Codes32 shift_halves(Codes32 v, int low, int high) {
#if defined(__AVX2__)
    return reinterpret_cast<Codes32>(_mm256_srlv_epi32(
        reinterpret_cast<__m256i>(v), _mm256_setr_epi32(low, low, low, low, high, high, high, high)));
#else
    const auto l = static_cast<uint16_t>(low), h = static_cast<uint16_t>(high);
    return reinterpret_cast<Codes32>(reinterpret_cast<Words32>(v) >>
                                     Words32{l, l, l, l, l, l, l, l, h, h, h, h, h, h, h, h});
#endif
}

// Low nibbles of 16 bytes, then the high ones.
inline Codes32 nibbles(const uint8_t* p) { return shift_halves(twice(p), 0, 4) & 15; }

// 2-bit fields t of 32 bytes.
inline Codes32 two_bits(const uint8_t* p, int t) { return field(load(p), 2 * t, 3); }

// 2-bit fields of elements 32 * i .. + 31 of types that keep four elements 32 columns apart in a byte.
inline Codes32 two_bit_fields(const uint8_t* qs, int i) { return two_bits(qs + 32 * (i >> 2), i & 3); }

// 3-bit fields of 128 columns, 32 columns apart: of fields 0 and 2, and 1 and 3, one in each nibble. The two
// lower bits of field f are those of `low`, the third is bit 4 * h + f of `high`.
struct ThreeBits {
    Codes32 even, odd;
};
struct ThirdBits {
    uint8_t even[16], odd[16];
};
constexpr ThirdBits third_bits() {
    ThirdBits bits{};
    for (int v = 0; v < 16; ++v) {
        bits.even[v] = static_cast<uint8_t>((v & 1) << 2 | (v & 4) << 4);
        bits.odd[v] = static_cast<uint8_t>((v & 2) << 1 | (v & 8) << 3);
    }
    return bits;
}
alignas(16) inline constexpr ThirdBits kThirdBits = third_bits();

// Nibbles of elements 32 * i .. + 31 of types that keep two elements 32 columns apart in a byte.
inline Codes32 nibble_fields(const uint8_t* qs, int i) {
    return field(load(qs + 32 * (i >> 1)), 4 * (i & 1), 15);
}

// 0xFF in byte e where bit e is set.
inline Codes32 bits(uint32_t v) {
#if defined(__AVX2__)
    const __m256i order = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
    const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(v)), order);
    return reinterpret_cast<Codes32>(_mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit));
#else
    Codes32 r;
    for (int e = 0; e < 32; ++e) r[e] = static_cast<uint8_t>(-(v >> e & 1));
    return r;
#endif
}

// 0xFF where bit n of the byte is set.
inline Codes32 test(Codes32 v, int n) {
    const uint8_t bit = static_cast<uint8_t>(1 << n);
    return reinterpret_cast<Codes32>((v & bit) != 0);
}

// `yes` where bit n of the byte of v is set.
inline Codes32 select_by_bit(Codes32 v, int n, Codes32 yes, Codes32 no) {
#if defined(__AVX2__)
    // Blends look at the top bit only, which takes one shift instead of a mask and a comparison.
    return reinterpret_cast<Codes32>(_mm256_blendv_epi8(reinterpret_cast<__m256i>(no),
                                                        reinterpret_cast<__m256i>(yes),
                                                        reinterpret_cast<__m256i>(left(v, 7 - n))));
#else
    return no ^ ((no ^ yes) & test(v, n));
#endif
}

// table[v], v < 16.
inline Codes32 lookup(const uint8_t* table, Codes32 v) {
#if defined(__AVX2__)
    return reinterpret_cast<Codes32>(
        _mm256_shuffle_epi8(reinterpret_cast<__m256i>(twice(table)), reinterpret_cast<__m256i>(v)));
#else
    Codes32 r;
    for (int e = 0; e < 32; ++e) r[e] = table[v[e]];
    return r;
#endif
}

// Two instructions for the third bits of two fields; to cut out and move every one takes six.
inline ThreeBits three_bit_fields(Codes32 low, Codes32 high, int h) {
    const Codes32 third = field(high, 4 * h, 15);
    return {(low & 0x33) | lookup(kThirdBits.even, third),
            field(low, 2, 0x33) | lookup(kThirdBits.odd, third)};
}

// The left half looked up in one table, the right half in another.
inline Codes32 lookup_halves(const uint8_t* left_table, const uint8_t* right_table, Codes32 v) {
#if defined(__AVX2__)
    const auto table = _mm256_inserti128_si256(
        _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(left_table))),
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(right_table)), 1);
    return reinterpret_cast<Codes32>(_mm256_shuffle_epi8(table, reinterpret_cast<__m256i>(v)));
#else
    Codes32 r;
    for (int e = 0; e < 32; ++e) r[e] = (e < 16 ? left_table : right_table)[v[e]];
    return r;
#endif
}

// Bytes of the left and right half in turn.
inline Codes32 zipped_halves(Codes32 v) {
#if defined(__AVX2__)
    // Eight bytes of each half side by side.
    const __m256i quads = _mm256_permute4x64_epi64(reinterpret_cast<__m256i>(v), 0xD8);
    const __m128i order = _mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    return reinterpret_cast<Codes32>(_mm256_shuffle_epi8(quads, _mm256_broadcastsi128_si256(order)));
#else
    Codes32 r;
    for (int e = 0; e < 32; ++e) r[e] = v[(e >> 1) + 16 * (e & 1)];
    return r;
#endif
}

// fields of 16 groups

typedef uint8_t Codes16 __attribute__((vector_size(16)));

// 0xFF in byte e where bit e is set.
inline Codes16 bits16(uint16_t v) {
    const Codes16 bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
#if defined(__AVX2__)
    const __m128i order = _mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m128i bytes = _mm_shuffle_epi8(_mm_cvtsi32_si128(v), order);
    return reinterpret_cast<Codes16>((reinterpret_cast<Codes16>(bytes) & bit) == bit);
#else
    const auto a = static_cast<uint8_t>(v), b = static_cast<uint8_t>(v >> 8);
    return reinterpret_cast<Codes16>((Codes16{a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b} & bit) != 0);
#endif
}

// For 32 elements the numbers of their groups of 16. A table in memory: the compiler would build the vectors
// again for every block.
struct GroupOrders {
    uint8_t of[8][32];
};
constexpr GroupOrders make_group_orders() {
    GroupOrders orders{};
    for (int i = 0; i < 8; ++i)
        for (int e = 0; e < 32; ++e) orders.of[i][e] = static_cast<uint8_t>(2 * i + e / 16);
    return orders;
}
alignas(32) inline constexpr GroupOrders kGroupOrders = make_group_orders();

// What the extra bits add to the codes of groups of 16: `step` where the group's bit is set.
class ShiftedGroups {
  public:
    ShiftedGroups(uint16_t extra, int step) : added_(bits16(extra) & static_cast<uint8_t>(step)) {}
    Codes32 of(int i) const {  // elements 32 * i .. + 31
#if defined(__AVX2__)
        const __m256i both = _mm256_broadcastsi128_si256(reinterpret_cast<__m128i>(added_));
        const auto* order = reinterpret_cast<const __m256i*>(kGroupOrders.of[i]);
        return reinterpret_cast<Codes32>(_mm256_shuffle_epi8(both, _mm256_load_si256(order)));
#else
        Codes32 r;
        std::memset(&r, added_[2 * i], 16);
        std::memset(reinterpret_cast<uint8_t*>(&r) + 16, added_[2 * i + 1], 16);
        return r;
#endif
    }

  private:
    Codes16 added_;
};

// Nibbles of eight bytes, low ones first within a byte.
inline Codes16 nibbles_in_order(const uint8_t* p) {
    uint64_t v = load_unaligned<uint64_t>(p);
    typedef uint64_t Pair __attribute__((vector_size(16)));
    const auto low = reinterpret_cast<Codes16>(Pair{v & 0x0F0F0F0F0F0F0F0F, 0});
    const auto high = reinterpret_cast<Codes16>(Pair{v >> 4 & 0x0F0F0F0F0F0F0F0F, 0});
    return __builtin_shuffle(low, high, Codes16{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
}

// 16 two-bit fields, those of the lowest bits first.
inline Codes16 two_bits_in_order(uint32_t v) {
    typedef uint32_t Dwords __attribute__((vector_size(16)));
    const Dwords byte = Dwords{v, v >> 8, v >> 16, v >> 24};
    const Dwords fields = (byte & 3u) | (byte & 12u) << 6 | (byte & 48u) << 12 | (byte & 192u) << 18;
    return reinterpret_cast<Codes16>(fields);
}

// d[g] = scale * s[g] with signed s.
inline void scaled16(float scale, Codes16 s, float* d) {
#if defined(__AVX2__)
    const auto v = reinterpret_cast<__m128i>(s);
    const __m256 factor = _mm256_set1_ps(scale);
    const __m256 a = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v));
    const __m256 b = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(v, v)));
    _mm256_storeu_ps(d, _mm256_mul_ps(a, factor));
    _mm256_storeu_ps(d + 8, _mm256_mul_ps(b, factor));
#else
    for (int g = 0; g < 16; ++g) d[g] = scale * static_cast<float>(static_cast<int8_t>(s[g]));
#endif
}

// fields of 8 groups, one per byte

// Nibbles of four bytes: low ones first within a byte, or the low ones of all bytes first.
inline uint64_t nibble_bytes(uint32_t v) {
    uint64_t x = v;
    x = (x | x << 16) & 0x0000FFFF0000FFFF;
    x = (x | x << 8) & 0x00FF00FF00FF00FF;
    return (x | x << 4) & 0x0F0F0F0F0F0F0F0F;
}
inline uint64_t split_nibble_bytes(uint32_t v) {
    return (v & 0x0F0F0F0F) | static_cast<uint64_t>(v >> 4 & 0x0F0F0F0F) << 32;
}

inline uint64_t two_bit_bytes(uint16_t v) {
    uint64_t x = v;
    x = (x | x << 24) & 0x000000FF000000FF;
    x = (x | x << 12) & 0x000F000F000F000F;
    return (x | x << 6) & 0x0303030303030303;
}

inline uint64_t bit_bytes(uint8_t v) {
    const uint64_t bits = v * 0x0101010101010101u & 0x8040201008040201;
    return (bits + 0x7F7F7F7F7F7F7F7F) >> 7 & 0x0101010101010101;
}

// d[g] = scale * (byte g - zero) with unsigned bytes, written as one vector (see scale_lanes).
inline void scaled8(float scale, uint64_t bytes, int zero, float* d) {
#if defined(__AVX2__)
    const __m256i v = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(bytes)));
    const __m256 s = _mm256_cvtepi32_ps(_mm256_sub_epi32(v, _mm256_set1_epi32(zero)));
    _mm256_storeu_ps(d, _mm256_mul_ps(s, _mm256_set1_ps(scale)));
#else
    for (int g = 0; g < 8; ++g)
        d[g] = scale * static_cast<float>(static_cast<int>(bytes >> 8 * g & 255) - zero);
#endif
}

}  // namespace c32
}  // namespace ikpy
