// What the interleaved layouts have in common (quant-formats.md#interleaved-building-blocks): fields of four
// columns of a quad of rows to codes, lists of scales to vectors.
#pragma once
#include "kernels/matmul/interleaved_product.hpp"
#include "kernels/matmul/interleaved_scales.hpp"
#include "unpack/level_tables.hpp"

namespace ikpy::interleaved {

// Bits shifted in from the neighbouring byte must be masked away afterwards.
inline Lanes shift_right(Lanes v, int n) {
    return reinterpret_cast<Lanes>(reinterpret_cast<LaneWords>(v) >> static_cast<uint16_t>(n));
}
inline Lanes shift_left(Lanes v, int n) {
    return reinterpret_cast<Lanes>(reinterpret_cast<LaneWords>(v) << static_cast<uint16_t>(n));
}

// The bits of `mask` after bit `from` has moved to bit `to`.
inline Lanes moved(Lanes v, int from, int to, uint8_t mask) {
    return (from > to ? shift_right(v, from - to) : shift_left(v, to - from)) & mask;
}

inline Lanes low_nibbles(Lanes v) { return v & 15; }
inline Lanes high_nibbles(Lanes v) { return shift_right(v, 4) & 15; }

// 0xFF where bit n is set.
inline Lanes bit_mask(Lanes v, int n) {
    const uint8_t bit = static_cast<uint8_t>(1 << n);
    return reinterpret_cast<Lanes>((v & bit) != 0);
}

// `yes` where bit n of the byte of v is set.
inline Lanes select_by_bit(Lanes v, int n, Lanes yes, Lanes no) {
#if defined(__AVX512VNNI__)
    const __mmask64 set =
        _mm512_test_epi8_mask(reinterpret_cast<__m512i>(v), _mm512_set1_epi8(static_cast<char>(1 << n)));
    return reinterpret_cast<Lanes>(
        _mm512_mask_mov_epi8(reinterpret_cast<__m512i>(no), set, reinterpret_cast<__m512i>(yes)));
#elif defined(__AVX2__)
    // Blends look at the top bit only.
    return reinterpret_cast<Lanes>(_mm256_blendv_epi8(reinterpret_cast<__m256i>(no),
                                                      reinterpret_cast<__m256i>(yes),
                                                      reinterpret_cast<__m256i>(shift_left(v, 7 - n))));
#else
    const uint8_t bit = static_cast<uint8_t>(1 << n);
    return (v & bit) != 0 ? yes : no;
#endif
}

// table[v], v < 16.
inline Lanes lookup(const uint8_t* table, Lanes v) {
#if defined(__AVX512VNNI__)
    const __m128i t = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return reinterpret_cast<Lanes>(
        _mm512_shuffle_epi8(_mm512_broadcast_i32x4(t), reinterpret_cast<__m512i>(v)));
#elif defined(__AVX2__)
    const __m128i t = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return reinterpret_cast<Lanes>(
        _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(t), reinterpret_cast<__m256i>(v)));
#else
    Lanes r;
    for (int i = 0; i < 16 * kQuads; ++i) r[i] = table[v[i]];
    return r;
#endif
}

// N4: calls f(column, low nibbles) and f(column, high nibbles) for 32 columns.
template <class Q, class F>
inline void n4(const Q& q, int offset, F f) {
    constexpr int kColumn[4] = {0, 16, 4, 20};
#pragma GCC unroll 4
    for (int l = 0; l < 4; ++l) {
        const Lanes v = q.bytes(offset + 16 * l);
        f(kColumn[l], low_nibbles(v));
        f(kColumn[l] + 8, high_nibbles(v));
    }
}

// P4: calls f(column, two bits) for 32 columns.
template <class Q, class F>
inline void p4(const Q& q, int offset, F f) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
        const Lanes v = q.bytes(offset + 16 * h);
#pragma GCC unroll 4
        for (int t = 0; t < 4; ++t) f(16 * h + 4 * t, shift_right(v, 2 * t) & 3);
    }
}

// Number of the bit that belongs to columns 4 * i .. + 3 in B4 bytes.
struct BitOrder {
    int of[8];
};
constexpr BitOrder kQ5_0Bits = {{0, 2, 4, 6, 1, 3, 5, 7}};
constexpr BitOrder kQ5_KBits = {{0, 2, 1, 3, 4, 6, 5, 7}};
constexpr BitOrder kIQ5_KBits = {{0, 4, 1, 5, 2, 6, 3, 7}};

// scales

typedef float Four __attribute__((vector_size(16)));
typedef uint8_t Bytes __attribute__((vector_size(16)));

inline Four halves(const uint8_t* p) {
#if defined(__F16C__)
    return reinterpret_cast<Four>(_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
    return Four{load_f16(p), load_f16(p + 2), load_f16(p + 4), load_f16(p + 6)};
#endif
}

inline Four integers(const int8_t* p) {
#if defined(__SSE4_1__)
    return reinterpret_cast<Four>(
        _mm_cvtepi32_ps(_mm_cvtepi8_epi32(_mm_cvtsi32_si128(load_unaligned<int32_t>(p)))));
#else
    return Four{static_cast<float>(p[0]), static_cast<float>(p[1]), static_cast<float>(p[2]),
                static_cast<float>(p[3])};
#endif
}

inline void put(float* at, Four v) { std::memcpy(at, &v, sizeof v); }

// The same scale for all groups.
inline void constant_scales(Four d, int n_groups, float* at) {
    for (int g = 0; g < n_groups; ++g) put(at + g * kHalfRows, d);
}

// d times integers at s + g * stride.
template <int Groups>
inline void scaled(Four d, const int8_t* s, int stride, float* at) {
#pragma GCC unroll 16
    for (int g = 0; g < Groups; ++g) put(at + g * kHalfRows, d * integers(s + g * stride));
}

#if defined(__AVX2__)
template <int Groups>
inline void scaled(Four d, const int8_t* s, int stride, const typename ScaleLanes<Groups>::Quad& at) {
    at.take(reinterpret_cast<__m128>(d), s, stride);
}
#endif

// Bytes below 16 to the upper half; four additions if it were written as a shift of bytes.
template <class V>
inline V to_high_nibbles(V v) {
    typedef uint16_t Words __attribute__((vector_size(sizeof(V))));
    return reinterpret_cast<V>(reinterpret_cast<Words>(v) << static_cast<uint16_t>(4));
}

inline void store(int8_t* at, Bytes v) { std::memcpy(at, &v, sizeof v); }

// The bytes of one group of rows, read like those of Quads.
struct GroupBytes {
    const uint8_t* p;
    Bytes bytes(int offset) const { return load_unaligned<Bytes>(p + offset); }
};

// 64 nibbles: entry p is in byte p % 32, nibble p / 32. 16 of them; source: GroupBytes or Quads<4>.
template <class S>
inline auto nibbles(const S& source, int low, int part) {
    const auto v = source.bytes(low + 16 * (part & 1));
    return part < 2 ? v & 15 : v >> 4;
}

// S8 and the scales of IQ4_XS_R8: 64 six-bit values less 32, 16 of them.
template <class S>
inline auto six_bit_scales(const S& source, int low, int high, int part) {
    const auto h = source.bytes(high) >> static_cast<uint8_t>(2 * part) & 3;
    return (nibbles(source, low, part) | to_high_nibbles(h)) - 32;
}

// scales() of unpackers whose scale_integers(source, part) are the integers of four groups. rows: the numbers
// they are multiplied with.
template <class U, class At>
inline void scales_of_parts(const uint8_t* p, Four rows, const At& d) {
    constexpr int kGroups = U::kBlock / U::kGroup;
    int8_t s[4 * kGroups];
    for (int part = 0; part < kGroups / 4; ++part)
        store(s + 16 * part, U::scale_integers(GroupBytes{p}, part));
    scaled<kGroups>(rows, s, 4, d);
}

}  // namespace ikpy::interleaved
