// Scales of caches of codes as latent attention uses them, on tiles (flash_latent_codes.cpp) and on vectors
// (flash_latent_words.cpp).
#pragma once
#include <algorithm>

#include "kernels/attention/flash_code_weights.hpp"
#include "kernels/attention/flash_latent.hpp"
#include "kernels/cache/kv_codes.hpp"

#if defined(__AVX512VNNI__)

namespace ikpy {
namespace latent {
namespace codes {

using flash::kHighest;
using flash::kTiny;

constexpr int64_t kBlock = 32;  // codes that share a scale

// Words of two vectors of dwords, the first below.
inline __m512i join_words(__m512i low, __m512i high) {
    return _mm512_mask_blend_epi16(0xAAAAAAAA, low, _mm512_slli_epi32(high, 16));
}

inline __m512i rounded(__m512 x) { return _mm512_cvtps_epi32(x); }

// scales: [dk / 32][kCells], or [segments][kCells] where a row has one.
template <class Codes>
void read_scales(const Shape& shape, const Cells& cells, float* scales) {
    if constexpr (Codes::kRowScale) {
        for (int64_t i = 0; i < shape.n_segments; ++i)
            for (int64_t c = 0; c < kCells; ++c)
                scales[i * kCells + c] = load_unaligned<float>(cells.rows[i] + c * cells.stride[i]);
        return;
    }
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int64_t i = 0; i < shape.n_segments; ++i) {
        const __m512i at = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(int32_t(cells.stride[i])));
        const int64_t n_blocks = shape.size[i] / kBlock;
        for (int64_t c = 0; c < kCells; c += 16)
            for (int64_t j = 0; j < n_blocks; ++j) {
                // The scale and the two bytes behind it.
                const uint8_t* b = cells.rows[i] + c * cells.stride[i] + j * Codes::kBytes;
                const __m512i words = _mm512_i32gather_epi32(at, b, 1);
                _mm512_storeu_ps(scales + j * kCells + c, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words)));
            }
        scales += n_blocks * kCells;
    }
}

// What the scales of V mean for the weights of some blocks of cells.
struct ValueScales {
    int16_t* relative;  // [dv / 32][blocks][kCells]: over the largest of them, words in the order of weights
    float* largest;     // [dv / 32]
};

// The largest magnitude of n blocks of scales, `to_next` apart.
inline float largest_scale(const float* scales, int64_t to_next, int64_t n) {
    __m512 top = _mm512_set1_ps(kTiny);
    for (int64_t j = 0; j < n; ++j, scales += to_next)
        for (int i = 0; i < 4; ++i) top = _mm512_max_ps(top, _mm512_abs_ps(_mm512_loadu_ps(scales + 16 * i)));
    return _mm512_reduce_max_ps(top);
}

// Scales of V of n blocks, of each 32 columns relative to the largest. Words 2 j and 2 j + 1 of a block are
// the cells j and j + 16, behind them the same from cell 32 on. scales: as read_scales writes them, a block
// after the other.
inline void prepare_scales(const Shape& shape, const float* scales, int64_t n, const ValueScales& out) {
    const int64_t to_next = shape.dk() / kBlock * kCells;
    scales += ((shape.n_segments > 1 ? shape.size[0] : 0) + shape.column) / kBlock * kCells;
    int16_t* to = out.relative;
    for (int64_t b = 0; b < shape.dv / kBlock; ++b, scales += kCells) {
        const float largest = largest_scale(scales, to_next, n);
        out.largest[b] = largest * (32768.0f / 32767.0f);  // the product with weights is divided by 2^15
        const __m512 inverse = _mm512_set1_ps(32767.0f / largest);
        for (int64_t i = 0; i < 2 * n; ++i, to += 32) {
            const float* at = scales + i / 2 * to_next + i % 2 * 32;
            const __m512i x = rounded(_mm512_mul_ps(_mm512_loadu_ps(at), inverse));
            const __m512i y = rounded(_mm512_mul_ps(_mm512_loadu_ps(at + 16), inverse));
            _mm512_storeu_si512(to, join_words(x, y));
        }
    }
}

// Row scales of V of a block over the largest, which is returned; ones where rows have none.
template <class Codes>
float row_scales(const Shape& shape, const float* scales, float* relative) {
    if (!Codes::kRowScale) {
        std::fill(relative, relative + kCells, 1.0f);
        return 1.0f;
    }
    scales += (shape.n_segments - 1) * kCells;
    const float largest = largest_scale(scales, 0, 1);
    for (int i = 0; i < kCells; i += 16)
        _mm512_storeu_ps(relative + i, _mm512_div_ps(_mm512_loadu_ps(scales + i), _mm512_set1_ps(largest)));
    return largest;
}

}  // namespace codes
}  // namespace latent
}  // namespace ikpy

#endif
