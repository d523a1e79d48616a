// IQ2_KL for kernels/gemv/gemv_points.hpp: its 32 pairs of levels are two tables of bytes.
#pragma once
#include "kernels/gemv/gemv_points.hpp"
#include "unpack/row_scale.hpp"

#if defined(__AVX512VNNI__)

namespace ikpy::points {

// Levels + 64 of both elements, by the low five bits of an index.
inline constexpr Bytes64 kFirstOfPair([](int i) { return kIq2klCodes[i & 31] + 64 - kIq3Zero; });
inline constexpr Bytes64 kSecondOfPair([](int i) { return kIq2klCodes[32 + (i & 31)] + 64 - kIq3Zero; });

// Bit of a block at which the field of byte i & 3 of a lane begins, whose sub-block is `step` or a multiple
// of two beyond it.
constexpr int scale_field(int i, int step) {
    const int block = 2 * (i / 16) + step;
    return i & 1 ? 2 * block : 16 + 8 * (block & 3) + 4 * (block >> 2);
}
inline constexpr Bytes64 kEvenScales([](int i) { return scale_field(i, 0); });
inline constexpr Bytes64 kOddScales([](int i) { return scale_field(i, 1); });

// Steps of 64 pairs: low nibbles belong to even sub-blocks, high ones to odd sub-blocks. 27 vector
// instructions per 256 weights: 13 cycles if two start per cycle (23 GB/s at 3.5 GHz),
// measured 18. Pairs as words of one table took 30.
struct IQ2_KL {
    static constexpr int kType = 157, kBlockBytes = 86, kHeaderBytes = 2, kSteps = 2, kVectors = 2,
                         kRowsAtOnce = 1;
    static constexpr bool kInterleaved = false, kRaisedOdd = false;
    static constexpr Order kOrder = kByPair;
    __m512i pairs;
    __m512 scale;

    // -64 times the sums of the sub-blocks, in one of their four lanes.
    static IKPY_VBMI void bias(const uint8_t* x, const ActQ8Layout& at, int64_t c, uint8_t* out) {
        const __m512i sums = _mm512_srai_epi32(_mm512_castsi256_si512(minus_sums32(x, at, c)), 1);
        for (int step = 0; step < 2; ++step)
            _mm512_store_si512(out + 64 * step, _mm512_maskz_permutexvar_epi32(0x1111, lanes(step), sums));
    }
    IKPY_VBMI_INLINE IQ2_KL(const uint8_t* const* rows, int step) {
        // The fifth bits of even sub-blocks in bit 4, those of odd ones in bit 5.
        static constexpr Bytes64 kFifth([](int i) { return (8 * (i & 7) + 2 * (i / 16) + 60) & 63; });
        const uint8_t* p = rows[0];
        const __m512i nibbles = _mm512_loadu_si512(p + 6);
        const __m512i high = _mm512_multishift_epi64_epi8(
            kFifth.load(), _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 70))));
        // Bits above the fifth do not matter.
        pairs = _mm512_ternarylogic_epi32(step ? _mm512_srli_epi16(nibbles, 4) : nibbles,
                                          step ? _mm512_srli_epi16(high, 1) : high, wide::bytes(15), 0xE4);
        // Low nibbles of four bytes, high ones, and before them two upper bits each. In vectors, since
        // general instructions take their ports.
        const __m512i fields = _mm512_multishift_epi64_epi8((step ? kOddScales : kEvenScales).load(),
                                                            _mm512_set1_epi64(load_unaligned<int64_t>(p)));
        scale = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(_mm512_set1_epi32(-32),
                                                       _mm512_and_si512(fields, _mm512_set1_epi32(0x030F)),
                                                       _mm512_set1_epi32(0x1001)));
    }
    IKPY_VBMI_INLINE __m512i weights(int v) const {
        return _mm512_permutexvar_epi8(pairs, (v ? kSecondOfPair : kFirstOfPair).load());
    }
    template <class From>
    IKPY_VBMI_INLINE __m512i start(From bias, int step) const {
        return bias.load(step);
    }

  private:
    static __m512i lanes(int step) {
        return _mm512_add_epi32(_mm512_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6),
                                _mm512_set1_epi32(step));
    }
};

}  // namespace ikpy::points

#endif
