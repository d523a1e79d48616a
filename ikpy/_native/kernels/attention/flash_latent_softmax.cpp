// Scores of latent attention between its two products: masks, soft caps and maxima.
#include <algorithm>

#include "kernels/attention/flash_latent_item.hpp"
#include "kernels/simd/simd_f32.hpp"

namespace ikpy {
namespace latent {

using simd::kLanes;
using simd::V;

namespace {

// Sums are scaled anew when a score exceeds the maximum by more than this many powers of two.
constexpr float kSlack = 8.0f;

// Soft cap and mask on the scores of 16 rows; cells from n on are masked. Returns the maxima. ld:
// between words of bits.
template <bool kMask, bool kCap>
V finish(float* s, int64_t n, float softcap, const uint32_t* bits, int64_t ld) {
    using namespace simd;
    const V cap = set1(softcap * kLog2e), low = set1(kMasked);
    for (int64_t c = n; c < kCells; ++c) store(s + c * kLanes, low);
    V top[4];
    for (V& each : top) each = set1(kNoMaximum);
    for (int64_t c = 0; c < kCells; c += 4) {
#pragma GCC unroll 4
        for (int64_t i = 0; i < 4; ++i) {
            float* at = s + (c + i) * kLanes;
            V x = load(at);
            if (kCap && c + i < n) x = mul(cap, simd::tanh(x));
            if (kMask) x = keep_if_bit(bits + ((c + i) >> 5) * ld, 1u << ((c + i) & 31), x, low);
            if (kMask || kCap) store(at, x);
            top[i] = simd::max(top[i], x);
        }
    }
    return simd::max(simd::max(top[0], top[1]), simd::max(top[2], top[3]));
}

V finish_lanes(const AttentionArgs& a, float* s, int64_t n, const uint32_t* bits, int64_t ld, bool masked) {
    const float cap = a.softcap;
    if (cap != 0.0f)
        return masked ? finish<true, true>(s, n, cap, bits, ld) : finish<false, true>(s, n, cap, bits, ld);
    return masked ? finish<true, false>(s, n, cap, bits, ld) : finish<false, false>(s, n, cap, bits, ld);
}

}  // namespace

Visibility visibility(const Problem& problem, const Item& item, int64_t c0, int64_t n, const Buffers& b) {
    const AttentionArgs& a = problem.a;
    uint32_t words[kWords];
    int64_t n_tokens = 0, n_all = 0, n_none = 0;
    for (int64_t r = 0; r < item.n_rows;) {
        const int64_t t = a.token_of(item.first_row + r);
        const int64_t end = std::min(item.n_rows, (t + 1) * a.heads_per_kv - item.first_row);
        const int visible = visible_bits(a, t, c0, n, words, kWords);
        n_all += visible == n;
        n_none += visible == 0;
        ++n_tokens;
        for (int w = 0; w < kWords; ++w)
            std::fill(b.bits + w * problem.shape.rows + r, b.bits + w * problem.shape.rows + end, words[w]);
        r = end;
    }
    return n_all == n_tokens ? Visibility::kAll : n_none == n_tokens ? Visibility::kNone : Visibility::kSome;
}

void scale_sums(const Problem& problem, const Buffers& b) {
    const Shape& shape = problem.shape;
    for (int64_t r = 0; r < shape.rows; ++r) {
        if (b.alpha[r] == 1.0f) continue;
        b.sum[r] *= b.alpha[r];
        float* o = sums_of(shape, r, b.o);
        const V alpha = simd::set1(b.alpha[r]);
        for (int64_t d = 0; d < shape.dv; d += kLanes, o += kRowUnit * kRowUnit)
            simd::store(o, simd::mul(alpha, simd::load(o)));
        if (!problem.has_middles) continue;
        float* mean = b.means + r / kRowUnit * kRowUnit * problem.value_blocks() + r % kRowUnit;
        for (int64_t i = 0; i < problem.value_blocks(); ++i) mean[i * kRowUnit] *= b.alpha[r];
    }
}

bool find_maxima(const Problem& problem, int64_t n, bool masked, const Buffers& b) {
    const int64_t rows = problem.shape.rows;
    for (int64_t m = 0; m < rows; m += kRowUnit) {
        const V top = finish_lanes(problem.a, b.s + m * kCells, n, b.bits + m, rows, masked);
        simd::store(b.block_top + m, top);
    }
    bool rises = false;
    for (int64_t r = 0; r < rows; ++r) {
        const float reference = b.block_top[r] - problem.products->lift;
        const bool above = reference > b.top[r] + kSlack;
        const float top = above ? reference : b.top[r];
        b.alpha[r] = above ? b.top[r] - top : 0.0f;
        b.top[r] = top;
        rises |= above;
    }
    if (!rises) return false;
    for (int64_t m = 0; m < rows; m += kLanes) simd::store(b.alpha + m, simd::exp2(simd::load(b.alpha + m)));
    return true;
}

}  // namespace latent
}  // namespace ikpy
