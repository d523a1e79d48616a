#include "kernels/gemm_f16.hpp"

#include <algorithm>

#include "kernels/activations.hpp"
#include "kernels/amx_tiles.hpp"
#include "kernels/gemm_amx.hpp"
#include "kernels/gemm_few_amx.hpp"
#include "kernels/gemm_float.hpp"
#include "kernels/split_bf16.hpp"
#include "kernels/transpose.hpp"

namespace ikpy {

#if defined(__AVX512F__) && defined(__linux__)

namespace {

// Fewer tokens meet the weights in f32. Thread time per 512 weights (Emerald Rapids, in cycles at 3 GHz):
// rows 28 for each token; tiles 200 for 4 to 8 tokens, 240 for 16, 350 for 32 and 650 for 64, 100 of them for
// splitting the weights. More than 64 tokens meet panels of split weights: 512 tokens take 0.8 of the time of
// passes. The product with the low part of the tokens keeps 8 significant bits.
constexpr int kTileTokens = 9;

void store_split(const SplitPairs& s, uint16_t* tiles) {
    _mm512_storeu_si512(tiles, s.hi);
    _mm512_storeu_si512(tiles + kTileValues, s.lo);
}

void split_row_tiles(const RowBlock& rows, int h, int first, int64_t k0, int64_t n, uint16_t* tiles) {
    const bool whole = n == kFewColumns && k0 + n <= rows.n_in;
    for (int i = first; i < first + kFewRows; ++i) {
        const uint8_t* row = rows.row(h, i);
        uint16_t* out = tiles + i * kTileDepth;
        if (whole) {
#pragma GCC unroll 4
            for (int64_t k = 0; k < kFewColumns; k += kTileDepth, out += 2 * kTileValues)
                store_split(split_f16_at(row + 2 * (k0 + k)), out);
        } else {
            for (int64_t k = 0; k < n; k += kTileDepth, out += 2 * kTileValues)
                store_split(split_f16_row(row, k0 + k, rows.n_in), out);
        }
    }
}

// 16 rows as right operands of both parts.
void split_half(const RowBlock& rows, int h, int64_t k0, int64_t n, uint16_t* panel) {
    for (int64_t k = 0; k < n; k += kTileDepth, panel += 2 * kTileValues) {
        __m512i hi[kHalfRows], lo[kHalfRows];
#pragma GCC unroll 16
        for (int i = 0; i < kHalfRows; ++i) {
            const uint8_t* row = rows.row(h, i);
            _mm_prefetch(reinterpret_cast<const char*>(row + (k0 + k) * 2 + 256), _MM_HINT_T0);
            const SplitPairs s = split_f16_row(row, k0 + k, rows.n_in);
            hi[i] = s.hi;
            lo[i] = s.lo;
        }
        transpose16(hi);
        transpose16(lo);
#pragma GCC unroll 16
        for (int i = 0; i < kHalfRows; ++i) {
            _mm512_storeu_si512(panel + i * 32, hi[i]);
            _mm512_storeu_si512(panel + kTileValues + i * 32, lo[i]);
        }
    }
}

void split_panel(const RowBlock& rows, int64_t k0, int64_t n, uint16_t* panel, uint8_t*) {
    for (int h = 0; h < rows.halves(); ++h) split_half(rows, h, k0, n, panel + h * kTileColumns * kHalfRows);
}

// A row of both parts as f32.
void join_row(const uint8_t* x, int64_t n, float* out) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
    for (int64_t k = 0; k < n; k += 32) {
        const __m512i hi = _mm512_loadu_si512(x + 4 * k), lo = _mm512_loadu_si512(x + 4 * k + 64);
        _mm512_storeu_ps(out + k, _mm512_add_ps(_mm512_castsi512_ps(_mm512_slli_epi32(hi, 16)),
                                                _mm512_castsi512_ps(_mm512_slli_epi32(lo, 16))));
        _mm512_storeu_ps(out + k + 16, _mm512_add_ps(_mm512_castsi512_ps(_mm512_and_si512(hi, upper)),
                                                     _mm512_castsi512_ps(_mm512_and_si512(lo, upper))));
    }
}

// Experts' groups of fewer tokens than tiles pay for.
void joined_row_products(const RowBlock* blocks, int n_blocks, const TokenSet& tokens, float* out,
                         uint8_t* work) {
    const int64_t n = round_up(blocks[0].n_in, kTileDepth);
    const uint8_t* rows[kTileTokens];
    for (int t = 0; t < tokens.n; ++t) {
        auto* row = reinterpret_cast<float*>(work) + t * n;
        if (tokens.fresh) join_row(tokens.x[t], n, row);
        rows[t] = reinterpret_cast<const uint8_t*>(row);
    }
    for (int b = 0; b < n_blocks; ++b)
        f16_row_products(blocks[b], rows, tokens.n, out + static_cast<int64_t>(b) * tokens.n * kBlockRows,
                         nullptr);
}

void tiles(const RowBlock* blocks, int n_blocks, const TokenSet& tokens, float* out, uint8_t* work) {
    if (tokens.n < kTileTokens) {
        joined_row_products(blocks, n_blocks, tokens, out, work);
    } else if (tokens.n <= kPassTokens) {
        few_tokens_product(2, split_row_tiles, blocks, n_blocks, tokens, out, work);
    } else {
        amx_product(2, split_panel, blocks, n_blocks, tokens.x, tokens.n, out, work);
    }
}

size_t work_bytes(int64_t n_in) { return std::max(few_tokens_work_bytes(2, n_in), amx_work_bytes(n_in)); }

}  // namespace

TileKernels f16_tile_kernels() { return {tiles, kActSplit, kTileTokens, work_bytes}; }

#else

TileKernels f16_tile_kernels() { return {}; }

#endif

}  // namespace ikpy
