// Decoders of plain numbers, of types with one scale per block and of ternary types
// (quant-formats.md#blocks-with-one-scale, quant-formats.md#ternary-types).
#include "layouts_legacy.hpp"

namespace ikpy::formats {

namespace {

template <class Number>
void decode_numbers(const uint8_t* matrix, int64_t ne0, int64_t row0, int64_t n_rows, float* dst,
                    int64_t dst_stride, bool) {
    for (int64_t r = 0; r < n_rows; ++r) {
        const uint8_t* row = matrix + (row0 + r) * ne0 * sizeof(typename Number::Stored);
        for (int64_t i = 0; i < ne0; ++i)
            dst[r * dst_stride + i] = Number::value(
                load_unaligned<typename Number::Stored>(row + i * sizeof(typename Number::Stored)));
    }
}

template <class T>
struct Cast {
    using Stored = T;
    static float value(T x) { return static_cast<float>(x); }
};
struct Half {
    using Stored = uint16_t;
    static float value(uint16_t x) { return f16_to_f32(x); }
};
struct BrainFloat {
    using Stored = uint16_t;
    static float value(uint16_t x) { return bf16_to_f32(x); }
};

template <class Number>
constexpr DecoderRow number_row(int id) {
    return {id, 1, 1, 0, sizeof(typename Number::Stored), decode_numbers<Number>};
}

struct Q1_0_G128 : TypeInfo<41, 128, BlockQ1_0_G128, void> {
    static void decode(const Block& b, int, float, float* y) {
        const float d = b.d.as_f16();
        for (int e = 0; e < 128; ++e) y[e] = b.qs[e >> 3] >> (e & 7) & 1 ? d : -d;
    }
};

// Activations; decoded so that they can be inspected and repacked.
struct Q8_K : TypeInfo<15, 256, BlockQ8_K, void> {
    static void decode(const Block& b, int, float, float* y) {
        signed_values<256>(b.qs, load_unaligned<float>(b.d), y);
    }
};

// Trit of a base-3 byte that the multiplier 3^n moves to the top, as -1, 0, 1.
inline int trit(uint8_t code, int multiplier) {
    return (3 * static_cast<uint8_t>(code * multiplier) >> 8) - 1;
}

struct IQ1_BN : TypeInfo<134, 64, BlockIQ1_BN, void, Header::kF16> {
    static void decode(const Block& b, int, float d, float* y) {
        for (int g = 0; g < 4; ++g) {
            for (int j = 0; j < 15; ++j)
                y[16 * g + j] = d * static_cast<float>(trit(b.ql[3 * g + j / 5], tables::iq1bn_mult[j % 5]));
            y[16 * g + 15] = d * static_cast<float>(trit(b.extra, tables::iq1bn_mult[g]));
        }
    }
};

struct TQ1_0 : TypeInfo<34, 256, BlockTQ1_0, void> {
    static void decode(const Block& b, int, float, float* y) {
        static constexpr int kRun[3] = {32, 16, 4}, kTrits[3] = {5, 5, 4};
        const float d = b.d.as_f16();
        const uint8_t* bytes = b.qs;
        for (int part = 0; part < 3; ++part) {
            int power = 1;
            for (int n = 0; n < kTrits[part]; ++n, power *= 3)
                for (int i = 0; i < kRun[part]; ++i) *y++ = d * static_cast<float>(trit(bytes[i], power));
            bytes += kRun[part];
        }
    }
};

struct TQ2_0 : TypeInfo<35, 256, BlockTQ2_0, void> {
    static void decode(const Block& b, int, float, float* y) {
        const float d = b.d.as_f16();
        uint8_t q[256] = {};
        pairs32<Reader>(b.qs, q);
        for (int e = 0; e < 256; ++e) y[e] = d * static_cast<float>(q[e] - 1);
    }
};

constexpr DecoderRow kRows[] = {
    number_row<Cast<float>>(0),    number_row<Half>(1),           number_row<Cast<int8_t>>(24),
    number_row<Cast<int16_t>>(25), number_row<Cast<int32_t>>(26), number_row<Cast<int64_t>>(27),
    number_row<Cast<double>>(28),  number_row<BrainFloat>(30),    decoder_row<Q4_0>(),
    decoder_row<Q4_1>(),           decoder_row<Q5_0>(),           decoder_row<Q5_1>(),
    decoder_row<Q6_0>(),           decoder_row<Q8_0>(),           decoder_row<Q8_KV>(),
    decoder_row<MXFP4>(),          decoder_row<NVFP4>(),          decoder_row<Q1_0_G128>(),
    decoder_row<IQ1_BN>(),         decoder_row<IQ2_BN>(),         decoder_row<TQ1_0>(),
    decoder_row<TQ2_0>(),          decoder_row<Q8_K>(),
};

}  // namespace

DecoderTable legacy_decoders() { return {kRows, sizeof kRows / sizeof *kRows}; }

}  // namespace ikpy::formats
