// Selective scan of Mamba-2 (arXiv:2405.21060): tokens of one sequence on columns of a head's state.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels/simd/simd_f32.hpp"

namespace ikpy {
namespace ssm {

// Tokens, or rows of the state, whose sums are held in registers together: with kMostVectors vectors each, as
// many chains as FMAs are under way.
#if defined(__AVX512F__)
constexpr int kGroup = 4;
#else
constexpr int kGroup = 2;
#endif
constexpr int kMostVectors = 4;
constexpr int64_t kMostColumns = kMostVectors * simd::kLanes;
constexpr int64_t kChunk = 16;  // most tokens that meet the state together

// What all columns of a head need of the tokens of a chunk. With the decay d(i, j) of the state from behind
// token j to token i:
//     y_i = decays[i] * S^T C_i + sum over j <= i of weights[i][j] * x_j
//     S <- decay * S + sum over j of B_j (steps[j] * x_j)^T
// where decays[i] is that since the start of the chunk, weights[i][j] = C_i.B_j * d(i, j) * dt_j, to which
// D is added for j = i, and steps[j] = d(last, j) * dt_j.
struct Chunk {
    int64_t n;
    const float *b[kChunk], *c[kChunk], *x[kChunk];
    float* y[kChunk];
    float decays[kChunk], steps[kChunk], weights[kChunk][kChunk];
    float decay;
};

// n columns of a head's state from `first` on, which take whole vectors of `state`; `rows` rows that are
// `stride` floats apart.
struct Columns {
    float* state;
    int64_t stride, rows, first, n;
};

template <int N>
inline void load(const float* p, simd::V (&v)[N]) {
    for (int j = 0; j < N; ++j) v[j] = simd::load(p + j * simd::kLanes);
}

template <int N>
inline void store(float* p, const simd::V (&v)[N]) {
    for (int j = 0; j < N; ++j) simd::store(p + j * simd::kLanes, v[j]);
}

template <int N>
inline void add_scaled(float factor, const simd::V (&x)[N], simd::V (&sum)[N]) {
    const simd::V f = simd::set1(factor);
    for (int j = 0; j < N; ++j) sum[j] = simd::fma(f, x[j], sum[j]);
}

// Inputs of a chunk in Vectors whole vectors; columns that the head lacks are 0.
template <int Vectors>
class Inputs {
  public:
    Inputs(const Chunk& chunk, const Columns& columns) {
        for (int64_t i = 0; i < chunk.n; ++i) {
            std::fill_n(x_[i], kWidth, 0.0f);
            std::memcpy(x_[i], chunk.x[i] + columns.first, columns.n * sizeof(float));
            for (int64_t j = 0; j < kWidth; ++j) steps_[i][j] = chunk.steps[i] * x_[i][j];
        }
    }
    const float* x(int64_t i) const { return x_[i]; }
    const float* step(int64_t i) const { return steps_[i]; }

  private:
    static constexpr int64_t kWidth = Vectors * simd::kLanes;
    float x_[kChunk][kWidth], steps_[kChunk][kWidth];
};

template <int Vectors>
inline void put(const Chunk& chunk, int64_t i, const Columns& columns, const simd::V (&y)[Vectors]) {
    float padded[Vectors * simd::kLanes];
    store(padded, y);
    std::memcpy(chunk.y[i] + columns.first, padded, columns.n * sizeof(float));
}

// Results of the tokens i .. i + N of a chunk, of the state before it.
template <int N, int Vectors>
inline void results(const Chunk& chunk, int64_t i, const Columns& columns, const Inputs<Vectors>& inputs) {
    simd::V sum[N][Vectors], row[Vectors];
    for (auto& s : sum)
        for (simd::V& v : s) v = simd::zero();
    for (int64_t r = 0; r < columns.rows; ++r) {
        load(columns.state + r * columns.stride, row);
        for (int g = 0; g < N; ++g) add_scaled(chunk.c[i + g][r], row, sum[g]);
    }
    for (int g = 0; g < N; ++g)
        for (simd::V& v : sum[g]) v = simd::mul(v, simd::set1(chunk.decays[i + g]));
    for (int64_t j = 0; j < i; ++j) {
        load(inputs.x(j), row);
        for (int g = 0; g < N; ++g) add_scaled(chunk.weights[i + g][j], row, sum[g]);
    }
    for (int p = 0; p < N; ++p) {
        load(inputs.x(i + p), row);
        for (int g = p; g < N; ++g) add_scaled(chunk.weights[i + g][i + p], row, sum[g]);
    }
    for (int g = 0; g < N; ++g) put(chunk, i + g, columns, sum[g]);
}

// Brings the rows r .. r + N of the state up to date.
template <int N, int Vectors>
inline void update(const Chunk& chunk, int64_t r, const Columns& columns, const Inputs<Vectors>& inputs) {
    simd::V rows[N][Vectors], step[Vectors];
    const simd::V decay = simd::set1(chunk.decay);
    for (int g = 0; g < N; ++g) {
        load(columns.state + (r + g) * columns.stride, rows[g]);
        for (simd::V& v : rows[g]) v = simd::mul(v, decay);
    }
    for (int64_t j = 0; j < chunk.n; ++j) {
        load(inputs.step(j), step);
        for (int g = 0; g < N; ++g) add_scaled(chunk.b[j][r + g], step, rows[g]);
    }
    for (int g = 0; g < N; ++g) store(columns.state + (r + g) * columns.stride, rows[g]);
}

// A chunk of one token: the state is read and written once. skip: D.
template <int Vectors>
inline void token(const Chunk& chunk, float skip, const Columns& columns) {
    const Inputs<Vectors> inputs(chunk, columns);
    simd::V row[Vectors], x[Vectors], step[Vectors], sum[Vectors];
    load(inputs.x(0), x);
    load(inputs.step(0), step);
    for (int j = 0; j < Vectors; ++j) sum[j] = simd::mul(x[j], simd::set1(skip));
    const simd::V decay = simd::set1(chunk.decay);
    const float *const b = chunk.b[0], *const c = chunk.c[0];
    for (int64_t r = 0; r < columns.rows; ++r) {
        float* const p = columns.state + r * columns.stride;
        load(p, row);
        for (simd::V& v : row) v = simd::mul(v, decay);
        add_scaled(b[r], step, row);
        store(p, row);
        add_scaled(c[r], row, sum);
    }
    put(chunk, 0, columns, sum);
}

template <int Vectors>
inline void chunk_on_columns(const Chunk& chunk, const Columns& columns) {
    const Inputs<Vectors> inputs(chunk, columns);
    int64_t i = 0, r = 0;
    for (; i + kGroup <= chunk.n; i += kGroup) results<kGroup, Vectors>(chunk, i, columns, inputs);
    for (; i < chunk.n; ++i) results<1, Vectors>(chunk, i, columns, inputs);
    for (; r + kGroup <= columns.rows; r += kGroup) update<kGroup, Vectors>(chunk, r, columns, inputs);
    for (; r < columns.rows; ++r) update<1, Vectors>(chunk, r, columns, inputs);
}

}  // namespace ssm
}  // namespace ikpy
