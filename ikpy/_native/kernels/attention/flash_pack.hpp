// Transposition between rows of a head and lanes of the tile kernel.
#pragma once
#include "kernels/simd/simd_f32.hpp"

namespace ikpy {
namespace flash {

#if defined(__AVX512F__)

// v[i] lane j -> v[j] lane i
inline void transpose16(__m512* v) {
    __m512 t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(v[i], v[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        v[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
        v[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
        v[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        v[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_f32x4(v[i], v[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_f32x4(v[i], v[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_f32x4(v[i + 8], v[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(v[i + 8], v[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        v[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
        v[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
        v[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
        v[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

inline __mmask16 first_lanes(int64_t n) { return n >= 16 ? __mmask16(0xffff) : __mmask16((1u << n) - 1u); }

#endif

// lanes[d * ld + m] = factor * rows[m][d] for 16 lanes m; a null row gives zeros.
inline void rows_to_lanes(const float* const* rows, int64_t n, float factor, float* lanes, int64_t ld) {
#if defined(__AVX512F__)
    for (int64_t d = 0; d < n; d += 16) {
        const __mmask16 valid = first_lanes(n - d);
        __m512 v[16];
        for (int m = 0; m < 16; ++m) {
            v[m] = rows[m] ? _mm512_maskz_loadu_ps(valid, rows[m] + d) : _mm512_setzero_ps();
        }
        transpose16(v);
        const int64_t columns = n - d < 16 ? n - d : 16;
        for (int64_t i = 0; i < columns; ++i) {
            _mm512_storeu_ps(lanes + (d + i) * ld, _mm512_mul_ps(v[i], _mm512_set1_ps(factor)));
        }
    }
#else
    for (int m = 0; m < 16; ++m) {
        for (int64_t d = 0; d < n; ++d) lanes[d * ld + m] = rows[m] ? factor * rows[m][d] : 0.0f;
    }
#endif
}

// rows[m][d] = factors[m] * lanes[d * ld + m] for 16 lanes m; null rows are left out.
inline void lanes_to_rows(const float* lanes, int64_t ld, int64_t n, const float* factors,
                          float* const* rows) {
#if defined(__AVX512F__)
    for (int64_t d = 0; d < n; d += 16) {
        __m512 v[16];
        for (int64_t i = 0; i < 16; ++i) {
            v[i] = d + i < n ? _mm512_loadu_ps(lanes + (d + i) * ld) : _mm512_setzero_ps();
        }
        transpose16(v);
        const __mmask16 valid = first_lanes(n - d);
        for (int m = 0; m < 16; ++m) {
            if (rows[m])
                _mm512_mask_storeu_ps(rows[m] + d, valid, _mm512_mul_ps(v[m], _mm512_set1_ps(factors[m])));
        }
    }
#else
    for (int m = 0; m < 16; ++m) {
        if (!rows[m]) continue;
        for (int64_t d = 0; d < n; ++d) rows[m][d] = factors[m] * lanes[d * ld + m];
    }
#endif
}

}  // namespace flash
}  // namespace ikpy
