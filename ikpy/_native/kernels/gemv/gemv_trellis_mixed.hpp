// Few tokens times IQ2_KT on AVX-512 with byte permutations: even 8-groups are generated, odd ones come from
// the table. The vector units and the load units each do what they have time for: 32 instructions for 128
// values and about 30 others, 31 cycles per 256 weights, and 21 cycles of 16 loads from the second-level
// cache. Measured 18 -> 24e9 weights/s of one core (38 cycles).
#pragma once
#include "kernels/gemv/gemv_trellis_table.hpp"

#if defined(__AVX512VNNI__)

namespace ikpy {
namespace trellis {

// Activations of 256 elements. Lane l of the sums covers elements 16 * l .. + 15.
struct MixedChunk {
    alignas(64) int32_t start[16];  // -126 times the sum of the first eight, -128 times that of the others
    alignas(64) float scale[16];
    alignas(64) uint32_t repeated[8][16];  // of the first eight of every lane, four times each
    alignas(64) int8_t odd[2][64];         // 8-groups 1 and 3 of every sub-block
};

inline void spread(const uint8_t* x, const ActQ8Layout& at, int64_t c, MixedChunk* out) {
    const __m512i lanes = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m256i quads = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    const uint8_t* from = x + kChunk * c;
    const __m512i scale = _mm512_castsi256_si512(load_256(x + at.scale + 32 * c));
    _mm512_store_si512(out->scale, _mm512_permutexvar_epi32(lanes, scale));
    __m512i start = minus_sums16(x, at, c);
    for (int m = 0; m < 2; ++m) {
        const __m512i bytes = fours(from + 4 * m);
        start = _mm512_dpbusd_epi32(start, _mm512_set1_epi8(2), bytes);
        repeat(bytes, out->repeated + 4 * m);
        _mm512_store_si512(out->odd[m], _mm512_i32gather_epi64(quads, from + 8 + 16 * m, 8));
    }
    _mm512_store_si512(out->start, start);
}

template <int NT>
IKPY_VBMI_INLINE void mixed_row(const uint8_t* p, int64_t n_chunks, const MixedChunk* const* x,
                                const ValueTable& table, __m512* total) {
    for (int t = 0; t < NT; ++t) total[t] = _mm512_setzero_ps();
    for (int64_t c = 0; c < n_chunks; ++c, p += UnpackIQ2_KT::kBlockBytes) {
        prefetch_weights<UnpackIQ2_KT::kBlockBytes>(p);
        const __m512i words = _mm512_loadu_si512(p + 4);
        const __m512i looked_up[2] = {lookup(table, word_of_quads(words, 1)),
                                      lookup(table, word_of_quads(words, 3))};
        const Lanes seeds = (reinterpret_cast<Lanes>(words) & 0xFFFF) + kOffset;
        Lanes sums[NT][2];
        for (int t = 0; t < NT; ++t) {
            sums[t][0] = load_lanes(x[t][c].start);
            sums[t][1] = Lanes{};
        }
#pragma GCC unroll 4
        for (int v = 0; v < 8; v += 2) {
            const Lanes a = (seeds * kPowers8.of[v]) & 0x3F3F3F3F;
            const Lanes b = (seeds * kPowers8.of[v + 1]) & 0x3F3F3F3F;
            for (int t = 0; t < NT; ++t) add_pair(a, b, x[t][c].repeated[v], sums[t]);
        }
        const __m512 scale = kLevelScales.at(doubled_nibbles(p));
        for (int t = 0; t < NT; ++t) {
            __m512i sum[2];
            for (int i = 0; i < 2; ++i)
                sum[i] = _mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sums[t][i]), looked_up[i],
                                             _mm512_load_si512(x[t][c].odd[i]));
            total[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(sum[0], sum[1])),
                                       _mm512_mul_ps(scale, _mm512_load_ps(x[t][c].scale)), total[t]);
        }
    }
}

struct MixedIQ2_KT {
    using Unpack = UnpackIQ2_KT;
    using Chunk = MixedChunk;
    template <int NT>
    IKPY_VBMI_INLINE static void row(const uint8_t* p, int64_t n_chunks, const Chunk* const* x,
                                     __m512* total) {
        mixed_row<NT>(p, n_chunks, x, value_table(), total);
    }
};

}  // namespace trellis
}  // namespace ikpy

#endif
