// Few tokens times IQ1_BN, on CPUs with byte permutations: trits are multiplied without being unpacked.
//
// Trit e of byte b is 3 * (b * 3^e mod 256) / 256 = F[e + 1] - 3 * F[e] with F[e] = b * 3^e / 256, all
// divisions rounded down. So the products of the trits with activations y[e] are the sum over e = 1 .. 5 of
// F[e] * (y[e - 1] - 3 * y[e]), y[5] = 0: a word product for F, and one with factors that are prepared once
// per token.
//
// 256 weights are 60 bytes in words of two vectors: 26 vector instructions, 13 cycles if two start per
// cycle (52 bytes: 14 GB/s at 3.5 GHz). Measured with all around them 20 cycles; unpacked trits took 50.
#pragma once
#include <algorithm>

#include "kernels/byte_permutes.hpp"
#include "kernels/quant_product.hpp"
#include "kernels/weight_prefetch.hpp"
#include "unpack/small_blocks.hpp"

#if defined(__AVX512VNNI__)

namespace ikpy {
namespace trits {

constexpr int kPowers = 5, kBlocks = 4, kBlockBytes = UnpackIQ1_BN::kBlockBytes;

// What is kept of 256 activations. Vector h: words of the bytes of 128 columns, 8 (with a spare one) for each
// 32 columns; the byte that two of these share comes twice.
struct Record {
    alignas(64) int16_t factor[2][kPowers][32];
    alignas(64) int32_t start[2][16];  // minus the sum of 32 activations in the first of their four lanes
    alignas(64) float scale[2][16];
};

// Which bytes make up word w of a vector.
struct Word {
    int block, group;  // of 64 columns; pair of 16-groups
    int slot;          // 0 .. 5: own bytes, 6: trits of the shared one, 7: spare
    explicit constexpr Word(int w) : block(w / 16), group(w / 8 & 1), slot(w & 7) {}
    constexpr int byte() const {
        return kBlockBytes * block + (slot < 6 ? 6 * group + slot : kBlockBytes - 1);
    }
    // Column of the trit that has the power e, -1 if there is none.
    constexpr int column(int e) const {
        const int first = 64 * block + 32 * group, shared = 4 - e - 2 * group;
        if (slot < 6 && e >= 0 && e < kPowers) return first + slot / 3 * 16 + slot % 3 * 5 + 4 - e;
        return slot == 6 && (shared == 0 || shared == 1) ? first + 16 * shared + 15 : -1;
    }
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

IKPY_VBMI inline void prepare(const uint8_t* x, const ActQ8Layout& at, Record* out) {
    const __m512i top = _mm512_set1_epi8(-128);
    for (int64_t c = 0; c < at.n / kChunk; ++c, ++out) {
        const __m256 scale = _mm256_loadu_ps(reinterpret_cast<const float*>(x + at.scale) + 8 * c);
        const __m256i sums =
            _mm256_srai_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + at.neg32 + 32 * c)), 7);
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
                const __m512i pairs = _mm512_maskz_permutex2var_epi8(kTables.present[i], a,
                                                                     _mm512_load_si512(kTables.pairs[i]), b);
                const __m512i sum = _mm512_maddubs_epi16(pairs, _mm512_set1_epi16(-0x2FF));
                _mm512_store_si512(out->factor[h][i],
                                   _mm512_add_epi16(sum, _mm512_load_si512(kTables.offset[i])));
            }
        }
    }
}

constexpr int kRows = 2;  // at a time: they share the loads of the factors

// Products of rows with NT tokens, without the scales of the rows.
template <int NT>
IKPY_VBMI void multiply_rows(const uint8_t* const* rows, int64_t n_chunks, const Record* const* x,
                             float (*out)[NT]) {
    constexpr int kBytes = kBlocks * kBlockBytes;
    __m512 total[kRows][NT];
    for (int r = 0; r < kRows; ++r)
        for (int t = 0; t < NT; ++t) total[r][t] = _mm512_setzero_ps();
    for (int64_t c = 0; c < n_chunks; ++c) {
        __m512i bytes[kRows];
        for (int r = 0; r < kRows; ++r) {
            const uint8_t* p = rows[r] + UnpackIQ1_BN::kHeaderBytes + c * kBytes;
            prefetch_weights<kBytes>(p);
            bytes[r] = _mm512_maskz_loadu_epi8((1ull << kBytes) - 1, p);
        }
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
    for (int r = 0; r < kRows; ++r)
        for (int t = 0; t < NT; ++t) out[r][t] = _mm512_reduce_add_ps(total[r][t]);
}

// Rows beyond the last one repeat it.
template <int NT>
void multiply(const RowBlock& rows, const Record* const* x, int n_tokens, float* out) {
    if constexpr (NT > 1)
        if (n_tokens < NT) return multiply<NT - 1>(rows, x, n_tokens, out);
    for (int h = 0; h < 2; ++h)
        for (int i = 0; i < rows.n[h]; i += kRows) {
            const uint8_t* at[kRows];
            float sums[kRows][NT];
            for (int r = 0; r < kRows; ++r) at[r] = rows.row(h, i + r);
            multiply_rows<NT>(at, rows.n_in / kChunk, x, sums);
            for (int r = 0; r < kRows && i + r < rows.n[h]; ++r)
                for (int t = 0; t < NT; ++t)
                    out[t * kBlockRows + h * kHalfRows + i + r] = sums[r][t] * UnpackIQ1_BN::row_scale(at[r]);
        }
}

inline void gemv(const RowBlock& rows, const TokenSet& tokens, float* out, uint8_t* work) {
    if (rows.n_in % kChunk != 0) return quant_gemv<UnpackIQ1_BN, kGemvTokens>(rows, tokens, out, work);
    const ActQ8Layout at(rows.n_in);
    const Record* records[kGemvTokens];
    for (int t = 0; t < tokens.n; ++t) {
        Record* to = reinterpret_cast<Record*>(work) + t * (at.n / kChunk);
        if (tokens.fresh) prepare(tokens.x[t], at, to);
        records[t] = to;
    }
    multiply<kGemvTokens>(rows, records, tokens.n, out);
}

inline size_t work_bytes(int64_t n_in) {
    return std::max(int8_panel_bytes(n_in), kGemvTokens * (round_up(n_in, kChunk) / kChunk) * sizeof(Record));
}

constexpr WeightKernels kernels() {
    WeightKernels k = quant_kernels<UnpackIQ1_BN>();
    k.gemv = gemv;
    k.work_bytes = work_bytes;
    return k;
}

}  // namespace trits
}  // namespace ikpy

#endif
