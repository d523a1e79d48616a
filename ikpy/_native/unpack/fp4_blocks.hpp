// Unpackers of MXFP4 and NVFP4: e2m1 codes. Layouts: quant-formats.md#blocks-with-one-scale.
#pragma once
#include "kernels/matmul/unpacked.hpp"
#include "unpack/codes32.hpp"
#include "unpack/wide.hpp"

namespace ikpy {

// kvalues_mxfp4 + 12 (the table is twice the e2m1 value).
alignas(16) inline constexpr uint8_t kMxfp4Codes[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                        12, 11, 10, 9,  8,  6,  4,  0};

// 2^(e - 128); subnormal for e = 0 and 1.
inline float half_power(uint8_t e) {
    const uint32_t bits = e > 1 ? static_cast<uint32_t>(e - 1) << 23 : 0x00200000u << e;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

struct UnpackMXFP4 {
    static constexpr int kType = 39, kGroup = 32, kBlock = 32, kBlockBytes = 17, kZero = 12;
    static constexpr int kLow = 0, kHigh = 24;
    template <class C>
    static void block(const uint8_t* p, C codes, float* d, float*) {
        c32::store(codes, c32::lookup(kMxfp4Codes, c32::nibbles(p + 1)));
        *d = half_power(*p);
    }
#if defined(__AVX512VNNI__)
    static constexpr const uint8_t* kLevels = kMxfp4Codes;
    static constexpr int kLevelCount = 16;
    static Codes512 wide(const uint8_t* p) { return wide::levels_of<UnpackMXFP4>(level_numbers(p)); }
    template <int Place = 0>
    static Codes512 level_numbers(const uint8_t* p) {
        Codes512 r = wide::block_nibbles<kBlockBytes, Place>(p);
        r.d = scales(p);
        return r;
    }
    static constexpr Pairs kPairs = Pairs::kConsecutive;
    static Codes512 halves(const uint8_t* p) {
        Codes512 r = wide::levels_of<UnpackMXFP4>(wide::block_nibble_halves<kBlockBytes>(p));
        r.d = scales(p);
        return r;
    }
    static __m512 scales(const uint8_t* p) {
        const __m128i e =
            _mm_setr_epi8(static_cast<char>(p[0]), static_cast<char>(p[17]), static_cast<char>(p[34]),
                          static_cast<char>(p[51]), static_cast<char>(p[68]), static_cast<char>(p[85]),
                          static_cast<char>(p[102]), static_cast<char>(p[119]), 0, 0, 0, 0, 0, 0, 0, 0);
        return half_powers(_mm512_cvtepu8_epi32(e));
    }
    // half_power() of every lane.
    static __m512 half_powers(__m512i exponent) {
        const __m512i one = _mm512_set1_epi32(1);
        const __m512i small = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), exponent);
        return _mm512_castsi512_ps(_mm512_mask_slli_epi32(small, _mm512_cmpgt_epi32_mask(exponent, one),
                                                          _mm512_sub_epi32(exponent, one), 23));
    }
#elif defined(__AVX2__)
    // half_power() of every lane.
    static __m256 half_powers(__m256i exponent) {
        const __m256i one = _mm256_set1_epi32(1);
        const __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), exponent);
        const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(exponent, one), 23);
        return _mm256_castsi256_ps(_mm256_blendv_epi8(small, normal, _mm256_cmpgt_epi32(exponent, one)));
    }
#endif
};

// Of 16 elements byte j of eight has element j in its low and j + 8 in its high nibble.
struct UnpackNVFP4 {
    static constexpr int kType = 40, kGroup = 16, kBlock = 64, kBlockBytes = 36, kZero = 12;
    static constexpr int kLow = 0, kHigh = 24;
    template <class C>
    static void block(const uint8_t* p, C to, float* d, float*) {
        codes(p, to);
#if defined(__AVX2__)
        const __m128i bytes = _mm_cvtepu8_epi16(_mm_cvtsi32_si128(load_unaligned<int32_t>(p)));
        _mm_storeu_ps(d, _mm256_castps256_ps128(halves_of(bytes)));
#else
        for (int g = 0; g < 4; ++g) d[g] = half_ue4m3(p[g]);
#endif
    }
    template <class C>
    static void codes(const uint8_t* p, C to) {
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h)
            c32::store(to + 32 * h, c32::lookup(kMxfp4Codes, nibbles(p + 4 + 16 * h)));
    }
#if defined(__AVX2__)
    // half_ue4m3() of eight words.
    static __m256 halves_of(__m128i words) {
        const __m128i unsigned_ = _mm_and_si128(words, _mm_set1_epi16(127));
        const __m128i numbers = _mm_andnot_si128(_mm_cmpeq_epi16(words, _mm_set1_epi16(127)), unsigned_);
        return _mm256_mul_ps(_mm256_cvtph_ps(_mm_slli_epi16(numbers, 7)), _mm256_set1_ps(128.0f));
    }
#endif
    static c32::Codes32 nibbles(const uint8_t* p) {
        typedef uint64_t Quadwords __attribute__((vector_size(32)));
        const auto a = load_unaligned<uint64_t>(p), b = load_unaligned<uint64_t>(p + 8);
        return reinterpret_cast<c32::Codes32>(Quadwords{a, a >> 4, b, b >> 4}) & 15;
    }
#if defined(__AVX512VNNI__)
    static constexpr const uint8_t* kLevels = kMxfp4Codes;
    static constexpr int kLevelCount = 16;
    static Codes512 wide(const uint8_t* p) { return wide::levels_of<UnpackNVFP4>(level_numbers(p)); }
    template <int Place = 0>
    static Codes512 level_numbers(const uint8_t* p) {
        constexpr int64_t kLow = Place, kHigh = (Place + 60) % 64;
        const __m512i turns = _mm512_setr_epi64(kLow, kHigh, kLow, kHigh, kLow, kHigh, kLow, kHigh);
        const __m512i twice = _mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3);
        Codes512 r;
        for (int i = 0; i < 4; ++i) {
            const auto* qs = reinterpret_cast<const __m256i*>(p + kBlockBytes * i + 4);
            const __m512i v = _mm512_castsi256_si512(_mm256_loadu_si256(qs));
            r.q[i] = _mm512_rolv_epi64(_mm512_permutexvar_epi64(twice, v), turns);
            if (Place == 0) r.q[i] = wide::low_nibbles(r.q[i]);
        }
        r.d = scales(p);
        return r;
    }
    static __m512 scales(const uint8_t* p) {
        const auto at = [p](int b) { return load_unaligned<int32_t>(p + kBlockBytes * b); };
        const __m128i codes = _mm_setr_epi32(at(0), at(1), at(2), at(3));
        const __mmask16 finite = _mm_cmpneq_epi8_mask(codes, _mm_set1_epi8(127));
        const __m128i magnitudes = _mm_and_si128(codes, _mm_set1_epi8(127));
        const __m256i halves = _mm256_slli_epi16(_mm256_cvtepu8_epi16(magnitudes), 7);
        return _mm512_maskz_mul_ps(finite, _mm512_cvtph_ps(halves), _mm512_set1_ps(128.0f));
    }
#endif
};

}  // namespace ikpy
