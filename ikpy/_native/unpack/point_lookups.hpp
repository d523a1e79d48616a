// How points are found in their tables: two ways, as a permutation of bytes or words over two registers takes
// three micro-operations on Intel's CPUs, two of them of the shuffle unit, and one on AMD's, which on the
// other hand gather slowly. Cycles per 256 weights of Zen 4 with OneRegister and TwoRegisters: IQ2_XXS 22 and
// 18, IQ2_XS 53 and 24, IQ2_S 60 and 39 (words then being looked up as such), IQ3_XXS 27 and 21, IQ3_S 33
// and 25.
#pragma once
#include "kernels/simd/byte_permutes.hpp"
#include "unpack/point_tables.hpp"

#if defined(__AVX512VNNI__)

namespace ikpy::points {

// table[index] of bytes with 256 or 512 entries, upper and ninth: bits 7 and 8 of the index; words of points,
// whose indices are the low bits of words, best of kTogether vectors at a time.
struct OneRegister {
    static constexpr int kTogether = 1;
    static IKPY_VBMI_INLINE __m512i bytes256(const uint8_t* table, __m512i index, __mmask64 upper) {
        const __mmask64 odd = _mm512_movepi8_mask(_mm512_add_epi8(index, index));
        return _mm512_mask_blend_epi8(upper, bytes128(table, index, odd), bytes128(table + 128, index, odd));
    }
    static IKPY_VBMI_INLINE __m512i bytes512(const uint8_t* table, __m512i index, __mmask64 upper,
                                             __mmask64 ninth) {
        return _mm512_mask_blend_epi8(ninth, bytes256(table, index, upper),
                                      bytes256(table + 256, index, upper));
    }
    template <int N, int T>
    static IKPY_VBMI_INLINE void words(const WordCodes<N>& table, const __m512i (&index)[T], __m512i* out) {
        const __m512i mask = _mm512_set1_epi32(N - 1);
        for (int i = 0; i < T; ++i) {
            const __m512i even = gathered(table.twice, _mm512_and_si512(index[i], mask));
            const __m512i odd =
                gathered(table.twice, _mm512_and_si512(_mm512_srli_epi32(index[i], 16), mask));
            out[i] = _mm512_mask_blend_epi16(0xAAAAAAAA, even, odd);
        }
    }
    // odd: bit 6 of the index.
    static IKPY_VBMI_INLINE __m512i bytes128(const uint8_t* table, __m512i index, __mmask64 odd) {
        const __m512i low = _mm512_permutexvar_epi8(index, _mm512_load_si512(table));
        return _mm512_mask_permutexvar_epi8(low, odd, index, _mm512_load_si512(table + 64));
    }

  private:
    static IKPY_VBMI_INLINE __m512i gathered(const uint32_t* table, __m512i index) {
        // With a mask that the compiler knows to be full it leaves the target as it is, and every gather
        // waits for the last use of its register.
        uint32_t all = 0xFFFF;
        asm("" : "+r"(all));
        return _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), static_cast<__mmask16>(all), index,
                                           reinterpret_cast<const int*>(table), 4);
    }
};

// Words of points by permutations of bytes, which F looks up.
template <class F>
struct PermutedWords {
    static constexpr int kTogether = 4;
    // table[index] with N entries; bits: those of the index from bit 7 on.
    template <int N>
    static IKPY_VBMI_INLINE __m512i bytes(const uint8_t* table, __m512i index, const __mmask64* bits) {
        if constexpr (N == 128) {
            return F::bytes128(table, index);
        } else {
            constexpr int kTop = N == 256 ? 0 : N == 512 ? 1 : N == 1024 ? 2 : 3;
            return _mm512_mask_blend_epi8(bits[kTop], bytes<N / 2>(table, index, bits),
                                          bytes<N / 2>(table + N / 2, index, bits));
        }
    }
    static IKPY_VBMI_INLINE __m512i bytes256(const uint8_t* table, __m512i index, __mmask64 upper) {
        return bytes<256>(table, index, &upper);
    }
    static IKPY_VBMI_INLINE __m512i bytes512(const uint8_t* table, __m512i index, __mmask64 upper,
                                             __mmask64 ninth) {
        const __mmask64 bits[2] = {upper, ninth};
        return bytes<512>(table, index, bits);
    }
    // Three permutations and a blend in place of 16 and 15: IQ1_S 50 -> 62, IQ1_M 44 -> 55e9 weights/s of
    // Zen 5. Values of bytes `low` of 11-bit indices whose upper bits are bits 4 to 6 of `high`, the others
    // of which mean nothing.
    static IKPY_VBMI_INLINE __m512i of_runs(const Runs<2048>& values, __m512i low, __m512i high) {
        const __m512i run =
            _mm512_ternarylogic_epi32(_mm512_srli_epi16(low, 4), high, _mm512_set1_epi8(15), 0xE4);
        return _mm512_mask_blend_epi8(_mm512_cmpge_epu8_mask(low, F::bytes128(values.from, run)),
                                      F::bytes128(values.before, run), F::bytes128(values.after, run));
    }
    // Of two vectors both bytes of all words are looked up together, 128 entries per permutation. As words,
    // 64 entries each, 256 weights took 1.2 (IQ2_XS) and 1.45 times (IQ2_S) as long on Zen 5.
    template <int N, int T>
    static IKPY_VBMI_INLINE void words(const WordCodes<N>& table, const __m512i (&index)[T], __m512i* out) {
#pragma GCC unroll 2
        for (int i = 0; i < T; i += 2)
            two_words(table, index[i], index[i + (T > 1)], out + i, out + i + (T > 1));
    }

  private:
    template <int N>
    static IKPY_VBMI_INLINE void two_words(const WordCodes<N>& table, __m512i a, __m512i b, __m512i* to_a,
                                           __m512i* to_b) {
        // Words of a in the lower halves of 128 bits, those of b in the upper ones.
        static constexpr Bytes64 kLow([](int i) { return 64 * (i / 8 & 1) + 16 * (i / 16) + 2 * (i & 7); });
        static constexpr Bytes64 kHigh([](int i) { return kLow.at[i] + 1; });
        const __m512i low = _mm512_permutex2var_epi8(a, kLow.load(), b);
        const __m512i high = _mm512_permutex2var_epi8(a, kHigh.load(), b);
        const __mmask64 bits[4] = {_mm512_movepi8_mask(low), _mm512_test_epi8_mask(high, _mm512_set1_epi8(1)),
                                   _mm512_test_epi8_mask(high, _mm512_set1_epi8(2)),
                                   _mm512_test_epi8_mask(high, _mm512_set1_epi8(4))};
        const __m512i first = bytes<N>(table.halves.first, low, bits);
        __m512i second;
        if constexpr (N == 2048)
            second = of_runs(iq1s_second, low, _mm512_slli_epi16(high, 4));
        else
            second = bytes<N>(table.halves.second, low, bits);
        *to_b = _mm512_unpackhi_epi8(first, second);
        *to_a = _mm512_unpacklo_epi8(first, second);
    }
};

struct TwoRegisters : PermutedWords<TwoRegisters> {
    static IKPY_VBMI_INLINE __m512i bytes128(const uint8_t* table, __m512i index) {
        return _mm512_permutex2var_epi8(_mm512_load_si512(table), index, _mm512_load_si512(table + 64));
    }
};

// For CPUs of Intel whose gathers are slow.
struct WithoutGathers : PermutedWords<WithoutGathers> {
    static IKPY_VBMI_INLINE __m512i bytes128(const uint8_t* table, __m512i index) {
        return OneRegister::bytes128(table, index, _mm512_movepi8_mask(_mm512_add_epi8(index, index)));
    }
};

}  // namespace ikpy::points

#endif
