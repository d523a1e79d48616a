// Prepared activations: what act_prepare writes and the matrix products read.
//
// Every token is one row in natural element order, so a product takes any set of tokens by their row
// pointers.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/simd/byte_dots.hpp"

namespace ikpy {

enum ActFormat : int32_t {
    kActF32 = 0,   // f32, zero padded to a multiple of 16
    kActQ8 = 1,    // int8 with one scale per 32 elements, see ActQ8Layout
    kActBf16 = 2,  // bf16, zero padded to a multiple of 32
    // Per 32 columns the values rounded to bf16 and then what the rounding left, zero padded to a multiple of
    // 32; dword j of each holds columns j and j + 16.
    kActSplit = 3,
    // f16 of the values times a power of two, zero padded to a multiple of 32; see act_scale_at. The largest
    // magnitude lies between 2^14 and 2^15, so nothing overflows and 29 powers of two below it keep all bits.
    kActF16 = 4,
};

// The bits of the float 1.5 * 2^23. That many added to an integer between -2^22 and 2^22 are the bits of the
// float 1.5 * 2^23 plus this integer: sums that start there need no conversion.
constexpr int32_t kStartBits = 0x4B400000;
constexpr float kStartValue = 12582912.0f;

constexpr int kLargestWeight = 15;

inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Byte offsets inside one row of format Q8 with n_in elements, padded with zeros to a multiple of 256.
// x[e] ~ scale[e / 32] * q[e]; sums are exact integers of at most 4064.
struct ActQ8Layout {
    int64_t n;      // padded elements; q int8[n] is at offset 0
    int64_t scale;  // f32[n / 32]: amax / 127, rounded to bf16
    int64_t sum32;  // f32[n / 32]: sum of q over the group
    // i32[n / 32]: kStartBits - 128 * sum, where dot products with codes stored as value + 128 start
    int64_t start32;
    int64_t sum16;    // f32[n / 16]
    int64_t start16;  // i32[n / 16]
    // On CPUs with dot products of bytes i16[n / 16]: sum16 times its scale in units of weighted_unit, f32[n
    // / 256]. Integers of up to kLargestWeight times them add up to less than 2^22 per unit.
    int64_t weighted, weighted_unit;
    int64_t nbytes;

    explicit ActQ8Layout(int64_t n_in)
        : n(round_up(n_in, 256)),
          scale(n),
          sum32(scale + n / 8),
          start32(sum32 + n / 8),
          sum16(start32 + n / 8),
          start16(sum16 + n / 4),
          weighted(start16 + n / 4),
          weighted_unit(weighted + (kByteDots ? n / 8 : 0)),
          nbytes(weighted_unit + (kByteDots ? n / 64 : 0)) {}
};

// Bytes from one row of prepared activations to the next. The odd cache line keeps rows of power-of-two
// length out of the same cache sets.
int64_t act_row_bytes(int format, int64_t n_in);

// Where a row holds the f32 with which products of it are to be multiplied; 0: products are complete.
inline int64_t act_scale_at(int format, int64_t n_in) {
    return format == kActF16 ? round_up(n_in, 32) * static_cast<int64_t>(sizeof(uint16_t)) : 0;
}

}  // namespace ikpy
