#include "kernels/flash_middles.hpp"

#include <algorithm>

#include "kernels/flash_codes.hpp"
#include "kernels/half_rows.hpp"
#include "kernels/kv_types.hpp"
#include "kernels/simd_f32.hpp"

namespace ikpy {
namespace flash {

using simd::kLanes;
using simd::V;

void read_middles(int type, const uint8_t* rows, int64_t stride, int64_t n, int64_t n_blocks, float* to) {
    const V code = simd::set1(float(kv::middle_code(type)));
    const int64_t bytes = kv::row_bytes(type, 1);
    uint16_t scales[kCodeCells] = {}, minima[kCodeCells] = {};
    float scale[kCodeCells], minimum[kCodeCells];
    for (int64_t b = 0; b < n_blocks; ++b, rows += bytes, to += kCodeCells) {
        for (int64_t c = 0; c < n; ++c) {
            const uint32_t both = load_unaligned<uint32_t>(rows + c * stride);
            scales[c] = uint16_t(both);
            minima[c] = uint16_t(both >> 16);
        }
        f16_to_f32_row(scales, scale, kCodeCells);
        f16_to_f32_row(minima, minimum, kCodeCells);
        for (int64_t c = 0; c < kCodeCells; c += kLanes)
            simd::store(to + c, simd::fma(code, simd::load(scale + c), simd::load(minimum + c)));
    }
}

void sum_blocks(const float* x, int64_t n_blocks, float* to) {
    for (int64_t b = 0; b < n_blocks; ++b, x += 32) {
        V total = simd::zero();
        for (int64_t d = 0; d < 32; d += kLanes) total = simd::add(total, simd::load(x + d));
        to[b] = simd::sum(total);
    }
}

void add_middles_to_scores(const float* middles, const float* sums, int64_t rows, int64_t n_blocks, int64_t n,
                           float* s, int64_t lds) {
    for (int64_t r = 0; r < rows; ++r, s += lds, sums += n_blocks)
        for (int64_t c = 0; c < n; c += kLanes) {
            V x = simd::load(s + c);
            for (int64_t b = 0; b < n_blocks; ++b)
                x = simd::fma(simd::set1(sums[b]), simd::load(middles + b * kCodeCells + c), x);
            simd::store(s + c, x);
        }
}

void add_middles_to_outputs(const float* middles, const float* p, int64_t ldp, int64_t rows, int64_t n_blocks,
                            int64_t n, float* o, int64_t ldo) {
    for (int64_t b = 0; b < n_blocks; ++b, middles += kCodeCells, o += 32)
        for (int64_t r = 0; r < rows; ++r) {
            V total = simd::zero();
            for (int64_t c = 0; c < n; c += kLanes)
                total = simd::fma(simd::load(p + r * ldp + c), simd::load(middles + c), total);
            const V more = simd::set1(simd::sum(total));
            for (float* to = o + r * ldo; to < o + r * ldo + 32; to += kLanes)
                simd::store(to, simd::add(simd::load(to), more));
        }
}

}  // namespace flash
}  // namespace ikpy
