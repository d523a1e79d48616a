// Eight-bit types with one scale per row or per 256 elements: Q8_KV, Q8_KV_R8, Q8_K_R8, Q8_K_R16
// (quant-formats.md#interleaved-bytes-and-bf16).
#include "encoders.hpp"
#include "magnitude.hpp"
#include "search.hpp"

namespace ikpy::quantize {
namespace {

// Levels of n elements, which are multiplied with inverse; returns their sum.
int32_t encode_levels(const float* x, int64_t n, float inverse, uint8_t* q) {
    int32_t sum = 0;
    for (int64_t j = 0; j < n; j++) {
        // Not by adding 1.5 * 2^23: the compiler would fuse that with the product, which is rounded first.
        // Not by lrintf, whose 64-bit results keep the loop from vectors (a third of the speed).
        const int level = static_cast<int>(std::rint(x[j] * inverse));
        q[j] = static_cast<uint8_t>(level);
        sum += level;
    }
    return sum;
}

// Levels of a whole row for the scale of the largest; returns the scale, and the sum of the levels.
float encode_row(const float* x, int64_t n, uint8_t* q, int32_t& sum) {
    const float d = largest_magnitude(x, n) / 127.0f;
    sum = encode_levels(x, n, finite_quotient(1.0f, d), q);
    return d;
}

// Weaves R rows of n bytes, four at a time, into out.
template <int R>
void weave(const uint8_t* rows, int64_t n, uint8_t* out) {
    for (int64_t j = 0; j < n; j += 4, out += 4 * R) {
        uint32_t words[R];
        for (int k = 0; k < R; k++) std::memcpy(words + k, rows + k * n + j, 4);
        std::memcpy(out, words, sizeof words);
    }
}

void encode_q8_kv(const Rows& r) {
    for (int64_t row = 0; row < r.n_rows; row++) {
        uint8_t* out = r.dst + row * r.row_bytes;
        int32_t sum;
        const float d = encode_row(r.src + row * r.ne0, r.ne0, out + 8, sum);
        put(out, d);
        put(out + 4, sum);
    }
}

void encode_q8_kv_r8(const Rows& r) {
    std::vector<uint8_t> levels(static_cast<size_t>(8 * r.ne0));
    for (int64_t row = 0; row < r.n_rows; row += 8) {
        uint8_t* out = r.dst + row * r.row_bytes;
        int32_t sum;
        for (int k = 0; k < 8; k++)
            put(out + 4 * k, encode_row(r.src + (row + k) * r.ne0, r.ne0, levels.data() + k * r.ne0, sum));
        weave<8>(levels.data(), r.ne0, out + 32);
    }
}

// Blocks of R rows by 256 columns: R f16 scales, then the levels, moved by OFFSET.
template <int R, int OFFSET>
void encode_q8_k_interleaved(const Rows& r) {
    uint8_t levels[R * 256];
    for (int64_t row = 0; row < r.n_rows; row += R) {
        uint8_t* out = r.dst + row * r.row_bytes;
        for (int64_t i = 0; i < r.ne0; i += 256, out += R * 258) {
            for (int k = 0; k < R; k++) {
                const float* x = r.src + (row + k) * r.ne0 + i;
                const float largest = largest_magnitude(x, 256);
                // Not the inverse of the scale: the two may differ in their last bit.
                encode_levels(x, 256, finite_quotient(127.0f, largest), levels + 256 * k);
                put(out + 2 * k, f32_to_f16(largest / 127.0f));
            }
            if constexpr (OFFSET != 0)
                for (uint8_t& q : levels) q = static_cast<uint8_t>(q + OFFSET);
            weave<R>(levels, 256, out + 2 * R);
        }
    }
}

}  // namespace

Encoder eight_bit_encoder(int type) {
    switch (type) {
        case 151:
            return encode_q8_kv;
        case 397:
            return encode_q8_k_interleaved<16, 128>;
        case 398:
            return encode_q8_kv_r8;
        case 399:
            return encode_q8_k_interleaved<8, 0>;
        default:
            return nullptr;
    }
}

}  // namespace ikpy::quantize
