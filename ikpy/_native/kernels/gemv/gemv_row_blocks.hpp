// Single tokens times groups of four or eight interleaved rows with blocks of 32 columns, on CPUs with
// byte permutations.
//
// As in gemv_row_groups.hpp a group of rows is read from its first byte to its last, where the kernel of
// other CPUs (gemv_interleaved.hpp) reads two or four groups side by side. One core of Zen 5 before and now,
// percent of what it can read from memory, and GB/s from the second-level cache:
//   Q4_0_R8 75, 88; 57, 64      Q4_0_4x4 82, 97; 46, 55     IQ4_NL_R4 82, 96; 47, 56
//   MXFP4_R8 82, 94; 50, 61     Q5_0_R4 75, 95; 51, 59      Q6_0_R4 68, 97; 53, 64
// and from the cache Q4_0_4x8 28, 54 and Q4_0_8x8 17, 64, whose rows were unpacked one by one. A sum, of the
// 32 columns of a block, has a row to every R-th lane or pair of lanes; it begins with what takes the zero of
// the codes off.
//
// A layout L has
//   Plain                      the unpacker of the type
//   kBytes                     of a block of all rows
//   kRun                       lanes of a row next to each other, 1 or 2
//   kVectors                   of codes of a block
//   static constexpr int column(int v, int j)   first column of the j-th lane of every row in vector v
//   kZero                      code of weight 0
//   static void codes(const uint8_t* p, __m512i* q)   of a block
//   static __m512 scales(const uint8_t* p)      of the rows, in all lanes
#pragma once
#include "kernels/gemv/gemv_row_groups.hpp"

#if defined(__AVX512VNNI__)

namespace ikpy {
namespace row_blocks {

constexpr int kBlocks = kChunk / 32;

// What is kept of 256 activations of a token.
struct alignas(64) Record {
    uint8_t codes[kBlocks][32];  // those that meet a vector next to each other, the same for all rows
    float scale[kBlocks];
    int32_t start[kBlocks];
};

template <class L>
inline void prepare_record(const uint8_t* x, const ActQ8Layout& at, int64_t c, Record* out) {
    constexpr int kPlaces = 16 / L::Plain::kRows;
    static_assert(L::kZero % kPlaces == 0 && 4 * kPlaces * L::kVectors == 32);
    static constexpr struct Order {
        alignas(32) int32_t of[8] = {};
        constexpr Order() {
            for (int i = 0; i < 8; ++i) of[i] = L::column(i / kPlaces, i % kPlaces) / 4;
        }
    } kOrder;
    const auto store = [](void* to, __m256i v) { _mm256_store_si256(static_cast<__m256i*>(to), v); };
    const auto load = [](const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); };
    const __m256i order = _mm256_load_si256(reinterpret_cast<const __m256i*>(kOrder.of));
    for (int b = 0; b < kBlocks; ++b)
        store(out->codes[b], _mm256_permutevar8x32_epi32(load(x + c * kChunk + 32 * b), order));
    const __m256i minus_sums = _mm256_srai_epi32(minus_sums32(x, at, c), 7);
    store(out->start, _mm256_mullo_epi32(minus_sums, _mm256_set1_epi32(L::kZero / kPlaces)));
    store(out->scale, load(x + at.scale + c * int64_t{sizeof out->scale}));
}

// The columns of a vector, the same for all rows.
template <class L>
IKPY_VBMI_INLINE __m512i for_all_rows(const uint8_t* p) {
    constexpr int R = L::Plain::kRows;
    if constexpr (L::kRun == 1) return row_groups::for_all_rows<R>(p);
    if constexpr (R == 8) return _mm512_set1_epi64(load_unaligned<int64_t>(p));
    const __m512i columns = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_castpd_si512(_mm512_permute_pd(_mm512_castsi512_pd(columns), 0xF0));
}

// Sums of the lanes of 16 rows, from groups of R.
template <class L>
IKPY_VBMI_INLINE __m512 sums_of_rows(const __m512* totals) {
    if constexpr (L::kRun == 1) return L::Plain::kRows == 8 ? sums_of_halves(totals) : sums_of_quads(totals);
    __m512 pairs[2] = {totals[0], totals[1]};
    if constexpr (L::Plain::kRows == 4)
        for (int i = 0; i < 2; ++i) pairs[i] = sums_of_halves(totals + 2 * i);
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    return _mm512_add_ps(_mm512_permutex2var_ps(pairs[0], even, pairs[1]),
                         _mm512_permutex2var_ps(pairs[0], odd, pairs[1]));
}

// Adds the products of 256 columns of a group to the sums of even and of odd blocks of NT tokens.
template <class L, int NT>
IKPY_VBMI_INLINE void add_chunk(const uint8_t* p, const Record* const* x, int64_t c, __m512 (*total)[2]) {
    constexpr int kPlaces = 16 / L::Plain::kRows;
#pragma GCC unroll 8
    for (int b = 0; b < kBlocks; ++b, p += L::kBytes) {
        prefetch_weights<L::kBytes>(p);
        __m512i q[L::kVectors];
        L::codes(p, q);
#pragma GCC unroll 8
        for (int t = 0; t < NT; ++t) {
            const Record& own = x[t][c];
            __m512i sum = _mm512_set1_epi32(own.start[b]);
#pragma GCC unroll 4
            for (int v = 0; v < L::kVectors; ++v)
                sum = _mm512_dpbusd_epi32(sum, q[v], for_all_rows<L>(own.codes[b] + 4 * kPlaces * v));
            const __m512 scale = _mm512_mul_ps(L::scales(p), _mm512_set1_ps(own.scale[b]));
            total[t][b % 2] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, total[t][b % 2]);
        }
    }
}

template <class L, int NT>
IKPY_VBMI void multiply_half(const RowBlock& rows, int h, const Record* const* x, float* out) {
    using U = typename L::Plain;
    constexpr int R = U::kRows;
    __m512 totals[NT][kHalfRows / R] = {};
    for (int i = 0; i < rows.n[h]; i += R) {
        const uint8_t* p = rows.group(h, i, R);
        __m512 total[NT][2] = {};
        for (int64_t c = 0; c < rows.n_in / kChunk; ++c, p += kBlocks * L::kBytes)
            add_chunk<L, NT>(p, x, c, total);
        for (int t = 0; t < NT; ++t) totals[t][i / R] = _mm512_add_ps(total[t][0], total[t][1]);
    }
    for (int t = 0; t < NT; ++t)
        _mm512_storeu_ps(out + t * kBlockRows + h * kHalfRows, sums_of_rows<L>(totals[t]));
}

// Tokens: 1 where the sums of 16 rows that share the activations are faster with two.
template <class L, int Tokens>
struct Product {
    using Unpack = typename L::Plain;
    using Record = row_blocks::Record;
    static constexpr int kTokens = Tokens;

    static void prepare(const uint8_t* x, const ActQ8Layout& at, int64_t c, Record* out) {
        prepare_record<L>(x, at, c, out);
    }
    template <int NT>
    static void multiply(const RowBlock& rows, const Record* const* x, float* out) {
        for (int h = 0; h < rows.halves(); ++h) multiply_half<L, NT>(rows, h, x, out);
    }
};

// The kernels k of the type with the product of up to Tokens tokens replaced. Other: that of more tokens.
template <class L, int Tokens = 1, ProductFn Other = interleaved_gemv<typename L::Plain>>
constexpr WeightKernels kernels(WeightKernels k) {
    return record_kernels<Product<L, Tokens>, Other>(k);
}

}  // namespace row_blocks
}  // namespace ikpy

#endif
