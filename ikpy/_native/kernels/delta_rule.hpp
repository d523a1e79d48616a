// Gated delta rule (arXiv:2412.06464, arXiv:2510.26692): one token after the other on columns of a head's
// state.
#pragma once
#include <cstdint>
#include <cstring>

#include "kernels/simd_f32.hpp"

namespace ikpy {
namespace delta {

// A row of a tile is kColumns values of the state. Sums of a row's products are kSums chains per vector: with
// fewer products per row than an FMA takes cycles, they would wait for each other.
#if defined(__AVX512F__)
constexpr int kVectors = 2, kSums = 2;
#else
constexpr int kVectors = 4, kSums = 1;
#endif
constexpr int64_t kColumns = kVectors * simd::kLanes;

// What all columns of a head need of a token. The state is held as the rows of a tile times their decay since
// the tile was last brought up to date, so that a token costs three products per element: `keys` and
// `queries` are multiplied with that decay, `updates` divided by it.
struct Token {
    const float *keys, *queries, *updates;
    const float* decay;  // what rows are multiplied with before the update; null = none due
    const float* v;
    float* out;
    float beta;
    float qk;  // scale * q.k
};

struct Sums {
    simd::V keys[kSums][kVectors], queries[kSums][kVectors];

    Sums() {
        for (int s = 0; s < kSums; ++s)
            for (int j = 0; j < kVectors; ++j) keys[s][j] = queries[s][j] = simd::zero();
    }

    void add(int s, const Token& token, int64_t i, const simd::V* row) {
        const simd::V k = simd::set1(token.keys[i]), q = simd::set1(token.queries[i]);
        for (int j = 0; j < kVectors; ++j) {
            keys[s][j] = simd::fma(k, row[j], keys[s][j]);
            queries[s][j] = simd::fma(q, row[j], queries[s][j]);
        }
    }
};

// n columns of a head's state, n <= kColumns; rows are `stride` floats apart.
struct Columns {
    float* state;
    int64_t stride, n, first;
};

// Loads or stores what columns there are; the others are 0.
template <bool Whole>
inline void load_columns(const float* p, int64_t n, simd::V* v) {
    float padded[kColumns] = {};
    if (!Whole) p = static_cast<float*>(std::memcpy(padded, p, n * sizeof(float)));
    for (int j = 0; j < kVectors; ++j) v[j] = simd::load(p + j * simd::kLanes);
}

template <bool Whole>
inline void store_columns(float* p, int64_t n, const simd::V* v) {
    float padded[kColumns];
    float* const to = Whole ? p : padded;
    for (int j = 0; j < kVectors; ++j) simd::store(to + j * simd::kLanes, v[j]);
    if (!Whole) std::memcpy(p, padded, n * sizeof(float));
}

// Calls row(i, s) for every row, s being the chain of sums it belongs to.
template <class Row>
inline void for_rows(int64_t dk, Row&& row) {
    int64_t i = 0;
    for (; i + kSums <= dk; i += kSums)
        for (int s = 0; s < kSums; ++s) row(i + s, s);
    for (; i < dk; ++i) row(i, 0);
}

template <bool Whole>
class Tile {
  public:
    // tile: kColumns floats for each of dk rows.
    Tile(const Columns& columns, int64_t dk, float* tile) : c_(columns), dk_(dk), tile_(tile) {}

    // Tokens of one sequence in their order; the last one brings the state up to date.
    void run(const Token* tokens, int64_t n) {
        simd::V change[kVectors];
        begin(tokens[0], change);
        for (int64_t t = 1; t < n; ++t) {
            if (tokens[t - 1].decay) {
                step<true>(tokens[t - 1], tokens[t], change);
            } else {
                step<false>(tokens[t - 1], tokens[t], change);
            }
        }
        finish(tokens[n - 1], change);
    }

  private:
    // Reads the state once, into the tile: lines of a row are `stride` apart and would push each other out of
    // the first cache.
    void begin(const Token& token, simd::V* change) {
        Sums sums;
        for_rows(dk_, [&](int64_t i, int s) {
            simd::V row[kVectors];
            load_columns<Whole>(c_.state + i * c_.stride, c_.n, row);
            for (int j = 0; j < kVectors; ++j) simd::store(tile_ + i * kColumns + j * simd::kLanes, row[j]);
            sums.add(s, token, i, row);
        });
        result(token, sums, change);
    }

    template <bool Decay>
    void updated(const Token& token, int64_t i, const simd::V* change, simd::V* row) const {
        const simd::V factor = simd::set1(token.updates[i]);
        for (int j = 0; j < kVectors; ++j) {
            row[j] = simd::load(tile_ + i * kColumns + j * simd::kLanes);
            if (Decay) row[j] = simd::mul(row[j], simd::set1(token.decay[i]));
            row[j] = simd::fma(factor, change[j], row[j]);
        }
    }

    template <bool Decay>
    void step(const Token& before, const Token& token, simd::V* change) {
        Sums sums;
        for_rows(dk_, [&](int64_t i, int s) {
            simd::V row[kVectors];
            updated<Decay>(before, i, change, row);
            for (int j = 0; j < kVectors; ++j) simd::store(tile_ + i * kColumns + j * simd::kLanes, row[j]);
            sums.add(s, token, i, row);
        });
        result(token, sums, change);
    }

    // change = beta (v - S^T k), out = S^T q + (q.k) change, where S is decayed but lacks the token.
    void result(const Token& token, const Sums& sums, simd::V* change) const {
        simd::V v[kVectors], out[kVectors];
        load_columns<Whole>(token.v + c_.first, c_.n, v);
        for (int j = 0; j < kVectors; ++j) {
            simd::V keys = sums.keys[0][j], queries = sums.queries[0][j];
            for (int s = 1; s < kSums; ++s) {
                keys = simd::add(keys, sums.keys[s][j]);
                queries = simd::add(queries, sums.queries[s][j]);
            }
            change[j] = simd::mul(simd::set1(token.beta), simd::sub(v[j], keys));
            out[j] = simd::fma(simd::set1(token.qk), change[j], queries);
        }
        store_columns<Whole>(token.out + c_.first, c_.n, out);
    }

    void finish(const Token& token, const simd::V* change) {
        for (int64_t i = 0; i < dk_; ++i) {
            simd::V row[kVectors];
            updated<true>(token, i, change, row);
            store_columns<Whole>(c_.state + i * c_.stride, c_.n, row);
        }
    }

    const Columns c_;
    const int64_t dk_;
    float* const tile_;
};

}  // namespace delta
}  // namespace ikpy
