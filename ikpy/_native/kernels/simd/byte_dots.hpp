// Vectors of dwords that take dot products of four unsigned and four signed bytes each: AVX-512 VNNI,
// AVX-VNNI. IKPY_BYTE_DOTS says that there are such.
#pragma once
#include <cstdint>

#include "kernels/simd/half_rows.hpp"

namespace ikpy {

#if defined(__AVX512VNNI__)
#define IKPY_BYTE_DOTS

typedef __m512i ByteSums;
inline ByteSums all_dwords(int32_t v) { return _mm512_set1_epi32(v); }
inline ByteSums load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline ByteSums add_byte_dots(ByteSums sum, ByteSums unsigned_bytes, ByteSums signed_bytes) {
    return _mm512_dpbusd_epi32(sum, unsigned_bytes, signed_bytes);
}
inline ByteSums add_words(ByteSums sum, ByteSums a, ByteSums b) { return _mm512_dpwssd_epi32(sum, a, b); }
inline ByteSums magnitudes(ByteSums signed_bytes) { return _mm512_abs_epi8(signed_bytes); }
inline __m512 float_bits(ByteSums v) { return _mm512_castsi512_ps(v); }
inline ByteSums bits_of(__m512 v) { return _mm512_castps_si512(v); }

#elif defined(__AVXVNNI__)
#define IKPY_BYTE_DOTS

typedef __m256i ByteSums;
inline ByteSums all_dwords(int32_t v) { return _mm256_set1_epi32(v); }
inline ByteSums load_bytes(const uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline ByteSums add_byte_dots(ByteSums sum, ByteSums unsigned_bytes, ByteSums signed_bytes) {
    return _mm256_dpbusd_avx_epi32(sum, unsigned_bytes, signed_bytes);
}
inline ByteSums add_words(ByteSums sum, ByteSums a, ByteSums b) { return _mm256_dpwssd_avx_epi32(sum, a, b); }
inline ByteSums magnitudes(ByteSums signed_bytes) { return _mm256_abs_epi8(signed_bytes); }
inline __m256 float_bits(ByteSums v) { return _mm256_castsi256_ps(v); }
inline ByteSums bits_of(__m256 v) { return _mm256_castps_si256(v); }

#endif

#if defined(__AVX2__)
// sum plus dot products of four bytes each, of which those of AVX2 alone add up two in 16 bits: pairs must
// not exceed these.
inline __m256i add_dots(__m256i sum, __m256i unsigned_bytes, __m256i signed_bytes) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(sum, unsigned_bytes, signed_bytes);
#else
    const __m256i pairs = _mm256_maddubs_epi16(unsigned_bytes, signed_bytes);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

// sum plus dot products of two words each.
inline __m256i add_word_dots(__m256i sum, __m256i a, __m256i b) {
#if defined(__AVXVNNI__)
    return _mm256_dpwssd_avx_epi32(sum, a, b);
#else
    return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
#endif
}
#endif

#if defined(IKPY_BYTE_DOTS)
constexpr bool kByteDots = true;
inline ByteSums broadcast_dword(const uint8_t* p) { return all_dwords(load_unaligned<int32_t>(p)); }
#else
constexpr bool kByteDots = false;
#endif

}  // namespace ikpy
