// Few tokens times trellis types on CPUs with byte permutations that multiply dwords in one operation (Zen 4
// and 5): values are generated, and all else is kept short.
//
// A lane holds 16 elements, whose seeds are permuted from bytes. One token meets the four bytes of a state as
// in kernels/gemv/gemv_trellis.hpp: 48 instructions per 256 weights. More tokens, and values whose signs are
// stored apart, meet values: a lane collects the byte sums of four states, each shifted up for the next, 60
// instructions and 4 per token.
#pragma once
#include "kernels/gemv/gemv_trellis_table.hpp"

#if defined(__AVX512VNNI__)

namespace ikpy {
namespace trellis {

// A constant that GCC keeps in a register instead of making it again in every turn.
IKPY_VBMI_INLINE __m512i kept(__m512i v) {
    asm("" : "+v"(v));
    return v;
}

// Activations of 256 elements: dword lane l of vector m holds elements 16 * l + 4 * m .. + 3.
struct FoursChunk {
    alignas(64) int32_t start[16];  // -126 times the sum of the lane's elements
    alignas(64) float scale[16];
    alignas(64) int8_t x[4][64];
};

inline void spread(const uint8_t* x, const ActQ8Layout& at, int64_t c, FoursChunk* out) {
    const __m512i lanes = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512i sums = minus_sums16(x, at, c);
    const __m512i scale = _mm512_castsi256_si512(load_256(x + at.scale + 32 * c));
    _mm512_store_si512(out->start, _mm512_sub_epi32(sums, _mm512_srai_epi32(sums, 6)));
    _mm512_store_si512(out->scale, _mm512_permutexvar_epi32(lanes, scale));
    for (int m = 0; m < 4; ++m) _mm512_store_si512(out->x[m], fours(x + kChunk * c + 4 * m));
}

// A type: seeds[j] of lanes, each of 16 / kSeeds elements, and the scales of the lanes.

struct StatesIQ1_KT {
    using Unpack = UnpackIQ1_KT;
    static constexpr int kSeeds = 2;
    static constexpr bool kSigned = false;
    __m512i seeds[2];
    __m512 scale;

    IKPY_VBMI_INLINE explicit StatesIQ1_KT(const uint8_t* p) {
        static constexpr Bytes64 kFirst([](int i) { return 32 * (i & 1) + 2 * (i / 4); });
        static constexpr Bytes64 kScales([](int i) { return i / 8; });
        const __m512i first = _mm512_set1_epi64(load_unaligned<int64_t>(p)), bytes = seed_bytes(p, first);
        for (int j = 0; j < 2; ++j) {
            const __m512i order = _mm512_add_epi8(kFirst.load(), _mm512_set1_epi8(static_cast<char>(j)));
            seeds[j] = _mm512_add_epi32(_mm512_maskz_permutexvar_epi8(0x3333333333333333, order, bytes),
                                        _mm512_set1_epi32(kOffset));
        }
        scale = kLevelScales.at(_mm512_permutexvar_epi8(kScales.load(), first));
    }
};

// 16-bit seeds of both groups of the lanes.
IKPY_VBMI_INLINE void word_seeds(const uint8_t* p, __m512i* seeds) {
    const __m512i words = _mm512_loadu_si512(p), offset = _mm512_set1_epi32(kOffset);
    seeds[0] = _mm512_add_epi32(_mm512_and_si512(words, _mm512_set1_epi32(0xFFFF)), offset);
    seeds[1] = _mm512_add_epi32(_mm512_srli_epi32(words, 16), offset);
}

struct StatesIQ2_KT {
    using Unpack = UnpackIQ2_KT;
    static constexpr int kSeeds = 2;
    static constexpr bool kSigned = false;
    __m512i seeds[2];
    __m512 scale;

    IKPY_VBMI_INLINE explicit StatesIQ2_KT(const uint8_t* p) : scale(kLevelScales.at(doubled_nibbles(p))) {
        word_seeds(p + 4, seeds);
    }
};

struct StatesIQ3_KT {
    using Unpack = UnpackIQ3_KT;
    static constexpr int kSeeds = 2;
    static constexpr bool kSigned = true;
    __m512i seeds[2], signs;
    __m512 scale;

    IKPY_VBMI_INLINE explicit StatesIQ3_KT(const uint8_t* p)
        : signs(_mm512_castsi256_si512(load_256(p + 68))), scale(kNibbleScales.at(doubled_nibbles(p))) {
        word_seeds(p + 4, seeds);
    }
    // Of vector m of the elements; bit s of a byte belongs to sub-block s, two lanes.
    IKPY_VBMI_INLINE __mmask64 negative(int m) const {
        static constexpr Bytes64 kOwn([](int i) { return 1 << i / 8; });
        const __m512i even = _mm512_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4);
        const __m512i own = _mm512_permutexvar_epi32(_mm512_add_epi32(even, _mm512_set1_epi32(m)), signs);
        return _mm512_test_epi8_mask(own, kOwn.load());
    }
};

struct StatesIQ4_KT {
    using Unpack = UnpackIQ4_KT;
    static constexpr int kSeeds = 4;
    static constexpr bool kSigned = false;
    __m512i seeds[4];
    __m512 scale;

    IKPY_VBMI_INLINE explicit StatesIQ4_KT(const uint8_t* p) {
        // A word has three top bits each of eight groups from bit 8 on, which come to bits 4 .. 6, and in
        // bit 0 which offset is theirs.
        static constexpr Bytes64 kTop([](int i) { return 4 + 3 * (i & 7); });
        const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
        const __m512i nibbles = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4);
        const __m512i words = _mm512_permutexvar_epi32(twice, _mm512_castsi256_si512(load_256(p)));
        const __m512i top = _mm512_multishift_epi64_epi8(kTop.load(), words);
        const __m512i middle = _mm512_srlv_epi32(_mm512_broadcast_i64x4(load_256(p + 96)), nibbles);
        const __m512i high = _mm512_and_si512(
            _mm512_ternarylogic_epi32(middle, top, _mm512_set1_epi8(15), 0xE4), _mm512_set1_epi8(127));
        const __m512i low = _mm512_loadu_si512(p + 32);
        const __m512i offset =
            _mm512_mask_blend_epi32(_mm512_test_epi32_mask(words, _mm512_set1_epi32(1)),
                                    _mm512_set1_epi32(kOffset), _mm512_set1_epi32(kOffsetIQ4));
        for (int j = 0; j < 4; ++j) {
            static constexpr Bytes64 kFirst([](int i) { return 64 * (i & 1) + 4 * (i / 4); });
            const __m512i order = _mm512_add_epi8(kFirst.load(), _mm512_set1_epi8(static_cast<char>(j)));
            seeds[j] = _mm512_add_epi32(_mm512_maskz_permutex2var_epi8(0x3333333333333333, low, order, high),
                                        offset);
        }
        const __m512i levels = _mm512_and_si512(_mm512_srli_epi32(words, 1), _mm512_set1_epi32(127));
        scale = _mm512_cvtepi32_ps(_mm512_sub_epi32(levels, _mm512_set1_epi32(64)));
    }
};

template <int N>
struct Multipliers {
    __m512i powers[N], six_bits;
    IKPY_VBMI_INLINE Multipliers() : six_bits(kept(_mm512_set1_epi32(0x3F3F3F3F))) {
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) powers[i] = kept(_mm512_set1_epi32(static_cast<int>(kPowers8.of[i])));
    }
    IKPY_VBMI_INLINE __m512i state(__m512i seeds, int i) const {
        return _mm512_and_si512(_mm512_mullo_epi32(seeds, powers[i]), six_bits);
    }
};

// Rows of a type T, whose seeds are found one block ahead: what waits for them fills the schedulers of Zen 5
// (IQ1_KT 42.9 -> 53.1e9 weights/s of one core, IQ4_KT 36.5 -> 47.1).
template <class T, class Multiply>
IKPY_VBMI_INLINE void for_blocks(const uint8_t* p, int64_t n_chunks, Multiply multiply) {
    T next(p);
    for (int64_t c = 0; c < n_chunks; ++c) {
        prefetch_weights<T::Unpack::kBlockBytes>(p);
        const T own = next;
        if (c + 1 < n_chunks) p += T::Unpack::kBlockBytes;
        next = T(p);
        multiply(own, c);
    }
}

// The states of a token.
template <class T>
struct StateProducts {
    using Unpack = typename T::Unpack;
    using Chunk = SpreadChunk;

    template <int NT>
    IKPY_VBMI_INLINE static void row(const uint8_t* p, int64_t n_chunks, const Chunk* const* x,
                                     __m512* total) {
        static_assert(NT == 1);
        constexpr int kValues = 16 / T::kSeeds;
        const Multipliers<kValues> by;
        total[0] = _mm512_setzero_ps();
        for_blocks<T>(p, n_chunks, [&](const T& w, int64_t c) IKPY_VBMI_LAMBDA {
            const Chunk& own = x[0][c];
            __m512i sums[2] = {_mm512_loadu_si512(own.start), _mm512_setzero_si512()};
#pragma GCC unroll 16
            for (int v = 0; v < 16; ++v)
                sums[v & 1] = _mm512_dpbusd_epi32(sums[v & 1], by.state(w.seeds[v / kValues], v % kValues),
                                                  _mm512_loadu_si512(own.x[v]));
            total[0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(sums[0], sums[1])),
                                       _mm512_mul_ps(w.scale, _mm512_loadu_ps(own.scale)), total[0]);
        });
    }
};

// The values of up to 12 tokens.
template <class T>
struct ValueProducts {
    using Unpack = typename T::Unpack;
    using Chunk = FoursChunk;

    template <int NT>
    IKPY_VBMI_INLINE static void row(const uint8_t* p, int64_t n_chunks, const Chunk* const* x,
                                     __m512* total) {
        constexpr int kValues = 16 / T::kSeeds;
        const Multipliers<kValues> by;
        const __m512i ones = kept(_mm512_set1_epi8(1)), zero = _mm512_setzero_si512();
        for (int t = 0; t < NT; ++t) total[t] = _mm512_setzero_ps();
        for_blocks<T>(p, n_chunks, [&](const T& w, int64_t c) IKPY_VBMI_LAMBDA {
            ValueSums<T, NT, Chunk> sums(x, c);
#pragma GCC unroll 4
            for (int m = 0; m < 4; ++m) {
                const int first = 4 * m % kValues;
                const __m512i seeds = w.seeds[4 * m / kValues];
                __m512i codes = _mm512_dpbusd_epi32(zero, by.state(seeds, first + 3), ones);
#pragma GCC unroll 3
                for (int i = 2; i >= 0; --i)
                    codes =
                        _mm512_dpbusd_epi32(_mm512_slli_epi32(codes, 8), by.state(seeds, first + i), ones);
                sums.add(w, m, codes, 126);
            }
            sums.add_to(total, w.scale);
        });
    }
};

}  // namespace trellis
}  // namespace ikpy

#endif
