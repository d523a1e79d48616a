// Few tokens times IQ1_KT and IQ3_KT on AVX-512 with byte permutations: the eight values of a seed come from
// a table that the generator fills at the first use, 64 KiB for the 13 bits of IQ1_KT and 512 KiB, a part of
// the second-level cache, for 16 bits.
//
// Generated values take 64 vector instructions per 256 weights before anything else
// (kernels/gemv/gemv_trellis.hpp), 32 cycles if two start per cycle. 32 lookups take 23 cycles of the load
// units from 64 KiB, 42 from 512 KiB, and the vector units have time for the rest: about 25 instructions of
// IQ1_KT and 35 of IQ3_KT beside those of the gathers. Measured on one core: IQ1_KT 16 -> 29e9 weights/s (30
// cycles), IQ3_KT 13 -> 18e9 (50 cycles; generating every second value gained no more). IQ2_KT needs a
// mixture (kernels/gemv/gemv_trellis_mixed.hpp); IQ4_KT has twice as many seeds and stays with generated
// values.
#pragma once
#include <memory>

#include "kernels/gemv/gemv_points.hpp"
#include "kernels/gemv/gemv_trellis.hpp"
#include "kernels/simd/byte_permutes.hpp"
#include "kernels/simd/lane_sums.hpp"

#if defined(__AVX512VNNI__)

namespace ikpy {
namespace trellis {

constexpr int kSeeds16 = 1 << 16;

struct ValueTable {
    alignas(64) uint8_t of[kSeeds16][8];  // values + 128 of seed i + kOffset
};

inline const ValueTable& value_table() {
    static const std::unique_ptr<const ValueTable> table = [] {
        auto made = std::make_unique<ValueTable>();
        constexpr int kGroups = 32;
        for (uint32_t s = 0; s < kSeeds16; s += kGroups) {
            uint32_t seeds[kGroups];
            for (uint32_t i = 0; i < kGroups; ++i) seeds[i] = kOffset + s + i;
            codes_of<8>(seeds, kGroups, made->of[s]);
        }
        return made;
    }();
    return *table;
}

// Activations of 256 elements in the order of the lookups: quadword q of vector j is 8-group j of sub-block
// q, so that two lanes hold all products of a sub-block.
struct QuadChunk {
    alignas(64) int32_t start[16];  // -128 * sum of the sub-block in every other lane
    alignas(64) float scale[16];
    alignas(64) int8_t x[4][64];
};

inline void spread(const uint8_t* x, const ActQ8Layout& at, int64_t c, QuadChunk* out) {
    const __m512i lanes = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m256i quads = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    const __m512i sums = _mm512_castsi256_si512(minus_sums32(x, at, c));
    const __m512i scale = _mm512_castsi256_si512(load_256(x + at.scale + 32 * c));
    _mm512_store_si512(out->start, _mm512_maskz_permutexvar_epi32(0x5555, lanes, sums));
    _mm512_store_si512(out->scale, _mm512_permutexvar_epi32(lanes, scale));
    for (int j = 0; j < 4; ++j)
        _mm512_store_si512(out->x[j], _mm512_i32gather_epi64(quads, x + kChunk * c + 8 * j, 8));
}

// Eight bytes each of eight table rows. Like OneRegister of unpack/point_lookups.hpp: with a mask
// that is known to be full every gather would wait for the last use of its target.
IKPY_VBMI_INLINE __mmask8 all_lanes() {
    uint32_t all = 0xFF;
    asm("" : "+r"(all));
    return static_cast<__mmask8>(all);
}
IKPY_VBMI_INLINE __m512i lookup(const ValueTable& table, __m256i seeds) {
    return _mm512_mask_i32gather_epi64(_mm512_setzero_si512(), all_lanes(), seeds, table.of, 8);
}
IKPY_VBMI_INLINE __m512i lookup(const ValueTable& table, __m512i seeds) {
    return _mm512_mask_i64gather_epi64(_mm512_setzero_si512(), all_lanes(), seeds, table.of, 8);
}

struct ScaleTable {
    alignas(64) float of[16];
    template <class F>
    constexpr explicit ScaleTable(F f) : of() {
        for (int i = 0; i < 16; ++i) of[i] = static_cast<float>(f(i));
    }
    // By the low four bits of the lanes.
    IKPY_VBMI_INLINE __m512 at(__m512i lanes) const {
        return _mm512_permutexvar_ps(lanes, _mm512_load_ps(of));
    }
};
inline constexpr ScaleTable kLevelScales([](int i) { return kIq4Codes[i] - 128; });
inline constexpr ScaleTable kNibbleScales([](int i) { return i; });

// Low bytes of the 13-bit seeds of the 32 groups of IQ1_KT, then high ones. first: the first eight bytes of
// the block in all quadwords; the top bit of group t of sub-block s is bit 4 + t of byte s.
IKPY_VBMI_INLINE __m512i seed_bytes(const uint8_t* p, __m512i first) {
    static constexpr Bytes64 kTop([](int i) { return 8 * (i / 4) + i % 4; });  // to bit 4
    const __m256i top =
        _mm256_multishift_epi64_epi8(_mm512_castsi512_si256(kTop.load()), _mm512_castsi512_si256(first));
    const __m256i middle = _mm256_srlv_epi32(_mm256_broadcastsi128_si256(load_128(p + 40)),
                                             _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4));
    const __m256i high = _mm256_and_si256(_mm256_ternarylogic_epi32(middle, top, _mm256_set1_epi8(15), 0xE4),
                                          _mm256_set1_epi8(31));
    return _mm512_inserti64x4(_mm512_castsi256_si512(load_256(p + 8)), high, 1);
}

// A type T: the codes of vector j, their signs if kSigned (magnitudes count then), scales of the lanes.
struct TableIQ1_KT {
    using Unpack = UnpackIQ1_KT;
    static constexpr bool kSigned = false;
    __m512i seeds[2];
    __m512 scale;

    IKPY_VBMI_INLINE explicit TableIQ1_KT(const uint8_t* p) {
        // Low and high bytes of the seeds of groups j and j + 1 of the eight sub-blocks.
        static constexpr Bytes64 kFirst([](int i) { return 32 * (i & 1) + 4 * (i / 4 & 7) + i / 32; });
        static constexpr Bytes64 kLast([](int i) { return 32 * (i & 1) + 4 * (i / 4 & 7) + i / 32 + 2; });
        static constexpr Bytes64 kScales([](int i) { return i / 8; });
        const __m512i first = _mm512_set1_epi64(load_unaligned<int64_t>(p)), bytes = seed_bytes(p, first);
        seeds[0] = _mm512_maskz_permutexvar_epi8(0x3333333333333333, kFirst.load(), bytes);
        seeds[1] = _mm512_maskz_permutexvar_epi8(0x3333333333333333, kLast.load(), bytes);
        scale = kLevelScales.at(_mm512_permutexvar_epi8(kScales.load(), first));
    }
    IKPY_VBMI_INLINE __m512i codes(const ValueTable& table, int j) const {
        const __m512i v = seeds[j >> 1];
        return lookup(table, j & 1 ? _mm512_extracti64x4_epi64(v, 1) : _mm512_castsi512_si256(v));
    }
};

// Nibbles of four bytes as scales: low ones of all bytes, then high ones.
IKPY_VBMI_INLINE __m512i doubled_nibbles(const uint8_t* p) {
    const __m512i counts = _mm512_setr_epi32(0, 0, 8, 8, 16, 16, 24, 24, 4, 4, 12, 12, 20, 20, 28, 28);
    return _mm512_srlv_epi32(_mm512_set1_epi32(load_unaligned<int32_t>(p)), counts);
}

// Group j of the quadwords of 16-bit seeds.
IKPY_VBMI_INLINE __m512i word_of_quads(__m512i quads, int j) {
    const __m512i v = j ? _mm512_srli_epi64(quads, static_cast<unsigned>(16 * j)) : quads;
    return j < 3 ? _mm512_and_si512(v, _mm512_set1_epi64(0xFFFF)) : v;
}

struct TableIQ3_KT {
    using Unpack = UnpackIQ3_KT;
    static constexpr bool kSigned = true;
    const uint8_t* signs;
    __m512i seeds;
    __m512 scale;

    IKPY_VBMI_INLINE explicit TableIQ3_KT(const uint8_t* p)
        : signs(p + 68), seeds(_mm512_loadu_si512(p + 4)), scale(kNibbleScales.at(doubled_nibbles(p))) {}
    IKPY_VBMI_INLINE __m512i codes(const ValueTable& table, int j) const {
        return lookup(table, word_of_quads(seeds, j));
    }
    IKPY_VBMI_INLINE __mmask64 negative(int j) const {
        // Bit s of a byte belongs to sub-block s.
        static constexpr Bytes64 kOwn([](int i) { return 1 << i / 8; });
        return _mm512_test_epi8_mask(_mm512_set1_epi64(load_unaligned<int64_t>(signs + 8 * j)), kOwn.load());
    }
};

// Sums of the products of values with NT tokens, in lanes that share the scales of a chunk. Values of a type
// T are codes above the start of the sums, or magnitudes if kSigned.
template <class T, int NT, class Chunk>
struct ValueSums {
    const Chunk* x[NT];
    __m512i sum[NT];

    IKPY_VBMI_INLINE ValueSums(const Chunk* const* tokens, int64_t c) {
#pragma GCC unroll 16
        for (int t = 0; t < NT; ++t) {
            x[t] = tokens[t] + c;
            sum[t] = T::kSigned ? _mm512_setzero_si512() : _mm512_load_si512(x[t]->start);
        }
    }
    // Of vector m of the activations; zero: of a signed value, as a code.
    IKPY_VBMI_INLINE void add(const T& w, int m, __m512i codes, char zero) {
        __mmask64 negative = 0;
        if constexpr (T::kSigned) {
            codes = _mm512_abs_epi8(_mm512_sub_epi8(codes, _mm512_set1_epi8(zero)));
            negative = w.negative(m);
        }
#pragma GCC unroll 16
        for (int t = 0; t < NT; ++t) {
            __m512i v = _mm512_load_si512(x[t]->x[m]);
            if (T::kSigned) v = _mm512_mask_sub_epi8(v, negative, _mm512_setzero_si512(), v);
            sum[t] = _mm512_dpbusd_epi32(sum[t], codes, v);
        }
    }
    IKPY_VBMI_INLINE void add_to(__m512* total, __m512 scale) const {
#pragma GCC unroll 16
        for (int t = 0; t < NT; ++t)
            total[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[t]),
                                       _mm512_mul_ps(scale, _mm512_load_ps(x[t]->scale)), total[t]);
    }
};

// Products of a row with NT tokens, in the lanes of total[t].
template <class T, int NT>
IKPY_VBMI_INLINE void lookup_row(const uint8_t* p, int64_t n_chunks, const QuadChunk* const* x,
                                 const ValueTable& table, __m512* total) {
    for (int t = 0; t < NT; ++t) total[t] = _mm512_setzero_ps();
    for (int64_t c = 0; c < n_chunks; ++c, p += T::Unpack::kBlockBytes) {
        prefetch_weights<T::Unpack::kBlockBytes>(p);
        const T w(p);
        ValueSums<T, NT, QuadChunk> sums(x, c);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) sums.add(w, j, w.codes(table, j), -128);
        sums.add_to(total, w.scale);
    }
}

template <class L>
struct LookedUp {
    using Unpack = typename L::Unpack;
    using Chunk = QuadChunk;
    template <int NT>
    IKPY_VBMI_INLINE static void row(const uint8_t* p, int64_t n_chunks, const Chunk* const* x,
                                     __m512* total) {
        lookup_row<L, NT>(p, n_chunks, x, value_table(), total);
    }
};

// Products of a block of rows with NT tokens, whose lanes are summed for 16 rows at once.
template <class T, int NT>
IKPY_VBMI void lane_products(const RowBlock& rows, const typename T::Chunk* const* x, float* out) {
    using U = typename T::Unpack;
    for (int h = 0; h < 2; ++h) {
        __m512 totals[NT][kHalfRows] = {};
        float scale[kHalfRows] = {};
        for (int i = 0; i < rows.n[h]; ++i) {
            const uint8_t* row = rows.row(h, i);
            __m512 total[NT];
            T::template row<NT>(row + U::kHeaderBytes, rows.n_in / kChunk, x, total);
            for (int t = 0; t < NT; ++t) totals[t][i] = total[t];
            scale[i] = U::row_scale(row);
        }
        for (int t = 0; t < NT; ++t)
            _mm512_storeu_ps(out + t * kBlockRows + h * kHalfRows,
                             _mm512_mul_ps(sums16(totals[t]), _mm512_loadu_ps(scale)));
    }
}

// T: Unpack, Chunk and row<NT>, the products of a row in the lanes of `total`.
template <class T, int Tokens>
struct InLanes {
    using Unpack = typename T::Unpack;
    using Record = typename T::Chunk;
    static constexpr int kTokens = Tokens;

    static void prepare(const uint8_t* x, const ActQ8Layout& at, int64_t c, Record* out) {
        spread(x, at, c, out);
    }
    template <int NT>
    static void multiply(const RowBlock& rows, const Record* const* x, float* out) {
        lane_products<T, NT>(rows, x, out);
    }
};

}  // namespace trellis
}  // namespace ikpy

#endif
