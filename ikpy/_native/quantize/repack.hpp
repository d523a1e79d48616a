// Conversion of whole rows between a plain type and its row-interleaved form (quant-formats.md#repacking).
#pragma once

#include <cstdint>

namespace ikpy {

// Whether repack_rows converts between the two types.
bool can_repack(int from, int to);

// Converts n_rows rows of ne0 elements of one matrix. src and dst must not overlap; dst takes
// n_rows * row_nbytes(to, ne0) bytes. False, with dst untouched, if the types are not permutations of each
// other, ne0 is not a multiple of the block or n_rows not a multiple of the rows interleaved.
bool repack_rows(int from, int to, const uint8_t* src, int64_t ne0, int64_t n_rows, uint8_t* dst);

}  // namespace ikpy
