// Few tokens on AVX2 alone, row-interleaved types with integer scales for groups of 16 columns: products of a
// group are multiplied with the scales of its rows as words and added up as integers, so that 32 columns take
// one conversion, and no scale becomes a float. What zero and the second table have too much is a product of
// the same words with the sums of the activations.
//
// Zen 3, 1e9 weights/s of one core before and now: Q2_K_R4 24.4, 32.3, Q3_K_R4 21.5, 24.7,
// Q6_K_R4 20.9, 23.0, IQ2_K_R4 19.4, 27.3, IQ3_K_R4 15.4, 20.8, IQ4_K_R4 15.9, 20.2, IQ5_K_R4 12.5, 16.5.
#pragma once
#include <type_traits>
#include <utility>

#include "kernels/matmul/interleaved_quads.hpp"
#include "kernels/simd/byte_dots.hpp"
#include "kernels/simd/simd_f32.hpp"

namespace ikpy {

#if defined(__AVX2__) && !defined(IKPY_BYTE_DOTS)

// Products of 32 columns of a vector of rows with NT tokens, as many added up in 16 bits as cannot exceed
// them (activations are at most 127). Factors are codes that span less than 128 less the lowest, others as
// signed values, multiplied as |w| * sign(x, w), exact as in Factors of gemv_int8_avx2.hpp.
template <class U, int NT>
class PairSums {
    static constexpr int G = U::kGroup, kPuts = G / 4;
    static constexpr int kLow = CodeRange<U>::kLow, kSpan = CodeRange<U>::kHigh - kLow;

  public:
    static constexpr bool kSigned = kSpan > 127;
    static constexpr int kPairs = kSigned ? 1 : std::min(kPuts, exact_pairs(kSpan));

    PairSums(const uint8_t* const* x, int64_t k) : x_(x), k_(k) {}

    static Lanes factors(Lanes codes) { return codes - static_cast<uint8_t>(kSigned ? 128 : kLow); }

    // Four columns; calls done(t, g, n, pairs) for sums of group g that are complete, n put before these.
    template <class F>
    [[gnu::always_inline]] void add(int column, Lanes v, F done) {
        const int g = column / G, n = n_[g]++;
        const auto codes = reinterpret_cast<__m256i>(v);
        const __m256i magnitude = kSigned ? _mm256_abs_epi8(codes) : codes;
#pragma GCC unroll 16
        for (int t = 0; t < NT; ++t) {
            __m256i four = _mm256_set1_epi32(load_unaligned<int32_t>(x_[t] + k_ + column));
            if (kSigned) four = _mm256_sign_epi8(four, codes);
            const __m256i pairs = _mm256_maddubs_epi16(magnitude, four);
            sum_[t][g] = n % kPairs ? _mm256_add_epi16(sum_[t][g], pairs) : pairs;
            if ((n + 1) % kPairs == 0 || n + 1 == kPuts) done(t, g, n, sum_[t][g]);
        }
    }

  private:
    const uint8_t* const* x_;
    int64_t k_;
    int n_[32 / G] = {};
    __m256i sum_[NT][32 / G];
};

#endif

namespace row_words {

// Says to unpackers that codes of a level table are wanted as they are multiplied: less the lowest level, or
// signed where levels span more than 127.
template <class Out, class = void>
struct WantsFactors : std::false_type {};
template <class Out>
struct WantsFactors<Out, std::void_t<decltype(Out::kFactors)>> : std::true_type {};

#if defined(__AVX2__) && !defined(IKPY_BYTE_DOTS)

template <class U, class = void>
struct HasWordScales : std::false_type {};
template <class U>
struct HasWordScales<U, std::void_t<decltype(U::word_scales(std::declval<Quads<4>>(), 0))>> : std::true_type {
};

// Orders of bytes, four of a row of four groups each, as upper bytes of words: of one group twice or of two
// groups next to each other.
struct Orders {
    uint8_t of[2][3][32];  // of groups 2 h and 2 h + 1: the first, the second, both
};
constexpr Orders make_orders() {
    Orders orders{};
    for (int h = 0; h < 2; ++h)
        for (int kind = 0; kind < 3; ++kind)
            for (int b = 0; b < 32; ++b) {
                const int row = b / 4 % 4, group = 2 * h + (kind < 2 ? kind : b / 2 % 2);
                orders.of[h][kind][b] = static_cast<uint8_t>(b % 2 ? 4 * group + row : 128);
            }
    return orders;
}
alignas(32) inline constexpr Orders kOrders = make_orders();

inline __m256i words_of(Lanes bytes, int h, int kind) {
    const __m256i order = _mm256_load_si256(reinterpret_cast<const __m256i*>(kOrders.of[h][kind]));
    return _mm256_srai_epi16(_mm256_shuffle_epi8(reinterpret_cast<__m256i>(bytes), order), 8);
}

// Takes codes of 32 columns as an unpacker finds them: adds their products times the words of their groups.
template <class U, int NT>
class WordDots {
    typedef PairSums<U, NT> Pairs;

  public:
    static constexpr bool kSigned = Pairs::kSigned, kFactors = true;

    // words: of the two groups; x: the tokens, of which column k is the first.
    WordDots(const __m256i* words, const uint8_t* const* x, int64_t k) : words_(words), pairs_(x, k) {}

    void put(int column, Lanes v) { put_factors(column, U::kZero > 0 ? Pairs::factors(v) : v); }
    // The second table counts in the products with the sums of the activations.
    template <class F>
    void put(int column, Lanes v, F) {
        put(column, v);
    }
    void put_factors(int column, Lanes v) {
        const bool first = !started_;
        pairs_.add(column, v, [&](int t, int g, int, __m256i pairs) {
            const __m256i dot = _mm256_madd_epi16(pairs, words_[g]);
            sum_[t] = first ? dot : _mm256_add_epi32(sum_[t], dot);
            started_ = true;
        });
    }
    __m256i sum(int t) const { return sum_[t]; }

  private:
    const __m256i* words_;
    Pairs pairs_;
    bool started_ = false;
    __m256i sum_[NT];
};

// Sums of a token's 16 groups of 256 columns as words.
inline void sums_as_words(const uint8_t* sum16, int16_t* to) {
    const auto* sum = reinterpret_cast<const float*>(sum16);
    const __m256i a = _mm256_cvtps_epi32(_mm256_loadu_ps(sum)),
                  b = _mm256_cvtps_epi32(_mm256_loadu_ps(sum + 8));
    _mm256_store_si256(reinterpret_cast<__m256i*>(to),
                       _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8));
}

// Sums over a block of the rows of a vector, without the numbers of the rows.
template <class U, int NT>
class BlockSums {
    static constexpr int kStep = StepOf<U>::kStep;
    static constexpr int kBase = WordDots<U, NT>::kSigned ? 0 : CodeRange<U>::kLow - U::kZero;

  public:
    BlockSums(const Quads<4>& quads, const uint8_t* const* x, const ActQ8Layout& at, int64_t k)
        : quads_(quads), x_(x), at_(at), k_(k) {
#pragma GCC unroll 8
        for (int t = 0; t < NT; ++t) {
            sums_as_words(x[t] + at.sum16 + k / 16 * 4, words_[t]);
            value_[t] = offset_[t] = _mm256_setzero_ps();
        }
        if (kStep > 0)
            shifted_ = _mm256_blend_epi16(reinterpret_cast<__m256i>(quads.rows(8)),
                                          reinterpret_cast<__m256i>(quads.rows(12)), 0xAA);
    }

    // Two scale groups of 32 columns; s: the scale bytes of four groups.
    [[gnu::always_inline]] void add(int ib, Lanes s) {
        const __m256i words[2] = {words_of(s, ib % 2, 0), words_of(s, ib % 2, 1)};
        WordDots<U, NT> dots(words, x_, k_ + 32 * ib);
        U::codes(quads_, ib, dots);
        const __m256i both = correction(words_of(s, ib % 2, 2), ib);
#pragma GCC unroll 8
        for (int t = 0; t < NT; ++t) {
            __m256i sum = dots.sum(t);
            if (kBase != 0 || kStep > 0) sum = _mm256_add_epi32(sum, _mm256_madd_epi16(both, sums(t, ib)));
            value_[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale(t, ib), value_[t]);
        }
    }
    // The same of offsets.
    [[gnu::always_inline]] void add_offsets(int ib, Lanes m) {
        const __m256i both = words_of(m, ib % 2, 2);
#pragma GCC unroll 8
        for (int t = 0; t < NT; ++t)
            offset_[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_madd_epi16(both, sums(t, ib))),
                                         scale(t, ib), offset_[t]);
    }
    __m256 value(int t) const { return value_[t]; }
    __m256 offset(int t) const { return offset_[t]; }

  private:
    // What the sums of two groups are multiplied with.
    __m256i correction(__m256i both, int ib) const {
        if (kStep == 0) return _mm256_mullo_epi16(both, _mm256_set1_epi16(kBase));
        const __m256i second = _mm256_srai_epi16(_mm256_slli_epi16(shifted_, 15 - ib), 15);
        const __m256i step = _mm256_and_si256(second, _mm256_set1_epi16(kStep));
        return _mm256_mullo_epi16(both, _mm256_add_epi16(step, _mm256_set1_epi16(kBase)));
    }
    __m256i sums(int t, int ib) const {
        return _mm256_set1_epi32(
            load_unaligned<int32_t>(reinterpret_cast<const uint8_t*>(words_[t] + 2 * ib)));
    }
    __m256 scale(int t, int ib) const {
        return _mm256_set1_ps(load_unaligned<float>(x_[t] + at_.scale + (k_ / 32 + ib) * 4));
    }

    const Quads<4>& quads_;
    const uint8_t* const* x_;
    const ActQ8Layout& at_;
    int64_t k_;
    __m256i shifted_;  // words of two groups whose bit ib says that they use the second table
    alignas(32) int16_t words_[NT][16];
    __m256 value_[NT], offset_[NT];
};

// Adds the products of a block of 256 columns from column k on to total[t].
template <class U, int NT>
inline void add_block(const Quads<4>& quads, const uint8_t* const* x, const ActQ8Layout& at, int64_t k,
                      __m256* total) {
    BlockSums<U, NT> sums(quads, x, at, k);
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
        const Lanes s = U::word_scales(quads, part);
        sums.add(2 * part, s);
        sums.add(2 * part + 1, s);
        if constexpr (U::kZero == 0) {
            const Lanes m = U::word_offsets(quads, part);
            sums.add_offsets(2 * part, m);
            sums.add_offsets(2 * part + 1, m);
        }
    }
    const __m256 rows = quads.halves(0);
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t) {
        total[t] = _mm256_fmadd_ps(sums.value(t), rows, total[t]);
        if (U::kZero == 0) total[t] = _mm256_fnmadd_ps(sums.offset(t), quads.halves(8), total[t]);
    }
}

template <class U>
constexpr bool kHas = HasWordScales<U>::value;

#else

template <class U>
constexpr bool kHas = false;
template <class U, int NT>
void add_block(const Quads<U::kRows>&, const uint8_t* const*, const ActQ8Layout&, int64_t, simd::V*);

#endif

}  // namespace row_words
}  // namespace ikpy
