// The tile unit (AMX) as its users see it: configuration of the eight tile registers.
#pragma once
#include <cstdint>

#if defined(__AVX512F__) && defined(__linux__)
#include "kernels/simd/half_rows.hpp"

#define IKPY_AMX __attribute__((target("amx-tile,amx-bf16")))

namespace ikpy {

constexpr int kTileHeight = 16;     // rows of a tile
constexpr int64_t kTileDepth = 32;  // bf16 values per tile row
constexpr int64_t kTileValues = kTileHeight * kTileDepth;

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    // Sums in tiles 0-3 and left operands in tile 4 with n_rows rows; all others are full.
    explicit TileConfig(int n_rows) {
        for (int i = 0; i < 8; ++i) {
            row_bytes[i] = 64;
            rows[i] = static_cast<uint8_t>(i < 5 ? n_rows : kTileHeight);
        }
    }

    // Left operands of n_first rows in tile 4 and, if any, of n_second in 5. Sums of those in tiles 0 and 1,
    // of these in 2 and 3; without these all four belong to tile 4.
    TileConfig(int n_first, int n_second) : TileConfig(n_first) {
        if (n_second > 0)
            for (int i : {2, 3, 5}) rows[i] = static_cast<uint8_t>(n_second);
    }
};

IKPY_AMX inline void load_tile_config(const TileConfig& config) {
    // GCC's intrinsic tells the compiler of 8 bytes only; without this the other stores are dropped.
    asm volatile("" ::"m"(config));
    _tile_loadconfig(&config);
}

IKPY_AMX inline void load_tile_config(int n_rows) { load_tile_config(TileConfig(n_rows)); }

IKPY_AMX inline void release_tiles() { _tile_release(); }

// Pairs of f32 rounded to bf16, the first in the low half.
inline __m512i bf16_pairs(__m512 low, __m512 high) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    const __m512i a = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(low), half), 16);
    const __m512i b = _mm512_add_epi32(_mm512_castps_si512(high), half);
    return _mm512_mask_blend_epi16(0xAAAAAAAA, a, b);
}

}  // namespace ikpy

#endif
