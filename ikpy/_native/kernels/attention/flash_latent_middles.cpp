// What the products of latent attention leave out of types whose blocks have a minimum (flash_middles.hpp).
#include <algorithm>
#include <cstring>

#include "kernels/attention/flash_latent_item.hpp"
#include "kernels/attention/flash_middles.hpp"
#include "kernels/simd/simd_f32.hpp"

namespace ikpy {
namespace latent {

using simd::kLanes;
using simd::V;

constexpr int kChains = 8;  // of additions at once

void sum_query_blocks(const Problem& problem, const Buffers& b) {
    const int64_t rows = problem.shape.rows;
    std::memset(b.q_sums, 0, size_t(problem.blocks() * rows) * sizeof(float));
    for (int64_t d = 0; d < problem.shape.dk(); ++d)
        for (int64_t m = 0; m < rows; m += kLanes) {
            float* sums = b.q_sums + d / 32 * rows + m;
            simd::store(sums, simd::add(simd::load(sums), simd::load(b.q + d * rows + m)));
        }
}

void read_middles(const Problem& problem, const Cells& cells, const Buffers& b) {
    float* to = b.middles;
    for (int i = 0; i < problem.shape.n_segments; ++i) {
        const int64_t n_blocks = problem.shape.size[i] / 32;
        flash::read_middles(problem.keys[i]->type, cells.rows[i], cells.stride[i], kCells, n_blocks, to);
        to += n_blocks * kCells;
    }
}

void add_middles_to_scores(const Problem& problem, const Buffers& b) {
    const int64_t rows = problem.shape.rows, n_blocks = problem.blocks();
    for (int64_t m = 0; m < rows; m += kLanes) {
        float* s = b.s + m / kRowUnit * kRowUnit * kCells + m % kRowUnit;
        for (int64_t c = 0; c < kCells; c += kChains, s += kChains * kRowUnit) {
            V x[kChains];
            for (int j = 0; j < kChains; ++j) x[j] = simd::load(s + j * kRowUnit);
            for (int64_t i = 0; i < n_blocks; ++i) {
                const V sums = simd::load(b.q_sums + i * rows + m);
                const float* middles = b.middles + i * kCells + c;
                for (int j = 0; j < kChains; ++j) x[j] = simd::fma(sums, simd::set1(middles[j]), x[j]);
            }
            for (int j = 0; j < kChains; ++j) simd::store(s + j * kRowUnit, x[j]);
        }
    }
}

void add_weighted_middles(const Problem& problem, const Buffers& b) {
    const int64_t n_blocks = problem.value_blocks();
    const float* middles = b.middles + problem.first_value_block() * kCells;
    for (int64_t m = 0; m < problem.shape.rows; m += kLanes) {
        V weight[kCells];
        const float* s = b.s + m / kRowUnit * kRowUnit * kCells + m % kRowUnit;
        for (int64_t c = 0; c < kCells; ++c)
            weight[c] = simd::exp2(simd::sub(simd::load(s + c * kRowUnit), simd::load(b.top + m)));
        float* mean = b.means + m / kRowUnit * kRowUnit * n_blocks + m % kRowUnit;
        for (int64_t i = 0; i < n_blocks; i += kChains) {
            const int n = int(std::min<int64_t>(kChains, n_blocks - i));
            V x[kChains];
            // Blocks that do not exist are another time the last one.
            const float* of[kChains];
            for (int j = 0; j < kChains; ++j) {
                x[j] = simd::zero();
                of[j] = middles + (i + std::min(j, n - 1)) * kCells;
            }
            for (int64_t c = 0; c < kCells; ++c)
                for (int j = 0; j < kChains; ++j) x[j] = simd::fma(weight[c], simd::set1(of[j][c]), x[j]);
            for (int j = 0; j < n; ++j, mean += kRowUnit)
                simd::store(mean, simd::add(simd::load(mean), x[j]));
        }
    }
}

void add_means_to_sums(const Problem& problem, const Buffers& b) {
    const Shape& shape = problem.shape;
    float* o = b.o;
    for (int64_t m = 0; m < shape.rows; m += kRowUnit)
        for (int64_t d = 0; d < shape.dv; d += kRowUnit)
            for (int64_t r = 0; r < kRowUnit; ++r, o += kRowUnit) {
                const V mean = simd::set1(b.means[(m * problem.value_blocks() + d / 32 * kRowUnit) + r]);
                for (int64_t i = 0; i < kRowUnit; i += kLanes)
                    simd::store(o + i, simd::add(simd::load(o + i), mean));
            }
}

}  // namespace latent
}  // namespace ikpy
