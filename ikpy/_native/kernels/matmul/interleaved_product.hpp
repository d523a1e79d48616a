// Products of row-interleaved types. Their bytes already hold four columns of four rows next to each other,
// as the panels of the microkernel do: nothing is transposed.
//
// An unpacker is a struct with kType, kRows, kGroup, kBlock, kBlockBytes (of the whole group), kZero,
// optional header members as in unpacked.hpp, and
//   template <class Out> static void codes(const Quads<kRows>& q, int ib, Out& out)
//       the codes of one block, four columns of every row at a time, to out.put(column, codes); symmetric
//       codes around 128, so kZero is 128 or 0
//   static void scales(const uint8_t* block, int quad, float* d, float* m)
//       scales of rows 4 * quad .. + 3 of a group; those of scale group g at d + g * kHalfRows
//   optional kStep: codes() calls out.put(column, codes, step) where step() is what a second level table adds
//       to the codes, kStep or nothing; on AVX-512 a class Steps made from Quads<kRows> tells of(ib, g), the
//       rows whose g-th scale group of the 32 columns takes the step
//   optional kLow, kHigh: the smallest and the largest code, for types that do not use all bytes
//   optional kCodesAt: codes are signed bytes that begin there in a block of eight rows
//   (gemv_byte_groups.hpp)
#pragma once
#include <algorithm>

#include "kernels/gemv/gemv_byte_groups.hpp"
#include "kernels/gemv/gemv_interleaved.hpp"
#include "kernels/matmul/bf16_quads.hpp"
#include "kernels/matmul/interleaved_quads.hpp"
#include "kernels/matmul/weight_prefetch.hpp"

namespace ikpy {

// The rows of the quads inside a panel half; `column` is a multiple of 4.
template <class U>
struct PanelRows {
    uint8_t* codes;
    void put(int column, Lanes v) const {
        v -= static_cast<uint8_t>(PanelCodes<U>::kBase);
        std::memcpy(codes + column * kHalfRows, &v, sizeof v);
    }
    template <class F>
    void put(int column, Lanes v, F step) const {
        put(column, v + step());
    }
};

// Where 256 columns of a half come in groups of rows that are read side by side.
struct PanelPlace {
    SideBySide groups;
    int64_t offset;  // of the columns in a group
};

// Up to this many bytes are asked for at once, in one burst of lines before a block is unpacked; on AVX2 what
// a block of any size needs later is asked for part by part, so that memory is read while few tokens are
// multiplied. Zen 3, weights in memory, products of 1, 4 and 8 tokens in the time that bursts took: Q4_K_R4
// 0.61, 0.70 and 0.79, IQ4_K_R4 0.75, 0.83 and 0.93, Q4_0_R8 0.89, 0.90 and 0.97.
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
constexpr int kBurstBlock = 0;
template <class U>
using PanelAhead = PartsAhead<U, U::kBlock / 32>;
#else
constexpr int kBurstBlock = kChunk - 1;
template <class U>
struct PanelAhead {
    PanelAhead(const SideBySide&, int64_t) {}
    void ask_for_later(const Quads<U::kRows>&, int) const {}
};
#endif

// Unpacks up to 256 columns of a half; groups beyond n get zero scales.
template <class U>
void pack_interleaved(const uint8_t* const* groups, const PanelPlace& place, int64_t n, uint8_t* codes,
                      float* d, float* m) {
    constexpr int R = U::kRows, kGroups = U::kBlock / U::kGroup;
    const int n_blocks = static_cast<int>(std::min<int64_t>(n, kChunk) / U::kBlock);
    for (int b = 0; b < n_blocks; ++b) {
        if constexpr (U::kBlock <= kBurstBlock)
            for (int i = 0; i < kHalfRows / R; ++i)
                prefetch_weights<U::kBlockBytes>(groups[i] + b * U::kBlockBytes);
        const PanelAhead<U> ahead(place.groups, place.offset + b * U::kBlockBytes);
        for (int q0 = 0; q0 < kHalfRows / 4; q0 += kQuads) {
            Quads<R> quads;
            for (int q = 0; q < kQuads; ++q) {
                quads.block[q] = groups[4 * (q0 + q) / R] + b * U::kBlockBytes;
                quads.place[q] = (q0 + q) % (R / 4);
                const int64_t at = b * kGroups * kHalfRows + 4 * (q0 + q);
                U::scales(quads.block[q], quads.place[q], d + at, m + at);
            }
            for (int ib = 0; ib < U::kBlock / 32; ++ib) {
                ahead.ask_for_later(quads, ib);
                PanelRows<U> rows{codes + (b * U::kBlock + 32 * ib) * kHalfRows + 16 * q0};
                U::codes(quads, ib, rows);
            }
        }
    }
    for (int64_t i = n_blocks * kGroups * kHalfRows; i < kChunk / U::kGroup * kHalfRows; ++i) {
        d[i] = 0.0f;
        if (U::kZero == 0) m[i] = 0.0f;
    }
}

// Packs `columns` columns from k0 of the halves from h0 to h1 into a panel at `work`.
template <class U>
Int8Panel interleaved_panel(const RowBlock& rows, int h0, int h1, int64_t k0, int64_t columns,
                            uint8_t* work) {
    Int8Panel p;
    p.n = columns;
    p.zero = PanelCodes<U>::kZero;
    p.codes = work;
    p.d = reinterpret_cast<float*>(work + p.n * kBlockRows);
    p.m = p.d + 2 * p.half_scales(U::kGroup);
    const SideBySide side_by_side((h1 - h0) * kHalfRows / U::kRows, U::kRows * rows.stride);
    for (int64_t k = 0; k < p.n; k += kChunk) {
        for (int h = h0; h < h1; ++h) {
            const uint8_t* groups[kHalfRows / U::kRows];
            const PanelPlace place{side_by_side, (k0 + k) / U::kBlock * U::kBlockBytes};
            for (int i = 0; i < kHalfRows / U::kRows; ++i)
                groups[i] = rows.group(h, i * U::kRows, U::kRows) + RowHeader<U>::kBytes + place.offset;
            const int64_t scales = (h - h0) * p.half_scales(U::kGroup) + k / U::kGroup * kHalfRows;
            pack_interleaved<U>(groups, place, rows.n_in - k0 - k,
                                p.codes + (h - h0) * p.half_codes() + k * kHalfRows, p.d + scales,
                                p.m + scales);
        }
    }
    return p;
}

template <class U>
Int8Panel whole_interleaved_panel(const RowBlock& rows, int64_t k0, int64_t n, uint8_t* work) {
    return interleaved_panel<U>(rows, 0, rows.halves(), k0, n, work);
}

// U::kLookedUp, or false: codes come from a table.
template <class U, class = void>
struct LookedUp : std::false_type {};
template <class U>
struct LookedUp<U, std::void_t<decltype(U::kLookedUp)>> : std::bool_constant<U::kLookedUp> {};

// Up to this many tokens those products are the faster ones. On AVX2 codes of few bits gain most from panels,
// whose products have more registers for sums in 16 bits, but not where a table gives the codes (Zen 5,
// MXFP4_R8 of 3, 4 and 8 tokens 199, 210 and 203 Gop/s, with panels 140, 160 and 209). Words
// (gemv_interleaved_words.hpp) pay longer: on a Xeon Q6_K_R4 of 4 tokens takes 1.13 times as long with
// panels, IQ2_K_R4 of 7 1.2 times, of 8 neither does. On AVX-512 sums of 12 tokens fit into the registers;
// where codes are looked up in two tables, have no scales or two sums of six bits, panels pay earlier.
template <class U>
constexpr int interleaved_tokens() {
#if defined(__AVX2__) && !defined(IKPY_BYTE_DOTS)
    constexpr int kSpan = PanelCodes<U>::kSpan;
    if (row_words::kHas<U>) return kSpan > 31 ? 7 : 6;
    if (LookedUp<U>::value && kSpan <= 31) return 6;
    return kSpan > 127 ? kInterleavedTokens : kSpan > 31 ? 4 : 2;
#elif defined(__AVX512VNNI__)
    constexpr bool kTwoSums = U::kGroup == 16;
    if (UnitScales<U>::value) return 5;
    if (StepOf<U>::kStep > 0) return kTwoSums ? 7 : 5;
    return kTwoSums && PanelCodes<U>::kSpan > 31 ? 8 : kInterleavedTokens;
#else
    return kInterleavedTokens;
#endif
}

// Few tokens: products straight from the unpacked codes where the tier has them, else small panels, so that
// reading memory and multiplying overlap.
template <class U>
void interleaved_gemv(const RowBlock& rows, const TokenSet& tokens, float* out,
                      [[maybe_unused]] uint8_t* work) {
    const ActQ8Layout layout(rows.n_in);
    const int n_halves = rows.halves();
    for (int h = 0; h < n_halves; ++h) {
        float* sums = out + h * kHalfRows;
#if defined(__AVX512VNNI__)
        if constexpr (byte_groups::kHas<U>)
            if (tokens.n == 1) {
                byte_groups::dot_half<U>(rows, h, tokens.x[0], layout, sums);
                continue;
            }
#endif
#if defined(__AVX2__)
        interleaved_dots<U, interleaved_tokens<U>()>(rows, h, tokens.x, tokens.n, layout, sums);
#else
        const Int8GemmFn multiply = int8_gemm_of<U>();
        for (int64_t k0 = 0; k0 < layout.n; k0 += kChunk)
            multiply(interleaved_panel<U>(rows, h, h + 1, k0, kChunk, work), 1, tokens.x, tokens.n, layout,
                     k0, sums, k0 > 0);
#endif
    }
    apply_row_scales<U>(rows, n_halves, tokens.n, out);
}

template <class U>
void interleaved_tile_panel(const RowBlock& rows, int64_t k0, int64_t n, uint16_t* panel, uint8_t* work) {
    const int n_halves = rows.halves();
    const Int8Panel p = interleaved_panel<U>(rows, 0, n_halves, k0, round_up(n, kChunk), work);
    decode_panel(p, n_halves, U::kGroup, U::kZero > 0, panel);
}

// Sets of tokens as for plain types.
template <class U>
void interleaved_tiles(const RowBlock* blocks, int n_blocks, const TokenSet& tokens, float* out,
                       uint8_t* work) {
    if (tokens.n > ahead_tokens(blocks[0].n_in))
        return panel_tiles<interleaved_tile_panel<U>>(blocks, n_blocks, tokens, out, work);
    ahead_product(fill_bf16_quads<U>, blocks, n_blocks, tokens, out, work);
}

template <class U>
struct InterleavedPanel {
    static constexpr PanelFn make = whole_interleaved_panel<U>;
};

// Codes of a byte take next to no unpacking for vectors: Q8_0_R8 has 0.79 of the rate of rows with 12 tokens
// per expert on tiles, 0.91 with 16, 0.97 with 20.
template <class U>
constexpr int64_t interleaved_expert_tokens() {
    return U::kBlockBytes >= U::kRows * U::kBlock ? 20 : kTileMinExpertTokens;
}

// On AMD's CPUs words pay no longer once their sums leave the registers: of five tokens IQ4_K_R4 took 1.4
// times as long on Zen 3 as with panels. AmdTokens: up to this many do not.
constexpr int kAmdWordTokens = 4;  // of most types

template <class U, int AmdTokens = kAmdWordTokens, int PassTokens = 0>
constexpr WeightKernels interleaved_kernels() {
    WeightKernels kernels =
        with_many_tokens<U>({U::kType,
                             kActQ8,
                             interleaved_tokens<U>(),
                             interleaved_gemv<U>,
                             panel_products_of<U, InterleavedPanel>(),
                             int8_panel_bytes<U>,
                             {interleaved_tiles<U>, kActBf16, kTileMinTokens, quant_tiles_work_bytes,
                              ahead_kept_tokens, interleaved_expert_tokens<U>()},
                             row_scales_of<U>(),
                             true});
#if defined(__AVX2__) && !defined(IKPY_BYTE_DOTS)
    if (row_words::kHas<U>) kernels.amd_gemv_tokens = AmdTokens;
#endif
#if defined(__AVX512VNNI__)
    kernels.pass_tokens = PassTokens;
#endif
    return kernels;
}

}  // namespace ikpy
