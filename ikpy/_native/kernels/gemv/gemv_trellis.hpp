// Few tokens and trellis types: the bytes of the generator's states meet the activations without being summed
// to codes before. IQ2_KT on AVX-512 takes 4 instructions per 16 weights (two of them the 32-bit product) and
// 15 per block: 79 per 256 weights instead of about 140. Measured gain over the product of unpacked
// codes: 1.2 (IQ3_KT) to 1.5 times on AVX-512, 2 to 4 times on AVX2.
#pragma once
#include "kernels/gemv/token_records.hpp"
#include "kernels/matmul/activations.hpp"
#include "kernels/matmul/weight_prefetch.hpp"
#include "unpack/trellis_lanes.hpp"

namespace ikpy {

#if defined(__AVX2__)

namespace trellis {

// Activations of 256 elements as the products read them: dword lane l of vector v holds element 16 * l + v
// four times, once for each byte of a state.
struct SpreadChunk {
    // Every token costs 16 products per block instead of 4, so that codes pay from here on.
    static constexpr int kTokens = kLanes == 16 ? 2 : 3;
    int32_t start[16];  // -126 * sum of the lane's elements
    float scale[16];
    uint32_t x[16][16];
};

// fours: four bytes at `from`, 16 bytes further for every lane. repeat: byte i of every lane four times, from
// `column` on in row i of `to`.
#if defined(__AVX512VNNI__)
inline __m512i fours(const uint8_t* from) {
    const __m512i lane = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60);
    return _mm512_i32gather_epi32(lane, from, 4);
}
inline void repeat(__m512i bytes, uint32_t (*to)[16], int column = 0) {
    for (int i = 0; i < 4; ++i) {
        const __m512i order = _mm512_set4_epi32(0x0C0C0C0C + 0x01010101 * i, 0x08080808 + 0x01010101 * i,
                                                0x04040404 + 0x01010101 * i, 0x01010101 * i);
        _mm512_storeu_si512(to[i] + column, _mm512_shuffle_epi8(bytes, order));
    }
}
#else
inline __m256i fours(const uint8_t* from) {
    const __m256i lane = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    return _mm256_i32gather_epi32(reinterpret_cast<const int*>(from), lane, 4);
}
inline void repeat(__m256i bytes, uint32_t (*to)[16], int column) {
    for (int i = 0; i < 4; ++i) {
        const __m128i order = _mm_setr_epi32(0x01010101 * i, 0x04040404 + 0x01010101 * i,
                                             0x08080808 + 0x01010101 * i, 0x0C0C0C0C + 0x01010101 * i);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to[i] + column),
                            _mm256_shuffle_epi8(bytes, _mm256_broadcastsi128_si256(order)));
    }
}
#endif

inline void spread(const uint8_t* x, const ActQ8Layout& at, int64_t c, SpreadChunk* out) {
    const auto* scale = reinterpret_cast<const float*>(x + at.scale) + 8 * c;
    const auto* start = reinterpret_cast<const int32_t*>(x + at.start16) + 16 * c;
    for (int l = 0; l < 16; ++l) {
        const int32_t sums = start[l] - kStartBits;  // times -128
        out->start[l] = sums - sums / 64;
        out->scale[l] = scale[l / 2];
    }
    for (int h = 0; h < kParts; ++h)
        for (int m = 0; m < 4; ++m)
            repeat(fours(x + kChunk * c + 128 * h + 4 * m), out->x + 4 * m, kLanes * h);
}

#if defined(__AVX512VNNI__)
inline void add_pair(Lanes a, Lanes b, const uint32_t* x, Lanes* sums) {
    sums[0] = reinterpret_cast<Lanes>(_mm512_dpbusd_epi32(
        reinterpret_cast<__m512i>(sums[0]), reinterpret_cast<__m512i>(a), _mm512_loadu_si512(x)));
    sums[1] = reinterpret_cast<Lanes>(_mm512_dpbusd_epi32(
        reinterpret_cast<__m512i>(sums[1]), reinterpret_cast<__m512i>(b), _mm512_loadu_si512(x + 16)));
}
inline float sum_of(LaneFloats v) { return _mm512_reduce_add_ps(reinterpret_cast<__m512>(v)); }
#else
// Four products of a byte below 64 and an activation stay below 2^15.
inline void add_pair(Lanes a, Lanes b, const uint32_t* x, Lanes* sums) {
    const auto* at = reinterpret_cast<const uint8_t*>(x);
    const auto codes_a = reinterpret_cast<__m256i>(a), codes_b = reinterpret_cast<__m256i>(b);
#if defined(__AVXVNNI__)
    sums[0] = reinterpret_cast<Lanes>(add_dots(reinterpret_cast<__m256i>(sums[0]), codes_a, load_256(at)));
    sums[1] =
        reinterpret_cast<Lanes>(add_dots(reinterpret_cast<__m256i>(sums[1]), codes_b, load_256(at + 64)));
#else
    const __m256i both = _mm256_add_epi16(_mm256_maddubs_epi16(codes_a, load_256(at)),
                                          _mm256_maddubs_epi16(codes_b, load_256(at + 64)));
    sums[0] += reinterpret_cast<Lanes>(_mm256_madd_epi16(both, _mm256_set1_epi16(1)));
#endif
}
inline float sum_of(LaneFloats v) { return sum_of_lanes(reinterpret_cast<__m256>(v)); }
#endif

template <class T, int NT>
void row_product(const uint8_t* p, int64_t n_chunks, const SpreadChunk* const* x, float* out) {
    constexpr int kValues = 16 / T::kSeeds;
    LaneFloats total[NT] = {};
    for (int64_t c = 0; c < n_chunks; ++c, p += T::Unpack::kBlockBytes) {
        prefetch_weights_into_l2<T::Unpack::kBlockBytes>(p);
#pragma GCC unroll 2
        for (int h = 0; h < kParts; ++h) {
            Lanes seeds[T::kSeeds], sums[NT][2];
            T::seeds(p, h, seeds);
            for (int t = 0; t < NT; ++t) {
                sums[t][0] = load_lanes(x[t][c].start + kLanes * h);
                sums[t][1] = Lanes{};
            }
#pragma GCC unroll 16
            for (int v = 0; v < 16; v += 2) {
                const Lanes seed = seeds[v / kValues];
                const Lanes a = (seed * kPowers8.of[v % kValues]) & 0x3F3F3F3F;
                const Lanes b = (seed * kPowers8.of[v % kValues + 1]) & 0x3F3F3F3F;
                for (int t = 0; t < NT; ++t) add_pair(a, b, x[t][c].x[v] + kLanes * h, sums[t]);
            }
            const LaneFloats d = T::scales(p, h);
            for (int t = 0; t < NT; ++t)
                total[t] += as_floats(sums[t][0] + sums[t][1]) *
                            (d * reinterpret_cast<LaneFloats>(load_lanes(x[t][c].scale + kLanes * h)));
        }
    }
    for (int t = 0; t < NT; ++t) out[t * kBlockRows] = sum_of(total[t]);
}

// Activations of 256 elements for types whose signs are stored apart: 32 elements are 16 bytes in each of two
// vectors, in the order that packing the sums of four states gives.
struct PlacedChunk {
    static constexpr int kTokens = kGemvTokens;
    float scale[8];
    int8_t x[kParts * 2][2][kLaneBytes];
};

inline void spread(const uint8_t* x, const ActQ8Layout& at, int64_t c, PlacedChunk* out) {
    std::memcpy(out->scale, x + at.scale + 32 * c, 32);
    for (int s = 0; s < 8; ++s) {
        const __m256i v = by_place(x + kChunk * c + 32 * s);
        auto* half = out->x[4 * s / kLanes];
        const int at_byte = 16 * (s % (kLanes / 4));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(half[0] + at_byte), _mm256_castsi256_si128(v));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(half[1] + at_byte), _mm256_extracti128_si256(v, 1));
    }
}

#if defined(__AVX512VNNI__)

// Sums of the bytes of four states less 126, as bytes.
inline __m512i packed_values(const Lanes* z) {
    __m512i v[4];
    for (int i = 0; i < 4; ++i)
        v[i] =
            _mm512_dpbusd_epi32(_mm512_setzero_si512(), reinterpret_cast<__m512i>(z[i]), _mm512_set1_epi8(1));
    const __m512i sums =
        _mm512_packus_epi16(_mm512_packus_epi32(v[0], v[1]), _mm512_packus_epi32(v[2], v[3]));
    return _mm512_sub_epi8(sums, _mm512_set1_epi8(126));
}

// Signs of the sub-blocks of part h: bit s of the bytes of `half` belongs to sub-block s.
struct Signs {
    __mmask64 negative;
    Signs(__m256i signs, int half, int h) {
        const __m128i bytes = half ? _mm256_extracti128_si256(signs, 1) : _mm256_castsi256_si128(signs);
        const auto bits = [h](int s) { return static_cast<int>(0x01010101U << (4 * h + s)); };
        const int a = bits(0), b = bits(1), c = bits(2), d = bits(3);
        const __m512i own = _mm512_setr_epi32(a, a, a, a, b, b, b, b, c, c, c, c, d, d, d, d);
        negative = _mm512_test_epi8_mask(_mm512_broadcast_i32x4(bytes), own);
    }
    // sums += |values| * x with the signs.
    void add(__m512i values, const int8_t* x, Lanes* sums) const {
        const __m512i v = _mm512_loadu_si512(x);
        const __m512i turned = _mm512_mask_sub_epi8(v, negative, _mm512_setzero_si512(), v);
        *sums = reinterpret_cast<Lanes>(
            _mm512_dpbusd_epi32(reinterpret_cast<__m512i>(*sums), _mm512_abs_epi8(values), turned));
    }
};

// Floats of eight sub-blocks in the lanes of part h.
inline LaneFloats of_sub_blocks(__m256 v, int h) {
    const __m512i order = _mm512_add_epi32(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
                                           _mm512_set1_epi32(4 * h));
    return reinterpret_cast<LaneFloats>(_mm512_permutexvar_ps(order, _mm512_castps256_ps512(v)));
}

#else

inline __m256i packed_values(const Lanes* z) {
    __m256i v[4];
    for (int i = 0; i < 4; ++i)
        v[i] = add_dots(_mm256_setzero_si256(), reinterpret_cast<__m256i>(z[i]), _mm256_set1_epi8(1));
    const __m256i sums =
        _mm256_packus_epi16(_mm256_packus_epi32(v[0], v[1]), _mm256_packus_epi32(v[2], v[3]));
    return _mm256_sub_epi8(sums, _mm256_set1_epi8(126));
}

struct Signs {
    __m256i control;  // negative where the sign is, never zero
    Signs(__m256i signs, int half, int h) {
        const __m256i bytes =
            half ? _mm256_permute4x64_epi64(signs, 0xEE) : _mm256_permute4x64_epi64(signs, 0x44);
        const int low = 7 - 2 * h, high = 6 - 2 * h;
        const __m256i counts = _mm256_setr_epi32(low, low, low, low, high, high, high, high);
        control = _mm256_or_si256(_mm256_sllv_epi32(bytes, counts), _mm256_set1_epi8(1));
    }
    void add(__m256i values, const int8_t* x, Lanes* sums) const {
        const __m256i turned = _mm256_sign_epi8(load_256(reinterpret_cast<const uint8_t*>(x)), control);
        *sums = reinterpret_cast<Lanes>(
            add_dots(reinterpret_cast<__m256i>(*sums), _mm256_abs_epi8(values), turned));
    }
};

inline LaneFloats of_sub_blocks(__m256 v, int h) {
    const __m256i order =
        _mm256_add_epi32(_mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1), _mm256_set1_epi32(2 * h));
    return reinterpret_cast<LaneFloats>(_mm256_permutevar8x32_ps(v, order));
}

#endif

template <class T, int NT>
void row_product(const uint8_t* p, int64_t n_chunks, const PlacedChunk* const* x, float* out) {
    LaneFloats total[NT] = {};
    for (int64_t c = 0; c < n_chunks; ++c, p += T::Unpack::kBlockBytes) {
        prefetch_weights_into_l2<T::Unpack::kBlockBytes>(p);
        const __m256i signs = T::signs(p);
        __m256 d[NT];
        for (int t = 0; t < NT; ++t) d[t] = _mm256_mul_ps(T::scales(p), _mm256_loadu_ps(x[t][c].scale));
#pragma GCC unroll 4
        for (int h = 0; h < 2 * kParts; ++h) {
            const Lanes seed = T::seeds(p, h);
            Lanes sums[NT] = {};
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                Lanes z[4];
                for (int i = 0; i < 4; ++i) z[i] = (seed * kPowers8.of[4 * half + i]) & 0x3F3F3F3F;
                const auto values = packed_values(z);
                const Signs own(signs, half, h);
                for (int t = 0; t < NT; ++t) own.add(values, x[t][c].x[h][half], &sums[t]);
            }
            for (int t = 0; t < NT; ++t) total[t] += as_floats(sums[t]) * of_sub_blocks(d[t], h);
        }
    }
    for (int t = 0; t < NT; ++t) out[t * kBlockRows] = sum_of(total[t]);
}

// Spread: the form of the activations.
template <class T, class Spread>
struct Generated {
    using Unpack = typename T::Unpack;
    using Record = Spread;
    static constexpr int kTokens = Spread::kTokens;

    static void prepare(const uint8_t* x, const ActQ8Layout& at, int64_t c, Record* out) {
        spread(x, at, c, out);
    }
    template <int NT>
    static void multiply(const RowBlock& rows, const Record* const* x, float* out) {
        for (int h = 0; h < 2; ++h)
            for (int i = 0; i < rows.n[h]; ++i) {
                const uint8_t* row = rows.row(h, i);
                float* to = out + h * kHalfRows + i;
                row_product<T, NT>(row + Unpack::kHeaderBytes, rows.n_in / kChunk, x, to);
                for (int t = 0; t < NT; ++t) to[t * kBlockRows] *= Unpack::row_scale(row);
            }
    }
};

}  // namespace trellis

#endif

}  // namespace ikpy
