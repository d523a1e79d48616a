// 256 columns of a row for a panel on AVX2, by the RowCodes of a type: scales eight at a time, and codes of
// the first level table, to which the distance of the second one is added. block() computes scales one after
// the other and looks codes of two tables up twice: IQ4_K took 2.2 times as long, Q4_K 1.4 times.
#pragma once
#include "kernels/matmul/unpacked.hpp"
#include "unpack/row_codes_iqk.hpp"

#if defined(__AVX2__) && !defined(__AVX512VNNI__)

namespace ikpy {

template <class U, class = void>
struct HasRowCodes : std::false_type {};
template <class U>
struct HasRowCodes<U, std::void_t<decltype(RowCodes<U>::kStep)>> : std::true_type {};

namespace row_chunk {

// What codes() of RowCodes have less than those of block().
template <class U>
constexpr int kCentre = HasRowCodes<U>::value && U::kZero == 128 && !kByteDots ? 128 : 0;

// Scales of groups in their order.
template <class U>
inline void put_groups(const __m256* v, float factor, float* to) {
    const __m256 f = _mm256_set1_ps(factor);
    if constexpr (U::kGroup == 32) {
        _mm256_store_ps(to, _mm256_mul_ps(v[0], f));
    } else {
        const __m256 even = _mm256_mul_ps(v[0], f), odd = _mm256_mul_ps(v[1], f);
        const __m256 low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
        _mm256_store_ps(to, _mm256_permute2f128_ps(low, high, 0x20));
        _mm256_store_ps(to + 8, _mm256_permute2f128_ps(low, high, 0x31));
    }
}

// Puts codes with what the second table adds. steps: words of two equal bytes, of eight even groups and of
// eight odd ones, or twice those of groups of 32.
struct SteppedCodes {
    uint8_t* to;
    __m256i steps;
    int element;

    SteppedCodes operator+(int n) const { return {to, steps, element + n}; }
    [[gnu::always_inline]] void take(c32::Codes32 v) const {
        const auto order = static_cast<int16_t>(0x0100 + 0x0202 * (element / 32));
        const __m256i of = _mm256_shuffle_epi8(steps, _mm256_set1_epi16(order));
        c32::store(to + element, v + reinterpret_cast<c32::Codes32>(of));
    }
};

template <class U>
inline __m256i steps_of(const BlockScales& s) {
    const __m256i masks = _mm256_packs_epi32(s.shifted[0], s.shifted[U::kGroup == 16 ? 1 : 0]);
    const __m256i step = _mm256_set1_epi16(RowCodes<U>::kStep * 0x0101);
    return _mm256_and_si256(_mm256_permute4x64_epi64(masks, 0xD8), step);
}

// Codes less kCentre.
template <class U>
inline void unpack(const uint8_t* p, Chunk* out) {
    const BlockScales s = RowCodes<U>::scales(p);
    put_groups<U>(s.d, s.factor, out->d);
    if (U::kZero == 0) put_groups<U>(s.m, s.offset_factor, out->m);
    if constexpr (RowCodes<U>::kStep > 0)
        RowCodes<U>::codes(p, SteppedCodes{out->codes, steps_of<U>(s), 0});
    else
        RowCodes<U>::codes(p, out->codes);
}

}  // namespace row_chunk
}  // namespace ikpy

#endif
