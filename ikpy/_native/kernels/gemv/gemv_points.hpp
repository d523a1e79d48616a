// Few tokens times weights that are points of a lattice (grid types), on CPUs with byte permutations.
//
// Tables hold levels with their signs, moved to be positive, and the sums begin with what that adds, so that
// products are of unsigned bytes. Activations are rearranged once per thread and product, so that points are
// multiplied in the order in which they are easily found and all products of one scale meet in the same
// lanes: one conversion to float per chunk.
//
// A lattice P says how a step is unpacked: 64 * kVectors weights, columns of kRowsAtOnce rows, which share
// the lanes of a vector evenly. It has
//   kType, kOrder, kVectors, kRowsAtOnce (1, 2 or 4), kSteps (per block of 256 columns)
//   kInterleaved: kBlockBytes and kHeaderBytes (before the first block) count all rows
//   P(const uint8_t* const* rows, int step)   blocks of the rows; of all rows at rows[0] if kInterleaved
//   static void find(P (&w)[T])   finds the points of several of these, if needed; kTogether: of how many at
//                              best
//   __m512i weights(int v)     unsigned levels of vector v; 16 times those of the others if v is odd and
//                              kRaisedOdd
//   __m512 scale               of the lanes of the sums, which begin with (16 times that, if kRaisedOdd)
//   static void bias(const uint8_t* x, const ActQ8Layout&, int64_t chunk, uint8_t* out)   makes what they
//                              begin with, 128 bytes per token and 256 columns
//   template <class From> __m512i start(From bias, int step)   chooses among that (Columns), if needed
#pragma once
#include <type_traits>

#include "kernels/gemv/token_records.hpp"
#include "kernels/matmul/weight_prefetch.hpp"
#include "kernels/simd/byte_permutes.hpp"
#include "kernels/simd/lane_sums.hpp"

#if defined(__AVX512VNNI__)

namespace ikpy {
namespace points {

// Orders of 256 activations.
enum Order {
    kByElement8,  // element e of all 32 8-groups: vectors of 32 bytes
    kByElement4,  // element e of all 64 4-groups
    kByPair,      // step s, vector v: element v of the pairs in sub-blocks s, s + 2, s + 4, s + 6
};

// Where the bytes of a vector go before quadwords are moved, and from where the quadwords of each come.
struct Moves {
    uint8_t bytes[64];
    int64_t quads[4][8];
};
constexpr Moves moves_of_pairs() {
    Moves m = {};
    for (int i = 0; i < 64; ++i) m.bytes[i] = static_cast<uint8_t>(32 * (i / 32) + 2 * (i % 16) + i / 16 % 2);
    for (int v = 0; v < 4; ++v)
        for (int q = 0; q < 8; ++q)
            m.quads[v][q] = 64 * (q >> 1) + 32 * (v & 1) + 16 * (v >> 1) + 8 * (q & 1);
    return m;
}
constexpr Moves moves(Order order) {
    if (order == kByPair) return moves_of_pairs();
    Moves m = {};
    const int size = order == kByElement8 ? 8 : 4;
    for (int i = 0; i < 64; ++i) m.bytes[i] = static_cast<uint8_t>(i % (64 / size) * size + i / (64 / size));
    for (int v = 0; v < 4; ++v)
        for (int q = 0; q < 8; ++q) {
            const int by8 = 64 * (q & 3) + 8 * (2 * v + (q >> 2)), by4 = 64 * (q >> 1) + 16 * v + 8 * (q & 1);
            m.quads[v][q] = order == kByElement8 ? by8 : by4;
        }
    return m;
}

// What is kept of a chunk of one token: rearranged bytes, the scale of every lane, and the bias.
constexpr int64_t kScales = kChunk;
template <class P>
constexpr int64_t kBias = kScales + (P::kOrder == kByPair ? 128 : 64);
template <class P>
constexpr int64_t kRecord = kBias<P> + 128;

template <Order O>
IKPY_VBMI_INLINE void rearrange(const uint8_t* x, uint8_t* out) {
    alignas(64) static constexpr Moves kMoves = moves(O);
    alignas(64) uint8_t moved[kChunk];
    for (int v = 0; v < 4; ++v)
        _mm512_store_si512(moved + 64 * v, _mm512_permutexvar_epi8(_mm512_load_si512(kMoves.bytes),
                                                                   _mm512_loadu_si512(x + 64 * v)));
    for (int v = 0; v < 4; ++v)
        _mm512_store_si512(out + 64 * v,
                           _mm512_i64gather_epi64(_mm512_loadu_si512(kMoves.quads[v]), moved, 1));
}

// The scales of eight sub-blocks in the lanes of their sums.
template <Order O>
inline void lane_scales(const uint8_t* scale, uint8_t* out) {
    const __m512 s = _mm512_castps256_ps512(_mm256_loadu_ps(reinterpret_cast<const float*>(scale)));
    if constexpr (O == kByPair) {
        const __m512i even = _mm512_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6);
        const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
        _mm512_store_ps(out, _mm512_permutexvar_ps(even, s));
        _mm512_store_ps(out + 64, _mm512_permutexvar_ps(odd, s));
        return;
    }
    const __m512i lanes = O == kByElement8
                              ? _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7)
                              : _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    _mm512_store_ps(out, _mm512_permutexvar_ps(lanes, s));
}

// A part of a record. One: of those for one token on Zen 5, which hold what all rows share for each of them.
template <class P, bool One>
struct Columns {
    static constexpr int kCopies = One ? P::kRowsAtOnce : 1;
    const uint8_t* from;

    Columns operator+(int64_t bytes) const { return {from + bytes * kCopies}; }
    // The bytes of a step, the same for all rows.
    IKPY_VBMI_INLINE __m512i load(int step) const {
        const uint8_t* at = from + 64 / P::kRowsAtOnce * kCopies * step;
        if constexpr (One || P::kRowsAtOnce == 1) {
            return _mm512_load_si512(at);
        } else if constexpr (P::kRowsAtOnce == 2) {
            return _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i*>(at)));
        } else {
            return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(at)));
        }
    }
};

// Whether P chooses among what was prepared; otherwise the sums begin with the bytes of their step.
template <class P, class = void>
struct HasStart : std::false_type {};
template <class P>
struct HasStart<P, decltype(static_cast<void>(std::declval<const P&>().start(
                       std::declval<Columns<P, false>>(), 0)))> : std::true_type {};

template <class P, class From>
IKPY_VBMI_INLINE __m512i first_sums(const P& w, From bias, int step) {
    if constexpr (HasStart<P>::value) {
        return w.start(bias, step);
    } else {
        return bias.load(step);
    }
}

// How many steps are unpacked before they are multiplied.
template <class P, class = void>
constexpr int kTogether = 1;
template <class P>
constexpr int kTogether<P, std::void_t<decltype(P::kTogether)>> = P::kTogether;

template <class P, class = void>
struct HasFind : std::false_type {};
template <class P>
struct HasFind<P, decltype(P::find(std::declval<P (&)[1]>()))> : std::true_type {};

// Steps first .. first + S - 1 of several blocks of the rows, one block after the other.
template <class P, int S, class>
struct Unpacked;
template <class P, int S, size_t... I>
struct Unpacked<P, S, std::index_sequence<I...>> {
    P w[sizeof...(I)];

    IKPY_VBMI_INLINE Unpacked(const uint8_t* const (*rows)[P::kRowsAtOnce], int first)
        : w{P(rows[I / S], first + static_cast<int>(I % S))...} {
        if constexpr (HasFind<P>::value) P::find(w);
    }
};

template <class P, bool One, int NT>
IKPY_VBMI_INLINE void add_step(const P& w, int step, const Columns<P, One>* x, __m512* total) {
    constexpr int kSpan = kChunk / P::kVectors;
    __m512i even[NT], odd[NT];  // one sum unless kRaisedOdd
#pragma GCC unroll 16
    for (int t = 0; t < NT; ++t) {
        even[t] = _mm512_setzero_si512();
        odd[t] = first_sums(w, x[t] + kBias<P>, step);
    }
#pragma GCC unroll 8
    for (int v = 0; v < P::kVectors; ++v) {
        const __m512i codes = w.weights(v);
#pragma GCC unroll 16
        for (int t = 0; t < NT; ++t) {
            __m512i& sum = P::kRaisedOdd && v % 2 == 0 ? even[t] : odd[t];
            sum = _mm512_dpbusd_epi32(sum, codes, (x[t] + kSpan * v).load(step));
        }
    }
#pragma GCC unroll 16
    for (int t = 0; t < NT; ++t) {
        if (P::kRaisedOdd) odd[t] = _mm512_add_epi32(odd[t], _mm512_slli_epi32(even[t], 4));
        const __m512 scale = _mm512_castsi512_ps((x[t] + kScales).load(step));
        total[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(odd[t]), _mm512_mul_ps(w.scale, scale), total[t]);
    }
}

// Where what the streams of P will need is.
template <class P>
constexpr int kStreams = P::kInterleaved ? 1 : P::kRowsAtOnce;
template <class P>
struct StreamsAhead {
    SideBySideAt far, near;
    explicit StreamsAhead(int64_t stride)
        : far(kStreams<P>, stride, kPrefetch.into_l2), near(kStreams<P>, stride, kPrefetch.beside_into_l1) {}
};

// Adds the products of B blocks of kRowsAtOnce rows from block c on.
template <class P, bool One, int NT, int B>
IKPY_VBMI_INLINE void add_blocks(const uint8_t* const* rows, StreamsAhead<P>& ahead, int64_t c,
                                 const Columns<P, One>* x, __m512* total) {
    constexpr int kSteps = std::min(P::kSteps, kTogether<P>);
    static_assert(P::kSteps % kSteps == 0);
    const uint8_t* at[B][P::kRowsAtOnce];
    Columns<P, One> record[B][NT];
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
        const int64_t offset = (c + b) * P::kBlockBytes;
        const int64_t far = ahead.far.skip(), near = ahead.near.skip();
        ahead.far.move(P::kBlockBytes);
        ahead.near.move(P::kBlockBytes);
        for (int r = 0; r < kStreams<P>; ++r) {
            at[b][r] = rows[r] + P::kHeaderBytes + offset;
            if constexpr (kStreams<P> == 1)
                prefetch_weights<P::kBlockBytes>(at[b][r]);
            else
                prefetch_weights_beside<P::kBlockBytes>(at[b][r], far, near);
        }
#pragma GCC unroll 16
        for (int t = 0; t < NT; ++t) record[b][t] = x[t] + (c + b) * kRecord<P>;
    }
#pragma GCC unroll 4
    for (int step = 0; step < P::kSteps; step += kSteps) {
        const Unpacked<P, kSteps, std::make_index_sequence<B * kSteps>> steps(at, step);
#pragma GCC unroll 4
        for (int i = 0; i < B * kSteps; ++i)
            add_step<P, One, NT>(steps.w[i], step + i % kSteps, record[i / kSteps], total);
    }
}

// Products of kRowsAtOnce rows with NT tokens, in the lanes of total[t].
template <class P, bool One, int NT>
IKPY_VBMI_INLINE void multiply_rows(const uint8_t* const* rows, int64_t stride, int64_t n_chunks,
                                    const Columns<P, One>* x, __m512* total) {
    // Four blocks of more tokens need too many registers (IQ2_S, 8 tokens: 218 instead of 336 Gop/s).
    constexpr int kBlocks = P::kSteps > 1 ? 1 : NT <= 4 ? kTogether<P> : std::min(2, kTogether<P>);
    for (int t = 0; t < NT; ++t) total[t] = _mm512_setzero_ps();
    StreamsAhead<P> ahead(stride);
    int64_t c = 0;
    for (; c + kBlocks <= n_chunks; c += kBlocks) add_blocks<P, One, NT, kBlocks>(rows, ahead, c, x, total);
    if constexpr (kBlocks > 1)
        for (; c < n_chunks; ++c) add_blocks<P, One, NT, 1>(rows, ahead, c, x, total);
}

// Of the rows of a half; those beyond the last one repeat it. Lanes are summed for 16 rows at once: a sum at
// the end of every row of 4096 columns took a tenth of the time.
template <class P, bool One, int NT>
IKPY_VBMI void multiply_half(const RowBlock& rows, int h, const Columns<P, One>* x, float* out) {
    constexpr int R = P::kRowsAtOnce;
    __m512 totals[NT][kHalfRows] = {};
    for (int i = 0; i < rows.n[h]; i += R) {
        const uint8_t* at[R];
        __m512 total[NT];
        for (int r = 0; r < R; ++r) at[r] = rows.group(h, i + r, P::kInterleaved ? R : 1);
        multiply_rows<P, One, NT>(at, rows.stride, rows.n_in / kChunk, x, total);
        for (int t = 0; t < NT; ++t)
            for (int r = 0; r < R; ++r) {
                const auto lanes = static_cast<__mmask16>(0xFFFF >> (16 - 16 / R) << (16 / R * r));
                totals[t][i + r] = _mm512_maskz_mov_ps(lanes, total[t]);
            }
    }
    for (int t = 0; t < NT; ++t) {
        float* to = out + t * kBlockRows + h * kHalfRows;
        _mm512_storeu_ps(to, sums16(totals[t]));
        if constexpr (P::kHeaderBytes > 0)
            for (int i = 0; i < rows.n[h]; ++i) {
                constexpr int kGroup = P::kInterleaved ? R : 1;
                to[i] *= load_f16(rows.group(h, i, kGroup) + 2 * (i % kGroup));
            }
    }
}

// U unpacks rows that end inside a chunk. Up to Tokens tokens meet a row at once. One: a kernel of its own
// for one token, on Zen 5.
template <class P, class U, int Tokens, bool One = false>
struct Product {
    using Unpack = U;
    using From = Columns<P, One>;
    struct Record {
        alignas(64) uint8_t at[kRecord<P> * From::kCopies];
    };
    static constexpr int kTokens = Tokens;

    IKPY_VBMI static void prepare(const uint8_t* x, const ActQ8Layout& at, int64_t c, Record* out) {
        alignas(64) uint8_t own[kRecord<P>];
        uint8_t* to = One ? own : out->at;
        rearrange<P::kOrder>(x + c * kChunk, to);
        lane_scales<P::kOrder>(x + at.scale + c * kChunk / 8, to + kScales);
        P::bias(x, at, c, to + kBias<P>);
        if constexpr (One)
            for (int i = 0; i < kRecord<P> * P::kRowsAtOnce / 64; ++i)
                _mm512_store_si512(out->at + 64 * i, Columns<P, false>{own}.load(i));
    }
    template <int NT>
    static void multiply(const RowBlock& rows, const Record* const* x, float* out) {
        From from[NT];
        for (int t = 0; t < NT; ++t) from[t] = {x[t]->at};
        for (int h = 0; h < 2; ++h) multiply_half<P, One, NT>(rows, h, from, out);
    }
};

// Zen 5 loads 16 or 32 bytes to all of a vector by way of its permuting units, of which there are two, and
// these look points up: 8 to 28 such loads of 100 to 250 vector operations. A kernel K of its own for one
// token, whose records hold these bytes once for every row, has 1.04 to 1.17 times the rate. Records beyond
// the first-level cache (48 KiB) come from the second, which takes more than that from the fastest types:
// 0.77 with 100 KiB of IQ2_XXS_R4 (14,336 columns), 1.06 with 50 KiB of IQ2_XXS and Q1_0_G128.
constexpr int64_t kMostRecordBytes = 52 << 10;
template <class K, ProductFn Other>
void gemv_of_one(const RowBlock& rows, const TokenSet& tokens, float* out, uint8_t* work) {
    static const bool has_own = !has_free_broadcasts();
    const int64_t bytes = rows.n_in / kChunk * static_cast<int64_t>(sizeof(typename K::Record));
    if (has_own && tokens.n == 1 && bytes <= kMostRecordBytes)
        return gemv_of_records<K, Other>(rows, tokens, out, work);
    Other(rows, tokens, out, work);
}

// ExpertTokens: on average per expert, from which tiles multiply.
template <class P, class U, int Tokens, int PassTokens = 0, int64_t ExpertTokens = kTileMinExpertTokens>
constexpr WeightKernels kernels() {
    using Few = Product<P, U, Tokens>;
    WeightKernels k = record_kernels<Few, PassTokens>();
    k.tiles.min_expert_tokens = ExpertTokens;
    if constexpr (P::kRowsAtOnce > 1) {
        using Single = Product<P, U, 1, true>;
        static_assert(sizeof(typename Single::Record) <= Tokens * sizeof(typename Few::Record));
        k.gemv = gemv_of_one<Single, record_kernels<Few>().gemv>;
    }
    return k;
}

}  // namespace points
}  // namespace ikpy

#endif
