// Unpackers of IQ1_S and IQ1_M and the row-interleaved formats of these names: points of trits t moved by an
// eighth, so that codes are 9 + 8 * t + 1 or - 1 with an eighth of the scale. Layouts:
// quant-formats.md#grid-types, quant-formats.md#one-bit-types-with-row-scales.
#pragma once
#include "kernels/matmul/unpacked.hpp"
#include "quantize/tables.hpp"
#include "unpack/four_rows.hpp"
#include "unpack/grid_points.hpp"
#include "unpack/grid_signs.hpp"
#include "unpack/wide.hpp"

namespace ikpy {
namespace ternary {

constexpr uint64_t kOnes = 0x0101010101010101;

// Eight codes: trits -1, 0, 1 become 0, 1, 2 without a borrow between bytes.
inline uint64_t codes(int index, bool down) {
    const uint64_t trits = load_unaligned<uint64_t>(tables::iq1s_grid + 8 * index);
    const uint64_t counts = (trits ^ 0x80 * kOnes) - 0x7F * kOnes;
    return (counts << 3) + (down ? 0 : 2) * kOnes;
}

inline void put(uint8_t* at, uint64_t v) { std::memcpy(at, &v, 8); }

#if defined(__AVX2__)
// 8 * t + delta.
inline __m256i moved(__m256i trits, __m256i delta) {
    const __m256i eighths = _mm256_and_si256(_mm256_slli_epi16(trits, 3), _mm256_set1_epi8(-8));
    return _mm256_add_epi8(eighths, delta);
}
// Those of four points; `index` holds four words.
inline __m256i moved_points(uint64_t index, __m256i delta) {
    return moved(grid::points_of_8(tables::iq1s_grid, index), delta);
}
#endif

#if defined(__AVX2__)
// Points between -9 and 9 as codes.
inline void store_codes(uint8_t* at, __m256i points) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), _mm256_add_epi8(points, _mm256_set1_epi8(9)));
}

// Bytes 4 * t + k at p, t < 4.
inline uint32_t bytes_of(const uint8_t* p, int k) {
    const uint64_t row = 0x000000FF000000FF << (8 * k);
    return static_cast<uint32_t>(_pext_u64(load_unaligned<uint64_t>(p), row) |
                                 _pext_u64(load_unaligned<uint64_t>(p + 8), row) << 16);
}

// Indices of the points of four rows from bytes and `high`, whose words have the upper bits at 8 to 10.
inline void put_indices(const uint8_t* p, __m256i high, FourRows* out) {
    const __m256i low = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    grid::put(_mm256_or_si256(low, _mm256_and_si256(high, _mm256_set1_epi16(0x700))), out->index[0]);
}

// Trits of columns 8 * g .. + 7 of four rows.
inline __m256i trits_of_rows(const FourRows& rows, int g) {
    return grid::points_of_rows<1>(tables::iq1s_grid, rows.index[0] + 4 * g);
}
#endif

inline float odd_eighth(int s) { return static_cast<float>(2 * s + 1) * 0.125f; }

#if defined(__AVX512VNNI__)
// Codes of eight points: bytes of the indices, their upper bits as bytes, and a mask of those moved up.
inline __m512i codes64(uint64_t low, uint64_t high, uint32_t up) {
    const __m128i index = _mm_unpacklo_epi8(_mm_cvtsi64_si128(static_cast<int64_t>(low)),
                                            _mm_cvtsi64_si128(static_cast<int64_t>(high)));
    const __m512i trits = grid::gather8(tables::iq1s_grid, _mm512_cvtepu16_epi64(index));
    const __m512i codes = _mm512_slli_epi16(_mm512_add_epi8(trits, wide::bytes(1)), 3);
    return _mm512_mask_add_epi64(codes, static_cast<__mmask8>(up), codes, wide::bytes(2));
}

// Byte k of the four dwords at a and at b.
inline uint64_t bytes_of_row(const uint8_t* a, const uint8_t* b, int k) {
    const __m256i v =
        _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a))),
                                _mm_loadu_si128(reinterpret_cast<const __m128i*>(b)), 1);
    return static_cast<uint64_t>(
        _mm_cvtsi128_si64(_mm256_cvtepi32_epi8(_mm256_srl_epi32(v, _mm_cvtsi32_si128(8 * k)))));
}

inline __m512 odd_eighths(float scale, __m512i s) {
    const __m512i odd = _mm512_add_epi32(_mm512_add_epi32(s, s), _mm512_set1_epi32(1));
    return wide::scaled(_mm512_set1_ps(scale * 0.125f), odd);
}
#endif

}  // namespace ternary

struct UnpackIQ1_S {
    static constexpr int kType = 19, kGroup = 32, kBlock = 256, kBlockBytes = 50, kZero = 9;
    static constexpr int kLow = 0, kHigh = 18;
    static void scales(const uint8_t* p, int, float* d) {
        const float scale = load_f16(p);
        for (int s = 0; s < 8; ++s)
            d[s] = scale * ternary::odd_eighth(load_unaligned<uint16_t>(p + 34 + 2 * s) >> 12 & 7);
    }
#if defined(__AVX2__)
    static constexpr bool kSignedPoints = true;
    static __m256i points32(const uint8_t* p, int i) {
        const int h = load_unaligned<uint16_t>(p + 34 + 2 * i);
        const uint64_t low = _pdep_u64(load_unaligned<uint32_t>(p + 2 + 4 * i), 0x00FF00FF00FF00FF);
        const uint64_t index = low | _pdep_u64(h & 0xFFF, 0x0700070007000700);
        return ternary::moved_points(index, _mm256_set1_epi8(h & 0x8000 ? -1 : 1));
    }
#endif
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        scales(p, 0, d);
        for (int s = 0; s < 8; ++s) {
#if defined(__AVX2__)
            ternary::store_codes(codes + 32 * s, points32(p, s));
#else
            const int h = load_unaligned<uint16_t>(p + 34 + 2 * s);
            for (int t = 0; t < 4; ++t)
                ternary::put(codes + 32 * s + 8 * t,
                             ternary::codes(p[2 + 4 * s + t] + 256 * (h >> (3 * t) & 7), h >> 15));
#endif
        }
    }
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p) {
        Codes512 r;
        for (int i = 0; i < 4; ++i) {
            const uint32_t h = load_unaligned<uint32_t>(p + 34 + 4 * i);
            const uint64_t high = _pdep_u64(_pext_u32(h, 0x0FFF0FFF), 0x0707070707070707);
            const uint32_t up = (h & 0x8000 ? 0 : 0x0F) | (h & 0x80000000 ? 0 : 0xF0);
            r.q[i] = ternary::codes64(load_unaligned<uint64_t>(p + 2 + 8 * i), high, up);
        }
        const __m256i h = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 34)));
        const __m256i s = _mm256_and_si256(_mm256_srli_epi32(h, 12), _mm256_set1_epi32(7));
        r.d = ternary::odd_eighths(load_f16(p), _mm512_castsi256_si512(s));
        return r;
    }
#endif
};

struct UnpackIQ1_M {
    static constexpr int kType = 29, kGroup = 16, kBlock = 256, kBlockBytes = 56, kZero = 9;
    static constexpr int kLow = 0, kHigh = 18;
    static void scales(const uint8_t* p, int, float* d) {
        uint16_t words[4], bits = 0;
        std::memcpy(words, p + 48, 8);
        for (int w = 0; w < 4; ++w) bits = static_cast<uint16_t>(bits | (words[w] >> 12) << (4 * w));
        const float scale = f16_to_f32(bits);
#if defined(__AVX2__)
        const __m256i four =
            _mm256_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(words)));
        const __m256i first =
            _mm256_setr_epi32(0x0100, 0x0100, 0x0100, 0x0100, 0x0302, 0x0302, 0x0302, 0x0302);
        for (int h = 0; h < 2; ++h) {
            const __m256i own = _mm256_add_epi16(first, _mm256_set1_epi32(0x0404 * h));
            const __m256i counts = _mm256_setr_epi32(0, 3, 6, 9, 0, 3, 6, 9);
            const __m256i fields = _mm256_and_si256(_mm256_srlv_epi32(_mm256_shuffle_epi8(four, own), counts),
                                                    _mm256_set1_epi32(7));
            const __m256i odd = _mm256_add_epi32(_mm256_add_epi32(fields, fields), _mm256_set1_epi32(1));
            _mm256_storeu_ps(d + 8 * h,
                             _mm256_mul_ps(_mm256_cvtepi32_ps(odd), _mm256_set1_ps(scale * 0.125f)));
        }
#else
        for (int s = 0; s < 16; ++s) d[s] = scale * ternary::odd_eighth(words[s >> 2] >> (3 * (s & 3)) & 7);
#endif
    }
#if defined(__AVX2__)
    static constexpr bool kSignedPoints = true;
    static __m256i points32(const uint8_t* p, int i) {
        return points_of(load_unaligned<uint32_t>(p + 4 * i), load_unaligned<uint16_t>(p + 32 + 2 * i));
    }
    // Four index bytes; h: for each three upper bits and whether the point is moved down.
    static __m256i points_of(uint32_t bytes, int h) {
        const uint64_t low = _pdep_u64(bytes, 0x00FF00FF00FF00FF);
        const uint64_t high = _pdep_u64(_pext_u32(h, 0x7777), 0x0700070007000700);
        const __m256i bit = _mm256_setr_epi64x(0x8, 0x80, 0x800, 0x8000);
        const __m256i down = _mm256_cmpeq_epi64(_mm256_and_si256(_mm256_set1_epi64x(h), bit), bit);
        return ternary::moved_points(low | high, _mm256_or_si256(down, _mm256_set1_epi8(1)));
    }
#endif
    static void block(const uint8_t* p, uint8_t* codes, float* d, float*) {
        scales(p, 0, d);
#if defined(__AVX2__)
        for (int i = 0; i < 8; ++i) ternary::store_codes(codes + 32 * i, points32(p, i));
#else
        for (int s = 0; s < 16; ++s) {
            const int h = p[32 + s];
            ternary::put(codes + 16 * s, ternary::codes(p[2 * s] + 256 * (h & 7), h & 8));
            ternary::put(codes + 16 * s + 8, ternary::codes(p[2 * s + 1] + 256 * (h >> 4 & 7), h & 128));
        }
#endif
    }
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p) {
        Codes512 r;
        for (int i = 0; i < 4; ++i) {
            const uint64_t h = _pdep_u64(load_unaligned<uint32_t>(p + 32 + 4 * i), 0x0F0F0F0F0F0F0F0F);
            const auto up = static_cast<uint32_t>(_pext_u64(~h, 0x0808080808080808));
            r.q[i] = ternary::codes64(load_unaligned<uint64_t>(p + 8 * i), h & 0x0707070707070707, up);
        }
        const uint64_t words = load_unaligned<uint64_t>(p + 48);
        const float scale = f16_to_f32(static_cast<uint16_t>(_pext_u64(words, 0xF000F000F000F000)));
        const uint64_t fields = _pext_u64(words, 0x0FFF0FFF0FFF0FFF);
        const __m128i s = _mm_set_epi64x(static_cast<int64_t>(_pdep_u64(fields >> 24, 0x0707070707070707)),
                                         static_cast<int64_t>(_pdep_u64(fields, 0x0707070707070707)));
        r.d = ternary::odd_eighths(scale, _mm512_cvtepu8_epi32(s));
        return r;
    }
#endif
};

struct UnpackIQ1_S_R4 {
    static constexpr int kType = 219, kRows = 4, kGroup = 32, kBlock = 32, kBlockBytes = 24, kZero = 9;
    static constexpr int kLow = 0, kHigh = 18;
    static constexpr int kHeaderBytes = 2;
    static float row_scale(const uint8_t* group, int k) { return load_f16(group + 2 * k); }
    static void block(const uint8_t* p, int k, uint8_t* codes, float* d, float*) {
        const int h = load_unaligned<uint16_t>(p + 16 + 2 * k);
        *d = ternary::odd_eighth(h >> 12 & 7);
#if defined(__AVX2__)
        ternary::store_codes(codes, ternary::moved_points(index_of(ternary::bytes_of(p, k), h),
                                                          _mm256_set1_epi8(h & 0x8000 ? -1 : 1)));
#else
        for (int t = 0; t < 4; ++t)
            ternary::put(codes + 8 * t, ternary::codes(p[4 * t + k] + 256 * (h >> (3 * t) & 7), h >> 15));
#endif
    }
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p, int k) {
        Codes512 r;
        uint64_t scales = 0;
        for (int i = 0; i < 4; ++i) {
            const uint8_t* a = p + 48 * i;
            const uint32_t h = load_unaligned<uint16_t>(a + 16 + 2 * k) |
                               static_cast<uint32_t>(load_unaligned<uint16_t>(a + 40 + 2 * k)) << 16;
            const uint64_t high = _pdep_u64(_pext_u32(h, 0x0FFF0FFF), 0x0707070707070707);
            const uint32_t up = (h & 0x8000 ? 0 : 0x0F) | (h & 0x80000000 ? 0 : 0xF0);
            r.q[i] = ternary::codes64(ternary::bytes_of_row(a, a + 24, k), high, up);
            scales |= static_cast<uint64_t>(_pext_u32(h, 0x70007000)) << (6 * i);
        }
        const uint64_t s = _pdep_u64(scales, 0x0707070707070707);
        r.d = ternary::odd_eighths(1.0f, _mm512_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(s))));
        return r;
    }
#endif
#if defined(__AVX2__)
    static constexpr bool kTrits = true;
    static void prepare(const uint8_t* p, FourRows* out) {
        const __m128i h = _mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 16)));
        const __m128i s = _mm_and_si128(_mm_srli_epi32(h, 12), _mm_set1_epi32(7));
        const __m128i odd = _mm_add_epi32(_mm_add_epi32(s, s), _mm_set1_epi32(1));
        const __m128 scale = _mm_mul_ps(_mm_cvtepi32_ps(odd), _mm_set1_ps(0.125f));
        const __m128i down = _mm_and_si128(_mm_slli_epi32(h, 16), _mm_set1_epi32(INT32_MIN));
        _mm_store_ps(out->d[0], scale);
        _mm_store_ps(out->d[1], _mm_xor_ps(scale, _mm_castsi128_ps(down)));
        // Three bits per point, from bit 3 * g on.
        const __m256i fields = _mm256_set1_epi64x(load_unaligned<int64_t>(p + 16));
        const __m256i moved = _mm256_sllv_epi64(fields, _mm256_setr_epi64x(8, 5, 2, 0));
        ternary::put_indices(p, _mm256_srlv_epi64(moved, _mm256_setr_epi64x(0, 0, 0, 1)), out);
    }
    static constexpr int kLargest = 1;
    static __m256i points(const uint8_t*, const FourRows& rows, int, int g) {
        return ternary::trits_of_rows(rows, g);
    }
    // Four index bytes and their upper bits as words.
    static uint64_t index_of(uint32_t low, int h) {
        return _pdep_u64(low, 0x00FF00FF00FF00FF) | _pdep_u64(h & 0xFFF, 0x0700070007000700);
    }
#endif
};

struct UnpackIQ1_M_R4 {
    static constexpr int kType = 229, kRows = 4, kGroup = 16, kBlock = 32, kBlockBytes = 28, kZero = 9;
    static constexpr int kLow = 0, kHigh = 18;
    static constexpr int kHeaderBytes = 2;
    static float row_scale(const uint8_t* group, int k) { return load_f16(group + 2 * k); }
    static void block(const uint8_t* p, int k, uint8_t* codes, float* d, float*) {
        for (int s = 0; s < 2; ++s) d[s] = static_cast<float>(p[24 + k] >> (4 * s) & 15) * 0.125f;
#if defined(__AVX2__)
        ternary::store_codes(codes, points_of_row(p, k));
#else
        for (int s = 0; s < 2; ++s) {
            const int h = p[16 + 4 * s + k];
            const uint8_t* index = p + 8 * s + k;
            ternary::put(codes + 16 * s, ternary::codes(index[0] + 256 * (h & 7), h & 8));
            ternary::put(codes + 16 * s + 8, ternary::codes(index[4] + 256 * (h >> 4 & 7), h & 128));
        }
#endif
    }
#if defined(__AVX512VNNI__)
    static Codes512 wide(const uint8_t* p, int k) {
        Codes512 r;
        uint64_t scales = 0;
        for (int i = 0; i < 4; ++i) {
            const uint8_t* a = p + 56 * i;
            const uint32_t fields =
                a[16 + k] | a[20 + k] << 8 | a[44 + k] << 16 | static_cast<uint32_t>(a[48 + k]) << 24;
            const uint64_t h = _pdep_u64(fields, 0x0F0F0F0F0F0F0F0F);
            const auto up = static_cast<uint32_t>(_pext_u64(~h, 0x0808080808080808));
            r.q[i] = ternary::codes64(ternary::bytes_of_row(a, a + 28, k), h & 0x0707070707070707, up);
            scales |= static_cast<uint64_t>(a[24 + k] | a[52 + k] << 8) << (16 * i);
        }
        constexpr uint64_t kNibble = 0x0F0F0F0F0F0F0F0F;
        const __m128i low = _mm_cvtsi64_si128(static_cast<int64_t>(scales & kNibble));
        const __m128i high = _mm_cvtsi64_si128(static_cast<int64_t>(scales >> 4 & kNibble));
        r.d = wide::scaled(_mm512_set1_ps(0.125f), _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(low, high)));
        return r;
    }
#endif
#if defined(__AVX2__)
    static constexpr bool kSignedPoints = true;
    static void prepare(const uint8_t* p, FourRows* out) {
        const __m128i v = _mm_cvtepu8_epi32(_mm_cvtsi32_si128(load_unaligned<int32_t>(p + 24)));
        const __m128 eighth = _mm_set1_ps(0.125f);
        const __m128i left = _mm_and_si128(v, _mm_set1_epi32(15)), right = _mm_srli_epi32(v, 4);
        _mm_store_ps(out->d[0], _mm_mul_ps(_mm_cvtepi32_ps(left), eighth));
        _mm_store_ps(out->d[1], _mm_mul_ps(_mm_cvtepi32_ps(right), eighth));
        // Nibbles per point: three upper bits and whether it is moved down.
        const __m256i order = _mm256_setr_epi64x(0x0380028001800080, 0x0380028001800080, 0x0780068005800480,
                                                 0x0780068005800480);
        const __m256i fields =
            _mm256_shuffle_epi8(_mm256_set1_epi64x(load_unaligned<int64_t>(p + 16)), order);
        ternary::put_indices(p, _mm256_srlv_epi64(fields, _mm256_setr_epi64x(0, 4, 0, 4)), out);
    }
    static constexpr int kLargest = 9;
    static __m256i points(const uint8_t* p, const FourRows& rows, int, int g) {
        const __m256i order =
            _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
        const __m256i bit = _mm256_set1_epi8(static_cast<char>(8 << 4 * (g & 1)));
        const __m256i fields = _mm256_set1_epi32(load_unaligned<int32_t>(p + 16 + 4 * (g >> 1)));
        const __m256i set = _mm256_and_si256(_mm256_shuffle_epi8(fields, order), bit);
        const __m256i down = _mm256_cmpeq_epi8(set, bit);
        return ternary::moved(ternary::trits_of_rows(rows, g), _mm256_or_si256(down, _mm256_set1_epi8(1)));
    }
    static __m256i points_of_row(const uint8_t* p, int k) {
        return UnpackIQ1_M::points_of(ternary::bytes_of(p, k), p[16 + k] | p[20 + k] << 8);
    }
#endif
};

}  // namespace ikpy
