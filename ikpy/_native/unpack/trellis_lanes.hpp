// Seeds and scales of the trellis types in lanes of 32 bits, for products that multiply and sum in one pass.
// Layouts: quant-formats.md#trellis-types.
//
// Types without signs of their own: lane l of part h covers the 16 elements 16 * (kLanes * h + l) .. + 15 of
// a block of 256, whose values come from kSeeds seeds, 16 / kSeeds each in order. All of them share one
// scale.
#pragma once
#include "kernels/matmul/unpacked.hpp"
#include "unpack/level_tables.hpp"
#include "unpack/trellis.hpp"

#if defined(__AVX2__)

namespace ikpy {
namespace trellis {

#if defined(__AVX512VNNI__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
constexpr int kLaneBytes = 4 * kLanes, kParts = 16 / kLanes;

typedef uint32_t Lanes __attribute__((vector_size(kLaneBytes)));
typedef uint64_t LanePairs __attribute__((vector_size(kLaneBytes)));
typedef float LaneFloats __attribute__((vector_size(kLaneBytes)));

inline Lanes load_lanes(const void* p) {
    Lanes v;
    std::memcpy(&v, p, kLaneBytes);
    return v;
}

inline Lanes even_odd(uint64_t even, uint64_t odd) {
    return reinterpret_cast<Lanes>(LanePairs{} + (even | odd << 32));
}

inline __m128i load_128(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline __m256i load_256(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

#if defined(__AVX512VNNI__)

inline Lanes words_as_lanes(const uint8_t* p, int) {
    return reinterpret_cast<Lanes>(_mm512_cvtepu16_epi32(load_256(p)));
}

// Eight dwords or words: low nibbles count in the lower eight lanes, high ones in the upper.
inline Lanes nibbles_in_dwords(const uint8_t* p, int) {
    const __m512i counts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(4), 1);
    return reinterpret_cast<Lanes>(_mm512_srlv_epi32(_mm512_broadcast_i64x4(load_256(p)), counts));
}
inline Lanes nibbles_in_words(const uint8_t* p, int) {
    const __m512i counts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(4), 1);
    const __m256i words = _mm256_broadcastsi128_si256(load_128(p));
    return reinterpret_cast<Lanes>(_mm512_srlv_epi32(_mm512_cvtepu16_epi32(words), counts));
}

// Each of eight dwords or signed bytes in two neighbouring lanes.
inline Lanes doubled_dwords(const uint8_t* p, int) {
    const __m512i order = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return reinterpret_cast<Lanes>(_mm512_permutexvar_epi32(order, _mm512_castsi256_si512(load_256(p))));
}
inline Lanes doubled_bytes(__m128i v, int) {
    const __m128i order = _mm_setr_epi8(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return reinterpret_cast<Lanes>(_mm512_cvtepi8_epi32(_mm_shuffle_epi8(v, order)));
}

inline LaneFloats as_floats(Lanes v) {
    return reinterpret_cast<LaneFloats>(_mm512_cvtepi32_ps(reinterpret_cast<__m512i>(v)));
}

#else

inline Lanes words_as_lanes(const uint8_t* p, int h) {
    return reinterpret_cast<Lanes>(_mm256_cvtepu16_epi32(load_128(p + 16 * h)));
}
inline Lanes nibbles_in_dwords(const uint8_t* p, int h) { return load_lanes(p) >> 4 * h; }
inline Lanes nibbles_in_words(const uint8_t* p, int h) { return words_as_lanes(p, 0) >> 4 * h; }

inline Lanes doubled_dwords(const uint8_t* p, int h) {
    const __m256i order = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    return reinterpret_cast<Lanes>(
        _mm256_permutevar8x32_epi32(_mm256_castsi128_si256(load_128(p + 16 * h)), order));
}
inline Lanes doubled_bytes(__m128i v, int h) {
    const __m128i order = h ? _mm_setr_epi8(4, 4, 5, 5, 6, 6, 7, 7, 0, 0, 0, 0, 0, 0, 0, 0)
                            : _mm_setr_epi8(0, 0, 1, 1, 2, 2, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0);
    return reinterpret_cast<Lanes>(_mm256_cvtepi8_epi32(_mm_shuffle_epi8(v, order)));
}

inline LaneFloats as_floats(Lanes v) {
    return reinterpret_cast<LaneFloats>(_mm256_cvtepi32_ps(reinterpret_cast<__m256i>(v)));
}

#endif

inline __m128i eight_bytes(uint64_t v) { return _mm_cvtsi64_si128(static_cast<int64_t>(v)); }

// Levels of the normal 16-level table.
inline LaneFloats doubled_levels(uint64_t nibbles, int h) {
    const __m128i codes = _mm_shuffle_epi8(load_128(kIq4Codes), eight_bytes(nibbles));
    return as_floats(doubled_bytes(_mm_xor_si128(codes, _mm_set1_epi8(-128)), h));
}

struct LanesIQ1_KT {
    using Unpack = UnpackIQ1_KT;
    static constexpr int kSeeds = 2;
    static void seeds(const uint8_t* p, int h, Lanes* s) {
        const Lanes low = words_as_lanes(p + 8, h), middle = nibbles_in_words(p + 40, h);
        // Bits 4 .. 7 of a byte belong to the four groups of two lanes; the lane's first one comes to bit 12.
        const Lanes top = doubled_bytes(eight_bytes(load_unaligned<uint64_t>(p)), h) << even_odd(8, 6);
        const Lanes first = (low & 0xFF) | (middle << 8 & 0xF00) | (top & 0x1000);
        const Lanes second = low >> 8 | (middle & 0xF00) | (top >> 1 & 0x1000);
        s[0] = first + kOffset;
        s[1] = second + kOffset;
    }
    static LaneFloats scales(const uint8_t* p, int h) {
        return doubled_levels(load_unaligned<uint64_t>(p) & 0x0F0F0F0F0F0F0F0F, h);
    }
};

struct LanesIQ2_KT {
    using Unpack = UnpackIQ2_KT;
    static constexpr int kSeeds = 2;
    static void seeds(const uint8_t* p, int h, Lanes* s) {
        const Lanes pair = load_lanes(p + 4 + kLaneBytes * h);
        s[0] = (pair & 0xFFFF) + kOffset;
        s[1] = (pair >> 16) + kOffset;
    }
    static LaneFloats scales(const uint8_t* p, int h) { return doubled_levels(split_nibbles(p), h); }
};

struct LanesIQ4_KT {
    using Unpack = UnpackIQ4_KT;
    static constexpr int kSeeds = 4;
    static void seeds(const uint8_t* p, int h, Lanes* s) {
        const Lanes low = load_lanes(p + 32 + kLaneBytes * h), middle = nibbles_in_dwords(p + 96, h),
                    word = doubled_dwords(p, h);
        // Two lanes share a word with eight groups: three top bits each from bit 8 on, and the choice of the
        // offset in bit 0.
        const Lanes top = word >> even_odd(8, 20), offset = (word << 15 & 0x8000) + kOffset;
        s[0] = ((low & 0xFF) | (middle << 8 & 0xF00) | (top << 12 & 0x7000)) + offset;
        s[1] = ((low >> 8 & 0xFF) | (middle & 0xF00) | (top << 9 & 0x7000)) + offset;
        s[2] = ((low >> 16 & 0xFF) | (middle >> 8 & 0xF00) | (top << 6 & 0x7000)) + offset;
        s[3] = (low >> 24 | (middle >> 16 & 0xF00) | (top << 3 & 0x7000)) + offset;
    }
    static LaneFloats scales(const uint8_t* p, int h) {
        return as_floats((doubled_dwords(p, h) >> 1 & 127) - 64);
    }
};

// Bytes 8 * r + k of 32 in two halves, k < 4 and k >= 4, each in the order 4 * (k & 3) + r.
inline __m256i by_place(const uint8_t* p) {
    const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    const __m256i turned =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    return _mm256_shuffle_epi8(_mm256_permutevar8x32_epi32(load_256(p), order), turned);
}

// Lane l of part h is one group of eight, kLanes * h + l.
struct LanesIQ3_KT {
    using Unpack = UnpackIQ3_KT;
    static Lanes seeds(const uint8_t* p, int h) {
        return words_as_lanes(p + 4 + 2 * kLanes * h, 0) + kOffset;
    }
    static __m256i signs(const uint8_t* p) { return by_place(p + 68); }  // bit s of a byte: sub-block s
    static __m256 scales(const uint8_t* p) {                             // of the eight sub-blocks
        return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight_bytes(split_nibbles(p))));
    }
};

}  // namespace trellis
}  // namespace ikpy

#endif
