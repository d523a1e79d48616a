// Prepared activations: what act_prepare writes and the matrix products read.
//
// Every token is one row in natural element order, so a product takes any set of tokens by their row
// pointers.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ikpy {

enum ActFormat : int32_t {
    kActF32 = 0,   // f32, zero padded to a multiple of 16
    kActQ8 = 1,    // int8 with one scale per 32 elements, see ActQ8Layout
    kActBf16 = 2,  // bf16, zero padded to a multiple of 32
    // Per 32 columns the values rounded to bf16 and then what the rounding left, zero padded to a multiple of
    // 32; dword j of each holds columns j and j + 16.
    kActSplit = 3,
    kActWords = 4,  // 16-bit integers with one scale per 512 columns, see ActWordsLayout
};

inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Byte offsets inside one row of format Q8 with n_in elements, padded with zeros to a multiple of 256.
// x[e] ~ scale[e / 32] * q[e]; sums are exact integers of at most 4064.
struct ActQ8Layout {
    int64_t n;      // padded elements; q int8[n] is at offset 0
    int64_t scale;  // f32[n / 32]: amax / 127, rounded to bf16
    int64_t sum32;  // f32[n / 32]: sum of q over the group
    int64_t
        neg32;  // i32[n / 32]: -128 * sum, the start value of dot products with codes stored as value + 128
    int64_t sum16;  // f32[n / 16]
    int64_t neg16;  // i32[n / 16]
    int64_t nbytes;

    explicit ActQ8Layout(int64_t n_in)
        : n(round_up(n_in, 256)),
          scale(n),
          sum32(scale + n / 8),
          neg32(sum32 + n / 8),
          sum16(neg32 + n / 8),
          neg16(sum16 + n / 4),
          nbytes(neg16 + n / 4) {}
};

constexpr int64_t kWordColumns = 512;            // columns that share a scale
constexpr int64_t kWordDepth = 64;               // int8 values per tile row
constexpr float kLargestWord = 127 * 256 + 127;  // of two signed bytes

// Byte offsets inside one row of format Words with n_in elements, padded with zeros to a multiple of 64.
// x[e] ~ scale[e / 512] * (256 * hi + lo) with signed bytes. Per 64 columns 64 bytes hi, then 64 bytes lo;
// bytes 2 j and 2 j + 1 of each belong to columns j and j + 32.
struct ActWordsLayout {
    int64_t scale;  // f32[n_in / 512]: amax / 32639
    int64_t nbytes;

    explicit ActWordsLayout(int64_t n_in)
        : scale(2 * round_up(n_in, kWordDepth)),
          nbytes(scale + 4 * (round_up(n_in, kWordColumns) / kWordColumns)) {}
};

// Bytes from one row of prepared activations to the next. The odd cache line keeps rows of power-of-two
// length out of the same cache sets.
int64_t act_row_bytes(int format, int64_t n_in);

}  // namespace ikpy
