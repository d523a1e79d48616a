#include "kernels/gemm_words.hpp"

#include <algorithm>

#include "kernels/activations.hpp"
#include "kernels/amx_tiles.hpp"
#include "kernels/gemm_few_amx.hpp"
#include "kernels/gemm_float.hpp"
#include "kernels/transpose.hpp"

namespace ikpy {

#if defined(__AVX512F__) && defined(__linux__)

#define IKPY_WORDS __attribute__((target("amx-tile,amx-int8,avx512fp16")))

namespace {

// All four products of bytes, at twice the rate of bf16, on 512 tokens (one core, others busy; in brackets
// the rms of the error of products of Gaussian numbers): 0.65 of the speed of BF16 weights (3.0e-5, 1.5e-4
// with single activations of 100 times the size); two bf16 parts each in three products 0.38 to 0.47
// (5.6e-6); without the product of lower bytes 0.77 (7.2e-5, 3.8e-4).
// Perplexities of two small models over 16 chunks differ from those of fp32 products by 1e-6 and 3e-5, as
// much as fp32 products do with and without flash attention.
//
// Filling panels takes a fifth of the time at 512 tokens, tile stores and scaling another fifth. Filling the
// next panel between the products of this one gains nothing. Columns with one scale: 512 instead of 256 halve
// stores and scaling (1.04 of the speed), and sums of 512 products of bytes times 256 just fit into 32 bits.
constexpr int64_t kMinTokens = kPassTokens + 1;  // smaller batches: splitting rows as left operands is faster
constexpr int kTileTokens = 12;                  // fewer tokens of an expert meet the weights in f32
static_assert(kWordColumns * (int64_t{127} * 127 * 256 + 2 * 128 * 128) < int64_t{1} << 31);
constexpr int kSteps = kWordColumns / kWordDepth;
constexpr int kRowVectors = kWordColumns / 32;
constexpr int64_t kTileBytes = kTileHeight * 64;
constexpr int64_t kHalfPanel = 2 * kSteps * kTileBytes;
constexpr int64_t kPartStride = 2 * kWordColumns + 64;  // no power of two: other sets of the cache
constexpr int64_t kTileSums = kTileHeight * kTileHeight;
constexpr int kParts = 3;  // sums of upper bytes, of mixed products, of lower bytes
constexpr int64_t kBlockSums = 2 * kParts * kTileSums;

// Work memory: panel [half][step][part] of weights, scales of its rows, rows before they are transposed
// [row][step][part], tokens that were copied together, sums of two groups of tokens, scales of tokens [n_in /
// kWordColumns][kMaxTokens] or tokens as f32.
struct Work {
    uint8_t* panel;
    float* row_scales;
    uint8_t* rows;
    uint8_t* gather;
    int32_t* sums;
    float* tokens;

    static constexpr int64_t kFixed = 2 * kHalfPanel + kBlockRows * 4 + kHalfRows * kPartStride +
                                      kTileHeight * kPartStride + 2 * kBlockSums * 4;

    explicit Work(uint8_t* base) {
        panel = base;
        row_scales = reinterpret_cast<float*>(panel + 2 * kHalfPanel);
        rows = reinterpret_cast<uint8_t*>(row_scales + kBlockRows);
        gather = rows + kHalfRows * kPartStride;
        sums = reinterpret_cast<int32_t*>(gather + kTileHeight * kPartStride);
        tokens = reinterpret_cast<float*>(sums + 2 * kBlockSums);
    }
};

size_t work_bytes(int64_t n_in) {
    const int64_t scales = round_up(n_in, kWordColumns) / kWordColumns * kMaxTokens;
    return Work::kFixed + std::max(scales, (kTileTokens - 1) * round_up(n_in, kWordDepth)) * sizeof(float);
}

// 32 f16 values of a row of n from column k on, zeros beyond.
inline __m512i load_halves(const uint8_t* row, int64_t k, int64_t n) {
    if (n - k >= 32) return _mm512_loadu_si512(row + 2 * k);
    const auto valid = static_cast<__mmask32>((uint64_t{1} << (n > k ? n - k : 0)) - 1);
    return _mm512_maskz_loadu_epi16(valid, row + 2 * k);
}

// The largest magnitude, as bits of an F16 number.
inline int largest_bits(const __m512i* v) {
    const __m512i magnitude = _mm512_set1_epi16(0x7FFF), ones = _mm512_set1_epi16(-1);
    __m512i top = _mm512_setzero_si512();
#pragma GCC unroll 16
    for (int i = 0; i < kRowVectors; ++i) top = _mm512_max_epu16(top, _mm512_and_si512(v[i], magnitude));
    top = _mm512_xor_si512(top, ones);  // there is an instruction for the smallest of eight
    const __m256i a = _mm256_min_epu16(_mm512_castsi512_si256(top), _mm512_extracti64x4_epi64(top, 1));
    const __m128i b = _mm_min_epu16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    return 0xFFFF - (_mm_cvtsi128_si32(_mm_minpos_epu16(b)) & 0xFFFF);
}

// Pair j of bytes belongs to element j of a and of b: upper bytes, rounded, and the signed lower bytes.
inline __m512i upper_bytes(__m512i a, __m512i b) {
    const __m512i half = _mm512_set1_epi16(0x80);
    return _mm512_mask_blend_epi8(0xAAAAAAAAAAAAAAAA, _mm512_srli_epi16(_mm512_add_epi16(a, half), 8),
                                  _mm512_add_epi16(b, half));
}

inline __m512i lower_bytes(__m512i a, __m512i b) {
    return _mm512_mask_blend_epi8(0xAAAAAAAAAAAAAAAA, a, _mm512_slli_epi16(b, 8));
}

// Columns k0 .. of a row of n as [step][part][64 bytes]; they are scale times those integers. The power
// of two brings the largest into [2^14, 32640), so that its upper byte does not overflow.
IKPY_WORDS inline void split_row(const uint8_t* row, int64_t k0, int64_t n, uint8_t* out, float* scale) {
    __m512i v[kRowVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kRowVectors; ++i) v[i] = load_halves(row, k0 + 32 * i, n);
    const int bits = largest_bits(v), exponent = 29 - std::max((bits + 8) >> 10, 1);
    const bool finite = bits < 0x7C00;
    *scale = f32_from_bits(finite ? static_cast<uint32_t>(127 - exponent) << 23 : 0x7FC00000);
    const __m512h e = _mm512_set1_ph(static_cast<_Float16>(exponent));
#pragma GCC unroll 8
    for (int s = 0; s < kSteps; ++s, out += 128) {
        const __m512i a = _mm512_cvtph_epi16(_mm512_scalef_ph((__m512h)v[2 * s], e));
        const __m512i b = _mm512_cvtph_epi16(_mm512_scalef_ph((__m512h)v[2 * s + 1], e));
        _mm512_storeu_si512(out, upper_bytes(a, b));
        _mm512_storeu_si512(out + 64, lower_bytes(a, b));
    }
}

// One part of one step of 16 rows as right operand.
inline void transpose_rows(const uint8_t* rows, uint8_t* tile) {
    __m512i r[kHalfRows];
#pragma GCC unroll 16
    for (int i = 0; i < kHalfRows; ++i) r[i] = _mm512_loadu_si512(rows + i * kPartStride);
    transpose16(r);
#pragma GCC unroll 16
    for (int i = 0; i < kHalfRows; ++i) _mm512_storeu_si512(tile + i * 64, r[i]);
}

void fill_half(const RowBlock& block, int h, int64_t k0, int n_steps, const Work& work) {
    constexpr int kRowsAhead = 4;
    for (int i = 0; i < kHalfRows; ++i) {
        const uint8_t* row = block.row(h, i);
        const uint8_t* ahead = row + kRowsAhead * block.stride + 2 * k0;
        for (int j = 0; j < 2 * kWordColumns; j += 64)
            _mm_prefetch(reinterpret_cast<const char*>(ahead + j), _MM_HINT_T0);
        split_row(row, k0, block.n_in, work.rows + i * kPartStride, work.row_scales + h * kHalfRows + i);
    }
    for (int i = 0; i < 2 * n_steps; ++i)
        transpose_rows(work.rows + i * 64, work.panel + h * kHalfPanel + i * kTileBytes);
}

// Sums of up to 16 tokens that are still to be scaled and added up.
struct Pending {
    const int32_t* sums = nullptr;
    const float* token_scales = nullptr;
    float* out = nullptr;
    int n = 0;
};

template <int NH>
inline void scale_tokens(const Pending& p, const float* row_scales, bool add, int begin, int end) {
    for (int t = begin; t < std::min(end, p.n); ++t) {
        const __m512 token = _mm512_set1_ps(p.token_scales[t]);
#pragma GCC unroll 2
        for (int h = 0; h < NH; ++h) {
            const int32_t* s = p.sums + h * kParts * kTileSums + t * kTileHeight;
            const __m512i upper = _mm512_slli_epi32(_mm512_loadu_si512(s), 8);
            const __m512i mixed = _mm512_loadu_si512(s + kTileSums);
            const __m512 lower = _mm512_cvtepi32_ps(_mm512_loadu_si512(s + 2 * kTileSums));
            const __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(upper, mixed)),
                                               _mm512_set1_ps(256.0f), lower);
            const __m512 scale = _mm512_mul_ps(token, _mm512_loadu_ps(row_scales + h * kHalfRows));
            float* out = p.out + t * kBlockRows + h * kHalfRows;
            const __m512 before = add ? _mm512_loadu_ps(out) : _mm512_setzero_ps();
            _mm512_storeu_ps(out, _mm512_fmadd_ps(sum, scale, before));
        }
    }
}

// Tiles 0 to 2, and 3 to 5 of the second half of the rows, plus one step of tokens times weights.
template <int NH>
IKPY_WORDS inline void add_products(const uint8_t* x, int64_t stride, const uint8_t* w) {
    _tile_loadd(6, x, stride);
    _tile_loadd(7, w, 64);
    _tile_dpbssd(0, 6, 7);
    _tile_loadd(7, w + kTileBytes, 64);
    _tile_dpbssd(1, 6, 7);
    if (NH == 2) {
        _tile_loadd(7, w + kHalfPanel, 64);
        _tile_dpbssd(3, 6, 7);
        _tile_loadd(7, w + kHalfPanel + kTileBytes, 64);
        _tile_dpbssd(4, 6, 7);
    }
    _tile_loadd(6, x + 64, stride);
    _tile_loadd(7, w + kTileBytes, 64);
    _tile_dpbssd(2, 6, 7);
    _tile_loadd(7, w, 64);
    _tile_dpbssd(1, 6, 7);
    if (NH == 2) {
        _tile_loadd(7, w + kHalfPanel + kTileBytes, 64);
        _tile_dpbssd(5, 6, 7);
        _tile_loadd(7, w + kHalfPanel, 64);
        _tile_dpbssd(4, 6, 7);
    }
}

IKPY_WORDS inline void clear_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
}

template <int NH>
IKPY_WORDS inline void store_sums(int32_t* sums) {
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + kTileSums, 64);
    _tile_stored(2, sums + 2 * kTileSums, 64);
    if (NH == 2) {
        _tile_stored(3, sums + 3 * kTileSums, 64);
        _tile_stored(4, sums + 4 * kTileSums, 64);
        _tile_stored(5, sums + 5 * kTileSums, 64);
    }
    asm volatile("" ::: "memory");  // tile stores do not tell the compiler what they write
}

// A panel times all tokens. While the tile unit works on 16 tokens the vector units scale the sums of those
// before.
template <int NH>
IKPY_WORDS void panel_product(int64_t k0, int n_steps, const TokenSet& tokens, const Work& work, float* out) {
    constexpr int kShare = kTileHeight / kSteps;  // tokens whose sums are scaled during a step
    const float* token_scales = work.tokens + k0 / kWordColumns * kMaxTokens;
    Pending pending;
    for (int t0 = 0; t0 < tokens.n; t0 += kTileHeight) {
        const int n = std::min(kTileHeight, tokens.n - t0);
        if (t0 == 0 || n < kTileHeight) load_tile_config(TileConfig(n, 3));
        const TokenRows x = token_rows(tokens.x + t0, n, 2 * k0, n_steps * 128, work.gather, kPartStride);
        float* const y = out + t0 * kBlockRows;
        clear_sums();
        for (int s = 0; s < n_steps; ++s) {
            add_products<NH>(x.base + s * 128, x.stride, work.panel + s * 2 * kTileBytes);
            scale_tokens<NH>(pending, work.row_scales, k0 > 0, s * kShare, (s + 1) * kShare);
            for (int i = 0; i < kShare * kBlockRows; i += 16)
                __builtin_prefetch(y + s * kShare * kBlockRows + i, 1);
        }
        scale_tokens<NH>(pending, work.row_scales, k0 > 0, n_steps * kShare, kTileHeight);
        int32_t* const sums = work.sums + t0 / kTileHeight % 2 * kBlockSums;
        store_sums<NH>(sums);
        pending = {sums, token_scales + t0, y, n};
    }
    scale_tokens<NH>(pending, work.row_scales, k0 > 0, 0, kTileHeight);
}

void copy_scales(const TokenSet& tokens, int64_t n_in, float* scales) {
    const int64_t offset = ActWordsLayout(n_in).scale, n = round_up(n_in, kWordColumns) / kWordColumns;
    for (int t = 0; t < tokens.n; ++t)
        for (int64_t i = 0; i < n; ++i)
            scales[i * kMaxTokens + t] = load_unaligned<float>(tokens.x[t] + offset + 4 * i);
}

IKPY_WORDS void panels_product(const RowBlock* blocks, int n_blocks, const TokenSet& tokens, float* out,
                               const Work& work) {
    const int64_t n_in = blocks[0].n_in;
    if (tokens.fresh) copy_scales(tokens, n_in, work.tokens);
    for (int64_t k0 = 0; k0 < n_in; k0 += kWordColumns) {
        const auto n_steps =
            static_cast<int>(round_up(std::min(kWordColumns, n_in - k0), kWordDepth) / kWordDepth);
        for (int b = 0; b < n_blocks; ++b) {
            for (int h = 0; h < blocks[b].halves(); ++h) fill_half(blocks[b], h, k0, n_steps, work);
            asm volatile("" ::: "memory");  // tile loads do not tell the compiler what they read
            (blocks[b].halves() == 2 ? panel_product<2> : panel_product<1>)(k0, n_steps, tokens, work,
                                                                            out + static_cast<int64_t>(b) *
                                                                                      tokens.n * kBlockRows);
        }
    }
    release_tiles();
}

// A prepared row as f32.
void join_row(const uint8_t* x, int64_t n, float* out) {
    const uint8_t* scale = x + ActWordsLayout(n).scale;
    const auto store = [](float* to, __m512i words, __m512 factor) {
        const __m512i first = _mm512_cvtepi16_epi32(_mm512_castsi512_si256(words));
        const __m512i second = _mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(words, 1));
        _mm512_storeu_ps(to, _mm512_mul_ps(_mm512_cvtepi32_ps(first), factor));
        _mm512_storeu_ps(to + 16, _mm512_mul_ps(_mm512_cvtepi32_ps(second), factor));
    };
    for (int64_t k = 0; k < n; k += kWordDepth, x += 128) {
        const __m512i hi = _mm512_loadu_si512(x), lo = _mm512_loadu_si512(x + 64);
        const __m512 factor = _mm512_set1_ps(load_unaligned<float>(scale + k / kWordColumns * 4));
        const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(lo, 8), 8), odd = _mm512_srai_epi16(lo, 8);
        store(out + k, _mm512_add_epi16(_mm512_slli_epi16(hi, 8), even), factor);
        store(out + k + 32, _mm512_add_epi16(_mm512_and_si512(hi, _mm512_set1_epi16(-256)), odd), factor);
    }
}

// Experts' groups of fewer tokens than tiles pay for.
void row_products(const RowBlock* blocks, int n_blocks, const TokenSet& tokens, float* out,
                  const Work& work) {
    const int64_t n_in = blocks[0].n_in, stride = round_up(n_in, kWordDepth);
    const uint8_t* rows[kTileTokens];
    for (int t = 0; t < tokens.n; ++t) {
        float* row = work.tokens + t * stride;
        if (tokens.fresh) join_row(tokens.x[t], n_in, row);
        rows[t] = reinterpret_cast<const uint8_t*>(row);
    }
    for (int b = 0; b < n_blocks; ++b)
        f16_row_products(blocks[b], rows, tokens.n, out + static_cast<int64_t>(b) * tokens.n * kBlockRows,
                         nullptr);
}

void tiles(const RowBlock* blocks, int n_blocks, const TokenSet& tokens, float* out, uint8_t* work) {
    (tokens.n < kTileTokens ? row_products : panels_product)(blocks, n_blocks, tokens, out, Work(work));
}

}  // namespace

TileKernels word_tile_kernels() {
    static const bool available = __builtin_cpu_supports("amx-int8") && __builtin_cpu_supports("avx512fp16");
    return available ? TileKernels{tiles, kActWords, kMinTokens, work_bytes} : TileKernels{};
}

#else

TileKernels word_tile_kernels() { return {}; }

#endif

}  // namespace ikpy
