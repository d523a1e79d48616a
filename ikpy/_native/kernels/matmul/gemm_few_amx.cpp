#include "kernels/matmul/gemm_few_amx.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "kernels/matmul/activations.hpp"
#include "kernels/matmul/tile_tokens.hpp"
#include "kernels/simd/amx_halves.hpp"
#include "kernels/simd/split_bf16.hpp"

namespace ikpy {

#if defined(__AVX512F__) && defined(__linux__)

namespace {

constexpr int64_t kChunkSteps = kFewColumns / kTileDepth;
constexpr int kTokenTiles = kFewTokens / kTileHeight;

// Work memory: tokens [tile][part][step], weights of two chunks [half][step][part], sums [tile][half].
struct Work {
    uint16_t* tokens;
    uint16_t* weights;
    float* sums;

    static int64_t token_values(TileFactors factors, int64_t n_in) {
        return kTokenTiles * tile_parts(factors) * round_up(n_in, kTileDepth) * kTileHeight;
    }
    static int64_t weight_values(TileFactors factors) {
        return 2 * tile_parts(factors) * kFewColumns * kHalfRows;
    }

    Work(uint8_t* base, TileFactors factors, int64_t n_in) {
        tokens = reinterpret_cast<uint16_t*>(base);
        weights = tokens + token_values(factors, n_in);
        sums = reinterpret_cast<float*>(weights + 2 * weight_values(factors));
    }
};

// Halves of rows that the sums in registers belong to: two with up to 32 tokens, one with up to 64.
template <int TokenTiles>
constexpr int kHalves = TokenTiles == 4 ? 1 : 2;

template <TileFactors F, bool TwoTiles>
IKPY_AMX inline void multiply_all() {
    tile_product<F, 0, 4, 6>();
    tile_product<F, 1, 5, 6>();
    if (TwoTiles) {
        tile_product<F, 2, 4, 7>();
        tile_product<F, 3, 5, 7>();
    }
}

// One step of two halves of rows in tiles 4 and 5; sums in tiles 0 and 1, of the second 16 tokens in 2 and 3.
// With 16 tokens and two parts those hold the products with the low parts of the weights: shorter chains.
template <TileFactors F, int TokenTiles>
IKPY_AMX inline void add_step(const uint16_t* weights, const uint16_t* tokens, int64_t token_low,
                              bool low_weights) {
    constexpr int kParts = tile_parts(F);
    constexpr int64_t kHalf = kParts * kChunkSteps * kTileValues;
    _tile_loadd(6, tokens, 64);
    if (TokenTiles == 2) _tile_loadd(7, tokens + kParts * token_low, 64);
    if (kParts == 2 && low_weights) {
        _tile_loadd(4, weights + kTileValues, 64);
        _tile_loadd(5, weights + kHalf + kTileValues, 64);
        if (TokenTiles == 2) {
            multiply_all<F, true>();
        } else {
            tile_product<F, 2, 4, 6>();
            tile_product<F, 3, 5, 6>();
        }
    }
    _tile_loadd(4, weights, 64);
    _tile_loadd(5, weights + kHalf, 64);
    multiply_all<F, TokenTiles == 2>();
    if (kParts == 2) {
        _tile_loadd(6, tokens + token_low, 64);
        if (TokenTiles == 2) _tile_loadd(7, tokens + 3 * token_low, 64);
        multiply_all<F, TokenTiles == 2>();
    }
}

// One step of one half, in tile 4 and its low part in 5; sums of 64 tokens in tiles 0 to 3.
template <TileFactors F>
IKPY_AMX inline void add_wide_step(const uint16_t* weights, const uint16_t* tokens, int64_t token_low,
                                   bool low_weights) {
    constexpr int kParts = tile_parts(F);
    _tile_loadd(4, weights, 64);
    const bool low = kParts == 2 && low_weights;
    if (low) _tile_loadd(5, weights + kTileValues, 64);
    _tile_loadd(6, tokens, 64);
    _tile_loadd(7, tokens + kParts * token_low, 64);
    tile_product<F, 0, 4, 6>();
    tile_product<F, 1, 4, 7>();
    if (low) {
        tile_product<F, 0, 5, 6>();
        tile_product<F, 1, 5, 7>();
    }
    _tile_loadd(6, tokens + 2 * kParts * token_low, 64);
    _tile_loadd(7, tokens + 3 * kParts * token_low, 64);
    tile_product<F, 2, 4, 6>();
    tile_product<F, 3, 4, 7>();
    if (kParts == 1) return;
    if (low) {
        tile_product<F, 2, 5, 6>();
        tile_product<F, 3, 5, 7>();
    }
    _tile_loadd(6, tokens + token_low, 64);
    _tile_loadd(7, tokens + 3 * token_low, 64);
    tile_product<F, 0, 4, 6>();
    tile_product<F, 1, 4, 7>();
    _tile_loadd(6, tokens + 5 * token_low, 64);
    _tile_loadd(7, tokens + 7 * token_low, 64);
    tile_product<F, 2, 4, 6>();
    tile_product<F, 3, 4, 7>();
}

// A chunk of columns of the rows whose sums are in registers: a block, or one half of it.
struct Chunk {
    int block, half;
    int64_t step, n_steps;
};

template <int TokenTiles>
Chunk chunk_at(int64_t i, int64_t row_steps) {
    constexpr int kUnits = 2 / kHalves<TokenTiles>;
    const int64_t per_row = (row_steps + kChunkSteps - 1) / kChunkSteps, step = i % per_row * kChunkSteps;
    const int unit = static_cast<int>(i / per_row);
    return {unit / kUnits, unit % kUnits, step, std::min(kChunkSteps, row_steps - step)};
}

template <TileFactors F, int TokenTiles>
void fill_quarter(RowTileFn fill, const RowBlock* blocks, const Chunk& c, int quarter, uint16_t* weights) {
    const RowBlock& block = blocks[c.block];
    for (int h = 0; h < kHalves<TokenTiles>; ++h)
        fill(block, block.n[1] > 0 ? c.half + h : 0, quarter * kFewRows, c.step * kTileDepth,
             c.n_steps * kTileDepth, weights + h * tile_parts(F) * kFewColumns * kHalfRows);
}

template <TileFactors F, int TokenTiles>
bool low_chunk(const uint16_t* weights, int64_t n_steps) {
    for (int h = 0; h < kHalves<TokenTiles>; ++h)
        if (has_low_parts(weights + h * tile_parts(F) * kFewColumns * kHalfRows, n_steps)) return true;
    return false;
}

template <TileFactors F, int TokenTiles>
IKPY_AMX void store_block(const RowBlock& block, int half, float* sums, int n_tokens, float* out) {
    constexpr int64_t kSums = kTileHeight * kTileHeight;
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + kSums, 64);
    _tile_stored(2, sums + 2 * kSums, 64);
    _tile_stored(3, sums + 3 * kSums, 64);
    asm volatile("" ::: "memory");  // tile stores do not tell the compiler what they write
    const float* more = tile_parts(F) == 2 && TokenTiles == 1 ? sums + 2 * kSums : nullptr;
    for (int t = 0; t < n_tokens; t += kTileHeight)
        for (int h = 0; h < kHalves<TokenTiles>; ++h, sums += kSums, more = more ? more + kSums : more)
            if (block.n[half + h] > 0)
                store_sums(sums, more, std::min(kTileHeight, n_tokens - t),
                           out + t * kBlockRows + (half + h) * kHalfRows);
}

// While the tile unit works on one chunk the vector units fill the next one.
template <TileFactors F, int TokenTiles>
IKPY_AMX void blocks_product(RowTileFn fill, const RowBlock* blocks, int n_blocks, const Work& work,
                             int n_tokens, float* out, int64_t block_out) {
    static_assert(kChunkSteps * kFewRows == kHalfRows);
    const int64_t row_steps = round_up(blocks[0].n_in, kTileDepth) / kTileDepth;
    const int64_t n_units = n_blocks * (2 / kHalves<TokenTiles>);
    const int64_t n_chunks = n_units * ((row_steps + kChunkSteps - 1) / kChunkSteps);
    uint16_t* weights = work.weights;
    uint16_t* spare = weights + Work::weight_values(F);
    Chunk chunk = chunk_at<TokenTiles>(0, row_steps);
    for (int q = 0; q < kChunkSteps; ++q) fill_quarter<F, TokenTiles>(fill, blocks, chunk, q, weights);
    for (int64_t i = 0; i < n_chunks; ++i) {
        if (chunk.step == 0) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        const Chunk next = chunk_at<TokenTiles>(i + 1, row_steps);
        const bool low = F == TileFactors::kSplit && low_chunk<F, TokenTiles>(weights, chunk.n_steps);
        for (int s = 0; s < kChunkSteps; ++s) {
            asm volatile("" ::: "memory");  // tile loads do not tell the compiler what they read
            const uint16_t* step = weights + s * tile_parts(F) * kTileValues;
            const uint16_t* tokens = work.tokens + (chunk.step + s) * kTileValues;
            if (s < chunk.n_steps) {
                if constexpr (TokenTiles == 4) {
                    add_wide_step<F>(step, tokens, row_steps * kTileValues, low);
                } else {
                    add_step<F, TokenTiles>(step, tokens, row_steps * kTileValues, low);
                }
            }
            if (i + 1 < n_chunks) fill_quarter<F, TokenTiles>(fill, blocks, next, s, spare);
        }
        if (i + 1 == n_chunks || next.step == 0)
            store_block<F, TokenTiles>(blocks[chunk.block], chunk.half, work.sums, n_tokens,
                                       out + chunk.block * block_out);
        chunk = next;
        std::swap(weights, spare);
    }
}

using ProductFn = void (*)(RowTileFn, const RowBlock*, int, const Work&, int, float*, int64_t);

template <TileFactors F>
ProductFn product_of(int n_tokens) {
    if (n_tokens <= kTileHeight) return blocks_product<F, 1>;
    return n_tokens <= 2 * kTileHeight ? blocks_product<F, 2> : blocks_product<F, 4>;
}

ProductFn product_of(TileFactors factors, int n_tokens) {
    switch (factors) {
        case TileFactors::kF16:
            return product_of<TileFactors::kF16>(n_tokens);
        case TileFactors::kSplit:
            return product_of<TileFactors::kSplit>(n_tokens);
        default:
            return product_of<TileFactors::kBf16>(n_tokens);
    }
}

}  // namespace

size_t few_tokens_work_bytes(TileFactors factors, int64_t n_in) {
    const int64_t values = Work::token_values(factors, n_in) + 2 * Work::weight_values(factors);
    return values * sizeof(uint16_t) + 4 * kTileHeight * kTileHeight * sizeof(float);
}

IKPY_AMX void few_tokens_product(TileFactors factors, RowTileFn fill, const RowBlock* blocks, int n_blocks,
                                 const TokenSet& tokens, float* out, uint8_t* work) {
    const Work at(work, factors, blocks[0].n_in);
    const int n_parts = tile_parts(factors);
    const int64_t row_steps = round_up(blocks[0].n_in, kTileDepth) / kTileDepth;
    load_tile_config(kTileHeight);
    if (tokens.fresh)
        for (int first = 0, i = 0; first < tokens.n; first += kTileHeight)
            for (int part = 0; part < n_parts; ++part, ++i)
                transpose_tokens(tokens.x + first, std::min(kTileHeight, tokens.n - first), n_parts, part,
                                 row_steps, at.tokens + i * row_steps * kTileValues);
    product_of(factors, tokens.n)(fill, blocks, n_blocks, at, tokens.n, out,
                                  static_cast<int64_t>(tokens.n) * kBlockRows);
    release_tiles();
}

#else

size_t few_tokens_work_bytes(TileFactors, int64_t) { return 0; }
void few_tokens_product(TileFactors, RowTileFn, const RowBlock*, int, const TokenSet&, float*, uint8_t*) {
    throw std::logic_error("this build has no tile products");
}

#endif

}  // namespace ikpy
