// Products of few tokens whose activations are rearranged first: one record per 256 columns and token, kept
// in the work memory of the thread for all blocks of rows of a matrix.
//
// A product K has
//   Unpack                    of the type: more tokens and rows that end inside a chunk are multiplied by it
//   Record                    of 256 activations, trivial
//   kTokens                   it multiplies up to so many at once; loops over them must be unrolled whole, or
//                             sums leave the registers (IQ2_XXS with six tokens: 132 instead of 240 Gop/s)
//   static void prepare(const uint8_t* x, const ActQ8Layout&, int64_t chunk, Record* out)
//   template <int NT> static void multiply(const RowBlock&, const Record* const* x, float* out)
#pragma once
#include <algorithm>

#include "kernels/matmul/quant_product.hpp"

namespace ikpy {

#if defined(__AVX512VNNI__)

// -128 times the sums of the activations of a chunk by groups of 32 or 16.
inline __m256i minus_sums32(const uint8_t* x, const ActQ8Layout& at, int64_t chunk) {
    const auto* start = reinterpret_cast<const __m256i*>(x + at.start32) + chunk;
    return _mm256_sub_epi32(_mm256_loadu_si256(start), _mm256_set1_epi32(kStartBits));
}
inline __m512i minus_sums16(const uint8_t* x, const ActQ8Layout& at, int64_t chunk) {
    const __m512i start = _mm512_loadu_si512(x + at.start16 + 64 * chunk);
    return _mm512_sub_epi32(start, _mm512_set1_epi32(kStartBits));
}

#endif

template <class K, int NT>
void multiply_records(const RowBlock& rows, const typename K::Record* const* x, int n_tokens, float* out) {
    if constexpr (NT > 1)
        if (n_tokens < NT) return multiply_records<K, NT - 1>(rows, x, n_tokens, out);
    K::template multiply<NT>(rows, x, out);
}

template <class K, ProductFn Other>
void gemv_of_records(const RowBlock& rows, const TokenSet& tokens, float* out, uint8_t* work) {
    using Record = typename K::Record;
    if (rows.n_in % kChunk != 0 || tokens.n > K::kTokens) return Other(rows, tokens, out, work);
    const ActQ8Layout at(rows.n_in);
    const int64_t n_chunks = at.n / kChunk;
    const Record* records[K::kTokens];
    for (int t = 0; t < tokens.n; ++t) {
        Record* to = reinterpret_cast<Record*>(work) + t * n_chunks;
        if (tokens.fresh)
            for (int64_t c = 0; c < n_chunks; ++c) K::prepare(tokens.x[t], at, c, to + c);
        records[t] = to;
    }
    multiply_records<K, K::kTokens>(rows, records, tokens.n, out);
}

template <class K>
size_t record_work_bytes(int64_t n_in) {
    const int64_t n_chunks = round_up(n_in, kChunk) / kChunk;
    return std::max(int8_panel_bytes<typename K::Unpack>(n_in),
                    K::kTokens * n_chunks * sizeof(typename K::Record));
}

// The kernels of the type with the product of few tokens replaced. Other: for what K does not multiply.
template <class K, ProductFn Other>
constexpr WeightKernels record_kernels(WeightKernels k) {
    k.gemv = gemv_of_records<K, Other>;
    k.work_bytes = record_work_bytes<K>;
    return k;
}
template <class K, int PassTokens = 0>
constexpr WeightKernels record_kernels() {
    constexpr int kTokens = std::max(kGemvTokens, K::kTokens);
    WeightKernels k =
        record_kernels<K, quant_gemv<typename K::Unpack, kTokens>>(quant_kernels<typename K::Unpack>());
    if (kTokens > kGemvTokens) k.gemv_tokens = kTokens;
    k.pass_tokens = PassTokens;
    return k;
}

}  // namespace ikpy
