// Few tokens times IQ1_BN, on CPUs with byte permutations: trits are multiplied without being unpacked.
//
// kernels/gemv/trit_words.hpp has the words: a word product for F, and one with factors that are prepared
// once per token.
//
// 256 weights are 60 bytes in words of two vectors: 26 vector instructions, 13 cycles if two start per
// cycle (52 bytes: 14 GB/s at 3.5 GHz). Measured with all around them 17 cycles; unpacked trits took 50.
#pragma once
#include "kernels/gemv/token_records.hpp"
#include "kernels/gemv/trit_words.hpp"
#include "kernels/matmul/weight_prefetch.hpp"
#include "kernels/simd/byte_permutes.hpp"
#include "kernels/simd/lane_sums.hpp"

#if defined(__AVX512VNNI__)

namespace ikpy {
namespace trits {

// What is kept of 256 activations. Vector h: words of the bytes of 128 columns.
struct Record {
    alignas(64) int16_t factor[2][kPowers][32];
    alignas(64) int32_t start[2][16];  // minus the sum of 32 activations in the first of their four lanes
    alignas(64) float scale[2][16];
};

struct Tables {
    alignas(64) uint8_t bytes[2][64];        // of the weights, in the upper halves of words
    uint64_t used[2];                        // the spare words stay zero
    alignas(64) uint8_t pairs[kPowers][64];  // y[e - 1] and y[e] for e = 1 .. 5
    uint64_t present[kPowers];
    alignas(64) int16_t offset[kPowers][32];  // takes back what the activations' offset of 128 adds
};
constexpr Tables make_tables() {
    Tables t{};
    for (int w = 0; w < 32; ++w) {
        const Word word(w);
        for (int h = 0; h < 2; ++h) {
            if (word.slot == 7) continue;
            t.bytes[h][2 * w + 1] = static_cast<uint8_t>(word.byte() + 2 * kBlockBytes * h);
            t.used[h] |= 2ull << (2 * w);
        }
        for (int i = 0; i < kPowers; ++i)
            for (int half = 0; half < 2; ++half) {
                const int column = word.column(i + half);
                if (column < 0) continue;
                t.pairs[i][2 * w + half] = static_cast<uint8_t>(column);
                t.present[i] |= 1ull << (2 * w + half);
                t.offset[i][w] = static_cast<int16_t>(t.offset[i][w] + (half ? 3 * 128 : -128));
            }
    }
    return t;
}
inline constexpr Tables kTables = make_tables();

IKPY_VBMI inline void prepare_record(const uint8_t* x, const ActQ8Layout& at, int64_t c, Record* out) {
    const __m512i top = _mm512_set1_epi8(-128);
    const __m256 scale = _mm256_loadu_ps(reinterpret_cast<const float*>(x + at.scale) + 8 * c);
    const __m256i sums = _mm256_srai_epi32(minus_sums32(x, at, c), 7);
    for (int h = 0; h < 2; ++h) {
        const __m512i lanes = _mm512_add_epi32(
            _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), _mm512_set1_epi32(4 * h));
        _mm512_store_ps(out->scale[h], _mm512_permutexvar_ps(lanes, _mm512_castps256_ps512(scale)));
        _mm512_store_si512(out->start[h],
                           _mm512_maskz_permutexvar_epi32(0x1111, lanes, _mm512_castsi256_si512(sums)));
        const __m512i a = _mm512_xor_si512(_mm512_loadu_si512(x + kChunk * c + 128 * h), top);
        const __m512i b = _mm512_xor_si512(_mm512_loadu_si512(x + kChunk * c + 128 * h + 64), top);
#pragma GCC unroll 5
        for (int i = 0; i < kPowers; ++i) {
            const __m512i pairs =
                _mm512_maskz_permutex2var_epi8(kTables.present[i], a, _mm512_load_si512(kTables.pairs[i]), b);
            const __m512i sum = _mm512_maddubs_epi16(pairs, _mm512_set1_epi16(-0x2FF));
            _mm512_store_si512(out->factor[h][i],
                               _mm512_add_epi16(sum, _mm512_load_si512(kTables.offset[i])));
        }
    }
}

// At a time: they share the loads of the factors, and their chains of products hide each other's latency (17
// cycles per 256 weights with four rows, 20 with two or one). The sums of more
// tokens need the registers.
constexpr int rows_at_once(int n_tokens) { return n_tokens <= 2 ? 4 : 2; }

// Products of rows with NT tokens, without the scales of the rows, in the lanes of total.
template <int NT>
IKPY_VBMI_INLINE void multiply_rows(const uint8_t* const* rows, int64_t stride, int64_t n_chunks,
                                    const Record* const* x, __m512 (*total)[NT]) {
    constexpr int kBytes = kBlocks * kBlockBytes, kRows = rows_at_once(NT);
    for (int r = 0; r < kRows; ++r)
        for (int t = 0; t < NT; ++t) total[r][t] = _mm512_setzero_ps();
    constexpr int64_t kHeader = UnpackIQ1_BN::kHeaderBytes;
    SideBySideAt far(kRows, stride, kHeader + kPrefetch.into_l2),
        near(kRows, stride, kHeader + kPrefetch.beside_into_l1);
    for (int64_t c = 0; c < n_chunks; ++c) {
        const int64_t offset = kHeader + c * kBytes;
        __m512i bytes[kRows];
        for (int r = 0; r < kRows; ++r) {
            const uint8_t* p = rows[r] + offset;
            prefetch_weights_beside<kBytes>(p, far.skip(), near.skip());
            bytes[r] = _mm512_maskz_loadu_epi8((1ull << kBytes) - 1, p);
        }
        far.move(kBytes);
        near.move(kBytes);
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
            __m512i words[kRows], sum[kRows][NT];
            for (int r = 0; r < kRows; ++r) {
                words[r] = _mm512_maskz_permutexvar_epi8(kTables.used[h], _mm512_load_si512(kTables.bytes[h]),
                                                         bytes[r]);
                for (int t = 0; t < NT; ++t) sum[r][t] = _mm512_load_si512(x[t][c].start[h]);
            }
            int power = 1;
#pragma GCC unroll 5
            for (int i = 0; i < kPowers; ++i) {
                power *= 3;
                const __m512i multiplier = _mm512_set1_epi16(static_cast<short>(power));
                for (int r = 0; r < kRows; ++r) {
                    const __m512i f = _mm512_mulhi_epu16(words[r], multiplier);
                    for (int t = 0; t < NT; ++t)
                        sum[r][t] =
                            _mm512_dpwssd_epi32(sum[r][t], f, _mm512_load_si512(x[t][c].factor[h][i]));
                }
            }
            for (int r = 0; r < kRows; ++r)
                for (int t = 0; t < NT; ++t)
                    total[r][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][t]),
                                                  _mm512_load_ps(x[t][c].scale[h]), total[r][t]);
        }
    }
}

// Of the rows of a half; those beyond the last one repeat it.
template <int NT>
IKPY_VBMI void multiply_half(const RowBlock& rows, int h, const Record* const* x, float* out) {
    constexpr int kRows = rows_at_once(NT);
    __m512 totals[NT][kHalfRows] = {};
    float scale[kHalfRows] = {};
    for (int i = 0; i < rows.n[h]; i += kRows) {
        const uint8_t* at[kRows];
        __m512 total[kRows][NT];
        for (int r = 0; r < kRows; ++r) at[r] = rows.row(h, i + r);
        multiply_rows<NT>(at, rows.stride, rows.n_in / kChunk, x, total);
        for (int r = 0; r < kRows; ++r) {
            for (int t = 0; t < NT; ++t) totals[t][i + r] = total[r][t];
            scale[i + r] = UnpackIQ1_BN::row_scale(at[r]);
        }
    }
    for (int t = 0; t < NT; ++t)
        _mm512_storeu_ps(out + t * kBlockRows + h * kHalfRows,
                         _mm512_mul_ps(sums16(totals[t]), _mm512_loadu_ps(scale)));
}

struct Product {
    using Unpack = UnpackIQ1_BN;
    using Record = trits::Record;
    static constexpr int kTokens = 6;  // seven are faster with panels

    static void prepare(const uint8_t* x, const ActQ8Layout& at, int64_t c, Record* out) {
        prepare_record(x, at, c, out);
    }
    template <int NT>
    static void multiply(const RowBlock& rows, const Record* const* x, float* out) {
        for (int h = 0; h < 2; ++h) multiply_half<NT>(rows, h, x, out);
    }
};

}  // namespace trits
}  // namespace ikpy

#endif
