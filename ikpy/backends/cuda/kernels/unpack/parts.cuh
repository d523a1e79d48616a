// Parts of super-blocks, as the lanes of matvec1_ multiply them (matvec_parts.cuh): 64 elements in four runs
// of 16, which mostly share their bytes.
//
// A part is a struct with
//   kBlocks: that a warp takes at a time of every row, 4 or 2; with 2 a lane has one row of a set
//   kResident: blocks of threads per multiprocessor that registers are to suffice for
//   kConsecutive: run i begins at element 64 part + 16 i; else at 128 (part / 2) + 32 i + 16 (part % 2)
//   kSum: what sums of activations are wanted times, 0: not at all
//   kShift: what is added to all levels of a run whose bit is set, 0: there is no such bit
//   shift_bit(i): which bit that is of run i
//   kPaired: words of activations are wanted as elements 0 4 1 5, 2 6 3 7
//   kWide: runs of 32, of which there are the sums of runs 0 and 2
//   factor(i): what the integer sum of run i is to be multiplied with yet
//   Constants: what is kept in registers all the time
//   float product(const uint8_t* block, int part, const PartActs& x, const Constants& c), of a shared block
// Bits are multiplied where they are in their bytes wherever that gives a multiple of the product.
#pragma once
#include "../mma.cuh"
#include "core.cuh"

namespace ikpy::cuda {

// 64 activations in runs of 16. scale: with the factor of the run; sum: of the run, times its own scale and
// kSum; shift: times kShift, over the value of the run's bit.
struct PartActs {
    unsigned q[16];
    float scale[4], sum[4], shift[4];
};

struct PartTraits {
    static constexpr int kBlocks = 4, kResident = 5;
    static constexpr bool kStates = false, kConsecutive = false, kPaired = false, kWide = false;
    static constexpr float kSum = 0.0f, kShift = 0.0f;
    struct Constants {};
    __device__ static constexpr float factor(int) { return 1.0f; }
    __device__ static constexpr int shift_bit(int) { return 0; }
};

// A constant that the compiler does not know to be one: it would hold it where permutations cannot reach it,
// and copy it before each. For all lanes of a warp at once, in front of the loop. (Made by an operation that
// may be done again, as OwnActs::kept makes its many, iq2_kl took 268 instructions instead of 222.)
__device__ __forceinline__ unsigned in_register(unsigned constant) {
    return __shfl_sync(kAllLanes, constant, 0);
}

// Bits of a where the mask has ones, else those of b, in one instruction.
__device__ __forceinline__ unsigned select_bits(unsigned mask, unsigned a, unsigned b) {
#if defined(__CUDACC__)
    unsigned out;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(out) : "r"(mask), "r"(a), "r"(b));
    return out;
#else
    return (a & mask) | (b & ~mask);
#endif
}

// Byte i of a word minus a constant.
template <int Bias = 0>
__device__ __forceinline__ float byte_value(unsigned word, int i) {
    return __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7440u | i)) - static_cast<float>(8388608 + Bias);
}

// Bit i of a word where it is, 0 or 1 << i.
__device__ __forceinline__ float bit_value(unsigned word, int i) {
    return __uint_as_float(select_bits(1u << i, word, 0x4B000000u)) - 8388608.0f;
}

// What the mask selects of a word, where it is, minus a constant.
template <unsigned Mask, int Bias = 0>
__device__ __forceinline__ float field_value(unsigned word) {
    return __uint_as_float(select_bits(Mask, word, 0x4B000000u)) - static_cast<float>(8388608 + Bias);
}

// sum + products of four unsigned with four signed bytes.
__device__ __forceinline__ int dot_unsigned(unsigned w, unsigned x, int sum) {
#if defined(__CUDACC__)
    asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(w), "r"(x));
#else
    for (int i = 0; i < 32; i += 8) sum += static_cast<int>(w >> i & 255) * static_cast<int8_t>(x >> i);
#endif
    return sum;
}
__device__ __forceinline__ int dot_signed(unsigned w, unsigned x, int sum) {
    return __dp4a(static_cast<int>(w), static_cast<int>(x), sum);
}

// shared memory

__device__ __forceinline__ unsigned word_at(const uint8_t* p) {
    return *reinterpret_cast<const unsigned*>(p);
}
__device__ __forceinline__ unsigned short_at(const uint8_t* p) {
    return *reinterpret_cast<const unsigned short*>(p);
}
// 2 if a field begins in the middle of a word, else 0.
__device__ __forceinline__ unsigned odd_half(const uint8_t* p) { return reinterpret_cast<uintptr_t>(p) & 2; }
// N words from p on, whose odd_half is `odd`, of which `Bytes` are wanted, all or all but two; shifted to the
// right by `shift`, below 16.
template <int N, int Bytes = 4 * N>
__device__ __forceinline__ void words_at(const uint8_t* p, unsigned odd, int shift, unsigned (&out)[N]) {
    const unsigned cut = 8 * odd + shift;
    p -= odd;
    unsigned word = word_at(p);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const unsigned next = i + 1 < N || (Bytes == 4 * N && odd) ? word_at(p + 4 * i + 4) : 0;
        out[i] = __funnelshift_r(word, next, cut);
        word = next;
    }
}

// Those of half h of four groups, of eight bytes in which the two of a group are next to each other.
__device__ __forceinline__ unsigned bytes_of_half(unsigned a, unsigned b, int h) {
    return permute_bytes(a, b, h ? 0x7531 : 0x6420);
}
// Bits 0, 2, 4 and 6 as bytes of 0 or 1.
__device__ __forceinline__ unsigned spread_even_bits(unsigned bits) {
    return (bits & 0x55) * 0x00041041u & kOnes;
}
// Four nibbles as bytes.
__device__ __forceinline__ unsigned spread_nibbles(unsigned x) {
    x = (x | x << 8) & 0x00ff00ffu;
    return (x | x << 4) & kNibbles;
}

// levels

// Integer sums of four runs of two bits, 2 i up in the bytes of q, with the levels of IQ2_K. These are
// 16 v + 2 [v == 1] - 31; here 8 v + [v == 1] is summed, in every run where its bits have room in a byte.
struct Iq2Runs : PartTraits {
    static constexpr float kSum = -31.0f, kShift = 5.0f;
    __device__ static constexpr float factor(int i) {
        return i == 0 ? 2.0f : i == 1 ? 0.5f : i == 2 ? 1.0f : 0.25f;
    }
    __device__ __forceinline__ static void sums(const unsigned (&q)[4], const PartActs& x, int (&sum)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] = kSumStart;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const unsigned v = q[n], ones = v & ~(v >> 1) & 0x55555555u;
            const unsigned low = select_bits(0x78787878u, v << 3, ones);
            const unsigned high = select_bits(0xf0f0f0f0u, v, ones >> 3);
            sum[0] = dot_unsigned(low & 0x19191919u, x.q[n], sum[0]);
            sum[1] = dot_unsigned(low & 0x64646464u, x.q[4 + n], sum[1]);
            sum[2] = dot_unsigned(high & 0x32323232u, x.q[8 + n], sum[2]);
            sum[3] = dot_unsigned(high & 0xc8c8c8c8u, x.q[12 + n], sum[3]);
        }
    }
};

// Integer sums of four runs of three bits with the levels of IQ3_K: two bits 2 i up in the bytes of q, the
// third one i up in those of h. Words are taken in pairs, whose nibbles are selectors of levels.
struct Iq3Runs : PartTraits {
    static constexpr bool kPaired = true;
    static constexpr float kShift = 4.0f;
    struct Constants {
        unsigned first = in_register(TableIq3nl::word(0));  // of eight levels
    };
    __device__ __forceinline__ static void sums(const unsigned (&q)[4], const unsigned (&h)[4],
                                                const PartActs& x, const Constants& c, int (&sum)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] = kSumStart;
#pragma unroll
        for (int n = 0; n < 4; n += 2) {
            const unsigned low = select_bits(kNibbles, q[n], q[n + 1] << 4);
            const unsigned high = select_bits(kNibbles, q[n] >> 4, q[n + 1]);
            const unsigned upper = select_bits(kNibbles, h[n], h[n + 1] << 4);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const unsigned pairs = (i < 2 ? low : high) >> 2 * (i & 1) & 0x33333333u;
                const unsigned index = pairs | ((i < 2 ? upper << (2 - i) : upper >> (i - 2)) & 0x44444444u);
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const unsigned levels =
                        permute_bytes(c.first, TableIq3nl::word(1), half_selectors(index, k));
                    sum[i] = dot_signed(levels, x.q[4 * i + n + k], sum[i]);
                }
            }
        }
    }
};

// The sums of the runs with what is added to their levels, multiplied with the scales: bytes minus Bias.
// bits: those of runs that are shifted.
template <class Part, int Bias>
__device__ __forceinline__ float scaled_runs(const int (&sum)[4], unsigned scales, unsigned bits,
                                             const PartActs& x) {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float v = sum_value(sum[i]) * x.scale[i];
        if constexpr (Part::kSum != 0.0f) v += x.sum[i];
        if constexpr (Part::kShift != 0.0f) v += bit_value(bits, Part::shift_bit(i)) * x.shift[i];
        total += byte_value<Bias>(scales, i) * v;
    }
    return total;
}

}  // namespace ikpy::cuda
