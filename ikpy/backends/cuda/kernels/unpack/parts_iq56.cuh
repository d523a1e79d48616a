// Parts of super-blocks of IQ5_K, IQ5_KS and IQ6_K.
#pragma once
#include "parts.cuh"

namespace ikpy::cuda {

// a * b + c of two f16 each, rounded once.
__device__ __forceinline__ unsigned fma_halves(unsigned a, unsigned b, unsigned c) {
#if defined(__CUDACC__)
    unsigned out;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
#else
    unsigned out = 0;
    for (int at = 0; at < 32; at += 16) {
        const auto half = [at](unsigned v) { return f16_to_f32(static_cast<uint16_t>(v >> at)); };
        out |= static_cast<unsigned>(f32_to_f16(std::fma(half(a), half(b), half(c)))) << at;
    }
    return out;
#endif
}

__device__ constexpr unsigned both(unsigned half) { return half * 0x00010001u; }

// Levels are cubics of their codes, rounded. With these coefficients in f16, each step rounded, all are what
// the table has; the last is 1536 larger than meant, so that the lower bytes of the results are the levels.
// levels(codes): of two codes, added as sixteenths to the f16 64.
struct CubicIq5nl {  // y^3 + b y + a of y = k code + m
    __device__ __forceinline__ static unsigned levels(unsigned codes) {
        const unsigned y = fma_halves(codes, both(0x32ca), both(0xcc36));
        return fma_halves(fma_halves(y, y, both(0x4eaf)), y, both(0x65fc));
    }
};
struct CubicIq6nl {  // ((d x + c) x + b) x + a of x = code - 32.5
    __device__ __forceinline__ static unsigned levels(unsigned codes) {
        const unsigned x = fma_halves(codes, both(0x3c00), both(0xd608));
        const unsigned slope = fma_halves(fma_halves(x, both(0x14f5), both(0x1c9a)), x, both(0x4181));
        return fma_halves(slope, x, both(0x65ff));
    }
};

// Four runs of codes: nibbles in 32 bytes q, and above them High bits of the first and of the last two runs
// in the bytes of h. To look 32 or 64 levels up takes 7 or 15 instructions of the busiest pipe for every
// four.
template <int High, class Levels>
struct CubicRuns : PartTraits {
    static constexpr int kBlocks = 2, kResident = 4;
    static constexpr bool kConsecutive = true;
    static constexpr float kShift = High == 1 ? 2.0f : 1.0f;

    __device__ __forceinline__ static void sums(const unsigned (&q)[8], const unsigned (&h)[8],
                                                const PartActs& x, int (&sum)[4]) {
        constexpr unsigned kUpper = ((1u << High) - 1) * kOnes, kExponent = 0x54 * kOnes;
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] = kSumStart;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const unsigned low = (j ? q[n] : q[n] << 4) & ~kNibbles;
                const unsigned high = select_bits(kUpper, j ? h[n] >> High : h[n], kExponent);
                const unsigned first = Levels::levels(permute_bytes(low, high, 0x5140));
                const unsigned last = Levels::levels(permute_bytes(low, high, 0x7362));
                const int run = 2 * j + n / 4;
                sum[run] = dot_signed(permute_bytes(first, last, 0x6420), x.q[4 * run + n % 4], sum[run]);
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

struct PartIQ5_K : CubicRuns<1, CubicIq5nl> {
    __device__ static constexpr int shift_bit(int i) { return i; }
    __device__ __forceinline__ static float product(const uint8_t* block, int part, const PartActs& x,
                                                    const Constants&) {
        const auto& b = *reinterpret_cast<const BlockIQ5_K*>(block);
        const unsigned head = word_at(block);  // d, a bit per 16 columns that chooses the levels
        const unsigned codes =
            spread_nibbles(short_at(b.scales_l + 2 * part)) | spread_pairs(b.scales_h[part]) << 4;
        unsigned q[8], h[8];
        eight_words(b.qs + 32 * part, 0, q);
        eight_words(b.qh, 2 * part, h);
        int sum[4];
        sums(q, h, x, sum);
        return f16_to_f32(static_cast<uint16_t>(head)) *
               scaled_runs<PartIQ5_K, 32>(sum, codes, head >> (16 + 4 * part), x);
    }
};

struct PartIQ5_KS : CubicRuns<1, CubicIq5nl> {
    static constexpr bool kWide = true;
    __device__ static constexpr int shift_bit(int i) { return i < 2 ? 0 : 8; }
    __device__ __forceinline__ static float product(const uint8_t* block, int part, const PartActs& x,
                                                    const Constants&) {
        const auto& b = *reinterpret_cast<const BlockIQ5_KS*>(block);
        // Odd scales plus 127 of two groups, with a bit that chooses the levels.
        const unsigned codes = short_at(b.scales + 2 * part);
        unsigned q[8], h[8];
        eight_words(b.qs + 32 * part, 0, q);
        eight_words(b.qh, 2 * part, h);
        int sum[4];
        sums(q, h, x, sum);
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float v = sum_value(sum[2 * i] + (sum[2 * i + 1] - kSumStart)) * x.scale[2 * i] +
                            bit_value(codes, 8 * i) * x.shift[2 * i];
            total += byte_value<127>(codes & 0xfefeu, i) * v;
        }
        return total;
    }
};

struct PartIQ6_K : CubicRuns<2, CubicIq6nl> {
    __device__ static constexpr int shift_bit(int i) { return i; }
    __device__ __forceinline__ static float product(const uint8_t* block, int part, const PartActs& x,
                                                    const Constants&) {
        const auto& b = *reinterpret_cast<const BlockIQ6_K*>(block);
        const unsigned head = word_at(block);  // d, a bit per 16 columns that chooses the levels
        const unsigned codes = word_at(b.scales + 4 * part) ^ 0x80808080u;
        unsigned q[8], h[8];
        eight_words(b.qs + 32 * part, 0, q);
        eight_words(b.qh + 32 * (part >> 1), 4 * (part & 1), h);
        int sum[4];
        sums(q, h, x, sum);
        return f16_to_f32(static_cast<uint16_t>(head)) *
               scaled_runs<PartIQ6_K, 128>(sum, codes, head >> (16 + 4 * part), x);
    }
};

}  // namespace ikpy::cuda
