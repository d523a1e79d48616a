// The two products of a quantized weight type, from its unpacker: panels for many tokens, row by row for few.
#pragma once
#include <algorithm>

#include "kernels/gemv/gemv_halves.hpp"
#include "kernels/gemv/gemv_int8.hpp"
#include "kernels/gemv/gemv_word_scales.hpp"
#include "kernels/matmul/bf16_rows.hpp"
#include "kernels/matmul/chained_groups.hpp"
#include "kernels/matmul/folded_scales.hpp"
#include "kernels/matmul/gemm_ahead_amx.hpp"
#include "kernels/matmul/gemm_amx.hpp"
#include "kernels/matmul/gemm_int8.hpp"
#include "kernels/matmul/row_chunk.hpp"
#include "kernels/matmul/unpacked.hpp"
#include "kernels/simd/prefetch_chunk.hpp"
#include "kernels/simd/transpose.hpp"

namespace ikpy {

#if defined(__AVX512VNNI__)

// Writes 256 columns of 16 rows into their half of the panel.
template <class U>
void pack_chunk(const uint8_t* const* rows, int64_t to_next_block, int64_t n, uint8_t* codes, float* d,
                float* m) {
    alignas(64) uint8_t q[kHalfRows][kChunk];
    __m512i dv[kHalfRows], mv[kHalfRows], r[kHalfRows];
    for (int i = 0; i < kHalfRows; ++i) {
        prefetch_chunk<U>(rows[i], to_next_block);
        const Codes512 c = n >= kChunk ? unpack_full<U>(rows[i], i % RowsOf<U>::kCount)
                                       : unpack_tail<U>(rows[i], i % RowsOf<U>::kCount, n);
        for (int j = 0; j < 4; ++j) _mm512_store_si512(q[i] + 64 * j, centred_codes<U>(c.q[j]));
        dv[i] = _mm512_castps_si512(c.d);
        if (U::kZero == 0) mv[i] = _mm512_castps_si512(c.m);
    }
    for (int j = 0; j < 4; ++j) {
#pragma GCC unroll 16
        for (int i = 0; i < kHalfRows; ++i) r[i] = _mm512_load_si512(q[i] + 64 * j);
        transpose16(r);
#pragma GCC unroll 16
        for (int i = 0; i < kHalfRows; ++i) _mm512_storeu_si512(codes + (16 * j + i) * 64, r[i]);
    }
    constexpr int kGroups = kChunk / U::kGroup;
    transpose16(dv);
    for (int g = 0; g < kGroups; ++g) _mm512_storeu_si512(d + g * kHalfRows, dv[g]);
    if (U::kZero == 0) {
        transpose16(mv);
        for (int g = 0; g < kGroups; ++g) _mm512_storeu_si512(m + g * kHalfRows, mv[g]);
    }
}

#elif defined(__AVX2__)

// One float of eight rows per group: at[g * kHalfRows + row].
inline void put_scales(const float* const* rows, int n_groups, float* at) {
    __m256i r[8];
    for (int g0 = 0; g0 < n_groups; g0 += 8) {
        for (int i = 0; i < 8; ++i) r[i] = _mm256_castps_si256(_mm256_load_ps(rows[i] + g0));
        transpose8(r);
        for (int g = 0; g < 8; ++g) _mm256_storeu_ps(at + (g0 + g) * kHalfRows, _mm256_castsi256_ps(r[g]));
    }
}

// 16 bytes from each of two places.
inline __m256i load_halves(const uint8_t* low, const uint8_t* high) {
    return _mm256_inserti128_si256(
        _mm256_castsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(low))),
        _mm_load_si128(reinterpret_cast<const __m128i*>(high)), 1);
}

// Codes of eight rows less Base.
template <int Base>
inline void pack_codes(const Chunk* c, uint8_t* to) {
    for (int j = 0; j < kChunk; j += 16, to += 16 * kHalfRows) {
        __m256i r[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            r[i] = load_halves(c[i].codes + j, c[4 + i].codes + j);
            if (Base != 0) r[i] = _mm256_sub_epi8(r[i], _mm256_set1_epi8(static_cast<char>(Base)));
        }
        transpose4(r);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 4 * i * kHalfRows), r[i]);
    }
}

template <class U>
void pack_chunk(const uint8_t* const* rows, int64_t to_next_block, int64_t n, uint8_t* codes, float* d,
                float* m) {
    constexpr int kGroups = kChunk / U::kGroup, kRows = 8, kBase = PanelCodes<U>::kBase;
    const bool by_row_codes = HasRowCodes<U>::value && n >= kChunk;
    Chunk c[kRows];
    const float *dv[kRows], *mv[kRows];
    for (int first = 0; first < kHalfRows; first += kRows) {
        for (int i = 0; i < kRows; ++i) {
            if (i % RowsOf<U>::kCount == 0) prefetch_chunk<U>(rows[first + i], to_next_block);
            if constexpr (HasRowCodes<U>::value) {
                if (by_row_codes) row_chunk::unpack<U>(rows[first + i], &c[i]);
            }
            if (!by_row_codes) unpack_chunk<U>(rows[first + i], (first + i) % RowsOf<U>::kCount, n, &c[i]);
            dv[i] = c[i].d;
            mv[i] = c[i].m;
        }
        if (by_row_codes)
            pack_codes<kBase - row_chunk::kCentre<U>>(c, codes + 4 * first);
        else
            pack_codes<kBase>(c, codes + 4 * first);
        if (!kUnscaled<U>) put_scales(dv, kGroups, d + first);
        if (U::kZero == 0) put_scales(mv, kGroups, m + first);
    }
}

#else

template <class U>
void pack_chunk(const uint8_t* const* rows, int64_t, int64_t n, uint8_t* codes, float* d, float* m) {
    Chunk c;
    constexpr int kGroups = kChunk / U::kGroup;
    for (int i = 0; i < kHalfRows; ++i) {
        unpack_chunk<U>(rows[i], i % RowsOf<U>::kCount, n, &c);
        for (int e = 0; e < kChunk; ++e) c.codes[e] = static_cast<uint8_t>(c.codes[e] - PanelCodes<U>::kBase);
        for (int j = 0; j < kChunk / 4; ++j) std::memcpy(codes + j * 64 + i * 4, c.codes + 4 * j, 4);
        for (int g = 0; g < kGroups; ++g) {
            d[g * kHalfRows + i] = c.d[g];
            if (U::kZero == 0) m[g * kHalfRows + i] = c.m[g];
        }
    }
}

#endif

constexpr int64_t kPanelBytes = kPanelColumns * kBlockRows + 2 * (kPanelColumns / 16 * kBlockRows * 4);

// Of a panel and, behind it, of the tokens that chained panels meet where threads do not share them.
template <class U>
size_t int8_panel_bytes(int64_t) {
#if defined(IKPY_BYTE_DOTS)
    if constexpr (kChains<U>) return static_cast<size_t>(kPanelBytes + kMaxTokens * kBiasedTokenBytes);
#endif
    return static_cast<size_t>(kPanelBytes);
}

// The scales of the rows of types with a row header.
template <class U>
void read_row_scales(const RowBlock& rows, float* scale) {
    constexpr int R = RowsOf<U>::kCount;
    for (int h = 0; h < rows.halves(); ++h)
        for (int i = 0; i < kHalfRows; ++i)
            scale[h * kHalfRows + i] = RowHeader<U>::scale(rows.group(h, i, R), i % R);
}

template <class U>
constexpr auto row_scales_of() {
    if constexpr (RowHeader<U>::kBytes > 0) {
        return read_row_scales<U>;
    } else {
        return nullptr;
    }
}

// Multiplies the products of types with a row header by the scales of the rows.
template <class U>
void apply_row_scales(const RowBlock& rows, int n_halves, int n_tokens, float* out) {
    if constexpr (RowHeader<U>::kBytes > 0) {
        float scale[kBlockRows];
        read_row_scales<U>(rows, scale);
        for (int t = 0; t < n_tokens; ++t)
            for (int i = 0; i < n_halves * kHalfRows; ++i) out[t * kBlockRows + i] *= scale[i];
    }
}

// Unpacks n columns (a multiple of 256) from column k0 of a row block into work.
template <class U>
[[gnu::noinline]] Int8Panel int8_panel(const RowBlock& rows, int64_t k0, int64_t n, uint8_t* work) {
    Int8Panel p;
    p.n = n;
    p.zero = PanelCodes<U>::kZero;
    p.codes = work;
    p.d = reinterpret_cast<float*>(work + n * kBlockRows);
    p.m = p.d + 2 * p.half_scales(U::kGroup);
    const int n_halves = rows.halves();
    for (int64_t k = 0; k < n; k += kChunk) {
        for (int h = 0; h < n_halves; ++h) {
            const uint8_t* at[kHalfRows];
            for (int i = 0; i < kHalfRows; ++i)
                at[i] = rows.group(h, i, RowsOf<U>::kCount) + RowHeader<U>::kBytes +
                        (k0 + k) / U::kBlock * U::kBlockBytes;
            const int64_t scales = h * p.half_scales(U::kGroup) + k / U::kGroup * kHalfRows;
            pack_chunk<U>(at, rows.to_next_block(), rows.n_in - k0 - k,
                          p.codes + h * p.half_codes() + k * kHalfRows, p.d + scales, p.m + scales);
        }
    }
    return p;
}

// Tokens whose sums are handed over together: while those of one tile are made, the lines of dst that they go
// to are fetched. A multiple of the tokens of all tiles of AVX-512 and most of AVX2.
constexpr int kSinkTokens = 6;

// The last columns of all tokens: complete sums leave while they are in the first-level cache.
inline void last_products(Int8GemmFn multiply, const Int8Panel& p, const RowBlock& rows, int block,
                          const TokenSet& tokens, int64_t k0, float* out) {
    const ActQ8Layout layout(rows.n_in);
    for (int t = 0; t < tokens.n; t += kSinkTokens) {
        const int n = std::min(kSinkTokens, tokens.n - t);
        float* const sums = out + static_cast<int64_t>(t) * kBlockRows;
        tokens.sink->expect(block, t, n);
        multiply(p, rows.halves(), tokens.x + t, n, layout, k0, sums, k0 > 0);
        tokens.sink->take(block, t, n, sums);
    }
}

// Panels of all blocks meet the same columns of the tokens before the next ones are read. columns(k0, n): the
// tokens as `multiply` wants them.
template <PanelFn Panel, class Columns>
void multiply_panels(Int8GemmFn multiply, const RowBlock* blocks, int n_blocks, Columns columns, float* out,
                     uint8_t* work) {
    const ActQ8Layout layout(blocks[0].n_in);
    for (int64_t k0 = 0; k0 < layout.n; k0 += kPanelColumns) {
        const int64_t n = std::min(kPanelColumns, layout.n - k0);
        const TokenSet tokens = columns(k0, n);
        const int64_t sums = static_cast<int64_t>(tokens.n) * kBlockRows;
        for (int b = 0; b < n_blocks; ++b) {
            const Int8Panel p = Panel(blocks[b], k0, n, work);
            if (k0 + kPanelColumns >= layout.n)
                last_products(multiply, p, blocks[b], b, tokens, k0, out + b * sums);
            else
                multiply(p, blocks[b].halves(), tokens.x, tokens.n, layout, k0, out + b * sums, k0 > 0);
        }
    }
}

template <class U, PanelFn Panel>
void panel_products(const RowBlock* blocks, int n_blocks, const TokenSet& tokens, float* out, uint8_t* work) {
    const auto same = [&](int64_t, int64_t) -> const TokenSet& { return tokens; };
    multiply_panels<Panel>(int8_gemm_of<U>(), blocks, n_blocks, same, out, work);
}

#if defined(IKPY_BYTE_DOTS)
template <class U, PanelFn Panel>
void chained_products(const RowBlock* blocks, int n_blocks, const TokenSet& tokens, float* out,
                      uint8_t* work) {
    if (tokens.n < kChainTokens) return panel_products<U, Panel>(blocks, n_blocks, tokens, out, work);
    const ActQ8Layout layout(blocks[0].n_in);
    const uint8_t* rows[kMaxTokens];
    const auto biased = [&](int64_t k0, int64_t n) -> TokenSet {
        biased_tokens(tokens, layout, k0, n, work + kPanelBytes, rows);
        return {rows, tokens.n, tokens.fresh, tokens.sink};
    };
    multiply_panels<chained_panel<U, Panel>>(chained_gemm(), blocks, n_blocks, biased, out, work);
}

template <class U, PanelFn Panel, PanelFn Integers>
void folded_products(const RowBlock* blocks, int n_blocks, const TokenSet& tokens, float* out,
                     uint8_t* work) {
    if (tokens.n < kFoldTokens) return panel_products<U, Panel>(blocks, n_blocks, tokens, out, work);
    panel_products<FoldedCodes<U>, folded_panel<U, Integers>>(blocks, n_blocks, tokens, out, work);
}
#endif

// The product of panels of U. PanelOf<V>::make: the panels of an unpacker.
template <class U, template <class> class PanelOf>
constexpr BlocksProductFn panel_products_of() {
#if defined(IKPY_BYTE_DOTS)
    if constexpr (HasIntegerScales<U>::value)
        return folded_products<U, PanelOf<U>::make, PanelOf<typename IntegerScaled<U>::Unpack>::make>;
    if constexpr (kChains<U>) return chained_products<U, PanelOf<U>::make>;
#endif
    return panel_products<U, PanelOf<U>::make>;
}

// With what changes where tokens are many.
template <class U>
constexpr WeightKernels with_many_tokens(WeightKernels kernels) {
#if defined(IKPY_BYTE_DOTS)
    if constexpr (HasIntegerScales<U>::value) {
        kernels.many_tokens = kFoldTokens;
    } else if constexpr (kChains<U>) {
        kernels.many_tokens = kChainTokens;
        kernels.share = bias_rows;
        kernels.shared_bytes = biased_row_bytes;
    }
#endif
    return kernels;
}

template <class U>
struct TransposedPanel {
    static constexpr PanelFn make = int8_panel<U>;
};

template <class U>
void tile_panel(const RowBlock& rows, int64_t k0, int64_t n, uint16_t* panel, uint8_t* work) {
    const Int8Panel p = int8_panel<U>(rows, k0, round_up(n, kChunk), work);
    decode_panel(p, rows.halves(), U::kGroup, U::kZero > 0, panel);
}

template <TilePanelFn Fill>
void panel_tiles(const RowBlock* blocks, int n_blocks, const TokenSet& tokens, float* out, uint8_t* work) {
    amx_product(TileFactors::kBf16, Fill, blocks, n_blocks, tokens.x, tokens.n, out, work);
}

// Sets of tokens that fit into the cache meet weights that are unpacked ahead, others panels.
template <class U>
void quant_tiles(const RowBlock* blocks, int n_blocks, const TokenSet& tokens, float* out, uint8_t* work) {
    if (tokens.n > ahead_tokens(blocks[0].n_in))
        return panel_tiles<tile_panel<U>>(blocks, n_blocks, tokens, out, work);
    ahead_product(fill_bf16_rows<U>, blocks, n_blocks, tokens, out, work);
}

inline size_t quant_tiles_work_bytes(int64_t n_in) {
    return std::max(amx_work_bytes(n_in), ahead_work_bytes(n_in));
}

// The product of few tokens and its work memory.
template <class U, int GemvTokens>
constexpr ProductFn gemv_of() {
#if defined(__AVX512VNNI__)
    if constexpr (HasHalves<U>::value) return halves::multiply<U, GemvTokens>;
#endif
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
    if constexpr (kWordScales<U>) return word_scales::gemv<U, GemvTokens>;
#endif
    return quant_gemv<U, GemvTokens>;
}

template <class U, int GemvTokens>
size_t quant_work_bytes(int64_t n_in) {
    size_t few = sums_work_bytes<U, GemvTokens>(n_in);
    if constexpr (HasHalves<U>::value) few = static_cast<size_t>(GemvTokens * round_up(n_in, kChunk));
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
    if constexpr (kWordScales<U>) few = word_scales::work_bytes<U, GemvTokens>(n_in);
#endif
    return std::max(int8_panel_bytes<U>(n_in), few);
}

// On AVX2 products of panels take a third of the time of rows for codes that span less than 128, three
// quarters for others (a third with dot products of bytes), which pays for the panels of few tokens. Scales
// of short blocks cost rows more.
template <class U, int Avx512Tokens = kGemvTokens>
constexpr int gemv_tokens() {
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
    constexpr bool kShort = U::kBlock < kChunk && !UnitScales<U>::value && !HasRowCodes<U>::value;
    return (kByteDots || PanelCodes<U>::kSpan < 128 ? 2 : 3) - (kShort ? 1 : 0);
#elif defined(__AVX512VNNI__)
    return Avx512Tokens;
#else
    return kGemvTokens;
#endif
}

// The same of AMD's CPUs without AVX-512; 0: no others. Zen 3, weights in memory, the time of four tokens by
// rows beside that with panels: Q4_0 0.94, Q4_K 0.87, Q6_K 0.75, IQ2_K 0.87, IQ4_K 0.90, IQ4_KS 0.90.
template <class U>
constexpr int amd_gemv_tokens() {
#if defined(__AVX2__) && !defined(IKPY_BYTE_DOTS)
    return HasRowCodes<U>::value ? 4 : 0;
#else
    return 0;
#endif
}

// GemvTokens: up to this many tokens row products were measured to be faster than panels.
template <class U, int GemvTokens = gemv_tokens<U>(), int AmdTokens = amd_gemv_tokens<U>()>
constexpr WeightKernels quant_kernels() {
    constexpr int kMost = std::max(GemvTokens, AmdTokens);
    WeightKernels kernels =
        with_many_tokens<U>({U::kType,
                             kActQ8,
                             GemvTokens,
                             gemv_of<U, kMost>(),
                             panel_products_of<U, TransposedPanel>(),
                             quant_work_bytes<U, kMost>,
                             {quant_tiles<U>, kActBf16, kTileMinTokens, quant_tiles_work_bytes,
                              ahead_kept_tokens, kTileMinExpertTokens},
                             row_scales_of<U>(),
                             true});
    kernels.amd_gemv_tokens = AmdTokens;
    return kernels;
}

}  // namespace ikpy
