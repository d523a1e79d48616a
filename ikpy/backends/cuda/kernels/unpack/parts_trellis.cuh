// Super-blocks of IQ1_KT, IQ2_KT, IQ3_KT and IQ4_KT.
#pragma once
#include "states.cuh"

namespace ikpy::cuda {

__device__ __forceinline__ float level_scale(int code) {
    const unsigned word = code < 8 ? (code < 4 ? TableIq4k::word(0) : TableIq4k::word(1))
                                   : (code < 12 ? TableIq4k::word(2) : TableIq4k::word(3));
    return static_cast<float>(static_cast<int8_t>(word >> 8 * (code & 3)));
}

// Entries of two codes, in bits 0 to 3 and 8 to 11, of a table that lanes have twice.
__device__ __forceinline__ void shuffled_levels(float level, unsigned codes, float (&d)[2]) {
    d[0] = __shfl_sync(kAllLanes, level, static_cast<int>(codes));
    d[1] = __shfl_sync(kAllLanes, level, static_cast<int>(codes >> 8));
}
// Those of nibbles s and s + 4 in byte s of four.
__device__ __forceinline__ unsigned split_codes(const uint8_t* scales, int q) {
    return short_at(scales + 2 * (q & 1)) >> 4 * (q >> 1);
}

struct SeedsIQ1_KT {
    static constexpr int kSeeds = 1;
    const uint8_t* low;
    unsigned upper[2];  // the upper five bits of eight seeds

    __device__ __forceinline__ SeedsIQ1_KT(const uint8_t* block, int q) : low(as<BlockIQ1_KT>(block).ql + q) {
        const auto& b = as<BlockIQ1_KT>(block);
        unsigned middle[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) middle[i] = b.qh[4 * i + q];
        const unsigned both = permute_bytes(permute_bytes(middle[0], middle[1], 0x0040),
                                            permute_bytes(middle[2], middle[3], 0x0040), 0x5410);
#pragma unroll
        for (int h = 0; h < 2; ++h)
            upper[h] = select_bits(kNibbles, both >> 4 * h, word_at(b.sh + 4 * h) >> q) & 0x1f1f1f1fu;
    }
    __device__ __forceinline__ void get(int group, unsigned (&seed)[1]) const {
        const unsigned lowest = low[4 * group];
        seed[0] = kTrellisOffset + permute_bytes(lowest, upper[group / 4], 0x1140 + group % 4 * 16);
    }
};
struct PartIQ1_KT : StateBlock<PartIQ1_KT> {
    static constexpr int kConstant = -126;
    using Values = StateValues<SeedsIQ1_KT>;
    __device__ static float level(int i) { return level_scale(i); }
    __device__ __forceinline__ static void scales(const uint8_t* block, int q, float level, float (&d)[2]) {
        shuffled_levels(level, short_at(as<BlockIQ1_KT>(block).sh + 2 * q), d);
    }
};

template <class Block>
struct SeedsIQ23_KT {
    static constexpr int kSeeds = 1;
    const uint8_t* low;

    __device__ __forceinline__ SeedsIQ23_KT(const uint8_t* block, int q)
        : low(as<Block>(block).ql[q].bytes) {}
    __device__ __forceinline__ void get(int group, unsigned (&seed)[1]) const {
        seed[0] = kTrellisOffset + short_at(low + 8 * group);
    }
};
struct PartIQ2_KT : StateBlock<PartIQ2_KT> {
    static constexpr int kConstant = -126;
    using Values = StateValues<SeedsIQ23_KT<BlockIQ2_KT>>;
    __device__ static float level(int i) { return level_scale(i); }
    __device__ __forceinline__ static void scales(const uint8_t* block, int q, float level, float (&d)[2]) {
        shuffled_levels(level, split_codes(as<BlockIQ2_KT>(block).scales, q), d);
    }
};

struct SeedsIQ3_KT : SeedsIQ23_KT<BlockIQ3_KT> {
    unsigned bits[2];

    __device__ __forceinline__ SeedsIQ3_KT(const uint8_t* block, int q)
        : SeedsIQ23_KT<BlockIQ3_KT>(block, q) {
#pragma unroll
        for (int h = 0; h < 2; ++h) bits[h] = word_at(as<BlockIQ3_KT>(block).qh + 8 * q + 4 * h);
    }
    // Of four values in the highest bits of bytes.
    __device__ __forceinline__ unsigned signs(int group, int h) const { return bits[h] << (7 - group); }
};
struct PartIQ3_KT : StateBlock<PartIQ3_KT> {
    static constexpr int kResident = 3, kConstant = 1;  // with registers for 4 it spills
    using Values = SignedStateValues<SeedsIQ3_KT>;
    __device__ static float level(int i) { return static_cast<float>(i); }
    __device__ __forceinline__ static void scales(const uint8_t* block, int q, float level, float (&d)[2]) {
        shuffled_levels(level, split_codes(as<BlockIQ3_KT>(block).scales, q), d);
    }
};

struct SeedsIQ4_KT {
    static constexpr int kSeeds = 2;
    const uint8_t *block, *low, *middle;
    int turn;

    __device__ __forceinline__ SeedsIQ4_KT(const uint8_t* block, int q)
        : block(block),
          low(as<BlockIQ4_KT>(block).ql + 2 * q),
          middle(as<BlockIQ4_KT>(block).qh + 2 * q),
          turn(6 * q) {}
    __device__ __forceinline__ void get(int group, unsigned (&seed)[2]) const {
        // The upper three bits of eight seeds; whether 0x8000 is to be added to them.
        const unsigned head = word_at(block + 4 * group), lowest = short_at(low + 8 * group);
        const unsigned upper =
            (short_at(middle + 8 * (group % 4)) >> group / 4 * 4 & 0x0f0fu) + (head & 1) * 0x8080u;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned rest = permute_bytes(lowest, upper, i ? 0x2251 : 0x2240);
            seed[i] =
                kTrellisOffset + select_bits(0x7000u, __funnelshift_r(head, head, turn + 3 * i - 4), rest);
        }
    }
};
struct PartIQ4_KT : StateBlock<PartIQ4_KT> {
    static constexpr int kBlocks = 2, kConstant = -126;
    using Values = StateValues<SeedsIQ4_KT>;
    __device__ static float level(int) { return 0.0f; }
    // Half of even bytes minus 128.
    __device__ __forceinline__ static void scales(const uint8_t* block, int q, float, float (&d)[2]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned code = as<BlockIQ4_KT>(block).shb[2 * q + i][0];
            d[i] = 0.5f * __uint_as_float(select_bits(0xfeu, code, 0x4B000000u)) - (4194304.0f + 64.0f);
        }
    }
};

}  // namespace ikpy::cuda
