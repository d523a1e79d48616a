// Scores of codes on vectors (VNNI), a cell to each lane: 16 cells are transposed, so that sums need no
// adding up and the scales of a block are one vector. Codes are made unsigned by adding an offset; sums start
// at minus the offset times the sum of the query's bytes, and remain exact.
#pragma once
#include "kernels/attention/flash_code_weights.hpp"
#include "kernels/cache/kv_codes.hpp"

#if defined(__AVX512VNNI__)

#define IKPY_BYTE_PERMUTES __attribute__((target("avx512vbmi")))

namespace ikpy {
namespace flash {

constexpr int64_t kQueryBytes = 64;  // of a block of a row: 32 upper, 32 lower bytes

// Scales of n cells: f32 [n_blocks][kCodeCells], or [kCodeCells] where rows have one. Loads of whole rows of
// 16 bytes, of which the first are used, take a third of the time of gathers on Zen 5.
template <class Codes>
IKPY_BYTE_PERMUTES void read_scales(const uint8_t* rows, int64_t stride, int64_t n, int64_t n_blocks,
                                    float* scales) {
    for (int64_t c = 0; c < n; c += 16, rows += 16 * stride)
        for (int64_t b = 0; b < (Codes::kRowScale ? 1 : n_blocks); ++b) {
            const uint8_t* at = rows + b * Codes::kBytes;
            __m512i first;
            if (n - c >= 16)
                kv::first_of_sixteen(at, stride, &first, 1);
            else
                first = gather_rows(at, stride, n - c);
            float* to = scales + b * kCodeCells + c;
            if constexpr (Codes::kRowScale)
                _mm512_storeu_si512(to, first);
            else
                _mm512_storeu_ps(to, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(first)));
        }
}

inline __m512i four_bytes(const int8_t* four) {
    return _mm512_set1_epi32(load_unaligned<int32_t>(reinterpret_cast<const uint8_t*>(four)));
}
// Adds the products of unsigned codes with four signed bytes. Written out because g++ copies the sums of its
// intrinsic from register to register.
inline void add_products(__m512i& sums, __m512i codes, __m512i four) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(four));
}
// Minus the offset times the sum of the levels; wraps around for undefined ones.
template <class Codes>
inline int32_t start_of(int32_t levels) {
    return int32_t(0u - uint32_t(Codes::kOffset) * uint32_t(levels));
}
inline int32_t sum_of_eight(__m256i x) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    s = _mm_add_epi32(s, _mm_unpackhi_epi64(s, s));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 1)));
}
inline __m512i joined(__m512i upper, __m512i lower) {
    return _mm512_add_epi32(_mm512_slli_epi32(upper, 8), lower);
}

// One block of S times 16 cells and R rows. query: [R][kQueryBytes], starts: [R][upper, lower]. first:
// nothing is in s. Fetches kLines lines on the way: all at once make loads wait.
template <int R, int S, int kLines>
IKPY_CODES void add_block_scores(const __m512i (*x)[8], const int8_t* query, const int32_t* starts,
                                 const float* scales, float* s, int64_t lds, bool first,
                                 StraightLines& next) {
    // Sums of the upper and lower bytes side by side, or, where registers are short, one after the other.
    constexpr int kSums = (2 * R + 8) * S <= 28 ? 2 : 1;
    __m512i sums[kSums][R][S];
#pragma GCC unroll 2
    for (int byte = 0; byte < kSums; ++byte)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int i = 0; i < S; ++i) sums[byte][r][i] = _mm512_set1_epi32(starts[2 * r + byte]);
#pragma GCC unroll 2
    for (int last = kSums - 1; last < 2; ++last) {
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g) {
            constexpr int kSteps = 16 / kSums;
            const int step = kSums == 2 ? g : 8 * last + g;
            next.fetch(kLines * (step + 1) / kSteps - kLines * step / kSteps);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
                for (int byte = 0; byte < kSums; ++byte) {
                    const int column = 32 * (kSums == 2 ? byte : last) + 4 * g;
                    const __m512i four = four_bytes(query + r * kQueryBytes + column);
#pragma GCC unroll 4
                    for (int i = 0; i < S; ++i) add_products(sums[byte][r][i], x[i][g], four);
                }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R && (kSums == 2 || last == 0); ++r)
#pragma GCC unroll 4
            for (int i = 0; i < S; ++i)
                sums[0][r][i] =
                    joined(sums[0][r][i], kSums == 2 ? sums[1][r][i] : _mm512_set1_epi32(starts[2 * r + 1]));
    }
#pragma GCC unroll 4
    for (int i = 0; i < S; ++i) {
        const __m512 scale = _mm512_loadu_ps(scales + 16 * i);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            float* to = s + r * lds + 16 * i;
            const __m512 before = first ? _mm512_setzero_ps() : _mm512_loadu_ps(to);
            _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[0][r][i]), scale, before));
        }
    }
}

// S times 16 cells and all rows, of which kRest remain behind groups of four. query:
// [blocks][rows][kQueryBytes]; starts: [blocks][rows][upper, lower]; scales: of the first of the cells,
// kCodeCells from block to block. Scores are still to be multiplied by the factors of the rows.
template <class Codes, int kRest, int S>
IKPY_BYTE_PERMUTES void scores_of_cells(const CodeQuery& q, const uint8_t* k, int64_t stride,
                                        int64_t n_blocks, const float* scales, float* s, int64_t lds,
                                        PrefetchLines& next) {
    constexpr int kLines = lines_of(S * 16 * Codes::kBytes);
    StraightLines ahead(next, k), none({nullptr, nullptr}, k);
    const int8_t* query = q.codes;
    const int32_t* starts = q.starts;
    k += Codes::kHeader;
    for (int64_t b = 0; b < n_blocks; ++b, k += Codes::kBytes) {
        __m512i x[S][8];
#pragma GCC unroll 4
        for (int i = 0; i < S; ++i) Codes::sixteen(k + 16 * i * stride, stride, x[i]);
        float* to = s;
        for (int64_t r = kRest; r < q.rows; r += 4, query += 4 * kQueryBytes, starts += 8, to += 4 * lds)
            add_block_scores<4, S, kLines>(x, query, starts, scales, to, lds, b == 0,
                                           r == kRest ? ahead : none);
        if constexpr (kRest > 0) {
            add_block_scores<kRest, S, kLines>(x, query, starts, scales, to, lds, b == 0,
                                               q.rows < 4 ? ahead : none);
            query += kRest * kQueryBytes;
            starts += 2 * kRest;
        }
        if (!Codes::kRowScale) scales += kCodeCells;
    }
    ahead.leave(next);
}

inline CodeQuery vector_query_at(int64_t rows, int64_t dk, uint8_t*& at) {
    CodeQuery out;
    out.rows = rows;
    out.codes = take<int8_t>(at, rows * dk / 32 * kQueryBytes);
    out.starts = take<int32_t>(at, rows * dk / 32 * 2);
    out.factors = take<float>(at, rows);
    return out;
}

inline size_t vector_query_bytes(int64_t rows, int64_t dk) {
    uint8_t* end = nullptr;
    vector_query_at(rows, dk, end);
    return reinterpret_cast<uintptr_t>(end);
}

template <class Codes>
CodeQuery pack_vector_query(const float* q, int64_t ldq, int64_t rows, int64_t dk, uint8_t* to) {
    const CodeQuery out = vector_query_at(rows, dk, to);
    for (int64_t r = 0; r < rows; ++r) {
        const RoundedRow rounded(q + r * ldq, dk);
        out.factors[r] = rounded.unit;
        for (int64_t b = 0; b < dk / 32; ++b) {
            int8_t* to_block = out.codes + (b * rows + r) * kQueryBytes;
            for (int i = 0; i < 2; ++i) {
                const __m512i level = rounded.levels(q + r * ldq + 32 * b + 16 * i);
                store_bytes(upper_bytes(level), to_block + 16 * i);
                store_bytes(level, to_block + 32 + 16 * i);
            }
        }
    }
    // Behind all stores: a load that meets several of them waits.
    for (int64_t i = 0; i < rows * dk / 32; ++i) {
        const __m512i bytes = _mm512_loadu_si512(out.codes + i * kQueryBytes);
        const __m512i fours = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), bytes);
        out.starts[2 * i] = start_of<Codes>(sum_of_eight(_mm512_castsi512_si256(fours)));
        out.starts[2 * i + 1] = start_of<Codes>(sum_of_eight(_mm512_extracti64x4_epi64(fours, 1)));
    }
    return out;
}

}  // namespace flash
}  // namespace ikpy

#endif
