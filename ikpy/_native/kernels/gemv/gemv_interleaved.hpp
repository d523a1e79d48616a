// Products of row-interleaved types with few tokens: the codes of the rows of a vector are multiplied as they
// are unpacked, one row to a lane, so that the integer sums of a scale group are ready for its scales without
// any shuffling.
#pragma once
#include <algorithm>

#include "kernels/gemv/gemv_interleaved_words.hpp"
#include "kernels/matmul/interleaved_scales.hpp"
#include "kernels/matmul/weight_prefetch.hpp"
#include "kernels/simd/byte_dots.hpp"
#include "kernels/simd/simd_f32.hpp"

namespace ikpy {

#if defined(__AVX2__)

constexpr int kLaneRows = 4 * kQuads;  // one to a lane

// U::Steps, or nothing for types without a second table.
template <class U, class = void>
struct StepRows {
    explicit StepRows(const Quads<U::kRows>&) {}
};
template <class U>
struct StepRows<U, std::void_t<typename U::Steps>> : U::Steps {
    using U::Steps::Steps;
};

#if defined(__AVX512VNNI__)
constexpr int kInterleavedTokens =
    12;  // loops over tokens must be unrolled whole, or sums leave the registers
#else
constexpr int kInterleavedTokens = 8;  // with panels from 7 on, 8 tokens took longer than 7 do here
#endif

// Takes codes as an unpacker finds them and adds their products with 32 columns of NT tokens per scale group.
#if defined(IKPY_BYTE_DOTS)

template <class U, int NT>
class GroupDots {
    static constexpr int G = U::kGroup, kGroups = 32 / G;

  public:
    // x: the tokens' columns; starts: where their sums start, see ActQ8Layout.
    GroupDots([[maybe_unused]] const StepRows<U>& steps, [[maybe_unused]] int ib, const uint8_t* const* x,
              int64_t k, int64_t starts)
        : x_(x), k_(k) {
        for (int g = 0; g < kGroups; ++g) {
#pragma GCC unroll 16
            for (int t = 0; t < NT; ++t)
                dot_[t][g] = U::kZero == 0 ? all_dwords(kStartBits) : broadcast_dword(x[t] + starts + 4 * g);
#if defined(__AVX512VNNI__)
            if constexpr (StepOf<U>::kStep > 0) start_unshifted(g, steps.of(ib, g), x, starts);
#endif
        }
    }
    void put(int column, Lanes v) {
#pragma GCC unroll 16
        for (int t = 0; t < NT; ++t) {
            ByteSums& sum = dot_[t][column / G];
            sum = add_byte_dots(sum, reinterpret_cast<ByteSums>(v), broadcast_dword(x_[t] + k_ + column));
        }
    }
#if defined(__AVX512VNNI__)
    template <class F>
    void put(int column, Lanes v, F) {
        put(column, v);
    }
#else
    template <class F>
    void put(int column, Lanes v, F step) {
        put(column, v + step());
    }
#endif
    simd::V sum(int t, int g, const uint8_t*) const {
        return float_bits(dot_[t][g]) - simd::set1(kStartValue);
    }

  private:
#if defined(__AVX512VNNI__)
    // Codes without the step are codes of a table whose zero is that much lower.
    void start_unshifted(int g, __mmask16 shifted, const uint8_t* const* x, int64_t starts) {
#pragma GCC unroll 16
        for (int t = 0; t < NT; ++t) {
            const auto start = load_unaligned<int32_t>(x[t] + starts + 4 * g);
            dot_[t][g] = _mm512_mask_set1_epi32(dot_[t][g], shifted,
                                                start - ((start - kStartBits) >> 7) * StepOf<U>::kStep);
        }
    }
#endif

    const uint8_t* const* x_;
    int64_t k_;
    ByteSums dot_[NT][kGroups];
};

#else

template <class U, int NT>
class GroupDots {
    static constexpr int G = U::kGroup, kGroups = 32 / G;
    typedef PairSums<U, NT> Pairs;

  public:
    GroupDots(const StepRows<U>&, int, const uint8_t* const* x, int64_t k, int64_t) : pairs_(x, k) {}
    void put(int column, Lanes v) {
        pairs_.add(column, Pairs::factors(v), [&](int t, int g, int n, __m256i pairs) {
            const __m256i dot = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
            dot_[t][g] = n < Pairs::kPairs ? dot : _mm256_add_epi32(dot_[t][g], dot);
        });
    }
    template <class F>
    void put(int column, Lanes v, F step) {
        put(column, v + step());
    }
    // Of the codes around their zero; sums: the sums of the token's groups.
    simd::V sum(int t, int g, const uint8_t* sums) const {
        constexpr int kLow = CodeRange<U>::kLow;
        const __m256 dot = _mm256_cvtepi32_ps(dot_[t][g]);
        if (Pairs::kSigned || U::kZero == kLow) return dot;
        return simd::fma(simd::set1(load_unaligned<float>(sums + 4 * g)),
                         simd::set1(static_cast<float>(kLow - U::kZero)), dot);
    }

  private:
    Pairs pairs_;
    __m256i dot_[NT][kGroups];
};

#endif

// Adds the products of 32 columns from column k of the activations on to total[t]; d and m: their scales and
// offsets.
template <class U, int NT>
inline void add_columns(const Quads<U::kRows>& quads, const StepRows<U>& steps, int ib, const float* d,
                        const float* m, const uint8_t* const* x, const ActQ8Layout& at, int64_t k,
                        simd::V* total) {
    constexpr int G = U::kGroup, kGroups = 32 / G;
    const int64_t sums = (G == 16 ? at.sum16 : at.sum32) + k / G * 4;
    const int64_t starts = (G == 16 ? at.start16 : at.start32) + k / G * 4;
    GroupDots<U, NT> dots(steps, ib, x, k, starts);
    U::codes(quads, ib, dots);
#pragma GCC unroll 16
    for (int t = 0; t < NT; ++t) {
        simd::V value = simd::set1(0.0f);
#pragma GCC unroll 2
        for (int g = 0; g < kGroups; ++g) {
            value = simd::fma(dots.sum(t, g, x[t] + sums), simd::load(d + g * kHalfRows), value);
            if (U::kZero == 0)
                value = simd::fma(simd::load(m + g * kHalfRows),
                                  simd::set1(load_unaligned<float>(x[t] + sums + 4 * g)), value);
        }
        const float scale = load_unaligned<float>(x[t] + at.scale + k / 32 * 4);
        total[t] = simd::fma(value, simd::set1(scale), total[t]);
    }
}

// Where the bytes of the rows of a vector lie: groups of rows one after the other, each of them read from its
// first block to the last at the same time as the others.
template <int R>
struct RowGroups {
    static constexpr int kCount = std::max(1, kLaneRows / R);
    const uint8_t* first[kCount];
    int place;      // of the first quad in its group
    int64_t bytes;  // of a group

    SideBySide side_by_side() const { return {kCount, bytes}; }
};

// Asks for the parts of a block that come later in the rows of a vector.
template <class U, int Parts>
class PartsAhead {
  public:
    PartsAhead(const SideBySide& side_by_side, int64_t offset)
        : far_(side_by_side.skip(offset, kPrefetch.into_l2)),
          near_(side_by_side.skip(offset, kPrefetch.beside_into_l1)) {}
    [[gnu::always_inline]] void ask_for(const Quads<U::kRows>& quads, int part) const {
        for (int q = 0; q < kQuads; q += U::kRows / 4) {
            prefetch_weights_beside<kBytes>(quads.block[q] + part * kBytes, far_, near_);
        }
    }
    // Into L2 alone, for what is unpacked into a panel.
    [[gnu::always_inline]] void ask_for_later(const Quads<U::kRows>& quads, int part) const {
        for (int q = 0; q < kQuads; q += U::kRows / 4)
            prefetch_weights_into_l2<kBytes>(quads.block[q] + part * kBytes, far_);
    }

  private:
    static constexpr int kBytes = U::kBlockBytes / Parts;
    const int64_t far_, near_;
};

// Adds the products of one block of the rows of a vector to total[t].
template <class U, int NT>
inline void add_block(const RowGroups<U::kRows>& groups, const uint8_t* const* x, const ActQ8Layout& at,
                      int64_t k, simd::V* total) {
    constexpr int R = U::kRows, kParts = U::kBlock / 32;
    constexpr int kScales = U::kBlock / U::kGroup * kHalfRows;
    const int64_t offset = k / U::kBlock * U::kBlockBytes;
    alignas(64) float d[kScales], m[U::kZero == 0 ? kScales : 1];
    Quads<R> quads;
    for (int q = 0; q < kQuads; ++q) {
        quads.block[q] = groups.first[4 * q / R] + offset;
        quads.place[q] = groups.place + q % (R / 4);
    }
    const PartsAhead<U, kParts> ahead(groups.side_by_side(), offset);
    if constexpr (row_words::kHas<U>) {
        for (int ib = 0; ib < kParts; ++ib) ahead.ask_for(quads, ib);
        row_words::add_block<U, NT>(quads, x, at, k, total);
        return;
    }
    block_scales<U>(quads, d, m);
    const StepRows<U> steps(quads);
    for (int ib = 0; ib < kParts; ++ib) {
        ahead.ask_for(quads, ib);
        const int scales = ib * kScales / kParts;
        add_columns<U, NT>(quads, steps, ib, d + scales, m + (U::kZero == 0 ? scales : 0), x, at, k + 32 * ib,
                           total);
    }
}

// out[t * kBlockRows + i]: products of the 16 rows of half h with n_tokens <= NT tokens, without row scales.
template <class U, int NT>
void interleaved_dots(const RowBlock& rows, int h, const uint8_t* const* x, int n_tokens,
                      const ActQ8Layout& at, float* out) {
    if constexpr (NT > 1)
        if (n_tokens < NT) return interleaved_dots<U, NT - 1>(rows, h, x, n_tokens, at, out);
    for (int row = 0; row < kHalfRows; row += kLaneRows) {
        RowGroups<U::kRows> groups;
        groups.bytes = U::kRows * rows.stride;
        groups.place = row % U::kRows / 4;
        for (int i = 0; i < groups.kCount; ++i)
            groups.first[i] = rows.group(h, row + i * U::kRows, U::kRows) + RowHeader<U>::kBytes;
        simd::V total[NT];
        for (int t = 0; t < NT; ++t) total[t] = simd::set1(0.0f);
        for (int64_t k = 0; k < rows.n_in; k += U::kBlock) add_block<U, NT>(groups, x, at, k, total);
        for (int t = 0; t < NT; ++t) simd::store(out + t * kBlockRows + row, total[t]);
    }
}

#else

constexpr int kInterleavedTokens = 4;

#endif

}  // namespace ikpy
