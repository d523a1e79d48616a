// Float products: f32 panels times f32 activations.
#pragma once
#include <cstdint>

#include "kernels/weights/weight_kernels.hpp"

namespace ikpy {

constexpr int64_t kFloatPanelColumns = 256;

// out[t * kBlockRows + row] (+)= sum over n columns of panel [n][32 rows] times x[t][k0 + k].
void f32_panel_gemm(const float* panel, int64_t n, int n_halves, const uint8_t* const* x, int64_t k0,
                    int n_tokens, float* out, bool add);

// Copies n columns of 16 f32 rows into panel[.][half * 16 + i].
void pack_f32_rows(const float* const* rows, int64_t n, float* panel, int half);

// Products of F16 rows with f32 activations, row by row.
void f16_row_products(const RowBlock& rows, const uint8_t* const* x, int n_tokens, float* out, uint8_t* work);

float f32_dot(const float* w, const float* x, int64_t n);

}  // namespace ikpy
