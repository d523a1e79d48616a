// Layouts of kernels/gemv_lanes.hpp: types made of nibbles, with tables of levels or upper bits or neither.
#pragma once
#include "kernels/gemv_lanes.hpp"
#include "unpack/iq4.hpp"
#include "unpack/iqk.hpp"
#include "unpack/legacy.hpp"
#include "unpack/row_scale.hpp"
#include "unpack/small_blocks.hpp"

#if defined(__AVX512VNNI__)

namespace ikpy {
namespace lanes {

// ---- codes ----

// Byte permutations look at the low six bits of an index: a table that is repeated needs no masks.
struct Levels {
    alignas(64) uint8_t of[64];
    template <size_t N>
    constexpr Levels(const uint8_t (&table)[N], int n) : of() {
        for (int i = 0; i < 64; ++i) of[i] = table[i % n];
    }
    IKPY_VBMI_INLINE __m512i at(__m512i index) const {
        return _mm512_permutexvar_epi8(index, _mm512_load_si512(of));
    }
};

// 8 + 8 bytes of eight blocks, blocks i and 4 + i next to each other. first, last: blocks 0 .. 3 and 4 .. 7.
struct Bytes16 {
    __m512i part[2];
    IKPY_VBMI_INLINE explicit Bytes16(const __m512i* parts) : part{parts[0], parts[1]} {}
    IKPY_VBMI_INLINE Bytes16(__m512i first, __m512i last)
        : part{_mm512_unpacklo_epi64(first, last), _mm512_unpackhi_epi64(first, last)} {}

    // Vector v in the order of codes: low nibbles of both parts, then high ones; other bits mean nothing.
    IKPY_VBMI_INLINE __m512i nibbles(int v) const {
        return v < 2 ? part[v] : _mm512_srli_epi16(part[v - 2], 4);
    }
};

// Of eight blocks of `Size` bytes with 16 bytes of nibbles at `At`.
template <int Size, int At>
IKPY_VBMI_INLINE Bytes16 bytes_of_blocks(const uint8_t* p) {
    const auto four = [](const uint8_t* q) __attribute__((always_inline)) {
        return wide::lanes_abcd(q, q + Size, q + 2 * Size, q + 3 * Size);
    };
    return {four(p + At), four(p + 4 * Size + At)};
}

IKPY_VBMI_INLINE Bytes16 load_128(const uint8_t* p) {
    return {_mm512_loadu_si512(p), _mm512_loadu_si512(p + 64)};
}

// Blocks of 32 weights whose bytes hold the first 16 in low nibbles, the last 16 in high ones.
struct HalvesOfBlocks {
    static constexpr int first(int v, int q) { return 32 * (q / 2 + 4 * (q % 2)) + 8 * v; }
    template <class Levels>
    IKPY_VBMI_INLINE static void look_up(const Bytes16& bytes, const Levels& levels, __m512i* q) {
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) q[v] = levels.at(bytes.nibbles(v));
    }
    IKPY_VBMI_INLINE static void low_nibbles(const Bytes16& bytes, __m512i* q) {
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) q[v] = wide::low_nibbles(bytes.nibbles(v));
    }
};

// Blocks of 64 weights whose 32 bytes hold the first 32 in low nibbles, the last 32 in high ones. Upper bits
// of the indices are bits of other bytes.
struct HalvesOfPairs {
    static constexpr int first(int v, int q) {
        return 128 * (q % 2) + 64 * (q / 4) + 32 * (v / 2) + 16 * (q / 2 % 2) + 8 * (v % 2);
    }
    // bits[i]: the upper bits for part i, those of blocks in their places from bit 4 on after rotating
    // quadwords to the left by turns[low or high nibbles].
    IKPY_VBMI_INLINE static void look_up(const Bytes16& bytes, const __m512i* bits, const __m512i* turns,
                                         const Levels& levels, __m512i* q) {
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) {
            constexpr int kLowOrUpper = 0xCA;  // of the first operand's bits
            const __m512i upper = _mm512_rolv_epi64(bits[v % 2], turns[v / 2]);
            q[v] =
                levels.at(_mm512_ternarylogic_epi32(wide::bytes(15), bytes.nibbles(v), upper, kLowOrUpper));
        }
    }
};

// Codes of blocks of 32 weights with `N` upper bits each, those of vector v from bit from[v] of the bytes in
// `bits` on.
template <int N>
IKPY_VBMI_INLINE void join_bits(const Bytes16& bytes, __m512i bits, const int (&from)[4], __m512i* q) {
    // The 8 x 8 bits that move some of a byte to bit 4 and drop all others.
    const auto moves = [](int bit) __attribute__((always_inline)) {
        int64_t rows = 0;
        for (int i = 0; i < N; ++i) rows |= int64_t{1} << (8 * (3 - i) + bit + i);
        return _mm512_set1_epi64(rows);
    };
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
        const __m512i upper = _mm512_gf2p8affine_epi64_epi8(bits, moves(from[v]), 0);
        q[v] = _mm512_ternarylogic_epi32(wide::bytes(15), bytes.nibbles(v), upper, 0xCA);
    }
}

// Bit b of byte j of the result: bit j of byte 7 - b, in every quadword.
IKPY_VBMI_INLINE __m512i transposed_bits(__m512i v) {
    return _mm512_gf2p8affine_epi64_epi8(_mm512_set1_epi64(static_cast<int64_t>(0x8040201008040201)), v, 0);
}

// Words at the start of eight blocks of 22 or 26 bytes. The first five or six blocks lie in 128 bytes, the
// others in 64.
template <class L, int Words>
class BlockStarts {
    static constexpr int kSize = L::Plain::kBlockBytes / 2, kFirst = (64 - Words) / kSize + 1,
                         kRest = std::min(kFirst * kSize, 8 * kSize - 32);
    struct Index {
        alignas(64) uint16_t of[32] = {};
        // word(i): block * 8 + word of the block that goes to word i; of the loaded words or of those that
        // are collected from the first blocks.
        template <class F>
        constexpr Index(F word, bool loaded) {
            for (int i = 0; i < 32; ++i) {
                const int b = word(i) / 8, w = word(i) % 8, at = kSize * b + w;
                of[i] = static_cast<uint16_t>(loaded ? at : b < kFirst ? Words * b + w : 32 + at - kRest);
            }
        }
    };

  public:
    IKPY_VBMI_INLINE explicit BlockStarts(const uint8_t* p) {
        static constexpr Index kIndex([](int i) { return i / Words % kFirst * 8 + i % Words; }, true);
        first_ = _mm512_permutex2var_epi16(_mm512_loadu_si512(p), _mm512_load_si512(kIndex.of),
                                           _mm512_loadu_si512(p + 64));
        rest_ = _mm512_loadu_si512(p + 2 * kRest);
    }
    // Words A, B, C and D of every block.
    template <int A, int B, int C, int D>
    IKPY_VBMI_INLINE __m512i quadwords() const {
        static constexpr Index kIndex(
            [](int i) {
                const int words[4] = {A, B, C, D};
                return L::first(0, i / 4) / 32 * 8 + words[i % 4];
            },
            false);
        return _mm512_permutex2var_epi16(first_, _mm512_load_si512(kIndex.of), rest_);
    }
    // The first words as numbers in half precision.
    IKPY_VBMI_INLINE __m512 scales() const {
        static constexpr Index kIndex([](int i) { return lane_group<L>(i % 16) * 8; }, false);
        const __m512i words = _mm512_permutex2var_epi16(first_, _mm512_load_si512(kIndex.of), rest_);
        return _mm512_cvtph_ps(_mm512_castsi512_si256(words));
    }

  private:
    __m512i first_, rest_;
};

// ---- scales ----

struct Order16 {
    alignas(16) uint8_t at[16];
    template <class F>
    constexpr explicit Order16(F f) : at() {
        for (int l = 0; l < 16; ++l) at[l] = static_cast<uint8_t>(f(l));
    }
    IKPY_VBMI_INLINE __m128i load() const { return _mm_load_si128(reinterpret_cast<const __m128i*>(at)); }
};

IKPY_VBMI_INLINE __m128i quadword_twice(const uint8_t* p) {
    return _mm_castpd_si128(_mm_loaddup_pd(reinterpret_cast<const double*>(p)));
}

IKPY_VBMI_INLINE __m512 signed_lanes(__m128i bytes) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

// A number in half precision in all lanes. Reads eight bytes.
IKPY_VBMI_INLINE __m512 half_lanes(const uint8_t* p) {
    return _mm512_broadcastss_ps(_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

// Four times six-bit integers less 32: nibbles from bits low(g) on of one quadword, two bits from bits
// high(g) on of another. Bits that wrap around are masked away.
template <class L>
struct SixBits {
    Order16 low, high;
    template <class Low, class High>
    constexpr SixBits(Low low_bit, High high_bit)
        : low([&](int l) { return (low_bit(lane_group<L>(l)) - 2) & 63; }),
          high([&](int l) { return (high_bit(lane_group<L>(l)) - 6) & 63; }) {}
    IKPY_VBMI_INLINE __m512 lanes(__m128i nibbles, __m128i pairs) const {
        const __m128i a = _mm_multishift_epi64_epi8(low.load(), nibbles);
        const __m128i b = _mm_multishift_epi64_epi8(high.load(), pairs);
        const __m128i six = _mm_ternarylogic_epi32(_mm_set1_epi8(0x3C), a, b, 0xCA);
        // six & ~3 ^ 0x80
        return signed_lanes(
            _mm_ternarylogic_epi32(six, _mm_set1_epi8(static_cast<char>(0xFC)), _mm_set1_epi8(-128), 0x6A));
    }
};

// Scale bytes of eight groups: bit 0 selects the table, the rest is an odd scale.
template <class L>
IKPY_VBMI_INLINE void odd_scales(__m128i scales, Codes* w) {
    static constexpr Order16 kOrder([](int l) { return lane_group<L>(l); });
    const __m128i s = _mm_shuffle_epi8(scales, kOrder.load());
    w->shifted = _mm_test_epi8_mask(s, _mm_set1_epi8(1));
    w->d = signed_lanes(_mm_sub_epi8(_mm_andnot_si128(_mm_set1_epi8(1), s), _mm_set1_epi8(127)));
}

// Numbers in half precision, word `Field` of eight blocks of up to 20 bytes.
template <class L, int Field = 0>
struct HalvesAtBlocks {
    static constexpr int kSize = L::Plain::kBlockBytes, kSecond = std::min(4 * kSize, 8 * kSize - 64);
    struct Index {
        alignas(64) uint16_t of[32] = {};
        constexpr Index() {
            for (int l = 0; l < 16; ++l) {
                const int g = lane_group<L>(l);
                of[l] =
                    static_cast<uint16_t>(Field + (g < 4 ? kSize * g / 2 : 32 + (kSize * g - kSecond) / 2));
            }
        }
    };
    IKPY_VBMI_INLINE static __m512 lanes(const uint8_t* p) {
        static constexpr Index kIndex;
        const __m512i words = _mm512_permutex2var_epi16(_mm512_loadu_si512(p), _mm512_load_si512(kIndex.of),
                                                        _mm512_loadu_si512(p + kSecond));
        return _mm512_cvtph_ps(_mm512_castsi512_si256(words));
    }
};

// Words of quadwords as numbers in half precision.
struct Order32 {
    alignas(64) uint16_t at[32];
    template <class F>
    constexpr explicit Order32(F f) : at() {
        for (int l = 0; l < 16; ++l) at[l] = static_cast<uint16_t>(f(l));
    }
    IKPY_VBMI_INLINE __m512 half_lanes(__m512i v) const {
        const __m512i words = _mm512_permutexvar_epi16(_mm512_load_si512(at), v);
        return _mm512_cvtph_ps(_mm512_castsi512_si256(words));
    }
};

// ---- types ----

inline constexpr Levels kLevels4(kIq4Codes, 16), kLevels5(kIq5Codes, 32), kLevels6(kIq6Codes, 64),
    kLevelsMxfp4(kMxfp4Codes, 16);

struct Q4_0 : HalvesOfBlocks {
    using Plain = UnpackQ4_0;
    static constexpr float kScale = 1.0f;
    IKPY_VBMI_INLINE static Codes unpack(const uint8_t* p) {
        Codes w;
        low_nibbles(bytes_of_blocks<18, 2>(p), w.q);
        w.d = HalvesAtBlocks<Q4_0>::lanes(p);
        return w;
    }
};

struct Q4_1 : HalvesOfBlocks {
    using Plain = UnpackQ4_1;
    static constexpr float kScale = 1.0f;
    IKPY_VBMI_INLINE static Codes unpack(const uint8_t* p) {
        Codes w;
        low_nibbles(bytes_of_blocks<20, 4>(p), w.q);
        w.d = HalvesAtBlocks<Q4_1>::lanes(p);
        w.m = HalvesAtBlocks<Q4_1, 1>::lanes(p);
        return w;
    }
};

struct IQ4_NL : HalvesOfBlocks {
    using Plain = UnpackIQ4_NL;
    static constexpr float kScale = 1.0f;
    IKPY_VBMI_INLINE static Codes unpack(const uint8_t* p) {
        Codes w;
        look_up(bytes_of_blocks<18, 2>(p), kLevels4, w.q);
        w.d = HalvesAtBlocks<IQ4_NL>::lanes(p);
        return w;
    }
};

struct MXFP4 : HalvesOfBlocks {
    using Plain = UnpackMXFP4;
    static constexpr float kScale = 1.0f;
    struct Exponents {
        alignas(64) uint8_t of[64] = {};
        constexpr Exponents() {
            for (int l = 0; l < 16; ++l) of[4 * l] = static_cast<uint8_t>(17 * lane_group<MXFP4>(l));
        }
    };
    IKPY_VBMI_INLINE static Codes unpack(const uint8_t* p) {
        static constexpr Exponents kExponents;
        Codes w;
        look_up(bytes_of_blocks<17, 1>(p), kLevelsMxfp4, w.q);
        const __m512i e =
            _mm512_maskz_permutex2var_epi8(0x1111111111111111, _mm512_loadu_si512(p),
                                           _mm512_load_si512(kExponents.of), _mm512_loadu_si512(p + 64));
        w.d = Plain::half_powers(e);
        return w;
    }
};

struct Q5_0 : HalvesOfBlocks {
    using Plain = UnpackQ5_0;
    static constexpr float kScale = 1.0f;
    IKPY_VBMI_INLINE static Codes unpack(const uint8_t* p) {
        static constexpr Order32 kScales([](int i) { return 4 * (i / 2) + 2; });
        const __m512i starts = BlockStarts<Q5_0, 3>(p).quadwords<1, 2, 0, 0>();
        Codes w;
        join_bits<1>(bytes_of_blocks<22, 6>(p), transposed_bits(starts), {7, 6, 5, 4}, w.q);
        w.d = kScales.half_lanes(starts);
        return w;
    }
};

struct Q5_1 : HalvesOfBlocks {
    using Plain = UnpackQ5_1;
    static constexpr float kScale = 1.0f;
    // Quadword i of every block, of which there are three.
    template <int I>
    IKPY_VBMI_INLINE static __m512i quadwords(const __m512i* v) {
        struct Index {
            alignas(64) int64_t of[2][8] = {};
            constexpr Index() {
                for (int q = 0; q < 8; ++q) {
                    const int at = 3 * (first(0, q) / 32) + I;
                    of[0][q] = at % 16;
                    of[1][q] = at < 16 ? q : at - 8;
                }
            }
        };
        static constexpr Index kIndex;
        const __m512i a = _mm512_permutex2var_epi64(v[0], _mm512_load_si512(kIndex.of[0]), v[1]);
        return _mm512_permutex2var_epi64(a, _mm512_load_si512(kIndex.of[1]), v[2]);
    }
    IKPY_VBMI_INLINE static Codes unpack(const uint8_t* p) {
        static constexpr Order32 kScales([](int i) { return 4 * (i / 2); }),
            kOffsets([](int i) { return 4 * (i / 2) + 1; });
        __m512i v[3];
        for (int i = 0; i < 3; ++i) v[i] = _mm512_loadu_si512(p + 64 * i);
        const __m512i starts = quadwords<0>(v), parts[2] = {quadwords<1>(v), quadwords<2>(v)};
        Codes w;
        join_bits<1>(Bytes16(parts), transposed_bits(starts), {3, 2, 1, 0}, w.q);
        w.d = kScales.half_lanes(starts);
        w.m = kOffsets.half_lanes(starts);
        return w;
    }
};

struct Q6_0 : HalvesOfBlocks {
    using Plain = UnpackQ6_0;
    static constexpr float kScale = 1.0f;
    IKPY_VBMI_INLINE static Codes unpack(const uint8_t* p) {
        const BlockStarts<Q6_0, 5> starts(p);
        Codes w;
        join_bits<2>(bytes_of_blocks<26, 10>(p), starts.template quadwords<1, 2, 3, 4>(), {0, 4, 2, 6}, w.q);
        w.d = starts.scales();
        return w;
    }
};

struct IQ4_XS : HalvesOfBlocks {
    using Plain = UnpackIQ4_XS;
    static constexpr float kScale = 0.25f;
    IKPY_VBMI_INLINE static Codes unpack(const uint8_t* p) {
        static constexpr SixBits<IQ4_XS> kScales([](int g) { return 32 + 4 * g; },
                                                 [](int g) { return 16 + 2 * g; });
        Codes w;
        look_up(load_128(p + 8), kLevels4, w.q);
        const __m128i scales = quadword_twice(p);
        w.d = _mm512_mul_ps(kScales.lanes(scales, scales), half_lanes(p));
        return w;
    }
};

struct IQ4_KS : HalvesOfBlocks {
    using Plain = UnpackIQ4_KS;
    static constexpr float kScale = 1.0f;
    IKPY_VBMI_INLINE static Codes unpack(const uint8_t* p) {
        Codes w;
        look_up(load_128(p + 8), kLevels4, w.q);
        odd_scales<IQ4_KS>(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), &w);
        return w;
    }
};

// The low bits of the eight words of a group are its scale byte.
struct IQ4_KSS : HalvesOfBlocks {
    using Plain = UnpackIQ4_KSS;
    static constexpr float kScale = 1.0f;
    IKPY_VBMI_INLINE static Codes unpack(const uint8_t* p) {
        const Bytes16 words = load_128(p);
        // Products with powers of two put four bits of a byte together in each of two lanes.
        const __m512i powers[2] = {_mm512_set1_epi64(0x0008000400020001),
                                   _mm512_set1_epi64(0x0080004000200010)};
        __m512i s = _mm512_setzero_si512(), even[2];
        for (int i = 0; i < 2; ++i) {
            const __m512i word = words.part[i];
            s = _mm512_dpbusd_epi32(s, powers[i], _mm512_and_si512(word, _mm512_set1_epi16(1)));
            even[i] = Plain::nibbles_of(word);
        }
        s = _mm512_add_epi32(s, _mm512_shuffle_epi32(s, _MM_PERM_CDAB));
        Codes w;
        look_up(Bytes16(even), kLevels4, w.q);
        w.shifted = _mm512_test_epi32_mask(s, _mm512_set1_epi32(1));
        const __m512i odd =
            _mm512_sub_epi32(_mm512_and_si512(s, _mm512_set1_epi32(254)), _mm512_set1_epi32(127));
        w.d = _mm512_cvtepi32_ps(odd);
        return w;
    }
};

// Of 16 groups, one bit each.
template <class L>
IKPY_VBMI_INLINE __mmask16 shifted_groups(const uint8_t* p) {
    struct Bits {
        alignas(64) int32_t of[16] = {};
        constexpr Bits() {
            for (int l = 0; l < 16; ++l) of[l] = 1 << lane_group<L>(l);
        }
    };
    static constexpr Bits kBits;
    return _mm512_test_epi32_mask(_mm512_set1_epi32(load_unaligned<int32_t>(p)), _mm512_load_si512(kBits.of));
}

// Scales of IQ4_K and IQ5_K: 4 low bits at p + 8, 2 high bits at p + 4.
template <class L>
IKPY_VBMI_INLINE void k_scales(const uint8_t* p, Codes* w) {
    static constexpr SixBits<L> kScales([](int g) { return 4 * g; }, [](int g) { return 32 + 2 * g; });
    w->d = _mm512_mul_ps(kScales.lanes(quadword_twice(p + 8), quadword_twice(p)), half_lanes(p));
}

struct IQ4_K : HalvesOfBlocks {
    using Plain = UnpackIQ4_K;
    static constexpr float kScale = 0.25f;
    IKPY_VBMI_INLINE static Codes unpack(const uint8_t* p) {
        Codes w;
        look_up(load_128(p + 16), kLevels4, w.q);
        k_scales<IQ4_K>(p, &w);
        w.shifted = shifted_groups<IQ4_K>(p + 2);
        return w;
    }
};

struct IQ5_K : HalvesOfPairs {
    using Plain = UnpackIQ5_K;
    static constexpr float kScale = 0.25f;
    IKPY_VBMI_INLINE static Codes unpack(const uint8_t* p) {
        // Bit i of the 32 bytes belongs to the i-th 32 weights.
        const __m512i high = wide::twice(p + 144);
        const __m512i bits[2] = {_mm512_permutex_epi64(high, 0xA0), _mm512_permutex_epi64(high, 0xF5)};
        const __m512i turns[2] = {_mm512_setr_epi64(4, 0, 4, 0, 2, 62, 2, 62),
                                  _mm512_setr_epi64(3, 63, 3, 63, 1, 61, 1, 61)};
        Codes w;
        look_up(load_128(p + 16), bits, turns, kLevels5, w.q);
        k_scales<IQ5_K>(p, &w);
        w.shifted = shifted_groups<IQ5_K>(p + 2);
        return w;
    }
};

struct IQ6_K : HalvesOfPairs {
    using Plain = UnpackIQ6_K;
    static constexpr float kScale = 1.0f;
    IKPY_VBMI_INLINE static Codes unpack(const uint8_t* p) {
        static constexpr Order16 kOrder([](int l) { return lane_group<IQ6_K>(l); });
        // Two bits from bit 2 * i on of each 32 bytes belong to the i-th 32 of 128 weights.
        const __m512i high = _mm512_loadu_si512(p + 148);
        const __m512i bits[2] = {_mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 2, 6, 0, 4, 2, 6), high),
                                 _mm512_permutexvar_epi64(_mm512_setr_epi64(1, 5, 3, 7, 1, 5, 3, 7), high)};
        const __m512i turns[2] = {_mm512_setr_epi64(4, 4, 4, 4, 0, 0, 0, 0),
                                  _mm512_setr_epi64(2, 2, 2, 2, 62, 62, 62, 62)};
        Codes w;
        look_up(load_128(p + 20), bits, turns, kLevels6, w.q);
        const __m128i scales = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 4));
        w.d = _mm512_mul_ps(signed_lanes(_mm_shuffle_epi8(scales, kOrder.load())), half_lanes(p));
        w.shifted = shifted_groups<IQ6_K>(p + 2);
        return w;
    }
};

}  // namespace lanes
}  // namespace ikpy

#endif
