// What an unpacker delivers: 256 codes of one row in natural order with a scale (and offset) per group.
//
// An unpacker is a struct with
//   kType, kGroup (16 or 32), kBlock (elements per block), kBlockBytes
//   kZero
//       the code of weight 0 of symmetric types, 0 for types with an offset per group
//   static void block(const uint8_t* p, uint8_t* codes, float* d, float* m)
//       one block, plain C++
// and may have
//   static Codes512 wide(const uint8_t* p)
//       256 elements, AVX-512
//   kHeaderBytes, static float row_scale(const uint8_t* row)
//       a header before the blocks of a row and the factor of all its weights
//   kUnitScales
//       all d of groups of 32 are 1, the scale is that of the row
//   kStep, static Codes512 unshifted(const uint8_t* p)
//       AVX-512, for types with a second level table that is the first one moved by kStep: codes of the first
//       table and the groups that use the second
//   kRows (4 or 8)
//       row-interleaved type: p is the start of a group, and block() and row_scale() take the number of the
//       row inside the group as second argument; kBlockBytes covers all rows of the group
//   kPairs, static Codes512 halves(const uint8_t* p)
//       AVX-512, groups of 32 only: the codes of kernels/gemv/gemv_halves.hpp, unshifted if there is a kStep
//   kLevels, kLevelCount (4, 8, 16, or 32 with groups of 32), static Codes512 level_numbers(const uint8_t* p)
//       AVX-512, types of few codes: these, and their numbers instead of codes, unshifted if there is a
//       kStep. Of 16 levels: template <int Place = 0>, numbers at bit Place, other bits undefined if that is
//       not 0
//   kLow, kHigh
//       the smallest and the largest code of types that do not use all bytes (up to 127 if kZero is not 128)
// Types whose codes times integer scales fit into a byte have a specialization of IntegerScaled below.
// A weight is d * (code - kZero) when kZero > 0, else d * code + m. Only codes with kZero = 128 exceed 127.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/simd/half_rows.hpp"

namespace ikpy {

constexpr int kChunk = 256;  // elements unpacked at a time

struct Chunk {
    alignas(64) uint8_t codes[kChunk];
    alignas(64) float d[16];
    alignas(64) float m[16];
};

template <class U, class = void>
struct RowsOf {
    static constexpr int kCount = 1;
};
template <class U>
struct RowsOf<U, std::void_t<decltype(U::kRows)>> {
    static constexpr int kCount = U::kRows;
};

template <class U, class = void>
struct RowHeader {
    static constexpr int kBytes = 0;
};
template <class U>
struct RowHeader<U, std::void_t<decltype(U::kHeaderBytes)>> {
    static constexpr int kBytes = U::kHeaderBytes * RowsOf<U>::kCount;
    static float scale(const uint8_t* group, [[maybe_unused]] int k) {
        if constexpr (RowsOf<U>::kCount > 1) {
            return U::row_scale(group, k);
        } else {
            return U::row_scale(group);
        }
    }
};

template <class U, class = void>
struct StepOf {
    static constexpr int kStep = 0;
};
template <class U>
struct StepOf<U, std::void_t<decltype(U::kStep)>> {
    static constexpr int kStep = U::kStep;
};

template <class U, class = void>
struct CodeRange {
    static constexpr int kLow = 0, kHigh = U::kZero == 128 ? 255 : 127;
};
template <class U>
struct CodeRange<U, std::void_t<decltype(U::kHigh)>> {
    static constexpr int kLow = U::kLow, kHigh = U::kHigh;
};

// How many sums of two products of codes of at most `span` can be added in signed 16 bits: activations are at
// most 127.
constexpr int exact_pairs(int span) { return 32767 / (2 * 127 * span); }

// Specializations, for tiers with dot products of bytes, have
//   Unpack
//       the unpacker of the type with d of groups of 16 without the factor of the block: the integers
//   static float factor(const uint8_t* block, int row)
//       that factor, of a row of a group
//   static float offset_factor(const uint8_t* block, int row)
//       of types with offsets: what the integers (up to 15) of the offsets are multiplied by
//   kLowScale, kHighScale
//       the smallest and the largest integer
template <class U>
struct IntegerScaled;
template <class U, class = void>
struct HasIntegerScales : std::false_type {};
template <class U>
struct HasIntegerScales<U, std::void_t<typename IntegerScaled<U>::Unpack>> : std::true_type {};

template <class U, class = void>
struct UnitScales : std::false_type {};
template <class U>
struct UnitScales<U, std::void_t<decltype(U::kUnitScales)>> : std::true_type {};

// Unpacks n blocks of row k of a group.
template <class U>
inline void unpack_blocks(const uint8_t* p, [[maybe_unused]] int k, int n, Chunk* out) {
    constexpr int kGroups = U::kBlock / U::kGroup;
#pragma GCC unroll 8
    for (int b = 0; b < n; ++b) {
        const uint8_t* block = p + b * U::kBlockBytes;
        uint8_t* codes = out->codes + b * U::kBlock;
        float *d = out->d + b * kGroups, *m = out->m + b * kGroups;
        if constexpr (RowsOf<U>::kCount > 1) {
            U::block(block, k, codes, d, m);
        } else {
            U::block(block, codes, d, m);
        }
    }
}

// 256 elements. Loops over whole chunks have no use for the calls of unpack_chunk(), which would keep their
// sums in memory.
template <class U>
inline void unpack_whole_chunk(const uint8_t* p, int k, Chunk* out) {
    unpack_blocks<U>(p, k, kChunk / U::kBlock, out);
}

// Up to 256 elements; groups beyond n get zero scales.
template <class U>
inline void unpack_chunk(const uint8_t* p, int k, int64_t n, Chunk* out) {
    if (n >= kChunk) return unpack_whole_chunk<U>(p, k, out);
    const int n_blocks = static_cast<int>(n / U::kBlock);
    unpack_blocks<U>(p, k, n_blocks, out);
    for (int e = n_blocks * U::kBlock; e < kChunk; ++e) out->codes[e] = 0;
    for (int g = n_blocks * (U::kBlock / U::kGroup); g < 16; ++g) out->d[g] = out->m[g] = 0.0f;
}

#if defined(__AVX512VNNI__)

// The four groups of 32 that share two vectors of halves: i-th fours, or every other one from group i on.
enum class Pairs { kConsecutive, kAlternating };

struct Codes512 {
    __m512i q[4];
    __m512 d;  // lane g = group g; upper 8 lanes unused for groups of 32
    __m512 m;
    __mmask16 shifted;  // groups whose codes lack the step; set by unshifted() only
};

template <class U, class = void>
struct HasWide : std::false_type {};
template <class U>
struct HasWide<U, std::void_t<decltype(&U::wide)>> : std::true_type {};

inline Codes512 load_chunk(const Chunk& c) {
    Codes512 r;
    for (int i = 0; i < 4; ++i) r.q[i] = _mm512_load_si512(c.codes + 64 * i);
    r.d = _mm512_load_ps(c.d);
    r.m = _mm512_load_ps(c.m);
    r.shifted = 0;
    return r;
}

template <class U>
inline __m512i centred_codes(__m512i q) {
    constexpr bool kShift = U::kZero > 0 && U::kZero < 128;
    return kShift ? _mm512_add_epi8(q, _mm512_set1_epi8(static_cast<char>(128 - U::kZero))) : q;
}

// Unpacks n < 256 elements at the end of a row: the blocks are moved to where bytes can be read behind them.
// unpack: U::wide or U::halves.
template <class U>
inline Codes512 unpack_short(Codes512 (*unpack)(const uint8_t*), const uint8_t* p, int64_t n) {
    alignas(64) uint8_t blocks[kChunk / U::kBlock * U::kBlockBytes] = {};
    std::memcpy(blocks, p, static_cast<size_t>(n / U::kBlock * U::kBlockBytes));
    Codes512 r = unpack(blocks);
    const auto groups = static_cast<__mmask16>((1 << (n / U::kGroup)) - 1);
    r.d = _mm512_maskz_mov_ps(groups, r.d);
    if (U::kZero == 0) r.m = _mm512_maskz_mov_ps(groups, r.m);
    return r;
}

template <class U>
inline Codes512 unpack_tail(const uint8_t* p, int k, int64_t n) {
    if constexpr (HasWide<U>::value && RowsOf<U>::kCount == 1 && U::kBlock < kChunk)
        if (n < kChunk) return unpack_short<U>(U::wide, p, n);
    Chunk c;
    unpack_chunk<U>(p, k, n, &c);
    return load_chunk(c);
}

template <class U>
inline Codes512 unpack_full(const uint8_t* p, [[maybe_unused]] int k) {
    if constexpr (HasWide<U>::value && RowsOf<U>::kCount > 1) {
        return U::wide(p, k);
    } else if constexpr (HasWide<U>::value) {
        return U::wide(p);
    } else {
        return unpack_tail<U>(p, k, kChunk);
    }
}

#endif

}  // namespace ikpy
