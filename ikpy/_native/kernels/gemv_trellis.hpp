// Few tokens and trellis types: the bytes of the generator's states meet the activations without being summed
// to codes before. IQ2_KT on AVX-512: 4 instructions per 16 weights (two of them the 32-bit product) and 15
// per block, 79 per 256 weights instead of 150; measured 1.6 to 2 times the product of unpacked codes.
#pragma once
#include "kernels/activations.hpp"
#include "kernels/quant_product.hpp"
#include "unpack/trellis_lanes.hpp"

namespace ikpy {

#if defined(__AVX2__)

namespace trellis {

// Activations of 256 elements as the products read them: dword lane l of vector v holds element 16 * l + v
// four times, once for each byte of a state.
struct SpreadChunk {
    int32_t start[16];  // -126 * sum of the lane's elements
    float scale[16];
    uint32_t x[16][16];
};

inline size_t spread_bytes(int64_t n_in) {
    return static_cast<size_t>(round_up(n_in, kChunk) / kChunk) * sizeof(SpreadChunk);
}

inline void spread(const uint8_t* x, const ActQ8Layout& at, SpreadChunk* out) {
    for (int64_t c = 0; c < at.n / kChunk; ++c, ++out) {
        const auto* scale = reinterpret_cast<const float*>(x + at.scale) + 8 * c;
        const auto* neg = reinterpret_cast<const int32_t*>(x + at.neg16) + 16 * c;
        for (int l = 0; l < 16; ++l) {
            out->start[l] = neg[l] - neg[l] / 64;  // -128 * sum before
            out->scale[l] = scale[l / 2];
        }
        for (int h = 0; h < kParts; ++h)
            for (int m = 0; m < 4; ++m) {
                const auto* from = reinterpret_cast<const int*>(x + kChunk * c + 128 * h + 4 * m);
#if defined(__AVX512VNNI__)
                const __m512i lane = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60);
                const __m512i bytes = _mm512_i32gather_epi32(lane, from, 4);
                for (int i = 0; i < 4; ++i)
                    _mm512_storeu_si512(out->x[4 * m + i],
                                        _mm512_shuffle_epi8(bytes, _mm512_set4_epi32(0x0C0C0C0C + 0x01010101 * i,
                                                                                     0x08080808 + 0x01010101 * i,
                                                                                     0x04040404 + 0x01010101 * i,
                                                                                     0x01010101 * i)));
#else
                const __m256i lane = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
                const __m256i bytes = _mm256_i32gather_epi32(from, lane, 4);
                for (int i = 0; i < 4; ++i) {
                    const __m128i order = _mm_setr_epi32(0x01010101 * i, 0x04040404 + 0x01010101 * i,
                                                         0x08080808 + 0x01010101 * i, 0x0C0C0C0C + 0x01010101 * i);
                    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out->x[4 * m + i] + 8 * h),
                                        _mm256_shuffle_epi8(bytes, _mm256_broadcastsi128_si256(order)));
                }
#endif
            }
    }
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
    const __m256i both = _mm256_add_epi16(_mm256_maddubs_epi16(reinterpret_cast<__m256i>(a), load_256(at)),
                                          _mm256_maddubs_epi16(reinterpret_cast<__m256i>(b), load_256(at + 64)));
    sums[0] += reinterpret_cast<Lanes>(_mm256_madd_epi16(both, _mm256_set1_epi16(1)));
}
inline float sum_of(LaneFloats v) { return sum_of_lanes(reinterpret_cast<__m256>(v)); }
#endif

template <class T, int NT>
void row_product(const uint8_t* p, int64_t n_chunks, const SpreadChunk* const* x, float* out) {
    constexpr int kValues = 16 / T::kSeeds;
    LaneFloats total[NT] = {};
    for (int64_t c = 0; c < n_chunks; ++c, p += T::Unpack::kBlockBytes) {
        for (int b = 0; b < T::Unpack::kBlockBytes; b += 64)
            _mm_prefetch(reinterpret_cast<const char*>(p + kPrefetchBytes + b), _MM_HINT_T0);
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

template <class T, int NT>
void row_products(const RowBlock& rows, const SpreadChunk* const* x, int n_tokens, float* out) {
    using U = typename T::Unpack;
    if (n_tokens == NT) {
        for (int h = 0; h < 2; ++h)
            for (int i = 0; i < rows.n[h]; ++i) {
                const uint8_t* row = rows.row(h, i);
                float* to = out + h * kHalfRows + i;
                row_product<T, NT>(row + U::kHeaderBytes, rows.n_in / kChunk, x, to);
                for (int t = 0; t < NT; ++t) to[t * kBlockRows] *= U::row_scale(row);
            }
    } else if constexpr (NT > 1) {
        row_products<T, NT - 1>(rows, x, n_tokens, out);
    }
}

template <class T>
void gemv(const RowBlock& rows, const uint8_t* const* x, int n_tokens, float* out, uint8_t* work) {
    const ActQ8Layout at(rows.n_in);
    const SpreadChunk* spread_x[kGemvTokens];
    for (int t = 0; t < n_tokens; ++t) {
        auto* to = reinterpret_cast<SpreadChunk*>(work + t * spread_bytes(rows.n_in));
        spread(x[t], at, to);
        spread_x[t] = to;
    }
    row_products<T, kGemvTokens>(rows, spread_x, n_tokens, out);
}

inline size_t work_bytes(int64_t n_in) {
    return std::max(int8_panel_bytes(n_in), kGemvTokens * spread_bytes(n_in));
}

}  // namespace trellis

template <class T>
constexpr WeightKernels trellis_kernels() {
    WeightKernels k = quant_kernels<typename T::Unpack>();
    k.gemv = trellis::gemv<T>;
    k.work_bytes = trellis::work_bytes;
    return k;
}

#endif

}  // namespace ikpy
