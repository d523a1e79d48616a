#include "kernels/attention/flash_amx.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "kernels/simd/amx_halves.hpp"

namespace ikpy {
namespace flash {

#if defined(__AVX512F__) && defined(__linux__)

namespace {

// Row tiles r, lane tiles m of the sums in tiles 2 r + m; left operands in 4 and 5, right ones in 6 and 7.
template <TileFactors F, int NR, int NL>
IKPY_AMX inline void multiply_loaded() {
    ikpy::tile_product<F, 0, 4, 6>();
    if (NL == 2) ikpy::tile_product<F, 1, 4, 7>();
    if (NR == 2) ikpy::tile_product<F, 2, 5, 6>();
    if (NR == 2 && NL == 2) ikpy::tile_product<F, 3, 5, 7>();
}

template <int NR>
IKPY_AMX inline void load_left(const uint16_t* a, int64_t lda) {
    _tile_loadd(4, a, lda * 2);
    if (NR == 2) _tile_loadd(5, a + kTileHeight * lda, lda * 2);
}

template <int NL>
IKPY_AMX inline void load_right(const uint16_t* b, int64_t to_next) {
    _tile_loadd(6, b, 64);
    if (NL == 2) _tile_loadd(7, b + to_next, 64);
}

template <TileFactors F, int NR, int NL>
IKPY_AMX void block(const Halves& a, int64_t lda, const RightTiles& b, int64_t depth, const SumTiles& c,
                    bool add) {
    constexpr int64_t kLower = kTileHeight * kTileHeight;
    float *const left = c.at, *const right = c.at + c.to_next;
    if (add) {
        _tile_loadd(0, left, 64);
        if (NL == 2) _tile_loadd(1, right, 64);
        if (NR == 2) _tile_loadd(2, left + kLower, 64);
        if (NR == 2 && NL == 2) _tile_loadd(3, right + kLower, 64);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < depth; k += kTileDepth) {
        const int64_t pair = k * kTileHeight;
        if (a.lo) {
            load_left<NR>(a.lo + k, lda);
            load_right<NL>(b.at.hi + pair, b.to_next);
            multiply_loaded<F, NR, NL>();
            load_left<NR>(a.hi + k, lda);
        } else {
            load_left<NR>(a.hi + k, lda);
            load_right<NL>(b.at.hi + pair, b.to_next);
        }
        multiply_loaded<F, NR, NL>();
        load_right<NL>(b.at.lo + pair, b.to_next);
        multiply_loaded<F, NR, NL>();
    }
    _tile_stored(0, left, 64);
    if (NL == 2) _tile_stored(1, right, 64);
    if (NR == 2) _tile_stored(2, left + kLower, 64);
    if (NR == 2 && NL == 2) _tile_stored(3, right + kLower, 64);
}

}  // namespace

simd::V raised(simd::V reference, simd::V top, float lift) {
    const __m512 raised = _mm512_sub_ps(top, _mm512_set1_ps(lift));
    const __m512 bound = _mm512_add_ps(reference, _mm512_set1_ps(8.0f));
    return _mm512_mask_mov_ps(reference, _mm512_cmp_ps_mask(raised, bound, _CMP_GT_OQ), raised);
}

void scale_lanes(float* o, int64_t n_rows, simd::V factor) {
    if (_mm512_cmp_ps_mask(factor, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ) == 0) return;
    for (int64_t r = 0; r < n_rows; ++r, o += 16)
        _mm512_storeu_ps(o, _mm512_mul_ps(_mm512_loadu_ps(o), factor));
}

namespace {

template <TileFactors F>
IKPY_AMX void product_of(const LeftTiles& a, const RightTiles& b, int64_t n_lanes, int64_t depth,
                         const SumTiles& c, bool add, Prefetch& next) {
    constexpr int64_t kBlock = 2 * kTileHeight;
    const int64_t n_blocks = (a.n_rows + kBlock - 1) / kBlock * ((n_lanes + kBlock - 1) / kBlock);
    const int64_t share = (next.rows + n_blocks - 1) / n_blocks;
    for (int64_t r = 0; r < a.n_rows; r += kBlock) {
        const Halves left = {a.at.hi + r * a.ld, a.at.lo ? a.at.lo + r * a.ld : nullptr};
        const bool two_rows = r + kTileHeight < a.n_rows;
        for (int64_t m = 0; m < n_lanes; m += kBlock) {
            next.advance(share);
            const int64_t lanes = m / kTileHeight;
            const RightTiles right = {{b.at.hi + lanes * b.to_next, b.at.lo + lanes * b.to_next}, b.to_next};
            const SumTiles sums = {c.at + lanes * c.to_next + r * kTileHeight, c.to_next};
            const bool two_lanes = m + kTileHeight < n_lanes;
            const auto run = two_rows ? (two_lanes ? block<F, 2, 2> : block<F, 2, 1>)
                                      : (two_lanes ? block<F, 1, 2> : block<F, 1, 1>);
            run(left, a.ld, right, depth, sums, add);
        }
    }
}

}  // namespace

void tile_product(TileFactors factors, const LeftTiles& a, const RightTiles& b, int64_t n_lanes,
                  int64_t depth, const SumTiles& c, bool add, Prefetch& next) {
    asm volatile("" ::: "memory");  // tile loads do not tell the compiler what they read
    const auto product =
        factors == TileFactors::kF16 ? product_of<TileFactors::kF16> : product_of<TileFactors::kSplit>;
    product(a, b, n_lanes, depth, c, add, next);
}

void begin_tiles() { load_tile_config(kTileHeight); }
void end_tiles() { release_tiles(); }

#else

void tile_product(TileFactors, const LeftTiles&, const RightTiles&, int64_t, int64_t, const SumTiles&, bool,
                  Prefetch&) {
    throw std::logic_error("this build has no tile products");
}
simd::V raised(simd::V, simd::V top, float) { return top; }
void scale_lanes(float*, int64_t, simd::V) {}
void begin_tiles() {}
void end_tiles() {}

#endif

}  // namespace flash
}  // namespace ikpy
