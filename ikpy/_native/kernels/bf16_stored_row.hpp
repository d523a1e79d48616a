// One of the rows that are unpacked together to bf16, between its two stages.
#pragma once
#include <utility>

#include "kernels/amx_tiles.hpp"
#include "kernels/byte_permutes.hpp"
#include "kernels/gemm_ahead_amx.hpp"
#include "kernels/unpacked.hpp"

#if defined(__AVX512VNNI__) && defined(__linux__)

namespace ikpy::bf16_rows {

constexpr int64_t kStep = 2 * kHalfRows * 32;  // values from 32 columns to the next 32
constexpr int kSteps = kChunk / 32;
using AllSteps = std::make_index_sequence<kSteps>;

// A row with scales and offsets of groups, to be read piece by piece.
struct StoredRow {
    alignas(64) uint8_t q[kChunk];
    alignas(64) float d[16], m[16];

    __m512i codes(int i) const { return _mm512_load_si512(q + 64 * i); }
    __m512 scales() const { return _mm512_load_ps(d); }
    __m512 offsets() const { return _mm512_load_ps(m); }
};

inline void store(__m512i pairs, int step, uint16_t* out) { _mm512_storeu_si512(out + step * kStep, pairs); }

}  // namespace ikpy::bf16_rows

#endif
