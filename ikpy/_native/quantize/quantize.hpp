// Encoders of the tensor types: rows of floats to blocks. Reentrant; rows may be split between threads in
// multiples of row_group(type).
#pragma once

#include <cstdint>

namespace ikpy::quantize {

enum Status : int {
    OK = 0,
    UNSUPPORTED_TYPE = 1,
    BAD_ROW_LENGTH = 2,
    BAD_ROW_COUNT = 3,
    NEEDS_IMATRIX = 4,
    OUT_OF_MEMORY = 5,
    FAILED = 6
};

// Whether quantize_rows encodes the type with this number.
bool can_quantize(int type);

// Rows that belong together in the type's layout (1 for plain types); 0 if the type is not encodable.
int row_group(int type);

// Encodes n_rows rows of ne0 floats (contiguous) to dst, n_rows * row size bytes. `imatrix` holds ne0
// non-negative importances of the columns, or is null for equal importance. Returns a Status; throws
// nothing, since it runs in threads where an exception would end the process.
int quantize_rows(int type, const float* src, int64_t ne0, int64_t n_rows, const float* imatrix,
                  uint8_t* dst) noexcept;

// Bytes of one encoded row, 0 if the type is not encodable or the row length does not fit.
int64_t encoded_row_nbytes(int type, int64_t ne0);

// quantize_rows with the rows divided between n_threads OpenMP threads.
int quantize_rows_parallel(int type, const float* src, int64_t ne0, int64_t n_rows, const float* imatrix,
                           uint8_t* dst, int n_threads) noexcept;

}  // namespace ikpy::quantize
