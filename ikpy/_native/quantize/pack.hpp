// Bit layouts shared by several block types (quant-formats.md#conventions). All functions OR into zeroed
// bytes.
#pragma once

#include <cstdint>

namespace ikpy::quantize {

// Nibble number `index` of an array of bytes that holds two per byte, even index low.
inline void put_nibble(uint8_t* bytes, int index, int value) {
    bytes[index >> 1] |= static_cast<uint8_t>((value & 15) << 4 * (index & 1));
}

// Low two bits of 256 levels: byte 32*(e/128) + e%32, bits 2*(e/32 % 4).
inline void pack_two_bits(uint8_t* qs, const uint8_t* levels) {
    for (int e = 0; e < 256; e++)
        qs[32 * (e >> 7) + (e & 31)] |= static_cast<uint8_t>((levels[e] & 3) << 2 * ((e >> 5) & 3));
}

// One bit (number `bit` of the level) of 256 levels: byte e%32, bit e/32.
inline void pack_bit_plane(uint8_t* qh, const uint8_t* levels, int bit) {
    for (int e = 0; e < 256; e++) qh[e & 31] |= static_cast<uint8_t>(((levels[e] >> bit) & 1) << (e >> 5));
}

// Low nibbles of 256 levels, the halves of each 32 elements paired: byte 16*(e/32) + e%16.
inline void pack_nibbles_16(uint8_t* qs, const uint8_t* levels) {
    for (int e = 0; e < 256; e++)
        qs[16 * (e >> 5) + (e & 15)] |= static_cast<uint8_t>((levels[e] & 15) << 4 * ((e >> 4) & 1));
}

// Low nibbles of 256 levels, the halves of each 64 elements paired: byte 32*(e/64) + e%32.
inline void pack_nibbles_32(uint8_t* qs, const uint8_t* levels) {
    for (int e = 0; e < 256; e++)
        qs[32 * (e >> 6) + (e & 31)] |= static_cast<uint8_t>((levels[e] & 15) << 4 * ((e >> 5) & 1));
}

}  // namespace ikpy::quantize
