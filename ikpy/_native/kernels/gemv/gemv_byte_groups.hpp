// Single tokens times groups of eight interleaved rows of signed bytes, on AVX-512.
//
// A group is read from its first byte to its last. The kernel of all interleaved types (gemv_interleaved.hpp)
// reads two groups side by side, which memory serves more slowly. One core of Zen 5 before and now, percent
// of what it can read from memory (41 GB/s), and GB/s from the second-level cache:
//   Q8_0_R8 72, 92; 67, 81     Q8_KV_R8 74, 92; 75, 82     Q8_K_R8 73, 92; 81, 80
// All other codes are unpacked into whole vectors (gemv_row_blocks.hpp, gemv_row_groups.hpp); bytes, in
// vectors of the eight rows, meet columns that the products load to all of them.
#pragma once
#include "kernels/matmul/activations.hpp"
#include "kernels/matmul/unpacked.hpp"
#include "kernels/matmul/weight_prefetch.hpp"
#include "kernels/simd/simd_f32.hpp"
#include "kernels/weights/weight_kernels.hpp"

#if defined(__AVX512VNNI__)

namespace ikpy::byte_groups {

template <class U, class = void>
struct Has : std::false_type {};
template <class U>
struct Has<U, std::void_t<decltype(U::kCodesAt)>> : std::true_type {};
template <class U>
constexpr bool kHas = Has<U>::value;

// Products of 32 columns, as float; start: see ActQ8Layout.
inline __m256 dot32(const uint8_t* codes, const uint8_t* x, int32_t start) {
    const __m256i top = _mm256_set1_epi8(static_cast<char>(0x80));
    __m256i sum[2] = {_mm256_set1_epi32(start), _mm256_setzero_si256()};
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 32 * i));
        sum[i % 2] = _mm256_dpbusd_epi32(sum[i % 2], _mm256_xor_si256(w, top),
                                         _mm256_set1_epi32(load_unaligned<int32_t>(x + 4 * i)));
    }
    return _mm256_sub_ps(_mm256_castsi256_ps(_mm256_add_epi32(sum[0], sum[1])), _mm256_set1_ps(kStartValue));
}

// Products of the rows of a group, without row scales.
template <class U>
__m256 dot_group(const uint8_t* p, int64_t n_in, const uint8_t* x, const ActQ8Layout& at) {
    __m256 total = _mm256_setzero_ps();
    for (int64_t k = 0; k < n_in; k += U::kBlock, p += U::kBlockBytes) {
        __m256 value = U::kCodesAt > 0 ? _mm256_setzero_ps() : total;
        for (int64_t c = 0; c < U::kBlock; c += 32) {
            const uint8_t* codes = p + U::kCodesAt + 8 * c;
            prefetch_weights<256>(codes);
            const int64_t group = (k + c) / 32 * 4;
            const __m256 dot = dot32(codes, x + k + c, load_unaligned<int32_t>(x + at.start32 + group));
            value = _mm256_fmadd_ps(dot, _mm256_set1_ps(load_unaligned<float>(x + at.scale + group)), value);
        }
        if constexpr (U::kCodesAt > 0) {
            const __m256 d = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
            total = _mm256_fmadd_ps(value, d, total);
        } else {
            total = value;
        }
    }
    return total;
}

// out[i]: products of the rows of half h.
template <class U>
void dot_half(const RowBlock& rows, int h, const uint8_t* x, const ActQ8Layout& at, float* out) {
    for (int i = 0; i < rows.n[h]; i += U::kRows)
        _mm256_storeu_ps(out + i,
                         dot_group<U>(rows.group(h, i, U::kRows) + RowHeader<U>::kBytes, rows.n_in, x, at));
}

}  // namespace ikpy::byte_groups

#endif
