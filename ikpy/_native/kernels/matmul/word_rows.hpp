// Rows of 16-bit weights, bf16 or f16, as operands of products.
#pragma once
#include <algorithm>

#include "kernels/matmul/gemm_amx.hpp"
#include "kernels/matmul/gemm_few_amx.hpp"
#include "kernels/simd/transpose.hpp"

#if defined(__AVX512F__)

namespace ikpy {

// 32 elements of a row, zeros beyond `left`.
inline __m512i load_words(const uint8_t* p, int64_t left) {
    if (left >= 32) return _mm512_loadu_si512(p);
    return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((1u << left) - 1), p);
}

// Fills a panel half [n / 2][16 rows][2] with n columns (a multiple of 32), zeros beyond the end of the rows.
inline void pack_rows(const RowBlock& rows, int h, int64_t k0, int64_t n, uint16_t* panel) {
    for (int64_t k = 0; k < n; k += 32) {
        __m512i r[kHalfRows];
#pragma GCC unroll 16
        for (int i = 0; i < kHalfRows; ++i) {
            const uint8_t* p = rows.row(h, i) + (k0 + k) * 2;
            _mm_prefetch(reinterpret_cast<const char*>(p + 256), _MM_HINT_T0);
            r[i] = load_words(p, rows.n_in - k0 - k);
        }
        transpose16(r);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) _mm512_storeu_si512(panel + (k + 2 * i) * kHalfRows, r[i]);
    }
}

// A TilePanelFn.
template <auto Pack>
void tile_panel(const RowBlock& rows, int64_t k0, int64_t n, uint16_t* panel, uint8_t*) {
    for (int h = 0; h < rows.halves(); ++h) Pack(rows, h, k0, n, panel + h * kTileColumns * kHalfRows);
}

// A RowTileFn.
inline void copy_row_tiles(const RowBlock& rows, int h, int first, int64_t k0, int64_t n, uint16_t* tiles) {
    for (int i = first; i < first + kFewRows; ++i) {
        const uint8_t* p = rows.row(h, i) + k0 * 2;
        for (int64_t k = 0; k < n; k += 32)
            _mm512_storeu_si512(tiles + k * kHalfRows + i * 32, load_words(p + k * 2, rows.n_in - k0 - k));
    }
}

// Products of any number of tokens on the tile unit.
inline void word_row_tiles(TileFactors factors, const RowBlock* blocks, int n_blocks, const TokenSet& tokens,
                           float* out, uint8_t* work) {
    if (tokens.n <= kFewTokens) {
        few_tokens_product(factors, copy_row_tiles, blocks, n_blocks, tokens, out, work);
    } else {
        amx_product(factors, tile_panel<pack_rows>, blocks, n_blocks, tokens.x, tokens.n, out, work);
    }
}

inline size_t word_row_tiles_work_bytes(TileFactors factors, int64_t n_in) {
    return std::max(few_tokens_work_bytes(factors, n_in), amx_work_bytes(n_in));
}

}  // namespace ikpy

#endif
