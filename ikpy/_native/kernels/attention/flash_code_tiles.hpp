// What scores and outputs of codes on tiles share (flash_codes.cpp).
#pragma once
#include <algorithm>

#include "kernels/attention/flash_code_weights.hpp"
#include "kernels/cache/kv_codes.hpp"
#include "kernels/simd/amx_tiles.hpp"

#if defined(__AVX512VNNI__) && defined(__linux__)

#define IKPY_CODE_TILES __attribute__((target("amx-tile,amx-int8,avx512vbmi")))

namespace ikpy {
namespace flash {

constexpr int64_t kTileBytes = 1024;
constexpr int64_t kTileRowsOfP = 8;  // rows per tile of weights, and of queries where rows have one scale
constexpr int64_t kTilesAtOnce = 8;  // of operands: they and their sums fit into the first-level cache

inline int64_t tiles_of(int64_t rows, int64_t per_tile) { return (rows + per_tile - 1) / per_tile; }

inline __m512i joined(const int32_t* upper_and_lower) {
    const __m512i upper = _mm512_slli_epi32(_mm512_loadu_si512(upper_and_lower), 8);
    return _mm512_add_epi32(upper, _mm512_loadu_si512(upper_and_lower + 16));
}

}  // namespace flash
}  // namespace ikpy

#endif
