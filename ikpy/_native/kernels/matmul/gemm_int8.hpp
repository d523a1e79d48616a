// Microkernel of quantized weights: panels of unpacked codes times int8 activations, exact integer dot
// products.
#pragma once
#include <cstdint>

#include "kernels/matmul/activations.hpp"
#include "kernels/matmul/unpacked.hpp"
#include "kernels/simd/byte_dots.hpp"
#include "kernels/weights/weight_kernels.hpp"

namespace ikpy {

// What panels hold instead of the codes of an unpacker: code - kBase. Symmetric codes have their zero at 128.
// AVX2 alone multiplies unsigned bytes of up to 127 best: they start at 0 if they span less than 128
// and are signed otherwise.
template <class U>
struct PanelCodes {
    static constexpr int kSpan = CodeRange<U>::kHigh - CodeRange<U>::kLow;
#if defined(__AVX2__) && !defined(IKPY_BYTE_DOTS)
    static constexpr int kBase = kSpan > 127 ? U::kZero : CodeRange<U>::kLow;
#else
    static constexpr int kBase = U::kZero > 0 ? U::kZero - 128 : 0;
#endif
    static constexpr int kZero = U::kZero - kBase;
};

// Columns unpacked at a time: codes and scales of 32 rows stay in a 32 KiB first-level cache. Longer panels
// were not faster, not even for few tokens.
constexpr int64_t kPanelColumns = 512;

// Unpacked codes of a row block over a range of columns, as the microkernel reads them. A weight is
// d * (code - zero) for types with symmetric codes and d * code + m otherwise.
struct Int8Panel {
    uint8_t* codes;  // [half][n / 4][16 rows][4]
    float* d;        // [half][n / group][16 rows]
    // [half][n / offset group][16 rows]; of symmetric codes room for what the microkernel of AVX2 finds out
    float* m;
    int64_t n;               // columns, a multiple of 256
    int zero;                // code of weight 0 of symmetric codes
    uint32_t apart[2] = {};  // of chained groups: bits of the pairs of each half that are not
    int64_t half_codes() const { return n * kHalfRows; }
    int64_t half_scales(int group) const { return n / group * kHalfRows; }
};

// Where the columns of a panel lie inside an activation row, in bytes.
struct PanelOffsets {
    int64_t q, weighted, weighted_unit, scale, sum, start;

    PanelOffsets(const ActQ8Layout& at, int64_t k0, int group, int offset_group)
        : q(k0),
          weighted(at.weighted + k0 / 8),
          weighted_unit(at.weighted_unit + k0 / 64),
          scale(at.scale + k0 / 8),
          sum((offset_group == 16 ? at.sum16 : at.sum32) + k0 / offset_group * 4),
          start((group == 16 ? at.start16 : at.start32) + k0 / group * 4) {}
};

// out[t * kBlockRows + row] (+)= panel row . x[t][k0 .. k0 + panel.n); `add` keeps what out holds.
using Int8GemmFn = void (*)(const Int8Panel&, int n_halves, const uint8_t* const* x, int n_tokens,
                            const ActQ8Layout&, int64_t k0, float* out, bool add);

// Types whose panels are multiplied without their d, all of which are 1: trits on AVX2.
#if defined(__AVX2__) && !defined(IKPY_BYTE_DOTS)
template <class U>
constexpr bool kUnscaled = UnitScales<U>::value && U::kZero > 0 && PanelCodes<U>::kSpan < 128;
#else
template <class U>
constexpr bool kUnscaled = false;
#endif

// Columns of an offset: those of a scale but for panels of kernels/matmul/folded_scales.hpp.
template <class U, class = void>
struct OffsetGroup {
    static constexpr int kColumns = U::kGroup;
};
template <class U>
struct OffsetGroup<U, std::void_t<decltype(U::kOffsetGroup)>> {
    static constexpr int kColumns = U::kOffsetGroup;
};

// offset_group: 0 for symmetric codes. span: what the largest code of the type exceeds the smallest one by.
Int8GemmFn int8_gemm(int group, int offset_group, int span, bool unscaled);

// Of panels and tokens of kernels/matmul/chained_groups.hpp; tiers with dot products of bytes only.
Int8GemmFn chained_gemm();

template <class U>
Int8GemmFn int8_gemm_of() {
    return int8_gemm(U::kGroup, U::kZero > 0 ? 0 : OffsetGroup<U>::kColumns, PanelCodes<U>::kSpan,
                     kUnscaled<U>);
}

}  // namespace ikpy
