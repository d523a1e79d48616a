// Unpackers of the grid types: eight elements are one or two lattice points with signs. Layouts:
// quant-formats section 6.1.
//
// A layout L gives, for row k of a group (0 for plain types),
//   static uint64_t point(p, k, g)      eight magnitudes of 8-group g
//   static uint64_t signs(p, k, i)      sign masks of 8-groups 8 * i .. 8 * i + 7
//   static void scales(p, k, float* d)  one per kGroup elements
// and for AVX2, of plain types, where these are slow
//   static void masks(p, uint8_t* out)  all sign masks of a block
//   static __m256i points32(p, i)       magnitudes 32 * i .. + 31, with kPointsOf32
#pragma once
#include "kernels/unpacked.hpp"
#include "quantize/tables.hpp"
#include "unpack/codes32.hpp"
#include "unpack/wide.hpp"

namespace ikpy {
namespace grid {

constexpr uint64_t kOnes = 0x0101010101010101;

// The largest magnitudes of the tables: of the types of 2 bits, of IQ3_XXS, of IQ3_S.
constexpr int kLargestPoint2 = 43, kLargestPoint3xxs = 62, kLargestPoint3s = 15;

// Indices have 64 bits: two instructions per point less than with sign extension.
inline uint64_t point8(const int8_t* grid, uint64_t index) {
    return load_unaligned<uint64_t>(grid + 8 * index);
}
inline uint64_t point4(const int8_t* grid, uint64_t first, uint64_t second) {
    return load_unaligned<uint32_t>(grid + 4 * first) |
           static_cast<uint64_t>(load_unaligned<uint32_t>(grid + 4 * second)) << 32;
}

// Four 7-bit fields as bytes.
inline uint64_t seven_bit_fields(uint32_t v) {
#if defined(__BMI2__)
    return _pdep_u64(v, 0x7F7F7F7F);
#else
    return (v & 0x7F) | (v << 1 & 0x7F00) | (v << 2 & 0x7F0000) | (v << 3 & 0x7F000000);
#endif
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
#if defined(__AVX2__)
    const __m128i v = _mm_set_epi64x(load_unaligned<int64_t>(words + stride), load_unaligned<int64_t>(words));
    const __m128i sevens = _mm_srli_epi16(v, 9);
    return static_cast<uint64_t>(_mm_cvtsi128_si64(_mm_packus_epi16(sevens, sevens)));
#else
    uint64_t fields = 0;
    for (int j = 0; j < 8; ++j)
        fields |= static_cast<uint64_t>(words[(j >> 2) * stride + 2 * (j & 3) + 1] >> 1) << (8 * j);
    return fields;
#endif
}

#if defined(__AVX2__)
// Sign masks of all 32 8-groups from 7-bit indices: the eighth bit makes their parity even. In general
// registers this took longer than the gathers (IQ2_XXS 9.4e9 weights/s).
inline __m256i even_masks32(__m256i indices) {
    const __m256i parity = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0));
    const __m256i nibble = _mm256_set1_epi8(15);
    const __m256i low = _mm256_shuffle_epi8(parity, _mm256_and_si256(indices, nibble));
    const __m256i high = _mm256_shuffle_epi8(parity, _mm256_and_si256(_mm256_srli_epi16(indices, 4), nibble));
    return _mm256_or_si256(indices, _mm256_xor_si256(low, high));
}

// The same for dwords of four indices and four other bits.
inline __m256i even_masks_of_dwords(__m256i v) {
    const __m256i a = _mm256_and_si256(v, _mm256_set1_epi32(0x7F));
    const __m256i b = _mm256_and_si256(_mm256_slli_epi32(v, 1), _mm256_set1_epi32(0x7F00));
    const __m256i c = _mm256_and_si256(_mm256_slli_epi32(v, 2), _mm256_set1_epi32(0x7F0000));
    const __m256i d = _mm256_and_si256(_mm256_slli_epi32(v, 3), _mm256_set1_epi32(0x7F000000));
    return even_masks32(_mm256_or_si256(_mm256_or_si256(a, b), _mm256_or_si256(c, d)));
}

inline void put(__m256i masks, void* at) { _mm256_store_si256(static_cast<__m256i*>(at), masks); }

// Four 16-bit indices of points of eight elements, eight of four.
inline __m256i points_of_8(const int8_t* grid, uint64_t index) {
    return _mm256_setr_epi64x(static_cast<int64_t>(point8(grid, index & 0xFFFF)),
                              static_cast<int64_t>(point8(grid, index >> 16 & 0xFFFF)),
                              static_cast<int64_t>(point8(grid, index >> 32 & 0xFFFF)),
                              static_cast<int64_t>(point8(grid, index >> 48)));
}
// The same of four rows whose indices are Stride apart.
template <int Stride, class T>
inline __m256i points_of_rows(const int8_t* grid, const T* index) {
    return _mm256_setr_epi64x(static_cast<int64_t>(point8(grid, index[0])),
                              static_cast<int64_t>(point8(grid, index[Stride])),
                              static_cast<int64_t>(point8(grid, index[2 * Stride])),
                              static_cast<int64_t>(point8(grid, index[3 * Stride])));
}
// Points of four elements at eight indices.
template <class T>
inline __m256i points_of_4_at(const int8_t* grid, const T* index) {
    const auto at = [=](int j) {
        return load_unaligned<int32_t>(grid + 4 * static_cast<uint64_t>(index[j]));
    };
    return _mm256_setr_epi32(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7));
}
inline __m128i points_of_4(const int8_t* grid, uint64_t index) {
    const auto at = [grid](uint64_t i) { return load_unaligned<int32_t>(grid + 4 * i); };
    return _mm_setr_epi32(at(index & 0xFFFF), at(index >> 16 & 0xFFFF), at(index >> 32 & 0xFFFF),
                          at(index >> 48));
}
#endif

inline float odd(int s) { return static_cast<float>(2 * s + 1); }

// Layouts whose sign masks are not in the order of the elements.
template <class L, class = void>
struct HasOwnSigns : std::false_type {};
template <class L>
struct HasOwnSigns<L, std::void_t<decltype(L::kOwnSigns)>> : std::true_type {};

#if defined(__AVX2__)

template <class L, class = void>
struct HasPoints32 : std::false_type {};
template <class L>
struct HasPoints32<L, std::void_t<decltype(L::kPointsOf32)>> : std::true_type {};

template <class L, class = void>
struct HasMasks : std::false_type {};
template <class L>
struct HasMasks<L, std::void_t<decltype(&L::masks)>> : std::true_type {};

// Magnitudes of elements 32 * i .. + 31 of row k.
template <class L>
inline __m256i magnitudes32(const uint8_t* p, [[maybe_unused]] int k, int i) {
    if constexpr (HasPoints32<L>::value) {
        return L::points32(p, i);
    } else if constexpr (RowsOf<L>::kCount > 1) {
        return L::points32(p, k, i);
    } else {
        typedef uint64_t Points __attribute__((vector_size(32)));
        return reinterpret_cast<__m256i>(Points{L::point(p, k, 4 * i), L::point(p, k, 4 * i + 1),
                                                L::point(p, k, 4 * i + 2), L::point(p, k, 4 * i + 3)});
    }
}

// Sign masks of the 32 8-groups.
template <class L>
inline void sign_masks(const uint8_t* p, [[maybe_unused]] int k, uint8_t* out) {
    if constexpr (HasMasks<L>::value) {
        L::masks(p, out);
    } else {
        for (int i = 0; i < 4; ++i) {
            const uint64_t masks = L::signs(p, k, i);
            std::memcpy(out + 8 * i, &masks, 8);
        }
    }
}

template <class L>
inline void signed_codes(const uint8_t* p, int k, uint8_t* codes) {
    alignas(32) uint8_t masks[32];
    sign_masks<L>(p, k, masks);
    for (int i = 0; i < kChunk / 32; ++i) {
        const auto points = reinterpret_cast<c32::Codes32>(magnitudes32<L>(p, k, i));
        const c32::Codes32 negative = c32::bits(load_unaligned<uint32_t>(masks + 4 * i));
        c32::store(codes + 32 * i, (points ^ negative) - negative + 128);
    }
}

#else

template <class L>
inline void signed_codes(const uint8_t* p, int k, uint8_t* codes) {
    for (int i = 0; i < L::kBlock / 64; ++i) {
        const uint64_t signs = L::signs(p, k, i);
        for (int h = 0; h < 2; ++h) {
            typedef uint64_t Points __attribute__((vector_size(32)));
            const int g = 8 * i + 4 * h;
            const auto points = reinterpret_cast<c32::Codes32>(Points{
                L::point(p, k, g), L::point(p, k, g + 1), L::point(p, k, g + 2), L::point(p, k, g + 3)});
            const c32::Codes32 negative = c32::bits(static_cast<uint32_t>(signs >> (32 * h)));
            c32::store(codes + 64 * i + 32 * h, (points ^ negative) - negative + 128);
        }
    }
}

#endif

template <class L>
inline void block(const uint8_t* p, int k, uint8_t* codes, float* d) {
    L::scales(p, k, d);
    if constexpr (HasOwnSigns<L>::value) {
        L::signed_codes(p, k, codes);
    } else {
        signed_codes<L>(p, k, codes);
    }
}

#if defined(__AVX512VNNI__)
inline __m512i gather8(const int8_t* grid, __m512i index) { return _mm512_i64gather_epi64(index, grid, 8); }
inline __m512i gather4(const int8_t* grid, __m512i index) { return _mm512_i32gather_epi32(index, grid, 4); }

// Bytes and words in the lanes that gathers take indices from.
inline __m512i byte_quads(uint64_t v) {
    return _mm512_cvtepu8_epi64(_mm_cvtsi64_si128(static_cast<int64_t>(v)));
}
inline __m512i word_quads(__m128i v) { return _mm512_cvtepu16_epi64(v); }
inline __m512i byte_dwords(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline __m128i load16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

// Odd scales 2 * s + 1 of 16 (or 8) lanes.
inline __m512 odd_scales(float scale, __m512i s) {
    const __m512i odd = _mm512_add_epi32(_mm512_add_epi32(s, s), _mm512_set1_epi32(1));
    return wide::scaled(_mm512_set1_ps(scale), odd);
}
inline __m512i dword_nibbles(uint32_t v) {
    const __m512i counts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 0, 0, 0, 0, 0, 0, 0);
    return _mm512_and_si512(_mm512_srlv_epi32(_mm512_set1_epi32(static_cast<int32_t>(v)), counts),
                            _mm512_set1_epi32(15));
}
template <class L, class = void>
struct HasWideSigns : std::false_type {};
template <class L>
struct HasWideSigns<L, std::void_t<decltype(&L::wide_signs)>> : std::true_type {};

inline uint64_t two_dwords(const uint8_t* a, const uint8_t* b) {
    return load_unaligned<uint32_t>(a) | static_cast<uint64_t>(load_unaligned<uint32_t>(b)) << 32;
}

template <class L>
inline Codes512 wide_block(const uint8_t* p, int k) {
    const __m512i zero = wide::bytes(128);
    Codes512 r;
    alignas(32) uint64_t signs[4];
    if constexpr (HasWideSigns<L>::value) {
        L::wide_signs(p, signs);
    } else {
        for (int i = 0; i < 4; ++i) signs[i] = L::signs(p, k, i);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const __m512i v = L::points(p, k, i);
        r.q[i] = _mm512_mask_sub_epi8(_mm512_or_si512(v, zero), signs[i], zero, v);
    }
    r.d = L::wide_scales(p, k);
    return r;
}
#endif

struct IQ2_XXS {
    static constexpr int kType = 16, kGroup = 32, kBlock = 256, kBlockBytes = 66, kZero = 128;
    static constexpr int kLow = 128 - kLargestPoint2, kHigh = 128 + kLargestPoint2;
    static uint64_t point(const uint8_t* p, int, int g) {
        return point8(tables::iq2xxs_grid, p[2 + 8 * (g >> 2) + (g & 3)]);
    }
    static uint32_t signs_scale(const uint8_t* p, int s) { return load_unaligned<uint32_t>(p + 6 + 8 * s); }
#if defined(__AVX2__)
    static void masks(const uint8_t* p, uint8_t* out) {
        const __m256 a = _mm256_loadu_ps(reinterpret_cast<const float*>(p + 2));
        const __m256 b = _mm256_loadu_ps(reinterpret_cast<const float*>(p + 34));
        const __m256i odd = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xDD));
        put(even_masks_of_dwords(_mm256_permute4x64_epi64(odd, 0xD8)), out);
    }
#endif
#if defined(__AVX512VNNI__)
    static __m512i points(const uint8_t* p, int, int i) {
        return gather8(tables::iq2xxs_grid, byte_quads(two_dwords(p + 2 + 16 * i, p + 10 + 16 * i)));
    }
    static __m512 wide_scales(const uint8_t* p, int) {
        const __m512i s = _mm512_srli_epi64(_mm512_loadu_si512(p + 2), 60);
        return odd_scales(load_f16(p) * 0.125f, _mm512_castsi256_si512(_mm512_cvtepi64_epi32(s)));
    }
    static void wide_signs(const uint8_t* p, uint64_t* masks) {
        const __m512i v = _mm512_srli_epi64(_mm512_loadu_si512(p + 2), 32);
        put(even_masks_of_dwords(_mm512_cvtepi64_epi32(v)), masks);
    }
#endif
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
    static constexpr int kLow = 128 - kLargestPoint2, kHigh = 128 + kLargestPoint2;
    static uint64_t point(const uint8_t* p, int, int g) {
        return point8(tables::iq2xs_grid, load_unaligned<uint16_t>(p + 2 + 2 * g) & 511);
    }
#if defined(__AVX2__)
    static void masks(const uint8_t* p, uint8_t* out) {
        const auto* words = reinterpret_cast<const __m256i*>(p + 2);
        const __m256i a = _mm256_srli_epi16(_mm256_loadu_si256(words), 9);
        const __m256i b = _mm256_srli_epi16(_mm256_loadu_si256(words + 1), 9);
        put(even_masks32(_mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xD8)), out);
    }
    static constexpr bool kPointsOf32 = true;
    static __m256i points32(const uint8_t* p, int i) {
        return points_of_8(tables::iq2xs_grid, load_unaligned<uint64_t>(p + 2 + 8 * i) & 0x01FF01FF01FF01FF);
    }
#endif
#if defined(__AVX512VNNI__)
    static __m512i points(const uint8_t* p, int, int i) {
        const __m512i words = word_quads(load16(p + 2 + 16 * i));
        return gather8(tables::iq2xs_grid, _mm512_and_si512(words, _mm512_set1_epi64(511)));
    }
    static __m512 wide_scales(const uint8_t* p, int) {
        return odd_scales(load_f16(p) * 0.125f, wide::nibble_lanes(p + 66));
    }
    static void wide_signs(const uint8_t* p, uint64_t* masks) {
        const __m512i sevens = _mm512_srli_epi16(_mm512_loadu_si512(p + 2), 9);
        put(even_masks32(_mm512_cvtepi16_epi8(sevens)), masks);
    }
#endif
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
    static constexpr int kLow = 128 - kLargestPoint2, kHigh = 128 + kLargestPoint2;
    static uint64_t point(const uint8_t* p, int, int g) {
        return point8(tables::iq2s_grid, p[2 + g] + 256 * (p[66 + (g >> 2)] >> (2 * (g & 3)) & 3));
    }
#if defined(__AVX2__)
    static void masks(const uint8_t* p, uint8_t* out) { std::memcpy(out, p + 34, 32); }
    static constexpr bool kPointsOf32 = true;
    static __m256i points32(const uint8_t* p, int i) {
        const uint64_t low = _pdep_u64(load_unaligned<uint32_t>(p + 2 + 4 * i), 0x00FF00FF00FF00FF);
        return points_of_8(tables::iq2s_grid, low | _pdep_u64(p[66 + i], 0x0300030003000300));
    }
#endif
#if defined(__AVX512VNNI__)
    static __m512i points(const uint8_t* p, int, int i) {
        const uint64_t low = load_unaligned<uint64_t>(p + 2 + 8 * i);
        const uint64_t high = _pdep_u64(load_unaligned<uint16_t>(p + 66 + 2 * i), 0x0303030303030303);
        const __m128i index = _mm_unpacklo_epi8(_mm_cvtsi64_si128(static_cast<int64_t>(low)),
                                                _mm_cvtsi64_si128(static_cast<int64_t>(high)));
        return gather8(tables::iq2s_grid, word_quads(index));
    }
    static __m512 wide_scales(const uint8_t* p, int) {
        return odd_scales(load_f16(p) * 0.125f, wide::nibble_lanes(p + 74));
    }
#endif
    static uint64_t signs(const uint8_t* p, int, int i) { return load_unaligned<uint64_t>(p + 34 + 8 * i); }
    static void scales(const uint8_t* p, int, float* d) {
        const float scale = load_f16(p) * 0.125f;
        for (int s = 0; s < 16; ++s) d[s] = scale * odd(p[74 + (s >> 1)] >> (4 * (s & 1)) & 15);
    }
};

struct IQ3_XXS {
    static constexpr int kType = 18, kGroup = 32, kBlock = 256, kBlockBytes = 98, kZero = 128;
    static constexpr int kLow = 128 - kLargestPoint3xxs, kHigh = 128 + kLargestPoint3xxs;
    static uint64_t point(const uint8_t* p, int, int g) {
        return point4(tables::iq3xxs_grid, p[2 + 2 * g], p[3 + 2 * g]);
    }
    static uint32_t signs_scale(const uint8_t* p, int s) { return load_unaligned<uint32_t>(p + 66 + 4 * s); }
#if defined(__AVX2__)
    static void masks(const uint8_t* p, uint8_t* out) {
        put(even_masks_of_dwords(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 66))), out);
    }
    static constexpr bool kPointsOf32 = true;
    static __m256i points32(const uint8_t* p, int i) {
        return points_of_4_at(tables::iq3xxs_grid, p + 2 + 8 * i);
    }
#endif
#if defined(__AVX512VNNI__)
    static __m512i points(const uint8_t* p, int, int i) {
        return gather4(tables::iq3xxs_grid, byte_dwords(p + 2 + 16 * i));
    }
    static __m512 wide_scales(const uint8_t* p, int) {
        const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 66));
        return odd_scales(load_f16(p) * 0.25f, _mm512_castsi256_si512(_mm256_srli_epi32(v, 28)));
    }
    static void wide_signs(const uint8_t* p, uint64_t* masks) {
        put(even_masks_of_dwords(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 66))), masks);
    }
#endif
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
    static constexpr int kLow = 128 - kLargestPoint3s, kHigh = 128 + kLargestPoint3s;
    static uint64_t point(const uint8_t* p, int, int g) {
        const int high = p[66 + (g >> 2)] >> (2 * (g & 3));
        return point4(tables::iq3s_grid, p[2 + 2 * g] + 256 * (high & 1),
                      p[3 + 2 * g] + 256 * (high >> 1 & 1));
    }
#if defined(__AVX2__)
    static void masks(const uint8_t* p, uint8_t* out) { std::memcpy(out, p + 74, 32); }
    static constexpr bool kPointsOf32 = true;
    static __m256i points32(const uint8_t* p, int i) {
        const auto four = [p, i](int h) {
            const uint64_t low =
                _pdep_u64(load_unaligned<uint32_t>(p + 2 + 8 * i + 4 * h), 0x00FF00FF00FF00FF);
            return points_of_4(tables::iq3s_grid, low | _pdep_u64(p[66 + i] >> (4 * h), 0x0100010001000100));
        };
        return _mm256_inserti128_si256(_mm256_castsi128_si256(four(0)), four(1), 1);
    }
#endif
#if defined(__AVX512VNNI__)
    static __m512i points(const uint8_t* p, int, int i) {
        const __m512i low = byte_dwords(p + 2 + 16 * i);
        return gather4(tables::iq3s_grid, _mm512_mask_add_epi32(low, load_unaligned<uint16_t>(p + 66 + 2 * i),
                                                                low, _mm512_set1_epi32(256)));
    }
    static __m512 wide_scales(const uint8_t* p, int) {
        return odd_scales(load_f16(p), dword_nibbles(load_unaligned<uint32_t>(p + 106)));
    }
#endif
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
