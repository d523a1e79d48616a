#include "kernels/gemm_amx.hpp"

#include <algorithm>
#include <stdexcept>

#include "kernels/amx_halves.hpp"
#include "kernels/half_rows.hpp"
#include "kernels/tile_tokens.hpp"

namespace ikpy {

#if defined(__AVX512F__) && defined(__linux__)

namespace {

constexpr int64_t kGatherStride = kTileColumns * 2 + 64;
constexpr int64_t kHalfPanel = kTileColumns * kHalfRows;  // values
constexpr int64_t kPanelBytes = kTileColumns * kBlockRows * 2;

constexpr int64_t kOutStride = kBlockRows * sizeof(float);

inline void prefetch_sums(const uint8_t* p, int64_t n) {
    for (int64_t i = 0; i < n; i += 64) __builtin_prefetch(p + i, 1);
}

// Tiles 0 to 3 plus the tokens in tile 4, or their low parts in 5, times one tile of each half of the
// weights.
template <TileFactors F, int NB, int NH, bool LowTokens>
IKPY_AMX inline void add_products(const uint16_t* w) {
    constexpr int kSums = NB * NH, kTokens = LowTokens ? 5 : 4;
    constexpr int64_t kSecond = (NH == 2 ? 1 : 2) * kHalfPanel;
    _tile_loadd(6, w, 64);
    tile_product<F, 0, kTokens, 6>();
    if (kSums > 1) {
        _tile_loadd(7, w + kSecond, 64);
        tile_product<F, 1, kTokens, 7>();
    }
    if (kSums > 2) {
        _tile_loadd(6, w + 2 * kHalfPanel, 64);
        tile_product<F, 2, kTokens, 6>();
        _tile_loadd(7, w + 3 * kHalfPanel, 64);
        tile_product<F, 3, kTokens, 7>();
    }
}

// Up to 16 tokens times NB row blocks of NH halves, NB * NH <= 4 sums. The weights stay in the first-level
// cache while the tokens stream by, so one tile of tokens shall meet as many tiles of weights as there are
// registers. Tokens (8 KiB per 512 cycles of products) and sums (4 KiB read, 4 KiB written) come from the
// second level, which passes some 22 bytes per cycle of both (stores cost three times what loads do):
// fetching the next tokens' sums early is worth 1.28 times the speed, fetching tokens early costs some of it.
template <TileFactors F, int NB, int NH>
IKPY_AMX void tile_sums(const TokenRows& x, const uint16_t* panel, int64_t n_steps, float* out,
                        int64_t out_block, bool add) {
    constexpr int kSums = NB * NH, kParts = tile_parts(F);
    constexpr int64_t kFetched = kTileHeight * kOutStride / (panel_columns(F) / kTileDepth);
    float* const second = NH == 2 ? out + kHalfRows : out + out_block;
    float* const third = out + out_block;
    float* const fourth = third + kHalfRows;
    if (add) {
        _tile_loadd(0, out, kOutStride);
        if (kSums > 1) _tile_loadd(1, second, kOutStride);
        if (kSums > 2) {
            _tile_loadd(2, third, kOutStride);
            _tile_loadd(3, fourth, kOutStride);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    const auto* const next = reinterpret_cast<const uint8_t*>(out) + kTileHeight * kOutStride;
    const auto* const next_third = reinterpret_cast<const uint8_t*>(third) + kTileHeight * kOutStride;
    for (int64_t s = 0; s < n_steps; ++s) {
        const uint16_t* w = panel + s * kParts * kTileValues;
        _tile_loadd(4, x.base + s * kParts * 64, x.stride);
        if (kParts == 2) _tile_loadd(5, x.base + s * kParts * 64 + 64, x.stride);
        add_products<F, NB, NH, false>(w);
        if (kParts == 2) {
            add_products<F, NB, NH, false>(w + kTileValues);
            add_products<F, NB, NH, true>(w);
        }
        if (kSums == 4) {
            prefetch_sums(next + s * kFetched, kFetched);
            prefetch_sums(next_third + s * kFetched, kFetched);
        }
    }
    _tile_stored(0, out, kOutStride);
    if (kSums > 1) _tile_stored(1, second, kOutStride);
    if (kSums > 2) {
        _tile_stored(2, third, kOutStride);
        _tile_stored(3, fourth, kOutStride);
    }
}

using SumsFn = void (*)(const TokenRows&, const uint16_t*, int64_t, float*, int64_t, bool);

template <TileFactors F>
SumsFn sums_of(int n_blocks, int n_halves) {
    if (n_halves == 1) return tile_sums<F, 1, 1>;
    return n_blocks == 2 ? tile_sums<F, 2, 2> : tile_sums<F, 1, 2>;
}

SumsFn sums_of(TileFactors factors, int n_blocks, int n_halves) {
    switch (factors) {
        case TileFactors::kF16:
            return sums_of<TileFactors::kF16>(n_blocks, n_halves);
        case TileFactors::kSplit:
            return sums_of<TileFactors::kSplit>(n_blocks, n_halves);
        default:
            return sums_of<TileFactors::kBf16>(n_blocks, n_halves);
    }
}

}  // namespace

size_t amx_work_bytes(int64_t) {
    const size_t int8_panel = kTileColumns * kBlockRows + 2 * (kTileColumns / 16 * kBlockRows * 4);
    return kWideBlocks * kPanelBytes + kTileHeight * kGatherStride + int8_panel;
}

IKPY_AMX void amx_product(TileFactors factors, TilePanelFn fill, const RowBlock* blocks, int n_blocks,
                          const uint8_t* const* x, int n_tokens, float* out, uint8_t* work) {
    auto* panels = reinterpret_cast<uint16_t*>(work);
    uint8_t* gather = work + kWideBlocks * kPanelBytes;
    uint8_t* fill_work = gather + kTileHeight * kGatherStride;
    const int64_t n_in = blocks[0].n_in, block_out = static_cast<int64_t>(n_tokens) * kBlockRows;
    const int64_t columns = panel_columns(factors), step_bytes = tile_parts(factors) * 64;
    for (int64_t k0 = 0; k0 < n_in; k0 += columns) {
        const int64_t n_steps = (std::min(columns, n_in - k0) + kTileDepth - 1) / kTileDepth;
        for (int b = 0; b < n_blocks; ++b)
            fill(blocks[b], k0, n_steps * kTileDepth, panels + b * kPanelBytes / 2, fill_work);
        for (int b = 0; b < n_blocks;) {
            const int n_halves = blocks[b].halves();
            const int count = n_halves == 2 && b + 1 < n_blocks && blocks[b + 1].n[1] > 0 ? 2 : 1;
            const auto sums = sums_of(factors, count, n_halves);
            for (int t0 = 0; t0 < n_tokens; t0 += kTileHeight) {
                const int nt = std::min(kTileHeight, n_tokens - t0);
                if (t0 == 0 || nt < kTileHeight) load_tile_config(TileConfig(nt, 2));
                sums(token_rows(x + t0, nt, k0 / kTileDepth * step_bytes, n_steps * step_bytes, gather,
                                kGatherStride),
                     panels + b * kPanelBytes / 2, n_steps, out + (b * block_out + t0 * kBlockRows),
                     block_out, k0 > 0);
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
        uint16_t* out = panel + h * kHalfPanel;
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
