// Few tokens on AVX2: a row is read in segments, twice. First all scales of a segment are made, then its
// codes are unpacked in registers and multiplied, 32 at a time.
//
// Scales and products of 256 columns made one after the other depend on each other for longer than it takes
// to start their instructions, and no core looks far enough ahead. Zen 3, 1e9 weights/s of one core before
// and now: Q4_0 15.3, 25.5, Q4_K 21.2, 25.2, Q8_0 15.8, 21.0, IQ2_K 15.7, 21.7, IQ4_K 11.9, 16.1.
#pragma once
#include <algorithm>

#include "kernels/matmul/activations.hpp"
#include "kernels/matmul/row_chunk.hpp"
#include "kernels/matmul/unpacked.hpp"
#include "kernels/matmul/weight_prefetch.hpp"
#include "kernels/simd/byte_dots.hpp"
#include "kernels/weights/weight_kernels.hpp"
#include "unpack/codes32.hpp"

#if defined(__AVX2__) && !defined(__AVX512VNNI__)

namespace ikpy {

constexpr int kGemvTokens = 8;
constexpr int kGemvTokensOfBytes = 2;
constexpr int kAmdTokensOfBytes = kByteDots ? 0 : 8;  // of 8 tokens 0.83 of the time with panels
constexpr int kGemvTokensOfUnscaledBytes = 7;

// Whether codes beyond 127 are multiplied as signed values; dot products of bytes take them as they are.
template <class U>
constexpr bool kSignedCodes = U::kZero == 128 && !kByteDots;

// 32 codes as factors of 8-bit products. Signed values are multiplied as |w| * sign(x, w): two products stay
// below 2^15, so the 16-bit pair sums are exact.
template <bool Signed>
class Factors {
  public:
    // w: codes, or what is signed already.
    explicit Factors(__m256i w, bool centred = false) {
        sign = Signed && !centred ? _mm256_xor_si256(w, _mm256_set1_epi8(-128)) : w;
        magnitude = Signed ? _mm256_abs_epi8(sign) : w;
    }
    // Dot products in eight lanes.
    __m256i dot(__m256i x) const { return add_dots(_mm256_setzero_si256(), magnitude, turned(x)); }
    // Sums of two products.
    __m256i pairs(__m256i x) const { return _mm256_maddubs_epi16(magnitude, turned(x)); }

  private:
    __m256i turned(__m256i x) const { return Signed ? _mm256_sign_epi8(x, sign) : x; }

    __m256i magnitude, sign;
};

inline float sum_of_lanes(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

constexpr int kSegmentChunks = 8;

template <class U>
constexpr int step_of() {
    if constexpr (HasRowCodes<U>::value)
        return RowCodes<U>::kStep;
    else
        return 0;
}
// Whether scales of groups of 16 are ordered by parity, eight even ones first.
template <class U>
constexpr bool kByParity = HasRowCodes<U>::value && U::kGroup == 16;
// Whether sums of the activations of all groups count, and of any.
template <class U>
constexpr bool kSumsOfAll = !kSignedCodes<U>;
template <class U>
constexpr bool kUsesSums = kSumsOfAll<U> || step_of<U>() > 0;

// The scales of a segment, and their products with those of NT tokens; by parity four of even groups, then
// their four odd neighbours.
template <class U, int NT>
struct SegmentScales {
    static constexpr int kGroups = kChunk / U::kGroup;  // of a chunk
    alignas(32) float d[kSegmentChunks][kGroups];
    alignas(32) float m[kSegmentChunks][kGroups];
    alignas(32) float products[NT][kSegmentChunks][kGroups];
};

// Element i of both halves of v in all lanes of its half: with a load one instruction. A broadcast for each
// half and a blend are three.
inline __m256 lanes_of_halves(__m256 v, int i) {
    switch (i) {
        case 0:
            return _mm256_permute_ps(v, 0x00);
        case 1:
            return _mm256_permute_ps(v, 0x55);
        case 2:
            return _mm256_permute_ps(v, 0xAA);
        default:
            return _mm256_permute_ps(v, 0xFF);
    }
}

// Eight numbers of even and eight of odd groups as lanes_of_halves() wants them.
inline void store_in_halves(__m256 even, __m256 odd, float* to) {
    _mm256_store_ps(to, _mm256_permute2f128_ps(even, odd, 0x20));
    _mm256_store_ps(to + 8, _mm256_permute2f128_ps(even, odd, 0x31));
}

// The scales of 32 codes, in the lanes of their products.
template <class U>
inline __m256 scale_lanes(const float* d, int i) {
    if (U::kGroup == 32) return _mm256_broadcast_ss(d + i);
    if (kByParity<U>) return lanes_of_halves(_mm256_load_ps(d + i / 4 * 8), i % 4);
    return _mm256_blend_ps(_mm256_broadcast_ss(d + 2 * i), _mm256_broadcast_ss(d + 2 * i + 1), 0xF0);
}

// Takes codes where only the scales are wanted.
struct NoCodes {
    NoCodes operator+(int) const { return *this; }
    void take(c32::Codes32) const {}
};

// Sums over a row.
template <class U, int NT>
struct RowSums {
    static constexpr int kTotals = NT == 1 ? 4 : NT == 2 ? 2 : 1;  // that do not wait for each other
    __m256 total[NT][kTotals];
    __m256 offset[NT];   // what the sums of the activations contribute, by kZero too much of types with such
    __m256 shifted[NT];  // the part of groups that use the second table, without its step

    RowSums() {
#pragma GCC unroll 8
        for (int t = 0; t < NT; ++t) {
            offset[t] = shifted[t] = _mm256_setzero_ps();
            for (int i = 0; i < kTotals; ++i) total[t][i] = _mm256_setzero_ps();
        }
    }
    float of(int t) const {
        const __m256 factor = _mm256_set1_ps(U::kZero == 0 ? 1.0f : -static_cast<float>(U::kZero));
        __m256 v = kSumsOfAll<U> ? _mm256_fmadd_ps(offset[t], factor, total[t][0]) : total[t][0];
        if (step_of<U>() > 0)
            v = _mm256_fmadd_ps(shifted[t], _mm256_set1_ps(static_cast<float>(step_of<U>())), v);
        for (int i = 1; i < kTotals; ++i) v = _mm256_add_ps(v, total[t][i]);
        return sum_of_lanes(v);
    }
};

// Multiplies 32 codes at a time as they are unpacked. scale: per token, of the groups of a chunk, whose first
// column is k; element: of the chunk.
template <class U, int NT>
struct DotSink {
    RowSums<U, NT>* sums;
    const uint8_t* const* x;
    const float* const* scale;
    int64_t k;
    int element;

    DotSink operator+(int n) const { return {sums, x, scale, k, element + n}; }
    [[gnu::always_inline]] void take(c32::Codes32 v) const {
        const Factors<kSignedCodes<U>> factors(reinterpret_cast<__m256i>(v), HasRowCodes<U>::value);
        const int i = element / 32;
#pragma GCC unroll 8
        for (int t = 0; t < NT; ++t) {
            const __m256i columns = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x[t] + k + element));
            __m256& total = sums->total[t][i % RowSums<U, NT>::kTotals];
            total =
                _mm256_fmadd_ps(_mm256_cvtepi32_ps(factors.dot(columns)), scale_lanes<U>(scale[t], i), total);
        }
    }
};

// Whether the codes of a block can go to a sink.
template <class U, class = void>
struct FillsSink : std::false_type {};
template <class U>
struct FillsSink<U, std::void_t<decltype(U::block(nullptr, NoCodes{}, nullptr, nullptr))>> : std::true_type {
};

template <class U, class Codes>
[[gnu::always_inline]] inline void put_chunk(const uint8_t* p, Codes codes, float* d, float* m) {
    constexpr int kGroups = U::kBlock / U::kGroup;
#pragma GCC unroll 8
    for (int b = 0; b < kChunk / U::kBlock; ++b)
        U::block(p + b * U::kBlockBytes, codes + b * U::kBlock, d + b * kGroups, m + b * kGroups);
}

template <class U>
[[gnu::always_inline]] inline void put_scales(const Chunk& w, float* d, float* m) {
    for (int g = 0; g < kChunk / U::kGroup; g += 8) {
        _mm256_store_ps(d + g, _mm256_load_ps(w.d + g));
        if (U::kZero == 0) _mm256_store_ps(m + g, _mm256_load_ps(w.m + g));
    }
}

// The scales of n_chunks whole chunks.
template <class U, int NT>
[[gnu::always_inline]] inline void read_scales(const uint8_t* p, int row, int n_chunks,
                                               SegmentScales<U, NT>* scales) {
    for (int c = 0; c < n_chunks; ++c, p += kChunk / U::kBlock * U::kBlockBytes) {
        if constexpr (FillsSink<U>::value) {
            put_chunk<U>(p, NoCodes{}, scales->d[c], scales->m[c]);
        } else {
            Chunk w;  // its codes are not used and never made
            unpack_whole_chunk<U>(p, row, &w);
            put_scales<U>(w, scales->d[c], scales->m[c]);
        }
    }
}

// Rows of activations, and the sums of their groups in the order that the scales of a type have.
struct RowTokens {
    const uint8_t* const* x;
    const float* const* sums;
};

// Of a token: what columns from one on are multiplied with.
struct TokenColumns {
    const float *scale, *sum;
};
template <class U>
inline TokenColumns columns_of(const uint8_t* x, const float* sums, const ActQ8Layout& at, int64_t k) {
    return {reinterpret_cast<const float*>(x + at.scale) + k / 32, sums + k / U::kGroup};
}

// Scales of a segment times those of a token; adds what the offsets contribute.
template <class U, int NT>
[[gnu::always_inline]] inline void multiply_scales(TokenColumns x, int n_chunks, int t,
                                                   SegmentScales<U, NT>* scales, __m256* offset) {
    constexpr int kGroups = SegmentScales<U, NT>::kGroups;
    for (int c = 0; c < n_chunks; ++c, x.scale += 8, x.sum += kGroups) {
        const __m256 xs = _mm256_loadu_ps(x.scale);
        for (int g = 0; g < kGroups; g += 8) {
            const __m256i first = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
            const __m256 s = kGroups == 8 ? xs
                                          : _mm256_permutevar8x32_ps(
                                                xs, _mm256_add_epi32(first, _mm256_set1_epi32(g / 2)));
            const __m256 d = UnitScales<U>::value ? s : _mm256_mul_ps(_mm256_load_ps(scales->d[c] + g), s);
            if (!UnitScales<U>::value) _mm256_store_ps(scales->products[t][c] + g, d);
            const __m256 added = U::kZero == 0 ? _mm256_mul_ps(_mm256_load_ps(scales->m[c] + g), s) : d;
            if (kUsesSums<U>) *offset = _mm256_fmadd_ps(added, _mm256_loadu_ps(x.sum + g), *offset);
        }
    }
}

template <class U, int NT>
[[gnu::always_inline]] inline void multiply_all_scales(const RowTokens& x, const ActQ8Layout& at, int64_t k,
                                                       int n_chunks, SegmentScales<U, NT>* scales,
                                                       RowSums<U, NT>* to) {
    if (UnitScales<U>::value && !kUsesSums<U>) return;
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t)
        multiply_scales<U, NT>(columns_of<U>(x.x[t], x.sums[t], at, k), n_chunks, t, scales, &to->offset[t]);
}

// Scales of eight groups of a block as products with those of token t; adds what the sums of its activations
// contribute. xs: scales of the activations times the factor of the block, xm: times that of the offsets.
template <class U, int NT>
[[gnu::always_inline]] inline __m256 block_products(const BlockScales& s, int i, int t, __m256 xs, __m256 xm,
                                                    const float* sum, RowSums<U, NT>* to) {
    const __m256 product = _mm256_mul_ps(s.d[i], xs);
    if (!kUsesSums<U>) return product;
    const __m256 sums = _mm256_loadu_ps(sum + 8 * i);
    const __m256 added = U::kZero == 0 ? _mm256_mul_ps(s.m[i], xm) : product;
    if (kSumsOfAll<U>) to->offset[t] = _mm256_fmadd_ps(added, sums, to->offset[t]);
    if (step_of<U>() > 0)
        to->shifted[t] =
            _mm256_fmadd_ps(_mm256_and_ps(product, _mm256_castsi256_ps(s.shifted[i])), sums, to->shifted[t]);
    return product;
}

// The same of a segment of types with RowCodes, whose scales are never stored.
template <class U, int NT>
[[gnu::always_inline]] inline void multiply_block_scales(const uint8_t* p, const RowTokens& x,
                                                         const ActQ8Layout& at, int64_t k, int n_chunks,
                                                         SegmentScales<U, NT>* scales, RowSums<U, NT>* to) {
    for (int c = 0; c < n_chunks; ++c, p += kChunk / U::kBlock * U::kBlockBytes, k += kChunk) {
        const BlockScales s = RowCodes<U>::scales(p);
#pragma GCC unroll 8
        for (int t = 0; t < NT; ++t) {
            const TokenColumns columns = columns_of<U>(x.x[t], x.sums[t], at, k);
            const __m256 plain = _mm256_loadu_ps(columns.scale);
            const __m256 xs = _mm256_mul_ps(plain, _mm256_set1_ps(s.factor));
            const __m256 xm = _mm256_mul_ps(plain, _mm256_set1_ps(s.offset_factor));
            const __m256 first = block_products<U, NT>(s, 0, t, xs, xm, columns.sum, to);
            float* products = scales->products[t][c];
            if constexpr (U::kGroup == 16)
                store_in_halves(first, block_products<U, NT>(s, 1, t, xs, xm, columns.sum, to), products);
            else
                _mm256_store_ps(products, first);
        }
    }
}

// Where the products of a chunk find their scales.
template <class U, int NT>
[[gnu::always_inline]] inline void find_scales(const RowTokens& x, const ActQ8Layout& at, int64_t k, int c,
                                               const SegmentScales<U, NT>& scales, const float** at_scale) {
    for (int t = 0; t < NT; ++t)
        at_scale[t] =
            UnitScales<U>::value ? columns_of<U>(x.x[t], x.sums[t], at, k).scale : scales.products[t][c];
}

template <class U, int NT>
[[gnu::always_inline]] inline void add_codes(const Chunk& w, DotSink<U, NT> sink) {
    // RowCodes gives them without the centre.
    const c32::Codes32 centre = c32::all(kSignedCodes<U> && HasRowCodes<U>::value ? 128 : 0);
#pragma GCC unroll 8
    for (int i = 0; i < kChunk / 32; ++i) (sink + 32 * i).take(c32::load(w.codes + 32 * i) ^ centre);
}

// Adds n_chunks whole chunks from column k on.
template <class U, int NT>
[[gnu::always_inline]] inline void add_segment(const uint8_t* p, int row, const RowTokens& x,
                                               const ActQ8Layout& at, int64_t k, int n_chunks,
                                               RowSums<U, NT>* to) {
    constexpr int64_t kBytes = kChunk / U::kBlock * U::kBlockBytes;
    SegmentScales<U, NT> scales;
    if constexpr (HasRowCodes<U>::value) {
        multiply_block_scales<U, NT>(p, x, at, k, n_chunks, &scales, to);
    } else {
        if constexpr (!UnitScales<U>::value) read_scales<U, NT>(p, row, n_chunks, &scales);
        multiply_all_scales<U, NT>(x, at, k, n_chunks, &scales, to);
    }
    for (int c = 0; c < n_chunks; ++c, p += kBytes, k += kChunk) {
        prefetch_weights<kBytes>(p);
        const float* scale[NT];
        find_scales<U, NT>(x, at, k, c, scales, scale);
        const DotSink<U, NT> sink{to, x.x, scale, k, 0};
        Chunk w;
        if constexpr (HasRowCodes<U>::value) {
            RowCodes<U>::codes(p, sink);
        } else if constexpr (FillsSink<U>::value) {
            put_chunk<U>(p, sink, w.d, w.m);
        } else {
            unpack_whole_chunk<U>(p, row, &w);
            add_codes<U, NT>(w, sink);
        }
    }
}

// The columns behind the last whole chunk; blocks of 256 columns leave none.
template <class U, int NT>
[[gnu::noinline]] void add_short_chunk(const uint8_t* p, int row, const RowTokens& x, const ActQ8Layout& at,
                                       int64_t k, int64_t n, float* out) {
    RowSums<U, NT> sums;
    SegmentScales<U, NT> scales;
    Chunk w;
    unpack_chunk<U>(p, row, n, &w);
    put_scales<U>(w, scales.d[0], scales.m[0]);
    multiply_all_scales<U, NT>(x, at, k, 1, &scales, &sums);
    const float* scale[NT];
    find_scales<U, NT>(x, at, k, 0, scales, scale);
    add_codes<U, NT>(w, {&sums, x.x, scale, k, 0});
    for (int t = 0; t < NT; ++t) out[t * kBlockRows] += sums.of(t);
}

template <class U, int NT>
void gemv_row(const uint8_t* p, int row, int64_t n_in, const RowTokens& x, const ActQ8Layout& at,
              float* out) {
    constexpr int64_t kBytes = kChunk / U::kBlock * U::kBlockBytes;
    RowSums<U, NT> sums;
    const int64_t n_chunks = n_in / kChunk;
    for (int64_t c = 0; c < n_chunks; c += kSegmentChunks)
        add_segment<U, NT>(p + c * kBytes, row, x, at, c * kChunk,
                           static_cast<int>(std::min<int64_t>(kSegmentChunks, n_chunks - c)), &sums);
#pragma GCC unroll 8
    for (int t = 0; t < NT; ++t) out[t * kBlockRows] = sums.of(t);
    if constexpr (U::kBlock < kChunk)
        if (n_chunks * kChunk < n_in)
            add_short_chunk<U, NT>(p + n_chunks * kBytes, row, x, at, n_chunks * kChunk,
                                   n_in - n_chunks * kChunk, out);
}

// Sums of a token's groups of 16, per 256 columns those of even groups and then of odd ones.
inline void sums_by_parity(const uint8_t* x, const ActQ8Layout& at, float* to) {
    const auto* sum = reinterpret_cast<const float*>(x + at.sum16);
    for (int64_t g = 0; g < at.n / 16; g += 16, sum += 16, to += 16) {
        const __m256 a = _mm256_loadu_ps(sum), b = _mm256_loadu_ps(sum + 8);
        const auto in_order = [](__m256 v) {
            return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(v), 0xD8));
        };
        _mm256_storeu_ps(to, in_order(_mm256_shuffle_ps(a, b, 0x88)));
        _mm256_storeu_ps(to + 8, in_order(_mm256_shuffle_ps(a, b, 0xDD)));
    }
}

// The sums of the groups of tokens in the order that the scales of U have; work: of sums_work_bytes().
template <class U>
inline void find_sums(const TokenSet& tokens, const ActQ8Layout& at, uint8_t* work, const float** sums) {
    for (int t = 0; t < tokens.n; ++t) {
        sums[t] = reinterpret_cast<const float*>(tokens.x[t] + (U::kGroup == 32 ? at.sum32 : at.sum16));
        if (!kByParity<U>) continue;
        auto* to = reinterpret_cast<float*>(work) + t * (at.n / 16);
        if (tokens.fresh) sums_by_parity(tokens.x[t], at, to);
        sums[t] = to;
    }
}
template <class U, int NT>
constexpr size_t sums_work_bytes(int64_t n_in) {
    return kByParity<U> ? static_cast<size_t>(NT * round_up(n_in, kChunk) / 16 * 4) : 0;
}

}  // namespace ikpy

#endif
