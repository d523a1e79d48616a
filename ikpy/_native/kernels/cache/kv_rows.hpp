// 16 rows of blocks of the cache, a row to each lane.
#pragma once
#include "kernels/cache/kv_blocks.hpp"

#if defined(__AVX512VNNI__)

#define IKPY_CODES __attribute__((target("avx512vbmi"), always_inline)) inline
#define IKPY_CODES_LAMBDA __attribute__((target("avx512vbmi"), always_inline))

namespace ikpy {
namespace kv {

// 32 bytes at p and 32 at q.
IKPY_CODES __m512i of_two(const uint8_t* p, const uint8_t* q) {
    const auto load = [](const uint8_t* at) IKPY_CODES_LAMBDA {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    };
    return _mm512_mask_broadcast_i64x4(_mm512_castsi256_si512(load(p)), 0xf0, load(q));
}

// Four rows at a time by one pointer. The compiler must not see how the groups follow each other: it keeps
// the addresses of all 16 rows over a loop otherwise, in vector registers for want of others, and moving them
// back takes as long as the transposition.
struct RowsOfFour {
    const uint8_t* first;
    int64_t stride, thrice;
    IKPY_CODES RowsOfFour(const uint8_t* b, int64_t stride) : first(b), stride(stride), thrice(3 * stride) {}
    IKPY_CODES const uint8_t* at(int i) const { return i == 3 ? first + thrice : first + i * stride; }
    IKPY_CODES void advance() {
        first += 4 * stride;
        asm("" : "+r"(first));
    }
};

// Rows of 16 bytes, x[i]: rows i, i + 4, i + 8, i + 12.
IKPY_CODES void rows_of_sixteen(const uint8_t* b, int64_t stride, __m512i* x) {
    RowsOfFour rows(b, stride);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) x[i] = _mm512_castsi128_si512(load_levels(rows.at(i)));
    rows.advance();
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) x[i] = _mm512_inserti32x4(x[i], load_levels(rows.at(i)), 1);
    rows.advance();
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) x[i] = _mm512_inserti32x4(x[i], load_levels(rows.at(i)), 2);
    rows.advance();
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) x[i] = _mm512_inserti32x4(x[i], load_levels(rows.at(i)), 3);
}

// Bytes 4 g .. 4 g + 3 of 16 rows of 16 bytes become out[g]: lane c holds those of row c.
IKPY_CODES void transpose16(const uint8_t* b, int64_t stride, __m512i* out) {
    __m512i x[4], y[4];
    rows_of_sixteen(b, stride, x);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        y[i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
        y[2 + i] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        out[2 * i] = _mm512_unpacklo_epi64(y[2 * i], y[2 * i + 1]);
        out[2 * i + 1] = _mm512_unpackhi_epi64(y[2 * i], y[2 * i + 1]);
    }
}

// 16 rows of 32 bytes, eight results. Fewer loads than two of 16 bytes, which products of the results wait
// for.
IKPY_CODES void transpose32(const uint8_t* b, int64_t stride, __m512i* out) {
    __m512i x[8], y[8];  // x[i]: rows i and i + 4, x[4 + i]: rows 8 + i and 12 + i
    RowsOfFour rows(b, stride);
    const auto load = [](const uint8_t* p) IKPY_CODES_LAMBDA {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    };
#pragma GCC unroll 2
    for (int m = 0; m < 8; m += 4) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) x[m + i] = _mm512_castsi256_si512(load(rows.at(i)));
        rows.advance();
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) x[m + i] = _mm512_mask_broadcast_i64x4(x[m + i], 0xf0, load(rows.at(i)));
        if (m == 0) rows.advance();
    }
#pragma GCC unroll 2
    for (int m = 0; m < 8; m += 4) {
        __m512i z[4];
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            z[i] = _mm512_unpacklo_epi32(x[m + 2 * i], x[m + 2 * i + 1]);
            z[2 + i] = _mm512_unpackhi_epi32(x[m + 2 * i], x[m + 2 * i + 1]);
        }
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            y[m + 2 * i] = _mm512_unpacklo_epi64(z[2 * i], z[2 * i + 1]);
            y[m + 2 * i + 1] = _mm512_unpackhi_epi64(z[2 * i], z[2 * i + 1]);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        out[i] = _mm512_shuffle_i32x4(y[i], y[4 + i], 0x88);
        out[4 + i] = _mm512_shuffle_i32x4(y[i], y[4 + i], 0xdd);
    }
}

// The first one or two of these results. Loads take a third of the time of a gather on Zen 5.
IKPY_CODES void first_of_sixteen(const uint8_t* b, int64_t stride, __m512i* out, int n) {
    __m512i x[4];
    rows_of_sixteen(b, stride, x);
    const __m512i low = _mm512_unpacklo_epi32(x[0], x[1]), high = _mm512_unpacklo_epi32(x[2], x[3]);
    out[0] = _mm512_unpacklo_epi64(low, high);
    if (n > 1) out[1] = _mm512_unpackhi_epi64(low, high);
}

}  // namespace kv
}  // namespace ikpy

#endif
