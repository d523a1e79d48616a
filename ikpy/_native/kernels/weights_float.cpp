// Kernels of F32, F16 and BF16 weights with f32 activations.
#include <algorithm>

#include "ikpy/tensor.hpp"
#include "kernels/activations.hpp"
#include "kernels/gemm_bf16.hpp"
#include "kernels/gemm_float.hpp"
#include "kernels/half_rows.hpp"
#include "kernels/weight_kernels.hpp"

namespace ikpy {
namespace {

// Row products need no unpacking: only the loads of the activations make them slower than panels, which pays
// for the panel from about this many tokens on.
constexpr int kGemvTokens = 12;
constexpr int kGroupTokens = 6;  // tokens that a row meets at once: 24 accumulators of 32 registers

struct ReadF32 {
    static constexpr int kBytes = 4;
    static void read(const uint8_t* p, float* y, int64_t n) { std::memcpy(y, p, sizeof(float) * n); }
#if defined(__AVX512F__)
    static __m512 lanes(const uint8_t* p, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, p); }
#endif
};

struct ReadF16 {
    static constexpr int kBytes = 2;
    static void read(const uint8_t* p, float* y, int64_t n) {
        f16_to_f32_row(reinterpret_cast<const uint16_t*>(p), y, n);
    }
#if defined(__AVX512F__)
    static __m512 lanes(const uint8_t* p, __mmask16 mask) {
        return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, p));
    }
#endif
};

struct ReadBf16 {
    static constexpr int kBytes = 2;
    static void read(const uint8_t* p, float* y, int64_t n) {
        bf16_to_f32_row(reinterpret_cast<const uint16_t*>(p), y, n);
    }
#if defined(__AVX512F__)
    static __m512 lanes(const uint8_t* p, __mmask16 mask) {
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p));
        return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }
#endif
};

// work: panel f32 [columns][32], then 16 rows of `columns` f32.
template <class R>
void float_gemm(const RowBlock& rows, const uint8_t* const* x, int n_tokens, float* out, uint8_t* work) {
    auto* panel = reinterpret_cast<float*>(work);
    float* buffer = panel + kFloatPanelColumns * kBlockRows;
    const int n_halves = rows.n[1] > 0 ? 2 : 1;
    for (int64_t k0 = 0; k0 < rows.n_in; k0 += kFloatPanelColumns) {
        const int64_t n = std::min(kFloatPanelColumns, rows.n_in - k0);
        for (int h = 0; h < n_halves; ++h) {
            const float* lines[kHalfRows];
            for (int i = 0; i < kHalfRows; ++i) {
                R::read(rows.row(h, i) + k0 * R::kBytes, buffer + i * kFloatPanelColumns, n);
                lines[i] = buffer + i * kFloatPanelColumns;
            }
            pack_f32_rows(lines, n, panel, h);
        }
        f32_panel_gemm(panel, n, n_halves, x, k0, n_tokens, out, k0 > 0);
    }
}

#if defined(__AVX512F__)

template <class R, int NT>
void dot_row(const uint8_t* row, int64_t n, const uint8_t* const* x, float* out) {
    constexpr int kChains = 4;
    __m512 total[NT][kChains];
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t)
#pragma GCC unroll 4
        for (int c = 0; c < kChains; ++c) total[t][c] = _mm512_setzero_ps();
    int64_t k = 0;
    for (; k + 16 * kChains <= n; k += 16 * kChains) {
        for (int b = 0; b < 16 * kChains * R::kBytes; b += 64)
            _mm_prefetch(reinterpret_cast<const char*>(row + k * R::kBytes + 2048 + b), _MM_HINT_T0);
#pragma GCC unroll 4
        for (int c = 0; c < kChains; ++c) {
            const __m512 w = R::lanes(row + (k + 16 * c) * R::kBytes, 0xFFFF);
#pragma GCC unroll 8
            for (int t = 0; t < NT; ++t)
                total[t][c] = _mm512_fmadd_ps(w, _mm512_loadu_ps(x[t] + (k + 16 * c) * 4), total[t][c]);
        }
    }
    for (; k < n; k += 16) {
        const auto mask = static_cast<__mmask16>(n - k >= 16 ? 0xFFFF : (1 << (n - k)) - 1);
        const __m512 w = R::lanes(row + k * R::kBytes, mask);
#pragma GCC unroll 8
        for (int t = 0; t < NT; ++t)
            total[t][0] = _mm512_fmadd_ps(w, _mm512_loadu_ps(x[t] + k * 4), total[t][0]);
    }
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t)
        out[t * kBlockRows] = _mm512_reduce_add_ps(
            _mm512_add_ps(_mm512_add_ps(total[t][0], total[t][1]), _mm512_add_ps(total[t][2], total[t][3])));
}

#else

template <class R, int NT>
void dot_row(const uint8_t* row, int64_t n_in, const uint8_t* const* x, float* out) {
    float buffer[kFloatPanelColumns];
    float total[NT] = {};
    for (int64_t k = 0; k < n_in; k += kFloatPanelColumns) {
        const int64_t n = std::min(kFloatPanelColumns, n_in - k);
        R::read(row + k * R::kBytes, buffer, n);
        for (int t = 0; t < NT; ++t) total[t] += f32_dot(buffer, reinterpret_cast<const float*>(x[t]) + k, n);
    }
    for (int t = 0; t < NT; ++t) out[t * kBlockRows] = total[t];
}

#endif

template <class R, int NT>
void dot_rows(const RowBlock& rows, const uint8_t* const* x, int n_tokens, float* out) {
    if (n_tokens == NT) {
        for (int h = 0; h < 2; ++h)
            for (int i = 0; i < rows.n[h]; ++i)
                dot_row<R, NT>(rows.row(h, i), rows.n_in, x, out + h * kHalfRows + i);
    } else if constexpr (NT > 1) {
        dot_rows<R, NT - 1>(rows, x, n_tokens, out);
    }
}

template <class R>
void float_gemv(const RowBlock& rows, const uint8_t* const* x, int n_tokens, float* out, uint8_t*) {
    const int n_groups = (n_tokens + kGroupTokens - 1) / kGroupTokens;
    for (int i = 0; i < n_groups; ++i) {
        const int begin = n_tokens * i / n_groups, end = n_tokens * (i + 1) / n_groups;
        dot_rows<R, kGroupTokens>(rows, x + begin, end - begin, out + begin * kBlockRows);
    }
}

size_t float_work_bytes(int64_t) { return (kFloatPanelColumns * (kBlockRows + kHalfRows)) * sizeof(float); }

template <class R>
constexpr WeightKernels float_kernels(int type) {
    return {type, kActF32, kGemvTokens, float_gemv<R>, float_gemm<R>, float_work_bytes};
}

// BF16_R16: dwords hold two columns of a row, 16 rows next to each other.
void interleaved_bf16_gemm(const RowBlock& rows, const uint8_t* const* x, int n_tokens, float* out,
                           uint8_t* work) {
    auto* panel = reinterpret_cast<float*>(work);
    const int n_halves = rows.n[1] > 0 ? 2 : 1;
    for (int64_t k0 = 0; k0 < rows.n_in; k0 += kFloatPanelColumns) {
        const int64_t n = std::min(kFloatPanelColumns, rows.n_in - k0);
        for (int h = 0; h < n_halves; ++h) {
            const uint8_t* group = rows.group(h, 0, kHalfRows) + k0 * kHalfRows * 2;
            for (int64_t k = 0; k < n; k += 2)
                for (int i = 0; i < kHalfRows; ++i) {
                    const uint32_t pair = load_unaligned<uint32_t>(group + (k * kHalfRows + 2 * i) * 2);
                    const uint32_t bits[2] = {pair << 16, pair & 0xFFFF0000};
                    float* at = panel + k * kBlockRows + h * kHalfRows + i;
                    std::memcpy(at, bits, 4);
                    std::memcpy(at + kBlockRows, bits + 1, 4);
                }
        }
        f32_panel_gemm(panel, n, n_halves, x, k0, n_tokens, out, k0 > 0);
    }
}

const WeightKernels kTable[] = {
    float_kernels<ReadF32>(kF32),
    float_kernels<ReadF16>(kF16),
    float_kernels<ReadBf16>(kBF16),
    {kTypeBf16R16, kActF32, 0, interleaved_bf16_gemm, interleaved_bf16_gemm, float_work_bytes}};

}  // namespace

const WeightKernels* float_weight_kernels(int type) {
    if (const WeightKernels* k = bf16_dot_kernels(type)) return k;
    for (const WeightKernels& k : kTable)
        if (k.type == type) return &k;
    return nullptr;
}

}  // namespace ikpy
