// The microkernel of CPUs with dot products of bytes (AVX-512 VNNI, AVX-VNNI) and of portable builds;
// gemm_int8_avx2.cpp has that of AVX2.
#include "kernels/matmul/gemm_int8.hpp"

#include <cstring>

#include "kernels/simd/byte_dots.hpp"
#include "kernels/simd/half_rows.hpp"
#include "kernels/simd/simd_f32.hpp"

#if defined(IKPY_BYTE_DOTS) || !defined(__AVX2__)

namespace ikpy {
namespace {

#if defined(IKPY_BYTE_DOTS)

// Two vectors of 16 rows (AVX-512) or 8 times NT tokens. Sums of 6 tokens fill 24 of 32 registers; of 16
// registers the sums of a group take 12, and those over groups wait in memory, 1.03 to 1.07 times as fast as
// 3 tokens whose sums all stay in registers.
//
// Sums start at kStartBits, so their bits are the float kStartValue + sum and one FMA converts and scales
// them: (kStartValue + sum) * d - kStartValue * d is rounded once, to what sum * d rounds to, because the
// last product is exact: scales of all types are halves times small integers, which leave the two bits that
// kStartValue = 3 * 2^22 takes.
//
// Cycles of Sapphire Rapids with AVX-512 for 32 columns, 32 rows and 6 tokens; both kinds of instructions
// share two ports:
//                                  dot products   multiply-adds   at best     first-level cache
//   groups of 32                        96             26         61 (79 %)          63
//   with offsets                        96             38         67 (72 %)          69
//   with offsets of groups of 16       108             29         69 (70 %)
//   chained groups of 16                96             38         67 (72 %)
//   groups of 16                        96             52         74 (65 %)          75
//   with offsets                        96             76         86 (56 %)          88
// Products of 512 tokens, 8,192 rows and 2,048 columns take 1.14 to 1.2 times as long: 2 to 7 % for
// unpacking, 5 to 13 % for tokens that come from the second-level cache, 4 to 6 % for stores. Besides, the
// processor grants so many 512-bit instructions per time: the clock falls from 3.5 GHz of dot products alone
// to 2.8, and the microkernel takes as long with a chain of 84 cycles beside it. To keep -kStartValue * d in
// the panel gained at most 2 % in the first-level cache; fetching the tokens of the next tile a few lines per
// group gained 2 % for groups of 32 and lost 2 % for others (all at once 4 to 9 %), panels of 768 or 1,024
// columns lost 2 to 9 %, pairs of panels and tiles of 5 or 7 tokens gained nothing.
// docs/performance-kernels.md has what each piece costs.
using simd::kLanes;
using simd::V;
constexpr int kVectorsOfHalf = kHalfRows / kLanes;
constexpr int kTileTokens = 6;

// Sums of a group and the starts of symmetric codes leave the exponent of kStartValue alone.
static_assert(32 * 255 * 127 + 32 * 128 * 127 < 1 << 22);

inline V broadcast_f32(const uint8_t* p) { return simd::set1(load_unaligned<float>(p)); }

// From the first row of a half, of which a vector is one of kVectorsOfHalf parts.
inline int64_t place(int v, int64_t half) { return v / kVectorsOfHalf * half + v % kVectorsOfHalf * kLanes; }

// NV: vectors of rows, one half after the other; NT: tokens, whose first byte is x[t][at].
template <int Columns, bool BiasedTokens, int NV, int NT>
[[gnu::always_inline]] inline void add_columns(const uint8_t* codes, int64_t half_codes,
                                               const uint8_t* const* x, int64_t at, ByteSums (&dot)[NV][NT]) {
#pragma GCC unroll 8
    for (int j = 0; j < Columns / 4; ++j) {
        ByteSums w[NV];
#pragma GCC unroll 2
        for (int v = 0; v < NV; ++v) w[v] = load_bytes(codes + 4 * place(v, half_codes / 4) + j * 64);
#pragma GCC unroll 8
        for (int t = 0; t < NT; ++t) {
            const ByteSums four = broadcast_dword(x[t] + at + 4 * j);
#pragma GCC unroll 2
            for (int v = 0; v < NV; ++v)
                dot[v][t] = BiasedTokens ? add_byte_dots(dot[v][t], four, w[v])
                                         : add_byte_dots(dot[v][t], w[v], four);
        }
    }
}

// The sums over groups.
template <int NV, int NT>
[[gnu::always_inline]] inline void load_sums(const float* out, bool add, V (&total)[NV][NT]) {
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t)
#pragma GCC unroll 2
        for (int v = 0; v < NV; ++v)
            total[v][t] = add ? simd::load(out + t * kBlockRows + v * kLanes) : simd::zero();
}

template <int NV, int NT>
[[gnu::always_inline]] inline void store_sums(const V (&total)[NV][NT], float* out) {
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t)
#pragma GCC unroll 2
        for (int v = 0; v < NV; ++v) simd::store(out + t * kBlockRows + v * kLanes, total[v][t]);
}

// total += (sum of a group) * d * (scale of the token)
template <int NV, int NT>
[[gnu::always_inline]] inline void add_scaled(const ByteSums (&dot)[NV][NT], int v, V d,
                                              const uint8_t* const* x, int64_t at, V (&total)[NV][NT]) {
    const V minus_start = simd::mul(d, simd::set1(-kStartValue));
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t)
        total[v][t] = simd::fma(simd::fma(float_bits(dot[v][t]), d, minus_start), broadcast_f32(x[t] + at),
                                total[v][t]);
}

// Offsets of groups of 16 in panels of kernels/matmul/folded_scales.hpp: of 256 columns at a time, 16 dwords
// of two integers for every two groups and then the numbers that they are multiplied by.
template <int NV, int NT>
[[gnu::always_inline]] inline void add_offsets(const Int8Panel& p, const uint8_t* const* x,
                                               const PanelOffsets& at, V (&total)[NV][NT]) {
    for (int64_t b = 0; b < p.n / 256; ++b) {
        const float* m = p.m + b * 16 * kHalfRows;
        ByteSums sum[NV][NT];
#pragma GCC unroll 8
        for (int t = 0; t < NT; ++t)
#pragma GCC unroll 2
            for (int v = 0; v < NV; ++v) sum[v][t] = all_dwords(kStartBits);
#pragma GCC unroll 8
        for (int pair = 0; pair < 8; ++pair) {
            ByteSums w[NV];
#pragma GCC unroll 2
            for (int v = 0; v < NV; ++v)
                w[v] = bits_of(simd::load(m + place(v, p.half_scales(16)) + pair * kHalfRows));
#pragma GCC unroll 8
            for (int t = 0; t < NT; ++t) {
                const ByteSums two = broadcast_dword(x[t] + at.weighted + 32 * b + 4 * pair);
#pragma GCC unroll 2
                for (int v = 0; v < NV; ++v) sum[v][t] = add_words(sum[v][t], w[v], two);
            }
        }
#pragma GCC unroll 2
        for (int v = 0; v < NV; ++v)
            add_scaled(sum, v, simd::load(m + place(v, p.half_scales(16)) + 8 * kHalfRows), x,
                       at.weighted_unit + 4 * b, total);
    }
}

template <int G, int Offsets, int NV, int NT>
void tile(const Int8Panel& p, const uint8_t* const* x, const PanelOffsets& at, float* out, bool add) {
    V total[NV][NT];
    load_sums(out, add, total);
    constexpr bool kOffsets = Offsets == G;
    const int64_t half_scales = p.half_scales(G);
    const uint8_t* codes = p.codes;
    const float* d = p.d;
    const float* m = p.m;
    if (Offsets == 16 && G == 32) add_offsets(p, x, at, total);
    for (int64_t g = 0; g < p.n / G; ++g) {
        ByteSums dot[NV][NT];
#pragma GCC unroll 8
        for (int t = 0; t < NT; ++t)
#pragma GCC unroll 2
            for (int v = 0; v < NV; ++v)
                dot[v][t] = Offsets == 0 ? broadcast_dword(x[t] + at.start + 4 * g) : all_dwords(kStartBits);
        add_columns<G, false>(codes, p.half_codes(), x, at.q + g * G, dot);
        codes += G * kHalfRows;
        V dv[NV], mv[NV], minus_start[NV];
#pragma GCC unroll 2
        for (int v = 0; v < NV; ++v) {
            dv[v] = simd::load(d + place(v, half_scales));
            minus_start[v] = simd::mul(dv[v], simd::set1(-kStartValue));
            if (kOffsets) mv[v] = simd::load(m + place(v, half_scales));
        }
        d += kHalfRows;
        m += kHalfRows;
#pragma GCC unroll 8
        for (int t = 0; t < NT; ++t) {
            const V scale = broadcast_f32(x[t] + at.scale + g * G / 32 * 4);
            const V sum = kOffsets ? broadcast_f32(x[t] + at.sum + 4 * g) : simd::zero();
#pragma GCC unroll 2
            for (int v = 0; v < NV; ++v) {
                V value = simd::fma(float_bits(dot[v][t]), dv[v], minus_start[v]);
                if (kOffsets) value = simd::fma(mv[v], sum, value);
                total[v][t] = simd::fma(value, scale, total[v][t]);
            }
        }
    }
    store_sums(total, out);
}

// Panels of kernels/matmul/chained_groups.hpp.
template <int NV, int NT>
void chained_tile(const Int8Panel& p, const uint8_t* const* x, const PanelOffsets& at, float* out, bool add) {
    V total[NV][NT];
    load_sums(out, add, total);
    const int64_t half_scales = p.half_scales(16);
    const uint8_t* codes = p.codes;
    const float* d = p.d;
    const float* m = p.m;
    for (int64_t pair = 0; pair < p.n / 32; ++pair) {
        const int64_t token = at.q + 32 * pair, scale = at.scale + 4 * pair;
        ByteSums dot[NV][NT];
#pragma GCC unroll 2
        for (int v = 0; v < NV; ++v)
#pragma GCC unroll 8
            for (int t = 0; t < NT; ++t) dot[v][t] = bits_of(simd::load(m + place(v, half_scales)));
        add_columns<16, true>(codes, p.half_codes(), x, token, dot);
#pragma GCC unroll 2
        for (int v = 0; v < NV; ++v) {
            const V ratio = simd::load(d + place(v, half_scales));
            const V added = simd::load(m + place(v, half_scales) + kHalfRows);
            if (p.apart[v / kVectorsOfHalf] >> pair & 1) {
                // Else GCC loads the scales before the branch and broadcasts them by shuffles behind it.
                int64_t again = scale;
                asm("" : "+r"(again));
                add_scaled(dot, v, ratio, x, again, total);
#pragma GCC unroll 8
                for (int t = 0; t < NT; ++t) dot[v][t] = bits_of(added);
            } else {
#pragma GCC unroll 8
                for (int t = 0; t < NT; ++t)
                    dot[v][t] = bits_of(simd::fma(float_bits(dot[v][t]), ratio, added));
            }
        }
        add_columns<16, true>(codes + 16 * kHalfRows, p.half_codes(), x, token + 16, dot);
#pragma GCC unroll 2
        for (int v = 0; v < NV; ++v)
            add_scaled(dot, v, simd::load(d + place(v, half_scales) + kHalfRows), x, scale, total);
        codes += 32 * kHalfRows;
        d += 2 * kHalfRows;
        m += 2 * kHalfRows;
    }
    store_sums(total, out);
}

#else

constexpr int kTileTokens = 1, kVectorsOfHalf = 1;

template <int G, int Offsets, int NH, int NT>
void tile(const Int8Panel& p, const uint8_t* const* x, const PanelOffsets& at, float* out, bool add) {
    for (int h = 0; h < NH; ++h) {
        const uint8_t* codes = p.codes + h * p.half_codes();
        const float* d = p.d + h * p.half_scales(G);
        const float* m = p.m + h * p.half_scales(G);
        float total[kHalfRows];
        for (int i = 0; i < kHalfRows; ++i) total[i] = add ? out[h * kHalfRows + i] : 0.0f;
        for (int64_t g = 0; g < p.n / G; ++g) {
            int32_t dot[kHalfRows];
            for (int i = 0; i < kHalfRows; ++i)
                dot[i] = Offsets == 0 ? load_unaligned<int32_t>(x[0] + at.start + 4 * g) - kStartBits : 0;
            for (int j = 0; j < G / 4; ++j) {
                const auto* v = reinterpret_cast<const int8_t*>(x[0] + at.q + g * G + 4 * j);
                const uint8_t* w = codes + g * G * kHalfRows + j * 64;
                for (int i = 0; i < kHalfRows; ++i)
                    dot[i] +=
                        w[4 * i] * v[0] + w[4 * i + 1] * v[1] + w[4 * i + 2] * v[2] + w[4 * i + 3] * v[3];
            }
            const float scale = load_unaligned<float>(x[0] + at.scale + g * G / 32 * 4);
            const float sum = load_unaligned<float>(x[0] + at.sum + 4 * g);
            for (int i = 0; i < kHalfRows; ++i) {
                float value = static_cast<float>(dot[i]) * d[g * kHalfRows + i];
                if (Offsets) value += m[g * kHalfRows + i] * sum;
                total[i] += value * scale;
            }
        }
        std::memcpy(out + h * kHalfRows, total, sizeof(total));
    }
}

#endif

// Panels of groups of kGroup columns; kOffsets: the columns of an offset, 0 for symmetric codes.
template <int G, int Offsets>
struct Groups {
    static constexpr int kGroup = G, kOffsets = Offsets;
    template <int NV, int NT>
    static constexpr auto* kTile = tile<G, Offsets, NV, NT>;
    static PanelOffsets offsets(const ActQ8Layout& layout, int64_t k0) {
        return {layout, k0, G, Offsets ? Offsets : G};
    }
};

template <class Kind, int NV, int NT>
void tile_of(int n, const Int8Panel& p, const uint8_t* const* x, const PanelOffsets& at, float* out,
             bool add) {
    if (n == NT) return Kind::template kTile<NV, NT>(p, x, at, out, add);
    if constexpr (NT > 1) tile_of<Kind, NV, NT - 1>(n, p, x, at, out, add);
}

// The panel from half h on.
template <class Kind>
Int8Panel from_half(Int8Panel p, int h) {
    p.codes += h * p.half_codes();
    p.d += h * p.half_scales(Kind::kGroup);
    if (Kind::kOffsets) p.m += h * p.half_scales(Kind::kOffsets);
    p.apart[0] = p.apart[h];
    return p;
}

template <class Kind>
void gemm(const Int8Panel& p, int n_halves, const uint8_t* const* x, int n_tokens, const ActQ8Layout& layout,
          int64_t k0, float* out, bool add) {
    const PanelOffsets at = Kind::offsets(layout, k0);
    // Tiles of nearly equal size, so that no single token is left over.
    const int n_tiles = (n_tokens + kTileTokens - 1) / kTileTokens;
    for (int i = 0; i < n_tiles; ++i) {
        const int begin = n_tokens * i / n_tiles, n = n_tokens * (i + 1) / n_tiles - begin;
        float* y = out + begin * kBlockRows;
        if (n_halves == 2 && kVectorsOfHalf == 1) {
            tile_of<Kind, 2, kTileTokens>(n, p, x + begin, at, y, add);
            continue;
        }
        for (int h = 0; h < n_halves; ++h)
            tile_of<Kind, kVectorsOfHalf, kTileTokens>(n, from_half<Kind>(p, h), x + begin, at,
                                                       y + h * kHalfRows, add);
    }
}

}  // namespace

Int8GemmFn int8_gemm(int group, int offset_group, int, bool) {
    if (group == 16) return offset_group ? gemm<Groups<16, 16>> : gemm<Groups<16, 0>>;
    return offset_group == 16  ? gemm<Groups<32, 16>>
           : offset_group != 0 ? gemm<Groups<32, 32>>
                               : gemm<Groups<32, 0>>;
}

#if defined(IKPY_BYTE_DOTS)
struct ChainedGroups {
    static constexpr int kGroup = 16, kOffsets = 16;
    template <int NV, int NT>
    static constexpr auto* kTile = chained_tile<NV, NT>;
    static PanelOffsets offsets(const ActQ8Layout& layout, int64_t) {
        PanelOffsets at(layout, 0, 16, 16);
        at.q = 0;
        at.scale = kPanelColumns;
        return at;
    }
};

Int8GemmFn chained_gemm() { return gemm<ChainedGroups>; }
#endif

}  // namespace ikpy

#endif
