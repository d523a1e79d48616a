#include "kernels/matmul/gemm_amx.hpp"

#include <algorithm>
#include <stdexcept>

#include "kernels/matmul/tile_tokens.hpp"
#include "kernels/simd/amx_halves.hpp"
#include "kernels/simd/half_rows.hpp"
#include "kernels/simd/split_bf16.hpp"

namespace ikpy {

#if defined(__AVX512F__) && defined(__linux__)

namespace {

constexpr int64_t kGatherStride = kTileColumns * 4 + 64;  // of tokens in two parts
constexpr int64_t kOutStride = kBlockRows * sizeof(float);

constexpr int64_t half_values(TileFactors factors) { return tile_parts(factors) * kTileColumns * kHalfRows; }
constexpr int64_t panel_values(TileFactors factors) { return 2 * half_values(factors); }

// What the four sums in registers belong to. Operands in one part: 16 tokens and two row blocks, so that the
// tokens are read half as often (0.96 of the time of 32 tokens and one block). In two parts: 32 tokens and
// one block, whose products need 8 loads for 12 (0.89 of the time).
constexpr int pass_tokens(TileFactors factors) { return tile_parts(factors) * kTileHeight; }
constexpr int pass_blocks(TileFactors factors) { return 2 / tile_parts(factors); }

inline void prefetch_sums(const uint8_t* p, int64_t n) {
    for (int64_t i = 0; i < n; i += 64) __builtin_prefetch(p + i, 1);
}

// NT tiles of tokens, in 4 and 5, times NH halves of the weights of NB row blocks, which pass through 6 and
// 7; NT * NB * NH <= 4 sums.
template <TileFactors F, int NT, int NB, int NH>
IKPY_AMX inline void add_products(const uint16_t* w) {
    _tile_loadd(6, w, 64);
    tile_product<F, 0, 4, 6>();
    if (NH == 2) {
        _tile_loadd(7, w + half_values(F), 64);
        tile_product<F, 1, 4, 7>();
    }
    if (NT == 2) tile_product<F, 2, 5, 6>();
    if (NT == 2 && NH == 2) tile_product<F, 3, 5, 7>();
    if (NB == 2) {
        _tile_loadd(6, w + panel_values(F), 64);
        tile_product<F, 2, 4, 6>();
        _tile_loadd(7, w + panel_values(F) + half_values(F), 64);
        tile_product<F, 3, 4, 7>();
    }
}

// Tokens in tiles 4 and 5.
template <int NT>
IKPY_AMX inline void load_tokens(const TokenRows& x, int64_t at) {
    _tile_loadd(4, x.base + at, x.stride);
    if (NT == 2) _tile_loadd(5, x.base + at + kTileHeight * x.stride, x.stride);
}

// Up to 16 tokens or 32 times NB row blocks of NH halves. LowWeights: not all of the second parts of the
// weights are zeros. The weights stay in the first-level cache while the tokens stream by. Tokens (8 KiB per
// 512 cycles of products) and sums (4 KiB read, 4 KiB written) come from the second level, which passes some
// 22 bytes per cycle of both (stores cost three times what loads do): fetching the next tokens' sums early is
// worth 1.28 times the speed, fetching tokens early costs some of it.
template <TileFactors F, int NT, int NB, int NH, bool LowWeights>
IKPY_AMX void tile_sums(const TokenRows& x, const uint16_t* panel, int64_t n_steps, float* out,
                        int64_t out_block, bool add) {
    constexpr bool kTwice = NT * NB == 2;
    constexpr int kParts = tile_parts(F);
    constexpr int64_t kFetched = kTileHeight * kOutStride / (kTileColumns / kTileDepth);
    float* const third = NT == 2 ? out + kTileHeight * kBlockRows : out + out_block;
    if (add) {
        _tile_loadd(0, out, kOutStride);
        if (NH == 2) _tile_loadd(1, out + kHalfRows, kOutStride);
        if (kTwice) _tile_loadd(2, third, kOutStride);
        if (kTwice && NH == 2) _tile_loadd(3, third + kHalfRows, kOutStride);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    const auto* const next = reinterpret_cast<const uint8_t*>(out) + NT * kTileHeight * kOutStride;
    const auto* const next_third = reinterpret_cast<const uint8_t*>(third) + NT * kTileHeight * kOutStride;
    for (int64_t s = 0; s < n_steps; ++s) {
        const uint16_t* w = panel + s * kParts * kTileValues;
        load_tokens<NT>(x, s * kParts * 64);
        if (kParts == 2 && LowWeights) add_products<F, NT, NB, NH>(w + kTileValues);
        add_products<F, NT, NB, NH>(w);
        if (kParts == 2) {
            load_tokens<NT>(x, s * kParts * 64 + 64);
            add_products<F, NT, NB, NH>(w);
        }
        if (kTwice && NH == 2) {
            prefetch_sums(next + s * kFetched, kFetched);
            prefetch_sums(next_third + s * kFetched, kFetched);
        }
    }
    _tile_stored(0, out, kOutStride);
    if (NH == 2) _tile_stored(1, out + kHalfRows, kOutStride);
    if (kTwice) _tile_stored(2, third, kOutStride);
    if (kTwice && NH == 2) _tile_stored(3, third + kHalfRows, kOutStride);
}

using SumsFn = void (*)(const TokenRows&, const uint16_t*, int64_t, float*, int64_t, bool);

template <TileFactors F>
SumsFn sums_of(int n_blocks, int n_halves) {
    if (n_halves == 1) return tile_sums<F, 1, 1, 1, false>;
    return n_blocks == 2 ? tile_sums<F, 1, 2, 2, false> : tile_sums<F, 1, 1, 2, false>;
}

template <bool LowWeights>
SumsFn split_sums_of(int n_tokens, int n_halves) {
    constexpr TileFactors F = TileFactors::kSplit;
    if (n_tokens > kTileHeight)
        return n_halves == 2 ? tile_sums<F, 2, 1, 2, LowWeights> : tile_sums<F, 2, 1, 1, LowWeights>;
    return n_halves == 2 ? tile_sums<F, 1, 1, 2, LowWeights> : tile_sums<F, 1, 1, 1, LowWeights>;
}

SumsFn sums_of(TileFactors factors, int n_tokens, int n_blocks, int n_halves, bool low_weights) {
    switch (factors) {
        case TileFactors::kF16:
            return sums_of<TileFactors::kF16>(n_blocks, n_halves);
        case TileFactors::kSplit:
            return low_weights ? split_sums_of<true>(n_tokens, n_halves)
                               : split_sums_of<false>(n_tokens, n_halves);
        default:
            return sums_of<TileFactors::kBf16>(n_blocks, n_halves);
    }
}

bool has_low_weights(TileFactors factors, const uint16_t* panel, int n_halves, int64_t n_steps) {
    if (factors != TileFactors::kSplit) return false;
    for (int h = 0; h < n_halves; ++h)
        if (has_low_parts(panel + h * half_values(factors), n_steps)) return true;
    return false;
}

}  // namespace

size_t amx_work_bytes(int64_t) {
    const size_t int8_panel = kTileColumns * kBlockRows + 2 * (kTileColumns / 16 * kBlockRows * 4);
    const size_t panels = kWideBlocks * panel_values(TileFactors::kSplit) * sizeof(uint16_t);
    return panels + pass_tokens(TileFactors::kSplit) * kGatherStride + int8_panel;
}

IKPY_AMX void amx_product(TileFactors factors, TilePanelFn fill, const RowBlock* blocks, int n_blocks,
                          const uint8_t* const* x, int n_tokens, float* out, uint8_t* work) {
    const int64_t n_values = panel_values(factors);
    auto* panels = reinterpret_cast<uint16_t*>(work);
    uint8_t* gather = work + kWideBlocks * n_values * sizeof(uint16_t);
    uint8_t* fill_work = gather + pass_tokens(factors) * kGatherStride;
    const int64_t n_in = blocks[0].n_in, block_out = static_cast<int64_t>(n_tokens) * kBlockRows;
    const int64_t step_bytes = tile_parts(factors) * 64;
    const int pass = pass_tokens(factors);
    for (int64_t k0 = 0; k0 < n_in; k0 += kTileColumns) {
        const int64_t n_steps = (std::min(kTileColumns, n_in - k0) + kTileDepth - 1) / kTileDepth;
        for (int b = 0; b < n_blocks; ++b)
            fill(blocks[b], k0, n_steps * kTileDepth, panels + b * n_values, fill_work);
        for (int b = 0; b < n_blocks;) {
            const uint16_t* panel = panels + b * n_values;
            const int n_halves = blocks[b].halves();
            const bool pair = n_halves == 2 && b + 1 < n_blocks && blocks[b + 1].n[1] > 0;
            const int count = pair ? pass_blocks(factors) : 1;
            const bool low = has_low_weights(factors, panel, n_halves, n_steps);
            for (int t0 = 0; t0 < n_tokens; t0 += pass) {
                const int nt = std::min(pass, n_tokens - t0), first = std::min(nt, kTileHeight);
                if (t0 == 0 || nt < pass) load_tile_config(TileConfig(first, nt - first));
                sums_of(factors, nt, count, n_halves, low)(
                    token_rows(x + t0, nt, k0 / kTileDepth * step_bytes, n_steps * step_bytes, gather,
                               kGatherStride),
                    panel, n_steps, out + (b * block_out + t0 * kBlockRows), block_out, k0 > 0);
            }
            b += count;
        }
    }
    release_tiles();
}

void decode_panel(const Int8Panel& p, int n_halves, int group, bool symmetric, uint16_t* panel) {
    const __m512i byte = _mm512_set1_epi32(0xFF);
    for (int h = 0; h < n_halves; ++h) {
        const uint8_t* codes = p.codes + h * p.half_codes();
        const float* d = p.d + h * p.half_scales(group);
        const float* m = p.m + h * p.half_scales(group);
        uint16_t* out = panel + h * kTileColumns * kHalfRows;
        for (int64_t g = 0; g < p.n / group; ++g, d += kHalfRows, m += kHalfRows) {
            const __m512 scale = _mm512_loadu_ps(d);
            const __m512 offset =
                symmetric ? _mm512_mul_ps(scale, _mm512_set1_ps(-128.0f)) : _mm512_loadu_ps(m);
            for (int j = 0; j < group / 4; ++j, codes += 64, out += 64) {
                const __m512i v = _mm512_loadu_si512(codes);
                __m512 f[4];
                f[0] = _mm512_cvtepi32_ps(_mm512_and_si512(v, byte));
                f[1] = _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(v, 8), byte));
                f[2] = _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(v, 16), byte));
                f[3] = _mm512_cvtepi32_ps(_mm512_srli_epi32(v, 24));
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) f[i] = _mm512_fmadd_ps(f[i], scale, offset);
                _mm512_storeu_si512(out, bf16_pairs(f[0], f[1]));
                _mm512_storeu_si512(out + 32, bf16_pairs(f[2], f[3]));
            }
        }
    }
}

#else

size_t amx_work_bytes(int64_t) { return 0; }
void amx_product(TileFactors, TilePanelFn, const RowBlock*, int, const uint8_t* const*, int, float*,
                 uint8_t*) {
    throw std::logic_error("this build has no tile products");
}
void decode_panel(const Int8Panel&, int, int, bool, uint16_t*) {}

#endif

}  // namespace ikpy
