// What the operands of tile products (AMX) hold.
#pragma once

namespace ikpy {

enum class TileFactors {
    kBf16,
    kF16,    // one product as of bf16, on CPUs with has_amx_halves()
    kSplit,  // two bf16 parts of each factor: hi hi + lo hi + hi lo
};

constexpr int tile_parts(TileFactors f) { return f == TileFactors::kSplit ? 2 : 1; }

}  // namespace ikpy
