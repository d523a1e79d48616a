// The value generator of the trellis types (quant-formats.md#generator).
#pragma once

#include <cstdint>

namespace ikpy::formats {

constexpr uint32_t kTrellisMultiplier = 0xCBAC1FED;
constexpr uint32_t kTrellisOffset = 4096, kTrellisOffsetIQ4 = 36864;

// V integers in -126..126 from a seed; arithmetic modulo 2^32.
template <int V>
inline void trellis_values(uint32_t seed, int* values) {
    for (int i = 0; i < V; ++i) {
        seed *= kTrellisMultiplier;
        const uint32_t bytes = seed & 0x3F3F3F3F;
        values[i] =
            static_cast<int>((bytes * 0x01010101) >> 24) - 126;  // the top byte is the sum of the four
    }
}

}  // namespace ikpy::formats
