#include "kernels/attention/flash_dots.hpp"

#include <algorithm>
#include <stdexcept>

#include "kernels/cpu_makers.hpp"
#include "kernels/simd/bf16_dots.hpp"
#include "kernels/simd/bf16_halves.hpp"
#include "kernels/simd/half_rows.hpp"

namespace ikpy {
namespace flash {

#if defined(__AVX512F__) && defined(__linux__)

namespace {

constexpr int64_t kLaneGroup = 16;
constexpr int kMostGroups = 4;
// Rows that divide 16, of which up to 24 sums stay in registers.
constexpr int rows_at_once(int groups) { return groups == 1 ? 16 : groups == 4 ? 4 : 8; }

// H rows and N groups of lanes.
template <int H, int N>
IKPY_BF16 void block(const uint16_t* a, int64_t lda, const uint16_t* b, int64_t b_next, int64_t depth,
                     float* c, int64_t c_next, bool add) {
    __m512 sum[H][N];
#pragma GCC unroll 16
    for (int i = 0; i < H; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j)
            sum[i][j] = add ? _mm512_loadu_ps(c + i * kLaneGroup + j * c_next) : _mm512_setzero_ps();
    for (int64_t k = 0; k < depth; k += 2) {
        __m512i x[N];
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) x[j] = _mm512_loadu_si512(b + j * b_next + k * kLaneGroup);
#pragma GCC unroll 16
        for (int i = 0; i < H; ++i) {
            const __m512i pair =
                _mm512_set1_epi32(load_unaligned<int32_t>(reinterpret_cast<const uint8_t*>(a + i * lda + k)));
#pragma GCC unroll 4
            for (int j = 0; j < N; ++j) sum[i][j] = add_bf16_dots(sum[i][j], x[j], pair);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < H; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) _mm512_storeu_ps(c + i * kLaneGroup + j * c_next, sum[i][j]);
}

// The lanes of b stay in the first-level cache while all rows meet them.
template <int N>
void multiply(const LeftTiles& a, const uint16_t* b, int64_t b_next, int64_t depth, float* c, int64_t c_next,
              bool add, int64_t share, Prefetch& next) {
    constexpr int H = rows_at_once(N);
    for (int64_t r = 0; r < a.n_rows; r += H) {
        if (r % kLaneGroup == 0) next.advance(share);
        block<H, N>(a.at.hi + r * a.ld, a.ld, b, b_next, depth, c + r * kLaneGroup, c_next, add);
    }
}

}  // namespace

bool multiplies_bf16() {
    static const bool available = has_fast_bf16_dots();
    return available;
}

simd::V rounded(simd::V x) { return split_rounded(x).hi; }

void dot_product(const LeftTiles& a, const RightTiles& b, int64_t n_lanes, int64_t depth, const SumTiles& c,
                 bool add, Prefetch& next) {
    static constexpr decltype(&multiply<1>) kernels[kMostGroups] = {multiply<1>, multiply<2>, multiply<3>,
                                                                    multiply<4>};
    const int64_t n_groups = n_lanes / kLaneGroup, row_groups = (a.n_rows + kLaneGroup - 1) / kLaneGroup;
    const int64_t turns = (n_groups + kMostGroups - 1) / kMostGroups * row_groups;
    const int64_t share = (next.rows + turns - 1) / turns;
    for (int64_t g = 0; g < n_groups; g += kMostGroups) {
        const int64_t n = std::min<int64_t>(kMostGroups, n_groups - g);
        kernels[n - 1](a, b.at.hi + g * b.to_next, b.to_next, depth, c.at + g * c.to_next, c.to_next, add,
                       share, next);
    }
}

#else

bool multiplies_bf16() { return false; }
simd::V rounded(simd::V x) { return x; }
void dot_product(const LeftTiles&, const RightTiles&, int64_t, int64_t, const SumTiles&, bool, Prefetch&) {
    throw std::logic_error("this build has no dot products of bf16");
}

#endif

}  // namespace flash
}  // namespace ikpy
