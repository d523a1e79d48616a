// Index scores as multiply-adds of floats: a block of keys as columns meets some heads of a token at once.
#include "kernels/attention/flash_pack.hpp"
#include "kernels/simd/simd_f32.hpp"
#include "kernels/sparse_attention/choose_cells.hpp"

namespace ikpy {
namespace indexer {
namespace {

using simd::kLanes;
using simd::V;

constexpr int kHeads = 4;                       // that meet a vector of keys at once
constexpr int kVectors = kLanes >= 16 ? 4 : 2;  // of cells at once: the sums stay in registers

// scores += sum over H heads of weight * relu(q . k), for kVectors of cells.
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

// The keys of a block: lanes[d][cell], zeros behind the last one.
void keys_to_lanes(const Problem& p, int64_t block, float* rows, float* lanes) {
    const int64_t c0 = block * kCells, n_cells = std::min(kCells, p.n_kv - c0);
    kv::load_rows(p.keys.type)(row<uint8_t>(p.keys, 0, c0), p.keys.nb[2], n_cells, p.n, rows, p.n);
    for (int64_t c = 0; c < kCells; c += 16) {
        const float* of[16];
        for (int64_t i = 0; i < 16; ++i) of[i] = c + i < n_cells ? rows + (c + i) * p.n : nullptr;
        flash::rows_to_lanes(of, p.n, 1.0f, lanes + c, kCells);
    }
}

void score_token(const Problem& p, int64_t token, const float* lanes, float* scores) {
    const float *q = row<float>(p.q, 0, token), *weights = row<float>(p.weights, token);
    const int64_t ldq = p.q.nb[1] / int64_t(sizeof(float));
    std::fill_n(scores, kCells, 0.0f);
    int64_t h = 0;
    for (; h + kHeads <= p.heads; h += kHeads)
        for (int64_t c = 0; c < kCells; c += kVectors * kLanes)
            add_heads<kHeads>(q + h * ldq, ldq, weights + h, p.n, lanes + c, scores + c);
    for (; h < p.heads; ++h)
        for (int64_t c = 0; c < kCells; c += kVectors * kLanes)
            add_heads<1>(q + h * ldq, ldq, weights + h, p.n, lanes + c, scores + c);
}

}  // namespace

// Rows and columns of a block of keys.
size_t float_scores_bytes(const Problem& p) { return size_t(2 * kCells * p.n) * sizeof(float); }

void score_by_floats(const Round& round, int64_t begin, int64_t end, uint8_t* work) {
    const Problem& p = round.p;
    float *const rows = reinterpret_cast<float*>(work), *const lanes = rows + kCells * p.n;
    for (int64_t block = begin; block < end; ++block) {
        bool loaded = false;
        for (int64_t t = round.t0; t < round.t1; ++t) {
            if (!round.sees(t, block)) continue;
            if (!loaded) keys_to_lanes(p, block, rows, lanes);
            loaded = true;
            score_token(p, t, lanes, round.of(t) + block * kCells);
            round.hide(t, block);
        }
    }
}

}  // namespace indexer
}  // namespace ikpy
