// Products of codes on AVX2: up to 8 rows per K head. The other factor, a query or the weights of a block of
// cells, is an integer of 16 bits times one scale; codes are widened to 16 bits and meet it in vpmaddwd,
// whose sums of 32 bits are exact.
//
// Instructions on the three vector ports for 32 elements of a cell and 4 rows: scores 2 to widen, 8 vpmaddwd
// and 4 additions, 8 to apply scales, 6 to add up lanes; outputs 4 to widen and interleave two cells, 16
// products and additions, 6 for the rounding of weights. That is 9 cycles each; products of floats take 6
// instructions for 8 elements on two of the ports alone, 12 cycles, and two thirds more to widen. Measured
// with the caches in the second level and 4 rows, GB/s: q8_0 6.9 instead of 4.6, q8_KV 7.2 instead of 4.3,
// q6_0 4.0 instead of 3.4, q4_0 and iq4_nl 3.4 instead of 2.6.
#include <algorithm>

#include "kernels/attention/flash_codes.hpp"
#include "kernels/cache/kv_blocks.hpp"
#include "kernels/cache/kv_types.hpp"
#include "kernels/simd/byte_dots.hpp"
#include "kernels/simd/half_rows.hpp"

#if defined(__AVX2__) && !defined(__AVX512VNNI__)

namespace ikpy {
namespace flash {
namespace {

constexpr int kScoreRowsAtOnce = 8, kOutputRowsAtOnce = 4;
constexpr float kHighest = 32767.0f;
constexpr float kTiny = 1e-30f;  // keeps divisions by a largest value of 0 finite

struct Work {
    float* scales;     // [blocks, one with row scales][kCodeCells]
    float* largest;    // [blocks]
    float* relative;   // [rows][kCodeCells]
    float* factors;    // [rows]
    int16_t* weights;  // [blocks][rows][kCodeCells]
};

template <typename T>
T* take(uint8_t*& at, int64_t n) {
    T* p = reinterpret_cast<T*>(at);
    at += (n * int64_t(sizeof(T)) + 63) / 64 * 64;
    return p;
}

Work work_at(uint8_t*& at, int64_t rows, int64_t d) {
    const int64_t n_blocks = d / 32;
    Work w;
    w.scales = take<float>(at, n_blocks * kCodeCells);
    w.largest = take<float>(at, n_blocks);
    w.relative = take<float>(at, rows * kCodeCells);
    w.factors = take<float>(at, rows);
    w.weights = take<int16_t>(at, n_blocks * rows * kCodeCells);
    return w;
}

size_t work_bytes(int64_t rows, int64_t d) {
    uint8_t* end = nullptr;
    work_at(end, rows, (d + 31) / 32 * 32);
    return reinterpret_cast<uintptr_t>(end);
}

// Blocks of a type with a scale for every block, or for every row.
template <class Levels, bool RowScale = false>
struct Codes : Levels {
    static constexpr bool kRowScale = RowScale;
    static constexpr int kHeader = RowScale ? 8 : 0;
};
struct LevelsQ8_KV {
    static constexpr int kBytes = 32;
    static void read(const uint8_t* block, __m128i* q) {
        q[0] = kv::load_levels(block);
        q[1] = kv::load_levels(block + 16);
    }
};

template <class C>
inline void copy_scales(const uint8_t* rows, int64_t stride, int64_t n, int64_t n_blocks, float* scales) {
    if constexpr (C::kRowScale) {
        for (int64_t c = 0; c < n; ++c) scales[c] = load_unaligned<float>(rows + c * stride);
        return;
    }
    for (int64_t b = 0; b < n_blocks; ++b, rows += C::kBytes) {
        alignas(16) uint16_t halves[kCodeCells];
        for (int64_t c = 0; c < n; ++c) halves[c] = load_unaligned<uint16_t>(rows + c * stride);
        for (int64_t c = 0; c < n; c += 8)
            _mm256_storeu_ps(scales + b * kCodeCells + c,
                             _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(halves + c))));
    }
}

inline __m256 magnitude(__m256 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }

// 16 elements as integers of 16 bits, in their order.
inline void round_words(__m256 low, __m256 high, int16_t* to) {
    const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(low), _mm256_cvtps_epi32(high));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(words, 0xD8));
}

// scores

size_t query_bytes(int64_t rows, int64_t dk) {
    return size_t((rows * dk * 2 + 63) / 64 * 64 + (rows * 4 + 63) / 64 * 64);
}

CodeQuery pack_query(const float* q, int64_t ldq, int64_t rows, int64_t dk, uint8_t* to) {
    CodeQuery out{};
    out.rows = rows;
    auto* words = take<int16_t>(to, rows * dk);  // [blocks][rows][32]
    out.codes = reinterpret_cast<int8_t*>(words);
    out.factors = take<float>(to, rows);
    for (int64_t r = 0; r < rows; ++r) {
        const float* x = q + r * ldq;
        __m256 top = _mm256_setzero_ps(), undefined = top;  // not 0 for infinite and undefined elements
        for (int64_t d = 0; d < dk; d += 8) {
            const __m256 v = _mm256_loadu_ps(x + d);
            top = _mm256_max_ps(top, magnitude(v));
            undefined = _mm256_fmadd_ps(v, _mm256_setzero_ps(), undefined);
        }
        const float largest = std::max(simd::highest(top), kTiny);
        out.factors[r] = largest / kHighest + simd::sum(undefined);
        const __m256 inverse = _mm256_set1_ps(kHighest / largest);
        for (int64_t d = 0; d < dk; d += 16)
            round_words(_mm256_mul_ps(_mm256_loadu_ps(x + d), inverse),
                        _mm256_mul_ps(_mm256_loadu_ps(x + d + 8), inverse),
                        words + (d / 32 * rows + r) * 32 + d % 32);
    }
    return out;
}

// Sums of the lanes of four vectors.
inline __m128 sums_of_four(const __m256* x) {
    const __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}

// One cell and R rows; scales: of the cell, kCodeCells from block to block.
template <class C, int R>
inline void scores_of_cell(const CodeQuery& q, int64_t r0, const uint8_t* k, int64_t n_blocks,
                           const float* scales, float* s, int64_t lds, PrefetchLines& next) {
    constexpr int kSums = (R + 3) / 4 * 4;
    __m256i whole[R];
    __m256 sums[kSums];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) whole[r] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int r = 0; r < kSums; ++r) sums[r] = _mm256_setzero_ps();
    const auto* query = reinterpret_cast<const __m256i*>(q.codes) + 2 * r0;
    k += C::kHeader;
    for (int64_t b = 0; b < n_blocks; ++b, k += C::kBytes, query += 2 * q.rows) {
        if (b % steps_per_line(C::kBytes) == 0) next.one();
        __m128i levels[2];
        C::read(k, levels);
        const __m256i low = _mm256_cvtepi8_epi16(levels[0]), high = _mm256_cvtepi8_epi16(levels[1]);
        const __m256 scale = _mm256_broadcast_ss(scales + (C::kRowScale ? 0 : b * kCodeCells));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m256i dot = add_word_dots(add_word_dots(C::kRowScale ? whole[r] : _mm256_setzero_si256(),
                                                            low, _mm256_load_si256(query + 2 * r)),
                                              high, _mm256_load_si256(query + 2 * r + 1));
            if constexpr (C::kRowScale)
                whole[r] = dot;
            else
                sums[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, sums[r]);
        }
    }
    if constexpr (C::kRowScale) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sums[r] = _mm256_cvtepi32_ps(whole[r]);
    }
#pragma GCC unroll 2
    for (int r = 0; r < R; r += 4) {
        alignas(16) float four[4];
        __m128 total = _mm_mul_ps(sums_of_four(sums + r), _mm_loadu_ps(q.factors + r0 + r));
        if constexpr (C::kRowScale) total = _mm_mul_ps(total, _mm_broadcast_ss(scales));
        _mm_store_ps(four, total);
        for (int i = 0; i < 4 && r + i < R; ++i) s[(r0 + r + i) * lds] = four[i];
    }
}

template <class C, int R>
void scores_of_rows(const CodeQuery& q, int64_t r0, const uint8_t* k, int64_t stride, int64_t n_blocks,
                    int64_t n, const float* scales, float* s, int64_t lds, PrefetchLines& ahead) {
    PrefetchLines next = ahead;
    for (int64_t c = 0; c < n; ++c)
        scores_of_cell<C, R>(q, r0, k + c * stride, n_blocks, scales + c, s + c, lds, next);
    ahead = next;
}

template <class C>
void scores(const CodeQuery& q, const uint8_t* k, int64_t stride, int64_t dk, int64_t n, float* s,
            int64_t lds, uint8_t* work, PrefetchLines next) {
    static constexpr decltype(&scores_of_rows<C, 1>) kernels[] = {
        scores_of_rows<C, 1>, scores_of_rows<C, 2>, scores_of_rows<C, 3>, scores_of_rows<C, 4>,
        scores_of_rows<C, 5>, scores_of_rows<C, 6>, scores_of_rows<C, 7>, scores_of_rows<C, 8>};
    const Work w = work_at(work, q.rows, dk);
    copy_scales<C>(k, stride, n, dk / 32, w.scales);
    for (int64_t r = 0; r < q.rows; r += kScoreRowsAtOnce)
        kernels[std::min<int64_t>(kScoreRowsAtOnce, q.rows - r) - 1](q, r, k, stride, dk / 32, n, w.scales, s,
                                                                     lds, next);
    next.advance(next.lines());
}

// outputs

// 64 values, zeros from n on, times factor / the largest magnitude; returns that magnitude.
inline float make_relative(const float* x, int64_t n, float factor, float* out) {
    __m256 top = _mm256_setzero_ps();
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    for (int64_t c = 0; c < kCodeCells; c += 8) {
        const __m256i valid = _mm256_cmpgt_epi32(_mm256_set1_epi32(int32_t(n - c)), lanes);
        const __m256 v = _mm256_maskload_ps(x + c, valid);
        top = _mm256_max_ps(top, magnitude(v));
        _mm256_storeu_ps(out + c, v);
    }
    const float largest = simd::highest(top);
    const __m256 inverse = _mm256_set1_ps(factor / std::max(largest, kTiny));
    for (int64_t c = 0; c < kCodeCells; c += 8)
        _mm256_storeu_ps(out + c, _mm256_mul_ps(inverse, _mm256_loadu_ps(out + c)));
    return largest;
}

// Weights times scales as integers, each relative to the largest.
void prepare_weights(const float* p, int64_t ldp, int64_t rows, int64_t n, int64_t n_scales, const Work& w) {
    for (int64_t r = 0; r < rows; ++r)
        w.factors[r] = make_relative(p + r * ldp, n, kHighest, w.relative + r * kCodeCells) / kHighest;
    for (int64_t b = 0; b < n_scales; ++b) {
        float* scales = w.scales + b * kCodeCells;
        w.largest[b] = make_relative(scales, n, 1.0f, scales);
        for (int64_t r = 0; r < rows; ++r) {
            const float* relative = w.relative + r * kCodeCells;
            int16_t* to = w.weights + (b * rows + r) * kCodeCells;
            for (int64_t c = 0; c < kCodeCells; c += 16)
                round_words(_mm256_mul_ps(_mm256_loadu_ps(relative + c), _mm256_loadu_ps(scales + c)),
                            _mm256_mul_ps(_mm256_loadu_ps(relative + c + 8), _mm256_loadu_ps(scales + c + 8)),
                            to + c);
        }
    }
}

// 16 elements (half of a block) of n cells and R rows. weights: [R][kCodeCells].
template <class C, int Half, int R>
inline void outputs_of_half(const uint8_t* v, int64_t stride, int64_t n, const int16_t* weights,
                            const float* factors, float largest, const float* alpha, float* o, int64_t ldo,
                            PrefetchLines& ahead) {
    PrefetchLines next = ahead;
    __m256i sums[R][2];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm256_setzero_si256();
    for (int64_t c = 0; c < n; c += 2, v += 2 * stride) {
        if (c % (2 * steps_per_line(C::kBytes)) == 0) next.one();
        __m128i x[2], y[2];
        C::read(v, x);
        C::read(c + 1 < n ? v + stride : v, y);  // the weight of a cell beyond the last one is 0
        const __m256i low = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(x[Half], y[Half]));
        const __m256i high = _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(x[Half], y[Half]));
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const __m256i two = _mm256_set1_epi32(
                load_unaligned<int32_t>(reinterpret_cast<const uint8_t*>(weights + r * kCodeCells + c)));
            sums[r][0] = add_word_dots(sums[r][0], low, two);
            sums[r][1] = add_word_dots(sums[r][1], high, two);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            float* to = o + r * ldo + 8 * i;
            const __m256 kept = _mm256_mul_ps(_mm256_set1_ps(alpha[r]), _mm256_loadu_ps(to));
            const __m256 factor = _mm256_set1_ps(factors[r] * largest);
            _mm256_storeu_ps(to, _mm256_fmadd_ps(factor, _mm256_cvtepi32_ps(sums[r][i]), kept));
        }
    ahead = next;
}

template <class C, int R>
void outputs_of_block(const uint8_t* v, int64_t stride, int64_t n, const int16_t* weights,
                      const float* factors, float largest, const float* alpha, float* o, int64_t ldo,
                      PrefetchLines& next) {
    outputs_of_half<C, 0, R>(v, stride, n, weights, factors, largest, alpha, o, ldo, next);
    outputs_of_half<C, 1, R>(v, stride, n, weights, factors, largest, alpha, o + 16, ldo, next);
}

template <class C>
void outputs(const float* p, int64_t ldp, int64_t rows, int64_t n, const uint8_t* v, int64_t stride,
             int64_t dv, const float* alpha, float* o, int64_t ldo, uint8_t* work, PrefetchLines next) {
    static constexpr decltype(&outputs_of_block<C, 1>) kernels[] = {
        outputs_of_block<C, 1>, outputs_of_block<C, 2>, outputs_of_block<C, 3>, outputs_of_block<C, 4>};
    const int64_t n_blocks = dv / 32;
    const Work w = work_at(work, rows, dv);
    copy_scales<C>(v, stride, n, n_blocks, w.scales);
    prepare_weights(p, ldp, rows, n, C::kRowScale ? 1 : n_blocks, w);
    v += C::kHeader;
    for (int64_t b = 0; b < n_blocks; ++b) {
        const int64_t scale = C::kRowScale ? 0 : b;
        for (int64_t r = 0; r < rows; r += kOutputRowsAtOnce)
            kernels[std::min<int64_t>(kOutputRowsAtOnce, rows - r) - 1](
                v + b * C::kBytes, stride, n, w.weights + (scale * rows + r) * kCodeCells, w.factors + r,
                w.largest[scale], alpha + r, o + r * ldo + 32 * b, ldo, next);
    }
    next.advance(next.lines());
}

void nothing_to_begin(int64_t) {}
void nothing_to_end() {}

template <class C>
const CodeProducts* products_of() {
    static const CodeProducts products = {scores<C>,  outputs<C>,       query_bytes,   pack_query,
                                          work_bytes, nothing_to_begin, nothing_to_end};
    return &products;
}

}  // namespace

const CodeProducts* vector_code_products(int type) {
    switch (type) {
        case kQ8_0:
            return products_of<Codes<kv::LevelsQ8_0>>();
        case kv::kTypeQ8_KV:
            return products_of<Codes<LevelsQ8_KV, true>>();
        case kv::kTypeQ4_1:
            return products_of<Codes<kv::LevelsQ4_1>>();
        case kv::kTypeQ5_0:
            return products_of<Codes<kv::LevelsQ5_0>>();
        case kv::kTypeQ5_1:
            return products_of<Codes<kv::LevelsQ5_1>>();
        case kv::kTypeQ6_0:
            return products_of<Codes<kv::LevelsQ6_0>>();
        case kv::kTypeQ4_0:
            return products_of<Codes<kv::LevelsQ4_0>>();
        case kv::kTypeIQ4_NL:
            return products_of<Codes<kv::LevelsIQ4_NL>>();
        default:
            return nullptr;
    }
}

}  // namespace flash
}  // namespace ikpy

#endif
