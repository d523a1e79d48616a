// Own rows of grid types. Points are looked up in shared memory: there a load takes the passes that its
// lanes' words need of one bank, of global memory a turn for every line that they lie in.
#pragma once
#include "own_rows.cuh"
// after the dialect
#include "../grid_tables.cuh"

namespace ikpy::cuda {

// Word of the table at a byte.
__device__ __forceinline__ unsigned point_at(const OwnActs& x, unsigned offset) {
    return *reinterpret_cast<const unsigned*>(x.table + offset);
}
// Bytes from the table's beginning of the point whose number is byte n of a word, below 256.
__device__ __forceinline__ unsigned offset_of_byte(unsigned word, int n) {
    return (n == 0 ? word << 2 : word >> (8 * n - 2)) & 0x3fc;
}
// The same of byte 2 at + j.
__device__ __forceinline__ unsigned offset_of_row(unsigned word, unsigned at, int j) {
    return __funnelshift_r(word, word, 16 * at + 8 * j - 2) & 0x3fc;
}

// Points of eight elements 8, 25 and 43 as nibbles, those of the first word the low ones: 0, 1 and 2, and 4
// more where an element is negative.
template <int N, const unsigned long long (&Grid)[N]>
struct OwnEights : OwnTraits<2> {
    static constexpr int kPair = 1, kTable = N;
    __device__ static unsigned table_word(int i) {
        const unsigned long long point = __ldg(&Grid[i]);
        return select_bits(kNibbles, static_cast<unsigned>(point) >> 4, static_cast<unsigned>(point >> 32));
    }
    // Bits 0 to 3 of a byte of signs to bits 2 of the low nibbles, 4 to 7 to those of the high ones: products
    // of seven bits do not meet.
    __device__ __forceinline__ static unsigned with_signs(unsigned point, unsigned masks, int t) {
        const unsigned seven = (masks >> 8 * t & 0x7f) * 0x00810204u, last = move_bits(masks, 8 * t + 7, 30);
        return point ^ (select_bits(0x40000000u, last, seven) & 0x44444444u);
    }
    // Products of point t of four, whose signs are byte t of the masks.
    __device__ __forceinline__ static int add(unsigned point, unsigned masks, int t, const OwnActs& x,
                                              int sum) {
        const unsigned at = with_signs(point, masks, t);
#pragma unroll
        for (int h = 0; h < 2; ++h)
            sum = dot_signed(permute_bytes(x.kept(0x002b1908u), 0x00d5e7f8u, half_selectors(at, h)),
                             x.q[2 * t + h], sum);
        return sum;
    }
};

// Bits 0 of four bytes as the top byte of a word, 0 to 15.
__device__ __forceinline__ unsigned gather_bits(unsigned word) { return (word & kOnes) * 0x01020408u; }
// Masks of four sign codes.
__device__ __forceinline__ unsigned masks_of_codes(unsigned codes) { return codes ^ codes << 1; }

struct OwnIQ2_XXS_R4 : OwnEights<256, iq2xxs_grid> {
    __device__ __forceinline__ static void products(const uint8_t* p, unsigned at, unsigned s,
                                                    const OwnActs& x, float (&v)[2]) {
        const auto& b = as<BlockIQ2_XXS_R4>(p);
        unsigned codes[1][2], index[1][2];
        float d[2];
        load_own(b.sas + 16 * s, at, codes);
        load_own(b.qs + 16 * s, at, index);
        load_factors(b.d, at, d);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const unsigned masks = masks_of_codes(codes[0][j] >> 1 & 0x7f7f7f7fu);
            int sum = kSumStart;
#pragma unroll
            for (int t = 0; t < 4; ++t)
                sum = add(point_at(x, offset_of_byte(index[0][j], t)), masks, t, x, sum);
            const float scale = 0.25f * x.byte_value(gather_bits(codes[0][j]), 3) + 0.125f;
            v[j] = d[j] * scale * (sum_value(sum) * x.scale);
        }
    }
};

// Bytes of two scales each, of halves: v = d / 8 (2 scale + 1) sum.
__device__ __forceinline__ void scale_odd_halves(const float (&d)[2], unsigned codes, const int (&sum)[2][2],
                                                 const OwnActs& x, float (&v)[2]) {
    const unsigned scales[2] = {codes << 1 & 0x1e1e1e1eu | kOnes, codes >> 3 & 0x1e1e1e1eu | kOnes};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        float both = 0.0f;
#pragma unroll
        for (int h = 0; h < 2; ++h) both += x.byte_value(scales[h], j) * sum_value(sum[j][h]);
        v[j] = 0.125f * d[j] * (both * x.scale);
    }
}

struct OwnIQ2_XS_R4 : OwnEights<512, iq2xs_grid> {
    static constexpr bool kHalves = true;
    __device__ __forceinline__ static void products(const uint8_t* p, unsigned at, unsigned s,
                                                    const OwnActs& x, float (&v)[2]) {
        const auto& b = as<BlockIQ2_XS_R4>(p);
        unsigned index[4];
        float d[2];
        load_words<8, 4>(b.qs[16 * s + 8 * at].bytes, index);
        load_factors(b.d, at, d);
        const unsigned codes = own_bytes<2>(load4<4>(b.scales + 4 * s), at);
        int sum[2][2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            // Sign codes of four points, 7 bits above 9 of a number each.
            const unsigned even = permute_bytes(index[2 * j], index[2 * j + 1], 0x7531) >> 1 & 0x7f7f7f7fu;
            const unsigned masks = masks_of_codes(even);
#pragma unroll
            for (int h = 0; h < 2; ++h) sum[j][h] = kSumStart;
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                const unsigned word = index[2 * j + t / 2], offset = (t % 2 ? word >> 14 : word << 2) & 0x7fc;
                sum[j][t / 2] = add(point_at(x, offset), masks, t, x, sum[j][t / 2]);
            }
        }
        scale_odd_halves(d, codes, sum, x, v);
    }
};

struct OwnIQ2_S_R4 : OwnEights<1024, iq2s_grid> {
    static constexpr bool kHalves = true;
    __device__ __forceinline__ static void products(const uint8_t* p, unsigned at, unsigned s,
                                                    const OwnActs& x, float (&v)[2]) {
        const auto& b = as<BlockIQ2_S_R4>(p);
        unsigned index[1][2], masks[1][2];
        float d[2];
        load_own(b.qs + 16 * s, at, index);
        load_own(b.signs + 16 * s, at, masks);
        load_factors(b.d, at, d);
        const unsigned upper = own_bytes<2>(load4<4>(b.qh + 4 * s), at);
        const unsigned codes = own_bytes<2>(load4<4>(b.scales + 4 * s), at);
        int sum[2][2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
            for (int h = 0; h < 2; ++h) sum[j][h] = kSumStart;
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                const unsigned high = move_bits(upper, 8 * j + 2 * t, 10) & 0xc00;
                const unsigned offset = offset_of_byte(index[0][j], t) | high;
                sum[j][t / 2] = add(point_at(x, offset), masks[0][j], t, x, sum[j][t / 2]);
            }
        }
        scale_odd_halves(d, codes, sum, x, v);
    }
};

// Points of four elements. Their negatives are complements plus one: `ones` sums the activations of those.
template <int N, const unsigned (&Grid)[N]>
struct OwnFours : OwnTraits<2> {
    static constexpr int kTable = N;
    __device__ static unsigned table_word(int i) { return __ldg(&Grid[i]); }
    // tops: bytes whose highest bits are signs.
    __device__ __forceinline__ static void add(unsigned point, unsigned tops, unsigned q, int& sum,
                                               int& ones) {
        const unsigned negative = permute_bytes(tops, tops, 0xba98);
        sum = dot_signed(point ^ negative, q, sum);
        ones = dot_signed(negative, q, ones);
    }
};

struct OwnIQ3_XXS_R4 : OwnFours<256, iq3xxs_grid> {
    __device__ __forceinline__ static void products(const uint8_t* p, unsigned at, unsigned s,
                                                    const OwnActs& x, float (&v)[2]) {
        const auto& b = as<BlockIQ3_XXS_R4>(p);
        unsigned codes[1][2], index[4];
        float d[2];
        load_own(b.sas + 16 * s, at, codes);
        load_words<8, 4>(b.qs + 32 * s + 16 * at, index);
        load_factors(b.d, at, d);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const unsigned masks = masks_of_codes(codes[0][j] >> 1 & 0x7f7f7f7fu);
            int sum = kSumStart, ones = 0;
#pragma unroll
            for (int w = 0; w < 8; ++w) {
                // Four bits to the tops of bytes.
                const unsigned four = masks >> 8 * (w / 2) & (w % 2 ? 0xf0 : 0x0f);
                const unsigned tops = four * (w % 2 ? 0x01020408u : 0x10204080u);
                add(point_at(x, offset_of_byte(index[2 * j + w / 4], w % 4)), tops, x.q[w], sum, ones);
            }
            const float scale = 0.5f * x.byte_value(gather_bits(codes[0][j]), 3) + 0.25f;
            v[j] = d[j] * scale * (sum_value(sum - ones) * x.scale);
        }
    }
};

struct OwnIQ3_S_R4 : OwnFours<512, iq3s_grid> {
    __device__ __forceinline__ static void products(const uint8_t* p, unsigned at, unsigned s,
                                                    const OwnActs& x, float (&v)[2]) {
        const auto& b = as<BlockIQ3_S_R4>(p);
        unsigned masks[1][2], index[8];
        float d[2];
        load_own(b.signs + 16 * s, at, masks);
        load_words<8, 4>(b.qs + 32 * s, index);
        load_words<8, 4>(b.qs + 32 * s + 16, index + 4);
        load_factors(b.d, at, d);
        const unsigned upper = own_bytes<2>(load4<4>(b.qh + 4 * s), at);
        const unsigned codes = own_bytes<2>(load4<4>(b.scales + 4 * (s & 3)), at, 4 * (s >> 2));
        const unsigned scales = codes << 1 & 0x1e1e1e1eu | kOnes;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            int sum = kSumStart, ones = 0;
#pragma unroll
            for (int w = 0; w < 8; ++w) {
                const unsigned high = move_bits(upper, 8 * j + w, 10) & 0x400;
                const unsigned offset = offset_of_row(index[2 * (w & 3) + (w >> 2)], at, j) | high;
                add(point_at(x, offset), masks[0][j] << (7 - w), x.q[w], sum, ones);
            }
            v[j] = d[j] * (x.byte_value(scales, j) * (sum_value(sum - ones) * x.scale));
        }
    }
};

// Ternary points of eight elements, plus one, as nibbles that are multiplied where they are: the sums of the
// high ones are 16 times as large, as all are in the end. Elements are an eighth larger, or smaller where a
// bit says so.
template <int Rows>
struct OwnTernary : OwnTraits<Rows> {
    static constexpr int kTable = 2048, kFactor = 16, kStart = 2 - kFactor, kShift = -4;
    __device__ static unsigned table_word(int i) { return __ldg(&iq1s_codes[i]); }
    // Point t of four, of row j: byte j of the word, and three bits of `upper` from `from` on.
    __device__ __forceinline__ static void add(unsigned word, int j, unsigned upper, int from, int t,
                                               const OwnActs& x, int& low, int& sum) {
        const unsigned point = point_at(x, offset_of_byte(word, j) | (move_bits(upper, from, 10) & 0x1c00));
        low = dot_unsigned(point & kNibbles, x.q[2 * t], low);
        sum = dot_unsigned(point & ~kNibbles, x.q[2 * t + 1], sum);
    }
};

struct OwnIQ1_S : OwnTernary<1> {
    __device__ __forceinline__ static void products(const uint8_t* p, unsigned, unsigned s, const OwnActs& x,
                                                    float (&v)[1]) {
        const auto& b = as<BlockIQ1_S>(p);
        // Of four points the upper three bits, a scale, and a bit.
        const unsigned head = load2<2>(b.qh[s].bytes), index = load4<2>(b.qs + 4 * s);
        int low = 0, sum = x.start[0] + static_cast<int>(head >> 15) * x.shift[0];
#pragma unroll
        for (int t = 0; t < 4; ++t) add(index, t, head, 3 * t, t, x, low, sum);
        v[0] = half_of(b.d) * field_value<14, -1>(head >> 11) * (sum_value(sum + 16 * low) * x.scale);
    }
};

struct OwnIQ1_M : OwnTernary<1> {
    static constexpr bool kHalves = true;
    __device__ __forceinline__ static void products(const uint8_t* p, unsigned, unsigned s, const OwnActs& x,
                                                    float (&v)[1]) {
        const auto& b = as<BlockIQ1_M>(p);
        const unsigned head = load2<2>(b.qh + 2 * s), index = load4<4>(b.qs + 4 * s);
        unsigned words[2];  // of halves of 64 columns four scales each, and four bits of the block's
        load_words<8, 2>(b.scales[0].bytes, words);
        const unsigned scales = (s < 4 ? words[0] : words[1]) >> (16 * (s >> 1 & 1) + 6 * (s & 1));
        const unsigned first = select_bits(15, words[0] >> 12, words[0] >> 24);
        const unsigned last = select_bits(0xf00, words[1] >> 4, words[1] >> 16);
        const float d = f16_to_f32(static_cast<uint16_t>(select_bits(255, first, last)));
        float both = 0.0f;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int low = 0, sum = x.start[h];
#pragma unroll
            for (int t = 2 * h; t < 2 * h + 2; ++t) {
                sum += static_cast<int>(head >> (4 * t + 3) & 1) * x.shift_of_quarter[t];
                add(index, t, head, 4 * t, t, x, low, sum);
            }
            both += field_value<14, -1>(move_bits(scales, 3 * h, 1)) * sum_value(sum + 16 * low);
        }
        v[0] = d * (both * x.scale);
    }
};

struct OwnIQ1_S_R4 : OwnTernary<4> {
    __device__ __forceinline__ static void products(const uint8_t* p, unsigned, unsigned, const OwnActs& x,
                                                    float (&v)[4]) {
        // Bytes of four points each; of two rows each: the upper three bits of four points, a scale, and a
        // bit.
        unsigned words[4], heads[2];
        load_words<8, 4>(p, words);
        load_words<8, 2>(p + 16, heads);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const unsigned head = heads[j / 2];
            int low = 0, sum = add_times_byte(x.shift[0], head >> 15 & 0x00010001u, j % 2 * 2, x.start[0]);
#pragma unroll
            for (int t = 0; t < 4; ++t) add(words[t], j, head, 16 * (j % 2) + 3 * t, t, x, low, sum);
            const unsigned scales = (head >> 11 & 0x000e000eu) | 0x00010001u;
            v[j] = x.byte_value(scales, j % 2 * 2) * (sum_value(sum + 16 * low) * x.scale);
        }
    }
};

struct OwnIQ1_M_R4 : OwnTernary<4> {
    static constexpr bool kHalves = true;
    __device__ __forceinline__ static void products(const uint8_t* p, unsigned, unsigned, const OwnActs& x,
                                                    float (&v)[4]) {
        // Bytes of four points; of two points the upper three bits and a bit, twice; two scales.
        unsigned words[7];
        load_pieces<4, 16, 7, 28>(reinterpret_cast<uintptr_t>(p), words);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float both = 0.0f;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                int low = 0, sum = x.start[h];
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const int t = 2 * h + n;
                    const unsigned down = words[4 + h] >> (4 * n + 3) & kOnes;
                    sum = add_times_byte(x.shift_of_quarter[t], down, j, sum);
                    add(words[t], j, words[4 + h], 8 * j + 4 * n, t, x, low, sum);
                }
                both += x.byte_value(words[6] >> 4 * h & kNibbles, j) * sum_value(sum + 16 * low);
            }
            v[j] = both * x.scale;
        }
    }
};

}  // namespace ikpy::cuda
