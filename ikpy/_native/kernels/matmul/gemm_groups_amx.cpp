#include "kernels/matmul/gemm_groups_amx.hpp"

#include <algorithm>
#include <stdexcept>

#include "kernels/matmul/activations.hpp"
#include "kernels/matmul/tile_tokens.hpp"
#include "kernels/matmul/weight_prefetch.hpp"

namespace ikpy {

#if defined(__AVX512F__) && defined(__linux__)

namespace {

constexpr int kPass = 2 * kTileHeight;  // tokens whose sums are in registers
constexpr int64_t kGroupStep = kHalfRows * kTileDepth * sizeof(uint16_t);

// Tokens in tiles 4 and 5, sums of the first 16 in 0 and 1, of the others in 2 and 3.
TileConfig config_of(int n_tokens) {
    TileConfig config(std::min(n_tokens, kTileHeight));
    config.rows[2] = config.rows[3] = config.rows[5] =
        static_cast<uint8_t>(std::clamp(n_tokens - kTileHeight, 1, kTileHeight));
    return config;
}

template <int TokenTiles, int Halves>
IKPY_AMX void block_sums(const uint8_t* first, const uint8_t* second, const TokenRows& x, int64_t n_steps,
                         float* out) {
    constexpr int64_t kOutStride = kBlockRows * sizeof(float);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t s = 0; s < n_steps; ++s) {
        const uint8_t* const token = x.base + s * kTileDepth * sizeof(uint16_t);
        _tile_loadd(4, token, x.stride);
        if (TokenTiles == 2) _tile_loadd(5, token + kTileHeight * x.stride, x.stride);
        prefetch_weights<kGroupStep>(first + s * kGroupStep);
        _tile_loadd(6, first + s * kGroupStep, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (TokenTiles == 2) _tile_dpbf16ps(2, 5, 6);
        if (Halves == 2) {
            prefetch_weights<kGroupStep>(second + s * kGroupStep);
            _tile_loadd(7, second + s * kGroupStep, 64);
            _tile_dpbf16ps(1, 4, 7);
            if (TokenTiles == 2) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, out, kOutStride);
    if (Halves == 2) _tile_stored(1, out + kHalfRows, kOutStride);
    if (TokenTiles == 1) return;
    out += kTileHeight * kBlockRows;
    _tile_stored(2, out, kOutStride);
    if (Halves == 2) _tile_stored(3, out + kHalfRows, kOutStride);
}

using SumsFn = void (*)(const uint8_t*, const uint8_t*, const TokenRows&, int64_t, float*);

SumsFn sums_of(int n_tokens, int n_halves) {
    if (n_tokens > kTileHeight) return n_halves == 2 ? block_sums<2, 2> : block_sums<2, 1>;
    return n_halves == 2 ? block_sums<1, 2> : block_sums<1, 1>;
}

}  // namespace

size_t groups_work_bytes(int64_t n_in) { return act_row_bytes(kActBf16, n_in) * kPass; }

IKPY_AMX void groups_product(const RowBlock* blocks, int n_blocks, const TokenSet& tokens, float* out,
                             uint8_t* work) {
    const bool copied = !tokens.fresh && tokens.n <= kPass;
    for (int first = 0; first < tokens.n; first += kPass) {
        const int n = std::min(kPass, tokens.n - first);
        const TokenRows x =
            token_rows(tokens.x + first, n, 0, blocks[0].n_in * static_cast<int64_t>(sizeof(uint16_t)), work,
                       act_row_bytes(kActBf16, blocks[0].n_in), copied);
        load_tile_config(config_of(n));
        for (int b = 0; b < n_blocks; ++b) {
            const RowBlock& rows = blocks[b];
            sums_of(n, rows.halves())(
                rows.group(0, 0, kHalfRows), rows.halves() == 2 ? rows.group(1, 0, kHalfRows) : nullptr, x,
                rows.n_in / kTileDepth, out + (static_cast<int64_t>(b) * tokens.n + first) * kBlockRows);
        }
    }
    release_tiles();
}

#else

size_t groups_work_bytes(int64_t) { return 0; }
void groups_product(const RowBlock*, int, const TokenSet&, float*, uint8_t*) {
    throw std::logic_error("this build has no tile products");
}

#endif

}  // namespace ikpy
