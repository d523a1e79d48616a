// Unpackers of the interleaved 256-column types made from k-quants and IQ_K types. Layouts:
// quant-formats.md#interleaved-k-quants, quant-formats.md#interleaved-non-linear-types.
#pragma once
#include "kernels/gemv/gemv_interleaved_words.hpp"
#include "kernels/simd/byte_dots.hpp"
#include "unpack/interleaved.hpp"

namespace ikpy {

// k-quants

struct UnpackQ2_K_R4 : IntegerScales {
    static constexpr int kType = 210, kRows = 4, kGroup = 16, kBlock = 256, kBlockBytes = 336, kZero = 0;
    static constexpr int kLow = 0, kHigh = 3;
    template <class Out>
    static void codes(const Quads<4>& q, int ib, Out& out) {
        interleaved::p4(q, 80 + 32 * ib, [&](int column, Lanes v) { out.put(column, v); });
    }
    template <class At>
    static void scales(const uint8_t* p, int, const At& d, const At& m) {
        with_factors(p, interleaved::halves(p), d, m);
    }
    template <class At>
    static void with_factors(const uint8_t* p, interleaved::Four factors, const At& d, const At& m) {
        int8_t scale[64], min[64];
        for (int part = 0; part < 4; ++part) {
            const auto v = load_unaligned<interleaved::Bytes>(p + 16 + 16 * part);
            interleaved::store(scale + 16 * part, v & 15);
            interleaved::store(min + 16 * part, v >> 4);
        }
        interleaved::scaled<16>(factors, scale, 4, d);
        interleaved::scaled<16>(-interleaved::halves(p + 8), min, 4, m);
    }
    static Lanes word_scales(const Quads<4>& q, int part) {
        return interleaved::low_nibbles(q.bytes(16 + 16 * part));
    }
    static Lanes word_offsets(const Quads<4>& q, int part) {
        return interleaved::high_nibbles(q.bytes(16 + 16 * part));
    }
};

struct UnpackQ3_K_R4 : IntegerScales {
    static constexpr int kType = 211, kRows = 4, kGroup = 16, kBlock = 256, kBlockBytes = 440, kZero = 128;
    static constexpr int kLow = 124, kHigh = 131;
    template <class Out>
    static void codes(const Quads<4>& q, int ib, Out& out) {
        const Lanes high = q.bytes(56 + 16 * ib);
        interleaved::p4(q, 184 + 32 * ib, [&](int column, Lanes v) {
            out.put(column, (v | interleaved::moved(high, column / 4, 2, 4)) + 124);
        });
    }
    template <class At>
    static void scales(const uint8_t* p, int, const At& d, const At& m) {
        with_factors(p, interleaved::halves(p), d, m);
    }
    template <class At>
    static void with_factors(const uint8_t* p, interleaved::Four factors, const At& d, const At&) {
        interleaved::scales_of_parts<UnpackQ3_K_R4>(p, factors, d);
    }
    template <class S>
    static auto scale_integers(const S& source, int part) {
        return interleaved::six_bit_scales(source, 24, 8, part);
    }
    static Lanes word_scales(const Quads<4>& q, int part) { return scale_integers(q, part); }
};

#if defined(IKPY_BYTE_DOTS)
template <class U>
struct UnpackIntegerScalesR4 : U {
    static void scales(const uint8_t* p, int, float* d, float* m) {
        U::with_factors(p, interleaved::Four{1.0f, 1.0f, 1.0f, 1.0f}, d, m);
    }
};

template <>
struct IntegerScaled<UnpackQ2_K_R4> {
    using Unpack = UnpackIntegerScalesR4<UnpackQ2_K_R4>;
    static constexpr int kLowScale = 0, kHighScale = 15;
    static float factor(const uint8_t* block, int row) { return load_f16(block + 2 * row); }
    static float offset_factor(const uint8_t* block, int row) { return -load_f16(block + 8 + 2 * row); }
};

template <>
struct IntegerScaled<UnpackQ3_K_R4> {
    using Unpack = UnpackIntegerScalesR4<UnpackQ3_K_R4>;
    static constexpr int kLowScale = -32, kHighScale = 31;
    static float factor(const uint8_t* block, int row) { return load_f16(block + 2 * row); }
};
#endif

// Scales and minima of Q4_K_R4 and Q5_K_R4.
template <class At>
inline void scales_and_mins_r4(const uint8_t* p, const At& d, const At& m) {
    int8_t scale[32], min[32];
    const auto high = load_unaligned<interleaved::Bytes>(p + 16);
    for (int part = 0; part < 2; ++part) {
        const auto low = load_unaligned<interleaved::Bytes>(p + 32 + 16 * part);
        const interleaved::Bytes h = part ? high >> 4 : high & 15;
        interleaved::store(scale + 16 * part, (low & 15) | interleaved::to_high_nibbles(h & 3));
        interleaved::store(min + 16 * part, (low >> 4) | interleaved::to_high_nibbles(h >> 2));
    }
    interleaved::scaled<8>(interleaved::halves(p), scale, 4, d);
    interleaved::scaled<8>(-interleaved::halves(p + 8), min, 4, m);
}

struct UnpackQ4_K_R4 : IntegerScales {
    static constexpr int kType = 212, kRows = 4, kGroup = 32, kBlock = 256, kBlockBytes = 576, kZero = 0;
    static constexpr int kLow = 0, kHigh = 15;
    template <class Out>
    static void codes(const Quads<4>& q, int ib, Out& out) {
        interleaved::n4(q, 64 + 64 * ib, [&](int column, Lanes v) { out.put(column, v); });
    }
    template <class At>
    static void scales(const uint8_t* p, int, const At& d, const At& m) {
        scales_and_mins_r4(p, d, m);
    }
};

struct UnpackQ5_K_R4 : IntegerScales {
    static constexpr int kType = 213, kRows = 4, kGroup = 32, kBlock = 256, kBlockBytes = 704, kZero = 0;
    static constexpr int kLow = 0, kHigh = 31;
    template <class Out>
    static void codes(const Quads<4>& q, int ib, Out& out) {
        const Lanes high = q.bytes(64 + 16 * ib);
        interleaved::n4(q, 192 + 64 * ib, [&](int column, Lanes v) {
            const int bit = interleaved::kQ5_KBits.of[column / 4];
            out.put(column, v | interleaved::moved(high, bit, 4, 16));
        });
    }
    template <class At>
    static void scales(const uint8_t* p, int, const At& d, const At& m) {
        scales_and_mins_r4(p, d, m);
    }
};

struct UnpackQ6_K_R4 : IntegerScales {
    static constexpr int kType = 214, kRows = 4, kGroup = 16, kBlock = 256, kBlockBytes = 840, kZero = 128;
    static constexpr int kLow = 96, kHigh = 159;
    template <class Out>
    static void codes(const Quads<4>& q, int ib, Out& out) {
        constexpr int kPair[4] = {0, 2, 1, 3};  // of columns 0, 4, 8, 12
        const Lanes high[2] = {q.bytes(72 + 32 * ib), q.bytes(88 + 32 * ib)};
        interleaved::n4(q, 328 + 64 * ib, [&](int column, Lanes v) {
            const int bit = 2 * kPair[column / 4 & 3];
            out.put(column, (v | interleaved::moved(high[column / 16], bit, 4, 0x30)) + 96);
        });
    }
    template <class At>
    static void scales(const uint8_t* p, int, const At& d, const At&) {
        interleaved::scaled<16>(interleaved::halves(p), reinterpret_cast<const int8_t*>(p + 8), 4, d);
    }
    static Lanes word_scales(const Quads<4>& q, int part) { return q.bytes(8 + 16 * part); }
};

// non-linear levels

struct UnpackIQ4_XS_R8 : IntegerScales {
    static constexpr int kType = 223, kRows = 8, kGroup = 32, kBlock = 256, kBlockBytes = 1088, kZero = 128;
    template <class Out>
    static void codes(const Quads<8>& q, int ib, Out& out) {
        for (int column = 0; column < 32; column += 8) {
            const Lanes v = q.bytes(64 + 128 * ib + 4 * column);
            out.put(column, interleaved::lookup(kIq4Codes, interleaved::low_nibbles(v)));
            out.put(column + 4, interleaved::lookup(kIq4Codes, interleaved::high_nibbles(v)));
        }
    }
    template <class At>
    static void scales(const uint8_t* p, int quad, const At& d, const At&) {
        int8_t s[64];
        for (int part = 0; part < 4; ++part)
            interleaved::store(s + 16 * part,
                               interleaved::six_bit_scales(interleaved::GroupBytes{p}, 32, 16, part));
        interleaved::scaled<8>(interleaved::halves(p + 8 * quad), s + 4 * quad, 8, d);
    }
#if defined(__AVX512VNNI__)
    // Of four groups, those of a quad of rows in 16 bytes.
    static Lanes scale_integers(const Quads<8>& q, int part) {
        const Lanes low = q.bytes(32);
        __m512i high = reinterpret_cast<__m512i>(q.bytes(16));
        high = _mm512_shuffle_i64x2(high, high, 0xA0);
        const __m512i turns = _mm512_setr_epi64(0, 0, 2, 2, 0, 0, 2, 2);
        high = _mm512_srlv_epi64(high, _mm512_add_epi64(turns, _mm512_set1_epi64(4 * part)));
        const Lanes nibbles = part ? interleaved::high_nibbles(low) : interleaved::low_nibbles(low);
        const Lanes upper = interleaved::to_high_nibbles(reinterpret_cast<Lanes>(high) & 3);
        const __m512i by_quad = _mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
        return reinterpret_cast<Lanes>(
            _mm512_permutexvar_epi32(by_quad, reinterpret_cast<__m512i>((nibbles | upper) - 32)));
    }
#endif
};

// What the extra bits add to the codes of sub-block ib: X4 bytes at `extra` of the left and right 16 columns.
struct ShiftedHalves {
    Lanes left, right;
    int step;
    template <class Q>
    ShiftedHalves(const Q& q, int extra, int step_)
        : left(q.rows(extra)), right(q.rows(extra + 4)), step(step_) {}
    Lanes of(int ib, int column) const {
        return interleaved::bit_mask(column < 16 ? left : right, ib) & static_cast<uint8_t>(step);
    }
};

// Tables of types with 16 bits of a row for its groups of 16.
template <int Step>
struct StepsOfExtraBits {
    static constexpr int kStep = Step;
#if defined(__AVX512VNNI__)
    class Steps {
      public:
        explicit Steps(const Quads<4>& q) : half_{q.row_bytes(8), q.row_bytes(12)} {}
        __mmask16 of(int ib, int g) const {
            return _mm_test_epi8_mask(half_[g], _mm_set1_epi32(static_cast<int>(0x01010101u << ib)));
        }

      private:
        __m128i half_[2];
    };
#endif
};

// Tables of types with scale bytes for groups of 32, in whose lowest bits they are.
template <int Step>
struct StepsOfOddScales {
    static constexpr int kStep = Step;
#if defined(__AVX512VNNI__)
    class Steps {
      public:
        explicit Steps(const Quads<4>& q) : quads_(q) {}
        __mmask16 of(int ib, int) const {
            return _mm_test_epi8_mask(quads_.row_bytes(4 * ib), _mm_set1_epi8(1));
        }

      private:
        const Quads<4>& quads_;
    };
#endif
};

struct UnpackIQ2_K_R4 : IntegerScales, StepsOfExtraBits<5> {
    static constexpr int kType = 337, kRows = 4, kGroup = 16, kBlock = 256, kBlockBytes = 304, kZero = 128;
    static constexpr int kLow = 97, kHigh = 150;
    template <class Out>
    static void codes(const Quads<4>& q, int ib, Out& out) {
        const ShiftedHalves shifted(q, 8, kStep);
        interleaved::p4(q, 48 + 32 * ib, [&](int column, Lanes v) {
            if constexpr (row_words::WantsFactors<Out>::value)
                out.put_factors(column, interleaved::lookup(kIq2Low.of, v));
            else
                out.put(column, interleaved::lookup(kIq2Codes, v), [&] { return shifted.of(ib, column); });
        });
    }
    template <class At>
    static void scales(const uint8_t* p, int, const At& d, const At&) {
        interleaved::scales_of_parts<UnpackIQ2_K_R4>(p, interleaved::halves(p), d);
    }
    template <class S>
    static auto scale_integers(const S& source, int part) {
        return interleaved::nibbles(source, 16, part) - 8;
    }
    static Lanes word_scales(const Quads<4>& q, int part) { return scale_integers(q, part); }
};

struct UnpackIQ3_K_R4 : IntegerScales, StepsOfExtraBits<4> {
    static constexpr int kType = 338, kRows = 4, kGroup = 16, kBlock = 256, kBlockBytes = 440, kZero = 128;
    static constexpr int kLow = 65, kHigh = 179;
    template <class Out>
    static void codes(const Quads<4>& q, int ib, Out& out) {
        const ShiftedHalves shifted(q, 8, kStep);
        const Lanes high = q.bytes(312 + 16 * ib);
        interleaved::p4(q, 56 + 32 * ib, [&](int column, Lanes v) {
            const Lanes level = v | interleaved::moved(high, column / 4, 2, 4);
            if constexpr (row_words::WantsFactors<Out>::value)
                out.put_factors(column, interleaved::lookup(kIq3Low.of, level));
            else
                out.put(column, interleaved::lookup(kIq3Codes, level),
                        [&] { return shifted.of(ib, column); });
        });
    }
    template <class At>
    static void scales(const uint8_t* p, int, const At& d, const At&) {
        using interleaved::Bytes;
        const uint64_t twice[2] = {load_unaligned<uint64_t>(p + 16), load_unaligned<uint64_t>(p + 16)};
        const Bytes signs = load_unaligned<Bytes>(twice);
        Bytes bit = {1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2};
        int8_t s[64];
        for (int part = 0; part < 4; ++part, bit <<= 2) {
            const Bytes negative = reinterpret_cast<Bytes>((signs & bit) != 0);
            const Bytes odd = interleaved::nibbles(interleaved::GroupBytes{p}, 24, part) * 2 + 1;
            interleaved::store(s + 16 * part, (odd ^ negative) - negative);
        }
        interleaved::scaled<16>(interleaved::halves(p), s, 4, d);
    }
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
    static Lanes word_scales(const Quads<4>& q, int part) {
        const Lanes odd = interleaved::nibbles(q, 24, part) * 2 + 1;
        // Eight bytes of signs twice: bit 2 * part of those of the first two groups, then the next one.
        const __m256i signs = _mm256_shuffle_epi32(reinterpret_cast<__m256i>(q.bytes(16)), 0x44);
        const __m256i bit =
            _mm256_slli_epi16(_mm256_setr_epi64x(kOnes, 2 * kOnes, kOnes, 2 * kOnes), 2 * part);
        const __m256i negative = _mm256_cmpeq_epi8(_mm256_and_si256(signs, bit), bit);
        return (odd ^ reinterpret_cast<Lanes>(negative)) - reinterpret_cast<Lanes>(negative);
    }
    static constexpr int64_t kOnes = 0x0101010101010101;
#endif
};

struct UnpackIQ4_K_R4 : IntegerScales, StepsOfExtraBits<4> {
    static constexpr int kType = 339, kRows = 4, kGroup = 16, kBlock = 256, kBlockBytes = 576, kZero = 128;
    template <class Out>
    static void codes(const Quads<4>& q, int ib, Out& out) {
        const ShiftedHalves shifted(q, 8, kStep);
        interleaved::n4(q, 64 + 64 * ib, [&](int column, Lanes v) {
            if constexpr (row_words::WantsFactors<Out>::value)
                out.put_factors(column, interleaved::lookup(kIq4Signed.of, v));
            else
                out.put(column, interleaved::lookup(kIq4Codes, v), [&] { return shifted.of(ib, column); });
        });
    }
    template <class At>
    static void scales(const uint8_t* p, int, const At& d, const At&) {
        interleaved::scales_of_parts<UnpackIQ4_K_R4>(p, interleaved::halves(p), d);
    }
    template <class S>
    static auto scale_integers(const S& source, int part) {
        return interleaved::six_bit_scales(source, 32, 16, part);
    }
    static Lanes word_scales(const Quads<4>& q, int part) { return scale_integers(q, part); }
};

// 32 columns of five-bit levels: nibbles at qs, fifth bits at qh; `shift` is added to the codes of a column.
template <class Q, class Out, class F>
inline void iq5_codes(const Q& q, int qs, int qh, Out& out, F shift) {
    const Lanes high = q.bytes(qh);
    interleaved::n4(q, qs, [&](int column, Lanes v) {
        const int bit = interleaved::kIQ5_KBits.of[column / 4];
        const uint8_t* table = row_words::WantsFactors<Out>::value ? kIq5Signed.of : kIq5Codes;
        const Lanes a = interleaved::lookup(table, v), b = interleaved::lookup(table + 16, v);
        const Lanes level = interleaved::select_by_bit(high, bit, b, a);
        if constexpr (row_words::WantsFactors<Out>::value)
            out.put_factors(column, level);
        else
            out.put(column, level, [&] { return shift(column); });
    });
}

struct UnpackIQ5_K_R4 : IntegerScales, StepsOfExtraBits<2> {
    static constexpr int kType = 340, kRows = 4, kGroup = 16, kBlock = 256, kBlockBytes = 704, kZero = 128;
    template <class Out>
    static void codes(const Quads<4>& q, int ib, Out& out) {
        const ShiftedHalves shifted(q, 8, kStep);
        iq5_codes(q, 64 + 64 * ib, 576 + 16 * ib, out, [&](int column) { return shifted.of(ib, column); });
    }
    template <class At>
    static void scales(const uint8_t* p, int, const At& d, const At&) {
        interleaved::scales_of_parts<UnpackIQ5_K_R4>(p, interleaved::halves(p), d);
    }
    template <class S>
    static auto scale_integers(const S& source, int part) {
        return interleaved::six_bit_scales(source, 32, 16, part);
    }
    static Lanes word_scales(const Quads<4>& q, int part) { return scale_integers(q, part); }
};

// Odd scales: bit 0 of the byte selects the table.
struct OddScales {
    template <class S>
    static auto scale_integers(const S& source, int part) {
        return (source.bytes(16 * part) & 254) - 127;
    }
};

struct UnpackIQ4_KS_R4 : IntegerScales, OddScales, StepsOfOddScales<4> {
    static constexpr int kType = 344, kRows = 4, kGroup = 32, kBlock = 256, kBlockBytes = 544, kZero = 128;
    static constexpr int kHeaderBytes = 4;
    static float row_scale(const uint8_t* group, int k) { return load_unaligned<float>(group + 4 * k); }
    template <class Out>
    static void codes(const Quads<4>& q, int ib, Out& out) {
        const Lanes shift = interleaved::shift_left(q.rows(4 * ib) & 1, 2);
        interleaved::n4(q, 32 + 64 * ib, [&](int column, Lanes v) {
            out.put(column, interleaved::lookup(kIq4Codes, v), [&] { return shift; });
        });
    }
    template <class At>
    static void scales(const uint8_t* p, int, const At& d, const At&) {
        interleaved::scales_of_parts<UnpackIQ4_KS_R4>(p, interleaved::Four{1, 1, 1, 1}, d);
    }
};

struct UnpackIQ5_KS_R4 : IntegerScales, OddScales, StepsOfOddScales<2> {
    static constexpr int kType = 352, kRows = 4, kGroup = 32, kBlock = 256, kBlockBytes = 672, kZero = 128;
    static constexpr int kHeaderBytes = 4;
    static float row_scale(const uint8_t* group, int k) { return load_unaligned<float>(group + 4 * k); }
    template <class Out>
    static void codes(const Quads<4>& q, int ib, Out& out) {
        const Lanes shift = interleaved::shift_left(q.rows(4 * ib) & 1, 1);
        iq5_codes(q, 32 + 64 * ib, 544 + 16 * ib, out, [&](int) { return shift; });
    }
    template <class At>
    static void scales(const uint8_t* p, int, const At& d, const At&) {
        interleaved::scales_of_parts<UnpackIQ5_KS_R4>(p, interleaved::Four{1, 1, 1, 1}, d);
    }
};

}  // namespace ikpy
