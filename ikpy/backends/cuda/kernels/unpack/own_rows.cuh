// Rows as the lanes of matvec1_ multiply them (matvec_own.cuh): 32 columns of several neighbouring rows of an
// interleaved group, whose words are next to each other, or of plain rows, one after the other.
//
// `Own` of an unpacker is a struct with
//   kRows: rows of a group that a lane has, 4 where blocks lie at multiples of 16 bytes, or 2; 1: plain ones
//   kHalves: sums of integers per 16 columns; kPair: activations are wanted as elements 0 4 1 5, 2 6 3 7 of
//   two words this far apart (1, 2 or 4), 0: in their order
//   kFactor: how many times as large as meant integer sums are; kStart: times which sum of activations they
//   begin with; kShift: and what is added to that where a bit says so; kSum: whether f32 sums are wanted
//   kTable: words of a table in shared memory, of which word i is table_word(i)
//   static void products(const uint8_t* block, unsigned at, unsigned s, const OwnActs& x, float (&v)[kRows])
//     of rows kRows at .. of the group with the 32 columns of sub-block s, without the factors of rows
#pragma once
#include "parts.cuh"

namespace ikpy::cuda {

// 32 activations. Halves have numbers of their own with kHalves, else the first is for all. start: of integer
// sums; shift: sums times kShift, of quarters too; scale: over kFactor; sum: times the scale.
struct OwnActs {
    unsigned q[8];
    int start[2], shift[2], shift_of_quarter[4];
    float scale;
    float sum[2];
    unsigned zero;         // which the compiler does not know
    const uint8_t* table;  // in shared memory

    // A constant in a register: known ones are put there anew wherever an instruction cannot have them
    // itself.
    __device__ __forceinline__ unsigned kept(unsigned constant) const { return constant ^ zero; }
    // Byte i of a word minus a constant.
    template <int Bias = 0>
    __device__ __forceinline__ float byte_value(unsigned word, int i) const {
        return __uint_as_float(permute_bytes(word, kept(0x4B000000u), 0x7440u | i)) -
               static_cast<float>(8388608 + Bias);
    }
};

template <int Rows>
struct OwnTraits {
    static constexpr int kRows = Rows, kPair = 0, kFactor = 1, kStart = 0, kShift = 0, kTable = 0;
    static constexpr bool kHalves = false, kSum = false;
    __device__ static unsigned table_word(int) { return 0; }
};

// First word of pair i.
template <int Pair>
__device__ constexpr int first_of_pair(int i) {
    return Pair == 1 ? 2 * i : Pair == 2 ? 4 * (i / 2) + i % 2 : i;
}
// Pair, or first word, that the low nibbles of piece i are in where pieces have columns 4 words apart.
__device__ constexpr int pair_of_piece(int i) { return 2 * (i & 1) + (i >> 1); }
__device__ constexpr int word_of_piece(int i) { return first_of_pair<2>(pair_of_piece(i)); }

// loads

// Words of the lane's rows in N pieces of a group of R rows.
template <int Rows, int N, int R = 4>
__device__ __forceinline__ void load_own(const uint8_t* p, int at, unsigned (&w)[N][Rows]) {
    p += 4 * Rows * at;
#pragma unroll
    for (int i = 0; i < N; ++i) load_words<4 * Rows, Rows>(p + 4 * R * i, w[i]);
}
// Factors of the lane's rows, of f16.
template <int Rows>
__device__ __forceinline__ void load_factors(const void* p, int at, float (&d)[Rows]) {
    unsigned both[Rows / 2];
    load_words<2 * Rows, Rows / 2>(static_cast<const uint8_t*>(p) + 2 * Rows * at, both);
#pragma unroll
    for (int j = 0; j < Rows; ++j) d[j] = f16_to_f32(static_cast<uint16_t>(both[j / 2] >> 16 * (j % 2)));
}
// Bytes of the lane's rows, of those of four, shifted to the right; above them are others where it has two.
template <int Rows>
__device__ __forceinline__ unsigned own_bytes(unsigned four, unsigned at, unsigned shift = 0) {
    return four >> (shift + (Rows == 4 ? 0 : 16 * at));
}

// bits

// Bit (or field) n of a word's bytes to bit `to`.
__device__ __forceinline__ unsigned move_bits(unsigned v, int n, int to) {
    return n < to ? v << (to - n) : v >> (n - to);
}
// Number of the bit that has columns 4 word .. 4 word + 3.
template <class Order>
__device__ constexpr int bit_of_word(int word) {
    int n = 0;
    while (Order::word(n) != word) ++n;
    return n;
}

// levels

// sum + number times byte j, of 0 or 1 as a rule; a number of 16 bits.
__device__ __forceinline__ int add_times_byte(int number, unsigned bytes, int j, int sum) {
#if defined(__CUDACC__)
    const int halves = j % 2 ? number << 16 : number & 0xffff;
    if (j < 2) {
        asm("dp2a.lo.s32.u32 %0, %1, %2, %0;" : "+r"(sum) : "r"(halves), "r"(bytes));
    } else {
        asm("dp2a.hi.s32.u32 %0, %1, %2, %0;" : "+r"(sum) : "r"(halves), "r"(bytes));
    }
    return sum;
#else
    return sum + static_cast<int16_t>(number) * static_cast<int>(bytes >> 8 * j & 255);
#endif
}

// Words of a table with all bytes negated.
__device__ constexpr unsigned negated(unsigned word) {
    unsigned out = 0;
    for (int at = 0; at < 32; at += 8) out |= (0u - (word >> at) & 255) << at;
    return out;
}

// Of 16 levels of which the first eight are negative and the others not, or the other way round: the sums of
// those of one sign and of the other are apart. A permutation gives the signs of bytes where the fourth bit
// of a selector is set, here zeros, so nothing is chosen.
template <class Table>
struct SignedLevels {
    static constexpr bool kNegativeFirst = (Table::word(0) & 0x80) != 0;
    // The first half where 0, the second where 1; their magnitudes.
    __device__ static constexpr unsigned word(int half, int i) {
        const unsigned w = Table::word(2 * half + i);
        return (half == 0) == kNegativeFirst ? negated(w) : w;
    }
    // Products of eight levels, whose numbers are nibbles, with pair i of activations.
    __device__ __forceinline__ static void add(unsigned v, const OwnActs& x, int i, int (&sum)[2]) {
        const unsigned other = v ^ 0x88888888u;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const unsigned q = x.q[2 * i + h];
            const unsigned here = half_selectors(v, h), past = half_selectors(other, h);
            sum[0] = dot_signed(permute_bytes(x.kept(word(0, 0)), word(0, 1), here), q, sum[0]);
            sum[1] = dot_signed(permute_bytes(x.kept(word(1, 0)), word(1, 1), past), q, sum[1]);
        }
    }
    // The sum of products, of which add() began with 0 and `start`.
    __device__ __forceinline__ static void begin(int start, int (&sum)[2]) {
        sum[kNegativeFirst ? 1 : 0] = start;
        sum[kNegativeFirst ? 0 : 1] = 0;
    }
    __device__ __forceinline__ static int total(const int (&sum)[2]) {
        return kNegativeFirst ? sum[1] - sum[0] : sum[0] - sum[1];
    }
};

// Where a row's sum begins whose levels of half h are shifted if bit 0 of byte j says so.
__device__ __forceinline__ int start_of_row(const OwnActs& x, unsigned bits, int j, int h) {
    return add_times_byte(x.shift[h], bits, j, x.start[h]);
}

// Sum of the products of N words of nibbles, of which word i has pair `pairs[i]` of activations.
template <class Table, int N>
__device__ __forceinline__ int sum_levels(const unsigned (&w)[N], const int (&pairs)[N], const OwnActs& x,
                                          int start) {
    int sum[2];
    SignedLevels<Table>::begin(start, sum);
#pragma unroll
    for (int i = 0; i < N; ++i) SignedLevels<Table>::add(w[i], x, pairs[i], sum);
    return SignedLevels<Table>::total(sum);
}
// Of pieces of a group of four rows, or of words whose pairs are in their order.
template <class Table, bool Pieces>
__device__ __forceinline__ int sum_row(const unsigned (&w)[4], const OwnActs& x, int start) {
    return sum_levels<Table>(w, {0, Pieces ? 2 : 1, Pieces ? 1 : 2, 3}, x, start);
}

// scales

// The factor of 32 columns times their products.
template <int Rows>
__device__ __forceinline__ void scale_sums(const float (&d)[Rows], const int (&sum)[Rows], const OwnActs& x,
                                           float (&v)[Rows]) {
#pragma unroll
    for (int j = 0; j < Rows; ++j) v[j] = d[j] * (sum_value(sum[j]) * x.scale);
}

// The products of halves times their scales, bytes minus Bias, and the factor.
template <int Bias, int Rows>
__device__ __forceinline__ void scale_halves(const float (&d)[Rows], const unsigned (&scales)[2],
                                             const int (&sum)[Rows][2], const OwnActs& x, float (&v)[Rows]) {
#pragma unroll
    for (int j = 0; j < Rows; ++j) {
        const float first = x.byte_value<Bias>(scales[0], j) * sum_value(sum[j][0]);
        v[j] = d[j] * ((first + x.byte_value<Bias>(scales[1], j) * sum_value(sum[j][1])) * x.scale);
    }
}

// Types with a factor per row: bytes of four rows, the lowest bit of which shifts levels; the rest is an odd
// scale.
template <int Rows>
__device__ __forceinline__ void scale_odd(unsigned codes, const int (&sum)[Rows], const OwnActs& x,
                                          float (&v)[Rows]) {
#pragma unroll
    for (int j = 0; j < Rows; ++j)
        v[j] = x.byte_value<127>(codes & ~kOnes, j) * (sum_value(sum[j]) * x.scale);
}

}  // namespace ikpy::cuda
