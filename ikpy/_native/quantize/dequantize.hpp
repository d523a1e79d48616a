// Decoding of stored tensor types to f32, any row range of plain and row-interleaved matrices.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ikpy {

// Bytes of one row of ne0 elements including its header; 0 if the type cannot be decoded here or ne0 is not a
// multiple of its block.
size_t row_nbytes(int type, int64_t ne0);

// Rows that share a block group (1 = plain); 0 if the type cannot be decoded here.
int interleave(int type);

bool can_dequantize(int type);

// Decodes rows row0 .. row0 + n_rows - 1 of the matrix (row 0 of which is at `matrix`) into dst, whose rows
// are dst_stride floats apart. compute_scale applies the read-time scale factor of IQ2_KT and IQ3_KT
// (quant-formats.md#factor-of-the-row-scale). The type must be one that can_dequantize accepts and ne0 a
// multiple of its block.
void dequantize_rows(int type, const uint8_t* matrix, int64_t ne0, int64_t row0, int64_t n_rows, float* dst,
                     int64_t dst_stride, bool compute_scale);

}  // namespace ikpy
