// Unpackers of the grid types: eight elements are one or two lattice points with signs. Layouts:
// quant-formats section 6.1.
//
// A layout L gives, for row k of a group (0 for plain types),
//   static uint64_t point(p, k, g)      eight magnitudes of 8-group g
//   static uint64_t signs(p, k, i)      sign masks of 8-groups 8 * i .. 8 * i + 7
//   static void scales(p, k, float* d)  one per kGroup elements
#pragma once
#include "kernels/unpacked.hpp"
#include "quantize/tables.hpp"
#include "unpack/wide.hpp"

namespace ikpy {
namespace grid {

constexpr uint64_t kOnes = 0x0101010101010101;

inline uint64_t point8(const int8_t* grid, int index) { return load_unaligned<uint64_t>(grid + 8 * index); }
inline uint64_t point4(const int8_t* grid, int first, int second) {
    return load_unaligned<uint32_t>(grid + 4 * first) |
           static_cast<uint64_t>(load_unaligned<uint32_t>(grid + 4 * second)) << 32;
}

// 0xFF in every byte whose bit of the mask is set.
inline uint64_t spread(uint8_t mask) {
    const uint64_t bits = mask * kOnes & 0x8040201008040201;
    return (((bits & 0x7F * kOnes) + 0x7F * kOnes) | bits) >> 7 & kOnes;
}

// 128 + magnitude, or 128 - magnitude where the sign bit is set; no byte carries into the next.
inline uint64_t signed_codes(uint64_t point, uint8_t mask) {
    const uint64_t one = spread(mask);
    return ((point | 0x80 * kOnes) ^ one * 0xFF) + one;
}

// Four 7-bit fields as bytes.
inline uint64_t seven_bit_fields(uint32_t v) {
    return (v & 0x7F) | (v << 1 & 0x7F00) | (v << 2 & 0x7F0000) | (v << 3 & 0x7F000000);
}

// Sign indices of 7 bits to masks of even parity.
inline uint64_t even_masks(uint64_t indices) {
    uint64_t parity = indices ^ indices >> 4;
    parity ^= parity >> 2;
    parity ^= parity >> 1;
    return indices | (parity & kOnes) << 7;
}

// Sign codes z of the interleaved types: mask = z ^ z << 1.
inline uint64_t code_masks(uint64_t codes) { return codes ^ codes << 1; }

// Eight words' upper seven bits as bytes.
inline uint64_t upper_sevens(const uint8_t* words, int stride) {
    uint64_t fields = 0;
    for (int j = 0; j < 8; ++j)
        fields |= static_cast<uint64_t>(words[(j >> 2) * stride + 2 * (j & 3) + 1] >> 1) << (8 * j);
    return fields;
}

inline float odd(int s) { return static_cast<float>(2 * s + 1); }

template <class L>
inline void block(const uint8_t* p, int k, uint8_t* codes, float* d) {
    L::scales(p, k, d);
    for (int i = 0; i < L::kBlock / 64; ++i) {
        const uint64_t signs = L::signs(p, k, i);
        for (int g = 0; g < 8; ++g) {
            const uint64_t q =
                signed_codes(L::point(p, k, 8 * i + g), static_cast<uint8_t>(signs >> (8 * g)));
            std::memcpy(codes + 64 * i + 8 * g, &q, 8);
        }
    }
}

#if defined(__AVX512VNNI__)
template <class L>
inline __m512i points64(const uint8_t* p, int k, int i) {
    uint64_t v[8];
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) v[g] = L::point(p, k, 8 * i + g);
    return _mm512_set_epi64(static_cast<int64_t>(v[7]), static_cast<int64_t>(v[6]),
                            static_cast<int64_t>(v[5]), static_cast<int64_t>(v[4]),
                            static_cast<int64_t>(v[3]), static_cast<int64_t>(v[2]),
                            static_cast<int64_t>(v[1]), static_cast<int64_t>(v[0]));
}

template <class L>
inline Codes512 wide_block(const uint8_t* p, int k) {
    const __m512i zero = wide::bytes(128);
    Codes512 r;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const __m512i v = points64<L>(p, k, i);
        r.q[i] = _mm512_mask_sub_epi8(_mm512_or_si512(v, zero), L::signs(p, k, i), zero, v);
    }
    alignas(64) float d[16];
    L::scales(p, k, d);
    r.d = _mm512_load_ps(d);
    return r;
}
#endif

struct IQ2_XXS {
    static constexpr int kType = 16, kGroup = 32, kBlock = 256, kBlockBytes = 66, kZero = 128;
    static uint64_t point(const uint8_t* p, int, int g) {
        return point8(tables::iq2xxs_grid, p[2 + 8 * (g >> 2) + (g & 3)]);
    }
    static uint32_t signs_scale(const uint8_t* p, int s) { return load_unaligned<uint32_t>(p + 6 + 8 * s); }
    static uint64_t signs(const uint8_t* p, int, int i) {
        return even_masks(seven_bit_fields(signs_scale(p, 2 * i)) |
                          seven_bit_fields(signs_scale(p, 2 * i + 1)) << 32);
    }
    static void scales(const uint8_t* p, int, float* d) {
        const float scale = load_f16(p) * 0.125f;
        for (int s = 0; s < 8; ++s) d[s] = scale * odd(static_cast<int>(signs_scale(p, s) >> 28));
    }
};

struct IQ2_XS {
    static constexpr int kType = 17, kGroup = 16, kBlock = 256, kBlockBytes = 74, kZero = 128;
    static uint64_t point(const uint8_t* p, int, int g) {
        return point8(tables::iq2xs_grid, load_unaligned<uint16_t>(p + 2 + 2 * g) & 511);
    }
    static uint64_t signs(const uint8_t* p, int, int i) {
        return even_masks(upper_sevens(p + 2 + 16 * i, 8));
    }
    static void scales(const uint8_t* p, int, float* d) {
        const float scale = load_f16(p) * 0.125f;
        for (int s = 0; s < 16; ++s) d[s] = scale * odd(p[66 + (s >> 1)] >> (4 * (s & 1)) & 15);
    }
};

struct IQ2_S {
    static constexpr int kType = 22, kGroup = 16, kBlock = 256, kBlockBytes = 82, kZero = 128;
    static uint64_t point(const uint8_t* p, int, int g) {
        return point8(tables::iq2s_grid, p[2 + g] + 256 * (p[66 + (g >> 2)] >> (2 * (g & 3)) & 3));
    }
    static uint64_t signs(const uint8_t* p, int, int i) { return load_unaligned<uint64_t>(p + 34 + 8 * i); }
    static void scales(const uint8_t* p, int, float* d) {
        const float scale = load_f16(p) * 0.125f;
        for (int s = 0; s < 16; ++s) d[s] = scale * odd(p[74 + (s >> 1)] >> (4 * (s & 1)) & 15);
    }
};

struct IQ3_XXS {
    static constexpr int kType = 18, kGroup = 32, kBlock = 256, kBlockBytes = 98, kZero = 128;
    static uint64_t point(const uint8_t* p, int, int g) {
        return point4(tables::iq3xxs_grid, p[2 + 2 * g], p[3 + 2 * g]);
    }
    static uint32_t signs_scale(const uint8_t* p, int s) { return load_unaligned<uint32_t>(p + 66 + 4 * s); }
    static uint64_t signs(const uint8_t* p, int, int i) {
        return even_masks(seven_bit_fields(signs_scale(p, 2 * i)) |
                          seven_bit_fields(signs_scale(p, 2 * i + 1)) << 32);
    }
    static void scales(const uint8_t* p, int, float* d) {
        const float scale = load_f16(p) * 0.25f;
        for (int s = 0; s < 8; ++s) d[s] = scale * odd(static_cast<int>(signs_scale(p, s) >> 28));
    }
};

struct IQ3_S {
    static constexpr int kType = 21, kGroup = 32, kBlock = 256, kBlockBytes = 110, kZero = 128;
    static uint64_t point(const uint8_t* p, int, int g) {
        const int high = p[66 + (g >> 2)] >> (2 * (g & 3));
        return point4(tables::iq3s_grid, p[2 + 2 * g] + 256 * (high & 1),
                      p[3 + 2 * g] + 256 * (high >> 1 & 1));
    }
    static uint64_t signs(const uint8_t* p, int, int i) { return load_unaligned<uint64_t>(p + 74 + 8 * i); }
    static void scales(const uint8_t* p, int, float* d) {
        const float scale = load_f16(p);
        for (int s = 0; s < 8; ++s) d[s] = scale * odd(p[106 + (s >> 1)] >> (4 * (s & 1)) & 15);
    }
};

}  // namespace grid

template <class L>
struct UnpackGrid : L {
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) { grid::block<L>(p, 0, codes, d); }
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p) { return grid::wide_block<L>(p, 0); }
#endif
};

template <class L>
struct UnpackGridRows : L {
    static void block(const uint8_t* p, int k, uint8_t* codes, float* d, float*) {
        grid::block<L>(p, k, codes, d);
    }
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p, int k) { return grid::wide_block<L>(p, k); }
#endif
};

}  // namespace ikpy
