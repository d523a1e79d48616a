// Non-linear levels with shifted second tables: IQ4_XS, IQ2_K ... IQ6_K, KS, KSS, KL
// (quant-formats.md#non-linear-levels, quant-formats.md#scales-per-row).
#pragma once
#include "heads.cuh"
#include "own_plain.cuh"
#include "parts_iq56.cuh"
#include "parts_iqk.cuh"

namespace ikpy::cuda {

struct CodesIQ4_XS {
    using Levels = TableIq4k;
    __device__ __forceinline__ static float load(const uint8_t* p, unsigned s, unsigned (&w)[4]) {
        unsigned head[2];  // d, the upper two bits of eight scales, and the lower four
        load_words<8, 2>(p, head);
        load_words<8, 4>(as<BlockIQ4_XS>(p).qs + 16 * s, w);
        const unsigned scale = select_bits(15, head[1] >> 4 * s, head[0] >> (12 + 2 * s));
        return f16_to_f32(static_cast<uint16_t>(head[0])) * field_value<63, 32>(scale);
    }
};
struct UnpackIQ4_XS : UnpackerTraits<256, 136> {
    using Own = OwnNibbles<CodesIQ4_XS>;
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        nibble_levels<CodesIQ4_XS>(p, s, g);
    }
};

struct UnpackIQ2_K : UnpackerTraits<256, 76, 1, 0, true> {
    using Part = PartIQ2_K;
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        unsigned head[3];  // d, a bit per 16 columns that chooses the levels, eight bytes of two scales
        load_head<4, 12>(p, head);
        const float d = f16_to_f32(static_cast<uint16_t>(head[0]));
        const unsigned scales = (s < 4 ? head[1] : head[2]) >> 8 * (s & 3), shifted = head[0] >> (16 + 2 * s);
#pragma unroll
        for (int h = 0; h < 2; ++h)
            g.d[h] = d * static_cast<float>(static_cast<int>(scales >> 4 * h & 15) - 8);
        pairs32<4>(as<BlockIQ2_K>(p).qs, s, g.q, 0);
        table_levels<4, TableIq2nl, true>(shifted & 1, shifted & 2, g.q);
    }
};

// Odd scale with a sign bit.
__device__ __forceinline__ float signed_odd(int magnitude, int negative) {
    const float v = static_cast<float>(2 * magnitude + 1);
    return negative ? -v : v;
}

struct UnpackIQ3_K : UnpackerTraits<256, 110, 1, 0, true> {
    using Part = PartIQ3_K;
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        const auto& b = as<BlockIQ3_K>(p);
        // d, bits that choose the levels, signs of sixteen scales, eight bytes of two scales
        unsigned head[4];
        load_head<2, 14>(p, head);
        const float d = f16_to_f32(static_cast<uint16_t>(head[0]));
        const unsigned four =
            s < 4 ? __funnelshift_r(head[1], head[2], 16) : __funnelshift_r(head[2], head[3], 16);
        const unsigned scales = four >> 8 * (s & 3);
        const unsigned shifted = head[0] >> (16 + 2 * s), negative = head[1] >> 2 * s;
        g.d[0] = d * signed_odd(scales & 15, negative & 1);
        g.d[1] = d * signed_odd(scales >> 4 & 15, negative & 2);
        pairs32<2>(b.qs, s, g.q, 0);
        plane32<2>(b.qh, s, g.q, 2);
        table_levels<8, TableIq3nl, true>(shifted & 1, shifted & 2, g.q);
    }
};

// The first 16 bytes of a block of IQ4_K or IQ5_K, in one load: d, a bit per 16 columns that chooses the
// levels, the upper two bits of sixteen scales, the lower four.
struct HeadIQ45 {
    unsigned words[4];

    __device__ __forceinline__ explicit HeadIQ45(const uint8_t* block) { load_words<16, 4>(block, words); }
    __device__ __forceinline__ bool shifted(int i) const { return words[0] >> (16 + i) & 1; }
    // Scales of the two halves of sub-block s.
    __device__ __forceinline__ void scales(int s, Group& g) const {
        const float d = f16_to_f32(static_cast<uint16_t>(words[0]));
        const unsigned low = (s < 4 ? words[2] : words[3]) >> 8 * (s & 3), high = words[1] >> 4 * s;
        g.d[0] = d * static_cast<float>(static_cast<int>((low & 15) | (high & 3) << 4) - 32);
        g.d[1] = d * static_cast<float>(static_cast<int>((low >> 4 & 15) | (high & 12) << 2) - 32);
    }
};

struct UnpackIQ4_K : UnpackerTraits<256, 144, 1, 0, true> {
    using Own = OwnIQ4_K;
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        const HeadIQ45 head(p);
        head.scales(s, g);
        nibbles16<16>(as<BlockIQ4_K>(p).qs + 16 * s, g.q);
        table_levels<16, TableIq4k, true>(head.shifted(2 * s), head.shifted(2 * s + 1), g.q);
    }
};

struct UnpackIQ5_K : UnpackerTraits<256, 176, 1, 0, true> {
    using Part = PartIQ5_K;
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        const auto& b = as<BlockIQ5_K>(p);
        const HeadIQ45 head(p);
        head.scales(s, g);
        nibbles32<16>(b.qs, s, g.q);
        plane32<16>(b.qh, s, g.q, 4);
        table_levels<32, TableIq5nl, true>(head.shifted(2 * s), head.shifted(2 * s + 1), g.q);
    }
};

struct UnpackIQ6_K : UnpackerTraits<256, 212, 1, 0, true> {
    using Part = PartIQ6_K;
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        const auto& b = as<BlockIQ6_K>(p);
        const float d = half_of(b.d);
        scales_of_halves(b.scales, s, d, g);
        nibbles32<4>(b.qs, s, g.q);
        pairs32<4>(b.qh, s, g.q, 4);
        table_levels<64, TableIq6nl, true>(bit_of(b.extra, 2 * s), bit_of(b.extra, 2 * s + 1), g.q);
    }
};

struct UnpackIQ2_KS : UnpackerTraits<256, 70, 1, 2> {
    __device__ static float row_scale(const uint8_t* row, int) { return load_f16<2>(row); }
    using Part = PartIQ2_KS;
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        // A bit per 32 columns that chooses the levels, and the highest one of its scale; the others.
        unsigned head[2];
        load_head<2, 6>(p, head);
        const unsigned scales = __funnelshift_r(head[0], head[1], 16), extra = head[0] >> s;
        const unsigned scale = (scales >> 4 * s & 15) | (extra >> 8 & 1) << 4;
        g.d[0] = static_cast<float>(static_cast<int>(scale) - 16);
        pairs32<2>(as<BlockIQ2_KS>(p).qs, s, g.q, 0);
        table_levels<4, TableIq2nl, false>(extra & 1, false, g.q);
    }
};

struct UnpackIQ3_KS : UnpackerTraits<256, 102, 1, 2> {
    __device__ static float row_scale(const uint8_t* row, int) { return load_f16<2>(row); }
    using Part = PartIQ3_KS;
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        const auto& b = as<BlockIQ3_KS>(p);
        unsigned head[2];  // the highest bit of every scale, and one that chooses the levels; the others
        load_head<2, 6>(p, head);
        const unsigned scales = __funnelshift_r(head[0], head[1], 16), extra = head[0] >> s;
        const unsigned scale = (scales >> (8 * (s & 3) + 4 * (s >> 2)) & 15) | (extra & 1) << 4;
        g.d[0] = static_cast<float>(static_cast<int>(scale) - 16);
        pairs32<2>(b.qs, s, g.q, 0);
        plane32<2>(b.qh, s, g.q, 2);
        table_levels<8, TableIq3nl, false>(extra >> 8 & 1, false, g.q);
    }
};

// Scale bytes of the KS types: bit 0 selects the table, the rest is an odd scale.
__device__ __forceinline__ float odd_scale(int code) { return static_cast<float>((code & 254) - 127); }

// Levels of sub-block s, of codes as OwnShifted has them (own_plain.cuh).
template <class Codes>
__device__ __forceinline__ void shifted_levels(const uint8_t* p, int s, Group& g) {
    unsigned w[4];
    const unsigned code = Codes::load(p, s, w);
    g.d[0] = odd_scale(static_cast<int>(code));
    nibbles_of(w, g.q);
    table_levels<16, TableIq4k, false>(code & 1, false, g.q);
}

struct CodesIQ4_KS {
    __device__ __forceinline__ static unsigned load(const uint8_t* p, unsigned s, unsigned (&w)[4]) {
        load_head<4, 16>(as<BlockIQ4_KS>(p).qs + 16 * s, w);
        return as<BlockIQ4_KS>(p).scales[s];
    }
};
struct UnpackIQ4_KS : UnpackerTraits<256, 136, 1, 4> {
    using Own = OwnShifted<CodesIQ4_KS>;
    __device__ static float row_scale(const uint8_t* row, int) { return float_at(row); }
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        shifted_levels<CodesIQ4_KS>(p, s, g);
    }
};

struct UnpackIQ5_KS : UnpackerTraits<256, 168, 1, 4> {
    __device__ static float row_scale(const uint8_t* row, int) { return float_at(row); }
    using Part = PartIQ5_KS;
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        const auto& b = as<BlockIQ5_KS>(p);
        g.d[0] = odd_scale(b.scales[s]);
        nibbles32<4>(b.qs, s, g.q);
        plane32<4>(b.qh, s, g.q, 4);
        table_levels<32, TableIq5nl, false>(b.scales[s] & 1, false, g.q);
    }
};

// Words of 16 bits with even parity, of which bits are differences; the freed low bits of eight are the
// scale.
struct CodesIQ4_KSS {
    __device__ __forceinline__ static unsigned load(const uint8_t* p, unsigned s, unsigned (&w)[4]) {
        unsigned bits = 0;
        load_head<4, 16>(p + 16 * s, w);
#pragma unroll
        for (int i = 3; i >= 0; --i) {
            const unsigned even = w[i] & 0xfffefffeu;
            bits = bits * 4 + (w[i] & 0x00010001u);
            w[i] = even ^ (even >> 1 & 0x7fff7fffu);
        }
        return (bits | bits >> 15) & 255;
    }
};
struct UnpackIQ4_KSS : UnpackerTraits<256, 128, 1, 4> {
    using Own = OwnShifted<CodesIQ4_KSS>;
    __device__ static float row_scale(const uint8_t* row, int) { return float_at(row); }
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        shifted_levels<CodesIQ4_KSS>(p, s, g);
    }
};

struct UnpackIQ2_KL : UnpackerTraits<256, 86, 1, 2> {
    __device__ static float row_scale(const uint8_t* row, int) { return load_f16<2>(row); }
    using Part = PartIQ2_KL;
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        const auto& b = as<BlockIQ2_KL>(p);
        unsigned head[2];  // the upper two bits of eight scales, and the lower four
        load_head<2, 6>(p, head);
        unsigned first[8], second[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            first[i] = TableIq2klFirst::word(i);
            second[i] = TableIq2klSecond::word(i);
        }
        unsigned low[4], high[4];
        load_words<2, 4>(b.qs + 16 * (s >> 1), low);
        load_words<2, 4>(b.qh, high);
        const unsigned scales = __funnelshift_r(head[0], head[1], 16) >> (8 * (s & 3) + 4 * (s >> 2));
        const unsigned scale = (scales & 15) | (head[0] >> 2 * s & 3) << 4;
        g.d[0] = static_cast<float>(static_cast<int>(scale) - 32);
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            unsigned x[2], y[2];
#pragma unroll
            for (int n = 0; n < 2; ++n)
                x[n] = y[n] = (low[i + n] >> 4 * (s & 1) & kNibbles) | (high[i + n] >> s & kOnes) << 4;
            look_up<32>(first, x[0], x[1]);
            look_up<32>(second, y[0], y[1]);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                g.q[2 * (i + n)] = __byte_perm(x[n], y[n], 0x5140);
                g.q[2 * (i + n) + 1] = __byte_perm(x[n], y[n], 0x7362);
            }
        }
    }
};

}  // namespace ikpy::cuda
