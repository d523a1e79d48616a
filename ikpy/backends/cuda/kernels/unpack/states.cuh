// Super-blocks of trellis types, as the warps of matvec1_ multiply them (matvec_states.cuh).
//
// A part is a struct over StateBlock with
//   kConstant                    what is added to all values that are multiplied
//   Values(block, q, x).add(g, c)  adds to c the products of groups 2 g and 2 g + 1 (other rows of fragments)
//   static float level(int i)    entry i of a table of scales, which lanes i and 16 + i have
//   static void scales(const uint8_t* block, int q, float level, float (&d)[2])   of groups 2 q and 2 q + 1
#pragma once
#include "parts.cuh"

namespace ikpy::cuda {

// Eight activations of quarter l % 4 of group l / 4 of a block, for lane l; scales of groups 2 (l % 4) and
// 2 (l % 4) + 1.
struct StateActs {
    unsigned q[2];
    float scale[2];
};

constexpr unsigned kTrellisOffset = 4096;

// Value n of a group is the sum of four six-bit parts of a state, seed * multiplier^(n + 1), minus 126; as
// powers are constants, no value waits for another.
__host__ __device__ constexpr unsigned trellis_power(int n) {
    unsigned power = 1;
    for (int i = 0; i <= n; ++i) power *= 0xcbac1fedu;
    return power;
}
constexpr unsigned kSixBits = 0x3f3f3f3fu;

// State n of the eight (four) that a seed has, its six-bit parts times Times, up to 4.
template <int Times = 1>
__device__ __forceinline__ unsigned trellis_state(unsigned seed, int n) {
    constexpr unsigned powers[8] = {trellis_power(0), trellis_power(1), trellis_power(2), trellis_power(3),
                                    trellis_power(4), trellis_power(5), trellis_power(6), trellis_power(7)};
    return seed * (powers[n] * Times) & kSixBits * Times;
}

// For bytes u, values plus 128, and signs in their highest bits: ones in all bits of bytes that are not to be
// negated so that magnitudes have these signs: of values from 0 on without sign, and of others with one.
// u ^ kept ^ 0x7f are the values, those to be negated less 1.
__device__ __forceinline__ unsigned kept_signs(unsigned u, unsigned signs) {
    return permute_bytes(u ^ signs, 0, 0xba98);
}

// The sums that products of a block begin with: `constant` times the activations of every group.
__device__ __forceinline__ int4 first_sums(int constant, const StateActs& x) {
    const unsigned word = static_cast<unsigned>(constant & 255) * kOnes, a[4] = {word, word, word, word};
    int c[4];
    mma_s8_k32(c, a, x.q, int4{kSumStart, kSumStart, kSumStart, kSumStart});
    return {c[0], c[1], c[2], c[3]};
}
// c += a * b.
__device__ __forceinline__ void add_products(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const unsigned b[2] = {b0, b1};
    mma_s8_k32(c, a, b, int4{c[0], c[1], c[2], c[3]});
}

template <class Part>
struct StateBlock : PartTraits {
    static constexpr bool kStates = true;
    static constexpr int kResident = 4;
    __device__ __forceinline__ static float product(const uint8_t* block, int q, float level,
                                                    const StateActs& x) {
        const int4 start = first_sums(Part::kConstant, x);
        const typename Part::Values values(block, q, x);
        int sum[2];
#pragma unroll
        for (int g = 0; g < 4; ++g) {
            int c[4] = {start.x, start.y, start.z, start.w};
            values.add(g, c);
            if (g == 0 || q == g) sum[0] = c[0], sum[1] = c[3];
        }
        float d[2], total = 0.0f;
        Part::scales(block, q, level, d);
#pragma unroll
        for (int i = 0; i < 2; ++i) total += x.scale[i] * (d[i] * sum_value(sum[i]));
        return total;
    }
};

// The four bytes of a state are multiplied with the activation in all bytes. Seeds(block, q).get(group,
// seed): the kSeeds seeds that the lane has of a group.
template <class Seeds>
struct StateValues {
    const Seeds seeds;
    unsigned b[8];

    __device__ __forceinline__ StateValues(const uint8_t* block, int q, const StateActs& x)
        : seeds(block, q) {
#pragma unroll
        for (int n = 0; n < 8; ++n) b[n] = permute_bytes(x.q[n / 4], 0, 0x1111 * (n % 4));
    }
    __device__ __forceinline__ void add(int g, int (&c)[4]) const {
        constexpr bool kOne = Seeds::kSeeds == 1;
        unsigned seed[2][Seeds::kSeeds];
#pragma unroll
        for (int i = 0; i < 2; ++i) seeds.get(2 * g + i, seed[i]);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            unsigned a[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                a[i] = trellis_state(seed[i % 2][kOne ? 0 : i / 2], kOne ? n + i / 2 * 4 : n);
            add_products(c, a, b[n], b[4 + n]);
        }
    }
};

// Magnitudes with explicit signs. The first products add the bytes of two states, whose sums come out as two
// bytes, 128 more than a value and 128 more than a negated one; which is which makes no difference.
template <class Seeds>
struct SignedStateValues {
    const Seeds seeds;
    const StateActs& x;
    unsigned ones, negatives;

    __device__ __forceinline__ SignedStateValues(const uint8_t* block, int q, const StateActs& x)
        : seeds(block, q), x(x) {
        const bool own = lane_id() / 4 == 2 * q;  // column 2 q is the lane's
        ones = own ? kOnes : 0;
        negatives = own ? 0x80808080u : 0;  // -128
    }
    __device__ __forceinline__ void add(int g, int (&c)[4]) const {
        constexpr int kPair = 2 + 254 * 256;
        unsigned seed[2][1];
#pragma unroll
        for (int r = 0; r < 2; ++r) seeds.get(2 * g + r, seed[r]);
        unsigned flipped[4], kept[4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int pairs[2][4];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const int n = 4 * h + 2 * k;
                const unsigned a[4] = {trellis_state(seed[0][0], n), trellis_state(seed[1][0], n),
                                       trellis_state<2>(seed[0][0], n + 1),
                                       trellis_state<2>(seed[1][0], n + 1)};
                const unsigned b[2] = {ones, negatives};
                mma_s8_k32(pairs[k], a, b, int4{kPair, kPair, kPair, kPair});
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const unsigned u = permute_bytes(static_cast<unsigned>(pairs[0][2 * r]),
                                                 static_cast<unsigned>(pairs[1][2 * r]), 0x5410);
                kept[2 * h + r] = kept_signs(u, seeds.signs(2 * g + r, h));
                flipped[2 * h + r] = u ^ kept[2 * h + r] ^ 0x7f7f7f7fu;
            }
        }
        // A kept byte is -1, which takes away the 1 that all values begin with.
        add_products(c, flipped, x.q[0], x.q[1]);
        add_products(c, kept, x.q[0], x.q[1]);
    }
};

}  // namespace ikpy::cuda
