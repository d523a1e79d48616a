// Single tokens times groups of four or eight interleaved rows with blocks of 256 columns, on CPUs with byte
// permutations.
//
// A group of rows is read from its first byte to its last, as plain rows are. The kernel of other CPUs
// (gemv_interleaved.hpp) reads four groups side by side, gathers every vector of codes from them and makes
// the scales of 16 rows at once: nothing is asked of memory meanwhile. GB/s of one core before and now, from
// memory (plain reads 16.6) and from the second-level cache of an Emerald Rapids:
//   Q2_K_R4 11.1, 12.5; 13.5, 17.3     IQ2_K_R4 10.9, 12.5; 14.3, 16.4    IQ4_XS_R8 12.8, 15.7; 28.4, 35.7
//   Q3_K_R4 11.0, 13.7; 17.8, 20.5     IQ3_K_R4 10.2, 13.2; 15.2, 17.6    IQ4_KS_R4 12.8, 15.7; 25.8, 30.8
//   Q4_K_R4 13.1, 16.5; 26.1, 30.2     IQ4_K_R4 13.0, 16.0; 22.6, 27.1    IQ5_KS_R4 13.6, 15.3; 24.4, 30.0
//   Q5_K_R4 13.6, 16.2; 26.3, 32.6     IQ5_K_R4 13.2, 15.6; 22.6, 26.3    Q6_K_R4 14.8, 16.2; 28.6, 34.8
// 1024 weights of IQ4_K_R4 are some 110 vector instructions; of more than one token the other kernel does
// more.
//
// A dword of a vector of codes holds four columns of row r = dword % R, so a sum has a row to every R-th
// lane. Scales and what corrects the sums are vectors of several scale groups as they lie in the file, the
// rows of a group next to each other.
//
// A layout L has
//   Plain                      the unpacker of the type (kernels/matmul/interleaved_product.hpp)
//   kVectors                   vectors of codes that meet in one sum
//   static constexpr int column(int v, int j)   first column of lanes R * j .. of vector v of a sum
//   kZero                      code of weight 0; 0 for types with offsets
//   kScale                     factor of all scales
//   static void codes(const uint8_t* p, int sum, __m512i* q)
//   static void scales(const uint8_t* p, int8_t* at)   of all groups and rows, then their offsets, if any
//   static __mmask16 shifted(const uint8_t* p, int i)   of lanes 16 * i .. of all scales, those whose codes
//                                               lack Plain::kStep
#pragma once
#include "kernels/gemv/token_records.hpp"
#include "kernels/matmul/interleaved_product.hpp"
#include "kernels/matmul/weight_prefetch.hpp"
#include "kernels/simd/byte_permutes.hpp"
#include "kernels/simd/lane_sums.hpp"

#if defined(__AVX512VNNI__)

namespace ikpy {
namespace row_groups {

template <class L>
struct Shape {
    using U = typename L::Plain;
    static constexpr int kRows = U::kRows, kPlaces = 16 / kRows;  // of columns in a vector
    static constexpr int kColumns = 4 * kPlaces * L::kVectors;    // of a sum
    static constexpr int kSums = kChunk / kColumns;
    static constexpr int kGroups = kChunk / U::kGroup;
    static constexpr int kParts = kGroups * kRows / 16;  // vectors of scales
    static constexpr bool kOffsets = L::kZero == 0;
};

// What is kept of 256 activations of a token.
template <class L>
struct alignas(64) Record {
    uint8_t codes[Shape<L>::kSums][L::kVectors][4 * Shape<L>::kPlaces];  // the same for all rows
    float scale[Shape<L>::kParts][16];
    float sum[Shape<L>::kParts][16];  // of the activations; times -kZero without the scale, if there is one
};

template <class L>
IKPY_VBMI void prepare_record(const uint8_t* x, const ActQ8Layout& at, int64_t c, Record<L>* out) {
    using S = Shape<L>;
    const uint8_t* codes = x + c * kChunk;
    for (int s = 0; s < S::kSums; ++s)
        for (int v = 0; v < L::kVectors; ++v)
            for (int j = 0; j < S::kPlaces; ++j) {
                const auto four = load_unaligned<int32_t>(codes + S::kColumns * s + L::column(v, j));
                std::memcpy(out->codes[s][v] + 4 * j, &four, sizeof four);
            }
    constexpr int G = S::U::kGroup;
    const auto* scale = reinterpret_cast<const float*>(x + at.scale) + c * 8;
    const auto* sum = reinterpret_cast<const float*>(x + (G == 16 ? at.sum16 : at.sum32)) + c * S::kGroups;
    for (int g = 0; g < S::kGroups; ++g)
        for (int r = 0; r < S::kRows; ++r) {
            const float s = L::kScale * scale[g * G / 32];
            const int lane = g * S::kRows + r;
            out->scale[lane / 16][lane % 16] = s;
            out->sum[lane / 16][lane % 16] = sum[g] * (S::kOffsets ? s : -static_cast<float>(L::kZero));
        }
}

// N numbers, over and over.
template <int N>
IKPY_VBMI_INLINE __m512 repeated(const float* p) {
    if constexpr (N == 16) return _mm512_load_ps(p);
    if constexpr (N == 8)
        return _mm512_broadcast_f32x8(_mm256_load_ps(p));
    else
        return _mm512_broadcast_f32x4(_mm_load_ps(p));
}

// A number in half precision of each of R rows.
template <int R>
IKPY_VBMI_INLINE __m512 halves_of_rows(const uint8_t* p) {
    const auto* at = reinterpret_cast<const __m128i*>(p);
    if constexpr (R == 8)
        return _mm512_broadcast_f32x8(_mm256_cvtph_ps(_mm_loadu_si128(at)));
    else
        return _mm512_broadcast_f32x4(_mm_cvtph_ps(_mm_loadl_epi64(at)));
}

IKPY_VBMI_INLINE __m512 integer_lanes(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p))));
}

// Scales of a block times those of a token.
template <class L>
struct Scales {
    alignas(64) float of[Shape<L>::kParts][16];

    // In the lanes of a sum: those of its groups, which repeat if they are less than 16.
    IKPY_VBMI_INLINE __m512 lanes(int sum) const {
        using S = Shape<L>;
        constexpr int kLanes = S::kColumns / S::U::kGroup * S::kRows;
        return repeated<kLanes>(&of[0][0] + kLanes * sum);
    }
};

// Keeps GCC from taking parts of stored vectors out of registers: that occupies one of two ports, a load
// none.
template <class T>
IKPY_VBMI_INLINE void into_memory(T& v) {
    asm("" : "+m"(v));
}

// Makes the scales; returns what does not depend on the codes.
template <class L>
IKPY_VBMI_INLINE __m512 make_scales(const uint8_t* p, const Record<L>& x, Scales<L>* d) {
    using S = Shape<L>;
    alignas(64) int8_t integers[128];
    L::scales(p, integers);
    into_memory(integers);
    __m512 offset = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int i = 0; i < S::kParts; ++i) {
        const __m512 scale = _mm512_mul_ps(integer_lanes(integers + 16 * i), _mm512_load_ps(x.scale[i]));
        _mm512_store_ps(d->of[i], scale);
        __m512 zero = scale;
        if constexpr (StepOf<typename S::U>::kStep > 0) {
            // Codes of a table that lacks the step have a zero that is so much lower.
            constexpr float kFactor = 1.0f - static_cast<float>(S::U::kStep) / L::kZero;
            zero = _mm512_mask_mul_ps(scale, L::shifted(p, i), scale, _mm512_set1_ps(kFactor));
        }
        if constexpr (S::kOffsets) zero = integer_lanes(integers + 16 * (S::kParts + i));
        offset = _mm512_fmadd_ps(zero, _mm512_load_ps(x.sum[i]), offset);
    }
    into_memory(*d);
    return offset;
}

// Columns of the places in a vector, the same for all of R rows.
template <int R>
IKPY_VBMI_INLINE __m512i for_all_rows(const uint8_t* p) {
    __m512i dwords, place;
    if constexpr (R == 8) {
        dwords = _mm512_set1_epi64(load_unaligned<int64_t>(p));
        place = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    } else {
        dwords = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
        place = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    }
    return _mm512_castps_si512(_mm512_permutevar_ps(_mm512_castsi512_ps(dwords), place));
}

// Asks for some lines of a block, which must not be moved: GCC would ask for all of them at once, and the
// loads of the products would wait for them (IQ4_K_R4 from memory: 14.4 instead of 15.3 GB/s).
template <int Bytes, int Steps>
IKPY_VBMI_INLINE void prefetch_step(const uint8_t* p, int step) {
    asm volatile("" ::: "memory");
    for (int b = 64 * step; b < Bytes; b += 64 * Steps) {
        if (kPrefetch.from_pages)
            prefetch_from_pages<64>(p + b);
        else
            prefetch_bytes<64, false>(p + b + kPrefetch.of_groups);
    }
}

template <class L>
IKPY_VBMI_INLINE __m512 add_block(const uint8_t* p, const Record<L>& x, __m512 total) {
    using S = Shape<L>;
    using U = typename S::U;
    Scales<L> d;
    const __m512 offset = make_scales<L>(p, x, &d);
    __m512 value[2] = {_mm512_setzero_ps(), S::kOffsets ? _mm512_setzero_ps() : offset};
#pragma GCC unroll 8
    for (int s = 0; s < S::kSums; ++s) {
        prefetch_step<U::kBlockBytes, S::kSums>(p, s);
        __m512i q[L::kVectors], sum = _mm512_setzero_si512();
        L::codes(p, s, q);
#pragma GCC unroll 4
        for (int v = 0; v < L::kVectors; ++v)
            sum = _mm512_dpbusd_epi32(sum, q[v], for_all_rows<S::kRows>(x.codes[s][v]));
        value[s % 2] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), d.lanes(s), value[s % 2]);
    }
    const __m512 all = _mm512_add_ps(value[0], value[1]);
    if constexpr (RowHeader<U>::kBytes > 0) return _mm512_add_ps(total, all);
    if constexpr (S::kOffsets) total = _mm512_fnmadd_ps(offset, halves_of_rows<S::kRows>(p + 8), total);
    return _mm512_fmadd_ps(all, halves_of_rows<S::kRows>(p), total);
}

template <class L>
IKPY_VBMI void multiply_half(const RowBlock& rows, int h, const Record<L>* x, float* out) {
    using U = typename L::Plain;
    constexpr int R = U::kRows;
    __m512 totals[kHalfRows / R] = {};
    for (int i = 0; i < rows.n[h]; i += R) {
        const uint8_t* p = rows.group(h, i, R) + RowHeader<U>::kBytes;
        __m512 total = _mm512_setzero_ps();
        for (int64_t c = 0; c < rows.n_in / kChunk; ++c, p += U::kBlockBytes)
            total = add_block<L>(p, x[c], total);
        totals[i / R] = total;
    }
    float* to = out + h * kHalfRows;
    if constexpr (R == 8)
        _mm512_storeu_ps(to, sums_of_halves(totals));
    else
        _mm512_storeu_ps(to, sums_of_quads(totals));
}

template <class L>
struct Product {
    using Unpack = typename L::Plain;
    using Record = row_groups::Record<L>;
    static constexpr int kTokens = 1;  // the sums of 16 rows that share the activations are faster with two

    static void prepare(const uint8_t* x, const ActQ8Layout& at, int64_t c, Record* out) {
        prepare_record<L>(x, at, c, out);
    }
    template <int NT>
    static void multiply(const RowBlock& rows, const Record* const* x, float* out) {
        const int n_halves = rows.halves();
        for (int h = 0; h < n_halves; ++h) multiply_half<L>(rows, h, x[0], out);
        apply_row_scales<Unpack>(rows, n_halves, NT, out);
    }
};

// The kernels of the type with the product of few tokens replaced.
template <class L>
constexpr WeightKernels kernels() {
    using U = typename L::Plain;
    return record_kernels<Product<L>, interleaved_gemv<U>>(interleaved_kernels<U>());
}

}  // namespace row_groups
}  // namespace ikpy

#endif
