// Quantized rows as bf16, in natural order: left operands of tile products.
#pragma once
#include "kernels/gemm_ahead_amx.hpp"
#include "kernels/prefetch_chunk.hpp"

namespace ikpy {

#if defined(__AVX512VNNI__) && defined(__linux__)

constexpr int64_t kAheadStep = 2 * kHalfRows * 32;  // values from 32 columns to the next 32

// The codes of 256 columns with scale and offset of every group, to be read piece by piece.
struct StoredCodes {
    alignas(64) uint8_t q[kChunk];
    alignas(64) float d[16], m[16];
};

// Rounded as in panels, halves away from zero: what a token gives must not depend on the number of others.
inline __m512i bf16_of(__m512 low, __m512 high) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    const __m512i first = _mm512_set1_epi32(0x00030001), step = _mm512_set1_epi32(0x00040004);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i odd = _mm512_add_epi32(first, _mm512_mullo_epi32(lanes, step));
    return _mm512_permutex2var_epi16(_mm512_add_epi32(_mm512_castps_si512(low), half), odd,
                                     _mm512_add_epi32(_mm512_castps_si512(high), half));
}

inline __m128i load_codes16(const uint8_t* p) { return _mm_load_si128(reinterpret_cast<const __m128i*>(p)); }

// Any codes: to f32 and times the scale.
template <int Group>
inline void convert_codes(const StoredCodes& c, uint16_t* out) {
#pragma GCC unroll 8
    for (int i = 0; i < kChunk / 32; ++i) {
        __m512 f[2];
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
            const int g = (32 * i + 16 * j) / Group;
            f[j] = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load_codes16(c.q + 32 * i + 16 * j)));
            f[j] = _mm512_fmadd_ps(f[j], _mm512_set1_ps(c.d[g]), _mm512_set1_ps(c.m[g]));
        }
        _mm512_storeu_si512(out + i * kAheadStep, bf16_of(f[0], f[1]));
    }
}

// Types whose codes are numbers of levels, or can be had as such: 16 levels, or 32 per group of 32.
template <class U, class = void>
struct LevelsOf {
    static constexpr bool kPlain = CodeRange<U>::kHigh < 16 || (CodeRange<U>::kHigh < 32 && U::kGroup == 32);
    static constexpr int kCount = !kPlain ? 0 : CodeRange<U>::kHigh < 16 ? 16 : 32;
    static Codes512 whole(const uint8_t* p, int k) { return unpack_full<U>(p, k); }
    static Codes512 tail(const uint8_t* p, int k, int64_t n) { return unpack_tail<U>(p, k, n); }
    static __m512i first16() {
        return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    }
};
template <class U>
struct LevelsOf<U, std::void_t<decltype(U::kLevels)>> {
    static constexpr int kCount = 16;
    static Codes512 whole(const uint8_t* p, int) { return U::level_numbers(p); }
    static Codes512 tail(const uint8_t* p, int, int64_t n) { return unpack_short<U>(U::level_numbers, p, n); }
    static __m512i first16() { return _mm512_cvtepu8_epi32(load_codes16(U::kLevels)); }
};

// Scales every level of a group instead of every weight. Two groups share a table of 16 levels each.
template <class U>
inline void look_up_levels(const StoredCodes& c, uint16_t* out) {
    constexpr int kCount = LevelsOf<U>::kCount, kTables = kCount == 32 || U::kGroup == 16 ? 1 : 2;
    const __m512 low = _mm512_cvtepi32_ps(LevelsOf<U>::first16());
    const __m512 high = kCount == 32 ? _mm512_add_ps(low, _mm512_set1_ps(16)) : low;
#pragma GCC unroll 8
    for (int i = 0; i < kChunk / 32; i += kTables) {
        const int g = 32 * i / U::kGroup, g2 = kCount == 32 ? g : g + 1;
        const __m512i table =
            bf16_of(_mm512_fmadd_ps(low, _mm512_set1_ps(c.d[g]), _mm512_set1_ps(c.m[g])),
                    _mm512_fmadd_ps(high, _mm512_set1_ps(c.d[g2]), _mm512_set1_ps(c.m[g2])));
#pragma GCC unroll 2
        for (int j = i; j < i + kTables; ++j) {
            const __m512i numbers =
                _mm512_cvtepu8_epi16(_mm256_load_si256(reinterpret_cast<const __m256i*>(c.q + 32 * j)));
            _mm512_storeu_si512(out + j * kAheadStep, _mm512_permutexvar_epi16(numbers, table));
        }
    }
}

// Adds 16 to the numbers that mean levels of the second group of a table.
template <class U>
inline __m512i number_levels(__m512i q) {
    if (LevelsOf<U>::kCount != 16) return q;
    const __m512i second = U::kGroup == 16 ? _mm512_setr_epi64(0, 0, -1, -1, 0, 0, -1, -1)
                                           : _mm512_setr_epi64(0, 0, 0, 0, -1, -1, -1, -1);
    return _mm512_or_si512(q, _mm512_and_si512(second, _mm512_set1_epi8(16)));
}

template <class U>
inline void write_bf16(const Codes512& codes, uint16_t* out) {
    StoredCodes c;
    for (int i = 0; i < 4; ++i) _mm512_store_si512(c.q + 64 * i, number_levels<U>(codes.q[i]));
    _mm512_store_ps(c.d, codes.d);
    _mm512_store_ps(
        c.m, U::kZero > 0 ? _mm512_mul_ps(codes.d, _mm512_set1_ps(-static_cast<float>(U::kZero))) : codes.m);
    // From registers the compiler would spread scales by permutations, of which one is done per cycle.
    asm volatile("" : "+m"(c));
    if constexpr (LevelsOf<U>::kCount > 0) {
        look_up_levels<U>(c, out);
    } else {
        convert_codes<U::kGroup>(c, out);
    }
}

template <class U>
[[gnu::noinline]] void write_tail(const uint8_t* p, int k, int64_t n, uint16_t* out) {
    write_bf16<U>(LevelsOf<U>::tail(p, k, n), out);
}

// AheadFn of a type.
template <class U>
void fill_bf16_row(const RowBlock& rows, int h, int i, int64_t k0, uint16_t* tiles) {
    const uint8_t* p =
        rows.group(h, i, RowsOf<U>::kCount) + RowHeader<U>::kBytes + k0 / U::kBlock * U::kBlockBytes;
    const int k = i % RowsOf<U>::kCount;
    prefetch_chunk<U>(p, rows.to_next_block());
    tiles += (h * kHalfRows + i) * 32;
    if (rows.n_in - k0 >= kChunk) {
        write_bf16<U>(LevelsOf<U>::whole(p, k), tiles);
    } else {
        write_tail<U>(p, k, rows.n_in - k0, tiles);
    }
}

#else

template <class U>
void fill_bf16_row(const RowBlock&, int, int, int64_t, uint16_t*) {}

#endif

}  // namespace ikpy
