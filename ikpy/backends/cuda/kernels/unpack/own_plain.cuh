// Plain rows of types with 16 non-linear levels as the lanes of matvec1_ multiply them.
#pragma once
#include "heads.cuh"
#include "own_rows.cuh"

namespace ikpy::cuda {

// Codes: load(p, s, w) gives sub-block s, whose low nibbles are elements 0 to 15 of 32, and its scale;
// Levels: the table.
template <class Codes>
struct OwnNibbles : OwnTraits<1> {
    static constexpr int kPair = 4;
    __device__ __forceinline__ static void products(const uint8_t* p, unsigned, unsigned s, const OwnActs& x,
                                                    float (&v)[1]) {
        unsigned w[4];
        const float d = Codes::load(p, s, w);
        v[0] = d * (sum_value(sum_row<typename Codes::Levels, false>(w, x, kSumStart)) * x.scale);
    }
};

// And the type's byte of an odd scale whose lowest bit shifts levels.
template <class Codes>
struct OwnShifted : OwnTraits<1> {
    static constexpr int kPair = 4, kShift = 4;
    __device__ __forceinline__ static void products(const uint8_t* p, unsigned, unsigned s, const OwnActs& x,
                                                    float (&v)[1]) {
        unsigned w[4];
        const unsigned code = Codes::load(p, s, w);
        const int start = x.start[0] + static_cast<int>(code & 1) * x.shift[0];
        v[0] = field_value<254, 127>(code) * (sum_value(sum_row<TableIq4k, false>(w, x, start)) * x.scale);
    }
};

struct OwnIQ4_K : OwnTraits<1> {
    static constexpr int kPair = 1, kShift = 4;
    static constexpr bool kHalves = true;
    __device__ __forceinline__ static void products(const uint8_t* p, unsigned, unsigned s, const OwnActs& x,
                                                    float (&v)[1]) {
        // d, a bit per 16 columns that shifts levels, the upper two bits of sixteen scales, the lower four
        unsigned head[4], q[4];
        load_words<16, 4>(p, head);
        load_words<16, 4>(as<BlockIQ4_K>(p).qs + 16 * s, q);
        const unsigned low = (s < 4 ? head[2] : head[3]) >> 8 * (s & 3);
        const unsigned high = __funnelshift_r(head[1], head[1], 4 * s - 4), bits = head[0] >> (16 + 2 * s);
        float total = 0.0f;
#pragma unroll
        for (int h = 0; h < 2; ++h) {  // high nibbles are the second half
            unsigned w[2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
                w[i] = h ? select_bits(kNibbles, q[2 * i] >> 4, q[2 * i + 1])
                         : select_bits(kNibbles, q[2 * i], q[2 * i + 1] << 4);
            const int start = x.start[h] + static_cast<int>(bits >> h & 1) * x.shift[h];
            const int sum = sum_levels<TableIq4k, 2>(w, {2 * h, 2 * h + 1}, x, start);
            total += field_value<63, 32>(select_bits(15, low >> 4 * h, high >> 2 * h)) * sum_value(sum);
        }
        v[0] = f16_to_f32(static_cast<uint16_t>(head[0])) * (total * x.scale);
    }
};

}  // namespace ikpy::cuda
