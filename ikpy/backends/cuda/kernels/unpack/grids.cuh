// Grid types: eight or four elements are a lattice point with signs (quant-formats.md#grid-types).
#pragma once
#include "own_grids.cuh"

namespace ikpy::cuda {

// Signs of eight elements: bits `at` to at + 7 of a word, or, if they are even, seven of them and their
// parity. Bits are counted by a pipe that has nothing else to do.
template <bool Even>
struct Signs {
    static constexpr bool kEven = Even;
    unsigned word;
    int at;

    __device__ __forceinline__ unsigned seven() const { return word >> at & 0x7f; }
    // A bit for each element; of more than eight bits the others mean nothing.
    __device__ __forceinline__ unsigned mask() const {
        return Even ? seven() + (static_cast<unsigned>(__popc(seven())) << 7) : word >> at;
    }
    // Of the first and of the last four elements the tops of bytes; the other bits mean nothing.
    __device__ __forceinline__ unsigned first_tops() const { return seven() * 0x10204080u; }
    __device__ __forceinline__ unsigned last_tops() const {
        static_assert(Even);
        return seven() * 0x01020408u + (static_cast<unsigned>(__popc(seven())) << 31);
    }
    // Bits 2 of nibbles, in the order of OwnEights; the others mean nothing. Products of seven bits do not
    // meet.
    __device__ __forceinline__ unsigned in_nibbles() const {
        const unsigned spread = seven() * 0x00810204u;
        return Even ? spread + (static_cast<unsigned>(__popc(seven())) << 30)
                    : select_bits(0x40000000u, move_bits(word, at + 7, 30), spread);
    }
};

// Code z of signs of the interleaved types to their mask.
__device__ __forceinline__ unsigned code_mask(unsigned z) { return (z ^ z << 1) & 255; }
__device__ __forceinline__ float odd(unsigned s) { return static_cast<float>(2 * s + 1); }

// Scales of two halves, whose codes are the nibbles of a byte: odd multiples of an eighth of the block's.
__device__ __forceinline__ void set_eighths(float* scales, float block, unsigned codes) {
    const float d = block * 0.125f;
    scales[0] = d * odd(codes & 15);
    scales[1] = d * odd(codes >> 4);
}

// Magnitudes (1 .. 127) negated where the tops of bytes are set.
__device__ __forceinline__ unsigned negate_by_tops(unsigned magnitudes, unsigned tops) {
    return (magnitudes ^ permute_bytes(tops, tops, 0xba98)) + (permute_bytes(tops, tops, 0xba98) & kOnes);
}

// Words 2 t and 2 t + 1 of a group from points and an eight-bit sign mask.
__device__ __forceinline__ void set_eight(Group& g, int t, unsigned low, unsigned high, unsigned mask) {
    g.q[2 * t] = negate_bytes(low, spread_bits(mask));
    g.q[2 * t + 1] = negate_bytes(high, spread_bits(mask >> 4));
}
__device__ __forceinline__ void set_point(Group& g, int t, unsigned long long point, unsigned mask) {
    set_eight(g, t, static_cast<unsigned>(point), static_cast<unsigned>(point >> 32), mask);
}

// Where the kernels but matvec1_ look points up: in global memory. Words 2 t and 2 t + 1 of a group.
template <class Points>
struct InLines {
    template <class S>
    __device__ __forceinline__ void operator()(Group& g, int t, unsigned first, unsigned second,
                                               const S& signs) const {
        Points::from_lines(g, t, first, second, signs);
    }
};
// And matvec1_: in shared memory.
template <class Points>
struct InBanks {
    Table table;
    template <class S>
    __device__ __forceinline__ void operator()(Group& g, int t, unsigned first, unsigned second,
                                               const S& signs) const {
        Points::from_banks(table, g, t, first, second, signs);
    }
};

// Points of eight elements, whose number is `first`.
template <int N, const unsigned long long (&Grid)[N]>
struct Eights : OwnEights<N, Grid> {
    template <class S>
    __device__ __forceinline__ static void from_lines(Group& g, int t, unsigned first, unsigned,
                                                      const S& signs) {
        set_point(g, t, __ldg(&Grid[first]), signs.mask());
    }
    template <class S>
    __device__ __forceinline__ static void from_banks(const Table& table, Group& g, int t, unsigned first,
                                                      unsigned, const S& signs) {
        const unsigned at = table.word(first) ^ (signs.in_nibbles() & 0x44444444u);
#pragma unroll
        for (int h = 0; h < 2; ++h)
            g.q[2 * t + h] = permute_bytes(table.kept(0x002b1908u), 0x00d5e7f8u, half_selectors(at, h));
    }
};
// Two points of four elements.
template <int N, const unsigned (&Grid)[N]>
struct Fours : OwnFours<N, Grid> {
    template <class S>
    __device__ __forceinline__ static void set(Group& g, int t, unsigned low, unsigned high, const S& signs) {
        if constexpr (S::kEven) {
            g.q[2 * t] = negate_by_tops(low, signs.first_tops());
            g.q[2 * t + 1] = negate_by_tops(high, signs.last_tops());
        } else {
            set_eight(g, t, low, high, signs.mask());
        }
    }
    template <class S>
    __device__ __forceinline__ static void from_lines(Group& g, int t, unsigned first, unsigned second,
                                                      const S& signs) {
        set(g, t, __ldg(&Grid[first]), __ldg(&Grid[second]), signs);
    }
    template <class S>
    __device__ __forceinline__ static void from_banks(const Table& table, Group& g, int t, unsigned first,
                                                      unsigned second, const S& signs) {
        set(g, t, table.word(first), table.word(second), signs);
    }
};
// Ternary points shifted by an eighth: q = 8 * point + 1 or - 1, so that the shift needs no offset. The table
// holds point + 1 in nibbles. down: not 0 for - 1.
__device__ __forceinline__ void set_ternary(Group& g, int t, unsigned number, unsigned down) {
    const unsigned point = __ldg(&iq1s_codes[number]), base = down ? 9 : 7;
    g.q[2 * t] = sub_bytes((point & kNibbles) << 3, base);
    g.q[2 * t + 1] = sub_bytes((point & ~kNibbles) >> 1, base);
}

// An unpacker of a format, which says where points are and not where they are looked up.
template <class Format>
struct UnpackGrid : UnpackerTraits<256, Format::kBytes, 1, 0, Format::kHalves> {
    using Points = typename Format::Points;
    static constexpr int kTable = Points::kTable, kCopies = kTable == 256 ? 16 : 1;
    static constexpr bool kPaired = Points::kPair != 0;
    __device__ static unsigned table_word(int i) { return Points::table_word(i); }
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        Format::group(p, s, g, InLines<Points>{});
    }
    __device__ static void group(const Table& table, const uint8_t* p, int s, Group& g) {
        Format::group(p, s, g, InBanks<Points>{table});
    }
};

struct FormatIQ2_XXS {
    using Points = Eights<256, iq2xxs_grid>;
    static constexpr int kBytes = 66;
    static constexpr bool kHalves = false;
    template <class Put>
    __device__ __forceinline__ static void group(const uint8_t* p, int s, Group& g, const Put& put) {
        const auto& b = as<BlockIQ2_XXS>(p);
        unsigned words[2];  // numbers; signs and the scale
        load_words<2, 2>(b.sub[s].index, words);
        g.d[0] = half_of(b.d) * 0.125f * odd(words[1] >> 28);
#pragma unroll
        for (int t = 0; t < 4; ++t) put(g, t, words[0] >> 8 * t & 255, 0, Signs<true>{words[1], 7 * t});
    }
};
using UnpackIQ2_XXS = UnpackGrid<FormatIQ2_XXS>;

struct FormatIQ2_XS {
    using Points = Eights<512, iq2xs_grid>;
    static constexpr int kBytes = 74;
    static constexpr bool kHalves = true;
    template <class Put>
    __device__ __forceinline__ static void group(const uint8_t* p, int s, Group& g, const Put& put) {
        const auto& b = as<BlockIQ2_XS>(p);
        set_eighths(g.d, half_of(b.d), b.scales[s]);
        unsigned words[2];
        load_words<2, 2>(b.qs[4 * s].bytes, words);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const unsigned word = words[t / 2];
            const int at = 16 * (t % 2);
            put(g, t, word >> at & 511, 0, Signs<true>{word, at + 9});
        }
    }
};
using UnpackIQ2_XS = UnpackGrid<FormatIQ2_XS>;

struct FormatIQ2_S {
    using Points = Eights<1024, iq2s_grid>;
    static constexpr int kBytes = 82;
    static constexpr bool kHalves = true;
    template <class Put>
    __device__ __forceinline__ static void group(const uint8_t* p, int s, Group& g, const Put& put) {
        const auto& b = as<BlockIQ2_S>(p);
        set_eighths(g.d, half_of(b.d), b.scales[s]);
        const unsigned low = load4<2>(b.qs + 4 * s), signs = load4<2>(b.signs + 4 * s), high = b.qh[s];
#pragma unroll
        for (int t = 0; t < 4; ++t)
            put(g, t, (low >> 8 * t & 255) | (high >> 2 * t & 3) << 8, 0, Signs<false>{signs, 8 * t});
    }
};
using UnpackIQ2_S = UnpackGrid<FormatIQ2_S>;

struct FormatIQ3_XXS {
    using Points = Fours<256, iq3xxs_grid>;
    static constexpr int kBytes = 98;
    static constexpr bool kHalves = false;
    template <class Put>
    __device__ __forceinline__ static void group(const uint8_t* p, int s, Group& g, const Put& put) {
        const auto& b = as<BlockIQ3_XXS>(p);
        const unsigned signs = load4<2>(b.signs_scale[s]);
        g.d[0] = half_of(b.d) * 0.25f * odd(signs >> 28);
        unsigned words[2];
        load_words<2, 2>(b.qs + 8 * s, words);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const unsigned v = words[t / 2] >> 16 * (t % 2);
            put(g, t, v & 255, v >> 8 & 255, Signs<true>{signs, 7 * t});
        }
    }
};
using UnpackIQ3_XXS = UnpackGrid<FormatIQ3_XXS>;

struct FormatIQ3_S {
    using Points = Fours<512, iq3s_grid>;
    static constexpr int kBytes = 110;
    static constexpr bool kHalves = false;
    template <class Put>
    __device__ __forceinline__ static void group(const uint8_t* p, int s, Group& g, const Put& put) {
        const auto& b = as<BlockIQ3_S>(p);
        g.d[0] = half_of(b.d) * odd(nibble_of(b.scales, s));
        const unsigned high = b.qh[s], signs = load4<2>(b.signs + 4 * s);
        unsigned words[2];
        load_words<2, 2>(b.qs + 8 * s, words);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const unsigned v = words[t / 2] >> 16 * (t % 2), h = high >> 2 * t;
            put(g, t, (v & 255) | (h & 1) << 8, (v >> 8 & 255) | (h & 2) << 7, Signs<false>{signs, 8 * t});
        }
    }
};
using UnpackIQ3_S = UnpackGrid<FormatIQ3_S>;

struct UnpackIQ1_S : UnpackerTraits<256, 50> {
    using Own = OwnIQ1_S;
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        const auto& b = as<BlockIQ1_S>(p);
        const unsigned h = load2<2>(b.qh[s].bytes), low = load4<2>(b.qs + 4 * s);
        g.d[0] = half_of(b.d) * 0.125f * odd(h >> 12 & 7);
#pragma unroll
        for (int t = 0; t < 4; ++t)
            set_ternary(g, t, (low >> 8 * t & 255) | (h >> 3 * t & 7) << 8, h & 0x8000);
    }
};
struct UnpackIQ1_M : UnpackerTraits<256, 56, 1, 0, true> {
    using Own = OwnIQ1_M;
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        const auto& b = as<BlockIQ1_M>(p);
        unsigned bits = 0;
#pragma unroll
        for (int w = 0; w < 4; ++w) bits |= (load2<2>(b.scales[w].bytes) >> 12) << 4 * w;
        const float d = f16_to_f32(static_cast<uint16_t>(bits)) * 0.125f;
        const unsigned scales = load2<2>(b.scales[s >> 1].bytes) >> 6 * (s & 1);
        g.d[0] = d * odd(scales & 7);
        g.d[1] = d * odd(scales >> 3 & 7);
        const unsigned low = load4<4>(b.qs + 4 * s), high = load2<2>(b.qh + 2 * s);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const unsigned h = high >> 4 * t;
            set_ternary(g, t, (low >> 8 * t & 255) | (h & 7) << 8, h & 8);
        }
    }
};
// interleaved

// Four bytes with a sign code above one bit of the scale: masks of the four 8-groups, and the scale.
__device__ __forceinline__ unsigned signs_and_scale(const uint8_t* sas, int k, int s, unsigned* scale) {
    const unsigned v = load4<4>(sas + 16 * s + 4 * k), z = v >> 1 & 0x7f7f7f7fu;
    *scale = (v & 1) | (v >> 7 & 2) | (v >> 14 & 4) | (v >> 21 & 8);
    return z ^ z << 1;
}

struct UnpackIQ2_XXS_R4 : UnpackerTraits<256, 264, 4> {
    using Own = OwnIQ2_XXS_R4;
    __device__ static void group(const uint8_t* p, int k, int s, Group& g) {
        const auto& b = as<BlockIQ2_XXS_R4>(p);
        unsigned scale;
        const unsigned masks = signs_and_scale(b.sas, k, s, &scale), index = load4<4>(b.qs + 16 * s + 4 * k);
        g.d[0] = half_of(b.d[k]) * 0.125f * odd(scale);
#pragma unroll
        for (int t = 0; t < 4; ++t)
            set_point(g, t, __ldg(&iq2xxs_grid[index >> 8 * t & 255]), masks >> 8 * t & 255);
    }
};

struct UnpackIQ3_XXS_R4 : UnpackerTraits<256, 392, 4> {
    using Own = OwnIQ3_XXS_R4;
    __device__ static void group(const uint8_t* p, int k, int s, Group& g) {
        const auto& b = as<BlockIQ3_XXS_R4>(p);
        unsigned scale;
        const unsigned masks = signs_and_scale(b.sas, k, s, &scale);
        g.d[0] = half_of(b.d[k]) * 0.25f * odd(scale);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const unsigned v = load2<2>(b.qs + 32 * s + 8 * k + 2 * t);
            set_eight(g, t, __ldg(&iq3xxs_grid[v & 255]), __ldg(&iq3xxs_grid[v >> 8]), masks >> 8 * t & 255);
        }
    }
};

struct UnpackIQ2_XS_R4 : UnpackerTraits<256, 296, 4, 0, true> {
    using Own = OwnIQ2_XS_R4;
    __device__ static void group(const uint8_t* p, int k, int s, Group& g) {
        const auto& b = as<BlockIQ2_XS_R4>(p);
        set_eighths(g.d, half_of(b.d[k]), b.scales[4 * s + k]);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const unsigned v = load2<2>(b.qs[16 * s + 4 * k + t].bytes);
            set_point(g, t, __ldg(&iq2xs_grid[v & 511]), code_mask(v >> 9));
        }
    }
};

struct UnpackIQ2_S_R4 : UnpackerTraits<256, 328, 4, 0, true> {
    using Own = OwnIQ2_S_R4;
    __device__ static void group(const uint8_t* p, int k, int s, Group& g) {
        const auto& b = as<BlockIQ2_S_R4>(p);
        const unsigned high = b.qh[4 * s + k];
        set_eighths(g.d, half_of(b.d[k]), b.scales[4 * s + k]);
        const unsigned low = load4<4>(b.qs + 16 * s + 4 * k), signs = load4<4>(b.signs + 16 * s + 4 * k);
#pragma unroll
        for (int t = 0; t < 4; ++t)
            set_point(g, t, __ldg(&iq2s_grid[(low >> 8 * t & 255) | (high >> 2 * t & 3) << 8]),
                      signs >> 8 * t & 255);
    }
};

struct UnpackIQ3_S_R4 : UnpackerTraits<256, 440, 4> {
    using Own = OwnIQ3_S_R4;
    __device__ static void group(const uint8_t* p, int k, int s, Group& g) {
        const auto& b = as<BlockIQ3_S_R4>(p);
        const int place = 4 * s + k;
        g.d[0] = half_of(b.d[k]) * odd(b.scales[place & 15] >> 4 * (place >> 4) & 15);
        const unsigned high = b.qh[place], signs = load4<4>(b.signs + 16 * s + 4 * k);
#pragma unroll
        for (int w = 0; w < 8; ++w) {
            const unsigned index = b.qs[32 * s + k + 8 * (w & 3) + 4 * (w >> 2)] | (high >> w & 1) << 8;
            g.q[w] = negate_bytes(__ldg(&iq3s_grid[index]), signs >> w & kOnes);
        }
    }
};

struct UnpackIQ1_S_R4 : UnpackerTraits<32, 24, 4, 2> {
    using Own = OwnIQ1_S_R4;
    __device__ static float row_scale(const uint8_t* group, int k) { return load_f16<2>(group + 2 * k); }
    __device__ static void group(const uint8_t* p, int k, int, Group& g) {
        const auto& b = as<BlockIQ1_S_R4>(p);
        const unsigned h = load2<2>(b.qh[k].bytes);
        g.d[0] = 0.125f * odd(h >> 12 & 7);
#pragma unroll
        for (int t = 0; t < 4; ++t) set_ternary(g, t, b.qs[4 * t + k] | (h >> 3 * t & 7) << 8, h & 0x8000);
    }
};

struct UnpackIQ1_M_R4 : UnpackerTraits<32, 28, 4, 2, true> {
    using Own = OwnIQ1_M_R4;
    __device__ static float row_scale(const uint8_t* group, int k) { return load_f16<2>(group + 2 * k); }
    __device__ static void group(const uint8_t* p, int k, int, Group& g) {
        const auto& b = as<BlockIQ1_M_R4>(p);
        g.d[0] = 0.125f * static_cast<float>(b.scales[k] & 15);
        g.d[1] = 0.125f * static_cast<float>(b.scales[k] >> 4);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const unsigned h = b.qh[4 * (t >> 1) + k] >> 4 * (t & 1);
            set_ternary(g, t, b.qs[4 * t + k] | (h & 7) << 8, h & 8);
        }
    }
};

}  // namespace ikpy::cuda
