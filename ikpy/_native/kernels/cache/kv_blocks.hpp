// Expansion of cache rows to f32: Row*::expand(row, n, dst) per format; Vectors*::load(row, i, x) gives the
// kVectors vectors from element i on, which take kBytes.
#pragma once
#include <cstring>

#include "kernels/simd/half_rows.hpp"
#include "kernels/simd/simd_f32.hpp"

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

// Types with a minimum: codes are made signed by taking a middle one from them, so that an element is the
// scale times its level plus this.
constexpr int kMiddleQ4_1 = 8, kMiddleQ5_1 = 16;
inline float middle_of(const uint8_t* block, int middle) {
    return float(middle) * load_f16(block) + load_f16(block + 2);
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

// Levels of a block of 32 as two vectors of signed bytes. kMiddle: of types with a minimum, see middle_of;
// else 0.
struct LevelsQ8_0 {
    static constexpr int kBytes = 34, kMiddle = 0;
    static void read(const uint8_t* block, __m128i* q) {
        q[0] = load_levels(block + 2);
        q[1] = load_levels(block + 18);
    }
};

template <int Bytes, int Middle>
struct LevelsOfNibbles {
    static constexpr int kBytes = Bytes, kMiddle = Middle;
    static void read(const uint8_t* block, __m128i* q) {
        const __m128i b = load_levels(block + Bytes - 16);
        q[0] = _mm_sub_epi8(low_nibbles(b), _mm_set1_epi8(8));
        q[1] = _mm_sub_epi8(high_nibbles(b), _mm_set1_epi8(8));
    }
};

using LevelsQ4_0 = LevelsOfNibbles<18, 0>;
using LevelsQ4_1 = LevelsOfNibbles<20, kMiddleQ4_1>;

// The 16 levels of nibbles whose fifth bits are those of two bytes.
inline __m128i levels_of_fives(__m128i nibbles, __m128i bytes) {
    const __m128i bit = _mm_set1_epi64x(int64_t(0x8040201008040201));
    const __m128i set = _mm_cmpeq_epi8(_mm_and_si128(bytes, bit), bit);
    return _mm_or_si128(nibbles, _mm_andnot_si128(set, _mm_set1_epi8(-16)));
}

template <int Bytes, int Middle>
struct LevelsOfFives {
    static constexpr int kBytes = Bytes, kMiddle = Middle;
    static void read(const uint8_t* block, __m128i* q) {
        const __m128i b = load_levels(block + Bytes - 16);
        const __m128i bits = _mm_cvtsi32_si128(load_unaligned<int32_t>(block + Bytes - 20));
        const __m128i one = _mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
        const __m128i low = _mm_shuffle_epi8(bits, one);
        const __m128i high = _mm_shuffle_epi8(bits, _mm_add_epi8(one, _mm_set1_epi8(2)));
        q[0] = levels_of_fives(low_nibbles(b), low);
        q[1] = levels_of_fives(high_nibbles(b), high);
    }
};

using LevelsQ5_0 = LevelsOfFives<22, 0>;
using LevelsQ5_1 = LevelsOfFives<24, kMiddleQ5_1>;

struct LevelsIQ4_NL {
    static constexpr int kBytes = 18, kMiddle = 0;
    static void read(const uint8_t* block, __m128i* q) {
        const __m128i b = load_levels(block + 2);
        const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kIq4NlValues));
        q[0] = _mm_shuffle_epi8(values, low_nibbles(b));
        q[1] = _mm_shuffle_epi8(values, high_nibbles(b));
    }
};

struct LevelsQ6_0 {
    static constexpr int kBytes = 26, kMiddle = 0;
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
            x[j] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(q[j]));
#else
            x[2 * j] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(q[j]));
            x[2 * j + 1] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(q[j], q[j])));
#endif
        }
        if constexpr (Levels::kMiddle == 0) {
            for (int j = 0; j < kVectors; ++j) x[j] = simd::mul(d, x[j]);
        } else {
            const simd::V middle = simd::set1(middle_of(block, Levels::kMiddle));
            for (int j = 0; j < kVectors; ++j) x[j] = simd::fma(d, x[j], middle);
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
using RowQ4_1 = RowOf<LevelsQ4_1>;
using RowQ5_0 = RowOf<LevelsQ5_0>;
using RowQ5_1 = RowOf<LevelsQ5_1>;
using RowQ6_0 = RowOf<LevelsQ6_0>;
using RowIQ4_NL = RowOf<LevelsIQ4_NL>;

#else

struct RowQ8_0 {
    static void expand(const uint8_t* row, int64_t n, float* dst) {
        for (int64_t b = 0; b < n / 32; ++b)
            scale_bytes(row + 34 * b + 2, 32, load_f16(row + 34 * b), dst + 32 * b);
    }
};

// Blocks that end with fifth bits, if kFives, and pairs of nibbles. kMiddle: 0 without a minimum.
template <int kBytes, bool kFives, int kMiddle>
struct RowOfNibbles {
    static void expand(const uint8_t* row, int64_t n, float* dst) {
        constexpr int kSign = kFives ? 16 : 8;
        for (int64_t b = 0; b < n / 32; ++b, row += kBytes, dst += 32) {
            const float d = load_f16(row), middle = kMiddle ? middle_of(row, kMiddle) : 0.0f;
            const uint8_t* nibbles = row + kBytes - 16;
            const uint32_t bits = kFives ? load_unaligned<uint32_t>(row + kBytes - 20) : 0;
            for (int j = 0; j < 16; ++j) {
                const int low = (nibbles[j] & 15) + 16 * int(bits >> j & 1);
                const int high = (nibbles[j] >> 4) + 16 * int(bits >> (j + 16) & 1);
                dst[j] = d * float(low - kSign) + middle;
                dst[j + 16] = d * float(high - kSign) + middle;
            }
        }
    }
};
using RowQ4_0 = RowOfNibbles<18, false, 0>;
using RowQ4_1 = RowOfNibbles<20, false, kMiddleQ4_1>;
using RowQ5_0 = RowOfNibbles<22, true, 0>;
using RowQ5_1 = RowOfNibbles<24, true, kMiddleQ5_1>;

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
