// Panels of types whose codes times their integer scales fit into a byte: these products take the place of
// the codes, so groups of 16 columns become groups of 32 with the same sums, which take half of the
// multiply-adds. AVX2 alone does not gain: bytes of its microkernel have to stay below 128. Offsets of groups
// of 16 are integers too: they meet the sums of the activations in dot products of words.
#pragma once
#include "kernels/matmul/gemm_int8.hpp"
#include "kernels/matmul/unpacked.hpp"
#include "kernels/simd/simd_f32.hpp"

namespace ikpy {

using PanelFn = Int8Panel (*)(const RowBlock&, int64_t k0, int64_t n, uint8_t* work);

// What the microkernel has to know of panels of U.
template <class U>
struct FoldedCodes {
    static constexpr int kGroup = 32, kOffsetGroup = U::kGroup, kZero = U::kZero > 0 ? 128 : 0;
};

#if defined(IKPY_BYTE_DOTS)

// Fewer tokens do not pay for the multiplication of the codes: products of 16 tokens took 0.98 (Q2_K)
// and 1.08 times (Q3_K) as long with it.
constexpr int kFoldTokens = 32;

template <class U>
constexpr bool folds_into_bytes() {
    using S = IntegerScaled<U>;
    const int low = U::kZero - CodeRange<U>::kLow, high = CodeRange<U>::kHigh - U::kZero;
    if (U::kZero == 0) return S::kLowScale == 0 && high * S::kHighScale <= 255;
    return low * -S::kLowScale <= 128 && high * S::kHighScale <= 128 && low * S::kHighScale <= 127 &&
           high * -S::kLowScale <= 127 && (low + high) * -S::kLowScale <= 255;
}

// The rows of a vector, four columns of each.
typedef int32_t RowDwords __attribute__((vector_size(4 * simd::kLanes)));
typedef uint16_t RowWords __attribute__((vector_size(4 * simd::kLanes)));
typedef uint8_t RowBytes __attribute__((vector_size(4 * simd::kLanes)));

// Multiplies the codes of 16 columns by the integers of their rows, kLanes at a time. Two bytes are
// multiplied as one word: no product exceeds 255. Symmetric codes become 128 - (code - zero) * scale, as -4 *
// -32 does not fit the other way round: with n = |scale| that is 128 - low * n + (code - lowest) * n for
// negative scales and 128 - high * n + (highest - code) * n for others.
template <class U>
inline void fold_group(RowDwords scale, uint8_t* codes) {
    constexpr int kLow = CodeRange<U>::kLow, kHigh = CodeRange<U>::kHigh, kSpan = kHigh - kLow;
    static_assert(folds_into_bytes<U>() && (kSpan & (kSpan + 1)) == 0);
    const RowDwords negative = scale < 0, n = negative ? -scale : scale;
    const auto words = reinterpret_cast<RowWords>(n | n << 16);
    const RowDwords below = negative ? RowDwords{} + (U::kZero - kLow) : RowDwords{} + (kHigh - U::kZero);
    const RowDwords first = (128 - below * n) & 255, twice = first | first << 8;
    const auto base = reinterpret_cast<RowBytes>(twice | twice << 16);
    const auto flip = reinterpret_cast<RowBytes>(~negative & (0x01010101 * kSpan));
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        auto v = load_unaligned<RowBytes>(codes + 64 * j);
        if (U::kZero > 0) v = (v - static_cast<uint8_t>(kLow - PanelCodes<U>::kBase)) ^ flip;
        v = reinterpret_cast<RowBytes>(reinterpret_cast<RowWords>(v) * words);
        if (U::kZero > 0) v += base;
        std::memcpy(codes + 64 * j, &v, sizeof(v));
    }
}

// Two groups of 16 columns become one of 32. scales, codes: of the 16 rows.
template <class U>
inline void fold_groups(const float* scales, uint8_t* codes) {
    for (int i = 0; i < 2; ++i)
        for (int row = 0; row < kHalfRows; row += simd::kLanes)
            fold_group<U>(__builtin_convertvector(simd::load(scales + i * kHalfRows + row), RowDwords),
                          codes + 16 * kHalfRows * i + 4 * row);
}

// factors: what the integers of the rows are multiplied by; m: [16 groups][16 rows] offsets of 256 columns,
// which become what the microkernel reads.
inline void pack_offsets(const float* factors, float* m) {
    for (int row = 0; row < kHalfRows; row += simd::kLanes) {
        const simd::V factor = simd::load(factors + row), none = simd::zero();
        const simd::V inverse = factor == none ? none : 1.0f / factor;
        const auto integers = [&](int group) {
            const simd::V v = simd::load(m + group * kHalfRows + row) * inverse;
            return __builtin_convertvector(v + 0.5f, RowDwords);
        };
        for (int pair = 0; pair < 8; ++pair) {
            const RowDwords two = integers(2 * pair) | integers(2 * pair + 1) << 16;
            std::memcpy(m + pair * kHalfRows + row, &two, sizeof(two));
        }
        simd::store(m + 8 * kHalfRows + row, factor);
    }
}

// A panel of integer scales with these in the codes; d of groups of 32 are the factors of the blocks.
template <class U, PanelFn Integers>
Int8Panel folded_panel(const RowBlock& rows, int64_t k0, int64_t n, uint8_t* work) {
    const Int8Panel p = Integers(rows, k0, n, work);
    for (int h = 0; h < rows.halves(); ++h) {
        const float* scales = p.d + h * p.half_scales(16);
        float* d = p.d + h * p.half_scales(32);  // overwrites scales that have been read
        uint8_t* codes = p.codes + h * p.half_codes();
        for (int64_t k = 0; k < n; k += U::kBlock) {
            alignas(64) float factors[kHalfRows];
            const auto read = [&](float (*of)(const uint8_t*, int)) {
                for (int i = 0; i < kHalfRows; ++i)
                    factors[i] =
                        of(rows.group(h, i, RowsOf<U>::kCount) + (k0 + k) / U::kBlock * U::kBlockBytes,
                           i % RowsOf<U>::kCount);
            };
            if constexpr (U::kZero == 0) {
                read(IntegerScaled<U>::offset_factor);
                pack_offsets(factors, p.m + h * p.half_scales(16) + k / 16 * kHalfRows);
            }
            read(IntegerScaled<U>::factor);
            if (U::kZero > 0)
                for (float& factor : factors) factor = -factor;
            for (int g = 0; g < U::kBlock / 32; ++g, d += kHalfRows, scales += 2 * kHalfRows) {
                fold_groups<U>(scales, codes);
                codes += 32 * kHalfRows;
                std::memcpy(d, factors, sizeof(factors));
            }
        }
    }
    return p;
}

#endif

}  // namespace ikpy
