// How points are found in their tables: two ways, as a permutation of bytes or words over two registers takes
// three micro-operations on Intel's CPUs, two of them of the shuffle unit, and one on AMD's, which on the
// other hand gather slowly. Cycles per 256 weights of Zen 4 with OneRegister and TwoRegisters: IQ2_XXS 22 and
// 18, IQ2_XS 53 and 24, IQ2_S 60 and 39, IQ3_XXS 27 and 21, IQ3_S 33 and 25.
#pragma once
#include "kernels/byte_permutes.hpp"
#include "unpack/point_tables.hpp"

#if defined(__AVX512VNNI__)

namespace ikpy::points {

// table[index] of bytes with 256 or 512 entries, upper and ninth: bits 7 and 8 of the index; words of points,
// whose indices are the low bits of words.
struct OneRegister {
    static IKPY_VBMI_INLINE __m512i bytes256(const uint8_t* table, __m512i index, __mmask64 upper) {
        const __mmask64 odd = _mm512_movepi8_mask(_mm512_add_epi8(index, index));
        return _mm512_mask_blend_epi8(upper, bytes128(table, index, odd), bytes128(table + 128, index, odd));
    }
    static IKPY_VBMI_INLINE __m512i bytes512(const uint8_t* table, __m512i index, __mmask64 upper,
                                             __mmask64 ninth) {
        return _mm512_mask_blend_epi8(ninth, bytes256(table, index, upper),
                                      bytes256(table + 256, index, upper));
    }
    template <int N>
    static IKPY_VBMI_INLINE __m512i words(const WordCodes<N>& table, __m512i index) {
        const __m512i mask = _mm512_set1_epi32(N - 1);
        const __m512i even = gathered(table.twice, _mm512_and_si512(index, mask));
        const __m512i odd = gathered(table.twice, _mm512_and_si512(_mm512_srli_epi32(index, 16), mask));
        return _mm512_mask_blend_epi16(0xAAAAAAAA, even, odd);
    }

  private:
    static IKPY_VBMI_INLINE __m512i bytes128(const uint8_t* table, __m512i index, __mmask64 odd) {
        const __m512i low = _mm512_permutexvar_epi8(index, _mm512_load_si512(table));
        return _mm512_mask_permutexvar_epi8(low, odd, index, _mm512_load_si512(table + 64));
    }
    static IKPY_VBMI_INLINE __m512i gathered(const uint32_t* table, __m512i index) {
        // With a mask that the compiler knows to be full it leaves the target as it is, and every gather
        // waits for the last use of its register.
        uint32_t all = 0xFFFF;
        asm("" : "+r"(all));
        return _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), static_cast<__mmask16>(all), index,
                                           reinterpret_cast<const int*>(table), 4);
    }
};

struct TwoRegisters {
    static IKPY_VBMI_INLINE __m512i bytes256(const uint8_t* table, __m512i index, __mmask64 upper) {
        return bytes<256>(table, index, &upper);
    }
    static IKPY_VBMI_INLINE __m512i bytes512(const uint8_t* table, __m512i index, __mmask64 upper,
                                             __mmask64 ninth) {
        const __mmask64 bits[2] = {upper, ninth};
        return bytes<512>(table, index, bits);
    }
    // table[index] with N entries; bits: those of the index from bit 7 on.
    template <int N>
    static IKPY_VBMI_INLINE __m512i bytes(const uint8_t* table, __m512i index, const __mmask64* bits) {
        if constexpr (N == 128) {
            return _mm512_permutex2var_epi8(_mm512_load_si512(table), index, _mm512_load_si512(table + 64));
        } else {
            constexpr int kTop = N == 256 ? 0 : N == 512 ? 1 : N == 1024 ? 2 : 3;
            return _mm512_mask_blend_epi8(bits[kTop], bytes<N / 2>(table, index, bits),
                                          bytes<N / 2>(table + N / 2, index, bits));
        }
    }
    // Of 512 or 1,024 points: of 2,048 Zen 4 gathers 32 in 40 cycles, permutations and blends would take 53.
    // As bytes (above) all 64 lanes are put to use.
    template <int N>
    static IKPY_VBMI_INLINE __m512i words(const WordCodes<N>& table, __m512i index) {
        static_assert(N <= 1024);
        return permuted<N>(table.once, index);
    }

  private:
    template <int N>
    static IKPY_VBMI_INLINE __m512i permuted(const uint16_t* table, __m512i index) {
        if constexpr (N == 64) {
            return _mm512_permutex2var_epi16(_mm512_load_si512(table), index, _mm512_load_si512(table + 32));
        } else {
            const __mmask32 upper = _mm512_test_epi16_mask(index, _mm512_set1_epi16(N / 2));
            return _mm512_mask_blend_epi16(upper, permuted<N / 2>(table, index),
                                           permuted<N / 2>(table + N / 2, index));
        }
    }
};

}  // namespace ikpy::points

#endif
