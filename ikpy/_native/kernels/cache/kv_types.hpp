// Cache row formats: sizes, expansion to f32 and round-to-nearest quantization
// (quant-formats.md#blocks-with-one-scale).
#pragma once
#include "ikpy/tensor.hpp"

namespace ikpy {
namespace kv {

constexpr int kTypeQ4_0 = 2;
constexpr int kTypeQ4_1 = 3;
constexpr int kTypeQ5_0 = 6;
constexpr int kTypeQ5_1 = 7;
constexpr int kTypeIQ4_NL = 20;
constexpr int kTypeQ6_0 = 133;
constexpr int kTypeQ8_KV = 151;

// dst[r * ld + i] = element i of the row at src + r * stride, for r < n_rows and i < n.
using LoadRows = void (*)(const uint8_t* src, int64_t stride, int64_t n_rows, int64_t n, float* dst,
                          int64_t ld);
using StoreRow = void (*)(const float* src, int64_t n, uint8_t* dst);

LoadRows load_rows(int type);  // nullptr if the type cannot be in a cache
StoreRow store_row(int type);

// Of types with a minimum what is taken from their codes to make them signed (kv_blocks.hpp), else 0.
int middle_code(int type);
int64_t block_elements(int type);
int64_t row_bytes(int type, int64_t n);  // bytes of n elements, rounded up to whole blocks

}  // namespace kv
}  // namespace ikpy
