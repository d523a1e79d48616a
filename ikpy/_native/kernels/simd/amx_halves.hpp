// The tile unit's product of halves (f16 times f16, f32 sums: AMX-FP16), and kernels' choice of the product.
#pragma once
#include "kernels/matmul/tile_factors.hpp"
#include "kernels/simd/amx_tiles.hpp"

#if defined(__AVX512F__) && defined(__linux__)

namespace ikpy {

// Tile Sum += rows of tile Left times pairs of rows of tile Right, whose layouts are those of bf16 products.
// Subnormal halves count. Only where has_amx_halves(). In bytes: TDPFP16PS is younger than some compilers.
template <int Sum, int Left, int Right>
IKPY_AMX inline void tile_dpfp16ps() {
    static_assert(Sum >= 0 && Sum < 8 && Left >= 0 && Left < 8 && Right >= 0 && Right < 8);
    static_assert(Sum != Left && Sum != Right && Left != Right);
    constexpr int kVex = ((~Right & 0xF) << 3) | 3, kRegisters = 0xC0 | Sum << 3 | Left;
    asm volatile(".byte 0xc4, 0xe2, %c0, 0x5c, %c1" ::"i"(kVex), "i"(kRegisters));
}

// The same of numbers of this kind.
template <TileFactors F, int Sum, int Left, int Right>
IKPY_AMX inline void tile_product() {
    if constexpr (F == TileFactors::kF16) {
        tile_dpfp16ps<Sum, Left, Right>();
    } else {
        // The intrinsic takes literal numbers only.
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(Left), "i"(Right));
    }
}

}  // namespace ikpy

#endif
