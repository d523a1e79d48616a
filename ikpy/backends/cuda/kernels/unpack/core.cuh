// What an unpacker delivers, and the bit work that unpackers share.
//
// An unpacker is a struct with
//   kName, kBlock (elements per block), kBytes (per block of all rows), kRows (interleaved rows, 1 = plain),
//   kHeader (header bytes per row, in front of the blocks of a row or group of rows)
//   kHalves: scales (and offsets) per 16 elements instead of 32; kOffset: weights have an offset
//   kBias: what is to be subtracted from the bytes yet (0 .. 127, where it is not 0)
//   static void group(const uint8_t* block, int k, int s, Group& g)   elements 32 s .. 32 s + 31 of row k
//   Part: how a warp of matvec1_ multiplies blocks (parts.cuh, states.cuh); void: by groups
//   Own: how a lane of matvec1_ multiplies rows that share its activations (own_rows.cuh); void: by groups
//   kTable: words of a table in shared memory that matvec1_ takes levels from, of which word i is
//   table_word(i), 0: none; with it group(const Table& table, const uint8_t* block, int s, Group& g), whose
//   words are elements 0 4 1 5, 2 6 3 7 of two with kPaired
//   static float row_scale(const uint8_t* group, int k)               with kHeader > 0: factor of the row
// A weight is row scale * (d * (q - bias) + m). Blocks are addressed by the structs of ikpy/blocks.hpp.
#pragma once
#include "../common.cuh"
#include "../tables.cuh"
#include "ikpy/blocks.hpp"

namespace ikpy::cuda {

struct Group {
    unsigned q[8];  // signed bytes in natural order
    float d[2];     // second only with kHalves
    float m[2];     // only with kOffset
};

// Of a type, in shared memory. zero: which the compiler does not know to be 0. step: bytes from a word to the
// next.
struct Table {
    const unsigned* words;
    unsigned zero, step, first;

    __device__ __forceinline__ unsigned word(unsigned i) const {
        return *reinterpret_cast<const unsigned*>(reinterpret_cast<const uint8_t*>(words) +
                                                  (i * step + first));
    }

    // A constant in a register: known ones are put there anew wherever an instruction cannot have them
    // itself.
    __device__ __forceinline__ unsigned kept(unsigned constant) const { return constant ^ zero; }
};

template <int Block, int Bytes, int Rows = 1, int Header = 0, bool Halves = false, bool Offset = false>
struct UnpackerTraits {
    static constexpr int kBlock = Block, kBytes = Bytes, kRows = Rows, kHeader = Header;
    static constexpr bool kHalves = Halves, kOffset = Offset;
    static constexpr int kBias = 0, kTable = 0;
    using Part = void;
    using Own = void;
    __device__ static float row_scale(const uint8_t*, int) { return 1.0f; }
};

constexpr unsigned kOnes = 0x01010101u, kNibbles = 0x0f0f0f0fu, kPairs = 0x03030303u;

// Bytes minus a constant as signed bytes; bytes below 128.
__device__ __forceinline__ unsigned sub_bytes(unsigned q, unsigned c) {
    return ((q | 0x80808080u) - c * kOnes) ^ 0x80808080u;
}

// Bit i of four bits in byte i.
__device__ __forceinline__ unsigned spread_bits(unsigned bits) { return (bits & 15) * 0x00204081u & kOnes; }

// Magnitudes (1 .. 127) negated where the byte of `ones` is 1.
__device__ __forceinline__ unsigned negate_bytes(unsigned magnitudes, unsigned ones) {
    return (magnitudes ^ ones * 0xff) + ones;
}

// Bytes of a and b (0 to 3 and 4 to 7) that the low four nibbles of the selector number; of a nibble from 8
// on, the sign of byte nibble - 8 eight times. nvcc's own function masks the selector once more.
__device__ __forceinline__ unsigned permute_bytes(unsigned a, unsigned b, unsigned selector) {
#if defined(__CUDACC__)
    unsigned out;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(selector));
    return out;
#else
    return __byte_perm(a, b, selector);
#endif
}

// The lower or the upper half of a word as selectors of a permutation, to which what is above means nothing.
// By the pipe of products: shifts, logic and permutations share another, which is busier.
__device__ __forceinline__ unsigned half_selectors(unsigned v, int half) {
#if defined(__CUDACC__)
    if (half == 0) return v;
    unsigned out;
    asm("dp2a.lo.s32.u32 %0, %1, 0x100, 0;" : "=r"(out) : "r"(v));
    return out;
#else
    return v >> 16 * half;
#endif
}

// A block of a 16-bit factor and N words behind it, at any even address. Returns the factor.
template <int N>
__device__ __forceinline__ float load_block(const uint8_t* block, unsigned* q) {
    const auto address = reinterpret_cast<uintptr_t>(block);
    unsigned words[N + 1];
    load_pieces<2, 16, N + 1, 4 * N + 2>(address, words);
    const unsigned upper = address & 2;
#pragma unroll
    for (int i = 0; i < N; ++i) q[i] = permute_bytes(words[i], words[i + 1], upper ? 0x7654 : 0x5432);
    return f16_to_f32(static_cast<uint16_t>(words[0] >> 8 * upper));
}

// table[index] for eight indices of which `low` has the low four bits as nibbles and `high` the bits above;
// the levels of four nibbles each. tables are packed levels, N of them.
template <int N>
__device__ __forceinline__ void look_up_nibbles(const unsigned* table, unsigned low, unsigned high,
                                                unsigned (&levels)[2]) {
    if constexpr (N <= 8) {
        const unsigned index = low & 0x77777777u;
#pragma unroll
        for (int h = 0; h < 2; ++h)
            levels[h] = permute_bytes(table[0], table[N == 4 ? 0 : 1], index >> 16 * h);
    } else {
        unsigned first[2], second[2];
        look_up_nibbles<N / 2>(table, low, high, first);
        look_up_nibbles<N / 2>(table + N / 8, low, high, second);
        const unsigned top = N == 16 ? low >> 3 : N == 32 ? high : high >> 1;
        const unsigned choice = 0x32103210u | (top & 0x11111111u) << 2;
#pragma unroll
        for (int h = 0; h < 2; ++h) levels[h] = permute_bytes(first[h], second[h], choice >> 16 * h);
    }
}

// table[index] for the index bytes of two words. Nibbles are what byte permutations take as selectors, so two
// words that share one are looked up at the price of one and a half.
template <int N>
__device__ __forceinline__ void look_up(const unsigned* table, unsigned& a, unsigned& b) {
    const unsigned low = (a & kNibbles) | (b & kNibbles) << 4;
    const unsigned high = N > 16 ? (a >> 4 & kNibbles) | (b & ~kNibbles) : 0;
    unsigned levels[2];
    look_up_nibbles<N>(table, low, high, levels);
    a = __byte_perm(levels[0], levels[1], 0x6420);
    b = __byte_perm(levels[0], levels[1], 0x7531);
}

// The normal or the shifted half of a table of 2 N levels.
template <int N, class Table>
__device__ __forceinline__ void choose_table(bool shifted, unsigned* table) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) table[i] = shifted ? Table::word(N / 4 + i) : Table::word(i);
}

// plain layouts: levels of elements 32 s .. 32 s + 31

// 32 bytes of any alignment, of which bits are taken. One shift does it: words are not cut out of aligned
// pieces first.
template <int Align, int Piece = 16>
struct Bytes32 {
    unsigned words[9];
    unsigned cut;  // bits in front of the bytes

    __device__ __forceinline__ explicit Bytes32(const uint8_t* p) {
        const auto address = reinterpret_cast<uintptr_t>(p);
        cut = (address & 3) * 8;
        if constexpr (Align >= 4) {
            load_words<Align, 8, Piece>(p, words);
        } else {
            load_pieces<Align, Piece, 9, 32>(address, words);
        }
    }
    // Of each byte those from `from` on that the mask selects, to bit `at`; joined to q if that is not 0.
    __device__ __forceinline__ void bits(int from, unsigned mask, int at, unsigned* q) const {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            unsigned v;
            if constexpr (Align >= 4) {
                v = __funnelshift_r(words[i], words[i], (from - at) & 31) & mask << at;
            } else {
                v = (__funnelshift_r(words[i], words[i + 1], cut + from) & mask) << at;
            }
            q[i] = at ? q[i] | v : v;
        }
    }
};

// Four words: element j low, j + 16 high.
__device__ __forceinline__ void nibbles_of(const unsigned* v, unsigned* q) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        q[i] = v[i] & kNibbles;
        q[4 + i] = v[i] >> 4 & kNibbles;
    }
}
template <int Align>
__device__ __forceinline__ void nibbles16(const uint8_t* p, unsigned* q) {
    unsigned v[4];
    load_words<Align, 4>(p, v);
    nibbles_of(v, q);
}
// 32 bytes per 64 elements: element j low, j + 32 high.
template <int Align>
__device__ __forceinline__ void nibbles32(const uint8_t* p, int s, unsigned* q) {
    Bytes32<Align>(p + 32 * (s >> 1)).bits(4 * (s & 1), kNibbles, 0, q);
}
// 32 bytes per 128 elements: two bits 32 elements apart, to bits `at` and up.
template <int Align>
__device__ __forceinline__ void pairs32(const uint8_t* p, int s, unsigned* q, int at) {
    Bytes32<Align>(p + 32 * (s >> 2)).bits(2 * (s & 3), kPairs, at, q);
}
// 32 bytes: bit s of byte j, to bit `at`. What is not aligned comes in pieces of 8 bytes: those of 16 take
// more registers than there are beside the lower bits of two rows.
template <int Align>
__device__ __forceinline__ void plane32(const uint8_t* p, int s, unsigned* q, int at) {
    Bytes32<Align, 8>(p).bits(s, kOnes, at, q);
}

// q = levels of N-level tables; with halves the two runs of 16 have tables of their own.
template <int N, class Table, bool Halves>
__device__ __forceinline__ void table_levels(bool first, bool second, unsigned* q) {
    unsigned table[N / 4];
    choose_table<N, Table>(first, table);
    if constexpr (Halves) {
        look_up<N>(table, q[0], q[1]);
        look_up<N>(table, q[2], q[3]);
        choose_table<N, Table>(second, table);
        look_up<N>(table, q[4], q[5]);
        look_up<N>(table, q[6], q[7]);
    } else {  // words that mostly come from the same bytes
#pragma unroll
        for (int i = 0; i < 4; ++i) look_up<N>(table, q[i], q[4 + i]);
    }
}

// Levels of sub-block s, of codes as OwnNibbles has them (own_plain.cuh).
template <class Codes>
__device__ __forceinline__ void nibble_levels(const uint8_t* p, int s, Group& g) {
    unsigned w[4];
    g.d[0] = Codes::load(p, s, w);
    nibbles_of(w, g.q);
    table_levels<16, typename Codes::Levels, false>(false, false, g.q);
}

// 2^(e - 128); subnormal for e = 0 and 1. The table of levels is doubled, hence the halved scale.
__device__ __forceinline__ float half_power(int e) {
    return __int_as_float(e > 1 ? (e - 1) << 23 : 0x00200000 << e);
}

__device__ __forceinline__ int nibble_of(const uint8_t* p, int i) { return p[i >> 1] >> 4 * (i & 1) & 15; }
// Eight nibbles in four bytes, the upper four in the high halves.
__device__ __forceinline__ int split_nibble(const uint8_t* p, int i) { return p[i & 3] >> 4 * (i >> 2) & 15; }
__device__ __forceinline__ int bit_of(const uint8_t* p, int i) { return p[i >> 3] >> (i & 7) & 1; }

// layouts of four (or R) interleaved rows, row k, sub-block s

// Nibbles, 64 bytes per 32 columns.
__device__ __forceinline__ void n4(const uint8_t* p, int k, int s, unsigned* q) {
#pragma unroll
    for (int l = 0; l < 4; ++l) {
        const unsigned v = load4<4>(p + 64 * s + 16 * l + 4 * k);
        const int word = (l & 1) * 4 + (l >> 1);
        q[word] = v & kNibbles;
        q[word + 2] = v >> 4 & kNibbles;
    }
}
// Two bits, 32 bytes per 32 columns; O0..O3: column of each pair divided by 4.
template <int O0 = 0, int O1 = 1, int O2 = 2, int O3 = 3>
__device__ __forceinline__ void p4(const uint8_t* p, int k, int s, unsigned* q, int at) {
    constexpr int order[4] = {O0, O1, O2, O3};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const unsigned v = load4<4>(p + 32 * s + 16 * h + 4 * k);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const unsigned bits = (v >> 2 * t & kPairs) << at;
            unsigned& word = q[4 * h + order[t]];
            word = at ? word | bits : bits;
        }
    }
}
// One bit, 16 bytes per 32 columns; orders: column of each bit divided by 4.
struct RisingBits {
    __device__ static constexpr int word(int n) { return n; }
};
struct Q5_0Bits {  // 0 16 4 20 8 24 12 28
    __device__ static constexpr int word(int n) { return (n & 1) * 4 + (n >> 1); }
};
struct Q5_KBits {  // 0 8 4 12 16 24 20 28
    __device__ static constexpr int word(int n) { return (n & 4) | (n & 1) << 1 | (n >> 1 & 1); }
};
struct IQ5Bits {  // 0 8 16 24 4 12 20 28
    __device__ static constexpr int word(int n) { return (n & 3) * 2 + (n >> 2); }
};
template <class Order>
__device__ __forceinline__ void b4(const uint8_t* p, int k, int s, unsigned* q, int at) {
    const unsigned v = load4<4>(p + 16 * s + 4 * k);
#pragma unroll
    for (int n = 0; n < 8; ++n) q[Order::word(n)] |= (v >> n & kOnes) << at;
}
// Bytes in runs of four columns.
template <int R>
__device__ __forceinline__ void q8x(const uint8_t* p, int k, int s, unsigned* q) {
#pragma unroll
    for (int i = 0; i < 8; ++i) q[i] = load4<4>(p + 4 * R * (8 * s + i) + 4 * k);
}
// Byte j of row k holds columns j (low) and j + 16 (high), eight rows.
__device__ __forceinline__ void nibbles_r8(const uint8_t* p, int k, unsigned* q) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const unsigned v = load4<4>(p + 32 * i + 4 * k);
        q[i] = v & kNibbles;
        q[4 + i] = v >> 4 & kNibbles;
    }
}
// Six-bit value at linear position p of split scales.
__device__ __forceinline__ int six_bits(const uint8_t* low, const uint8_t* high, int p) {
    return (low[p & 31] >> 4 * (p >> 5) & 15) | (high[p & 15] >> 2 * (p >> 4) & 3) << 4;
}
// Bit of 16-column group b in bits per row.
__device__ __forceinline__ int x4(const uint8_t* p, int k, int b) {
    return p[4 * (b & 1) + k] >> (b >> 1) & 1;
}

template <class B>
__device__ __forceinline__ const B& as(const uint8_t* p) {
    return *reinterpret_cast<const B*>(p);
}
// The signed bytes of the two halves of sub-block s, times d.
__device__ __forceinline__ void scales_of_halves(const uint8_t* scales, int s, float d, Group& g) {
    const unsigned both = load2<2>(scales + 2 * s);
#pragma unroll
    for (int h = 0; h < 2; ++h) g.d[h] = d * static_cast<float>(static_cast<int8_t>(both >> 8 * h));
}

__device__ __forceinline__ float half_of(const Word& w) { return load_f16<2>(w.bytes); }
__device__ __forceinline__ float float_at(const uint8_t* p) { return __uint_as_float(load4<4>(p)); }

}  // namespace ikpy::cuda
