// The microkernel of AVX2 without dot products of bytes: 16 rows in two vectors times 3 tokens, or 8 rows
// times 6 tokens.
//
// Four columns of eight rows take vpmaddubsw, which gives sums of two products in 16 bits, vpmaddwd with ones
// and vpaddd: 3 instructions on the vector ports for 32 products. Codes of few bits are added up in 16 bits
// instead, as many as cannot exceed them whatever the codes and activations are, which leaves little more
// than vpmaddubsw and vpaddw. Codes of 8 bits would exceed 16 bits at once: they are multiplied as
// |w| * sign(x, w), 4 instructions. With groups of 32, 1e9 op/s of one core at 3 GHz: spans up to 15 220, up
// to 31 210, up to 63 200, up to 127 175, 8 bits 125. Two vectors of rows share the broadcasts of the tokens;
// more than 3 tokens leave the registers. Codes of 8 bits also need a register for their magnitudes and gain
// from making them for more tokens.
//
// vpsignb shares two ports with the products, vpxor runs on a third one. Many tokens therefore meet negative
// codes with their complements -x - 1: |w| * ~x is w * x - |w|, and the sums start at what is missing, which
// is added up once per panel. 1.06 times as fast.
#include "kernels/matmul/gemm_int8.hpp"

#if defined(__AVX2__) && !defined(IKPY_BYTE_DOTS)

namespace ikpy {
namespace {

enum class Codes {
    kOffset,    // d * code + m
    kZero,      // d * (code - zero)
    kSigned,    // d * code, codes of 8 bits
    kMasked,    // the same with complements; m holds what sums start at
    kUnscaled,  // code - zero
};

constexpr int kMaskedTokens = 24;  // from this many on the sums at the start pay

constexpr bool eight_bits(Codes kind) { return kind == Codes::kSigned || kind == Codes::kMasked; }
constexpr int vectors_of(Codes kind) { return eight_bits(kind) ? 1 : 2; }
constexpr int tile_tokens(Codes kind) { return eight_bits(kind) ? 6 : kind == Codes::kUnscaled ? 4 : 3; }

inline __m256 broadcast_f32(const uint8_t* p) { return _mm256_set1_ps(load_unaligned<float>(p)); }
inline __m256i load_codes(const uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

// Keeps the compiler from adding in another order, which takes more registers than there are.
inline void pin(__m256i& v) { asm("" : "+x"(v)); }

// A token's columns as they are multiplied with magnitudes; sign: the codes, or 0xFF where they are negative.
template <Codes Kind>
inline __m256i signed_columns(__m256i x, __m256i sign) {
    if (Kind == Codes::kSigned) return _mm256_sign_epi8(x, sign);
    return Kind == Codes::kMasked ? _mm256_xor_si256(x, sign) : x;
}

// Products of a group of columns. Pairs: sums of two products that are added in 16 bits; start: where sums of
// kMasked start.
template <int G, Codes Kind, int Pairs, int NT>
inline void multiply_group(const uint8_t* codes, const uint8_t* const* x, int64_t k, const float* start,
                           __m256i (&dot)[vectors_of(Kind)][NT]) {
    constexpr int kSteps = G / 4, kVectors = vectors_of(Kind);
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i pairs[kVectors][NT];
#pragma GCC unroll 8
    for (int j = 0; j < kSteps; ++j) {
        __m256i sign[kVectors], magnitude[kVectors];
#pragma GCC unroll 2
        for (int r = 0; r < kVectors; ++r) {
            const __m256i w = load_codes(codes + 64 * j + 32 * r);
            magnitude[r] = eight_bits(Kind) ? _mm256_abs_epi8(w) : w;
            sign[r] = Kind == Codes::kMasked ? _mm256_cmpgt_epi8(_mm256_setzero_si256(), w) : w;
        }
#pragma GCC unroll 6
        for (int t = 0; t < NT; ++t) {
            const __m256i four = _mm256_set1_epi32(load_unaligned<int32_t>(x[t] + k + 4 * j));
#pragma GCC unroll 2
            for (int r = 0; r < kVectors; ++r) {
                const __m256i v = signed_columns<Kind>(four, sign[r]);
                const __m256i product = _mm256_maddubs_epi16(magnitude[r], v);
                pairs[r][t] = j % Pairs ? _mm256_add_epi16(pairs[r][t], product) : product;
                pin(pairs[r][t]);
                if ((j + 1) % Pairs) continue;
                const __m256i sum = _mm256_madd_epi16(pairs[r][t], ones);
                if (Kind == Codes::kMasked && j == 0)
                    dot[r][t] = _mm256_add_epi32(sum, *reinterpret_cast<const __m256i_u*>(start));
                else
                    dot[r][t] = j < Pairs ? sum : _mm256_add_epi32(dot[r][t], sum);
                pin(dot[r][t]);
            }
        }
    }
}

// Writes to the panel's m where sums of kMasked start: per group, the magnitudes of the negative codes.
template <int G>
void put_starts(const Int8Panel& p, int n_halves) {
    const int64_t n_groups = n_halves * p.n / G;
    for (int64_t g = 0; g < n_groups; ++g) {
        const uint8_t* codes = p.codes + g * G * kHalfRows;
        auto* start = reinterpret_cast<__m256i_u*>(p.m + g * kHalfRows);
        for (int r = 0; r < 2; ++r) {
            __m256i pairs = _mm256_setzero_si256();
#pragma GCC unroll 8
            for (int j = 0; j < G / 4; ++j) {
                const __m256i w = load_codes(codes + 64 * j + 32 * r);
                const __m256i magnitude = _mm256_abs_epi8(_mm256_min_epi8(w, _mm256_setzero_si256()));
                pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(magnitude, _mm256_set1_epi8(1)));
            }
            _mm256_storeu_si256(start + r, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        }
    }
}

// Sum of a token's activations in n_groups (a multiple of 8) groups of 32, in all lanes: the same for all
// rows of unscaled codes, whose zeros it makes up for.
inline __m256 weighted_sum(const uint8_t* x, const PanelOffsets& at, int64_t n_groups) {
    const auto* scale = reinterpret_cast<const float*>(x + at.scale);
    const auto* sum = reinterpret_cast<const float*>(x + at.sum);
    __m256 total = _mm256_setzero_ps();
    for (int64_t g = 0; g < n_groups; g += 8)
        total = _mm256_fmadd_ps(_mm256_loadu_ps(scale + g), _mm256_loadu_ps(sum + g), total);
    total = _mm256_add_ps(total, _mm256_permute2f128_ps(total, total, 1));
    total = _mm256_add_ps(total, _mm256_permute_ps(total, 0x4E));
    return _mm256_add_ps(total, _mm256_permute_ps(total, 0xB1));
}

// The rows of the vectors from `row` on times NT tokens.
template <int G, Codes Kind, int Pairs, int NT>
void tile(const Int8Panel& p, int row, const uint8_t* const* x, const PanelOffsets& at, float* out,
          bool add) {
    constexpr int kVectors = vectors_of(Kind);
    const int half = row / kHalfRows, first = row % kHalfRows;
    const uint8_t* codes = p.codes + half * p.half_codes() + 4 * first;
    const float* d = p.d + half * p.half_scales(G) + first;
    const float* m = p.m + half * p.half_scales(G) + first;
    const __m256 minus_zero = _mm256_set1_ps(-static_cast<float>(p.zero));
    constexpr bool kSums = Kind == Codes::kOffset || Kind == Codes::kZero;
    float* y = out + row;
    __m256 total[kVectors][NT];
#pragma GCC unroll 6
    for (int t = 0; t < NT; ++t)
#pragma GCC unroll 2
        for (int r = 0; r < kVectors; ++r)
            total[r][t] = add ? _mm256_loadu_ps(y + t * kBlockRows + 8 * r) : _mm256_setzero_ps();
    if (Kind == Codes::kUnscaled) {
#pragma GCC unroll 6
        for (int t = 0; t < NT; ++t) {
            const __m256 zeros = _mm256_mul_ps(weighted_sum(x[t], at, p.n / G), minus_zero);
            for (int r = 0; r < kVectors; ++r) total[r][t] = _mm256_add_ps(total[r][t], zeros);
        }
    }
    for (int64_t g = 0; g < p.n / G; ++g, codes += G * kHalfRows, d += kHalfRows, m += kHalfRows) {
        __m256i dot[kVectors][NT];
        multiply_group<G, Kind, Pairs, NT>(codes, x, at.q + g * G, m, dot);
#pragma GCC unroll 6
        for (int t = 0; t < NT; ++t) {
            const __m256 scale = broadcast_f32(x[t] + at.scale + g * G / 32 * 4);
            const __m256 sum = kSums ? broadcast_f32(x[t] + at.sum + 4 * g) : scale;
#pragma GCC unroll 2
            for (int r = 0; r < kVectors; ++r) {
                __m256 value = _mm256_cvtepi32_ps(dot[r][t]);
                if (Kind == Codes::kZero) value = _mm256_fmadd_ps(sum, minus_zero, value);
                if (Kind != Codes::kUnscaled) value = _mm256_mul_ps(value, _mm256_loadu_ps(d + 8 * r));
                if (Kind == Codes::kOffset) value = _mm256_fmadd_ps(sum, _mm256_loadu_ps(m + 8 * r), value);
                total[r][t] = _mm256_fmadd_ps(value, scale, total[r][t]);
            }
        }
    }
#pragma GCC unroll 6
    for (int t = 0; t < NT; ++t)
#pragma GCC unroll 2
        for (int r = 0; r < kVectors; ++r) _mm256_storeu_ps(y + t * kBlockRows + 8 * r, total[r][t]);
}

template <int G, Codes Kind, int Pairs, int NT>
void tile_of(int n, const Int8Panel& p, int row, const uint8_t* const* x, const PanelOffsets& at, float* out,
             bool add) {
    if (n == NT) return tile<G, Kind, Pairs, NT>(p, row, x, at, out, add);
    if constexpr (NT > 1) tile_of<G, Kind, Pairs, NT - 1>(n, p, row, x, at, out, add);
}

template <int G, Codes Kind, int Pairs>
void gemm(const Int8Panel& p, int n_halves, const uint8_t* const* x, int n_tokens, const ActQ8Layout& layout,
          int64_t k0, float* out, bool add) {
    if constexpr (Kind == Codes::kSigned)
        if (n_tokens >= kMaskedTokens) {
            put_starts<G>(p, n_halves);
            return gemm<G, Codes::kMasked, Pairs>(p, n_halves, x, n_tokens, layout, k0, out, add);
        }
    constexpr int kTileTokens = tile_tokens(Kind), kTileRows = 8 * vectors_of(Kind);
    const PanelOffsets at(layout, k0, G, G);
    // Tiles of nearly equal size, so that no single token is left over.
    const int n_tiles = (n_tokens + kTileTokens - 1) / kTileTokens;
    for (int i = 0; i < n_tiles; ++i) {
        const int begin = n_tokens * i / n_tiles, n = n_tokens * (i + 1) / n_tiles - begin;
        for (int row = 0; row < n_halves * kHalfRows; row += kTileRows)
            tile_of<G, Kind, Pairs, kTileTokens>(n, p, row, x + begin, at, out + begin * kBlockRows, add);
    }
}

// The kernel that adds as many pairs in 16 bits as the codes allow, at most a group.
template <int G, Codes Kind, int Pairs = G / 4>
Int8GemmFn gemm_of_span(int span) {
    if constexpr (Pairs > 1)
        if (exact_pairs(span) < Pairs) return gemm_of_span<G, Kind, Pairs / 2>(span);
    return gemm<G, Kind, Pairs>;
}

template <int G>
Int8GemmFn gemm_of_group(bool symmetric, int span) {
    if (span > 127) return gemm<G, Codes::kSigned, 1>;
    return symmetric ? gemm_of_span<G, Codes::kZero>(span) : gemm_of_span<G, Codes::kOffset>(span);
}

}  // namespace

Int8GemmFn int8_gemm(int group, int offset_group, int span, bool unscaled) {
    const bool symmetric = offset_group == 0;
    if (unscaled) return gemm_of_span<32, Codes::kUnscaled>(span);
    return group == 16 ? gemm_of_group<16>(symmetric, span) : gemm_of_group<32>(symmetric, span);
}

}  // namespace ikpy

#endif
