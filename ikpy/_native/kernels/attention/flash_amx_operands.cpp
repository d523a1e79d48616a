// Operands of the tile attention kernel's products.
#include <cstring>

#include "kernels/attention/flash_amx.hpp"
#include "kernels/attention/flash_dots.hpp"
#include "kernels/attention/flash_pack.hpp"
#include "kernels/simd/bf16_halves.hpp"
#include "kernels/simd/f16_halves.hpp"
#include "kernels/simd/transpose.hpp"

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

template <TileFactors F>
inline void store_pair(__m512 first, __m512 second, const Halves& out, int64_t at);

template <>
inline void store_pair<TileFactors::kSplit>(__m512 first, __m512 second, const Halves& out, int64_t at) {
    const FloatHalves a = split_rounded(first), b = split_rounded(second);
    _mm512_storeu_si512(out.hi + at, bf16_pairs(a.hi, b.hi));
    if (out.lo) _mm512_storeu_si512(out.lo + at, bf16_pairs(a.lo, b.lo));
}

template <>
inline void store_pair<TileFactors::kBf16>(__m512 first, __m512 second, const Halves& out, int64_t at) {
    _mm512_storeu_si512(out.hi + at, bf16_pairs(first, second));
}

template <>
inline void store_pair<TileFactors::kF16>(__m512 first, __m512 second, const Halves& out, int64_t at) {
    const HalfPairs x = split_to_f16(first, second);
    _mm512_storeu_si512(out.hi + at, x.hi);
    _mm512_storeu_si512(out.lo + at, x.lo);
}

template <TileFactors F>
void pairs_of(const float* x, int64_t n_rows, int64_t depth, const Halves& out) {
    for (int64_t d = 0; d < depth; d += 2) {
        const float* at = x + d * 16;
        const __m512 first = d < n_rows ? _mm512_loadu_ps(at) : _mm512_setzero_ps();
        const __m512 second = d + 1 < n_rows ? _mm512_loadu_ps(at + 16) : _mm512_setzero_ps();
        store_pair<F>(first, second, out, d * 16);
    }
}

template <TileFactors F>
simd::V weight_pairs(const float* s, int64_t n_rows, simd::V factor, simd::V top, const Halves& out) {
    __m512 total = _mm512_setzero_ps();
    for (int64_t r = 0; r < (n_rows + 31) / 32 * 32; r += 2) {
        __m512 p[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int i = 0; i < 2; ++i)
            if (r + i < n_rows)
                p[i] = simd::exp2(_mm512_fmsub_ps(_mm512_loadu_ps(s + (r + i) * 16), factor, top));
        if (F == TileFactors::kBf16) p[0] = rounded(p[0]), p[1] = rounded(p[1]);
        total = _mm512_add_ps(total, _mm512_add_ps(p[0], p[1]));
        store_pair<F>(p[0], p[1], out, r * 16);
    }
    return total;
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

void split_pairs(TileFactors factors, const float* x, int64_t n_rows, int64_t depth, const Halves& out) {
    const auto pairs = factors == TileFactors::kF16    ? pairs_of<TileFactors::kF16>
                       : factors == TileFactors::kBf16 ? pairs_of<TileFactors::kBf16>
                                                       : pairs_of<TileFactors::kSplit>;
    pairs(x, n_rows, depth, out);
}

simd::V exp2_pairs(TileFactors factors, const float* s, int64_t n_rows, simd::V factor, simd::V top,
                   const Halves& out) {
    const auto pairs = factors == TileFactors::kF16    ? weight_pairs<TileFactors::kF16>
                       : factors == TileFactors::kBf16 ? weight_pairs<TileFactors::kBf16>
                                                       : weight_pairs<TileFactors::kSplit>;
    return pairs(s, n_rows, factor, top, out);
}

void copy_halves(const uint8_t* x, int64_t stride, int64_t n_rows, int64_t n, uint16_t* out, int64_t ld_out) {
    for (int64_t r = 0; r < n_rows; ++r) std::memcpy(out + r * ld_out, x + r * stride, size_t(n) * 2);
}

void transpose_halves(const uint8_t* x, int64_t stride, int64_t n_rows, int64_t n, uint16_t* out,
                      int64_t ld_out) {
    for (int64_t d = 0; d < n; d += 16) {
        const __mmask16 valid = first_lanes(n - d);
        const auto row = [&](int64_t r) {
            return r < n_rows ? _mm256_maskz_loadu_epi16(valid, x + r * stride + 2 * d)
                              : _mm256_setzero_si256();
        };
        for (int64_t r = 0; r < ld_out; r += 32) {
            __m512i v[16];
            for (int64_t i = 0; i < 16; ++i) v[i] = interleaved_words(row(r + 2 * i), row(r + 2 * i + 1));
            ikpy::transpose16(v);
            for (int64_t i = 0; i < 16; ++i) _mm512_storeu_si512(out + (d + i) * ld_out + r, v[i]);
        }
    }
}

simd::V half_scale(const float* x, int64_t ld, int64_t n_rows) {
    __m512 largest = _mm512_setzero_ps();
    for (int64_t r = 0; r < n_rows; ++r)
        largest = _mm512_max_ps(largest, _mm512_abs_ps(_mm512_loadu_ps(x + r * ld)));
    const __m512 up = _mm512_sub_ps(_mm512_set1_ps(10.0f), _mm512_getexp_ps(largest)),
                 most = _mm512_set1_ps(20.0f);
    const __m512 within = _mm512_max_ps(_mm512_min_ps(up, most), _mm512_sub_ps(_mm512_setzero_ps(), most));
    return _mm512_scalef_ps(_mm512_set1_ps(1.0f), within);
}

#else

void split_rows(const float*, int64_t, int64_t, int64_t, const Halves&, int64_t) {}
void split_transposed(const float*, int64_t, int64_t, int64_t, const Halves&, int64_t) {}
void split_pairs(TileFactors, const float*, int64_t, int64_t, const Halves&) {}
simd::V exp2_pairs(TileFactors, const float*, int64_t, simd::V, simd::V top, const Halves&) { return top; }
void copy_halves(const uint8_t*, int64_t, int64_t, int64_t, uint16_t*, int64_t) {}
void transpose_halves(const uint8_t*, int64_t, int64_t, int64_t, uint16_t*, int64_t) {}
simd::V half_scale(const float*, int64_t, int64_t) { return simd::set1(1.0f); }

#endif

}  // namespace flash
}  // namespace ikpy
