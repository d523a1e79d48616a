// One token times IQ1_BN on AVX2, by the words of kernels/gemv/trit_words.hpp: a vector has those of a block
// of 64 columns, which take 19 instructions. Unpacked trits of four rows take 23, most of which more tokens
// share: Zen 3, 1e9 weights/s of one core with one token 20.9 and 26.2 with words, with two 33.1 and 25.8.
#pragma once
#include "kernels/gemv/gemv_int8_avx2.hpp"
#include "kernels/gemv/token_records.hpp"
#include "kernels/gemv/trit_words.hpp"
#include "kernels/matmul/weight_prefetch.hpp"

#if defined(__AVX2__) && !defined(__AVX512VNNI__)

namespace ikpy {
namespace trits {

// What is kept of 256 activations, per block.
struct Record {
    alignas(32) int16_t factor[kBlocks][kPowers][16];
    alignas(
        32) int32_t start[kBlocks][8];  // minus the sum of 32 activations in the first of their four lanes
    alignas(32) float scale[kBlocks][8];
};

struct Tables {
    // Bytes of a block in the upper halves of words: from its start on, or from 3 bytes before it.
    alignas(32) uint8_t bytes[2][32];
    // y[e - 1] and y[e] for e = 1 .. 5 of columns 0 .. 15 of both groups, and of 16 .. 31; 128: none.
    alignas(32) uint8_t pairs[2][kPowers][32];
    alignas(32) int16_t offset[kPowers][16];  // takes back what the activations' offset of 128 adds
};
constexpr Tables make_tables() {
    Tables t{};
    for (int w = 0; w < 16; ++w) {
        const Word word(w);
        for (int back = 0; back < 2; ++back) {
            t.bytes[back][2 * w] = 128;
            t.bytes[back][2 * w + 1] = static_cast<uint8_t>(word.slot == 7 ? 128 : word.byte() + 3 * back);
        }
        for (int i = 0; i < kPowers; ++i)
            for (int half = 0; half < 2; ++half) {
                const int column = word.column(i + half) - 32 * word.group;
                for (int part = 0; part < 2; ++part)
                    t.pairs[part][i][2 * w + half] =
                        static_cast<uint8_t>(column >= 0 && column / 16 == part ? column % 16 : 128);
                if (column >= 0)
                    t.offset[i][w] = static_cast<int16_t>(t.offset[i][w] + (half ? 3 * 128 : -128));
            }
    }
    return t;
}
inline constexpr Tables kTables = make_tables();

inline __m256i load(const void* p) { return _mm256_load_si256(static_cast<const __m256i*>(p)); }

inline void prepare_factors(const uint8_t* x, int16_t (*to)[16]) {
    const __m256i top = _mm256_set1_epi8(-128);
    const auto* columns = reinterpret_cast<const __m256i*>(x);
    const __m256i first = _mm256_xor_si256(_mm256_loadu_si256(columns), top),
                  second = _mm256_xor_si256(_mm256_loadu_si256(columns + 1), top);
    const __m256i low = _mm256_permute2x128_si256(first, second, 0x20),
                  high = _mm256_permute2x128_si256(first, second, 0x31);
#pragma GCC unroll 5
    for (int i = 0; i < kPowers; ++i) {
        const __m256i pairs = _mm256_or_si256(_mm256_shuffle_epi8(low, load(kTables.pairs[0][i])),
                                              _mm256_shuffle_epi8(high, load(kTables.pairs[1][i])));
        const __m256i sum = _mm256_maddubs_epi16(pairs, _mm256_set1_epi16(-0x2FF));
        _mm256_store_si256(reinterpret_cast<__m256i*>(to[i]), _mm256_add_epi16(sum, load(kTables.offset[i])));
    }
}

inline void prepare_record(const uint8_t* x, const ActQ8Layout& at, int64_t c, Record* out) {
    const auto* scale = reinterpret_cast<const float*>(x + at.scale) + 8 * c;
    const auto* sum = reinterpret_cast<const float*>(x + at.sum32) + 8 * c;
    for (int b = 0; b < kBlocks; ++b) {
        prepare_factors(x + kChunk * c + 64 * b, out->factor[b]);
        for (int lane = 0; lane < 8; ++lane) {
            const int group = 2 * b + lane / 4;
            out->scale[b][lane] = scale[group];
            out->start[b][lane] = lane % 4 == 0 ? -static_cast<int32_t>(sum[group]) : 0;
        }
    }
}

// The words of block b of a chunk; nothing behind the chunk is read.
inline __m256i words_of(const uint8_t* chunk, int b) {
    const bool back = b == kBlocks - 1;
    const auto* bytes = reinterpret_cast<const __m128i*>(chunk + kBlockBytes * b - (back ? 3 : 0));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(bytes)),
                               load(kTables.bytes[back]));
}

constexpr int kRows = 2;  // at a time: they share the loads of the factors

// Products of rows with a token, without the scales of the rows, in the lanes of total.
[[gnu::always_inline]] inline void multiply_rows(const uint8_t* const* rows, int64_t stride, int64_t n_chunks,
                                                 const Record* x, __m256* total) {
    constexpr int kBytes = kBlocks * kBlockBytes;
    for (int r = 0; r < kRows; ++r) total[r] = _mm256_setzero_ps();
    constexpr int64_t kHeader = UnpackIQ1_BN::kHeaderBytes;
    SideBySideAt far(kRows, stride, kHeader + kPrefetch.into_l2),
        near(kRows, stride, kHeader + kPrefetch.beside_into_l1);
    for (int64_t c = 0; c < n_chunks; ++c, ++x) {
        const int64_t offset = kHeader + c * kBytes;
        for (int r = 0; r < kRows; ++r) {
            prefetch_weights_beside<kBytes>(rows[r] + offset, far.skip(), near.skip());
        }
        far.move(kBytes);
        near.move(kBytes);
#pragma GCC unroll 4
        for (int b = 0; b < kBlocks; ++b) {
            __m256i words[kRows], sum[kRows];
#pragma GCC unroll 2
            for (int r = 0; r < kRows; ++r) {
                words[r] = words_of(rows[r] + offset, b);
                sum[r] = load(x->start[b]);
            }
            int power = 1;
#pragma GCC unroll 5
            for (int i = 0; i < kPowers; ++i) {
                power *= 3;
                const __m256i multiplier = _mm256_set1_epi16(static_cast<short>(power));
#pragma GCC unroll 2
                for (int r = 0; r < kRows; ++r)
                    sum[r] = add_word_dots(sum[r], _mm256_mulhi_epu16(words[r], multiplier),
                                           load(x->factor[b][i]));
            }
#pragma GCC unroll 2
            for (int r = 0; r < kRows; ++r)
                total[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r]), _mm256_load_ps(x->scale[b]), total[r]);
        }
    }
}

struct Product {
    using Unpack = UnpackIQ1_BN;
    using Record = trits::Record;
    static constexpr int kTokens = 1;

    static void prepare(const uint8_t* x, const ActQ8Layout& at, int64_t c, Record* out) {
        prepare_record(x, at, c, out);
    }
    // Rows beyond the last one repeat it.
    template <int NT>
    static void multiply(const RowBlock& rows, const Record* const* x, float* out) {
        static_assert(NT == 1);
        for (int h = 0; h < 2; ++h)
            for (int i = 0; i < rows.n[h]; i += kRows) {
                const uint8_t* at[kRows];
                __m256 total[kRows];
                for (int r = 0; r < kRows; ++r) at[r] = rows.row(h, i + r);
                multiply_rows(at, rows.stride, rows.n_in / kChunk, x[0], total);
                for (int r = 0; r < kRows; ++r)
                    out[h * kHalfRows + i + r] = sum_of_lanes(total[r]) * UnpackIQ1_BN::row_scale(at[r]);
            }
    }
};

}  // namespace trits
}  // namespace ikpy

#endif
