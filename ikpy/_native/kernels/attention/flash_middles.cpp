#include "kernels/attention/flash_middles.hpp"

#include <algorithm>

#include "kernels/attention/flash_codes.hpp"
#include "kernels/cache/kv_types.hpp"
#include "kernels/simd/half_rows.hpp"
#include "kernels/simd/lane_sums.hpp"
#include "kernels/simd/simd_f32.hpp"

namespace ikpy {
namespace flash {

using simd::kLanes;
using simd::V;

namespace {

// Scales and minima (f16 side by side) of n blocks, `stride` bytes apart; 0 in the other lanes. Gathered: two
// stores for each block, and loads that wait for all of them, take three times as long.
inline void read_pairs(const uint8_t* blocks, int64_t stride, int64_t n, V* scale, V* minimum) {
#if defined(__AVX512F__)
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __mmask16 valid = _mm512_cmplt_epi32_mask(lanes, _mm512_set1_epi32(int32_t(n)));
    const __m512i at = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(int32_t(stride)));
    const __m512i both = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), valid, at, blocks, 1);
    *scale = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(both));
    *minimum = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(both, 16)));
#elif defined(__AVX2__)
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i valid = _mm256_cmpgt_epi32(_mm256_set1_epi32(int32_t(n)), lanes);
    const __m256i at = _mm256_mullo_epi32(lanes, _mm256_set1_epi32(int32_t(stride)));
    const __m256i both = _mm256_mask_i32gather_epi32(_mm256_setzero_si256(),
                                                     reinterpret_cast<const int*>(blocks), at, valid, 1);
    const __m256i words =
        _mm256_packus_epi32(_mm256_and_si256(both, _mm256_set1_epi32(0xffff)), _mm256_srli_epi32(both, 16));
    const __m256i apart = _mm256_permute4x64_epi64(words, 0xD8);
    *scale = _mm256_cvtph_ps(_mm256_castsi256_si128(apart));
    *minimum = _mm256_cvtph_ps(_mm256_extracti128_si256(apart, 1));
#else
    float d[kLanes] = {}, m[kLanes] = {};
    for (int64_t i = 0; i < std::min<int64_t>(n, kLanes); ++i) {
        d[i] = load_f16(blocks + i * stride);
        m[i] = load_f16(blocks + i * stride + 2);
    }
    *scale = simd::load(d);
    *minimum = simd::load(m);
#endif
}

// Sums of the lanes of n <= 16 vectors.
inline void sums_of(const V* x, int n, float* to) {
#if defined(__AVX512F__)
    if (n > 2) return _mm512_storeu_ps(to, sums16(x));
#endif
    for (int i = 0; i < n; ++i) to[i] = simd::sum(x[i]);
}

}  // namespace

void read_middles(int type, const uint8_t* rows, int64_t stride, int64_t n, int64_t n_blocks, float* to) {
    const V code = simd::set1(float(kv::middle_code(type)));
    const int64_t bytes = kv::row_bytes(type, 1);
    for (int64_t c = 0; c < kCodeCells; c += kLanes)
        for (int64_t b = 0; b < n_blocks; ++b) {
            V scale = simd::zero(), minimum = scale;
            if (c < n) read_pairs(rows + c * stride + b * bytes, stride, n - c, &scale, &minimum);
            simd::store(to + b * kCodeCells + c, simd::fma(code, scale, minimum));
        }
}

void sum_blocks(const float* x, int64_t n_blocks, float* to) {
    for (int64_t b = 0; b < n_blocks; ++b, x += 32) {
        V total = simd::zero();
        for (int64_t d = 0; d < 32; d += kLanes) total = simd::add(total, simd::load(x + d));
        to[b] = simd::sum(total);
    }
}

void add_middles_to_scores(const float* middles, const float* sums, int64_t rows, int64_t n_blocks, int64_t n,
                           float* s, int64_t lds) {
    for (int64_t r = 0; r < rows; ++r, s += lds, sums += n_blocks)
        for (int64_t c = 0; c < n; c += kLanes) {
            V x = simd::load(s + c);
            for (int64_t b = 0; b < n_blocks; ++b)
                x = simd::fma(simd::set1(sums[b]), simd::load(middles + b * kCodeCells + c), x);
            simd::store(s + c, x);
        }
}

void add_middles_to_outputs(const float* middles, const float* p, int64_t ldp, int64_t rows, int64_t n_blocks,
                            int64_t n, float* o, int64_t ldo) {
    constexpr int kAtOnce = 16;
    for (int64_t first = 0; first < n_blocks * rows; first += kAtOnce) {
        const int n_sums = int(std::min<int64_t>(kAtOnce, n_blocks * rows - first));
        V x[kAtOnce];
        float sums[kAtOnce];
        for (int i = 0; i < kAtOnce; ++i) x[i] = simd::zero();
        for (int i = 0; i < n_sums; ++i) {
            const float* weight = p + (first + i) / n_blocks * ldp;
            const float* middle = middles + (first + i) % n_blocks * kCodeCells;
            for (int64_t c = 0; c < n; c += kLanes)
                x[i] = simd::fma(simd::load(weight + c), simd::load(middle + c), x[i]);
        }
        sums_of(x, n_sums, sums);
        for (int i = 0; i < n_sums; ++i) {
            float* to = o + (first + i) / n_blocks * ldo + (first + i) % n_blocks * 32;
            for (int64_t d = 0; d < 32; d += kLanes)
                simd::store(to + d, simd::add(simd::load(to + d), simd::set1(sums[i])));
        }
    }
}

}  // namespace flash
}  // namespace ikpy
