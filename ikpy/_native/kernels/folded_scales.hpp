// Panels of types whose codes times their integer scales fit into a byte: these products take the place of
// the codes, so groups of 16 columns become groups of 32 with the same sums, which take half of the
// multiply-adds. Only AVX-512 gains: bytes of the AVX2 microkernel have to stay below 128.
#pragma once
#include "kernels/gemm_int8.hpp"
#include "kernels/unpacked.hpp"

namespace ikpy {

using PanelFn = Int8Panel (*)(const RowBlock&, int64_t k0, int64_t n, uint8_t* work);

// What the microkernel has to know of panels of U.
template <class U>
struct FoldedCodes {
    static constexpr int kGroup = 32, kOffsetGroup = U::kGroup, kZero = U::kZero > 0 ? 128 : 0;
};

#if defined(__AVX512VNNI__)

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

// Multiplies the codes of 16 columns by the integers of their rows. Two bytes are multiplied as one word: no
// product exceeds 255. Symmetric codes become 128 - (code - zero) * scale, as -4 * -32 does not fit the other
// way round: with n = |scale| that is 128 - low * n + (code - lowest) * n for negative scales and
// 128 - high * n + (highest - code) * n for others.
template <class U>
inline void fold_group(__m512i scale, uint8_t* codes) {
    constexpr int kLow = CodeRange<U>::kLow, kHigh = CodeRange<U>::kHigh, kSpan = kHigh - kLow;
    static_assert(folds_into_bytes<U>() && (kSpan & (kSpan + 1)) == 0);
    const __m512i n = _mm512_abs_epi32(scale), words = _mm512_or_si512(n, _mm512_slli_epi32(n, 16));
    const __mmask16 negative = _mm512_movepi32_mask(scale);
    const __m512i below = _mm512_mask_blend_epi32(negative, _mm512_set1_epi32(kHigh - U::kZero),
                                                  _mm512_set1_epi32(U::kZero - kLow));
    const __m512i first = _mm512_sub_epi32(_mm512_set1_epi32(128), _mm512_mullo_epi32(below, n));
    const __m512i four_times = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0C0C0C0C));
    const __m512i base = _mm512_shuffle_epi8(first, four_times);
    const __m512i flip = _mm512_maskz_set1_epi32(static_cast<__mmask16>(~negative), 0x01010101 * kSpan);
    const __m512i lowest = _mm512_set1_epi8(static_cast<char>(kLow - PanelCodes<U>::kBase));
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        __m512i v = _mm512_loadu_si512(codes + 64 * j);
        if (U::kZero > 0) v = _mm512_xor_si512(_mm512_sub_epi8(v, lowest), flip);
        v = _mm512_mullo_epi16(v, words);
        if (U::kZero > 0) v = _mm512_add_epi8(v, base);
        _mm512_storeu_si512(codes + 64 * j, v);
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
            for (int i = 0; i < kHalfRows; ++i)
                factors[i] = IntegerScaled<U>::factor(
                    rows.group(h, i, RowsOf<U>::kCount) + (k0 + k) / U::kBlock * U::kBlockBytes,
                    i % RowsOf<U>::kCount);
            const __m512 factor = _mm512_load_ps(factors);
            const __m512 shown = U::kZero > 0 ? _mm512_sub_ps(_mm512_setzero_ps(), factor) : factor;
            for (int g = 0; g < U::kBlock / 32; ++g, d += kHalfRows) {
                for (int i = 0; i < 2; ++i, scales += kHalfRows, codes += 16 * kHalfRows)
                    fold_group<U>(_mm512_cvtps_epi32(_mm512_loadu_ps(scales)), codes);
                _mm512_storeu_ps(d, shown);
            }
        }
    }
    return p;
}

#endif

}  // namespace ikpy
