// Sums over the lanes of several vectors at once.
#pragma once
#if defined(__AVX512F__)
// GCC 12 reports variables of its own intrinsics as uninitialized.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

namespace ikpy {

// lane 8 * i + r of the result = sum of lanes r and 8 + r of a[i]
inline __m512 sums_of_halves(const __m512* a) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a[0], a[1], 0x44), _mm512_shuffle_f32x4(a[0], a[1], 0xee));
}

// lane 4 * q + r of the result = sum of lanes r, 4 + r, 8 + r and 12 + r of a[q]
inline __m512 sums_of_quads(const __m512* a) {
    const __m512 x =
        _mm512_add_ps(_mm512_shuffle_f32x4(a[0], a[1], 0x88), _mm512_shuffle_f32x4(a[0], a[1], 0xdd));
    const __m512 y =
        _mm512_add_ps(_mm512_shuffle_f32x4(a[2], a[3], 0x88), _mm512_shuffle_f32x4(a[2], a[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
}

// lane i of the result = sum of the lanes of a[i]
inline __m512 sums16(const __m512* a) {
    __m512 t[8], u[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        t[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]),
                             _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        u[i] = _mm512_add_ps(_mm512_shuffle_ps(t[2 * i], t[2 * i + 1], 0x44),
                             _mm512_shuffle_ps(t[2 * i], t[2 * i + 1], 0xee));
    }
    return sums_of_quads(u);
}

}  // namespace ikpy

#endif
