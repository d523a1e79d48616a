// Expansion of cache rows to f32: Row*::expand(row, n, dst) per format; Vectors*::load(row, i, x) gives the
// kVectors vectors from element i on, which take kBytes.
#pragma once
#include <cstring>

#include "kernels/half_rows.hpp"
#include "kernels/simd_f32.hpp"

namespace ikpy {
namespace kv {

constexpr int8_t kIq4NlValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                     1,    13,   25,  38,  53,  69,  89,  113};

// n signed bytes times d
inline void scale_bytes(const uint8_t* q, int64_t n, float d, float* dst) {
    int64_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16) {
        const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q + i));
        _mm512_storeu_ps(dst + i,
                         _mm512_mul_ps(_mm512_set1_ps(d), _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(b))));
    }
#elif defined(__AVX2__)
    for (; i + 8 <= n; i += 8) {
        const __m128i b = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(q + i));
        _mm256_storeu_ps(dst + i,
                         _mm256_mul_ps(_mm256_set1_ps(d), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b))));
    }
#endif
    for (; i < n; ++i) dst[i] = d * float(int8_t(q[i]));
}

struct RowF32 {
    static void expand(const uint8_t* row, int64_t n, float* dst) {
        std::memcpy(dst, row, size_t(n) * sizeof(float));
    }
};

struct RowF16 {
    static void expand(const uint8_t* row, int64_t n, float* dst) {
        f16_to_f32_row(reinterpret_cast<const uint16_t*>(row), dst, n);
    }
};

struct RowBF16 {
    static void expand(const uint8_t* row, int64_t n, float* dst) {
        bf16_to_f32_row(reinterpret_cast<const uint16_t*>(row), dst, n);
    }
};

#if defined(__AVX2__)

inline __m128i load_levels(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline __m128i low_nibbles(__m128i b) { return _mm_and_si128(b, _mm_set1_epi8(15)); }
inline __m128i high_nibbles(__m128i b) { return low_nibbles(_mm_srli_epi16(b, 4)); }

// Levels of a block of 32 as two vectors of signed bytes.
struct LevelsQ8_0 {
    static constexpr int kBytes = 34;
    static void read(const uint8_t* block, __m128i* q) {
        q[0] = load_levels(block + 2);
        q[1] = load_levels(block + 18);
    }
};

struct LevelsQ4_0 {
    static constexpr int kBytes = 18;
    static void read(const uint8_t* block, __m128i* q) {
        const __m128i b = load_levels(block + 2);
        q[0] = _mm_sub_epi8(low_nibbles(b), _mm_set1_epi8(8));
        q[1] = _mm_sub_epi8(high_nibbles(b), _mm_set1_epi8(8));
    }
};

struct LevelsIQ4_NL {
    static constexpr int kBytes = 18;
    static void read(const uint8_t* block, __m128i* q) {
        const __m128i b = load_levels(block + 2);
        const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kIq4NlValues));
        q[0] = _mm_shuffle_epi8(values, low_nibbles(b));
        q[1] = _mm_shuffle_epi8(values, high_nibbles(b));
    }
};

struct LevelsQ6_0 {
    static constexpr int kBytes = 26;
    static void read(const uint8_t* block, __m128i* q) {
        const __m128i b = load_levels(block + 10);
        const __m128i top = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(block + 2));
        // Byte j of the upper half holds the bits of elements j + 8 and j + 24 in its upper nibble.
        const __m128i bits = _mm_unpacklo_epi64(top, _mm_srli_epi16(top, 4));
        const __m128i low = _mm_and_si128(_mm_slli_epi16(bits, 4), _mm_set1_epi8(0x30));
        const __m128i high = _mm_and_si128(_mm_slli_epi16(bits, 2), _mm_set1_epi8(0x30));
        q[0] = _mm_sub_epi8(_mm_or_si128(low_nibbles(b), low), _mm_set1_epi8(32));
        q[1] = _mm_sub_epi8(_mm_or_si128(high_nibbles(b), high), _mm_set1_epi8(32));
    }
};

// Vectors of a type with blocks of 32 levels and one f16 scale in front.
template <class Levels>
struct VectorsOf {
    static constexpr int kVectors = 32 / simd::kLanes, kBytes = Levels::kBytes;
    static void load(const uint8_t* row, int64_t i, simd::V* x) {
        const uint8_t* block = row + i / 32 * Levels::kBytes;
        const simd::V d = simd::set1(load_f16(block));
        __m128i q[2];
        Levels::read(block, q);
        for (int j = 0; j < 2; ++j) {
#if defined(__AVX512F__)
            x[j] = _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(q[j])));
#else
            x[2 * j] = _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(q[j])));
            const __m128i upper = _mm_unpackhi_epi64(q[j], q[j]);
            x[2 * j + 1] = _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(upper)));
#endif
        }
    }
};

template <class Levels>
struct RowOf {
    static void expand(const uint8_t* row, int64_t n, float* dst) {
        constexpr int kVectors = VectorsOf<Levels>::kVectors;
        for (int64_t i = 0; i < n; i += 32) {
            simd::V x[kVectors];
            VectorsOf<Levels>::load(row, i, x);
            for (int j = 0; j < kVectors; ++j) simd::store(dst + i + j * simd::kLanes, x[j]);
        }
    }
};

using RowQ8_0 = RowOf<LevelsQ8_0>;
using RowQ4_0 = RowOf<LevelsQ4_0>;
using RowQ6_0 = RowOf<LevelsQ6_0>;
using RowIQ4_NL = RowOf<LevelsIQ4_NL>;

#else

struct RowQ8_0 {
    static void expand(const uint8_t* row, int64_t n, float* dst) {
        for (int64_t b = 0; b < n / 32; ++b)
            scale_bytes(row + 34 * b + 2, 32, load_f16(row + 34 * b), dst + 32 * b);
    }
};

struct RowQ4_0 {
    static void expand(const uint8_t* row, int64_t n, float* dst) {
        for (int64_t b = 0; b < n / 32; ++b, row += 18, dst += 32) {
            const float d = load_f16(row);
            for (int j = 0; j < 16; ++j) {
                dst[j] = d * float((row[2 + j] & 15) - 8);
                dst[j + 16] = d * float((row[2 + j] >> 4) - 8);
            }
        }
    }
};

struct RowQ6_0 {
    static void expand(const uint8_t* row, int64_t n, float* dst) {
        for (int64_t b = 0; b < n / 32; ++b, row += 26, dst += 32) {
            const float d = load_f16(row);
            for (int j = 0; j < 16; ++j) {
                const int high = row[2 + (j & 7)] >> (4 * (j >> 3));
                dst[j] = d * float(((row[10 + j] & 15) | ((high & 3) << 4)) - 32);
                dst[j + 16] = d * float(((row[10 + j] >> 4) | ((high & 12) << 2)) - 32);
            }
        }
    }
};

struct RowIQ4_NL {
    static void expand(const uint8_t* row, int64_t n, float* dst) {
        for (int64_t b = 0; b < n / 32; ++b, row += 18, dst += 32) {
            const float d = load_f16(row);
            for (int j = 0; j < 16; ++j) {
                dst[j] = d * float(kIq4NlValues[row[2 + j] & 15]);
                dst[j + 16] = d * float(kIq4NlValues[row[2 + j] >> 4]);
            }
        }
    }
};

#endif

struct RowQ8_KV {
    static void expand(const uint8_t* row, int64_t n, float* dst) {
        float d;
        std::memcpy(&d, row, sizeof(d));
        scale_bytes(row + 8, n, d, dst);
    }
};

struct VectorsF32 {
    static constexpr int kVectors = 1, kBytes = 4 * simd::kLanes;
    static void load(const uint8_t* row, int64_t i, simd::V* x) {
        x[0] = simd::load(reinterpret_cast<const float*>(row) + i);
    }
};

#if defined(__AVX512F__)

struct VectorsF16 {
    static constexpr int kVectors = 1, kBytes = 2 * simd::kLanes;
    static void load(const uint8_t* row, int64_t i, simd::V* x) {
        x[0] = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + 2 * i)));
    }
};

struct VectorsBF16 {
    static constexpr int kVectors = 1, kBytes = 2 * simd::kLanes;
    static void load(const uint8_t* row, int64_t i, simd::V* x) {
        const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + 2 * i));
        x[0] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
    }
};

#elif defined(__AVX2__)

struct VectorsF16 {
    static constexpr int kVectors = 1, kBytes = 2 * simd::kLanes;
    static void load(const uint8_t* row, int64_t i, simd::V* x) {
        x[0] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + 2 * i)));
    }
};

struct VectorsBF16 {
    static constexpr int kVectors = 1, kBytes = 2 * simd::kLanes;
    static void load(const uint8_t* row, int64_t i, simd::V* x) {
        const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + 2 * i));
        x[0] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
    }
};

#endif

}  // namespace kv
}  // namespace ikpy
