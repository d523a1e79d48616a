// Weights of trellis types as bf16: values of the generator in the lanes of their pairs, without bytes in
// between.
#pragma once
#include "kernels/matmul/bf16_stored_row.hpp"
#include "unpack/trellis.hpp"

#if defined(__AVX512VNNI__) && defined(__linux__)

namespace ikpy::bf16_rows {

template <class U, class = void>
struct SeedsOf {
    static constexpr int kValues = 0;
};
template <class U>
struct SeedsOf<U, std::void_t<decltype(U::kSeedValues)>> {
    static constexpr int kValues = U::kSeedValues;
};

template <class U, class = void>
struct SignWords : std::false_type {};
template <class U>
struct SignWords<U, std::void_t<decltype(U::kSignWords)>> : std::true_type {};

// Powers of the multiplier for the even and the odd values of V per seed.
template <int V, int Odd>
inline constexpr Lanes16 kPairPowers{[](int i) { return trellis::kPowers8.of[2 * i % V + Odd]; }};

// The seeds of 32 values, of those from lane `First` on.
template <int V, int First>
inline constexpr Lanes16 kPairSeeds{[](int i) { return First + 2 * i / V; }};

// A sum of bytes less 126 is added to the bits of the float 1.5 * 2^23, which makes it a float that one FMA
// scales; scales are small integers, so nothing is rounded.
constexpr float kBias = 0x1.8p23f;
constexpr int32_t kBiasBits = 0x4B400000;

template <int V, int Odd>
inline __m512 biased_values(__m512i seeds) {
    return _mm512_castsi512_ps(trellis::sums(seeds, kPairPowers<V, Odd>.load(), kBiasBits - 126));
}

template <class U, int Step>
inline void generate_step(const StoredRow& row, uint16_t* out) {
    constexpr int V = U::kSeedValues, kFirst = 32 * Step / V;
    const __m512i seeds = _mm512_permutexvar_epi32(kPairSeeds<V, kFirst % 16>.load(), row.codes(kFirst / 16));
    const __m512 d = _mm512_set1_ps(row.d[Step]), m = _mm512_set1_ps(row.m[Step]);
    const __m512 even = _mm512_fmadd_ps(biased_values<V, 0>(seeds), d, m);
    const __m512 odd = _mm512_fmadd_ps(biased_values<V, 1>(seeds), d, m);
    __m512i pairs = bf16_pairs(even, odd);
    if constexpr (SignWords<U>::value)  // magnitudes: the sign bit is replaced
        pairs = _mm512_ternarylogic_epi32(pairs, _mm512_slli_epi16(row.codes(2), 15 - Step),
                                          _mm512_set1_epi16(INT16_MIN), 0xD8);
    store(pairs, Step, out);
}

template <class U, size_t... Steps>
inline void generate(const StoredRow& row, uint16_t* out, std::index_sequence<Steps...>) {
    (generate_step<U, Steps>(row, out), ...);
}

}  // namespace ikpy::bf16_rows

#endif
