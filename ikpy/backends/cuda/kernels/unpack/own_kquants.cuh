// Own rows of types with linear levels: k-quants and those with one scale per 32.
#pragma once
#include "own_rows.cuh"

namespace ikpy::cuda {

// Bytes in runs of four columns; levels exceed what is meant by Bias.
template <int R, int Bias = 0>
struct OwnBytes : OwnTraits<4> {
    static constexpr int kStart = -Bias;
    __device__ __forceinline__ static void sums(const uint8_t* p, int at, const OwnActs& x, int (&sum)[4]) {
        unsigned w[8][4];
        load_own<4, 8, R>(p, at, w);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[j] = x.start[0];
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                sum[j] = Bias ? dot_unsigned(w[i][j], x.q[i], sum[j]) : dot_signed(w[i][j], x.q[i], sum[j]);
    }
};
// With a factor of f16, or none.
template <class B, int R, int Bias = 0>
struct OwnQ8 : OwnBytes<R, Bias> {
    __device__ __forceinline__ static void products(const uint8_t* p, unsigned at, unsigned s,
                                                    const OwnActs& x, float (&v)[4]) {
        const auto& b = as<B>(p);
        int sum[4];
        float d[4];
        OwnBytes<R, Bias>::sums(b.qs + 32 * R * s, at, x, sum);
        load_factors(b.d, at, d);
        scale_sums(d, sum, x, v);
    }
};
struct OwnQ8_KV_R8 : OwnBytes<8> {
    __device__ __forceinline__ static void products(const uint8_t* p, unsigned at, unsigned, const OwnActs& x,
                                                    float (&v)[4]) {
        int sum[4];
        sums(p, at, x, sum);
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] = sum_value(sum[j]) * x.scale;
    }
};

// Nibbles that are multiplied where they are: the sums of the high ones, and in the end all, are 16 times as
// large. q: activations of the low ones and of the high ones.
template <int Rows>
__device__ __forceinline__ void add_nibbles(const unsigned (&w)[Rows], unsigned low, unsigned high,
                                            int (&low_sum)[Rows], int (&high_sum)[Rows]) {
#pragma unroll
    for (int j = 0; j < Rows; ++j) {
        low_sum[j] = dot_unsigned(w[j] & kNibbles, low, low_sum[j]);
        high_sum[j] = dot_unsigned(w[j] & ~kNibbles, high, high_sum[j]);
    }
}

struct OwnQ4_0_R8 : OwnTraits<4> {
    static constexpr int kFactor = 16, kStart = -8 * kFactor;
    __device__ __forceinline__ static void products(const uint8_t* p, unsigned at, unsigned, const OwnActs& x,
                                                    float (&v)[4]) {
        const auto& b = as<BlockQ4_0_R8>(p);
        unsigned w[4][4];
        float d[4];
        load_own<4, 4, 8>(b.qs, at, w);
        load_factors(b.d, at, d);
        int low[4] = {}, sum[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[j] = x.start[0];
#pragma unroll
        for (int i = 0; i < 4; ++i) add_nibbles(w[i], x.q[i], x.q[4 + i], low, sum);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[j] += 16 * low[j];
        scale_sums(d, sum, x, v);
    }
};

// Scales and minima of four rows in 32 columns, with the products: v = d scale product - dmin minimum sum.
template <class B>
__device__ __forceinline__ void scale_with_minima(const B& b, int s, const int (&sum)[4], const OwnActs& x,
                                                  float (&v)[4]) {
    const unsigned low = load4<4>(b.scales_l + 4 * s);
    const unsigned high = load4<4>(b.scales_h + 4 * (s & 3)) >> 4 * (s >> 2);
    const unsigned scales = (low & kNibbles) | (high & kPairs) << 4;
    const unsigned minima = (low >> 4 & kNibbles) | (high & 4 * kPairs) << 2;
    float d[4], m[4];
    unsigned both[4];
    load_words<16, 4>(b.d, both);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        d[j] = f16_to_f32(static_cast<uint16_t>(both[j / 2] >> 16 * (j % 2)));
        m[j] = f16_to_f32(static_cast<uint16_t>(both[2 + j / 2] >> 16 * (j % 2)));
        v[j] = d[j] * (x.byte_value(scales, j) * (sum_value(sum[j]) * x.scale)) -
               m[j] * (x.byte_value(minima, j) * x.sum[0]);
    }
}

struct OwnQ4_K_R4 : OwnTraits<4> {
    static constexpr int kFactor = 16;
    static constexpr bool kSum = true;
    __device__ __forceinline__ static void products(const uint8_t* p, unsigned at, unsigned s,
                                                    const OwnActs& x, float (&v)[4]) {
        const auto& b = as<BlockQ4_K_R4>(p);
        unsigned w[4][4];
        load_own(b.qs + 64 * s, at, w);
        int low[4] = {}, sum[4] = {kSumStart, kSumStart, kSumStart, kSumStart};
#pragma unroll
        for (int i = 0; i < 4; ++i)
            add_nibbles(w[i], x.q[word_of_piece(i)], x.q[word_of_piece(i) + 2], low, sum);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[j] += 16 * low[j];
        scale_with_minima(b, s, sum, x, v);
    }
};

// Nibbles with bits above them, in order of columns.
template <class Order>
__device__ __forceinline__ int sum_five_bits(const unsigned (&w)[4], unsigned upper, const unsigned* q,
                                             int sum) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int word = word_of_piece(i) + 2 * h;
            const unsigned bits = move_bits(upper, bit_of_word<Order>(word), 4) & 16 * kOnes;
            sum = dot_signed((w[i] >> 4 * h & kNibbles) | bits, q[word], sum);
        }
    return sum;
}
// The words of row j.
template <int N, int Rows>
__device__ __forceinline__ void words_of_row(const unsigned (&w)[N][Rows], int j, unsigned (&out)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = w[i][j];
}

struct OwnQ5_K_R4 : OwnTraits<4> {
    static constexpr bool kSum = true;
    __device__ __forceinline__ static void products(const uint8_t* p, unsigned at, unsigned s,
                                                    const OwnActs& x, float (&v)[4]) {
        const auto& b = as<BlockQ5_K_R4>(p);
        unsigned w[4][4], upper[1][4];
        load_own(b.qs + 64 * s, at, w);
        load_own(b.qh + 16 * s, at, upper);
        int sum[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            unsigned row[4];
            words_of_row(w, j, row);
            sum[j] = sum_five_bits<Q5_KBits>(row, upper[0][j], x.q, kSumStart);
        }
        scale_with_minima(b, s, sum, x, v);
    }
};

struct OwnQ5_0_R4 : OwnTraits<2> {
    static constexpr int kStart = -16;
    __device__ __forceinline__ static void products(const uint8_t* p, unsigned at, unsigned, const OwnActs& x,
                                                    float (&v)[2]) {
        const auto& b = as<BlockQ5_0_R4>(p);
        unsigned w[4][2], upper[1][2];
        float d[2];
        load_own(b.qs, at, w);
        load_own(b.qh, at, upper);
        load_factors(b.d, at, d);
        int sum[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            unsigned row[4];
            words_of_row(w, j, row);
            sum[j] = sum_five_bits<Q5_0Bits>(row, upper[0][j], x.q, x.start[0]);
        }
        scale_sums(d, sum, x, v);
    }
};

// Products of one half of the columns: nibbles of two pieces, a word with the two bits above them. Second:
// number of the pair that has the high nibbles of the first piece (the low ones of the other are the third).
template <int Second>
__device__ __forceinline__ int sum_six_bits(unsigned first, unsigned second, unsigned upper,
                                            const unsigned* q, int sum) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int word = i + 2 * h, pair = Second == 1 ? 2 * i + h : word;
            const unsigned bits = move_bits(upper, 2 * pair, 4) & 16 * kPairs;
            sum = dot_signed(((i ? second : first) >> 4 * h & kNibbles) | bits, q[word], sum);
        }
    return sum;
}

struct OwnQ6_K_R4 : OwnTraits<2> {
    static constexpr int kStart = -32;
    static constexpr bool kHalves = true;
    __device__ __forceinline__ static void products(const uint8_t* p, unsigned at, unsigned s,
                                                    const OwnActs& x, float (&v)[2]) {
        const auto& b = as<BlockQ6_K_R4>(p);
        unsigned w[4][2], upper[2][2], scales[2];
        float d[2];
        load_own(b.qs + 64 * s, at, w);
        load_own(b.qh + 32 * s, at, upper);
        load_factors(b.d, at, d);
        load_words<8, 2>(b.scales + 8 * s, scales);
        int sum[2][2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            scales[h] = own_bytes<2>(scales[h], at) ^ 0x8080;  // two signed bytes, plus 128
#pragma unroll
            for (int j = 0; j < 2; ++j)
                sum[j][h] = sum_six_bits<1>(w[h][j], w[2 + h][j], upper[h][j], x.q + 4 * h, x.start[h]);
        }
        scale_halves<128>(d, scales, sum, x, v);
    }
};

struct OwnQ6_0_R4 : OwnTraits<2> {
    static constexpr int kStart = -32;
    __device__ __forceinline__ static void products(const uint8_t* p, unsigned at, unsigned, const OwnActs& x,
                                                    float (&v)[2]) {
        const auto& b = as<BlockQ6_0_R4>(p);
        unsigned w[4][2], upper[2][2];
        float d[2];
        load_own(b.qs, at, w);
        load_own(b.qh, at, upper);
        load_factors(b.d, at, d);
        int sum[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            sum[j] = x.start[0];
#pragma unroll
            for (int h = 0; h < 2; ++h)
                sum[j] = sum_six_bits<2>(w[h][j], w[2 + h][j], upper[h][j], x.q + 4 * h, sum[j]);
        }
        scale_sums(d, sum, x, v);
    }
};

// Products of two bits, in bits 0 and 1 of nibbles, that are multiplied where they are; so that sums of the
// second and fourth are 4 times as large, as all are in the end.
__device__ __forceinline__ int sum_pairs(unsigned v, const unsigned* q, int start) {
    int low = 0, high = start;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        low = dot_unsigned(v >> 4 * i & kPairs, q[2 * i], low);
        high = dot_unsigned(v >> 4 * i & 4 * kPairs, q[2 * i + 1], high);
    }
    return high + 4 * low;
}

struct OwnIQ2_BN_R4 : OwnTraits<4> {
    static constexpr int kFactor = 4, kStart = -kFactor;
    __device__ __forceinline__ static void products(const uint8_t* p, unsigned at, unsigned s,
                                                    const OwnActs& x, float (&v)[4]) {
        unsigned w[2][4];
        load_own(p + 32 * s, at, w);
#pragma unroll
        for (int j = 0; j < 4; ++j)
            v[j] = sum_value(sum_pairs(w[1][j], x.q + 4, sum_pairs(w[0][j], x.q, x.start[0]))) * x.scale;
    }
};

struct OwnQ2_K_R4 : OwnTraits<4> {
    static constexpr int kFactor = 4;
    static constexpr bool kHalves = true, kSum = true;
    __device__ __forceinline__ static void products(const uint8_t* p, unsigned at, unsigned s,
                                                    const OwnActs& x, float (&v)[4]) {
        const auto& b = as<BlockQ2_K_R4>(p);
        unsigned w[2][4], codes[2], both[4];
        load_own(b.qs + 32 * s, at, w);
        load_words<8, 2>(b.scales + 8 * s, codes);
        load_words<16, 4>(b.d, both);
        const unsigned scales[2] = {codes[0] & kNibbles, codes[1] & kNibbles};
        const unsigned minima[2] = {codes[0] >> 4 & kNibbles, codes[1] >> 4 & kNibbles};
        float d[4];
        int sum[4][2];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            d[j] = f16_to_f32(static_cast<uint16_t>(both[j / 2] >> 16 * (j % 2)));
#pragma unroll
            for (int h = 0; h < 2; ++h) sum[j][h] = sum_pairs(w[h][j], x.q + 4 * h, kSumStart);
        }
        scale_halves<0>(d, scales, sum, x, v);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float m = f16_to_f32(static_cast<uint16_t>(both[2 + j / 2] >> 16 * (j % 2)));
            v[j] -= m * (x.byte_value(minima[0], j) * x.sum[0] + x.byte_value(minima[1], j) * x.sum[1]);
        }
    }
};

// Three bits of 16 columns each, as low nibbles (the first four columns and the third) in two words: two bits
// and the third one, bits 0 to 3 of the bytes of `upper`.
__device__ __forceinline__ void join_three_bits(unsigned v, unsigned upper, unsigned (&q)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        // Bits i and i + 2 of a byte to bits 2 and 6: their sum at bit 4 is of no meaning and carries to 5.
        const unsigned bits = (upper & (5 * kOnes) << i) * (20 >> i);
        q[i] = select_bits(0x33333333u, i ? v >> 2 : v, bits);
    }
}

// Six-bit scales of the lane's rows, of four (or eight) from position `from` on.
template <int Rows, class B>
__device__ __forceinline__ unsigned split_scales(const B& b, unsigned from, unsigned at) {
    const unsigned low = own_bytes<Rows>(load4<4>(b.scales_l + (from & 31)), at, 4 * (from >> 5));
    const unsigned high = own_bytes<Rows>(load4<4>(b.scales_h + (from & 15)), at, 2 * (from >> 4));
    return (low & kNibbles) | (high & kPairs) << 4;
}

struct OwnQ3_K_R4 : OwnTraits<2> {
    static constexpr int kFactor = 16, kStart = -4 * kFactor;
    static constexpr bool kHalves = true;
    __device__ __forceinline__ static void products(const uint8_t* p, unsigned at, unsigned s,
                                                    const OwnActs& x, float (&v)[2]) {
        const auto& b = as<BlockQ3_K_R4>(p);
        unsigned w[2][2], upper[1][2], scales[2];
        float d[2];
        load_own(b.qs + 32 * s, at, w);
        load_own(b.qh + 16 * s, at, upper);
        load_factors(b.d, at, d);
        int sum[2][2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            scales[h] = split_scales<2>(b, 8 * s + 4 * h, at);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                unsigned q[2];
                join_three_bits(w[h][j], upper[0][j] >> 4 * h, q);
                int low = 0, high = x.start[h];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    low = dot_unsigned(q[i] & kNibbles, x.q[4 * h + i], low);
                    high = dot_unsigned(q[i] & ~kNibbles, x.q[4 * h + i + 2], high);
                }
                sum[j][h] = high + 16 * low;
            }
        }
        scale_halves<32>(d, scales, sum, x, v);
    }
};

}  // namespace ikpy::cuda
