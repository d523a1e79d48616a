// Index scores of a block of cells, and the choice of the best of all.
#include "kernels/index_scores.hpp"

#include <algorithm>
#include <cstring>

#include "kernels/flash_pack.hpp"
#include "kernels/simd_f32.hpp"

namespace ikpy {
namespace indexer {
namespace {

using simd::kLanes;
using simd::V;

constexpr int kHeads = 4;                       // that meet a vector of keys at once
constexpr int kVectors = kLanes >= 16 ? 4 : 2;  // of cells at once: the sums stay in registers
constexpr int64_t kStep = kVectors * kLanes;    // cells

// scores[kStep] += sum over H heads of weight * relu(q . k)
template <int H>
void add_heads(const float* q, int64_t ldq, const float* weights, int64_t n, const float* lanes,
               float* scores) {
    V sum[H][kVectors];
    for (auto& of_head : sum)
        for (V& v : of_head) v = simd::zero();
    for (int64_t d = 0; d < n; ++d) {
        V k[kVectors];
        for (int i = 0; i < kVectors; ++i) k[i] = simd::load(lanes + d * kCells + i * kLanes);
        for (int h = 0; h < H; ++h) {
            const V x = simd::set1(q[h * ldq + d]);
            for (int i = 0; i < kVectors; ++i) sum[h][i] = simd::fma(x, k[i], sum[h][i]);
        }
    }
    for (int i = 0; i < kVectors; ++i) {
        V total = simd::load(scores + i * kLanes);
        for (int h = 0; h < H; ++h)
            total = simd::fma(simd::set1(weights[h]), simd::max(sum[h][i], simd::zero()), total);
        simd::store(scores + i * kLanes, total);
    }
}

// Unsigned numbers in the order of the floats.
uint32_t ordered(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Where the k-th largest lies among the scores whose upper bits are those of `prefix`: finds its next bits,
// and takes from k what lies above them.
struct Search {
    uint32_t prefix = 0;
    int known = 0;  // upper bits of prefix that count
    int64_t k;

    void next_bits(const float* scores, int64_t n, int bits, uint32_t* histogram) {
        std::fill_n(histogram, size_t(1) << bits, 0u);
        const int shift = 32 - known - bits;
        const uint32_t mask = (1u << bits) - 1u;
        for (int64_t i = 0; i < n; ++i) {
            const uint32_t x = ordered(scores[i]);
            if (known == 0 || x >> (32 - known) == prefix) ++histogram[x >> shift & mask];
        }
        uint32_t bin = mask;
        for (; bin > 0 && histogram[bin] < k; --bin) k -= histogram[bin];
        prefix = prefix << bits | bin;
        known += bits;
    }
};

}  // namespace

void keys_to_lanes(const Tensor& keys, int64_t first_cell, int64_t n_cells, float* rows, float* lanes) {
    const int64_t n = keys.ne[0];
    kv::load_rows(keys.type)(row<uint8_t>(keys, 0, first_cell), keys.nb[2], n_cells, n, rows, n);
    for (int64_t c = 0; c < kCells; c += 16) {
        const float* of[16];
        for (int64_t i = 0; i < 16; ++i) of[i] = c + i < n_cells ? rows + (c + i) * n : nullptr;
        flash::rows_to_lanes(of, n, 1.0f, lanes + c, kCells);
    }
}

void scores_of_block(const float* q, int64_t ldq, const float* weights, int64_t heads, int64_t n,
                     const float* lanes, float* scores) {
    std::fill_n(scores, kCells, 0.0f);
    int64_t h = 0;
    for (; h + kHeads <= heads; h += kHeads)
        for (int64_t c = 0; c < kCells; c += kStep)
            add_heads<kHeads>(q + h * ldq, ldq, weights + h, n, lanes + c, scores + c);
    for (; h < heads; ++h)
        for (int64_t c = 0; c < kCells; c += kStep)
            add_heads<1>(q + h * ldq, ldq, weights + h, n, lanes + c, scores + c);
}

void choose_best(const float* scores, int64_t n, int64_t k, uint32_t* histogram, int32_t first_cell,
                 int32_t* chosen) {
    Search search;
    search.k = k;
    for (const int bits : {11, 11, 10}) search.next_bits(scores, n, bits, histogram);
    int64_t equal = search.k;
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t x = ordered(scores[i]);
        if (x < search.prefix || (x == search.prefix && equal-- <= 0)) continue;
        *chosen++ = first_cell + int32_t(i);
    }
}

}  // namespace indexer
}  // namespace ikpy
