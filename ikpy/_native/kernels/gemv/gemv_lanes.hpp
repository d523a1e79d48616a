// Few tokens times types of two to six bits, on CPUs with byte permutations: all products of a group meet in
// one or two lanes of a sum, so that 256 weights cost one conversion to float and one multiplication with
// scales, which are made in the lanes where they are needed. What is known of the activations alone, their
// sums times the code of zero, is where the integer sums begin.
//
// Against the products of gemv_halves.hpp and gemv_int8.hpp, which other CPUs use, with weights in the
// second-level cache of an Emerald Rapids (GB/s of one core, `python -m benchmarks.matmul cached`): IQ4_NL 21
// and 27, IQ4_XS 21 and 29, IQ4_KS 24 and 31, IQ4_KSS 19 and 22, MXFP4 16 and 25, IQ4_K 18 and 25, IQ5_K 20
// and 24, IQ6_K 21 and 29, Q5_0 20 and 26, Q5_1 18 and 27, Q6_0 22 and 29. 256 weights of IQ4_XS are 24
// vector instructions, where halves take 37; what is left is bound by the two ports that vectors of 64 bytes
// have.
//
// A layout L says how 256 weights become four vectors of codes, eight consecutive weights to a quadword:
//   Plain      the unpacker of the type, whose members hold for L as well
//   static constexpr int first(int v, int q)   the first weight of quadword q of vector v: of one group of 32
//              for all v, or of one of 16 for v = 0, 1 and the one behind it for v = 2, 3
//   static constexpr float kScale              factor of all scales
//   static Codes unpack(const uint8_t* p)      never reads past the 256 weights
//   kUnpacksAhead, if single tokens gain from weights unpacked before those in front of them are multiplied:
//              what waits for its operands fills the schedulers of Zen 4. Of these types it gains 2 to 7 %,
//              the others lose 1 to 24 %
#pragma once
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "kernels/matmul/quant_product.hpp"
#include "kernels/matmul/weight_prefetch.hpp"
#include "kernels/simd/byte_permutes.hpp"
#include "kernels/simd/lane_sums.hpp"

#if defined(__AVX512VNNI__)

namespace ikpy {
namespace lanes {

struct Codes {
    __m512i q[4];
    __m512 d;           // in the order of lane_group()
    __m512 m;           // of types with an offset per group
    __mmask16 shifted;  // groups whose codes lack the step
};

// The lanes of a sum come from two vectors where groups have 16 weights: two of the one, two of the other.
template <class L>
constexpr int kSums = 32 / L::Plain::kGroup;

// Weight at which the part of its group that lane l of a sum holds begins.
template <class L>
constexpr int lane_start(int l) {
    return kSums<L> == 1 ? L::first(0, l / 2) + 4 * (l % 2) : L::first(l % 4 & 2, l / 4 * 2 + l % 2);
}

template <class L>
constexpr int lane_group(int l) {
    return lane_start<L>(l) / L::Plain::kGroup;
}

// What is kept of 256 activations of a token.
template <class L>
struct alignas(64) Record {
    uint8_t codes[kChunk];
    float scale[16];
    int32_t start[kSums<L>][16];  // -kZero times the sums of the codes
    int32_t step[16];             // what a step adds
    float sum[16];                // of the activations, for types with offsets
};

template <class L>
struct Orders {
    alignas(64) int64_t quads[4][8] = {};
    alignas(64) int32_t scales[16] = {};
    constexpr Orders() {
        for (int v = 0; v < 4; ++v)
            for (int q = 0; q < 8; ++q) quads[v][q] = L::first(v, q);
        for (int l = 0; l < 16; ++l) scales[l] = lane_start<L>(l) / 32;
    }
};

// Sums of the lanes of two vectors in the order of lane_group().
template <class L>
IKPY_VBMI_INLINE __m512i joined(const __m512i* sum) {
    if constexpr (kSums<L> == 1) return sum[0];
    const __m512 a = _mm512_castsi512_ps(sum[0]), b = _mm512_castsi512_ps(sum[1]);
    return _mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88)),
                            _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xDD)));
}

template <class L>
IKPY_VBMI void prepare(const uint8_t* x, const ActQ8Layout& at, Record<L>* out) {
    using U = typename L::Plain;
    static constexpr Orders<L> kOrders;
    constexpr int kEach = 4 / kSums<L>;
    for (int64_t c = 0; c < at.n / kChunk; ++c, ++out) {
        __m512i sum[kSums<L>];
        for (int v = 0; v < 4; ++v) {
            const __m512i a = _mm512_i64gather_epi64(_mm512_load_si512(kOrders.quads[v]), x + kChunk * c, 1);
            _mm512_store_si512(out->codes + 64 * v, a);
            const __m512i before = v % kEach ? sum[v / kEach] : _mm512_setzero_si512();
            sum[v / kEach] = _mm512_dpbusd_epi32(before, _mm512_set1_epi8(1), a);
        }
        for (int s = 0; s < kSums<L>; ++s)
            _mm512_store_si512(out->start[s], _mm512_mullo_epi32(sum[s], _mm512_set1_epi32(-U::kZero)));
        const __m256 scales = _mm256_loadu_ps(reinterpret_cast<const float*>(x + at.scale) + 8 * c);
        const __m512 scale = _mm512_mul_ps(
            _mm512_permutexvar_ps(_mm512_load_si512(kOrders.scales), _mm512_castps256_ps512(scales)),
            _mm512_set1_ps(L::kScale));
        _mm512_store_ps(out->scale, scale);
        const __m512i all = joined<L>(sum);
        _mm512_store_si512(out->step, _mm512_mullo_epi32(all, _mm512_set1_epi32(StepOf<U>::kStep)));
        _mm512_store_ps(out->sum, _mm512_mul_ps(_mm512_cvtepi32_ps(all), scale));
    }
}

template <class L>
IKPY_VBMI_INLINE __m512 add_products(const Codes& w, const Record<L>& x, __m512 total) {
    using U = typename L::Plain;
    constexpr int kEach = 4 / kSums<L>;
    __m512i sum[kSums<L>];
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
        __m512i& s = sum[v / kEach];
        if (v % kEach == 0) s = U::kZero > 0 ? _mm512_load_si512(x.start[v / kEach]) : _mm512_setzero_si512();
        s = _mm512_dpbusd_epi32(s, w.q[v], _mm512_load_si512(x.codes + 64 * v));
    }
    __m512i all = joined<L>(sum);
    if (StepOf<U>::kStep > 0) all = _mm512_mask_add_epi32(all, w.shifted, all, _mm512_load_si512(x.step));
    if (U::kZero == 0) total = _mm512_fmadd_ps(w.m, _mm512_load_ps(x.sum), total);
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(all), _mm512_mul_ps(w.d, _mm512_load_ps(x.scale)), total);
}

// Blocks at the end of a row, moved to where those behind them can be read.
template <class L>
IKPY_VBMI_INLINE Codes unpack_end(const uint8_t* p, int64_t n) {
    using U = typename L::Plain;
    alignas(64) uint8_t blocks[kChunk / U::kBlock * U::kBlockBytes] = {};
    std::memcpy(blocks, p, static_cast<size_t>(n / U::kBlock * U::kBlockBytes));
    return L::unpack(blocks);
}

template <class L, class = void>
struct UnpacksAhead : std::false_type {};
template <class L>
struct UnpacksAhead<L, std::void_t<decltype(L::kUnpacksAhead)>> : std::true_type {};

// Products of n times 256 weights with a token; each are unpacked before those in front of them are
// multiplied.
template <class L>
IKPY_VBMI_INLINE __m512 multiply_ahead(const uint8_t* p, int64_t n, const Record<L>* x, __m512 total) {
    constexpr int64_t kBytes = kChunk / L::Plain::kBlock * L::Plain::kBlockBytes;
    if (n == 0) return total;
    Codes w = L::unpack(p);
    for (int64_t c = 1; c < n; ++c) {
        prefetch_weights<kBytes>(p);
        p += kBytes;
        const Codes next = L::unpack(p);
        total = add_products<L>(w, x[c - 1], total);
        w = next;
    }
    prefetch_weights<kBytes>(p);
    return add_products<L>(w, x[n - 1], total);
}

template <class L, int NT>
IKPY_VBMI_INLINE void multiply_row(const uint8_t* p, int64_t n_in, const Record<L>* const* x, __m512* total) {
    using U = typename L::Plain;
    constexpr int64_t kBytes = kChunk / U::kBlock * U::kBlockBytes;
    const int64_t n_full = n_in / kChunk;
#pragma GCC unroll 16
    for (int t = 0; t < NT; ++t) total[t] = _mm512_setzero_ps();
    if constexpr (NT == 1 && UnpacksAhead<L>::value) {
        total[0] = multiply_ahead<L>(p, n_full, x[0], total[0]);
    } else {
        for (int64_t c = 0; c < n_full; ++c) {
            prefetch_weights<kBytes>(p + c * kBytes);
            const Codes w = L::unpack(p + c * kBytes);
#pragma GCC unroll 16
            for (int t = 0; t < NT; ++t) total[t] = add_products<L>(w, x[t][c], total[t]);
        }
    }
    if constexpr (U::kBlock < kChunk) {
        if (n_full * kChunk == n_in) return;
        const Codes w = unpack_end<L>(p + n_full * kBytes, n_in - n_full * kChunk);
#pragma GCC unroll 16
        for (int t = 0; t < NT; ++t) total[t] = add_products<L>(w, x[t][n_full], total[t]);
    }
}

// Lanes are summed for 16 rows at once: sums at the end of every row of 1024 columns took 5 % of the time.
template <class L, int NT>
IKPY_VBMI void multiply_half(const RowBlock& rows, int h, const Record<L>* const* x, float* out) {
    using Header = RowHeader<typename L::Plain>;
    __m512 totals[NT][kHalfRows] = {};
    for (int i = 0; i < rows.n[h]; ++i) {
        __m512 total[NT];
        multiply_row<L, NT>(rows.row(h, i) + Header::kBytes, rows.n_in, x, total);
        for (int t = 0; t < NT; ++t) totals[t][i] = total[t];
    }
    for (int t = 0; t < NT; ++t) {
        float* to = out + t * kBlockRows + h * kHalfRows;
        _mm512_storeu_ps(to, sums16(totals[t]));
        if constexpr (Header::kBytes > 0)
            for (int i = 0; i < rows.n[h]; ++i) to[i] *= Header::scale(rows.row(h, i), 0);
    }
}

template <class L, int NT>
void multiply(const RowBlock& rows, const TokenSet& tokens, float* out, uint8_t* work) {
    if (tokens.n < NT) {
        if constexpr (NT > 1) multiply<L, NT - 1>(rows, tokens, out, work);
        return;
    }
    const ActQ8Layout at(rows.n_in);
    const Record<L>* records[NT];
    for (int t = 0; t < NT; ++t) {
        Record<L>* to = reinterpret_cast<Record<L>*>(work) + t * (at.n / kChunk);
        if (tokens.fresh) prepare<L>(tokens.x[t], at, to);
        records[t] = to;
    }
    for (int h = 0; h < 2; ++h)
        if (rows.n[h] > 0) multiply_half<L, NT>(rows, h, records, out);
}

template <class L, int Tokens>
size_t work_bytes(int64_t n_in) {
    return std::max(int8_panel_bytes<typename L::Plain>(n_in),
                    Tokens * (round_up(n_in, kChunk) / kChunk) * sizeof(Record<L>));
}

// The kernels of the type with the product of up to Tokens tokens replaced; with more, panels are faster.
template <class L, int Tokens = 10>
constexpr WeightKernels kernels() {
    WeightKernels k = quant_kernels<typename L::Plain>();
    k.gemv = multiply<L, Tokens>;
    k.gemv_tokens = Tokens;
    k.work_bytes = work_bytes<L, Tokens>;
    return k;
}

}  // namespace lanes
}  // namespace ikpy

#endif
