// Q1_0_G128 for kernels/gemv/gemv_points.hpp: "points" of eight elements are the bits of a byte, which need
// no tables.
#pragma once
#include "unpack/points.hpp"

#if defined(__AVX512VNNI__)

namespace ikpy::points {

// Two rows, whose bits are twice the codes 0 and 1: 22 vector operations per 512 weights where bits as masks
// took 72 (one core of Zen 5, from the cache: 100 -> 149e9 weights/s).
struct Q1_0_G128 {
    static constexpr int kType = 41, kBlockBytes = 36, kHeaderBytes = 0, kSteps = 1, kRowsAtOnce = 2,
                         kVectors = 8;
    static constexpr bool kInterleaved = false, kRaisedOdd = false;
    static constexpr Order kOrder = kByElement8;
    __m512i bits;
    __m512 scale;

    // Minus the sums of the sub-blocks.
    static IKPY_VBMI void bias(const uint8_t* x, const ActQ8Layout& at, int64_t c, uint8_t* out) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(out), _mm256_srai_epi32(minus_sums32(x, at, c), 7));
    }
    IKPY_VBMI_INLINE Q1_0_G128(const uint8_t* const* p, int) {
        // Two halves of 16 bytes of each row, every one behind the scale of its 128 columns.
        static constexpr Bytes64 kBits([](int i) { return 64 * (i / 32) + i % 32 + 2 + i / 16 % 2 * 2; });
        static constexpr struct {
            alignas(64) uint16_t at[32] = {0, 0, 0, 0, 9, 9, 9, 9, 32, 32, 32, 32, 41, 41, 41, 41};
        } kScales;
        constexpr __mmask64 kBlock = (1ull << kBlockBytes) - 1;
        const __m512i a = _mm512_maskz_loadu_epi8(kBlock, p[0]), b = _mm512_maskz_loadu_epi8(kBlock, p[1]);
        bits = _mm512_permutex2var_epi8(a, kBits.load(), b);
        scale = _mm512_cvtph_ps(
            _mm512_castsi512_si256(_mm512_permutex2var_epi16(a, _mm512_load_si512(kScales.at), b)));
    }
    IKPY_VBMI_INLINE __m512i weights(int v) const {
        return _mm512_gf2p8affine_epi64_epi8(bits, _mm512_set1_epi64(int64_t{1} << (48 + v)), 0);
    }
};

}  // namespace ikpy::points

#endif
