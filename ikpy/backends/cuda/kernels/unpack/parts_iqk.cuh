// Parts of super-blocks of IQ2_K, IQ3_K, IQ2_KS, IQ3_KS and IQ2_KL.
#pragma once
#include "parts.cuh"

namespace ikpy::cuda {

struct PartIQ2_K : Iq2Runs {
    __device__ static constexpr int shift_bit(int i) { return 2 * i; }
    __device__ __forceinline__ static float product(const uint8_t* block, int part, const PartActs& x,
                                                    const Constants&) {
        const auto& b = *reinterpret_cast<const BlockIQ2_K*>(block);
        const int half = part >> 1, h = part & 1;
        const unsigned head = word_at(block);  // d, a bit per 16 columns that chooses the levels
        const unsigned codes = word_at(b.scales + 4 * half) >> 4 * h & kNibbles;
        unsigned q[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) q[n] = word_at(b.qs + 16 * part + 4 * n);
        int sum[4];
        sums(q, x, sum);
        const unsigned shifted = head >> (16 + 8 * half + h);
        return f16_to_f32(static_cast<uint16_t>(head)) * scaled_runs<PartIQ2_K, 8>(sum, codes, shifted, x);
    }
};

struct PartIQ2_KS : Iq2Runs {
    __device__ static constexpr int shift_bit(int i) { return i; }
    __device__ __forceinline__ static float product(const uint8_t* block, int part, const PartActs& x,
                                                    const Constants&) {
        const auto& b = *reinterpret_cast<const BlockIQ2_KS*>(block);
        const int half = part >> 1;
        const unsigned odd = odd_half(b.qs);
        // A bit per 32 columns that chooses the levels, and the highest one of its scale.
        const unsigned extra = short_at(b.extra) >> 4 * half;
        const unsigned codes = spread_nibbles(short_at(b.scales + 2 * half)) | spread_bits(extra >> 8) << 4;
        unsigned q[4];
        words_at(b.qs + 16 * part, odd, 0, q);
        int sum[4];
        sums(q, x, sum);
        return scaled_runs<PartIQ2_KS, 16>(sum, codes, extra, x);
    }
};

struct PartIQ3_K : Iq3Runs {
    __device__ static constexpr int shift_bit(int i) { return 2 * i; }
    __device__ __forceinline__ static float product(const uint8_t* block, int part, const PartActs& x,
                                                    const Constants& c) {
        const auto& b = *reinterpret_cast<const BlockIQ3_K*>(block);
        const int half = part >> 1, h = part & 1;
        const unsigned odd = odd_half(b.qs);
        // Bits that choose the levels, signs of sixteen scales, two scales in a byte.
        const unsigned extra = short_at(b.extra), signs = short_at(b.scales_h);
        unsigned nibbles[1];
        words_at(b.scales_l + 4 * half, odd, 4 * h, nibbles);
        // Odd scales with a sign, plus 128.
        const unsigned magnitudes = (nibbles[0] & kNibbles) * 2 + kOnes;
        const unsigned codes =
            negate_bytes(magnitudes, spread_even_bits(signs >> (8 * half + h))) ^ 0x80808080u;
        unsigned q[4], upper[4];
        words_at(b.qs + 16 * part, odd, 0, q);
        words_at(b.qh + 16 * h, odd, 4 * half, upper);
        int sum[4];
        sums(q, upper, x, c, sum);
        const unsigned shifted = extra >> (8 * half + h);
        return f16_to_f32(static_cast<uint16_t>(short_at(b.d.bytes))) *
               scaled_runs<PartIQ3_K, 128>(sum, codes, shifted, x);
    }
};

struct PartIQ3_KS : Iq3Runs {
    __device__ static constexpr int shift_bit(int i) { return i; }
    __device__ __forceinline__ static float product(const uint8_t* block, int part, const PartActs& x,
                                                    const Constants& c) {
        const auto& b = *reinterpret_cast<const BlockIQ3_KS*>(block);
        const int half = part >> 1, h = part & 1;
        const unsigned odd = odd_half(b.qs);
        // The highest bit of every scale, and one that chooses the levels.
        const unsigned extra = short_at(b.extra) >> 4 * half;
        unsigned nibbles[1];
        words_at(b.scales, odd, 4 * half, nibbles);
        const unsigned codes = (nibbles[0] & kNibbles) | spread_bits(extra) << 4;
        unsigned q[4], upper[4];
        words_at(b.qs + 16 * part, odd, 0, q);
        words_at(b.qh + 16 * h, odd, 4 * half, upper);
        int sum[4];
        sums(q, upper, x, c, sum);
        return scaled_runs<PartIQ3_KS, 16>(sum, codes, extra >> 8, x);
    }
};

// Of both levels of IQ2_KL, the numbers that they have among those of IQ3_K, as nibbles: word i of 32 bytes.
__device__ constexpr unsigned iq2kl_codes(int i) {
    unsigned codes = 0;
    for (int at = 0; at < 32; at += 8)
        for (unsigned n = 0; n < 8; ++n) {
            const unsigned level = TableIq3nl::word(n / 4) >> 8 * (n % 4) & 255;
            if ((TableIq2klFirst::word(i) >> at & 255) == level) codes |= n << at;
            if ((TableIq2klSecond::word(i) >> at & 255) == level) codes |= n << (at + 4);
        }
    return codes;
}

struct PartIQ2_KL : PartTraits {
    static constexpr bool kConsecutive = true;
    // Of every eight codes, and of eight levels, the first four.
    struct Constants {
        unsigned first[4], level = in_register(TableIq3nl::word(0));
        __device__ __forceinline__ Constants() {
            constexpr unsigned words[4] = {iq2kl_codes(0), iq2kl_codes(2), iq2kl_codes(4), iq2kl_codes(6)};
#pragma unroll
            for (int i = 0; i < 4; ++i) first[i] = in_register(words[i]);
        }
    };
    // Codes of four pairs of levels each, whose numbers are the low and high nibbles of a word, with a fifth
    // bit in bits 0 and 1 of the bytes of `upper`.
    __device__ __forceinline__ static void codes_of(const Constants& c, unsigned q, unsigned upper,
                                                    unsigned (&codes)[2]) {
        constexpr unsigned t[4] = {iq2kl_codes(1), iq2kl_codes(3), iq2kl_codes(5), iq2kl_codes(7)};
        // A permutation gives the signs of bytes, here zero, where the fourth bit of a selector is set.
        const unsigned other = q ^ 0x88888888u;
        const unsigned top = (upper << 2 & 0x04040404u) | (upper << 5 & 0x40404040u) | 0x32103210u;
        unsigned mixed[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const unsigned at = half_selectors(q, k), past = half_selectors(other, k);
            const unsigned low = permute_bytes(c.first[0], t[0], at) | permute_bytes(c.first[1], t[1], past);
            const unsigned high = permute_bytes(c.first[2], t[2], at) | permute_bytes(c.first[3], t[3], past);
            mixed[k] = permute_bytes(low, high, half_selectors(top, k));
        }
        codes[0] = permute_bytes(mixed[0], mixed[1], 0x6420);
        codes[1] = permute_bytes(mixed[0], mixed[1], 0x7531);
    }
    __device__ __forceinline__ static float product(const uint8_t* block, int part, const PartActs& x,
                                                    const Constants& c) {
        const auto& b = *reinterpret_cast<const BlockIQ2_KL*>(block);
        const unsigned odd = odd_half(b.qs);
        unsigned q[4], upper[4];
        words_at(b.qs + 16 * part, odd, 0, q);
        words_at(b.qh, odd, 2 * part, upper);
        int sum[2] = {kSumStart, kSumStart};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            unsigned codes[2];
            codes_of(c, q[n], upper[n], codes);
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const unsigned levels =
                        permute_bytes(c.level, TableIq3nl::word(1), half_selectors(codes[j], k));
                    sum[j] = dot_signed(levels, x.q[8 * j + 2 * n + k], sum[j]);
                }
        }
        // The upper two bits of two scales, and the lower four.
        const unsigned high = short_at(b.scales_h) >> 4 * part;
        const unsigned low = short_at(b.scales_l + 2 * (part & 1)) >> 4 * (part >> 1);
        const unsigned codes = (low & 0x0f0fu) | (high << 4 & 0x30u) | (high << 10 & 0x3000u);
        return byte_value<32>(codes, 0) * (sum_value(sum[0]) * x.scale[0]) +
               byte_value<32>(codes, 1) * (sum_value(sum[1]) * x.scale[2]);
    }
};

}  // namespace ikpy::cuda
