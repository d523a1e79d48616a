// Own rows of types with non-linear levels.
#pragma once
#include "own_kquants.cuh"

namespace ikpy::cuda {

// 16 levels

struct OwnIQ4_NL_R4 : OwnTraits<2> {
    static constexpr int kPair = 2;
    __device__ __forceinline__ static void products(const uint8_t* p, unsigned at, unsigned, const OwnActs& x,
                                                    float (&v)[2]) {
        const auto& b = as<BlockIQ4_NL_R4>(p);
        unsigned w[4][2], row[4];
        float d[2];
        int sum[2];
        load_own(b.qs, at, w);
        load_factors(b.d, at, d);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            words_of_row(w, j, row);
            sum[j] = sum_row<TableIq4k, true>(row, x, kSumStart);
        }
        scale_sums(d, sum, x, v);
    }
};

struct OwnMXFP4_R8 : OwnTraits<2> {
    static constexpr int kPair = 4;
    __device__ __forceinline__ static void products(const uint8_t* p, unsigned at, unsigned, const OwnActs& x,
                                                    float (&v)[2]) {
        const auto& b = as<BlockMXFP4_R8>(p);
        unsigned w[4][2], row[4];
        int sum[2];
        load_own<2, 4, 8>(b.qs, at, w);
        const unsigned powers = load2<2>(b.e + 2 * at);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            words_of_row(w, j, row);
            sum[j] = sum_row<TableMxfp4, false>(row, x, kSumStart);
        }
        const float d[2] = {half_power(powers & 255), half_power(powers >> 8)};
        scale_sums(d, sum, x, v);
    }
};

struct OwnIQ4_XS_R8 : OwnTraits<4> {
    static constexpr int kPair = 1;
    __device__ __forceinline__ static void products(const uint8_t* p, unsigned at, unsigned s,
                                                    const OwnActs& x, float (&v)[4]) {
        const auto& b = as<BlockIQ4_XS_R8>(p);
        unsigned w[4][4], row[4];
        float d[4];
        int sum[4];
        load_own<4, 4, 8>(b.qs + 128 * s, at, w);
        load_factors(b.d, at, d);
        const unsigned scales = split_scales<4>(b, 8 * s + 4 * at, at);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            words_of_row(w, j, row);
            sum[j] = sum_row<TableIq4k, false>(row, x, kSumStart);
            d[j] *= x.byte_value<32>(scales, j);
        }
        scale_sums(d, sum, x, v);
    }
};

struct OwnIQ4_KS_R4 : OwnTraits<4> {
    static constexpr int kPair = 2, kShift = 4;
    __device__ __forceinline__ static void products(const uint8_t* p, unsigned at, unsigned s,
                                                    const OwnActs& x, float (&v)[4]) {
        const auto& b = as<BlockIQ4_KS_R4>(p);
        unsigned w[4][4], row[4];
        int sum[4];
        load_own(b.qs + 64 * s, at, w);
        const unsigned codes = load4<4>(b.scales + 4 * s);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            words_of_row(w, j, row);
            sum[j] = sum_row<TableIq4k, true>(row, x, start_of_row(x, codes & kOnes, j, 0));
        }
        scale_odd(codes, sum, x, v);
    }
};

// The first 16 bytes of a block: factors of four rows, and bits of both halves.
template <int Rows>
struct HeadR4 {
    float d[Rows];
    unsigned extra[2];

    __device__ __forceinline__ HeadR4(const uint8_t* block, unsigned at, unsigned s) {
        unsigned words[4];
        load_words<16, 4>(block, words);
        // Values, not places: what is picked by a number known at run time would be in local memory.
        if (Rows == 2) words[0] = at != 0 ? words[1] : words[0];
#pragma unroll
        for (int j = 0; j < Rows; ++j) d[j] = f16_to_f32(static_cast<uint16_t>(words[j / 2] >> 16 * (j % 2)));
#pragma unroll
        for (int h = 0; h < 2; ++h) extra[h] = own_bytes<Rows>(words[2 + h], at, s) & kOnes;
    }
};

struct OwnIQ4_K_R4 : OwnTraits<4> {
    static constexpr int kPair = 2, kShift = 4;
    static constexpr bool kHalves = true;
    __device__ __forceinline__ static void products(const uint8_t* p, unsigned at, unsigned s,
                                                    const OwnActs& x, float (&v)[4]) {
        const auto& b = as<BlockIQ4_K_R4>(p);
        unsigned w[4][4];
        load_own(b.qs + 64 * s, at, w);
        const HeadR4<kRows> head(p, at, s);
        const unsigned scales[2] = {split_scales<4>(b, 8 * s, at), split_scales<4>(b, 8 * s + 4, at)};
        int sum[4][2];
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                sum[j][h] = sum_levels<TableIq4k, 2>({w[h][j], w[2 + h][j]}, {2 * h, 2 * h + 1}, x,
                                                     start_of_row(x, head.extra[h], j, h));
        scale_halves<32>(head.d, scales, sum, x, v);
    }
};

// 32 levels, the shifted ones of IQ5_K, of which the first half is negative and the other positive. What four
// bits say is looked up as SignedLevels does, in the half that the fifth bit says. The others are smaller
// by 2.
struct FiveBitLevels {
    __device__ static constexpr unsigned word(int i) {
        const unsigned w = TableIq5nl::word(8 + i);
        return i < 4 ? negated(w) : w;
    }
    __device__ __forceinline__ static unsigned magnitudes(const OwnActs& x, int first, unsigned v,
                                                          unsigned other) {
        return permute_bytes(x.kept(word(first)), word(first + 1), v) |
               permute_bytes(x.kept(word(first + 2)), word(first + 3), other);
    }
    // Products of piece i of a row: fifth bits of the low nibbles are bit 2 (i & 1) + 4 (i >> 1) of the bytes
    // of `upper`, those of the high ones the bit above. sum: of negative levels and of positive ones.
    __device__ __forceinline__ static void add(unsigned v, unsigned upper, int i, const OwnActs& x,
                                               int (&sum)[2]) {
        const int bit = 2 * (i & 1) + 4 * (i >> 1);
        const unsigned other = v ^ 0x88888888u, low = upper << (7 - bit), high = upper << (6 - bit);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const unsigned here = half_selectors(v, h), past = half_selectors(other, h);
            const unsigned q = x.q[2 * pair_of_piece(i) + h];
            const unsigned positive = permute_bytes(low, high, h ? 0xfbea : 0xd9c8);  // by the bits 7
            sum[0] = dot_signed(magnitudes(x, 0, here, past) & ~positive, q, sum[0]);
            sum[1] = dot_signed(magnitudes(x, 4, here, past) & positive, q, sum[1]);
        }
    }
};

struct OwnIQ5_KS_R4 : OwnTraits<2> {
    static constexpr int kPair = 2, kStart = -2, kShift = 2;
    __device__ __forceinline__ static void products(const uint8_t* p, unsigned at, unsigned s,
                                                    const OwnActs& x, float (&v)[2]) {
        const auto& b = as<BlockIQ5_KS_R4>(p);
        unsigned w[4][2], upper[1][2];
        load_own(b.qs + 64 * s, at, w);
        load_own(b.qh + 16 * s, at, upper);
        const unsigned codes = own_bytes<2>(load4<4>(b.scales + 4 * s), at);
        int sum[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            int signs[2] = {0, start_of_row(x, codes & kOnes, j, 0)};
#pragma unroll
            for (int i = 0; i < 4; ++i) FiveBitLevels::add(w[i][j], upper[0][j], i, x, signs);
            sum[j] = signs[1] - signs[0];
        }
        scale_odd(codes, sum, x, v);
    }
};

struct OwnIQ5_K_R4 : OwnTraits<2> {
    static constexpr int kPair = 2, kStart = -2, kShift = 2;
    static constexpr bool kHalves = true;
    __device__ __forceinline__ static void products(const uint8_t* p, unsigned at, unsigned s,
                                                    const OwnActs& x, float (&v)[2]) {
        const auto& b = as<BlockIQ5_K_R4>(p);
        unsigned w[4][2], upper[1][2];
        load_own(b.qs + 64 * s, at, w);
        load_own(b.qh + 16 * s, at, upper);
        const HeadR4<kRows> head(p, at, s);
        const unsigned scales[2] = {split_scales<2>(b, 8 * s, at), split_scales<2>(b, 8 * s + 4, at)};
        int sum[2][2];
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                int signs[2] = {0, start_of_row(x, head.extra[h], j, h)};
#pragma unroll
                for (int i = h; i < 4; i += 2) FiveBitLevels::add(w[i][j], upper[0][j], i, x, signs);
                sum[j][h] = signs[1] - signs[0];
            }
        scale_halves<32>(head.d, scales, sum, x, v);
    }
};

// 4 and 8 levels

// Products of 16 columns, half h: numbers of levels are the low and high nibbles of two words. The table has
// eight levels, or four twice.
__device__ __forceinline__ int sum_few_levels(unsigned first, unsigned second, const unsigned (&at)[2],
                                              const OwnActs& x, int h, int sum) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int n = 0; n < 2; ++n)
            sum = dot_signed(permute_bytes(x.kept(first), second, half_selectors(at[i], n)),
                             x.q[4 * h + 2 * i + n], sum);
    return sum;
}

// Codes of the lane's rows in 16 columns, group b of them.
template <int Rows>
__device__ __forceinline__ unsigned own_codes(const uint8_t* scales, unsigned b, unsigned at) {
    return own_bytes<Rows>(load4<4>(scales + 4 * (b & 7)), at, 4 * (b >> 3)) & kNibbles;
}

struct OwnIQ2_K_R4 : OwnTraits<4> {
    static constexpr int kPair = 2, kShift = 5;
    static constexpr bool kHalves = true;
    __device__ __forceinline__ static void products(const uint8_t* p, unsigned at, unsigned s,
                                                    const OwnActs& x, float (&v)[4]) {
        const auto& b = as<BlockIQ2_K_R4>(p);
        constexpr unsigned levels = TableIq2nl::word(0);
        unsigned w[2][4];
        load_own(b.qs + 32 * s, at, w);
        const HeadR4<kRows> head(p, at, s);
        const unsigned scales[2] = {own_codes<4>(b.scales, 2 * s, at), own_codes<4>(b.scales, 2 * s + 1, at)};
        int sum[4][2];
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                sum[j][h] =
                    sum_few_levels(levels, levels, {w[h][j] & 0x33333333u, w[h][j] >> 2 & 0x33333333u}, x, h,
                                   start_of_row(x, head.extra[h], j, h));
        scale_halves<8>(head.d, scales, sum, x, v);
    }
};

struct OwnIQ3_K_R4 : OwnTraits<2> {
    static constexpr int kPair = 2, kShift = 4;
    static constexpr bool kHalves = true;
    __device__ __forceinline__ static void products(const uint8_t* p, unsigned at, unsigned s,
                                                    const OwnActs& x, float (&v)[2]) {
        const auto& b = as<BlockIQ3_K_R4>(p);
        unsigned w[2][2], upper[1][2], scales[2], extra[2], signs[2];
        float d[2];
        int sum[2][2];
        load_own(b.qs + 32 * s, at, w);
        load_own(b.qh + 16 * s, at, upper);
        load_factors(b.d, at, d);
        load_words<8, 2>(b.extra, extra);
        load_words<8, 2>(b.scales_h, signs);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            // Odd scales with a sign, plus 128.
            const unsigned odd = own_codes<2>(b.scales_l, 2 * s + h, at) * 2 + kOnes;
            scales[h] = negate_bytes(odd, own_bytes<2>(signs[h], at, s) & kOnes) ^ 0x8080;
            const unsigned shifted = own_bytes<2>(extra[h], at, s) & kOnes;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                unsigned q[2];
                join_three_bits(w[h][j], upper[0][j] >> 4 * h, q);
                sum[j][h] = sum_few_levels(TableIq3nl::word(0), TableIq3nl::word(1), q, x, h,
                                           start_of_row(x, shifted, j, h));
            }
        }
        scale_halves<128>(d, scales, sum, x, v);
    }
};

}  // namespace ikpy::cuda
