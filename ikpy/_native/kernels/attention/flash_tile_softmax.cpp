// Scores to weights in the tile kernel.
#include "kernels/attention/flash_dots.hpp"
#include "kernels/attention/flash_tile.hpp"

namespace ikpy {
namespace row_tiles {
namespace {

using simd::kLanes;
using simd::V;

// Soft cap and mask on the scores of one vector of lanes; returns their maximum.
template <bool kMask, bool kCap>
V finish_vector(float* s, const TileBuffers& b, const Part& part, int64_t m, float softcap) {
    using namespace simd;
    V top = set1(kMasked);
    const V factor = load(b.factor + m), cap = div(set1(softcap * kLog2e), factor), low = set1(kMasked);
    for (int64_t c = part.begin; c < part.end; ++c) {
        V x = load(s + c * b.row);
        if (kCap) x = mul(cap, simd::tanh(mul(factor, x)));
        if (kMask) x = keep_if_bit(b.bits + (c >> 5) * b.lanes + m, 1u << (c & 31), x, low);
        if (kMask || kCap) store(s + c * b.row, x);
        top = simd::max(top, x);
    }
    return mul(factor, top);
}

// Turns the scores of one vector of lanes into weights; returns their sum.
V exp2_scores(float* s, const TileBuffers& b, const Part& part, V top) {
    using namespace simd;
    V total = zero();
    for (int64_t c = part.begin; c < part.end; ++c) {
        const V p = simd::exp2(sub(load(s + c * b.row), top));
        store(s + c * b.row, p);
        total = add(total, p);
    }
    return total;
}

// Takes off what the distances of the cells at these positions cost the scores of one vector of lanes, and
// masks all of them; returns their maximum.
V finish_biased(float* s, const TileBuffers& b, const Part& part, int64_t m, const int32_t* cell_pos,
                bool masked) {
    using namespace simd;
    const V factor = load(b.factor + m), own = load(b.position + m), low = set1(kMasked);
    const V slope = div(sub(zero(), load(b.slope + m)), factor);
    V top = low;
    for (int64_t c = part.begin; c < part.end; ++c) {
        const V distance = simd::abs(sub(own, set1(float(cell_pos[c]))));
        V x = fma(slope, distance, load(s + c * b.row));
        if (masked) x = keep_if_bit(b.bits + (c >> 5) * b.lanes + m, 1u << (c & 31), x, low);
        store(s + c * b.row, x);
        top = simd::max(top, x);
    }
    return mul(factor, top);
}

// Adds the biases of the differences of positions to the scores of one vector of lanes, and masks all of
// them; returns their maximum.
V finish_differences(const AttentionArgs& a, float* s, const TileBuffers& b, const Part& part, int64_t m,
                     const int32_t* cell_pos, bool masked) {
    using namespace simd;
    const V factor = load(b.factor + m), own = load(b.position + m), low = set1(kMasked);
    const V unit = div(set1(kLog2e), factor), first = load(b.slope + m);
    const V most = set1(float(a.farthest)), least = set1(-float(a.farthest));
    const float* const middle = a.biases_of(0);
    V top = low;
    for (int64_t c = part.begin; c < part.end; ++c) {
        const V difference = simd::max(simd::min(sub(set1(float(cell_pos[c])), own), most), least);
        V x = fma(unit, gather(middle, add(first, difference)), load(s + c * b.row));
        if (masked) x = keep_if_bit(b.bits + (c >> 5) * b.lanes + m, 1u << (c & 31), x, low);
        store(s + c * b.row, x);
        top = simd::max(top, x);
    }
    return mul(factor, top);
}

}  // namespace

V finish_scores(const AttentionArgs& a, float* s, const TileBuffers& b, const Part& part, int64_t m,
                int64_t c0, bool masked) {
    if (a.biased()) {
        if (a.softcap != 0.0f) finish_vector<false, true>(s, b, part, m, a.softcap);
        if (a.biases) return finish_differences(a, s, b, part, m, a.cell_pos + c0, masked);
        return finish_biased(s, b, part, m, a.cell_pos + c0, masked);
    }
    if (a.softcap != 0.0f) {
        return masked ? finish_vector<true, true>(s, b, part, m, a.softcap)
                      : finish_vector<false, true>(s, b, part, m, a.softcap);
    }
    return masked ? finish_vector<true, false>(s, b, part, m, 0.0f)
                  : finish_vector<false, false>(s, b, part, m, 0.0f);
}

void online_softmax(const AttentionArgs& a, const TileBuffers& b, const Part& part, int64_t c0, bool masked) {
    using namespace simd;
    for (int64_t m = part.m; m < part.m + part.lanes; m += kLanes) {
        float* s = b.s + b.lane(m, b.s_rows);
        const V before = load(b.maximum + m);
        V top = simd::max(before, finish_scores(a, s, b, part, m, c0, masked));
        if (b.p2.hi) top = flash::raised(before, top, b.lift());
        const V total = b.p2.hi
                            ? flash::exp2_pairs(b.v_factors, s + part.begin * b.row, part.end - part.begin,
                                                load(b.factor + m), top, offset(b.p2, m * kTileCells))
                            : exp2_scores(s, b, part, top);
        const V alpha = simd::exp2(sub(before, top));
        store(b.alpha + m, alpha);
        store(b.maximum + m, top);
        store(b.sum + m, fma(load(b.sum + m), alpha, total));
    }
}

void full_weights(const TileBuffers& b, int64_t n_cells) {
    for (int64_t c = 0; c < n_cells; ++c) {
        for (int64_t m = 0; m < b.lanes; m += kLanes) {
            float* s = b.s + c * b.row + b.lane(m, b.s_rows);
            const V top = simd::load(b.maximum + m);
            const V p = simd::exp2(simd::sub(simd::mul(simd::load(s), simd::load(b.factor + m)), top));
            simd::store(s, b.v_factors == TileFactors::kBf16 ? flash::rounded(p) : p);
            for (int i = 0; i < kLanes; ++i) b.total[m + i] += double(s[i]);
        }
    }
}

}  // namespace row_tiles

}  // namespace ikpy
