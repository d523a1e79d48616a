// Row-interleaved types as bf16, four rows of a group at a time: left operands of tile products.
//
// Only what is stored differs from the plain type: codes and scales are brought into the order of rows, and
// then written as those of the plain type are, so both layouts give the same bits. Of four rows and 32
// columns that takes two permutations more than plain rows do; the scales of four rows are decoded together.
//
// QuadLayout<U> of an unpacker U (kernels/matmul/interleaved_product.hpp) has
//   Plain                      the unpacker of the plain type, or of one with the same values
//   static constexpr int column(int v, int j)   first of the four columns of 16-byte lane j of vector v
//   static void codes(const uint8_t* block, int quad, int step, __m512i* q)   two vectors, 32 columns from
//       column 32 * step of the block on, dword r of a lane belonging to row 4 * quad + r of the group:
//       numbers of the plain type's levels from bit kNumberPlace on (other bits undefined), or codes less
//       kZero
//   or, where these numbers are fields that bits can be taken from in the order of columns,
//   using Fields = F           with kSteps steps of 32 columns to 64 bytes and
//   static __m512i kept(const uint8_t* block, int quad, int step)   these, 16 bytes of every row
//   static __m512i row(const uint8_t* bytes, int step)   those of a row for a step
//   static constexpr int bit(int column)   where a field starts in the quadword of bytes 2 * column, + 1
//   static void scales(const uint8_t* block, int quad, StoredQuad* out)   of 256 columns, times kUnit
#pragma once
#include <cstring>

#include "kernels/matmul/bf16_rows.hpp"

namespace ikpy {

template <class U>
struct QuadLayout;

#if defined(__AVX512VNNI__) && defined(__linux__)

namespace bf16_rows {

// Dwords of rows 2 * Pair and 2 * Pair + 1 in two vectors of codes.
template <class L, int Pair>
inline constexpr Lanes16 kColumnOrder{[](int i) {
    for (int at = 0; at < 8; ++at)
        if (L::column(at / 4, at % 4) == 4 * (i % 8)) return 4 * at + 2 * Pair + i / 8;
    return -1;
}};

// What is kept of the codes.
template <class L, class = void>
struct KeptCodes {
    static constexpr int kSteps = 1;
    template <int R>
    using Row = RowOfQuad<R>;

    static IKPY_VBMI_INLINE void keep(const uint8_t* p, int quad, int step, uint8_t (*out)[64]) {
        __m512i q[2];
        L::codes(p, quad, step, q);
        _mm512_store_si512(out[0], _mm512_permutex2var_epi32(q[0], kColumnOrder<L, 0>.load(), q[1]));
        _mm512_store_si512(out[1], _mm512_permutex2var_epi32(q[0], kColumnOrder<L, 1>.load(), q[1]));
    }
};

// Fields: one permutation for four rows, and the bits of every row are taken where the table wants them, for
// both bytes of a value.
template <class L>
struct KeptCodes<L, std::void_t<typename L::Fields>> {
    using F = typename L::Fields;
    static constexpr int kSteps = F::kSteps, kPlace = kNumberPlace<typename L::Plain>;
    static constexpr Bytes64 kBits{[](int i) { return (F::bit(i / 2) - kPlace) & 63; }};

    template <int R>
    struct Row {
        const StoredQuad& quad;
        template <int Step>
        IKPY_VBMI_INLINE __m512i twice() const {
            return _mm512_multishift_epi64_epi8(kBits.load(),
                                                F::row(quad.q[Step / kSteps][0] + 16 * R, Step % kSteps));
        }
        GroupScales groups() const { return {quad.d[R], quad.m[R]}; }
    };

    static IKPY_VBMI_INLINE void keep(const uint8_t* p, int quad, int step, uint8_t (*out)[64]) {
        _mm512_store_si512(out[0], F::kept(p, quad, step));
    }
};

// Codes and scales of 256 columns.
template <class U>
IKPY_VBMI_INLINE void keep_quad(const uint8_t* p, int quad, StoredQuad* out) {
    using L = QuadLayout<U>;
    constexpr int kBlockSteps = U::kBlock / 32, kShared = KeptCodes<L>::kSteps;
    L::scales(p, quad, out);
#pragma GCC unroll 8
    for (int s = 0; s < kSteps; s += kShared)
        KeptCodes<L>::keep(p + s / kBlockSteps * U::kBlockBytes, quad, s % kBlockSteps, out->q[s / kShared]);
}

// n < 256 columns at the end of a row; what lies behind them is not multiplied.
template <class U>
[[gnu::noinline]] IKPY_VBMI void keep_quad_tail(const uint8_t* p, int quad, int64_t n, StoredQuad* out) {
    uint8_t blocks[kChunk / U::kBlock * U::kBlockBytes] = {};
    std::memcpy(blocks, p, static_cast<size_t>(n / U::kBlock * U::kBlockBytes));
    keep_quad<U>(blocks, quad, out);
}

template <class L, size_t... R>
IKPY_VBMI_INLINE void write_quad(const StoredQuad& quad, uint16_t* out, std::index_sequence<R...>) {
    (write<typename L::Plain>(typename KeptCodes<L>::template Row<R>{quad}, out + 32 * R), ...);
}

}  // namespace bf16_rows

// AheadFn of a type.
template <class U>
IKPY_VBMI void fill_bf16_quads(const RowBlock& rows, int h, int first, int64_t k0, uint16_t* tiles) {
    using namespace bf16_rows;
    static_assert(kAheadRows == 4);
    const uint8_t* p =
        rows.group(h, first, U::kRows) + RowHeader<U>::kBytes + k0 / U::kBlock * U::kBlockBytes;
    const int number = first % U::kRows / 4;
    prefetch_chunk<U, U::kRows / 4>(p, rows.to_next_block(), number);
    StoredQuad quad;
    if (rows.n_in - k0 >= kChunk) {
        keep_quad<U>(p, number, &quad);
    } else {
        keep_quad_tail<U>(p, number, rows.n_in - k0, &quad);
    }
    // As for plain rows: scales shall be spread by loads.
    asm volatile("" : "+m"(quad));
    write_quad<QuadLayout<U>>(quad, tiles + (h * kHalfRows + first) * 32, std::make_index_sequence<4>());
}

#else

template <class U>
void fill_bf16_quads(const RowBlock&, int, int, int64_t, uint16_t*) {}

#endif

}  // namespace ikpy
