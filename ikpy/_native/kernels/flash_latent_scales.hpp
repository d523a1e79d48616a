// Scales of caches of codes as latent attention uses them, on tiles (flash_latent_codes.cpp) and on vectors
// (flash_latent_words.cpp).
#pragma once
#include <algorithm>

#include "kernels/flash_code_weights.hpp"
#include "kernels/flash_latent.hpp"
#include "kernels/kv_codes.hpp"

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
        for (int64_t j = 0; j < shape.size[i] / kBlock; ++j, scales += kCells)
            for (int64_t c = 0; c < kCells; c += 16) {
                // The scale and the two bytes behind it.
                const uint8_t* b = cells.rows[i] + c * cells.stride[i] + j * Codes::kBytes;
                const __m512i words = _mm512_i32gather_epi32(at, b, 1);
                _mm512_storeu_ps(scales + c, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words)));
            }
    }
}

// Scales of 64 cells relative to the largest, which is returned.
inline float relative_scales(const float* scales, __m512* relative) {
    __m512 top = _mm512_set1_ps(kTiny);
    for (int i = 0; i < 4; ++i) top = _mm512_max_ps(top, _mm512_abs_ps(_mm512_loadu_ps(scales + 16 * i)));
    const float largest = _mm512_reduce_max_ps(top);
    for (int i = 0; i < 4; ++i)
        relative[i] = _mm512_div_ps(_mm512_loadu_ps(scales + 16 * i), _mm512_set1_ps(largest));
    return largest;
}

// What the scales of V mean for the weights of a block of cells.
struct ValueScales {
    int16_t* relative;  // [dv / 32][kCells]: over the largest of the block, words in the order of weights
    float* largest;     // [dv / 32]
};

// Scales of V: those of each block relative to its largest, or factors of the weights where a row has one.
// Words 2 j and 2 j + 1 of a block are the cells j and j + 16, behind them the same from cell 32 on.
template <class Codes>
void prepare_scales(const Shape& shape, const float* scales, const ValueScales& out, float* of_weights) {
    const int64_t last = shape.n_segments - 1;
    __m512 relative[4];
    std::fill(of_weights, of_weights + kCells, 1.0f);
    if constexpr (Codes::kRowScale) {
        const float largest = relative_scales(scales + last * kCells, relative);
        std::fill(out.largest, out.largest + shape.dv / kBlock, largest);
        for (int i = 0; i < 4; ++i) _mm512_storeu_ps(of_weights + 16 * i, relative[i]);
        return;
    }
    scales += ((last ? shape.size[0] : 0) + shape.column) / kBlock * kCells;
    const __m512 highest = _mm512_set1_ps(32767.0f);
    for (int64_t b = 0; b < shape.dv / kBlock; ++b) {
        // The product with weights is divided by 2^15.
        out.largest[b] = relative_scales(scales + b * kCells, relative) * (32768.0f / 32767.0f);
        for (int64_t half = 0; half < 2; ++half) {
            const __m512i x = rounded(_mm512_mul_ps(relative[2 * half], highest));
            const __m512i y = rounded(_mm512_mul_ps(relative[2 * half + 1], highest));
            _mm512_storeu_si512(out.relative + b * kCells + 32 * half, join_words(x, y));
        }
    }
}

}  // namespace codes
}  // namespace latent
}  // namespace ikpy

#endif
