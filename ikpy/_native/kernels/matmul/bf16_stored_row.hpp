// Rows that are unpacked together to bf16, between their two stages.
#pragma once
#include <utility>

#include "kernels/matmul/gemm_ahead_amx.hpp"
#include "kernels/matmul/unpacked.hpp"
#include "kernels/simd/amx_tiles.hpp"
#include "kernels/simd/byte_permutes.hpp"

#if defined(__AVX512VNNI__) && defined(__linux__)

namespace ikpy::bf16_rows {

constexpr int64_t kStep = 2 * kHalfRows * 32;  // values from 32 columns to the next 32
constexpr int kSteps = kChunk / 32;
using AllSteps = std::make_index_sequence<kSteps>;

struct Lanes16 {
    alignas(64) uint32_t at[16];
    template <class F>
    constexpr explicit Lanes16(F f) : at() {
        for (int i = 0; i < 16; ++i) at[i] = static_cast<uint32_t>(f(i));
    }
    __m512i load() const { return _mm512_load_si512(at); }
};

// Scales and offsets of the groups of a row, to be read one by one or all at once.
struct GroupScales {
    const float *d, *m;

    __m512 scales() const { return _mm512_load_ps(d); }
    __m512 offsets() const { return _mm512_load_ps(m); }
};

// Every byte of half of a vector twice.
inline constexpr Bytes64 kTwice[2] = {Bytes64([](int i) { return i / 2; }),
                                      Bytes64([](int i) { return 32 + i / 2; })};

// A row, whose 32 columns of step s are half half(s) of step(s).
struct StoredRow {
    alignas(64) uint8_t q[kChunk];
    alignas(64) float d[16], m[16];

    __m512i codes(int i) const { return _mm512_load_si512(q + 64 * i); }
    __m512i step(int s) const { return codes(s / 2); }
    static constexpr int half(int s) { return s % 2; }
    // For both bytes of a value.
    template <int Step>
    IKPY_VBMI_INLINE __m512i twice() const {
        return _mm512_permutexvar_epi8(kTwice[half(Step)].load(), step(Step));
    }
    GroupScales groups() const { return {d, m}; }
};

// Four rows of a group of interleaved ones, in pairs or as their layout keeps them
// (kernels/matmul/bf16_quads.hpp).
struct StoredQuad {
    alignas(64) uint8_t q[kSteps][2][64];
    alignas(64) float d[4][16], m[4][16];
};

// Row R of them.
template <int R>
struct RowOfQuad {
    const StoredQuad& quad;

    __m512i step(int s) const { return _mm512_load_si512(quad.q[s][R / 2]); }
    static constexpr int half(int) { return R % 2; }
    template <int Step>
    IKPY_VBMI_INLINE __m512i twice() const {
        return _mm512_permutexvar_epi8(kTwice[half(Step)].load(), step(Step));
    }
    GroupScales groups() const { return {quad.d[R], quad.m[R]}; }
};

inline void store(__m512i pairs, int step, uint16_t* out) { _mm512_storeu_si512(out + step * kStep, pairs); }

}  // namespace ikpy::bf16_rows

#endif
