// Types without an unpacker: whole rows are decoded to f32 and multiplied with f32 activations.
#include <algorithm>

#include "kernels/matmul/activations.hpp"
#include "kernels/matmul/gemm_float.hpp"
#include "quantize/dequantize.hpp"

namespace ikpy {
namespace {

// work: panel f32 [columns][32], then 32 decoded rows.
float* decoded_rows(uint8_t* work) {
    return reinterpret_cast<float*>(work) + kFloatPanelColumns * kBlockRows;
}

void decode(const RowBlock& rows, float* out) {
    for (int h = 0; h < 2; ++h)
        if (rows.n[h] > 0)
            dequantize_rows(rows.type, rows.half[h], rows.n_in, 0, rows.n[h], out + h * kHalfRows * rows.n_in,
                            rows.n_in, true);
}

void gemm(const RowBlock& rows, const TokenSet& tokens, float* out, uint8_t* work) {
    auto* panel = reinterpret_cast<float*>(work);
    float* decoded = decoded_rows(work);
    decode(rows, decoded);
    const int n_halves = rows.halves();
    for (int64_t k0 = 0; k0 < rows.n_in; k0 += kFloatPanelColumns) {
        const int64_t n = std::min(kFloatPanelColumns, rows.n_in - k0);
        for (int h = 0; h < n_halves; ++h) {
            const float* lines[kHalfRows];
            for (int i = 0; i < kHalfRows; ++i)
                lines[i] = decoded + (h * kHalfRows + std::min(i, rows.n[h] - 1)) * rows.n_in + k0;
            pack_f32_rows(lines, n, panel, h);
        }
        f32_panel_gemm(panel, n, n_halves, tokens.x, k0, tokens.n, out, k0 > 0);
    }
}

void gemv(const RowBlock& rows, const TokenSet& tokens, float* out, uint8_t* work) {
    float* decoded = decoded_rows(work);
    decode(rows, decoded);
    for (int h = 0; h < 2; ++h)
        for (int i = 0; i < rows.n[h]; ++i)
            for (int t = 0; t < tokens.n; ++t)
                out[t * kBlockRows + h * kHalfRows + i] =
                    f32_dot(decoded + (h * kHalfRows + i) * rows.n_in,
                            reinterpret_cast<const float*>(tokens.x[t]), rows.n_in);
}

size_t work_bytes(int64_t n_in) {
    return static_cast<size_t>(kFloatPanelColumns + n_in) * kBlockRows * sizeof(float);
}

}  // namespace

const WeightKernels* decoded_weight_kernels(int type) {
    static constexpr WeightKernels kKernels = {-1, kActF32, 2, gemv, each_block<gemm>, work_bytes};
    return can_dequantize(type) ? &kKernels : nullptr;
}

}  // namespace ikpy
