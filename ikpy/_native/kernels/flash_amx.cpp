#include "kernels/flash_amx.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "kernels/amx_tiles.hpp"
#include "kernels/bf16_halves.hpp"
#include "kernels/flash_pack.hpp"

namespace ikpy {
namespace flash {

#if defined(__AVX512F__) && defined(__linux__)

namespace {

// The upper halves of 16 dwords.
inline __m256i upper(__m512 x) {
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(x), 16));
}

inline __m256i rounded_upper(__m512 x) {
    const __m512i bits = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
}

inline void store_split(__m512 x, const Halves& out, int64_t at) {
    const FloatHalves s = split_rounded(x);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.hi + at), upper(s.hi));
    if (out.lo) _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.lo + at), rounded_upper(s.lo));
}

inline void store_pair(__m512 first, __m512 second, const Halves& out, int64_t at) {
    const FloatHalves a = split_rounded(first), b = split_rounded(second);
    _mm512_storeu_si512(out.hi + at, bf16_pairs(a.hi, b.hi));
    if (out.lo) _mm512_storeu_si512(out.lo + at, bf16_pairs(a.lo, b.lo));
}

// Row tiles r, lane tiles m of the sums in tiles 2 r + m; left operands in 4 and 5, right ones in 6 and 7.
template <int NR, int NL>
IKPY_AMX inline void multiply_loaded() {
    _tile_dpbf16ps(0, 4, 6);
    if (NL == 2) _tile_dpbf16ps(1, 4, 7);
    if (NR == 2) _tile_dpbf16ps(2, 5, 6);
    if (NR == 2 && NL == 2) _tile_dpbf16ps(3, 5, 7);
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

template <int NR, int NL>
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
            multiply_loaded<NR, NL>();
            load_left<NR>(a.hi + k, lda);
        } else {
            load_left<NR>(a.hi + k, lda);
            load_right<NL>(b.at.hi + pair, b.to_next);
        }
        multiply_loaded<NR, NL>();
        load_right<NL>(b.at.lo + pair, b.to_next);
        multiply_loaded<NR, NL>();
    }
    _tile_stored(0, left, 64);
    if (NL == 2) _tile_stored(1, right, 64);
    if (NR == 2) _tile_stored(2, left + kLower, 64);
    if (NR == 2 && NL == 2) _tile_stored(3, right + kLower, 64);
}

}  // namespace

void split_rows(const float* x, int64_t ld, int64_t n_rows, int64_t n, const Halves& out, int64_t ld_out) {
    for (int64_t r = 0; r < n_rows; ++r)
        for (int64_t d = 0; d < ld_out; d += 16) {
            const __m512 v =
                d < n ? _mm512_maskz_loadu_ps(first_lanes(n - d), x + r * ld + d) : _mm512_setzero_ps();
            store_split(v, out, r * ld_out + d);
        }
}

void split_transposed(const float* x, int64_t ld, int64_t n_rows, int64_t n, const Halves& out,
                      int64_t ld_out) {
    for (int64_t d = 0; d < n; d += 16) {
        const __mmask16 valid = first_lanes(n - d);
        for (int64_t r = 0; r < ld_out; r += 16) {
            __m512 v[16];
            for (int64_t i = 0; i < 16; ++i)
                v[i] =
                    r + i < n_rows ? _mm512_maskz_loadu_ps(valid, x + (r + i) * ld + d) : _mm512_setzero_ps();
            transpose16(v);
            for (int64_t i = 0; i < 16; ++i) store_split(v[i], out, (d + i) * ld_out + r);
        }
    }
}

void split_pairs(const float* x, int64_t n_rows, int64_t depth, const Halves& out) {
    for (int64_t d = 0; d < depth; d += 2) {
        const float* at = x + d * 16;
        const __m512 first = d < n_rows ? _mm512_loadu_ps(at) : _mm512_setzero_ps();
        const __m512 second = d + 1 < n_rows ? _mm512_loadu_ps(at + 16) : _mm512_setzero_ps();
        store_pair(first, second, out, d * 16);
    }
}

simd::V exp2_pairs(const float* s, int64_t n_rows, simd::V top, const Halves& out) {
    __m512 total = _mm512_setzero_ps();
    for (int64_t r = 0; r < (n_rows + 31) / 32 * 32; r += 2) {
        __m512 p[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int i = 0; i < 2; ++i)
            if (r + i < n_rows) p[i] = simd::exp2(_mm512_sub_ps(_mm512_loadu_ps(s + (r + i) * 16), top));
        total = _mm512_add_ps(total, _mm512_add_ps(p[0], p[1]));
        store_pair(p[0], p[1], out, r * 16);
    }
    return total;
}

simd::V raised(simd::V reference, simd::V top) {
    const __m512 bound = _mm512_add_ps(reference, _mm512_set1_ps(8.0f));
    return _mm512_mask_mov_ps(reference, _mm512_cmp_ps_mask(top, bound, _CMP_GT_OQ), top);
}

void scale_lanes(float* o, int64_t n_rows, simd::V factor) {
    if (_mm512_cmp_ps_mask(factor, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ) == 0) return;
    for (int64_t r = 0; r < n_rows; ++r, o += 16)
        _mm512_storeu_ps(o, _mm512_mul_ps(_mm512_loadu_ps(o), factor));
}

IKPY_AMX void tile_product(const Halves& a, int64_t lda, int64_t n_rows, const RightTiles& b, int64_t n_lanes,
                           int64_t depth, const SumTiles& c, bool add) {
    asm volatile("" ::: "memory");  // tile loads do not tell the compiler what they read
    for (int64_t r = 0; r < n_rows; r += 2 * kTileHeight) {
        const Halves left = {a.hi + r * lda, a.lo ? a.lo + r * lda : nullptr};
        const bool two_rows = r + kTileHeight < n_rows;
        for (int64_t m = 0; m < n_lanes; m += 2 * kTileHeight) {
            const int64_t lanes = m / kTileHeight;
            const RightTiles right = {{b.at.hi + lanes * b.to_next, b.at.lo + lanes * b.to_next}, b.to_next};
            const SumTiles sums = {c.at + lanes * c.to_next + r * kTileHeight, c.to_next};
            const bool two_lanes = m + kTileHeight < n_lanes;
            const auto run =
                two_rows ? (two_lanes ? block<2, 2> : block<2, 1>) : (two_lanes ? block<1, 2> : block<1, 1>);
            run(left, lda, right, depth, sums, add);
        }
    }
}

void begin_tiles() { load_tile_config(kTileHeight); }
void end_tiles() { release_tiles(); }

#else

void split_rows(const float*, int64_t, int64_t, int64_t, const Halves&, int64_t) {}
void split_transposed(const float*, int64_t, int64_t, int64_t, const Halves&, int64_t) {}
void split_pairs(const float*, int64_t, int64_t, const Halves&) {}
void tile_product(const Halves&, int64_t, int64_t, const RightTiles&, int64_t, int64_t, const SumTiles&,
                  bool) {
    throw std::logic_error("this build has no tile products");
}
simd::V exp2_pairs(const float*, int64_t, simd::V top, const Halves&) { return top; }
simd::V raised(simd::V, simd::V top) { return top; }
void scale_lanes(float*, int64_t, simd::V) {}
void begin_tiles() {}
void end_tiles() {}

#endif

}  // namespace flash
}  // namespace ikpy
