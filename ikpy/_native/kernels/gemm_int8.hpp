// Microkernel of quantized weights: panels of unpacked codes times int8 activations, exact integer dot
// products.
#pragma once
#include <cstdint>

#include "kernels/activations.hpp"
#include "kernels/weight_kernels.hpp"

namespace ikpy {

// Unpacked codes of a row block over a range of columns, as the microkernel reads them. A weight is
// d * (code - 128) for types with symmetric codes and d * code + m otherwise.
struct Int8Panel {
    uint8_t* codes;  // [half][n / 4][16 rows][4]
    float* d;        // [half][n / group][16 rows]
    float* m;        // like d; unused for symmetric codes
    int64_t n;       // columns, a multiple of 256
    int64_t half_codes() const { return n * kHalfRows; }
    int64_t half_scales(int group) const { return n / group * kHalfRows; }
};

// out[t * kBlockRows + row] (+)= panel row . x[t][k0 .. k0 + panel.n); `add` keeps what out holds.
using Int8GemmFn = void (*)(const Int8Panel&, int n_halves, const uint8_t* const* x, int n_tokens,
                            const ActQ8Layout&, int64_t k0, float* out, bool add);

Int8GemmFn int8_gemm(int group, bool symmetric);

}  // namespace ikpy
