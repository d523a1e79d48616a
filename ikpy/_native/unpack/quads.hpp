// Building blocks of the layouts of kernels/matmul/bf16_quads.hpp (quant-formats.md#interleaved-rows): codes
// and scales of four interleaved rows.
#pragma once
#include "kernels/matmul/bf16_quads.hpp"
#include "kernels/simd/byte_permutes.hpp"
#include "unpack/lanes_interleaved.hpp"

#if defined(__AVX512VNNI__) && defined(__linux__)

namespace ikpy::quads {

using bf16_rows::StoredQuad;

// codes

// Four pieces of 16 bytes, four columns of every row of a quad; the quads of a group take turns.
template <int R>
IKPY_VBMI_INLINE __m512i pieces(const uint8_t* p, int quad) {
    if constexpr (R == 4) return row_groups::load_once(p);
    if constexpr (R == 8) {
        const __m512i even = _mm512_setr_epi64(0, 1, 4, 5, 8, 9, 12, 13);
        const __m512i order = _mm512_add_epi64(even, _mm512_set1_epi64(2 * quad));
        return _mm512_permutex2var_epi64(_mm512_loadu_si512(p), order, _mm512_loadu_si512(p + 64));
    }
    p += 16 * quad;
    return wide::lanes_abcd(p, p + 64, p + 128, p + 192);
}

// The dwords of pieces A, B, C and D of every row of a quad next to each other.
template <int A, int B, int C, int D>
IKPY_VBMI_INLINE __m512i rows_of(__m512i v) {
    static constexpr bf16_rows::Lanes16 kOrder([](int i) {
        constexpr int kPiece[4] = {A, B, C, D};
        return 4 * kPiece[i % 4] + i / 4;
    });
    return _mm512_permutexvar_epi32(kOrder.load(), v);
}

// Orders of the pieces with nibbles: N4, halves of 32 columns, and halves of 8. rows() brings the pieces with
// every other four columns into one half of a row's bytes; bit(): where a nibble starts in such a half.
struct FourTurns {
    static constexpr int column(int v, int j) { return 16 * (j % 2) + 4 * (j / 2) + 8 * v; }
    static IKPY_VBMI_INLINE __m512i rows(__m512i v) { return rows_of<0, 1, 2, 3>(v); }
    static constexpr int bit(int column) {
        return 32 * (column / 16) + 8 * (column % 4) + 4 * (column / 8 % 2);
    }
};
struct HalvesOf32 {
    static constexpr int column(int v, int j) { return 16 * v + 4 * j; }
    static IKPY_VBMI_INLINE __m512i rows(__m512i v) { return rows_of<0, 2, 1, 3>(v); }
    static constexpr int bit(int column) {
        return 32 * (column / 8 % 2) + 8 * (column % 4) + 4 * (column / 16);
    }
};
struct HalvesOf8 {
    static constexpr int column(int v, int j) { return 8 * j + 4 * v; }
};

// Nibbles at `At`. numbers(): from bit Place on; bits above and below them mean nothing.
template <class Order, int R, int At>
struct Nibbles : Order {
    static constexpr int kBits = 4, kSteps = 1;
    template <int Place>
    static IKPY_VBMI_INLINE void numbers(const uint8_t* p, int quad, int step, __m512i* q) {
        const __m512i v = pieces<R>(p + At + 16 * R * step, quad);
        q[0] = Place > 0 ? _mm512_slli_epi16(v, Place) : v;
        q[1] = _mm512_srli_epi16(v, 4 - Place);
    }
    static IKPY_VBMI_INLINE __m512i kept(const uint8_t* p, int quad, int step) {
        return Order::rows(pieces<R>(p + At + 16 * R * step, quad));
    }
    static IKPY_VBMI_INLINE __m512i row(const uint8_t* bytes, int) { return row_groups::four_times16(bytes); }
};

// P4: two bits of 32 bytes.
template <int At>
struct Pairs {
    static constexpr int kBits = 2, kSteps = 2;
    static constexpr int column(int v, int j) { return 16 * (j % 2) + 8 * v + 4 * (j / 2); }
    template <int Place>
    static IKPY_VBMI_INLINE void numbers(const uint8_t* p, int, int step, __m512i* q) {
        const __m512i v = row_groups::twice32(p + At + 32 * step);
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            const auto turn = [i](int j) {
                const int64_t count = (Place - 4 * i - 2 * (j / 2)) & 31;
                return count | count << 32;
            };
            q[i] = _mm512_rolv_epi32(
                v, _mm512_setr_epi64(turn(0), turn(0), turn(1), turn(1), turn(2), turn(2), turn(3), turn(3)));
        }
    }
    static IKPY_VBMI_INLINE __m512i kept(const uint8_t* p, int, int step) {
        return rows_of<0, 1, 2, 3>(_mm512_loadu_si512(p + At + 32 * step));
    }
    static IKPY_VBMI_INLINE __m512i row(const uint8_t* bytes, int step) {
        return _mm512_set1_epi64(load_unaligned<int64_t>(bytes + 8 * step));
    }
    static constexpr int bit(int column) {
        return 32 * (column / 16) + 8 * (column % 4) + 2 * (column / 4 % 4);
    }
};

// Fields of F with `N` bits on top of them, those of a column from bit O::bit(column) of 16 * N bytes at `At`
// on. All other bits are zero.
template <class F, int N, class O, int At>
struct UpperBits : F {
    template <int Place>
    struct Moves {
        alignas(64) int64_t of[2][8] = {};
        constexpr Moves() {
            for (int v = 0; v < 2; ++v)
                for (int q = 0; q < 8; ++q)
                    for (int i = 0; i < N; ++i)
                        of[v][q] |= int64_t{1}
                                    << (8 * (7 - Place - F::kBits - i) + O::bit(F::column(v, q / 2)) + i);
        }
    };
    template <int Place>
    static IKPY_VBMI_INLINE void numbers(const uint8_t* p, int quad, int step, __m512i* q) {
        static constexpr Moves<Place> kMoves;
        const __m512i upper =
            N == 1 ? row_groups::four_times16(p + At + 16 * step) : row_groups::twice32(p + At + 32 * step);
        const __m512i lower = wide::bytes(((1 << F::kBits) - 1) << Place);
        F::template numbers<Place>(p, quad, step, q);
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
            constexpr int kLowOrUpper = 0xCA;  // of the first operand's bits
            const __m512i high = _mm512_gf2p8affine_epi64_epi8(upper, _mm512_load_si512(kMoves.of[v]), 0);
            q[v] = _mm512_ternarylogic_epi32(lower, q[v], high, kLowOrUpper);
        }
    }
};

// Numbers of the levels of P.
template <class P, class N>
struct LevelCodes : N {
    using Plain = P;
    static IKPY_VBMI_INLINE void codes(const uint8_t* p, int quad, int step, __m512i* q) {
        N::template numbers<bf16_rows::kNumberPlace<P>>(p, quad, step, q);
    }
};

// The same if fields of F are all of them.
template <class P, class F>
struct LevelFields {
    using Plain = P;
    using Fields = F;
};

// Numbers that are codes of P, of which the code of weight 0 is taken away.
template <class P, class N>
struct CentredCodes : N {
    using Plain = P;
    static IKPY_VBMI_INLINE void codes(const uint8_t* p, int quad, int step, __m512i* q) {
        N::template numbers<0>(p, quad, step, q);
        for (int v = 0; v < 2; ++v) q[v] = _mm512_sub_epi8(q[v], wide::bytes(P::kZero));
    }
};

// Bytes at `At`: codes less 128 after the bits of `Flip` have changed.
template <int R, int At, int Flip>
struct Bytes : HalvesOf32 {
    using Plain = UnpackQ8_0;
    static IKPY_VBMI_INLINE void codes(const uint8_t* p, int quad, int step, __m512i* q) {
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
            q[v] = pieces<R>(p + At + R * (32 * step + 16 * v), quad);
            if (Flip != 0) q[v] = _mm512_xor_si512(q[v], wide::bytes(Flip));
        }
    }
};

// scales

// Signed integers [group][R rows], 64 or (not Whole) 32 of them, to [4 rows][16]: of groups of 32 with minima
// behind the scales, eight of the former and eight of the latter. What has not been stored at once is not
// loaded at once either: that would wait for the stores.
template <int R, bool Whole>
IKPY_VBMI_INLINE __m512i by_row(const int8_t* integers, int quad) {
    static constexpr Bytes64 kOrder(
        [](int i) { return R == 8 ? 8 * (i % 8) + i / 16 : 4 * (i % (Whole ? 16 : 8)) + i / 16; });
    __m512i order = kOrder.load();
    if (R == 8) order = _mm512_add_epi8(order, _mm512_set1_epi8(static_cast<char>(4 * quad)));
    const __m512i all =
        Whole ? _mm512_load_si512(integers)
              : _mm512_castsi256_si512(_mm256_load_si256(reinterpret_cast<const __m256i*>(integers)));
    return _mm512_permutexvar_epi8(order, all);
}

// Numbers in half precision of the rows of a quad, or 1 where the row has a number of its own.
template <class U>
IKPY_VBMI_INLINE __m128 row_factors(const uint8_t* p, int quad, float unit) {
    if constexpr (RowHeader<U>::kBytes > 0) return _mm_set1_ps(unit);
    const __m128i halves = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * quad));
    return _mm_mul_ps(_mm_cvtph_ps(halves), _mm_set1_ps(unit));
}

IKPY_VBMI_INLINE __m512 times(const int8_t* row, __m512 factor) {
    return _mm512_mul_ps(row_groups::integer_lanes(row), factor);
}

// Integers of a row_groups layout S times the numbers of the rows; minima behind them if P has offsets.
template <class U, class P, class S>
struct IntegerScales {
    static constexpr bool kMinima = P::kZero == 0;
    static IKPY_VBMI_INLINE void scales(const uint8_t* p, int quad, StoredQuad* out) {
        alignas(64) int8_t integers[128], rows[2][64];
        alignas(16) float factor[4], least[4];
        S::scales(p, integers);
        _mm_store_ps(factor, row_factors<U>(p, quad, S::kScale * bf16_rows::RowParts<P>::kUnit));
        if (kMinima) _mm_store_ps(least, row_factors<U>(p + 8, quad, -1.0f));
        constexpr bool kBoth = kMinima && U::kGroup == 16;
        constexpr bool kWhole = kMinima || U::kGroup == 16 || U::kRows == 8;
        _mm512_store_si512(rows[0], by_row<U::kRows, kWhole>(integers, quad));
        if (kBoth) _mm512_store_si512(rows[1], by_row<U::kRows, kWhole>(integers + 64, quad));
        row_groups::into_memory(rows);
        row_groups::into_memory(factor);
        row_groups::into_memory(least);
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) {
            const __m512 d = _mm512_set1_ps(factor[r]);
            if (kMinima && !kBoth) {
                const __m512 all =
                    times(rows[0] + 16 * r, _mm512_mask_blend_ps(0xFF00, d, _mm512_set1_ps(least[r])));
                _mm512_store_ps(out->d[r], all);
                _mm256_store_ps(out->m[r], _mm512_extractf32x8_ps(all, 1));
            } else {
                _mm512_store_ps(out->d[r], times(rows[0] + 16 * r, d));
            }
            if (kBoth) _mm512_store_ps(out->m[r], times(rows[1] + 16 * r, _mm512_set1_ps(least[r])));
        }
    }
};

// Adds offsets, the steps of P, for the groups of row r that are bits of S::shifted_groups(p, r).
template <class P, class S, class T>
struct StepOffsets : S {
    static IKPY_VBMI_INLINE void scales(const uint8_t* p, int quad, StoredQuad* out) {
        S::scales(p, quad, out);
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r)
            _mm512_store_ps(out->m[r], _mm512_maskz_mul_ps(T::shifted_groups(p, r), _mm512_load_ps(out->d[r]),
                                                           _mm512_set1_ps(P::kStep)));
    }
};

// X4: bit s of bytes r and 4 + r of the eight belongs to the groups of 16 of step s.
struct ExtraBits {
    static __mmask16 shifted_groups(const uint8_t* p, int r) {
        return static_cast<__mmask16>(_pdep_u32(p[8 + r], 0x5555) | _pdep_u32(p[12 + r], 0xAAAA));
    }
};

// The lowest bits of bytes [group][4].
struct LowestBits {
    static __mmask16 shifted_groups(const uint8_t* p, int r) {
        uint64_t low[2];
        for (int i = 0; i < 2; ++i)
            low[i] = _pext_u64(load_unaligned<uint64_t>(p + 16 * i), 0x0000000100000001ull << (8 * r)) |
                     _pext_u64(load_unaligned<uint64_t>(p + 16 * i + 8), 0x0000000100000001ull << (8 * r))
                         << 2;
        return static_cast<__mmask16>(low[0] | low[1] << 4);
    }
};

// A number in half precision per row and block of 32 columns.
template <class U, class P>
struct HalfScales {
    static IKPY_VBMI_INLINE void scales(const uint8_t* p, int quad, StoredQuad* out) {
        static constexpr Lanes32x16 kByRow;
        constexpr int64_t B = U::kBlockBytes;
        const __m512i at = _mm512_setr_epi64(0, B, 2 * B, 3 * B, 4 * B, 5 * B, 6 * B, 7 * B);
        alignas(64) uint16_t rows[4][8];
        _mm512_store_si512(
            rows, _mm512_permutexvar_epi16(kByRow.load(), _mm512_i64gather_epi64(at, p + 8 * quad, 1)));
        row_groups::into_memory(rows);
        for (int r = 0; r < 4; ++r) {
            const __m256 d = _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(rows[r])));
            _mm256_store_ps(out->d[r], _mm256_mul_ps(d, _mm256_set1_ps(bf16_rows::RowParts<P>::kUnit)));
        }
    }

  private:
    // Word r of eight quadwords after word r - 1 of all.
    struct Lanes32x16 {
        alignas(64) uint16_t at[32];
        constexpr Lanes32x16() : at() {
            for (int i = 0; i < 32; ++i) at[i] = static_cast<uint16_t>(4 * (i % 8) + i / 8);
        }
        __m512i load() const { return _mm512_load_si512(at); }
    };
};

// A number in half precision per row and 256 columns, or none.
template <class U, class P>
struct RowScales {
    static IKPY_VBMI_INLINE void scales(const uint8_t* p, int quad, StoredQuad* out) {
        alignas(16) float factor[4];
        _mm_store_ps(factor, row_factors<U>(p, quad, bf16_rows::RowParts<P>::kUnit));
        row_groups::into_memory(factor);
        for (int r = 0; r < 4; ++r) _mm512_store_ps(out->d[r], _mm512_set1_ps(factor[r]));
    }
};

}  // namespace ikpy::quads

#endif
