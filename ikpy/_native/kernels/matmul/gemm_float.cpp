#include "kernels/matmul/gemm_float.hpp"

#include <cstring>

#include "kernels/simd/half_rows.hpp"
#include "kernels/simd/transpose.hpp"

namespace ikpy {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kTileTokens = 12;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kTileTokens = 6;
#else
constexpr int kLanes = 4, kTileTokens = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));

// Two row vectors times NT tokens in registers.
template <int NT>
void tile(const float* panel, int64_t n, const uint8_t* const* x, int64_t k0, float* out, bool add) {
    Vec total[2][NT];
#pragma GCC unroll 12
    for (int t = 0; t < NT; ++t)
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v)
            total[v][t] = add ? *reinterpret_cast<const Vec*>(out + t * kBlockRows + v * kLanes) : Vec{};
    for (int64_t k = 0; k < n; ++k) {
        const Vec w0 = *reinterpret_cast<const Vec*>(panel),
                  w1 = *reinterpret_cast<const Vec*>(panel + kLanes);
        panel += kBlockRows;
#pragma GCC unroll 12
        for (int t = 0; t < NT; ++t) {
            const float v = load_unaligned<float>(x[t] + (k0 + k) * 4);
            total[0][t] += w0 * v;
            total[1][t] += w1 * v;
        }
    }
#pragma GCC unroll 12
    for (int t = 0; t < NT; ++t)
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) *reinterpret_cast<Vec*>(out + t * kBlockRows + v * kLanes) = total[v][t];
}

template <int NT>
void tile_of(int nt, const float* panel, int64_t n, const uint8_t* const* x, int64_t k0, float* out,
             bool add) {
    if (nt == NT) return tile<NT>(panel, n, x, k0, out, add);
    if constexpr (NT > 1) tile_of<NT - 1>(nt, panel, n, x, k0, out, add);
}

}  // namespace

void f32_panel_gemm(const float* panel, int64_t n, int n_halves, const uint8_t* const* x, int64_t k0,
                    int n_tokens, float* out, bool add) {
    const int n_tiles = (n_tokens + kTileTokens - 1) / kTileTokens;
    for (int i = 0; i < n_tiles; ++i) {
        const int begin = n_tokens * i / n_tiles, nt = n_tokens * (i + 1) / n_tiles - begin;
        // With one half and 16 lanes the second vector is computed in vain; its rows are never read.
        for (int r = 0; r < n_halves * kHalfRows; r += 2 * kLanes)
            tile_of<kTileTokens>(nt, panel + r, n, x + begin, k0, out + begin * kBlockRows + r, add);
    }
}

void pack_f32_rows(const float* const* rows, int64_t n, float* panel, int half) {
    panel += half * kHalfRows;
    int64_t k = 0;
#if defined(__AVX512F__)
    for (; k + 16 <= n; k += 16) {
        __m512i r[16];
#pragma GCC unroll 16
        for (int i = 0; i < kHalfRows; ++i) r[i] = _mm512_loadu_si512(rows[i] + k);
        transpose16(r);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) _mm512_storeu_si512(panel + (k + i) * kBlockRows, r[i]);
    }
#elif defined(__AVX2__)
    for (; k + 8 <= n; k += 8)
        for (int first = 0; first < kHalfRows; first += 8) {
            __m256i r[8];
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i)
                r[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[first + i] + k));
            transpose8(r);
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i)
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(panel + (k + i) * kBlockRows + first), r[i]);
        }
#endif
    for (; k < n; ++k)
        for (int i = 0; i < kHalfRows; ++i) panel[k * kBlockRows + i] = rows[i][k];
}

float f32_dot(const float* w, const float* x, int64_t n) {
    Vec total[4] = {};
    int64_t k = 0;
    for (; k + 4 * kLanes <= n; k += 4 * kLanes)
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v)
            total[v] += *reinterpret_cast<const Vec*>(w + k + v * kLanes) *
                        *reinterpret_cast<const Vec*>(x + k + v * kLanes);
    const Vec sum = (total[0] + total[1]) + (total[2] + total[3]);
    float result = 0.0f;
    for (int i = 0; i < kLanes; ++i) result += sum[i];
    for (; k < n; ++k) result += w[k] * x[k];
    return result;
}

}  // namespace ikpy
