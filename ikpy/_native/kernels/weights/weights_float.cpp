// Kernels of F32, F16 and BF16 weights with f32 activations.
#include <algorithm>

#include "ikpy/tensor.hpp"
#include "kernels/matmul/activations.hpp"
#include "kernels/matmul/gemm_bf16.hpp"
#include "kernels/matmul/gemm_f16.hpp"
#include "kernels/matmul/gemm_float.hpp"
#include "kernels/matmul/weight_prefetch.hpp"
#include "kernels/simd/half_rows.hpp"
#include "kernels/simd/lane_sums.hpp"
#include "kernels/simd/simd_f32.hpp"
#include "kernels/weights/weight_kernels.hpp"

namespace ikpy {
namespace {

// Row products need no unpacking: only the loads of the activations make them slower than panels, which pays
// for the panel from about kGemvTokens on. A row meets kGroupTokens at once; with long vectors a second pass
// over the rows would cost more.
#if defined(__AVX512F__)
constexpr int kGemvTokens = 24, kGroupTokens = 6;
#elif !defined(__AVX2__)
constexpr int kGemvTokens = 12, kGroupTokens = 8;
#else
constexpr int kGemvTokens = 18, kGroupTokens = 6;
#endif

struct ReadF32 {
    static constexpr int kBytes = 4;
    static void read(const uint8_t* p, float* y, int64_t n) { std::memcpy(y, p, sizeof(float) * n); }
#if defined(__AVX2__)
    static simd::V lanes(const uint8_t* p) { return simd::load(reinterpret_cast<const float*>(p)); }
#endif
};

struct ReadF16 {
    static constexpr int kBytes = 2;
    static void read(const uint8_t* p, float* y, int64_t n) {
        f16_to_f32_row(reinterpret_cast<const uint16_t*>(p), y, n);
    }
#if defined(__AVX512F__)
    static simd::V lanes(const uint8_t* p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
#elif defined(__AVX2__)
    static simd::V lanes(const uint8_t* p) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
#endif
};

struct ReadBf16 {
    static constexpr int kBytes = 2;
    static void read(const uint8_t* p, float* y, int64_t n) {
        bf16_to_f32_row(reinterpret_cast<const uint16_t*>(p), y, n);
    }
#if defined(__AVX512F__)
    static simd::V lanes(const uint8_t* p) {
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
        return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }
#elif defined(__AVX2__)
    static simd::V lanes(const uint8_t* p) {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    }
#endif
};

// work: panel f32 [columns][32], then 16 rows of `columns` f32.
template <class R>
void float_panel(const RowBlock& rows, int64_t k0, int64_t n, float* panel) {
    float* buffer = panel + kFloatPanelColumns * kBlockRows;
    for (int h = 0; h < rows.halves(); ++h) {
        const float* lines[kHalfRows];
        for (int i = 0; i < kHalfRows; ++i) {
            R::read(rows.row(h, i) + k0 * R::kBytes, buffer + i * kFloatPanelColumns, n);
            lines[i] = buffer + i * kFloatPanelColumns;
        }
        pack_f32_rows(lines, n, panel, h);
    }
}

// Panels of all blocks meet the same columns of the tokens before the next ones are read.
template <void (*Panel)(const RowBlock&, int64_t k0, int64_t n, float* panel)>
void float_gemm(const RowBlock* blocks, int n_blocks, const TokenSet& tokens, float* out, uint8_t* work) {
    auto* panel = reinterpret_cast<float*>(work);
    for (int64_t k0 = 0; k0 < blocks[0].n_in; k0 += kFloatPanelColumns) {
        const int64_t n = std::min(kFloatPanelColumns, blocks[0].n_in - k0);
        for (int b = 0; b < n_blocks; ++b) {
            Panel(blocks[b], k0, n, panel);
            f32_panel_gemm(panel, n, blocks[b].halves(), tokens.x, k0, tokens.n,
                           out + static_cast<int64_t>(b) * tokens.n * kBlockRows, k0 > 0);
        }
    }
}

#if defined(__AVX2__)

// The last n elements of a row in the first lanes, zeros in the others.
template <class R>
simd::V last_lanes(const uint8_t* p, int64_t n) {
    alignas(64) uint8_t padded[simd::kLanes * R::kBytes] = {};
    std::memcpy(padded, p, n * R::kBytes);
    return R::lanes(padded);
}

// Products of NR rows with NT tokens; the lanes of sums[t * kHalfRows + i] are still to be added up. Every
// sum is made in the same order whatever NR and NT are; that of a token alone is another one (dot_row).
template <class R, int NR, int NT>
void dot_lanes(const RowBlock& rows, int h, int first, const uint8_t* const* x, simd::V* sums) {
    const uint8_t* w[NR];
    simd::V total[NR][NT];
#pragma GCC unroll 4
    for (int i = 0; i < NR; ++i) {
        w[i] = rows.row(h, first + i);
#pragma GCC unroll 8
        for (int t = 0; t < NT; ++t) total[i][t] = simd::zero();
    }
    auto add = [&](int64_t k, bool whole) __attribute__((always_inline)) {
        simd::V lanes[NR];
#pragma GCC unroll 4
        for (int i = 0; i < NR; ++i)
            lanes[i] =
                whole ? R::lanes(w[i] + k * R::kBytes) : last_lanes<R>(w[i] + k * R::kBytes, rows.n_in - k);
#pragma GCC unroll 8
        for (int t = 0; t < NT; ++t) {
            simd::V v = simd::load(reinterpret_cast<const float*>(x[t]) + k);
            if (NR > 1) asm("" : "+v"(v));  // one load, not an operand in memory of every product
#pragma GCC unroll 4
            for (int i = 0; i < NR; ++i) total[i][t] = simd::fma(lanes[i], v, total[i][t]);
        }
    };
    int64_t k = 0;
    const LinesAhead lines_ahead(NR, rows.stride);
    constexpr int kStep = 64 / R::kBytes;  // a cache line of weights
    for (; k + kStep <= rows.n_in; k += kStep) {
        const int64_t ahead = lines_ahead.at(k * R::kBytes);
#pragma GCC unroll 4
        for (int i = 0; i < NR; ++i) prefetch_line(w[i] + ahead);
#pragma GCC unroll 4
        for (int c = 0; c < kStep; c += simd::kLanes) add(k + c, true);
    }
    for (; k + simd::kLanes <= rows.n_in; k += simd::kLanes) add(k, true);
    if (k < rows.n_in) add(k, false);
#pragma GCC unroll 4
    for (int i = 0; i < NR; ++i)
#pragma GCC unroll 8
        for (int t = 0; t < NT; ++t) sums[t * kHalfRows + i] = total[i][t];
}

// The lanes of a row's product with one token. Rows one behind the other read memory faster than four side by
// side (Zen 5, one thread, GB/s: F16 25.5 and 36.2, F32 30.3 and 37.5).
template <class R>
simd::V dot_row(const uint8_t* w, int64_t n_in, const float* x) {
    constexpr int kChains = 4;
    simd::V total[kChains];
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) total[c] = simd::zero();
    int64_t k = 0;
    for (; k + kChains * simd::kLanes <= n_in; k += kChains * simd::kLanes) {
        prefetch_weights<kChains * simd::kLanes * R::kBytes>(w + k * R::kBytes);
#pragma GCC unroll 4
        for (int c = 0; c < kChains; ++c) {
            const int64_t at = k + c * simd::kLanes;
            total[c] = simd::fma(R::lanes(w + at * R::kBytes), simd::load(x + at), total[c]);
        }
    }
    for (; k + simd::kLanes <= n_in; k += simd::kLanes)
        total[0] = simd::fma(R::lanes(w + k * R::kBytes), simd::load(x + k), total[0]);
    if (k < n_in)
        total[0] = simd::fma(last_lanes<R>(w + k * R::kBytes, n_in - k), simd::load(x + k), total[0]);
    return simd::add(simd::add(total[0], total[1]), simd::add(total[2], total[3]));
}

// The lanes of 16 rows at once where vectors are long: a quarter of the work that single rows would be.
inline void add_lanes(const simd::V* sums, float* out) {
#if defined(__AVX512F__)
    simd::store(out, sums16(sums));
#else
    for (int i = 0; i < kHalfRows; ++i) out[i] = simd::sum(sums[i]);
#endif
}

template <class R, int NT>
void dot_half(const RowBlock& rows, int h, const uint8_t* const* x, float* out) {
#if defined(__AVX512F__)
    constexpr int kRows = NT <= 6 ? 4 : 3;  // up to 24 of 32 registers hold sums
#else
    constexpr int kRows = NT <= 2 ? 4 : 2;  // up to 12 of 16
#endif
    simd::V sums[NT * kHalfRows];
    int i = 0;
    if constexpr (NT == 1) {
        for (; i < rows.n[h]; ++i)
            sums[i] = dot_row<R>(rows.row(h, i), rows.n_in, reinterpret_cast<const float*>(x[0]));
    } else {
        for (; i + kRows <= rows.n[h]; i += kRows) dot_lanes<R, kRows, NT>(rows, h, i, x, sums + i);
        for (; i < rows.n[h]; ++i) dot_lanes<R, 1, NT>(rows, h, i, x, sums + i);
    }
    for (; i < kHalfRows; ++i)
        for (int t = 0; t < NT; ++t) sums[t * kHalfRows + i] = simd::zero();
    for (int t = 0; t < NT; ++t) add_lanes(sums + t * kHalfRows, out + t * kBlockRows);
}

#else

template <class R, int NT>
void dot_row(const uint8_t* row, int64_t n_in, const uint8_t* const* x, float* out) {
    float buffer[kFloatPanelColumns];
    float total[NT] = {};
    for (int64_t k = 0; k < n_in; k += kFloatPanelColumns) {
        const int64_t n = std::min(kFloatPanelColumns, n_in - k);
        R::read(row + k * R::kBytes, buffer, n);
        for (int t = 0; t < NT; ++t) total[t] += f32_dot(buffer, reinterpret_cast<const float*>(x[t]) + k, n);
    }
    for (int t = 0; t < NT; ++t) out[t * kBlockRows] = total[t];
}

template <class R, int NT>
void dot_half(const RowBlock& rows, int h, const uint8_t* const* x, float* out) {
    for (int i = 0; i < rows.n[h]; ++i) dot_row<R, NT>(rows.row(h, i), rows.n_in, x, out + i);
}

#endif

template <class R, int NT>
void dot_rows(const RowBlock& rows, const uint8_t* const* x, int n_tokens, float* out) {
    if (n_tokens == NT) {
        for (int h = 0; h < 2; ++h)
            if (rows.n[h] > 0) dot_half<R, NT>(rows, h, x, out + h * kHalfRows);
    } else if constexpr (NT > 1) {
        dot_rows<R, NT - 1>(rows, x, n_tokens, out);
    }
}

template <class R>
void float_gemv(const RowBlock& rows, const TokenSet& tokens, float* out, uint8_t*) {
    const int n_groups = (tokens.n + kGroupTokens - 1) / kGroupTokens;
    for (int i = 0; i < n_groups; ++i) {
        const int begin = tokens.n * i / n_groups, end = tokens.n * (i + 1) / n_groups;
        dot_rows<R, kGroupTokens>(rows, tokens.x + begin, end - begin, out + begin * kBlockRows);
    }
}

size_t float_work_bytes(int64_t) { return (kFloatPanelColumns * (kBlockRows + kHalfRows)) * sizeof(float); }

template <class R>
constexpr WeightKernels float_kernels(int type) {
    return {type, kActF32, kGemvTokens, float_gemv<R>, float_gemm<float_panel<R>>, float_work_bytes};
}

WeightKernels f16_kernels() {
    WeightKernels kernels = float_kernels<ReadF16>(kF16);
    kernels.tiles = f16_tile_kernels();
    return kernels;
}

// BF16_R16: dwords hold two columns of a row, 16 rows next to each other.
void interleaved_bf16_panel(const RowBlock& rows, int64_t k0, int64_t n, float* panel) {
    for (int h = 0; h < rows.halves(); ++h) {
        const uint8_t* group = rows.group(h, 0, kHalfRows) + k0 * kHalfRows * 2;
        for (int64_t k = 0; k < n; k += 2)
            for (int i = 0; i < kHalfRows; ++i) {
                const uint32_t pair = load_unaligned<uint32_t>(group + (k * kHalfRows + 2 * i) * 2);
                const uint32_t bits[2] = {pair << 16, pair & 0xFFFF0000};
                float* at = panel + k * kBlockRows + h * kHalfRows + i;
                std::memcpy(at, bits, 4);
                std::memcpy(at + kBlockRows, bits + 1, 4);
            }
    }
}

#if defined(__AVX2__)
#if defined(__AVX512F__)
inline simd::V even_columns(const uint8_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
}
inline simd::V odd_columns(const uint8_t* p) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), upper));
}
#else
inline simd::V even_columns(const uint8_t* p) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), 16));
}
inline simd::V odd_columns(const uint8_t* p) {
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xFFFF0000));
    return _mm256_castsi256_ps(
        _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), upper));
}
#endif

// Products of 16 rows of BF16_R16, a row to a lane. n: columns, an even number.
template <int NT>
void dot_group(const uint8_t* group, int64_t n, const uint8_t* const* x, float* out) {
    constexpr int kVectors = kHalfRows / simd::kLanes, kBytes = 4 * kHalfRows;  // of two columns
    simd::V total[NT][kVectors][2];
#pragma GCC unroll 4
    for (int t = 0; t < NT; ++t)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) total[t][v][0] = total[t][v][1] = simd::zero();
    for (int64_t k = 0; k < n; k += 2, group += kBytes) {
        prefetch_weights<kBytes>(group);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
            const simd::V even = even_columns(group + 4 * simd::kLanes * v);
            const simd::V odd = odd_columns(group + 4 * simd::kLanes * v);
#pragma GCC unroll 4
            for (int t = 0; t < NT; ++t) {
                const float* columns = reinterpret_cast<const float*>(x[t]) + k;
                total[t][v][0] = simd::fma(even, simd::set1(columns[0]), total[t][v][0]);
                total[t][v][1] = simd::fma(odd, simd::set1(columns[1]), total[t][v][1]);
            }
        }
    }
#pragma GCC unroll 4
    for (int t = 0; t < NT; ++t)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v)
            simd::store(out + t * kBlockRows + v * simd::kLanes, simd::add(total[t][v][0], total[t][v][1]));
}

constexpr int kGroupsTokens = simd::kLanes == kHalfRows ? 4 : 2;

template <int NT>
void dot_groups(const RowBlock& rows, const uint8_t* const* x, int n_tokens, float* out) {
    if (n_tokens == NT) {
        for (int h = 0; h < rows.halves(); ++h)
            dot_group<NT>(rows.group(h, 0, kHalfRows), rows.n_in, x, out + h * kHalfRows);
    } else if constexpr (NT > 1) {
        dot_groups<NT - 1>(rows, x, n_tokens, out);
    }
}

void group_gemv(const RowBlock& rows, const TokenSet& tokens, float* out, uint8_t*) {
    for (int t = 0; t < tokens.n; t += kGroupsTokens)
        dot_groups<kGroupsTokens>(rows, tokens.x + t, std::min(kGroupsTokens, tokens.n - t),
                                  out + t * kBlockRows);
}

constexpr WeightKernels kInterleaved = {
    kTypeBf16R16, kActF32, kGroupsTokens, group_gemv, float_gemm<interleaved_bf16_panel>, float_work_bytes};
#else
constexpr WeightKernels kInterleaved = {
    kTypeBf16R16, kActF32, 0, nullptr, float_gemm<interleaved_bf16_panel>, float_work_bytes};
#endif

}  // namespace

void f16_row_products(const RowBlock& rows, const uint8_t* const* x, int n_tokens, float* out,
                      uint8_t* work) {
    float_gemv<ReadF16>(rows, {x, n_tokens, true}, out, work);
}

const WeightKernels* float_weight_kernels(int type) {
    if (const WeightKernels* k = bf16_dot_kernels(type)) return k;
    // Made when first asked for: which tile products there are may take a trial.
    static const WeightKernels table[] = {float_kernels<ReadF32>(kF32), f16_kernels(),
                                          float_kernels<ReadBf16>(kBF16), kInterleaved};
    for (const WeightKernels& k : table)
        if (k.type == type) return &k;
    return nullptr;
}

}  // namespace ikpy
