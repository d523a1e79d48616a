// Layouts written once and used in both directions: an Io type either reads fields out of block bytes or
// writes them into zeroed block bytes. The sub-layouts shared by several types follow
// (quant-formats.md#conventions and quant-formats.md#interleaved-building-blocks).
#pragma once

#include <cstdint>
#include <cstring>

#include "ikpy/blocks.hpp"

namespace ikpy::formats {

// What a block of one row says, before scales are applied. Fields not used by a type stay 0.
template <int N>
struct Levels {
    uint16_t d = 0, m = 0;  // stored bits of the block scale and minimum (MXFP4: the exponent)
    uint8_t q[N] = {};
};
struct ScaledLevels {
    uint8_t s[4] = {}, q[64] = {};  // scales of groups of 16
};
struct SuperBlock {
    uint16_t d = 0, dmin = 0;
    uint8_t q[256] = {};
    uint8_t scale[16] = {}, min[16] = {}, extra[16] = {};
};
struct GridBlock {
    uint16_t d = 0;
    uint16_t index[64] = {};
    uint8_t sign[32] = {};  // masks of eight elements
    uint8_t scale[16] = {};
};

struct Reader {
    static constexpr bool kReads = true;
    // W bits from bit `shift` of a byte are bits `at` and up of a number.
    template <int W, class V>
    static void bits(const uint8_t& byte, int shift, V& value, int at = 0) {
        value = static_cast<V>(value | ((byte >> shift) & ((1 << W) - 1)) << at);
    }
    static void byte(const uint8_t& byte, uint8_t& value) { value = byte; }
    static void four_bytes(const uint8_t* bytes, uint8_t* values) { std::memcpy(values, bytes, 4); }
    static void word(const Word& word, uint16_t& value) { value = word.get(); }
};

struct Writer {
    static constexpr bool kReads = false;
    template <int W, class V>
    static void bits(uint8_t& byte, int shift, const V& value, int at = 0) {
        byte = static_cast<uint8_t>(byte | ((value >> at) & ((1 << W) - 1)) << shift);
    }
    static void byte(uint8_t& byte, const uint8_t& value) { byte = value; }
    static void four_bytes(uint8_t* bytes, const uint8_t* values) { std::memcpy(bytes, values, 4); }
    static void word(Word& word, const uint16_t& value) { word.set(value); }
};

// W bits at bit number `position` of an array of bytes; they may cross one byte border.
template <class Io, int W, class Byte, class V>
inline void bit_run(Byte* bytes, int position, V& value) {
    constexpr int kMask = (1 << W) - 1;
    Byte &first = bytes[position >> 3], &last = bytes[(position + W - 1) >> 3];
    const int shift = position & 7;
    if constexpr (Io::kReads) {
        value = static_cast<V>(value | ((first | last << 8) >> shift & kMask));
    } else {
        const int moved = (value & kMask) << shift;
        first = static_cast<uint8_t>(first | moved);
        if (&last != &first) last = static_cast<uint8_t>(last | moved >> 8);
    }
}

// plain 256-element blocks

// Nibbles of 32 consecutive elements in 16 bytes: element j low, j + 16 high.
template <class Io, class Byte, class V>
inline void nibbles16(Byte* bytes, V* q, int n) {
    for (int s = 0; s < n / 32; ++s)
        for (int j = 0; j < 16; ++j) {
            Io::template bits<4>(bytes[16 * s + j], 0, q[32 * s + j]);
            Io::template bits<4>(bytes[16 * s + j], 4, q[32 * s + j + 16]);
        }
}

// Nibbles of 64 consecutive elements in 32 bytes: element j low, j + 32 high.
template <class Io, class Byte>
inline void nibbles32(Byte* bytes, uint8_t* q) {
    for (int s = 0; s < 4; ++s)
        for (int j = 0; j < 32; ++j) {
            Io::template bits<4>(bytes[32 * s + j], 0, q[64 * s + j]);
            Io::template bits<4>(bytes[32 * s + j], 4, q[64 * s + j + 32]);
        }
}

// Two bits of 128 consecutive elements in 32 bytes, 32 elements apart.
template <class Io, class Byte>
inline void pairs32(Byte* bytes, uint8_t* q, int at = 0) {
    for (int h = 0; h < 2; ++h)
        for (int t = 0; t < 4; ++t)
            for (int j = 0; j < 32; ++j)
                Io::template bits<2>(bytes[32 * h + j], 2 * t, q[128 * h + 32 * t + j], at);
}

// One bit of 256 elements in 32 bytes: bit number = sub-block.
template <class Io, class Byte>
inline void plane32(Byte* bytes, uint8_t* q, int at) {
    for (int s = 0; s < 8; ++s)
        for (int j = 0; j < 32; ++j) Io::template bits<1>(bytes[j], s, q[32 * s + j], at);
}

// n single bits in order.
template <class Io, class Byte>
inline void bit_list(Byte* bytes, uint8_t* values, int n, int at = 0) {
    for (int i = 0; i < n; ++i) Io::template bits<1>(bytes[i >> 3], i & 7, values[i], at);
}

// n nibbles in order.
template <class Io, class Byte>
inline void nibble_list(Byte* bytes, uint8_t* values, int n) {
    for (int i = 0; i < n; ++i) Io::template bits<4>(bytes[i >> 1], 4 * (i & 1), values[i]);
}

// row-interleaved blocks, row k of four

// N4: nibbles, 64 bytes per 32 columns.
template <class Io, class Byte>
inline void n4(Byte* bytes, int k, uint8_t* q, int columns = 256) {
    static constexpr int kColumn[4] = {0, 16, 4, 20};
    for (int ib = 0; ib < columns / 32; ++ib)
        for (int l = 0; l < 4; ++l)
            for (int i = 0; i < 4; ++i) {
                Byte& byte = bytes[64 * ib + 16 * l + 4 * k + i];
                uint8_t* column = q + 32 * ib + kColumn[l] + i;
                Io::template bits<4>(byte, 0, column[0]);
                Io::template bits<4>(byte, 4, column[8]);
            }
}

// P4: two bits, 32 bytes per 32 columns; order = column offset of each bit pair divided by 4.
struct PairOrder {
    int offset[4];
};
constexpr PairOrder kRisingPairs = {{0, 1, 2, 3}};
template <class Io, class Byte>
inline void p4(Byte* bytes, int k, uint8_t* q, int at = 0, PairOrder order = kRisingPairs,
               int columns = 256) {
    for (int h = 0; h < columns / 16; ++h)
        for (int t = 0; t < 4; ++t)
            for (int i = 0; i < 4; ++i)
                Io::template bits<2>(bytes[16 * h + 4 * k + i], 2 * t, q[16 * h + 4 * order.offset[t] + i],
                                     at);
}

// B4: one bit, 16 bytes per 32 columns; order = column offset of each bit.
struct BitOrder {
    int offset[8];
};
template <class Io, class Byte>
inline void b4(Byte* bytes, int k, uint8_t* q, BitOrder order, int at, int columns = 256) {
    for (int ib = 0; ib < columns / 32; ++ib)
        for (int n = 0; n < 8; ++n)
            for (int i = 0; i < 4; ++i)
                Io::template bits<1>(bytes[16 * ib + 4 * k + i], n, q[32 * ib + order.offset[n] + i], at);
}

// Position of a value per 16 columns in the lists of four rows.
inline int position16(int b16, int k) { return 4 * b16 + k; }

// S8: six-bit values at linear position p.
template <class Io, class Byte>
inline void six_bits(Byte* low, Byte* high, int p, uint8_t& value) {
    Io::template bits<4>(low[p & 31], 4 * (p >> 5), value, 0);
    Io::template bits<2>(high[p & 15], 2 * (p >> 4), value, 4);
}
template <class Io, class Byte>
inline void s8(Byte* low, Byte* high, int k, uint8_t* scale) {
    for (int b = 0; b < 16; ++b) six_bits<Io>(low, high, position16(b, k), scale[b]);
}

// X4: extra bits per 16 columns; also the sign bits of IQ3_K_R4 (bit `at` of the scale).
template <class Io, class Byte>
inline void x4(Byte* bytes, int k, uint8_t* values, int at = 0) {
    for (int b = 0; b < 16; ++b) Io::template bits<1>(bytes[4 * (b & 1) + k], b >> 1, values[b], at);
}

// Q8x: bytes of R rows in runs of four columns.
template <class Io, int R, class Byte>
inline void q8x(Byte* bytes, int k, uint8_t* q, int columns) {
    for (int m = 0; m < columns / 4; ++m) Io::four_bytes(bytes + 4 * R * m + 4 * k, q + 4 * m);
}

// Bytes of the eight-row nibble types: byte j of row k holds columns j (low) and j + 16 (high).
template <class Io, class Byte>
inline void nibbles_r8(Byte* bytes, int k, uint8_t* q) {
    for (int j = 0; j < 16; ++j) {
        Byte& byte = bytes[32 * (j >> 2) + 4 * k + (j & 3)];
        Io::template bits<4>(byte, 0, q[j]);
        Io::template bits<4>(byte, 4, q[j + 16]);
    }
}

}  // namespace ikpy::formats
