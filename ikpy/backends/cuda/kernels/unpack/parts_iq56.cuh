// Parts of super-blocks of IQ5_K, IQ5_KS and IQ6_K.
#pragma once
#include "parts.cuh"

namespace ikpy::cuda {

// Four runs of N = 32 or 64 levels: nibbles in 32 bytes q, and above them bits of the first and of the last
// two runs in the bytes of h. Levels are looked up plus 2: so the first half is negative and the others are
// not, and a permutation gives ones, or zeros, where the highest bit of a selector says that a level is among
// other eight, which an AND, or an OR, joins.
template <int N, class Table>
struct ShiftedRuns : PartTraits {
    static constexpr int kBlocks = 2, kResident = 4, kHigh = N == 32 ? 1 : 2;
    static constexpr bool kConsecutive = true, kPaired = true;
    static constexpr float kShift = N == 32 ? 2.0f : 1.0f, kSum = -2.0f;

    __device__ static constexpr unsigned word(int i) {
        unsigned out = 0;
        for (int at = 0; at < 32; at += 8) out |= ((Table::word(i) >> at) + 2 & 255) << at;
        return out;
    }
    // The first four of every eight levels, and bits that choose between two.
    struct Constants {
        unsigned first[N / 8], choice = in_register(0x44444444u);
        __device__ __forceinline__ Constants() {
#pragma unroll
            for (int i = 0; i < N / 8; ++i) first[i] = in_register(word(2 * i));
        }
    };
    // Selectors of one of two levels for every nibble, by bit `at` of the nibbles of a word.
    __device__ __forceinline__ static unsigned choices(const Constants& c, unsigned bits, int at) {
        return select_bits(c.choice, at <= 2 ? bits << (2 - at) : bits >> (at - 2), 0x32103210u);
    }
    // Levels 16 i to 16 i + 15.
    template <int I>
    __device__ __forceinline__ static unsigned sixteen(const Constants& levels, unsigned at, unsigned past) {
        constexpr unsigned low = word(4 * I + 1), high = word(4 * I + 3);
        const unsigned a = permute_bytes(levels.first[2 * I], low, at);
        const unsigned b = permute_bytes(levels.first[2 * I + 1], high, past);
        return I < N / 32 ? a & b : a | b;
    }
    __device__ __forceinline__ static void sums(const unsigned (&q)[8], const unsigned (&h)[8],
                                                const PartActs& x, const Constants& c, int (&sum)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] = kSumStart;
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            const unsigned upper = select_bits(kNibbles, h[n], h[n + 1] << 4);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const unsigned index = j ? select_bits(kNibbles, q[n] >> 4, q[n + 1])
                                         : select_bits(kNibbles, q[n], q[n + 1] << 4);
                const unsigned other = index ^ 0x88888888u;
                const unsigned fifth = choices(c, upper, kHigh * j), sixth = choices(c, upper, kHigh * j + 1);
                const int run = 2 * j + n / 4;
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const unsigned at = index >> 16 * k, past = other >> 16 * k, first = fifth >> 16 * k;
                    unsigned levels = permute_bytes(sixteen<0>(c, at, past), sixteen<1>(c, at, past), first);
                    if constexpr (N == 64) {
                        const unsigned upper_half =
                            permute_bytes(sixteen<2>(c, at, past), sixteen<3>(c, at, past), first);
                        levels = permute_bytes(levels, upper_half, sixth >> 16 * k);
                    }
                    sum[run] = dot_signed(levels, x.q[4 * run + n % 4 + k], sum[run]);
                }
            }
        }
    }
};

// 32 bytes that are aligned to a word, shifted to the right by `shift`.
__device__ __forceinline__ void eight_words(const uint8_t* p, int shift, unsigned (&out)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = word_at(p + 4 * i) >> shift;
}
// Four pairs of bits as bytes.
__device__ __forceinline__ unsigned spread_pairs(unsigned x) {
    x = (x | x << 12) & 0x000f000fu;
    return (x | x << 6) & kPairs;
}

struct PartIQ5_K : ShiftedRuns<32, TableIq5nl> {
    __device__ static constexpr int shift_bit(int i) { return i; }
    __device__ __forceinline__ static float product(const uint8_t* block, int part, const PartActs& x,
                                                    const Constants& c) {
        const auto& b = *reinterpret_cast<const BlockIQ5_K*>(block);
        const unsigned head = word_at(block);  // d, a bit per 16 columns that chooses the levels
        const unsigned codes =
            spread_nibbles(short_at(b.scales_l + 2 * part)) | spread_pairs(b.scales_h[part]) << 4;
        unsigned q[8], h[8];
        eight_words(b.qs + 32 * part, 0, q);
        eight_words(b.qh, 2 * part, h);
        int sum[4];
        sums(q, h, x, c, sum);
        return f16_to_f32(static_cast<uint16_t>(head)) *
               scaled_runs<PartIQ5_K, 32>(sum, codes, head >> (16 + 4 * part), x);
    }
};

struct PartIQ5_KS : ShiftedRuns<32, TableIq5nl> {
    static constexpr bool kWide = true;
    __device__ static constexpr int shift_bit(int i) { return i < 2 ? 0 : 8; }
    __device__ __forceinline__ static float product(const uint8_t* block, int part, const PartActs& x,
                                                    const Constants& c) {
        const auto& b = *reinterpret_cast<const BlockIQ5_KS*>(block);
        // Odd scales plus 127 of two groups, with a bit that chooses the levels.
        const unsigned codes = short_at(b.scales + 2 * part);
        unsigned q[8], h[8];
        eight_words(b.qs + 32 * part, 0, q);
        eight_words(b.qh, 2 * part, h);
        int sum[4];
        sums(q, h, x, c, sum);
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float v = sum_value(sum[2 * i] + (sum[2 * i + 1] - kSumStart)) * x.scale[2 * i] +
                            x.sum[2 * i] + bit_value(codes, 8 * i) * x.shift[2 * i];
            total += byte_value<127>(codes & 0xfefeu, i) * v;
        }
        return total;
    }
};

struct PartIQ6_K : ShiftedRuns<64, TableIq6nl> {
    __device__ static constexpr int shift_bit(int i) { return i; }
    __device__ __forceinline__ static float product(const uint8_t* block, int part, const PartActs& x,
                                                    const Constants& c) {
        const auto& b = *reinterpret_cast<const BlockIQ6_K*>(block);
        const unsigned head = word_at(block);  // d, a bit per 16 columns that chooses the levels
        const unsigned codes = word_at(b.scales + 4 * part) ^ 0x80808080u;
        unsigned q[8], h[8];
        eight_words(b.qs + 32 * part, 0, q);
        eight_words(b.qh + 32 * (part >> 1), 4 * (part & 1), h);
        int sum[4];
        sums(q, h, x, c, sum);
        return f16_to_f32(static_cast<uint16_t>(head)) *
               scaled_runs<PartIQ6_K, 128>(sum, codes, head >> (16 + 4 * part), x);
    }
};

}  // namespace ikpy::cuda
