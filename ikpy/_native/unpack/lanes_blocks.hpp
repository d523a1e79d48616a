// Layouts of kernels/gemv/gemv_row_blocks.hpp (quant-formats.md#interleaved-small-blocks).
#pragma once
#include "kernels/gemv/gemv_row_blocks.hpp"
#include "unpack/interleaved_legacy.hpp"
#include "unpack/lanes_interleaved.hpp"

#if defined(__AVX512VNNI__)

namespace ikpy {
namespace row_blocks {

using row_groups::Nibbles;

// Blocks that begin with the halves of their rows.
template <class U>
struct Halves {
    using Plain = U;
    static constexpr int kBytes = U::kBlockBytes, kRun = 1;
    static IKPY_VBMI_INLINE __m512 scales(const uint8_t* p) {
        return row_groups::halves_of_rows<U::kRows>(p);
    }
};

struct OrderQ5_0 {
    static constexpr int bit(int column) { return interleaved::kQ5_0Bits.of[column / 4]; }
};
struct OrderQ6_0 {
    static constexpr int bit(int column) { return 2 * (column / 4 & 3); }
};

struct IQ4_NL : Halves<UnpackIQ4_NL_R4>, Nibbles {
    static constexpr int kZero = 128;
    static IKPY_VBMI_INLINE void codes(const uint8_t* p, __m512i* q) {
        row_groups::levels_of_fields<Nibbles, 8>(p, 0, lanes::kLevels4, q);
    }
};

struct Q5_0 : Halves<UnpackQ5_0_R4>, Nibbles {
    static constexpr int kZero = 16;
    static IKPY_VBMI_INLINE void codes(const uint8_t* p, __m512i* q) {
        row_groups::UpperBits<Nibbles, 1, OrderQ5_0>::join<24>(p, 0, row_groups::four_times16(p + 8), q);
    }
};

struct Q6_0 : Halves<UnpackQ6_0_R4>, Nibbles {
    static constexpr int kZero = 32;
    static IKPY_VBMI_INLINE void codes(const uint8_t* p, __m512i* q) {
        row_groups::UpperBits<Nibbles, 2, OrderQ6_0>::join<40>(p, 0, row_groups::twice32(p + 8), q);
    }
};

// Low nibbles of 4 * R bytes are four of the first 16 columns, high ones four of the last 16.
template <int R>
struct HalvesOf32 {
    static constexpr int kVectors = R / 2, kPlaces = 16 / R;
    static constexpr int column(int v, int j) { return 4 * kPlaces * (v / 2) + 4 * j + 16 * (v % 2); }
};

struct Q4_0 : Halves<UnpackQ4_0_R8>, HalvesOf32<8> {
    static constexpr int kZero = 8;
    static IKPY_VBMI_INLINE void codes(const uint8_t* p, __m512i* q) {
        for (int i = 0; i < 2; ++i) row_groups::codes_of_fields<Nibbles, 16>(p, i, q + 2 * i);
    }
};

// The top bits of nibbles are inverted.
IKPY_VBMI_INLINE void signed_nibbles(const uint8_t* p, __m512i* q) {
    constexpr int kMaskedXor = 0x6A;  // v & 15 ^ 8
    const __m512i bytes = row_groups::load_once(p);
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v)
        q[v] =
            _mm512_ternarylogic_epi32(Nibbles::field(bytes, v), wide::bytes(15), wide::bytes(8), kMaskedXor);
}
struct Q4_0_4x4 : Halves<UnpackQ4_0_4x4>, HalvesOf32<4> {
    static constexpr int kZero = 8;
    static IKPY_VBMI_INLINE void codes(const uint8_t* p, __m512i* q) { signed_nibbles(p + 8, q); }
};

struct MXFP4 : HalvesOf32<8> {
    using Plain = UnpackMXFP4_R8;
    static constexpr int kBytes = Plain::kBlockBytes, kZero = UnpackMXFP4::kZero, kRun = 1;
    static IKPY_VBMI_INLINE void codes(const uint8_t* p, __m512i* q) {
        static constexpr lanes::Levels kLevels(kMxfp4Codes, 16);
        for (int i = 0; i < 2; ++i) row_groups::levels_of_fields<Nibbles, 8>(p, i, kLevels, q + 2 * i);
    }
    static IKPY_VBMI_INLINE __m512 scales(const uint8_t* p) {
        const __m128i exponents = _mm_set1_epi64x(load_unaligned<int64_t>(p));
        return UnpackMXFP4::half_powers(_mm512_cvtepu8_epi32(exponents));
    }
};

// Runs of eight bytes of every row.
template <int R>
struct RunsQ4_0 : HalvesOf32<R> {
    using Plain = UnpackQ4_0Runs<R == 4 ? 32 : 33, R>;
    static constexpr int kBytes = Plain::kBlockBytes, kZero = 8, kRun = 2;
    static IKPY_VBMI_INLINE void codes(const uint8_t* p, __m512i* q) {
        for (int i = 0; i < R / 4; ++i) signed_nibbles(p + 2 * R + 64 * i, q + 2 * i);
    }
    static IKPY_VBMI_INLINE __m512 scales(const uint8_t* p) {
        const __m512i twice =
            _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4 % R, 4 % R, 5 % R, 5 % R, 6 % R, 6 % R, 7 % R, 7 % R);
        const __m256 d =
            R == 4
                ? _mm256_castps128_ps256(_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))
                : _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        return _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(d));
    }
};

}  // namespace row_blocks
}  // namespace ikpy

#endif
