#include "kernels/matmul/gemm_bf16.hpp"

#include <algorithm>
#include <cstring>

#include "ikpy/tensor.hpp"
#include "kernels/matmul/activations.hpp"
#include "kernels/matmul/gemm_groups_amx.hpp"
#include "kernels/matmul/weight_prefetch.hpp"
#include "kernels/matmul/word_rows.hpp"
#include "kernels/simd/bf16_dots.hpp"

namespace ikpy {

#if defined(__AVX512F__)

namespace {

// Row products need no unpacking: only the loads of the activations make them slower than panels.
constexpr int kGemvTokens = 6, kPassTokens = 24;
constexpr int kTileTokens = 6;
// 2,048 x 8,192 weights, Gop/s of rows and tiles: 3 tokens 88 and 71, 4 tokens 102 and 94, 5 tokens 105 and
// 118.
constexpr int kRowTileTokens = 5;
// The same of groups of 16 rows: 3 tokens 87 and 87, 4 tokens 107 and 116, 6 tokens 118 and 175.
constexpr int kGroupTileTokens = 4;
constexpr int64_t kPanelColumns = 512;

// panel: [half][n / 2][16 rows][2].
template <int NH, int NT>
IKPY_BF16 void tile(const uint16_t* panel, int64_t n, const uint8_t* const* x, int64_t k0, float* out,
                    bool add) {
    __m512 total[NH][NT];
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t)
#pragma GCC unroll 2
        for (int h = 0; h < NH; ++h)
            total[h][t] = add ? _mm512_loadu_ps(out + t * kBlockRows + h * kHalfRows) : _mm512_setzero_ps();
    for (int64_t k = 0; k < n; k += 2) {
        __m512i w[NH];
#pragma GCC unroll 2
        for (int h = 0; h < NH; ++h) w[h] = _mm512_loadu_si512(panel + (h * n + k) * kHalfRows);
#pragma GCC unroll 8
        for (int t = 0; t < NT; ++t) {
            const __m512i v = _mm512_set1_epi32(load_unaligned<int32_t>(x[t] + (k0 + k) * 2));
#pragma GCC unroll 2
            for (int h = 0; h < NH; ++h) total[h][t] = add_bf16_dots(total[h][t], w[h], v);
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t)
#pragma GCC unroll 2
        for (int h = 0; h < NH; ++h) _mm512_storeu_ps(out + t * kBlockRows + h * kHalfRows, total[h][t]);
}

template <int NH, int NT>
void tile_of(int nt, const uint16_t* panel, int64_t n, const uint8_t* const* x, int64_t k0, float* out,
             bool add) {
    if (nt == NT) return tile<NH, NT>(panel, n, x, k0, out, add);
    if constexpr (NT > 1) tile_of<NH, NT - 1>(nt, panel, n, x, k0, out, add);
}

// BF16_R16 is stored as panels are.
void copy_rows(const RowBlock& rows, int h, int64_t k0, int64_t n, uint16_t* panel) {
    const uint8_t* group = rows.group(h, 0, kHalfRows) + k0 * kHalfRows * 2;
    const int64_t columns = std::min(n, rows.n_in - k0);
    std::memcpy(panel, group, columns * kHalfRows * 2);
    std::memset(panel + columns * kHalfRows, 0, (n - columns) * kHalfRows * 2);
}

template <auto Pack>
void panel_product(const RowBlock& rows, const TokenSet& tokens, int64_t k0, float* out, uint16_t* panel) {
    const int64_t n = std::min(kPanelColumns, round_up(rows.n_in - k0, 32));
    for (int h = 0; h < rows.halves(); ++h) Pack(rows, h, k0, n, panel + h * n * kHalfRows);
    const int n_tiles = (tokens.n + kTileTokens - 1) / kTileTokens;
    for (int i = 0; i < n_tiles; ++i) {
        const int begin = tokens.n * i / n_tiles, nt = tokens.n * (i + 1) / n_tiles - begin;
        float* y = out + begin * kBlockRows;
        if (rows.halves() == 2) {
            tile_of<2, kTileTokens>(nt, panel, n, tokens.x + begin, k0, y, k0 > 0);
        } else {
            tile_of<1, kTileTokens>(nt, panel, n, tokens.x + begin, k0, y, k0 > 0);
        }
    }
}

// Panels of all blocks meet the same columns of the tokens before the next ones are read.
template <auto Pack>
void gemm(const RowBlock* blocks, int n_blocks, const TokenSet& tokens, float* out, uint8_t* work) {
    for (int64_t k0 = 0; k0 < blocks[0].n_in; k0 += kPanelColumns)
        for (int b = 0; b < n_blocks; ++b)
            panel_product<Pack>(blocks[b], tokens, k0, out + static_cast<int64_t>(b) * tokens.n * kBlockRows,
                                reinterpret_cast<uint16_t*>(work));
}

template <int NT>
IKPY_BF16 void dot_row(const uint8_t* row, int64_t n, const uint8_t* const* x, float* out) {
    constexpr int kChains = 4;
    __m512 total[NT][kChains];
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t)
#pragma GCC unroll 4
        for (int c = 0; c < kChains; ++c) total[t][c] = _mm512_setzero_ps();
    int64_t k = 0;
    for (; k + 32 * kChains <= n; k += 32 * kChains) {
#pragma GCC unroll 4
        for (int c = 0; c < kChains; ++c) {
            const uint8_t* p = row + (k + 32 * c) * 2;
            prefetch_weights<64>(p);
            const __m512i w = _mm512_loadu_si512(p);
#pragma GCC unroll 8
            for (int t = 0; t < NT; ++t)
                total[t][c] = add_bf16_dots(total[t][c], w, _mm512_loadu_si512(x[t] + (k + 32 * c) * 2));
        }
    }
    for (; k < n; k += 32) {
        const __m512i w = load_words(row + k * 2, n - k);
#pragma GCC unroll 8
        for (int t = 0; t < NT; ++t)
            total[t][0] = add_bf16_dots(total[t][0], w, _mm512_loadu_si512(x[t] + k * 2));
    }
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t)
        out[t * kBlockRows] = _mm512_reduce_add_ps(
            _mm512_add_ps(_mm512_add_ps(total[t][0], total[t][1]), _mm512_add_ps(total[t][2], total[t][3])));
}

template <int NT>
void dot_rows(const RowBlock& rows, const uint8_t* const* x, int n_tokens, float* out) {
    if (n_tokens == NT) {
        for (int h = 0; h < 2; ++h)
            for (int i = 0; i < rows.n[h]; ++i)
                dot_row<NT>(rows.row(h, i), rows.n_in, x, out + h * kHalfRows + i);
    } else if constexpr (NT > 1) {
        dot_rows<NT - 1>(rows, x, n_tokens, out);
    }
}

// Products of a group of 16 rows of BF16_R16, one to a lane. n: columns, an even number.
template <int NT>
IKPY_BF16 void dot_group(const uint8_t* group, int64_t n, const uint8_t* const* x, float* out) {
    constexpr int kChains = NT <= 4 ? 4 : 2, kBytes = 2 * 2 * kHalfRows;  // of two columns
    __m512 total[NT][kChains];
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t)
#pragma GCC unroll 4
        for (int c = 0; c < kChains; ++c) total[t][c] = _mm512_setzero_ps();
    const auto add = [&](int64_t k, int c) __attribute__((always_inline)) {
        const __m512i w = _mm512_loadu_si512(group + k * 2 * kHalfRows);
#pragma GCC unroll 8
        for (int t = 0; t < NT; ++t)
            total[t][c] =
                add_bf16_dots(total[t][c], w, _mm512_set1_epi32(load_unaligned<int32_t>(x[t] + k * 2)));
    };
    int64_t k = 0;
    for (; k + 2 * kChains <= n; k += 2 * kChains) {
        prefetch_weights<kChains * kBytes>(group + k * 2 * kHalfRows);
#pragma GCC unroll 4
        for (int c = 0; c < kChains; ++c) add(k + 2 * c, c);
    }
    for (; k < n; k += 2) add(k, 0);
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t) {
        __m512 sum = _mm512_add_ps(total[t][0], total[t][1]);
        if (kChains == 4) sum = _mm512_add_ps(sum, _mm512_add_ps(total[t][2], total[t][3]));
        _mm512_storeu_ps(out + t * kBlockRows, sum);
    }
}

template <int NT>
void dot_groups(const RowBlock& rows, const uint8_t* const* x, int n_tokens, float* out) {
    if (n_tokens == NT) {
        for (int h = 0; h < 2; ++h)
            if (rows.n[h] > 0) dot_group<NT>(rows.group(h, 0, kHalfRows), rows.n_in, x, out + h * kHalfRows);
    } else if constexpr (NT > 1) {
        dot_groups<NT - 1>(rows, x, n_tokens, out);
    }
}

void interleaved_gemv(const RowBlock& rows, const TokenSet& tokens, float* out, uint8_t*) {
    dot_groups<kGemvTokens>(rows, tokens.x, tokens.n, out);
}

void gemv(const RowBlock& rows, const TokenSet& tokens, float* out, uint8_t*) {
    dot_rows<kGemvTokens>(rows, tokens.x, tokens.n, out);
}

void interleaved_tiles(const RowBlock* blocks, int n_blocks, const TokenSet& tokens, float* out,
                       uint8_t* work) {
    if (blocks[0].n_in % 32 == 0) return groups_product(blocks, n_blocks, tokens, out, work);
    amx_product(TileFactors::kBf16, tile_panel<copy_rows>, blocks, n_blocks, tokens.x, tokens.n, out, work);
}

size_t interleaved_tile_work_bytes(int64_t n_in) {
    return std::max(groups_work_bytes(n_in), amx_work_bytes(n_in));
}

// Experts' groups of fewer tokens than a batch has rows for tiles go row by row.
void row_tiles(const RowBlock* blocks, int n_blocks, const TokenSet& tokens, float* out, uint8_t* work) {
    if (tokens.n >= kRowTileTokens)
        return word_row_tiles(TileFactors::kBf16, blocks, n_blocks, tokens, out, work);
    for (int b = 0; b < n_blocks; ++b)
        gemv(blocks[b], tokens, out + static_cast<int64_t>(b) * tokens.n * kBlockRows, work);
}

size_t row_tile_work_bytes(int64_t n_in) { return word_row_tiles_work_bytes(TileFactors::kBf16, n_in); }

size_t work_bytes(int64_t) { return kPanelColumns * kBlockRows * sizeof(uint16_t); }

const WeightKernels kPlain = {kBF16,
                              kActBf16,
                              kGemvTokens,
                              gemv,
                              gemm<pack_rows>,
                              work_bytes,
                              {row_tiles, kActBf16, kRowTileTokens, row_tile_work_bytes},
                              nullptr,
                              false,
                              kPassTokens};
const WeightKernels kInterleaved = {
    kTypeBf16R16,
    kActBf16,
    kGemvTokens,
    interleaved_gemv,
    gemm<copy_rows>,
    work_bytes,
    {interleaved_tiles, kActBf16, kGroupTileTokens, interleaved_tile_work_bytes},
    nullptr,
    false,
    kPassTokens};

}  // namespace

const WeightKernels* bf16_dot_kernels(int type) {
    static const bool available = __builtin_cpu_supports("avx512bf16");
    if (!available) return nullptr;
    return type == kBF16 ? &kPlain : type == kTypeBf16R16 ? &kInterleaved : nullptr;
}

#else

const WeightKernels* bf16_dot_kernels(int) { return nullptr; }

#endif

}  // namespace ikpy
