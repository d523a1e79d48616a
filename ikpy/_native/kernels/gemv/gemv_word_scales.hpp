// Few tokens on AVX2, types of few bits with groups of 16 and small integers as scales: products of 32
// columns are multiplied by their scales as words and added up as integers. A conversion and a multiply-add
// for every 32 columns, which scales in floats take, cost Zen 3 half as much again: 21.9 cycles for 256
// nibbles instead of 14.5.
//
// A word is the scale of a group times that of the activations, which has 8 significant bits, in a unit that
// is a power of two. Blocks with groups whose scale of the activations is too small for a word to be exact
// are multiplied with scales in floats: of Gaussian activations 1 in 100 blocks of types that leave one
// binade below the largest scale, next to none where there are two (Q3_K, IQ2_K) or three (Q2_K); of those of
// small trained models 9 to 19 in 100 where there are two.
#pragma once
#include <cmath>

#include "kernels/gemv/gemv_int8_avx2.hpp"

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

// Of 256 activations; groups in the order of words: eight even ones, then eight odd ones.
struct Record {
    alignas(32) int16_t scale[16];  // in the unit of words
    alignas(32) int16_t sum[16];
    float unit;
    bool exact;  // whether all scales are integers
};

template <class U>
void prepare(const uint8_t* x, const ActQ8Layout& at, Record* records) {
    static_assert(U::kGroup == 16 && steps<U>() > 1);
    const auto* scale = reinterpret_cast<const float*>(x + at.scale);
    const auto* sum = reinterpret_cast<const float*>(x + at.sum16);
    for (int64_t c = 0; c < at.n / kChunk; ++c, scale += 8, sum += 16, ++records) {
        float largest = 0.0f;
        for (int g = 0; g < 8; ++g) largest = std::max(largest, scale[g]);
        int exponent;
        std::frexp(largest, &exponent);
        records->unit = std::ldexp(1.0f / (256 * steps<U>()), exponent);
        records->exact = true;
        for (int g = 0; g < 8; ++g) {
            const float in_units = scale[g] / records->unit;
            // Also false for those that are not finite.
            const bool exact = in_units == std::rint(in_units) && in_units <= 256.0f * steps<U>();
            records->exact = records->exact && exact;
            records->scale[g] = records->scale[g + 8] = static_cast<int16_t>(exact ? in_units : 0.0f);
        }
        for (int g = 0; g < 16; ++g) records->sum[g / 2 + g % 2 * 8] = static_cast<int16_t>(sum[g]);
    }
}

// Tokens: their rows and records.
struct Tokens {
    RowTokens rows;
    const Record* const* records;
    bool all_exact;

    template <int NT>
    bool exact(int64_t c) const {
        bool all = true;
        for (int t = 0; t < NT; ++t) all = all && records[t][c].exact;
        return all;
    }
};

// Sums over a row of the blocks with exact words.
template <class U, int NT>
struct Sums {
    __m256 total[NT], offset[NT];  // offset: as in RowSums

    Sums() {
#pragma GCC unroll 8
        for (int t = 0; t < NT; ++t) total[t] = offset[t] = _mm256_setzero_ps();
    }
    float of(int t) const {
        const __m256 factor = _mm256_set1_ps(U::kZero == 0 ? 1.0f : -static_cast<float>(U::kZero));
        return sum_of_lanes(_mm256_fmadd_ps(offset[t], factor, total[t]));
    }
};

// Words of a segment, each twice in a dword and as lanes_of_halves() wants them, and the units of the sums of
// their products.
template <int NT>
struct Words {
    alignas(32) float of[NT][kSegmentChunks][16];
    float unit[NT][kSegmentChunks];
};

// What the sums of the activations contribute to a block, in the unit of words and by kZero too much.
template <class U>
[[gnu::always_inline]] inline __m256 offset_of_block(const BlockWords& w, __m256i words,
                                                     const Record& record) {
    const __m256i sums = _mm256_load_si256(reinterpret_cast<const __m256i*>(record.sum));
    const __m256 all = _mm256_cvtepi32_ps(_mm256_madd_epi16(words, sums));
    if (step_of<U>() == 0) return all;
    const __m256i shifted = _mm256_madd_epi16(_mm256_and_si256(words, w.shifted), sums);
    constexpr float kFactor = -static_cast<float>(step_of<U>()) / std::max(U::kZero, 1);
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(shifted), _mm256_set1_ps(kFactor), all);
}

template <class U, int NT>
[[gnu::always_inline]] inline void make_words(const uint8_t* p, const Tokens& x, int64_t c0, int n_chunks,
                                              Words<NT>* words, Sums<U, NT>* sums) {
    // Unrolled by GCC, every copy would make its constants again.
#pragma GCC unroll 1
    for (int c = 0; c < n_chunks; ++c, p += U::kBlockBytes) {
        if (!x.template exact<NT>(c0 + c)) continue;
        const BlockWords w = RowCodes<U>::words(p);
#pragma GCC unroll 8
        for (int t = 0; t < NT; ++t) {
            const Record& record = x.records[t][c0 + c];
            const __m256i scale = _mm256_load_si256(reinterpret_cast<const __m256i*>(record.scale));
            const __m256i of = _mm256_mullo_epi16(w.d, scale);
            auto* to = reinterpret_cast<__m256i*>(words->of[t][c]);
            _mm256_store_si256(to, _mm256_unpacklo_epi16(of, of));
            _mm256_store_si256(to + 1, _mm256_unpackhi_epi16(of, of));
            words->unit[t][c] = w.factor * record.unit;
            const bool own = U::kZero == 0;  // offsets of groups
            const __m256 offset = offset_of_block<U>(w, own ? _mm256_mullo_epi16(w.m, scale) : of, record);
            const float unit = own ? w.offset_factor * record.unit : words->unit[t][c];
            sums->offset[t] = _mm256_fmadd_ps(offset, _mm256_set1_ps(unit), sums->offset[t]);
        }
    }
}

// Multiplies 32 codes at a time as they are unpacked; sums: of block `chunk` of a segment.
template <class U, int NT>
struct WordSink {
    __m256i* sums;
    const uint8_t* const* x;
    const Words<NT>* words;
    int64_t k;
    int chunk, element;

    WordSink operator+(int n) const { return {sums, x, words, k, chunk, element + n}; }
    [[gnu::always_inline]] void take(c32::Codes32 v) const {
#pragma GCC unroll 8
        for (int t = 0; t < NT; ++t) {
            const __m256i columns = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x[t] + k + element));
            const __m256i pairs = _mm256_maddubs_epi16(reinterpret_cast<__m256i>(v), columns);
            const __m256i lanes = _mm256_castps_si256(scale_lanes<U>(words->of[t][chunk], element / 32));
            sums[t] = _mm256_add_epi32(sums[t], _mm256_madd_epi16(pairs, lanes));
        }
    }
};

template <class U, int NT>
[[gnu::always_inline]] inline void add_block(const uint8_t* p, const Tokens& x, int64_t c0, int c,
                                             const Words<NT>& words, Sums<U, NT>* to) {
    __m256i sums[NT];
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t) sums[t] = _mm256_setzero_si256();
    RowCodes<U>::codes(p, WordSink<U, NT>{sums, x.rows.x, &words, (c0 + c) * kChunk, c, 0});
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t)
        to->total[t] =
            _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[t]), _mm256_set1_ps(words.unit[t][c]), to->total[t]);
}

// Adds the blocks whose words are not exact with scales in floats. Apart from the others, since a call keeps
// nothing in registers.
template <class U, int NT>
[[gnu::noinline]] void add_in_floats(const uint8_t* p, const ActQ8Layout& at, int64_t n_chunks,
                                     const Tokens& x, float* out) {
    RowSums<U, NT> sums;
    for (int64_t c = 0; c < n_chunks; ++c, p += U::kBlockBytes)
        if (!x.template exact<NT>(c)) ikpy::add_segment<U, NT>(p, 0, x.rows, at, c * kChunk, 1, &sums);
    for (int t = 0; t < NT; ++t) out[t * kBlockRows] += sums.of(t);
}

template <class U, int NT>
[[gnu::always_inline]] inline void multiply_row(const uint8_t* row, const ActQ8Layout& at, int64_t n_chunks,
                                                const Tokens& x, float* out) {
    Sums<U, NT> sums;
    Words<NT> words;
    const uint8_t* p = row;
    for (int64_t c0 = 0; c0 < n_chunks; c0 += kSegmentChunks) {
        const int n = static_cast<int>(std::min<int64_t>(kSegmentChunks, n_chunks - c0));
        make_words<U, NT>(p, x, c0, n, &words, &sums);
        for (int c = 0; c < n; ++c, p += U::kBlockBytes) {
            prefetch_weights<U::kBlockBytes>(p);
            if (x.template exact<NT>(c0 + c)) add_block<U, NT>(p, x, c0, c, words, &sums);
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t) out[t * kBlockRows] = sums.of(t);
    if (!x.all_exact) add_in_floats<U, NT>(row, at, n_chunks, x, out);
}

template <class U, int NT>
void multiply(const RowBlock& rows, const ActQ8Layout& at, const Tokens& x, int n_tokens, float* out) {
    if (n_tokens < NT) {
        if constexpr (NT > 1) multiply<U, NT - 1>(rows, at, x, n_tokens, out);
        return;
    }
    for (int h = 0; h < 2; ++h)
        for (int i = 0; i < rows.n[h]; ++i)
            multiply_row<U, NT>(rows.row(h, i), at, rows.n_in / kChunk, x, out + h * kHalfRows + i);
}

template <class U, int MaxTokens>
void gemv(const RowBlock& rows, const TokenSet& tokens, float* out, uint8_t* work) {
    const ActQ8Layout at(rows.n_in);
    const float* sums[MaxTokens];
    const Record* records[MaxTokens];
    auto* next = reinterpret_cast<Record*>(work);
    bool all_exact = true;
    for (int t = 0; t < tokens.n; ++t, next += at.n / kChunk) {
        if (tokens.fresh) prepare<U>(tokens.x[t], at, next);
        records[t] = next;
        all_exact =
            all_exact && std::all_of(next, next + at.n / kChunk, [](const Record& r) { return r.exact; });
    }
    find_sums<U>(tokens, at, reinterpret_cast<uint8_t*>(next), sums);
    multiply<U, MaxTokens>(rows, at, {{tokens.x, sums}, records, all_exact}, tokens.n, out);
}

template <class U, int MaxTokens>
size_t work_bytes(int64_t n_in) {
    return MaxTokens * static_cast<size_t>(round_up(n_in, kChunk) / kChunk) * sizeof(Record) +
           sums_work_bytes<U, MaxTokens>(n_in);
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
