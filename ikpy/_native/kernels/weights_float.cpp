// F32, F16 and BF16 weights, and the way through f32 for types without an unpacker.
#include <algorithm>

#include "ikpy/tensor.hpp"
#include "kernels/activations.hpp"
#include "kernels/gemm_float.hpp"
#include "kernels/half_rows.hpp"
#include "kernels/weight_kernels.hpp"

namespace ikpy {
namespace {

constexpr int kFloatGemvTokens = 2;

struct ReadF32 {
    static constexpr int kBytes = 4;
    static void read(const uint8_t* p, float* y, int64_t n) { std::memcpy(y, p, sizeof(float) * n); }
};
struct ReadF16 {
    static constexpr int kBytes = 2;
    static void read(const uint8_t* p, float* y, int64_t n) {
        f16_to_f32_row(reinterpret_cast<const uint16_t*>(p), y, n);
    }
};
struct ReadBf16 {
    static constexpr int kBytes = 2;
    static void read(const uint8_t* p, float* y, int64_t n) {
        bf16_to_f32_row(reinterpret_cast<const uint16_t*>(p), y, n);
    }
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

template <class R>
void float_gemv(const RowBlock& rows, const uint8_t* const* x, int n_tokens, float* out, uint8_t* work) {
    auto* buffer = reinterpret_cast<float*>(work);
    for (int h = 0; h < 2; ++h) {
        for (int i = 0; i < rows.n[h]; ++i) {
            float total[kFloatGemvTokens] = {};
            for (int64_t k = 0; k < rows.n_in; k += kFloatPanelColumns) {
                const int64_t n = std::min(kFloatPanelColumns, rows.n_in - k);
                R::read(rows.row(h, i) + k * R::kBytes, buffer, n);
                for (int t = 0; t < n_tokens; ++t)
                    total[t] += f32_dot(buffer, reinterpret_cast<const float*>(x[t]) + k, n);
            }
            for (int t = 0; t < n_tokens; ++t) out[t * kBlockRows + h * kHalfRows + i] = total[t];
        }
    }
}

size_t float_work_bytes(int64_t) { return (kFloatPanelColumns * (kBlockRows + kHalfRows)) * sizeof(float); }

template <class R>
constexpr WeightKernels float_kernels(int type) {
    return {type, kActF32, kFloatGemvTokens, float_gemv<R>, float_gemm<R>, float_work_bytes};
}

const WeightKernels kTable[] = {float_kernels<ReadF32>(kF32), float_kernels<ReadF16>(kF16),
                                float_kernels<ReadBf16>(kBF16)};

}  // namespace

const WeightKernels* float_weight_kernels(int type) {
    for (const WeightKernels& k : kTable)
        if (k.type == type) return &k;
    return nullptr;
}

}  // namespace ikpy
