// Tile products of latent attention on F16 and BF16 caches (flash_latent_halves.cpp, which says of what).
#pragma once
#include "kernels/attention/flash_latent.hpp"
#include "kernels/simd/amx_halves.hpp"

#if defined(__AVX512VNNI__) && defined(__linux__)

namespace ikpy {
namespace latent {

constexpr int64_t kTileSums = 256;
constexpr int64_t kPair = 2 * kTileBytes;  // a tile and its low halves

// Rows of keys as left tiles: those of the cache, or made of F16 ones, with low halves.
struct KeyRows {
    const uint8_t *hi, *lo;
    int64_t stride;  // bytes
};

IKPY_AMX inline void load_sums(const float* c) {
    _tile_loadd(0, c, 64);
    _tile_loadd(1, c + kTileSums, 64);
    _tile_loadd(2, c + 2 * kTileSums, 64);
    _tile_loadd(3, c + 3 * kTileSums, 64);
}

IKPY_AMX inline void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

IKPY_AMX inline void store_sums(float* c) {
    _tile_stored(0, c, 64);
    _tile_stored(1, c + kTileSums, 64);
    _tile_stored(2, c + 2 * kTileSums, 64);
    _tile_stored(3, c + 3 * kTileSums, 64);
}

// Lines of sums that the product after this one adds to, fetched into the first-level cache: tile loads do
// not look ahead.
struct Ahead {
    const uint8_t* at;
    int64_t pace;
    Background& next;
    Ahead(const float* sums, int64_t ticks, Background& background)
        : at(reinterpret_cast<const uint8_t*>(sums)),
          pace((4 * kTileBytes / 64 + ticks - 1) / ticks),
          next(background) {}
    void tick() {
        for (int64_t i = 0; i < pace; ++i, at += 64) __builtin_prefetch(at, 1, 3);
        next.tick();
    }
};

// Adds keys of a block times queries of 16 rows, n tiles deep, to the tiles of sums.
// beside: what vectors do meanwhile, in 4 n ticks.
template <TileFactors F, class Beside>
IKPY_AMX void multiply_keys(const KeyRows& keys, const uint8_t* q, int64_t n, Beside& beside) {
    const int64_t stride = keys.stride, outer = 16 * stride;
    for (int64_t k = 0; k < n; ++k, q += kPair) {
        const uint8_t *hi = keys.hi + 64 * k, *lo = keys.lo + 64 * k;
        _tile_loadd(6, q, 64);
        _tile_loadd(7, q + kTileBytes, 64);
        _tile_loadd(4, hi, stride);
        tile_product<F, 0, 4, 6>();
        tile_product<F, 0, 4, 7>();
        if (F == TileFactors::kSplit) {
            _tile_loadd(5, lo, stride);
            tile_product<F, 0, 5, 6>();
        }
        beside.tick();
        _tile_loadd(4, hi + outer, stride);
        tile_product<F, 1, 4, 6>();
        tile_product<F, 1, 4, 7>();
        if (F == TileFactors::kSplit) {
            _tile_loadd(5, lo + outer, stride);
            tile_product<F, 1, 5, 6>();
        }
        beside.tick();
        _tile_loadd(4, hi + 2 * outer, stride);
        tile_product<F, 2, 4, 6>();
        tile_product<F, 2, 4, 7>();
        if (F == TileFactors::kSplit) {
            _tile_loadd(5, lo + 2 * outer, stride);
            tile_product<F, 2, 5, 6>();
        }
        beside.tick();
        _tile_loadd(4, hi + 3 * outer, stride);
        tile_product<F, 3, 4, 6>();
        tile_product<F, 3, 4, 7>();
        if (F == TileFactors::kSplit) {
            _tile_loadd(5, lo + 3 * outer, stride);
            tile_product<F, 3, 5, 6>();
        }
        beside.tick();
    }
}

// Adds weights of 16 rows times values of 64 columns to the tiles of sums. beside: what vectors do meanwhile,
// in 4 n ticks.
template <TileFactors F, class Beside>
IKPY_AMX void multiply_values(const uint8_t* p, const uint8_t* v, int64_t n, Beside& beside) {
    constexpr int64_t tile = tile_parts(F) * kTileBytes;
    for (int64_t k = 0; k < n; ++k, p += kPair, v += 4 * tile) {
        _tile_loadd(4, p, 64);
        _tile_loadd(5, p + kTileBytes, 64);
        _tile_loadd(6, v, 64);
        tile_product<F, 0, 4, 6>();
        tile_product<F, 0, 5, 6>();
        if (F == TileFactors::kSplit) {
            _tile_loadd(7, v + kTileBytes, 64);
            tile_product<F, 0, 4, 7>();
        }
        beside.tick();
        _tile_loadd(6, v + tile, 64);
        tile_product<F, 1, 4, 6>();
        tile_product<F, 1, 5, 6>();
        if (F == TileFactors::kSplit) {
            _tile_loadd(7, v + tile + kTileBytes, 64);
            tile_product<F, 1, 4, 7>();
        }
        beside.tick();
        _tile_loadd(6, v + 2 * tile, 64);
        tile_product<F, 2, 4, 6>();
        tile_product<F, 2, 5, 6>();
        if (F == TileFactors::kSplit) {
            _tile_loadd(7, v + 2 * tile + kTileBytes, 64);
            tile_product<F, 2, 4, 7>();
        }
        beside.tick();
        _tile_loadd(6, v + 3 * tile, 64);
        tile_product<F, 3, 4, 6>();
        tile_product<F, 3, 5, 6>();
        if (F == TileFactors::kSplit) {
            _tile_loadd(7, v + 3 * tile + kTileBytes, 64);
            tile_product<F, 3, 4, 7>();
        }
        beside.tick();
    }
}

}  // namespace latent
}  // namespace ikpy

#endif
