// Few tokens times types whose bytes hold five trits, on CPUs whose byte permutations over two registers are
// single operations: the trits of a byte are looked up.
//
// 256 weights fit into the bytes of a vector. Two permutations and a blend find the first four trits of
// every byte, as many the fifth one; four products with bit matrices take the four apart. Activations are
// rearranged to meet them: lane l of vector n is multiplied with trit n of bytes 4 * l .. + 3. 256 weights of
// IQ1_BN are some 27 vector instructions and 10 loads, six cycles of Zen 5 if four start per cycle, those of
// TQ1_0, whose trits have scales of their own, 29 and 19. 1e9 weights/s of one core from the cache: IQ1_BN 90
// (as words, gemv_trits.hpp) -> 128, TQ1_0 44 (unpacked) -> 93.
//
// A layout L has
//   Unpack                    the unpacker of the type
//   kBlockBytes               of 256 columns
//   kRows                     multiplied at once
//   kSums                     1 where all trits of a lane share a scale of the activations, else kTrits
//   static constexpr int column(int byte, int n)   of trit n of a byte, -1 if there is none
//   static __m512i bytes(const uint8_t* p)   of a block
//   static __m512 scale(const uint8_t* p)    of a block, for types without one of the row
#pragma once
#include "kernels/gemv/token_records.hpp"
#include "kernels/matmul/weight_prefetch.hpp"
#include "kernels/simd/byte_permutes.hpp"
#include "kernels/simd/lane_sums.hpp"
#include "unpack/small_blocks.hpp"

#if defined(__AVX512VNNI__)

namespace ikpy {
namespace trit_bytes {

constexpr int kTrits = 5;

// By a byte its first four trits, two bits each, and the fifth one.
struct TritTables {
    alignas(64) uint8_t four[256] = {}, last[256] = {};
    constexpr TritTables() {
        constexpr int kPowers[kTrits] = {1, 3, 9, 27, 81};
        for (int b = 0; b < 256; ++b) {
            const auto byte = static_cast<uint8_t>(b);
            for (int n = 0; n < 4; ++n)
                four[b] = static_cast<uint8_t>(four[b] | trit(byte, kPowers[n]) << 2 * n);
            last[b] = trit(byte, kPowers[4]);
        }
    }
};
inline constexpr TritTables kTritTables;

template <class L>
struct Record {
    alignas(64) int8_t x[kTrits][64];
    alignas(64) int32_t start[L::kSums][16];  // minus the sum of the activations of a lane
    alignas(64) float scale[L::kSums][16];
};

// Where the activations of a record come from, and the groups of 32 of its lanes.
template <class L>
struct Places {
    alignas(64) uint8_t column[kTrits][64] = {};
    uint64_t used[kTrits] = {}, upper[kTrits] = {};
    alignas(64) int32_t group[kTrits][16] = {};
    constexpr Places() {
        for (int n = 0; n < kTrits; ++n)
            for (int b = 0; b < 64; ++b) {
                const int c = L::column(b, n);
                if (c < 0) continue;
                column[n][b] = static_cast<uint8_t>(c);
                used[n] |= uint64_t{1} << b;
                if (c >= 128) upper[n] |= uint64_t{1} << b;
                group[L::kSums == 1 ? 0 : n][b / 4] = c / 32;
            }
    }
};

template <class L>
IKPY_VBMI inline void prepare_record(const uint8_t* x, const ActQ8Layout& at, int64_t c, Record<L>* out) {
    static constexpr Places<L> kPlaces;
    const auto load = [&](int i) { return _mm512_loadu_si512(x + kChunk * c + 64 * i); };
    const __m512i a = load(0), b = load(1), d = load(2), e = load(3), zero = _mm512_setzero_si512();
    const __m512 scale = _mm512_castsi512_ps(_mm512_maskz_loadu_epi32(0xFF, x + at.scale + 32 * c));
    __m512i sum = zero;
    for (int n = 0; n < kTrits; ++n) {
        const __m512i column = _mm512_load_si512(kPlaces.column[n]);
        const __m512i lower = _mm512_maskz_permutex2var_epi8(kPlaces.used[n], a, column, b);
        const __m512i v =
            _mm512_mask_blend_epi8(kPlaces.upper[n], lower, _mm512_permutex2var_epi8(d, column, e));
        _mm512_store_si512(out->x[n], v);
        if (L::kSums > 1) sum = zero;
        sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), v);
        if (n % L::kSums == L::kSums - 1 || L::kSums > 1)
            _mm512_store_si512(out->start[L::kSums == 1 ? 0 : n], _mm512_sub_epi32(zero, sum));
    }
    for (int n = 0; n < L::kSums; ++n)
        _mm512_store_ps(out->scale[n], _mm512_permutexvar_ps(_mm512_load_si512(kPlaces.group[n]), scale));
}

// Trits 0 .. 3 come to the lowest bits, which tell them apart from what is beside them.
IKPY_VBMI_INLINE __m512i trit_of_four(__m512i four, int n) {
    const int64_t matrix = int64_t{1} << (56 + 2 * n) | int64_t{2} << (48 + 2 * n);
    return _mm512_gf2p8affine_epi64_epi8(four, _mm512_set1_epi64(matrix), 0);
}

// At a time: they share the loads of activations and tables. The sums of more tokens need the registers.
template <class L>
constexpr int rows_at_once(int n_tokens) {
    return n_tokens <= 2 ? L::kRows : 1;
}

// The tables, in registers of their own: as operands in memory they took half of all loads.
struct Lookups {
    __m512i four[4], last[4];
    IKPY_VBMI_INLINE Lookups() {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            four[i] = kept(_mm512_load_si512(kTritTables.four + 64 * i));
            last[i] = kept(_mm512_load_si512(kTritTables.last + 64 * i));
        }
    }
    static IKPY_VBMI_INLINE __m512i at(const __m512i* table, __m512i bytes, __mmask64 upper) {
        return _mm512_mask_blend_epi8(upper, _mm512_permutex2var_epi8(table[0], bytes, table[1]),
                                      _mm512_permutex2var_epi8(table[2], bytes, table[3]));
    }
    static IKPY_VBMI_INLINE __m512i kept(__m512i v) {
        asm("" : "+v"(v));
        return v;
    }
};

// Adds the products of blocks of R rows with NT tokens.
template <class L, int R, int NT>
IKPY_VBMI_INLINE void add_blocks(const uint8_t* const* p, const Record<L>* const* x, int64_t c,
                                 const Lookups& tables, __m512 (*total)[NT]) {
    __m512i four[R], last[R], sum[R][NT];
    __m512 value[R][NT][2];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        const __m512i bytes = L::bytes(p[r]);
        const __mmask64 upper = _mm512_movepi8_mask(bytes);
        four[r] = tables.at(tables.four, bytes, upper);
        last[r] = tables.at(tables.last, bytes, upper);
    }
#pragma GCC unroll 5
    for (int n = 0; n < kTrits; ++n) {
        const int s = L::kSums > 1 ? n : 0;
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const __m512i trits = n < 4 ? trit_of_four(four[r], n) : last[r];
#pragma GCC unroll 16
            for (int t = 0; t < NT; ++t) {
                const Record<L>& own = x[t][c];
                if (L::kSums > 1 || n == 0) sum[r][t] = _mm512_load_si512(own.start[s]);
                sum[r][t] = _mm512_dpbusd_epi32(sum[r][t], trits, _mm512_load_si512(own.x[n]));
                if (L::kSums == 1 && n < kTrits - 1) continue;
                const __m512 v = _mm512_cvtepi32_ps(sum[r][t]), scale = _mm512_load_ps(own.scale[s]);
                if constexpr (L::kSums == 1)
                    total[r][t] = _mm512_fmadd_ps(v, scale, total[r][t]);
                else
                    value[r][t][n % 2] =
                        n < 2 ? _mm512_mul_ps(v, scale) : _mm512_fmadd_ps(v, scale, value[r][t][n % 2]);
            }
        }
    }
    if constexpr (L::kSums > 1)
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < NT; ++t)
                total[r][t] = _mm512_fmadd_ps(_mm512_add_ps(value[r][t][0], value[r][t][1]), L::scale(p[r]),
                                              total[r][t]);
}

// Of the rows of a half, whose lanes are summed for 16 rows at once; those beyond the last one repeat it.
template <class L, int NT>
IKPY_VBMI void multiply_half(const RowBlock& rows, int h, const Record<L>* const* x, float* out) {
    constexpr int R = rows_at_once<L>(NT);
    constexpr int64_t kHeader = RowHeader<typename L::Unpack>::kBytes;
    __m512 totals[NT][kHalfRows] = {};
    const Lookups tables;
    for (int i = 0; i < rows.n[h]; i += R) {
        const uint8_t* p[R];
        __m512 total[R][NT];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            p[r] = rows.row(h, i + r) + kHeader;
            for (int t = 0; t < NT; ++t) total[r][t] = _mm512_setzero_ps();
        }
        SideBySideAt far(R, rows.stride, kHeader + kPrefetch.into_l2),
            near(R, rows.stride, kHeader + kPrefetch.beside_into_l1);
        for (int64_t c = 0; c < rows.n_in / kChunk; ++c) {
            for (int r = 0; r < R; ++r) {
                prefetch_weights_beside<L::kBlockBytes>(p[r], far.skip(), near.skip());
            }
            add_blocks<L, R, NT>(p, x, c, tables, total);
            for (int r = 0; r < R; ++r) p[r] += L::kBlockBytes;
            far.move(L::kBlockBytes);
            near.move(L::kBlockBytes);
        }
        for (int t = 0; t < NT; ++t)
            for (int r = 0; r < R; ++r) totals[t][i + r] = total[r][t];
    }
    for (int t = 0; t < NT; ++t) _mm512_storeu_ps(out + t * kBlockRows + h * kHalfRows, sums16(totals[t]));
}

template <class L, int Tokens>
struct Product {
    using Unpack = typename L::Unpack;
    using Record = trit_bytes::Record<L>;
    static constexpr int kTokens = Tokens;

    static void prepare(const uint8_t* x, const ActQ8Layout& at, int64_t c, Record* out) {
        prepare_record<L>(x, at, c, out);
    }
    template <int NT>
    static void multiply(const RowBlock& rows, const Record* const* x, float* out) {
        const int n_halves = rows.halves();
        for (int h = 0; h < n_halves; ++h) multiply_half<L, NT>(rows, h, x, out);
        apply_row_scales<Unpack>(rows, n_halves, NT, out);
    }
};

// Bytes 0 .. 31 have trits of 32 columns each, the next 16 of 16, the last four four of them.
struct TQ1_0 {
    using Unpack = UnpackTQ1_0;
    static constexpr int kBlockBytes = UnpackTQ1_0::kBlockBytes, kSums = kTrits, kRows = 2;
    static constexpr int column(int byte, int n) {
        if (byte < 32) return 32 * n + byte;
        if (byte < 48) return 160 + 16 * n + byte - 32;
        return byte < 52 && n < 4 ? 240 + 4 * n + byte - 48 : -1;
    }
    static IKPY_VBMI_INLINE __m512i bytes(const uint8_t* p) {
        return _mm512_maskz_loadu_epi8((1ull << kBlockBytes) - 1, p);
    }
    static IKPY_VBMI_INLINE __m512 scale(const uint8_t* p) {
        return _mm512_cvtph_ps(_mm256_set1_epi16(load_unaligned<int16_t>(p + 52)));
    }
};

// Of 32 columns six bytes hold 30; the byte that two groups of 32 share comes to both.
struct IQ1_BN {
    using Unpack = UnpackIQ1_BN;
    static constexpr int kBlock = UnpackIQ1_BN::kBlockBytes, kBlockBytes = 4 * kBlock, kSums = 1, kRows = 4;
    static constexpr int column(int byte, int n) {
        const int group = byte / 8, slot = byte % 8, e = kTrits - 1 - n;
        if (slot < 6) return 32 * group + slot / 3 * 16 + slot % 3 * 5 + e;
        return slot == 6 && e / 2 == group % 2 && e < 4 ? 32 * group + 16 * (e % 2) + 15 : -1;
    }
    static IKPY_VBMI_INLINE __m512i bytes(const uint8_t* p) {
        static constexpr Bytes64 kFrom([](int i) {
            const int group = i / 8, slot = i % 8;
            return kBlock * (group / 2) + (slot < 6 ? 6 * (group % 2) + slot : kBlock - 1);
        });
        return _mm512_permutexvar_epi8(kFrom.load(), _mm512_maskz_loadu_epi8((1ull << kBlockBytes) - 1, p));
    }
};

}  // namespace trit_bytes
}  // namespace ikpy

#endif
