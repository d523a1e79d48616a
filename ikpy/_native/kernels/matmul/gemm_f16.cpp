#include "kernels/matmul/gemm_f16.hpp"

#include <algorithm>

#include "ikpy/ops.hpp"
#include "kernels/matmul/activations.hpp"
#include "kernels/matmul/gemm_float.hpp"
#include "kernels/matmul/word_rows.hpp"
#include "kernels/simd/amx_tiles.hpp"
#include "kernels/simd/split_bf16.hpp"

namespace ikpy {

#if defined(__AVX512F__) && defined(__linux__)

namespace {

// Fewer tokens meet the weights in f32. Thread time per 512 weights (Emerald Rapids, in cycles at 3 GHz):
// rows 28 for each token; tiles 200 for 4 to 8 tokens, 240 for 16, 350 for 32 and 650 for 64, 100 of them for
// splitting the weights. More than 64 tokens meet panels of split weights: 512 tokens take 0.8 of the time of
// passes. The product with the low part of the tokens keeps 8 significant bits.
constexpr int kTileTokens = 9;
// Of products of halves. 2,048 x 8,192 weights, Gop/s of rows and tiles: 4 tokens 117 and 94, 5 tokens
// 135 and 117, 6 tokens 137 and 139, 8 tokens 125 and 188.
constexpr int kHalfTileTokens = 6;

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
    for (int h = 0; h < rows.halves(); ++h)
        split_half(rows, h, k0, n, panel + h * 2 * kTileColumns * kHalfRows);
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

void read_halves(const uint8_t* x, int64_t n, float* out) {
    f16_to_f32_row(reinterpret_cast<const uint16_t*>(x), out, n);
}

// Experts' groups of fewer tokens than tiles pay for: Read makes f32 of a row of prepared activations.
template <void (*Read)(const uint8_t*, int64_t, float*)>
void row_products(const RowBlock* blocks, int n_blocks, const TokenSet& tokens, float* out, uint8_t* work) {
    const int64_t n = round_up(blocks[0].n_in, kTileDepth);
    const uint8_t* rows[kTileTokens];
    for (int t = 0; t < tokens.n; ++t) {
        auto* row = reinterpret_cast<float*>(work) + t * n;
        if (tokens.fresh) Read(tokens.x[t], n, row);
        rows[t] = reinterpret_cast<const uint8_t*>(row);
    }
    for (int b = 0; b < n_blocks; ++b)
        f16_row_products(blocks[b], rows, tokens.n, out + static_cast<int64_t>(b) * tokens.n * kBlockRows,
                         nullptr);
}

void split_tiles(const RowBlock* blocks, int n_blocks, const TokenSet& tokens, float* out, uint8_t* work) {
    if (tokens.n < kTileTokens) {
        row_products<join_row>(blocks, n_blocks, tokens, out, work);
    } else if (tokens.n <= kFewTokens) {
        few_tokens_product(TileFactors::kSplit, split_row_tiles, blocks, n_blocks, tokens, out, work);
    } else {
        amx_product(TileFactors::kSplit, split_panel, blocks, n_blocks, tokens.x, tokens.n, out, work);
    }
}

size_t split_work_bytes(int64_t n_in) {
    return std::max(few_tokens_work_bytes(TileFactors::kSplit, n_in), amx_work_bytes(n_in));
}

void half_tiles(const RowBlock* blocks, int n_blocks, const TokenSet& tokens, float* out, uint8_t* work) {
    if (tokens.n < kHalfTileTokens) {
        row_products<read_halves>(blocks, n_blocks, tokens, out, work);
    } else {
        word_row_tiles(TileFactors::kF16, blocks, n_blocks, tokens, out, work);
    }
}

size_t half_work_bytes(int64_t n_in) { return word_row_tiles_work_bytes(TileFactors::kF16, n_in); }

}  // namespace

TileKernels f16_tile_kernels() {
    if (rounds_f16_activations()) return {half_tiles, kActF16, kHalfTileTokens, half_work_bytes};
    return {split_tiles, kActSplit, kTileTokens, split_work_bytes};
}

#else

TileKernels f16_tile_kernels() { return {}; }

#endif

}  // namespace ikpy
