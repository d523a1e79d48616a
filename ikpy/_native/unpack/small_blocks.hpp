// Unpackers of Q1_0_G128, IQ1_BN, IQ2_BN, TQ1_0, TQ2_0 and the interleaved forms of Q4_0 with
// runs of eight bytes. Layouts: quant-formats.md#blocks-with-one-scale, quant-formats.md#ternary-types.
#pragma once
#include "kernels/matmul/unpacked.hpp"
#include "unpack/codes32.hpp"
#include "unpack/fp4_blocks.hpp"
#include "unpack/wide.hpp"

namespace ikpy {

struct UnpackQ1_0_G128 {
    static constexpr int kType = 41, kGroup = 32, kBlock = 128, kBlockBytes = 18, kZero = 1;
    static constexpr int kLow = 0, kHigh = 2;
    template <class C>
    static void block(const uint8_t* p, C codes, float* d, float*) {
        for (int g = 0; g < 4; ++g) d[g] = load_f16(p);
#pragma GCC unroll 8
        for (int g = 0; g < 4; ++g)
            c32::store(codes + 32 * g, c32::bits(load_unaligned<uint32_t>(p + 2 + 4 * g)) & 2);
    }
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p) {
        Codes512 r;
        for (int i = 0; i < 4; ++i)
            r.q[i] = _mm512_maskz_mov_epi8(load_unaligned<uint64_t>(p + 18 * (i >> 1) + 2 + 8 * (i & 1)),
                                           wide::bytes(2));
        r.d = _mm512_mask_blend_ps(0x00F0, wide::f16_lanes(p), wide::f16_lanes(p + 18));
        return r;
    }
#endif
};

// Trit 0 .. 2 of a base-3 byte that the multiplier 3^n moves to the top.
constexpr uint8_t trit(uint8_t code, int multiplier) {
    return static_cast<uint8_t>(3 * static_cast<uint8_t>(code * multiplier) >> 8);
}

#if defined(__AVX2__)
// For the elements of a vector, 32 * i on, or four times 8 * (i - 2) on: the byte each trit is taken from,
// and the power of 3 that moves it to the top of the upper byte of its word, for even and odd elements. Bytes
// 5 to 12 follow bytes 0 to 7 in the vector; of four rows bytes 0 to 5, or 6 to 11, and 12.
struct Iq1bnOrder {
    uint8_t byte[10][32];
    uint16_t even[10][16], odd[10][16];
};
constexpr Iq1bnOrder make_iq1bn_order() {
    constexpr uint8_t kPowers[5] = {81, 27, 9, 3, 1};
    Iq1bnOrder order{};
    for (int i = 0; i < 10; ++i)
        for (int e = 0; e < 32; ++e) {
            const int column = i < 2 ? 32 * i + e : 8 * (i - 2) + e % 8, g = column / 16, j = column % 16;
            const int byte = j < 15 ? 3 * g + j / 5 : 12;
            const int place =
                i < 2 ? (byte < 8 ? byte : byte + 3) : (byte < 12 ? byte % 6 : 6) + e / 8 % 2 * 8;
            order.byte[i][e] = static_cast<uint8_t>(place);
            const uint8_t power = kPowers[j < 15 ? j % 5 : g];
            if (e % 2) {
                order.odd[i][e / 2] = power;
            } else {
                order.even[i][e / 2] = static_cast<uint16_t>(power << 8);
            }
        }
    return order;
}
alignas(32) inline constexpr Iq1bnOrder kIq1bnOrder = make_iq1bn_order();
#endif

struct UnpackIQ1_BN {
    static constexpr int kType = 134, kGroup = 32, kBlock = 64, kBlockBytes = 13, kZero = 1;
    static constexpr int kLow = 0, kHigh = 2;
    static constexpr int kHeaderBytes = 2;
    static constexpr bool kUnitScales = true;
    static float row_scale(const uint8_t* row) { return load_f16(row); }
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        d[0] = d[1] = 1.0f;
#if defined(__AVX2__)
        const __m256i bytes = _mm256_broadcastsi128_si256(bytes_of_64(p));
#pragma GCC unroll 8
        for (int i = 0; i < 2; ++i)
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + 32 * i), trits32(bytes, i));
#else
        static constexpr uint8_t kPowers[5] = {81, 27, 9, 3, 1};
#pragma GCC unroll 8
        for (int g = 0; g < 4; ++g) {
            for (int j = 0; j < 15; ++j) codes[16 * g + j] = trit(p[3 * g + j / 5], kPowers[j % 5]);
            codes[16 * g + 15] = trit(p[12], kPowers[g]);
        }
#endif
    }
#if defined(__AVX2__)
    static __m128i bytes_of_64(const uint8_t* p) {
        const __m128 low = _mm_castsi128_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
        return _mm_castps_si128(_mm_loadh_pi(low, reinterpret_cast<const __m64*>(p + 5)));
    }
    class Columns {
      public:
        Columns(__m256i even_rows, __m256i odd_rows) {
            const __m256i order = _mm256_broadcastsi128_si256(
                _mm_setr_epi8(0, 1, 2, 3, 4, 5, 15, -1, 6, 7, 11, 12, 13, 14, 15, -1));
            const __m256i a = _mm256_shuffle_epi8(even_rows, order), b = _mm256_shuffle_epi8(odd_rows, order);
            half_[0] = _mm256_unpacklo_epi64(a, b);
            half_[1] = _mm256_unpackhi_epi64(a, b);
        }
        __m256i of(int g) const { return trits32(half_[g >> 2], 2 + g); }

      private:
        __m256i half_[2];
    };
    // The elements of kIq1bnOrder: the product with a power of 3 modulo 256 in the upper byte of a word,
    // times 3, upper word.
    static __m256i trits32(__m256i bytes, int i) {
        const auto load = [](const void* at) { return _mm256_load_si256(static_cast<const __m256i*>(at)); };
        const __m256i upper = _mm256_set1_epi16(static_cast<short>(0xFF00));
        const __m256i v = _mm256_shuffle_epi8(bytes, load(kIq1bnOrder.byte[i]));
        const __m256i even = _mm256_mullo_epi16(v, load(kIq1bnOrder.even[i]));
        const __m256i odd = _mm256_mullo_epi16(_mm256_and_si256(v, upper), load(kIq1bnOrder.odd[i]));
        const __m256i odd_trits = _mm256_mulhi_epu16(odd, _mm256_set1_epi16(3 << 8));
        return _mm256_or_si256(_mm256_mulhi_epu16(even, _mm256_set1_epi16(3)),
                               _mm256_and_si256(odd_trits, upper));
    }
#endif
#if defined(__AVX512VNNI__)
    // 64 elements: bytes 3 * g + j / 5 of lane g, times powers of 3 modulo 256, times 3, upper byte.
    static __m512i trits(const uint8_t* p) {
        alignas(16) static constexpr uint8_t kFirst[16] = {0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 12};
        alignas(64) static constexpr uint8_t kPower[64] = {
            81, 27, 9, 3, 1,  81, 27, 9, 3, 1,  81, 27, 9, 3, 1,  81, 81, 27, 9, 3, 1,  81,
            27, 9,  3, 1, 81, 27, 9,  3, 1, 27, 81, 27, 9, 3, 1,  81, 27, 9,  3, 1, 81, 27,
            9,  3,  1, 9, 81, 27, 9,  3, 1, 81, 27, 9,  3, 1, 81, 27, 9,  3,  1, 3};
        const __m512i step = _mm512_mask_blend_epi8(
            0x7FFF7FFF7FFF7FFF, _mm512_setzero_si512(),
            _mm512_inserti64x4(
                _mm512_castsi256_si512(_mm256_inserti128_si256(_mm256_setzero_si256(), _mm_set1_epi8(3), 1)),
                _mm256_inserti128_si256(_mm256_set1_epi8(6), _mm_set1_epi8(9), 1), 1));
        const __m128i bytes = _mm_insert_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), 0, 15);
        const __m128i rest = _mm_cvtsi32_si128(load_unaligned<int32_t>(p + 8));
        const __m128i all = _mm_insert_epi8(_mm_unpacklo_epi64(bytes, rest), p[12], 12);
        const __m512i index = _mm512_add_epi8(wide::table16(kFirst), step);
        const __m512i v = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(all), index);
        const __m512i power = _mm512_load_si512(kPower), low = _mm512_set1_epi16(255);
        const __m512i three = _mm512_set1_epi16(3);
        const __m512i even = _mm512_and_si512(_mm512_mullo_epi16(v, power), low);
        const __m512i odd =
            _mm512_and_si512(_mm512_mullo_epi16(_mm512_srli_epi16(v, 8), _mm512_srli_epi16(power, 8)), low);
        const __m512i even_trits = _mm512_srli_epi16(_mm512_mullo_epi16(even, three), 8);
        const __m512i odd_trits = _mm512_mullo_epi16(odd, three);
        return _mm512_mask_blend_epi8(0xAAAAAAAAAAAAAAAA, even_trits, odd_trits);
    }
    static Codes512 wide(const uint8_t* p) {
        Codes512 r;
        for (int i = 0; i < 4; ++i) r.q[i] = trits(p + 13 * i);
        r.d = _mm512_set1_ps(1.0f);
        return r;
    }
#endif
};

struct UnpackIQ2_BN {
    static constexpr int kType = 135, kGroup = 32, kBlock = 64, kBlockBytes = 16, kZero = 1;
    static constexpr int kLow = 0, kHigh = 3;
    static constexpr int kHeaderBytes = 4;
    static constexpr bool kUnitScales = true;
    static float row_scale(const uint8_t* row) { return load_unaligned<float>(row); }
    template <class C>
    static void block(const uint8_t* p, C codes, float* d, float*) {
        d[0] = d[1] = 1.0f;
        const c32::Codes32 v = c32::twice(p);
        c32::store(codes, c32::shift_halves(v, 0, 2) & 3);
        c32::store(codes + 32, c32::shift_halves(v, 4, 6) & 3);
    }
#if defined(__AVX2__)
    static __m128i bytes_of_64(const uint8_t* p) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    }
    class Columns {
      public:
        Columns(__m256i even_rows, __m256i odd_rows)
            : bytes_{_mm256_unpacklo_epi64(even_rows, odd_rows), _mm256_unpackhi_epi64(even_rows, odd_rows)} {
        }
        __m256i of(int g) const {
            return _mm256_and_si256(_mm256_srli_epi16(bytes_[g & 1], g & ~1), _mm256_set1_epi8(3));
        }

      private:
        __m256i bytes_[2];  // 0 to 7, 8 to 15
    };
#endif
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p) {
        const __m512i counts =
            _mm512_setr_epi64(0, 0, 0x0002000200020002, 0x0002000200020002, 0x0004000400040004,
                              0x0004000400040004, 0x0006000600060006, 0x0006000600060006);
        Codes512 r;
        for (int i = 0; i < 4; ++i) {
            const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * i));
            r.q[i] = _mm512_and_si512(_mm512_srlv_epi16(_mm512_broadcast_i32x4(v), counts), wide::bytes(3));
        }
        r.d = _mm512_set1_ps(1.0f);
        return r;
    }
#endif
};

struct UnpackTQ2_0 {
    static constexpr int kType = 35, kGroup = 32, kBlock = 256, kBlockBytes = 66, kZero = 1;
    static constexpr int kLow = 0, kHigh = 3;
    template <class C>
    static void block(const uint8_t* p, C codes, float* d, float*) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            d[i] = load_f16(p + 64);
            c32::store(codes + 32 * i, c32::two_bit_fields(p, i));
        }
    }
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p) {
        Codes512 r;
        for (int i = 0; i < 4; ++i) r.q[i] = wide::two_bit_fields(p, i);
        r.d = wide::f16_lanes(p + 64);
        return r;
    }
#endif
};

// Base-3 bytes in runs of 32 and 16 with five trits and of 4 with four: trit n of a run comes before trit n
// + 1.
struct UnpackTQ1_0 {
    static constexpr int kType = 34, kGroup = 32, kBlock = 256, kBlockBytes = 54, kZero = 1;
    static constexpr int kLow = 0, kHigh = 2;
    // 3 * v / 256 of bytes v.
    template <class V>
    static V trits(V v) {
        return -reinterpret_cast<V>(v > 85) - reinterpret_cast<V>(v > 170);
    }
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        c32::Codes32 long_run = c32::load(p);
        auto short_run = load_unaligned<c32::Codes16>(p + 32);
        for (int n = 0; n < 5; ++n) {
            c32::store(codes + 32 * n, trits(long_run));
            const c32::Codes16 t = trits(short_run);
            std::memcpy(codes + 160 + 16 * n, &t, 16);
            long_run *= 3;
            short_run *= 3;
        }
        typedef uint32_t Dwords __attribute__((vector_size(16)));
        const auto rest = load_unaligned<uint32_t>(p + 48);
        const c32::Codes16 powers = {1, 1, 1, 1, 3, 3, 3, 3, 9, 9, 9, 9, 27, 27, 27, 27};
        const c32::Codes16 t = trits(reinterpret_cast<c32::Codes16>(Dwords{} + rest) * powers);
        std::memcpy(codes + 240, &t, 16);
        for (int g = 0; g < 8; ++g) d[g] = load_f16(p + 52);
    }
#if defined(__AVX512VNNI__)
    // Bytes times 3 and 9; bits beyond them are lost, as they shall be.
    template <class V>
    static V times3(V v) {
        return v + v + v;
    }
    template <class V>
    static V times9(V v) {
        return times3(times3(v));
    }
    static __m512i trits512(__m512i v) {
        const auto above = [&](int at) {
            return _mm512_min_epu8(_mm512_subs_epu8(v, wide::bytes(at)), wide::bytes(1));
        };
        return _mm512_add_epi8(above(85), above(170));
    }
    // The first trit of each byte of a and of b, one behind the other.
    static __m512i joined(c32::Codes32 a, c32::Codes32 b) {
        return trits512(_mm512_inserti64x4(_mm512_castsi256_si512((__m256i)a), (__m256i)b, 1));
    }
    static c32::Codes32 pair(c32::Codes16 a, c32::Codes16 b) {
        return (c32::Codes32)_mm256_inserti128_si256(_mm256_castsi128_si256((__m128i)a), (__m128i)b, 1);
    }
    static Codes512 wide(const uint8_t* p) {
        const c32::Codes32 run = c32::load(p), run3 = times3(run), run9 = times9(run), run27 = times9(run3);
        const auto half = load_unaligned<c32::Codes16>(p + 32);
        const c32::Codes32 halves = pair(half, times3(half)), halves9 = times9(halves);
        const auto rest = (c32::Codes16)_mm_set1_epi32(load_unaligned<int32_t>(p + 48));
        const auto rest3 = (c32::Codes16)_mm_blend_epi32((__m128i)rest, (__m128i)times3(rest), 0xA);
        const __m128i rests = _mm_blend_epi32((__m128i)rest3, (__m128i)times9(rest3), 0xC);
        const auto half81 = times9((c32::Codes16)_mm256_castsi256_si128((__m256i)halves9));
        Codes512 r;
        r.q[0] = joined(run, run3);
        r.q[1] = joined(run9, run27);
        r.q[2] = joined(times9(run9), halves);
        r.q[3] = joined(halves9, pair(half81, (c32::Codes16)rests));
        r.d = wide::f16_lanes(p + 52);
        return r;
    }
#endif
};

// Q4_0_4x8 and Q4_0_8x8: runs of eight bytes of one row after the other, nibbles with the top bit inverted.
template <int Type, int Rows>
struct UnpackQ4_0Runs {
    static constexpr int kType = Type, kRows = Rows, kGroup = 32, kBlock = 32, kBlockBytes = 18 * Rows,
                         kZero = 8;
    static constexpr int kLow = 0, kHigh = 15;
    template <class C>
    static void block(const uint8_t* p, int k, C codes, float* d, float*) {
        const uint8_t* run = p + 2 * Rows + 8 * k;
        uint64_t runs[2] = {load_unaligned<uint64_t>(run), load_unaligned<uint64_t>(run + 8 * Rows)};
        c32::store(codes, c32::nibbles(reinterpret_cast<const uint8_t*>(runs)) ^ 8);
        *d = load_f16(p + 2 * k);
    }
#if defined(__AVX512VNNI__)
    static __m128i runs(const uint8_t* p) {
        return _mm_set_epi64x(load_unaligned<int64_t>(p + 8 * Rows), load_unaligned<int64_t>(p));
    }
    static Codes512 wide(const uint8_t* p, int k) {
        Codes512 r;
        for (int i = 0; i < 4; ++i) {
            const uint8_t* a = p + 2 * kBlockBytes * i + 2 * Rows + 8 * k;
            const __m512i lanes =
                _mm512_mask_broadcast_i32x4(_mm512_broadcast_i32x4(runs(a)), 0xFF00, runs(a + kBlockBytes));
            r.q[i] = _mm512_xor_si512(wide::nibbles16(lanes), wide::bytes(8));
        }
        uint16_t d[8];
        for (int b = 0; b < 8; ++b) d[b] = load_unaligned<uint16_t>(p + b * kBlockBytes + 2 * k);
        const __m128i words =
            _mm_setr_epi16(static_cast<short>(d[0]), static_cast<short>(d[1]), static_cast<short>(d[2]),
                           static_cast<short>(d[3]), static_cast<short>(d[4]), static_cast<short>(d[5]),
                           static_cast<short>(d[6]), static_cast<short>(d[7]));
        r.d = _mm512_castps256_ps512(_mm256_cvtph_ps(words));
        return r;
    }
#endif
};

}  // namespace ikpy
