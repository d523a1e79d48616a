// Layouts of the row-interleaved types for kernels/matmul/bf16_quads.hpp.
#pragma once
#include "unpack/interleaved_legacy.hpp"
#include "unpack/interleaved_super.hpp"
#include "unpack/iq4.hpp"
#include "unpack/iqk.hpp"
#include "unpack/kquants.hpp"
#include "unpack/legacy.hpp"
#include "unpack/quads.hpp"
#include "unpack/row_scale.hpp"

#if defined(__AVX512VNNI__) && defined(__linux__)

namespace ikpy {
namespace quads {

// orders of upper bits

struct OrderQ5_0 {
    static constexpr int bit(int column) { return interleaved::kQ5_0Bits.of[column / 4]; }
};
struct OrderQ6_0 {
    static constexpr int bit(int column) { return 2 * (column / 4 & 3); }
};
using row_groups::OrderIQ5_K;
using row_groups::OrderQ3_K;
using row_groups::OrderQ5_K;
using row_groups::OrderQ6_K;

template <int At>
using N4 = Nibbles<FourTurns, 4, At>;

// codes that are not numbers of levels or plain numbers

// Five-bit levels with groups of 16, of the second table where the extra bits say so.
struct CodesIQ5_K : UpperBits<N4<64>, 1, OrderIQ5_K, 576> {
    using Plain = UnpackIQ5_K;
    static IKPY_VBMI_INLINE void codes(const uint8_t* p, int quad, int step, __m512i* q) {
        static constexpr Bytes64 kLevels([](int i) { return kIq5Codes[i] - Plain::kZero; });
        const __m512i extra = _mm512_broadcast_i64x4(
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8))));
        const __mmask16 second = _mm512_test_epi32_mask(extra, _mm512_set1_epi32(1 << step));
        numbers<0>(p, quad, step, q);
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
            const __m512i number = _mm512_mask_or_epi32(q[v], second, q[v], wide::bytes(32));
            q[v] = _mm512_permutexvar_epi8(number, kLevels.load());
        }
    }
};

// Signed nibbles.
struct SignedNibbles : Nibbles<HalvesOf32, 4, 8> {
    template <int Place>
    static IKPY_VBMI_INLINE void numbers(const uint8_t* p, int quad, int step, __m512i* q) {
        Nibbles::numbers<Place>(p, quad, step, q);
        for (int v = 0; v < 2; ++v) q[v] = _mm512_xor_si512(q[v], wide::bytes(8 << Place));
    }
};

// Exponents, a byte per row and block.
struct ScalesMXFP4 {
    static IKPY_VBMI_INLINE void scales(const uint8_t* p, int quad, StoredQuad* out) {
        constexpr int B = UnpackMXFP4_R8::kBlockBytes;
        const __m256i at = _mm256_setr_epi32(0, B, 2 * B, 3 * B, 4 * B, 5 * B, 6 * B, 7 * B);
        const __m256i e = _mm256_i32gather_epi32(reinterpret_cast<const int*>(p + 4 * quad), at, 1);
        for (int r = 0; r < 4; ++r) {
            const __m256i row = _mm256_and_si256(_mm256_srli_epi32(e, 8 * r), _mm256_set1_epi32(255));
            _mm512_store_ps(out->d[r], UnpackMXFP4::half_powers(_mm512_castsi256_si512(row)));
        }
    }
};

// Codes C of P with a scale per block, with integers S, and with integers S and the table steps T.
template <class U, class C>
struct SmallBlocks : C, HalfScales<U, typename C::Plain> {};
template <class U, class C, class S>
struct SuperBlocks : C, IntegerScales<U, typename C::Plain, S> {};
template <class U, class C, class S, class T>
struct SteppedBlocks : C, StepOffsets<typename C::Plain, IntegerScales<U, typename C::Plain, S>, T> {};

}  // namespace quads

template <>
struct QuadLayout<UnpackQ4_0_R8>
    : quads::SmallBlocks<UnpackQ4_0_R8,
                         quads::LevelFields<UnpackQ4_0, quads::Nibbles<quads::HalvesOf32, 8, 16>>> {};
template <>
struct QuadLayout<UnpackQ4_0_4x4>
    : quads::SmallBlocks<UnpackQ4_0_4x4, quads::LevelCodes<UnpackQ4_0, quads::SignedNibbles>> {};
template <>
struct QuadLayout<UnpackMXFP4_R8> : quads::LevelFields<UnpackMXFP4, quads::Nibbles<quads::HalvesOf32, 8, 8>>,
                                    quads::ScalesMXFP4 {};
template <>
struct QuadLayout<UnpackIQ4_NL_R4>
    : quads::SmallBlocks<UnpackIQ4_NL_R4, quads::LevelFields<UnpackIQ4_NL, quads::N4<8>>> {};
template <>
struct QuadLayout<UnpackQ5_0_R4>
    : quads::SmallBlocks<
          UnpackQ5_0_R4,
          quads::LevelCodes<UnpackQ5_0, quads::UpperBits<quads::N4<24>, 1, quads::OrderQ5_0, 8>>> {};
template <>
struct QuadLayout<UnpackQ6_0_R4>
    : quads::SmallBlocks<
          UnpackQ6_0_R4,
          quads::CentredCodes<UnpackQ6_0, quads::UpperBits<quads::N4<40>, 2, quads::OrderQ6_0, 8>>> {};
template <>
struct QuadLayout<UnpackQ8_0_R8> : quads::SmallBlocks<UnpackQ8_0_R8, quads::Bytes<8, 16, 0>> {};
template <>
struct QuadLayout<UnpackQ8_K_R8> : quads::Bytes<8, 16, 0>, quads::RowScales<UnpackQ8_K_R8, UnpackQ8_0> {};
template <>
struct QuadLayout<UnpackQ8_K_R16> : quads::Bytes<16, 32, 0x80>,
                                    quads::RowScales<UnpackQ8_K_R16, UnpackQ8_0> {};
template <>
struct QuadLayout<UnpackQ8_KV_R8> : quads::Bytes<8, 0, 0>, quads::RowScales<UnpackQ8_KV_R8, UnpackQ8_0> {};
template <>
struct QuadLayout<UnpackIQ2_BN_R4> : quads::LevelFields<UnpackIQ2_BN, quads::Pairs<0>>,
                                     quads::RowScales<UnpackIQ2_BN_R4, UnpackIQ2_BN> {};

template <>
struct QuadLayout<UnpackQ2_K_R4>
    : quads::SuperBlocks<UnpackQ2_K_R4, quads::LevelFields<UnpackQ2_K, quads::Pairs<80>>, row_groups::Q2_K> {
};
template <>
struct QuadLayout<UnpackQ3_K_R4>
    : quads::SuperBlocks<
          UnpackQ3_K_R4,
          quads::LevelCodes<UnpackQ3_K, quads::UpperBits<quads::Pairs<184>, 1, quads::OrderQ3_K, 56>>,
          row_groups::Q3_K> {};
template <>
struct QuadLayout<UnpackQ4_K_R4>
    : quads::SuperBlocks<UnpackQ4_K_R4, quads::LevelFields<UnpackQ4_K, quads::N4<64>>, row_groups::Q4_K> {};
template <>
struct QuadLayout<UnpackQ5_K_R4>
    : quads::SuperBlocks<
          UnpackQ5_K_R4,
          quads::LevelCodes<UnpackQ5_K, quads::UpperBits<quads::N4<192>, 1, quads::OrderQ5_K, 64>>,
          row_groups::Q5_K> {};
template <>
struct QuadLayout<UnpackQ6_K_R4>
    : quads::SuperBlocks<
          UnpackQ6_K_R4,
          quads::CentredCodes<UnpackQ6_K, quads::UpperBits<quads::N4<328>, 2, quads::OrderQ6_K, 72>>,
          row_groups::Q6_K> {};
template <>
struct QuadLayout<UnpackIQ4_XS_R8>
    : quads::SuperBlocks<UnpackIQ4_XS_R8,
                         quads::LevelCodes<UnpackIQ4_XS, quads::Nibbles<quads::HalvesOf8, 8, 64>>,
                         row_groups::IQ4_XS> {};

template <>
struct QuadLayout<UnpackIQ2_K_R4>
    : quads::SteppedBlocks<UnpackIQ2_K_R4, quads::LevelFields<UnpackIQ2_K, quads::Pairs<48>>,
                           row_groups::IQ2_K, quads::ExtraBits> {};
template <>
struct QuadLayout<UnpackIQ3_K_R4>
    : quads::SteppedBlocks<
          UnpackIQ3_K_R4,
          quads::LevelCodes<UnpackIQ3_K, quads::UpperBits<quads::Pairs<56>, 1, quads::OrderQ3_K, 312>>,
          row_groups::IQ3_K, quads::ExtraBits> {};
template <>
struct QuadLayout<UnpackIQ4_K_R4>
    : quads::SteppedBlocks<UnpackIQ4_K_R4, quads::LevelFields<UnpackIQ4_K, quads::N4<64>>, row_groups::IQ4_K,
                           quads::ExtraBits> {};
template <>
struct QuadLayout<UnpackIQ5_K_R4> : quads::SuperBlocks<UnpackIQ5_K_R4, quads::CodesIQ5_K, row_groups::IQ5_K> {
};
template <>
struct QuadLayout<UnpackIQ4_KS_R4>
    : quads::SteppedBlocks<UnpackIQ4_KS_R4, quads::LevelFields<UnpackIQ4_KS, quads::N4<32>>,
                           row_groups::IQ4_KS, quads::LowestBits> {};
template <>
struct QuadLayout<UnpackIQ5_KS_R4>
    : quads::SteppedBlocks<
          UnpackIQ5_KS_R4,
          quads::LevelCodes<UnpackIQ5_KS, quads::UpperBits<quads::N4<32>, 1, quads::OrderIQ5_K, 544>>,
          row_groups::IQ5_KS, quads::LowestBits> {};

}  // namespace ikpy

#endif
