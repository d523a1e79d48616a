// Unpackers of the grid types over their layouts: eight elements are one or two lattice points with signs.
//
// A layout L gives, for row k of a group (0 for plain types),
//   static uint64_t point(p, k, g)      eight magnitudes of 8-group g
//   static uint64_t signs(p, k, i)      sign masks of 8-groups 8 * i .. 8 * i + 7
//   static void scales(p, k, float* d)  one per kGroup elements
// and for AVX2, of plain types, where these are slow
//   static void masks(p, uint8_t* out)  all sign masks of a block
//   static __m256i points32(p, i)       magnitudes 32 * i .. + 31, with kPointsOf32
// and for AVX-512
//   static __m512i points(p, k, i)      magnitudes 64 * i .. + 63
//   static __m512 wide_scales(p, k)     as scales
//   static void wide_signs(p, masks)    all sign masks of a block of a plain type, where these are slow
#pragma once
#include "kernels/matmul/unpacked.hpp"
#include "unpack/codes32.hpp"
#include "unpack/wide.hpp"

namespace ikpy {
namespace grid {

// Layouts whose sign masks are not in the order of the elements: they have signed_codes themselves.
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
template <class L, class = void>
struct HasWideSigns : std::false_type {};
template <class L>
struct HasWideSigns<L, std::void_t<decltype(&L::wide_signs)>> : std::true_type {};

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
