// Panels of symmetric types with a scale for every 16 columns whose pairs of groups are chained: one
// multiply-add turns the sum of the first group into units of the second one's scale, which the second one's
// products are then added to. Three multiply-adds for two groups instead of four.
//
// With r = d1 / d2 and C = kStartValue the float (C + sum1) * r + C * (1 - r) has the bits of an integer,
// kStartBits + round(sum1 * r), from which the second sum goes on. So a pair is off by up to half of d2 times
// the scale of the activations, the least that a weight's code and an activation's change it by. What
// unsigned bytes add to the second sum must not depend on the token: the activations are unsigned (q + 128),
// the codes signed.
#pragma once
#include <algorithm>
#include <cstring>

#include "kernels/matmul/folded_scales.hpp"
#include "kernels/matmul/gemm_int8.hpp"
#include "kernels/matmul/unpacked.hpp"
#include "kernels/simd/simd_f32.hpp"

namespace ikpy {

// Bytes of the columns of a token as chained panels meet them: q + 128 of kPanelColumns, then their scales.
// With these bytes in the rows of activations, whose parts are on more pages then, products of other types
// took 1.03 to 1.05 times as long.
constexpr int64_t kBiasedTokenBytes =
    kPanelColumns + kPanelColumns / 32 * static_cast<int64_t>(sizeof(float));

#if defined(IKPY_BYTE_DOTS)

// n columns of a token.
inline void bias_columns(const uint8_t* x, const ActQ8Layout& at, int64_t k0, int64_t n, uint8_t* to) {
    for (int64_t i = 0; i < n; i += static_cast<int64_t>(sizeof(ByteSums))) {
        const ByteSums q = load_bytes(x + k0 + i) ^ all_dwords(int32_t(0x80808080));
        std::memcpy(to + i, &q, sizeof(q));
    }
    std::memcpy(to + kPanelColumns, x + at.scale + k0 / 8, n / 8);
}

// Rows [first, last) of n_rows, to [panels][n_rows].
inline void bias_rows(const uint8_t* x, int64_t n_in, int64_t n_rows, int64_t first, int64_t last,
                      uint8_t* to) {
    const ActQ8Layout at(n_in);
    const int64_t stride = act_row_bytes(kActQ8, n_in);
    for (int64_t r = first; r < last; ++r)
        for (int64_t k0 = 0; k0 < at.n; k0 += kPanelColumns)
            bias_columns(x + r * stride, at, k0, std::min(kPanelColumns, at.n - k0),
                         to + (k0 / kPanelColumns * n_rows + r) * kBiasedTokenBytes);
}

inline int64_t biased_row_bytes(int64_t n_in) {
    return (ActQ8Layout(n_in).n + kPanelColumns - 1) / kPanelColumns * kBiasedTokenBytes;
}

// n columns of all tokens: where those of each are, if all threads share them, or `to`, which gets them.
inline void biased_tokens(const TokenSet& tokens, const ActQ8Layout& at, int64_t k0, int64_t n, uint8_t* to,
                          const uint8_t** rows) {
    const uint8_t* from = to;
    if (tokens.shared)
        from = tokens.shared +
               (k0 / kPanelColumns * tokens.shared_rows + tokens.first_shared) * kBiasedTokenBytes;
    for (int t = 0; t < tokens.n; ++t) {
        rows[t] = from + t * kBiasedTokenBytes;
        if (!tokens.shared) bias_columns(tokens.x[t], at, k0, n, to + t * kBiasedTokenBytes);
    }
}

// Fewer tokens do not pay for making the chains.
constexpr int kChainTokens = 128;

template <class U>
constexpr bool kChains = U::kGroup == 16 && U::kZero > 0 && !HasIntegerScales<U>::value;

// Small codes are multiplied by 4, so that half a unit is less.
template <class U>
constexpr int kMultiple = CodeRange<U>::kHigh - CodeRange<U>::kLow <= 32 ? 4 : 1;

// The largest magnitude of a code.
template <class U>
constexpr int kLargestCode =
    kMultiple<U> * std::max(CodeRange<U>::kHigh - U::kZero, U::kZero - CodeRange<U>::kLow);

// The largest |r|. It is rounded to steps of kLargestRatio / 2^22, so that C * (1 - r) is exact; coarser ones
// would show in the sums of wide codes.
template <class U>
constexpr float kLargestRatio = kLargestCode<U> > 64 ? 32.0f : 128.0f;

// |r| times the magnitudes of the first group's codes and those of the second: below this sums leave the
// exponent of kStartValue alone, whatever the activations (up to 128).
constexpr float kLargestSize = (1 << 22) / 128;

// Up to this |r| they do whatever the codes.
template <class U>
constexpr float kSafeRatio = std::min(kLargestRatio<U>, kLargestSize / (16.0f * kLargestCode<U>)-1.0f);

// Two groups of the rows of a vector.
struct GroupPair {
    simd::V first, unit;  // d1, d2
    simd::V ratio;        // r
    simd::V added;        // what the multiply-add adds
    ByteSums start[2];    // where the sum of each group starts
    bool fits;
};

inline simd::V to_floats(ByteSums v) {
    return __builtin_convertvector(reinterpret_cast<RowDwords>(v), simd::V);
}

// Makes the codes of a group signed; those of rows that are not used become 0. Returns their sums.
template <int Multiple>
inline ByteSums sign_codes(ByteSums used, uint8_t* codes) {
    ByteSums sum = all_dwords(0);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        auto c =
            reinterpret_cast<RowBytes>((load_bytes(codes + 64 * j) ^ all_dwords(int32_t(0x80808080))) & used);
        for (int f = Multiple; f > 1; f /= 2) c += c;
        std::memcpy(codes + 64 * j, &c, sizeof(c));
        sum = add_byte_dots(sum, all_dwords(0x01010101), reinterpret_cast<ByteSums>(c));
    }
    return sum;
}

inline simd::V magnitudes_of(const uint8_t* codes) {
    ByteSums sum = all_dwords(0);
    for (int j = 0; j < 4; ++j)
        sum = add_byte_dots(sum, magnitudes(load_bytes(codes + 64 * j)), all_dwords(0x01010101));
    return to_floats(sum);
}

// ratio: |r|; codes: signed.
template <class U>
inline bool pair_fits(simd::V ratio, const uint8_t* codes) {
    if (!simd::any_above(ratio, kSafeRatio<U>)) return true;
    if (simd::any_above(ratio, kLargestRatio<U>)) return false;
    return !simd::any_above(simd::fma(ratio, magnitudes_of(codes), magnitudes_of(codes + 16 * kHalfRows)),
                            kLargestSize - 1.0f);
}

template <class U>
inline GroupPair read_pair(const float* d, uint8_t* codes) {
    using simd::V;
    constexpr float kSteps = 3 * kLargestRatio<U>;  // added, it leaves the steps of r
    const V scale = simd::set1(1.0f / kMultiple<U>), d2 = simd::load(d + kHalfRows) * scale;
    GroupPair pair;
    pair.first = simd::load(d) * scale;
    // Without codes any scale will do.
    pair.unit = d2 == simd::zero() ? pair.first : d2;
    pair.ratio = pair.first == pair.unit ? simd::set1(1.0f) : pair.first / pair.unit;
    pair.ratio = (pair.ratio + kSteps) - kSteps;
    const auto used = reinterpret_cast<ByteSums>(d2 != simd::zero());
    const ByteSums sum1 = sign_codes<kMultiple<U>>(all_dwords(-1), codes);
    const ByteSums sum2 = sign_codes<kMultiple<U>>(used, codes + 16 * kHalfRows);
    pair.start[0] = reinterpret_cast<ByteSums>(kStartBits - 128 * reinterpret_cast<RowDwords>(sum1));
    pair.start[1] = reinterpret_cast<ByteSums>(kStartBits - 128 * reinterpret_cast<RowDwords>(sum2));
    pair.added = (1.0f - pair.ratio) * kStartValue - 128.0f * to_floats(sum2);
    pair.fits = pair_fits<U>(simd::max(pair.ratio, -pair.ratio), codes);
    return pair;
}

// d: the scales of two groups of 16 rows, of which the first become r. m: becomes where the first sum starts
// and what the multiply-add adds. Pairs that do not fit keep both scales, and m becomes where both sums
// start.
template <class U>
inline bool chain_pair(float* d, float* m, uint8_t* codes) {
    constexpr int kVectors = kHalfRows / simd::kLanes;
    GroupPair pairs[kVectors];
    bool fits = true;
    for (int v = 0; v < kVectors; ++v) {
        pairs[v] = read_pair<U>(d + v * simd::kLanes, codes + 4 * v * simd::kLanes);
        fits &= pairs[v].fits;
    }
    for (int v = 0; v < kVectors; ++v, d += simd::kLanes, m += simd::kLanes) {
        simd::store(d, fits ? pairs[v].ratio : pairs[v].first);
        simd::store(d + kHalfRows, pairs[v].unit);
        simd::store(m, float_bits(pairs[v].start[0]));
        simd::store(m + kHalfRows, fits ? pairs[v].added : float_bits(pairs[v].start[1]));
    }
    return fits;
}

template <class U, PanelFn Panel>
Int8Panel chained_panel(const RowBlock& rows, int64_t k0, int64_t n, uint8_t* work) {
    Int8Panel p = Panel(rows, k0, n, work);
    for (int h = 0; h < rows.halves(); ++h) {
        p.apart[h] = 0;
        for (int64_t pair = 0; pair < n / 32; ++pair) {
            const int64_t at = h * p.half_scales(16) + pair * 2 * kHalfRows;
            const bool fits =
                chain_pair<U>(p.d + at, p.m + at, p.codes + h * p.half_codes() + pair * 32 * kHalfRows);
            p.apart[h] |= uint32_t{!fits} << pair;
        }
    }
    return p;
}

#endif

}  // namespace ikpy
