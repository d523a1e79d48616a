// Few tokens on AVX2, types of few bits with groups of 16 and small integers as scales: products of 32
// columns are multiplied by their scales as words and added up as integers. A conversion and a multiply-add
// for every 32 columns, which scales in floats take, cost Zen 3 half as much again: 21.9 cycles for 256
// nibbles instead of 14.5.
//
// A word is the scale of a group times that of the activations, which has 8 significant bits, in a unit that
// is a power of two. Blocks with groups whose scale of the activations is too small for a word to be exact
// are multiplied with scales in floats: of Gaussian activations 1 in 100 blocks of types that leave one
// binade below the largest scale, next to none where there are two (Q3_K, IQ2_K) or three (Q2_K).
#pragma once
#include <cmath>

#include "kernels/gemv_int8_avx2.hpp"

#if defined(__AVX2__) && !defined(__AVX512VNNI__)

namespace ikpy {
namespace word_scales {

template <class U, class = void>
struct HasLargestScale : std::false_type {};
template <class U>
struct HasLargestScale<U, std::void_t<decltype(RowCodes<U>::kLargestScale)>> : std::true_type {};

// The largest word with which sums of 8 products of two words stay in 31 bits.
constexpr int largest_word(int code) {
    const int64_t most = 2147483647LL / (8 * 4 * 127 * code);
    return static_cast<int>(most < 32767 ? most : 32767);
}

// Units of a word in 1/256 of the power of two above the largest scale of the activations; 1: words do not
// hold a binade below the largest scale.
template <class U>
constexpr int steps() {
    int n = 1;
    while (RowCodes<U>::kLargestScale * 255 * 2 * n <= largest_word(CodeRange<U>::kHigh)) n *= 2;
    return n;
}

// Of 256 activations.
template <class U>
struct Record {
    static_assert(U::kGroup == 16 && steps<U>() > 1);
    alignas(32) float scale[8];                 // of groups of 32, in the unit of words
    alignas(32) float sum[kChunk / U::kGroup];  // of the groups of U as floats, in the order of its scales
    float unit;
    bool exact;  // whether all scale[] are integers
};

template <class U>
void prepare(const uint8_t* x, const ActQ8Layout& at, Record<U>* records) {
    const auto* scale = reinterpret_cast<const float*>(x + at.scale);
    const auto* sum = reinterpret_cast<const float*>(x + (U::kGroup == 32 ? at.sum32 : at.sum16));
    for (int64_t c = 0; c < at.n / kChunk; ++c, scale += 8, sum += kChunk / U::kGroup, ++records) {
        float largest = 0.0f;
        for (int g = 0; g < 8; ++g) largest = std::max(largest, scale[g]);
        int exponent;
        std::frexp(largest, &exponent);
        records->unit = std::ldexp(1.0f / (256 * steps<U>()), exponent);
        records->exact = true;
        for (int g = 0; g < 8; ++g) {
            records->scale[g] = scale[g] / records->unit;
            // Also false for those that are not finite.
            if (!(records->scale[g] == std::rint(records->scale[g]) && records->scale[g] <= 65536.0f))
                records->exact = false;
        }
        for (int g = 0; g < kChunk / U::kGroup; ++g)
            records->sum[U::kGroup == 32 ? g : g / 2 + g % 2 * 8] = sum[g] * scale[g * U::kGroup / 32];
    }
}

// Tokens: their rows and records.
template <class U>
struct Tokens {
    const uint8_t* const* x;
    const Record<U>* const* records;

    template <int NT>
    bool exact(int64_t c) const {
        bool all = true;
        for (int t = 0; t < NT; ++t) all = all && records[t][c].exact;
        return all;
    }
};

// Sums over a row.
template <class U, int NT>
struct Sums {
    __m256 total[NT][2], offset[NT];

    Sums() {
#pragma GCC unroll 8
        for (int t = 0; t < NT; ++t) total[t][0] = total[t][1] = offset[t] = _mm256_setzero_ps();
    }
    float of(int t) const {
        return sum_of_lanes(_mm256_add_ps(_mm256_add_ps(total[t][0], total[t][1]), offset[t]));
    }
};

// Of a segment: words, each twice in a dword, or scales as floats, and the factors of the blocks.
template <class U, int NT>
struct Words {
    alignas(32) int32_t of[NT][kSegmentChunks][kChunk / U::kGroup];
    float factor[kSegmentChunks];
};

// The words of 32 codes, in the lanes of their products.
template <class U>
inline __m256i word_lanes(const int32_t* words, int i) {
    if (U::kGroup == 32) return _mm256_set1_epi32(words[i]);
    return _mm256_blend_epi32(_mm256_set1_epi32(words[i]), _mm256_set1_epi32(words[i + 8]), 0xF0);
}

template <class U, int NT>
[[gnu::always_inline]] inline void make_words(const uint8_t* p, const Tokens<U>& x, int64_t c0, int n_chunks,
                                              Words<U, NT>* words, Sums<U, NT>* sums) {
    const __m256i twice =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13));
    for (int c = 0; c < n_chunks; ++c, p += U::kBlockBytes) {
        const BlockScales s = RowCodes<U>::scales(p);
        const bool exact = x.template exact<NT>(c0 + c);
        words->factor[c] = s.factor;
#pragma GCC unroll 8
        for (int t = 0; t < NT; ++t) {
            const Record<U>& record = x.records[t][c0 + c];
            __m256 added = _mm256_setzero_ps();
#pragma GCC unroll 2
            for (int i = 0; i < kChunk / U::kGroup / 8; ++i) {
                const __m256 product = _mm256_mul_ps(s.d[i], _mm256_load_ps(record.scale));
                const __m256i word = exact ? _mm256_shuffle_epi8(_mm256_cvtps_epi32(product), twice)
                                           : _mm256_castps_si256(product);
                _mm256_store_si256(reinterpret_cast<__m256i*>(words->of[t][c] + 8 * i), word);
                if (kUsesSums<U>)
                    added = _mm256_fmadd_ps(sum_factors<U>(s, i), _mm256_load_ps(record.sum + 8 * i), added);
            }
            const __m256 factor = _mm256_set1_ps(U::kZero == 0 ? s.offset_factor : s.factor);
            if (kUsesSums<U>) sums->offset[t] = _mm256_fmadd_ps(added, factor, sums->offset[t]);
        }
    }
}

template <bool Exact>
struct SumOf {
    typedef __m256i Type;
};
template <>
struct SumOf<false> {
    typedef __m256 Type;
};

// Multiplies 32 codes at a time as they are unpacked. Exact: with words, else with floats; sums: of a block.
template <class U, int NT, bool Exact>
struct WordSink {
    typedef typename SumOf<Exact>::Type Sum;
    static constexpr int kSums = Exact ? 1 : 2;
    Sum (*sums)[kSums];
    const uint8_t* const* x;
    const Words<U, NT>* words;
    int64_t k;
    int chunk, element;

    WordSink operator+(int n) const { return {sums, x, words, k, chunk, element + n}; }
    [[gnu::always_inline]] void take(c32::Codes32 v) const {
        const Factors<kSignedCodes<U>> factors(reinterpret_cast<__m256i>(v), true);
        const int i = element / 32;
#pragma GCC unroll 8
        for (int t = 0; t < NT; ++t) {
            const __m256i columns = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x[t] + k + element));
            const __m256i scales = word_lanes<U>(words->of[t][chunk], i);
            if constexpr (Exact) {
                Sum& sum = sums[t][0];
                sum = _mm256_add_epi32(sum, _mm256_madd_epi16(factors.pairs(columns), scales));
            } else {
                Sum& sum = sums[t][i % kSums];
                sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(factors.dot(columns)), _mm256_castsi256_ps(scales),
                                      sum);
            }
        }
    }
};

inline __m256 as_floats(__m256i v) { return _mm256_cvtepi32_ps(v); }
inline __m256 as_floats(__m256 v) { return v; }

template <class U, int NT, bool Exact>
[[gnu::always_inline]] inline void add_block(const uint8_t* p, const Tokens<U>& x, int64_t c0, int c,
                                             const Words<U, NT>& words, Sums<U, NT>* to) {
    typedef WordSink<U, NT, Exact> Sink;
    typename Sink::Sum sums[NT][Sink::kSums];
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t)
        for (int i = 0; i < Sink::kSums; ++i) sums[t][i] = typename Sink::Sum{};
    RowCodes<U>::codes(p, Sink{sums, x.x, &words, (c0 + c) * kChunk, c, 0});
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t) {
        const __m256 unit = _mm256_set1_ps(words.factor[c] * x.records[t][c0 + c].unit);
        for (int i = 0; i < Sink::kSums; ++i)
            to->total[t][i % 2] = _mm256_fmadd_ps(as_floats(sums[t][i]), unit, to->total[t][i % 2]);
    }
}

template <class U, int NT>
[[gnu::always_inline]] inline void add_segment(const uint8_t* p, const Tokens<U>& x, int64_t c0, int n_chunks,
                                               Sums<U, NT>* to) {
    Words<U, NT> words;
    make_words<U, NT>(p, x, c0, n_chunks, &words, to);
    for (int c = 0; c < n_chunks; ++c, p += U::kBlockBytes) {
        prefetch_weights<U::kBlockBytes>(p);
        if (x.template exact<NT>(c0 + c))
            add_block<U, NT, true>(p, x, c0, c, words, to);
        else
            add_block<U, NT, false>(p, x, c0, c, words, to);
    }
}

template <class U, int NT>
void multiply_row(const uint8_t* row, int64_t n_chunks, const Tokens<U>& x, float* out) {
    Sums<U, NT> sums;
    const uint8_t* p = row + RowHeader<U>::kBytes;
    for (int64_t c = 0; c < n_chunks; c += kSegmentChunks)
        add_segment<U, NT>(p + c * U::kBlockBytes, x, c,
                           static_cast<int>(std::min<int64_t>(kSegmentChunks, n_chunks - c)), &sums);
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t) {
        out[t * kBlockRows] = sums.of(t);
        if constexpr (RowHeader<U>::kBytes > 0) out[t * kBlockRows] *= RowHeader<U>::scale(row, 0);
    }
}

template <class U, int NT>
void multiply(const RowBlock& rows, const Tokens<U>& x, int n_tokens, float* out) {
    if (n_tokens < NT) {
        if constexpr (NT > 1) multiply<U, NT - 1>(rows, x, n_tokens, out);
        return;
    }
    for (int h = 0; h < 2; ++h)
        for (int i = 0; i < rows.n[h]; ++i)
            multiply_row<U, NT>(rows.row(h, i), rows.n_in / kChunk, x, out + h * kHalfRows + i);
}

template <class U, int MaxTokens>
void gemv(const RowBlock& rows, const TokenSet& tokens, float* out, uint8_t* work) {
    const ActQ8Layout at(rows.n_in);
    const Record<U>* records[MaxTokens];
    for (int t = 0; t < tokens.n; ++t) {
        auto* to = reinterpret_cast<Record<U>*>(work) + t * (at.n / kChunk);
        if (tokens.fresh) prepare<U>(tokens.x[t], at, to);
        records[t] = to;
    }
    multiply<U, MaxTokens>(rows, {tokens.x, records}, tokens.n, out);
}

template <class U, int MaxTokens>
size_t work_bytes(int64_t n_in) {
    return MaxTokens * static_cast<size_t>(round_up(n_in, kChunk) / kChunk) * sizeof(Record<U>);
}

}  // namespace word_scales

// Types that these products are for: Q2_K, Q3_K and IQ2_K. Those with groups of 32, whose scales take one
// load, gain 0 to 5 %; so do those of more bits, whose sums have to leave 32 bits before the end of a block.
// Where there are dot products of bytes (AVX-VNNI), which leave no words to multiply, words gain as well:
// one token of Q2_K 1.14, IQ2_K 1.09, Q3_K 0.96 times, two tokens of Q2_K and Q3_K 1.2 times.
template <class U>
constexpr bool kWordScales = word_scales::HasLargestScale<U>::value;

}  // namespace ikpy

#else

namespace ikpy {
template <class U>
constexpr bool kWordScales = false;
}  // namespace ikpy

#endif
