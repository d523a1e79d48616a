// Codes of types made of nibbles, with tables of levels or upper bits or neither, in the order of
// kernels/gemv/gemv_lanes.hpp.
#pragma once
#include "kernels/gemv/gemv_lanes.hpp"
#include "unpack/level_tables.hpp"
#include "unpack/wide.hpp"

#if defined(__AVX512VNNI__)

namespace ikpy {
namespace lanes {

// q[v] = code(fields of vector v), which L makes of what `from` holds.
template <class L, class Code, class... From>
IKPY_VBMI_INLINE void each_vector(Code code, __m512i* q, From... from) {
    q[0] = code(L::template fields<0>(from...));
    q[1] = code(L::template fields<1>(from...));
    q[2] = code(L::template fields<2>(from...));
    q[3] = code(L::template fields<3>(from...));
}

// Byte permutations look at the low six bits of an index: a table that is repeated needs no masks.
struct Levels {
    alignas(64) uint8_t of[64];
    template <size_t N>
    constexpr Levels(const uint8_t (&table)[N], int n) : of() {
        for (int i = 0; i < 64; ++i) of[i] = table[i % n];
    }
    IKPY_VBMI_INLINE __m512i at(__m512i index) const {
        return _mm512_permutexvar_epi8(index, _mm512_load_si512(of));
    }
};

inline constexpr Levels kLevels4(kIq4Codes, 16), kLevels5(kIq5Codes, 32), kLevels6(kIq6Codes, 64);

// 8 + 8 bytes of eight blocks, blocks i and 4 + i next to each other. first, last: blocks 0 .. 3 and 4 .. 7.
struct Bytes16 {
    __m512i part[2];
    IKPY_VBMI_INLINE explicit Bytes16(const __m512i* parts) : part{parts[0], parts[1]} {}
    IKPY_VBMI_INLINE Bytes16(__m512i first, __m512i last)
        : part{_mm512_unpacklo_epi64(first, last), _mm512_unpackhi_epi64(first, last)} {}

    // Vector v in the order of codes: low nibbles of both parts, then high ones; other bits mean nothing.
    IKPY_VBMI_INLINE __m512i nibbles(int v) const {
        return v < 2 ? part[v] : _mm512_srli_epi16(part[v - 2], 4);
    }
};

// Of eight blocks of `Size` bytes with 16 bytes of nibbles at `At`.
template <int Size, int At>
IKPY_VBMI_INLINE Bytes16 bytes_of_blocks(const uint8_t* p) {
    const auto four = [](const uint8_t* q) __attribute__((always_inline)) {
        return wide::lanes_abcd(q, q + Size, q + 2 * Size, q + 3 * Size);
    };
    return {four(p + At), four(p + 4 * Size + At)};
}

IKPY_VBMI_INLINE Bytes16 load_128(const uint8_t* p) {
    return {_mm512_loadu_si512(p), _mm512_loadu_si512(p + 64)};
}

// Blocks of 32 weights whose bytes hold the first 16 in low nibbles, the last 16 in high ones.
struct HalvesOfBlocks {
    static constexpr int first(int v, int q) { return 32 * (q / 2 + 4 * (q % 2)) + 8 * v; }
    template <class Levels>
    IKPY_VBMI_INLINE static void look_up(const Bytes16& bytes, const Levels& levels, __m512i* q) {
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) q[v] = levels.at(bytes.nibbles(v));
    }
    IKPY_VBMI_INLINE static void low_nibbles(const Bytes16& bytes, __m512i* q) {
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) q[v] = wide::low_nibbles(bytes.nibbles(v));
    }
};

// Blocks of 64 weights whose 32 bytes hold the first 32 in low nibbles, the last 32 in high ones. Upper bits
// of the indices are bits of other bytes.
struct HalvesOfPairs {
    static constexpr int first(int v, int q) {
        return 128 * (q % 2) + 64 * (q / 4) + 32 * (v / 2) + 16 * (q / 2 % 2) + 8 * (v % 2);
    }
    // bits[i]: the upper bits for part i, those of blocks in their places from bit 4 on after rotating
    // quadwords to the left by turns[low or high nibbles].
    IKPY_VBMI_INLINE static void look_up(const Bytes16& bytes, const __m512i* bits, const __m512i* turns,
                                         const Levels& levels, __m512i* q) {
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) {
            constexpr int kLowOrUpper = 0xCA;  // of the first operand's bits
            const __m512i upper = _mm512_rolv_epi64(bits[v % 2], turns[v / 2]);
            q[v] =
                levels.at(_mm512_ternarylogic_epi32(wide::bytes(15), bytes.nibbles(v), upper, kLowOrUpper));
        }
    }
};

// Codes of blocks of 32 weights with `N` upper bits each, those of vector v from bit from[v] of the bytes in
// `bits` on.
template <int N>
IKPY_VBMI_INLINE void join_bits(const Bytes16& bytes, __m512i bits, const int (&from)[4], __m512i* q) {
    // The 8 x 8 bits that move some of a byte to bit 4 and drop all others.
    const auto moves = [](int bit) __attribute__((always_inline)) {
        int64_t rows = 0;
        for (int i = 0; i < N; ++i) rows |= int64_t{1} << (8 * (3 - i) + bit + i);
        return _mm512_set1_epi64(rows);
    };
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
        const __m512i upper = _mm512_gf2p8affine_epi64_epi8(bits, moves(from[v]), 0);
        q[v] = _mm512_ternarylogic_epi32(wide::bytes(15), bytes.nibbles(v), upper, 0xCA);
    }
}

// Bit b of byte j of the result: bit j of byte 7 - b, in every quadword.
IKPY_VBMI_INLINE __m512i transposed_bits(__m512i v) {
    return _mm512_gf2p8affine_epi64_epi8(_mm512_set1_epi64(static_cast<int64_t>(0x8040201008040201)), v, 0);
}

}  // namespace lanes
}  // namespace ikpy

#endif
